"""What a single random picture costs in each reader: pictures/s from the page cache, and bytes over HTTP.

python -m tests.bench.readers [--pictures 50] [--zarrita FOLDER]     # a folder where `npm install zarrita` was run

Also the speed of `copy` beside `cp -r`, and the time to the first batch from a stand-in for a bucket: as 4 GB at 100
MB/s, both a tenth as large.

Result (two cores of an AMD EPYC, shared with other work, so that only ratios count; zarr 3.1.6, tensorstore 0.1.86,
zarrita 0.7.5): pictures/s in format 2 memory map 30,329, tensorstore 3,002, zarr-python 352; in format 1 20,541, 5.2
and 4.4. Bytes a picture over HTTP: 204,740 (zarrita 197,259, which keeps a chunk's index), and 99,876,864 in format 1.
copy, which hashes and reads back, 52 to 105 MB/s beside 192 to 271 MB/s of cp and sync. First batch after
17.0 s, in windows of 16 of 40 chunks; all there after 40.9 s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zarr
from numpy.random import default_rng

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from range_server import serving
from stores import as_format_1, make_images, make_store

from pipeline.commands.copy_store import copy_store
from pipeline.store.reader import open_store
from pipeline.store.remote import RemotePath
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.reading.cache import Cache

K, CHUNKS, SIZE = 508, 4, 256
Read = Callable[[int], Any]

ZARRITA = """
import * as zarr from "zarrita";
const root = zarr.root(new zarr.FetchStore(process.argv[1]));
const array = await zarr.open(root.resolve("train/images"), { kind: "array" });
const begun = performance.now();
for (const slot of process.argv.slice(2)) await zarr.get(array, [Number(slot), null, null, null]);
console.log((performance.now() - begun) / 1000);
"""


def readers(place: str) -> dict[str, Read]:
    """Name -> a function that reads one picture of the store at a path or URL."""
    import tensorstore as ts

    images = zarr.open_group(place, mode="r")["train/images"]
    driver = {"driver": "file", "path": f"{place}/train/images/"}
    if remote := "://" in place:
        driver = {"driver": "http", "base_url": place, "path": "/train/images/"}
    array = ts.open({"driver": "zarr3", "kvstore": driver}, read=True).result()
    found: dict[str, Read] = {"zarr-python": lambda slot: images[slot]}
    found["tensorstore"] = lambda slot: array[slot].read().result()
    if not remote:  # a web server can't list a folder
        split = open_store(place)["train"]
        found["memory map"] = lambda slot: split.image(slot).copy()
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=50)
    parser.add_argument("--zarrita", type=Path)
    args = parser.parse_args()
    slots = default_rng(0).integers(0, K * CHUNKS, args.pictures).tolist()
    with tempfile.TemporaryDirectory() as folder:
        two = make_store(
            Path(folder, "2.zarr"), {"train": (make_images(K * CHUNKS, SIZE), [0] * (K * CHUNKS))}, chunk_images=K
        )
        copies(two, Path(folder))
        num = 40 * (K // 10)
        small = {"train": (make_images(num, SIZE), [0] * num)}
        first_batch(make_store(Path(folder, "small.zarr"), small, chunk_images=K // 10), Path(folder, "cache"))
        one = Path(folder, "1.zarr")
        subprocess.run(["cp", "-r", two, one], check=True)
        for version, store in ((2, two), (1, as_format_1(one))):
            some = slots if version == 2 else slots[:5]
            for name, read in readers(str(store)).items():
                read(some[0])
                begun = time.perf_counter()
                for slot in some:
                    read(slot)
                say(
                    f"format {version}, {name}: {len(some) / (time.perf_counter() - begun):,.1f} pictures/s from memory"
                )
            with serving(store) as (url, lengths):
                for name, read in readers(url).items():
                    lengths.clear()
                    for slot in some:
                        read(slot)
                    say(f"format {version}, {name}: {sum(lengths) / len(some):,.0f} bytes a picture over HTTP")
                if args.zarrita:
                    lengths.clear()
                    command = ["node", "--input-type=module", "-e", ZARRITA, url, *map(str, some)]
                    done = subprocess.run(command, cwd=args.zarrita, capture_output=True, text=True, check=True)
                    say(
                        f"format {version}, zarrita: {sum(lengths) / len(some):,.0f} bytes a picture over HTTP, "
                        f"{len(some) / float(done.stdout):,.1f} pictures/s"
                    )


def copies(store: Path, folder: Path) -> None:
    megabytes = K * CHUNKS * SIZE * SIZE * 3 / 1e6
    for attempt in range(3):
        target = folder / f"copy{attempt}"
        begun = time.perf_counter()
        copy_store(store, target, quiet=True)
        ours = time.perf_counter() - begun
        subprocess.run(["rm", "-r", target], check=True)
        begun = time.perf_counter()
        subprocess.run(["cp", "-r", store, target], check=True)
        subprocess.run(["sync", "-f", target], check=True)
        theirs = time.perf_counter() - begun
        subprocess.run(["rm", "-r", target], check=True)
        say(f"copy: {megabytes / ours:,.0f} MB/s; cp -r and sync: {megabytes / theirs:,.0f} MB/s")


def first_batch(store: Path, folder: Path, rate: float = 10e6) -> None:
    """4 GB at 100 MB/s, all a tenth as large: `local://` files of 10 MB, one after another, in windows of 16."""
    read_bytes, line = RemotePath.read_bytes, threading.Lock()

    def limited(path: RemotePath) -> bytes:
        data = read_bytes(path)
        with line:
            time.sleep(len(data) / rate)
        return data

    RemotePath.read_bytes = limited  # type: ignore[method-assign]
    begun = time.perf_counter()
    cache = Cache(str(folder), True, lambda line: None)
    data = RankPartitionedDataset(cache.open(f"local://{store}"), "train", order="windowed", crop=224)
    loader = Loader(data, 256)
    cache.start([(data.split, loader.coming_slots(0))])
    next(iter(loader))
    first = time.perf_counter() - begun
    loader.close()
    while not (folder / store.name / "zarr.json").exists():
        time.sleep(0.05)
    whole = time.perf_counter() - begun
    cache.close()
    RemotePath.read_bytes = read_bytes  # type: ignore[method-assign]
    say(f"first batch after {first:.1f} s, all chunks after {whole:.1f} s")


if __name__ == "__main__":
    main()
