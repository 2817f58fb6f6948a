"""Running a conversion: locks, what is left to do, jobs, commit. From top to bottom in `Conversion.run`."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.conversion import shared_pickle
from pipeline.conversion.backends import run_jobs
from pipeline.conversion.commit import (
    BadSamplesError,
    BadSlot,
    Report,
    bad_samples_line,
    check_root,
    commit_split,
    load_samples,
    merge_receipts,
    missing_chunks,
    remove_store,
    say_left_out,
    write_errors,
)
from pipeline.conversion.plan import SplitPlan, check_finished
from pipeline.conversion.preflight import check_space
from pipeline.conversion.workdir import Part, Workspace
from pipeline.conversion.worker import ChunkResult, ChunkTask, convert_chunk, load_receipt
from pipeline.errors import BAD_SAMPLE_REASONS, Error, UsageError
from pipeline.image.decode import DecodeOptions
from pipeline.progress import Progress, say
from pipeline.store.atomic import atomic_file, write_json
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
    liveness_files: list[str] = field(default_factory=list)

    def run(self, backend: str, n_jobs: int, on_error: str, overwrite: bool) -> Report:
        report = Report([workspace.dst for workspace in self.workspaces])
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                _check_parent(workspace.dst)
                liveness_file = stack.enter_context(workspace.run(self.part))
                self.liveness_files.append(str(workspace.path / "runs" / liveness_file))
            for workspace, geometry in zip(self.workspaces, self.geometries, strict=True):
                root = root_attributes(geometry.to_json(), self.class_ids, self.class_names)
                if overwrite:
                    remove_store(workspace, [plan.split for plan in self.plans], root)
                    for plan in self.plans:
                        shutil.rmtree(workspace.split(plan.split).path, ignore_errors=True)
                check_root(workspace.dst, root)
            open_plans = [plan for plan in self.plans if not self._is_finished(plan)]
            if self.part is None:  # and so alone here
                for workspace in self.workspaces:
                    workspace.forget_beginnings()
            report.committed = [plan.split for plan in self.plans if plan not in open_plans]
            for name in report.committed:
                say(f"{name}: finished already", quiet=self.quiet)
            todo = {plan.split: self._prepare(plan) for plan in open_plans}
            check_space(open_plans, self.geometries, self.workspaces, todo)
            for plan in open_plans:
                self._convert_split(plan, todo[plan.split], backend, n_jobs, report)
            self._finish(open_plans, on_error, report)
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
                _check_same_software(workspace.dst, plan)
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
            if not (workspace.path / "classes.json").exists():
                write_json(workspace.path / "classes.json", {"ids": self.class_ids, "names": self.class_names})
        mine = [chunk for chunk in range(plan.num_chunks) if self.part is None or self.part.has(chunk)]
        todo = [chunk for chunk in mine if not self._is_good(plan, chunk)]
        for chunk in todo:
            for workspace in self.workspaces:
                workspace.split(plan.split).receipt(chunk).unlink(missing_ok=True)
        if len(todo) < len(mine):
            done = len(mine) - len(todo)
            what = f"{done:,} of {counted(len(mine), 'chunk')} {are(done)} finished already"
            say(f"{plan.split}: {what}", quiet=self.quiet)
        return todo

    def _is_good(self, plan: SplitPlan, chunk: int) -> bool:
        """Finished in every size, without bad samples, from files that are still the same."""
        receipts = [load_receipt(workspace.split(plan.split), chunk) for workspace in self.workspaces]
        if any(receipt is None or receipt["bad"] for receipt in receipts):
            return False
        stamps = plan.source.change_stamps(plan.slots(chunk)).tolist()
        return all(receipt is not None and receipt["stamps"] == stamps for receipt in receipts)

    def _convert_split(self, plan: SplitPlan, todo: list[int], backend: str, n_jobs: int, report: Report) -> None:
        if not todo:
            return
        folder = self.workspaces[0].split(plan.split).path
        run_name = Path(self.liveness_files[0]).name
        inputs = [folder / f"source-{run_name}.pickle", folder / f"order-{run_name}.npy"]
        try:
            with atomic_file(inputs[0]) as file:
                _hand_over(plan, file)
            with atomic_file(inputs[1]) as file:
                np.save(file, plan.order)
            run = ChunkTask(
                name=run_name,
                liveness_files=tuple(self.liveness_files),
                source=str(inputs[0]),
                order=str(inputs[1]),
                works=tuple(str(workspace.split(plan.split).path) for workspace in self.workspaces),
                geometries=tuple(self.geometries),
                options=self.options,
                chunk_images=plan.chunk_images,
                software=plan.software,
                parent_pid=os.getpid() if backend == "loky" else None,
            )
            total = sum(len(plan.slots(chunk)) for chunk in todo)
            image_bytes = sum(geometry.image_bytes for geometry in self.geometries)
            with Progress(plan.split, total, image_bytes, quiet=self.quiet) as progress:
                for result in run_jobs(backend, n_jobs, functools.partial(convert_chunk, run), todo):
                    progress.advance(result.num_images)
                    if self.verbose:
                        self._tell(plan, result)
            report.num_images += total
            report.seconds += progress.seconds
            say(progress.summary(), quiet=self.quiet)
        finally:
            for path in inputs:
                path.unlink(missing_ok=True)

    def _tell(self, plan: SplitPlan, result: ChunkResult) -> None:
        """One line about a finished chunk, and one about each bad sample in it."""
        rate = result.num_images / max(result.seconds, 1e-9)
        say(
            f"{plan.split}: chunk {result.chunk:,} of {plan.num_chunks:,}: {counted(result.num_images, 'image')} in "
            f"{result.seconds:.2f} s ({rate:,.0f} images/s), {result.num_bad:,} bad"
        )
        receipt = load_receipt(self.workspaces[0].split(plan.split), result.chunk) if result.num_bad else None
        for bad in receipt["bad"] if receipt else ():
            key = as_text(plan.source.key(int(plan.order[bad["slot"]])))
            say(f"{plan.split}: bad: {key}: {BAD_SAMPLE_REASONS[bad['reason']]} ({bad['detail'] or bad['reason']})")

    def _finish(self, plans: list[SplitPlan], on_error: str, report: Report) -> None:
        """Commit all splits, or say why not. A part commits only when all other parts are done."""
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                if workspace.path.exists():
                    stack.enter_context(workspace.committing())
            plans = [plan for plan in plans if not self._is_finished(plan)]  # another part may have committed
            missing = {plan.split: self._missing(plan) for plan in plans}
            if self.part is not None and any(missing.values()):
                own = self._gather_bad([plan for plan in plans if not missing[plan.split]])
                say(
                    f"part {self.part.index}/{self.part.count} is done; other parts are still to come", quiet=self.quiet
                )
                report.bad = own
                return
            report.bad = self._gather_bad(plans)
            for workspace in self.workspaces:
                write_errors(workspace, report.bad)
            if report.bad and on_error == "stop":
                raise BadSamplesError(bad_samples_line(report.bad, self.workspaces[0]))
            self._check_unchanged(plans)
            for plan in plans:
                for workspace in self.workspaces:
                    if not (workspace.dst / plan.split).exists():
                        commit_split(workspace, plan.split, self.class_ids, self.class_names)
                report.committed.append(plan.split)
                say_left_out(report.bad, plan.split, plan.num_samples, report.stores[0], quiet=self.quiet)

    def _missing(self, plan: SplitPlan) -> list[int]:
        works = [w.split(plan.split) for w in self.workspaces if not (w.dst / plan.split).exists()]
        return sorted({chunk for work in works for chunk in missing_chunks(work, plan.num_chunks)})

    def _gather_bad(self, plans: list[SplitPlan]) -> list[BadSlot]:
        bad: list[BadSlot] = []
        for plan in plans:
            for workspace, geometry in zip(self.workspaces, self.geometries, strict=True):
                if not (workspace.dst / plan.split).exists():
                    work = workspace.split(plan.split)
                    bad += merge_receipts(
                        plan.split, work, plan.identity(geometry, self.class_ids), load_samples(work)
                    ).bad
                    break
        return bad

    def _check_unchanged(self, plans: list[SplitPlan]) -> None:
        """Refuse to commit when source files changed after they were read."""
        for plan in plans:
            work = next(w for w in self.workspaces if not (w.dst / plan.split).exists()).split(plan.split)
            for chunk in range(plan.num_chunks):
                receipt = load_receipt(work, chunk)
                stamps = plan.source.change_stamps(plan.slots(chunk)).tolist()
                if receipt is None or receipt["stamps"] != stamps:
                    old = receipt["stamps"] if receipt else []
                    at = next((i for i, (a, b) in enumerate(zip(old, stamps, strict=False)) if a != b), 0)
                    key = as_text(plan.source.key(int(plan.slots(chunk)[at])))
                    raise Error(
                        f"{plan.split}: {key} changed while it was converted; rerun: only changed chunks are redone"
                    )


def _hand_over(plan: SplitPlan, file: BinaryIO) -> None:
    try:
        shared_pickle.save(plan.source, file)
    except OSError:
        raise
    except Exception as error:  # whatever a user's own objects raise when pickled
        raise UsageError(
            f"the samples can't be sent to worker processes ({error}); pass paths, bytes or arrays"
        ) from error


def _check_parent(dst: Path) -> None:
    dst.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(dst.parent, os.W_OK):
        raise Error(f"{dst.parent}: not writable; choose another DST or change its permissions")


def _check_same_software(dst: Path, plan: SplitPlan) -> None:
    """A split that joins a store must come from the same decoder and resizer as the splits that are there."""
    store = open_store(dst)
    for name in store.splits:
        stored = store[name].attrs.get("software", {})
        for package in sorted(stored.keys() | plan.software.keys()):
            if stored.get(package) != plan.software.get(package):
                raise Error(
                    f"{dst}: {name} was made with {package} {stored.get(package)}, not {plan.software.get(package)}; "
                    "install that version, or convert all splits again with --overwrite"
                )
