"""Packed byte strings, against plain lists."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources import byte_strings as strings
from pipeline.sources.byte_strings import ByteStringsBuilder, first_duplicate, path_order


def pack(values):
    builder = ByteStringsBuilder()
    for value in values:
        builder.append(value)
    assert len(builder) == len(values)
    return builder.build()


@given(st.lists(st.binary(max_size=9), max_size=40), st.data())
def test_behaves_as_a_list(values, data):
    packed = pickle.loads(pickle.dumps(pack(values)))
    assert len(packed) == len(values)
    assert list(packed) == values
    assert [packed[i] for i in range(len(values))] == values
    indices = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=60)) if values else []
    assert list(packed.take(np.array(indices, np.int64))) == [values[i] for i in indices]
    with pytest.raises(IndexError):
        packed[len(values)]


@given(st.lists(st.lists(st.sampled_from([b"a", b"a-", b"a.jpg", b"b", b"\xff"]), min_size=1, max_size=4), max_size=30))
def test_path_order_compares_components(paths):
    packed = pack([b"/".join(parts) for parts in paths])
    assert list(packed.take(path_order(packed))) == [b"/".join(parts) for parts in sorted(paths)]


@given(st.lists(st.binary(max_size=2), max_size=60))
def test_first_duplicate(values):
    wanted = next(((values.index(v), i) for i, v in enumerate(values) if v in values[:i]), None)
    assert first_duplicate(pack(values)) == wanted


def test_equal_hashes_are_compared(monkeypatch):
    monkeypatch.setattr(strings, "hash", lambda value: 7, raising=False)
    assert first_duplicate(pack([b"a", b"b", b"c"])) is None
    assert first_duplicate(pack([b"a", b"b", b"a"])) == (0, 2)


def test_take_in_blocks(monkeypatch):
    monkeypatch.setattr(strings, "_TAKE_BLOCK", 3)
    values = [b"x" * i for i in range(11)]
    packed = pack(values)
    assert list(packed) == values
    assert list(packed.take(np.arange(10, -1, -1))) == values[::-1]
