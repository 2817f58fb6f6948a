"""The arguments of `python -m pipeline`: every command with its flags, help and examples."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import docstring_parser

from pipeline import __version__
from pipeline.conversion.options import COMMAND_KINDS, ON_ERROR, ConvertOptions
from pipeline.errors import UsageError
from pipeline.store.format import CODECS
from pipeline.text import one_line

PROG = "python -m pipeline"

_FILES: dict[str, Any] = {}
"""How shells complete a path; filled when a script for them is printed."""

TRAINER = {
    "train": ("trainer.main", "Train a classifier on a store."),
    "predict": ("trainer.predict", "Say what images show, by the weights of a run."),
    "report-runs": ("trainer.report.__main__", "Write one HTML page about runs."),
}
"""Commands of the trainer: their modules, which have a `main`, and their help."""

_SHELLS = [f"shtab-{shell}" for shell in ("bash", "zsh", "tcsh")]


class Parser(argparse.ArgumentParser):
    """Wrong use is one line on standard error, and exit code 2."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples as they are
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> Any:
        raise UsageError(f"{one_line(message)}; see `{self.prog} --help`")

    def flag(self, name: str, help: str, *, is_path: bool = False, shown: Any = None, **options: Any) -> None:
        """Add an argument. Its help shows the default (or `shown`), and shells complete a path."""
        shown = options.get("default") if shown is None else shown
        text = help if shown in (None, False, argparse.SUPPRESS) else f"{help} (default: {shown})"
        action = self.add_argument(name, help=text, **options)
        if is_path:
            action.complete = _FILES  # type: ignore[attr-defined]

    def place(self, name: str, help: str, **options: Any) -> None:
        """Add a positional argument that is a path."""
        self.flag(name, help, is_path=True, metavar=name.upper(), **options)


class _PrintCompletion(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, args: Any, value: Any, option: str | None = None) -> None:
        try:
            import shtab
        except ImportError:
            raise UsageError(f"{option}: completion for shells needs a package: pip install shtab") from None
        _FILES.update(shtab.FILE)
        print(shtab.complete(parser, value.removeprefix("shtab-")))  # noqa: T201
        parser.exit()


