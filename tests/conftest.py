"""Fixtures for all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell starts background jobs, and nohup its command, with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-data", type=Path, default=None, help="folder with imagenet_sample_700.tar, cifar10.tar.gz, ..."
    )


@pytest.fixture(scope="session")
def real_data(request: pytest.FixtureRequest) -> Path:
    """Folder with the real datasets; the test is skipped without `--real-data DIR`."""
    folder = request.config.getoption("--real-data")
    if folder is None:
        pytest.skip("needs --real-data DIR")
    return folder.resolve()


@pytest.fixture(autouse=True)
def restore_sigterm() -> Iterator[None]:
    """A trainer that was stopped in this process leaves SIGTERM ignored, which later children would inherit."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks at it again."""
    gc.freeze()
