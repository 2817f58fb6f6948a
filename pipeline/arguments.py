"""The arguments of `python -m pipeline`: every command with its flags, help and examples."""

from __future__ import annotations

import argparse
import inspect
import re
from importlib.util import find_spec
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from pipeline import __version__
from pipeline.conversion.backends import BACKENDS
from pipeline.errors import UsageError
from pipeline.sources import SOURCE_KINDS as ALL_KINDS
from pipeline.store.geometry import CHANNELS, FILTERS, FITS
from pipeline.text import one_line

PROG = "python -m pipeline"
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
        text = _WRONG_TYPE.sub(_wrong_type, one_line(message)).rstrip(".")
        if "--print_completion: invalid choice: 'shtab-" in text and find_spec("shtab") is None:
            raise UsageError("--print_completion: completion for shells needs a package: pip install shtab")
        command = ""
        # jsonargparse writes `convert.dst`, where the help says `DST`.
        if missing := re.search(r"required: ((?:(\w+)\.)?\w+(?:, (?:\w+\.)?\w+)*)", text):
            command = f" {missing[2]}" if missing[2] else ""
            names = [name.rpartition(".")[2].upper() for name in missing[1].split(", ")]
            text = text.replace(missing[1], ", ".join(names))
        prog = self.prog.replace(" [options]", "")
        raise UsageError(f"{text}; see `{prog}{command if not prog.endswith(command) else ''} --help`")


_WRONG_TYPE = re.compile(r"Parser key \"(\w+)\": Expected a <class '(\w+)'>\. Got value: (.*)")
_TYPE_NAMES = {"int": "a whole number", "float": "a number"}


def _wrong_type(match: re.Match[str]) -> str:
    name, kind, value = match.groups()
    return f"--{name.replace('_', '-')} {value}: must be {_TYPE_NAMES.get(kind, kind)}"


