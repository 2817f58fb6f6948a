"""Fixtures for the tests of sources."""

import functools
from collections.abc import Iterator

import pytest

from pipeline.sources import devkit


@pytest.fixture(autouse=True, scope="session")
def each_devkit_is_read_once() -> Iterator[None]:
    """By a process that imports scipy, for two seconds; most tests have the same devkit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devkit, "_synsets", functools.cache(devkit._synsets))
        yield
