"""What a training run needs, before it starts: parameters, memory, FLOPs and hours.

    python train.py configs/nanovlm-460m.yaml --plan --plan-ranks 8

The run's model goes through a micro-batch under FakeTensorMode, where tensors have shapes and no numbers; the
rest is arithmetic: no GPU and no weights. `PUBLISHED` has what the shipped recipes name; other checkpoints
need their config.json and tokenizer. What a recipe cannot know about its data is a flag (`PlanOptions`).
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from data.image_rules import Images
from data.new_processor import SPECIAL_TOKENS
from data.processor import Processor
from data.sources import DatasetConfig, count_rows
from families import FAMILIES
from generation.fast.quantized import pack_layer, replace_layers, rounded_bytes
from models.checkpoints.backbones import TEXT, VISION, choose_backbone
from models.checkpoints.load import Uninitialised, choose_family, read_config
from models.checkpoints.quantized import kept_bytes as bytes_of_codes
from models.checkpoints.save import written
from models.checkpoints.sizes import PARTS as TABLE_PARTS
from models.checkpoints.sizes import module_of, read_headers
from models.checkpoints.sources import open_files
from models.checkpoints.weights import Entry, StoredTensor
from models.config import VLMConfig
from models.losses import chunk_positions
from models.vision_language_model import VisionLanguageModel, part_size
from training.config import PlanOptions, TrainConfig, dataset_entries
from training.distributed import blocks_of, compute_dtype, has_codes
from training.flops import PEAKS, Amounts, costs, known_peak, peak_flops, tower_amounts, training_flops
from training.lora import add_adapters, weights_of
from training.optim import is_muon_matrix, part_of
from training.rows import new_tokenizer, sized

_TAGS = 2  # tokens around a tile (what names its place, and a marker), or around a whole image
Tiles = tuple[tuple[int, int], ...]  # heights and widths in pixels of the parts that an image makes
_FILL = 0.97  # share of a packed row that is not padding


class Device(NamedTuple):
    """`kind` is cpu or cuda, `dtype` what is computed in, `peak` FLOP/s."""

    kind: str
    dtype: torch.dtype
    peak: float
    name: str


@dataclass(frozen=True)
class AverageRow:
    """An average row of the data; its samples are blind to each other. sizes: height and width in
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
    short-lived buffers. `steps` and `hours` are None where the data's length is not known."""

    heading: str
    parameters: dict[str, int]
    trainable: dict[str, int]
    memory: dict[str, int]
    step: dict[str, float]
    flops: float
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
        lines += [line("model FLOPs", f"{self.flops:.3e}"), "the run"]
        if self.steps is None:
            return "\n".join([*lines, "  unknown length: give the number of rows (--plan-rows), or --steps"])
        lines += [line("steps", f"{self.steps:,}"), line("model FLOPs", f"{self.steps * self.flops:.3e}")]
        return "\n".join([*lines, line("hours", f"{self.hours:,.1f}") + f"  at {self.rate}"])


def line(name: str, value: str) -> str:
    return f"  {name:<22}{value:>16}"


def make_plan(
    config: TrainConfig, options: PlanOptions, device: Device, shape: VLMConfig, row: AverageRow
) -> Plan:
    ranks = options.plan_ranks
    per_rank, left = divmod(config.batch_size, ranks)
    micro = config.micro_batch_size or max(1, per_rank)
    if left or per_rank % micro:
        raise ValueError(
            f"--batch-size {config.batch_size}: expected a multiple of ranks x --micro-batch-size, "
            f"{ranks} x {micro}"
        )
    positions, samples = config.batch_size * config.sequence_length, config.batch_size * row.samples
    tokens = positions * row.fill
    sizes = _sizes(shape, row)
    amounts = Amounts(
        *tower_amounts(shape.vision, sizes, config.batch_size * row.tiles / len(sizes)),
        positions=tokens,
        pairs=tokens * config.sequence_length * row.fill / row.samples,
        labelled=tokens * row.labelled,
    )
    known = config.weights != "auto" or not config.lora_rank or config.init_from in (*PUBLISHED, "")
    kind = weights_of(config, None if known else open_files(config.init_from))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = planned_model(config, shape, kind)
        needed = memory(config, ranks, device, model, row, micro)
    if codes := kept_bytes(config, kind, model):
        needed = {"codes, on each rank": codes} | needed
    shown = dict.fromkeys(TABLE_PARTS, 0)  # a tied head stays 0: its weights are the embeddings'
    trainable: Counter[str] = Counter()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        module = "adapters" if "lora_" in name else module_of(name)
        shown[module] = shown.get(module, 0) + parameter.numel()
        if parameter.requires_grad:
            trainable[module] += parameter.numel()
    flops = training_flops(costs(model), amounts)
    steps = None if row.total_samples is None else math.ceil(row.total_samples / samples)
    where = "1 rank" if ranks == 1 else f"each of {ranks} ranks ({config.parallel})"
    optimizer = {"none": "adamw", "language": "muon", "all": "muon-all"}[config.muon]
    return Plan(
        heading=f"memory of {where}, {str(device.dtype).removeprefix('torch.')}, {optimizer}",
        parameters=shown,
        trainable=dict(trainable),
        memory=needed,
        step={
            "rows": config.batch_size,
            "positions": positions,
            "tokens": tokens,
            "labelled tokens": amounts.labelled,
            "tiles": amounts.tiles,
            "samples": samples,
        },
        flops=flops,
        steps=steps,
        hours=None if steps is None else steps * flops / (options.plan_mfu * device.peak * ranks) / 3600,
        rate=f"{options.plan_mfu:.0%} of {ranks} x {device.peak / 1e12:,.4g} TFLOP/s",
    )


