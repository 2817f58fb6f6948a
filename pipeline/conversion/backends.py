"""Where chunk jobs run: joblib's own backends, on one machine or a cluster."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import joblib

from pipeline.errors import Error, UsageError
from pipeline.text import one_line

BACKENDS = ("loky", "dask", "ray")
PARENT_POLL_SECONDS = 0.5
CONNECT_SECONDS = 8
END_SECONDS, DEATH_SECONDS = 10.0, 0.5
"""Workers have so long to end, all of them together; then each is killed, and has so long to die."""
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""What a gRPC client, such as Ray's, sends first: the preface and empty settings."""
WORKER_DEATHS = {"TerminatedWorkerError", "KilledWorker", "WorkerCrashedError", "RayActorError"}
"""Names of what loky, Dask and Ray raise when a worker died; only the first is a package that is always there."""
Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerDiedError(Error):
    """A worker process ended while it had a job."""


@contextlib.contextmanager
def backend(name: str, scheduler: str | None) -> Iterator[None]:
    """Choose joblib's backend for the block: `loky` (processes here), `dask` or `ray`.

    `scheduler` is the address of a Dask scheduler (`tcp://host:8786`) or Ray cluster, else a local one is started.
    """
    options: dict[str, Any] = {}
    started: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if name == "loky":
        options = {"initializer": end_with_parent, "initargs": (os.getpid(),)}
    else:
        started = _dask(scheduler) if name == "dask" else _ray(scheduler)
    with started, joblib.parallel_config(backend=name, **options):
        yield


def end_with_parent(parent_pid: int) -> None:
    """Let this worker process end when its parent does, and by nothing else.

    Loky's otherwise live on for minutes, with queued jobs. Ctrl-C goes to the parent, which ends its workers; one that
    is interrupted itself may say so with a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("PYTHONFAULTHANDLER", "0")  # no stacks on the terminal; what a worker died of is found out

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait until the block's end, also in processes that start in it, until they ignore it themselves."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which would unblock it, started later (until Python 3.13)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _dask(scheduler: str | None) -> Iterator[None]:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UsageError("--backend dask needs the extra: pip install 'efficient-imagenet[dask]'") from None
    with contextlib.ExitStack() as stack:
        if scheduler is None:
            cluster = stack.enter_context(LocalCluster(threads_per_worker=1, processes=True, dashboard_address=None))
            stack.enter_context(Client(cluster))
        else:
            if scheduler.startswith("tcp://") or "://" not in scheduler:
                # A scheduler's first 8 bytes are the number of parts of a message.
                _check_answers("Dask scheduler", scheduler, b"", lambda start: int.from_bytes(start[:8], "little") < 99)
            try:
                stack.enter_context(Client(scheduler, timeout=CONNECT_SECONDS))
            except (OSError, ValueError, TimeoutError) as error:
                raise _no_answer("Dask scheduler", scheduler, one_line(error)[:200]) from None
        yield


@contextlib.contextmanager
def _ray(scheduler: str | None) -> Iterator[None]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise UsageError("--backend ray needs the extra: pip install 'efficient-imagenet[ray]'") from None
    if scheduler not in (None, "auto") and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        # The fourth byte of a gRPC server's first frame is its type: settings.
        _check_answers("Ray cluster", scheduler, HTTP2_START, lambda start: start[3:4] == b"\4")
    register_ray()
    started = not ray.is_initialized()
    if started:
        dashboard = False if scheduler is None else None
        try:
            ray.init(address=scheduler, log_to_driver=False, include_dashboard=dashboard, logging_level=logging.ERROR)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            reason = f"{one_line(error)[:200]}; where it wants a token, set RAY_AUTH_MODE=token"
            raise _no_answer("Ray cluster", scheduler, reason) from None
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def _check_answers(what: str, scheduler: str, greeting: bytes, is_right: Callable[[bytes], bool]) -> None:
    """Raise UsageError where HOST:PORT sends no bytes, or none that `is_right`: the libraries would wait for ever."""
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--scheduler {scheduler}: must be HOST:PORT of a running {what}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            connection.sendall(greeting)
            start = connection.recv(9)
    except OSError as error:
        raise _no_answer(what, scheduler, error.strerror or one_line(error)) from None
    if not start or not is_right(start):
        raise _no_answer(what, scheduler, "something else listens")


def _no_answer(what: str, scheduler: str | None, reason: str) -> UsageError:
    return UsageError(f"--scheduler {scheduler}: no {what} answers there ({reason}); check the address")


def run_jobs(name: str, n_jobs: int, function: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Run `function` over the jobs in the backend of the surrounding block; results come in the order they finish.

    `n_jobs` is as joblib counts; `loky` starts no more workers than there are jobs.

    Raises:
        WorkerDiedError: a worker died; results that came before stay valid.
        Exception: whatever a job raised.
    """
    if name == "loky":
        n_jobs = max(1, min(joblib.effective_n_jobs(n_jobs), len(jobs)))
    # Ray's joblib backend can only return lists, so its progress comes at the end.
    return_as = "list" if name == "ray" else "generator_unordered"
    parallel = joblib.Parallel(n_jobs=n_jobs, batch_size=1, pre_dispatch="2*n_jobs", return_as=return_as)
    try:
        # Here the workers start.
        with _interrupts_wait() if name == "loky" and n_jobs != 1 else contextlib.nullcontext():
            results = parallel(joblib.delayed(function)(job) for job in jobs)
        if name == "loky" and n_jobs != 1:
            bound_joins(joblib.externals.loky.get_reusable_executor(reuse=True))
        yield from results
    except Exception as error:
        if WORKER_DEATHS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise
        raise WorkerDiedError(
            "a worker process died (killed, or out of memory?); rerun the same command to go on, with fewer --n-jobs "
            "if memory is short"
        ) from None


def stop_workers(name: str) -> None:
    """End loky's idle workers, which would otherwise wait for more jobs for a while."""
    if name == "loky":
        executor = joblib.externals.loky.get_reusable_executor(reuse=True)
        bound_joins(executor)
        executor.shutdown(wait=True)


def bound_joins(executor: Any) -> None:
    """Let nobody wait for ever for the end of a loky executor's workers, as loky and the end of Python do otherwise.

    A worker may hang in a library that has threads of its own, or, where no signal helps, in the I/O of a dead disk.
    """
    deadline: list[float] = []
    for process in list(executor._processes.values()):
        process.join = functools.partial(_join, process, deadline)


def _join(process: Any, deadline: list[float], timeout: float | None = None) -> None:
    """As `Process.join`; without a timeout up to a deadline, which the first call sets."""
    join = functools.partial(type(process).join, process)
    if timeout is not None:
        join(timeout)
        return
    deadline[:] = deadline or [time.monotonic() + END_SECONDS]
    join(max(DEATH_SECONDS, deadline[0] - time.monotonic()))
    if process.is_alive():
        with contextlib.suppress(OSError):
            os.kill(process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        join(DEATH_SECONDS)
