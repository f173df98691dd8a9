"""Recipe and command line → `TrainConfig`: a YAML file of its fields, a flag for each.

config = parse_config(["configs/shapes.yaml", "--pictures", "2000"])
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
import typing
from argparse import ArgumentTypeError
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser

from data.errors import did_you_mean, one_line
from data.files import check_rows_path, nearest_file, replacing
from models import __version__
from models.checkpoints.folder import check_replaceable
from models.checkpoints.hub import resolve_source
from models.config import check_device
from training.config import SHAPES, Data, TrainConfig, dataset_entries, flag
from training.plan_options import PlanOptions

DEFAULT_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "shapes.yaml"
RUN_FILE = "run.yaml"
_MOST_BYTES = 2**20  # of a recipe
_MOST_VALUES = 10_000
_MOST_DIGITS = 5_000  # of a number: from text to bits takes the square of the time
_MOST_LETTERS = 4_096  # of a path or other text
_MOST_WRITTEN = 64  # of a number in quotes: jsonargparse reads it as YAML, aliases and all
_LARGEST = 2**63 - 1
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_DATA = ("data", "eval_data")
_TEXT = tuple(item.name for item in dataclasses.fields(TrainConfig) if item.type == "str")
# Whose values are text, however they look: 7e8 and 0123 may begin a commit, `no` is a language.
_TEXT_KEYS = {*_TEXT, *_DATA, "path", "name", "subset", "split", "revision", "columns"}
# Beside YAMLError: what PyYAML lets through where dates, numbers or tags are none, `!!timestamp x` for one.
_CONSTRUCTORS_RAISE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def parse_config(arguments: list[str] | None = None, description: str = "") -> TrainConfig:
    """The recipe named first (the image world's by default), with the flags behind it put over it; see
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
    known = {flag(word + name) for name in flags | plan for word in ("", "no_")} | {"--help", "--version"}
    if unknown := sorted(set(given) - known):
        near = did_you_mean(unknown[0], known)
        _leave(f"unknown flag {', '.join(unknown)}{near}; --help lists them all")
    try:
        settings = read_recipe(recipe)
        # jsonargparse would copy a whole list once for each of its entries, and once more for what is in it;
        # and read text as YAML, aliases of aliases too, to find that it is text.
        past = {name: settings[name] for name in _DATA if name in settings}
        past |= {name: settings[name] for name in _TEXT if isinstance(settings.get(name), str)}
        settings = {name: value for name, value in settings.items() if name not in past}
        parser = _parser(description)
        parsed = parser.parse_object(settings)  # refuses values of the wrong type, as it does those of flags
        if arguments:
            parser.set_defaults(**settings)
            parsed = parser.parse_args(arguments)
        values = {name: parsed[name] for name in flags}
        values |= {name: value for name, value in past.items() if flag(name) not in given}
        for name in (*_DATA, *_TEXT):
            if isinstance(value := values[name], str) and len(value) > _MOST_LETTERS:
                raise ValueError(
                    f"{flag(name)}: expected at most {_MOST_LETTERS} characters, got {len(value)}"
                )
        if sum(_check_values(flag(name), values[name]) for name in _DATA) > _MOST_VALUES - 10 * len(flags):
            raise ValueError(
                f"--data, --eval-data: expected at most {_MOST_VALUES} values with all others, got more"
            )
        config = TrainConfig(**values)
        return config, PlanOptions(**{name: parsed[name] for name in plan})
    except (ValueError, KeyError, ArgumentError) as error:
        _leave(one_line(error))


def parse_command(
    arguments: list[str] | None = None, description: str = ""
) -> tuple[TrainConfig, PlanOptions]:
    """`parse_arguments`, and a look at what the configuration names: device, models, rows and output folder.

    None of this needs torch: what is wrong is told at once, in one sentence, and the process leaves with
    status 2. Of several ranks each looks later, where all of them hear of what one lacks.
    """
    config, options = parse_arguments(arguments, description)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return config, options
    try:
        check_device(config.device)
        sources = [*filter(None, (config.init_from, config.vision_from, config.text_from))]
        for source in sources:
            resolve_source(source)  # a slip that can be seen here, before the Hub is asked for any
        if not options.plan:
            check_replaceable(Path(config.output))
            for data in (config.data, config.eval_data):
                if data and data != SHAPES:
                    for entry in dataset_entries(data):
                        check_rows_path(str(entry.get("path", "")))
            if sources:
                from models.checkpoints.hub import check_has_config  # takes 0.2 s to import

                for source in sources:
                    check_has_config(source)
    except (ValueError, OSError) as error:
        _leave(one_line(error))
    return config, options


def read_recipe(path: str | Path) -> dict[str, Any]:
    """A recipe's keys and values, the keys known.

    Raises:
        ValueError: no such file, too large, not YAML, too many values, a key that is unknown, given twice or
            without a value, a value that only YAML has: one sentence.
    """
    try:
        recipe = yaml.load(_text_of(Path(path)), _Loader) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} cannot be read: {error}{nearest_file(path)}") from None
    except RecursionError:
        raise ValueError(f"recipe {path} is nested too deeply") from None
    except _Refused as error:
        raise ValueError(f"recipe {path}: {error}") from None
    except (yaml.YAMLError, *_CONSTRUCTORS_RAISE) as error:
        raise ValueError(f"recipe {path} is no YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected keys and values, got {type(recipe).__name__}")
    if recipe.get("resume") == "auto":
        recipe["resume"] = True
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    if unknown := sorted(str(key) for key in recipe if key not in known):
        near = did_you_mean(unknown[0], known)
        raise ValueError(
            f"recipe {path}: unknown key {', '.join(unknown)}{near}; train.py --help lists them all"
        )
    if empty := [key for key, value in recipe.items() if value is None]:
        raise ValueError(
            f"recipe {path}: no value for {', '.join(empty)}; leave out what is to be its default"
        )
    for key, value in recipe.items():
        if isinstance(value, str) and key not in (*_DATA, *_TEXT) and len(value) > _MOST_WRITTEN:
            raise ValueError(
                f"recipe {path}: {key}: expected at most {_MOST_WRITTEN} characters, got {len(value)}"
            )
        _check_values(f"recipe {path}: {key}", value)
    for key in _DATA:
        value = recipe.get(key, "")
        if not (
            isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, dict) for v in value))
        ):
            raise ValueError(
                f"recipe {path}: {key}: expected a path, or a list of datasets with keys and values, "
                f"got {value!r:.80}"
            )
    return recipe


