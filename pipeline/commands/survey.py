"""What is in a split, in figures: classes, original sizes, bad samples, bytes, and checks that are quick to make."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import StoreError
from pipeline.store.format import BAD_LABEL, SMALL_ARRAYS, UNLABELLED, SplitArrays, chunk_name
from pipeline.store.integrity import altered_arrays, check_chunk, read_arrays
from pipeline.store.reader import Split
from pipeline.store.remote import is_remote

CHECKED_CHUNKS = 4
CHECKED_BYTES = 400_000_000
"""At most so many chunks, and chunks of so many bytes but at least one, are hashed for each split; at a URL one."""


@dataclass
class SplitSurvey:
    """Everything that the report says of a split, but for the pictures.

    Attributes:
        counts: int64 (classes,), served samples by label.
        num_unlabelled: served samples without a label.
        sizes: int32 (n, 2), height and width of the served samples' originals, all above 0.
        disk: bytes of files.
        bad_reasons: reason code -> bad samples, most frequent first.
        problems: one line each; damage that was found.
        passed: one line each; checks without a finding.
        good_chunks: int64, chunks whose files are there in full.
        checked_chunks: chunks that were hashed, ascending.
    """

    split: Split
    counts: np.ndarray
    num_unlabelled: int
    sizes: np.ndarray
    disk: dict[str, int]
    bad_reasons: dict[str, int]
    good_chunks: np.ndarray
    problems: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    checked_chunks: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.split.name

    @property
    def num_bad(self) -> int:
        return self.split.num_samples - self.split.num_valid


def survey_split(split: Split) -> SplitSurvey:
    """Count everything, and check files, small arrays and the fingerprint. Reads no images.

    Raises:
        StoreError: a small array is damaged, so that nothing can be said.
    """
    problems = split.problems()
    arrays = read_arrays(split)
    if arrays is None:
        split.check_files()  # says which, and what to do
        raise StoreError(f"{split.path}: damaged; run `python -m pipeline verify {split.store_path}`")
    passed = [] if problems else [_files_passed(split)]
    labels, num_classes = arrays.labels, split.num_classes
    if problem := split.label_problem(labels):
        problems.append(problem)
    altered = altered_arrays(split, arrays)
    if not altered:
        passed.append("labels, keys, sizes and digests are unaltered, and fit the sample fingerprint (SHA-256)")
    inside = labels[(labels >= 0) & (labels < num_classes)]
    sizes = arrays.source_size[labels != BAD_LABEL]
    return SplitSurvey(
        split,
        np.bincount(inside, minlength=num_classes),
        int(np.count_nonzero(labels == UNLABELLED)),
        sizes[(sizes > 0).all(axis=1)],
        _disk_use(split, arrays),
        dict(Counter(entry["reason"] for entry in split.attrs["bad_samples"]).most_common()),
        split.good_chunks(),
        [*problems, *altered],
        passed,
    )


def _files_passed(split: Split) -> str:
    kind = "in full size" if split.is_raw else "and not empty"
    files = f"all {split.num_chunks:,} chunk files are" if split.num_chunks != 1 else "the only chunk file is"
    return f"{files} there, {kind}"


def _disk_use(split: Split, arrays: SplitArrays) -> dict[str, int]:
    sizes = split.chunk_sizes()
    images = sum(sizes.get(chunk_name(chunk), 0) for chunk in range(split.num_chunks))
    folders = [split.path, split.path / "images", *(split.path / name for name in SMALL_ARRAYS)]
    others = sum((folder / "zarr.json").stat().st_size for folder in folders)
    others += sum(array.nbytes for array in arrays.named().values())
    raw_bytes = split.num_chunks * split.chunk_bytes  # what the images would take without a codec
    padding_bytes = raw_bytes - split.num_samples * split.image_bytes  # zeros at the end of the last chunk
    return {
        "image_bytes": images,
        "array_bytes": others,  # small arrays and metadata
        "total_bytes": images + others,
        "raw_bytes": raw_bytes,
        "padding_bytes": padding_bytes,
    }


def check_chunks(survey: SplitSurvey, rng: np.random.Generator) -> None:
    """Hash a few random chunks and note the result."""
    split = survey.split
    most = 1 if is_remote(split.path) else min(CHECKED_CHUNKS, max(1, CHECKED_BYTES // split.chunk_bytes))
    most = min(most, len(survey.good_chunks))
    survey.checked_chunks = sorted(rng.choice(survey.good_chunks, most, replace=False).tolist())
    problems = [problem for chunk in survey.checked_chunks if (problem := check_chunk(split, chunk))]
    survey.problems += problems
    if survey.checked_chunks and not problems:
        which = f"of {most:,} random chunks out of {split.num_chunks:,}"
        if most == split.num_chunks:
            which = f"of all {most:,} chunks" if most > 1 else "of the only chunk"
        survey.passed.append(f"the pixels {which} are unaltered (SHA-256)")
