"""Charts of the HTML reports as inline SVG: values in, markup out. The page's style sheet gives colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.html.page import Html, count, join, short_count, tag

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 42
NUM_COLOURS = 7
DASHES = ("none", "7 4", "2 4")
HEAT_LEVELS = 6
Format = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """One axis: the range of values, linear or logarithmic, its name, how its ticks are written, and the distance of
    linear ones where it's fixed."""

    low: float
    high: float
    name: str = ""
    log: bool = False
    text: Format = short_count
    is_shown: bool = True
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
    """Powers of ten and, where there is room, 2 and 5 times them; powers of two over a range below a decade."""
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
    values: Iterable[float], name: str = "", text: Format = short_count, *, zero: bool = True, whole: bool = False
) -> Axis:
    """An axis that holds all finite values, from 0 where `zero`, with ticks that are round, at its ends too; `whole`
    for numbers of things."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    scale = max(abs(low), abs(high))
    if high - low <= 1e-9 * scale or scale < 1e-100:  # one value, or too close to tell apart
        low, high = (0.0, scale if scale >= 1e-100 else 1.0) if high >= 0 else (low, 0.0)
    step = nice_step(max((high - low) / 5, 1.0 if whole else 0.0))
    low = 0.0 if zero and low == 0 else math.floor(low / step + 1e-9) * step
    high = max(math.ceil(high / step - 1e-9) * step, low + step)
    return Axis(low, high, name, text=text, whole=whole, step=step)


@dataclass(frozen=True)
class Plot:
    """Maps values to the picture's units; `left` and `height` where the defaults don't fit."""

    x_axis: Axis
    y_axis: Axis
    left: int = LEFT
    height: int = HEIGHT

    def x(self, value: float) -> float:
        return self.left + self.x_axis.position(value) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - self.y_axis.position(value) * (self.height - TOP - BOTTOM)

    def frame(self) -> Html:
        """Grid, ticks and names of the axes."""
        parts = []
        bottom, middle = self.height - BOTTOM, (self.height - BOTTOM + TOP) / 2
        for value in self.y_axis.ticks(5) if self.y_axis.is_shown else ():
            y = f"{self.y(value):.1f}"
            parts.append(tag("line", class_="grid", x1=self.left, x2=WIDTH - RIGHT, y1=y, y2=y))
            parts.append(tag("text", self.y_axis.text(value), x=self.left - 6, y=y, dy=4, text_anchor="end"))
        for value in self.x_axis.ticks(7):
            x = f"{self.x(value):.1f}"
            parts.append(tag("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            parts.append(tag("text", self.x_axis.text(value), x=x, y=bottom + 18, text_anchor="middle"))
        parts.append(tag("line", class_="axis", x1=self.left, x2=WIDTH - RIGHT, y1=bottom, y2=bottom))
        right = WIDTH - RIGHT
        parts.append(tag("text", self.x_axis.name, x=right, y=self.height - 6, text_anchor="end"))
        if self.y_axis.name:
            turned = f"rotate(-90 12 {middle:.0f})"
            parts.append(tag("text", self.y_axis.name, x=12, y=f"{middle:.0f}", text_anchor="middle", transform=turned))
        return join(*parts)

    def picture(self, label: str, *parts: object) -> Html:
        return picture(label, self.frame(), *parts, height=self.height)


def picture(label: str, *parts: object, height: float = HEIGHT) -> Html:
    """An SVG that screen readers read as one image with this label."""
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def path(points: Iterable[tuple[float, float]]) -> str:
    """Points joined by lines, for the attribute `d`."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def profile(values_sorted: np.ndarray, label: str, x_name: str, y_name: str, most: int = 400) -> Html:
    """Values in descending order as a stepped area, from 0; more than `most` values are thinned out evenly.

    Args:
        values_sorted: (n,), n > 0.
    """
    num = len(values_sorted)
    plot = Plot(Axis(0, num, x_name, whole=True), linear_axis(values_sorted.tolist(), y_name, whole=True))
    edges = np.unique(np.linspace(0, num, min(num, most) + 1).astype(int))
    points: list[tuple[float, float]] = []
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        y = plot.y(float(values_sorted[(first + last - 1) // 2]))
        if points and points[-1][1] == y:
            points[-1] = (plot.x(last), y)
        else:
            points += [(plot.x(first), y), (plot.x(last), y)]
    base = plot.y(0)
    area = path([(plot.x(0), base), *points, (plot.x(num), base)]) + "Z"
    return plot.picture(label, tag("path", class_="area", d=area), tag("path", class_="edge", d=path(points)))


def histogram(
    edges: Sequence[float], counts: Sequence[int], label: str, x_axis: Axis, y_name: str, mark: tuple[float, str] | None
) -> Html:
    """Bars between the edges; `mark` is a value and its name, drawn as a line across."""
    plot = Plot(x_axis, linear_axis(counts, y_name, whole=True))
    base = plot.y(0)
    parts = []
    for low, high, number in zip(edges[:-1], edges[1:], counts, strict=True):
        if number:
            x, y = plot.x(low), plot.y(number)
            title = tag("title", f"{x_axis.text(low)} to {x_axis.text(high)}: {count(number)}")
            width = max(plot.x(high) - x - 0.8, 0.8)
            height = max(base - y, 0.8)
            size = {"x": f"{x:.1f}", "y": f"{base - height:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
            parts.append(tag("rect", title, class_="fill", **size))
    if mark:
        value, name = mark
        x = plot.x(min(max(value, x_axis.low), x_axis.high))
        is_right = x < (WIDTH + LEFT) / 2
        parts.append(tag("line", class_="mark", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=base))
        anchor = "start" if is_right else "end"
        place = {"x": f"{x - (1 if is_right else -1):.1f}", "y": TOP - 4, "text_anchor": anchor}  # above all bars
        parts.append(tag("text", name, class_="mark-text", **place))
    return plot.picture(label, *parts)


def heat_map(cells: np.ndarray, x_axis: Axis, y_axis: Axis, label: str, *, diagonal: bool) -> Html:
    """Counts in a grid of equal cells, stronger for more on a logarithmic scale, with a legend.

    Args:
        cells: int (rows, columns), the first row at the bottom.
        diagonal: draw the line where x = y.
    """
    plot = Plot(x_axis, y_axis, height=360)
    rows, columns = cells.shape
    width = (WIDTH - plot.left - RIGHT) / columns
    height = (plot.height - TOP - BOTTOM) / rows
    largest = int(cells.max())
    scale = HEAT_LEVELS / math.log(largest + 1)
    levels = np.ceil(np.log(cells + 1) * scale - 1e-9).astype(int)  # 0 for an empty cell
    parts = []
    for level in range(1, HEAT_LEVELS + 1):
        squares = [
            f"M{plot.left + column * width:.1f} {plot.height - BOTTOM - (row + 1) * height:.1f}"
            f"h{width:.2f}v{height:.2f}h-{width:.2f}z"
            for row, column in np.argwhere(levels == level).tolist()
        ]
        if squares:
            parts.append(tag("path", class_="fill", fill_opacity=f"{_opacity(level):.2f}", d="".join(squares)))
    low, high = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
    if diagonal and low < high:
        line = path([(plot.x(low), plot.y(low)), (plot.x(high), plot.y(high))])
        parts.append(tag("path", class_="faint", d=line))
    for level in range(1, HEAT_LEVELS + 1):
        square = {"x": plot.left + 36 + 16 * level, "y": plot.height - 15, "width": 16, "height": 10}
        parts.append(tag("rect", class_="fill", fill_opacity=f"{_opacity(level):.2f}", **square))
    parts.append(tag("text", "1", x=plot.left + 47, y=plot.height - 6, text_anchor="end"))
    parts.append(tag("text", f"{count(largest)} per cell", x=plot.left + 58 + 16 * HEAT_LEVELS, y=plot.height - 6))
    return plot.picture(label, *parts)


def _opacity(level: int) -> float:
    return 0.12 + 0.88 * (level / HEAT_LEVELS) ** 1.3


@dataclass(frozen=True)
class Series:
    """One line of a chart; what isn't finite is a gap. `number` chooses colour and dashes."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int

    @property
    def look(self) -> str:
        dash = DASHES[self.number // NUM_COLOURS % len(DASHES)]
        return f"stroke:var(--s{self.number % NUM_COLOURS});stroke-dasharray:{dash}"


def lines(series: Sequence[Series], label: str, x_axis: Axis, y_axis: Axis, most_dots: int = 120) -> Html:
    """Line chart. Points carry dots whose titles give the value, unless there are more than `most_dots` in all."""
    plot = Plot(x_axis, y_axis)
    parts = []
    total = sum(len(one.xs) for one in series)
    for one in series:
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in zip(one.xs, one.ys, strict=True):
            if math.isfinite(y) and (not y_axis.log or y > 0):
                runs[-1].append((plot.x(x), plot.y(y)))
            elif runs[-1]:
                runs.append([])
        drawn = "".join(path(run) for run in runs if len(run) > 1)
        if drawn:
            parts.append(tag("path", class_="line", d=drawn, style=one.look))
        points = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if math.isfinite(y) and (not y_axis.log or y > 0)]
        lone = {run[0] for run in runs if len(run) == 1}
        for x, y in points:
            place = (plot.x(x), plot.y(y))
            if total <= most_dots or place in lone:
                title = tag("title", f"{one.name}, epoch {x:g}: {y_axis.text(y)}")
                colour = f"fill:var(--s{one.number % NUM_COLOURS})"
                dot = {"cx": f"{place[0]:.1f}", "cy": f"{place[1]:.1f}", "r": 2.6}
                parts.append(tag("circle", title, style=colour, **dot))
    return plot.picture(label, *parts)


def legend(series: Sequence[Series]) -> Html:
    """Names of the lines with a piece of each."""
    return tag(
        "ul",
        *(
            tag(
                "li",
                tag(
                    "svg",
                    tag("line", class_="line", x1=1, x2=37, y1=6, y2=6, style=one.look),
                    viewBox="0 0 38 12",
                    aria_hidden="true",
                ),
                tag("bdi", one.name),
            )
            for one in series
        ),
        class_="legend",
    )


def ranges(names: Sequence[str], middles: Sequence[float], spreads: Sequence[float], label: str) -> Html:
    """For each name a dot at its middle and a line of `spread` to both sides, on an axis from 0 to 1."""
    height = TOP + 34 * len(names) + BOTTOM
    plot = Plot(Axis(0, 1, "share of full scale"), Axis(0, 1, is_shown=False), left=64, height=height)
    parts = []
    for row, (name, middle, spread) in enumerate(zip(names, middles, spreads, strict=True)):
        y = TOP + 34 * row + 17
        low, high = plot.x(max(0.0, middle - spread)), plot.x(min(1.0, middle + spread))
        parts.append(tag("text", name, x=plot.left - 8, y=y + 4, text_anchor="end"))
        bar = {"x": f"{low:.1f}", "y": y - 5, "width": f"{high - low:.1f}", "height": 10, "rx": 5}
        parts.append(tag("rect", class_="area", **bar))
        parts.append(tag("circle", class_="fill", cx=f"{plot.x(middle):.1f}", cy=y, r=5))
    return plot.picture(label, *parts)
