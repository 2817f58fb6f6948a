"""Geometry of the HTML reports' charts: values in, inline SVG out, through the macros of `templates/charts.html`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup

from pipeline.html.page import count, macro, unit_of

NUM_COLOURS = 7
COUNT_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
DASHES = ("none", "7 4", "2 4")
HEAT_OPACITIES = tuple(round(0.12 + 0.88 * (level / 6) ** 1.3, 2) for level in range(1, 7))
Format = Callable[[float], str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis: the range of values, linear or logarithmic, its name, how its ticks are written, and the distance of
    linear ticks where it's fixed."""

    low: float
    high: float
    name: str = ""
    log: bool = False
    text: Format = count
    whole: bool = False
    step: float | None = None

    def position(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside the range, at most about `most` unless the step is fixed."""
        if self.log:
            return log_ticks(self.low, self.high, most)
        step = self.step or nice_step(max((self.high - self.low) / max(1, most - 1), 1.0 if self.whole else 0.0))
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten and, where there is room, 2 and 5 times them; equal steps over a range below a decade."""
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        found = [m * 10.0**e for e in range(first, last + 1) for m in multiples if low <= m * 10.0**e <= high]
        if len(found) <= most:
            break
    if len(found) >= 3:
        return found
    step = nice_step((high - low) / 4)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def linear_axis(
    values: Iterable[float], name: str = "", text: Format | None = None, *, zero: bool = True, whole: bool = False
) -> Axis:
    """An axis that holds all finite values, with a round tick at each end.

    Args:
        values: NaN and infinities are passed over.
        name: of the axis.
        text: writes a tick; by default all ticks have the same unit and as many digits.
        zero: the axis holds 0, too.
        whole: values are counts, so ticks are whole numbers.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    scale = max(abs(low), abs(high))
    if high - low <= 1e-9 * scale or scale < 1e-100:  # one value, or too close to tell apart
        low, high = (0.0, scale if scale >= 1e-100 else 1.0) if high >= 0 else (low, 0.0)
    step = nice_step(max((high - low) / 5, 1.0 if whole else 0.0))
    low = 0.0 if zero and low == 0 else math.floor(low / step + 1e-9) * step
    high = max(math.ceil(high / step - 1e-9) * step, low + step)
    return Axis(low, high, name, text=text or _tick_text(max(abs(low), abs(high)), step), whole=whole, step=step)


def _tick_text(largest: float, step: float) -> Format:
    """Writes the ticks of one axis: plain numbers below 10,000, else in thousands, millions or more."""
    size, unit = unit_of(largest, COUNT_UNITS) if largest >= 10_000 else (1, "")
    digits = next((digits for digits in range(12) if math.isclose(round(step / size, digits), step / size)), 12)
    return lambda value: f"{value / size:,.{digits}f}{unit}" if value else "0"


@dataclass(frozen=True)
class Plot:
    """Maps values to the drawing's units, and says where its frame lies."""

    x_axis: Axis
    y_axis: Axis
    height: int = 250
    width: int = 440
    left: int = 52
    right: int = 426
    top: int = 12

    @property
    def bottom(self) -> int:
        return self.height - 42

    def x(self, value: float) -> float:
        return round(self.left + self.x_axis.position(value) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.y_axis.position(value) * (self.bottom - self.top), 1)

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(self.x(value), self.x_axis.text(value)) for value in self.x_axis.ticks(7)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(self.y(value), self.y_axis.text(value)) for value in self.y_axis.ticks(5)]


