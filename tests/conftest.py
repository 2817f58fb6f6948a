"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


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
