"""What a source passes over: counted by kind, with extensions and a few names, so that a person can judge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipeline.text import as_text, counted

_PLURALS: dict[str, str] = {}


def _kind(one: str, several: str) -> str:
    _PLURALS[one] = several
    return one


DOT_FILE = _kind("dot-file", "dot-files")
SYSTEM_FOLDER = _kind("hidden or system folder", "hidden or system folders")
NOT_AN_IMAGE = _kind("file that is no image", "files that are no images")
OUTSIDE_CLASSES = _kind("image outside the class folders", "images outside the class folders")
OUTSIDE_SPLITS = _kind("folder outside the splits", "folders outside the splits")
LINK_TO_NOTHING = _kind("link that leads nowhere", "links that lead nowhere")
LINK_LOOP = _kind("link to a folder above", "links to folders above")
NO_CLASS_ARCHIVE = _kind("file that is no class archive", "files that are no class archives")
NO_IMAGE = _kind("sample without an image", "samples without an image")
OTHER_FILE = _kind("file of a sample that isn't used", "files of samples that aren't used")
_BY_EXTENSION = (NOT_AN_IMAGE, NO_CLASS_ARCHIVE, OTHER_FILE)
_EXAMPLES = 2
_EXTENSIONS_SHOWN = 3
_EXTENSIONS_KEPT = 100  # a folder of `x.00001` ... must not fill the memory
_REST = "of other kinds"


class Ignored(dict[str, int]):
    """Kind, as the constants above, -> count; `SourceSet.ignored`.

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
            examples.append(" ".join(as_text(path.removeprefix(self.root)).split()))
        if kind in _BY_EXTENSION:
            found = self.extensions.setdefault(kind, Counter())
            extension = _extension(path)
            known = extension in found or len(found) < _EXTENSIONS_KEPT
            found[extension if known else _REST] += count


def _extension(path: bytes) -> str:
    stem, dot, extension = path.rpartition(b"/")[2].rpartition(b".")
    return f".{as_text(extension.lower())}" if dot and stem and len(extension) <= 8 else "without extension"


def describe(ignored: Mapping[str, int]) -> str:
    """One line: `12 files that are no images (10 .txt, 2 .json; e.g. notes/readme.txt, x.json), 1 dot-file (.rc)`."""
    said = ((counted(count, kind, _PLURALS.get(kind, kind)), kind) for kind, count in ignored.items() if count)
    return ", ".join(text + _details(ignored, kind) for text, kind in sorted(said, key=lambda pair: pair[1]))


def _details(ignored: Mapping[str, int], kind: str) -> str:
    if not isinstance(ignored, Ignored) or kind not in ignored.examples:
        return ""
    count, examples = ignored[kind], ignored.examples[kind]
    extensions = ignored.extensions.get(kind, Counter())
    details = []
    if count > 1 and extensions:
        most = extensions.most_common(_EXTENSIONS_SHOWN)
        rest = count - sum(number for _, number in most)
        details.append(", ".join(f"{number:,} {extension}" for extension, number in most))
        details[0] += f", {rest:,} {_REST}" if rest else ""
    details.append(("" if count <= len(examples) else "e.g. ") + ", ".join(examples))
    return f" ({'; '.join(details)})"
