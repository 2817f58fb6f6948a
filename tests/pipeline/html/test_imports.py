"""Pages need Jinja2 and little else; whoever makes no page doesn't need Jinja2."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("pipeline.html.page", ("numpy", "PIL", "zarr", "yaml", "torch", "matplotlib")),
        ("pipeline.commands.report", ("torch", "matplotlib")),
        ("pipeline.store.reader, pipeline.cli", ("pipeline.html", "jinja2")),
        ("trainer.report.records, trainer.report.provenance", ("jinja2", "torch")),
    ],
)
def test_imports_no_more_than_it_needs(modules: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([m for m in {unwanted!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
