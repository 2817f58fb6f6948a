"""The job of a worker: one chunk, from reading its images to its receipt. One chunk, one file, one job, one writer.

Nothing but a short result goes back to the parent; pixels go straight from the decoder into the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import numpy as np

from pipeline.conversion.chunk_writer import ChunkWriter
from pipeline.conversion.plan import first_difference
from pipeline.conversion.receipts import Receipt, write_receipt
from pipeline.conversion.workdir import SplitWork
from pipeline.errors import BadSample, Error, UsageError
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.image.resize import software_versions
from pipeline.sources.base import Source
from pipeline.store.atomic import atomic_file
from pipeline.store.geometry import Geometry
from pipeline.text import as_text, one_line

MIN_MAPPED_BYTES = 65_536
MAX_MAPPED_ARRAYS = 64
"""Which of a source's arrays are mapped rather than copied: each map takes a file descriptor in every worker."""

READ_AHEAD = 16
"""So many samples ahead the system is asked to read, so that a disk works while images are decoded."""


@dataclass(frozen=True)
class ChunkTask:
    """What all jobs of one run share; small, sent with each job.

    Attributes:
        name: the run's name, part of temp names.
        liveness_files: files that exist while the run lives, one per store.
        inputs: file with the split's source and order, written by `save_inputs`.
        works: the split's work folder in each store.
        geometries: one per store.
        options: how to decode.
        chunk_images: slots per chunk, K.
        software: versions that a worker must have, too.
        parent_pid: process id that must be the worker's parent, None where workers have other parents.
        note: file that each slot is noted in before its sample is read; empty for none.
        crashed: slots whose samples crash the decoder.
    """

    name: str
    liveness_files: tuple[str, ...]
    inputs: str
    works: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    options: DecodeOptions
    chunk_images: int
    software: dict[str, str]
    parent_pid: int | None
    note: str = ""
    crashed: tuple[int, ...] = ()

    def check_alive(self) -> None:
        """Raise Error when the parent or the run is gone: the next run may be writing here already."""
        orphaned = self.parent_pid is not None and self.parent_pid not in (os.getppid(), os.getpid())
        if orphaned or not all(map(os.path.exists, self.liveness_files)):
            raise Error(f"run {self.name} has ended or its work folder was removed; rerun the same command")


@dataclass(frozen=True)
class ChunkResult:
    """What the parent learns at once: counts, and the seconds that the job took. The rest is in the receipt."""

    chunk: int
    num_images: int
    num_bad: int
    seconds: float


def save_inputs(path: Path, source: Source, order: np.ndarray, run_name: str) -> None:
    """Write what workers read from: a file that only this run's workers load, under a name that nobody can guess.

    The source's classes may come from a script or a notebook. `order` is int64 (N,), slot -> index in the source.

    Raises:
        UsageError: a part of the source can't be pickled.
    """
    arrays: list[np.ndarray] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.nbytes < MIN_MAPPED_BYTES or len(arrays) == MAX_MAPPED_ARRAYS:
            return True
        arrays.append(np.frombuffer(data, np.uint8))
        return False

    try:
        pickled = cloudpickle.dumps((source, order), protocol=5, buffer_callback=stays_in_pickle)
    except Exception as error:  # whatever a user's own objects raise
        raise UsageError(f"the samples can't be pickled ({one_line(error)}); pass paths, bytes or arrays") from error
    with atomic_file(path, temp_id=run_name) as file:
        joblib.dump((pickled, arrays), file)


@functools.lru_cache(maxsize=2)
def load_inputs(path: str) -> tuple[Source, np.ndarray]:
    """The source and the order of a file by `save_inputs`; their large arrays are read-only maps of it."""
    pickled, arrays = joblib.load(path, mmap_mode="r")
    source, order = pickle.loads(pickled, buffers=arrays)
    return source, order


def convert_chunk(task: ChunkTask, chunk: int) -> ChunkResult:
    """Read, decode, resize and write one chunk in every size, then its receipts.

    Bad samples are zero-filled and noted in the receipt; what to do about them is decided at commit.

    Raises:
        Error: the run is gone, the software differs, or the chunk can't be written.
    """
    task.check_alive()
    if other := first_difference(task.software, software_versions(), words="{name} is {new}, the run's is {old}"):
        where = f"worker on {socket.gethostname()}"
        raise Error(f"{where}: {other}; install the same versions everywhere, or pixels could differ")
    try:
        return _convert_chunk(task, chunk)
    except FileNotFoundError as error:
        task.check_alive()
        raise Error(f"{error.filename}: gone, its work folder was removed; rerun the same command") from None
    except OSError as error:
        where = error.filename or task.works[0]
        raise Error(f"{where}: {error.strerror or error}; mend that and rerun the same command to go on") from None


def _convert_chunk(task: ChunkTask, chunk: int) -> ChunkResult:
    start = time.monotonic()
    source, order = load_inputs(task.inputs)
    first = chunk * task.chunk_images
    indices = np.array(order[first : first + task.chunk_images])
    works = [SplitWork(Path(work)) for work in task.works]
    stamps = source.change_stamps(indices)
    sizes = np.zeros((len(indices), 2), np.int32)
    bad: list[dict[str, Any]] = []
    modes: Counter[str] = Counter()
    warnings, peak_16bit = 0, -1
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(
                ChunkWriter(
                    stack.enter_context(atomic_file(work.chunk(chunk), temp_id=task.name, check=task.check_alive)),
                    geometry,
                    task.chunk_images,
                )
            )
            for work, geometry in zip(works, task.geometries, strict=True)
        ]
        ask = getattr(source, "read_ahead", lambda i: None)
        for index in indices[:READ_AHEAD].tolist():
            ask(index)
        for position, index in enumerate(indices):
            task.check_alive()
            for index_ahead in indices[position + READ_AHEAD : position + READ_AHEAD + 1].tolist():
                ask(index_ahead)
            places = [file.next_slot() for file in files]
            slot = first + position
            if task.note:
                Path(task.note).write_text(str(slot))
            try:
                if slot in task.crashed:
                    raise BadSample("crashed-decoder", as_text(source.key(int(index))))
                decoded = decode_into(source.read(int(index)), task.geometries, places, task.options)
            except BadSample as sample:
                for place in places:
                    place[:] = 0
                bad.append({"slot": slot, "reason": sample.reason, "detail": sample.detail})
            else:
                sizes[position] = decoded.height, decoded.width
                modes[decoded.mode] += 1
                warnings += decoded.warnings
                peak_16bit = max(peak_16bit, decoded.peak_16bit)
            for file in files:
                file.mark_filled()
        for file in files:
            file.finish(task.chunk_images - len(indices))
    for work, file in zip(works, files, strict=True):
        sums, squares = file.sums.tolist(), file.squares.tolist()
        receipt = Receipt(file.sha256, sums, squares, bad, dict(modes), warnings, sizes, stamps, peak_16bit)
        write_receipt(work, chunk, receipt, task.name, task.check_alive)
    return ChunkResult(chunk, len(indices), len(bad), time.monotonic() - start)
