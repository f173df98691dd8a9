"""Recipe and command line → `TrainConfig`: a YAML file of its fields, a flag for each.

config = parse_config(["configs/shapes.yaml", "--pictures", "2000"])
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser

from data.errors import one_line
from training.config import TrainConfig, flag
from training.run_plan import PlanOptions

DEFAULT_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "shapes.yaml"
RUN_FILE = "run.yaml"
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
        ValueError: no such file, not YAML, an unknown key or one without a value, a date or another value
            that only YAML has: one sentence.
    """
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} cannot be read: {error}") from None
    except RecursionError:
        raise ValueError(f"recipe {path} is nested too deeply") from None
    except (yaml.YAMLError, *_CONSTRUCTORS_RAISE) as error:
        raise ValueError(f"recipe {path} is no YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected keys and values, got {type(recipe).__name__}")
    for key, value in recipe.items():
        if (odd := _odd_value([key, value])) is not None:
            raise ValueError(
                f"recipe {path}: {str(key)[:80]}: expected text, numbers, true, false, lists, and keys with "
                f"values, got a {type(odd).__name__}; put text that looks like one into quotes"
            )
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


def _odd_value(recipe: list[Any]) -> Any:
    """A date, set, tuple or bytes that YAML's tags made, which run.yaml would bring back as another value;
    None where there is none."""
    waiting: list[Any] = [recipe]
    seen = set()  # a list may hold itself, or another one a billion times
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            if id(value) not in seen:
                seen.add(id(value))
                waiting += [*value, *value.values()] if isinstance(value, dict) else value
        elif value is not None and not isinstance(value, str | int | float):
            return value
    return None


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
            if kind is bool:
                parser.add_argument(name, action=ActionYesNo(yes_prefix="", no_prefix="no-"), **options)
            else:
                parser.add_argument(name, type=kind, **options)
    return parser


def _leave(sentence: str) -> NoReturn:
    print(f"train.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)
