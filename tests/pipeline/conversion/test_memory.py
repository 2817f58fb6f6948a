"""What a conversion holds in memory: a worker a few hundred MB at most, the parent little more than the index.

Peaks are the kernel's own (VmHWM), of processes of their own: the conversion's parent says its own at the end, its
workers are looked at while they run.
"""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from folders import make_image

from pipeline import convert, open_store
from pipeline.conversion import jobs as execution
from pipeline.errors import Error

WORKER_BYTES = 400e6
PARENT_BYTES_PER_SAMPLE = 300
"""What the parent may hold more for each further sample: keys, labels, order and sizes take 45 bytes in the source
and in the plan each, which exist two or three times over while they are permuted, written and read again."""

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

# The class is a script's own, so that its workers get it by value; its images are files, read in turn.
SCRIPT = """
import json, sys
import numpy as np
from pipeline import convert
from pipeline.sources import SourceSet

class Repeated:
    def __init__(self, files, num):
        self.files = files
        self.labels = (np.arange(num) % 10).astype(np.int32)
    def __len__(self):
        return len(self.labels)
    def key(self, i):
        return b"%07d" % i
    def keys(self):
        numbers = np.arange(len(self))
        digits = numbers[:, None] // 10 ** np.arange(6, -1, -1) % 10 + ord("0")
        return digits.astype(np.uint8).reshape(-1), np.arange(len(self) + 1) * 7
    def read(self, i):
        with open(self.files[i % len(self.files)], "rb") as file:
            return file.read()
    def change_stamps(self, indices):
        return np.zeros((len(indices), 2), np.int64)

files, num, dst, options = json.loads(sys.argv[1])
source = SourceSet("repeated", [str(i) for i in range(10)], {"train": Repeated(files, num)})
convert(source, dst, n_jobs=2, quiet=True, **options)
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_bytes(pid: int) -> int:
    """A running process's largest resident memory so far; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def measure(files: list[Path], num: int, dst: Path, **options: Any) -> tuple[int, dict[int, int]]:
    """Convert `num` samples; the parent's peak in bytes, and that of each of its workers by process id."""
    arguments = json.dumps([[str(file) for file in files], num, str(dst), options])
    workers: dict[int, int] = {}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, arguments], stdout=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                children = parent.children(recursive=True)
            except psutil.NoSuchProcess:
                break
            for child in children:
                workers[child.pid] = max(workers.get(child.pid, 0), peak_bytes(child.pid))
            time.sleep(0.02)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0
    assert len(workers) >= 2, "no worker was seen"
    return int(output), workers


def write_jpegs(folder: Path, num: int, height: int, width: int) -> list[Path]:
    files = [folder / f"{i:03d}.jpg" for i in range(num)]
    for seed, file in enumerate(files):
        make_image(seed, height, width).save(file)
    return files


@pytest.fixture
def photographs(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Real ImageNet photographs where they are given, else JPEGs of their usual size."""
    real = request.config.getoption("--real-data")
    if real is None:
        return write_jpegs(tmp_path, 32, 375, 500)
    with tarfile.open(real / "imagenet_sample_700.tar") as tar:
        tar.extractall(tmp_path / "photographs", filter="data")
    return sorted(path for path in (tmp_path / "photographs").rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_proc
def test_memory_doesnt_grow_with_the_number_of_images(tmp_path: Path) -> None:
    files = write_jpegs(tmp_path, 16, 20, 20)
    few, many = 10_000, 200_000
    small, small_workers = measure(files, few, tmp_path / "few.zarr", size=16)
    large, large_workers = measure(files, many, tmp_path / "many.zarr", size=16)
    assert open_store(tmp_path / "many.zarr")["train"].num_valid == many
    assert max(small_workers.values()) < WORKER_BYTES, small_workers
    assert max(large_workers.values()) < WORKER_BYTES, large_workers
    assert large - small < PARENT_BYTES_PER_SAMPLE * (many - few), (small, large)
    assert max(large_workers.values()) - max(small_workers.values()) < PARENT_BYTES_PER_SAMPLE * (many - few)


@pytest.mark.slow
@needs_proc
def test_a_worker_at_full_size(photographs: list[Path], tmp_path: Path) -> None:
    # As many samples as make 64 chunks of 100 MB, of which one part in 32 is converted: two.
    num = 64 * (100 * 10**6 // (256 * 256 * 3))
    parent, workers = measure(photographs, num, tmp_path / "a.zarr", size=256, chunk_mb=100, part="1/32")
    chunks = list((tmp_path / "a.zarr.work" / "train" / "split" / "images").iterdir())
    assert [chunk.stat().st_size for chunk in chunks] == [508 * 256 * 256 * 3 + 16 * 508 + 4] * 2  # and the index
    assert max(workers.values()) < WORKER_BYTES, workers
    assert parent < WORKER_BYTES, parent


@pytest.mark.parametrize("num", [64, 640])
def test_what_goes_to_and_from_a_worker_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Paths and counts: neither an index nor a pixel, whatever the number and size of images."""
    sent: list[int] = []
    received: list[int] = []
    run_jobs = execution.run_jobs

    def listen(name: str, n_jobs: int, function: functools.partial[Any], jobs: list[int]) -> Iterator[Any]:
        sent.extend(len(pickle.dumps((function, job))) for job in jobs)
        for result in run_jobs(name, n_jobs, function, jobs):
            received.append(len(pickle.dumps(result)))
            yield result

    monkeypatch.setattr(execution, "run_jobs", listen)
    samples = [(np.full((60, 60, 3), i % 256, np.uint8) if i % 3 else b"broken", 0) for i in range(num)]
    with pytest.raises(Error, match="bad samples, nothing committed"):
        convert(samples, tmp_path / "a.zarr", size=50, n_jobs=1, quiet=True)
    assert len(sent) == len(received) == 64
    assert max(sent) < 4000
    assert max(received) < 200
