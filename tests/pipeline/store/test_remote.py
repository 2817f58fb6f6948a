"""Stores at URLs: what is read, and how often; fsspec's memory stands for a bucket."""

import errno
import functools
import http.server
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from folders import same_tree
from stores import make_images, three_class_store

from pipeline import open_store
from pipeline.cli import main
from pipeline.commands.copy_store import copy_store
from pipeline.commands.info import store_info
from pipeline.commands.report import default_path, write_report
from pipeline.commands.verify import verify
from pipeline.commands.warm import warm
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.store import reader
from pipeline.store.format import chunk_name
from pipeline.store.metadata import read_metadata
from pipeline.store.remote import RemotePath, place
from pipeline.store.transfer import failures
from trainer.dataset import RankPartitionedDataset

NUM, K, SIZE = 22, 4, 16
IMAGE_BYTES = SIZE * SIZE * 3


@pytest.fixture
def images() -> np.ndarray:
    return make_images(NUM, size=SIZE)


@pytest.fixture
def store(tmp_path: Path, images: np.ndarray) -> Path:
    return three_class_store(tmp_path / "a.zarr", images, K)


def put(store: Path, url: str) -> str:
    for file in store.rglob("*"):
        if file.is_file():
            RemotePath(f"{url}/{file.relative_to(store)}").write_bytes(file.read_bytes())
    return url


@pytest.fixture
def remote(store: Path, url: str) -> str:
    return put(store, url)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(name, bytes) of everything that is read from fsspec's memory."""
    done: list[tuple[str, int]] = []
    system = type(fsspec.filesystem("memory"))
    cat_file = system.cat_file

    def counted(self: Any, path: str, *args: Any, **options: Any) -> bytes:
        data = cat_file(self, path, *args, **options)
        done.append((path.partition(".zarr/")[2], len(data)))
        return data

    monkeypatch.setattr(system, "cat_file", counted)
    return done


def test_a_single_picture_costs_its_own_bytes(remote: str, images: np.ndarray, reads: list[tuple[str, int]]) -> None:
    train = open_store(remote)["train"]
    reads.clear()
    assert np.array_equal(train.image(9), images[9])
    assert reads == [("train/images/c.2.0.0.0", IMAGE_BYTES)]
    with pytest.raises(IndexError):
        train.image(NUM)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")  # read here without our filter
@pytest.mark.parametrize("codec", ["zstd", "max"])
def test_a_compressed_picture_is_read_alone(
    store: Path, url: str, images: np.ndarray, reads: list[tuple[str, int]], codec: str
) -> None:
    copy_store(store, url, codec=codec, quiet=True)
    train = open_store(url)["train"]
    reads.clear()
    assert np.array_equal(train.image(9), images[9])
    of_images = sum(size for name, size in reads if "/c." in name)
    assert of_images <= IMAGE_BYTES + 100 + 16 * K + 4


def test_folders_are_made_where_there_are_such(store: Path, tmp_path: Path) -> None:
    copy_store(store, f"local://{tmp_path}/new/b.zarr", quiet=True)
    assert same_tree(store, tmp_path / "new" / "b.zarr")


def test_a_store_at_a_url_is_the_local_one(store: Path, remote: str) -> None:
    local, there = open_store(store), open_store(remote)
    assert there.splits == local.splits
    assert there.attrs == local.attrs
    for one, other in ((local["train"], there["train"]), (local["val"], pickle.loads(pickle.dumps(there["val"])))):
        for name in ("labels", "valid_slots", "source_size", "digests"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert [one.key(i) for i in range(len(one))] == [other.key(i) for i in range(len(other))]
        assert not other.labels.flags.writeable
    assert store_info(remote)["splits"]["train"]["bytes"] == store_info(store)["splits"]["train"]["bytes"]
    with pytest.raises(StoreNotFoundError, match="no split 'test'"):
        there["test"]


def test_commands(
    remote: str, tmp_path: Path, reads: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", remote, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == remote
    assert not [name for name, _ in reads if "images/c." in name]
    assert main(["--quiet", "report", remote, "--out", str(tmp_path / "page.html")]) == 0
    assert "unaltered (SHA-256)" in (tmp_path / "page.html").read_text()
    assert default_path(place("s3://bucket/folder/x.zarr")) == Path("x.html")
    reads.clear()
    result = verify(remote, sample=1, quiet=True)
    assert result["ok"]
    assert result["notes"][0].startswith(f"{remote}/train: 1 of 6 chunks checked")
    whole = [name for name, _ in reads if name.startswith("train/images/c.")]
    assert len(set(whole)) <= 5  # one is hashed, and single pictures of four are read through zarr
    assert verify(remote, sample=0, quiet=True)["notes"] == []


@pytest.mark.parametrize("damage", ["pixels", "index", "truncated", "missing"])
def test_damage_is_found(remote: str, damage: str) -> None:
    chunk = RemotePath(remote) / "train" / "images" / chunk_name(1)
    data = chunk.read_bytes()
    if damage == "missing":
        fsspec.filesystem("memory").rm(str(chunk).removeprefix("memory://"))
    else:
        changed = {"pixels": b"x" + data[1:], "index": data[:-1] + b"x", "truncated": data[:-9]}[damage]
        chunk.write_bytes(changed if changed != data else b"y" + changed[1:])
    result = verify(remote, sample=0, quiet=True)
    assert len([problem for problem in result["problems"] if problem.startswith(str(chunk))]) == 1
    if damage in ("truncated", "missing"):
        with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: (missing|short) chunk"):
            open_store(remote)["train"]


def test_what_needs_memory_maps_says_what_to_do(remote: str) -> None:
    with pytest.raises(StoreError, match="at a URL, which can't be memory-mapped"):
        _ = open_store(remote)["train"].maps
    with pytest.raises(UsageError, match="--cache DIR"):
        RankPartitionedDataset(remote, "train")
    with pytest.raises(UsageError, match="at a URL"):
        warm(remote, quiet=True)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (open_store, "no store there; check the URL"),
        (write_report, "no store there"),
        (store_info, "no store there"),
        (verify, "no store there"),
    ],
)
def test_nothing_there(act: Callable[[str], Any], words: str) -> None:
    with pytest.raises(StoreNotFoundError, match=words):
        act("memory://nothing.zarr")


