"""Recipes and flags of train.py: what they mean, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import islice
from pathlib import Path

import pytest

from data.images import load_image
from recipes import flags
from tests.runs import refused
from training.config import PlanOptions, TrainConfig, flag, parse_arguments, write_run

PLAIN = ["--init-from", "x", "--data", "y"]
RECIPES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
NUMBERS = {
    item.name: item.type
    for described in (TrainConfig, PlanOptions)
    for item in dataclasses.fields(described)
    if item.type in ("int", "float")
}


def parse(*arguments: str) -> TrainConfig:
    return parse_arguments(list(arguments))[0]


def refusal(capsys, arguments: list[str]) -> str:
    return refused(capsys, arguments, parse_arguments)


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse_and_come_back(recipe, tmp_path):
    config = parse(str(recipe), "--seed", "5")
    assert config.seed == 5 and config.output == f"runs/{recipe.stem}"
    write_run(config, tmp_path)
    assert parse(str(tmp_path / "run.yaml")) == config


def test_names_of_other_trainers_have_ours_beside_them():
    """Every flag in the table of docs/train-reference.md is one of train.py, and names stand there once."""
    text = (Path(__file__).parent.parent / "docs" / "train-reference.md").read_text(encoding="utf-8")
    section = text.partition("## Names from TRL and LLaMA-Factory\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"
    ]
    assert len(rows) > 30 and all(len(row) == 3 and row[2] for row in rows)
    known = {flag(item.name) for item in dataclasses.fields(TrainConfig)}
    named = re.findall(r"`(--[a-z0-9-]+)", section)
    assert {one.replace("--no-", "--") if one not in known else one for one in named} <= known
    for name in ("per_device_train_batch_size", "lora_rank", "cutoff_len", "val_size", "warmup_ratio"):
        assert section.count(f"`{name}`") == 1


def test_flags_go_over_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 7\nlr: 1e-4\npacking: no\ngrad_clip: 5\nkeep_best: true\n")
    config = parse(str(recipe), "--lr=5e-5", "--no-keep-best", "--data", "[{path: a, weight: 2}]",
                   "--init-from", "x")  # fmt: skip
    assert (config.steps, config.lr, config.grad_clip) == (7, 5e-5, 5.0)
    assert (config.packing, config.keep_best, config.data) == (False, False, [{"path": "a", "weight": 2}])


def test_without_options_the_bundled_rows_are_learnt():
    """Which are those that their recipe draws. Rows of one's own begin at the defaults."""
    config = parse("--epochs", "2")
    assert config.init_from == "checkpoints/ocelli-shapes" and config.epochs == 2
    assert parse(*PLAIN).lr == TrainConfig(init_from="x", data="y").lr and not parse(*PLAIN).holdout
    with open(config.data, encoding="utf-8") as file:
        bundled = [json.loads(line) for line in file]
    assert len(bundled) == flags.ROWS
    for row, drawn in zip(bundled, islice(flags.rows(), 28), strict=False):
        images = [load_image(one.pop("image")) for one in (row, drawn)]
        assert row == drawn and images[0].tobytes() == images[1].tobytes()


# A commit's beginning, a subset named after Norway, what YAML takes for a number, a truth or a time.
@pytest.mark.parametrize("text", ["7e8", "0123456", "12:30:45", "no"])
def test_text_that_looks_like_something_else_stays_text(tmp_path, text):
    entry = f"{{path: a/b, revision: {text}, subset: {text}, columns: {{question: {text}}}, weight: 2}}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"init_from: {text}\noutput: &o {text}\nsteps: 5\neval_data: *o\ndata:\n- {entry}\n")
    for config in (
        parse(str(recipe)),
        parse("--init-from", text, "--output", text, "--data", f"[{entry}]", "--eval-data", text),
    ):
        named = {"revision": text, "subset": text, "columns": {"question": text}}
        assert config.data == [{"path": "a/b", **named, "weight": 2}]
        assert (config.init_from, config.output, config.eval_data) == (text, text, text)
        write_run(config, tmp_path)
        assert parse(str(tmp_path / "run.yaml")) == config


@pytest.mark.parametrize("data", ["[ab].jsonl", "[a]", "[a: b].jsonl"])
def test_paths_that_look_like_lists(data, capsys):
    """And a dataset that is not in a list, or not written as YAML has it."""
    assert parse("--init-from", "x", "--data", data).data == data
    assert parse("--init-from", "x", "--data", "{path: a}").data == [{"path": "a"}]
    asked = "[{path: a, constants: {question: What is it?}}]"
    for wrong in (asked, " " + asked, "[{path: \x07}]"):
        assert "--data" in refusal(capsys, ["--init-from", "x", "--data", wrong])


