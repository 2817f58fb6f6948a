"""The shell of the HTML reports: markup that escapes by construction, and the parts that every page is made of.

Standard library only. A page is one file without scripts, and loads nothing: its content security policy forbids it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pipeline.html.style import STYLE

VOID_TAGS = frozenset({"br", "col", "hr", "img", "link", "meta"})
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Html(str):
    """Markup; any other string is text and is escaped where it's put into a page."""

    __slots__ = ()


def printable(text: str, most: int = 200) -> str:
    """Text that can't disturb a page: what isn't printable (controls, surrogates, bidirectional marks) as \\x.., and
    the middle of a text longer than `most` characters replaced by an ellipsis."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def join(*children: object) -> Html:
    """Children one after the other; text is escaped, None and empty strings are left out."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(str(child))
        elif child is not None:
            parts.append(html.escape(printable(str(child), most=100_000), quote=False))
    return Html("".join(parts))


def tag(tag_name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Underscores in attributes' names become hyphens, a last one is dropped (`class_`); None and False
    leave an attribute out, True writes its bare name."""
    written = [tag_name]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(name)
        elif value is not None and value is not False:
            written.append(f'{name}="{html.escape(printable(str(value), most=1_000_000))}"')
    start = f"<{' '.join(written)}>"
    return Html(start if tag_name in VOID_TAGS else f"{start}{join(*children)}</{tag_name}>")


# Figures as people read them


def count(value: float) -> str:
    """1,281,167"""
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """For axes: 1.3M, 25k, 0.5"""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def data_size(num_bytes: float) -> str:
    """Decimal units: 98.4 GB"""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def share(part: float, whole: float) -> str:
    """A percentage in which a little is never shown as nothing, nor nearly all as all."""
    if not whole:
        return "0%"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "< 0.01%"
    if 99.99 < percent < 100:
        return "> 99.99%"
    digits = 0 if percent in (0, 100) else 1 if 1 <= percent <= 99 else 2
    return f"{percent:.{digits}f}%"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """1 class, 2 classes"""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


# Parts of a page


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    text_columns: int = 1,
    hide_caption: bool = False,
    class_: str = "",
) -> Html:
    """A table with a caption, in a region that scrolls sideways where it's too wide.

    Args:
        caption: what the table holds.
        head: the columns' names.
        rows: cells; the first of each row is its heading. A cell may be a `td` element of the caller's.
        text_columns: so many leading columns are text; the others are figures, aligned to the right.
        hide_caption: only for screen readers, where a heading says the same.
    """

    def cell(column: int, value: object) -> Html:
        if isinstance(value, Html) and value.startswith("<td"):
            return value
        kind = None if column < text_columns else "num"
        return tag("td", value, class_=kind) if column else tag("th", value, scope="row", class_=kind)

    names = [tag("th", name, scope="col", class_=None if i < text_columns else "num") for i, name in enumerate(head)]
    body = [tag("tr", *(cell(i, value) for i, value in enumerate(row))) for row in rows]
    whole = tag(
        "table",
        tag("caption", caption, class_="unseen" if hide_caption else None),
        tag("thead", tag("tr", *names)),
        tag("tbody", *body),
    )
    return tag("div", whole, class_=f"scroll {class_}".rstrip(), role="region", aria_label=caption, tabindex="0")


def bar_cell(value: float, largest: float, text: str) -> Html:
    """A table cell with a figure and a bar of `value / largest` behind it."""
    percent = 100 * value / largest if largest else 0.0
    bar = tag("span", class_="bar", style=f"width:{percent:.3g}%", aria_hidden="true")
    return tag("td", tag("span", bar, class_="track"), tag("span", text, class_="value"), class_="bars")


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """A list of names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def tiles(entries: Iterable[tuple[str, str, str]]) -> Html:
    """The page's leading figures: (name, value, remark)."""
    made = (
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("span", remark) if remark else ""))
        for name, value, remark in entries
    )
    return tag("dl", *made, class_="tiles")


def details(summary: object, *children: object, is_open: bool = False) -> Html:
    """Something that opens on a click or a key."""
    return tag("details", tag("summary", summary), *children, open=is_open)


def figure(title: str, chart: Html, *notes: object) -> Html:
    """A chart with its title above and remarks below."""
    return tag(
        "figure",
        tag("figcaption", title),
        chart,
        *(tag("p", note, class_="note") for note in notes if note),
        class_="chart",
    )


def section(anchor: str, title: str, *children: object) -> Html:
    """A part of the page that the navigation leads to."""
    return tag(
        "section", tag("h2", title, id=f"{anchor}-title"), *children, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def verdict(good: bool, text: object) -> Html:
    """A line with a mark that says good or bad in shape, word and colour."""
    word = tag("span", "passed: " if good else "failed: ", class_="unseen")
    mark = tag("span", "✓" if good else "✗", class_="mark", aria_hidden="true")
    return tag("li", mark, tag("span", word, text), class_="good" if good else "bad")


def page(eyebrow: str, title: str, lead: object, sections: Sequence[tuple[str, str, Html]], *, front: Html) -> bytes:
    """The whole file, UTF-8.

    Args:
        eyebrow: what kind of page it is.
        title: its subject.
        lead: one or two sentences on the subject.
        sections: (anchor, name for the navigation, what `section` made).
        front: what stands before the sections, such as `tiles`.
    """
    now = datetime.now(UTC)
    links = (tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in sections)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="efficient-imagenet"),
        tag("title", f"{title} – {eyebrow}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(STYLE)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", class_="skip", href="#content"),
        tag(
            "header",
            tag("p", eyebrow, class_="eyebrow"),
            tag("h1", title),
            tag("p", lead, class_="lead"),
            tag("nav", tag("ul", *links), aria_label="Sections"),
        ),
        tag("main", front, *(made for _, _, made in sections), id="content", tabindex="-1"),
        tag(
            "footer",
            tag(
                "p",
                "Made by efficient-imagenet on ",
                tag("time", f"{now:%Y-%m-%d %H:%M} UTC", datetime=f"{now:%Y-%m-%dT%H:%MZ}"),
                ". The page is complete in itself and loads nothing.",
            ),
        ),
    )
    return ("<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n").encode()
