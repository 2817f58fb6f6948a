import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversion.plan import MIX_SAMPLES, chunk_length, first_difference, slot_order

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("image_bytes", "num_samples", "chunk_mb", "expected"),
    [
        (256 * 256 * 3, 1_281_167, 100, 508),  # ImageNet: 100 MB
        (256 * 256 * 3, 50_000, 100, 508),
        (256 * 256 * 3, 700, 100, 11),  # small: 64 chunks
        (4096 * 4096 * 3, 100, 1, 1),  # one image is larger than a chunk
        (3, 1, 100, 1),
        (3, 64, 100, 1),
        (3, 65, 100, 2),
    ],
)
def test_chunk_length(image_bytes: int, num_samples: int, chunk_mb: float, expected: int) -> None:
    assert chunk_length(image_bytes, num_samples, chunk_mb) == expected


def test_order_is_a_seeded_permutation() -> None:
    one, again, other = (slot_order(1000, shuffled=True, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(np.sort(one), np.arange(1000))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.array_equal(slot_order(5, shuffled=False, seed=3), np.arange(5))


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(0, 3))
def test_order_in_blocks_permutes_and_stays_local(lengths: list[int], seed: int) -> None:
    blocks = np.append(0, np.cumsum(lengths))
    order = slot_order(int(blocks[-1]), shuffled=True, seed=seed, blocks=blocks)
    assert np.array_equal(np.sort(order), np.arange(blocks[-1]))
    assert np.array_equal(order, slot_order(int(blocks[-1]), shuffled=True, seed=seed, blocks=blocks))
    for block in range(len(lengths)):  # a block's samples lie within one window: MIX_SAMPLES and less than a block more
        slots = np.flatnonzero((order >= blocks[block]) & (order < blocks[block + 1]))
        assert np.ptp(slots) < MIX_SAMPLES + max(lengths)


def test_order_in_blocks_mixes() -> None:
    blocks = np.arange(0, 10_001, 100)
    one, other = (slot_order(10_000, shuffled=True, seed=seed, blocks=blocks) for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert len(np.unique(one[:500] // 100)) == 11  # a window of 1,100 samples
    assert len(np.unique(one[:1100] // 100)) == 11
    assert np.abs(np.diff(one[:1100] // 100)).max() > 5
    assert np.array_equal(slot_order(10_000, shuffled=False, seed=0, blocks=blocks), np.arange(10_000))


def test_first_difference_names_the_field() -> None:
    assert first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}) == ""
    assert (
        first_difference({"geometry": {"size": 256}}, {"geometry": {"size": 224}})
        == "geometry.size was 256, is 224 now"
    )
    assert first_difference({"keys": "aa"}, {"keys": "bb"}) == "the source has other files now"
    assert first_difference({}, {"new": 1}) == "new was None, is 1 now"
