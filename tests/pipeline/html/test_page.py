from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from pages import Element, parse, read_page

from pipeline.html.page import TEMPLATES, count, data_size, macro, render, share
from pipeline.text import printable

pytestmark = pytest.mark.quick


@pytest.fixture
def show(tmp_path: Path) -> Callable[..., Element]:
    """Renders a template's text with some values, and parses it."""

    def shown(template: str, **values: object) -> Element:
        file = tmp_path / "template.html"
        file.write_text('{% import "parts.html" as parts %}' + template)
        return parse(render(file, **values).decode())

    return shown


@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_any_text_comes_back_as_text(text: str) -> None:
    made = macro("parts.html", "tiles", [(text, text, text)])
    made.encode()  # no lone surrogate is left
    tree = parse(made)
    assert tree.find("dt")[0].raw_text == printable(text)
    assert tree.find("strong")[0].raw_text == printable(text)
    (region,) = parse(macro("parts.html", "table", text, [text], caller=lambda: "")).find("div", "scroll")
    assert region.attributes["aria-label"] == printable(text)


def test_only_markup_is_left_alone() -> None:
    made = str(macro("parts.html", "row", "<b>&", Markup("<i>x</i>"), 3))
    assert made.strip() == '<tr><th scope="row">&lt;b&gt;&amp;</th><td><i>x</i></td><td>3</td></tr>'


def test_a_value_that_is_missing_is_an_error(show: Callable[..., Element]) -> None:
    with pytest.raises(jinja2.UndefinedError, match="oops"):
        show("{{ oops }}")


def test_a_long_name_is_cut_at_its_middle_and_whole_in_the_title() -> None:
    (name,) = parse(macro("parts.html", "name", "a" * 100 + "\n" + "b" * 100, most=30)).find("bdi")
    assert len(name.text) == 33
    assert name.attributes["title"] == "a" * 100 + "\\n" + "b" * 100
    assert parse(macro("parts.html", "name", "abc")).find("bdi")[0].attributes == {}


@pytest.mark.parametrize(
    ("value", "text"), [(True, "yes"), (None, "none"), (1000, "1,000"), ([1, "a"], "1, a"), (0.5, "0.5"), ("x", "x")]
)
def test_fields_are_written_for_people(value: object, text: str) -> None:
    assert str(macro("parts.html", "value", value)) == text


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (count(1281167), "1,281,167"),
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


def test_tables_have_headings_and_bars(show: Callable[..., Element]) -> None:
    tree = show(
        """{% call parts.table("What", ["Name", "Number"]) %}
        {{ parts.row("a", "1") }}{{ parts.row("b", parts.bar(1000, 4000)) }}
        {% endcall %}"""
    )
    assert tree.tables() == {"What": [["Name", "Number"], ["a", "1"], ["b", "1,000"]]}
    assert [cell.attributes["scope"] for cell in tree.find("th")] == ["col", "col", "row", "row"]
    assert tree.find("span", "bar")[0].attributes["style"] == "width:25%"


def test_lines_to_copy_stay_lines(show: Callable[..., Element]) -> None:
    (code,) = show("{{ parts.code(text) }}", text="a <\n\n  b").find("code")
    assert code.raw_text == "a <\n\n  b\n"


def test_page_is_whole(tmp_path: Path) -> None:
    template, page = tmp_path / "page.html", tmp_path / "out.html"
    template.write_text(
        '{% extends "base.html" %}{% import "parts.html" as parts %}'
        '{% block content %}{% call parts.section("a", "First") %}<p>x</p>{% endcall %}{% endblock %}'
    )
    page.write_bytes(render(template, eyebrow="Kind", title="A & B", sections=[("a", "First")]))
    tree = read_page(page)
    assert tree.find("title")[0].text == "A & B – Kind"
    assert tree.find("h1")[0].text == "A & B"
    assert tree.one("a").find("p")[0].text == "x"


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
    style = (TEMPLATES / "style.css").read_text()
    themes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", style)]
    assert len(themes) == 3
    for theme in themes:
        for text in ("ink", "soft", "accent", "good", "bad"):
            assert min(contrast(theme[text], theme[ground]) for ground in ("paper", "card", "wash")) >= 4.5
        assert min(contrast(theme[mark], theme["card"]) for mark in ("good", "bad")) >= 4.5
        assert min(contrast(theme[f"s{i}"], theme["card"]) for i in range(7)) >= 3
