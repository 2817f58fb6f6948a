"""The command line: `python -m pipeline COMMAND`. Parsing and exit codes; the work is done elsewhere."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from pipeline import __version__
from pipeline.backends import BACKENDS
from pipeline.errors import Error, UsageError
from pipeline.geometry import CHANNELS, FILTERS, FITS
from pipeline.sources import SOURCE_KINDS as ALL_KINDS

PROG = "python -m pipeline"
INTERRUPTED = 130  # 128 + SIGINT, as shells do
TERMINATED = 143  # 128 + SIGTERM
CODECS = ("none", "zstd", "blosc", "max")
SOURCE_KINDS = tuple(kind for kind in ALL_KINDS if kind != "sequence")  # that one only from Python


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of examples as they are."""


class Parser(ArgumentParser):
    """Wrong use is one line on standard error, and exit code 2."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
        text = re.sub(r"\s+\((type:\s+\w+,\s+)?default:\s+(null|False)\)", "", text)
        return re.sub(r"\s+\(required\)", "", text.replace("(type: int, default", "(default"))

    def error(self, message: str, ex: Exception | None = None) -> Any:
        text = _WRONG_TYPE.sub(_wrong_type, " ".join(str(message).split()))
        missing = re.search(r"required: (\w+)\.", text)  # of a command: jsonargparse names it before each argument
        command = f" {missing[1]}" if missing and self.prog == PROG else ""
        text = text.replace(f"{command.strip()}.", "") if command else text
        raise UsageError(f"{text}; see `{self.prog.replace(' [options]', '')}{command} --help`")


_WRONG_TYPE = re.compile(r"Parser key \"(\w+)\": Expected a <class '(\w+)'>\. Got value: (.*)")
_TYPE_NAMES = {"int": "a whole number", "float": "a number"}


def _wrong_type(match: re.Match[str]) -> str:
    name, kind, value = match.groups()
    return f"--{name.replace('_', '-')} {value}: must be {_TYPE_NAMES.get(kind, kind)}"


def _command(parsers: Any, name: str, help_text: str, example: str) -> Parser:
    parser = Parser(description=help_text, epilog=f"example: {example}", formatter_class=_Help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--quiet", action="store_true", help="show no progress, only results and errors")
    parsers.add_subcommand(name, parser, help=help_text)
    return parser


def make_parser() -> Parser:
    """All commands and their flags."""
    parser = Parser(
        prog=PROG,
        description="Convert image datasets into stores, and look after the stores.",
        epilog="exit codes: 0 success, 1 failed check or job, 2 wrong use, 130 and 143 after Ctrl-C and SIGTERM",
        version=__version__,
        formatter_class=_Help,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subcommands(required=True, dest="command", metavar="COMMAND")

    convert = _command(
        commands,
        "convert",
        "Convert a dataset into a store, or go on with an interrupted conversion.",
        "python -m pipeline convert /data/imagenet data/imagenet-256.zarr --size 256",
    )
    add = convert.add_argument
    add("src", metavar="SRC", help="folder, archives, manifest, parquet, or torchvision:NAME")
    add("dst", metavar="DST", help="the store to write; holds {size} when there are several sizes")
    add("--size", action="append", metavar="S", help="side in pixels, 256 if not given; repeatable")
    add("--fit", choices=FITS, default="crop", help="how an image becomes a square")
    add("--filter", choices=FILTERS, default="bicubic", help="resampling filter, always antialiased")
    add("--channels", choices=tuple(CHANNELS), default="rgb", help="three channels, or one")
    add("--exif-transpose", action="store_true", help="apply the EXIF orientation before the resize")
    add("--split", action="append", metavar="NAME", help="only this split, repeatable; or the name of an only split")
    add("--source", choices=SOURCE_KINDS, default=None, metavar="KIND", help=f"force a kind: {', '.join(SOURCE_KINDS)}")
    add("--n-jobs", type=int, default=-1, metavar="N", help="worker processes; -1: one per core")
    add("--backend", choices=BACKENDS, default="loky", help="processes here, or a Dask or Ray cluster")
    add(
        "--scheduler",
        type=str,
        metavar="ADDR",
        default=None,
        help="running Dask or Ray cluster; else a local one is started",
    )
    add("--part", type=str, metavar="I/N", default=None, help="only every N-th chunk, I from 1; for batch schedulers")
    add("--on-error", choices=("stop", "skip"), default="stop", help="with bad samples: commit nothing, or skip them")
    add("--max-pixels", type=int, default=None, metavar="N", help="images with more pixels are bad samples")
    add("--classes", type=str, metavar="FILE", default=None, help="keep only the class ids listed in FILE, one a line")
    add("--class-order", type=str, metavar="FILE|numeric", default=None, help="label order other than sorted ids")
    add("--limit-per-class", type=int, metavar="N", default=None, help="at most N samples a class and split")
    add("--no-shuffle", action="store_true", help="keep the source's order in train splits, too")
    add("--seed", type=int, default=0, help="seed of the shuffle")
    add("--chunk-mb", type=float, default=100.0, metavar="MB", help="size of a chunk file in 10^6 bytes")
    add("--overwrite", action="store_true", help="delete the store and unfinished work first")
    add("--dry-run", action="store_true", help="say what would be written, and stop")
    add("--check-md5", action="store_true", help="check the official archives' MD5 first")
    add("--download", action="store_true", help="let torchvision download the dataset")

    commit = _command(
        commands,
        "commit",
        "Commit a conversion whose parts are all done.",
        "python -m pipeline commit data/imagenet-256.zarr",
    )
    commit.add_argument("dst", metavar="DST", help="the store being written")
    commit.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="as for convert")

    info = _command(
        commands,
        "info",
        "Describe a store, or without one the installed software.",
        "python -m pipeline info data/imagenet-256.zarr",
    )
    info.add_argument("store", nargs="?", metavar="STORE", default=None, help="the store's folder")
    info.add_argument("--json", action="store_true", help="print JSON")

    verify = _command(
        commands,
        "verify",
        "Check every byte of a store against its digests, and samples against their source.",
        "python -m pipeline verify data/imagenet-256.zarr --against /data/imagenet --sample 1000",
    )
    verify.add_argument("store", metavar="STORE", help="the store's folder")
    verify.add_argument(
        "--against", type=str, metavar="SRC", default=None, help="decode samples of SRC again and compare pixels"
    )
    verify.add_argument("--sample", type=int, metavar="N", default=1000, help="how many samples a split; 0 for all")
    verify.add_argument("--source", choices=SOURCE_KINDS, default=None, metavar="KIND", help="kind of SRC")
    verify.add_argument("--json", action="store_true", help="print JSON")

    copy = _command(
        commands,
        "copy",
        "Copy a store with another codec: compressed for shipping, none for training.",
        "python -m pipeline copy data/imagenet-256.zarr s3://bucket/imagenet-256.zarr --codec zstd",
    )
    copy.add_argument("store", metavar="STORE", help="a store, or a URL that zarr can read")
    copy.add_argument("dst", metavar="DST", help="a folder, or a URL that zarr can write")
    copy.add_argument("--codec", choices=CODECS, default="none", help="none for training; max is smallest")
    copy.add_argument("--n-jobs", type=int, default=-1, metavar="N", help="threads; -1: one per core")

    report = _command(
        commands,
        "report",
        "Write one HTML page to look at the dataset.",
        "python -m pipeline report data/imagenet-256.zarr",
    )
    report.add_argument("store", metavar="STORE", help="the store's folder")
    report.add_argument(
        "--out", type=str, metavar="FILE.html", default=None, help="default: STORE with .html instead of .zarr"
    )

    bench = _command(
        commands,
        "bench",
        "Measure how fast this machine reads a store.",
        "python -m pipeline bench data/imagenet-256.zarr",
    )
    bench.add_argument("store", metavar="STORE", help="the store's folder")
    bench.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")


def _run_convert(args: Namespace) -> None:
    from pipeline.conversion import DEFAULT_MAX_PIXELS, convert

    options = args.as_dict()
    for name in ("debug", "command"):
        options.pop(name, None)
    options["size"] = _sizes(options["size"])
    options["max_pixels"] = DEFAULT_MAX_PIXELS if options["max_pixels"] is None else options["max_pixels"]
    report = convert(options.pop("src"), options.pop("dst"), **options)
    if not args.dry_run:
        for store in report.stores:
            _out(f"{store}: {', '.join(report.committed) or 'nothing committed yet'}")


def _sizes(texts: Sequence[str] | None) -> list[int]:
    try:
        return [int(text) for text in texts or ["256"]]
    except ValueError as error:
        raise UsageError(f"--size {', '.join(texts or ())}: must be whole numbers of pixels") from error


def _run_commit(args: Namespace) -> None:
    from pipeline.commit import commit

    report = commit(args.dst, on_error=args.on_error, quiet=args.quiet)
    _out(f"{report.stores[0]}: {', '.join(report.committed)}")


def _run_info(args: Namespace) -> None:
    from pipeline.info import software_info, software_text, store_info, store_text

    value, text = (store_info(args.store), store_text) if args.store else (software_info(), software_text)
    _out(json.dumps(value, indent=2) if args.json else text(value))


def _run_verify(args: Namespace) -> None:
    from pipeline.verify import check, result_text, verify

    result = verify(args.store, against=args.against, sample=args.sample, source=args.source, quiet=args.quiet)
    _out(json.dumps(result, indent=2) if args.json else result_text(result))
    check(result)


def _run_copy(args: Namespace) -> None:
    from pipeline.recode import copy_store

    copy_store(args.store, args.dst, codec=args.codec, n_jobs=args.n_jobs, quiet=args.quiet)


def _run_report(args: Namespace) -> None:
    from pipeline.report import write_report

    _out(str(write_report(args.store, args.out)))


def _run_bench(args: Namespace) -> None:
    benchmark = importlib.import_module("pipeline.benchmark")  # needs the extra `train`
    result = benchmark.bench(args.store)
    _out(json.dumps(result, indent=2) if args.json else benchmark.bench_text(result))


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "convert": _run_convert,
    "commit": _run_commit,
    "info": _run_info,
    "verify": _run_verify,
    "copy": _run_copy,
    "report": _run_report,
    "bench": _run_bench,
}


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


def _interrupt(signum: int, frame: object) -> None:
    """The first Ctrl-C ends the run in order; the second at once, which loses nothing either."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 failed check or job, 2 wrong use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    name = "arguments"
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that workers and temp files are cleaned up
        signal.signal(signal.SIGINT, _interrupt)
    try:
        parsed = make_parser().parse_args(arguments)
        name = parsed.command
        COMMANDS[name](parsed[name])
    except Error as error:
        if debug:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished chunks are kept: rerun the same command to go on\n")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        sys.stderr.write(f"error: {error.filename or name}: {error.strerror or error}; mend that and run it again\n")
        return 1
    except Exception as error:  # a fault of ours: still one line, and a way to see more
        if debug:
            raise
        text = " ".join(str(error).split())
        sys.stderr.write(f"error: {type(error).__name__}: {text}; unexpected: run it with --debug and report that\n")
        return 1
    return 0
