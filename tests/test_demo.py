"""The demo's way of running commands: whoever stops it gets one line, and no child stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DATA = Path(__file__).resolve().parent.parent / "data"

# `main` is one command here, which starts a child of its own and says both process ids.
SCRIPT = """
import sys
sys.path.insert(0, {data!r})
import demo
demo.END_SECONDS = 1.0
demo.main = lambda: demo.run("python", "-c", {child!r})
demo.run_demo()
"""
CHILD = """
import os, signal, subprocess, sys, time
grandchild = subprocess.Popen(["sleep", "600"])
def stopped(*_):
    sys.stderr.write("a traceback of many lines\\n" * 50)
    sys.exit(130)
signal.signal(signal.SIGINT, {handler})
sys.stderr.write("a message\\n")
sys.stderr.flush()
print("started", os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
"""
ORDERLY, STUBBORN = "stopped", "signal.SIG_IGN"


@pytest.mark.parametrize("handler", [ORDERLY, STUBBORN], ids=["a child that ends", "a child that doesn't"])
@pytest.mark.parametrize(
    ("signum", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted; run the same command again\n"),
        (signal.SIGTERM, 143, "terminated; run the same command again\n"),
    ],
)
def test_a_stopped_demo_ends_its_children(handler: str, signum: int, code: int, line: str) -> None:
    script = SCRIPT.format(data=str(DATA), child=CHILD.format(handler=handler))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = next([int(word) for word in text.split()[1:]] for text in process.stdout if text.startswith("started"))
        children = [psutil.Process(pid) for pid in pids]
        assert process.stderr is not None
        assert process.stderr.readline() == "a message\n"
        os.kill(process.pid, signum)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (code, line)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_a_failed_command_ends_the_demo_with_its_code() -> None:
    script = SCRIPT.format(data=str(DATA), child="raise SystemExit('why')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "why\n")
