import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from folders import make_folder, make_image
from stores import edit_attributes

from pipeline import convert, open_store
from pipeline.commands.copy_store import copy_store
from pipeline.commands.verify import result_text, verify
from pipeline.errors import UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("source"), {"train": {"a": 60, "b": 40}, "val": {"a": 3, "b": 2}})
    (folder / "train" / "a" / "005.jpg").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def pristine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store") / "a.zarr"
    convert(source, store, size=16, n_jobs=1, on_error="skip", quiet=True)
    return store


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "a.zarr"))


def check(store: Path) -> list[str]:
    result = verify(store, quiet=True)
    assert result["ok"] == (not result["problems"])
    return result["problems"]


def test_a_sound_store_passes(store: Path, source: Path) -> None:
    assert check(store) == []
    result = verify(store, against=source, sample=0, quiet=True)
    assert result["problems"] == []
    assert result["splits"]["train"] == {"num_samples": 100, "num_valid": 99, "chunks": 50, "compared": 100}
    assert verify(store, against=source, sample=7, quiet=True)["splits"]["train"]["compared"] == 7


@pytest.mark.parametrize("chunk", [0, 17, 49])
def test_one_flipped_bit(store: Path, chunk: int) -> None:
    path = store / "train" / "images" / f"c.{chunk}.0.0.0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
    assert check(store) == [f"{path}: altered (SHA-256 differs from the one in digests)"]


def test_missing_short_and_swapped_chunks(store: Path) -> None:
    images = store / "train" / "images"
    (images / "c.3.0.0.0").unlink()
    (images / "c.5.0.0.0").write_bytes((images / "c.5.0.0.0").read_bytes()[:-1])
    os.rename(images / "c.7.0.0.0", images / "x")
    os.rename(images / "c.8.0.0.0", images / "c.7.0.0.0")
    os.rename(images / "x", images / "c.8.0.0.0")
    problems = check(store)
    assert f"{images}/c.3.0.0.0: missing chunk" in problems
    assert f"{images}/c.5.0.0.0: short chunk, 1,571 of 1,572 bytes" in problems
    for chunk in (7, 8):
        assert f"{images}/c.{chunk}.0.0.0: altered (SHA-256 differs from the one in digests)" in problems


@pytest.mark.parametrize(
    ("name", "file"), [("labels", "c.0"), ("keys", "c.0"), ("digests", "c.0.0"), ("source_size", "c.0.0")]
)
def test_altered_small_arrays(store: Path, name: str, file: str) -> None:
    path = store / "train" / name / file
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.write_bytes(data)
    assert any(problem.startswith(f"{store / 'train' / name}: altered") for problem in check(store))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda attrs: attrs.update(num_valid=100), "num_valid doesn't fit the labels"),
        (lambda attrs: attrs.update(bad_samples=[]), "bad_samples doesn't list exactly the slots labelled -1"),
        (lambda attrs: attrs.update(sample_fingerprint="0" * 64), "sample_fingerprint doesn't fit labels and keys"),
        (lambda attrs: attrs.update(mean=[0.5, 0.5, 0.5]), "mean or std doesn't fit the pixels"),
    ],
)
def test_altered_attributes(store: Path, change: Callable[[dict], None], message: str) -> None:  # type: ignore[type-arg]
    edit_attributes(store / "train" / "zarr.json", change)
    assert check(store) == [f"{store / 'train' / 'zarr.json'}: {message}"]


def test_strangers_are_named(store: Path) -> None:
    (store / "notes.txt").touch()
    assert check(store) == [f"{store / 'notes.txt'}: not a part of the store"]


def test_another_source_differs(store: Path, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "source"))
    make_image(1234).save(other / "train" / "b" / "007.jpg")
    problems = verify(store, against=other, sample=0, quiet=True)["problems"]
    assert len(problems) == 1
    assert "b/007.jpg: pixels differ from the source's by up to" in problems[0]
    make_image(5).save(other / "train" / "a" / "005.jpg")
    problems = verify(store, against=other, sample=0, quiet=True)["problems"]
    assert any("a/005.jpg: bad in the store, good in the source" in problem for problem in problems)
    os.rename(other / "train" / "b" / "007.jpg", other / "train" / "a" / "777.jpg")
    problems = verify(store, against=other, sample=0, quiet=True)["problems"]
    assert any("b/007.jpg: not in" in problem for problem in problems)


def test_a_compressed_copy_is_verified_too(store: Path, source: Path, tmp_path: Path) -> None:
    copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    assert verify(tmp_path / "b.zarr", against=source, sample=5, quiet=True)["problems"] == []
    path = tmp_path / "b.zarr" / "train" / "images" / "c.2.0.0.0"
    data = bytearray(path.read_bytes())
    data[-5] ^= 255
    path.write_bytes(data)
    problems = verify(tmp_path / "b.zarr", quiet=True)["problems"]
    assert len(problems) == 1
    assert problems[0].startswith(str(path))


