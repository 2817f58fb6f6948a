"""The trainer's command line and its YAML recipes, turned into a `Config` by jsonargparse."""

from __future__ import annotations

import difflib
import functools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from pipeline import __version__
from pipeline.errors import UsageError
from pipeline.text import one_line
from trainer.config import Config, Stage

EXAMPLES = """examples:
  torchrun --nproc-per-node=8 trainer/main.py --config trainer/recipes/resnet50.yaml --data data/imagenet-256.zarr
  python trainer/main.py --data data/own-64.zarr --model resnet18 --crop 56 --epochs 20 --lr 0.2 --out runs/own
  torchrun --nproc-per-node=2 trainer/main.py --config runs/own/config.yaml --resume auto      # go on, on two ranks
  python trainer/main.py --data data/own-64.zarr --model resnet18 --weights runs/own/best.pt --eval-only
Any flag may stand in the YAML file, with underscores or dashes; flags after --config override it.
--no-SWITCH takes a switch back, such as --no-compile."""

RECIPES = Path(__file__).parent / "recipes"

GROUPS = {
    "data": "data and weights",
    "model": "model",
    "epochs": "schedule and optimizer",
    "augment": "augmentation",
    "eval_crop": "evaluation",
    "stages": "the run",
}
"""Headings of the help, each before its first field."""

PLACEHOLDERS = {
    "data": "STORE",
    "cache": "DIR",
    "out": "FOLDER",
    "resume": "auto|PATH",
    "weights": "PATH",
    "subset": "FILE",
}

KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
"""Types of fields in words."""


class _Parser(ArgumentParser):
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Each field with its choices and its default, in groups."""
        helps = {action.dest: str(action.help) for action in self._actions}
        lines = [f"usage: {self.prog} --data STORE [--config RECIPE.yaml] [any field]", "", str(self.description)]
        for item in fields(Config):
            if item.name in GROUPS:
                lines += ["", f"{GROUPS[item.name]}:"]
            default = item.default if item.default_factory is MISSING else []
            shown = "" if default in (MISSING, None, False, []) else f" (default: {default})"
            lines += _paragraph(f"--{item.name}{_choices(item.name)}", helps[item.name] + shown)
        lines += ["", "files and help:"]
        for name, value in (("config", " FILE|NAME"), ("version", ""), ("help", "")):
            lines += _paragraph(f"--{name}{value}", helps[name])
        return _dashes("\n".join(lines)) + f"\n\n{EXAMPLES}\n"

    def get_completion_script(self, *args: Any, **kwargs: Any) -> str:
        return _dashes(super().get_completion_script(*args, **kwargs))


def _paragraph(flag: str, text: str) -> list[str]:
    head = [] if len(flag) < 27 else [f"  {flag}"]
    first = f"  {flag:27} " if not head else " " * 30
    return head + textwrap.wrap(" ".join(text.split()), 110, initial_indent=first, subsequent_indent=" " * 30)


def _choices(name: str) -> str:
    """What may follow a flag, as a person writes it."""
    kind = get_type_hints(Config)[name]
    kinds = [part for part in get_args(kind) if part is not type(None)] or [kind]
    if kinds == [bool]:
        return ""
    if get_origin(kind) is Literal:
        return " " + "|".join(kinds)
    return " " + (PLACEHOLDERS.get(name) or {int: "N", float: "X", str: "NAME"}.get(kinds[0], "LIST"))


def _dashes(text: str) -> str:
    return re.sub(r"--[a-z]\w*", lambda flag: flag[0].replace("_", "-"), text)


@functools.cache
def _parser() -> _Parser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True, add_print_completion_argument=True)
    parser = _Parser(
        prog="trainer/main.py",
        description=Config.__doc__,
        exit_on_error=False,
        version=__version__,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help=f"YAML file with any of these fields, or a recipe's name: {_recipe_names()}.")
    parser.add_class_arguments(Config, as_group=False)
    return parser


def parse(argv: Sequence[str]) -> Config:
    """The config of a command line. `--help` prints and exits.

    Raises:
        UsageError: an unknown flag or key, a wrong type or a value out of range, in one line.
    """
    parser = _parser()
    try:
        values = parser.parse_args(list(_plain_flags(argv)))
        del values["config"]
        return Config(**vars(parser.instantiate(values)))
    except (ArgumentError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(_explain(str(error))) from error


def _plain_flags(argv: Sequence[str]) -> Iterator[str]:
    """The command line as jsonargparse takes it: names with underscores, booleans with a value, and in the place of
    `--config FILE` the file's fields."""
    booleans = {item.name for item in fields(Config) if "bool" in str(item.type)}
    args = [*argv]
    while args:
        flag, equals, value = args.pop(0).partition("=")
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--"):
            yield flag + equals + value
            continue
        _check_name(name if name.removeprefix("no_") not in booleans else name.removeprefix("no_"), flag)
        if not equals and name.removeprefix("no_") in booleans and (not args or args[0].startswith("--")):
            name, equals, value = name.removeprefix("no_"), "=", str(not name.startswith("no_")).lower()
        elif not equals and args and not args[0].startswith("--"):
            equals, value = "=", args.pop(0)
        if name == "config" and equals:
            yield from _recipe_flags(value)
        else:
            if name == "stages":
                _check_stages(value)
            yield f"--{name}{equals}{value}"


