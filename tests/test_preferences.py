"""Training on preferences: the paper's loss on transformers' model, layouts of pairs, runs that resume."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch

import train
from data.errors import BadRow, DatasetError
from data.packing import IGNORE_INDEX, SampleEncoder, collate, pack
from data.processor import Processor
from eval.statistics import score_interval
from models import VisionLanguageModel
from models.checkpoints.save import written
from tests import qwen_checkpoints, tiny
from tests.processors import embedded
from tests.rows import png, source
from tests.runs import SETTINGS, contents, curve, flags, metrics, named, refused, run, tiny_checkpoint
from tests.test_training_own_sizes import of_transformers
from training.config import TrainConfig
from training.preferences import PreferencesLoss

BETA, SMOOTHING, SFT = 0.7, 0.1, 0.3
BAR = 1e-5
SETTINGS_OF_PAIRS = TrainConfig(
    data="rows", init_from="tiny", dpo_beta=BETA, dpo_smoothing=SMOOTHING, dpo_sft=SFT
)
USER, RED, BLUE = ({"role": role, "content": text} for role, text in (
    ("user", "how many"), ("assistant", "three red"), ("assistant", "two squares")
))  # fmt: skip


def pairs(processor: Processor, count: int = 2) -> list:
    """(sample with its other answer, its tiles), of one image each."""
    encoder, made = SampleEncoder(processor, 900), []
    for number in range(count):
        row = {"image": png(60, 40 + 8 * number, seed=number), "question": "how many " * (1 + number)}
        row |= {"chosen": "three of them", "rejected": "two red squares"[: 9 + 6 * number]}
        opened = source([row], preferences=True)
        given = [schema.conversation(row, form_for=processor.form) for schema in opened.schemas]
        sample = encoder.encode_answers(given, ("toy", number))
        made.append((sample, encoder.tiles(sample)))
    return made


@pytest.fixture(scope="module", params=["idefics3", "qwen3_vl"])
def models(request, tmp_path_factory):
    """transformers' models that learns and that does not, the same two as ours, and their processor."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "idefics3":
        processor, before = tiny.model_with_processor("idefics3-2-tiles-tied")
        tiny.save(before, folder)
    else:
        before, processor = qwen_checkpoints.save_hf(request.param, folder, seed=1), None
    ours = VisionLanguageModel.from_pretrained(folder, dtype=torch.float32)
    processor = processor or Processor.from_pretrained(folder, config=ours.config)
    processor.config = ours.config
    module = PreferencesLoss(ours.train(), True, SETTINGS_OF_PAIRS)
    now = type(before)(before.config).train()
    tiny.randomize(now, seed=7)
    with torch.no_grad():  # not far from what it was: answers gain little in a run
        for parameter, start in zip(now.parameters(), before.parameters(), strict=True):
            parameter.lerp_(start, 0.95)
    tiny.save(now, folder / "now")
    ours.load_state_dict(
        VisionLanguageModel.from_pretrained(folder / "now", dtype=torch.float32).state_dict()
    )
    return now, before, module, processor


def log_probability(model, config, sample, tiles) -> torch.Tensor:
    """Of an answer in a row of its own, by transformers' model."""
    ids, labels = torch.tensor([sample.input_ids]), torch.tensor(sample.labels[1:])
    images = tiles.to("cpu")
    if config.family == "idefics3":
        inputs = {"pixel_values": images[None]}
    else:
        inputs = of_transformers(ids, list(images), config)
    told = labels != IGNORE_INDEX
    scores = model(input_ids=ids, **inputs).logits[0, :-1][told].log_softmax(-1)
    return scores.gather(1, labels[told, None]).sum()


