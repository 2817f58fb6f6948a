"""The official ILSVRC2012 archives, read in place: the nested train tar, the flat val tar, labels from the devkit.

    SRC/ILSVRC2012_img_train.tar         1,000 archives nXXXXXXXX.tar, one per class
    SRC/ILSVRC2012_img_val.tar           50,000 images
    SRC/ILSVRC2012_devkit_t12.tar.gz     which class each of them has, and the classes' names
    SRC/ILSVRC2012_img_test*.tar         images without public labels

SRC may also be one of the archives; the devkit is then looked for beside it. A split that has been unpacked already
(`SRC/train/<class>/`, `nXXXXXXXX.tar` files in SRC or `SRC/train`, flat `SRC/val/`) is taken from there. Keys and order
are those of the unpacked class folders.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.archive import ArchiveSource, Table, TableBuilder, opened
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.byte_strings import ByteStringsBuilder, path_order
from pipeline.sources.devkit import NAME, Devkit, find_devkit, is_official_val, read_devkit
from pipeline.sources.files import FileSource
from pipeline.sources.folder import Scan, list_folder, scan, split_folders
from pipeline.sources.ignored import NO_CLASS_ARCHIVE, Ignored
from pipeline.sources.labels import LabelColumn, resolve
from pipeline.sources.tar import image_rows, read_table, refuse_duplicates
from pipeline.sources.tarfiles import members

TRAIN, VAL, TEST, TASK_3 = "train", "val", "test", "task 3"
MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    TEST: "e1b8681fff3d63731c599df9b4b6fc02",  # ILSVRC2012_img_test_v10102019.tar
    NAME: "fa75699e90414af021442c21a62c3abf",
}
_ROLES = (
    (re.compile(r"ILSVRC2012_img_train\.tar"), TRAIN),
    (re.compile(r"ILSVRC2012_img_val\.tar"), VAL),
    (re.compile(r"ILSVRC2012_img_test\w*\.tar"), TEST),
    (re.compile(r"ILSVRC2012_img_train_t3\.tar|ILSVRC2012_devkit_t3\.tar\.gz"), TASK_3),
)
_OFFICIAL = re.compile(r"ILSVRC\d{4}_(img|images|devkit).*\.(tar|tar\.gz|tgz)")
_CLASS_TAR = re.compile(rb"(n\d{8})\.tar")


def role_of(path: Path) -> str | None:
    """What the file is, by its name or, for a renamed train archive, by its first member."""
    for pattern, role in _ROLES:
        if pattern.fullmatch(path.name):
            return role
    return TRAIN if path.suffix == ".tar" and path.is_file() and _is_nested(path) else None


def is_official(path: Path) -> bool:
    """True for one of the archives, and for a folder that holds some of them or a flat `val/` with a devkit."""
    if path.is_file():
        return bool(_OFFICIAL.fullmatch(path.name)) or role_of(path) is not None
    try:
        files = os.listdir(path)
    except OSError:
        return False
    if any(pattern.fullmatch(name) for name in files for pattern, _ in _ROLES):
        return True
    if _holds_class_tars(path) or _holds_class_tars(path / TRAIN):
        return True
    val = path / VAL
    if find_devkit(path) is None or not val.is_dir():
        return False
    return is_official_val(list_folder(os.fsencode(val), Ignored())[1])


@dataclass
class _Found:
    """What is collected on the way: archives by role, then one column of labels and one place per split."""

    root: Path
    archives: dict[str, Path]
    folders: dict[str, bytes]
    ignored: Ignored = field(init=False)
    notes: list[str] = field(default_factory=list)
    columns: dict[str, LabelColumn] = field(default_factory=dict)
    places: dict[str, tuple[Table, list[str]] | Scan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ignored = Ignored(os.fsencode(self.root))


def open_imagenet(src: Path, splits: Sequence[str] | None = None, *, check_md5: bool = False) -> SourceSet:
    """The official archives.

    Args:
        src: the folder of the archives, or one archive.
        splits: the wanted splits; the headers of the others aren't read.
        check_md5: compare the archives that are used with their known sums first; reads each of them once.

    Raises:
        UsageError: a missing, damaged or wrong archive or devkit, or a wrong sum.
    """
    found = _look(src)
    devkit_path = find_devkit(found.root)
    have = {*found.archives, *found.folders}
    wanted = [split for split in (TRAIN, VAL, TEST) if split in have and (not splits or split in splits)]
    if check_md5:
        for split in wanted:
            if split in found.archives:
                _check_md5(found.archives[split], MD5[split])
        if devkit_path is not None and devkit_path.is_file():
            _check_md5(devkit_path, MD5[NAME])
    devkit = read_devkit(devkit_path) if devkit_path is not None and devkit_path.name.startswith(NAME) else None
    class_ids = _train(found, TRAIN in wanted)
    if VAL in wanted:
        _val(found, devkit, devkit_path)
    if TEST in wanted:
        _test(found)
    if not class_ids:
        class_ids = sorted(devkit.words) if devkit else []
    ids, labels = resolve(found.columns, lambda split, i: _where(found, split, i), class_ids=class_ids)
    sources: dict[str, Source] = {}
    for split, place in found.places.items():
        if isinstance(place, Scan):
            sources[split] = FileSource(place.root, place.keys, labels[split])
        else:
            sources[split] = ArchiveSource(place[1], place[0], labels[split])
    class_names = [devkit.words.get(wnid, wnid) for wnid in ids] if devkit else None
    return SourceSet("imagenet", ids, sources, class_names, found.ignored, found.notes, str(src))


def _look(src: Path) -> _Found:
    if src.is_file():
        role = role_of(src)
        if role == TASK_3:
            raise UsageError(
                f"{src}: belongs to task 3 (dog breeds), which isn't the 1,000-class set; get ILSVRC2012_img_train.tar"
            )
        if role is None:
            raise UsageError(
                f"{src}: not an image archive of ILSVRC2012; give ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or "
                "their folder"
            )
        return _Found(src.parent, {role: src}, {})
    found = _Found(src, {}, split_folders(os.fsencode(src), None) or {})
    for path in sorted(src.iterdir()):
        role = next((role for pattern, role in _ROLES if pattern.fullmatch(path.name)), None)
        if role == TASK_3:
            found.notes.append(f"{path}: belongs to task 3 (dog breeds), which isn't converted")
        elif role in found.archives:
            raise UsageError(f"{path} and {found.archives[role]}: both hold the {role} images; move one away")
        elif role is not None:
            found.archives[role] = path
            if found.folders.pop(role, None):
                found.notes.append(f"{src / role}: passed over, {path.name} is read instead")
    for folder in (src, src / TRAIN):
        if TRAIN not in found.archives and _holds_class_tars(folder):
            found.archives[TRAIN] = folder
            found.folders.pop(TRAIN, None)
    return found


def _holds_class_tars(folder: Path) -> bool:
    return folder.is_dir() and any(_CLASS_TAR.fullmatch(os.fsencode(name)) for name in os.listdir(folder))


def _train(found: _Found, wanted: bool) -> list[str] | None:
    """Index train where it is wanted; returns its classes, which give the class map in any case."""
    archive = found.archives.get(TRAIN)
    if archive is None and TRAIN in found.folders:
        if not wanted:
            return [names.text(name) for name in list_folder(found.folders[TRAIN], Ignored())[0]]
        place = scan(found.folders[TRAIN], found.ignored)
        found.places[TRAIN], found.columns[TRAIN] = place, place.column
        return place.classes
    if archive is None:
        return None
    classes = _class_tars(archive, found.ignored if wanted else Ignored())
    if not wanted:
        return sorted(classes)
    builder, archives = TableBuilder(), sorted({path for path, _, _ in classes.values()})
    for wnid, (path, start, end) in sorted(classes.items()):
        with opened(path) as fd:
            for member in members(fd, f"{path}: {wnid}.tar" if archive.is_file() else path, start, end):
                if member.kind == "file":
                    key = f"{wnid}/".encode() + member.name
                    builder.add(key, archives.index(path), member.offset, member.size)
    table = builder.build()
    table = table.take(image_rows(table, found.ignored))
    table = table.take(path_order(table.names))
    refuse_duplicates(table, [Path(path) for path in archives])
    column = LabelColumn()
    for key in table.names:
        column.add(key[:9].decode())
    found.places[TRAIN], found.columns[TRAIN] = (table, archives), column
    return sorted(classes)


def _class_tars(archive: Path, ignored: Ignored) -> dict[str, tuple[str, int, int | None]]:
    """WordNet id -> the file that holds the class's tar, and the bytes it fills there."""
    classes: dict[str, tuple[str, int, int | None]] = {}
    if archive.is_dir():
        for path in archive.iterdir():
            if match := _CLASS_TAR.fullmatch(os.fsencode(path.name)):
                classes[match[1].decode()] = (str(path), 0, None)
        return classes
    with opened(str(archive)) as fd:
        for member in members(fd, str(archive)):
            match = _CLASS_TAR.fullmatch(member.name.rpartition(b"/")[2])
            if match is None or member.kind != "file":
                if member.kind != "folder":
                    ignored.add(NO_CLASS_ARCHIVE, member.name)
                continue
            wnid = match[1].decode()
            if wnid in classes:
                raise UsageError(f"{archive}: {wnid}.tar is twice in it; get the archive again")
            classes[wnid] = (str(archive), member.offset, member.offset + member.size)
    if not classes:
        raise UsageError(f"{archive}: no class archives nXXXXXXXX.tar in it; get ILSVRC2012_img_train.tar")
    return classes


