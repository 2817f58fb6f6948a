"""Damaged and hostile stores: one StoreError at once, and `verify` never passes what zarr-python reads otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from stores import as_format_1, make_images, make_store

from pipeline.commands.copy_store import copy_store
from pipeline.commands.verify import verify
from pipeline.errors import Error, StoreError
from pipeline.store import format as format_module
from pipeline.store.attributes import with_digest
from pipeline.store.format import SMALL_ARRAYS
from pipeline.store.metadata import METADATA_BYTES
from pipeline.store.reader import open_store

SECONDS = 10
MEMORY = 4_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return build(tmp_path / "a.zarr")


def build(path: Path) -> Path:
    splits = {"train": (make_images(11), [i % 3 for i in range(11)]), "val": (make_images(3, seed=1), [0, 1, 2])}
    return make_store(path, splits, bad={"train": [4]}, class_ids=["cat", "dog", "eel"])


def files(store: Path) -> list[Path]:
    return sorted(store.rglob("zarr.json"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change metadata; where they have attributes their digest fits again, so that it isn't what is noticed."""
    value = json.loads(path.read_text())
    change(value)
    if value.get("attributes"):
        value["attributes"] = with_digest(value["attributes"])
    path.write_text(json.dumps(value).replace("Infinity", "1e999"))


def open_all(store: Path) -> None:
    opened = open_store(store)
    for name in opened.splits:
        split = opened[name]
        split.labels, split.key(0), split.image(0)