def _sizes(shape: VLMConfig, row: AverageRow) -> Tiles:
    return row.sizes or ((shape.vision.least_side,) * 2,)


def planned_model(config: TrainConfig, shape: VLMConfig, kind: str) -> VisionLanguageModel:
    """The model that the run trains. Frozen matrices of any `kind` but float32 are bfloat16 here: autograd
    keeps as little of one as of the other."""
    with Uninitialised():
        model = VisionLanguageModel(shape)
    if kind != "float32":
        frozen = [name for name, _ in model.named_modules() if part_of(name) not in config.learns]
        replace_layers(
            model, partial(pack_layer, "bfloat16"), names=[f"{name}.weight" for name in frozen if name]
        )
    if config.lora_rank:
        add_adapters(model, config, written(shape)[1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or part_of(name) in config.learns)
    return model


def kept_bytes(config: TrainConfig, kind: str, model: VisionLanguageModel) -> int:
    """Bytes of what `planned_model` has in bfloat16, in its kind (`training.lora.weights_of`)."""
    total, place, entries = 0.0, StoredTensor, dict[str, Entry]()
    if kind == "codes":
        opened = open_files(config.init_from)
        headers = read_headers(opened)
        entries = headers.entries if headers else entries
        place = choose_family(opened.config, opened.source).tensor_map(entries)
    for buffer_name, one in model.named_buffers():
        name, size = buffer_name.replace(".base_layer.", "."), float(one.nbytes)
        if one.dim() == 2 and entries and part_of(name) == "language_model":
            size = bytes_of_codes(entries[place(name).name]) / place(name).parts
        elif one.dim() == 2 and kind in ("int8", "int4"):
            size = rounded_bytes(kind, name, one.shape)
        total += size
    return round(total)


# ------------------------------------------------------------------------------------------------- memory
def memory(
    config: TrainConfig, ranks: int, device: Device, model: VisionLanguageModel, row: AverageRow, micro: int
) -> dict[str, int]:
    """Bytes on each rank for one micro-batch, by what takes them. Weights are float32; in bfloat16, products
    run under autocast, or under FSDP on blocks that are gathered in bfloat16, two at a time."""
    text, full = model.config.text, device.dtype == torch.float32
    parameters = dict(model.named_parameters())
    learns = {name: p for name, p in parameters.items() if p.requires_grad}
    trained = sum(p.numel() for p in learns.values())
    muon = sum(p.numel() for name, p in learns.items() if is_muon_matrix(name, p, config.muon))
    shards, gathered = 1, 0
    codes = has_codes(model)
    if config.parallel == "fsdp" and ranks > 1 and not codes:  # whole are two blocks, and what is in no block
        blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
        everything = sum(p.numel() for p in parameters.values())
        shards, gathered = ranks, (4 if full else 2) * (everything - sum(blocks) + 2 * max(blocks))
    labelled = micro * config.sequence_length * row.fill * row.labelled
    # A chunk of float32 logits, with their product and gradient where those are narrower, and the hidden
    # states of labelled positions with their gradient; see models/losses.py.
    chunk = min(labelled, chunk_positions(text.vocab_size, device.kind))
    # A head that runs again in backward: logits, their logarithms, and the gradients of both.
    each = 12 if codes or config.task != "answers" else 4 if full else 8
    logits = chunk * text.vocab_size * each + 8 * labelled * text.hidden_size
    result = {
        "weights": 4 * sum(p.numel() for p in parameters.values()) / shards + gathered,
        # Gathered blocks have whole gradients until these are scattered.
        "gradients": 4 * trained / shards + (gathered if learns else 0),
        # Two moments of AdamW, one momentum of Muon; float32.
        "optimizer state": (8 * (trained - muon) + 4 * muon) / shards,
        "weight average": 4 * trained / shards if config.ema else 0,
        "activations": activation_bytes(config, device, model, row, micro),
        "logits of a chunk": logits,
    }
    return {name: round(size) for name, size in result.items() if size or name in ("weights", "gradients")}


def activation_bytes(
    config: TrainConfig, device: Device, model: VisionLanguageModel, row: AverageRow, micro: int
) -> float:
    """Bytes that autograd keeps of a micro-batch's forward pass, without the head's; copies of weights that
    autocast makes are in it. With checkpointing, a block keeps its input alone, and one at a time everything.

    Of blocks that are alike two run: the first one keeps what all share as well. On a GPU a fused norm keeps
    a little less than is counted.
    """
    weights = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept = dict[int, torch.UntypedStorage]()  # held, so that no address is given twice
    total, inputs = 0, 0
    of_kind = dict[Any, list[int]]()  # of each block, by what blocks that are alike have in common

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage._cdata not in weights:
            kept[storage._cdata] = storage
            total += storage.nbytes()
        return tensor

    def forward(block: nn.Module, plain: Callable, x: Tensor, *given: Any) -> Tensor:
        nonlocal total, inputs
        kind = (x.requires_grad, *((p.shape, p.requires_grad) for p in block.parameters()))
        before, seen = total, of_kind.setdefault(kind, [])
        if len(seen) < 2:
            out = plain(x, *given)
        else:
            total, out = total + seen[1], x.clone()
        seen.append(total - before)
        inputs += x.nbytes
        return out

    for block in blocks_of(model):
        block.forward = partial(forward, block, block.forward)
    length, sizes = config.sequence_length, _sizes(model.config, row)
    images = [torch.zeros(3, *sizes[at % len(sizes)]) for at in range(round(micro * row.tiles))]
    positions = torch.arange(length) % math.ceil(length / row.samples)
    places_of = (3, micro, length) if model.config.text.rope_sections else (micro, length)
    masked = row.samples > 1 and device.kind == "cpu"  # on a GPU the mask is a few blocks
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),  # of a norm in two types
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=device.dtype != torch.float32),
    ):
        pixels: Any = torch.stack(images) if images and len({*sizes}) == 1 else images
        features = torch.cat(tuple(model.encode_images(pixels))) if images else None
        x = model.place_features(
            torch.zeros(micro, length, dtype=torch.int64),
            features,
            torch.arange(0 if features is None else len(features)),
        )
        mask = torch.ones(micro, length, length, dtype=torch.bool) if masked else None
        model.language_model(x, mask, position_ids=positions.expand(places_of))
    sizes_of_blocks = [size for seen in of_kind.values() for size in seen]
    kept_again = max(sizes_of_blocks) - sum(sizes_of_blocks) + inputs
    return total + kept_again if config.activation_checkpointing else total


