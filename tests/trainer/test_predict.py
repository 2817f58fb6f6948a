"""What `python -m trainer.predict` says is what evaluation saw."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from training_runs import metrics, quadrant_images, run_here

from pipeline import convert, open_store
from pipeline.cli import main as pipeline_main
from pipeline.store.remote import RemotePath
from trainer.models import build_model
from trainer.predict import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in folders of their classes, a store of them, and a run on it."""
    folder = tmp_path_factory.mktemp("predict")
    for split, num in (("train", 96), ("val", 24)):
        images, labels = quadrant_images(num, size=24, seed=num)
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / "pictures" / split / f"quadrant{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    convert(folder / "pictures", folder / "own.zarr", size=20, n_jobs=1, quiet=True)
    assert run_here(data=folder / "own.zarr", out=folder / "run", epochs=4, crop=16, flip_eval=True) == 0
    return folder


def predictions(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[dict]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_file_is_seen_as_evaluation_sees_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = open_store(folder / "own.zarr")["val"]
    model = build_model("flatten_linear", 4, 16).eval()
    model.load_state_dict(torch.load(folder / "run" / "best.pt"))
    train = open_store(folder / "own.zarr")["train"]
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (train.mean, train.std))
    for slot in range(0, 24, 5):
        key = split.key(slot).decode()
        (found,) = predictions(capsys, folder / "run", folder / "pictures" / "val" / key, "--top", 4)
        x = torch.from_numpy(np.array(split.image(slot))).permute(2, 0, 1)[:, 2:18, 2:18] / 255
        with torch.inference_mode():
            x = ((x - mean) / std)[None]
            wanted = ((model(x) + model(x.flip(3))) / 2).softmax(1)[0]
        shares = {item["id"]: item["probability"] for item in found["classes"]}
        for label, name in enumerate(open_store(folder / "own.zarr").class_ids):
            assert shares[name] == pytest.approx(wanted[label].item(), abs=1e-5)


def test_a_split_of_a_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = folder / "run" / "last.pt"
    ask = (folder / "run", "--weights", last, "--top", 1)
    found = predictions(capsys, *ask, folder / "own.zarr" / "val")
    split = open_store(folder / "own.zarr")["val"]
    assert [line["image"] for line in found] == [split.key(i).decode() for i in range(24)]
    right = [line["classes"][0]["id"] == f"quadrant{split.labels[i]}" for i, line in enumerate(found)]
    files = [folder / "pictures" / "val" / line["image"] for line in found]
    assert [line["classes"] for line in predictions(capsys, *ask, *files)] == [line["classes"] for line in found]
    # the last evaluation, which averages mirror images, too
    assert sum(right) / 24 == pytest.approx(metrics(folder / "run")[-1]["val_top1"])


def test_what_lies_at_a_url(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((folder / "pictures" / "val").rglob("*.png"))
    for path in (folder / "own.zarr" / "val", image):
        here, there = predictions(capsys, folder / "run", path), predictions(capsys, folder / "run", f"local://{path}")
        assert [line["classes"] for line in there] == [line["classes"] for line in here]
    predictions(capsys, folder / "run", "memory://none.png", code=1)
    predictions(capsys, "s3://bucket/run", image, code=2)


def test_a_server_that_fails_is_said_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(path: RemotePath, *_: Any) -> Any:
        raise OSError(errno.EIO, "no connection", path.url)

    good = next((folder / "pictures" / "val").rglob("*.png"))
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "stat", fails)
        (line,) = predictions(capsys, folder / "run", good, "s3://bucket/x.png", code=1)
        assert line["image"] == str(good)
        assert main([str(folder / "run"), "s3://bucket/x.zarr/val"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(RemotePath, "read_range", fails)
    assert main([str(folder / "run"), f"local://{folder}/own.zarr/val"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "own.zarr/val" in said
    assert "no connection" in said


def test_nobody_reads_the_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        assert main([str(folder / "run"), str(folder / "own.zarr" / "val")]) == 141


def test_whole_pictures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(folder / "pictures", tmp_path / "whole.zarr", size=20, fit="stretch", n_jobs=1, quiet=True)
    fields = {"augment": "rrc", "rrc_scale": 0.8, "eval_resize": 18, "crop": 16}
    assert run_here(data=tmp_path / "whole.zarr", out=tmp_path / "run", epochs=8, **fields) == 0
    picture = tmp_path / "wide.png"
    Image.fromarray(np.tile(quadrant_images(1, size=24)[0][0], (1, 2, 1))).save(picture)
    (line,) = predictions(capsys, tmp_path / "run", picture)
    assert len(line["classes"]) == 4
    assert sum(item["probability"] for item in line["classes"]) == pytest.approx(1, abs=1e-4)


def test_a_store_that_was_brought_from_a_bucket_and_moved(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    fields = {"data": f"local://{tmp_path}/gone.zarr", "cache": str(tmp_path / "cache"), "order": "windowed"}
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config | fields))
    image = next((folder / "pictures" / "val").rglob("*.png"))
    for data in (folder / "own.zarr", f"local://{folder}/own.zarr"):
        for run in (folder / "run", tmp_path / "run"):
            assert predictions(capsys, run, image, "--data", data) == predictions(capsys, folder / "run", image)


def test_a_split_of_another_fit_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(folder / "pictures", tmp_path / "whole.zarr", size=20, fit="stretch", n_jobs=1, quiet=True)
    assert main([str(folder / "run"), str(tmp_path / "whole.zarr" / "val")]) == 2
    assert "val: made with --fit stretch, the run's store with crop" in capsys.readouterr().err


def test_text_is_safe_and_bad_images_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, odd = tmp_path / "bad.jpg", tmp_path / "\x1b[31m.png"
    bad.write_bytes(b"no picture")
    shutil.copy(folder / "pictures" / "val" / open_store(folder / "own.zarr")["val"].key(0).decode(), odd)
    assert main([str(folder / "run"), str(bad), str(odd), str(tmp_path / "gone.jpg"), "--top", "2"]) == 1
    out, err = capsys.readouterr()
    assert out.count("%") == 2
    assert "\x1b" not in out + err
    assert [line.split(": ")[1] for line in err.splitlines()] == [str(bad), str(tmp_path / "gone.jpg")]


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(next((folder / "pictures" / "val").rglob("*.png")))
    for arguments, words in (
        ([str(tmp_path), image], "config.yaml"),
        ([str(folder / "run"), image, "--top", "0"], "--top 0"),
        ([str(folder / "run"), image, "--weights", str(tmp_path / "no.pt")], "no.pt"),
        ([str(folder / "run"), image, "--data", str(tmp_path / "no.zarr")], "no.zarr"),
        ([str(folder / "run"), str(folder / "pictures")], "a folder; give image files"),
        ([str(folder / "run"), str(folder / "own.zarr")], "/val"),
    ):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert main([str(folder / "run")]) == 2


def test_the_installed_command_does_it_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(next((folder / "pictures" / "val").rglob("*.png")))
    assert pipeline_main(["predict", str(folder / "run"), image, "--top", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{image}: quadrant")
