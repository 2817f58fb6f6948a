"""The accuracy study runs, treats its arms alike, and goes on where it stopped; what it measures isn't tested here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import make_folder, make_image
from PIL import Image

from pipeline.errors import UsageError
from pipeline.store.reader import open_store
from tests.bench.accuracy import parity, whole_pictures
from tests.bench.accuracy.arms import (
    ARMS,
    BASE,
    CROP,
    FAMILIES,
    FILTERS,
    SIZES,
    STRETCHED,
    Arm,
    Settings,
    arm,
    store_path,
)
from tests.bench.accuracy.data import make_originals, make_stores
from tests.bench.accuracy.run import place_name, start, train_and_evaluate
from tests.bench.accuracy.summary import Spread, difference, draw, put_into, table

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(train=6, val=3, epochs=3, global_batch=8, amp=False)
CLASSES = ("cat", "dog")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in CIFAR-10's layout; more of them than any test takes."""
    counts = {"train": dict.fromkeys(CLASSES, 40), "test": dict.fromkeys(CLASSES, 10)}
    return make_folder(tmp_path_factory.mktemp("pictures") / "cifar", counts)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    folder = tmp_path_factory.mktemp("study")
    make_originals(images, folder / "originals", TINY)
    make_stores(folder / "originals", folder / "stores", 1)
    return folder


