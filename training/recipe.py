"""Recipe and command line → `TrainConfig`: a YAML file of its fields, a flag for each.

config = parse_config(["configs/shapes.yaml", "--pictures", "2000"])
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from argparse import ArgumentTypeError
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser

from data.errors import one_line
from training.config import Data, TrainConfig, flag
from training.run_plan import PlanOptions

DEFAULT_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "shapes.yaml"
RUN_FILE = "run.yaml"
_MOST_VALUES = 10_000  # of a recipe
# Beside YAMLError: what PyYAML lets through where dates, numbers or tags are none, `!!timestamp x` for one.
_CONSTRUCTORS_RAISE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def parse_config(arguments: list[str] | None = None, description: str = "") -> TrainConfig:
    """The recipe named first (the picture world's by default), with the flags behind it put over it; see
    `parse_arguments`."""
    return parse_arguments(arguments, description)[0]


def parse_arguments(
    arguments: list[str] | None = None, description: str = ""
) -> tuple[TrainConfig, PlanOptions]:
    """The run's configuration, and what was asked about its plan.

    Leaves with status 2 and one sentence for a recipe that is missing or not YAML, an unknown key or flag, a
    value of the wrong type or out of range.
    """
    arguments = _without_auto(list(sys.argv[1:] if arguments is None else arguments))
    recipe = DEFAULT_RECIPE
    if arguments and not arguments[0].startswith("-"):
        recipe = Path(arguments.pop(0))
    flags = {item.name for item in dataclasses.fields(TrainConfig)}
    plan = {item.name for item in dataclasses.fields(PlanOptions)}
    given = [a.split("=")[0] for a in arguments if a.startswith("--")]
    known = {flag(word + name) for name in flags | plan for word in ("", "no_")} | {"--help"}
    if unknown := sorted(set(given) - known):
        _leave(f"unknown flag {', '.join(unknown)}; --help lists them all")
    try:
        settings = read_recipe(recipe)
        parser = _parser(description)
        parsed = parser.parse_object(settings)  # refuses values of the wrong type, as it does those of flags
        if arguments:
            parser.set_defaults(**settings)
            parsed = parser.parse_args(arguments)
        config = TrainConfig(**{name: parsed[name] for name in flags})
        return config, PlanOptions(**{name: parsed[name] for name in plan})
    except (ValueError, KeyError, ArgumentError) as error:
        _leave(one_line(error))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """A recipe's keys and values, the keys known.

    Raises:
        ValueError: no such file, not YAML, too many values, an unknown key or one without a value: one
            sentence.
    """
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} cannot be read: {error}") from None
    except RecursionError:
        raise ValueError(f"recipe {path} is nested too deeply") from None
    except _TooManyValues as error:
        raise ValueError(f"recipe {path}: {error}") from None
    except (yaml.YAMLError, *_CONSTRUCTORS_RAISE) as error:
        raise ValueError(f"recipe {path} is no YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected keys and values, got {type(recipe).__name__}")
    if recipe.get("resume") == "auto":
        recipe["resume"] = True
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    if unknown := sorted(str(key) for key in recipe if key not in known):
        raise ValueError(f"recipe {path}: unknown key {', '.join(unknown)}; train.py --help lists them all")
    if empty := [key for key, value in recipe.items() if value is None]:
        raise ValueError(
            f"recipe {path}: no value for {', '.join(empty)}; leave out what is to be its default"
        )
    return recipe


class _TooManyValues(Exception):
    """Of a recipe, its aliases written out."""


class _Loader(yaml.SafeLoader):
    """Counts values before any is made: a few hundred bytes of aliases, of merged keys too, can stand for
    billions.

    Raises:
        _TooManyValues: more than `_MOST_VALUES`, or a value that holds itself.
    """

    def __init__(self, stream: str):
        super().__init__(stream)
        self._sizes: dict[int, int] = {}  # id of a node that is whole → its values, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias or node is None:
            if node is not None and id(node) not in self._sizes:
                raise _TooManyValues("expected values that do not hold themselves")
            return node
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inside = [one for part in parts for one in (part if isinstance(part, tuple) else [part])]
        self._sizes[id(node)] = size = 1 + sum(self._sizes[id(one)] for one in inside)
        if max(size, len(self._sizes)) > _MOST_VALUES:
            raise _TooManyValues(f"expected at most {_MOST_VALUES} values, got more")
        return node


class _WrongData(ArgumentTypeError, ValueError):
    """What is wrong with --data or --eval-data, from the command line or from a recipe."""


class PathOrList:
    """The type of --data and --eval-data: a path, or a list of datasets as keys and values, which on the
    command line is YAML.

    Raises:
        _WrongData: it is neither, or has dates, sets, pairs or bytes, which only YAML has and run.yaml would
            bring back as other values.
    """

    def __call__(self, value: Any) -> Data:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                value = yaml.load(value, _Loader)
            except (yaml.YAMLError, _TooManyValues, RecursionError, *_CONSTRUCTORS_RAISE) as error:
                raise _WrongData(f"expected a path, or a list in YAML: {one_line(error)}") from None
        if isinstance(value, str):
            return value
        if not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            raise _WrongData(
                f"expected a path, or a list of datasets with keys and values, got {value!r:.80}"
            )
        waiting: list[Any] = [*value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                waiting += [*one, *one.values()]
            elif isinstance(one, list):
                waiting += one
            elif one is not None and not isinstance(one, str | int | float):
                advice = "; put it into quotes to have it as text" if isinstance(one, date) else ""
                raise _WrongData(
                    f"expected text, numbers, true and false, got a {type(one).__name__}{advice}"
                )
        return value

    def __repr__(self) -> str:  # as --help names it
        return "str | list[dict[str, Any]]"


def _without_auto(arguments: list[str]) -> list[str]:
    """`--resume auto`, as other trainers have it, as the switch that it is here."""
    plain = ["--resume" if argument == "--resume=auto" else argument for argument in arguments]
    return [one for before, one in zip(["", *plain], plain) if (before, one) != ("--resume", "auto")]


def write_run(config: TrainConfig, folder: Path) -> None:
    """The resolved configuration as a recipe, run.yaml: `python train.py folder/run.yaml` is the same run."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    temporary = folder / f".{RUN_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / RUN_FILE)


def _parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [RECIPE.yaml] [flags]",
        description=description,
        exit_on_error=False,
    )
    for described in (TrainConfig, PlanOptions):
        types = typing.get_type_hints(described)
        for item in dataclasses.fields(described):
            kind: type | UnionType = types[item.name]
            name, options = flag(item.name), {"default": item.default, "help": item.metadata["help"]}
            if kind == Data:  # jsonargparse's own check copies the whole list for each of its entries
                parser.add_argument(name, type=PathOrList(), **options)
            elif kind is bool:
                parser.add_argument(name, action=ActionYesNo(yes_prefix="", no_prefix="no-"), **options)
            else:
                parser.add_argument(name, type=kind, **options)
    return parser


def _leave(sentence: str) -> NoReturn:
    print(f"train.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)
