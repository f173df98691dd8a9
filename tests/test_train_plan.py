"""train.py --plan: its formulas against what is counted and measured, and recipes against built models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train
from benchmarks.common import SHAPES
from data.packing import Batch, dense_mask
from families import FAMILIES, lfm2_vl
from models.checkpoints.load import choose_family
from models.checkpoints.weights import StoredTensor
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from models.whole_rows import IGNORE_INDEX
from tests import lfm2_checkpoints, qwen_checkpoints
from tests.runs import refused, tiny_checkpoint
from training.config import PlanOptions, TrainConfig, parse_arguments
from training.flops import PARTS, amounts_of, known_peak, measured_peak
from training.lora import add_adapters
from training.optim import build_optimizers, part_of
from training.plan import AverageRow, Device, make_plan, network, plan_of

OF_ROWS = {"init_from": "x", "data": "rows.jsonl"}
CONFIGS = Path(__file__).parent.parent / "configs"
H100 = ["--plan", "--plan-device", "H100"]
_SIZES = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_TEXT = {"intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}
TINY = replace(  # with several layers and heads, so that what grows with them is counted
    SHAPES["tiny"],
    vision=replace(SHAPES["tiny"].vision, **_SIZES, image_size=64),
    text=replace(SHAPES["tiny"].text, **_TEXT),
)
LFM2 = lfm2_vl.read_config(json.loads(lfm2_checkpoints.hf_config(1).to_json_string()), {}, {})
PACKED = [
    *(
        choose_family(described, kind).read_config(described, {}, {})
        for kind in qwen_checkpoints.KINDS
        for described in [json.loads(qwen_checkpoints.hf_config(kind, 3).to_json_string())]
    ),
    replace(LFM2, image_token_id=300),  # none that is drawn below
]
ROWS, LENGTH, TILES = 2, 128, 2
LABELLED = 0.25
SMOLVLM = SHAPES["SmolVLM-256M"]


def model_of(config: VLMConfig, frozen=()) -> VisionLanguageModel:
    model = VisionLanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    return model


def size_in(config: VLMConfig) -> tuple[int, int]:
    """Height and width in pixels of the images here."""
    side = config.vision.least_side
    return (4 * side, 5 * side) if config in PACKED else (side, side)


def batch_of(config: VLMConfig, segments: int = 1) -> dict[str, torch.Tensor]:
    """Rows with TILES tiles each, the last quarter labelled; cut into segments of one length."""
    ids, size = (
        torch.randint(1, 190, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)),
        size_in(config),
    )
    ids[:, : TILES * FAMILIES[config.family].positions(config, *size)] = config.image_token_id
    labels = ids.clone()
    labels[:, : int(LENGTH * (1 - LABELLED))] = IGNORE_INDEX
    batch = {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(ROWS * TILES, 3, *size)}
    if segments > 1:
        of = torch.arange(LENGTH).div(LENGTH // segments, rounding_mode="floor")[None].expand(ROWS, -1) + 1
        batch["attention_mask"] = dense_mask(of)
        if config.text.layer_types:  # short convolutions ask where a segment begins
            batch["position_ids"] = torch.arange(LENGTH)[None].expand(ROWS, -1) % (LENGTH // segments)
    return batch


def plan_with(shape: VLMConfig, frozen=(), ranks=1, kind="cuda", precision="bfloat16", row=None, **settings):
    """The plan of a run with these settings on rows; parts that are frozen have a rate of 0."""
    rates = {
        name: float(part not in frozen) for name, part in zip(("vision_lr", "projector_lr", "lr"), PARTS)
    }
    config = TrainConfig(init_from="x", data="rows.jsonl", **{
        "batch_size": 1, "sequence_length": 4096, "muon": "none", "ema": 0.0, **rates, **settings
    })  # fmt: skip
    device = Device(kind, getattr(torch, precision), 1e14, "a device")
    return make_plan(config, PlanOptions(plan_ranks=ranks, plan_mfu=0.5), device, shape, row or AverageRow())


def tiny_plan(frozen=(), samples=1, precision="float32", shape=TINY, **more):
    row = AverageRow(tiles=TILES, sizes=(size_in(shape),), samples=samples, labelled=LABELLED)
    more = {"batch_size": ROWS, "sequence_length": LENGTH, "kind": "cpu", "row": row} | more
    return plan_with(shape, frozen, precision=precision, **more)


# --------------------------------------------------------------------------------- parameters and memory
@pytest.mark.parametrize(
    "muon, frozen", [("none", ()), ("language", ("vision_model",)), ("all", ("language_model",))]
)
def test_weights_gradients_and_state_are_those_of_a_real_step(muon, frozen):
    model = model_of(TINY, frozen)
    optimizers = build_optimizers(model, dict.fromkeys(PARTS, 1e-3), TrainConfig(**OF_ROWS, muon=muon))
    model(**batch_of(TINY)).loss.backward()
    state = 0
    for one in optimizers:
        one.step()
        state += sum(v.nbytes for kept in one.state.values() for v in kept.values() if v.numel() > 1)
    memory = tiny_plan(frozen, muon=muon).memory
    assert memory["optimizer state"] == state
    assert memory["weights"] == sum(p.nbytes for p in model.parameters())
    assert memory["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def kept_by(model, autocast: bool = False, **batch) -> int:
    """Bytes that autograd saves in a forward pass, each storage once, without those of parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is given twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        loss_of(model, batch)
    return sum(storage.nbytes() for storage in storages.values())


