"""One HTML page that compares runs: `python -m trainer.report runs/*`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from pipeline import __version__
from pipeline.errors import Error, UsageError
from pipeline.store.atomic import write_bytes
from pipeline.store.remote import check_local
from pipeline.text import one_line, printable
from trainer.report.page import render_report
from trainer.report.records import load_runs


def write_report(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write one self-contained HTML page about runs.

    Args:
        paths: the runs' folders.
        out: the page; by default `report.html` in the folder of a single run, and of several `runs.html` in the
            current folder.
        note: gets a line on each folder whose run never began; it is left out.

    Returns:
        Path of the page.

    Raises:
        UsageError: a path that is no run's folder.
        Error: a broken metrics.jsonl or config.yaml, or the page can't be written.
    """
    runs = load_runs(paths, note)
    default = runs[0].folder / "report.html" if len(runs) == 1 else Path("runs.html")
    path = default if out is None else Path(out)
    check_local(out or "", "--out")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give --out the name of a file, such as {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, render_report(runs))
    except OSError as error:
        raise Error(f"{path}: can't be written ({error.strerror}); give another --out") from error
    return path


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise UsageError(f"{one_line(message)}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 (failed) or 2 (wrong use)."""
    parser = _Parser(
        prog="python -m trainer.report",
        description="Write one HTML page that compares training runs.",
        epilog="example: python -m trainer.report runs/*",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        version=__version__,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, with metrics.jsonl and config.yaml")
    help_out = "default: RUN/report.html for one run, runs.html in this folder for several"
    parser.add_argument("--out", type=str, metavar="FILE.html", default=None, help=help_out)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser.parse_args(arguments)
        path = write_report(args.runs, args.out, lambda line: sys.stderr.write(printable(f"note: {line}") + "\n"))
        sys.stdout.write(f"{path}\n")
    except Error as error:
        if "--debug" in arguments:
            raise
        sys.stderr.write(f"error: {printable(one_line(error))}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
