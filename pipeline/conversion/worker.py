"""The job of a worker: one chunk, from reading its images to its receipt. One chunk, one file, one job, one writer.

Nothing but a short result goes back to the parent; pixels go straight from the decoder into the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.conversion import shared_pickle
from pipeline.conversion.chunk_writer import ChunkWriter
from pipeline.conversion.workdir import SplitWork
from pipeline.errors import BadSample, Error
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.image.resize import software_versions
from pipeline.sources.base import Source
from pipeline.store.atomic import atomic_file, write_json
from pipeline.store.geometry import Geometry


@dataclass(frozen=True)
class ChunkTask:
    """What all jobs of one run share; small, sent with each job.

    Attributes:
        name: the run's name, part of temp names.
        liveness_files: files that exist while the run lives, one per store.
        source: file that the split's source was handed over in.
        order: `.npy` file, int64 (N,): slot -> index in the source.
        works: the split's work folder in each store.
        geometries: one per store.
        options: how to decode.
        chunk_images: slots per chunk, K.
        software: versions that a worker must have, too.
        parent_pid: process id that must be the worker's parent, None where workers have other parents.
    """

    name: str
    liveness_files: tuple[str, ...]
    source: str
    order: str
    works: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    options: DecodeOptions
    chunk_images: int
    software: dict[str, str]
    parent_pid: int | None

    def check_alive(self) -> None:
        """Raise RunGoneError when the parent or the run is no more: whoever comes next may be writing here already."""
        if self.parent_pid is not None and self.parent_pid not in (os.getppid(), os.getpid()):
            raise RunGoneError(self.name)
        if not all(os.path.exists(liveness_file) for liveness_file in self.liveness_files):
            raise RunGoneError(self.name)


class RunGoneError(Error):
    """The run that this job belongs to has ended; the job stops without writing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"run {name} has ended or its work folder was removed; rerun the same command")
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunGoneError, (self.name,))


@dataclass(frozen=True)
class ChunkResult:
    """What the parent learns at once: counts, and the seconds that the job took. The rest is in the receipt."""

    chunk: int
    num_images: int
    num_bad: int
    seconds: float


@functools.lru_cache(maxsize=2)
def _open_inputs(source: str, order: str, run_name: str) -> tuple[Source, np.ndarray]:
    return shared_pickle.load(source), np.load(order, mmap_mode="r")


def _check_software(wanted: dict[str, str]) -> None:
    here = software_versions()
    for name in sorted(wanted.keys() | here.keys()):
        if wanted.get(name) != here.get(name):
            raise Error(
                f"worker on {socket.gethostname()}: {name} is {here.get(name)}, the run's is {wanted.get(name)}; "
                "install the same versions everywhere, or pixels could differ"
            )


def convert_chunk(run: ChunkTask, chunk: int) -> ChunkResult:
    """Read, decode, resize and write one chunk in every size, then its receipts.

    Bad samples are zero-filled and noted in the receipt; what to do about them is decided at commit.

    Raises:
        Error: the run is gone, the software differs, or the chunk can't be written.
    """
    run.check_alive()
    _check_software(run.software)
    try:
        source, order = _open_inputs(run.source, run.order, run.name)
        return _convert_chunk(run, chunk, source, order)
    except FileNotFoundError as error:
        run.check_alive()
        raise Error(
            f"{error.filename}: gone; the work folder was removed while converting: rerun the same command"
        ) from None
    except OSError as error:
        where = error.filename or run.works[0]
        raise Error(f"{where}: {error.strerror or error}; mend that and rerun the same command to go on") from None


def _convert_chunk(run: ChunkTask, chunk: int, source: Source, order: np.ndarray) -> ChunkResult:
    start = time.monotonic()
    first = chunk * run.chunk_images
    indices = np.array(order[first : first + run.chunk_images])
    works = [SplitWork(Path(work)) for work in run.works]
    stamps = source.change_stamps(indices)
    sizes = np.zeros((len(indices), 2), np.int64)
    bad: list[dict[str, Any]] = []
    modes: dict[str, int] = {}
    warnings = 0
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(
                ChunkWriter(
                    stack.enter_context(atomic_file(work.chunk(chunk), temp_id=run.name, check=run.check_alive)),
                    geometry,
                    run.chunk_images,
                )
            )
            for work, geometry in zip(works, run.geometries, strict=True)
        ]
        for position, index in enumerate(indices):
            run.check_alive()
            places = [file.next_slot() for file in files]
            try:
                decoded = decode_into(source.read(int(index)), run.geometries, places, run.options)
            except BadSample as sample:
                for place in places:
                    place[:] = 0
                bad.append({"slot": first + position, "reason": sample.reason, "detail": sample.detail})
            else:
                sizes[position] = decoded.height, decoded.width
                modes[decoded.mode] = modes.get(decoded.mode, 0) + 1
                warnings += decoded.warnings
            for file in files:
                file.mark_filled()
        for file in files:
            file.finish(run.chunk_images - len(indices))
    for work, geometry, file in zip(works, run.geometries, files, strict=True):
        status = os.stat(work.chunk(chunk))
        receipt = {
            "chunk": chunk,
            "size": geometry.size,
            "sha256": file.sha256,
            "sums": file.sums.tolist(),
            "squares": file.squares.tolist(),
            "file": [status.st_size, status.st_mtime_ns],
            "bad": bad,
            "modes": dict(sorted(modes.items())),
            "warnings": warnings,
            "source_size": sizes.tolist(),
            "stamps": stamps.tolist(),
        }
        write_json(work.receipt(chunk), receipt, indent=None, check=run.check_alive)
    return ChunkResult(chunk, len(indices), len(bad), time.monotonic() - start)


def load_receipt(work: SplitWork, chunk: int) -> dict[str, Any] | None:
    """A chunk's receipt, or None when the chunk isn't finished or its file is not the one that the receipt tells of."""
    try:
        receipt: dict[str, Any] = json.loads(work.receipt(chunk).read_bytes())
        status = os.stat(work.chunk(chunk))
        return receipt if receipt["file"] == [status.st_size, status.st_mtime_ns] else None
    except (OSError, ValueError, KeyError):
        return None
