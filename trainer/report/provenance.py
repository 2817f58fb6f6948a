"""Where a run came from: the code's git commit and the installation, one line of `starts.jsonl` per start."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.report.records import STARTS, append_json_line

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("efficient-imagenet", "torch", "torchvision", "numpy")


def git_state(root: Path = ROOT) -> tuple[str, bool] | None:
    """(commit, whether tracked files differ from it) of the checkout whose root this is; None where it is none."""
    try:
        top, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top).resolve() != root.resolve():
            return None  # installed into some other project's folder
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def record_start(folder: Path, **facts: Any) -> None:
    """Append a line to the folder's starts.jsonl.

    Args:
        folder: the run's folder.
        facts: what the caller knows: `step`, `world_size`, `global_batch`, `device`, ...

    Raises:
        OSError: it can't be written.
    """
    state = git_state()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    line = {
        **facts,
        "git_commit": state and state[0],
        "git_modified": state and state[1],
        "command": sys.argv,
        "python": platform.python_version(),
        "software": versions,
    }
    append_json_line(folder / STARTS, line)
