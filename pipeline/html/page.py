"""The HTML reports' Jinja2 templates, and figures as people read them.

Templates escape all text. A page is one file without scripts and loads nothing: its content security policy forbids
it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.text import counted, printable

TEMPLATES = Path(__file__).parent / "templates"
Units = tuple[tuple[float, str], ...]
SIZE_UNITS: Units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def render(template: Path, **values: Any) -> bytes:
    """A page as UTF-8.

    Args:
        template: extends `base.html`; it may use everything in `TEMPLATES`.
        values: what the template prints. Text is escaped; only `Markup` isn't.
    """
    page = _environment(template.parent).get_template(template.name)
    return page.render(made_at=datetime.now(UTC), **values).encode()


def macro(template: str, name: str, *args: object, **values: object) -> Markup:
    """What a macro of a template in `TEMPLATES` makes."""
    made: Markup = getattr(_environment(TEMPLATES).get_template(template).module, name)(*args, **values)
    return made


@lru_cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    filters = (count, data_size, share, counted, printable, repr)
    environment.filters.update({one.__name__: one for one in filters})
    return environment


def count(value: float) -> str:
    """1,281,167"""
    return f"{value:,.0f}"


def unit_of(value: float, units: Units) -> tuple[float, str]:
    """(size, name) of the largest unit that isn't above the value; the last one where all are."""
    return next(((size, name) for size, name in units if abs(value) >= size), units[-1])


def data_size(num_bytes: float) -> str:
    """Decimal units: 98.4 GB"""
    size, name = unit_of(num_bytes, SIZE_UNITS)
    return f"{num_bytes / size:,.{0 if size == 1 else 1}f} {name}"


def share(part: float, whole: float) -> str:
    """A percentage in which a little is never shown as nothing, nor nearly all as all."""
    if not whole:
        return "0%"
    value = 100 * part / whole
    if 0 < value < 0.01:
        return "< 0.01%"
    if 99.99 < value < 100:
        return "> 99.99%"
    digits = 0 if value in (0, 100) else 1 if 1 <= value <= 99 else 2
    return f"{value:.{digits}f}%"
