"""What a training run needs, before it starts: parameters, memory, FLOPs and hours.

    python train.py configs/nanovlm-460m.yaml --plan --plan-ranks 8

This is arithmetic on the shapes in a `VLMConfig`: no GPU and no weights. `PUBLISHED` has what the shipped
recipes name; other checkpoints need their config.json and tokenizer. What a recipe cannot know about its data
is a flag (`PlanOptions`). The tests compare the formulas with autograd and with torch's counter.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from data.new_processor import SPECIAL_TOKENS
from data.processor import Processor
from data.sources import DatasetConfig, count_rows
from data.tiles import Images
from families import FAMILIES
from families.keys import checked
from models.checkpoints.backbones import read_text_config, read_vision_config
from models.checkpoints.load import choose_family, meta_init
from models.checkpoints.sizes import PARTS as TABLE_PARTS
from models.checkpoints.sizes import module_of
from models.checkpoints.sources import open_files
from models.config import TextConfig, VLMConfig
from models.gated_delta import CHUNK
from models.losses import chunk_positions
from models.packed_vision_transformer import PackedVisionConfig
from models.vision_language_model import VisionLanguageModel, part_size
from training.config import PlanOptions, TrainConfig, dataset_entries
from training.distributed import compute_dtype
from training.flops import (
    Amounts,
    known_peak,
    linear_sizes,
    peak_flops,
    tower_amounts,
    training_flops,
)
from training.optim import is_muon_matrix, part_of
from training.rows import new_tokenizer, sized

_TAGS = 2  # tokens around a tile (what names its place, and a marker), or around a whole image
Tiles = tuple[tuple[int, int], ...]  # heights and widths in pixels of the parts that an image makes
_FILL = 0.97  # share of a packed row that is not padding


@dataclass(frozen=True)
class Device:
    """`kind` is cpu or cuda, `dtype` what is computed in, `peak` FLOP/s."""

    kind: str
    dtype: torch.dtype
    peak: float
    name: str


@dataclass(frozen=True)
class AverageRow:
    """What the data decides; samples of a row are blind to each other. sizes: height and width in
    pixels of each part of an image, none for the tower's tile; fill: share of positions that are not padding;
    labelled: share of these that carry a label; total_samples: of the whole run, None if unknown."""

    tiles: float = 1.0
    sizes: Tiles = ()
    samples: float = 1.0
    fill: float = 1.0
    labelled: float = 0.25
    total_samples: int | None = None


@dataclass(frozen=True)
class Plan:
    """A step is that of all ranks together. `memory` is bytes on each rank, without the libraries' own and
    short-lived buffers. `run_flops` counts the blocks that activation checkpointing runs again; MFU does not.
    `steps` and `hours` are None where the data's length is not known."""

    heading: str
    parameters: dict[str, int]
    trainable: dict[str, int]
    memory: dict[str, int]
    step: dict[str, float]
    flops: float
    run_flops: float
    steps: int | None
    hours: float | None
    rate: str

    def table(self) -> str:
        lines = ["parameters"]
        for name, size in self.parameters.items():
            learns = self.trainable.get(name, 0)
            note = "" if learns == size else "frozen" if not learns else f"{learns:,} learn"
            lines.append(f"{line(name, f'{size:,}')}  {note}".rstrip())
        lines += [line("all", f"{sum(self.parameters.values()):,}"), self.heading]
        memory = self.memory | {"all": sum(self.memory.values())}
        lines += [line(name, f"{size / 2**30:,.2f}") + " GiB" for name, size in memory.items()]
        lines.append("a step, all ranks")
        lines += [line(name, f"{round(value):,}") for name, value in self.step.items()]
        lines.append(line("model FLOPs", f"{self.flops:.3e}"))
        if self.run_flops != self.flops:
            lines.append(line("FLOPs run", f"{self.run_flops:.3e}"))
        lines.append("the run")
        if self.steps is None:
            return "\n".join([*lines, "  unknown length: give the number of rows (--plan-rows), or --steps"])
        lines += [line("steps", f"{self.steps:,}"), line("model FLOPs", f"{self.steps * self.flops:.3e}")]
        return "\n".join([*lines, line("hours", f"{self.hours:,.1f}") + f"  at {self.rate}"])


