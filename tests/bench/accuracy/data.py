"""The study's data: "original JPEGs" larger than the training crop and not square, and the stores made from them."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePath

from PIL import Image

from pipeline import convert
from pipeline.errors import UsageError
from tests.bench.accuracy.arms import EVAL_SIZE, FILTERS, SIZES, STRETCHED, Settings, store_path

LONG, SHORT = 80, 64
"""Sides of the originals: of ImageNet's mean shape (470 x 390 px), and as much larger than the stores."""

QUALITY = 95
SPLITS = {"train": "train", "test": "val", "val": "val"}


def read_images(source: Path) -> Iterator[tuple[str, bytes]]:
    """(path inside, bytes) of each file in a tar, which may be compressed, or a folder."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                yield path.relative_to(source).as_posix(), path.read_bytes()
        return
    try:
        with tarfile.open(source) as tar:
            for member in tar:
                if member.isfile() and (file := tar.extractfile(member)):
                    yield member.name, file.read()
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"--images {source}: neither a folder nor a tar that can be read ({error})") from None


def make_originals(source: Path, folder: Path, settings: Settings) -> None:
    """Enlarge the first pictures of each class to 80x64, every fourth to 64x80, and save them as JPEGs, once.

    Args:
        source: a tar or folder of `train|test|val/<class>/<picture>`; the pictures of one split need names in order.
        folder: gets `train/<class>/<n>.jpg` and `val/<class>/<n>.jpg`; complete when it exists.

    Raises:
        UsageError: `source` can't be read, or hasn't both splits.
    """
    if folder.exists():
        return
    wanted = {"train": settings.train, "val": settings.val}
    taken: dict[tuple[str, str], int] = defaultdict(int)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, data in read_images(source):
        parts = PurePath(name).parts
        if len(parts) < 3 or (split := SPLITS.get(parts[-3], "")) not in wanted:
            continue
        number = taken[split, parts[-2]]
        if number == wanted[split]:
            continue
        taken[split, parts[-2]] += 1
        target = temporary / split / parts[-2] / f"{number:04d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        size = (SHORT, LONG) if number % 4 == 3 else (LONG, SHORT)
        picture = Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.BICUBIC)
        picture.save(target, "JPEG", quality=QUALITY)
    if {split for split, _ in taken} != set(wanted):
        raise UsageError(f"--images {source}: must hold train/<class>/<picture> and test/<class>/<picture>")
    temporary.rename(folder)


def make_stores(originals: Path, stores: Path, jobs: int) -> None:
    """Convert the originals: cut to each bicubic size, to one size with each other filter, and stretched.

    What is there already stays.
    """
    for filter in FILTERS:
        sizes = list(SIZES) if filter == "bicubic" else [EVAL_SIZE]
        destination = store_path(stores, "{size}" if len(sizes) > 1 else EVAL_SIZE, filter)
        convert(originals, destination, size=sizes, filter=filter, n_jobs=jobs, quiet=True)
    convert(
        originals, store_path(stores, "{size}", "stretch"), size=[*STRETCHED], fit="stretch", n_jobs=jobs, quiet=True
    )
