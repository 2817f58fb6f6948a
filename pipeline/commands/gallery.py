"""Pictures for the report: random samples of a split as small images that a page can hold in itself."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pipeline.commands.survey import SplitSurvey, check_chunks
from pipeline.text import one_line

THUMB_PIXELS = 160
PIXEL_ART = 40
"""Images up to this side are kept as they are, without loss."""
JPEG_QUALITY = 75


@dataclass(frozen=True)
class Picture:
    """A sample to show: its slot and its image as a data URI."""

    slot: int
    uri: str


def data_uri(image: np.ndarray) -> str:
    """uint8 (H, W, C), C 1 or 3, as a data URI: PNG up to `PIXEL_ART`, above JPEG of at most `THUMB_PIXELS`."""
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    side = max(picture.size)
    file = io.BytesIO()
    if side <= PIXEL_ART:
        picture.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        if side > THUMB_PIXELS:
            picture = picture.resize((THUMB_PIXELS, THUMB_PIXELS), Image.Resampling.LANCZOS)
        picture.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def draw(labels: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """int64 (n,), n <= `most`: random positions in the labels, int (N,), one of each label before a second of any."""
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    ordered = labels[by_label]
    rounds = np.arange(len(labels)) - np.searchsorted(ordered, ordered)  # 0 for a label's first, 1 for its second
    return by_label[np.argsort(rounds + rng.random(len(labels)))[:most]]


def choose_pictures(survey: SplitSurvey, most: int, most_bytes: int, rng: np.random.Generator) -> list[Picture]:
    """Random served samples of as many classes as possible, by label and slot; `most_bytes` holds all their data URIs.

    Some random chunks are checked on the way, which is noted in the survey. Pictures of a compressed split of format 1
    come from these, as a chunk is decompressed whole for each.
    """
    split = survey.split
    check_chunks(survey, rng)
    one_by_one = split.is_raw or split.version > 1
    slots = split.valid_slots
    slots = slots[np.isin(slots // split.chunk_images, survey.good_chunks if one_by_one else survey.checked_chunks)]
    pictures, used = [], 0
    for slot in slots[draw(split.labels[slots], most, rng)].tolist():
        try:
            uri = data_uri(split.read_image(slot))
        except (OSError, ValueError, RuntimeError) as error:  # of a codec
            problem = f"{split.chunk_path(slot // split.chunk_images)}: can't be read ({one_line(error)})"
            if problem not in survey.problems:
                survey.problems.append(problem)
            continue
        used += len(uri)
        if used > most_bytes:
            break
        pictures.append(Picture(slot, uri))
    return sorted(pictures, key=lambda picture: (int(split.labels[picture.slot]), picture.slot))