def line(name: str, value: str) -> str:
    return f"  {name:<22}{value:>16}"


def make_plan(
    config: TrainConfig, options: PlanOptions, device: Device, shape: VLMConfig, row: AverageRow
) -> Plan:
    ranks, learns = options.plan_ranks, config.learns
    per_rank, left = divmod(config.batch_size, ranks)
    micro = config.micro_batch_size or max(1, per_rank)
    if left or per_rank % micro:
        raise ValueError(
            f"--batch-size {config.batch_size}: expected a multiple of ranks x --micro-batch-size, "
            f"{ranks} x {micro}"
        )
    with meta_init():
        parameters = dict(VisionLanguageModel(shape).named_parameters())
    shown = dict.fromkeys(TABLE_PARTS, 0)  # a tied head stays 0: its weights are the embeddings'
    trainable: Counter[str] = Counter()
    for name, parameter in parameters.items():
        shown[module_of(name)] += parameter.numel()
        if part_of(name) in learns:
            trainable[module_of(name)] += parameter.numel()
    if adapters := adapter_weights(config, shape):
        shown["adapters"] = trainable["adapters"] = sum(adapters.values())

    positions, samples = config.batch_size * config.sequence_length, config.batch_size * row.samples
    tokens = positions * row.fill
    amounts = Amounts(
        *_of_tower(shape, row, config.batch_size),
        positions=tokens,
        pairs=tokens * config.sequence_length * row.fill / row.samples,
        labelled=tokens * row.labelled,
    )
    flops = training_flops(shape, amounts, learns, adapters)
    steps = None if row.total_samples is None else math.ceil(row.total_samples / samples)
    where = "1 rank" if ranks == 1 else f"each of {ranks} ranks ({config.parallel})"
    optimizer = {"none": "adamw", "language": "muon", "all": "muon-all"}[config.muon]
    return Plan(
        heading=f"memory of {where}, {str(device.dtype).removeprefix('torch.')}, {optimizer}",
        parameters=shown,
        trainable=dict(trainable),
        memory=memory(config, ranks, device, shape, row, parameters, micro),
        step={
            "rows": config.batch_size,
            "positions": positions,
            "tokens": tokens,
            "labelled tokens": amounts.labelled,
            "tiles": amounts.tiles,
            "samples": samples,
        },
        flops=flops,
        run_flops=training_flops(shape, amounts, learns, adapters, config.activation_checkpointing),
        steps=steps,
        hours=None if steps is None else steps * flops / (options.plan_mfu * device.peak * ranks) / 3600,
        rate=f"{options.plan_mfu:.0%} of {ranks} x {device.peak / 1e12:,.4g} TFLOP/s",
    )


def _of_tower(shape: VLMConfig, row: AverageRow, rows: int) -> tuple[float, float, float]:
    """Tiles of so many rows, their patches, and the pairs of these."""
    sizes = row.sizes or ((shape.vision.least_side,) * 2,)
    return tower_amounts(shape.vision, sizes, rows * row.tiles / len(sizes))


def adapter_weights(config: TrainConfig, shape: VLMConfig) -> Counter[str]:
    """Weights of LoRA adapters by part, {} without: r · (in + out) for each layer (arXiv:2106.09685)."""
    found: Counter[str] = Counter()
    for part, flag in (("language_model", "lora_targets"), ("vision_model", "lora_vision_targets")):
        targets = {name.strip() for name in getattr(config, flag).split(",")} - {""}
        layers = [item for block in linear_sizes(shape, part) for item in block.items()]
        if unknown := sorted(targets - dict(layers).keys()):
            flag, known = flag.replace("_", "-"), ", ".join(dict(layers))
            raise ValueError(f"--{flag}: expected {known}, got {', '.join(unknown)}")
        found[part] = config.lora_rank * sum(sum(size) for name, size in layers if name in targets)
    return +found


