"""The documents, their code blocks, and how a Python block is run: in a folder of its own, as a script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "data" / "README.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """What the code prints, run in `folder`; it must succeed."""
    (folder / "block.py").write_text(code)
    command = [sys.executable, "block.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
