"""What a store of fixed squares costs in accuracy, and which setting makes up for it: a controlled study on CIFAR-10.

    python -m tests.bench.accuracy --images cifar10.tar.gz [--seeds 3] [--jobs 2] [--work FOLDER]
        [--docs docs] [--block study] [--arms NAME ...] [--kept]

The pictures are enlarged once to 80x64 JPEGs, which stand for ImageNet's: larger than the crop, and not square. Each
arm of `arms.py` then trains the same small network for the same number of steps with the trainer's own loop, with
several seeds, two runs at a time with one thread each. Arms of one seed begin with the same weights and see the same
samples in the same batches. A finished run is kept in WORK, so that the same command goes on where it was interrupted.
Writes WORK/results.json, WORK/table.md and WORK/accuracy.svg; with --docs also the table in docs/accuracy.md, the
figure beside it, and results.json beside this file.

`--reduced` is a small one, of two arms, one seed and few steps: it shows that the study works, and measures nothing.

What it gave, how long it took and on which machine: docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import Error
from pipeline.store.atomic import write_bytes, write_json
from pipeline.store.reader import open_store
from tests.bench.accuracy.arms import ARMS, EVAL_SIZE, Settings, store_path
from tests.bench.accuracy.data import make_originals, make_stores
from tests.bench.accuracy.run import kept, run_and_keep
from tests.bench.accuracy.summary import draw, put_into, table
from trainer.bench.machine import describe

REDUCED = Settings(train=32, val=8, epochs=3, global_batch=16)
REDUCED_ARMS = ("ordinary-0.08", "growing-rrc")

WORKERS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""One thread each; glibc keeps freed memory: asking the kernel for every activation anew costs a third of the speed."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.accuracy",
        description=(__doc__ or "").splitlines()[0],
    )
    defaults = Settings()
    names = [arm.name for arm in ARMS]
    parser.add_argument(
        "--images", type=Path, required=True, help="tar or folder of train|test/<class>/<picture>, such as CIFAR-10's"
    )
    parser.add_argument("--work", type=Path, default=Path("data/accuracy-study"), help="keeps data and finished runs")
    parser.add_argument("--docs", type=Path, help="folder of accuracy.md, which gets the table and the figure")
    parser.add_argument(
        "--block",
        default="study",
        help="which table of accuracy.md; `study` has the figure, others a results-BLOCK.json",
    )
    parser.add_argument("--kept", action="store_true", help="run nothing: the table of the runs that are there")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--arms", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--epochs", type=int, default=defaults.epochs, help="at least 3")
    parser.add_argument("--train", type=int, default=defaults.train, help="training images per class")
    parser.add_argument("--val", type=int, default=defaults.val, help="images per class for evaluation")
    parser.add_argument("--model", default=defaults.model, help="of the trainer, or resnet_small_narrow")
    parser.add_argument("--lr", type=float, default=defaults.lr, help="per 256 samples")
    parser.add_argument("--no-amp", action="store_true", help="float32; bfloat16 is faster on CPUs that have it")
    parser.add_argument("--reduced", action="store_true", help="two arms, one seed, few steps: does it work?")
    options = parser.parse_args(argv)
    if options.epochs < 3 or options.seeds < 1 or options.jobs < 1:
        parser.error("--epochs must be at least 3, --seeds and --jobs at least 1")
    return options


def study(options: argparse.Namespace) -> dict[str, Any]:
    """What results.json holds; `results` are in the order of the arms and seeds.

    Runs whose results are kept already aren't run again.
    """
    settings = Settings(
        train=options.train,
        val=options.val,
        epochs=options.epochs,
        lr=options.lr,
        model=options.model,
        amp=not options.no_amp,
    )
    arms, seeds = options.arms, range(options.seeds)
    if options.reduced:
        settings, arms, seeds = replace(REDUCED, amp=settings.amp), REDUCED_ARMS, range(1)
    # pictures of another number per class are other pictures
    work = options.work / f"{settings.train}-{settings.val}"
    work.mkdir(parents=True, exist_ok=True)
    make_originals(options.images, work / "originals", settings)
    make_stores(work / "originals", work / "stores", options.jobs)
    runs = [(name, seed) for seed in seeds for name in arms]
    (work / "results").mkdir(exist_ok=True)
    results = {run: found for run in runs if (found := kept(*run, settings, work))}
    if options.kept:
        runs = list(results)
    left = [run for run in runs if run not in results]
    say(f"{len(runs)} runs of {len(arms)} arms; {len(results)} are done already")
    began = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn")
    ) as executor:
        futures = {executor.submit(run_and_keep, *run, settings, work): run for run in left}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                result = results[futures[future]] = future.result()
                minutes = (time.perf_counter() - began) / 60
                say(
                    f"{done + len(runs) - len(left):3} of {len(runs)}: {result['arm']}, seed {result['seed']}: "
                    f"top-1 {result['top1'][result['own']]:.2%} in {result['seconds']:.0f} s; "
                    f"{minutes / done * (len(left) - done):.0f} min left"
                )
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    store = open_store(store_path(work / "stores", EVAL_SIZE))
    return {
        "bench": "accuracy",
        "machine": describe(),
        "jobs": options.jobs,
        "pictures": {split: store[split].num_valid for split in ("train", "val")},
        "results": [results[name, seed] for name in arms for seed in seeds if (name, seed) in results],
    }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = parse(argv)
    os.environ |= WORKERS_ENVIRONMENT
    try:
        summary = study(options)
    except KeyboardInterrupt:
        return 130
    except Error as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    write_json(options.work / "results.json", summary)
    text = table(summary)
    write_bytes(options.work / "table.md", text.encode())
    draw(summary, options.work / "accuracy.svg")
    say(text)
    if options.docs:
        put_into(options.docs / "accuracy.md", options.block, text)
        suffix = "" if options.block == "study" else f"-{options.block}"
        if not suffix:
            shutil.copyfile(options.work / "accuracy.svg", options.docs / "accuracy.svg")
        write_json(Path(__file__).with_name(f"results{suffix}.json"), summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
