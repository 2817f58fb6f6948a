"""The training report's page: runs compared in figures, curves, configuration and provenance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.html.charts import Axis, Series, legend, linear_axis, lines
from pipeline.html.page import (
    Html,
    count,
    data_size,
    details,
    facts,
    figure,
    join,
    page,
    plural,
    section,
    short_count,
    table,
    tag,
    tiles,
)
from trainer.report.records import RunRecord, compare_configs

MOST_POINTS = 150
MOST_ROWS = 3_000
LEAST_ROWS = 10
Format = Callable[[float], str]


percent, loss = "{:.2%}".format, "{:.4f}".format


def short_percent(value: float) -> str:
    return f"{100 * value:.3g}%"


@dataclass(frozen=True)
class Figure:
    """One figure of an epoch: its key in metrics.jsonl, its title, and how it is written in a table and on an axis."""

    key: str
    title: str
    text: Format
    axis_text: Format = short_count
    from_zero: bool = False


LEARNING = (
    Figure("train_loss", "Training loss", loss),
    Figure("val_loss", "Validation loss", loss),
    Figure("val_top1", "Validation top-1", percent, short_percent),
    Figure("val_top5", "Validation top-5", percent, short_percent),
    Figure("lr", "Learning rate", lambda value: f"{value:.3g}", from_zero=True),
)
SPEED = (
    Figure("images_per_second", "Images per second", count, from_zero=True),
    Figure("data_wait_share", "Share of time waiting for data", percent, short_percent, from_zero=True),
    Figure(
        "peak_memory_bytes", "Peak memory per rank", data_size, lambda value: short_count(value) + "B", from_zero=True
    ),
)


def render(runs: Sequence[RunRecord]) -> bytes:
    """The page's bytes."""
    sections = [
        ("curves", "Curves", _charts("curves", "Curves", runs, LEARNING)),
        ("speed", "Throughput", _charts("speed", "Throughput", runs, SPEED)),
        ("config", "Configuration", _configs(runs)),
        ("code", "Code and machines", _code(runs)),
        ("epochs", "All epochs", _epochs(runs)),
    ]
    title = runs[0].name if len(runs) == 1 else f"{count(len(runs))} runs"
    front = join(tiles(_tiles(runs)), _overview(runs))
    return page("Training report", title, _lead(runs), sections, front=front)


def _lead(runs: Sequence[RunRecord]) -> str:
    models = dict.fromkeys(str(run.config["model"]) for run in runs if "model" in run.config)
    data = dict.fromkeys(Path(str(run.config["data"])).name for run in runs if "data" in run.config)
    words = [
        f"{', '.join(list(values)[:4])}{', ...' if len(values) > 4 else ''}" for values in (models, data) if values
    ]
    return f"{' trained on '.join(words)}." if len(words) == 2 else "No config was found beside the metrics."


