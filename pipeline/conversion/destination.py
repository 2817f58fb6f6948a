"""What is at DST already: whether splits can be added to it, and what `--overwrite` may delete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.conversion.plan import SplitPlan, check_same_software, first_difference
from pipeline.conversion.preflight import check_space, needs
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreNotFoundError, UsageError
from pipeline.store.format import FORMAT_NAME, SMALL_ARRAYS
from pipeline.store.geometry import Geometry
from pipeline.store.reader import open_store
from pipeline.store.writer import root_attributes, write_root
from pipeline.text import counted

SPLIT_ENTRIES = ("zarr.json", "images", *SMALL_ARRAYS, ".")
"""How the names begin of all that a split's folder may hold, hidden files of the system included."""


def check_parent(dst: Path) -> None:
    """Make the folder that DST lies in."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(dst.parent, os.W_OK):
        raise Error(f"{dst.parent}: not writable; choose another DST or change its permissions")


def check_root(dst: Path, attributes: dict[str, Any]) -> None:
    """Check that DST is free, or a store to which a split with these root attributes can be added."""
    if not dst.exists():
        return
    if not dst.is_dir():
        raise UsageError(f"{dst}: exists and is not a folder; choose another DST")
    if not any(dst.iterdir()):
        return
    try:
        store = open_store(dst)
    except StoreNotFoundError:
        raise UsageError(f"{dst}: exists and is not a store; choose another DST") from None
    here, there = attributes["class_ids"], store.attrs["class_ids"]
    if set(here) != set(there):
        raise Error(
            f"{dst}: other classes: the store has {_more(there, here)}, this conversion {_more(here, there)}; use "
            "another DST, give SRC the same classes (empty class folders will do), or convert all splits again with "
            "--overwrite"
        )
    words = "{name}: the store has {old}, this conversion asks for {new}"
    difference = first_difference(_root_fields(store.attrs), _root_fields(attributes), words=words)
    if difference:
        raise Error(f"{dst}: {difference}; use another DST, or convert all splits again with --overwrite")


def _more(ids: Sequence[str], others: Sequence[str]) -> str:
    """How many classes there are, and which aren't among the others."""
    left = sorted(set(ids) - set(others))
    names = ", ".join(repr(name) for name in left[:3]) + (", ..." if len(left) > 3 else "")
    return f"{counted(len(ids), 'class', 'classes')}" + (f" (only here: {names})" if left else "")


def _root_fields(attributes: dict[str, Any]) -> dict[str, Any]:
    """A root group's attributes with a field per value, so that a difference names one class and not all."""
    ids, names = attributes["class_ids"], attributes["class_names"]
    return {
        **attributes["geometry"],
        **{f"class {label}": name for label, name in enumerate(ids)},
        **{f"name of class {label}": name for label, name in enumerate(names)},
    }


def list_split(workspace: Workspace, split: str, geometry: dict[str, Any], classes: dict[str, list[str]]) -> None:
    """Write the root group, or replace it by one that lists this split, too; the split itself appears afterwards."""
    dst = workspace.dst
    listed = open_store(dst).attrs["splits"] if (dst / "zarr.json").exists() else []
    if split not in listed:
        write_root(dst, workspace.path, root_attributes(geometry, classes["ids"], classes["names"], [*listed, split]))


def check_rename(workspace: Workspace) -> None:
    """Check that what the work folder holds can be renamed into DST: it can't be where DST is mounted, or a link."""
    try:  # of a name that doesn't exist: the system compares the file systems first
        os.rename(workspace.path / ".nothing", workspace.dst / ".nothing")
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UsageError(
                f"{workspace.dst}: on another file system than {workspace.path}; give a folder inside of it as DST, "
                f"such as {workspace.dst.resolve() / 'store.zarr'}"
            ) from None


def overwrite_splits(
    plans: Sequence[SplitPlan], stores: Sequence[tuple[Workspace, Geometry]], roots: Sequence[dict[str, Any]]
) -> None:
    """For `--overwrite` delete the splits of these plans in all stores, and unfinished work on them.

    Nothing is deleted unless everything can be, and there is room for what is to come.
    """
    splits = [plan.split for plan in plans]
    others = [
        _check_overwrite(workspace.dst, splits, root, plans[0].software)
        for (workspace, _), root in zip(stores, roots, strict=True)
    ]
    check_space(needs(plans, stores, overwrite=True))
    for (workspace, _), root, kept in zip(stores, roots, others, strict=True):
        for split in splits:
            _delete(workspace.dst / split, workspace.path / ".overwritten")
            shutil.rmtree(workspace.split(split).path, ignore_errors=True)
        if not kept and workspace.dst.exists():
            if os.listdir(workspace.dst) == ["zarr.json"]:
                _delete(workspace.dst, workspace.path / ".overwritten")
            else:  # foreign files stay, in a store without splits
                write_root(workspace.dst, workspace.path, root)


def _check_overwrite(dst: Path, splits: Sequence[str], root: dict[str, Any], software: dict[str, str]) -> list[str]:
    """Raise unless these splits of a store may be deleted; returns the names of the store's other splits."""
    if dst.is_symlink():
        raise UsageError(f"{dst}: a link, through which --overwrite deletes nothing; give {dst.resolve()} as DST")
    if dst.exists() and not dst.is_dir():
        raise UsageError(f"{dst}: exists and is not a folder; choose another DST")
    if not dst.exists() or not any(dst.iterdir()):
        return []
    others = sorted(path.name for path in dst.iterdir() if path.name not in splits and _is_split(path))
    damage = ""
    try:
        store = open_store(dst)
    except StoreNotFoundError:
        raise UsageError(f"{dst}: not an {FORMAT_NAME} store: nothing is deleted there; choose another DST") from None
    except Error as error:
        damage = str(error)
    if others and damage:
        raise Error(f"{dst}: --overwrite deletes nothing here, as {', '.join(others)} would be lost: {damage}")
    if others:
        check_root(dst, root)
        check_same_software(store, others, software)
    for split in splits:
        for folder, known in ((dst / split, SPLIT_ENTRIES), (dst / split / "images", ("zarr.json", "c."))):
            if folder.is_symlink() or folder.is_file():
                raise UsageError(f"{folder}: no conversion wrote that; move it away, or choose another DST")
            for entry in folder.iterdir() if folder.exists() else ():
                if not entry.name.startswith(known):
                    raise UsageError(f"{entry}: no conversion wrote that; move it away, or choose another DST")
    return others


def _is_split(path: Path) -> bool:
    """True also where its metadata is gone."""
    return (path / "zarr.json").exists() or (path / "images").exists()


def _delete(folder: Path, away: Path) -> None:
    """Delete a folder. A kill leaves no half of it: it is moved away first."""
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(OSError):  # such as of a mount point
            folder = folder.rename(away)
        shutil.rmtree(folder)
