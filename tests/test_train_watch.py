"""What a run shows: metrics, sample answers with their images, the plot, the best model, trackers; how it
goes on from a broken state; and that no logits of a whole row are made."""

from __future__ import annotations

import json
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText

import train
from models import losses
from models.vision_language_model import IGNORE_INDEX
from tests.prompts import ImageBlock, inputs_of, tiny_vlm, words
from tests.runs import curve, flags, metrics, named, prepared, refused, run, settings_in
from training import plot
from training.config import TrainConfig
from training.metrics import Metrics, TrackerError, open_tracker, read_metrics
from training.rows import RowsLoss
from training.state import FOLDER, states
from training.task import Answered, Question


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("watch"), rows=24)


def settings(base, output: str, **more) -> list[str]:
    return flags(**(settings_in(base, output, batch_size=4, steps=4, save_every=2) | more))


# ------------------------------------------------------------------------------------------ the whole run
@pytest.fixture(scope="module")
def watched(base):
    # By its name, a dataset has the same order wherever it lies: two of its first five rows have images.
    held_out = [{"path": str(base / "rows.jsonl"), "name": "seen"}]
    train.main(settings(base, "watched", eval_data=held_out, eval_every=2, eval_samples=5))
    return base / "watched"


def test_metrics_tell_speed_and_time_left(watched):
    rows = metrics(watched, "loss")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["tokens_per_second"] > 0 and 0 <= row["mfu"] < 1 and row["seconds_left"] >= 0
    for name in ("images_per_second", "mfu"):  # rounded: of a step that was held up for seconds nothing stays
        assert any(row[name] > 0 for row in rows), name
    assert rows[-1]["seconds_left"] == 0


def test_sample_answers_have_their_images(watched):
    for step in (2, 4):
        folder = watched / "samples" / f"step-{step:08d}"
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert len(rows) == 5 and all(row["question"] and row["target"] for row in rows)
        named = [name for row in rows for name in row["pictures"]]
        assert named and {path.name for path in folder.glob("*.png")} == set(named)
        for name in named:
            assert max(Image.open(folder / name).size) <= 512
    scores = metrics(watched, "eval_loss")
    assert [row["eval_exact_match"] for row in scores] == [
        sum(json.loads(line)["right"] for line in path.read_text().splitlines()) / 5
        for path in sorted((watched / "samples").glob("*/answers.jsonl"))
    ]


def test_the_plot_is_drawn(watched):
    root = ET.fromstring((watched / "plot.svg").read_text())
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3  # loss, held-out loss, exact match
    assert len(lines[0].get("points").split()) == 4


def test_the_best_model_is_kept(watched):
    score = json.loads((watched / "best" / "best.json").read_text())
    rows = metrics(watched, "eval_loss")
    seen = {row["step"]: row["eval_loss"] for row in rows}
    assert score["name"] == "eval_loss" and score["value"] == min(seen.values()) == seen[score["step"]]
    AutoModelForImageTextToText.from_pretrained(watched / "best")
    assert f"{seen[score['step']]:.3f}" in (watched / "best" / "README.md").read_text()  # its card's table


def test_a_worse_model_is_not_the_best(base, watched):
    """The same run with a rate that ruins it: what was best before stays, and a run that goes on knows it."""
    arguments = settings(base, "ruined", eval_data=str(base / "rows.jsonl"), eval_every=2, steps=2)
    train.main(arguments)
    before = (base / "ruined" / "best" / "model.safetensors").read_bytes()
    train.main([*arguments, "--steps", "4", "--lr", "3.0", "--grad-clip", "0"])
    rows = metrics(base / "ruined", "eval_loss")
    assert [row["step"] for row in rows] == [2, 4] and rows[1]["eval_loss"] > rows[0]["eval_loss"]
    assert (base / "ruined" / "best" / "model.safetensors").read_bytes() == before
    assert json.loads((base / "ruined" / "best" / "best.json").read_text())["step"] == 2
    train.main([*arguments, "--no-resume", "--no-keep-best"])
    assert not (base / "ruined" / "best").exists()


