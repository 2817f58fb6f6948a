"""What a source passes over: counted by kind, with extensions and a few names, so that a person can judge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipeline.sources import names
from pipeline.text import counted

NO_CLASS_ARCHIVE = "not a class archive"
NO_IMAGE = "sample without an image"
OTHER_FILE = "file of a sample that isn't used"
OUTSIDE_SPLITS = "folder outside the splits"
_WORDS = {
    names.DOT_FILE: ("dot-file", ""),
    names.SYSTEM_FOLDER: ("hidden or system folder", ""),
    names.NOT_AN_IMAGE: ("file that is no image", "files that are no images"),
    names.OUTSIDE_CLASSES: ("image outside the class folders", "images outside the class folders"),
    names.LINK_LOOP: ("link to a folder above", "links to folders above"),
    OUTSIDE_SPLITS: ("folder outside the splits", "folders outside the splits"),
    NO_CLASS_ARCHIVE: ("file that is no class archive", "files that are no class archives"),
    NO_IMAGE: ("sample without an image", "samples without an image"),
    OTHER_FILE: ("file of a sample that isn't used", "files of samples that aren't used"),
}
_BY_EXTENSION = (names.NOT_AN_IMAGE, NO_CLASS_ARCHIVE, OTHER_FILE)
_EXAMPLES = 2
_EXTENSIONS_SHOWN = 3
_EXTENSIONS_KEPT = 100  # a folder of `x.00001` ... must not fill the memory
_REST = "of other kinds"


class Ignored(dict[str, int]):
    """Kind -> count, as `SourceSet.ignored` has it.

    Args:
        root: the folder that names are shown relative to.

    Attributes:
        examples: kind -> the first names.
        extensions: kind -> how many files have which extension, for kinds of files.
    """

    def __init__(self, root: bytes = b"") -> None:
        super().__init__()
        self.root = root + b"/" if root else b""
        self.examples: dict[str, list[str]] = {}
        self.extensions: dict[str, Counter[str]] = {}

    def add(self, kind: str, path: bytes, count: int = 1) -> None:
        """Count `count` things of a kind, the first of which is at `path`."""
        self[kind] = self.get(kind, 0) + count
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _EXAMPLES:
            examples.append(" ".join(names.text(path.removeprefix(self.root)).split()))
        if kind in _BY_EXTENSION:
            found = self.extensions.setdefault(kind, Counter())
            extension = _extension(path)
            known = extension in found or len(found) < _EXTENSIONS_KEPT
            found[extension if known else _REST] += count


def _extension(path: bytes) -> str:
    stem, dot, extension = path.rpartition(b"/")[2].rpartition(b".")
    return f".{names.text(extension.lower())}" if dot and stem and len(extension) <= 8 else "without extension"


def describe(ignored: Mapping[str, int]) -> str:
    """One line: `12 files that are no images (10 .txt, 2 .json; e.g. notes/readme.txt, x.json), 1 dot-file (.rc)`."""
    return ", ".join(_describe(ignored, kind, count) for kind, count in sorted(ignored.items()) if count)


def _describe(ignored: Mapping[str, int], kind: str, count: int) -> str:
    text = counted(count, *_WORDS[kind]) if kind in _WORDS else f"{count:,} {kind}"
    if not isinstance(ignored, Ignored) or kind not in ignored.examples:
        return text
    examples = ", ".join(ignored.examples[kind])
    extensions = ignored.extensions.get(kind, Counter())
    details = []
    if count > 1 and extensions:
        most = extensions.most_common(_EXTENSIONS_SHOWN)
        rest = count - sum(number for _, number in most)
        details.append(", ".join(f"{number:,} {extension}" for extension, number in most))
        details[0] += f", {rest:,} {_REST}" if rest else ""
    details.append(examples if count <= len(ignored.examples[kind]) else f"e.g. {examples}")
    return f"{text} ({'; '.join(details)})"
