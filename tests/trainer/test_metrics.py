from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from pipeline.html.page import TEMPLATES
from trainer.metrics import draw_curves

LINE = {"train_loss": 2.0, "val_loss": 1.0, "val_top1": 0.5, "val_top5": 0.75}


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws lines of metrics and returns the two panels."""

    def draw(lines: list[dict[str, Any]]) -> Any:
        figures: list[Figure] = []
        save = Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda self, *args, **rest: figures.append(self) or save(self, *args, **rest)
        )
        draw_curves(tmp_path / "curves.png", lines)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        return figures[0].axes

    return draw


@pytest.mark.parametrize("num_epochs", [1, 2, 3, 90])
def test_epochs_are_whole_and_accuracies_percent(drawn: Any, num_epochs: int) -> None:
    loss, accuracy = drawn([{"epoch": i, **LINE} for i in range(1, num_epochs + 1)])
    for axes in (loss, accuracy):
        ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        assert ticks
        assert all(float(tick).is_integer() for tick in ticks)
    assert all(re.fullmatch(r"[\d.]+%", label.get_text()) for label in accuracy.get_yticklabels())
    assert [line.get_label() for line in loss.lines] == ["validation", "training"]
    assert [next(iter(line.get_ydata())) for line in (*loss.lines, *accuracy.lines)] == [1.0, 2.0, 0.5, 0.75]


def test_colours_are_those_of_the_report(drawn: Any) -> None:
    light = (TEMPLATES / "style.css").read_text().split("@media")[0]
    colours = dict(re.findall(r"--(\w+):(#\w+)", light))
    for axes in drawn([{"epoch": 1, **LINE}]):
        assert [to_hex(line.get_color()) for line in axes.lines] == [colours["s0"], colours["s1"]]


def test_top5_that_is_always_one_is_left_out(drawn: Any) -> None:
    _, accuracy = drawn([{"epoch": 1, **LINE, "val_top5": 1.0}, {"epoch": 2, **LINE, "val_top5": 1.0}])
    assert [line.get_label() for line in accuracy.lines] == ["top-1"]


def test_epochs_without_evaluation_are_no_gap(drawn: Any) -> None:
    skipped = {"epoch": 2, "train_loss": 1.5, "val_loss": None, "val_top1": None, "val_top5": None}
    loss, _ = drawn([{"epoch": 1, **LINE}, skipped, {"epoch": 3, **LINE}])
    assert [list(line.get_xdata()) for line in loss.lines] == [[1, 3], [1, 2, 3]]


def test_without_validation_there_are_empty_panels(drawn: Any) -> None:
    drawn([{"epoch": 1, "train_loss": 1.0, "val_loss": None, "val_top1": None, "val_top5": None}])
