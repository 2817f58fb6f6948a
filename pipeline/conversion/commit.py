"""From finished chunks to splits that readers can see: put receipts together, write metadata, rename once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from pipeline.conversion.destination import list_split
from pipeline.conversion.receipts import read_receipts
from pipeline.conversion.workdir import Workspace
from pipeline.errors import BAD_SAMPLE_REASONS, Error, UsageError
from pipeline.progress import say
from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.atomic import write_bytes
from pipeline.store.format import BAD_LABEL, FORMAT_VERSION, SplitArrays
from pipeline.store.geometry import Geometry
from pipeline.store.writer import channel_statistics, publish, split_attributes, write_split
from pipeline.text import are, as_text, counted

DARK_PEAK = 26  # a tenth of 255


@dataclass(frozen=True)
class BadSlot:
    """A bad sample with all that can be said of it; `detail` is never stored."""

    split: str
    slot: int
    key: bytes
    reason: str
    detail: str


@dataclass
class Report:
    """What a conversion did.

    Attributes:
        stores: paths of the stores, one per size.
        committed: splits that are now readable, or were already.
        num_images: images converted in this run.
        seconds: time spent on them.
        bad: bad samples, all splits.
    """

    stores: list[Path]
    committed: list[str] = field(default_factory=list)
    num_images: int = 0
    seconds: float = 0.0
    bad: list[BadSlot] = field(default_factory=list)


class BadSamplesError(Error):
    """Bad samples were found under `--on-error stop`: nothing was committed, nothing is lost."""


class StagedSplit:
    """A split of one store as its work folder holds it; everything is read once.

    Attributes:
        identity: what identifies the conversion, from `plan.json`.
        labels: int32 (N,), by slot.
        keys: by slot.
        receipts: chunk -> its receipt, for the finished chunks; missing: the other chunks.
        bad: bad samples in the finished chunks.
    """

    def __init__(self, workspace: Workspace, split: str) -> None:
        self.workspace, self.split = workspace, split
        self.work = workspace.split(split)
        self.identity: dict[str, Any] = json.loads(self.work.plan.read_bytes())
        self.num_chunks = -(-self.identity["num_samples"] // self.identity["recipe"]["chunk_images"])
        with np.load(self.work.samples) as arrays:
            self.labels = arrays["labels"]
            self.keys = ByteStrings(arrays["keys"], arrays["key_offsets"])
        self.receipts = read_receipts(self.work, self.num_chunks)
        self.missing = sorted(set(range(self.num_chunks)) - self.receipts.keys())
        bad = [bad for receipt in self.receipts.values() for bad in receipt.bad]
        self.bad = [BadSlot(split, key=self.keys[one["slot"]], **one) for one in bad]

    def publish(self) -> None:
        """Write the split's metadata beside its finished chunks and rename it into place."""
        identity, recipe, receipts = self.identity, self.identity["recipe"], self.receipts.values()
        geometry = Geometry(**identity["geometry"])
        labels = self.labels.copy()
        labels[[bad.slot for bad in self.bad]] = BAD_LABEL
        num_pixels = int(np.count_nonzero(labels != BAD_LABEL)) * geometry.size**2
        sums = [sum(channel) for channel in zip(*(receipt.sums for receipt in receipts), strict=True)]
        squares = [sum(channel) for channel in zip(*(receipt.squares for receipt in receipts), strict=True)]
        mean, std = channel_statistics(sums, squares, num_pixels)
        modes = sum((Counter(receipt.modes) for receipt in receipts), Counter[str]())
        source_size = np.concatenate([receipt.source_size for receipt in receipts])
        digests = np.frombuffer(bytes.fromhex("".join(receipt.sha256 for receipt in receipts)), np.uint8)
        arrays = SplitArrays(labels, self.keys.blob, self.keys.offsets, source_size, digests.reshape(-1, 32))
        attributes: dict[str, Any] = {
            "recipe": recipe,
            "bad_samples": [{"slot": b.slot, "key": as_text(b.key), "reason": b.reason} for b in self.bad],
            "order": {
                "shuffled": recipe["shuffled"],
                "seed": recipe["seed"],
                **({"blocks": identity["blocks"]} if "blocks" in identity else {}),
            },
            "mean": mean,
            "std": std,
            "source_modes": dict(sorted(modes.items())),
            "decoder_warnings": sum(receipt.warnings for receipt in receipts),
            "software": identity["software"],
            "resizer": identity["software"]["resizer"],  # that of the workers, not of this machine
        }
        self._clear()
        store, attributes = zarr.storage.LocalStore(self.work.staged), split_attributes(arrays, attributes)
        write_split(store, "", geometry.image_shape, recipe["chunk_images"], arrays, attributes)
        classes = json.loads(self.workspace.classes.read_bytes())
        list_split(self.workspace, self.split, identity["geometry"], classes)
        publish(self.work.staged, self.workspace.dst / self.split)
        shutil.rmtree(self.work.path, ignore_errors=True)

    def _clear(self) -> None:
        """Delete everything beside the finished chunk files: metadata of a killed commit, temp files."""
        chunks = {self.work.chunk(chunk).name for chunk in range(self.num_chunks)}
        unwanted = [path for path in self.work.staged.iterdir() if path != self.work.images]
        unwanted += [path for path in self.work.images.iterdir() if path.name not in chunks]
        for path in unwanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def stop_at_bad(workspaces: Sequence[Workspace], bad: Sequence[BadSlot], on_error: str) -> None:
    """List bad samples in `<DST>.errors.jsonl`, and under `stop` go no further."""
    lines = [
        json.dumps({"split": b.split, "slot": b.slot, "key": as_text(b.key), "reason": b.reason,
                    "meaning": BAD_SAMPLE_REASONS[b.reason], "detail": b.detail}) + "\n"
        for b in bad
    ]  # fmt: skip
    for workspace in workspaces:
        if bad:
            write_bytes(workspace.errors, "".join(lines).encode())
        else:
            workspace.errors.unlink(missing_ok=True)
    if bad and on_error == "stop":
        first = bad[0]
        raise BadSamplesError(
            f"{counted(len(bad), 'bad sample')}, nothing committed (first: {first.split}/"
            f"{as_text(first.key)}: {BAD_SAMPLE_REASONS[first.reason]}; all in {workspaces[0].errors}); "
            f"mend the file{'s' if len(bad) > 1 else ''} and rerun, or rerun with --on-error skip"
        )