# ------------------------------------------------------------------------------------------------- memory
def memory(
    config: TrainConfig,
    ranks: int,
    device: Device,
    shape: VLMConfig,
    row: AverageRow,
    parameters: dict[str, nn.Parameter],
    micro: int,
) -> dict[str, int]:
    """Bytes on each rank for one micro-batch, by what takes them.

    In bfloat16, products run in bfloat16 over float32 master weights: by autocast, which keeps a copy of each
    matrix until backward is through, or under FSDP by gathering a block at a time in bfloat16.
    """
    text, fsdp, full = shape.text, config.parallel == "fsdp" and ranks > 1, device.dtype == torch.float32
    residual, product = (4, 4) if full else (2, 2) if fsdp else (4, 2)  # bytes of a number there
    parts, adapters = config.learns, sum(adapter_weights(config, shape).values())
    learns = {name: p for name, p in parameters.items() if part_of(name) in parts}
    trained = sum(p.numel() for p in learns.values()) + adapters
    muon = sum(p.numel() for name, p in learns.items() if is_muon_matrix(name, p, config.muon))
    shards = ranks if fsdp else 1
    master = 4 * (sum(p.numel() for p in parameters.values()) + adapters) / shards
    gathered = 0
    if fsdp:  # held whole at a time: the largest block, the next one, and what is in no block
        blocks: Counter[str] = Counter()
        for name, parameter in parameters.items():
            head, found, rest = name.partition(".layers.")
            blocks[f"{head}.{rest.split('.')[0]}" if found else ""] += parameter.numel()
        gathered = blocks.pop("") + 2 * max(blocks.values())
    # Gathered blocks have whole gradients until these are scattered.
    gradients = 4 * trained / shards + ((4 if full else 2) * gathered if learns else 0)
    weights = master + 4 * gathered if full else 2 * (gathered or _cast(_reached(config), shape, parameters))

    labelled = micro * config.sequence_length * row.fill * row.labelled
    # A chunk of float32 logits, with their product and gradient where those are narrower, and the hidden
    # states of labelled positions with their gradient; see models/losses.py.
    chunk = min(labelled, chunk_positions(text.vocab_size, device.kind))
    logits = chunk * text.vocab_size * (4 + (2 * product if product < 4 else 0))
    activations = activation_bytes(config, shape, row, micro, residual, product, device.kind == "cuda")
    if device.kind == "cpu" and row.samples > 1:
        # The mask between samples, T² for a row.
        activations += micro * config.sequence_length**2 * product
    # Numbers of the micro-batch that is computed with, and of the next, which is copied meanwhile.
    _, patches, _ = _of_tower(shape, row, micro)
    pixels = 2 * 4 * patches * shape.vision.num_channels * shape.vision.patch_size**2
    result = {
        "weights": weights,
        "master weights": 0 if full else master,
        "gradients": gradients,
        # Two moments of AdamW, one momentum of Muon; float32.
        "optimizer state": (8 * (trained - muon) + 4 * muon) / shards,
        "weight average": 4 * trained / shards if config.ema else 0,
        "activations": activations,
        "pixels": pixels if device.kind == "cuda" else 0,
        "logits of a chunk": logits + 2 * labelled * text.hidden_size * residual,
    }
    return {name: round(size) for name, size in result.items() if size or name in ("weights", "gradients")}


def _reached(config: TrainConfig) -> frozenset[str]:
    """The parts that learn, by their own weights or by adapters in the tower."""
    return config.learns | ({"vision_model"} if config.lora_vision_targets else set())


def _cast(parts: frozenset[str], shape: VLMConfig, parameters: dict[str, nn.Parameter]) -> int:
    """Weights that autocast copies until backward: matrices and their biases, but neither tables nor norms,
    and not those in front of everything that learns, which backward does not reach."""
    frozen = {"vision_model", "projector"} - parts
    unreached = frozen if len(frozen) == 2 else frozen & {"vision_model"}
    tables = ("norm", "embed_tokens", "position_embedding")
    copied = sum(
        p.numel()
        for name, p in parameters.items()
        if part_of(name) not in unreached and not any(table in name for table in tables)
    )
    # A tied head is multiplied with as well.
    return copied + (shape.text.vocab_size * shape.text.hidden_size if shape.tie_word_embeddings else 0)


