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
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.sources.archive import ArchivePart, TableBuilder
from pipeline.sources.archive_index import KeptIndex, index_archives
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings
from pipeline.sources.devkit import NAME, Devkit, find_devkit, is_official_val, read_devkit
from pipeline.sources.files import open_regular, opened
from pipeline.sources.folder import Scan, list_folder, scan, split_folders
from pipeline.sources.ignored import NO_CLASS_ARCHIVE, Ignored
from pipeline.sources.labels import assemble
from pipeline.sources.tar_headers import members
from pipeline.text import as_text

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
    if role := _role(path.name):
        return role
    return TRAIN if path.suffix == ".tar" and path.is_file() and _is_nested(path) else None


def _role(name: str) -> str | None:
    return next((role for pattern, role in _ROLES if pattern.fullmatch(name)), None)


def is_official(path: Path) -> bool:
    """True for one of the archives, and for a folder that holds some of them or a flat `val/` with a devkit."""
    if path.is_file():
        return bool(_OFFICIAL.fullmatch(path.name)) or role_of(path) is not None
    try:
        files = os.listdir(path)
    except OSError:
        return False
    if any(map(_role, files)) or _holds_class_tars(path) or _holds_class_tars(path / TRAIN):
        return True
    val = path / VAL
    if find_devkit(path) is None or not val.is_dir():
        return False
    return is_official_val(list_folder(os.fsencode(val))[1])


@dataclass
class _Found:
    """What SRC holds: archives by their role, unpacked splits; then the splits that were read."""

    root: Path
    archives: dict[str, Path]
    folders: dict[str, bytes]
    notes: list[str] = field(default_factory=list)
    parts: dict[str, ArchivePart | Scan] = field(default_factory=dict)


def open_imagenet(src: Path, options: SourceOptions) -> SourceSet:
    """The official archives; the headers of splits that aren't wanted aren't read.

    With `check_md5` the archives that are used are compared with their known sums first, which reads each of them once.
    """
    found = _look(src)
    ignored = Ignored(os.fsencode(found.root))
    devkit_path = find_devkit(found.root)
    wanted = [split for split in (TRAIN, VAL, TEST) if split in found.archives or split in found.folders]
    wanted = [split for split in wanted if options.wants(split)]
    if options.check_md5:
        for split in wanted:
            if split in found.archives:
                _check_md5(found.archives[split], MD5[split])
        if devkit_path is not None and devkit_path.is_file():
            _check_md5(devkit_path, MD5[NAME])
    devkit = read_devkit(devkit_path) if devkit_path is not None and devkit_path.name.startswith(NAME) else None
    class_ids = _train(found, TRAIN in wanted, ignored, options.index)
    if VAL in wanted:
        _val(found, devkit, devkit_path, ignored, options.index)
    if TEST in wanted:
        _test(found, ignored, options.index)
    if not class_ids and devkit:
        class_ids = sorted(devkit.words)
    made = assemble("imagenet", found.parts, options, class_ids=class_ids or (), ignored=ignored, notes=found.notes)
    if devkit:
        made.class_names = [devkit.words.get(wnid, wnid) for wnid in made.class_ids]
    return made


def _look(src: Path) -> _Found:
    if src.is_file():
        role = role_of(src)
        if role == TASK_3:
            raise UsageError(f"{src}: of task 3 (dog breeds), not the 1,000-class set; get ILSVRC2012_img_train.tar")
        if role is None:
            raise UsageError(
                f"{src}: not an image archive of ILSVRC2012; give ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or "
                "their folder"
            )
        return _Found(src.parent, {role: src}, {})
    found = _Found(src, {}, split_folders(os.fsencode(src)) or {})
    for path in sorted(src.iterdir()):
        role = _role(path.name)
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