def loss_of(model, batch):
    """As training takes it: the head on labelled positions only."""
    features = torch.cat(tuple(model.encode_images(batch["pixel_values"])))
    places = (batch["input_ids"] == model.config.image_token_id).flatten().nonzero()[:, 0]
    x = model.place_features(batch["input_ids"], features, places)
    hidden, _ = model.language_model(x, batch.get("attention_mask"), position_ids=batch.get("position_ids"))
    return model.summed_loss(hidden, batch["labels"])[0]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    "precision, frozen, shape",
    [
        ("float32", (), TINY),
        ("bfloat16", ("vision_model",), TINY),
        *(("bfloat16" if number % 2 else "float32", (), shape) for number, shape in enumerate(PACKED)),
    ],
)
def test_activations_are_what_autograd_keeps(precision, frozen, shape):
    """Of a real model, which runs every block."""
    model, segments = model_of(shape, frozen), 4
    measured = kept_by(model, precision == "bfloat16", **batch_of(shape, segments))
    measured -= model.language_model.lm_head.weight.nbytes  # the loss has the head's gradient ready
    expected = tiny_plan(frozen, segments, precision, shape).memory["activations"]
    assert expected == pytest.approx(measured, rel=0.03)


def test_checkpointing_keeps_little():
    whole, little = (plan_with(SMOLVLM, activation_checkpointing=on) for on in (False, True))
    assert little.memory["activations"] < 0.15 * whole.memory["activations"]
    assert little.flops == whole.flops


@pytest.mark.slow
def test_fsdp_cuts_what_it_shards():
    config = SHAPES["SmolVLM-2.2B"]
    ddp, fsdp = (plan_with(config, ranks=8, batch_size=8, parallel=kind).memory for kind in ("ddp", "fsdp"))
    assert ddp["optimizer state"] == 8 * 2_246_272_880 == 8 * fsdp["optimizer state"]
    assert fsdp["weights"] < 0.3 * ddp["weights"] and fsdp["gradients"] < 0.3 * ddp["gradients"]
    assert ddp == plan_with(config).memory


# -------------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "frozen"),
    [
        *((shape, ()) for shape in (TINY, *PACKED)),
        *((TINY, frozen) for frozen in (("language_model",), ("projector", "language_model"))),
        *((shape, ("vision_model",)) for shape in (TINY, PACKED[2])),
    ],
)
def test_flops_are_those_of_torchs_counter(frozen, shape):
    model = model_of(shape, frozen)
    # Plain products, which the counter knows; fused attention on a CPU it does not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, batch_of(shape)).backward()
    assert tiny_plan(frozen, shape=shape).flops == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.slow
