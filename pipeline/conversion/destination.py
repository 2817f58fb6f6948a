"""What is at DST already: whether splits can be added to it, and what `--overwrite` may delete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import zarr

from pipeline.conversion.plan import first_difference
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreNotFoundError, UsageError
from pipeline.store.atomic import fsync_dir
from pipeline.store.format import FORMAT_NAME
from pipeline.store.reader import Store, open_store
from pipeline.store.writer import write_group
from pipeline.text import counted


def check_parent(dst: Path) -> None:
    """Make the folder that DST lies in.

    Raises:
        Error: it isn't writable.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(dst.parent, os.W_OK):
        raise Error(f"{dst.parent}: not writable; choose another DST or change its permissions")


def check_root(dst: Path, attributes: dict[str, Any]) -> None:
    """Check that DST is free, or a store to which a split with these root attributes can be added.

    Raises:
        Error: it is a store with another geometry or other classes.
        UsageError: it is something else.
    """
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


def write_root(workspace: Workspace, attributes: dict[str, Any]) -> None:
    """Write the root group unless it is there."""
    dst, made = workspace.dst, workspace.path / "root"
    if (dst / "zarr.json").exists():
        return
    shutil.rmtree(made, ignore_errors=True)
    write_group(zarr.storage.LocalStore(made), "", attributes)
    dst.mkdir(parents=True, exist_ok=True)
    with open(made / "zarr.json", "rb") as file:
        os.fsync(file.fileno())
    os.replace(made / "zarr.json", dst / "zarr.json")
    made.rmdir()
    fsync_dir(dst)
    fsync_dir(dst.parent)


def remove_store(workspace: Workspace, splits: Collection[str], attributes: dict[str, Any]) -> None:
    """For `--overwrite` delete a store, or only these splits where it has others, too.

    A kill leaves no half of one: each is moved away before it is deleted.

    Args:
        workspace: the store's.
        splits: those that are converted anew.
        attributes: of the root group that they will have.

    Raises:
        UsageError: it is no store: nothing is deleted.
        Error: it has other splits, of another geometry or other classes: nothing is deleted.
    """
    path = workspace.dst
    if not path.exists():
        return
    if path.is_symlink():
        raise UsageError(f"{path}: a link, through which --overwrite deletes nothing; give {path.resolve()} as DST")
    if not path.is_dir():
        raise UsageError(f"{path}: exists and is not a folder; choose another DST")
    doomed = [path]
    if any(path.iterdir()):
        try:
            present = Store(path).splits
        except StoreNotFoundError:
            raise UsageError(
                f"{path}: not an {FORMAT_NAME} store, so --overwrite doesn't delete it; choose another DST"
            ) from None
        except Error:
            present = []  # damaged
        if not set(present) <= set(splits):
            check_root(path, attributes)
            doomed = [path / split for split in splits if (path / split).exists()]
    removed = workspace.path / "overwritten"
    for folder in doomed:
        shutil.rmtree(removed, ignore_errors=True)
        with contextlib.suppress(OSError):  # such as of a mount point
            folder = folder.rename(removed)
        shutil.rmtree(folder)
