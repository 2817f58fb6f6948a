"""The Kaggle edition of ImageNet ("ImageNet Object Localization Challenge"), unpacked.

    SRC/ILSVRC/Data/CLS-LOC/train/<class>/   SRC/ILSVRC/Data/CLS-LOC/val/   SRC/ILSVRC/Data/CLS-LOC/test/
    SRC/LOC_val_solution.csv                 the class of each validation image
    SRC/LOC_synset_mapping.txt               the classes' names (may be missing)

SRC may also be any folder on the way down to `CLS-LOC`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.folder import build, scan
from pipeline.sources.ignored import Ignored
from pipeline.sources.labels import LabelColumn
from pipeline.text import are, as_text, counted

SOLUTION, MAPPING = "LOC_val_solution.csv", "LOC_synset_mapping.txt"
_SPLITS = ("train", "val", "test")


def find_tree(src: Path) -> Path | None:
    """The folder `CLS-LOC` of a Kaggle tree, or None."""
    candidates = [src / "ILSVRC" / "Data" / "CLS-LOC", src / "Data" / "CLS-LOC", src / "CLS-LOC"]
    if src.resolve().name == "CLS-LOC":
        candidates.append(src)
    return next((path for path in candidates if path.is_dir()), None)


def open_kaggle(src: Path, options: SourceOptions) -> SourceSet:
    """The Kaggle tree; `test` is unlabelled."""
    tree = find_tree(src)
    if tree is None:
        raise UsageError(f"{src}: no ILSVRC/Data/CLS-LOC in it; give the folder of the unpacked Kaggle archive")
    ignored = Ignored(os.fsencode(tree))
    folders = {split: os.fsencode(tree / split) for split in _SPLITS if (tree / split).is_dir()}
    scans = {split: scan(folders[split], ignored) for split in folders if options.wants(split)}
    notes: list[str] = []
    if "val" in scans and scans["val"].is_flat:
        solution = _beside(tree, SOLUTION)
        if solution is None:
            raise UsageError(
                f"{src / SOLUTION}: missing, it has the labels of {tree / 'val'}; put it there, or convert only "
                "--split train"
            )
        scans["val"].column, notes = _solve(solution, scans["val"].keys, tree / "val")
    found = build("kaggle", scans, folders.get("train"), options, ignored)
    found.notes = notes
    if mapping := _beside(tree, MAPPING):
        words = _read_mapping(mapping)
        found.class_names = [words.get(wnid, wnid) for wnid in found.class_ids]
    return found


def _beside(tree: Path, name: str) -> Path | None:
    """The file in the tree's folder or one of the three above it."""
    folders = [tree, *tree.resolve().parents[:3]]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _solve(solution: Path, keys: Iterable[bytes], images: Path) -> tuple[LabelColumn, list[str]]:
    """Labels of the images from the CSV's `ImageId,PredictionString`; the first word of the latter is the class."""
    truth: dict[bytes, str] = {}
    with open(solution, newline="", encoding="utf-8-sig", errors="backslashreplace") as file:
        for line, row in enumerate(csv.reader(file), 1):
            if line == 1 and row[:2] == ["ImageId", "PredictionString"]:
                continue
            if len(row) < 2 or not row[1].split():
                raise UsageError(f"{solution}, line {line}: not `ImageId,PredictionString`; get the file again")
            truth[row[0].encode()] = row[1].split()[0]
    column = LabelColumn()
    missing = []
    for key in keys:
        wnid = truth.get(key.rpartition(b".")[0])
        if wnid is None:
            missing.append(as_text(key))
        column.add(wnid)
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UsageError(f"{images / missing[0]}{more}: not in {solution}; get the file again, or remove the images")
    unused = len(truth) - len(column)
    note = f"{images}: {counted(unused, 'image')} that {solution} lists {are(unused)} missing there"
    return column, [note] if unused > 0 else []


def _read_mapping(path: Path) -> dict[str, str]:
    """WordNet id -> names, from lines such as `n01440764 tench, Tinca tinca`."""
    lines = path.read_text(encoding="utf-8-sig", errors="backslashreplace").splitlines()
    return {wnid: words.strip() for wnid, _, words in (line.strip().partition(" ") for line in lines) if wnid}