def test_adapters_in_the_tower_are_counted_where_they_are():
    """With the projector trained beside them: by the plan, and by what measures a run that learns so."""
    model, batch = model_of(TINY), batch_of(TINY)
    lora = {
        "lora_rank": 4,
        "lora_vision_targets": "q_proj,k_proj,v_proj,out_proj,fc1,fc2",
        "weights": "float32",
    }
    config = TrainConfig(init_from="x", data="rows.jsonl", lr=1.0, projector_lr=1.0, **lora)
    add_adapters(model, config, lambda name: StoredTensor(name))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, batch).backward()
    plan = tiny_plan(lr=1.0, vision_lr=-1.0, **lora)
    assert plan.flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(plan.trainable.values()) == trained
    assert plan.memory["activations"] == pytest.approx(kept_by(model, **batch), rel=0.1)


def test_amounts_of_a_batch():
    """Two segments of 3 and 2 positions, and a prefix of 2 that two branches of 1 and 3 see."""
    segments = torch.tensor([[1, 1, 1, 2, 2, -1], [0, 0, 1, 2, 2, 2]])
    labels = torch.full_like(segments, -100)
    labels[0, 2] = labels[1, 4] = 7
    vision = replace(TINY.vision, patch_size=2)
    pixels = [torch.zeros(3, 4, 6), torch.zeros(3, 2, 2)]
    amounts = amounts_of(Batch(segment_ids=segments, labels=labels, pixel_values=pixels), vision)
    assert (amounts.tiles, amounts.positions, amounts.labelled) == (2, 11, 2)
    assert (amounts.patches, amounts.patch_pairs) == (6 + 1, 36 + 1)
    assert amounts.pairs == (9 + 4) + (4 + 1 + 2 + 9 + 6)
    assert amounts_of(Batch(segment_ids=segments * 0 - 1, labels=labels), vision).positions == 0


def test_steps_and_hours():
    row = AverageRow(tiles=3, samples=5, fill=0.5, labelled=0.1, total_samples=3201)
    plan = plan_with(TINY, ranks=8, batch_size=64, sequence_length=1000, row=row)
    assert list(plan.step.values()) == [64, 64_000, 32_000, 3200, 192, 320]
    assert plan.steps == 11 and plan.hours == pytest.approx(11 * plan.flops / (0.5 * 8e14) / 3600)
    assert plan_with(TINY).hours is None


