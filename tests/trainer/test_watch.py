"""Signals: they end a run in order, and a late one doesn't cut off its last words."""

import os
import signal
import subprocess
import sys

import pytest

from trainer.watch import Signals

LATE = """
import os, signal
from trainer.watch import Signals, Stopped
try:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        raise Stopped(signals.received, 7)
except Stopped as stopped:
    os.kill(os.getpid(), signal.SIGTERM)  # another rank had its own earlier, so this one comes when all is over
    print(stopped)
"""


def test_signals_are_noted_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_comes_too_late() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stopped by SIGTERM after step 7, with a checkpoint; go on with --resume auto\n"


def test_another_error_leaves_sigterm_deadly() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), Signals():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) is before
