"""The run's folder: locks, checkpoints that survive kills, and which one is taken."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pipeline.errors import Error, UsageError
from trainer import run_folder as checkpoint
from trainer.run_folder import LAST, PREVIOUS, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    yield folder
    folder.close()


def state(step: int, floats: int = 1000) -> dict[str, object]:
    return {"step": step, "model": {"weight": torch.full((floats,), float(step))}}


def test_newest_valid_checkpoint_wins(folder: RunFolder) -> None:
    assert folder.find("auto") is None
    for step in (1, 2, 3):
        folder.save(state(step))
    folder.wait()
    found = folder.find("auto")
    assert found is not None
    assert (found[0].name, found[1]["step"]) == (LAST, 3)
    data = bytearray((folder.path / LAST).read_bytes())
    middle = len(data) // 2
    for spoilt in (data[:-50], data[:middle], b"", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]):
        (folder.path / LAST).write_bytes(spoilt)
        found = folder.find("auto")
        assert found is not None
        assert (found[0].name, found[1]["step"]) == (PREVIOUS, 2)
    (folder.path / PREVIOUS).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"last\.pt and .*previous\.pt: damaged"):
        folder.find("auto")


def test_resume_from_paths(folder: RunFolder, tmp_path: Path) -> None:
    folder.save(state(1))
    folder.save(state(2))
    folder.wait()
    for where, step in ((folder.path, 2), (folder.path / LAST, 2), (folder.path / PREVIOUS, 1)):
        other = RunFolder(tmp_path / "other")
        found = other.find(str(where))
        other.close()
        assert found is not None
        assert found[1]["step"] == step
    with pytest.raises(UsageError, match="no checkpoint there"):
        folder.find(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="add --resume auto"):
        folder.find(None)


def test_a_restarted_run_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def restarted_and_found() -> tuple[bool, bool]:
        folder = RunFolder(tmp_path)
        try:
            return folder.restarted, folder.find(None) is not None
        finally:
            folder.close()

    first = RunFolder(tmp_path)
    first.save(state(1))
    first.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted_and_found() == (True, True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    with pytest.raises(UsageError, match="holds a run already"):
        restarted_and_found()
    assert restarted_and_found() == (True, True)  # the same job held it before: machines came or went
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    with pytest.raises(UsageError, match="holds a run already"):
        restarted_and_found()


def test_one_live_run_per_folder(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="another run is writing there"):
        RunFolder(folder.path, wait_seconds=60)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # then it waits for the dying one
    with pytest.raises(UsageError, match="another run is writing there"):
        RunFolder(folder.path, wait_seconds=0.1)
    folder.close()
    RunFolder(folder.path).close()


def test_a_folder_goes_again_where_nothing_was_written(tmp_path: Path) -> None:
    own, found = tmp_path / "own", tmp_path / "found"
    found.mkdir()
    for path, remains in ((own, False), (found, True)):
        folder = RunFolder(path)
        with pytest.raises(UsageError, match="another run is writing there"):
            RunFolder(path)
        assert path.is_dir()
        folder.close()
        folder.close()
        assert path.exists() == remains
    written = RunFolder(own)
    written.save(state(1))
    written.close()
    assert sorted(os.listdir(own)) == [LAST, "lock"]


def test_unwritable_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match=r"--out .*run: can't be written \(Not a directory\)") as caught:
        RunFolder(tmp_path / "file" / "run")
    assert caught.value.exit_code == 1


def test_a_disk_that_is_full_before_the_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(RunFolder, "_remove_temps", no_space)
    with pytest.raises(Error, match=r"--out .*run: can't be written \(No space left on device\); make room there"):
        RunFolder(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_files_are_not_called_damaged(folder: RunFolder, tmp_path: Path) -> None:
    folder.save(state(1), best={"weight": torch.zeros(3)})
    folder.wait()
    text = tmp_path / "notes.txt"
    text.write_text("no checkpoint")
    for path, words in ((folder.path / "best.pt", "weights alone"), (text, "no file of torch's")):
        with pytest.raises(UsageError) as caught:
            folder.find(str(path))
        assert str(caught.value).startswith(f"--resume {path}: not a checkpoint ({words}): use --weights with it")


def test_best_weights_are_adopted_unless_they_are_of_a_later_epoch(folder: RunFolder, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"epoch": 1, "val_top1": 0.5}\n{"epoch": 2, "val_top1": 0.75}\n')
    assert not folder.adopt(old / LAST, 2, 0.75)  # there is none
    (old / "best.pt").write_bytes(b"weights")
    assert not folder.adopt(old / PREVIOUS, 1, 0.5)
    assert not (folder.path / "best.pt").exists()
    assert folder.adopt(old / LAST, 2, 0.75)
    for name in ("best.pt", "metrics.jsonl"):
        assert (folder.path / name).read_bytes() == (old / name).read_bytes()


def test_full_disk_is_one_line_and_keeps_what_is_there(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save(state(1))
    folder.wait()

    def no_space(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint.torch, "save", no_space)
    folder.save(state(2))
    with pytest.raises(Error, match="No space left on device"):
        folder.wait()
    folder.wait()  # said once
    found = folder.find("auto")
    assert found is not None
    assert found[1]["step"] == 1
    assert sorted(os.listdir(folder.path)) == [LAST, "lock"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_random_moments_while_saving(folder: RunFolder) -> None:
    folder.save(state(0))
    folder.wait()
    newest = 0
    for attempt in range(20):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)  # a forked child has no worker threads
            step = newest
            while True:
                step += 1
                folder.save(state(step, floats=300_000))
        time.sleep(0.02 + 0.013 * (attempt % 10))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = folder.find("auto")
        assert found is not None
        assert found[1]["step"] >= newest
        assert torch.equal(found[1]["model"]["weight"].unique(), torch.tensor([float(found[1]["step"])]))
        newest = found[1]["step"]
    assert newest > 0
    folder.close()
    RunFolder(folder.path).close()  # sweeps the leavings
    assert set(os.listdir(folder.path)) <= {LAST, PREVIOUS, "lock"}


def test_checkpoints_need_no_unpickling_of_code(folder: RunFolder) -> None:
    folder.save(state(4))
    folder.wait()
    loaded = torch.load(folder.path / LAST, weights_only=True)
    assert loaded["step"] == 4
