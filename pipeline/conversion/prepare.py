"""What is left to do: which chunks of which stores, as the work folders and the source's files are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.conversion.names import Part
from pipeline.conversion.plan import SplitPlan, check_finished, check_same_software
from pipeline.conversion.receipts import Receipt, read_receipts
from pipeline.conversion.workdir import SplitWork, Workspace
from pipeline.errors import Error
from pipeline.progress import say
from pipeline.store.geometry import Geometry
from pipeline.store.reader import open_store
from pipeline.text import are, counted

TRIED_AGAIN = ("missing", "unreadable", "unsupported", "crashed-decoder")
"""Why a sample is bad whose file need not change to be good: permissions, an extra that was installed, memory."""


@dataclass
class SplitJob:
    """What is left to do of one split.

    Attributes:
        plan: of the split.
        stores: the stores that don't have it yet, as work folder and geometry.
        todo: chunks to convert in this run.
        suspects: chunks that a dead run was converting.
    """

    plan: SplitPlan
    stores: list[tuple[Workspace, Geometry]]
    todo: list[int]
    suspects: list[int]

    @property
    def works(self) -> list[SplitWork]:
        return [workspace.split(self.plan.split) for workspace, _ in self.stores]

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        return tuple(geometry for _, geometry in self.stores)


def stores_without(plan: SplitPlan, stores: Sequence[tuple[Workspace, Geometry]]) -> list[tuple[Workspace, Geometry]]:
    """The stores that the split is to be written to."""
    without = []
    for workspace, geometry in stores:
        if workspace.has_split(plan.split):
            store = open_store(workspace.dst)
            if plan.split not in store:
                raise Error(f"{workspace.dst / plan.split}: lacks zarr.json; restore it, or convert with --overwrite")
            check_finished(store[plan.split], plan, geometry)
            continue
        if (workspace.dst / "zarr.json").exists():
            store = open_store(workspace.dst)
            check_same_software(store, store.splits, plan.software)
        without.append((workspace, geometry))
    return without


def prepare(
    plan: SplitPlan,
    stores: list[tuple[Workspace, Geometry]],
    class_ids: Sequence[str],
    part: Part | None,
    run_name: str,
    *,
    quiet: bool,
) -> SplitJob:
    """Save the plan, or compare it with that of an earlier run; forget what must be done again.

    The commit locks must be held, so that nobody commits what is forgotten here.
    """
    job = SplitJob(plan, stores, [], [])
    suspects: set[int] = set()
    for (workspace, geometry), work in zip(stores, job.works, strict=True):
        work.make()
        suspects.update(work.remove_temps(workspace.live()))
        plan.save(work, geometry, class_ids, run_name)
    good = good_chunks(plan, [read_receipts(work, plan.num_chunks) for work in job.works])
    mine = [chunk for chunk in range(plan.num_chunks) if part is None or part.has(chunk)]
    job.todo = [chunk for chunk in mine if chunk not in good]
    job.suspects = sorted(suspects.intersection(job.todo))
    for chunk in job.todo:
        for work in job.works:
            work.receipt(chunk).unlink(missing_ok=True)
    if done := len(mine) - len(job.todo):
        what = f"{done:,} of {counted(len(mine), 'chunk')} {are(done)} finished already"
        say(f"{plan.split}: {what}", quiet=quiet)
    return job


def good_chunks(plan: SplitPlan, stores: Sequence[dict[int, Receipt]]) -> set[int]:
    """Chunks that are finished in every store and would come out the same if they were converted again."""
    finished = set.intersection(*map(set, stores))
    again = set()
    for receipts in stores:
        for chunk, receipt in receipts.items():
            for bad in receipt.bad:
                stamp = receipt.stamps[bad["slot"] - chunk * plan.chunk_images]
                if bad["reason"] in TRIED_AGAIN or stamp.max() <= 0:  # the source can't see changes of this sample
                    again.add(chunk)
    return finished - again - changed_chunks(plan, stores).keys()


def changed_chunks(plan: SplitPlan, stores: Sequence[dict[int, Receipt]]) -> dict[int, bytes]:
    """Finished chunks whose files have changed since they were read -> the key of the first such file."""
    changed = {}
    for chunk in sorted(set().union(*stores)):
        indices = plan.slots(chunk)
        stamps = plan.source.change_stamps(indices)
        for receipts in stores:
            receipt = receipts.get(chunk)
            if receipt is not None and not np.array_equal(receipt.stamps, stamps):
                different = np.flatnonzero((receipt.stamps != stamps).any(1))
                changed[chunk] = plan.source.key(int(indices[different[0]]))
    return changed
