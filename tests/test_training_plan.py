"""Plans against what is counted and measured: parameters, optimizer state, FLOPs, what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shapes import SHAPES
from data.packing import dense_mask
from models.config import VLMConfig
from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from training.costs import count, is_muon_matrix, meta_parameters, part_of
from training.optim import Muon
from training.plan import Plan, Workload, make_plan

_TINY = SHAPES["tiny"]
TINY = replace(  # with several layers and heads, so that what grows with them is counted
    _TINY,
    vision=replace(
        _TINY.vision,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
    ),
    text=replace(_TINY.text, intermediate_size=160, num_hidden_layers=4, num_attention_heads=8, head_dim=8),
)
ROWS, LENGTH, TILES = 2, 96, 2
LABELLED = 0.25


def model_of(config: VLMConfig, frozen=()) -> VisionLanguageModel:
    model = VisionLanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    return model


def batch_of(config: VLMConfig, documents: int = 1) -> dict[str, torch.Tensor]:
    """Rows with TILES tiles each, the last quarter of the row labelled; cut into documents of one length."""
    ids = torch.randint(1, 190, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, : TILES * config.tokens_per_tile] = config.image_token_id
    labels = ids.clone()
    labels[:, : int(LENGTH * (1 - LABELLED))] = IGNORE_INDEX
    side = config.vision.image_size
    batch = {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(ROWS * TILES, 3, side, side)}
    if documents > 1:
        of = torch.arange(LENGTH).div(LENGTH // documents, rounding_mode="floor")[None].expand(ROWS, -1) + 1
        batch["attention_mask"] = dense_mask(of)
    return batch


def workload(**fields) -> Workload:
    sizes = {"micro_batch": ROWS, "sequence_length": LENGTH, "tiles_per_row": TILES, "labelled": LABELLED}
    return Workload(**sizes | {"precision": "float32", "device": "cpu"} | fields)


# --------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize(
    ("shape", "total"),
    [("SmolVLM-256M", 256_484_928), ("SmolVLM-500M", 507_482_304), ("SmolVLM-2.2B", 2_246_272_880)],
)
def test_parameters_are_the_published_ones(shape, total):
    plan = make_plan(SHAPES[shape], Workload())
    assert sum(plan.parameters.values()) == sum(plan.trainable.values()) == total


def test_parameters_by_part():
    plan = make_plan(SHAPES["SmolVLM-256M"], Workload(frozen={"vision"}))
    text = SHAPES["SmolVLM-256M"].text
    assert plan.parameters["head"] == plan.parameters["embeddings"] == text.vocab_size * text.hidden_size
    assert plan.parameters["projector"] == 768 * 16 * 576
    assert plan.trainable.keys() == {"projector", "embeddings", "blocks", "head"}
    tied = make_plan(replace(SHAPES["SmolVLM-256M"], tie_word_embeddings=True), Workload())
    assert (
        tied.parameters["head"] == 0
        and tied.memory["weights"] == make_plan(SHAPES["SmolVLM-256M"], Workload()).memory["weights"]
    )
    assert count(meta_parameters(TINY)) == {
        part: sum(p.numel() for n, p in model_of(TINY).named_parameters() if part_of(n) == part)
        for part in ("vision", "projector", "language")
    }


def test_adapters_are_counted_as_peft_makes_them():
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=targets), model_of(TINY).language_model
    )
    made = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    plan = make_plan(TINY, workload(lora_rank=4, frozen={"vision", "projector"}))
    assert plan.trainable == {"adapters": made}
    assert plan.memory["optimizer state"] == 8 * made and plan.memory["gradients"] == 4 * made


# ------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", "language")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_state_are_those_of_a_real_step(optimizer, frozen):
    model = model_of(TINY, frozen)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if optimizer == "muon" and is_muon_matrix(name, p)]
    others = [p for name, p in named if not any(p is matrix for matrix in matrices)]
    used = [torch.optim.AdamW(others), *([Muon(matrices)] if matrices else [])]
    model.loss(**batch_of(TINY))[0].backward()
    for one in used:
        one.step()
    plan = make_plan(TINY, workload(optimizer=optimizer, frozen=frozenset(frozen)))
    state = [
        value for one in used for kept in one.state.values() for value in kept.values() if value.numel() > 1
    ]
    assert plan.memory["optimizer state"] == sum(value.nbytes for value in state)
    assert plan.memory["weights"] == sum(p.nbytes for p in model.parameters())
    assert plan.memory["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


class Kept:
    """Bytes that autograd saves in a forward pass, each storage once, those of parameters not."""

    def __init__(self, model):
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is given twice

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def kept_by(model, autocast: bool = False, **batch) -> int:
    kept = Kept(model)
    with (
        torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        total, _ = model.loss(**batch)
    assert total.requires_grad
    return kept.bytes


@pytest.mark.parametrize("frozen", [(), ("vision",), ("language",)], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("documents", [1, 4])
def test_activations_are_what_autograd_keeps(precision, frozen, documents):
    model, autocast = model_of(TINY, frozen), precision == "bfloat16"
    plan = make_plan(TINY, workload(precision=precision, frozen=frozenset(frozen), samples_per_row=documents))
    measured = kept_by(model, autocast, **batch_of(TINY, documents))
    expected = plan.memory["activations"]
    if autocast:  # copies of weights are saved with them
        expected += plan.memory["weights"]
    if "language" not in frozen:  # the loss has the head's gradient ready
        measured -= model.language_model.lm_head.weight.nbytes
    assert expected == pytest.approx(measured, rel=0.03)


def test_activations_of_blocks_in_bfloat16():
    model = model_of(TINY).bfloat16()
    batch = batch_of(TINY)
    measured = kept_by(model, **batch) - model.language_model.lm_head.weight.nbytes
    plan = make_plan(TINY, workload(precision="bfloat16", distribution="fsdp", world_size=2))
    assert plan.memory["activations"] == pytest.approx(measured, rel=0.03)


def test_checkpointing_keeps_little():
    whole, little = (
        make_plan(SHAPES["SmolVLM-256M"], Workload(checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    assert little.memory["activations"] < 0.15 * whole.memory["activations"]
    assert little.flops_per_step == whole.flops_per_step == whole.run_flops_per_step
    assert 1.2 < little.run_flops_per_step / little.flops_per_step < 4 / 3


def test_fsdp_cuts_what_it_shards():
    config = SHAPES["SmolVLM-2.2B"]
    ddp, fsdp = (
        make_plan(config, Workload(distribution=kind, world_size=8)).memory for kind in ("ddp", "fsdp")
    )
    assert ddp["optimizer state"] == 8 * 2_246_272_880 == 8 * fsdp["optimizer state"]
    assert ddp["master weights"] == 8 * fsdp["master weights"]
    assert fsdp["weights"] < 0.3 * ddp["weights"] and fsdp["gradients"] < 0.3 * ddp["gradients"]
    alone = make_plan(config, Workload()).memory
    assert alone == make_plan(config, Workload(distribution="ddp", world_size=8)).memory


# -------------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.parametrize("frozen", [(), ("vision",), ("language",), ("projector", "language")], ids=str)
def test_flops_are_those_of_torchs_counter(frozen):
    model = model_of(TINY, frozen)
    batch = batch_of(TINY)
    # Plain products, which the counter knows; fused attention on a CPU it does not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(**batch)[0].backward()
    plan = make_plan(TINY, workload(frozen=frozenset(frozen)))
    assert plan.flops_per_step == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_flops_of_the_published_shape():
    """6 FLOPs for each weight and position, and attention: no more than a rough count, to a few percent."""
    config, tokens = SHAPES["SmolVLM-256M"], 4096
    plan = make_plan(config, Workload(labelled=1.0, tiles_per_row=0))
    weights = plan.parameters["blocks"] + plan.parameters["head"]
    attention = 12 * config.text.num_hidden_layers * 9 * 64 * tokens
    assert plan.flops_per_step == pytest.approx(tokens * (6 * weights + attention), rel=0.01)
    packed = make_plan(config, Workload(labelled=1.0, tiles_per_row=0, samples_per_row=4))
    assert plan.flops_per_step - packed.flops_per_step == pytest.approx(tokens * attention * 0.75, rel=0.01)


# ---------------------------------------------------------------------------------------------- the whole
def test_a_step_and_a_run():
    work = Workload(
        micro_batch=2,
        accumulation=4,
        world_size=8,
        distribution="ddp",
        sequence_length=1000,
        tiles_per_row=3,
        samples_per_row=5,
        fill=0.5,
        labelled=0.1,
        total_samples=3201,
        mfu=0.5,
        peak_flops=1e14,
    )
    plan = make_plan(TINY, work)
    assert (plan.rows_per_step, plan.positions_per_step, plan.tokens_per_step) == (64, 64_000, 32_000)
    assert (plan.labels_per_step, plan.tiles_per_step, plan.samples_per_step) == (3200, 192, 320)
    assert plan.steps == 11 and plan.total_flops == 11 * plan.flops_per_step
    assert plan.hours == pytest.approx(plan.total_flops / (0.5 * 8e14) / 3600)
    assert make_plan(TINY, replace(work, total_samples=None, total_tokens=64_001)).steps == 3
    assert make_plan(TINY, replace(work, total_samples=None)).hours is None
    assert plan.memory_bytes == sum(plan.memory.values())


def test_table():
    work = Workload(
        micro_batch=4, world_size=8, distribution="ddp", frozen={"vision"}, total_samples=10**6,
        checkpointing=True, peak_flops=989e12, average=True,
    )  # fmt: skip
    plan = make_plan(SHAPES["SmolVLM-256M"], work)
    assert isinstance(plan, Plan)
    lines = plan.table().splitlines()
    assert any(line.split() == ["vision", "86,433,024", "frozen"] for line in lines), lines
    assert "memory of each of 8 ranks (ddp), bfloat16, adamw" in lines
    assert any(line.startswith("  weight average") for line in lines)
    assert lines[-1].endswith("at 40% of 8 x 989 TFLOP/s")
    unknown = make_plan(TINY, workload()).table().splitlines()[-1]
    assert unknown == "  no length given: say how many rows the data have (--plan-rows), or --steps"
    adapted = make_plan(TINY, workload(lora_rank=8, frozen={"vision", "projector"}))
    assert "adapters" in adapted.table() and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "fp8"}, "precision: expected one of"),
        ({"world_size": 2}, "distribution: 2 ranks need ddp or fsdp"),
        ({"frozen": {"vision", "projector", "language"}}, "nothing would learn"),
        ({"frozen": {"head"}}, r"frozen: expected some of .* got \['head'\]"),
        ({"fill": 0}, "fill: expected a share from 0 to 1, got 0"),
        ({"micro_batch": 0}, "micro_batch: expected at least 1, got 0"),
        ({"tiles_per_row": -1}, "tiles_per_row: expected 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Workload(**fields)