def parse(arguments: Sequence[str], prog: str = PROG) -> argparse.Namespace:
    """The command (`command`) and its arguments; `prog` is how it was called. UsageError where they are wrong."""
    parser, commands = _parsers(prog)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2)
    first = arguments[0].partition("=")[0]
    if first.startswith("--") and first not in parser._option_string_actions:
        parser.error(f"{first}: flags stand after the command, but for --quiet and --debug")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands[args.command]
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), unknown[0])
        flags = [name for action in command._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag.replace("_", "-").lower(), flags, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _parsers(prog: str) -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog=prog,
        description="Convert image datasets into stores, look after the stores, and train on them.",
        epilog="exit codes: 0 success, 1 failed check or job, 2 wrong use, 130, 143, 141: Ctrl-C, SIGTERM, no reader",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    text = "print a script that completes this command in a shell"
    parser.add_argument("--print_completion", choices=_SHELLS, action=_PrintCompletion, metavar="SHELL", help=text)
    _common(parser, False)
    adder = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    commands: dict[str, Parser] = {}

    def command(name: str, text: str, *examples: str) -> Parser:
        epilog = "\n".join(["examples:", *(f"  {prog} {name} {example}" for example in examples)])
        commands[name] = adder.add_parser(name, help=text, description=text, epilog=epilog)
        return commands[name]

    _add_convert(command)
    _add_others(command)
    for name, (_, text) in TRAINER.items():
        adder.add_parser(name, help=text, add_help=False)
    for name, made in commands.items():
        _common(made, argparse.SUPPRESS)  # so that what stands before the command's name counts, too
        made.usage = f"{prog} {name} {' '.join(_positionals(made))} [options]"
    return parser, commands


def _positionals(parser: Parser) -> list[str]:
    actions = [action for action in parser._actions if not action.option_strings]
    return [f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in actions]


def _common(parser: Parser, default: Any) -> None:
    text = "show no progress, only errors and what was asked for"
    parser.add_argument("--quiet", action="store_true", default=default, help=text)
    parser.add_argument("--debug", action="store_true", default=default, help="show the traceback of an error")


def _add_convert(command: Callable[..., Parser]) -> None:
    """SRC, DST and a flag for each field of `ConvertOptions`, with its docstring as help."""
    text = "Convert a dataset into a store, or go on with an interrupted conversion."
    several = "photos 'data/photos-{size}.zarr' --size 160 --size 224 --on-error skip"
    parser = command("convert", text, "/data/imagenet data/imagenet-256.zarr", several)
    parser.place("src", "folder, archives, manifest, parquet, or torchvision:NAME")
    parser.place("dst", "the store to write; holds {size} when there are several sizes")
    texts = {param.arg_name: param.description for param in docstring_parser.parse_from_object(ConvertOptions).params}
    for item in fields(ConvertOptions):
        options = dict(item.metadata)
        if item.default is False:
            options["action"] = "store_true"
        elif type(item.default) in (int, float):
            options["type"] = type(item.default)
        if item.name != "quiet":  # which all commands have
            flag = f"--{item.name.replace('_', '-')}"
            # Only what was given arrives: the defaults are the dataclass's.
            parser.flag(flag, texts.get(item.name) or "", default=argparse.SUPPRESS, shown=item.default, **options)


def _add_others(command: Callable[..., Parser]) -> None:
    name = "data/imagenet-256.zarr"
    commit = command("commit", "Commit a conversion whose parts are all done.", name)
    commit.place("dst", "the store being written")
    commit.flag("--on-error", "as for convert", choices=ON_ERROR, default="stop")

    info = command("info", "Describe a store, or without one the installed software.", name, f"{name} --json")
    info.place("store", "the store's folder or URL", nargs="?")
    info.flag("--json", "print JSON", action="store_true")

    text = "Check every byte of a store against its digests, and samples against their source."
    verify = command("verify", text, name, f"{name} --against /data/imagenet --sample 1000")
    verify.place("store", "the store's folder or URL")
    text = "decode samples of SRC, from which the store was converted, again and compare pixels"
    verify.flag("--against", text, metavar="SRC", is_path=True)
    verify.flag(
        "--sample",
        "how many samples a split; 0 for all; at a URL only their chunks are read",
        type=int,
        metavar="N",
        default=1000,
    )
    verify.flag("--source", "kind of SRC", choices=COMMAND_KINDS)
    verify.flag("--json", "print JSON", action="store_true")

    url = "s3://bucket/imagenet-256.zarr"
    text = "Copy a store, compressed for shipping or raw for training; or go on with an interrupted copy."
    copy = command("copy", text, f"{name} {url} --codec zstd", f"{url} {name} --codec none")
    copy.place("store", "a store, or a URL that fsspec can read")
    copy.place("dst", "a folder, or a URL that fsspec can write")
    copy.flag("--codec", "none for training; max is smallest", choices=CODECS, default="none")
    copy.flag("--n-jobs", "threads; -1: one per core, as far as memory goes", type=int, metavar="N", default=-1)

    report = command("report", "Write one HTML page to look at the dataset.", name, f"{name} --out imagenet.html")
    report.place("store", "the store's folder or URL")
    report.flag("--out", "the page", metavar="FILE.html", is_path=True, shown="STORE with .html instead of .zarr")

    warm = command("warm", "Read a store into memory, in the largest pages, before training.", name)
    warm.place("store", "the store's folder")
    warm.flag("--split", "name of a split, may be given several times", action="append", metavar="NAME", shown="all")
    text = "read at most so many GB (10^9 bytes)"
    warm.flag("--size-limit", text, type=float, metavar="GB", shown="what the available memory holds")

    bench = command("bench", "Measure how fast this machine reads a store.", name)
    bench.place("store", "the store's folder")
    bench.flag("--json", "print JSON", action="store_true")
