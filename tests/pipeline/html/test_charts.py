from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import parse

from pipeline.html.charts import Axis, Plot, Series, heat_map, histogram, legend, linear_axis, lines, profile

pytestmark = pytest.mark.quick
POINT = re.compile(r"(-?[\d.]+) (-?[\d.]+)")


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in POINT.findall(path)]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.booleans(), st.booleans())
def test_linear_axis_holds_everything_between_round_ends(values: list[float], zero: bool, whole: bool) -> None:
    axis = linear_axis(values, zero=zero, whole=whole)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values)
    assert max(values) <= axis.high + slack
    ticks = axis.ticks(5)
    assert 2 <= len(ticks) <= 7
    assert (ticks[0], ticks[-1]) == pytest.approx((axis.low, axis.high), abs=slack)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert not zero or axis.low <= 0 <= axis.high
    assert not whole or all(float(tick).is_integer() for tick in ticks)


@given(st.floats(0.5, 1e6), st.floats(1.01, 1e5))
def test_log_axis_has_ticks_inside(low: float, factor: float) -> None:
    axis = Axis(low, low * factor, log=True)
    assert all(axis.low * (1 - 1e-9) <= tick <= axis.high * (1 + 1e-9) for tick in axis.ticks(7))
    assert 1 <= len(axis.ticks(7)) <= 8


def test_nothing_but_nan_still_makes_an_axis() -> None:
    assert linear_axis([math.nan]).ticks()


def test_one_value_has_an_axis_down_to_zero() -> None:
    """A share that is constantly 100 % isn't drawn as if it could be 200 %."""
    axis = linear_axis([1.0, 1.0], zero=False)
    assert (axis.low, axis.high) == (0.0, 1.0)
    axis = linear_axis([-3.0], zero=False)
    assert (axis.low, axis.high) == (-3.0, 0.0)


def test_profile_has_a_step_for_each_value() -> None:
    tree = parse(profile(np.array([5, 5, 3, 1]), "label", "classes", "samples"))
    (edge,) = tree.find("path", "edge")
    plot = Plot(Axis(0, 4), linear_axis([5, 5, 3, 1], whole=True))
    corners = [(0, 5), (1, 5), (1, 5), (2, 5), (2, 3), (3, 3), (3, 1), (4, 1)]
    assert points(edge.attributes["d"]) == [pytest.approx((plot.x(x), plot.y(y)), abs=0.06) for x, y in corners]
    assert tree.find("svg")[0].attributes["aria-label"] == "label"


def test_profile_of_many_values_stays_small() -> None:
    values = np.arange(21_000)[::-1]
    made = profile(values, "label", "classes", "samples")
    assert len(made) < 30_000
    (edge,) = parse(made).find("path", "edge")
    heights = [y for _, y in points(edge.attributes["d"])]
    assert heights == sorted(heights)


def test_histogram_heights_are_in_proportion() -> None:
    tree = parse(histogram([1, 2, 4, 8], [10, 0, 40], "l", Axis(1, 8, log=True), "n", (3, "stored: 3")))
    bars = tree.find("rect", "fill")
    assert [bar.find("title")[0].text for bar in bars] == ["1 to 2: 10", "4 to 8: 40"]
    heights = [float(bar.attributes["height"]) for bar in bars]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.01)
    assert tree.find("line", "mark")
    (name,) = tree.find("text", "mark-text")
    assert float(name.attributes["y"]) < min(float(bar.attributes["y"]) for bar in bars)
    assert tree.find("text", "mark-text")[0].text == "stored: 3"


def test_heat_map_draws_each_filled_cell_once() -> None:
    cells = np.array([[0, 1], [7, 1000]])
    tree = parse(heat_map(cells, Axis(1, 4, log=True), Axis(1, 4, log=True), "l"))
    assert sum(path.attributes["d"].count("M") for path in tree.find("path", "fill")) == 3
    assert float(tree.find("path", "fill")[-1].attributes["fill-opacity"]) == 1
    assert "1,000 per cell" in tree.text


def test_lines_leave_gaps_and_show_lone_points() -> None:
    series = Series("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 4.0, math.nan], 0)
    tree = parse(lines([series], "l", Axis(0, 5), linear_axis([0, 4]), "{:.2f}".format))
    (line,) = tree.find("path", "line")
    assert line.attributes["d"].count("M") == 1
    assert [dot.find("title")[0].text for dot in tree.find("circle")] == [
        "a, epoch 1: 1.00",
        "a, epoch 2: 2.00",
        "a, epoch 4: 4.00",
    ]
    few = parse(lines([series], "l", Axis(0, 5), linear_axis([0, 4]), "{:.2f}".format, most_dots=1))
    assert [dot.find("title")[0].text for dot in few.find("circle")] == ["a, epoch 4: 4.00"]


def test_twenty_one_lines_look_different() -> None:
    looks = {str(legend([Series("", [], [], number)])) for number in range(21)}
    assert len(looks) == 21
    assert len(parse(legend([Series("<x>", [], [], 0)])).find("li")) == 1


def test_thin_lines_look_thin() -> None:
    tree = parse(legend([Series("a", [], [], 0), Series("b", [], [], 0, is_thin=True)]))
    assert [len(item.find("line", "thin")) for item in tree.find("li")] == [0, 1]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 1900], ["0", "500", "1,000", "1,500", "2,000"]),
        ([20_000], ["0", "5k", "10k", "15k", "20k"]),
        ([1.2e6], ["0", "0.25M", "0.50M", "0.75M", "1.00M", "1.25M"]),
        ([0.9], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([3e-4], ["0", "0.0001", "0.0002", "0.0003"]),
        ([0.0, 0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_of_an_axis_have_one_unit(values: list[float], wanted: list[str]) -> None:
    axis = linear_axis(values)
    assert [axis.text(tick) for tick in axis.ticks()] == wanted


def test_labels_are_text() -> None:
    made = lines([Series("<b>", [1], [1.0], 0)], '"><script>', Axis(0, 5, "<i>"), linear_axis([1], "&"), str)
    assert "<script" not in made
    tree = parse(made)
    assert tree.find("svg")[0].attributes["aria-label"] == '"><script>'
    assert tree.find("title")[0].text == "<b>, epoch 1: 1.0"
