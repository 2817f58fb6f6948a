"""The same bytes from a Dask cluster with worker processes of its own, and from Ray."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from folders import make_folder, same_tree
from joblib.externals.loky import process_executor

from pipeline import convert
from pipeline.conversion import backends
from pipeline.conversion.backends import backend, run_jobs, stop_workers
from pipeline.errors import Error, UsageError


def signals_that_wait(_: int) -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system has no signal masks")
def test_workers_start_deaf_to_ctrl_c() -> None:
    """One that was interrupted before it can ignore that would print a traceback of Python's own start."""
    with backend("loky", None):
        masks = list(run_jobs("loky", 2, signals_that_wait, range(4)))
    assert all(signal.SIGINT in mask for mask in masks)
    assert signal.SIGINT not in signals_that_wait(0)


def never_ends(_: int) -> int:
    atexit.register(time.sleep, 40)
    return os.getpid()


def test_a_worker_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "END_SECONDS", 1.0)
    with backend("loky", None):
        workers = {psutil.Process(worker) for worker in run_jobs("loky", 2, never_ends, range(4))}
        start = time.monotonic()
        stop_workers("loky")
    assert time.monotonic() - start < 30
    assert not any(worker.is_running() for worker in workers)


def fails_or_hangs(job: int) -> None:
    time.sleep(60 * job)
    raise ZeroDivisionError


@pytest.mark.timeout(90)
def test_a_worker_that_no_signal_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a system call that can't be interrupted: what kills it does nothing."""
    start, tried = time.monotonic(), list[int]()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), backend("loky", None):
        patch.setattr(backends, "END_SECONDS", 1.0)
        patch.setattr(process_executor, "kill_process_tree", lambda process: process.join())
        patch.setattr(os, "kill", lambda pid, _: tried.append(pid))
        list(run_jobs("loky", 2, fails_or_hangs, [0, 1]))
    assert tried
    for worker in tried:
        assert psutil.Process(worker).is_running()
        psutil.Process(worker).kill()
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("n_jobs", "num_jobs", "workers"), [(5000, 3, 3), (2, 3, 2), (-1, 1, 1), (-1000, 3, 1), (7, 0, 1)]
)
def test_no_more_workers_than_jobs(monkeypatch: pytest.MonkeyPatch, n_jobs: int, num_jobs: int, workers: int) -> None:
    asked = []

    def parallel(n_jobs: int, **options: object) -> Callable[[Iterable[object]], list[object]]:
        asked.append(n_jobs)
        return list

    monkeypatch.setattr("pipeline.conversion.backends.joblib.Parallel", parallel)
    with backend("loky", None):
        assert len(list(run_jobs("loky", n_jobs, str, range(num_jobs)))) == num_jobs
    assert asked == [workers]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(
        tmp_path_factory.mktemp("source"), {"train": {"cat": 40, "dog": 30}, "val": {"cat": 3, "dog": 4}}
    )


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("reference") / "a.zarr"
    convert(source, store, size=16, n_jobs=1, quiet=True)
    return store


@pytest.fixture(scope="module")
def dask_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and two workers, each a process that this one didn't fork."""
    folder = tmp_path_factory.mktemp("dask")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    host = ["--host", "127.0.0.1"]
    commands = [
        ["scheduler", *host, "--port", address.rsplit(":", 1)[1], "--no-dashboard"],
        *[
            ["worker", address, *host, "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder / name)]
            for name in ("1", "2")
        ],
    ]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_" + command[0], *command[1:]], **output)  # type: ignore[call-overload]
        for command in commands
    ]
    try:
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


@pytest.mark.filterwarnings("ignore")  # of distributed's own
def test_dask_cluster(source: Path, reference: Path, tmp_path: Path, dask_address: str) -> None:
    from distributed import Client

    with Client(dask_address, timeout=60) as client:
        client.wait_for_workers(2, timeout=60)
        convert(source, tmp_path / "a.zarr", size=16, backend="dask", scheduler=dask_address, quiet=True)
        assert same_tree(reference, tmp_path / "a.zarr")
        client.run(
            lambda: setattr(sys.modules["pipeline.conversion.worker"], "software_versions", lambda: {"pillow": "1.0"})
        )
        with pytest.raises(Error, match=r"worker on .*: .* the run's is .*; install the same versions everywhere"):
            convert(source, tmp_path / "b.zarr", size=16, backend="dask", scheduler=dask_address, quiet=True)
    assert not (tmp_path / "b.zarr").exists()


@pytest.mark.filterwarnings("ignore")
def test_wrong_dask_address(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--scheduler tcp://127.0.0.1:1: no Dask scheduler answers there"):
        convert(source, tmp_path / "a.zarr", size=16, backend="dask", scheduler="tcp://127.0.0.1:1", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [None, b"", b"SSH-2.0-OpenSSH_9.2"])
@pytest.mark.parametrize(("name", "scheme"), [("dask", "tcp://"), ("ray", ""), ("ray", "ray://")])
def test_what_listens_is_no_scheduler(
    name: str, scheme: str, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never answers, one that hangs up, and one that talks of other things."""
    pytest.importorskip("distributed" if name == "dask" else "ray")
    monkeypatch.setattr("pipeline.conversion.backends.CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def serve() -> None:
            connection = stack.enter_context(server.accept()[0])
            if answer is not None:
                with contextlib.suppress(OSError):  # the other end may be gone by then
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=address), backend(name, address):
            pass
        thread.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_of_its_own(source: Path, reference: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    convert(source, tmp_path / "a.zarr", size=16, n_jobs=2, backend="dask", quiet=True)
    assert same_tree(reference, tmp_path / "a.zarr")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"--scheduler 127.0.0.1:1: no Ray cluster answers there \(Connection refused\)"),
        ("ray://127.0.0.1:1", r"--scheduler ray://127.0.0.1:1: no Ray cluster answers there \(Connection refused\)"),
        ("head", "--scheduler head: must be HOST:PORT of a running Ray cluster"),
        ("head:0", "--scheduler head:0: must be HOST:PORT of a running Ray cluster"),
    ],
)
def test_wrong_ray_address(source: Path, tmp_path: Path, address: str, message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=message):
        convert(source, tmp_path / "a.zarr", size=16, backend="ray", scheduler=address, quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray(source: Path, reference: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a.zarr", size=16, n_jobs=2, backend="ray", quiet=True)
    assert same_tree(reference, tmp_path / "a.zarr")