def test_digests_are_of_the_bytes_on_disk(store: Path) -> None:
    digests = np.fromfile(store / "train" / "digests" / "c.0.0", np.uint8)
    assert digests.size == 50 * 32


def test_the_wrong_source_says_which_is_expected(store: Path, tmp_path: Path) -> None:
    expected = (
        f"expected is the SRC that {store} was converted from: a source of kind folder with a split train of "
        f"100 samples, such as {open_store(store)['train'].key(0).decode()}"
    )
    other = make_folder(tmp_path / "other", {"train": {"bus": 2}})
    wrong = {
        other: "none of the samples of train is there (2 others, such as bus/000.jpg)",
        tmp_path / "nowhere": f"{tmp_path / 'nowhere'}: no such file or folder; check the path",
    }
    for against, message in wrong.items():
        with pytest.raises(UsageError) as caught:
            verify(store, against=against, quiet=True)
        assert str(caught.value) == f"--against {against}: {message}; {expected}"


def test_the_wrong_source_is_noticed_before_the_chunks_are_read(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.verify._check_chunks", None)
    other = make_folder(tmp_path / "other", {"train": {"bus": 2}})
    with pytest.raises(UsageError, match="none of the samples of train is there"):
        verify(store, against=other, quiet=True)


def test_a_source_without_the_split(store: Path, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "source"))
    shutil.rmtree(other / "val")
    message = r"no split 'val' \(there are: train\); .*; expected is the SRC that .* a split val of 5 samples"
    with pytest.raises(UsageError, match=message):
        verify(store, against=other, quiet=True)


def test_a_split_that_only_the_source_has_is_noted(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a.zarr", size=8, split="train", n_jobs=1, on_error="skip", quiet=True)
    result = verify(tmp_path / "a.zarr", against=source, sample=1, quiet=True)
    assert result["ok"]
    assert result["notes"] == [f"{source} has a split val that the store lacks"]
    assert f"note: {source} has a split val that the store lacks" in result_text(result).splitlines()
    convert(source / "val", tmp_path / "b.zarr", size=8, split="holdout", n_jobs=1, quiet=True)
    assert verify(tmp_path / "b.zarr", against=source / "val", quiet=True)["notes"] == []  # its only split has no name


def test_a_negative_sample_is_refused(store: Path) -> None:
    with pytest.raises(UsageError, match="--sample -1: must be a number of samples, or 0 for all"):
        verify(store, sample=-1, quiet=True)


def test_other_software_is_named_with_what_was_compared(store: Path, source: Path, tmp_path: Path) -> None:
    old = {"software": {"resizer": "pillow 9.1", "efficient-imagenet": "0.0"}}
    edit_attributes(store / "train" / "zarr.json", lambda attributes: attributes.update(old))
    result = verify(store, against=source, sample=0, quiet=True)
    assert result["ok"]
    assert [note for note in result["notes"] if "pillow 9.1" in note and "compared with resizer" in note]
    other = Path(shutil.copytree(source, tmp_path / "source"))
    for number in (7, 8):
        make_image(1234).save(other / "train" / "b" / f"00{number}.jpg")
    result = verify(store, against=other, sample=0, quiet=True)
    (problem,) = result["problems"]  # one for both
    assert "2 of 100 pictures" in problem
    assert "pillow 9.1" in problem
    assert result["notes"] == []


def test_many_samples_are_compared_in_processes(
    store: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(source, tmp_path / "source"))
    make_image(1234).save(other / "train" / "b" / "007.jpg")
    alone = verify(store, against=other, sample=0, quiet=True)
    started: list[int] = []
    parallel = joblib.Parallel

    def spy(**options: Any) -> Any:
        started.append(options["n_jobs"])
        return parallel(**options)

    monkeypatch.setattr("pipeline.commands.compare.BLOCK_IMAGES", 16)
    monkeypatch.setattr("pipeline.commands.compare.joblib.cpu_count", lambda: 2)
    monkeypatch.setattr("pipeline.commands.compare.joblib.Parallel", spy)
    assert verify(store, against=other, sample=0, quiet=True) == alone
    assert 2 in started


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_threads_are_no_more_than_the_cores_that_may_be_used(store: Path) -> None:
    code = (
        "import os, sys, threading; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from pipeline.commands import verify as module\n"
        "names, real = set(), module.check_chunk\n"
        "module.check_chunk = lambda *a: (names.add(threading.get_ident()), real(*a))[1]\n"
        f"assert module.verify({str(store)!r}, quiet=True)['ok']\n"
        "print(len(names))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


def test_std_may_differ_in_its_last_digit(store: Path) -> None:
    def nudge(attrs: dict[str, Any], digits: float) -> None:
        attrs["std"] = [np.nextafter(value, 1) * digits for value in attrs["std"]]

    edit_attributes(store / "train" / "zarr.json", lambda attrs: nudge(attrs, 1))
    assert check(store) == []
    edit_attributes(store / "train" / "zarr.json", lambda attrs: nudge(attrs, 1 + 1e-12))
    assert len(check(store)) == 1
