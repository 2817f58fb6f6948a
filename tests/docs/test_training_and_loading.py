"""What docs/training.md and docs/loading.md show and state is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from documents import ROOT, blocks, run
from folders import make_folder

from pipeline import convert, open_store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader

TRAINING, LOADING = ROOT / "docs" / "training.md", ROOT / "docs" / "loading.md"


def test_the_table_of_recipes_is_theirs() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| .*? \| (.*?) \| (.*?) \| (\w+)", TRAINING.read_text(), re.MULTILINE)
    recipes = {path.stem: path.read_text() for path in (ROOT / "trainer" / "recipes").glob("*.yaml")}
    assert {name for name, *_ in rows} == set(recipes)
    for name, model, epochs, top1, origin in rows:
        values = yaml.safe_load(recipes[name])
        assert values["model"] == model
        assert (str(values["epochs"]), top1 in recipes[name]) == (epochs, True)
        assert f"# {origin.capitalize()}" in recipes[name]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path, {"photos": {"cat": 70, "dog": 70}})
    return tmp_path


def test_two_folders_into_one_store(photos: Path) -> None:
    make_folder(photos, {"photos-val": {"cat": 0, "dog": 5}})
    convert("photos", "own.zarr", size=16, n_jobs=1, quiet=True)
    convert("photos-val", "own.zarr", size=16, split="val", n_jobs=1, quiet=True)
    store = open_store("own.zarr")
    assert store["train"].num_valid == 140
    assert store["val"].labels.tolist() == [1] * 5


def test_both_ways_of_loading(photos: Path) -> None:
    convert("photos", "data/own-224.zarr", size=224, n_jobs=1, quiet=True)
    code, subsets = blocks(LOADING, "python")
    run(code, photos)
    run(f"{subsets}\nassert (len(data), len(rest), len(balanced)) == (112, 28, 140)", photos)

    data = RankPartitionedDataset("data/own-224.zarr", rank=1, world_size=2, crop=192)
    plain, fast = torch.utils.data.DataLoader(data, 16), Loader(data, 16)
    a, b = list(plain), list(fast)
    assert (len(plain), len(fast)) == (len(a), len(b)) == (5, 4)  # 70 samples of the rank; 140 // 32 global batches
    assert a[-1][0].shape == (6, 3, 192, 192)
    assert all(part[0][0].is_contiguous(memory_format=torch.channels_last) for part in (a, b))
    assert all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in zip(a, b, strict=False))