# -------------------------------------------------------------------------------------------- refusals
@pytest.mark.slow
def test_every_number_has_bounds(capsys):
    for name, kind in NUMBERS.items():
        for value in ("-2", "1" + "0" * 30, *(["nan", "inf"] if kind == "float" else [])):
            assert f"{flag(name)}: expected " in refusal(capsys, [*PLAIN, f"{flag(name)}={value}"])


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("learning_rate: 1", "learning_rate"),
        ("warmup_step: 1", "warmup_steps"),
        ("- a list", "list"),
        ("a: b: c", "YAML"),
        ("lr: 1e-3\nsteps: 2\nlr: 2e-3", "lr"),
        ("lr: fast", "lr"),
        ("steps: 1.5", "steps"),
        ("init_from: [a]", "init_from"),
        ("data: [a]", "data"),
        ("data: {path: a}", "data"),
        ("output: &a [*a]", "output"),
    ],
)
def test_recipes_that_are_refused(recipe, named, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert named in refusal(capsys, [str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("nowhere.yaml", "nowhere.yaml"),
        ("--learning-rate 1", "--learning-rate"),
        ("--stepps 1", "--steps"),
        ("--schedule step", "--schedule"),
        ("--data rows.jsonl", "--init-from"),
        ("--init-from x --vision-from y --text-from z", "--init-from"),
        ("--vision-from x", "--text-from"),
        ("--init-from x --data y --lr 0", "--lr"),
        ("--init-from x --data y --eval-metric exact_match", "--eval-metric"),
        ("--init-from x --data recipes.shapes", "--data"),
        ("--init-from x --data y --lora-rank 2 --vision-lr 1", "--lora-rank"),
    ],
)
def test_flags_that_are_refused(arguments, named, capsys):
    assert named in refusal(capsys, arguments.split())


def test_numbers_at_their_bounds():
    assert parse(*PLAIN, "--seed", str(2**63 - 1), "--threads", "512", "--vision-lr=-1").threads == 512


BACKBONES = "--data y --vision-from v --text-from t --batch-size 8"
ROWS = "--data y --init-from x"
# What each run has in common with all others is left out: these have an effect in some runs only.
WITHOUT_EFFECT = {
    ROWS: ["scale_factor", "lora_alpha", "eval_samples", "eval_questions"],
    f"{ROWS} --no-packing": ["packing_buffer"],
    f"{ROWS} --eval-data z --task preferences": ["eval_questions"],
    f"{ROWS} --muon none": ["matrix_lr"],
    f"{ROWS} --schedule cosine": ["decay_fraction"],
}
WITH_EFFECT = {
    f"{ROWS} --lora-rank 2": ["lora_alpha", "lora_dropout", "lora_targets"],
    f"{ROWS} --eval-data z --eval-metric exact_match": ["eval_questions", "eval_pictures", "eval_samples"],
    f"{ROWS} --eval-data z": ["eval_questions"],
    f"{ROWS} --eval-data z --task preferences --eval-metric anls": ["eval_questions"],
    ROWS: ["matrix_lr", "packing_buffer", "max_tiles", "micro_batch_size", "epochs", "decay_fraction"],
    BACKBONES: ["scale_factor", "longest_edge", "image_tokens"],
}
CASES = {False: WITHOUT_EFFECT, True: WITH_EFFECT}
EFFECTS = [(run, name, has) for has, cases in CASES.items() for run, names in cases.items() for name in names]


def default_of(name: str) -> str | bool | int | float:
    (item,) = (item for item in dataclasses.fields(TrainConfig) if item.name == name)
    return item.default


@pytest.mark.slow(but=32)
@pytest.mark.parametrize(("run", "name", "has"), EFFECTS, ids=str)
def test_a_flag_that_has_no_effect_is_refused(run, name, has, capsys):
    """By its name, also with the value that it has anyway: somebody expects something of it."""
    value = default_of(name) or {"eval_data": "z", "lora_dropout": 0.1}.get(name, 1)
    given = [*run.split(), flag(name), *([] if value is True else [str(value)])]
    if has:
        parse(*given)
    else:
        assert f"{flag(name)}: has no effect" in refusal(capsys, given)


@pytest.mark.parametrize("given", ["--no-packing", "--lora-dropout 0", "--eval-samples 0"])
def test_what_turns_something_off_is_never_refused(given):
    parse(*PLAIN, *given.split())


def test_plans_alone_have_the_flags_of_plans(capsys):
    for item in dataclasses.fields(PlanOptions):
        if item.name not in ("plan", "show"):
            given = [flag(item.name), str(item.default)]
            assert flag(item.name) in refusal(capsys, [*PLAIN, *given])
            assert parse(*PLAIN, "--plan", *given)
