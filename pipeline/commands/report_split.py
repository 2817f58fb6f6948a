"""One split's part of the dataset report: samples, classes, original sizes, channels, bad samples."""

from __future__ import annotations

import numpy as np

from pipeline.commands.gallery import PIXEL_ART, Picture
from pipeline.commands.survey import ClassSurvey, SizeSurvey, SplitSurvey, quantiles
from pipeline.errors import BAD_SAMPLE_REASONS
from pipeline.html.charts import Axis, heat_map, histogram, profile, ranges
from pipeline.html.page import (
    Html,
    bar_cell,
    count,
    details,
    figure,
    join,
    plural,
    printable,
    section,
    share,
    short_count,
    table,
    tag,
)
from pipeline.store.format import UNLABELLED
from pipeline.store.reader import Split, Store

MOST_NAMED_CLASSES = 40
EXTREME_CLASSES = 5
LISTED_BAD = 50
KEY_LENGTH = 120
MODES = {
    "RGB": "red, green, blue",
    "L": "gray",
    "LA": "gray with alpha",
    "RGBA": "RGB with alpha",
    "RGBX": "RGB with padding",
    "P": "palette",
    "PA": "palette with alpha",
    "CMYK": "printing inks",
    "YCbCr": "luma and chroma",
    "1": "black and white",
    "I;16": "16-bit gray",
    "I;16B": "16-bit gray, big-endian",
    "I": "32-bit integers",
    "F": "32-bit floats",
    "LAB": "CIE L*a*b*",
}


def split_section(anchor: str, store: Store, survey: SplitSurvey, pictures: list[Picture]) -> Html:
    """Everything about one split."""
    split = survey.split
    parts: list[Html] = [_sheet(store, survey, pictures)]
    if survey.classes.num_labelled:
        parts.append(_class_sizes(store, survey.classes))
    elif split.num_valid:
        parts.append(tag("p", "The samples have no labels."))
    parts += [_sizes(survey), _modes(survey), _channels(split)]
    if survey.num_bad:
        parts.append(_bad(survey))
    return section(anchor, f"Split {split.name}", *parts)


def class_text(store: Store, label: int) -> str:
    """A class as people call it: its name, and its id where that's another."""
    if not 0 <= label < len(store.class_ids):
        return "unlabelled" if label == UNLABELLED else f"label {label}"
    name, class_id = store.class_names[label], store.class_ids[label]
    return printable(name if name == class_id else f"{name} ({class_id})", KEY_LENGTH)


def _sheet(store: Store, survey: SplitSurvey, pictures: list[Picture]) -> Html:
    split = survey.split
    title = tag("h3", "Samples")
    if not pictures:
        return join(title, tag("p", "There is no sample to show."))
    items, labelled = [], survey.classes.num_labelled > 0
    for picture in pictures:
        label = int(split.labels[picture.slot])
        name, key = (
            class_text(store, label),
            printable(split.key(picture.slot).decode("utf-8", "backslashreplace"), KEY_LENGTH),
        )
        height, width = split.source_size[picture.slot].tolist()
        remark = f"slot {picture.slot}, originally {width} × {height}"
        side = str(split.image_shape[0])
        place = {"width": side, "height": side, "loading": "lazy", "decoding": "async"}
        image = tag("img", src=picture.uri, alt=f"{name}: {key}", title=remark, **place)
        short = store.class_names[label] if 0 <= label < len(store.class_names) else name
        bold = tag("b", tag("bdi", printable(short, KEY_LENGTH))) if labelled else None
        caption = tag("figcaption", bold, tag("bdi", key, class_="key"))
        items.append(tag("li", tag("figure", image, caption)))
    where = ""
    if not split.is_raw and len(survey.checked_chunks) < split.num_chunks:
        where = f", from {plural(len(survey.checked_chunks), 'random chunk')}, as the store is compressed"
    captions = "labels. Below each: class and key" if labelled else "slots. Below each: key"
    drawn = f"{count(len(pictures))} of {count(split.num_valid)}, drawn at random{where}"
    if len(pictures) == split.num_valid:
        drawn = "All of them" if len(pictures) > 1 else "The only one"
    note = f"{drawn}, in the order of {captions}."
    grid = tag("ul", *items, class_="sheet pixels" if split.image_shape[0] <= PIXEL_ART * 2 else "sheet")
    return join(title, tag("p", note, class_="note"), grid)


