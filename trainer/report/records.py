"""Reading finished and running runs back from their folders, and comparing them. No torch."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Error, UsageError
from pipeline.text import one_line
from trainer.schedule import learning_rate

METRICS, CONFIG, STARTS, LOCK = "metrics.jsonl", "config.yaml", "starts.jsonl", "lock"
IDENTITY_FIELDS = frozenset({"out", "resume", "debug"})
"""Config fields that say where a run is, not what it is: they count as no difference."""


@dataclass(frozen=True)
class RunRecord:
    """One run's folder.

    Attributes:
        name: the folder's name, with as many of its parents as tell it from the others.
        folder: as it was given.
        config: fields of config.yaml, empty where there is no such file.
        epochs: lines of metrics.jsonl by rising epoch.
        starts: lines of starts.jsonl, one per start and resume; empty in a run that recorded none.
        is_cut: the last line of metrics.jsonl was cut short by a crash, and left out.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    epochs: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    is_cut: bool

    def values(self, key: str) -> list[float]:
        """A figure of every epoch; NaN where it's missing or null."""
        return [math.nan if line.get(key) is None else float(line[key]) for line in self.epochs]

    def finite(self, key: str) -> list[float]:
        return [value for value in self.values(key) if math.isfinite(value)]

    def best(self, key: str, *, lowest: bool = False) -> tuple[float, int] | tuple[None, None]:
        """(value, epoch) of the best epoch, the first of equal ones; (None, None) where there is no figure."""
        found = [(v, line["epoch"]) for v, line in zip(self.values(key), self.epochs, strict=True) if math.isfinite(v)]
        return (min if lowest else max)(found, key=lambda pair: pair[0], default=(None, None))

    def last(self, key: str) -> float | None:
        """The figure of the last epoch that has one."""
        values = self.finite(key)
        return values[-1] if values else None

    def median(self, key: str) -> float | None:
        """Median over the epochs; the first, which warms caches and compiles, counts only where it's the only one."""
        values = self.finite(key)
        return statistics.median(values[1:] or values) if values else None

    def rates_by_step(self, most: int) -> tuple[list[float], list[float]]:
        """(epochs, learning rates) of the steps done, at most `most` and some more in the warm-up; both empty where the
        config's schedule doesn't give the rates in metrics.jsonl, as after a resume with another config."""
        last, config = self.epochs[-1] if self.epochs else {}, self.config
        start = self.starts[-1] if self.starts else {}
        try:
            steps = last["step"] // last["epoch"]
            total, warmup = config["epochs"] * steps, config["warmup_epochs"] * steps
            peak = config["lr"] * (start.get("global_batch") or config["global_batch"]) / 256
            form = config.get("schedule", "cosine")
            rate = partial(learning_rate, total_steps=total, warmup_steps=warmup, peak=peak, schedule=form)
            if not all(math.isclose(rate(line["step"] - 1), line["lr"], rel_tol=1e-6) for line in self.epochs):
                return [], []
        except (KeyError, TypeError, ZeroDivisionError):
            return [], []
        chosen = sorted({*thin_out(last["step"], most), *thin_out(min(last["step"], int(warmup) + 2), most // 8)})
        return [(step + 1) / steps for step in chosen], [rate(step) for step in chosen]


def thin_out(num: int, most: int) -> list[int]:
    """At most `most` of 0 ... num - 1, evenly spread, the first and the last among them."""
    most = min(num, most)
    return [round(i * (num - 1) / max(most - 1, 1)) for i in range(most)]


def load_runs(
    paths: Sequence[str | os.PathLike[str]], note: Callable[[str], object] = lambda line: None
) -> list[RunRecord]:
    """Read the runs' folders, in the order given, each once.

    Args:
        paths: the folders.
        note: gets a line on each folder that is left out, because its run never began.

    Raises:
        UsageError: a path that is no run's folder, or no run that began.
        Error: a broken line or file in it.
    """
    folders = []
    for folder in dict.fromkeys(Path(os.path.abspath(path)) for path in paths):
        if folder.suffix == ".html" and folder.is_file():  # a page, of which `*` in a folder of runs makes one, too
            continue
        if (folder / LOCK).is_file() and not (folder / METRICS).is_file():
            note(f"{folder}: left out, its run was refused or ended before it began")
        else:
            folders.append(folder)
    if not folders:
        raise UsageError("no run that began among those given; give the folders of runs, such as runs/*")
    return [_load(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _load(name: str, folder: Path) -> RunRecord:
    file = folder / METRICS
    if not file.is_file():
        what = "has no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise UsageError(f"{folder}: {what}; give the folder of a run, such as runs/NAME")
    lines, is_cut = json_lines(file)
    epochs: dict[float, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        wrong = [key for key, value in line.items() if not isinstance(value, int | float | None)]
        if not isinstance(line.get("epoch"), int) or wrong:
            what = f"{wrong[0]} is {line[wrong[0]]!r}, not a number" if wrong else "no epoch in it"
            raise Error(f"{file}: line {number}: {what}; mend or delete that line")
        epochs[line["epoch"]] = line  # a later line of the same epoch replaces it
    starts, _ = json_lines(folder / STARTS)
    return RunRecord(name, folder, _config(folder / CONFIG), [epochs[key] for key in sorted(epochs)], starts, is_cut)


def json_lines(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The file's objects, none where there is no file, and whether a last line without an end was left out.

    Raises:
        Error: it can't be read, or another line is broken.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise Error(f"{file}: can't be read ({error.strerror}); check its permissions") from error
    lines: list[dict[str, Any]] = []
    rows = text.split("\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            value = json.loads(row)
            if not isinstance(value, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            if number == len(rows):
                return lines, True
            raise Error(f"{file}: line {number} is broken ({error}); mend or delete that line") from None
        lines.append(value)
    return lines, False


def append_json_line(file: Path, value: dict[str, Any]) -> None:
    """Add an object to the file's end; it is on the disk when this returns.

    Raises:
        OSError: it can't be written.
    """
    with open(file, "a") as lines:
        lines.write(json.dumps(value) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise Error(f"{file}: can't be read ({one_line(error)}); mend or delete the file") from None
    if not isinstance(value, dict):
        raise Error(f"{file}: not a mapping of fields to values; mend or delete the file")
    return value


def compare_configs(runs: Sequence[RunRecord]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(fields that differ, with one text per run, empty where a run doesn't have the field; fields that are equal, with
    their value), in the order of the config."""
    different: dict[str, list[str]] = {}
    equal: dict[str, str] = {}
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [config_text(run.config[name]) if name in run.config else "" for run in runs]
        if len(set(values)) == 1:
            equal[name] = values[0]
        elif name not in IDENTITY_FIELDS:
            different[name] = values
    return different, equal


def config_text(value: Any) -> str:
    """A config's value on one line, as YAML writes it."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("\n...\n").strip()