def _val(found: _Found, devkit: Devkit | None, devkit_path: Path | None) -> None:
    if VAL in found.archives:
        flat = _flat(found.archives[VAL], found.ignored)
        found.places[VAL], keys, images = flat, flat[0].names, str(found.archives[VAL])
    else:
        place = scan(found.folders[VAL], found.ignored)
        found.places[VAL], found.columns[VAL] = place, place.column
        if not place.is_flat:
            return
        keys, images = place.keys, names.text(place.root)
    if devkit is None and devkit_path is not None:
        raise UsageError(f"{devkit_path}: a devkit of another year or task; get {NAME}.tar.gz")
    if devkit is None:
        raise UsageError(
            f"{found.root / NAME}.tar.gz: missing, it has the labels of {images}; put it there, or convert only "
            "--split train"
        )
    found.columns[VAL], notes = devkit.label(keys, images)
    found.notes += notes


def _test(found: _Found) -> None:
    if TEST in found.archives:
        flat = _flat(found.archives[TEST], found.ignored)
        found.places[TEST], found.columns[TEST] = flat, LabelColumn()
        found.columns[TEST].add(None, len(flat[0].names))
        found.notes.append(f"{found.archives[TEST]}: the test images have no public labels; they stay unlabelled")
    else:
        place = scan(found.folders[TEST], found.ignored)
        found.places[TEST], found.columns[TEST] = place, place.column


def _flat(archive: Path, ignored: Ignored) -> tuple[Table, list[str]]:
    """The images of an archive by their bare names, sorted."""
    table = read_table([archive])
    table = table.take(image_rows(table, ignored))
    bare = ByteStringsBuilder()
    for name in table.names:
        bare.append(name.rpartition(b"/")[2])
    table = Table(bare.build(), table.archive, table.offset, table.size)
    table = table.take(path_order(table.names))
    refuse_duplicates(table, [archive])
    return table, [str(archive)]


def _where(found: _Found, split: str, sample: int) -> str:
    place = found.places[split]
    if isinstance(place, Scan):
        return names.text(os.path.join(place.root, place.keys[sample]))
    table, archives = place
    return f"{archives[int(np.asarray(table.archive)[sample])]}: {names.text(table.names[sample])}"


def _is_nested(path: Path) -> bool:
    try:
        with opened(str(path)) as fd:
            first = next(iter(members(fd, str(path))), None)
    except UsageError:
        return False
    return first is not None and _CLASS_TAR.fullmatch(first.name.rpartition(b"/")[2]) is not None


def _check_md5(path: Path, known: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != known:
        raise UsageError(f"{path}: its MD5 sum is {found}, not {known}; get the archive again")
