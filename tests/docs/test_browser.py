"""The page of docs/browser.md reads a store with zarrita, in node; drawing is left to browsers."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from documents import DOCS
from range_server import serving
from stores import make_images, make_store

SHOW = """
const split = await openSplit(process.argv[2], "train");
const slots = process.argv.slice(3).map(Number);
const shown = [];
for (const slot of slots) {
  const picture = await split.picture(slot);
  shown.push([split.className(slot), split.key(slot), picture.shape, [...toRGBA(picture)]]);
}
console.log(JSON.stringify({ slots: split.slots, shown }));
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder where node finds the page's version of zarrita."""
    version = re.search(r"zarrita@([\d.]+)", (DOCS / "browser.md").read_text())
    assert version
    if not shutil.which("npm"):
        pytest.skip("needs node and npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), f"zarrita@{version[1]}"]
    if subprocess.run(command, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("npm can't install zarrita here")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_the_page_shows_pictures_with_labels_and_keys(folder: Path, channels: int) -> None:
    images = make_images(9, 16, channels)
    store = make_store(folder / "a.zarr", {"train": (images, [i % 3 for i in range(9)])}, bad={"train": [4]})
    page = (DOCS / "browser.md").read_text()
    script = re.search(r'<script type="module">\n(.*?)// The page\.', page, re.S)
    assert script
    (folder / "show.mjs").write_text(script[1] + SHOW)
    with serving(store) as (url, lengths):
        done = subprocess.run(
            ["node", "show.mjs", url, "7", "2"], cwd=folder, capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout)
    assert found["slots"] == [0, 1, 2, 3, 5, 6, 7, 8]
    for slot, (class_name, key, shape, pixels) in zip((7, 2), found["shown"], strict=True):
        assert class_name == f"class00{slot % 3}"
        assert key == f"train/{slot:06d}.png"
        assert shape == [16, 16, channels]
        rgba = np.array(pixels, np.uint8).reshape(16, 16, 4)
        assert (rgba[..., :3] == images[slot]).all()
        assert (rgba[..., 3] == 255).all()
    assert max(lengths) <= max(images[0].nbytes, 16 * 4 + 4, 9 * 16 + 80)  # no chunk was read whole
