"""Where chunk jobs run: joblib's own backends, on one machine or a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import TypeVar

import joblib

from pipeline.errors import Error, UsageError

BACKENDS = ("loky", "dask", "ray")
PARENT_POLL_SECONDS = 0.5
CONNECT_SECONDS = 10
Job = TypeVar("Job")
Result = TypeVar("Result")


@contextlib.contextmanager
def backend(name: str, scheduler: str | None) -> Iterator[None]:
    """Choose joblib's backend for the block.

    Args:
        name: `loky` (processes here), `dask` or `ray`.
        scheduler: address of a running Dask scheduler (`tcp://host:8786`) or Ray cluster; without it a local one is
            started.

    Raises:
        UsageError: an unknown name, a package that isn't installed, a scheduler that doesn't answer.
    """
    if name not in BACKENDS:
        raise UsageError(f"--backend {name}: must be one of {', '.join(BACKENDS)}")
    if name == "loky":
        if scheduler:
            raise UsageError("--scheduler goes with --backend dask or ray")
        with joblib.parallel_config(backend="loky", initializer=end_with_parent, initargs=(os.getpid(),)):
            yield
    elif name == "dask":
        with _dask(scheduler), joblib.parallel_config(backend="dask"):
            yield
    else:
        with _ray(scheduler), joblib.parallel_config(backend="ray"):
            yield


def end_with_parent(parent_pid: int) -> None:
    """Let this worker process end when its parent does, and by nothing else.

    Loky's otherwise live on for minutes, with queued jobs. Ctrl-C goes to the parent, which ends its workers; one that
    is interrupted itself may say so with a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

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
            try:
                stack.enter_context(Client(scheduler, timeout=CONNECT_SECONDS))
            except (OSError, ValueError, TimeoutError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UsageError(f"--scheduler {scheduler}: no Dask scheduler answers there ({reason})") from None
        yield


@contextlib.contextmanager
def _ray(scheduler: str | None) -> Iterator[None]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise UsageError("--backend ray needs the extra: pip install 'efficient-imagenet[ray]'") from None
    if scheduler not in (None, "auto"):
        _check_listening(scheduler)
    register_ray()
    started = not ray.is_initialized()
    if started:
        dashboard = False if scheduler is None else None
        try:
            ray.init(address=scheduler, log_to_driver=False, include_dashboard=dashboard, logging_level=logging.ERROR)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"--scheduler {scheduler}: no Ray cluster lets this machine in there ({str(error)[:200]}); where it "
                "wants a token, set RAY_AUTH_MODE=token"
            ) from None
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def _check_listening(scheduler: str) -> None:
    """Raise UsageError where nothing listens at HOST:PORT: Ray itself tries for minutes, and ends the process."""
    host, _, port = scheduler.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--scheduler {scheduler}: must be HOST:PORT of a running Ray cluster, or auto")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(f"--scheduler {scheduler}: no Ray cluster answers there ({error.strerror or error})") from None


def run_jobs(name: str, n_jobs: int, function: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Run `function` over the jobs in the backend of the surrounding block; results come in the order they finish.

    Args:
        name: of the backend.
        n_jobs: workers as joblib counts them, -1 for one per core; `loky` starts no more than there are jobs.
        function: what is done with a job; it is sent to the workers.
        jobs: what to do.

    Raises:
        Error: a worker died; results that came before stay valid.
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
        yield from results
    except joblib.externals.loky.process_executor.TerminatedWorkerError:
        raise Error(
            "a worker process died (killed, or out of memory?); rerun the same command to go on, with fewer --n-jobs "
            "if memory is short"
        ) from None
