"""The check for machines with a GPU, in a form that a CPU does in seconds."""

from __future__ import annotations

import sys

import pytest

from trainer import gpu_check

SMALL = ["--model=resnet_small", "--size=16", "--crop=12", "--batch-size=8", "--images=40", "--steps=3"]


@pytest.mark.parametrize(
    ("threshold", "code", "word"), [("0", 0, "passed"), ("1000", 1, "FAILED: loader, 1 thread(s)")]
)
def test_reduced_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threshold: str, code: int, word: str
) -> None:
    args = [*SMALL, "--threads=[1, 2]", "--device=cpu", "--compile=false", f"--threshold={threshold}"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *args])
    assert gpu_check.main() == code
    text = capsys.readouterr().out
    for wanted in (
        "resident batches",
        "loader, 2 thread(s)",
        "1 core",
        "data wait",
        "rrc on the device",
        "peak memory",
    ):
        assert wanted in text
    assert text.splitlines()[-1].startswith(word)


def test_no_such_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device=xpu"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.startswith("gpu-check: --device xpu: not available")
