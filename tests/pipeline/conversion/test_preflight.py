"""What is said before the first image is converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from folders import make_folder

from pipeline import convert
from pipeline.conversion.plan import SplitPlan
from pipeline.conversion.preflight import needs
from pipeline.conversion.workdir import Workspace
from pipeline.sources import open_source
from pipeline.store.geometry import Geometry


def test_a_dry_run_tries_each_sample_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "source", {"train": {"a": 9, "b": 8}, "val": {"a": 3}})
    for name in ("train/a/001.jpg", "train/a/005.jpg", "train/b/007.jpg", "val/a/000.jpg", "val/a/002.jpg"):
        (source / name).write_bytes(b"")
    convert(source, tmp_path / "a.zarr", size=8, dry_run=True)
    assert "dry run: 20 samples tried, 5 bad" in capsys.readouterr().err


def test_the_kind_of_source_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "source", {"train": {"a": 2}})
    for options, said in (({}, "source: folder, recognised by"), ({"source": "folder"}, "source: folder, as --source")):
        convert(source, tmp_path / "a.zarr", size=8, dry_run=True, **options)
        assert said in capsys.readouterr().err


def test_room_for_what_workers_are_handed_counts_a_subsets_source(tmp_path: Path) -> None:
    """All images of a list are handed over, also where only some are converted."""
    items = [(np.zeros((40, 40, 3), np.uint8), i % 2) for i in range(100)]
    few = open_source(items, limit_per_class=1)
    train = few.splits["train"]
    plan = SplitPlan("train", train, np.arange(2), train.labels, *train.keys(), 2, {}, {})
    (need,) = needs([plan], [(Workspace(tmp_path / "a.zarr"), Geometry(size=4))], overwrite=False)
    assert need.num_bytes > 100 * 40 * 40 * 3
