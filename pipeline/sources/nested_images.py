"""Images that lie deeper than the class folders: a class may have folders of its own, or SRC is a folder too high.

With SRC `photos` the class of `photos/stuff/cat/1.jpg` is `stuff`, with SRC `photos/stuff` it is `cat`.
"""

from __future__ import annotations

from pipeline.sources import names
from pipeline.sources.labels import some
from pipeline.text import as_text, counted


class NestedImages:
    """Collects such images of one split, given the keys of all its labelled images in their order."""

    def __init__(self) -> None:
        self.first = b""
        self._total = self._count = 0
        self._classes: list[str] = []

    def add(self, key: bytes) -> None:
        """Count one image: `class/1.jpg` is where it should be, `class/folder/1.jpg` is deeper."""
        self._total += 1
        if key.count(b"/") < 2:
            return
        self._count += 1
        if not self.first:
            self.first = key
        name = as_text(key.partition(b"/")[0])
        if name not in self._classes[-1:]:
            self._classes.append(name)

    @property
    def wanted_root(self) -> bytes:
        """The folder, relative to the split's, whose sub-folders would make the first such image's folder its class."""
        folders = self.first.split(b"/")[:-1]
        splits = [depth for depth, folder in enumerate(folders) if depth and names.split_of_folder(folder)]
        return b"/".join(folders[: splits[0] if splits else -1])

    def warning(self, example: str, remedy: str) -> str:
        """One line.

        Args:
            example: where the first such image is.
            remedy: what to do where the deeper folders are the classes.
        """
        lie = "lies" if self._count == 1 else "lie"
        return (
            f"{self._count:,} of {counted(self._total, 'image')} {lie} deeper than the class folders, such as "
            f"{example}; taken for the class: {some(self._classes)}; if the folders below are the "
            f"classes, {remedy}"
        )
