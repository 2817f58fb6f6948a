"""Both reports in headless Chromium, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stores import make_images, make_store

from pipeline.commands.report import write_report
from trainer.report.__main__ import write_report as write_run_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def screenshot(page: Path, folder: Path, width: int, height: int, *, dark: bool = False) -> np.ndarray:
    """uint8 (height, width, 3) of the page's top, after checking that nothing was written to the console."""
    out = folder / "shot.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
               f"--blink-settings=preferredColorScheme={0 if dark else 1}",
               "--enable-logging=stderr", f"--screenshot={out}", page.as_uri()]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in result.stderr
    return np.asarray(Image.open(out).convert("RGB"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reports")
    splits = {"train": (make_images(60, 32), np.arange(60) % 50), "val": (make_images(9, 32), [0, 1, 2] * 3)}
    store = make_store(folder / "x.zarr", splits, bad={"train": [3]})
    for name in ("a", "b"):
        (folder / "runs" / name).mkdir(parents=True)
        lines = [{"epoch": i, "step": i, "train_loss": 1 / i, "val_top1": 1 - 1 / i} for i in range(1, 6)]
        (folder / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [write_report(store), write_run_report([folder / "runs" / "a", folder / "runs" / "b"])]


@pytest.mark.parametrize("kind", [0, 1], ids=["dataset", "runs"])
def test_looks(pages: list[Path], tmp_path: Path, kind: int) -> None:
    light = screenshot(pages[kind], tmp_path, 1200, 1600)
    assert light.shape == (1600, 1200, 3)
    assert np.median(light) > 240
    assert light.std() > 10  # something is on it
    assert len(np.unique(light.astype(int) @ [1, 256, 65536])) > 200
    dark = screenshot(pages[kind], tmp_path, 1200, 1600, dark=True)
    assert np.median(dark) < 40
    assert dark.std() > 10


@pytest.mark.parametrize("kind", [0, 1], ids=["dataset", "runs"])
def test_fits_a_narrow_window(pages: list[Path], tmp_path: Path, kind: int) -> None:
    """Nothing sticks out to the right at the width of a telephone: the margin there is paper alone."""
    shot = screenshot(pages[kind], tmp_path, 500, 3000)
    margin = shot[:, -12:]
    assert np.abs(margin.astype(int) - shot[0, -1].astype(int)).max() <= 2
