"""The chunk jobs of a split, also where a worker dies: the chunks that it may have died of are converted alone.

A decoder that crashes on one image takes its worker along, and loky takes all workers along. Which chunks were being
converted is known from their temp files. Each is then converted by a process of its own, which notes the slot before
it reads it; a sample that ends this process twice is made a bad one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from joblib import effective_n_jobs
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from pipeline.conversion.backends import WorkerDiedError, bound_joins, end_with_parent, run_jobs
from pipeline.conversion.prepare import SplitJob
from pipeline.conversion.receipts import read_receipt
from pipeline.conversion.workdir import Liveness
from pipeline.conversion.worker import ChunkResult, ChunkTask, convert_chunk
from pipeline.errors import Error
from pipeline.progress import say

CHANCE_DEATHS = 3
"""So many deaths are borne that no sample explains, such as kills from outside."""


def run_chunks(task: ChunkTask, job: SplitJob, live: Liveness, backend: str, n_jobs: int) -> Iterator[ChunkResult]:
    """Convert the job's chunks; results come in the order they finish."""
    left, idle_deaths = set(job.todo), 0
    alone = job.suspects if backend == "loky" and min(effective_n_jobs(n_jobs), len(left)) == 1 else []
    while left:
        for chunk in alone:
            left.discard(chunk)
            yield convert_alone(task, chunk)
        try:
            for result in run_jobs(backend, n_jobs, functools.partial(convert_chunk, task), sorted(left)):
                left.discard(result.chunk)
                yield result
        except WorkerDiedError:
            live.renew()  # workers that live on stop now
            task = dataclasses.replace(task, name=live.name, liveness_files=live.files)
            found = [work.remove_temps(store.live()) for (store, _), work in zip(job.stores, job.works, strict=True)]
            alone = sorted(left & set().union(*found))
            idle_deaths = 0 if alone else idle_deaths + 1
            if idle_deaths == CHANCE_DEATHS:
                raise
            if len(left) == len(alone) + 1:  # a single job would be run by this process
                alone = sorted(left)
            what = f", chunk {', '.join(map(str, alone))} in a process of its own" if alone else ""
            say(f"{job.plan.split}: a worker process died; going on{what}")
        for chunk in sorted(left.difference(alone)):  # finished, but the result was lost
            if all(read_receipt(work, chunk) for work in job.works):
                left.discard(chunk)
                yield ChunkResult(chunk, len(job.plan.slots(chunk)), 0, 0.0)


def convert_alone(task: ChunkTask, chunk: int) -> ChunkResult:
    """Convert a chunk in a process of its own; a sample that ends it twice is bad, with the reason `crashed-decoder`.

    Raises:
        Error: the process ends again and again, but not of a sample.
    """
    note = Path(f"{task.inputs}-slot")
    task = dataclasses.replace(task, note=str(note), parent_pid=os.getpid())
    slots: list[int] = []
    while True:
        note.write_text("-1")
        executor = ProcessPoolExecutor(1, initializer=end_with_parent, initargs=(os.getpid(),))
        try:
            future = executor.submit(convert_chunk, task, chunk)
            bound_joins(executor)
            return future.result()
        except TerminatedWorkerError:
            slot = int(note.read_text())
            if slot in slots and slot >= 0:
                task = dataclasses.replace(task, crashed=(*task.crashed, slot))
            slots.append(slot)
            if len(slots) > 2 * len(task.crashed) + CHANCE_DEATHS:
                raise Error(
                    f"{task.works[0]}: the process that converts chunk {chunk} was killed {len(slots)} times; where "
                    "memory is short, close other programs, then rerun the same command"
                ) from None
        finally:
            executor.shutdown(wait=True, kill_workers=True)
            note.unlink(missing_ok=True)
