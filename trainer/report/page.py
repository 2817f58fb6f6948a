"""The training report's page: runs compared in figures, curves, configuration and provenance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.html.charts import Axis, Series, legend, linear_axis, lines
from pipeline.html.page import SIZE_UNITS, count, render, unit_of
from trainer.report.records import RunRecord, compare_configs, thin_out

TEMPLATE = Path(__file__).with_name("runs.html")
MOST_POINTS = 150
MOST_ROWS = 3_000
LEAST_ROWS = 10
NEUTRAL = 6
"""The gray among the colours of series."""
Format = Callable[[float], str]
Cell = tuple[str, bool]
"""A figure's text, and whether it is the best of its column."""


@dataclass(frozen=True)
class Figure:
    """One figure of an epoch: its column's name in tables, how it's written there, and how on an axis (None: as a
    plain number)."""

    head: str
    text: Format
    tick: Format | None = None


@dataclass(frozen=True)
class Panel:
    """A chart of one or two figures on one scale: names by their keys in metrics.jsonl, the main one first."""

    title: str
    names: dict[str, str]
    from_zero: bool = True


CURVES = (
    Panel("Loss", {"val_loss": "validation loss", "train_loss": "training loss"}, from_zero=False),
    Panel("Validation accuracy", {"val_top1": "top-1", "val_top5": "top-5"}, from_zero=False),
    Panel("Learning rate", {"lr": "learning rate"}),
)
THROUGHPUT = (
    Panel("Images per second", {"images_per_second": "images per second"}),
    Panel("Share of time waiting for data", {"data_wait_share": "data wait"}),
    Panel("Peak memory per rank", {"peak_memory_bytes": "peak memory"}),
)