# ----------------------------------------------------------------------------------- from a recipe
def choose_device(config: TrainConfig, options: PlanOptions) -> Device:
    """The device that the run is planned for. By default, --device cpu means this machine's CPU."""
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
    if (peak := known_peak(name, dtype)) is None:
        raise ValueError(
            f"--plan-device: expected auto, cpu, {', '.join(PEAKS)}, or --plan-tflops, got {name}"
        )
    return Device(kind, dtype, peak, f"{name}, data sheet")


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


# What the Hub has of the checkpoints that the shipped recipes name: a plan of these needs no network.
PUBLISHED = json.loads((Path(__file__).parents[1] / "configs/published.json").read_text(encoding="utf-8"))
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
    """The shape of a model that starts from backbones."""
    stored, seen = config_of(config.text_from), config_of(config.vision_from)
    added = len(SPECIAL_TOKENS) - SMOLLM2_TOKENS
    text = choose_backbone(stored, TEXT).read_config(stored)
    if config.text_from in PUBLISHED:
        vocabulary = text.vocab_size + added
    else:
        vocabulary = max(text.vocab_size, len(new_tokenizer(open_files(config.text_from).processor_folder)))
    return VLMConfig(
        vision=choose_backbone(seen, VISION).read_config(seen),
        text=replace(text, vocab_size=vocabulary),
        scale_factor=config.scale_factor,
        image_token_id=vocabulary - 1,
        tie_word_embeddings=bool(stored.get("tie_word_embeddings", False)),
    )


def config_of(source: str) -> dict[str, Any]:
    return PUBLISHED[source]["config.json"] if source in PUBLISHED else open_files(source).config


def stored_shape(source: str) -> VLMConfig:
    """The shape of a checkpoint."""
    return read_config(config_of(source), source)


def _images_of(source: str, shape: VLMConfig) -> Images:
    """The rule by which a checkpoint's processor cuts images."""
    if source in PUBLISHED:
        return FAMILIES[shape.family].image_rule(PUBLISHED[source]["preprocessor_config.json"], shape)
    return Processor.from_pretrained(source, shape).images


def _rows_here(config: TrainConfig) -> int | None:
    """Rows of the data, if all of it lies on this machine."""
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.data)]
    counts = [None if one.streaming else count_rows(one.path, one.subset, one.split) for one in entries]
    return None if None in counts else round(sum(count or 0 for count in counts) * (1 - config.holdout))
