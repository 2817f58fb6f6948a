"""What is in a split, in figures: classes, original sizes, bad samples, bytes, and checks that are quick to make."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.errors import StoreError
from pipeline.store.format import BAD_LABEL, SMALL_ARRAYS, UNLABELLED, SplitArrays, chunk_name
from pipeline.store.integrity import altered_arrays, check_chunk, read_arrays
from pipeline.store.reader import Split
from pipeline.store.remote import is_remote

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
CHECKED_CHUNKS = 4
CHECKED_BYTES = 400_000_000
"""At most so many chunks, and chunks of so many bytes but at least one, are hashed for each split; at a URL one."""


@dataclass(frozen=True)
class ClassSurvey:
    """Served samples per class.

    Attributes:
        counts: int64 (classes,), by label.
        num_unlabelled: served samples without a label.
    """

    counts: np.ndarray
    num_unlabelled: int

    @property
    def num_labelled(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def by_size(self) -> np.ndarray:
        """int64 (classes,): labels, the largest class first, equal ones by label."""
        return np.argsort(-self.counts, kind="stable")

    @property
    def empty(self) -> np.ndarray:
        """Labels of the classes without a sample, ascending."""
        return np.flatnonzero(self.counts == 0)


@dataclass(frozen=True)
class SizeSurvey:
    """Original sizes of the served samples.

    Attributes:
        sizes: int32 (n, 2), height and width, all above 0.
        target: side S of the stored images.
        fit: as in the geometry: decides which side is resized to S.
    """

    sizes: np.ndarray
    target: int
    fit: str

    @cached_property
    def common(self) -> list[tuple[int, int, int]]:
        """(height, width, number) of the most frequent sizes, at most three."""
        values, numbers = self._distinct
        top = np.argsort(-numbers, kind="stable")[:3]
        return [(int(values[i] >> 32), int(values[i] & 0xFFFFFFFF), int(numbers[i])) for i in top]

    @cached_property
    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = self.sizes.astype(np.int64)
        return np.unique(sizes[:, 0] << 32 | sizes[:, 1], return_counts=True)

    @property
    def num_distinct(self) -> int:
        return len(self._distinct[0])

    @property
    def num_enlarged(self) -> int:
        """Images with too few pixels for the stored size, which had to be enlarged in some direction."""
        side = self.sizes.max(axis=1) if self.fit == "pad" else self.sizes.min(axis=1)
        return int(np.count_nonzero(side < self.target))


def quantiles(values: np.ndarray) -> list[Any]:
    """Values at `QUANTILES` of a non-empty array; each is one of the array's."""
    return np.quantile(values, QUANTILES, method="inverted_cdf").tolist()


@dataclass
class SplitSurvey:
    """Everything that the report says of a split, but for the pictures.

    Attributes:
        bad_reasons: reason code -> bad samples, most frequent first.
        sizes: None where no served sample has a size.
        disk: bytes of files.
        problems: one line each; damage that was found.
        passed: one line each; checks without a finding.
        good_chunks: int64, chunks whose files are there in full.
        checked_chunks: chunks that were hashed, ascending.
    """

    split: Split
    classes: ClassSurvey
    sizes: SizeSurvey | None
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


def survey_split(split: Split, fit: str) -> SplitSurvey:
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
    classes = ClassSurvey(np.bincount(inside, minlength=num_classes), int(np.count_nonzero(labels == UNLABELLED)))
    sizes = arrays.source_size[labels != BAD_LABEL]
    sizes = sizes[(sizes > 0).all(axis=1)]
    return SplitSurvey(
        split,
        classes,
        SizeSurvey(sizes, split.image_shape[0], fit) if len(sizes) else None,
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
