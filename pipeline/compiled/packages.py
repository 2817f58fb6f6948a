"""Which installed packages make up PIL and the resizer, seen from outside: PIL may be broken, so it isn't imported."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

SIMD_NAME = "pillow-simd-resize"
SIMD_MODULE = "pillow_simd_resize"
SIMD_SOURCES = Path(__file__).parent
PIL_OWNERS = ("pillow", "pillow-simd", "pil")


def cpu_flags() -> frozenset[str]:
    """Names of this processor's instruction sets as Linux gives them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def source_digest() -> str:
    """Letters and digits that change with our C source, so that a library made from another one is not used."""
    digest = hashlib.sha256()
    for path in sorted(SIMD_SOURCES.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return "c" + digest.hexdigest()[:7]  # a letter first: a version may drop leading zeros


@dataclass(frozen=True)
class SimdVersion:
    """Version of the installed resize: `12.1.1.post0+avx2.c1a2b3c4`.

    Args:
        release: of pillow-simd.
        instructions: `avx2` or `sse4`, what it was compiled for.
        source: `source_digest()` of our C source.
    """

    release: str
    instructions: str
    source: str

    def __str__(self) -> str:
        return f"{self.release}+{self.instructions}.{self.source}"

    @property
    def cpu_flag(self) -> str:
        """What Linux calls the instructions that the processor must have."""
        return {"avx2": "avx2", "sse4": "sse4_2"}[self.instructions]


def installed_simd() -> SimdVersion | None:
    """Version of the distribution pillow-simd-resize, or None."""
    try:
        version = importlib.metadata.version(SIMD_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    release, _, local = version.partition("+")
    instructions, _, source = local.partition(".")
    return SimdVersion(release, instructions, source)


def pil_owners() -> list[str]:
    """Installed distributions that own the folder PIL; more than one mean a mixture of releases."""
    return [name for name in PIL_OWNERS if any(importlib.metadata.distributions(name=name))]


def file_problems(distribution: importlib.metadata.Distribution) -> list[str]:
    """Files of PIL that are altered, missing or foreign, against the list that the distribution installed."""
    files = [(file, file.hash) for file in distribution.files or [] if file.parts[0] == "PIL" and file.hash]
    if not files:
        return []  # installed by a system's package manager, which checks its own files
    problems = []
    folder = Path(str(distribution.locate_file("PIL")))
    known = {Path(str(distribution.locate_file(file))).resolve() for file, _ in files}
    for file, wanted in files:
        path = Path(str(distribution.locate_file(file)))
        try:
            digest = hashlib.new(wanted.mode, path.read_bytes()).digest()
        except OSError:
            problems.append(f"{path}: missing")
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted.value:
            problems.append(f"{path}: not the file that {distribution.name} {distribution.version} installed")
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".so", ".pyd") and path.resolve() not in known:
            problems.append(f"{path}: left by another release of PIL")
    return problems