def _command(parsers: Any, prog: str, name: str, help_text: str, *examples: str) -> Parser:
    epilog = "\n".join(["examples:", *(f"  {prog} {name} {example}" for example in examples)])
    parser = Parser(description=help_text, epilog=epilog, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--quiet", action="store_true", help="show no progress, only errors and what was asked for")
    parsers.add_subcommand(name, parser, help=help_text)
    return parser


def make_parser(prog: str = PROG) -> Parser:
    """All commands and their flags.

    Args:
        prog: how the program was called, for the help.
    """
    if "add_print_completion_argument" in inspect.signature(set_parsing_settings).parameters:
        set_parsing_settings(add_print_completion_argument=True)
    parser = Parser(
        prog=prog,
        description="Convert image datasets into stores, and look after the stores.",
        epilog="exit codes: 0 success, 1 failed check or job, 2 wrong use, 130, 143, 141: Ctrl-C, SIGTERM, no reader",
        version=__version__,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subcommands(required=True, dest="command", metavar="COMMAND")
    for add_command in (_convert, _commit, _info, _verify, _copy, _report, _bench):
        add_command(commands, prog)
    return parser


def _path(parser: Parser, *names: str, **options: Any) -> None:
    """Add an argument that is a path, which shells complete."""
    parser.add_argument(*names, **options).complete = _FILES


_FILES = {  # the value of `shtab.FILE`, which needn't be installed
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "tcsh": "f",
    "fish": "(__fish_complete_path (commandline -ct))",
    "powershell": "_shtab_powershell_compgen_files",
}


def _convert(commands: Any, prog: str) -> None:
    parser = _command(
        commands,
        prog,
        "convert",
        "Convert a dataset into a store, or go on with an interrupted conversion.",
        "/data/imagenet data/imagenet-256.zarr",
        "photos 'data/photos-{size}.zarr' --size 160 --size 224 --on-error skip",
    )
    _path(parser, "src", metavar="SRC", help="folder, archives, manifest, parquet, or torchvision:NAME")
    _path(parser, "dst", metavar="DST", help="the store to write; holds {size} when there are several sizes")
    add = parser.add_argument
    add("--verbose", action="store_true", help="one line for each chunk, with images/s and its bad files")
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
    classes = {"type": str, "default": None}
    _path(parser, "--classes", metavar="FILE", help="keep only the class ids listed in FILE, one a line", **classes)
    _path(parser, "--class-order", metavar="FILE|numeric", help="label order other than sorted ids", **classes)
    add("--limit-per-class", type=int, metavar="N", default=None, help="at most N samples a class and split")
    add("--no-shuffle", action="store_true", help="keep the source's order in train splits, too")
    add("--seed", type=int, default=0, help="seed of the shuffle")
    add("--chunk-mb", type=float, default=100.0, metavar="MB", help="size of a chunk file in 10^6 bytes")
    add("--overwrite", action="store_true", help="delete these splits, and unfinished work, first")
    add("--dry-run", action="store_true", help="say what would be written, and stop")
    add("--check-md5", action="store_true", help="check the official archives' MD5 first")
    add("--download", action="store_true", help="let torchvision download the dataset")


def _commit(commands: Any, prog: str) -> None:
    parser = _command(
        commands, prog, "commit", "Commit a conversion whose parts are all done.", "data/imagenet-256.zarr"
    )
    _path(parser, "dst", metavar="DST", help="the store being written")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="as for convert")


def _info(commands: Any, prog: str) -> None:
    parser = _command(
        commands,
        prog,
        "info",
        "Describe a store, or without one the installed software.",
        "data/imagenet-256.zarr",
        "data/imagenet-256.zarr --json",
    )
    _path(parser, "store", nargs="?", metavar="STORE", default=None, help="the store's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _verify(commands: Any, prog: str) -> None:
    parser = _command(
        commands,
        prog,
        "verify",
        "Check every byte of a store against its digests, and samples against their source.",
        "data/imagenet-256.zarr",
        "data/imagenet-256.zarr --against /data/imagenet --sample 1000",
    )
    _path(parser, "store", metavar="STORE", help="the store's folder")
    against = "decode samples of SRC, from which the store was converted, again and compare pixels"
    _path(parser, "--against", type=str, metavar="SRC", default=None, help=against)
    add = parser.add_argument
    add("--sample", type=int, metavar="N", default=1000, help="how many samples a split; 0 for all")
    add("--source", choices=SOURCE_KINDS, default=None, metavar="KIND", help="kind of SRC")
    add("--json", action="store_true", help="print JSON")


def _copy(commands: Any, prog: str) -> None:
    parser = _command(
        commands,
        prog,
        "copy",
        "Copy a store with another codec: compressed for shipping, none for training.",
        "data/imagenet-256.zarr s3://bucket/imagenet-256.zarr --codec zstd",
        "s3://bucket/imagenet-256.zarr data/imagenet-256.zarr --codec none",
    )
    _path(parser, "store", metavar="STORE", help="a store, or a URL that zarr can read")
    _path(parser, "dst", metavar="DST", help="a folder, or a URL that zarr can write")
    add = parser.add_argument
    add("--codec", choices=CODECS, default="none", help="none for training; max is smallest")
    add("--n-jobs", type=int, default=-1, metavar="N", help="threads; -1: one per core")


def _report(commands: Any, prog: str) -> None:
    parser = _command(
        commands,
        prog,
        "report",
        "Write one HTML page to look at the dataset.",
        "data/imagenet-256.zarr",
        "data/imagenet-256.zarr --out imagenet.html",
    )
    _path(parser, "store", metavar="STORE", help="the store's folder")
    out = "default: STORE with .html instead of .zarr"
    _path(parser, "--out", type=str, metavar="FILE.html", default=None, help=out)


def _bench(commands: Any, prog: str) -> None:
    parser = _command(commands, prog, "bench", "Measure how fast this machine reads a store.", "data/imagenet-256.zarr")
    _path(parser, "store", metavar="STORE", help="the store's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
