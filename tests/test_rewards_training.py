"""Training on rewards: the losses of the papers, on-policy to the last digit, resumable, on several ranks."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

import train
from models.vision_language_model import VisionLanguageModel
from tests import lfm2_checkpoints, qwen_checkpoints
from tests.graph_cases import tape_graphs
from tests.runs import (
    OF_REWARDS,
    contents,
    figures,
    flags,
    metrics,
    prepared,
    refused,
    run,
    settings_in,
    tiny_checkpoint,
    write_rows,
)
from training import rollouts
from training.config import TrainConfig
from training.distributed import Ranks
from training.rollouts import RewardsTask

SAVE = {"idefics3": tiny_checkpoint, "qwen3_vl": partial(qwen_checkpoints.save_hf, "qwen3_vl")}
SAVE |= {"lfm2_vl": lfm2_checkpoints.save_hf}  # whose short convolutions share no prompt


def varied(answers, row, **more):
    """Something that differs between answers and depends on the row."""
    return [sum(map(ord, answer)) % 7 / 7 + len(row["target"]) / 100 for answer in answers]


def some(answers, row, of):
    return varied(answers, row) if row["target"] in of else [0.0] * len(answers)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A folder with a checkpoint of a kind, and rows."""

    @cache
    def opened(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        SAVE[kind](folder / "tiny")
        write_rows(folder / "rows.jsonl", 8, every=2)
        return folder

    return opened


def task_of(folder: Path, **more) -> RewardsTask:
    usual = {"batch_size": 4, "sequence_length": 200, "rewards": {f"{__name__}:varied": 1.0}}
    settings = settings_in(folder, "out", **OF_REWARDS | usual | more)
    return RewardsTask(TrainConfig(**settings), Ranks(torch.device("cpu")))


def alone(task: RewardsTask, model, group, answer: int) -> torch.Tensor:
    """Log-probabilities of an answer's tokens, from the prompt and it alone, without any of the packing."""
    prompt, ids = torch.tensor(group.prompt_ids), torch.tensor(group.ids[answer])
    parts, text = None if group.parts is None else group.parts.to("cpu"), model.language_model
    shown, said = model.embed(prompt[None], parts), model.embed_tokens(ids[None])
    x = torch.cat((shown, F.pad(said, (0, shown.shape[2] - said.shape[2]))), 1)
    position_ids = None
    if places := model.places([prompt], parts):
        after = torch.arange(len(ids)) + len(prompt) + places[0][1]
        position_ids = torch.cat((places[0][0], after.expand(3, -1)), 1)[:, None]
    logits = text.logits(text(x, position_ids=position_ids)[0])[0, len(prompt) - 1 : -1]
    return (logits / task.config.temperature).log_softmax(-1)[range(len(ids)), ids]


def expected_loss(task: RewardsTask, model, reference) -> torch.Tensor:
    """TRL's GRPOTrainer, written from its documentation and the papers."""
    config, rows, rewards = task.config, [], []
    for group in task.groups:
        rewards.append(torch.tensor(group.totals))
        for answer, drawn in enumerate(group.drawn):
            now = alone(task, model, group, answer)
            with torch.no_grad():
                first = alone(task, reference, group, answer) if config.kl else now.detach()
            rows.append((now, torch.tensor(drawn), first))
    rewards = torch.stack(rewards)
    scaled = rewards - rewards.mean(dim=1, keepdim=True)
    if config.policy_loss != "dr_grpo":
        scaled = scaled / (rewards.std(dim=1, keepdim=True) + 1e-4)
    high = {"dapo": 0.28}.get(config.policy_loss, config.clip)
    losses = []
    for (now, drawn, first), advantage in zip(rows, scaled.flatten(), strict=True):
        ratio = torch.exp(now - drawn)
        loss = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - config.clip, 1 + high) * advantage)
        losses.append(loss + config.kl * (torch.exp(first - now) - (first - now) - 1))
    if config.policy_loss == "grpo":
        return torch.stack([loss.mean() for loss in losses]).mean()
    if config.policy_loss == "dr_grpo":
        return torch.cat(losses).sum() / (len(losses) * config.answer_tokens)
    return torch.cat(losses).sum() / sum(map(len, losses))


