"""From finished chunks to a split that readers can see: assemble receipts, write metadata, rename once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from pipeline.conversion.plan import first_difference
from pipeline.conversion.workdir import SplitWork, Workspace
from pipeline.conversion.worker import load_receipt
from pipeline.errors import BAD_SAMPLE_REASONS, Error, StoreNotFoundError, UsageError
from pipeline.image.resize import resizer
from pipeline.progress import say
from pipeline.store.atomic import fsync_dir, write_bytes
from pipeline.store.format import BAD_LABEL, FORMAT_NAME
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Store, open_store
from pipeline.store.writer import (
    SplitArrays,
    channel_statistics,
    publish,
    root_attributes,
    split_attributes,
    write_group,
    write_split,
)
from pipeline.text import are, as_text, counted


@dataclass(frozen=True)
class BadSlot:
    """A bad sample with all that can be said of it; `detail` is never stored."""

    split: str
    slot: int
    key: bytes
    reason: str
    detail: str


@dataclass
class Finished:
    """All receipts of a split put together."""

    digests: np.ndarray
    source_size: np.ndarray
    bad: list[BadSlot]
    sums: list[int]
    squares: list[int]
    modes: dict[str, int]
    warnings: int


def load_samples(work: SplitWork) -> dict[str, np.ndarray]:
    """The plan's arrays by slot: order, labels, keys, key_offsets."""
    with np.load(work.samples) as arrays:
        return dict(arrays)


def missing_chunks(work: SplitWork, num_chunks: int) -> list[int]:
    """Chunks without a good receipt."""
    return [chunk for chunk in range(num_chunks) if load_receipt(work, chunk) is None]


