"""Running a conversion: locks, what is left to do, jobs, commit. From top to bottom in `Conversion.run`."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.conversion.backends import run_jobs
from pipeline.conversion.commit import Report, StagedSplit, publish_split, stop_at_bad
from pipeline.conversion.destination import check_parent, check_root, remove_store
from pipeline.conversion.plan import SplitPlan, check_finished, check_same_software
from pipeline.conversion.preflight import check_space
from pipeline.conversion.receipts import Receipt, Receipts, read_receipt
from pipeline.conversion.workdir import Part, Workspace
from pipeline.conversion.worker import ChunkResult, ChunkTask, convert_chunk, load_inputs, save_inputs
from pipeline.errors import BAD_SAMPLE_REASONS, Error
from pipeline.image.decode import DecodeOptions
from pipeline.progress import Progress, say
from pipeline.store.atomic import write_json
from pipeline.store.geometry import Geometry
from pipeline.store.reader import open_store
from pipeline.store.writer import root_attributes
from pipeline.text import are, as_text, counted


@dataclass
class Conversion:
    """Everything a run needs to know."""

    plans: list[SplitPlan]
    geometries: list[Geometry]
    workspaces: list[Workspace]
    class_ids: list[str]
    class_names: list[str]
    options: DecodeOptions
    part: Part | None
    quiet: bool
    verbose: bool = False
    liveness_files: list[Path] = field(default_factory=list)

    def run(self, backend: str, n_jobs: int, on_error: str, overwrite: bool) -> Report:
        report = Report([workspace.dst for workspace in self.workspaces])
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                check_parent(workspace.dst)
                self.liveness_files.append(stack.enter_context(workspace.run(self.part)))
            for workspace, geometry in zip(self.workspaces, self.geometries, strict=True):
                root = root_attributes(geometry.to_json(), self.class_ids, self.class_names)
                if overwrite:
                    remove_store(workspace, [plan.split for plan in self.plans], root)
                    for plan in self.plans:
                        shutil.rmtree(workspace.split(plan.split).path, ignore_errors=True)
                check_root(workspace.dst, root)
            plans = [plan for plan in self.plans if not self._is_finished(plan)]
            if self.part is None:  # and so alone here
                for workspace in self.workspaces:
                    workspace.forget_settings()
            report.committed = [plan.split for plan in self.plans if plan not in plans]
            for name in report.committed:
                say(f"{name}: finished already", quiet=self.quiet)
            todo = {plan.split: self._prepare(plan) for plan in plans}
            check_space(plans, self.geometries, self.workspaces, todo)
            for plan in plans:
                if todo[plan.split]:
                    self._convert_split(plan, todo[plan.split], backend, n_jobs, report)
            self._finish(plans, on_error, report)
        return report

    def _is_finished(self, plan: SplitPlan) -> bool:
        finished = []
        for workspace, geometry in zip(self.workspaces, self.geometries, strict=True):
            exists = (workspace.dst / plan.split).exists()
            if exists:
                store = open_store(workspace.dst)
                if plan.split not in store:
                    raise Error(
                        f"{workspace.dst / plan.split}: zarr.json is missing there; restore it, or convert with "
                        "--overwrite"
                    )
                check_finished(store[plan.split], plan, geometry)
            elif (workspace.dst / "zarr.json").exists():
                check_same_software(open_store(workspace.dst), plan)
            finished.append(exists)
        return all(finished)

    def _prepare(self, plan: SplitPlan) -> list[int]:
        """Save or compare the plan; return the chunks to convert."""
        for workspace, geometry in zip(self.workspaces, self.geometries, strict=True):
            work = workspace.split(plan.split)
            work.make()
            if self.part is None:
                work.remove_temps()
            plan.save(work, geometry, self.class_ids)
            write_json(workspace.classes, {"ids": self.class_ids, "names": self.class_names})
        works = [workspace.split(plan.split) for workspace in self.workspaces]
        good = self._good_chunks(plan, [Receipts(work, plan.num_chunks) for work in works])
        mine = [chunk for chunk in range(plan.num_chunks) if self.part is None or self.part.has(chunk)]
        todo = [chunk for chunk in mine if chunk not in good]
        for chunk in todo:
            for work in works:
                work.receipt(chunk).unlink(missing_ok=True)
        if len(todo) < len(mine):
            done = len(mine) - len(todo)
            what = f"{done:,} of {counted(len(mine), 'chunk')} {are(done)} finished already"
            say(f"{plan.split}: {what}", quiet=self.quiet)
        return todo

    def _good_chunks(self, plan: SplitPlan, stores: list[Receipts]) -> set[int]:
        """Chunks finished in every size, without bad samples, from files that are still the same."""
        changed = _changed(plan, stores)
        bad = {bad["slot"] // plan.chunk_images for receipts in stores for bad in receipts.bad}
        return set.intersection(*(set(receipts.found) for receipts in stores)) - changed.keys() - bad

    def _convert_split(self, plan: SplitPlan, todo: list[int], backend: str, n_jobs: int, report: Report) -> None:
        run_name = self.liveness_files[0].name
        inputs = self.workspaces[0].split(plan.split).path / f"inputs-{run_name}"
        task = ChunkTask(
            name=run_name,
            liveness_files=tuple(map(str, self.liveness_files)),
            inputs=str(inputs),
            works=tuple(str(workspace.split(plan.split).path) for workspace in self.workspaces),
            geometries=tuple(self.geometries),
            options=self.options,
            chunk_images=plan.chunk_images,
            software=plan.software,
            parent_pid=os.getpid() if backend == "loky" else None,
        )
        total = sum(len(plan.slots(chunk)) for chunk in todo)
        image_bytes = sum(geometry.image_bytes for geometry in self.geometries)
        try:
            save_inputs(inputs, plan.source, plan.order)
            with Progress(plan.split, total, image_bytes, quiet=self.quiet) as progress:
                for result in run_jobs(backend, n_jobs, functools.partial(convert_chunk, task), todo):
                    progress.advance(result.num_images)
                    if self.verbose:
                        self._tell(plan, result)
        finally:
            load_inputs.cache_clear()  # this process maps the file, too, where it is its own worker
            inputs.unlink(missing_ok=True)
        report.num_images += total
        report.seconds += progress.seconds
        say(progress.summary(), quiet=self.quiet)

    def _tell(self, plan: SplitPlan, result: ChunkResult) -> None:
        """One line about a finished chunk, and one about each bad sample in it."""
        rate = result.num_images / max(result.seconds, 1e-9)
        say(
            f"{plan.split}: chunk {result.chunk:,} of {plan.num_chunks:,}: {counted(result.num_images, 'image')} in "
            f"{result.seconds:.2f} s ({rate:,.0f} images/s), {result.num_bad:,} bad"
        )
        receipt = read_receipt(self.workspaces[0].split(plan.split), result.chunk) if result.num_bad else None
        for bad in receipt.bad if receipt else ():
            key = as_text(plan.source.key(int(plan.order[bad["slot"]])))
            say(f"{plan.split}: bad: {key}: {BAD_SAMPLE_REASONS[bad['reason']]} ({bad['detail'] or bad['reason']})")

    def _finish(self, plans: list[SplitPlan], on_error: str, report: Report) -> None:
        """Commit all splits, or say why not. A part commits only when all other parts are done."""
        with self._committing():
            staged: dict[str, list[StagedSplit]] = {}
            for plan in plans:
                missing_in = [workspace for workspace in self.workspaces if not (workspace.dst / plan.split).exists()]
                if missing_in:  # another part may have committed it
                    staged[plan.split] = [StagedSplit(workspace, plan.split) for workspace in missing_in]
            complete = {split for split, stores in staged.items() if not any(one.receipts.missing for one in stores)}
            report.bad = [bad for split, stores in staged.items() if split in complete for bad in stores[0].bad]
            if self.part is not None and len(complete) < len(staged):
                part = f"part {self.part.index}/{self.part.count}"
                say(f"{part} is done; other parts are still to come", quiet=self.quiet)
                return
            for split in staged:
                if split not in complete:
                    raise Error(f"{self.workspaces[0].path}: finished chunks of {split} are gone; rerun the command")
            stop_at_bad(self.workspaces, report.bad, on_error)
            for plan in plans:
                receipts = [store.receipts for store in staged.get(plan.split, ())]
                for key in _changed(plan, receipts).values():
                    raise Error(
                        f"{plan.split}: {as_text(key)} changed while it was converted; rerun: only changed chunks are "
                        "redone"
                    )
            for stores in staged.values():
                publish_split(stores, report, quiet=self.quiet)

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                if workspace.path.exists():
                    stack.enter_context(workspace.committing())
            yield


def _changed(plan: SplitPlan, stores: list[Receipts]) -> dict[int, bytes]:
    """Finished chunks whose files have changed since they were read -> the key of the first such file."""
    changed = {}
    for chunk in sorted(set().union(*(receipts.found for receipts in stores))):
        indices = plan.slots(chunk)
        stamps = plan.source.change_stamps(indices)
        for receipts in stores:
            receipt: Receipt | None = receipts.found.get(chunk)
            if receipt is not None and not np.array_equal(receipt.stamps, stamps):
                different = np.flatnonzero((receipt.stamps != stamps).any(1))
                changed[chunk] = plan.source.key(int(indices[different[0]]))
    return changed
