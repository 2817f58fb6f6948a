"""Which installed packages make up PIL and the resizer, seen from outside: PIL may be broken, so it isn't imported."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

CORE_NAME = "pillow-simd-core"
CORE_MODULE = "pillow_simd_core"
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


def installed_core() -> str | None:
    """Version of pillow-simd-core, such as `12.1.1.post0+avx2`, or None."""
    try:
        return importlib.metadata.version(CORE_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


def instruction_set(version: str) -> str:
    """`avx2` or `sse4.1`, out of a version of pillow-simd-core."""
    return {"avx2": "avx2"}.get(version.partition("+")[2], "sse4.1")


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