def _class_sizes(store: Store, classes: ClassSurvey) -> Html:
    counts = classes.counts
    smallest, few, median, many, largest = classes.quantiles()
    title = tag("h3", "Classes")
    words = f"{plural(len(counts), 'class', 'classes')} of {count(smallest)} to {count(largest)} samples"
    if smallest == largest:
        words = f"{plural(len(counts), 'class', 'classes')} of {plural(largest, 'sample')} each"
    notes = [words]
    if smallest and largest > smallest:
        notes.append(f"the largest is {largest / smallest:.3g} times the smallest")
    if len(classes.empty):
        first = ", ".join(class_text(store, label) for label in classes.empty[:5].tolist())
        more = ", ..." if len(classes.empty) > 5 else ""
        notes.append(f"{count(len(classes.empty))} without any sample ({first}{more})")
    if classes.num_unlabelled:
        notes.append(f"{plural(classes.num_unlabelled, 'sample')} unlabelled")
    lead = tag("p", "; ".join(notes) + ".")
    if len(counts) <= MOST_NAMED_CLASSES:
        rows = [
            [tag("bdi", class_text(store, label)), bar_cell(number, largest, count(number))]
            for label, number in enumerate(counts.tolist())
        ]
        return join(title, lead, table("Samples per class", ["Class", "Samples"], rows, hide_caption=True))
    label = (
        f"Samples per class, classes sorted by size: the largest has {count(largest)}, the median {count(median)}, "
        f"the smallest {count(smallest)}."
    )
    if smallest == largest:
        return join(title, lead)
    chart = profile(counts[classes.by_size], label, "classes, the largest first", "samples")
    note = f"Median {count(median)}; 5% of the classes have at most {count(few)}, 5% more than {count(many)}."
    extremes = [
        _class_table(store, counts, f"The {EXTREME_CLASSES} largest", classes.by_size[:EXTREME_CLASSES]),
        _class_table(store, counts, f"The {EXTREME_CLASSES} smallest", classes.by_size[::-1][:EXTREME_CLASSES]),
    ]
    shown = figure("Samples per class, sorted", chart, note)
    return join(title, lead, tag("div", shown, tag("div", *extremes, class_="pair"), class_="columns"))


def _class_table(store: Store, counts: np.ndarray, caption: str, labels: np.ndarray) -> Html:
    rows = [[tag("bdi", class_text(store, label)), count(int(counts[label]))] for label in labels.tolist()]
    return table(caption, ["Class", "Samples"], rows)


def _sizes(survey: SplitSurvey) -> Html:
    title, sizes = tag("h3", "Original sizes"), survey.sizes
    if sizes is None:
        return join(title, tag("p", "No sample has a recorded size."))
    height, width, _ = sizes.common[0]
    if sizes.num_distinct == 1:
        text = f"Every image was {width} × {height} pixels"
        enlarged = ", and was enlarged" if sizes.num_enlarged else ""
        return join(title, tag("p", f"{text}{enlarged}."))
    common = ", ".join(f"{w} × {h} ({share(number, len(sizes.sizes))})" for h, w, number in sizes.common)
    enlarged = (
        f"{plural(sizes.num_enlarged, 'image')} ({share(sizes.num_enlarged, len(sizes.sizes))}) had to be enlarged"
    )
    lead = f"{count(sizes.num_distinct)} different sizes, most often {common}. {enlarged} to fill {sizes.target} px."
    charts = tag("div", _heat(sizes), tag("div", _short_side(sizes), _quantile_table(sizes)), class_="columns")
    return join(title, tag("p", lead), charts)


def _heat(sizes: SizeSurvey) -> Html:
    cells, rows, columns = sizes.heat_map()
    x_axis = Axis(columns[0], columns[-1], "width in pixels", log=True, text=_pixels)
    y_axis = Axis(rows[0], rows[-1], "height in pixels", log=True, text=_pixels)
    label = (
        f"Heights and widths of the original images: widths from {count(sizes.sizes[:, 1].min())} to "
        f"{count(sizes.sizes[:, 1].max())}, heights from {count(sizes.sizes[:, 0].min())} to "
        f"{count(sizes.sizes[:, 0].max())} pixels."
    )
    return figure(
        "Width and height",
        heat_map(cells, x_axis, y_axis, label, diagonal=True),
        "The stronger a cell, the more images it holds, on a logarithmic scale. Square images lie on the dotted line.",
    )


