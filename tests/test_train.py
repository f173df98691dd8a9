"""train.py: recipes, freezing, adapters, the image world end to end, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import train
from tests.runs import SETTINGS, curve, flags, tiny_checkpoint, write_rows
from training.config import TrainConfig
from training.metrics import read_metrics
from training.recipe import parse_config, read_recipe, write_run
from training.state import FOLDER, states

RECIPES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
# An image-world run of three steps of each stage.
SMALL = {
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "pictures": 18,
    "vision_pictures": 12,
    "vision_batch_size": 4,
    "batch_size": 2,
    "log_every": 1,
    "eval_every": 3,
    "eval_pictures": 2,
    "eval_questions": 10,
    "save_every": 4,
    "vision_layers": 1,
    "text_layers": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    tiny_checkpoint(folder / "tiny")
    write_rows(folder / "rows.jsonl", 12)
    return folder


def settings(base, output: str, **more) -> list[str]:
    made = {"init_from": str(base / "tiny"), "data": str(base / "rows.jsonl"), "output": str(base / output)}
    return flags(**(SETTINGS | made | {"batch_size": 4, "steps": 3} | more))


def refused(arguments: list[str], capsys) -> str:
    """The one sentence with which train.py refuses."""
    with pytest.raises(SystemExit) as left:
        train.main(arguments)
    assert left.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: error:")]
    assert len(said) == 1
    return said[0]


# ---------------------------------------------------------------------------------------------- recipes
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse(recipe):
    config = parse_config([str(recipe), "--seed", "5"])
    assert config.seed == 5 and config.output == f"runs/{recipe.stem}"


def test_no_argument_is_the_shapes_world():
    assert parse_config([]) == TrainConfig()


def test_resume_auto(tmp_path, capsys):
    for arguments, resume in (
        (["--resume", "auto", "--seed", "3"], True),
        (["--no-resume", "--resume=auto"], True),
        (["--resume"], True),
        (["--no-resume"], False),
        (["--resume", "auto", "--no-resume"], False),
    ):
        assert parse_config(arguments).resume is resume, arguments
    (tmp_path / "recipe.yaml").write_text("resume: auto")
    assert parse_config([str(tmp_path / "recipe.yaml")]).resume is True
    assert "never" in refused(["--resume", "never"], capsys)
    assert "auto" in refused(["--device", "cpu", "auto"], capsys)
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    assert "--resume auto" in " ".join(capsys.readouterr().out.split())


def test_the_resolved_config_is_a_recipe(base):
    train.main(settings(base, "resolved", max_tiles=3))
    config = parse_config([str(base / "resolved" / "run.yaml")])
    assert config.max_tiles == 3 and config.init_from == str(base / "tiny")
    assert read_recipe(base / "resolved" / "run.yaml") == config.to_dict()


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        ("learning_rate: 1", [], "unknown key learning_rate"),
        ("- a list", [], "expected keys and values, got list"),
        ("a: b: c", [], "is no YAML"),
        ("lr: fast", [], "lr"),
        ("", ["--learning-rate", "1"], "unknown flag --learning-rate"),
        ("", ["--batch-size", "0"], "--batch-size: expected from 1 to 65536, got 0"),
        ("", ["--schedule", "step"], "--schedule: expected wsd, cosine, got 'step'"),
        ("", ["--data", "rows.jsonl"], "rows need a model to start from"),
        ("lora_rank: 4", [], "--lora-rank: not for the image world"),
    ],
)
def test_bad_settings(tmp_path, capsys, text, arguments, message):
    (tmp_path / "recipe.yaml").write_text(text)
    assert message in refused([str(tmp_path / "recipe.yaml"), *arguments], capsys)


@pytest.mark.parametrize(
    "text",
    [
        "7e8d9f0",
        "7e8",
        "1234567",
        "0123456",
        "0o17",
        "0x1f",
        "1_000",
        "12:30:45",
        "1e400",
        "no",
        ".5e3",
        "9" * 40,
    ],
)
def test_text_that_looks_like_something_else_stays_text(tmp_path, text):
    """The beginning of a commit, a subset named after Norway."""
    entry = f"{{path: a/b, revision: {text}, subset: {text}}}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"init_from: {text}\noutput: &o {text}\nsteps: 5\ndata:\n- {entry}\n")
    for config in (
        parse_config([str(recipe)]),
        parse_config(["--init-from", text, "--output", text, "--data", f"[{entry}]"]),
    ):
        (data,) = config.data
        assert (data["revision"], data["subset"], config.init_from, config.output) == (text,) * 4
        write_run(config, tmp_path)
        assert parse_config([str(tmp_path / "run.yaml")]) == config


@pytest.mark.parametrize("text", ["no", "7e8", "12"])
def test_a_path_of_rows_and_the_names_of_columns_stay_text(tmp_path, text):
    recipe = tmp_path / "recipe.yaml"
    entry = f"{{path: a/b, weight: 2, columns: {{question: {text}}}}}"
    recipe.write_text(f"init_from: a/b\ndata: {text}\neval_data:\n- {entry}\n")
    config = parse_config([str(recipe)])
    assert config.data == text
    assert config.eval_data == [{"path": "a/b", "weight": 2, "columns": {"question": text}}]


def test_a_text_beside_the_same_number(tmp_path):
    """An alias is text where a text is wanted, and a number elsewhere."""
    (tmp_path / "recipe.yaml").write_text("output: &n 17\nsteps: *n\nimages: 0\nvision_images: 0\n")
    config = parse_config([str(tmp_path / "recipe.yaml")])
    assert (config.output, config.steps) == ("17", 17)


def test_no_recipe_there(capsys):
    assert "nowhere.yaml cannot be read" in refused(["nowhere.yaml"], capsys)


# ------------------------------------------------------------------------------------------------- data
def test_bad_data_and_models(base, capsys):
    (base / "columns.jsonl").write_text('{"prompt": "a", "reply": "b"}\n')
    (base / "empty.jsonl").write_text("")
    said = refused(settings(base, "bad", data=str(base / "columns.jsonl")), capsys)
    assert "prompt" in said and "reply" in said
    assert "has no rows" in refused(settings(base, "bad", data=str(base / "empty.jsonl")), capsys)
    assert "no such file" in refused(settings(base, "bad", data=str(base / "nowhere.jsonl")), capsys)
    assert "rows.jsonl" in refused(settings(base, "rows.jsonl/run"), capsys)
    assert "context" in refused(settings(base, "bad", sequence_length=4096), capsys)
    assert "not installed" in refused(settings(base, "bad", tracker="trackio"), capsys)
    (base / "other").mkdir()
    (base / "other" / "config.json").write_text('{"model_type": "bert"}')
    said = refused(settings(base, "bad", init_from=str(base / "other")), capsys)
    assert "other: unsupported architecture (model_type 'bert'); supported are" in said
    short = flags(**(SMALL | {"sequence_length": 64, "output": str(base / "short")}))
    assert "--sequence-length: expected more than the 70 positions of an image" in refused(short, capsys)


def test_a_loss_that_is_not_finite(base, capsys, monkeypatch):
    def broken(task, wrapped, batches, step, *rest):
        total, logged = backward(task, wrapped, batches, step, *rest)
        if step == 1:
            next(p for p in task.module.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return total, logged

    backward = train.backward
    monkeypatch.setattr(train, "backward", broken)
    said = refused(settings(base, "nan"), capsys)
    assert "step 1: the gradient is nan; its samples: " in said and "rows.jsonl" in said
    train.main(settings(base, "skipped", max_skipped=1))
    assert len(curve(base / "skipped")) == 3
    weights = load_file(base / "skipped" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
        None,
    ],
)
def test_too_little_memory_is_one_sentence(base, capsys, monkeypatch, error):
    def fail(*_):
        if error is not None:
            raise error
        torch.empty(2**60, dtype=torch.uint8)  # as a CPU says it

    monkeypatch.setattr(train, "backward", fail)
    said = refused(settings(base, "full"), capsys)
    assert "out of memory: lower --micro-batch-size" in said and "--sequence-length" in said
    assert said.strip().splitlines()[-1].startswith("train.py: error: ") and "Traceback" not in said
    small = flags(**(SMALL | {"output": str(base / "full-shapes")}))
    assert "out of memory: lower --vision-batch-size" in refused(small, capsys)


def test_another_error_of_ours_is_not_taken_for_too_little_memory(base, monkeypatch):
    def fail(*_):
        raise RuntimeError("expected a matrix")

    monkeypatch.setattr(train, "backward", fail)
    with pytest.raises(RuntimeError, match="a matrix"):
        train.main(settings(base, "full"))


# ------------------------------------------------------------------------------------------------ parts
def test_rate_0_freezes(base):
    train.main(settings(base, "frozen", vision_lr=0.0, projector_lr=0.0, eval_data=str(base / "rows.jsonl")))
    before, after = (
        load_file(base / "tiny" / "model.safetensors"),
        load_file(base / "frozen" / "model.safetensors"),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("text_model" in name or "lm_head" in name for name in changed)
    rows = [json.loads(line) for line in (base / "frozen" / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_loss" in row for row in rows)


@pytest.mark.parametrize(
    "change", [{"activation_checkpointing": True}, {"packing": False, "epochs": 1, "steps": 0}]
)
def test_other_ways(base, change):
    train.main(settings(base, "ways", resume=False, **change))
    assert len(curve(base / "ways")) == 3


def test_data_that_end_early_are_looked_at_too(base, capsys):
    """Behind the last step of a run with fewer than it asked for: its line, scores, a card that has them."""
    more = {"steps": 1000, "epochs": 1, "save_every": 1, "log_every": 100, "eval_every": 100}
    train.main(settings(base, "early", eval_data=str(base / "rows.jsonl"), **more))
    logged, scores = read_metrics(base / "early" / "metrics.jsonl")
    assert logged["step"] == scores["step"] > 1 and logged["loss"] > 0 and scores["eval_loss"] > 0
    assert f"{scores['eval_loss']:.3f}" in (base / "early" / "README.md").read_text()
    assert states(base / "early" / FOLDER)[-1].name == f"step-{logged['step']:08d}"
    assert "best/" not in capsys.readouterr().out


def test_a_short_run_shows_its_loss(base, capsys):
    """Shorter than --log-every; there is no plot before there is a line, and that is no failure."""
    train.main(settings(base, "short", steps=3, log_every=20, eval_every=1))
    (row,) = read_metrics(base / "short" / "metrics.jsonl")
    assert row["step"] == 3 and row["loss"] > 0
    said = capsys.readouterr().out
    assert "plot could not be written" not in said and (base / "short" / "plot.svg").exists()
    assert "no held-out rows are scored (--eval-data): no model is kept in best/" in said


def test_adapters(base):
    """Saved as a standard adapter that opens on the transformers model, and merged beside it."""
    train.main(settings(base, "lora", lora_rank=4, lora_alpha=8.0, lr=1e-2, steps=4))
    start = AutoModelForImageTextToText.from_pretrained(base / "tiny").eval()
    merged = AutoModelForImageTextToText.from_pretrained(base / "lora").eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain, expected = start(input_ids=ids).logits, merged(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(start, base / "lora" / "adapter").eval()
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert (plain - expected).abs().max() > 1e-3
        torch.testing.assert_close(
            adapted.merge_and_unload()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4
        )


def test_the_shapes_world_end_to_end(tmp_path):
    train.main(flags(**SMALL, output=str(tmp_path / "shapes")))
    rows = [json.loads(line) for line in (tmp_path / "shapes" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "dense_loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert ["loss" in row for row in steps] == [False] * 3 + [True] * 3
    assert "eval_accuracy" in rows[-1]
    AutoModelForImageTextToText.from_pretrained(tmp_path / "shapes")


def test_asking_the_model_now_and_then_changes_nothing(tmp_path, capsys):
    """The same weights to the bit, however often it was asked. Sample answers take no scores; best/ does, and
    it is said that there are none."""
    asked, unasked = tmp_path / "asked", tmp_path / "unasked"
    train.main(flags(**SMALL | {"eval_every": 1}, output=str(asked)))
    assert (asked / "best").exists() and "best/" not in capsys.readouterr().out
    none = {"eval_questions": 0, "eval_pictures": 0}
    train.main(flags(**SMALL | {"eval_every": 1000} | none, output=str(unasked)))
    said = capsys.readouterr().out
    assert "--eval-questions 0 leaves answers without a score: no model is kept in best/" in said
    assert not (unasked / "best").exists() and [p.name for p in (unasked / "samples").iterdir()] == [
        "step-00000006"
    ]
    weights = [load_file(folder / "model.safetensors") for folder in (asked, unasked)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    rows = [json.loads(line) for line in (asked / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)  # once there is a language model


def test_rows_are_answered_where_there_is_a_metric(base, capsys):
    held_out = {"eval_data": str(base / "rows.jsonl"), "eval_metric": "exact_match", "eval_questions": 6}
    train.main(settings(base, "asked", **held_out))
    rows = [json.loads(line) for line in (base / "asked" / "metrics.jsonl").read_text().splitlines()]
    assert {"eval_loss", "eval_accuracy"} <= rows[-1].keys()
    said = refused(settings(base, "asked", **held_out | {"eval_metric": "exact_mach"}), capsys)
    assert "unknown metric 'exact_mach'; expected exact_match" in said
    said = refused(settings(base, "asked", eval_metric="exact_match"), capsys)
    assert "--eval-metric: expected rows with --eval-data" in said