def activation_bytes(
    config: TrainConfig,
    shape: VLMConfig,
    row: AverageRow,
    micro: int,
    residual: int,
    product: int,
    fused: bool,
) -> float:
    """What one micro-batch keeps for backward on one rank, without the head's share.

    Products keep their inputs: one for q, k, v and one for gate, up (or fc1), but one each under autocast,
    where each product casts its own. Attention keeps q, k, v, its output, and a float32 normalizer for each
    head. With checkpointing, each block keeps its input alone, and one block at a time has everything.
    """
    vision, text, learns = shape.vision, shape.text, _reached(config)
    casts, size = residual != product, 0.0
    (_, patches, _), positions = _of_tower(shape, row, micro), micro * config.sequence_length
    packed = isinstance(vision, PackedVisionConfig)

    def rms(width: int, learns: bool) -> float:
        """A fused norm keeps its input; elsewhere a float32 one, and what comes out before the weight."""
        return width * residual + 4 if fused else width * (8 if learns else 4)

    def blocks(each: list[float], width: int) -> float:
        return len(each) * width * residual + max(each) if config.activation_checkpointing else sum(each)

    if "vision_model" in learns:
        width, gated = vision.hidden_size, packed and vision.gated_mlp
        norm = rms(width, True) if packed and vision.norm == "rms" else width * residual + 8
        # LayerNorms keep their input, mean and deviation; the MLP keeps what goes into its activation and
        # comes out, a gated one also what that is multiplied with, and the product; packed attention joins
        # what comes out of its segments.
        block = 2 * norm + (4 + gated if casts else 2) * width * product
        block += (4 + packed) * width * product + 4 * vision.num_attention_heads
        block += (4 if gated else 2) * vision.intermediate_size * product
        tower = blocks([block] * vision.num_hidden_layers, width) + width * residual + 8
        size += patches * (vision.num_channels * vision.patch_size**2 * product + tower)
    if packed:
        deep = len(vision.taps)
        if {"vision_model", "projector"} & learns:
            # Each merger keeps what goes into its norm, of some with a copy, its layers and its activation.
            inner = vision.merger_width or vision.hidden_size * vision.merge_size**2
            normed = vision.merger_norm != "none"
            merger = vision.hidden_size * (residual * normed + product) + 8
            merger += 2 * inner / vision.merge_size**2 * product
            size += patches * (merger * (1 + deep) + deep * vision.hidden_size * residual)
            size += patches / vision.merge_size**2 * (1 + deep) * text.hidden_size * residual
        # The first block's input lies in one tensor with what is added after the next ones.
        size += positions * deep * text.hidden_size * residual
    elif "projector" in learns:
        size += patches * vision.hidden_size * product

    # Gradients pass the whole decoder, whatever learns: adapters sit in its first block.
    speaks, width = "language_model" in learns, text.hidden_size
    needs_inputs = speaks or config.lora_rank > 0
    norm = rms(width, speaks)
    heads, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    swiglu = (4 if needs_inputs else 3) * text.intermediate_size * product
    attention: float = 2 * (heads + keys) * product + 4 * text.num_attention_heads
    attention += (3 if casts else 1) * width * product * needs_inputs
    if text.attention_gate:  # its sigmoid, and what that weighs
        attention += (2 if casts else 3) * heads * product
    if text.qk_norm:
        attention += rms(heads + keys, speaks)
    # A short convolution keeps its gates and value, what its taps are multiplied with, plain and padded, the
    # sum, and the inputs of its two products.
    convolution = (3 + 2 * speaks + 2 * needs_inputs) * width * product + width * residual
    mixers = {
        "attention": attention,
        "conv": convolution,
        "delta": _delta_bytes(text, residual, product, speaks),
    }
    shared = text.block_norms * norm + (1 + casts) * width * product * needs_inputs + swiglu
    if text.block_norms > 2:  # after each part as well, of which what came out is kept
        shared += 2 * width * residual
    each = [shared + mixers.get(text.mixer(layer), attention) for layer in range(text.num_hidden_layers)]
    return size + positions * (blocks(each, width) + norm)