class _Refused(Exception):
    """What is wrong with a recipe that can be read, or that is YAML."""


def _text_of(path: Path) -> str:
    """Raises OSError, UnicodeDecodeError, and _Refused for what has no end or too much of it: a device would
    be read until memory ends, a pipe waited for, unless it is open already, as `<(...)` is."""
    mode = path.stat().st_mode
    is_open = stat.S_ISFIFO(mode) and path.parent.name == "fd"
    if not (stat.S_ISREG(mode) or is_open):
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise _Refused(f"expected a file, got {kind}; save it as one")
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise _Refused(f"expected at most {_MOST_BYTES} bytes, got more")
    return raw.decode("utf-8")


def _resolvers(dates: bool) -> dict[str, list[tuple[str, re.Pattern]]]:
    """YAML's rules of what plain text is, with 1e-3 and 1e5 as the numbers that they are to everyone else."""
    made = {}
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items():
        made[first] = [rule for rule in rules if dates or rule[0] != "tag:yaml.org,2002:timestamp"]
    for first in "-+.0123456789":
        made[first] = [("tag:yaml.org,2002:float", _EXPONENT), *made.get(first, [])]
    return made


class _Dumper(yaml.SafeDumper):
    """Puts quotes round text that would be read as a number or as a date."""

    yaml_implicit_resolvers = _resolvers(dates=True)


class _Loader(yaml.SafeLoader):
    """Counts values before any is made: a few hundred bytes of aliases, of merged keys too, can stand for
    billions. Dates are text, as they are on the command line, and so are the values of `_TEXT_KEYS`. A key
    that is merged (`<<`) gives way to one of the same name, but none is given twice.

    Raises:
        _Refused: more than `_MOST_VALUES`, aliases written out, a value that holds itself, a number of more
            than `_MOST_DIGITS`, or a key given twice.
    """

    yaml_implicit_resolvers = _resolvers(dates=False)

    def __init__(self, stream: str):
        super().__init__(stream)
        self._sizes: dict[int, int] = {}  # id of a node that is whole → its values, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias:
            if id(node) not in self._sizes:
                raise _Refused("expected values that do not hold themselves")
            return node
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        if isinstance(node, yaml.CollectionNode):
            inside = [one for part in node.value for one in (part if isinstance(part, tuple) else [part])]
            size = 1 + sum(self._sizes[id(one)] for one in inside)
        else:  # long text counts as many
            size = 1 + len(node.value) // 64
            if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                raise _Refused(
                    f"expected numbers of at most {_MOST_DIGITS} characters, got {len(node.value)}"
                )
        self._sizes[id(node)] = size
        if isinstance(node, yaml.MappingNode):
            node.value = [(key, _as_text(value) if _is_text_key(key) else value) for key, value in node.value]
        if max(size, len(self._sizes)) > _MOST_VALUES:
            raise _Refused(f"expected at most {_MOST_VALUES} values, got more")
        return node


