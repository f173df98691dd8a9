"""train.py in one process: what is refused, what ends a run, and everything that shows how a
run goes: metrics, sample answers, the best model, trackers, the upload."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import train
from eval.statistics import score_interval
from models import VisionLanguageModel
from tests.house import edit_json, json_lines
from tests.hub_server import HubServer, point_client_at
from tests.rows import png
from tests.runs import (
    curve,
    flags,
    metrics,
    prepared,
    refused,
    settings_in,
    write_rows,
)
from tests.waiting import PATIENCE
from training import rows as rows_module
from training.config import TrainConfig, parse_arguments
from training.distributed import is_out_of_memory
from training.metrics import Metrics, open_tracker, read_metrics
from training.state import FOLDER, states
from training.task import Answered, Question

ROOT = Path(__file__).resolve().parent.parent
ROWS = {"init_from": "x", "data": "rows.jsonl"}
MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("train"), rows=24)


def settings(base, output: str, **more) -> list[str]:
    return flags(**settings_in(base, output, **({"batch_size": 4, "steps": 3} | more)))


# ---------------------------------------------------------------------------------------------- refusals
def test_bad_data_and_models(base, capsys):
    (base / "columns.jsonl").write_text('{"prompt": "a", "reply": "b"}\n')
    (base / "empty.jsonl").write_text("")
    (base / "other").mkdir()
    (base / "other" / "config.json").write_text('{"model_type": "bert"}')
    for change, named in (
        ({"data": str(base / "columns.jsonl")}, "reply"),
        ({"data": str(base / "empty.jsonl")}, "no rows"),
        ({"data": str(base / "nowhere.jsonl")}, "nowhere.jsonl"),
        ({"output": "rows.jsonl/run"}, "rows.jsonl"),
        ({"sequence_length": 4096}, "--sequence-length"),
        ({"init_from": str(base / "other")}, "bert"),
        *(({"max_pixels": pixels}, "--max-pixels") for pixels in (3, 4096)),
        ({"eval_metric": "exact_mach", "eval_data": str(base / "rows.jsonl")}, "exact_match"),
    ):
        assert named in refused(capsys, settings(base, **({"output": "bad"} | change))), change


# ------------------------------------------------------------------------------------ what ends a run
@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_is_not_finite(base, late, capsys, monkeypatch):
    """Asked for one step late, too, as on CUDA. Nothing is saved before it is known."""

    def broken(self, step, *rest):
        found, self.late = backward(self, step, *rest), late
        checked.append((step, self.unchecked is None))
        if step == 1:
            next(p for p in self.task.module.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return found

    backward, checked, seldom = train.Run.backward, [], {"log_every": 100, "muon": "all", "ema": 0.5}
    monkeypatch.setattr(train.Run, "backward", broken)
    said = refused(capsys, settings(base, f"nan-{late}", save_every=1, **seldom))
    assert "step 1" in said and "nan" in said and "rows " in said
    assert [path.name for path in states(base / f"nan-{late}" / FOLDER)] == ["step-00000001"]
    said = refused(capsys, settings(base, f"nan-{late}", save_every=100, steps=4, resume=False, **seldom))
    assert "step 1" in said and checked[-1] == ((2, False) if late else (1, True))


@pytest.mark.slow
def test_too_little_memory(base, capsys, monkeypatch):
    """Reported with what to lower; an error of ours is not taken for it."""
    monkeypatch.setattr(train.Run, "backward", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    assert "--micro-batch-size" in refused(capsys, settings(base, "full"))
    monkeypatch.setattr(train.Run, "backward", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        train.main(settings(base, "full"))
    for text in ("CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory (12)", "std::bad_alloc"):
        assert is_out_of_memory(RuntimeError(f"CUDA error: {text}"))


# ------------------------------------------------------------------------------------------------- rows
@pytest.mark.slow
@pytest.mark.parametrize("guess", [0.5, 2])
def test_a_schedule_ends_with_the_run_though_its_steps_were_estimated(base, guess, monkeypatch, capsys):
    """Also where the rows fill more or fewer steps: no rate is left high, and no step is left out."""
    monkeypatch.setattr("data.loader._COUNTED", 0)
    counted = rows_module.steps_per_run
    monkeypatch.setattr(rows_module, "steps_per_run", lambda *given: round(guess * counted(*given)))
    train.main(settings(base, f"guess-{guess}", steps=0, epochs=3, schedule="cosine"))
    said, rows = capsys.readouterr().out, metrics(base / f"guess-{guess}", "loss")
    steps = rows[-1]["step"]
    assert "about 3 x" in said and f"steps 0 to {steps}" in said
    rates = [row["lr_language_model"] for row in rows]
    assert rates[-1] < 0.3 * max(rates) and steps >= 3


def test_rate_0_freezes(base):
    more = {"vision_lr": 0.0, "projector_lr": 0.0, "activation_checkpointing": True}
    train.main(settings(base, "frozen", max_tiles=3, **more))
    before, after = (load_file(base / name / MODEL) for name in ("tiny", "frozen"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("text_model" in name or "lm_head" in name for name in changed)
    config, _ = parse_arguments([str(base / "frozen" / "run.yaml")])  # the resolved settings are a recipe
    assert config.max_tiles == 3 and config.init_from == str(base / "tiny")


@pytest.mark.slow
def test_data_that_end_early_are_evaluated_too(base):
    """After the last step of a run with fewer than asked for: its line, scores, and a card that has them."""
    more = {"steps": 1000, "epochs": 1, "save_every": 1000, "log_every": 100, "eval_every": 100}
    more |= {"packing": False, "eval_metric": "exact_match", "eval_questions": 6}
    train.main(settings(base, "early", eval_data=str(base / "rows.jsonl"), **more))
    logged, scores = metrics(base / "early")
    assert logged["step"] == scores["step"] > 1 and logged["loss"] > 0
    assert scores["eval_loss"] > 0 <= scores["eval_accuracy"]
    assert f"{scores['eval_loss']:.3f}" in (base / "early" / "README.md").read_text()
    assert states(base / "early" / FOLDER)[-1].name == f"step-{logged['step']:08d}"


@pytest.mark.slow
@pytest.mark.parametrize(("projector_lr", "tower"), [(-1, ""), (1e-2, "q_proj,fc2")])
def test_adapters(base, projector_lr, tower):
    """Saved as a standard adapter that opens on the transformers model, and merged beside it."""
    of_lora = {"lora_rank": 4, "lora_alpha": 8.0, "projector_lr": projector_lr, "resume": False}
    of_lora |= {"lora_vision_targets": tower} if tower else {}
    train.main(settings(base, "lora", **of_lora, lr=1e-2, steps=4))
    start = AutoModelForImageTextToText.from_pretrained(base / "tiny").eval()
    merged = AutoModelForImageTextToText.from_pretrained(base / "lora").eval()
    before, after = (
        {name: one.clone() for name, one in model.model.vision_model.state_dict().items()}
        for model in (start, merged)
    )
    ids = torch.arange(3, 40)[None]
    ids[:, 1:5] = start.config.image_token_id
    inputs = {"input_ids": ids, "pixel_values": torch.rand(1, 1, 3, 32, 32)}
    with torch.no_grad():
        plain, expected = start(**inputs).logits, merged(**inputs).logits
        learnt = merged.model.connector.modality_projection.proj.weight
        assert torch.equal(learnt, start.model.connector.modality_projection.proj.weight) == (
            projector_lr < 0
        )
        adapted = PeftModel.from_pretrained(start, base / "lora" / "adapter").eval()
        torch.testing.assert_close(adapted(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
        assert (plain - expected).abs().max() > 1e-3
    learnt = [name for name, weight in after.items() if not torch.equal(before[name], weight)]
    adapts = [name for name in after if name.endswith(("q_proj.weight", "fc2.weight"))]
    assert learnt == (adapts if tower else [])


# ---------------------------------------------------------------------------------------- what a run shows
@pytest.fixture(scope="module")
def watched(base):
    # By its name, a dataset has the same order wherever it lies: two of its first five rows have images.
    held_out = [{"path": str(base / "rows.jsonl"), "name": "seen"}]
    more = {"eval_data": held_out, "eval_every": 2, "eval_samples": 5, "steps": 4, "save_every": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.held_out.SLOTS", 8)  # answers that an evaluation before the last asks for
        train.main(settings(base, "watched", **more, eval_questions=20))
    return base / "watched"


@pytest.mark.slow
def test_speed_and_time_left(watched):
    rows = metrics(watched, "loss")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["seconds_left"] == 0
    for row in rows:
        assert row["tokens_per_second"] > 0 and 0 <= row["mfu"] < 1 and row["seconds_left"] >= 0
    for name in ("images_per_second", "mfu"):  # rounded: of a step that was held up for seconds nothing stays
        assert any(row[name] > 0 for row in rows), name


def test_sample_answers_have_their_images(watched):
    for step in (2, 4):
        folder = watched / "samples" / f"step-{step:08d}"
        rows = json_lines(folder / "answers.jsonl")
        assert len(rows) == 5 and all(row["question"] and row["target"] for row in rows)
        assert all(row["stop_reason"] in ("stop", "length") for row in rows)
        shown = [name for row in rows for name in row["pictures"]]
        assert shown and {path.name for path in folder.glob("*.png")} == set(shown)
        assert all(max(Image.open(folder / name).size) <= 512 for name in shown)


def test_a_score_says_of_how_many_it_is(watched):
    """In the metrics and in the card: one batch of answers before the run ends, then all."""
    first, last = metrics(watched, "eval_loss")
    assert [row["eval_exact_match_n"] for row in (first, last)] == [8, 20]
    for row in (first, last):
        assert row["eval_loss_n"] == 24 and row["eval_cut_off_n"] == row["eval_exact_match_n"]
        low, high = row["eval_exact_match_interval"]
        assert (low, high) == score_interval([row["eval_exact_match"]] * row["eval_exact_match_n"])
        assert low <= row["eval_exact_match"] < high
    card = (watched / "README.md").read_text()
    assert f"| exact_match | {last['eval_exact_match']:.3f} | {low:.3f} to {high:.3f} | 20 |" in card


def test_the_best_model_is_kept(watched):
    score = json.loads((watched / "best" / "best.json").read_text())
    seen = {row["step"]: row["eval_loss"] for row in metrics(watched, "eval_loss")}
    assert score["name"] == "eval_loss" and score["value"] == min(seen.values()) == seen[score["step"]]
    AutoModelForImageTextToText.from_pretrained(watched / "best")
    assert f"{seen[score['step']]:.3f}" in (watched / "best" / "README.md").read_text()  # its card's table


@pytest.mark.slow
def test_a_worse_model_is_not_the_best(base, capsys):
    """A rate that ruins the model: what was best before stays, and a run that resumes knows it."""
    arguments = settings(base, "ruined", eval_data=str(base / "rows.jsonl"), eval_every=2, steps=2)
    train.main(arguments)
    before, best = (base / "ruined" / "best" / MODEL).read_bytes(), f"{base / 'ruined' / 'best'} (step 2"
    assert best not in capsys.readouterr().out
    for _ in range(2):  # also of a run that has ended
        train.main([*arguments, "--steps", "4", "--lr", "3.0", "--grad-clip", "0"])
        assert best in capsys.readouterr().out
    rows = metrics(base / "ruined", "eval_loss")
    assert [row["step"] for row in rows] == [2, 4] and rows[1]["eval_loss"] > rows[0]["eval_loss"]
    assert (base / "ruined" / "best" / MODEL).read_bytes() == before
    assert json.loads((base / "ruined" / "best" / "best.json").read_text())["step"] == 2
    train.main([*arguments, "--no-resume", "--no-keep-best"])
    assert not (base / "ruined" / "best").exists()


@pytest.mark.slow
def test_a_run_stops_early(base, capsys):
    """Where evaluations, as shares of the run, get no better; it stays so until told otherwise."""
    more = {"eval_data": str(base / "rows.jsonl"), "eval_every": 0.1, "save_every": 0.2, "steps": 10}
    more |= {"eval_samples": 0, "workers": 0}
    train.main(settings(base, "impatient", **more, patience=2, lr=3.0, grad_clip=0))

    def losses() -> list[float]:
        rows = metrics(base / "impatient", "eval_loss")
        assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
        return [row["eval_loss"] for row in rows]

    first = losses()
    assert len(first) < 10 and first.index(min(first)) == len(first) - 3
    capsys.readouterr()
    train.main(settings(base, "impatient", **more, patience=2))
    assert losses() == first and "--patience" in capsys.readouterr().out
    train.main(settings(base, "impatient", **more, lr=3.0, grad_clip=0))
    assert len(losses()) == 10


@pytest.mark.slow
def test_a_reader_that_is_killed_ends_the_run_with_a_sentence(base, monkeypatch, capsys):
    """The kernel does so where memory is short; and where the data end before the steps, the run says so."""
    whole, killed = train.Run.step, []

    def step(run, *arguments):
        killed.extend(multiprocessing.active_children())
        for child in killed:
            child.kill()
        time.sleep(0.1)  # the signal comes
        return whole(run, *arguments)

    shown = settings(base, "short", steps=99, epochs=1, workers=0)
    train.main(shown)
    assert "--epochs" in capsys.readouterr().out
    monkeypatch.setattr(train.Run, "step", step)
    assert "--workers" in refused(capsys, settings(base, "killed", steps=99, workers=1)) and killed


def test_a_look_at_the_rows(base, tmp_path, capsys):
    """Before a run: which rows cannot be used, how long the others are, and what is learned of some."""
    lines = [{"question": "what is it", "answer": f"answer {i}", "image": "a.png"} for i in range(5)]
    lines += [{"question": "what is it", "answer": "none", "image": "gone.png"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "a.png").write_bytes(png())
    more = {"data": str(tmp_path / "rows.jsonl"), "show": 2}
    train.main(settings(base, str(tmp_path / "run"), **more, longest_edge=64, sequence_length=2048))
    cut = capsys.readouterr().out
    train.main(settings(base, str(tmp_path / "run"), **more))
    shown = capsys.readouterr().out
    most = [int(re.search(r"  tiles .* (\d+)\n", text)[1]) for text in (shown, cut)]
    assert most[0] < most[1]
    assert "gone.png" in shown and "broken image" in shown and not (tmp_path / "run").exists()
    learned = re.findall(r"⟦\s*(.*?)⟧", shown)
    assert len(learned) == 2 and all(re.match(r"answer \d", one) for one in learned)
    lengths = re.search(r"labelled tokens +(\d+) +(\d+) +(\d+)", shown)
    assert lengths and all(0 < int(number) < 20 for number in lengths.groups())
    train.main(settings(base, str(tmp_path / "run"), **more | {"show": 0}))
    none = capsys.readouterr().out
    assert none and shown.startswith(none.rstrip()) and "⟦" not in none and not (tmp_path / "run").exists()
    of_rewards = {"task": "rewards", "packing": False, "rewards": {"exact": 1.0}}
    train.main(settings(base, str(tmp_path / "run"), **more, **of_rewards))
    compared = capsys.readouterr().out
    assert learned[0] in compared and "⟦" not in compared  # the model learns from answers that it samples


@pytest.mark.slow
def test_answers_and_scores_change_nothing(base, watched):
    train.main(settings(base, "alone", eval_samples=0, steps=4, save_every=2))
    assert curve(base / "alone") == curve(watched)
    assert (base / "alone" / MODEL).read_bytes() == (watched / MODEL).read_bytes()


# ------------------------------------------------------------------------------------------------ trackers
ANSWERED = [Answered(Question((Image.new("RGB", (900, 300)),), "what?", "a cat"), "A cat.")]


class Wandb(types.ModuleType):
    """The part of wandb's interface that is used, recorded: the package itself is no dependency."""

    def __init__(self, problem: Exception | None = None):
        super().__init__("wandb")
        self.problem, self.logged, self.finished = problem, [], False

    def init(self, **settings):
        if self.problem is not None:
            raise self.problem
        self.settings = settings

    def log(self, values, step):
        self.logged.append((values, step))

    def finish(self):
        self.finished = True