def _delta_bytes(text: TextConfig, residual: int, product: int, speaks: bool) -> float:
    """What the gated delta rule keeps of a position: its convolution as a short one does, and in float32
    scores within a chunk, the matrix before it, keys, queries, what is added, and the gated norm."""
    heads, dim, value_dim = text.delta_value_heads, text.delta_key_dim, text.delta_value_dim
    keys, values = heads * dim, heads * value_dim
    inputs = 2 * text.delta_key_heads * dim + values
    scores = heads * (6 * CHUNK + dim * value_dim / CHUNK + 10)
    rule = 4 * (scores + 6 * keys + (7 + speaks) * values + inputs) + CHUNK
    return rule + inputs * (residual + 2 * speaks * product) + (heads + values) * product


# ----------------------------------------------------------------------------------- from a recipe
def choose_device(config: TrainConfig, options: PlanOptions) -> Device:
    """What the run is planned for. By default, --device cpu means this machine's CPU."""
    wanted, here = options.plan_device.lower(), torch.cuda.is_available()
    if wanted == "auto" and config.device == "cpu":
        wanted = "cpu"
    kind = "cpu" if wanted == "cpu" else "cuda"
    dtype = compute_dtype(config, kind)
    if options.plan_tflops:
        return Device(kind, dtype, options.plan_tflops * 1e12, f"{options.plan_tflops:g} TFLOP/s")
    if wanted == "cpu" or (wanted == "auto" and here):
        return Device(kind, dtype, *peak_flops(torch.device(kind), dtype))
    name = "H100" if wanted == "auto" else options.plan_device
    return Device(kind, dtype, known_peak(name, dtype) or 0.0, f"{name}, data sheet")


def plan_of(config: TrainConfig, options: PlanOptions) -> tuple[Plan, str]:
    """The plan of a run on rows, and what it assumes."""
    shape, sizes = network(config)
    tiles = len(sizes) if options.plan_tiles == -1 else options.plan_tiles
    positions = sum(FAMILIES[shape.family].positions(shape, *size) for size in sizes) / len(sizes)
    tokens = tiles * (positions + _TAGS) + options.plan_text
    most = config.max_tiles or config.sequence_length
    if tokens > config.sequence_length or tiles > most:
        raise ValueError(
            f"a sample of {tiles:g} tiles and {options.plan_text} text tokens takes {tokens:g} positions: "
            f"expected at most {config.sequence_length} positions (--sequence-length) and {most:g} tiles "
            "(--max-tiles), which a row holds"
        )
    samples = 1.0
    if config.packing and config.task == "answers":
        samples = max(1.0, min(_FILL * config.sequence_length / tokens, most / tiles if tiles else math.inf))
    rows = options.plan_rows or _rows_here(config)
    total = rows and rows * (config.epochs or 1)
    if config.steps:
        total = math.floor(config.steps * config.batch_size * samples)
    row = AverageRow(
        tiles=samples * tiles,
        sizes=sizes,
        samples=samples,
        fill=min(1.0, samples * tokens / config.sequence_length),
        labelled=options.plan_labelled * options.plan_text / tokens,
        total_samples=total,
    )
    device = choose_device(config, options)
    described = " and ".join(dict.fromkeys(f"{width} x {height}" for height, width in sizes))
    return make_plan(config, options, device, shape, row), (
        f"assumed: a sample is {tiles:g} tiles of {described} pixels, {positions:g} positions each, and "
        f"{options.plan_text} tokens of text, {options.plan_labelled:.0%} of them answers (--plan-tiles, "
        f"--plan-text, --plan-labelled); {device.name} (--plan-device)"
    )


def describe_plan(config: TrainConfig, options: PlanOptions) -> str:
    """The plan of a run on rows, as `--plan` prints it."""
    plan, assumed = plan_of(config, options)
    return f"{plan.table()}\n{assumed}"


# Configs of the checkpoints that the shipped recipes name, as the Hub has them: a plan needs no network.
def _smollm2(
    width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int = 49_152
) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "tie_word_embeddings": True,
    }