def _tiles(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    several, planned = len(runs) > 1, runs[0].config.get("epochs")
    rest = "in all" if several else "" if planned is None else f"of {planned}"
    made = [("Epochs", count(sum(len(run.epochs) for run in runs)), rest)]

    def add(
        name: str, find: Callable[[RunRecord], tuple[float | None, str]], text: Format, better: Callable[..., Any]
    ) -> None:
        """The best run's figure; `find` gives a run's figure and a remark on it."""
        found = [(*find(run), run.name) for run in runs if find(run)[0] is not None]
        if found:
            value, remark, run_name = better(found, key=lambda one: one[0])
            made.append((name, text(value), f"{remark} · {run_name}" if several else remark))

    def at_epoch(value: float | None, epoch: int | None) -> tuple[float | None, str]:
        return value, f"epoch {epoch}"

    speed, wait = ("Fastest", "Least data wait") if several else ("Speed", "Data wait")
    add("Best top-1", lambda run: at_epoch(*run.best("val_top1")), percent, max)
    add("Lowest validation loss", lambda run: at_epoch(*run.best("val_loss", lowest=True)), loss, min)
    add(speed, lambda run: (run.median("images_per_second"), "images/s"), count, max)
    add(wait, lambda run: (run.median("data_wait_share"), "of the time"), percent, min)
    return made


def _progress(run: RunRecord) -> str:
    done, planned = run.epochs[-1]["epoch"] if run.epochs else 0, run.config.get("epochs")
    return f"{done} of {planned}" if planned is not None else str(done)


def _overview(runs: Sequence[RunRecord]) -> Html:
    columns: list[tuple[str, Callable[[RunRecord], float | None], Format, Callable[..., Any] | None]] = [
        ("Best top-1", lambda run: run.best("val_top1")[0], percent, max),
        ("at epoch", lambda run: run.best("val_top1")[1], count, None),
        ("Last top-1", lambda run: run.last("val_top1"), percent, max),
        ("Last top-5", lambda run: run.last("val_top5"), percent, max),
        ("Last val. loss", lambda run: run.last("val_loss"), loss, min),
        ("Images/s", lambda run: run.median("images_per_second"), count, max),
        ("Data wait", lambda run: run.median("data_wait_share"), percent, min),
        ("Peak memory", lambda run: max(run.finite("peak_memory_bytes"), default=None), data_size, min),
    ]
    rows: list[list[object]] = [[tag("bdi", run.name), _progress(run)] for run in runs]
    for _, find, text, better in columns:
        values = [find(run) for run in runs]
        known = [value for value in values if value is not None]
        best = better(known) if better and len(set(known)) > 1 else None
        for row, value in zip(rows, values, strict=True):
            row.append("–" if value is None else _best(text(value)) if value == best else text(value))
    head = ["Run", "Epochs", *(name for name, *_ in columns)]
    notes = ["Images/s and data wait are medians over the epochs after the first."]
    if len(runs) > 1:
        notes.append("★ marks the best of a column.")
    notes += [f"{run.name}: the last line was cut short by a crash and is left out." for run in runs if run.is_cut]
    notes += [f"{run.name}: no epoch is finished yet." for run in runs if not run.epochs]
    remarks = (tag("p", note, class_="note") for note in notes)
    title = tag("h2", "Runs", class_="unseen")
    return join(title, table("Runs at a glance", head, rows), *remarks)


def _best(text: str) -> Html:
    star = tag("span", "★ ", aria_hidden="true")
    return tag("td", star, text, tag("span", " (best)", class_="unseen"), class_="num best")


def _charts(anchor: str, title: str, runs: Sequence[RunRecord], figures: Sequence[Figure]) -> Html:
    drawn, missing = [], []
    for one in figures:
        series = [_series(run, number, one.key) for number, run in enumerate(runs)]
        values = [value for each in series for value in each.ys if math.isfinite(value)]
        if not values:
            missing.append(one.title.lower())
            continue
        xs = [x for each in series for x in each.xs]
        x_axis = Axis(min(*xs, max(xs) - 1), max(xs), "epoch", text=lambda value: f"{value:g}", whole=True)
        y_axis = linear_axis(values, "", one.axis_text, zero=one.from_zero)
        label = f"{one.title} by epoch. " + " ".join(_words(run, one) for run in runs)
        drawn.append(figure(one.title, lines(series, label, x_axis, y_axis)))
    key = legend(series) if len(runs) > 1 and drawn else ""
    note = tag("p", f"Not recorded: {', '.join(missing)}.", class_="note") if missing else ""
    return section(anchor, title, key, tag("div", *drawn, class_="columns wide"), note)


def _series(run: RunRecord, number: int, key: str) -> Series:
    values = run.values(key)
    chosen = _thin(len(values), MOST_POINTS)
    return Series(run.name, [run.epochs[i]["epoch"] for i in chosen], [values[i] for i in chosen], number)


def _thin(num: int, most: int) -> list[int]:
    """At most `most` of 0 ... num - 1, evenly spread, the first and the last among them."""
    most = min(num, most)
    return [round(i * (num - 1) / max(most - 1, 1)) for i in range(most)]


def _words(run: RunRecord, one: Figure) -> str:
    values = run.finite(one.key)
    return f"{run.name}: from {one.text(values[0])} to {one.text(values[-1])}." if values else f"{run.name}: none."


def _configs(runs: Sequence[RunRecord]) -> Html:
    different, equal = compare_configs(runs)
    parts: list[Html] = []
    if len(runs) > 1:
        text = (
            f"{plural(len(different), 'field differs', 'fields differ')}, {count(len(equal))} are the same in all runs."
        )
        parts.append(tag("p", text if different else "All runs have the same configuration."))
    if different:
        rows = []
        for name, values in different.items():
            usual = Counter(values).most_common(1)[0][0]  # in a tie the earliest
            rows.append([tag("code", name), *(_value(value, value != usual) for value in values)])
        head = ["Field", *(tag("bdi", run.name) for run in runs)]
        parts.append(table("Fields that differ", head, rows, text_columns=len(head), class_="matrix"))
        parts.append(tag("p", "● marks a value that most of the runs don't have.", class_="note"))
    if equal:
        listing = facts((name, tag("code", value)) for name, value in equal.items())
        title = f"The {plural(len(equal), 'field')} that all share" if len(runs) > 1 else "All fields"
        parts.append(details(title, listing, is_open=len(runs) == 1))
    if not different and not equal:
        parts = [tag("p", "The runs' folders hold no config.yaml.")]
    return section("config", "Configuration", *parts)


def _value(text: str, is_odd: bool) -> Html:
    mark = tag("span", "● ", aria_hidden="true") if is_odd else ""
    said = tag("span", " (differs)", class_="unseen") if is_odd else ""
    return tag("td", mark, tag("code", text or "not set"), said, class_="differs" if is_odd else None)


def _code(runs: Sequence[RunRecord]) -> Html:
    rows = []
    for run in runs:
        start = run.starts[-1] if run.starts else {}
        commits = list(dict.fromkeys(str(one["git_commit"])[:12] for one in run.starts if one.get("git_commit")))
        if commits and start.get("git_modified"):
            commits[-1] += " (modified)"
        software = start.get("software") or {}
        known = [start.get("device"), software.get("torch"), start.get("world_size"), len(run.starts) or None]
        code = tag("td", tag("code", ", ".join(commits), class_="word")) if commits else tag("td", "not recorded")
        rows.append([tag("bdi", run.name), code, *("–" if value is None else str(value) for value in known)])
    head = ["Run", "Git commit", "Device", "PyTorch", "Ranks", "Starts"]
    note = "A run has one start and one more for each resume; where commits differ, all are named in order."
    listing = table("What the runs ran on", head, rows, text_columns=4, hide_caption=True)
    return section("code", "Code and machines", listing, tag("p", note, class_="note"))


def _epochs(runs: Sequence[RunRecord]) -> Html:
    figures = [*LEARNING, *SPEED]
    most = max(LEAST_ROWS, MOST_ROWS // len(runs))
    parts = []
    for run in runs:
        rows = []
        for i in _thin(len(run.epochs), most):
            values = [(one, run.epochs[i].get(one.key)) for one in figures]
            figures_text = ("–" if value is None else one.text(value) for one, value in values)
            rows.append([str(run.epochs[i]["epoch"]), count(run.epochs[i].get("step") or 0), *figures_text])
        shown = f", {len(rows)} of them shown" if len(rows) < len(run.epochs) else ""
        head = ["Epoch", "Step", "Train loss", "Val. loss", "Top-1", "Top-5", "LR", "Images/s", "Data wait", "Memory"]
        summary = join(tag("bdi", run.name), f": {plural(len(run.epochs), 'epoch')}{shown}")
        listing = table(f"Epochs of {run.name}", head, rows, hide_caption=True, class_="tall")
        parts.append(details(summary, listing, is_open=len(runs) == 1))
    return section("epochs", "All epochs", *parts)
