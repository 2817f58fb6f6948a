from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import parse

from pipeline.html.page import Html, bar_cell, count, data_size, join, page, printable, share, short_count, table, tag
from pipeline.html.style import STYLE

pytestmark = pytest.mark.quick


@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_any_text_comes_back_as_text(text: str) -> None:
    made = tag("p", text, title=text)
    made.encode()  # no lone surrogate is left
    (element,) = parse(made).find("p")
    assert element.text == printable(text)
    assert element.attributes["title"] == printable(text)


def test_only_markup_is_left_alone() -> None:
    assert tag("p", "<b>&", tag("i", '"')) == '<p>&lt;b&gt;&amp;<i>"</i></p>'
    assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'
    assert join("<", None, Html("<br>"), 3) == "&lt;<br>3"


def test_attributes() -> None:
    made = tag("details", class_="a", aria_label="x", open=True, hidden=False, id=None, viewBox="0")
    assert made == '<details class="a" aria-label="x" open viewBox="0"></details>'
    assert tag("img", src="data:,") == '<img src="data:,">'


def test_printable_shows_what_is_not_and_shortens() -> None:
    assert printable("a\x00\n\u202e\udc80é日") == "a\\x00\\n\\u202e\\udc80é日"
    short = printable("a" * 100 + "b" * 100, 30)
    assert short == "a" * 20 + " … " + "b" * 10


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (count(1281167), "1,281,167"),
        (short_count(1_281_167), "1.28M"),
        (short_count(25_000), "25k"),
        (short_count(0.5), "0.5"),
        (data_size(98.4e9), "98.4 GB"),
        (data_size(999), "999 bytes"),
        (share(1, 3), "33.3%"),
        (share(1, 1_000_000), "< 0.01%"),
        (share(999_999, 1_000_000), "> 99.99%"),
        (share(5, 700), "0.71%"),
        (share(0, 5), "0%"),
        (share(5, 5), "100%"),
        (share(0, 0), "0%"),
    ],
)
def test_figures(made: str, wanted: str) -> None:
    assert made == wanted


def test_table_marks_headings_and_figures() -> None:
    tree = parse(table("What", ["Name", "Number"], [["a", "1"], ["b", bar_cell(1, 4, "one")]]))
    assert tree.tables() == {"What": [["Name", "Number"], ["a", "1"], ["b", "one"]]}
    assert [cell.attributes["scope"] for cell in tree.find("th")] == ["col", "col", "row", "row"]
    assert tree.find("span", "bar")[0].attributes["style"] == "width:25%"


def test_page_is_whole() -> None:
    tree = parse(page("Kind", "A & B", "lead", [("a", "First", Html("<p>x</p>"))], front=Html("")).decode())
    assert tree.find("title")[0].text == "A & B – Kind"
    assert tree.find("h1")[0].text == "A & B"


def test_needs_the_standard_library_only() -> None:
    code = "import sys, pipeline.html.page; print([m for m in ('numpy', 'PIL', 'zarr', 'yaml') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb (WCAG 2.2)."""
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    values = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_light_dark_and_print() -> None:
    themes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", STYLE)]
    assert len(themes) == 3
    for theme in themes:
        for text in ("ink", "soft", "accent", "good", "bad"):
            assert min(contrast(theme[text], theme[ground]) for ground in ("paper", "card", "wash")) >= 4.5
        assert min(contrast(theme[mark], theme["card"]) for mark in ("good", "bad")) >= 4.5
        assert min(contrast(theme[f"s{i}"], theme["card"]) for i in range(7)) >= 3
