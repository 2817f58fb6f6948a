"""Fixtures for all tests."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

# A shell starts background jobs, and nohup its command, with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Children of the start method "forkserver" begin with these, which take seconds to import.
multiprocessing.set_forkserver_preload(["torchvision", "trainer.training"])

# --n-jobs -1 converts without worker processes; tests of workers ask for two.
os.environ["LOKY_MAX_CPU_COUNT"] = "1"


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


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a store that isn't there yet, in fsspec's memory."""
    import fsspec

    name = f"{secrets.token_hex(8)}.zarr"
    yield f"memory://{name}"
    memory = fsspec.filesystem("memory")
    if memory.exists(name):
        memory.rm(name, recursive=True)


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[None]:
    """A local S3-compatible server; its address and credentials are in the environment, as with the real one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, settings):
            yield
    finally:
        server.terminate()
        server.wait(timeout=10)


_bucket_numbers = itertools.count()


@pytest.fixture
def bucket(bucket_server: None) -> str:
    """URL of an empty bucket."""
    import boto3

    name = f"bucket{next(_bucket_numbers)}"
    for _ in range(300):
        try:
            boto3.client("s3").create_bucket(Bucket=name)
            break
        except Exception:  # until the server listens
            time.sleep(0.1)
    return f"s3://{name}"