def moved(model, by: float) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("kind", "variant"),
    [*product(["idefics3"], ["grpo", "dr_grpo", "dapo"]), ("qwen3_vl", "dapo"), ("lfm2_vl", "grpo")],
)
def test_loss_and_gradients_are_those_of_the_formulas(opened, kind, variant):
    """After the weights have moved, so that ratios are clipped, and away from the reference."""
    folder = opened(kind)
    kl = {"grpo": 0.04}.get(variant, 0.0)
    task = task_of(folder, policy_loss=variant, kl=kl, temperature=1.3, micro_batch_size=3)
    reference = VisionLanguageModel.from_pretrained(folder / "tiny", dtype=torch.float32)
    batches = next(task.batches())
    assert any(group.parts is not None for group in task.groups) and task.groups[0].varies
    image, repeated = task.processor.image_token_id, 4 if kind == "lfm2_vl" else 1
    shown = sum(group.prompt_ids.count(image) for group in task.groups)
    assert sum(len(batch["placeholders"]) for batch in batches) == repeated * shown > 0
    moved(task.model, 1.0 if kind == "idefics3" else 0.1)  # whose weights hardly prefer one thing
    expected = expected_loss(task, task.model, reference)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
    task.model.zero_grad()
    parts = []
    total = torch.zeros(())
    for batch in batches:
        loss, seen = task.module(**task.inputs(batch, 0))
        (loss / task.count(batches)).backward()
        total += loss.detach() / task.count(batches)
        parts.append(seen)
    assert sum(part["clipped"] for part in parts) > 0
    assert total.item() == pytest.approx(expected.item(), rel=4e-6, abs=1e-5)
    for name, parameter in task.model.named_parameters():
        if name in gradients:
            scale = gradients[name].abs().max()
            # Keys' biases change no softmax: without rotation their gradient is rounding alone.
            noise = 2e-6 if name.endswith("k_proj.bias") else 5e-7
            assert (parameter.grad - gradients[name]).abs().max() <= max(1e-5 * scale, noise), name


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("kind", "step"), [*product(SAVE, ["eager"]), ("idefics3", "c"), ("lfm2_vl", "c"), ("qwen3_vl", "cuda")]
)
def test_training_sees_the_probabilities_that_answers_were_drawn_by(opened, kind, step, monkeypatch):
    """`cuda` on a CPU, with a tape for a graph."""
    monkeypatch.setitem(rollouts._STEPS, "cuda", ("cpu", *rollouts._STEPS["cuda"][1:]))
    tape_graphs(monkeypatch)
    filters = {"temperature": 0.7, "top_k": 40, "top_p": 0.9} if step == "eager" else {}
    task = task_of(opened(kind), rollout_step=step, answer_tokens=24, **filters)
    parts = [task.module(**task.inputs(batch, 0))[1] for batch in next(task.batches())]
    assert sum(part["tokens"] for part in parts) > 4 * 4 * 8
    for part in parts:
        assert part["most"] <= (1e-3 if step == "c" else 2e-5)


def test_the_divergence_is_finite_with_filters(opened):
    """The reference may have no chance of a token that the model drew: it is 0 before weights have moved, and
    then that of the distributions without filters."""
    task = task_of(opened("idefics3"), temperature=0.7, top_k=2, kl=0.5)
    batch = next(task.batches())[0]
    assert task.module(**task.inputs(batch, 0))[1]["kl"].item() == pytest.approx(0, abs=1e-6)
    moved(task.model, 1.0)
    loss, seen = task.module(**task.inputs(batch, 0))
    expected, models = 0.0, (task.model, task.module.references[0].model)
    for group in task.groups:
        for answer in range(len(group.ids)):
            with torch.no_grad():
                now, first = (alone(task, model, group, answer) for model in models)
            expected += ((first - now).exp() - (first - now) - 1).sum().item()
    assert loss.isfinite() and seen["kl"].item() == pytest.approx(expected, rel=1e-3) and expected > 0