def _path(points: Iterable[Point]) -> str:
    """Points joined by lines, for the attribute `d`."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def profile(values_sorted: np.ndarray, label: str, x_name: str, y_name: str, most: int = 400) -> Markup:
    """Values in descending order as a stepped area, from 0; more than `most` values are thinned out evenly.

    Args:
        values_sorted: (n,), n > 0.
    """
    num = len(values_sorted)
    plot = Plot(Axis(0, num, x_name, whole=True), linear_axis(values_sorted.tolist(), y_name, whole=True))
    edges = np.unique(np.linspace(0, num, min(num, most) + 1).astype(int))
    points: list[Point] = []
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        y = plot.y(float(values_sorted[(first + last - 1) // 2]))
        points += [(plot.x(first), y), (plot.x(last), y)]
    area = _path([(plot.x(0), plot.y(0)), *points, (plot.x(num), plot.y(0))]) + "Z"
    return macro("charts.html", "profile", plot, label, area, _path(points))


def histogram(
    edges: Sequence[float], counts: Sequence[int], label: str, x_axis: Axis, y_name: str, mark: tuple[float, str] | None
) -> Markup:
    """Bars between the edges; `mark` is a value and its name, drawn as a line across."""
    plot = Plot(x_axis, linear_axis(counts, y_name, whole=True))
    bars = []
    for low, high, number in zip(edges[:-1], edges[1:], counts, strict=True):
        if number:
            x, height = plot.x(low), max(round(plot.bottom - plot.y(number), 1), 0.8)
            width = max(round(plot.x(high) - x - 0.8, 1), 0.8)
            title = f"{x_axis.text(low)} to {x_axis.text(high)}: {count(number)}"
            bars.append((x, round(plot.bottom - height, 1), width, height, title))
    drawn = None
    if mark:
        x = plot.x(min(max(mark[0], x_axis.low), x_axis.high))
        drawn = (x, mark[1], x < (plot.left + plot.right) / 2)
    return macro("charts.html", "histogram", plot, label, bars, drawn)


def heat_map(cells: np.ndarray, x_axis: Axis, y_axis: Axis, label: str) -> Markup:
    """Counts in a grid of equal cells, stronger for more on a logarithmic scale, with a legend and the line x = y.

    Args:
        cells: int (rows, columns), the first row at the bottom.
    """
    plot = Plot(x_axis, y_axis, height=360)
    rows, columns = cells.shape
    width, height = (plot.right - plot.left) / columns, (plot.bottom - plot.top) / rows
    largest = int(cells.max())
    scale = len(HEAT_OPACITIES) / math.log(largest + 1)
    levels = np.ceil(np.log(cells + 1) * scale - 1e-9).astype(int)  # 0 for an empty cell
    layers = []
    for level, opacity in enumerate(HEAT_OPACITIES, 1):
        squares = [
            f"M{plot.left + column * width:.1f} {plot.bottom - (row + 1) * height:.1f}"
            f"h{width:.2f}v{height:.2f}h-{width:.2f}z"
            for row, column in np.argwhere(levels == level).tolist()
        ]
        if squares:
            layers.append((opacity, "".join(squares)))
    low, high = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
    diagonal = _path((plot.x(value), plot.y(value)) for value in (low, high)) if low < high else None
    return macro("charts.html", "heat_map", plot, label, layers, diagonal, HEAT_OPACITIES, largest)


@dataclass(frozen=True)
class Series:
    """One line of a chart; what isn't finite is a gap. `number` chooses colour and dashes; a thin line is fainter."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int
    is_thin: bool = False

    @property
    def colour(self) -> str:
        return f"var(--s{self.number % NUM_COLOURS})"

    @property
    def dashes(self) -> str:
        return DASHES[self.number // NUM_COLOURS % len(DASHES)]


def lines(
    series: Sequence[Series], label: str, x_axis: Axis, y_axis: Axis, text: Format, most_dots: int = 120
) -> Markup:
    """Line chart. Points carry dots whose titles give the value, unless there are more than `most_dots` in all.

    Args:
        text: writes a value in a title.
    """
    plot = Plot(x_axis, y_axis, height=230, width=360, left=58, right=346)
    with_dots = sum(len(one.xs) for one in series) <= most_dots
    paths, dots = [], []
    for one in series:
        path, marked = "", []
        for finite, group in groupby(zip(one.xs, one.ys, strict=True), lambda pair: math.isfinite(pair[1])):
            points = list(group) if finite else []
            if len(points) > 1:
                path += _path((plot.x(x), plot.y(y)) for x, y in points)
            if with_dots or len(points) == 1:
                marked += [(plot.x(x), plot.y(y), f"{one.name}, epoch {x:g}: {text(y)}") for x, y in points]
        paths.append(path)
        dots.append(marked)
    return macro("charts.html", "lines", plot, label, series, paths, dots)


def legend(series: Sequence[Series]) -> Markup:
    """Names of the lines with a piece of each."""
    return macro("charts.html", "legend", series)
