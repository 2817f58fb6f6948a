"""The index of archives that the work folder keeps: read instead of a scan, and only where it must be right."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import make_image, tree
from layouts import tar_bytes, write_devkit

from pipeline import convert
from pipeline.conversion.commit import BadSamplesError
from pipeline.sources import archive_index, open_source, tar_headers
from pipeline.sources.archive import TableBuilder
from pipeline.sources.archive_index import KeptIndex

BAD = b"no image"


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    make_image(seed).save(file, "JPEG")
    return file.getvalue()


def imagenet(path: Path) -> Path:
    """The official archives with three classes of five images; one is bad, so that no conversion finishes."""
    wnids = ("n01440764", "n02100735", "n02119789")
    nested = {
        f"{wnid}.tar": tar_bytes({f"{wnid}_{i}.JPEG": jpeg(9 * label + i) if label + i else BAD for i in range(5)})
        for label, wnid in enumerate(wnids)
    }
    path.mkdir()
    (path / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(nested))
    val = {f"ILSVRC2012_val_{i:08d}.JPEG": jpeg(50 + i) for i in range(1, 5)}
    (path / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(val))
    write_devkit(path / "ILSVRC2012_devkit_t12.tar.gz", [3, 1, 2, 3])
    return path


def folders(path: Path) -> Path:
    """A tar with class folders, two of them without images, and a link."""
    path.mkdir()
    files = {f"{name}/{i}.jpg": jpeg(i) if i else BAD for name in ("cat", "dog") for i in range(6)}
    (path / "pets.tar").write_bytes(tar_bytes(files | {"rat/readme.txt": b"none yet"}))
    with tarfile.open(path / "pets.tar", "a") as archive:
        for name, kind in ("ant", tarfile.DIRTYPE), ("dog/7.jpg", tarfile.SYMTYPE):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "1.jpg" if kind == tarfile.SYMTYPE else ""
            archive.addfile(entry)
    return path


def shards(path: Path) -> Path:
    """WebDataset shards with labels beside the images."""
    path.mkdir()
    for shard in range(3):
        images = {f"{shard}{i}.jpg": jpeg(shard + i) if shard + i else BAD for i in range(5)}
        labels = {f"{shard}{i}.cls": str(i % 2).encode() for i in range(5)}
        (path / f"train-{shard}.tar").write_bytes(tar_bytes(sorted((images | labels).items())))
    return path


SOURCES = {"imagenet": imagenet, "tar": folders, "webdataset": shards}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the reads of archives; `image` are those of more bytes than a header or a label has."""
    counts: Counter[str] = Counter()
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        counts["small" if size <= 1024 else "image"] += 1
        return pread(fd, size, offset)

    monkeypatch.setattr(tar_headers, "_pread", counted)
    return counts


def run(source: Path, store: Path, **options: Any) -> None:
    convert(source, store, **{"size": 16, "n_jobs": 1, "quiet": True, "chunk_mb": 0.002, **options})


def begin(source: Path, store: Path) -> Path:
    """Convert, which stops at the bad sample; returns the work folder."""
    with pytest.raises(BadSamplesError):
        run(source, store)
    return store.with_name(store.name + ".work")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_rerun_scans_no_archive(tmp_path: Path, reads: Counter[str], kind: str) -> None:
    source = SOURCES[kind](tmp_path / "source")
    run(source, tmp_path / "fresh.zarr", on_error="skip")
    begin(source, tmp_path / "a.zarr")
    scan = reads["small"]
    reads.clear()
    run(source, tmp_path / "a.zarr", on_error="skip")
    assert scan > 20
    assert reads["small"] <= 3  # by which the kind is recognised
    assert reads["image"] == 0
    assert tree(tmp_path / "a.zarr") == tree(tmp_path / "fresh.zarr")
    assert not (tmp_path / "a.zarr.work").exists()


def test_another_part_scans_no_archive(tmp_path: Path, reads: Counter[str]) -> None:
    source = imagenet(tmp_path / "source")
    run(source, tmp_path / "fresh.zarr", on_error="skip")
    reads.clear()
    run(source, tmp_path / "a.zarr", on_error="skip", part="1/2")
    scan = reads["small"]
    reads.clear()
    run(source, tmp_path / "a.zarr", on_error="skip", part="2/2")
    assert reads["small"] < scan / 5
    assert tree(tmp_path / "a.zarr") == tree(tmp_path / "fresh.zarr")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_dry_run_and_a_source_alone_keep_nothing(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "source")
    run(source, tmp_path / "a.zarr", dry_run=True)
    open_source(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def one_more(source: Path) -> None:
    with open(source / "pets.tar", "r+b") as file:
        file.write(tar_bytes({f"{name}/{i}.jpg": jpeg(i + 1) for name in ("cat", "dog", "rat") for i in range(6)}))


def touched(source: Path) -> None:
    status = os.stat(source / "pets.tar")
    os.utime(source / "pets.tar", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def rewritten(source: Path) -> None:
    """In the same bytes, with its time set back: the time of the change shows it."""
    path = source / "pets.tar"
    status, content = os.stat(path), path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def another_archive(source: Path) -> None:
    (source / "more.tar").write_bytes(tar_bytes({"cat/more.jpg": jpeg(3)}))


@pytest.mark.parametrize("change", [one_more, touched, rewritten, another_archive])
def test_changed_archives_are_scanned(tmp_path: Path, reads: Counter[str], change: Callable[[Path], None]) -> None:
    source = folders(tmp_path / "source")
    work = begin(source, tmp_path / "a.zarr")
    change(source)
    reads.clear()
    found = open_source(source, index=KeptIndex(work))
    assert reads["small"] > 12
    assert found.splits["train"].keys()[0].tobytes() == open_source(source).splits["train"].keys()[0].tobytes()


def index_of(folder: Path, **arrays: np.ndarray) -> None:
    """Write an index file again with other arrays."""
    path = folder / ".index-archives.npz"
    with np.load(path) as kept:
        everything = {name: kept[name] for name in kept.files} | arrays
    with open(path, "wb") as file:
        np.savez(file, **everything)


def loads(folder: Path, archive: str) -> bool:
    """True where the index is read without a scan."""
    kept = KeptIndex(folder)
    archive_index.index_archives([archive], kept)
    return not kept._new


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, str]:
    """A private folder with the index of an archive of three files, and the archive."""
    (tmp_path / "x.tar").write_bytes(tar_bytes({"a/1.jpg": b"one", "a/1.cls": b"7", "b/2.jpg": b"three"}))
    (tmp_path / "work").mkdir(0o700)
    index = KeptIndex(tmp_path / "work")
    archive_index.index_archives([str(tmp_path / "x.tar")], index)
    index.save("run")
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".index-archives.npz"]
    return tmp_path / "work", str(tmp_path / "x.tar")


