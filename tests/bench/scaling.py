"""How training scales over ranks: so many ranks on as many cores, against one rank on one core.

    python -m tests.bench.scaling [--ranks 2] [--model resnet18] [--crop 112] [--batch 32] [--steps 16] [--repeats 3]

Every rank has the same batch, one thread, and gloo; the ways take turns, each for two epochs of `--steps` steps, of
which the second, after all warm-up, is measured. Medians are printed. Linux only: processes are kept on their cores.

On 2 Xeon cores (Emerald Rapids): 29.6 images/s on one, 51.3 on two, ratios 1.73, 2.04, 1.53.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.synthetic import random_store
from trainer.bench.machine import describe, on_cores

MAIN = Path(__file__).parent.parent.parent / "trainer" / "main.py"


def rate(store: Path, out: Path, ranks: int, args: argparse.Namespace) -> float:
    """images/s of the second epoch, all ranks together."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(MAIN)]
    settings = {
        "data": store,
        "out": out,
        "model": args.model,
        "crop": args.crop,
        "batch-size": args.batch,
        "global-batch": args.batch * ranks,
        "epochs": 2,
        "warmup-epochs": 0,
        "device": "cpu",
    }
    command += [f"--{name}={value}" for name, value in settings.items()]
    with on_cores(ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {done.stderr.strip()}")
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return float(line["images_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--crop", type=int, default=112)
    parser.add_argument("--batch", type=int, default=32, help="per rank")
    parser.add_argument("--steps", type=int, default=16, help="of an epoch, with one rank as with several")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], args.ranks: []}
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        stores = {
            ranks: random_store(folder / f"{ranks}.zarr", args.batch * ranks * args.steps, size=args.crop + 16)
            for ranks in rates
        }
        for repeat in range(args.repeats):
            for ranks, store in stores.items():
                rates[ranks].append(rate(store, folder / f"run-{repeat}-{ranks}", ranks, args))
    machine = describe()
    lines = [f"{machine['processor']}, {machine['cores']} cores; {args.model}, crop {args.crop}, {args.batch} a rank"]
    for ranks, measured in rates.items():
        each = ", ".join(f"{value:.1f}" for value in measured)
        lines.append(f"{ranks} rank(s) on {ranks} core(s): {statistics.median(measured):7.1f} images/s ({each})")
    ratios = [many / one for one, many in zip(rates[1], rates[args.ranks], strict=True)]
    lines.append(f"ratio: {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
