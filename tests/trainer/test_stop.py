"""Signals: they end a run in order, and a late one doesn't cut off its last words."""

import os
import signal
import subprocess
import sys

import pytest

from trainer.stop import Signals

LATE = """
import os, signal
from trainer.stop import Signals, Stopped
try:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        raise Stopped(signals.received, 7)
except Stopped as stopped:
    os.kill(os.getpid(), signal.SIGTERM)  # another rank had its own earlier, so this one comes when all is over
    print(stopped)
"""


SIGNALS = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2", "XCPU")]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_noted_and_handlers_come_back(number: signal.Signals) -> None:
    def handler(*_: object) -> None:
        raise AssertionError("the handler of before")

    before = signal.signal(number, handler)
    try:
        with Signals() as signals:
            assert signals.received == 0
            os.kill(os.getpid(), number)
            assert signals.received == number
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_sigterm_comes_too_late() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stopped by SIGTERM after step 7, with a checkpoint; go on with --resume auto\n"


def test_another_error_leaves_sigterm_deadly() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), Signals():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) is before