def _check_name(name: str, where: str) -> None:
    known = [item.name for item in fields(Config)]
    if name not in (*known, "config", "help", "version", "print_completion"):
        close = difflib.get_close_matches(name, known, 1)
        dashes = "--" if where.startswith("--") else ""
        raise UsageError(
            f"{where}: unknown; " + (f"did you mean {_dashes(dashes + close[0])}?" if close else "see --help")
        )


def _check_stages(text: str) -> None:
    """Raise UsageError for anything but plain data: of a class's name jsonargparse would import the module."""
    names = {item.name for item in fields(Stage)}
    try:
        rows = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        rows = None
    if not isinstance(rows, list) or any(not isinstance(row, dict) or not row.keys() <= names for row in rows):
        raise UsageError(f"--stages {text}: must be a list of {{epoch: N, size: PX, crop: PX}}")


FLOAT = re.compile(r"[-+]?[\d._]+[eE][-+]?\d+")
"""1e-3 is a number, as in every other program; to YAML 1.1 it is a text."""


class _Loader(yaml.SafeLoader):
    """Plain data: no tags, and no aliases, which can make gigabytes out of ten lines."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases aren't allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that would be read back as numbers, such as a run called 1e5."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def dump(config: Config) -> str:
    """YAML that `--config` reads as this config."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False)


def _recipe_names() -> str:
    return ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))


def _recipe_flags(file: str) -> Iterator[str]:
    """The fields of a YAML file, or of the recipe of that name, as flags.

    Raises:
        UsageError: not a file of fields.
    """
    named = RECIPES / f"{file}.yaml"
    try:
        path = named if Path(file).name == file and named.exists() and not Path(file).exists() else file
        with open(path, encoding="utf-8") as recipe:
            values = yaml.load(recipe, _Loader)
    except OSError as error:
        raise UsageError(
            f"--config {file}: {error.strerror}; give a path, or one of the recipes {_recipe_names()}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not a text in UTF-8 (byte {error.start}); save it as such") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not plain YAML ({one_line(error)}); mend it") from error
    if not isinstance(values, dict) or not values:
        raise UsageError(f"{file}: holds no fields; write some, such as `epochs: 16`, or leave out --config")
    for key, value in values.items():
        name = str(key).replace("-", "_")
        _check_name(name, f"{file}: {key}")
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield from _plain_flags([f"--{name}={text}"])


def _explain(message: str) -> str:
    """jsonargparse's message as one line, without Python's names of types."""
    text = " ".join(message.split())
    types = get_type_hints(Config)
    if missing := re.search(r"are required: (\w+)", text):
        return _dashes(f"--{missing[1]} is required; give it, such as --data STORE, or see --help")
    wrong = re.match(r"Parser key \"(\w+)\":.* (?:Got|Given) value:(.*)", text)
    if wrong and wrong[1] in types:
        kind = types[wrong[1]]
        wanted = " or ".join(get_args(kind)) if get_origin(kind) is Literal else KINDS[(*get_args(kind), kind)[0]]
        return _dashes(f"--{wrong[1]}{wrong[2] or ' (empty)'}: must be {wanted}")
    return _dashes(re.sub(r"Parser key \"(\w+)\":", r"--\1:", text)) + "; see --help"
