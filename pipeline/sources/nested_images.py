"""Images that lie deeper than the class folders: a class may have folders of its own, or SRC is a folder too high.

With SRC `photos` the class of `photos/stuff/cat/1.jpg` is `stuff`, with SRC `photos/stuff` it is `cat`.
"""

from __future__ import annotations

from pipeline.sources import names
from pipeline.text import counted

_CLASSES_NAMED = 3


class NestedImages:
    """Collects such images of one split, given the keys of all its labelled images in their order."""

    def __init__(self) -> None:
        self.first = b""
        self._total = self._count = 0
        self._classes: list[bytes] = []

    def look(self, key: bytes) -> None:
        """Take note of one image: `class/1.jpg` is where it should be, `class/folder/1.jpg` is deeper."""
        self._total += 1
        if key.count(b"/") < 2:
            return
        self._count += 1
        if not self.first:
            self.first = key
        name = key.partition(b"/")[0]
        if len(self._classes) <= _CLASSES_NAMED and name not in self._classes[-1:]:
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
        taken = ", ".join(names.text(name) for name in self._classes[:_CLASSES_NAMED])
        more = ", ..." if len(self._classes) > _CLASSES_NAMED else ""
        lie = "lies" if self._count == 1 else "lie"
        return (
            f"{self._count:,} of {counted(self._total, 'image')} {lie} deeper than the class folders, such as "
            f"{example}; taken for the class: {taken}{more}; if the folders below are the classes, {remedy}"
        )
