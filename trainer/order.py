"""The order of an epoch and the randomness of each sample, as pure numpy functions.

Nothing here knows ranks, workers or machines, and nothing keeps a state: the order is a function of (seed, epoch,
number of samples), a sample's augmentation one of (seed, epoch, slot). So both are the same for any world size, any
number of workers and after any resume. Only raw streams that numpy guarantees for all its versions are used
(`SeedSequence`, the bits of `PCG64`), never `Generator` methods, whose results may change between releases.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pipeline.errors import UsageError

ORDER_VERSION = 1
"""Part of every checkpoint's data state; raised when a change here alters an order or an augmentation."""

DEFAULT_WINDOW = 16
"""Chunks per window of the windowed order: 1.6 GB of ImageNet's chunks, each batch drawn from 16 places of the disk."""

STREAM_TOP, STREAM_LEFT = 0, 1
"""Streams of `uniform` that place the crop; the trainer's augmentations take numbers from 2 on."""

STREAM_DRAW = 2**32 - 1
"""Stream of `uniform` that draws samples by weight."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def check_seed(seed: int, epoch: int = 0) -> None:
    """Raise UsageError unless both are one 32-bit word, as SeedSequence takes them: of longer seeds, the upper words
    would be taken for epochs."""
    if not (0 <= seed < 2**32 and 0 <= epoch < 2**32):
        raise UsageError(f"seed {seed}, epoch {epoch}: both must be 0 or more, and below 2^32")


def _shuffle(bits: np.random.PCG64, count: int, group: np.ndarray | None = None) -> np.ndarray:
    """int64 (count,): a permutation of range(count), ascending by `group`, int64 (count,), if given.

    Sorts 64-bit keys of group, random bits and index, which is several times faster than an argsort and, as no two keys
    are equal, the same with any sorting algorithm. A million samples have 44 random bits each.
    """
    index_bits = max(count - 1, 0).bit_length()
    keys = bits.random_raw(count) >> np.uint64(index_bits) << np.uint64(index_bits)
    keys |= np.arange(count, dtype=np.uint64)
    if group is not None and count:
        group_bits = int(group.max()).bit_length()
        keys &= np.uint64(2 ** (64 - group_bits) - 1)
        keys |= group.astype(np.uint64) << np.uint64(64 - group_bits) if group_bits else np.uint64(0)
    keys.sort()
    return (keys & np.uint64(2**index_bits - 1)).astype(np.int64)


def epoch_order(
    seed: int, epoch: int, num_samples: int, chunk_images: int | None = None, window: int | None = None
) -> np.ndarray:
    """The order in which an epoch serves the samples 0 .. num_samples - 1.

    Args:
        seed, epoch: 0 or more; seeded through `SeedSequence([seed, epoch])`, so (1, 0) and (0, 1) are unrelated.
        num_samples: N, served samples of the split.
        chunk_images: samples per chunk; with it the order is windowed, without it each permutation is equally likely.
        window: chunks per window, `DEFAULT_WINDOW` by default.

    Returns:
        int64 (N,): a permutation. Windowed: chunks are permuted, then cut into windows, and the samples of each window
        are permuted; so a reader that holds one window in memory reads the disk in sequence.

    Raises:
        UsageError: a seed, epoch or window out of range.
    """
    check_seed(seed, epoch)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    if chunk_images is None:
        return _shuffle(bits, num_samples)
    window_of_chunk = _window_of_chunk(bits, num_samples, chunk_images, window)
    return _shuffle(bits, num_samples, window_of_chunk[np.arange(num_samples) // chunk_images])


def weighted_order(seed: int, epoch: int, weights: np.ndarray) -> np.ndarray:
    """An epoch of as many samples as there are weights, each drawn with a probability in proportion to its weight.

    Args:
        weights: float64 (N,), none below 0, their sum above 0 and finite.

    Returns:
        int64 (N,): samples 0 .. N - 1 in the order of the draws, with replacement.
    """
    check_seed(seed, epoch)
    sums = np.cumsum(weights)
    draws = np.searchsorted(sums, uniform(seed, epoch, np.arange(len(weights)), STREAM_DRAW) * sums[-1], "right")
    return np.minimum(draws, np.flatnonzero(weights)[-1])  # where rounding leads past the last


def window_bounds(seed: int, epoch: int, num_samples: int, chunk_images: int, window: int | None = None) -> np.ndarray:
    """int64 (windows + 1,): where the windows of `epoch_order(...)` with the same arguments begin and end in it."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    window_of_chunk = _window_of_chunk(bits, num_samples, chunk_images, window)
    sizes = np.full(len(window_of_chunk), chunk_images)
    sizes[-1:] = num_samples - chunk_images * (len(sizes) - 1)
    return np.concatenate([[0], np.cumsum(np.bincount(window_of_chunk, sizes))]).astype(np.int64)


def _window_of_chunk(bits: np.random.PCG64, num_samples: int, chunk_images: int, window: int | None) -> np.ndarray:
    """int64 (chunks,): the window that each chunk falls into."""
    window = DEFAULT_WINDOW if window is None else window
    if window < 1 or chunk_images < 1:
        raise UsageError(f"window {window} of chunks of {chunk_images} images: both must be at least 1")
    chunks = -(-num_samples // chunk_images)
    place = np.empty(chunks, np.int64)
    place[_shuffle(bits, chunks)] = np.arange(chunks)
    return place // window


@lru_cache(maxsize=64)
def _stream_key(seed: int, epoch: int, stream: int) -> np.uint64:
    return np.random.SeedSequence([seed, epoch, stream]).generate_state(1, np.uint64)[0]


def uniform(seed: int, epoch: int, slots: np.ndarray, stream: int) -> np.ndarray:
    """One random number per sample, counter-based: element i depends on (seed, epoch, slots[i], stream) alone.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) evaluated at position
    slot of the sequence that starts from a key of (seed, epoch, stream).

    Args:
        slots: int64 (n,), store slots.
        stream: 0 or more; one for each independent decision. Taken: 0 and 1 the crop, 2 the flip, 3 and 4 shifts and
            windows, 5 to 26 resized crops, 64 what torchvision draws, 2^32 - 1 samples with weights.

    Returns:
        float64 (n,) in [0, 1), 53 random bits each.
    """
    with np.errstate(over="ignore"):
        z = _stream_key(seed, epoch, stream) + (np.asarray(slots).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)) * 2.0**-53


def crop_offsets(seed: int, epoch: int, slots: np.ndarray, room: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Where each sample's random crop begins.

    Args:
        slots: int64 (n,), store slots.
        room: (rows, columns) that the image is larger than the crop, both 0 or more.

    Returns:
        top, left: int64 (n,) each, uniform over 0 .. room inclusive.
    """
    top = (uniform(seed, epoch, slots, STREAM_TOP) * (room[0] + 1)).astype(np.int64)
    left = (uniform(seed, epoch, slots, STREAM_LEFT) * (room[1] + 1)).astype(np.int64)
    return top, left


def centre_offsets(count: int, room: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The centre crop, rounded as torchvision's CenterCrop does: int64 (count,) top and left."""
    return np.full(count, round(room[0] / 2)), np.full(count, round(room[1] / 2))
