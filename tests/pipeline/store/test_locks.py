"""Locks, held by this process through two descriptors: an flock belongs to the open file, not to the process."""

import threading
from pathlib import Path

import pytest

from pipeline.store import locks
from pipeline.store.locks import flock

pytestmark = [pytest.mark.quick, pytest.mark.skipif(locks.fcntl is None, reason="this system has no flock")]


@pytest.mark.parametrize(("first", "second", "free"), [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, True)])
def test_shared_and_exclusive(tmp_path: Path, first: int, second: int, free: bool) -> None:
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert flock(one, shared=bool(first))
        assert flock(other, shared=bool(second)) == free
        one.close()
        assert flock(other)


def test_wait(tmp_path: Path) -> None:
    got: list[bool] = []
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        flock(one)
        thread = threading.Thread(target=lambda: got.append(flock(other.fileno(), wait=True)))
        thread.start()
        assert not got
        one.close()
        thread.join(30)
        assert got == [True]