def test_peaks():
    assert known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert known_peak("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert known_peak("NVIDIA H100 NVL", torch.bfloat16) == 835e12
    assert known_peak("NVIDIA A100-SXM4-40GB", torch.float32) == 156e12  # TF32
    assert known_peak("Tesla T4", torch.bfloat16) is None
    state = torch.get_rng_state()
    assert measured_peak(torch.device("cpu"), torch.float32) > 1e8
    assert torch.equal(state, torch.get_rng_state())  # the run's random numbers are left alone


# ------------------------------------------------------------------------------------------- the recipes
def plan_for(*arguments: str):
    return plan_of(*parse_arguments([*arguments, "--plan"]))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        # The towers as published, the projector, and a row for each added token.
        ("nanovlm-222m", 85_797_120 + 134_515_008 + 4 * 768 * 576 + 40 * 576),
        ("nanovlm-460m", 86_433_024 + 361_821_120 + 16 * 768 * 960 + 40 * 960),
        ("smolvlm-256m-finetune", 256_484_928),
        ("smolvlm-256m-lora", 256_484_928),
        ("qwen3-vl-2b-lora", 2_127_532_032),
        ("qwen3-vl-4b-int4-lora", 4_437_815_808),
        ("qwen3.5-0.8b-lora", 852_985_920),
        ("lfm2.5-vl-450m-lora", 85_843_200 + 10_495_488 + 354_483_968),  # tower, projector, LFM2-350M
    ],
)
def test_recipes(recipe, parameters, capsys):
    """Offline, from the configs that come with Ocelli."""
    path = CONFIGS / f"{recipe}.yaml"
    config, options = parse_arguments([str(path), *H100])
    plan, assumed = plan_of(config, options)
    if recipe.startswith("nanovlm"):
        train.main([str(path), *H100])
        assert capsys.readouterr().out == f"{plan.table()}\n{assumed}\n"
    with torch.device("meta"):
        built = sum(p.numel() for p in VisionLanguageModel(network(config)[0]).parameters())
    assert sum(plan.parameters.values()) - plan.parameters.get("adapters", 0) == built == parameters
    assert plan.steps == (config.steps or None) and (plan.hours is None) == (config.steps == 0)
    if "lora" in recipe:
        assert plan.trainable == {"adapters": plan.parameters["adapters"]}
        fewer = plan_for(str(path), *H100, "--lora-targets", "q_proj,v_proj", "--plan-rows", "800")
        attention = {
            "qwen3-vl-2": 28 * (3 * 2048 + 1024),
            "qwen3-vl-4": 36 * (2 * 2560 + 4096 + 1024),
            "qwen3.5-0.": 6 * (2 * 1024 + 2 * 2048 + 512),  # queries and their gates
            "smolvlm-25": 30 * (3 * 576 + 192),
            "lfm2.5-vl-": 6 * (3 * 1024 + 512),
        }
        assert fewer.steps and fewer.parameters["adapters"] == 16 * attention[recipe[:10]]
    # The memory in the recipe's comment is the plan's.
    planned = plan_for(str(path), *H100, "--plan-ranks", "8") if "460m" in recipe else plan
    size = sum(planned.memory.values()) / 2**30
    assert f"{size:.1f} GiB" in path.read_text(), size
    if "460m" in recipe:
        assert planned.table() in (CONFIGS.parent / "docs/train-reference.md").read_text(encoding="utf-8")


def test_a_local_folder(tmp_path):
    tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 30)
    rows = f"[{{path: {tmp_path}/rows.jsonl, allow_text_only: true}}]"
    source = ["--init-from", str(tmp_path / "tiny"), "--data", rows, "--epochs", "2"]
    arguments = [*source, "--sequence-length", "256", "--plan-text", "20", "--plan-tflops", "1"]
    arguments += ["--batch-size", "2"]
    model = VisionLanguageModel.from_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()  # weights are not needed
    plan = plan_for(*arguments)
    assert sum(plan.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert plan.steps == -(-60 // plan.step["samples"])  # two passes over 30 rows
    assert plan_for(*arguments, "--no-packing").step["samples"] == 2
    assert "vision" not in plan_for(*arguments, "--vision-lr", "0").trainable
    # Tiles follow from the processor.
    settings = json.loads((tmp_path / "tiny" / "preprocessor_config.json").read_text())
    settings |= {"do_image_splitting": True, "size": {"longest_edge": 128}}
    (tmp_path / "tiny" / "preprocessor_config.json").write_text(json.dumps(settings))
    limited = plan_for(*arguments, "--max-tiles", "13", "--plan-text", "9")
    assert limited.step["tiles"] == 13 * 2  # 4 x 3, and the whole image


@pytest.mark.parametrize(
    ("recipe", "arguments", "named"),
    [
        ("nanovlm-460m", "--text-from google/siglip2-base-patch16-512", "text backbone"),
        ("nanovlm-460m", "--plan-ranks 3", "--batch-size"),
        ("nanovlm-222m", "--plan-text 5000", "5000"),
        ("smolvlm-256m-lora", "--lora-targets qkv", "--lora-targets"),
        ("smolvlm-256m-lora", "--plan-device abacus", "--plan-device"),
    ],
)
def test_what_cannot_be_planned(recipe, arguments, named, capsys):
    assert named in refused(capsys, [str(CONFIGS / f"{recipe}.yaml"), *arguments.split(), "--plan"])
