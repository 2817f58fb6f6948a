"""The page about the architecture is the code's: its files exist, its main road is short, its rooms are all."""

from __future__ import annotations

import re

from documents import DOCS, ROOT

PAGE = (DOCS / "architecture.md").read_text()
MODULES = [path for package in ("pipeline", "trainer") for path in sorted((ROOT / package).rglob("*.py"))]


def lines(*names: str) -> int:
    return sum(len((ROOT / name).read_text().splitlines()) for name in names)


def test_the_main_road_is_short() -> None:
    road = re.findall(r"^\d+\. \[`(.*?)`\]", PAGE, re.MULTILINE)
    assert len(road) >= 12
    assert lines(*road) <= 3000


def test_every_room_is_on_the_page() -> None:
    rooms = {path.parent.name for path in MODULES} - {"pipeline", "trainer"}
    assert {room for room in rooms if f"{room}/" not in PAGE} == set()


def test_every_file_that_it_names_exists() -> None:
    for name in re.findall(r"`((?:pipeline|trainer|docs|tests)/[\w/]*(?:\.\w+)?)`", PAGE):
        assert (ROOT / name).exists(), name
