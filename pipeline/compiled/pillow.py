"""Whether the folder PIL holds one release's files, seen from outside: PIL may be broken, so it isn't imported."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

PIL_OWNERS = ("pillow", "pillow-simd", "pil")


def pil_owners() -> list[str]:
    """Installed distributions that own the folder PIL; with more than one, it is a mixture of releases."""
    return [name for name in PIL_OWNERS if any(importlib.metadata.distributions(name=name))]


def file_problems(distribution: importlib.metadata.Distribution) -> list[str]:
    """Files of PIL that are altered, missing or foreign, against the list that the distribution installed."""
    files = [(file, file.hash) for file in distribution.files or [] if file.parts[0] == "PIL" and file.hash]
    if not files:
        return []  # installed by a system's package manager, which checks its own files
    problems = []
    known = set()
    for file, wanted in files:
        path = Path(str(distribution.locate_file(file)))
        known.add(path.resolve())
        try:
            digest = hashlib.new(wanted.mode, path.read_bytes()).digest()
        except OSError:
            problems.append(f"{path}: missing")
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted.value:
            problems.append(f"{path}: not the file that {distribution.name} {distribution.version} installed")
    for path in sorted(Path(str(distribution.locate_file("PIL"))).rglob("*")):
        if path.suffix in (".py", ".so", ".pyd") and path.resolve() not in known:
            problems.append(f"{path}: left by another release of PIL")
    return problems