def _train(found: _Found, wanted: bool, ignored: Ignored, kept: KeptIndex | None) -> list[str] | None:
    """Index train where it is wanted; returns its classes, which give the class map in any case."""
    archive = found.archives.get(TRAIN)
    if archive is None and TRAIN in found.folders:
        if not wanted:
            return [as_text(name) for name in list_folder(found.folders[TRAIN])[0]]
        place = found.parts[TRAIN] = scan(found.folders[TRAIN], ignored)
        return place.classes
    if archive is None:
        return None
    classes = _class_tars(archive, ignored if wanted else Ignored(), kept)
    if wanted:
        archives = sorted({path for path, _, _ in classes.values()})

        def add_classes(builder: TableBuilder) -> None:
            for wnid, (path, start, end) in sorted(classes.items()):
                where = f"{path}: {wnid}.tar" if archive.is_file() else path
                builder.add_archive(path, archives.index(path), where, start, end, f"{wnid}/".encode())

        table, _ = index_archives(archives, kept, TRAIN, add_classes)
        part = found.parts[TRAIN] = ArchivePart(archives, table.take(table.images(ignored)).sorted(archives))
        for key in part.table.names:
            part.column.add(key[:9].decode())
    return sorted(classes)


def _class_tars(archive: Path, ignored: Ignored, kept: KeptIndex | None) -> dict[str, tuple[str, int, int | None]]:
    """WordNet id -> the file that holds the class's tar, and the bytes it fills there."""
    classes: dict[str, tuple[str, int, int | None]] = {}
    if archive.is_dir():
        for path in archive.iterdir():
            if match := _CLASS_TAR.fullmatch(os.fsencode(path.name)):
                classes[match[1].decode()] = (str(path), 0, None)
        return classes
    table, _ = index_archives([str(archive)], kept, "classes")
    for row, name in enumerate(table.names):
        match, offset = _CLASS_TAR.fullmatch(name.rpartition(b"/")[2]), int(table.offset[row])
        if match is None or offset < 0:
            ignored.add(NO_CLASS_ARCHIVE, name)
            continue
        wnid = match[1].decode()
        if wnid in classes:
            raise UsageError(f"{archive}: {wnid}.tar is twice in it; get the archive again")
        classes[wnid] = (str(archive), offset, offset + int(table.size[row]))
    if not classes:
        raise UsageError(f"{archive}: no class archives nXXXXXXXX.tar in it; get ILSVRC2012_img_train.tar")
    return classes


def _val(
    found: _Found, devkit: Devkit | None, devkit_path: Path | None, ignored: Ignored, kept: KeptIndex | None
) -> None:
    if VAL in found.archives:
        flat = found.parts[VAL] = _flat(found.archives[VAL], ignored, kept, VAL)
        keys, images = flat.table.names, str(found.archives[VAL])
    else:
        folder = found.parts[VAL] = scan(found.folders[VAL], ignored)
        keys, images = folder.keys, as_text(folder.root)
        if not folder.is_flat:
            return
    if devkit is None and devkit_path is not None:
        raise UsageError(f"{devkit_path}: a devkit of another year or task; get {NAME}.tar.gz")
    if devkit is None:
        raise UsageError(
            f"{found.root / NAME}.tar.gz: missing, it has the labels of {images}; put it there, or convert only "
            "--split train"
        )
    found.parts[VAL].column, notes = devkit.label(keys, images)
    found.notes += notes


def _test(found: _Found, ignored: Ignored, kept: KeptIndex | None) -> None:
    if TEST in found.archives:
        part = found.parts[TEST] = _flat(found.archives[TEST], ignored, kept, TEST)
        part.column.add(None, len(part.table.names))
        found.notes.append(f"{found.archives[TEST]}: the test images have no public labels; they stay unlabelled")
    else:
        found.parts[TEST] = scan(found.folders[TEST], ignored)


def _flat(archive: Path, ignored: Ignored, kept: KeptIndex | None, name: str) -> ArchivePart:
    """The images of an archive by their bare names, sorted."""
    archives = [str(archive)]
    table, _ = index_archives(archives, kept, name)
    table = table.take(table.images(ignored))
    table.names = ByteStrings.pack(name.rpartition(b"/")[2] for name in table.names)
    return ArchivePart(archives, table.sorted(archives))


def _is_nested(path: Path) -> bool:
    try:
        with opened(str(path)) as fd:
            first = next(iter(members(fd, str(path))), None)
    except UsageError:
        return False
    return first is not None and _CLASS_TAR.fullmatch(first.name.rpartition(b"/")[2]) is not None


def _check_md5(path: Path, known: str) -> None:
    with open(path, "rb", opener=open_regular) as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != known:
        raise UsageError(f"{path}: its MD5 sum is {found}, not {known}; get the archive again")