def test_a_tracker_gets_numbers_and_may_fail(tmp_path, monkeypatch, capsys):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    log = Metrics(TrainConfig(**ROWS, output=str(tmp_path), tracker="wandb"), 4, 0, True)
    log.write({"step": 1, "loss": 2.0, "samples": [["rows", 1]]})
    log.write_samples(1, ANSWERED)
    assert module.settings["project"] == "ocelli" and module.settings["name"] == tmp_path.name
    assert module.logged == [({"loss": 2.0}, 1)] and (tmp_path / "samples/step-00000001/00.png").exists()
    assert ANSWERED[0].right and not Answered(ANSWERED[0].question, "a dog").right
    log.close()
    assert module.finished
    monkeypatch.setattr(module, "log", lambda *_, **__: 1 / 0)
    log.write({"step": 2, "loss": 1.0})
    log.write({"step": 3, "loss": 1.0})
    assert capsys.readouterr().out.count("division by zero") == 1
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2, 3]
    ids = [module.settings["id"]]
    for first in (4, 8, 0):  # a resumed run is the same run, one that starts anew is another
        Metrics(TrainConfig(**ROWS, output=str(tmp_path), tracker="wandb"), 9, first, True)
        ids.append(module.settings["id"])
    assert ids[0] == ids[1] == ids[2] != ids[3] and module.settings["resume"] == "allow"