def test_blocks_compiled_for_training_are_not_compiled_for_sampling(opened):
    task, counter = task_of(opened("idefics3")), CompileCounter()
    for block in task.model.language_model.layers:
        block.compile(backend=counter)
    next(task.batches())
    assert counter.frame_count == 0


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_a_token_at_a_filters_edge_does_not_stop_a_run(opened, filters):
    """But disagreement over many does, and without a filter over one."""
    task, one = task_of(opened("idefics3"), **filters), torch.tensor(1.0)
    seen = {"tokens": one * 1000, "most": one * 0.1, "clipped": one * 0, "off": one * 0.1}
    for off, stops in ((0.1, not filters), (50.0, True)):
        with pytest.raises(ValueError) if stops else nullcontext():
            task.note([seen | {"off": one * off}])


def test_a_list_of_answers_is_accepted(opened, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "red or", "answer": ["red", "crimson", 4]}) + "\n")
    task = task_of(opened("idefics3"), data=[{"path": str(rows), "allow_text_only": True}], batch_size=1)
    next(task.batches())
    (group,) = task.groups
    assert group.sample.row["target"] == "red" and group.sample.row["accept"] == ["crimson", "4"]


def test_answers_depend_on_seed_batch_and_weights_alone(opened):
    """Not on how many are sampled at a time."""
    folder, ids = opened("idefics3"), []
    for more in ({}, {"answers_at_once": 3}, {"seed": 1}):
        task = task_of(folder, **more)
        next(task.batches())
        ids.append([group.ids for group in task.groups])
    assert ids[0] == ids[1] != ids[2]
    assert len({tuple(one) for one in ids[0][0]}) > 1


# ----------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("rewards"), 24)


