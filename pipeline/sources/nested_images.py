"""Images that lie deeper than the class folders: a class may have folders of its own, or SRC is a folder too high.

With SRC `photos` the class of `photos/stuff/cat/1.jpg` is `stuff`, with SRC `photos/stuff` it is `cat`.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.sources import names
from pipeline.sources.labels import some
from pipeline.text import as_text, counted


class NestedImages:
    """Collects such images of one split, given the keys of all its labelled images in their order."""

    def __init__(self) -> None:
        self._total = 0
        self._roots: dict[bytes, tuple[int, bytes]] = {}
        self._classes: list[str] = []

    def add(self, key: bytes) -> None:
        """Count one image: `class/1.jpg` is where it should be, `class/folder/1.jpg` is deeper."""
        self._total += 1
        if key.count(b"/") < 2:
            return
        folders = key.split(b"/")[:-1]
        splits = [depth for depth, folder in enumerate(folders) if depth and names.split_of_folder(folder)]
        root = b"/".join(folders[: splits[0] if splits else -1])
        count, first = self._roots.get(root, (0, key))
        self._roots[root] = count + 1, first
        name = as_text(folders[0])
        if name not in self._classes[-1:]:
            self._classes.append(name)

    def warning(self, path: Callable[[bytes], str], remedy: str) -> list[str]:
        """One line, or none where no image lies deeper; `path` shows a path below the split's folder.

        `remedy` says what to do where the deeper folders are the classes, with `{root}` for the folder of most of them.
        """
        if not self._roots:
            return []
        root, (_, first) = max(self._roots.items(), key=lambda item: item[1][0])
        deeper = sum(count for count, _ in self._roots.values())
        what = f"{counted(self._total, 'image')} {'lies' if deeper == 1 else 'lie'}"
        return [
            f"{deeper:,} of {what} deeper than the class folders, such as {path(first)}; taken for the class: "
            f"{some(self._classes)}; if the folders below are the classes, " + remedy.format(root=path(root))
        ]
