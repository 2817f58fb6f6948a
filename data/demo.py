"""The demo: digits as an image folder -> a store -> two training ranks on the CPU -> a summary.

    python data/demo.py

Prints each command before running it, so that every step can be repeated by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from make_digits import make_digits

ROOT = Path(__file__).resolve().parent.parent
RAW, STORE, RUN = "data/digits", "data/digits-32.zarr", "runs/demo"
SCRIPTS = Path(sysconfig.get_path("scripts"))

NEXT = """
For ImageNet:
  make dataset RAW=/path/to/imagenet
  .venv/bin/torchrun --nproc-per-node=8 trainer/main.py --config trainer/recipes/resnet50.yaml \\
      --data data/imagenet-256.zarr
"""


def run(*command: str) -> float:
    """Run a command from the project's root; returns its seconds. Ends the demo with its exit code if it fails."""
    print("$", " ".join(command), flush=True)
    start = time.monotonic()
    program = {"python": sys.executable, "torchrun": str(SCRIPTS / "torchrun")}[command[0]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # what torchrun sets itself, with ten lines of warning
    code = subprocess.run([program, *command[1:]], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)
    return time.monotonic() - start


def main() -> None:
    num_images = make_digits(ROOT / RAW)
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    convert_seconds = run("python", "-m", "pipeline", "convert", RAW, STORE, "--size", "32", "--overwrite")
    run("python", "-m", "pipeline", "verify", STORE, "--against", RAW)
    train = "torchrun --nproc-per-node=2 trainer/main.py --config trainer/recipes/digits.yaml"
    train_seconds = run(*train.split(), "--data", STORE, "--out", RUN)
    run("python", "-m", "pipeline", "report", STORE)

    epochs = [json.loads(line) for line in (ROOT / RUN / "metrics.jsonl").read_text().splitlines()]
    last = epochs[-1]
    print(f"""
Done: {num_images:,} images converted, {len(epochs)} epochs trained on two CPU ranks.
  validation accuracy  {last["val_top1"]:.1%}
  conversion           {num_images / convert_seconds:,.0f} images/s, start of Python included ({convert_seconds:.1f} s)
  training             {last["images_per_second"]:,.0f} images/s in the last epoch ({train_seconds:.0f} s in all)
  waiting for data     {last["data_wait_share"]:.2%} of the training time
  store                {STORE} (look at it: {STORE.removesuffix(".zarr")}.html)
  run                  {RUN} (metrics.jsonl, curves.png, last.pt, best.pt, TensorBoard events)
{NEXT.rstrip()}""")


if __name__ == "__main__":
    main()