def _short_side(sizes: SizeSurvey) -> Html:
    edges, numbers = sizes.histogram()
    axis = Axis(edges[0], edges[-1], "pixels", log=True, text=_pixels)
    label = (
        f"Shorter side of the original images: from {count(sizes.short.min())} to {count(sizes.short.max())} pixels, "
        f"median {count(float(np.median(sizes.short)))}."
    )
    chart = histogram(edges, numbers, label, axis, "images", (sizes.target, f"stored: {sizes.target}"))
    return figure("Shorter side", chart)


def _quantile_table(sizes: SizeSurvey) -> Html:
    rows = [
        ["Shorter side", *(count(value) for value in quantiles(sizes.short))],
        ["Longer side", *(count(value) for value in quantiles(sizes.long))],
        ["Width ÷ height", *(f"{value:.2f}" for value in quantiles(sizes.aspect))],
    ]
    return table("Quantiles", ["Pixels", "least", "5%", "median", "95%", "most"], rows)


def _pixels(value: float) -> str:
    return count(value) if value < 10_000 else short_count(value)


def _modes(survey: SplitSurvey) -> Html:
    modes = survey.split.attrs.get("source_modes", {})
    if not modes:
        return Html("")
    title = tag("h3", "Original pixel modes")
    if len(modes) == 1:
        mode = next(iter(modes))
        return join(title, tag("p", "Every image was ", _mode(mode), "."))
    ordered = sorted(modes.items(), key=lambda item: -item[1])
    largest, total = ordered[0][1], sum(modes.values())
    rows = [
        [
            _mode(mode),
            bar_cell(number, largest, count(number)),
            share(number, total),
        ]
        for mode, number in ordered
    ]
    listing = table("Pixel modes of the original images", ["Mode", "Images", "Share"], rows, hide_caption=True)
    return join(title, listing)


def _mode(mode: str) -> Html:
    return join(tag("code", mode), f", {MODES[mode]}" if mode in MODES else "")


def _channels(split: Split) -> Html:
    names = {1: ["gray"], 3: ["red", "green", "blue"]}.get(len(split.mean)) or [str(i) for i in range(len(split.mean))]
    label = "; ".join(
        f"{name}: mean {mean:.4f}, standard deviation {std:.4f}"
        for name, mean, std in zip(names, split.mean, split.std, strict=True)
    )
    chart = figure("Mean ± one standard deviation", ranges(names, split.mean, split.std, label))
    rows = [
        [name, f"{mean:.4f}", f"{std:.4f}", f"{255 * mean:.2f}", f"{255 * std:.2f}"]
        for name, mean, std in zip(names, split.mean, split.std, strict=True)
    ]
    head = ["Channel", "mean", "std", "mean × 255", "std × 255"]
    listing = table("Of all served pixels, as shares of 255", head, rows)
    return join(tag("h3", "Channels"), tag("div", chart, listing, class_="columns"))


def _bad(survey: SplitSurvey) -> Html:
    largest = max(survey.bad_reasons.values(), default=0)
    reasons = [
        [
            tag("code", reason, class_="word"),
            tag("td", BAD_SAMPLE_REASONS.get(reason, "")),
            bar_cell(number, largest, count(number)),
        ]
        for reason, number in survey.bad_reasons.items()
    ]
    listed = survey.split.attrs.get("bad_samples", [])[:LISTED_BAD]
    rows = [
        [
            count(entry["slot"]),
            tag("td", tag("bdi", printable(str(entry["key"]), KEY_LENGTH), class_="key")),
            tag("td", tag("code", entry["reason"], class_="word")),
        ]
        for entry in listed
    ]
    which = f"The first {LISTED_BAD} of {count(survey.num_bad)}" if survey.num_bad > LISTED_BAD else "All of them"
    lead = f"{plural(survey.num_bad, 'sample')} ({share(survey.num_bad, survey.split.num_samples)}) can't be served."
    return join(
        tag("h3", "Bad samples"),
        tag("p", lead),
        table("Reasons", ["Reason", "Meaning", "Samples"], reasons, text_columns=2),
        details(which, table("Bad samples", ["Slot", "Key", "Reason"], rows, text_columns=3, hide_caption=True)),
    )