def merge_receipts(split: str, work: SplitWork, identity: dict[str, Any], samples: dict[str, np.ndarray]) -> Finished:
    """Read all receipts of a split.

    Raises:
        Error: a chunk isn't finished.
    """
    num_samples, chunk_images = identity["num_samples"], identity["recipe"]["chunk_images"]
    num_chunks = -(-num_samples // chunk_images)
    channels = Geometry(**identity["geometry"]).num_channels
    done = Finished(
        np.zeros((num_chunks, 32), np.uint8),
        np.zeros((num_samples, 2), np.int32),
        [],
        [0] * channels,
        [0] * channels,
        {},
        0,
    )
    keys, offsets = samples["keys"], samples["key_offsets"]
    for chunk in range(num_chunks):
        receipt = load_receipt(work, chunk)
        if receipt is None:
            raise Error(f"{work.chunk(chunk)}: not finished; rerun the convert command")
        first = chunk * chunk_images
        done.digests[chunk] = np.frombuffer(bytes.fromhex(receipt["sha256"]), np.uint8)
        done.source_size[first : first + len(receipt["source_size"])] = receipt["source_size"]
        for bad in receipt["bad"]:
            slot = bad["slot"]
            key = keys[offsets[slot] : offsets[slot + 1]].tobytes()
            done.bad.append(BadSlot(split, slot, key, bad["reason"], bad["detail"]))
        done.sums = [a + b for a, b in zip(done.sums, receipt["sums"], strict=True)]
        done.squares = [a + b for a, b in zip(done.squares, receipt["squares"], strict=True)]
        done.warnings += receipt["warnings"]
        for mode, count in receipt["modes"].items():
            done.modes[mode] = done.modes.get(mode, 0) + count
    return done


def write_errors(workspace: Workspace, bad: Sequence[BadSlot]) -> None:
    """Write `<DST>.errors.jsonl`, one bad sample a line, or delete it when there are none."""
    if not bad:
        workspace.errors.unlink(missing_ok=True)
        return
    lines = [
        json.dumps({"split": b.split, "slot": b.slot, "key": as_text(b.key), "reason": b.reason,
                    "meaning": BAD_SAMPLE_REASONS[b.reason], "detail": b.detail}) + "\n"
        for b in bad
    ]  # fmt: skip
    write_bytes(workspace.errors, "".join(lines).encode())


def check_root(dst: Path, attributes: dict[str, Any]) -> None:
    """Check that DST is free, or a store to which a split with these root attributes can be added.

    Raises:
        Error: it is a store with another geometry or other classes.
        UsageError: it is something else.
    """
    if not dst.exists():
        return
    if not dst.is_dir():
        raise UsageError(f"{dst}: exists and is not a folder; choose another DST")
    if not any(dst.iterdir()):
        return
    try:
        store = open_store(dst)
    except StoreNotFoundError:
        raise UsageError(f"{dst}: exists and is not a store; choose another DST") from None
    here, there = attributes["class_ids"], store.attrs["class_ids"]
    if gone := _but(there, here):
        raise Error(
            f"{dst}: the store has {gone}, this conversion has not; use another DST, or give it the same classes (of "
            "folders an empty one is enough)"
        )
    if new := _but(here, there):
        raise Error(
            f"{dst}: this conversion has {new}, the store has not; use another DST, or convert all splits again with "
            "--overwrite"
        )
    words = "{name}: the store has {old}, this conversion asks for {new}"
    difference = first_difference(_root_fields(store.attrs), _root_fields(attributes), words=words)
    if difference:
        raise Error(f"{dst}: {difference}; use another DST, or convert all splits again with --overwrite")


def _but(ids: Sequence[str], others: Sequence[str]) -> str:
    """In words, the classes that are not among the others; empty for none."""
    left = sorted(set(ids) - set(others))
    if not left:
        return ""
    return f"{counted(len(left), 'class', 'classes')} more ({left[0]!r}{', ...' if len(left) > 1 else ''})"


def _root_fields(attributes: dict[str, Any]) -> dict[str, Any]:
    """What a root group says, one value a field, so that a difference is one field and not a thousand classes."""
    ids, names = attributes["class_ids"], attributes["class_names"]
    return {
        **attributes["geometry"],
        **{f"class {label}": name for label, name in enumerate(ids)},
        **{f"name of class {label}": name for label, name in enumerate(names)},
    }


def write_root(dst: Path, geometry: dict[str, Any], class_ids: Sequence[str], class_names: Sequence[str]) -> None:
    """Write the root group unless it is there."""
    if (dst / "zarr.json").exists():
        return
    made = dst.with_name(dst.name + ".work") / "root"
    shutil.rmtree(made, ignore_errors=True)
    write_group(zarr.storage.LocalStore(made), "", root_attributes(geometry, class_ids, class_names))
    dst.mkdir(parents=True, exist_ok=True)
    with open(made / "zarr.json", "rb") as file:
        os.fsync(file.fileno())
    os.replace(made / "zarr.json", dst / "zarr.json")
    made.rmdir()
    fsync_dir(dst)
    fsync_dir(dst.parent)


def commit_split(workspace: Workspace, split: str, class_ids: Sequence[str], class_names: Sequence[str]) -> None:
    """Write a split's metadata beside its finished chunks and rename it into place.

    Raises:
        Error: a chunk isn't finished.
        OSError: as the file system says; nothing is visible then.
    """
    work = workspace.split(split)
    identity = json.loads(work.plan.read_bytes())
    geometry = Geometry(**identity["geometry"])
    samples = load_samples(work)
    done = merge_receipts(split, work, identity, samples)
    recipe = identity["recipe"]
    labels = samples["labels"].copy()
    labels[[bad.slot for bad in done.bad]] = BAD_LABEL
    num_pixels = int(np.count_nonzero(labels != BAD_LABEL)) * geometry.size**2
    mean, std = channel_statistics(done.sums, done.squares, num_pixels)
    arrays = SplitArrays(labels, samples["keys"], samples["key_offsets"], done.source_size, done.digests)
    _clear_staged(work, len(done.digests))
    attributes = {
        "recipe": recipe,
        "bad_samples": [{"slot": b.slot, "key": as_text(b.key), "reason": b.reason} for b in done.bad],
        "order": {
            "shuffled": recipe["shuffled"],
            "seed": recipe["seed"],
            **({"blocks": identity["blocks"]} if "blocks" in identity else {}),
        },
        "mean": mean,
        "std": std,
        "source_modes": dict(sorted(done.modes.items())),
        "decoder_warnings": done.warnings,
        "software": identity["software"],
        "resizer": resizer(),
    }
    write_split(
        zarr.storage.LocalStore(work.staged),
        "",
        geometry.image_shape,
        recipe["chunk_images"],
        arrays,
        split_attributes(arrays, attributes),
    )
    write_root(workspace.dst, identity["geometry"], class_ids, class_names)
    publish(work.staged, workspace.dst / split)
    shutil.rmtree(work.path, ignore_errors=True)


def _clear_staged(work: SplitWork, num_chunks: int) -> None:
    """Delete everything beside the finished chunk files: metadata of a killed commit, temp files."""
    wanted = {work.chunk(chunk).name for chunk in range(num_chunks)}
    for child in work.staged.iterdir():
        if child == work.images:
            for file in child.iterdir():
                if file.name not in wanted:
                    file.unlink()
        elif child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def remove_store(workspace: Workspace, splits: Collection[str], attributes: dict[str, Any]) -> None:
    """For `--overwrite` delete a store, or only these splits of it where it has others, too.

    Whoever is killed meanwhile leaves no half of one: it moves away first.

    Args:
        workspace: the store's.
        splits: those that are converted anew.
        attributes: of the root group that they will have.

    Raises:
        UsageError: it is no store: nothing is deleted.
        Error: it has other splits, of another geometry or other classes: nothing is deleted.
    """
    path = workspace.dst
    if not path.exists():
        return
    if path.is_symlink():
        raise UsageError(f"{path}: a link, through which --overwrite deletes nothing; give {path.resolve()} as DST")
    if not path.is_dir():
        raise UsageError(f"{path}: exists and is not a folder; choose another DST")
    doomed = [path]
    if any(path.iterdir()):
        try:
            present = Store(path).splits
        except StoreNotFoundError:
            raise UsageError(
                f"{path}: not an {FORMAT_NAME} store, so --overwrite doesn't delete it; choose another DST"
            ) from None
        except Error:
            present = []  # damaged
        if not set(present) <= set(splits):
            check_root(path, attributes)
            doomed = [path / split for split in splits if (path / split).exists()]
    removed = workspace.path / "overwritten"
    for folder in doomed:
        shutil.rmtree(removed, ignore_errors=True)
        with contextlib.suppress(OSError):  # such as of a mount point
            folder = folder.rename(removed)
        shutil.rmtree(folder)


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


def bad_samples_line(bad: Sequence[BadSlot], workspace: Workspace) -> str:
    """One line about bad samples: how many, the first of them, what to do."""
    first = bad[0]
    return (
        f"{counted(len(bad), 'bad sample')}, nothing committed (first: {first.split}/"
        f"{as_text(first.key)}: {BAD_SAMPLE_REASONS[first.reason]}; all in {workspace.errors}); "
        f"mend the file{'s' if len(bad) > 1 else ''} and rerun, or rerun with --on-error skip"
    )


def say_left_out(bad: Sequence[BadSlot], split: str, num_samples: int, store: Path, *, quiet: bool) -> None:
    """Say how many bad samples a committed split has; one without any good one is worth a line even when quiet."""
    reasons = Counter(sample.reason for sample in bad if sample.split == split)
    count = reasons.total()
    if not count:
        return
    images = counted(num_samples, "image")
    causes = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
    why = f"({causes}; see `python -m pipeline info {store}`)"
    if count == num_samples:
        say(f"warning: {split}: none of {images} could be read {why}")
    else:
        say(f"{split}: {count:,} of {images} {are(count)} bad and left out {why}", quiet=quiet)


@contextlib.contextmanager
def folder_errors() -> Iterator[None]:
    """Turn what the file system says about the destination into one line."""
    try:
        yield
    except OSError as error:
        raise Error(f"{error.filename}: {error.strerror}; mend that and rerun the same command to go on") from error


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
    classes = json.loads((workspace.path / "classes.json").read_bytes())
    splits = sorted(path.parent.name for path in workspace.path.glob("*/plan.json"))
    num_samples = {}
    report = Report([workspace.dst])
    with folder_errors(), workspace.committing():
        for split in splits:
            work = workspace.split(split)
            identity = json.loads(work.plan.read_bytes())
            num_samples[split] = identity["num_samples"]
            num_chunks = -(-identity["num_samples"] // identity["recipe"]["chunk_images"])
            missing = missing_chunks(work, num_chunks)
            if missing:
                raise Error(f"{workspace.dst}: {split}: {_name_missing(missing, num_chunks, workspace.part_count())}")
            report.bad += merge_receipts(split, work, identity, load_samples(work)).bad
        write_errors(workspace, report.bad)
        if report.bad and on_error == "stop":
            raise BadSamplesError(bad_samples_line(report.bad, workspace))
        for split in splits:
            commit_split(workspace, split, classes["ids"], classes["names"])
            report.committed.append(split)
            say(f"{split}: committed", quiet=quiet)
            say_left_out(report.bad, split, num_samples[split], workspace.dst, quiet=quiet)
    with workspace.run(None):
        pass
    return report


def _name_missing(missing: Sequence[int], num_chunks: int, count: int | None) -> str:
    text = f"{len(missing):,} of {counted(num_chunks, 'chunk')} {are(len(missing))} missing"
    if count is None:
        return f"{text} (first: {missing[0]}); rerun the convert command"
    parts = sorted({chunk % count + 1 for chunk in missing})
    return f"{text}, of --part {', '.join(f'{part}/{count}' for part in parts)}; run that again"
