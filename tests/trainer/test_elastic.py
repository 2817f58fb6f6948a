"""A rank that is killed, and a host that is cut off: torchrun restarts, and training goes on without a gap."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from training_runs import (
    ROOT,
    SMALL,
    TORCHRUN,
    checkpoint,
    epochs_done,
    flags,
    metrics,
    own_lines,
    quadrant_store,
    torchrun,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# With torchrun's default a restarted gloo group may find the addresses of the ended one in the shared store.
ENV = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
FIELDS = {"epochs": 120, "checkpoint_every": 3, "pad": 1, "flip": 0.5, "lr": 0.1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrant_store(tmp_path_factory.mktemp("data") / "quadrants.zarr", val=5)


def workers(torchrun_pid: int) -> dict[int, psutil.Process]:
    """Rank -> process."""
    found = {}
    for child in psutil.Process(torchrun_pid).children():
        with contextlib.suppress(psutil.Error, KeyError):
            found[int(child.environ()["RANK"])] = child
    return found


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def model(out: Path) -> dict[str, torch.Tensor]:
    state = checkpoint(out)
    return state["model"]


def test_a_killed_rank_is_replaced_and_nothing_is_lost(store: Path, tmp_path: Path) -> None:
    fields = {**SMALL, **FIELDS, "data": store, "timeout": 20}
    whole = torchrun(2, {**fields, "out": tmp_path / "whole"}, env=ENV)
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "killed"
    command = [str(TORCHRUN), "--nproc-per-node=2", "--max-restarts=2", "trainer/main.py", *flags(**fields, out=out)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for victim, epochs in ((1, 30), (0, 70)):
            wait_until(lambda epochs=epochs: epochs_done(out) >= epochs)  # type: ignore[misc]
            workers(process.pid)[victim].send_signal(signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    assert stdout.count("resuming from") == 2
    assert any("lost contact with another rank" in line for line in own_lines(stderr)) or "SIGTERM" in stderr
    assert [line["epoch"] for line in metrics(out)] == list(range(1, FIELDS["epochs"] + 1))  # type: ignore[operator]
    for mine, wanted in zip(metrics(out), metrics(tmp_path / "whole"), strict=True):
        assert (mine["step"], mine["train_loss"], mine["val_loss"]) == (
            wanted["step"],
            wanted["train_loss"],
            wanted["val_loss"],
        )
    for name, value in model(tmp_path / "whole").items():
        assert torch.equal(model(out)[name], value)


def test_ranks_end_when_torchrun_is_killed(store: Path, tmp_path: Path) -> None:
    """With a checkpoint of the step that they were at, and without holding the folder."""
    out = tmp_path / "run"
    fields = {**SMALL, **FIELDS, "data": store, "epochs": 2000, "checkpoint_every": 10**6, "timeout": 60, "out": out}
    command = [str(TORCHRUN), "--nproc-per-node=2", "trainer/main.py", *flags(**fields)]
    with subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_until(lambda: epochs_done(out) >= 5)
        ranks = workers(process.pid)
        assert len(ranks) == 2
        process.kill()
        try:
            wait_until(lambda: all(map(ended, ranks.values())), 20)
        finally:
            for rank in ranks.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
        assert process.stderr is not None
        assert b"stopped by SIGTERM after step" in process.stderr.read()
    state = checkpoint(out)
    assert state["step"] >= 8 * 5
    done = state["step"] // 8
    again = torchrun(2, {**fields, "epochs": done + 1, "resume": "auto"}, env=ENV)
    assert again.returncode == 0, again.stderr
    assert epochs_done(out) == done + 1


RANK_THAT_HANGS = """
import signal, time
from trainer import main
main.AGENT_GRACE_SECONDS = 0.5
signal.signal(signal.SIGTERM, signal.SIG_IGN)
main._end_with_agent()
print("ready", flush=True)
time.sleep(120)
"""
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_that_hangs_ends_too_when_torchrun_is_killed() -> None:
    command = [sys.executable, "-c", AGENT, RANK_THAT_HANGS]
    env = {**ENV, "TORCHELASTIC_RUN_ID": "none"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        (rank,) = psutil.Process(agent.pid).children()
        agent.kill()
        try:
            wait_until(lambda: ended(rank), 20)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


HOSTS = {"einet-a": "10.77.0.1", "einet-b": "10.77.0.2"}


@pytest.fixture
def network() -> Iterator[None]:
    """Two network namespaces joined by a pair of virtual interfaces, as two hosts on one file system."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")

    def remove() -> None:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)

    remove()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "veth-a", "netns", "einet-a", "type", "veth", "peer", "name", "veth-b", "netns", "einet-b")
        for host, address in HOSTS.items():
            link = f"veth-{host[-1]}"
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove()
        pytest.skip(f"network namespaces aren't permitted: {error.stderr.decode().strip()}")
    yield
    remove()


def start_host(host: str, options: list[str], fields: dict[str, Any], log: Path) -> subprocess.Popen[bytes]:
    env = {**ENV, "GLOO_SOCKET_IFNAME": f"veth-{host[-1]}"}
    command = ["ip", "netns", "exec", host, str(TORCHRUN), *options, "trainer/main.py", *flags(**fields)]
    with open(log, "wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def end(process: subprocess.Popen[bytes]) -> None:
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            one.kill()
    process.wait()


def test_a_host_that_joins_and_is_cut_off(store: Path, tmp_path: Path, network: None) -> None:
    """One host trains, another joins, and is cut off; the first goes on alone. The same global batches throughout."""
    out = tmp_path / "run"
    fields = {**SMALL, **FIELDS, "data": store, "out": out, "timeout": 10, "epochs": 1500}
    options = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=cut-off",
        f"--rdzv-endpoint={HOSTS['einet-a']}:29400",
    ]
    processes = {}
    try:
        for host, address in HOSTS.items():
            conf = f"is_host={str(host == 'einet-a').lower()},last_call_timeout=5"
            more = [f"--rdzv-conf={conf}", f"--local-addr={address}"]
            processes[host] = start_host(host, options + more, fields, tmp_path / f"{host}.log")
            ranks = len(processes)
            wait_until(lambda ranks=ranks: f"{ranks} x cpu" in logs(tmp_path), 240)  # type: ignore[misc]
            before = epochs_done(out)
            wait_until(lambda before=before: epochs_done(out) > before + 10, 240)  # type: ignore[misc]
        ip("-n", "einet-b", "link", "set", "veth-b", "down")
        before = epochs_done(out)
        wait_until(lambda: epochs_done(out) > before + 30, 400)
        text = logs(tmp_path)
        assert text.count("global batch 16 = 1 rank x 16 samples") == 2
        assert text.count("global batch 16 = 2 ranks x 8 samples") == 1
        assert text.count("resuming from") == 2
        assert "stopped by SIGTERM" in text  # to regroup, after a checkpoint
        assert "lost contact with another rank" in text
        epochs = [line["epoch"] for line in metrics(out)]
        assert epochs == list(range(1, len(epochs) + 1))
        assert all(line["step"] == 8 * line["epoch"] for line in metrics(out))
    finally:
        for process in processes.values():
            end(process)
