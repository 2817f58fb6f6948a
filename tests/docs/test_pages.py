"""What the documents claim: blocks print what stands below them, messages are the code's, links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from documents import DOCS, DOCUMENTS, ROOT, blocks, run
from folders import make_folder
from stores import make_images, make_store

PAGES = [*DOCUMENTS, ROOT / "examples" / "README.md"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the blocks expect in the folder where they run."""
    make_folder(tmp_path, {"photos": {"cat": 70, "dog": 70}})
    np.savez(tmp_path / "x.npz", images=np.zeros((5, 30, 40, 3), np.uint8), labels=np.array([0, 1, 0, 1, -2]))
    return tmp_path


def test_the_loop_in_the_readme_trains(folder: Path) -> None:
    from pipeline import convert

    text = (ROOT / "README.md").read_text()
    assert text[: text.index("```python")].count("\n") + 30 < 100  # within the first hundred lines, whole
    (loop,) = blocks(ROOT / "README.md", "python")
    convert(folder / "photos", folder / "data" / "own-224.zarr", size=224, n_jobs=1, quiet=True)
    printed = run(loop.replace("crop=192", "crop=32"), folder)  # small, else as it stands
    assert re.findall(r"^epoch (\d): loss \d\.\d+$", printed, re.M) == ["0", "1"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 220


def test_the_source_of_ones_own_converts(folder: Path) -> None:
    (source,) = blocks(DOCS / "sources.md", "python")
    run(source, folder)
    assert (folder / "x.zarr" / "train" / "zarr.json").exists()


def test_the_reader_in_the_specification_runs(folder: Path) -> None:
    from pipeline import convert

    convert(folder / "photos", folder / "data" / "digits-32.zarr", size=32, n_jobs=1, quiet=True)
    code, _ = blocks(ROOT / "docs" / "format.md", "python")
    assert "140 samples" in run(code, folder)
    assert "has shape (32, 32, 3)" in run(code, folder)


def test_the_order_is_what_its_page_claims(tmp_path: Path) -> None:
    check, _ = blocks(DOCS / "order.md", "python")
    assert run(check, tmp_path) == "all claims hold\n"


@pytest.mark.parametrize("name", ["order.md", "performance.md"])
def test_what_stands_below_a_block_is_what_it_prints(name: str, tmp_path: Path) -> None:
    text = (DOCS / name).read_text()
    pairs = re.findall(r"^```python\n((?:(?!^```).)*?)^```\n+(?:prints\n+)?^```text\n(.*?)^```$", text, re.M | re.S)
    assert pairs
    for code, printed in pairs:
        assert run(code, tmp_path) == printed


def test_the_loop_to_migrate_to_runs(tmp_path: Path) -> None:
    images, labels = make_images(300, 256), np.arange(300) % 4
    splits = {"train": (images, labels), "val": (images[:20], labels[:20])}
    make_store(tmp_path / "data" / "imagenet-256.zarr", splits, chunk_images=20)
    (code,) = blocks(DOCS / "migration.md", "python")
    assert run(code, tmp_path) == "1 steps an epoch; torch.Size([20, 3, 224, 224]) torch.float32\n"


def test_the_loops_to_migrate_from_are_python() -> None:
    before = blocks(DOCS / "migration.md", "py")
    assert len(before) == 3
    for code in before:
        compile(code, "before", "exec")


def test_the_tensorstore_reader_in_the_specification_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    images = make_images(140, 32)
    store = make_store(tmp_path / "data" / "digits-32.zarr", {"train": (images, np.arange(140) % 2)}, chunk_images=10)
    _, code = blocks(DOCS / "format.md", "python")
    code += f"assert batch.tobytes() == open({str(tmp_path / 'wanted')!r}, 'rb').read()\n"
    (tmp_path / "wanted").write_bytes(images[[5, 0, 9]].tobytes())
    assert "(140, 32, 32, 3) in pieces of 1 image" in run(code, store.parent.parent)


def templates() -> Iterator[re.Pattern[str]]:
    """Every text in the code as a pattern, with anything in the place of what is filled in."""
    for path in [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = re.split(r"(\.\*)", re.sub(r"\\\{\w+\\\}", ".*", re.escape(node.value)))
            else:
                continue
            if sum(len(part) for part in parts if part != ".*") > 20:
                yield re.compile("".join(parts))


def test_messages_that_troubleshooting_quotes_are_the_codes_own() -> None:
    known = list(templates())
    quoted = "".join(blocks(DOCS / "troubleshooting.md", "text")).splitlines()
    assert len(quoted) > 20
    for line in quoted:
        message = re.sub(r"^(error|trainer): ", "", line)
        assert any(pattern.fullmatch(message) for pattern in known), line


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target