def _is_text_key(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value in _TEXT_KEYS


def _as_text(value: yaml.Node) -> yaml.Node:
    """What was written, in place of a number or a truth; of a mapping, its values."""
    if isinstance(value, yaml.MappingNode):
        value.value = [(key, _as_text(inner)) for key, inner in value.value]
    if not isinstance(value, yaml.ScalarNode) or value.tag not in (*_NUMBERS, "tag:yaml.org,2002:bool"):
        return value
    return yaml.ScalarNode("tag:yaml.org,2002:str", value.value, value.start_mark, value.end_mark)


def _check_keys(node: yaml.MappingNode) -> None:
    """Raises _Refused for one that is given twice: YAML's libraries take the last."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise _Refused(
                    f"expected each key once, got {key.value:.80} in line {lines[name]}, and again in {line}"
                )
            lines[name] = line


def _check_values(name: str, value: Any) -> int:
    """How many there are.

    Raises:
        ValueError: for what run.yaml would bring back as another value, or not at all: sets, pairs, bytes and
            dates of YAML's tags, huge numbers, keys that are no text.
    """
    waiting, count = [value], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            if odd := [key for key in one if not isinstance(key, str)]:
                raise ValueError(
                    f"{name}: expected text as keys, got {type(odd[0]).__name__}; put it into quotes"
                )
            waiting += one.values()
            count += len(one)
        elif isinstance(one, int) and not -_LARGEST <= one <= _LARGEST:
            raise ValueError(f"{name}: expected whole numbers of at most 64 bits, got a larger one")
        elif one is not None and not isinstance(one, str | int | float):
            raise ValueError(
                f"{name}: expected text, numbers, true, false, lists, and keys with values, "
                f"got {type(one).__name__}"
            )
        elif isinstance(one, str):
            count += len(one) // 64
    return count


class _Datasets:
    """What `--data` of the command line says: a list of datasets in YAML or JSON, by a recipe's rules; else a
    path."""

    def __repr__(self) -> str:  # in --help
        return "str, or a list of dict"

    def __call__(self, text: str) -> Data:
        try:
            read = yaml.load(text, _Loader) if text.lstrip().startswith("[") else None
        except _Refused as error:
            raise ArgumentTypeError(str(error)) from None
        except (yaml.YAMLError, RecursionError, *_CONSTRUCTORS_RAISE):
            return text
        return read if isinstance(read, list) and all(isinstance(one, dict) for one in read) else text


def _without_auto(arguments: list[str]) -> list[str]:
    """`--resume auto`, as other trainers have it, as the switch that it is here."""
    plain = ["--resume" if argument == "--resume=auto" else argument for argument in arguments]
    return [one for before, one in zip(["", *plain], plain) if (before, one) != ("--resume", "auto")]


def write_run(config: TrainConfig, folder: Path) -> None:
    """The resolved configuration as a recipe, run.yaml: `python train.py folder/run.yaml` is the same run.

    Raises:
        ValueError: it would be too long to be read again.
    """
    raw = yaml.dump(config.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode("utf-8")
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{RUN_FILE}: expected settings of at most {_MOST_BYTES} bytes, got {len(raw)}")
    with replacing(folder / RUN_FILE) as temporary:
        temporary.write_bytes(raw)


def _parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [RECIPE.yaml] [flags]",
        description=description,
        exit_on_error=False,
        version=f"(Ocelli) {__version__}",
    )
    for described in (TrainConfig, PlanOptions):
        types = typing.get_type_hints(described)
        for item in dataclasses.fields(described):
            kind: type | UnionType = types[item.name]
            name, options = flag(item.name), {"default": item.default, "help": item.metadata["help"]}
            if item.name in _DATA:
                parser.add_argument(name, type=_Datasets(), **options)
            elif kind is bool:
                parser.add_argument(name, action=ActionYesNo(yes_prefix="", no_prefix="no-"), **options)
            else:
                parser.add_argument(name, type=kind, **options)
    return parser


def _leave(sentence: str) -> NoReturn:
    print(f"train.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)
