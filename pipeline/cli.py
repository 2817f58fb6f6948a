"""The command line: `python -m pipeline COMMAND`. Parsing and exit codes; the work is done elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.arguments import PROG, TRAINER, parse
from pipeline.conversion.names import store_paths
from pipeline.conversion.options import ConvertOptions
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, UsageError
from pipeline.text import are, counted, one_line, printable

SCRIPT = "efficient-imagenet"  # the same as an installed command, which shells can complete
INTERRUPTED = 130  # 128 + SIGINT, as shells do
TERMINATED = 143  # 128 + SIGTERM
NO_READER = 141  # 128 + SIGPIPE


def _out(text: str) -> None:
    sys.stdout.write(printable(text, keep="\n") + "\n")


def _show(args: Namespace, value: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
    _out(json.dumps(value, indent=2) if args.json else text(value))


def _run_convert(args: Namespace) -> None:
    from pipeline.conversion.api import convert

    options = _options(args)
    report = convert(args.src, args.dst, **options)
    if not args.quiet and not options.get("dry_run"):
        for store in report.stores:
            _out(printable(f"{store}: {', '.join(report.committed) or 'nothing committed yet'}"))


def _options(args: Namespace) -> dict[str, Any]:
    """The options of `convert` that were given."""
    return {name: value for name, value in vars(args).items() if name not in ("src", "dst", "command", "debug")}


def _run_commit(args: Namespace) -> None:
    from pipeline.conversion.commit import commit

    report = commit(args.dst, on_error=args.on_error, quiet=args.quiet)
    if not args.quiet:
        _out(printable(f"{report.stores[0]}: {', '.join(report.committed)}"))


def _run_info(args: Namespace) -> None:
    from pipeline.commands.info import software_info, software_text, store_info, store_text

    value, text = (store_info(args.store), store_text) if args.store else (software_info(), software_text)
    _show(args, value, text)


def _run_verify(args: Namespace) -> None:
    from pipeline.commands.verify import check, result_text, verify

    result = verify(args.store, against=args.against, sample=args.sample, source=args.source, quiet=args.quiet)
    _show(args, result, result_text)
    check(result)


def _run_copy(args: Namespace) -> None:
    from pipeline.commands.copy_store import copy_store

    copy_store(args.store, args.dst, codec=args.codec, n_jobs=args.n_jobs, quiet=args.quiet)


def _run_report(args: Namespace) -> None:
    from pipeline.commands.report import write_report

    _out(printable(str(write_report(args.store, args.out))))


def _run_warm(args: Namespace) -> None:
    from pipeline.commands.warm import warm, warm_text

    _out(warm_text(warm(args.store, split=args.split, size_limit=args.size_limit, quiet=args.quiet)))


def _run_bench(args: Namespace) -> None:
    benchmark = _trainer("bench", "trainer.bench.command")
    _show(args, benchmark.bench(args.store), benchmark.bench_text)


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "convert": _run_convert,
    "commit": _run_commit,
    "info": _run_info,
    "verify": _run_verify,
    "copy": _run_copy,
    "report": _run_report,
    "warm": _run_warm,
    "bench": _run_bench,
}


def _trainer(command: str, module: str) -> Any:
    """A module of the trainer, which the pipeline knows by name only."""
    if importlib.util.find_spec("torch") is None and command != "report-runs":
        raise UsageError(f"{command}: needs PyTorch, which isn't installed: pip install 'efficient-imagenet[train]'")
    return importlib.import_module(module)


class _Terminated(SystemExit):
    """SIGTERM came."""


def _terminate(signum: int, frame: object) -> None:
    raise _Terminated(TERMINATED)


def _interrupt(signum: int, frame: object) -> None:
    """The first Ctrl-C ends the run in order; the second at once, which loses nothing either."""
    signal.signal(signal.SIGINT, _give_up)
    raise KeyboardInterrupt


def _give_up(signum: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted twice; what is finished is kept: run the same command again\n")
    os._exit(INTERRUPTED)


def _what_is_left(args: Namespace | None) -> str:
    """What a stopped command leaves behind, and how to go on."""
    again = "run the same command again"
    if args is None or args.command != "convert":
        return again
    try:
        options = ConvertOptions(**_options(args))
        stores = store_paths(args.dst, options.sizes)
    except UsageError:
        return again
    if options.dry_run:
        return again
    finished = max(Workspace(store).num_finished() for store in stores)
    if finished:
        return f"{counted(finished, 'finished chunk')} {are(finished)} kept: rerun the same command to go on"
    if any((store / "zarr.json").exists() for store in stores):
        return "finished splits are kept: rerun the same command to go on"
    return "no chunk was finished yet: rerun the same command"


def _program(arguments: Sequence[str]) -> str:
    """How this was called; completion is for the installed command, as shells can't complete `python -m`."""
    is_script = os.path.basename(sys.argv[0]) == SCRIPT or arguments[:1] == ["--print_completion"]
    return SCRIPT if is_script else PROG


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 failed check or job, 2 wrong use, 128 + a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    args = None
    words = [word for word in arguments if not word.startswith("-")]
    if words and words[0] in TRAINER:  # which parse, and say what went wrong, for themselves
        arguments.remove(words[0])
        try:
            return int(_trainer(words[0], TRAINER[words[0]][0]).main(arguments))
        except UsageError as error:
            return _say(f"error: {error}", error.exit_code)
    # What joblib's resource tracker says when it cleans up after a killed run is no news to whoever killed it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that workers and temp files are cleaned up
        signal.signal(signal.SIGINT, _interrupt)
    try:
        args = parse(arguments, _program(arguments))
        COMMANDS[args.command](args)
        sys.stdout.flush()  # here, where a reader that is gone is noticed
        return 0
    except KeyboardInterrupt:
        return _say(f"interrupted; {_what_is_left(args)}", INTERRUPTED)
    except _Terminated:
        return _say(f"terminated; {_what_is_left(args)}", TERMINATED)
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # neither fails again when Python flushes it at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return NO_READER
    except Exception as error:
        if debug:
            raise
        if isinstance(error, Error):
            return _say(f"error: {error}", error.exit_code)
        if isinstance(error, OSError):
            what = error.filename or (args.command if args else "arguments")
            return _say(f"error: {what}: {error.strerror or error}; mend that and run it again", 1)
        # A fault of ours: still one line, and a way to see more.
        return _say(
            f"error: {type(error).__name__}: {error}; unexpected: run it with --debug and report what it shows", 1
        )


def _say(text: str, exit_code: int) -> int:
    """Write one line to standard error; returns the exit code."""
    sys.stderr.write(printable(one_line(text)) + "\n")
    return exit_code
