"""The examples do what they say, run as a user runs them: each in a process of its own, on a small store."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from training_runs import ROOT, TORCHRUN

from pipeline import convert

EXAMPLES = ROOT / "examples"
NEEDED = {
    "plain_loop.py": [],
    "whole_pictures.py": [],
    "lightning_module.py": ["lightning"],
    "accelerate_loop.py": ["accelerate"],
    "timm_transforms.py": ["timm"],
    "jax_numpy.py": ["jax"],
    "grain_source.py": ["grain"],
    "spawn.py": [],
    "own_folder.py": [],
    "gcn_neighborloader.py": ["torch_geometric"],
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's digits as pictures, and the store made from them, `digits-16.zarr`."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, "data/make_digits.py", folder / "digits"], cwd=ROOT, check=True)
    convert(folder / "digits", folder / "digits-16.zarr", size=16, quiet=True)
    return folder


def run(name: str, *arguments: object, launcher: tuple[str, ...] = (sys.executable,), **more: str) -> str:
    """What the example prints; skips where a package that it needs isn't installed."""
    for package in NEEDED[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    command = [*launcher, str(EXAMPLES / name), *map(str, arguments)]
    # as many threads as torchrun gives: more than free cores spin while they wait for each other
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning: Grad strides" not in done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    """The share of each epoch's line, 0 to 1."""
    lines = re.findall(r"^epoch (\d+): .*?([\d.]+)% (?:of|on) \d", output, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1)), output
    return [float(percent) / 100 for _, percent in lines]


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(NEEDED)
    assert files == set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["plain_loop.py", "lightning_module.py", "timm_transforms.py", "jax_numpy.py"])
def test_a_loop_learns_the_digits(name: str, digits: Path) -> None:
    output = run(name, digits / "digits-16.zarr", 3)
    assert len(accuracies(output)) == 3
    assert accuracies(output)[-1] > 0.7  # 92 to 97 % when this was written; one in ten by chance
    assert output.count("of 360") == 3


def test_a_loop_over_whole_pictures_learns_the_digits(digits: Path) -> None:
    store = digits / "stretched-32.zarr"
    convert(digits / "digits", store, size=32, fit="stretch", quiet=True)
    assert accuracies(run("whole_pictures.py", store, 3))[-1] > 0.7


def test_grain_is_served_whole_batches(digits: Path) -> None:
    assert run("grain_source.py", digits / "digits-16.zarr", 2) == "2,816 crops of 14 px in 2 epochs of 1,437 samples\n"


def test_randaugment_image_by_image(digits: Path) -> None:
    assert accuracies(run("timm_transforms.py", digits / "digits-16.zarr", 2, "--randaugment"))[-1] > 0.5


def test_accelerate_on_two_processes(digits: Path) -> None:
    launcher = (str(TORCHRUN), "--nproc-per-node=2")
    output = run("accelerate_loop.py", digits / "digits-16.zarr", 3, launcher=launcher, ACCELERATE_USE_CPU="true")
    assert accuracies(output)[-1] > 0.7
    assert output.count("of 360, 2 processes") == 3


def test_spawned_ranks_count_each_validation_sample_once(digits: Path) -> None:
    output = run("spawn.py", digits / "digits-16.zarr", 2)
    assert accuracies(output)[-1] > 0.7
    assert output.count("of 360, 2 ranks") == 2


def test_a_folder_end_to_end(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    arguments = [digits / "digits" / "train", "--work", folder, "--size", 16, "--epochs", 4]
    predicted = re.findall(r"/(\d)/\d+\.png: (\d) \(\d+%\)$", run("own_folder.py", *arguments), re.MULTILINE)
    assert [wanted for wanted, _ in predicted] == [str(digit) for digit in range(10)]
    assert sum(wanted == found for wanted, found in predicted) >= 7
    results = {path: path.stat().st_mtime_ns for path in (folder / "16.zarr/train/zarr.json", folder / "run/best.pt")}
    seven = min((digits / "digits" / "val" / "7").iterdir())
    again = run("own_folder.py", arguments[0], seven, *arguments[1:])
    assert re.search(rf"^{re.escape(str(seven))}: \d \(\d+%\)$", again, re.MULTILINE)
    assert {path: path.stat().st_mtime_ns for path in results} == results  # nothing was done twice


def test_a_bad_file_in_an_own_folder_is_left_out(digits: Path, tmp_path: Path) -> None:
    for label in ("3", "8"):
        shutil.copytree(digits / "digits" / "train" / label, tmp_path / "photos" / label)
    bad = sorted((tmp_path / "photos" / "3").iterdir())[:40]
    for path in bad:
        path.write_bytes(b"")
    (tmp_path / "photos" / "notes.txt").touch()
    arguments = ["--work", tmp_path / "work", "--size", 16, "--epochs", 1]
    output = run("own_folder.py", tmp_path / "photos", *arguments)
    assert len(re.findall(r"/[38]/\d+\.png: [38] \(\d+%\)$", output, re.MULTILINE)) == 2
    assert f"{bad[0]}: can't be read (empty)" in run("own_folder.py", tmp_path / "photos", bad[0], *arguments)


@pytest.mark.parametrize("name", sorted({*NEEDED} - {"gcn_neighborloader.py"}))
def test_without_arguments_it_says_what_it_wants(name: str) -> None:
    if any(importlib.util.find_spec(package) is None for package in NEEDED[name]):
        pytest.skip("a package isn't installed")
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert name in done.stderr


def test_the_graph_is_never_downloaded(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch_geometric") is None:
        pytest.skip("torch_geometric isn't installed")
    command = [sys.executable, str(EXAMPLES / "gcn_neighborloader.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}: no AmazonProducts there" in done.stderr
    assert not list(tmp_path.iterdir())


def make_amazon(folder: Path, nodes: int = 900, classes: int = 3) -> Path:
    """Files of AmazonProducts' form: a node's one or two classes are those of its neighbours."""
    rng = np.random.default_rng(0)
    first = np.arange(nodes) % classes
    near = scipy.sparse.csr_matrix((rng.random((nodes, nodes)) < 0.03) & (first[:, None] == first))
    has = np.eye(classes, dtype=int)[first] | np.eye(classes, dtype=int)[np.minimum(first, 1)]  # (nodes, classes)
    raw = folder / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "adj_full.npz", data=near.data, indices=near.indices, indptr=near.indptr, shape=near.shape)
    np.save(raw / "feats.npy", (has + rng.normal(0, 1, has.shape)).astype(np.float32))
    (raw / "class_map.json").write_text(json.dumps({str(node): has[node].tolist() for node in range(nodes)}))
    thirds = np.array_split(rng.permutation(nodes), [nodes * 2 // 3, nodes * 5 // 6])
    (raw / "role.json").write_text(json.dumps(dict(zip(("tr", "va", "te"), (x.tolist() for x in thirds), strict=True))))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("amazon", [False, True])
def test_a_graph_network_on_two_ranks(amazon: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("pyg_lib") is None and importlib.util.find_spec("torch_sparse") is None:
        pytest.skip("neither pyg-lib nor torch-sparse is installed: NeighborLoader needs one")
    root = [make_amazon(tmp_path)] if amazon else []
    output = run("gcn_neighborloader.py", *root, launcher=(str(TORCHRUN), "--nproc-per-node=2"))
    assert accuracies(output)[-1] > 0.7  # 83 % on the block model, of which the features alone give 28 %
