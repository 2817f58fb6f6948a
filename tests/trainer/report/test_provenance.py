from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from trainer.report import provenance
from trainer.report.provenance import git_state, record_start


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_commit_and_whether_it_was_changed(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked").write_text("x")
    assert git_state(checkout) == (commit, False)
    (checkout / "file").write_text("2")
    assert git_state(checkout) == (commit, True)


def test_no_commit_outside_its_own_checkout(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = checkout / "site-packages"
    inside.mkdir()
    assert git_state(inside) is None
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(checkout) is None


def test_each_start_is_a_line(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "git_state", lambda: ("c" * 40, True))
    record_start(tmp_path, step=0, world_size=2)
    record_start(tmp_path, step=7, world_size=1)
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["world_size"]) for line in lines] == [(0, 2), (7, 1)]
    assert lines[0]["git_commit"] == "c" * 40
    assert lines[0]["git_modified"] is True
    assert "numpy" in lines[0]["software"]