def figures_of(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """Figures by their keys in metrics.jsonl, in the order of the tables, each in one unit that fits all the runs.

    Top-5 is left out where it says nothing: with five classes or fewer it is 1 in every epoch."""

    def largest(key: str) -> float:
        return max((value for run in runs for value in run.finite(key)), default=0.0) or 1.0

    def short_percent(value: float) -> str:
        return f"{100 * value:.3g}%"

    size, unit = unit_of(largest("peak_memory_bytes"), SIZE_UNITS)
    digits = max(0, 3 - math.floor(math.log10(largest("lr"))))
    figures = {
        "train_loss": Figure("Train loss", "{:.4f}".format),
        "val_loss": Figure("Val. loss", "{:.4f}".format),
        "val_top1": Figure("Top-1", "{:.2%}".format, short_percent),
        "val_top5": Figure("Top-5", "{:.2%}".format, short_percent),
        "lr": Figure("LR", lambda value: f"{value:.{digits}f}"),
        "images_per_second": Figure("Images/s", count),
        "data_wait_share": Figure("Data wait", "{:.2%}".format, short_percent),
        "peak_memory_bytes": Figure(
            f"Peak memory, {unit}", lambda value: f"{value / size:.2f}", lambda value: f"{value / size:.3g} {unit}"
        ),
    }
    if min((value for run in runs for value in run.finite("val_top5")), default=0) == 1:
        del figures["val_top5"]
    return figures


def render_report(runs: Sequence[RunRecord]) -> bytes:
    """The page's bytes."""
    figures, several = figures_of(runs), len(runs) > 1
    datasets = [str(run.config.get("data", "")) for run in runs]
    different, equal = compare_configs(runs)
    return render(
        TEMPLATE,
        eyebrow="Training report",
        title=f"{count(len(runs))} runs" if several else runs[0].name,
        runs=runs,
        several=several,
        models=list(dict.fromkeys(str(run.config["model"]) for run in runs if "model" in run.config)),
        datasets=list(dict.fromkeys(Path(data).name for data in datasets if data)),
        num_datasets=len(set(datasets)),
        tiles=_tiles(runs, figures),
        overview=_overview(runs, figures, datasets),
        has_top5="val_top5" in figures,
        curves=[_panel(runs, panel, figures) for panel in CURVES],
        speed=[_panel(runs, panel, figures) for panel in THROUGHPUT],
        legend=legend([Series(run.name, (), (), number) for number, run in enumerate(runs)]) if several else "",
        different=[(name, _marked(values)) for name, values in different.items()],
        equal=equal,
        machines=[_machine(run) for run in runs],
        epoch_head=["Epoch", "Step", *(figure.head for figure in figures.values())],
        epochs=[_epochs(run, figures, max(LEAST_ROWS, MOST_ROWS // len(runs))) for run in runs],
    )


def _tiles(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the leading figures; with several runs each is the best run's."""
    several, planned = len(runs) > 1, runs[0].config.get("epochs")
    rest = "in all" if several else "" if planned is None else f"of {planned}"
    made = [("Epochs", count(sum(len(run.epochs) for run in runs)), rest)]
    for name, single, key, remark, better in (
        ("Best top-1", "", "val_top1", "", max),
        ("Lowest validation loss", "", "val_loss", "", min),
        ("Fastest", "Speed", "images_per_second", "images/s", max),
        ("Least data wait", "Data wait", "data_wait_share", "of the time", min),
    ):
        found = [(run.median(key), 0, run) if remark else (*run.best(key, lowest=better is min), run) for run in runs]
        found = [one for one in found if one[0] is not None]
        if found:
            value, epoch, run = better(found, key=lambda one: one[0])
            remark = remark or f"epoch {epoch}"
            title = name if several else single or name
            made.append((title, figures[key].text(value), f"{remark} · {run.name}" if several else remark))
    return made


def _overview(
    runs: Sequence[RunRecord], figures: dict[str, Figure], datasets: Sequence[str]
) -> tuple[list[str], list[list[Cell]]]:
    """Names of the columns of figures, and each run's cells. The best is sought among runs on the same data."""
    columns: list[tuple[str, str, list[float | None], Callable[..., Any] | None]] = [
        ("Best top-1", "val_top1", [run.best("val_top1")[0] for run in runs], max),
        ("at epoch", "", [run.best("val_top1")[1] for run in runs], None),
        ("Last top-1", "val_top1", [run.last("val_top1") for run in runs], max),
        ("Last top-5", "val_top5", [run.last("val_top5") for run in runs], max),
        ("Last val. loss", "val_loss", [run.last("val_loss") for run in runs], min),
        ("Images/s", "images_per_second", [run.median("images_per_second") for run in runs], max),
        ("Data wait", "data_wait_share", [run.median("data_wait_share") for run in runs], min),
        ("", "peak_memory_bytes", [max(run.finite("peak_memory_bytes"), default=None) for run in runs], min),
    ]
    head: list[str] = []
    rows: list[list[Cell]] = [[] for _ in runs]
    for name, key, values, better in columns:
        if key and key not in figures:
            continue
        text = figures[key].text if key else count
        head.append(name or figures[key].head)
        for row, value, own in zip(rows, values, datasets, strict=True):
            rivals = [v for v, data in zip(values, datasets, strict=True) if data == own and v is not None]
            is_best = better is not None and len(set(map(text, rivals))) > 1 and value == better(rivals)
            row.append(("–" if value is None else text(value), is_best))
    return head, rows


def _panel(runs: Sequence[RunRecord], panel: Panel, figures: dict[str, Figure]) -> dict[str, Any]:
    """A panel's title, chart, legend, and the names of figures that no run has."""
    several = len(runs) > 1
    asked = [(key, name) for key, name in panel.names.items() if key in figures]
    known = [(key, name) for key, name in asked if any(run.finite(key) for run in runs)]
    missing = [name for key, name in asked if (key, name) not in known]
    made: dict[str, Any] = {"title": panel.title, "chart": "", "legend": "", "missing": missing}
    if not known:
        return made
    series, said, look = [], [f"{panel.title} by epoch."], []
    for place, (key, name) in enumerate(known):
        thin, text = several and place > 0, figures[key].text
        look.append(Series(name, (), (), NEUTRAL if several else place, thin))
        for number, run in enumerate(runs):
            full_name = f"{run.name}, {name}" if len(known) > 1 else run.name
            xs, ys = run.rates_by_step(MOST_POINTS) if key == "lr" else ([], [])
            if not xs:
                points = [(line["epoch"], value) for line, value in zip(run.epochs, run.values(key), strict=True)]
                if key.startswith("val_"):  # an epoch without evaluation is no gap
                    points = [point for point in points if math.isfinite(point[1])]
                chosen = [points[i] for i in thin_out(len(points), MOST_POINTS)]
                xs, ys = [x for x, _ in chosen], [y for _, y in chosen]
            finite = [y for y in ys if math.isfinite(y)]
            series.append(Series(full_name, xs, ys, number if several else place, thin))
            said.append(f"{full_name}: {f'from {text(finite[0])} to {text(finite[-1])}' if finite else 'none'}.")
    figure = figures[known[0][0]]
    xs, ys = [x for one in series for x in one.xs], [y for one in series for y in one.ys]
    x_axis = Axis(min(*xs, max(xs) - 1), max(xs), "epoch", text="{:g}".format, whole=True)
    y_axis = linear_axis(ys, "", figure.tick, zero=panel.from_zero)
    made["chart"] = lines(series, " ".join(said), x_axis, y_axis, figure.text)
    made["legend"] = legend(look) if len(look) > 1 else ""
    return made


def _marked(values: Sequence[str]) -> list[Cell]:
    """Each run's value of a config's field, and whether it is another than most runs have; in a tie the earliest."""
    usual = Counter(values).most_common(1)[0][0]
    return [(value, value != usual) for value in values]


def _machine(run: RunRecord) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    commits = list(dict.fromkeys(str(one["git_commit"])[:12] for one in run.starts if one.get("git_commit")))
    if commits and start.get("git_modified"):
        commits[-1] += " (modified)"
    torch = (start.get("software") or {}).get("torch")
    known = [start.get("device"), torch, start.get("world_size"), len(run.starts) or None]
    return {"commits": ", ".join(commits), "cells": ["–" if value is None else str(value) for value in known]}


def _epochs(run: RunRecord, figures: dict[str, Figure], most: int) -> list[list[str]]:
    """Rows of the run's table: epoch, step and figures, evenly spread where there are more than `most`."""
    rows = []
    for line in (run.epochs[i] for i in thin_out(len(run.epochs), most)):
        texts = ["–" if line.get(key) is None else one.text(line[key]) for key, one in figures.items()]
        rows.append([str(line["epoch"]), count(line.get("step") or 0), *texts])
    return rows