_SIGLIP = {"model_type": "siglip_vision_model"}  # the rest is as transformers has it by default: base/16
PUBLISHED: dict[str, dict[str, Any]] = {
    "google/siglip-base-patch16-224": _SIGLIP | {"image_size": 224},
    "google/siglip2-base-patch16-512": _SIGLIP | {"image_size": 512},
    "HuggingFaceTB/SmolLM2-135M": _smollm2(576, 1536, 30, 9, 3),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _smollm2(960, 2560, 32, 15, 5),
    "HuggingFaceTB/SmolVLM-256M-Instruct": {
        "model_type": "idefics3",
        "image_token_id": 49_190,
        "scale_factor": 4,
        "tie_word_embeddings": False,
        "text_config": _smollm2(576, 1536, 30, 9, 3, 49_280),
        "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
    },
    "Qwen/Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262_144,
        },
        "vision_config": {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "Qwen/Qwen3.5-0.8B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
            "max_position_embeddings": 262_144,
        },
        "vision_config": {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072},
    },
    "LiquidAI/LFM2.5-VL-450M": {
        "model_type": "lfm2_vl",
        "text_config": {
            "hidden_size": 1024, "block_ff_dim": 6656, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
        "vision_config": {},  # as transformers has it by default
    },
}  # fmt: skip
_QWEN_IMAGES = {"patch_size": 16, "size": {"longest_edge": 2**24}}
# Of those that see, the settings of their preprocessor_config.json that are not the defaults.
IMAGES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": {
        "size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}
    },
    "Qwen/Qwen3-VL-2B-Instruct": _QWEN_IMAGES,
    "Qwen/Qwen3.5-0.8B": _QWEN_IMAGES,
    "LiquidAI/LFM2.5-VL-450M": {},
}  # fmt: skip
SMOLLM2_TOKENS = 3  # of SmolVLM's special tokens, those that SmolLM2's tokenizers have


def network(config: TrainConfig) -> tuple[VLMConfig, Tiles]:
    """The shape of the model that a run on rows trains, and the parts that its processor makes of a 4:3
    photograph."""
    if config.init_from:
        shape = stored_shape(config.init_from)
        images = sized(_images_of(config.init_from, shape), config)
    else:
        shape = _joined_shape(config)
        side = {"longest_edge": shape.vision.least_side}
        settings = {"size": side, "max_image_size": side, "do_image_splitting": False}
        images = sized(FAMILIES[shape.family].image_rule(settings, shape), config)
    return shape, tuple(part_size(part.pixels) for part in images.plan(4000, 3000).parts)


def _joined_shape(config: TrainConfig) -> VLMConfig:
    """Of a model that starts from backbones."""
    stored, added = config_of(config.text_from), len(SPECIAL_TOKENS) - SMOLLM2_TOKENS
    text = read_text_config(stored)
    if config.text_from in PUBLISHED:
        vocabulary = text.vocab_size + added
    else:
        vocabulary = max(text.vocab_size, len(new_tokenizer(open_files(config.text_from).processor_folder)))
    return checked(
        VLMConfig,
        vision=read_vision_config(config_of(config.vision_from)),
        text=replace(text, vocab_size=vocabulary),
        scale_factor=config.scale_factor,
        image_token_id=vocabulary - 1,
        tie_word_embeddings=bool(stored.get("tie_word_embeddings", False)),
    )


def config_of(source: str) -> dict[str, Any]:
    return PUBLISHED.get(source) or open_files(source).config


def stored_shape(source: str) -> VLMConfig:
    """The shape of a checkpoint."""
    stored = config_of(source)
    return choose_family(stored, source).read_config(stored, {}, {})


def _images_of(source: str, shape: VLMConfig) -> Images:
    """How a checkpoint's processor cuts images."""
    if source in IMAGES:
        return FAMILIES[shape.family].image_rule(IMAGES[source], shape)
    return Processor.from_pretrained(source, shape).images


def _rows_here(config: TrainConfig) -> int | None:
    """Rows of the data, if all of it lies on this machine."""
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.data)]
    counts = [None if one.streaming else count_rows(one.path, one.subset, one.split) for one in entries]
    return None if None in counts else round(sum(count or 0 for count in counts) * (1 - config.holdout))