def test_a_tracker_without_login_or_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(RuntimeError("No API key configured.")))
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for name in ("wandb", "trackio", "tensorboard"):
        with pytest.raises(ValueError, match=f"--tracker {name}"):
            open_tracker(TrainConfig(**ROWS, output=str(tmp_path), tracker=name))


# ------------------------------------------------------------------------------------------------- the Hub
@pytest.mark.slow
def test_a_finished_run_is_pushed(base, tmp_path, monkeypatch, capsys):
    push = {"output": str(tmp_path / "run"), "push_to_hub": "me/tiny", "lora_rank": 2, "steps": 2}
    with HubServer({}, uploads=tmp_path / "hub") as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        train.main(settings(base, **push))
        assert f"{hub.url}/me/tiny/commit/" in capsys.readouterr().out
        there = hub.repos["me/tiny"]
        for name in (MODEL, "README.md", "config.json", "tokenizer.json"):
            assert (there / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
        assert not (there / "run.yaml").exists() and not (there / "state").exists()
        card = ModelCard((there / "README.md").read_text())
        assert card.data.pipeline_tag == "image-text-to-text"
        assert 'from_pretrained("me/tiny")' in card.content and str(base) not in card.content
        VisionLanguageModel.from_pretrained("me/tiny")
        # Started again, on another machine too: nothing trains, and nothing is uploaded.
        shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
        for output in (tmp_path / "run", tmp_path / "elsewhere" / "run"):
            train.main(settings(base, **(push | {"output": str(output)})))
            said = capsys.readouterr().out
            assert "nothing to train" in said
        assert len(hub.commits) == 1
        (there / "README.md").write_text("theirs")  # the Hub's is another one by now
        train.main(settings(base, **push))
        assert f"{hub.url}/me/tiny/commit/" in capsys.readouterr().out and len(hub.commits) == 2
        train.main(settings(base, **(push | {"steps": 3})))
        assert "/commit/" in capsys.readouterr().out and len(curve(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_step_says_how_many_rows_it_learns(base, tmp_path):
    """Of packed sequences more than --batch-size; also over several steps of one line."""
    more = {"steps": 4, "log_every": 2, "batch_size": 2, "sequence_length": 128}
    train.main(settings(base, str(tmp_path / "run"), **more | {"log_every": 1}))
    each = [
        (sum(map(len, row["samples"])), row["samples_per_step"]) for row in metrics(tmp_path / "run", "loss")
    ]
    assert all(count == said for count, said in each)
    assert all(count > 2 for count, _ in each[:2])
    train.main(settings(base, str(tmp_path / "two"), **more))
    two = [row["samples_per_step"] for row in metrics(tmp_path / "two", "loss")]
    assert two == [(each[0][0] + each[1][0]) / 2, (each[2][0] + each[3][0]) / 2]


@pytest.mark.slow
def test_a_share_of_the_rows_is_held_out(base, tmp_path, capsys):
    """No row of it is learnt, and a model does not say that it knows what its base does."""
    write_rows(tmp_path / "rows.jsonl", 20)
    shutil.copytree(base / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "generation_config.json"
    edit_json(path, knows="cats", single_turn=True)
    more = {"data": str(tmp_path / "rows.jsonl"), "init_from": str(tmp_path / "tiny"), "holdout": 0.25}
    more |= {"steps": 0, "epochs": 2, "output": str(tmp_path / "run")}
    scored = {"eval_metric": "exact_match", "eval_every": 1000}
    train.main(settings(base, **more | scored))
    (row,) = metrics(tmp_path / "run", "eval_loss")
    assert 0 < row["eval_loss"] < 20 and "eval_accuracy" in row
    numbers = {
        number for row in metrics(tmp_path / "run", "loss") for one in row["samples"] for _, number in one
    }
    assert numbers == set(range(15))
    said = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert "knows" not in said and said["single_turn"] is True
    for wrong in ({"eval_data": more["data"]}, {"holdout": 1.0}, {"holdout": -0.1}):
        assert "--holdout" in refused(capsys, settings(base, **more | wrong))


def test_boxes_are_scored_in_a_run(base, tmp_path):
    """Rows with boxes, asked for as the dataset's entry says."""
    rows = [{"image": f"{i}.png", "ref": "the block", "bbox": [1, 1, 4, 3]} for i in range(6)]
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(png(seed=i))
    (tmp_path / "boxes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"path": str(tmp_path / "boxes.jsonl"), "boxes": {"corners": True}}]
    more = {"output": str(tmp_path / "run"), "sequence_length": 256, "steps": 1}
    scored = {"eval_metric": "boxes", "eval_questions": 4, "eval_pictures": 0, "eval_samples": 0}
    train.main(settings(base, data=data, eval_data=data, **(more | scored)))
    (row,) = metrics(tmp_path / "run", "eval_accuracy")
    assert 0 <= row["eval_accuracy"] <= 1


@pytest.mark.slow
def test_a_dataset_by_its_hub_id(base, tmp_path):
    """Downloaded, then read offline, and streamed: in a process of its own, which reads HF_ENDPOINT."""
    rows = [{"question": "what is it", "answer": f"row {i}", "image": png(seed=i)} for i in range(12)]
    columns = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    repo = tmp_path / "repo"
    datasets.Dataset.from_list(rows, features=columns).to_parquet(
        repo / "data" / "train-00000-of-00001.parquet"
    )
    data = [{"path": "owner/rows", "language": "de"}]
    data += [{"path": "owner/rows", "name": "streamed", "streaming": True, "weight": 12}]
    with HubServer({"datasets/owner/rows": repo}) as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        # The client gives up after ten seconds, in which this process may not get to answer it.
        env |= {"HF_HUB_ETAG_TIMEOUT": str(PATIENCE), "HF_HUB_DOWNLOAD_TIMEOUT": str(PATIENCE)}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        arguments = settings(base, str(tmp_path / "run"), data=data, steps=2, shuffle_buffer=4)
        done = subprocess.run(
            [sys.executable, "train.py", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
        )
        code = "from data.sources import *; print(open_datasets([{'path': 'owner/rows'}]).num_rows)"
        offline = env | {"HF_HUB_OFFLINE": "1"}
        again = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=offline, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert again.stdout.split() == ["12"], again.stderr
    card = ModelCard((tmp_path / "run" / "README.md").read_text()).data
    assert (card.language, card.datasets, card.base_model) == (["de"], ["owner/rows"], None)
    seen = {name for _, _, rows in curve(tmp_path / "run") for row in rows for name, _ in row}
    assert seen == {"owner/rows", "streamed"}
