"""Reading HTML reports back in tests: a strict parser that finds elements, text and tables."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

VOID = {"br", "col", "hr", "img", "link", "meta"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def find(self, tag: str, class_: str = "") -> list[Element]:
        return [e for e in self.walk() if e.tag == tag and class_ in ["", *e.attributes.get("class", "").split()]]

    def one(self, id_: str) -> Element:
        (found,) = [e for e in self.walk() if e.attributes.get("id") == id_]
        return found

    @property
    def raw_text(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw_text for child in self.children)

    @property
    def text(self) -> str:
        """The text as it is shown: any white space is one space."""
        return " ".join(self.raw_text.split())

    def tables(self) -> dict[str, list[list[str]]]:
        """Caption -> rows of cells' texts, the head first."""
        return {
            table.find("caption")[0].text: [
                [cell.text for cell in row.walk() if cell.tag in ("td", "th")] for row in table.find("tr")
            ]
            for table in self.find("table")
        }

    def facts(self) -> dict[str, str]:
        return {
            pair.find("dt")[0].text: pair.find("dd")[0].text
            for pairs in self.find("dl")
            for pair in pairs.children
            if isinstance(pair, Element)
        }


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"attribute twice: {tag} {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Element:
    """The tree of a page or a piece of one; fails on tags that don't match."""
    builder = _Builder()
    builder.feed(text)
    builder.close()
    assert builder.open == [builder.root], "elements left open"
    return builder.root


def read_page(path: Path) -> Element:
    """Parse a report and check what must hold for each: complete in itself, no scripts, labelled, reachable."""
    text = path.read_text(encoding="utf-8")
    page = parse(text)
    elements = list(page.walk())
    assert not {e.tag for e in elements} & {"script", "iframe", "object", "embed", "base", "form", "video", "audio"}
    for element in elements:
        assert not [name for name in element.attributes if name.startswith("on")]
        for name in ("src", "href", "srcset", "data", "poster", "action", "xlink:href"):
            value = element.attributes.get(name)
            assert value is None or re.match(r"#[\w-]+$|data:(image/(png|jpeg);base64,|,$)", value), value
    style = page.find("style")[0].raw_text + " ".join(e.attributes.get("style", "") for e in elements)
    assert "url(" not in style
    assert "@import" not in style
    policy = [e.attributes["content"] for e in page.find("meta") if "http-equiv" in e.attributes]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]

    ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    assert {e.attributes["href"][1:] for e in page.find("a")} <= set(ids)
    assert {e.attributes["aria-labelledby"] for e in elements if "aria-labelledby" in e.attributes} <= set(ids)
    assert page.find("html")[0].attributes["lang"] == "en"
    assert len(page.find("h1")) == 1
    levels = [int(e.tag[1]) for e in elements if re.fullmatch("h[1-6]", e.tag)]
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False)), levels
    assert all(image.attributes["alt"].strip() for image in page.find("img"))
    for svg in page.find("svg"):
        shown = svg.attributes.get("role") == "img" and svg.attributes["aria-label"].strip()
        assert shown or svg.attributes.get("aria-hidden") == "true"
    assert all(table.find("caption")[0].text for table in page.find("table"))
    assert all(cell.attributes["scope"] in ("row", "col") for cell in page.find("th"))
    assert all("nan" not in e.attributes.get(name, "") for e in elements for name in ("d", "x", "y", "cx", "cy"))
    return page


def image_of(element: Element) -> Image.Image:
    """The picture in an img element's data URI."""
    return Image.open(io.BytesIO(base64.b64decode(element.attributes["src"].split(",", 1)[1])))
