"""The study's results as one table and one figure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import UsageError
from pipeline.store.atomic import write_bytes
from tests.bench.accuracy.arms import BASE, CROP, EVAL_SIZE, FAMILIES, Arm, arm

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of the families: Okabe and Ito's (Color Universal Design, 2008), told apart with any kind of colour vision."""

MARKERS = ("D", "o", "s", "^", "v", "P", "X")

COMMON, WHOLE = f"{CROP} of bicubic-{EVAL_SIZE}", f"{EVAL_SIZE} of bicubic-{EVAL_SIZE}"


class Spread(NamedTuple):
    """Several runs' figures: mean, standard deviation of the sample (NaN for a single run), number."""

    mean: float
    std: float
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))

    def points(self, sign: str = "") -> str:
        """In per cent, with the deviation where there is one."""
        return f"{100 * self.mean:{sign}.1f}" + (f" ± {100 * self.std:.1f}" if self.number > 1 else "")


def by_arm(summary: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """arm -> seed -> result, in the results' order."""
    arms: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for result in summary["results"]:
        arms[result["arm"]][result["seed"]] = result
    return arms


def difference(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> Spread | None:
    """Accuracy on the own store less that of the base arm, seed by seed; None without a common seed."""
    pairs = [_own(runs[seed]) - _own(base[seed]) for seed in runs if seed in base]
    return Spread.of(pairs) if pairs else None


def _own(result: dict[str, Any]) -> float:
    return result["top1"][result["own"]]


def table(summary: dict[str, Any]) -> str:
    """Markdown: a row per arm, figures in per cent; and what they were measured on."""
    arms = by_arm(summary)
    lines = [
        "| | trained on | top-1 %, own store | less torchvision's | n | 28 of 32 | whole 32 | training loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in arms.items():
        own = Spread.of([_own(result) for result in runs.values()])
        base = arm(name).base
        less = difference(runs, arms[base]) if base in arms and name != base else None
        common, whole = (Spread.of([run["top1"][place] for run in runs.values()]) for place in (COMMON, WHOLE))
        loss = statistics.fmean(result["train_loss"] for result in runs.values())
        lines.append(
            f"| {arm(name).family} | {arm(name).words} | **{own.points()}** | {less.points('+') if less else ''} | "
            f"{own.number} | {common.points()} | {whole.points()} | {loss:.2f} |"
        )
    settings, machine = summary["results"][0]["settings"], summary["machine"]
    steps = {result["steps"] for result in summary["results"]}
    assert len(steps) == 1, f"the arms took different numbers of steps: {steps}"
    # not the sum: a busy machine stops some of them for minutes
    seconds = statistics.median(result["seconds"] for result in summary["results"])
    note = (
        f"Mean ± standard deviation over n seeds; {summary['pictures']['val']:,} pictures for evaluation. Each run: "
        f"{summary['pictures']['train']:,} training pictures, {settings['epochs']} epochs, {steps.pop():,} steps of "
        f"{settings['global_batch']}, {settings['model']}, {'bfloat16' if settings['amp'] else 'float32'}; "
        f"{seconds:.0f} s in the median with {summary['jobs']} runs at a time, which makes "
        f"{seconds * len(summary['results']) / summary['jobs'] / 60:.0f} minutes for all, on {machine['cores']} cores "
        f"of {machine['processor']}."
    )
    return "\n".join([*lines, "", note, ""])


def draw(summary: dict[str, Any], path: Path) -> None:
    """Each arm's accuracy on its own store, mean and seeds, and its mean on the store that all have in common."""
    import matplotlib
    from matplotlib.figure import Figure

    arms = by_arm(summary)
    with matplotlib.rc_context({"svg.hashsalt": "accuracy", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8.5, 1.1 + 0.28 * len(arms)), layout="constrained")
        axes = figure.subplots()
        shown: set[str] = set()
        for row, (name, runs) in enumerate(arms.items()):
            family = arm(name).family
            style = FAMILIES.index(family)
            values = [100 * _own(result) for result in runs.values()]
            axes.plot(values, [row] * len(values), "|", color=COLOURS[style], markersize=9, alpha=0.7)
            label = None if family in shown else family
            common = 100 * statistics.fmean(result["top1"][COMMON] for result in runs.values())
            axes.plot(common, row, MARKERS[style], color=COLOURS[style], markerfacecolor="none", markersize=9)
            axes.plot(statistics.fmean(values), row, MARKERS[style], color=COLOURS[style], label=label)
            shown.add(family)
        if BASE in arms:
            base = 100 * statistics.fmean(_own(result) for result in arms[BASE].values())
            axes.axvline(base, color=COLOURS[0], linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(arms)), [_plain(arm(name)) for name in arms])
        axes.invert_yaxis()
        axes.set_xlabel("top-1, %; filled: on the own store, with\na bar for each seed; hollow: on 28 of 32 px")
        axes.grid(axis="x", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=len(shown), fontsize=8, handletextpad=0.2)
        figure.savefig(path, metadata={"Date": None})


def _plain(chosen: Arm) -> str:
    return chosen.words.replace("`", "")


def put_into(page: Path, block: str, text: str) -> None:
    """Replace what stands between `<!-- BLOCK -->` and `<!-- /BLOCK -->` in the page.

    Raises:
        UsageError: the page isn't there, or hasn't the two marks.
    """
    marks = f"<!-- {block} -->", f"<!-- /{block} -->"
    old = page.read_text() if page.exists() else ""
    if not all(mark in old for mark in marks):
        raise UsageError(f"{page}: hasn't the marks {marks[0]} and {marks[1]}, between which the table goes")
    before, rest = old.split(marks[0], 1)
    after = rest.split(marks[1], 1)[1]
    write_bytes(page, f"{before}{marks[0]}\n{text}{marks[1]}{after}".encode())
