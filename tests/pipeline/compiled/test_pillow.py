"""Files of PIL that aren't one release's are noticed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

import pytest

from pipeline.compiled.pillow import file_problems


@pytest.mark.quick
def test_altered_missing_and_foreign_files_are_problems(tmp_path: Path) -> None:
    folder, info = tmp_path / "PIL", tmp_path / "pillow-1.0.dist-info"
    folder.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 1.0\n")
    record = []
    for name in ("Image.py", "_core.so", "gone.py"):
        data = name.encode()
        (folder / name).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"PIL/{name},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join(record))
    distribution = importlib.metadata.PathDistribution(info)
    assert file_problems(distribution) == []

    (folder / "_core.so").write_bytes(b"of another release")
    (folder / "gone.py").unlink()
    (folder / "_extra.so").write_bytes(b"left behind")
    problems = file_problems(distribution)
    assert len(problems) == 3
    assert "_core.so: not the file that pillow 1.0 installed" in problems[0]
    assert "gone.py: missing" in problems[1]
    assert "_extra.so: left by another release" in problems[2]