def test_what_the_server_says_is_one_line(
    remote: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError("Access\nDenied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", denied)
    assert main(["info", remote]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "Access Denied" in lines[0]
    with pytest.raises(UsageError, match=r"nosuch://x.*: no store can be opened at such a URL"):
        open_store("nosuch://x")


def test_local_reading_imports_no_fsspec(store: Path) -> None:
    code = f"import sys, pipeline; s = pipeline.open_store({str(store)!r})['train']; s.image(0); s.read_image(1)\n"
    code += "assert not {'fsspec', 'zarr'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("url", ["s3://", "s3:/", "s3:/b/x.zarr", "http:///x.zarr", "memory://", "https:"])
def test_urls_without_a_bucket_or_host_are_no_paths(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for arguments in (["copy", str(store), url], ["copy", url, "y.zarr"], ["info", url]):
        assert main(arguments) == 2
        assert "a URL without a bucket or host" in capsys.readouterr().err
    for arguments in (["convert", url, "y.zarr"], ["convert", str(store), url], ["report", str(store), "--out", url]):
        assert main(arguments) == 2
        assert f"{url}: a URL" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match=r"^file:///: .* write file:///PATH$"):
        place("file:///")
    assert place("./s3:/x").name == "x"
    assert place("memory:///x").name == "x"


@pytest.mark.parametrize(
    ("name", "then"), [("s3://b/x", "check the address, and that its bucket exists"), ("/disk/x", "run it again")]
)
def test_what_is_gone_has_the_remedy_of_its_place(name: str, then: str) -> None:
    for where, filename in ((name, None), ("/elsewhere", name)):
        with pytest.raises(Error, match=f"^{name}: not found; {then}$"), failures(place(where), "run it again"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", filename)


def test_a_group_deep_in_foreign_ones_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = tmp_path, []
    for _ in range(12):
        folder = folder / "g"
        folder.mkdir()
        (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    monkeypatch.setattr(reader, "read_metadata", lambda file: read.append(file) or read_metadata(file))
    with pytest.raises(StoreNotFoundError, match="not one that `convert` wrote"):
        open_store(folder)
    assert len(read) == 3  # its own, and of the two above it


def test_a_part_of_a_store_names_the_store(remote: str, store: Path) -> None:
    for whole in (remote, str(store)):
        for part in ("train", "val/images"):
            with pytest.raises(StoreNotFoundError, match=f"a part of the store {whole}; give that"):
                open_store(f"{whole}/{part}")


@pytest.mark.filterwarnings("ignore")  # of botocore's own
def test_a_plain_web_server(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's: its listing has no sizes, and it knows no ranges."""
    pytest.importorskip("aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(store.parent)))
    threading.Thread(target=server.serve_forever).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/{store.name}"
        assert main(["info", url]) == main(["copy", url, str(tmp_path / "copied.zarr")]) == 0
        assert np.array_equal(open_store(url)["train"].image(9), open_store(store)["train"].image(9))
    finally:
        server.shutdown()
        server.server_close()
    assert "missing" not in capsys.readouterr().out
    assert same_tree(store, tmp_path / "copied.zarr")


def test_a_bucket(store: Path, bucket: str, images: np.ndarray) -> None:
    with pytest.raises(Error, match=r"no-such-bucket/a.zarr: not found; check the address"):
        copy_store(store, "s3://no-such-bucket/a.zarr", quiet=True)
    copy_store(store, f"{bucket}/a.zarr", quiet=True)
    train = open_store(f"{bucket}/a.zarr")["train"]
    assert np.array_equal(train.image(9), images[9])
    assert store_info(f"{bucket}/a.zarr")["splits"]["val"]["num_valid"] == 3
    with pytest.raises(StoreNotFoundError, match="no store there"):
        open_store("s3://no-such-bucket/a.zarr")