def reduced(images: Path, work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench.accuracy", f"--images={images}", f"--work={work}", "--reduced"]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)


def check_reduced(work: Path) -> dict[str, Any]:
    summary = json.loads((work / "results.json").read_text())
    assert [result["arm"] for result in summary["results"]] == ["ordinary-0.08", "growing-rrc"]
    assert len({result["steps"] for result in summary["results"]}) == 1
    assert all(0 <= top1 <= 1 for result in summary["results"] for top1 in result["top1"].values())
    lines = (work / "table.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 3  # the head and two arms
    assert (work / "accuracy.svg").read_text().startswith("<?xml")
    return summary


def test_the_reduced_study_runs_and_goes_on_where_it_stopped(images: Path, tmp_path: Path) -> None:
    done = reduced(images, tmp_path)
    assert done.returncode == 0, done.stderr
    first = check_reduced(tmp_path)
    results = sorted(tmp_path.rglob("*.0.json"))
    assert [path.name for path in results] == ["growing-rrc.0.json", "ordinary-0.08.0.json"]
    before = [os.stat(path).st_mtime_ns for path in results]
    results[0].unlink()
    done = reduced(images, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs of 2 arms; 1 are done already" in done.stdout
    assert os.stat(results[1]).st_mtime_ns == before[1]
    again = check_reduced(tmp_path)
    for one, other in zip(first["results"], again["results"], strict=True):
        assert one["top1"] == other["top1"]  # the arm that was run anew learnt the same


def test_the_reduced_study_runs_on_cifar10(real_data: Path, tmp_path: Path) -> None:
    done = reduced(real_data / "cifar10.tar.gz", tmp_path)
    assert done.returncode == 0, done.stderr
    assert check_reduced(tmp_path)["results"][0]["steps"] == 3 * (10 * 32 // 16)


@pytest.mark.parametrize("chosen", ARMS, ids=lambda chosen: chosen.name)
def test_all_arms_take_the_same_steps_on_the_same_pictures(chosen: Arm, work: Path) -> None:
    result = train_and_evaluate(chosen.name, 0, TINY, work)
    assert result["steps"] == 3 * (2 * 6 // 8)
    assert result["samples"] == result["steps"] * 8
    assert np.isfinite(result["train_loss"])
    kind = "stretch" if chosen.fit == "stretch" else chosen.filter
    assert result["own"] == f"{CROP} of {kind}-{chosen.size}"
    whole = {f"{CROP} of stretch-{size}" for size in STRETCHED}
    assert set(result["top1"]) == whole | {result["own"], "28 of bicubic-32", "32 of bicubic-32"}


def test_arms_differ_in_what_feeds_the_network_alone(work: Path) -> None:
    assert len({chosen.name for chosen in ARMS}) == len(ARMS)
    assert [family for family in FAMILIES if not any(chosen.family == family for chosen in ARMS)] == []
    feeding = {"data", "stages", "crop", "augment", "rrc_scale", "flip", "pad", "resample", "eval_resize"}
    base = vars(arm(BASE).config(TINY, work, 0))
    for chosen in ARMS:
        config = vars(chosen.config(TINY, work, 0))
        assert {name for name in base if config[name] != base[name]} <= feeding


def test_every_arm_begins_with_the_same_weights_and_serves_the_same_batches(work: Path) -> None:
    served = []
    for name in (BASE, "crop-45", "rrc-32-0.35", "growing-rrc", "crop-32-box"):
        run = start(name, 1, TINY, work)
        batches = []
        for images, labels in run.loader:
            assert images.dtype == torch.uint8
            assert images.is_contiguous(memory_format=torch.channels_last)
            batches.append((run.loader.indices.tolist(), labels.tolist()))
        weights = torch.cat([value.flatten() for value in run.raw.parameters()])
        served.append((batches, weights.tolist()))
        for loader in run.loaders:
            loader.close()
    assert all(one == served[0] for one in served[1:])


def test_the_ordinary_loader_gives_the_pictures_that_the_store_has_under_its_indices(work: Path) -> None:
    run = start(BASE, 0, TINY, work)
    run.loader._pictures.transform.transforms[0].scale = (1.0, 1.0)  # type: ignore[attr-defined]  # nearly the whole
    run.loader._pictures.transform.transforms[1].p = 0.0  # type: ignore[attr-defined]
    split = open_store(store_path(work / "stores", CROP))["train"]
    (images, labels), *_ = run.loader
    slots = run.loader.indices
    assert labels.tolist() == split.labels[slots].tolist()
    for image, slot in zip(images, slots, strict=True):
        stored = np.stack([split.image(i) for i in range(split.num_valid)]).astype(float)
        errors = np.abs(stored - image.permute(1, 2, 0).numpy()).mean((1, 2, 3))
        assert errors.argmin() == slot


def test_originals_are_oblong_jpegs(work: Path) -> None:
    sizes = []
    for path in sorted((work / "originals" / "train" / "cat").iterdir()):
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            sizes.append(picture.size)
    assert sizes == [(80, 64), (80, 64), (80, 64), (64, 80), (80, 64), (80, 64)]
    assert len(list((work / "originals").rglob("*.jpg"))) == 2 * (6 + 3)


def test_each_filter_and_size_has_a_store(work: Path) -> None:
    for filter in FILTERS:
        for size in SIZES if filter == "bicubic" else (32,):
            store = open_store(store_path(work / "stores", size, filter))
            assert store.geometry["filter"] == filter
            assert store["val"].image_shape == (size, size, 3)


def test_sources_without_both_splits_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos", {"train": {"cat": 2}})
    with pytest.raises(UsageError, match="must hold train/"):
        make_originals(tmp_path / "photos", tmp_path / "originals", TINY)
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(UsageError, match="neither a folder nor a tar"):
        make_originals(tmp_path / "text", tmp_path / "originals", TINY)


def made_up(values: dict[str, list[float]]) -> dict[str, Any]:
    """A summary of runs with these accuracies on their own stores, seed by seed."""
    results = []
    for name, accuracies in values.items():
        own = f"{CROP} of {arm(name).filter}-{arm(name).size}"
        for seed, accuracy in enumerate(accuracies):
            top1 = {"28 of bicubic-32": 0.5, "32 of bicubic-32": 0.25, own: accuracy}
            settings = vars(Settings())
            results.append(
                {
                    "arm": name,
                    "seed": seed,
                    "settings": settings,
                    "steps": 7,
                    "seconds": 60.0,
                    "train_loss": 1.5,
                    "own": own,
                    "top1": top1,
                }
            )
    machine = {"cores": 2, "processor": "a processor"}
    pictures = {"train": 2500, "val": 10_000}
    return {"results": results, "jobs": 2, "machine": machine, "pictures": pictures}


def test_the_table_gives_means_spreads_and_differences_by_seed() -> None:
    text = table(made_up({BASE: [0.60, 0.62], "crop-45": [0.50, 0.54]}))
    (row,) = [line for line in text.splitlines() if "store 45 px" in line]
    assert "| **52.0 ± 2.8** | -9.0 ± 1.4 | 2 | 50.0 ± 0.0 | 25.0 ± 0.0 | 1.50 |" in row
    assert "2,500 training pictures, 60 epochs, 7 steps of 128" in text
    assert "60 s in the median with 2 runs at a time, which makes 2 minutes for all" in text


def test_resized_crops_are_compared_with_torchvisions_of_their_scale() -> None:
    text = table(made_up({BASE: [0.6], "ordinary-0.35": [0.7], "rrc-32-0.35": [0.69], "whole-rrc-36-0.08": [0.62]}))
    differences = [line.split("|")[4].strip() for line in text.splitlines()[2:6]]
    assert differences == ["", "+10.0", "-1.0", "+2.0"]


def test_differences_pair_equal_seeds() -> None:
    summary = made_up({BASE: [0.5, 0.7], "crop-28": [0.4, 0.6, 0.9]})
    runs = {name: {r["seed"]: r for r in summary["results"] if r["arm"] == name} for name in (BASE, "crop-28")}
    found = difference(runs["crop-28"], runs[BASE])
    assert found is not None
    assert found.number == 2
    assert found.mean == pytest.approx(-0.1)
    assert found.std == pytest.approx(0.0, abs=1e-12)
    assert Spread.of([0.5]).points("+") == "+50.0"  # a single run has no spread


def test_arms_of_unequal_steps_make_no_table() -> None:
    summary = made_up({BASE: [0.5], "crop-28": [0.5]})
    summary["results"][0]["steps"] = 8
    with pytest.raises(AssertionError, match="different numbers of steps"):
        table(summary)


def test_the_figure_names_every_arm_and_is_the_same_each_time(tmp_path: Path) -> None:
    summary = made_up({chosen.name: [0.5, 0.6] for chosen in ARMS})
    draw(summary, tmp_path / "one.svg")
    draw(summary, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert all(chosen.words.replace("`", "").replace("&", "&amp;") in text for chosen in ARMS)


def test_the_page_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text("before\n<!-- study -->\nold\n<!-- /study -->\nafter\n")
    put_into(page, "study", "new\n")
    assert page.read_text() == "before\n<!-- study -->\nnew\n<!-- /study -->\nafter\n"
    with pytest.raises(UsageError, match="hasn't the marks"):
        put_into(page, "parity", "new\n")


def test_places_are_named_after_crop_and_store() -> None:
    assert place_name(28, Path("stores/bicubic-32.zarr")) == "28 of bicubic-32"


class Thirds(torch.nn.Module):
    """A network of 1,000 classes that looks at the mean colours of nine fields, so that geometry matters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(27, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.nn.functional.adaptive_avg_pool2d(images, 3).flatten(1))


@pytest.fixture
def wordnet_folder(tmp_path: Path) -> Path:
    """Three pictures of each of four ImageNet classes, in ImageNet's sizes."""
    for number, name in enumerate(("n01440764", "n02105855", "n03888257", "n15075141")):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for i in range(3):
            picture = make_image(10 * number + i, 375 if i else 500, 500 if i else 333)
            picture.save(tmp_path / "raw" / name / f"{name}_{i}.JPEG", quality=92)
    return tmp_path / "raw"


def test_parity_reads_the_same_pictures_both_ways(wordnet_folder: Path, tmp_path: Path) -> None:
    pictures = parity.Pictures(wordnet_folder, tmp_path)
    data = pictures.data("bilinear")
    ordinary, stored = list(pictures.ordinary("bilinear", data)), list(pictures.stored(data))
    for (one, labels), (other, same) in zip(ordinary, stored, strict=True):
        assert one.shape == other.shape == (12, 3, 224, 224)
        assert labels.tolist() == same.tolist() == sorted([0, 230, 701, 999] * 3)
        assert (one.float() - other.float()).abs().mean((1, 2, 3)).max() < 1


def test_parity_counts_both_ways_alike(wordnet_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = parity.measure(Thirds(), wordnet_folder, tmp_path)
    assert [row["filter"] for row in rows] == list(FILTERS)
    assert all(row["pictures"] == 12 and row["same_answer"] >= 11 / 12 for row in rows)
    text = parity.table(rows, {"cores": 2, "processor": "a processor"}, 60.0)
    assert sum(line.startswith(f"| {name} |") for line in text.splitlines() for name in FILTERS) == 4


def test_parity_fails_above_its_tolerance() -> None:
    row = {"store_top1": 0.752, "ordinary_top1": 0.75, "store_top5": 0.92, "ordinary_top5": 0.922}
    assert parity.within([row])
    assert not parity.within([row, {**row, "store_top5": 0.926}])


def test_whole_pictures_show_the_same_parts_from_the_jpegs_and_the_stores(wordnet_folder: Path, tmp_path: Path) -> None:
    pictures = parity.Pictures(wordnet_folder, tmp_path)
    data = pictures.data("bicubic")
    for scale in (whole_pictures.CENTRE, *whole_pictures.SCALES):
        for cut in (False, True):
            ((wanted, labels),) = whole_pictures.originals(pictures, data, scale, "bicubic", cut=cut)
            stored = whole_pictures.from_cut(pictures, scale, "cubic")
            if not cut:
                stored = whole_pictures.from_whole(pictures, 320, scale, "cubic")
            ((found, same),) = stored
            assert labels.tolist() == same.tolist()
            errors = (found.float() - wanted.float()).abs().mean((1, 2, 3))
            others = (found.float() - wanted.flip(0).float()).abs().mean((1, 2, 3))
            assert (errors < others / 3).all()


def test_whole_pictures_make_a_table(wordnet_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = whole_pictures.measure(Thirds(), wordnet_folder, tmp_path)
    assert [len(row["top1"]) for row in rows] == [3] * 8 + [2, 3, 2]
    assert all(same == 1 for row in (rows[0], rows[8]) for same in row["same"].values())
    text = whole_pictures.table(rows, {"cores": 2, "processor": "a processor"}, 60.0)
    assert sum(line.startswith(("| JPEG", "| whole", "| cut")) for line in text.splitlines()) == 11