def test_answers_and_scores_change_nothing(base, watched):
    """The losses and weights of a run that is not looked at."""
    train.main(settings(base, "alone", eval_samples=0))
    assert curve(base / "alone") == curve(watched)
    name = "model.safetensors"
    assert (base / "alone" / name).read_bytes() == (watched / name).read_bytes()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_are_looked_at_as_one_is(base, parallel):
    """The same losses, scores, answers and best model, whether the first rank has the weights or a share."""
    rows = named(base / "rows.jsonl")
    more = settings_in(base, f"{parallel}1", batch_size=4, steps=4, save_every=2, ema=0.9)
    more |= {"eval_data": rows, "eval_every": 2, "eval_samples": 5}
    train.main(flags(**more))
    watched = base / f"{parallel}1"
    run(2, **(more | {"output": str(base / parallel), "parallel": parallel}))
    for name in ("step-00000002", "step-00000004"):
        path = Path("samples") / name / "answers.jsonl"
        assert (base / parallel / path).read_text() == (watched / path).read_text()
    best, expected = (
        json.loads((folder / "best" / "best.json").read_text()) for folder in (base / parallel, watched)
    )
    assert best["step"] == expected["step"] and best["value"] == pytest.approx(expected["value"], abs=1e-5)
    losses = [[loss for _, loss, _ in curve(folder)] for folder in (base / parallel, watched)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # looking at an average leaves the weights alone
    AutoModelForImageTextToText.from_pretrained(base / parallel / "best")


# -------------------------------------------------------------------------------------------- broken states
@pytest.mark.parametrize("file", ["run.pt", ".metadata", "*.distcp"])
def test_a_broken_state_is_passed_over(base, capsys, file):
    """With adapters and in bfloat16, whose evaluations and best model are made once more, too."""
    name = f"broken-{file.strip('*.')}"
    more = {"precision": "bfloat16", "lora_rank": 2, "activation_checkpointing": True, "eval_every": 6}
    arguments = settings(base, name, steps=6, eval_data=named(base / "rows.jsonl"), **more)
    train.main(arguments)
    expected = curve(base / name)
    paths = [base / name / part / "adapter" / "adapter_model.safetensors" for part in ("", "best")]
    paths.append(base / name / "model.safetensors")
    weights = [path.read_bytes() for path in paths]
    before, newest = states(base / name / FOLDER)
    (path,) = newest.glob(file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (newest.parent / ".writing-00000007").mkdir()
    capsys.readouterr()
    train.main(arguments)
    said = capsys.readouterr().err
    assert f"{newest} cannot be read and is skipped" in said
    assert "the state after step 7 was not written completely" in said
    assert curve(base / name) == expected and states(base / name / FOLDER) == [before, newest]
    assert [path.read_bytes() for path in paths] == weights


def test_no_state_can_be_read(base, capsys):
    train.main(settings(base, "lost", steps=2))
    (state,) = states(base / "lost" / FOLDER)
    (state / "run.pt").write_bytes(b"")
    assert "holds no state that can be read (1 tried)" in refused(capsys, settings(base, "lost", steps=2))
    assert states(base / "lost" / FOLDER) == [state]


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

    def Image(self, pixels, caption):
        return pixels.shape, caption

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(tmp_path, monkeypatch) -> tuple[Wandb, Metrics]:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module, Metrics(TrainConfig(output=str(tmp_path), tracker="wandb"), 4, 0, True)


def test_a_tracker_gets_numbers_and_images(wandb, tmp_path):
    module, log = wandb
    log.write({"step": 1, "loss": 2.0, "samples": [["rows", 1]]})
    log.write_samples(1, ANSWERED)
    log.close()
    assert module.settings["project"] == "ocelli" and module.settings["name"] == tmp_path.name
    assert module.logged[0] == ({"loss": 2.0}, 1) and module.finished
    shown = module.logged[1][0]["sample_0"]
    assert shown == ((171, 512, 3), "what? -> A cat. (expected: a cat)")
    assert ANSWERED[0].right and not Answered(ANSWERED[0].question, "a dog").right


def test_a_tracker_that_fails_does_not_end_the_run(wandb, monkeypatch, capsys):
    module, log = wandb
    monkeypatch.setattr(module, "log", lambda *_, **__: 1 / 0)
    log.write({"step": 1, "loss": 2.0})
    log.write({"step": 2, "loss": 1.0})
    log.close()
    assert capsys.readouterr().out.count("division by zero") == 1
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2]


def test_a_tracker_without_login_or_package(tmp_path, monkeypatch):
    def open_it(name: str) -> str:
        with pytest.raises(TrackerError) as refused:
            open_tracker(TrainConfig(output=str(tmp_path), tracker=name))
        return str(refused.value)

    monkeypatch.setitem(sys.modules, "wandb", Wandb(RuntimeError("No API key configured.")))
    assert "No API key configured." in open_it("wandb")
    for name, module in (("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        assert "requirements-track.txt" in open_it(name)


# ------------------------------------------------------------------------------------------------ the plot
def test_plot_of_a_run():
    rows = [{"step": step, "loss": 10.0 / step, "eval_accuracy": step / 1000} for step in range(1, 1001)]
    root = ET.fromstring(plot.draw([*rows, {"step": 1001, "loss": float("nan")}], "a <run>"))
    loss, accuracy = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.findall("{http://www.w3.org/2000/svg}polyline")
    )
    assert 200 < len(loss) <= 300 and loss == sorted(loss)  # falls: y grows downwards
    assert accuracy == sorted(accuracy, key=lambda p: (p[0], -p[1]))
    assert loss[0][1] < loss[-1][1] <= plot.HEIGHT - plot.BOTTOM
    ET.fromstring(plot.draw([], "empty"))


def test_plot_command(watched, tmp_path, capsys):
    assert plot.main([str(watched), str(tmp_path / "one.svg")]) == 0
    ET.parse(tmp_path / "one.svg")
    assert plot.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("training.plot: error: ")


# ------------------------------------------------------------------------- logits of the whole never exist
class MostLogits(TorchDispatchMode):
    """The most rows of logits that one tensor has: of those as wide as the vocabulary, but for weights."""

    def __init__(self, model):
        super().__init__()
        self.vocabulary, self.rows = model.config.text.vocab_size, 0
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if not isinstance(one, torch.Tensor) or one.shape[-1:] != (self.vocabulary,):
                continue
            if one.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, one.numel() // self.vocabulary)
        return made


@pytest.mark.parametrize("training", [True, False])
def test_logits_of_a_row_never_exist(training, monkeypatch):
    """In RowsLoss, forward and backward; the model's plain forward makes them all, and is caught at it."""
    monkeypatch.setitem(losses.CHUNK_BYTES, "cpu", 0)  # the fewest positions at once: 16
    model = tiny_vlm()
    inputs = inputs_of([ImageBlock(1), *words(1, 60)])
    ids = inputs["input_ids"]
    labels = ids.masked_fill(ids == model.config.image_token_id, IGNORE_INDEX)
    labels[:, :20] = IGNORE_INDEX
    labelled = int((labels[:, 1:] != IGNORE_INDEX).sum())
    assert labelled > 32
    batch = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(ids.shape[1])[None],
        "segment_ids": torch.ones_like(ids),
        "pixel_values": inputs["pixel_values"].flatten(0, -4),
    }
    with MostLogits(model) as seen, torch.set_grad_enabled(training):
        total, _ = RowsLoss(model, blank=False)(**batch)
        if training:
            total.backward()
    assert 0 < seen.rows <= 16
    with MostLogits(model) as seen, torch.no_grad():
        whole = model(labels=labels, **inputs)
    assert seen.rows >= ids.shape[1]
    torch.testing.assert_close(total.detach(), whole.loss * labelled, rtol=1e-5, atol=0)
