"""Running a conversion: locks, what is left to do, jobs, commit. From top to bottom in `Conversion.run`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.conversion.backends import stop_workers
from pipeline.conversion.commit import Report, StagedSplit, publish_split, stop_at_bad
from pipeline.conversion.destination import check_parent, check_rename, check_root, overwrite_splits
from pipeline.conversion.jobs import run_chunks
from pipeline.conversion.names import Part
from pipeline.conversion.plan import SplitPlan
from pipeline.conversion.preflight import check_space, needs
from pipeline.conversion.prepare import SplitJob, changed_chunks, prepare, stores_without
from pipeline.conversion.receipts import read_receipt
from pipeline.conversion.workdir import Liveness, Workspace
from pipeline.conversion.worker import ChunkResult, ChunkTask, load_inputs, save_inputs
from pipeline.errors import BAD_SAMPLE_REASONS, Error
from pipeline.image.decode import DecodeOptions
from pipeline.progress import Progress, say
from pipeline.sources.archive_index import KeptIndex
from pipeline.store.atomic import remove_temps, write_json
from pipeline.store.geometry import Geometry
from pipeline.store.writer import root_attributes
from pipeline.text import as_text, counted


@dataclass
class Conversion:
    """Everything a run needs to know."""

    plans: list[SplitPlan]
    stores: list[tuple[Workspace, Geometry]]
    class_ids: list[str]
    class_names: list[str]
    options: DecodeOptions
    part: Part | None
    quiet: bool
    verbose: bool = False
    index: KeptIndex | None = None

    @property
    def workspaces(self) -> list[Workspace]:
        return [workspace for workspace, _ in self.stores]

    def run(self, backend: str, n_jobs: int, on_error: str, overwrite: bool) -> Report:
        report = Report([workspace.dst for workspace in self.workspaces])
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                check_parent(workspace.dst)
                prefix = stack.enter_context(workspace.run(self.part))
                check_rename(workspace)
            live = Liveness(self.workspaces, prefix)
            roots = [
                root_attributes(geometry.to_json(), self.class_ids, self.class_names) for _, geometry in self.stores
            ]
            if overwrite:
                overwrite_splits(self.plans, self.stores, roots)
            for workspace, root in zip(self.workspaces, roots, strict=True):
                check_root(workspace.dst, root)
            with self._committing():
                jobs = self._prepare(live.name, report)
            check_space(needs([job.plan for job in jobs], self.stores, overwrite=False))
            for job in jobs:
                if job.todo:
                    self._convert(job, live, backend, n_jobs, report)
            stop_workers(backend)  # they map a file in the work folder, which NFS can't delete then
            with self._committing():
                self._finish([job.plan for job in jobs], on_error, report)
        return report

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                stack.enter_context(workspace.committing())
            yield

    def _prepare(self, run_name: str, report: Report) -> list[SplitJob]:
        """What is left to do of each split that isn't finished in all stores."""
        for workspace in self.workspaces:
            if self.part is None:  # and so alone here
                workspace.forget_settings()
        jobs = []
        for plan in self.plans:
            if stores := stores_without(plan, self.stores):
                jobs.append(prepare(plan, stores, self.class_ids, self.part, run_name, quiet=self.quiet))
            else:
                report.committed.append(plan.split)
                say(f"{plan.split}: finished already", quiet=self.quiet)
        for workspace in self.workspaces:
            remove_temps(workspace.path, workspace.live())
            write_json(workspace.classes, {"ids": self.class_ids, "names": self.class_names}, temp_id=run_name)
        if self.index and jobs:
            self.index.save(run_name)
        return jobs

    def _convert(self, job: SplitJob, live: Liveness, backend: str, n_jobs: int, report: Report) -> None:
        plan = job.plan
        inputs = job.works[0].path / f"inputs-{live.name}"
        task = ChunkTask(
            name=live.name,
            liveness_files=live.files,
            inputs=str(inputs),
            works=tuple(str(work.path) for work in job.works),
            geometries=job.geometries,
            options=self.options,
            chunk_images=plan.chunk_images,
            software=plan.software,
            parent_pid=os.getpid() if backend == "loky" else None,
        )
        total = sum(len(plan.slots(chunk)) for chunk in job.todo)
        image_bytes = sum(geometry.image_bytes for geometry in job.geometries)
        try:
            save_inputs(inputs, plan.source, plan.order, live.name)
            with Progress(plan.split, total, image_bytes, quiet=self.quiet) as progress:
                for result in run_chunks(task, job, live, backend, n_jobs):
                    progress.advance(result.num_images)
                    if self.verbose:
                        self._tell(job, result)
        finally:
            load_inputs.cache_clear()  # this process maps the file, too, where it is its own worker
            inputs.unlink(missing_ok=True)
        report.num_images += total
        report.seconds += progress.seconds
        say(progress.summary(), quiet=self.quiet)

    def _tell(self, job: SplitJob, result: ChunkResult) -> None:
        """One line about a finished chunk, and one about each bad sample in it."""
        plan, rate = job.plan, result.num_images / max(result.seconds, 1e-9)
        say(
            f"{plan.split}: chunk {result.chunk:,} of {plan.num_chunks:,}: {counted(result.num_images, 'image')} in "
            f"{result.seconds:.2f} s ({rate:,.0f} images/s), {result.num_bad:,} bad"
        )
        receipt = read_receipt(job.works[0], result.chunk) if result.num_bad else None
        for bad in receipt.bad if receipt else ():
            key = as_text(plan.source.key(int(plan.order[bad["slot"]])))
            say(f"{plan.split}: bad: {key}: {BAD_SAMPLE_REASONS[bad['reason']]} ({bad['detail'] or bad['reason']})")

    def _finish(self, plans: list[SplitPlan], on_error: str, report: Report) -> None:
        """Commit all splits, or say why not. A part commits only when all other parts are done."""
        staged: dict[str, list[StagedSplit]] = {}
        changed: dict[str, dict[int, bytes]] = {}
        waiting = set()
        for plan in plans:
            workspaces = [workspace for workspace in self.workspaces if not workspace.has_split(plan.split)]
            if not workspaces:  # another part has committed it
                continue
            stores = staged[plan.split] = [StagedSplit(workspace, plan.split) for workspace in workspaces]
            changed[plan.split] = changed_chunks(plan, [store.receipts for store in stores])
            missing = {chunk for store in stores for chunk in store.missing}
            if self.part is None and missing:
                raise Error(f"{stores[0].work.path}: finished chunks are gone ({min(missing)}); rerun the command")
            # Files of another part's chunk that were mended since are that part's to read again.
            if self.part is not None and not all(map(self.part.has, missing | changed[plan.split].keys())):
                waiting.add(plan.split)
        report.bad = [bad for split, stores in staged.items() if split not in waiting for bad in stores[0].bad]
        if waiting and self.part is not None:
            say(f"part {self.part.index}/{self.part.count} is done; other parts are still to come", quiet=self.quiet)
            return
        if staged:  # else the list of bad samples is that of the conversion that finished
            stop_at_bad(self.workspaces, report.bad, on_error)
        for split, keys in changed.items():
            for key in keys.values():
                raise Error(f"{split}: {as_text(key)} changed meanwhile; rerun: only changed chunks are redone")
        for stores in staged.values():
            publish_split(stores, report, quiet=self.quiet)
