"""What train.py says, in one sentence, to numbers out of bounds and to recipes that are none."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

import train
from data.tokenizer import SPECIAL_TOKENS
from training.config import TrainConfig, flag
from training.recipe import parse_arguments, parse_config, read_recipe, write_run
from training.run_plan import PlanOptions

NUMBERS = {
    item.name: item.type
    for described in (TrainConfig, PlanOptions)
    for item in dataclasses.fields(described)
    if item.type in ("int", "float")
}


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as left:
        parse_arguments(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("train.py: error: ") and said.count("\n") == 1
    return said


# ---------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_without_bounds(name, capsys):
    values = ["-2", "-.inf", ".nan", "1" + "0" * 18, "1" + "0" * 30, ".inf", "1e400"]
    if NUMBERS[name] == "int":
        values = [value for value in values if value.strip("-").isdecimal()]
    if name == "seed":
        values.remove("1" + "0" * 18)
    if name == "grad_clip":  # beyond every norm: nothing is clipped
        values = values[:3]
    for value in values:
        said = refused([f"{flag(name)}={value}"], capsys)
        assert f"{flag(name)}: expected " in said and ", got " in said, said


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400"])
def test_a_recipe_holds_no_number_that_is_not_finite(value, tmp_path, capsys):
    for name in ("lr", "weight_decay", "dense_weight", "fact_weight", "lora_alpha", "ema"):
        (tmp_path / "recipe.yaml").write_text(f"{name}: {value}")
        assert f"{flag(name)}: expected " in refused([str(tmp_path / "recipe.yaml")], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--patch-size 0", "--patch-size: expected from 1 to 512, got 0"),
        ("--scale-factor 0", "--scale-factor: expected from 1 to 64, got 0"),
        ("--lora-rank 1000000000", "--lora-rank: expected from 0 to 1024, got 1000000000"),
        ("--threads 100000", "--threads: expected from 0 to 512, got 100000"),
        ("--seed 99999999999999999999", "--seed: expected from 0 to 9223372036854775807, got 9999999999999"),
        ("--beta2 1", "--beta2: expected 0 or more, less than 1, got 1.0"),
        ("--lora-dropout 1.5", "--lora-dropout: expected 0 or more, less than 1, got 1.5"),
        ("--vision-matrix-lr -3", "--vision-matrix-lr: expected from 0 to 100, got -3.0"),
        ("--vision-lr -3", "--vision-lr: expected from 0 to 100, or -1 for --lr's, got -3.0"),
        ("--curriculum-pictures -4", "--curriculum-pictures: expected from 0 to 1000000000, got -4"),
        ("--image-size 10", "--image-size: expected a multiple of --patch-size 8, got 10"),
        ("--image-size 512 --patch-size 4", "--patch-size: expected at most 64 patches a side"),
        ("--scale-factor 3", "--scale-factor: expected a divisor of 8, the patches a side"),
        ("--vision-width 130", "--vision-width: expected a multiple of --vision-heads 4, got 130"),
        ("--text-heads 7", "--text-heads: expected a multiple of --text-kv-heads 2, got 7"),
        ("--text-width 18", "--text-width: expected 6 heads (--text-heads) of an even width"),
        ("--lr 0", "--lr: expected something that learns, got a rate of 0 for all of it"),
        ("--vision-lr 0", "--vision-lr: expected more than 0, since at first the vision tower trains alone"),
        ("--pictures 0", "--vision-pictures: expected fewer than --pictures (0), got 64000"),
        ("--plan-tiles -3", "--plan-tiles: expected from 0 to 65536, or -1 for an image of 4:3, got -3.0"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(arguments, message, capsys):
    assert message in refused(arguments.split(), capsys)


def test_numbers_at_their_bounds():
    assert parse_config(["--lr", "0", "--vision-lr", "1e-3"]).rates["vision_model"] == 1e-3
    assert parse_config(["--vision-lr", "0", "--vision-pictures", "0"]).vision_steps == 0
    assert parse_config(["--seed", str(2**63 - 1), "--threads", "512", "--vision-lr=-1"]).threads == 512
    assert TrainConfig(vocab_size=len(SPECIAL_TOKENS) + 256).vocab_size == 299
    assert TrainConfig(pictures=0, steps=7).shape_steps == 7  # as its help says
    # A model that is there brings its sizes.
    assert TrainConfig(init_from="x", scale_factor=3).scale_factor == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sequence-length 4096", "--sequence-length: expected at most 2048, the model's context"),
        ("--init-from checkpoints/ocelli-shapes --image-size 32", "--image-size: expected 64, as the model"),
        ("--init-from checkpoints/ocelli-shapes --patch-size 16", "--patch-size: expected 8, as the model"),
    ],
)  # fmt: skip
def test_images_that_the_model_does_not_take(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        train.main([*arguments.split(), "--device", "cpu", "--output", str(tmp_path / "run")])
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- recipes
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 5\nlr: 1\nsteps: 7", "expected each key once, got steps in line 1, and again in 3"),
        ("steps: 5\n'steps': 5", "expected each key once, got steps in line 1, and again in 2"),
        ("data:\n- path: a\n  path: b", "expected each key once, got path in line 2, and again in 3"),
        ("data: [{path: a, columns: {question: q, question: q}}]", "got question in line 1, and again in 1"),
        ("? &a steps\n: 5\n? *a\n: 7", "expected each key once, got steps"),
        ("<<: {steps: 5}\n<<: {steps: 7}", "expected each key once, got << in line 1, and again in 2"),
        ("steps: 1" + ":1" * 300_000, "expected numbers of at most 5000 characters, got 600001"),
        ("steps: '1" + ":1" * 1_000 + "'", "steps: expected at most 64 characters, got 2001"),
        ("output: " + "x" * 5_000, "--output: expected at most 4096 characters, got 5000"),
        ("# nothing\n" * 200_000, "expected at most 1048576 bytes, got more"),
    ],
)
def test_recipes_that_are_refused(text, said, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(text)
    assert said in refused([str(tmp_path / "recipe.yaml")], capsys)
    assert said in refused([str(tmp_path / "recipe.yaml"), "--plan"], capsys)


def test_merged_keys_give_way(tmp_path):
    (tmp_path / "recipe.yaml").write_text("<<: [{steps: 5, lr: 1.0}, {steps: 6}]\nsteps: 7")
    assert read_recipe(tmp_path / "recipe.yaml") == {"steps": 7, "lr": 1.0}


def test_a_recipe_is_a_file(tmp_path, capsys):
    """A pipe was waited for, and a device read until memory ended; what is open already ends."""
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (("/dev/zero", "a pipe or a device"), (str(tmp_path / "pipe"), "a pipe or a device")):
        assert f"recipe {path}: expected a file, got {kind}; save it as one" in refused([path], capsys)
    assert "expected a file, got a folder" in refused([str(tmp_path)], capsys)
    reading, writing = os.pipe()  # what <(...) of a shell is
    try:
        os.write(writing, b"steps: 7")
        os.close(writing)
        assert parse_config([f"/dev/fd/{reading}"]).steps == 7
    finally:
        os.close(reading)


def test_text_is_not_read_as_yaml(tmp_path):
    """Aliases of aliases in quotes stood for a million values, which took seconds."""
    lists = ["a: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    text = "{" + ", ".join(lists) + "}"
    (tmp_path / "recipe.yaml").write_text(f'init_from: x\ndata: "[{text}]"\noutput: "{text}"')
    before = time.process_time()
    config = parse_config([str(tmp_path / "recipe.yaml")])
    assert (config.output, config.data) == (text, f"[{text}]") and time.process_time() - before < 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[{path: a, path: b}]", "--data: expected each key once, got path in line 1, and again in 1"),
        ("[{path: a, columns: &a [*a]}]", "--data: expected values that do not hold themselves"),
    ],
)
def test_datasets_of_the_command_line(data, said, capsys):
    assert said in refused(["--init-from", "x", "--data", data], capsys)
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    assert "list of datasets (type: str, or a list of dict" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("data", ["[ab].jsonl", "[a]", "[" * 4_000, "{path: a}"])
def test_paths_that_look_like_lists(data):
    assert parse_config(["--init-from", "x", "--data", data]).data == data


def test_settings_that_run_yaml_could_not_hold(tmp_path, capsys):
    """PyYAML's parser in C overran its stack with the first."""
    said = refused(["--init-from", "x", "--data", "[" * 60_000], capsys)
    assert "--data: expected at most 4096 characters, got 60000" in said
    long = TrainConfig(init_from="x", data=[{"path": "ä" * 2**20}])
    with pytest.raises(ValueError, match=r"run.yaml: expected settings of at most 1048576 bytes, got 2\d{6}"):
        write_run(long, tmp_path)
    assert not any(tmp_path.iterdir())