def settings(folder, output: str, **more) -> dict:
    usual = {"steps": 6, "batch_size": 4, "rewards": {f"{__name__}:varied": 1.0}, "weight_decay": 0.0}
    return settings_in(folder, output, **OF_REWARDS | usual | more)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(folder):
    """Between two lines of metrics.jsonl (`python -m tests.soak.kills --parts rewards` does it at any
    moment)."""
    whole, again, more = folder / "whole", folder / "again", {"save_every": 3, "log_every": 2}
    train.main(flags(**settings(folder, whole.name, keep=2, **more)))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "state" / "step-00000006")
    shutil.rmtree(again / "rollouts")
    train.main(flags(**settings(folder, again.name, **more)))
    assert figures(again) == figures(whole)
    made, expected = contents(again / "rollouts"), contents(whole / "rollouts")
    assert made == {name: data for name, data in expected.items() if int(name[5:13]) > 3} and made
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"parallel": "fsdp", "kl": 0.1, "micro_batch_size": 1},
        {"parallel": "ddp", "kl": 0.0, "micro_batch_size": 1},
    ],
)
def test_two_ranks(folder, more):
    """Answers are those of one rank while weights are; a rank may have no group that varies, and without a KL
    divergence nothing to train on."""
    more, output = {"steps": 2, "decay_fraction": 1e-9} | more, f"{more['parallel']}-{more['kl']}"
    alone = f"one-{more['kl']}"
    if not more["kl"]:
        task = RewardsTask(TrainConfig(**settings(folder, "first", **more)), Ranks(torch.device("cpu")))
        batches = task.batches()
        firsts = [group for _ in range(2) for group in (next(batches), task.groups[:2])[1]]
        more["rewards"] = {f"{__name__}:some": {"of": [group.sample.row["target"] for group in firsts]}}
    train.main(flags(**settings(folder, alone, **more | {"parallel": "ddp"})))
    run(2, **settings(folder, output, **more))
    for one, other in zip(figures(folder / alone), figures(folder / output), strict=True):
        samples, padded = one.pop("samples"), other.pop("samples")
        assert [ids for ids in padded if ids] == samples
        assert ([] in padded) == (not more["kl"])  # the rank that has nothing to train on
        assert other == pytest.approx(one, rel=2e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_adapters_learn_beside_a_reference_without_them(folder, weights):
    more = {"lora_rank": 2, "kl": 0.5, "projector_lr": 1e-3, "eval_every": 3, "weights": weights}
    more |= {"rollout_step": "c"} if weights == "float32" else {}
    more |= {"eval_data": str(folder / "rows.jsonl"), "eval_pictures": 8, "lr": 0.01}
    output = folder / f"lora-{weights}"
    train.main(flags(**settings(folder, output.name, **more)))
    rows = metrics(output, "kl")
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-6
    off = 1e-3 if weights == "float32" else 0.1  # keys and values are kept in bfloat16 beside codes
    assert all(0 <= row["off_policy"] < off for row in rows)
    evaluated = metrics(output, "eval_reward")
    assert [row["step"] for row in evaluated] == [3, 6]
    for row in evaluated:
        low, high = row["eval_reward_interval"]
        assert row["eval_reward_n"] == row["eval_cut_off_n"] == 8 and low <= row["eval_reward"] <= high
    best = json.loads((output / "best" / "best.json").read_text())
    assert best["name"] == "eval_reward"


def test_groups_in_which_all_are_alike_are_counted_and_teach_nothing(folder):
    train.main(flags(**settings(folder, "alike", rewards={"exact": 1.0}, steps=2)))
    assert [row["unvaried"] for row in metrics(folder / "alike")] == [1, 1]
    before, after = (load_file(folder / name / "model.safetensors") for name in ("tiny", "alike"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_an_answer_that_is_not_learnt_may_be_of_any_length(folder, capsys):
    """It is what rewards compare with; the prompt alone has to fit."""
    row = {"question": "how many", "answer": "red squares " * 100}
    (folder / "long.jsonl").write_text("".join(json.dumps(row | {"image": None}) + "\n" for _ in range(8)))
    data = [{"path": str(folder / "long.jsonl"), "allow_text_only": True}]
    more = {"data": data, "sequence_length": 24, "steps": 1, "max_drop_rate": 0.0}
    train.main(flags(**settings(folder, "long", **more)))
    assert "reward" in metrics(folder / "long")[-1]
    train.main(flags(**settings(folder, "look", **more), show=0))
    assert "too long" not in capsys.readouterr().out
    row["question"] = "how many " * 100
    (folder / "long.jsonl").write_text("".join(json.dumps(row | {"image": None}) + "\n" for _ in range(8)))
    assert "too long" in refused(capsys, flags(**settings(folder, "longer", **more)))


@pytest.mark.slow
def test_questions_that_no_reward_can_score_are_counted_and_end_a_run_that_has_no_others(folder, capsys):
    more = {"rewards": {"number": 1.0, "iou": 1.0}, "batch_size": 32, "group_size": 2, "answer_tokens": 1}
    said = refused(capsys, flags(**settings(folder, "unscored", **more)))
    assert all(word in said for word in ("number", "boxes", "target"))
    rows = metrics(folder / "unscored")
    assert [row["unscored"] for row in rows] == [row["unvaried"] for row in rows] == [1, 1], "64 questions"
    assert "reward" not in rows[0]
    train.main(flags(**settings(folder, "unscored", **more | {"rewards": {"length": 1.0}, "steps": 3})))
    assert "reward" in metrics(folder / "unscored")[-1], "other rewards go on from there"


def test_what_is_kept_to_look_at(folder):
    train.main(flags(**settings(folder, "seen", steps=1)))
    (row,) = metrics(folder / "seen")
    told = {"reward", "unvaried", "answer_tokens", "cut_off", "entropy", "clipped", "off_policy"}
    assert told <= row.keys() and math.isfinite(row["policy_loss"])
    lines = (folder / "seen" / "rollouts" / "step-00000001" / "answers.jsonl").read_text().splitlines()
    best, worst = (json.loads(line) for line in lines[:2])
    assert best["reward"] > worst["reward"] and best["question"] == worst["question"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rewards": "{}"},
        {"rewards": "{exakt: 1.0}"},
        {"rewards": "exact"},
        {"lora_rank": 2, "lora_dropout": 0.1},
        {"group_size": 1},
        {"data": ""},
        {"task": "answers"},
        {"answer_tokens": 300},
        {"rollout_step": "cuda"},
        {"sequence_length": 251},  # which leaves no room for an answer in the context of 256
        {"rewards": {f"{__name__}:absent": 1}},
        {"most_off_policy": 1e-12},
    ],
)
def test_mistakes_are_one_sentence(folder, wrong, capsys):
    assert refused(capsys, flags(**settings(folder, "refused", **wrong)))
