"""`report`: one HTML page to look at a store before training on it. Aggregates only, so it opens at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.commands.gallery import Picture, choose_pictures
from pipeline.commands.report_split import split_section
from pipeline.commands.survey import SplitSurvey, survey_split
from pipeline.errors import Error, StoreError, UsageError
from pipeline.html.page import (
    Html,
    count,
    data_size,
    details,
    facts,
    join,
    page,
    plural,
    section,
    share,
    table,
    tag,
    tiles,
    verdict,
)
from pipeline.store.atomic import write_bytes
from pipeline.store.reader import Split, Store
from pipeline.store.writer import known_codecs

PICTURES_PER_SPLIT = 40
PICTURES_IN_ALL = 120
PICTURE_BYTES = 1_050_000
"""Upper bound of all pictures together as base64, so that the page stays below about 1.5 MB."""
MOST_CLASS_ROWS = 2_000
FITS = {
    "crop": "the shorter side resized to {size} px, then the centre square cut out",
    "stretch": "both sides resized to {size} px, whatever the shape",
    "pad": "the longer side resized to {size} px, then black borders added",
}


def write_report(
    store_path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, seed: int | None = None
) -> Path:
    """Write one self-contained HTML page about a store.

    Args:
        store_path: the store.
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
        survey = survey_split(split, store.geometry["fit"])
        surveys.append(survey)
        pictures.append(choose_pictures(survey, most, PICTURE_BYTES // len(names), rng))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, render(store, surveys, pictures))
    except OSError as error:
        raise Error(f"{path}: can't be written ({error.strerror}); give another --out") from error
    problems = [problem for survey in surveys for problem in survey.problems]
    if problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        raise StoreError(f"{problems[0]}{more}; {path} lists them; restore the files or convert with --overwrite")
    return path


def default_path(store: Path) -> Path:
    """The page beside a store: `x.html` for `x.zarr`, with `.html` appended to any other name."""
    absolute = Path(os.path.abspath(store))
    name = absolute.stem if absolute.suffix == ".zarr" else absolute.name
    return (Path(store).parent if Path(store).name else absolute.parent) / f"{name}.html"


def render(store: Store, surveys: list[SplitSurvey], pictures: list[list[Picture]]) -> bytes:
    """The page's bytes, from what was found."""
    sections: list[tuple[str, str, Html]] = []
    for number, (survey, chosen) in enumerate(zip(surveys, pictures, strict=True)):
        anchor = f"split-{number}"
        sections.append((anchor, survey.name, split_section(anchor, store, survey, chosen)))
    if len(store.class_ids) <= MOST_CLASS_ROWS and any(survey.classes.num_labelled for survey in surveys):
        sections.append(("classes", "Classes", _classes(store, surveys)))
    sections += [
        ("disk", "Disk use", _disk(store, surveys)),
        ("checks", "Verification", _checks(store, surveys)),
        ("provenance", "Recipe and provenance", _provenance(store, surveys)),
    ]
    front = join(tiles(_tiles(store, surveys)), _overview(surveys))
    return page("Dataset report", Path(os.path.abspath(store.path)).name, _lead(store), sections, front=front)


def _lead(store: Store) -> str:
    geometry = store.geometry
    size = geometry["size"]
    fit = FITS.get(geometry["fit"], geometry["fit"]).format(size=size)
    exif = "applied" if geometry.get("exif_transpose") else "not applied"
    channels = {"rgb": "RGB", "gray": "gray"}.get(geometry["channels"], geometry["channels"])
    return (
        f"{size} × {size} {channels} images, stored as plain uint8: {fit}, with the antialiased {geometry['filter']} "
        f"filter; EXIF orientation {exif}."
    )


def _tiles(store: Store, surveys: list[SplitSurvey]) -> list[tuple[str, str, str]]:
    valid = sum(survey.split.num_valid for survey in surveys)
    bad = sum(survey.num_bad for survey in surveys)
    total = sum(survey.disk.total_bytes for survey in surveys)
    problems = sum(len(survey.problems) for survey in surveys)
    each = total / sum(survey.split.num_samples for survey in surveys) if valid + bad else 0
    samples = ", ".join(f"{survey.name} {count(survey.split.num_valid)}" for survey in surveys)
    return [
        ("Samples", count(valid), samples),
        ("Classes", count(len(store.class_ids)), ""),
        ("On disk", data_size(total), f"{data_size(each)} per image"),
        ("Bad samples", count(bad), share(bad, valid + bad) + " of all, never served" if bad else "none"),
        ("State", "✗ damaged" if problems else "✓ sound", "see Verification" if problems else "as far as checked now"),
    ]


def _overview(surveys: list[SplitSurvey]) -> Html:
    head = ["Split", "Order", "Samples", "Unlabelled", "Bad", "Classes present", "Bytes"]
    rows = []
    for number, survey in enumerate(surveys):
        order = survey.split.attrs["order"]
        rows.append(
            [
                tag("a", survey.name, href=f"#split-{number}"),
                f"shuffled, seed {order['seed']}" if order["shuffled"] else "as in the source",
                count(survey.split.num_valid),
                count(survey.classes.num_unlabelled),
                count(survey.num_bad),
                count(int(np.count_nonzero(survey.classes.counts))),
                count(survey.disk.total_bytes),
            ]
        )
    return join(tag("h2", "Splits", class_="unseen"), table("Splits at a glance", head, rows, text_columns=2))


def _classes(store: Store, surveys: list[SplitSurvey]) -> Html:
    with_names = store.class_names != store.class_ids
    head = ["Label", "Id", *(["Name"] if with_names else []), *(survey.name for survey in surveys)]
    rows = [
        [
            str(label),
            tag("bdi", class_id),
            *([tag("bdi", store.class_names[label])] if with_names else []),
            *(count(int(survey.classes.counts[label])) for survey in surveys),
        ]
        for label, class_id in enumerate(store.class_ids)
    ]
    num = len(store.class_ids)
    listing = table(
        "All classes and their samples in each split",
        head,
        rows,
        text_columns=2 + with_names,
        hide_caption=True,
        class_="tall",
    )
    return section("classes", "Classes", details(f"All {plural(num, 'class', 'classes')}", listing, is_open=num <= 12))


def _disk(store: Store, surveys: list[SplitSurvey]) -> Html:
    head = ["Split", "Codec", "Chunk files", "Images per chunk", "Images", "Labels, keys, ...", "Padding", "Total"]
    rows = []
    for survey in surveys:
        split, disk = survey.split, survey.disk
        codec = "none" if split.is_raw else "+".join(name for name in split.codecs if name != "bytes")
        rows.append(
            [
                survey.name,
                codec,
                count(split.num_chunks),
                count(split.chunk_images),
                data_size(disk.image_bytes),
                data_size(disk.array_bytes),
                data_size(disk.padding_bytes) if split.is_raw else "compressed",
                data_size(disk.total_bytes),
            ]
        )
    raw, stored = (sum(getattr(s.disk, name) for s in surveys) for name in ("raw_bytes", "image_bytes"))
    parts = [table("Files and bytes", head, rows, text_columns=2)]
    note = "Sizes are in decimal units. Padding fills the last chunk with zeros and is part of the images' bytes."
    parts.append(tag("p", note, class_="note"))
    if not all(survey.split.is_raw for survey in surveys):
        raw, stored = (sum(getattr(s.disk, name) for s in surveys) for name in ("raw_bytes", "image_bytes"))
        text = f"The images are compressed to {share(stored, raw)} of {data_size(raw)}. Training needs a raw copy:"
        parts += [tag("p", text), code(f"python -m pipeline copy {store.path} NEW.zarr --codec none")]
    return section("disk", "Disk use", *parts)


def _checks(store: Store, surveys: list[SplitSurvey]) -> Html:
    columns = []
    for survey in surveys:
        lines = [verdict(False, problem) for problem in survey.problems[:20]]
        if len(survey.problems) > 20:
            lines.append(verdict(False, f"and {len(survey.problems) - 20:,} more problems"))
        lines += [verdict(True, line) for line in survey.passed]
        columns.append(tag("div", tag("h3", survey.name), tag("ul", *lines, class_="checks")))
    return section(
        "checks",
        "Verification",
        tag("p", "Checked when this page was made:"),
        tag("div", *columns, class_="columns"),
        tag("p", "Every byte of every chunk, and pixels against their source, are checked by:"),
        code(f"python -m pipeline verify {store.path}\npython -m pipeline verify {store.path} --against SRC"),
    )


def _provenance(store: Store, surveys: list[SplitSurvey]) -> Html:
    names = [survey.name for survey in surveys]
    all_attrs = [survey.split.attrs for survey in surveys]
    rows: list[list[object]] = []
    for group in ("recipe", "software"):
        fields = dict.fromkeys(name for attrs in all_attrs for name in attrs.get(group, {}))
        fields.pop("resizer", None)  # has a row of its own
        for name in fields:
            title = name if group == "software" else _words(name)
            rows.append([title, *(_text(attrs.get(group, {}).get(name)) for attrs in all_attrs)])
        if group == "recipe":
            rows.append(["Resizer", *(attrs.get("resizer", "not recorded") for attrs in all_attrs)])
            rows.append(["Decoder warnings", *(count(attrs.get("decoder_warnings", 0)) for attrs in all_attrs)])
    prints = [[survey.name, tag("td", tag("code", survey.split.fingerprint))] for survey in surveys]
    digests = [
        [f"{survey.name}/{name}", tag("td", tag("code", digest))]
        for survey in surveys
        for name, digest in survey.split.attrs.get("sha256", {}).items()
    ]
    root = {name: store.attrs[name] for name in ("format", "format_version", "geometry")}
    return section(
        "provenance",
        "Recipe and provenance",
        tag("h3", "Geometry"),
        facts((_words(name), _text(value)) for name, value in store.geometry.items()),
        table("Recipe and software", ["", *names], rows, text_columns=1 + len(names)),
        table("Sample fingerprints", ["Split", "SHA-256 of labels, keys and order"], prints, text_columns=2),
        details("Digests of the small arrays", table("SHA-256", ["Array", "SHA-256"], digests, text_columns=2)),
        details("Metadata of the store", code(json.dumps(root, indent=2))),
        _use(store, surveys[0].split),
    )


def _use(store: Store, split: Split) -> Html:
    shape = (split.num_samples, *split.image_shape)
    lines = [
        "import zarr  # or any other Zarr v3 reader",
        f"images = zarr.open_array({str(split.path / 'images')!r}, mode='r')  # uint8 {shape}",
    ]
    if split.is_raw:
        lines += [
            "",
            "from trainer.dataset import RankPartitionedDataset",
            f"data = RankPartitionedDataset({str(store.path)!r}, {split.name!r})",
        ]
    return details("How to read it from Python", code("\n".join(lines)))


def code(text: str) -> Html:
    """Lines to copy."""
    lines = Html("\n".join(join(line) for line in text.splitlines()))
    return tag("pre", tag("code", lines), tabindex="0")


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return count(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
