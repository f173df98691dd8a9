"""Recipes: the repository's own and one with datasets, with changed keys, values and bytes, as train.py reads
them. A refusal is one sentence on stderr and status 2; what is taken must be written and read back alike."""

from __future__ import annotations

import contextlib
import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.robustness.judging import Wrong
from tests.robustness.mutations import ODD_VALUES, deep_json, generators, mutate_bytes, mutate_json
from training.config import TrainConfig, parse_config, write_run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DATASETS = """
output: runs/mine
init_from: runs/shapes
data:
  - {path: rows.jsonl, weight: 2, columns: {question: query}, min_ratings: {relevance: 3}}
  - {path: HuggingFaceM4/the_cauldron, subset: ai2d, streaming: true, weight: 1.5, revision: main}
steps: 100
images: 0
lr: 1e-4
muon: none
packing: false
"""
# What YAML has and JSON has not.
YAML_VALUES = (
    "yes", "~", "0x1F", "0o17", "1_000", "1:30:00", ".inf", "-.inf", ".nan", "2001-12-14", "2001-99-99",
    "!!binary aGk=",
    "!!set {a, b}", "!!python/object/apply:os.system [true]", "&a [*a]", "*missing",
    "<<: {a: 1}", "? [a]\n: b",
    "!!int nothing", "1e999", "9" * 5000, "|\n  text", "'", "[", "{",
    "%TAG", "\t", "--- a\n--- b", "!!timestamp x",
    "0b1111", "!!float .", "!!omap [a: 1]", "= ", "@", "`",
)  # fmt: skip


class Refused(Exception):
    """What train.py says before it leaves."""


REFUSALS = (Refused,)


def inputs() -> st.SearchStrategy[bytes]:
    return generators().map(make)


@cache
def seeds() -> tuple[bytes, ...]:
    return (*(path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))), DATASETS.encode())


@cache
def parsed_seeds() -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load(data) for data in seeds())


def make(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return mutate_bytes(rng, rng.choice(seeds()), seeds())
    if kind < 0.31:
        return rng.choice((deep_json(20_000), deep_json(20_000, "{"), rng.randbytes(50)))
    recipe = dict(rng.choice(parsed_seeds()))
    if kind < 0.6:
        names = list(TrainConfig.__dataclass_fields__)
        for _ in range(rng.choice((1, 1, 2, 4))):
            recipe[rng.choice(names)] = rng.choice(ODD_VALUES)
    elif kind < 0.8:
        changed = mutate_json(rng, recipe)
        return yaml.safe_dump(changed, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    lines = yaml.safe_dump(recipe).splitlines()
    at = rng.randrange(len(lines))
    if kind >= 0.6:
        lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(YAML_VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def opened(folder: Path):
    recipe = folder / "recipe.yaml"

    def run(data: bytes) -> str:
        recipe.write_bytes(data)
        config = parsed(recipe)
        try:
            write_run(config, folder)
        except ValueError as error:  # it would be too long
            raise Refused(str(error)) from None
        if len(data) % 8 == 0:  # it takes as long as reading the recipe
            again = parsed(folder / "run.yaml")
            if repr(again) != repr(config):
                raise Wrong("a run's own run.yaml is read as other settings")
        return "shapes" if config.is_shapes else "rows"

    return run


def parsed(path: Path) -> TrainConfig:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_config([str(path)])
    except SystemExit as error:
        text = said.getvalue()
        if error.code != 2 or not text.startswith("train.py: error: ") or not text.endswith("\n"):
            raise Wrong(f"left with status {error.code} and {text!r}") from error
        raise Refused(text[:-1]) from None
