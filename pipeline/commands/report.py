"""`report`: one HTML page to look at a store before training on it. Aggregates only, so it opens at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.commands.gallery import Picture, choose_pictures
from pipeline.commands.report_split import MOST_NAMED_CLASSES, split_values
from pipeline.commands.survey import SplitSurvey, survey_split
from pipeline.errors import Error, StoreError, UsageError
from pipeline.html.page import render
from pipeline.store.atomic import write_bytes
from pipeline.store.reader import Split, Store
from pipeline.store.remote import check_local, is_remote
from pipeline.store.writer import known_codecs

TEMPLATE = Path(__file__).with_name("report.html")
PICTURES_PER_SPLIT = 40
PICTURES_IN_ALL = 120
PICTURE_BYTES = 1_050_000
"""Upper bound of all pictures together as base64, so that the page stays below about 1.5 MB."""
MOST_CLASS_ROWS = 2_000


def write_report(
    store_path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, seed: int | None = None
) -> Path:
    """Write one self-contained HTML page about a store.

    Args:
        store_path: the store, or its URL.
        out: the page; by default STORE with `.html` instead of `.zarr`.
        seed: of the random samples and of the choice of chunks to check; others each time by default.

    Returns:
        Path of the page.

    Raises:
        StoreNotFoundError: no store is there.
        StoreError: the store is damaged. Where it can be read at all the page is written first, and names the damage.
        UsageError: the page can't be written there.
    """
    with known_codecs():
        return _write_report(Store(store_path), out, seed)


def _write_report(store: Store, out: str | os.PathLike[str] | None, seed: int | None) -> Path:
    path = Path(out) if out is not None else default_path(store.path)
    check_local(out or "", "--out")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give --out the name of a file, such as {path / 'report.html'}")
    names = store.splits
    if not names:
        raise StoreError(f"{store.path}: no complete split to report on; finish its conversion first")
    rng = np.random.default_rng(seed)
    most = max(1, min(PICTURES_PER_SPLIT, PICTURES_IN_ALL // len(names)))
    surveys, pictures = [], []
    for name in names:
        split = Split(store, name, check=False)
        survey = survey_split(split)
        surveys.append(survey)
        pictures.append(choose_pictures(survey, most, PICTURE_BYTES // len(names), rng))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, render_report(store, surveys, pictures))
    except OSError as error:
        raise Error(f"{path}: can't be written ({error.strerror}); give another --out") from error
    problems = [problem for survey in surveys for problem in survey.problems]
    if problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        raise StoreError(f"{problems[0]}{more}; {path} lists them; restore the files or convert with --overwrite")
    return path


def default_path(store: Path) -> Path:
    """The page beside a store, or here for one at a URL: `x.html` for `x.zarr`, `.html` appended to any other name."""
    absolute = Path(os.path.abspath(str(store)))
    name = absolute.stem if absolute.suffix == ".zarr" else absolute.name
    if is_remote(store):
        return Path(f"{name}.html")
    return (Path(store).parent if Path(store).name else absolute.parent) / f"{name}.html"


def render_report(store: Store, surveys: list[SplitSurvey], pictures: list[list[Picture]]) -> bytes:
    """The page's bytes, from what was found."""
    has_labels = any(survey.counts.any() for survey in surveys)
    has_table = has_labels and MOST_NAMED_CLASSES < len(store.class_ids) <= MOST_CLASS_ROWS
    sections = [(f"split-{number}", survey.name) for number, survey in enumerate(surveys)]
    sections += [("classes", "Classes")] if has_table else []
    sections += [("disk", "Disk use"), ("checks", "Verification"), ("provenance", "Recipe and provenance")]
    return render(
        TEMPLATE,
        eyebrow="Dataset report",
        title=Path(os.path.abspath(str(store.path))).name,
        sections=sections,
        store=store,
        surveys=surveys,
        splits=[split_values(store, survey, chosen) for survey, chosen in zip(surveys, pictures, strict=True)],
        recipe=_recipe(surveys),
        root=json.dumps({name: store.attrs[name] for name in ("format", "format_version", "geometry")}, indent=2),
    )


def _words(value: Any) -> Any:
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else value


def _recipe(surveys: list[SplitSurvey]) -> list[tuple[str, list[Any]]]:
    """(field, its value in each split) of recipes and software."""
    attrs = [survey.split.attrs for survey in surveys]

    def rows(group: str) -> list[tuple[str, list[Any]]]:
        fields = dict.fromkeys(name for one in attrs for name in one.get(group, {}) if name != "resizer")
        return [(name, [_words(one.get(group, {}).get(name)) for one in attrs]) for name in fields]

    return [
        *((name.replace("_", " ").capitalize(), values) for name, values in rows("recipe")),
        ("Resizer", [one.get("resizer", "not recorded") for one in attrs]),
        ("Decoder warnings", [one.get("decoder_warnings", 0) for one in attrs]),
        *rows("software"),
    ]