def test_loss_and_gradient_are_the_papers_on_transformers_model(models):
    now, before, module, processor = models
    config, made = module.model.config, pairs(processor)
    expected = torch.zeros(())
    for sample, tiles in made:
        answers = (sample, *sample.others)
        policy = [log_probability(now, config, one, tiles) for one in answers]
        with torch.no_grad():
            reference = [log_probability(before, config, one, tiles) for one in answers]
        margin = BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
        likely = (1 - SMOOTHING) * margin.sigmoid().log() + SMOOTHING * (1 - margin.sigmoid()).log()
        length = sum(label != IGNORE_INDEX for label in sample.labels)
        expected = expected - likely - SFT * policy[0] / length
    expected.backward()
    rows = [pack([sample], [tiles], config) for sample, tiles in made]
    batch = collate([*rows, None], 0, None, processor.image_token_id).to("cpu")
    loss, logged = module(**batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=BAR, atol=0)
    gradients = {name: parameter.grad for name, parameter in now.named_parameters()}
    largest = max(one.abs().max() for one in gradients.values())
    _, places = written(config)
    for name, parameter in module.model.named_parameters():
        place = places(name)
        other = gradients[place.name].chunk(place.parts)[place.part]
        assert (parameter.grad - other).abs().max() <= BAR * largest, name
    assert logged["loss"] == loss and logged["margin"] != 0
    assert all(p.grad is None for p in module.references[0].parameters())


def test_images_are_encoded_once_where_the_tower_is_frozen(models, monkeypatch):
    *_, module, processor = models
    (sample, tiles), *_ = pairs(processor, 1)
    batch = collate([pack([sample], [tiles], module.model.config)], 0, None, processor.image_token_id)
    frozen = PreferencesLoss(copy.deepcopy(module.references[0].model), False, SETTINGS_OF_PAIRS)
    with torch.no_grad():
        frozen.model.language_model.norm.weight.mul_(1.1)
    seen, encode = [], VisionLanguageModel.encode_images
    monkeypatch.setattr(VisionLanguageModel, "encode_images", lambda *a: seen.append(1) or encode(*a))
    together, logged = frozen(**batch.to("cpu"))
    assert len(seen) == 1
    frozen.blank = True  # as for a tower that learns
    apart, _ = frozen(**batch.to("cpu"))
    assert len(seen) == 3 and logged["margin"] != 0
    torch.testing.assert_close(together, apart)


# ------------------------------------------------------------------------------------------------- rows
LAYOUTS = {
    "question": {"question": "how many", "chosen": "three red", "rejected": "two squares"},
    "prompt": {"prompt": "how many", "chosen": "three red", "rejected": "two squares"},
    "messages": {"prompt": [USER], "chosen": [RED], "rejected": [BLUE]},
    "one message": {"prompt": [USER], "chosen": RED, "rejected": BLUE},
    "whole": {"chosen": [USER, RED], "rejected": [USER, BLUE]},
    "whole with a prompt": {"prompt": "how many", "chosen": [USER, RED], "rejected": [USER, BLUE]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "how many"}],
        "chosen": {"from": "gpt", "value": "three red"},
        "rejected": {"from": "gpt", "value": "two squares"},
    },
}  # fmt: skip


def encoded(row: dict, most: int = 200, **config):
    processor, opened = embedded(), source([row], preferences=True, **config)
    given = [schema.conversation(row, form_for=processor.form) for schema in opened.schemas]
    return SampleEncoder(processor, most).encode_answers(given, ("toy", 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_pair(layout):
    picture = {"image": png(seed=1)}
    expected = encoded(LAYOUTS["question"] | picture)
    assert encoded(LAYOUTS[layout] | picture) == expected
    (other,) = expected.others
    assert expected.images and not other.images and other.image_shapes == expected.image_shapes


def test_columns_have_other_names():
    row = {"q": "how many", "good": "three red", "bad": "two squares", "image": png(seed=1)}
    names = {"question": "q", "chosen": "good", "rejected": "bad"}
    assert encoded(row, columns=names) == encoded(LAYOUTS["question"] | {"image": png(seed=1)})
    for wrong in ({"image": "photo"}, {"colour": "q"}, {"prompt": "gone"}):
        with pytest.raises(DatasetError):
            encoded(row, columns=names | wrong)


def test_only_the_answers_that_differ_are_learnt():
    """Not what was said before them, even where they begin alike."""
    said = {"role": "assistant", "content": "three"}
    ask = {"role": "user", "content": "how many circles"}
    sample = encoded({"prompt": [ask, said, USER], "chosen": "two red", "rejected": "two squares"})
    plain = encoded({"prompt": [USER], "chosen": "two red", "rejected": "two squares"})
    for one, other in zip((sample, *sample.others), (plain, *plain.others), strict=True):
        assert [x for x in one.labels if x != IGNORE_INDEX] == [x for x in other.labels if x != IGNORE_INDEX]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "how many", "chosen": "two", "rejected": "two"},
        {"chosen": [USER, RED], "rejected": [{"role": "user", "content": "how"}, BLUE]},
        {"question": "how many", "chosen": "two", "rejected": ""},
        {"question": "how many", "chosen": "two", "rejected": None},
    ],
)
def test_what_is_no_pair_is_a_bad_row(row):
    with pytest.raises(BadRow):
        encoded(row | {"image": png(seed=1)})