def test_what_is_loaded_is_what_a_scan_finds(kept: tuple[Path, str]) -> None:
    folder, archive = kept
    assert loads(folder, archive)
    builder = TableBuilder()
    builder.add_archive(archive, 0)
    scanned = builder.build()
    table, above = archive_index.index_archives([archive], KeptIndex(folder))
    assert list(table.names) == list(scanned.names) == [b"a/1.jpg", b"a/1.cls", b"b/2.jpg"]
    assert list(table.contents) == list(scanned.contents) == [b"", b"7", b""]
    for name in ("archive", "offset", "size"):
        loaded, found = getattr(table, name), getattr(scanned, name)
        assert loaded.dtype == found.dtype
        assert loaded.tolist() == found.tolist()
    assert above == builder.folders


@pytest.mark.parametrize(
    "arrays",
    [
        {"offset": np.array([512, -2, 2560])},
        {"offset": np.array([512, 1536, 1 << 40])},
        {"size": np.array([3, -1, 5])},
        {"size": np.array([3, 1, 1 << 62])},
        {"size": np.array([3, 1])},
        {"size": np.array([3.0, 1.0, 5.0])},
        {"size": np.array([3, 1, None])},
        {"archive": np.array([0, 0, 1], np.int32)},
        {"archive": np.array([0, -1, 0], np.int32)},
        {"names_offsets": np.array([0, 7, 6, 21])},
        {"names_offsets": np.array([0, 7, 14, 22])},
        {"names_offsets": np.array([1, 7, 14, 21])},
        {"names_offsets": np.array([0, 7, 21])},
        {"names_offsets": np.array([], np.int64)},
        {"names": np.zeros((3, 7), np.uint8)},
        {"contents_offsets": np.array([0, 1])},
        {"folder_archive": np.array([0], np.int32)},
        {"key": np.array([1], np.uint8)},
    ],
    ids=lambda arrays: "-".join(arrays),
)
def test_what_cannot_be_true_is_passed_over(kept: tuple[Path, str], arrays: dict[str, np.ndarray]) -> None:
    index_of(kept[0], **arrays)
    assert not loads(*kept)


def test_damage_anywhere_in_the_file_is_passed_over(kept: tuple[Path, str]) -> None:
    path = kept[0] / ".index-archives.npz"
    whole = path.read_bytes()
    builder = TableBuilder()
    builder.add_archive(kept[1], 0)
    names = list(builder.build().names)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 300).tolist():
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            table, _ = archive_index.index_archives([kept[1]], KeptIndex(kept[0]))
            assert (list(table.names), table.offset.tolist(), table.size.tolist()) == (
                names,
                [512, 1536, 2560],
                [3, 1, 5],
            )


def test_a_compressed_file_may_be_a_bomb(kept: tuple[Path, str]) -> None:
    path = kept[0] / ".index-archives.npz"
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)
    assert not loads(*kept)


def not_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def others_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)


def a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".index-archives.npz").rename(folder / "elsewhere")
    (folder / ".index-archives.npz").symlink_to("elsewhere")


def a_linked_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def a_fifo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".index-archives.npz").unlink()
    os.mkfifo(folder / ".index-archives.npz")


@pytest.mark.parametrize("spoil", [not_own, others_may_write, a_link, a_linked_folder, a_fifo])
def test_what_others_may_have_put_there_is_passed_over(
    kept: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    spoil(kept[0], monkeypatch)
    assert not loads(*kept)


def test_an_index_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folders(tmp_path / "source")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive_index.np, "savez", full)
    index = KeptIndex(tmp_path)
    archive_index.index_archives([str(source / "pets.tar")], index)
    index.save("run")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_temp_files_of_dead_runs_are_deleted(tmp_path: Path) -> None:
    work = begin(folders(tmp_path / "source"), tmp_path / "a.zarr")
    (work / ".index-archives.npz.tmp-dead").write_bytes(b"half")
    begin(tmp_path / "source", tmp_path / "a.zarr")
    assert [path.name for path in work.iterdir() if path.name.startswith(".")] == [".index-archives.npz"]