def publish_split(stores: Sequence[StagedSplit], report: Report, *, quiet: bool) -> None:
    """Make one split visible in all stores that don't have it yet, at least one, and say what was left out."""
    first = stores[0]
    for store in stores:
        store.publish()
    report.committed.append(first.split)
    if -1 < (peak := max(receipt.peak_16bit for receipt in first.receipts.values())) < DARK_PEAK:
        say(
            f"warning: {first.split}: images of 16 bits a channel use only {peak / 255:.0%} of their range and are "
            "stored nearly black; convert again with --scale-16bit max, or N for the level that is white"
        )
    num_samples, reasons = len(first.labels), Counter(bad.reason for bad in first.bad)
    if not reasons:
        return
    images, count = counted(num_samples, "image"), reasons.total()
    causes = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
    why = f"({causes}; listed in {Workspace(report.stores[0]).errors})"
    if count == num_samples:
        say(f"warning: {first.split}: none of {images} could be read {why}")
    else:
        say(f"{first.split}: {count:,} of {images} {are(count)} bad and left out {why}", quiet=quiet)


@contextlib.contextmanager
def folder_errors(folder: Path) -> Iterator[None]:
    """Turn what the file system says into one line, about this folder where it names no file."""
    try:
        yield
    except OSError as error:
        where, what = error.filename or folder, error.strerror or error
        raise Error(f"{where}: {what}; mend that and rerun the same command to go on") from error


def commit(dst: str | os.PathLike[str], *, on_error: str = "stop", quiet: bool = False) -> Report:
    """Commit a conversion whose chunks are all finished, without its source.

    Raises:
        UsageError: nothing is to be committed there.
        Error: chunks are missing; their parts are named.
        BadSamplesError: bad samples under `stop`.
    """
    workspace = Workspace(Path(os.path.abspath(dst)))
    if not workspace.path.exists():
        raise UsageError(f"{workspace.path}: nothing to commit there (no unfinished conversion)")
    report = Report([workspace.dst])
    with folder_errors(workspace.path), workspace.hold(shared=True, needs_locks=False), workspace.committing():
        staged = [StagedSplit(workspace, split) for split in workspace.begun()]
        if not staged:
            raise UsageError(f"{workspace.path}: nothing to commit there (all splits are committed)")
        for split in staged:
            if split.identity["format_version"] != FORMAT_VERSION:
                raise Error(
                    f"{workspace.path}: begun by a release that writes format {split.identity['format_version']}; "
                    "commit it with that release, or convert with --overwrite"
                )
            if split.missing:
                raise Error(f"{workspace.dst}: {split.split}: {_name_missing(split, workspace.part_count())}")
            report.bad += split.bad
        stop_at_bad([workspace], report.bad, on_error)
        for split in staged:
            publish_split([split], report, quiet=quiet)
            say(f"{split.split}: committed", quiet=quiet)
    return report


def _name_missing(split: StagedSplit, count: int | None) -> str:
    missing = split.missing
    text = f"{len(missing):,} of {counted(split.num_chunks, 'chunk')} {are(len(missing))} missing"
    if count is None:
        return f"{text} (first: {missing[0]}); rerun the convert command"
    parts = sorted({chunk % count + 1 for chunk in missing})
    return f"{text}, of --part {', '.join(f'{part}/{count}' for part in parts)}; run that again"