def test_a_pair_fits_a_row_as_a_whole():
    row = LAYOUTS["question"]
    whole = pack([encoded(row)], [None])
    assert encoded(row, len(whole.input_ids))
    with pytest.raises(BadRow, match="tokens"):
        encoded(row, len(whole.input_ids) - 1)


# ------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("preferences")
    tiny_checkpoint(made / "tiny")
    with (made / "pairs.jsonl").open("w") as file:
        for number in range(24):
            (made / f"{number}.png").write_bytes(png(seed=number))
            row = {"question": f"how many {number}", "chosen": f"red {number}", "rejected": "squares"}
            file.write(json.dumps(row | {"image": f"{number}.png" if number % 3 else None}) + "\n")
    return made


BESIDE = ({"lora_rank": 2, "projector_lr": 1e-3}, {"lora_rank": 2, "projector_lr": 1e-3, "weights": "int4"})


def settings(folder, output: str, **more) -> dict:
    data = named(folder / "pairs.jsonl")
    made = {"init_from": str(folder / "tiny"), "data": data, "output": str(folder / output)}
    made |= {"task": "preferences", "steps": 5, "sequence_length": 96, "decay_fraction": 1e-9}
    return SETTINGS | made | more


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, *BESIDE], ids=["weights", "adapters", "int4"])
def test_answers_gain_and_a_run_resumes_to_the_bit(folder, more):
    """Compared with the model that it began with, not with the one that it resumes from."""
    name = f"run{len(more)}"  # of settings, which differ in that
    held_out = {"eval_data": named(folder / "pairs.jsonl"), "save_every": 3, **more}
    train.main(flags(**settings(folder, name, **held_out)))
    whole, weights = curve(folder / name), contents(folder / name)["model.safetensors"]
    first, *_, scores = metrics(folder / name)
    assert first["margin"] == 0 and first["loss"] == pytest.approx(0.69315)
    pairs = scores["eval_accuracy_n"]
    assert scores["eval_loss_n"] == pairs == len((folder / "pairs.jsonl").read_text().splitlines())
    right = round(scores["eval_accuracy"] * pairs)
    interval = score_interval([1.0] * right + [0.0] * (pairs - right))
    assert tuple(scores["eval_accuracy_interval"]) == interval and "eval_exact_match" not in scores
    assert scores["eval_margin"] > 0 and scores["eval_accuracy"] > 0.9 and scores["eval_loss"] < first["loss"]
    shutil.rmtree(folder / name / "state" / "step-00000005")
    train.main(flags(**settings(folder, name, **held_out)))
    assert curve(folder / name) == whole and contents(folder / name)["model.safetensors"] == weights


@pytest.mark.slow
def test_two_ranks_with_shards_are_as_one(folder):
    more = BESIDE[1] | {"decay_fraction": 1e-9, "steps": 3}
    train.main(flags(**settings(folder, "one", **more)))
    run(2, **settings(folder, "two", parallel="fsdp", micro_batch_size=2, **more))
    for one, other in zip(metrics(folder / "one"), metrics(folder / "two"), strict=True):
        for key in ("loss", "margin", "chosen_logprob", "accuracy"):
            assert one[key] == pytest.approx(other[key], abs=2e-5), key


def test_pairs_and_the_task_belong_together(folder, capsys, tmp_path):
    given = settings(folder, "refused")
    assert "preferences" in refused(capsys, flags(**(given | {"task": "answers"})))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "how", "answer": "two", "image": None}) + "\n")
    assert "chosen" in refused(capsys, flags(**(given | {"data": str(rows)})))
    backbones = {"vision_from": str(folder / "tiny"), "text_from": str(folder / "tiny"), "init_from": ""}
    assert "--init-from" in refused(capsys, flags(**(given | backbones)))
    for wrong in ({"task": "answers", "dpo_beta": 0.2}, {"packing_buffer": 4}, {"dpo_smoothing": 0.6}):
        assert "--" + next(reversed(wrong)).replace("_", "-") in refused(capsys, flags(**(given | wrong)))
