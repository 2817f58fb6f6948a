"""The trainer's command: `torchrun --nproc-per-node=P trainer/main.py --data STORE ...`, or plain `python`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence

try:
    from pipeline.errors import Error, StoreError, UsageError
    from pipeline.text import one_line, printable
    from trainer.config import Config
    from trainer.flags import parse
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(f"trainer: {missing}; `source .venv/bin/activate` first, or install with `make setup`")

GRACE_SECONDS = 10.0
"""Ranks other than 0 wait so long before they report an error that rank 0 reports too; torchrun ends them sooner."""

AGENT_POLL_SECONDS, AGENT_GRACE_SECONDS = 0.5, 30.0
"""How often a rank checks that torchrun's agent lives, and how long it may take to end when the agent is gone."""

LOST = ("gloo", "pair closure", "closed by peer", "reset by peer")
"""Words in torch's message when another rank is gone."""

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torchrun keeps a store; without this variable a restarted group may read the old group's addresses from it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 (failed), 2 (wrong use), or 128 + a signal's number."""
    number = os.environ.get("RANK", "")
    rank = int(number) if number.isdecimal() else 0
    config: Config | None = None
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        _run(config)
        return 0
    except KeyboardInterrupt:  # before the first step; later Ctrl-C raises `Stopped`
        if rank == 0:
            when = "" if config and config.eval_only else " before the first step"
            print(f"trainer: interrupted{when}", file=sys.stderr, flush=True)  # noqa: T201
        return 128 + signal.SIGINT
    except Exception as error:
        return _report(error, rank, debug=config is not None and config.debug)


def _end_with_agent() -> None:
    """Under torchrun, end when its agent was killed; otherwise ranks would train on and hold the run's folder.

    It ends as on SIGTERM, with a checkpoint after the present step, and in any case after AGENT_GRACE_SECONDS.
    """
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(AGENT_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(AGENT_GRACE_SECONDS)
        os._exit(128 + signal.SIGTERM)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="agent-watch", daemon=True).start()


def _run(config: Config) -> None:
    _end_with_agent()
    # Imported here so that `--help` and a mistyped flag answer at once.
    from tqdm import tqdm

    from trainer.ranks import Ranks, process_group
    from trainer.training import evaluate_only, train

    ranks = Ranks.from_env()

    def say(line: str) -> None:
        if ranks.rank == 0:
            tqdm.write(printable(line))
            sys.stdout.flush()

    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and SHARED_STORE not in os.environ:
        say(f"note: torchrun restarts gloo groups reliably only with {SHARED_STORE}=1 in its environment")
    device = ranks.device(config.device)
    with process_group(ranks, device, config.timeout):
        (evaluate_only if config.eval_only else train)(config, ranks, device, say)


def _report(error: Exception, rank: int, debug: bool) -> int:
    """Say what ended the run in one line, by rank 0 where all ranks know it; returns the exit code."""
    text, code = one_line(error), getattr(error, "exit_code", 1)
    everywhere = isinstance(error, UsageError | StoreError)
    if not isinstance(error, Error):
        everywhere = any(word in text for word in LOST) or "Dist" in type(error).__name__
        if everywhere:
            text = f"lost contact with another rank, which ended or is cut off; go on with --resume auto ({text[:200]})"
        elif type(error).__name__ == "OutOfMemoryError":
            text = f"out of memory on the device; set a smaller --batch-size, the global batch stays ({text[:200]})"
        else:
            text = f"{type(error).__name__}: {text}" + ("" if debug else " (--debug shows the traceback)")
    if rank and code >= 128:
        return code
    if rank and everywhere:
        time.sleep(GRACE_SECONDS)
    if debug:
        traceback.print_exc()
    print(printable(f"trainer{f', rank {rank}' if rank else ''}: {text}"), file=sys.stderr, flush=True)  # noqa: T201
    return code


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # Everything is written and closed. Python's own end would take torch's C++ threads apart, which now and then
        # aborts, so that torchrun calls a finished run failed; after an error it might wait for the other ranks.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
