"""The order of an epoch and the per-sample randomness."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from trainer.order import crop_offsets, epoch_order, uniform, window_bounds

pytestmark = pytest.mark.quick

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 1000)


@settings(deadline=None)
@given(SEEDS, EPOCHS, st.integers(0, 300), st.none() | st.integers(1, 50), st.integers(1, 8))
def test_an_order_is_a_permutation_and_repeats(seed, epoch, count, chunk_images, window):
    order = epoch_order(seed, epoch, count, chunk_images, window)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, epoch_order(seed, epoch, count, chunk_images, window))


def test_orders_never_change_between_releases():
    # A change here needs a new ORDER_VERSION: checkpoints rely on it.
    assert epoch_order(0, 0, 10).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert epoch_order(3, 7, 10, chunk_images=2, window=2).tolist() == [4, 7, 6, 5, 3, 2, 1, 0, 9, 8]
    assert uniform(1, 2, np.array([0, 5, 10**9]), 3).tolist() == [
        0.1942996404198326,
        0.07519787458844795,
        0.06998415060239416,
    ]


def test_seed_and_epoch_are_not_added():
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in range(4) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 16


def test_each_epoch_leaves_out_other_samples():
    num_samples, global_batch = 103, 10
    left_out = [frozenset(epoch_order(0, epoch, num_samples)[100:].tolist()) for epoch in range(20)]
    assert len(set(left_out)) > 15
    assert all(len(left) == num_samples % global_batch for left in left_out)


def test_every_place_is_equally_likely():
    count, epochs = 8, 4000
    places = np.zeros((count, count))
    for epoch in range(epochs):
        places[np.arange(count), epoch_order(5, epoch, count)] += 1
    # each cell is binomial(4000, 1/8): mean 500, standard deviation 21; six of them
    assert np.abs(places - epochs / count).max() < 126


@settings(deadline=None)
@given(SEEDS, EPOCHS, st.integers(1, 400), st.integers(1, 40), st.integers(1, 6))
def test_a_window_holds_whole_chunks_and_mixes_them(seed, epoch, count, chunk_images, window):
    order = epoch_order(seed, epoch, count, chunk_images, window)
    bounds = window_bounds(seed, epoch, count, chunk_images, window)
    assert bounds[0] == 0
    assert bounds[-1] == count
    num_chunks = -(-count // chunk_images)
    assert len(bounds) - 1 == -(-num_chunks // window)
    seen = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunks = np.unique(order[begin:end] // chunk_images)
        assert len(chunks) <= window
        seen += chunks.tolist()
    assert sorted(seen) == list(range(num_chunks))  # no chunk is in two windows


def test_windows_mix_as_well_as_a_shuffle_of_their_samples():
    chunk_images, window = 100, 8
    order = epoch_order(0, 0, 6400, chunk_images, window)
    bounds = window_bounds(0, 0, 6400, chunk_images, window)
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        first, second = order[begin : (begin + end) // 2], order[(begin + end) // 2 : end]
        # each chunk has hypergeometric 50 +- 4.7 samples in either half of its window
        for chunk in np.unique(first // chunk_images):
            assert 20 < np.count_nonzero(first // chunk_images == chunk) < 80
        assert set((first // chunk_images).tolist()) == set((second // chunk_images).tolist())
    # windows are made anew every epoch
    other = epoch_order(0, 1, 6400, chunk_images, window)
    first_chunks = [set((x[:800] // chunk_images).tolist()) for x in (order, other)]
    assert first_chunks[0] != first_chunks[1]


@settings(deadline=None)
@given(SEEDS, EPOCHS, st.lists(st.integers(0, 2**31), min_size=1, max_size=30), st.integers(0, 9))
def test_a_sample_draws_the_same_number_in_any_company(seed, epoch, slots, stream):
    together = uniform(seed, epoch, np.array(slots), stream)
    alone = [uniform(seed, epoch, np.array([slot]), stream)[0] for slot in slots]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_draws_are_uniform_and_unrelated():
    slots = np.arange(40_000)
    draws = np.array(
        [uniform(seed, epoch, slots, stream) for seed in (0, 1) for epoch in (0, 1) for stream in (0, 1, 2)]
    )
    assert np.abs(draws.mean(1) - 0.5).max() < 6 * 0.289 / 200
    counts = np.array([np.histogram(row, 20, (0, 1))[0] for row in draws])
    assert np.abs(counts - 2000).max() < 6 * 44
    correlation = np.corrcoef(np.vstack([draws, draws[0][np.arange(1, 40_001) % 40_000]]))  # and with its neighbour
    assert np.abs(correlation - np.eye(len(correlation))).max() < 6 / 200


@settings(deadline=None)
@given(SEEDS, EPOCHS, st.integers(0, 40), st.integers(0, 40))
def test_crops_lie_inside(seed, epoch, rows, columns):
    top, left = crop_offsets(seed, epoch, np.arange(200), (rows, columns))
    assert top.min() >= 0
    assert left.min() >= 0
    assert top.max() <= rows
    assert left.max() <= columns


def test_crops_reach_every_place():
    top, left = crop_offsets(0, 0, np.arange(5000), (3, 7))
    assert set(top.tolist()) == set(range(4))
    assert set(left.tolist()) == set(range(8))


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1), (2**32, 0), (0, 2**32)])
def test_seeds_of_more_or_less_than_a_word_are_refused(seed, epoch):
    with pytest.raises(UsageError, match="0 or more"):
        epoch_order(seed, epoch, 4)


def test_empty_windows_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        epoch_order(0, 0, 4, chunk_images=2, window=0)


def test_it_needs_only_numpy():
    code = "import sys, trainer.order; assert not {'torch', 'zarr', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
