"""What `make` passes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("raw", ["it's food", 'say "cheese"', "a b;c (1), d"])
def test_any_path_can_be_converted(tmp_path: Path, raw: str) -> None:
    """The virtual environment is one whose python writes its arguments down."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    python.chmod(0o755)
    (tmp_path / ".setup").touch()
    make = ["make", "--no-print-directory", "dataset", f"VENV={tmp_path}", f"RAW={raw}", f"OUT={raw}.zarr", "SIZE=8"]
    done = subprocess.run(make, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arguments").read_text().splitlines()[2:5] == ["convert", raw, f"{raw}.zarr"]
