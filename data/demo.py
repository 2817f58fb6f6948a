"""The demo: digits as an image folder -> a store -> two training ranks on the CPU -> two reports and a summary.

    python data/demo.py

Prints each command before running it, so that every step can be repeated by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RAW, STORE, RUN = "data/digits", "data/digits-32.zarr", "runs/demo"
SCRIPTS = Path(sysconfig.get_path("scripts"))
END_SECONDS = 40.0  # torchrun gives its ranks 30

NEXT = """
Now `source .venv/bin/activate`, and your own images, in a folder per class:
  python -m pipeline convert photos data/own-224.zarr --size 224 --val-fraction 0.1
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
    # A session of its own: the terminal's Ctrl-C reaches this process alone, which passes it on once and waits. What
    # commands then say about it (torchrun a traceback) isn't shown: standard error passes through here.
    child = subprocess.Popen(
        [program, *command[1:]], cwd=ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    stopping = threading.Event()
    messages = threading.Thread(target=pass_on, args=(child.stderr, stopping), daemon=True)
    messages.start()
    try:
        code = child.wait()
        messages.join(END_SECONDS)
    except BaseException:
        stopping.set()
        end(child)
        raise
    if code:
        sys.exit(code)
    return time.monotonic() - start


def pass_on(messages: IO[bytes], stopping: threading.Event) -> None:
    """Copy a command's standard error to ours, until it is to be stopped."""
    while block := os.read(messages.fileno(), 1 << 16):
        if not stopping.is_set():
            sys.stderr.buffer.write(block)
            sys.stderr.buffer.flush()


def end(child: subprocess.Popen[bytes]) -> None:
    """End a command in order: torchrun ends its ranks, a conversion its workers. A second Ctrl-C ends it at once."""
    try:
        os.killpg(child.pid, signal.SIGINT)
        child.wait(END_SECONDS)
    except (KeyboardInterrupt, ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # whatever of the group is left
        child.wait()


def terminated(signum: int, frame: object) -> None:
    print("terminated; run the same command again", file=sys.stderr)
    sys.exit(128 + signum)


def main() -> None:
    from make_digits import make_digits  # scikit-learn takes seconds to import: Ctrl-C is heeded by then

    num_images = make_digits(ROOT / RAW)
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    convert_seconds = run("python", "-m", "pipeline", "convert", RAW, STORE, "--size", "32", "--overwrite")
    run("python", "-m", "pipeline", "verify", STORE, "--against", RAW)
    train = "torchrun --nproc-per-node=2 trainer/main.py --config trainer/recipes/digits.yaml"
    train_seconds = run(*train.split(), "--data", STORE, "--out", RUN)
    run("python", "-m", "pipeline", "report", STORE)
    run("python", "-m", "trainer.report", RUN)

    epochs = [json.loads(line) for line in (ROOT / RUN / "metrics.jsonl").read_text().splitlines()]
    last = epochs[-1]
    print(f"""
Done: {num_images:,} images converted, {len(epochs)} epochs trained on two CPU ranks.
  validation accuracy  {last["val_top1"]:.1%}
  conversion           {num_images / convert_seconds:,.0f} images/s, start of Python included ({convert_seconds:.1f} s)
  training             {last["images_per_second"]:,.0f} images/s in the last epoch ({train_seconds:.0f} s in all)
  waiting for data     {last["data_wait_share"]:.2%} of the training time
  store                {STORE}
  run                  {RUN} (metrics.jsonl, curves.png, last.pt, best.pt, TensorBoard events)
  look at the data     {STORE.removesuffix(".zarr")}.html
  look at the run      {RUN}/report.html
{NEXT.rstrip()}""")


def run_demo() -> None:
    """`main`; on Ctrl-C and SIGTERM its children end first, and there is one line instead of a traceback."""
    signal.signal(signal.SIGTERM, terminated)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    run_demo()