@contextlib.contextmanager
def bounded(seconds: int = SECONDS) -> Iterator[None]:
    """Fail what doesn't end in time."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def set_in(*keys: Any) -> Callable[[Any], None]:
    """A change: walk along the keys but the last and set what the last but one names to the last."""
    *walk, name, value = keys

    def change(metadata: Any) -> None:
        for key in walk:
            metadata = metadata[key]
        metadata[name] = value

    return change


IMAGES = "train/images/zarr.json"
HOSTILE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "endless": (IMAGES, set_in("shape", 0, 2**32)),
    "no slots in a chunk": (IMAGES, set_in("chunk_grid", "configuration", "chunk_shape", 0, 0)),
    "huge chunk": (IMAGES, set_in("chunk_grid", "configuration", "chunk_shape", 0, 2**40)),
    "negative": (IMAGES, set_in("shape", 0, -1)),
    "not whole": (IMAGES, set_in("shape", 0, 11.0)),
    "huge image": (IMAGES, set_in("shape", 1, 2**31)),
    "separator": (IMAGES, set_in("chunk_key_encoding", "configuration", "separator", "/")),
    "type": (IMAGES, set_in("data_type", "int8")),
    "fill": (IMAGES, set_in("fill_value", 1)),
    "truth as fill": (IMAGES, set_in("fill_value", False)),
    "no zarr_format": (IMAGES, lambda m: m.pop("zarr_format")),
    "node": (IMAGES, set_in("node_type", "group")),
    "transformers": (IMAGES, set_in("storage_transformers", [{"name": "x"}])),
    "unknown field": (IMAGES, set_in("more", 1)),
    "codecs": (IMAGES, set_in("codecs", 0)),
    "label type": ("train/labels/zarr.json", set_in("data_type", "uint32")),
    "label order": ("train/labels/zarr.json", set_in("codecs", 0, "configuration", "endian", "big")),
    "label separator": ("train/source_size/zarr.json", set_in("chunk_key_encoding", "configuration", "separator", "/")),
    "label chunks": ("train/labels/zarr.json", set_in("chunk_grid", "configuration", "chunk_shape", 0, 6)),
    "key length": ("train/keys/zarr.json", set_in("shape", 0, 2**50)),
    "no geometry": ("zarr.json", lambda m: m["attributes"].pop("geometry")),
    "geometry": ("zarr.json", set_in("attributes", "geometry", "size", 16)),
    "no such fit": ("zarr.json", set_in("attributes", "geometry", "fit", "{0.__class__}")),
    "no classes": ("zarr.json", lambda m: m["attributes"].pop("class_ids")),
    "classes": ("zarr.json", set_in("attributes", "class_names", "cat")),
    "fewer names": ("zarr.json", set_in("attributes", "class_names", ["cat"])),
    "fewer classes": ("zarr.json", lambda m: m["attributes"].update(class_ids=["a"], class_names=["a"])),
    "an array": ("zarr.json", set_in("node_type", "array")),
    "mean": ("train/zarr.json", set_in("attributes", "mean", [0.5])),
    "std": ("train/zarr.json", set_in("attributes", "std", [0.5, 0.5, 1e999])),
    "valid": ("train/zarr.json", set_in("attributes", "num_valid", 12)),
    "bad": ("train/zarr.json", set_in("attributes", "bad_samples", [4])),
    "no order": ("train/zarr.json", lambda m: m["attributes"].pop("order")),
    "no list of splits": ("zarr.json", lambda m: m["attributes"].pop("splits")),
    "no digests": ("train/zarr.json", set_in("attributes", "sha256", {})),
    "no attributes": ("train/zarr.json", lambda m: m.pop("attributes")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_one_error_at_once(store: Path, name: str) -> None:
    file, change = HOSTILE[name]
    edit(store / file, change)
    with bounded(), pytest.raises(StoreError) as caught:
        open_all(store)
    assert "\n" not in str(caught.value)
    with bounded(), contextlib.suppress(StoreError):  # of the root
        assert not verify(store, quiet=True)["ok"]


@pytest.mark.parametrize("name", ["endless", "no slots in a chunk", "huge chunk", "negative", "huge image"])
@pytest.mark.parametrize("codec", ["zstd", "max"])
def test_hostile_compressed_stores_too(store: Path, tmp_path: Path, name: str, codec: str) -> None:
    file, change = HOSTILE[name]
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    edit(tmp_path / "b.zarr" / file, change)
    with bounded():
        assert not verify(tmp_path / "b.zarr", quiet=True)["ok"]
    with bounded(), pytest.raises(StoreError):
        _ = open_store(tmp_path / "b.zarr")["train"]


def test_an_endless_split_that_its_attributes_confirm(store: Path) -> None:
    edit(store / IMAGES, set_in("shape", 0, 2**32))
    edit(store / "train/zarr.json", lambda m: m["attributes"].update(num_samples=2**32, num_valid=2**32 - 1))
    with bounded(), pytest.raises(StoreError, match="missing chunk"):
        _ = open_store(store)["train"]
    with bounded():
        assert not verify(store, quiet=True)["ok"]


def test_a_folder_is_no_compressed_chunk(store: Path, tmp_path: Path) -> None:
    copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    path = tmp_path / "b.zarr" / "train" / "images" / "c.1.0.0.0"
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: missing chunk"):
        _ = open_store(tmp_path / "b.zarr")["train"]


@pytest.mark.parametrize("codec", ["none", "zstd", "max"])
def test_a_huge_chunk_is_neither_allocated_nor_hashed(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path / "a.zarr", {"train": (make_images(11), [0] * 11)}, chunk_images=11)
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    edit(tmp_path / "b.zarr" / IMAGES, set_in("chunk_grid", "configuration", "chunk_shape", 0, 2**40))
    with bounded():
        assert not verify(tmp_path / "b.zarr", quiet=True)["ok"]


@pytest.mark.parametrize("file", ["zarr.json", "train/zarr.json", IMAGES, "train/labels/zarr.json"])
def test_endless_metadata_is_not_read(store: Path, file: str) -> None:
    os.truncate(store / file, METADATA_BYTES + 1)
    with bounded(), pytest.raises(StoreError, match="268,435,457 bytes of metadata"):
        open_all(store)


@pytest.mark.parametrize("text", ["[" * 100_000, "1", "null", '{"attributes": NaN}', "\x00", '{"a": ' * 50_000])
@pytest.mark.parametrize("file", ["zarr.json", "train/zarr.json", IMAGES, "train/labels/zarr.json"])
def test_what_is_no_metadata_is_one_error(store: Path, file: str, text: str) -> None:
    (store / file).write_text(text)
    with bounded(), pytest.raises(StoreError):
        open_all(store)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder", "dangling"])
@pytest.mark.parametrize("file", ["zarr.json", "train/zarr.json", IMAGES, "train/images/c.1.0.0.0", "train/labels/c.0"])
def test_what_is_no_file_is_one_error(store: Path, file: str, kind: str) -> None:
    path = store / file
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    with bounded(), pytest.raises(StoreError):
        if file == "train/zarr.json":
            _ = open_store(store)["train"]  # named, though it is none of the splits now
        open_all(store)
    with bounded(), contextlib.suppress(StoreError):
        assert not verify(store, quiet=True)["ok"]


@pytest.mark.parametrize("label", [-3, -100, 3])
def test_labels_outside_the_classes_are_refused(store: Path, label: int) -> None:
    path = store / "train" / "labels" / "c.0"
    labels = np.fromfile(path, "<i4")
    labels[7] = label
    labels.tofile(path)
    with pytest.raises(StoreError, match=f"slot 7 has label {label}, outside the 3 classes"):
        open_all(store)


def test_another_number_of_good_labels_is_refused(store: Path) -> None:
    path = store / "train" / "labels" / "c.0"
    labels = np.fromfile(path, "<i4")
    labels[7] = -1
    labels.tofile(path)
    with pytest.raises(StoreError, match="num_valid doesn't fit"):
        _ = open_store(store)["train"].valid_slots


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (IMAGES, set_in("chunk_key_encoding", "configuration", "separator", "/")),
        (IMAGES, set_in("codecs", 0, "configuration", "index_location", "start")),
        ("train/labels/zarr.json", set_in("data_type", "uint32")),
        ("train/labels/zarr.json", set_in("codecs", 0, "configuration", "endian", "big")),
        ("train/keys/zarr.json", set_in("node_type", "group")),
    ],
)
def test_verify_reads_through_zarr_python(
    store: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: Callable[[Any], Any]
) -> None:
    """Where a hole in our own comparison of metadata is made, zarr-python still finds the difference."""
    monkeypatch.setattr(format_module, "check_array_metadata", lambda *_: None)
    edit(store / file, change)
    problems = verify(store, quiet=True)["problems"]
    assert problems
    assert all("zarr-python" in problem for problem in problems)


def test_what_does_not_belong_is_named(store: Path) -> None:
    added = ["train/images/c.3.0.0.0", "train/images/c.0", "train/labels/c.1", "train/notes.txt"]
    for name in added:
        (store / name).write_bytes(b"x")
    assert verify(store, quiet=True)["problems"] == [f"{store / name}: not a part of the store" for name in sorted(
        added, key=lambda name: (name.count("/"), name))]  # fmt: skip


def test_consolidated_metadata_is_named(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(store)
    problems = verify(store, quiet=True)["problems"]
    assert problems
    assert all("consolidated_metadata" in problem for problem in problems)


def test_opening_reads_no_small_arrays(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromfile", None)
    assert open_store(store)["train"].num_samples == 11


def test_numpy_integers_are_slots(tmp_path: Path) -> None:
    images = make_images(300, size=16)
    split = open_store(make_store(tmp_path / "b.zarr", {"train": (images, [0] * 300)}, chunk_images=300))["train"]
    for number in (np.int16(130), np.uint8(255), np.int64(7)):
        assert np.array_equal(split.image(number), images[int(number)])
        assert split.key(number) == split.key(int(number))
    with pytest.raises(TypeError):
        split.image(1.0)  # type: ignore[arg-type]


def test_a_relative_path_survives_another_working_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    opened = open_store(store.name)
    split = opened["train"]
    monkeypatch.chdir("/")
    assert opened["val"].image(1).any()
    assert pickle.loads(pickle.dumps(split)).image(1).any()


# Fuzzing: whatever a changed zarr.json does, one line comes back at once, and what passes reads the same.


def readings(store: Path) -> list[np.ndarray]:
    """What zarr-python reads, as anybody would open it."""
    group: Any = zarr.open_group(store, mode="r")
    return [group[f"{name}/{array}"][...] for name in ("train", "val") for array in ("images", *SMALL_ARRAYS)]


def same_readings(store: Path, expected: list[np.ndarray]) -> bool:
    try:
        found = readings(store)
    except Exception:
        return False
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def passes(store: Path) -> bool:
    with bounded():
        with contextlib.suppress(Error):
            open_all(store)
        try:
            return bool(verify(store, quiet=True)["ok"])
        except Error:
            return False


def flip_bits(path: Path, rng: np.random.Generator) -> bytes:
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    return bytes(data)


def mutate(path: Path, rng: np.random.Generator) -> bytes:
    """The file with one value anywhere in it replaced, removed, doubled or renamed, or with some bytes changed."""
    if rng.random() < 0.2:
        data = bytearray(path.read_bytes())
        for _ in range(int(rng.integers(1, 4))):
            data[rng.integers(len(data))] = int(rng.integers(256))
        return bytes(data[: int(rng.integers(len(data)))] if rng.random() < 0.2 else data)
    value = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    node, key = places[rng.integers(len(places))]
    attributes = value.get("attributes")
    numbers = [0, -1, 1, 2**31, 2**32, 2**63, 10**400, 1.5, -0.0]
    others = [*numbers, True, None, "", "x" * 1000, "/", [], {}, [0] * 5, {"name": "bytes"}]
    match rng.integers(4):
        case 0 if isinstance(node, dict):
            del node[key]
        case 1 if isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        case 2 if isinstance(node, list):
            node.insert(key, node[key])
        case _:
            node[key] = others[rng.integers(len(others))]
    if attributes and attributes is value.get("attributes"):  # else their digest alone would notice everything
        value["attributes"] = with_digest(attributes)
    return json.dumps(value).encode()


def fuzz(store: Path, change: Callable[[Path, np.random.Generator], bytes], count: int) -> tuple[int, list[str]]:
    """(how many changed stores passed, those of them that zarr-python reads otherwise)."""
    warnings.simplefilter("ignore")
    expected, rng = readings(store), np.random.default_rng(0)
    passed, wrong = 0, []
    for number in range(count):
        path = files(store)[rng.integers(len(files(store)))]
        good = path.read_bytes()
        changed = change(path, rng)
        path.write_bytes(changed)
        if passes(store):
            passed += 1
            if not same_readings(store, expected):
                wrong.append(f"{number} {path.relative_to(store)}: {changed!r}")
        path.write_bytes(good)
    return passed, wrong


@pytest.mark.parametrize("flips", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_no_flipped_bit_passes(tmp_path: Path, flips: int) -> None:
    store = build(tmp_path / "a.zarr")
    assert fuzz(store, flip_bits, flips) == (0, [])
    assert fuzz(as_format_1(store), flip_bits, flips // 2)[1] == []


@pytest.mark.slow
def test_a_thousand_mutations(tmp_path: Path) -> None:
    code = f"import test_hostile_stores as t; from pathlib import Path; t.limited({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, env=_environment(), timeout=280)


def _environment() -> dict[str, str]:
    tests = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}:{Path(__file__).parent}"}


def limited(folder: str) -> None:
    """Run in a process of its own: the memory bound would outlive the test."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    store = build(Path(folder) / "a.zarr")
    assert fuzz(store, mutate, 700)[1] == []
    assert fuzz(as_format_1(store), mutate, 300)[1] == []
