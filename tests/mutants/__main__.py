"""Put each fault into a copy of the project and see a test fail: `python -m tests.mutants [--list] [--only NAME]`.

Exits with 1 where a fault goes unnoticed. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.faults import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pipeline", "trainer", "tests")


def copy_project(folder: Path) -> None:
    """Copy what the tests of the trainer need."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(tests: list[str], folder: Path) -> bool:
    """Whether one of these tests fails in the copy.

    Raises:
        RuntimeError: the tests couldn't be run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def is_noticed(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails in the copy with the fault in it, which is taken out again."""
    file = folder / "trainer" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        return run_tests(mutant.tests.split(" "), folder)
    finally:
        file.write_text(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="only name the faults")
    parser.add_argument("--only", metavar="NAME", action="append", choices=MUTANTS, help="this one (repeatable)")
    options = parser.parse_args(argv)
    if options.list:
        for name, mutant in MUTANTS.items():
            sys.stdout.write(f"{name:28} trainer/{mutant.file}: {mutant.old.strip()} -> {mutant.new.strip()}\n")
        return 0
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        wanted = [MUTANTS[name] for name in options.only or MUTANTS]
        tests = sorted({test for mutant in wanted for test in mutant.tests.split(" ")})
        if run_tests(tests, Path(folder)):
            sys.stdout.write("the tests fail without any fault; mend that first\n")
            return 1
        for name in options.only or MUTANTS:
            noticed = is_noticed(MUTANTS[name], Path(folder))
            sys.stdout.write(f"{name:28} {'dead' if noticed else 'ALIVE: ' + MUTANTS[name].tests}\n")
            sys.stdout.flush()
            unnoticed += [] if noticed else [name]
    sys.stdout.write(f"{len(unnoticed)} of {len(options.only or MUTANTS)} went unnoticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
