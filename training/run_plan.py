"""A recipe → the plan of its run: `python train.py RECIPE --plan`, with no download and no GPU.

    options = PlanOptions(plan_ranks=8, plan_device="H100")
    print(describe(parse_config(["configs/nanovlm-460m.yaml"]), options))

What a recipe cannot know about its data (images and words of a sample, how many there are) is a flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from data.sources import DatasetConfig, count_rows
from models.checkpoints.backbones import read_text_config, read_vision_config
from models.checkpoints.hub import read_json
from models.checkpoints.idefics3 import build
from models.checkpoints.load import choose_reader
from models.config import TextConfig, VLMConfig
from shapes.stream import ShapesStream
from shapes.training import build_processor, chat_pieces, model_config, stream_config
from training.config import TrainConfig, dataset_entries
from training.costs import Amounts, linear_sizes, training_flops
from training.devices import known_peak, peak_flops
from training.plan import Plan, Workload, make_plan
from training.plan_options import PlanOptions as PlanOptions
from training.published import LONGEST_EDGE, SMOLLM2_TOKENS, config_of, folder_of
from training.throughput import amounts_of

_TAGS = 2  # tokens that a tile has around its own: what names its place, and a marker
_FILL = 0.97  # share of a packed row that is not padding


@dataclass(frozen=True)
class Device:
    """`kind` is cpu or cuda, `dtype` what is computed in, `peak` FLOP/s, and `name` says whose."""

    kind: str
    dtype: torch.dtype
    peak: float
    name: str


def describe(config: TrainConfig, options: PlanOptions) -> str:
    """The plan of a run as text.

    Raises:
        CheckpointError, DatasetError, ValueError: an architecture that is not known, a model that is neither
            here nor in the table of `training/published.py`, data that do not fit, ranks that do not divide.
    """
    plan, notes = plan_of(config, options)
    return "\n".join([plan.table(), *notes])


def plan_of(config: TrainConfig, options: PlanOptions) -> tuple[Plan, list[str]]:
    """The plan, and in words what it assumes."""
    device = choose_device(config, options)
    if config.is_shapes:
        return _plan_of_shapes(config, options, device)
    shape, longest_edge = network(config)
    work, sample = workload(config, options, shape, longest_edge, device)
    assumed = f"assumed: {sample} (--plan-tiles, --plan-text, --plan-labelled); {device.name} (--plan-device)"
    return make_plan(shape, work), [assumed]


# ------------------------------------------------------------------------------------------- the machine
def choose_device(config: TrainConfig, options: PlanOptions) -> Device:
    """What the run is planned for. The image world and --device cpu mean this machine's CPU."""
    wanted = options.plan_device
    if wanted == "auto" and (config.device == "cpu" or (config.is_shapes and not torch.cuda.is_available())):
        wanted = "cpu"
    kind = "cpu" if wanted == "cpu" else "cuda"
    auto = "bfloat16" if kind == "cuda" else "float32"
    dtype = getattr(torch, auto if config.precision == "auto" else config.precision)
    if options.plan_tflops:
        return Device(kind, dtype, options.plan_tflops * 1e12, f"{options.plan_tflops:g} TFLOP/s")
    if wanted == "cpu":
        return Device(kind, dtype, peak_flops(torch.device("cpu"), dtype)[0], "this CPU, measured")
    if wanted == "auto" and torch.cuda.is_available():
        peak, name = peak_flops(torch.device("cuda"), dtype)
        return Device(kind, dtype, peak, name)
    name = "H100" if wanted == "auto" else wanted
    listed = known_peak(name, dtype)
    assert listed is not None, "both precisions are in the table"
    return Device(kind, dtype, listed, f"{name}, data sheet")


# --------------------------------------------------------------------------------------------- the model
def network(config: TrainConfig) -> tuple[VLMConfig, int]:
    """The shape of the model that a run on rows trains, and the pixels that its images are resized to.

    Raises:
        CheckpointError: not known here, or of an architecture that is not supported.
    """
    if config.init_from:
        stored = config_of(config.init_from)
        shape = choose_reader(stored, config.init_from).read_config(stored, {})
        return shape, _longest_edge(config.init_from, stored, shape.vision.image_size)
    vision, text = config_of(config.vision_from), config_of(config.text_from)
    added = _added_tokens(config.text_from, text)
    vocabulary = text.get("vocab_size", 0) + added
    shape = build(
        VLMConfig,
        vision=read_vision_config(vision),
        text=read_text_config({**text, "vocab_size": vocabulary}),
        scale_factor=config.scale_factor,
        image_token_id=vocabulary - 1,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )
    return shape, config.longest_edge


def _added_tokens(source: str, stored: dict) -> int:
    """Rows that the vocabulary grows by; see `training.rows.new_tokenizer`."""
    from data.tokenizer import SPECIAL_TOKENS

    folder = folder_of(source)
    if folder is None:
        return len(set(SPECIAL_TOKENS) - set(SMOLLM2_TOKENS))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return len(SPECIAL_TOKENS)
    from training.rows import new_tokenizer

    return max(0, len(new_tokenizer(folder)) - stored.get("vocab_size", 0))


def _longest_edge(source: str, stored: dict, tile: int) -> int:
    """Pixels that a checkpoint's processor resizes the longer side of an image to; one tile if not told."""
    folder = folder_of(source)
    if folder is None:
        return LONGEST_EDGE.get(source.rsplit("@", 1)[0], tile)
    for name in ("preprocessor_config.json", "processor_config.json"):
        settings = read_json(folder / name) if (folder / name).is_file() else {}
        settings = settings.get("image_processor", settings)
        if settings.get("do_image_splitting") is False:
            return tile
        if "size" in settings:
            return settings["size"].get("longest_edge", tile)
    return stored.get("max_img_size", tile)  # nanoVLM


# ---------------------------------------------------------------------------------------------- the work
def workload(
    config: TrainConfig, options: PlanOptions, shape: VLMConfig, longest_edge: int, device: Device
) -> tuple[Workload, str]:
    """The run on rows as `make_plan` takes it, and what a sample is taken to be.

    Raises:
        ValueError: ranks or micro-batches do not divide the batch, or a sample does not fit into a row.
    """
    tiles = options.plan_tiles if options.plan_tiles != -1 else _tiles(longest_edge, shape.vision.image_size)
    tokens = tiles * (shape.tokens_per_tile + _TAGS) + options.plan_text
    most = config.max_tiles or math.inf
    if tokens > config.sequence_length or tiles > most:
        raise ValueError(
            f"a sample of {tiles:g} tiles and {options.plan_text} tokens of text takes {tokens:g} positions: "
            f"expected at most {config.sequence_length} positions and {most:g} tiles, which a row holds"
        )
    samples = 1.0
    if config.packing:
        samples = max(1.0, min(_FILL * config.sequence_length / tokens, most / tiles if tiles else math.inf))
    rows = options.plan_rows or _rows_here(config)
    common = _common(config, options, device, config.batch_size)
    length = None
    if config.steps:
        per_step = config.batch_size * samples
        length = math.floor(config.steps * per_step)
    elif rows:
        length = rows * (config.epochs or 1)
    work = Workload(
        **common,
        sequence_length=config.sequence_length,
        tiles_per_row=samples * tiles,
        samples_per_row=samples,
        fill=min(1.0, samples * tokens / config.sequence_length),
        labelled=options.plan_labelled * options.plan_text / tokens,
        total_samples=length,
    )
    sample = (
        f"a sample is {tiles:g} tiles of {shape.tokens_per_tile} positions and {options.plan_text} tokens of "
        f"text, {options.plan_labelled:.0%} of them answers"
    )
    return work, sample


def _common(config: TrainConfig, options: PlanOptions, device: Device, batch: int) -> dict:
    """What the workloads of rows and of the image world have in common."""
    ranks = options.plan_ranks
    per_rank, left = divmod(batch, ranks)
    micro = config.micro_batch_size or per_rank
    if left or per_rank % micro:
        raise ValueError(
            f"batch_size {batch}: expected a multiple of ranks x micro_batch_size, {ranks} x {max(micro, 1)}"
        )
    targets = tuple(name.strip() for name in config.lora_targets.split(",")) if config.lora_rank else ()
    known = linear_sizes(TextConfig())
    if unknown := sorted(set(targets) - set(known)):
        raise ValueError(f"--lora-targets: expected {', '.join(known)}, got {', '.join(unknown)}")
    names = {"vision_model": "vision", "projector": "projector", "language_model": "language"}
    frozen = {names[part] for part, rate in config.rates.items() if rate == 0}
    return {
        "micro_batch": micro,
        "accumulation": per_rank // micro,
        "world_size": ranks,
        "distribution": "none" if ranks == 1 else config.parallel,
        "optimizer": {"none": "adamw", "language": "muon", "all": "muon-all"}[config.muon],
        "precision": str(device.dtype).removeprefix("torch."),
        "frozen": frozenset({"vision", "projector"} if config.lora_rank else frozen),
        "checkpointing": config.activation_checkpointing,
        "lora_rank": config.lora_rank,
        "lora_targets": targets,
        "average": bool(config.ema),
        "device": device.kind,
        "mfu": options.plan_mfu,
        "peak_flops": device.peak,
    }


def _tiles(longest_edge: int, tile: int) -> int:
    """Tiles of an image of 4:3, with the whole image as one more where it is cut."""
    long = math.ceil(longest_edge / tile)
    return 1 if long <= 1 else long * math.ceil(0.75 * long) + 1


def _rows_here(config: TrainConfig) -> int | None:
    """Rows of the data, where all of them lie on this machine; those that a run streams, too."""
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.data)]
    counts = [count_rows(entry.path, entry.subset, entry.split) for entry in entries]
    return None if None in counts else sum(count or 0 for count in counts)


# --------------------------------------------------------------------------------------- the image world
def _plan_of_shapes(config: TrainConfig, options: PlanOptions, device: Device) -> tuple[Plan, list[str]]:
    """Of the stage in which the whole model learns, and a note on the one before; a row is an image."""
    processor = build_processor(config)
    if config.init_from:
        stored = config_of(config.init_from)
        shape = choose_reader(stored, config.init_from).read_config(stored, {})
    else:
        shape = model_config(config, processor.tokenizer)
    pieces = chat_pieces(processor.tokenizer, shape.tokens_per_tile)
    stream = ShapesStream(stream_config(config), processor.tokenizer, pieces)
    drawn = amounts_of(stream.batch(config.vision_steps))
    positions = config.batch_size * config.sequence_length
    work = Workload(
        **_common(config, options, device, config.batch_size),
        sequence_length=config.sequence_length,
        tiles_per_row=1,
        fill=drawn.positions / positions,
        labelled=drawn.labelled / drawn.positions,
        total_samples=(config.shape_steps - config.vision_steps) * config.batch_size,
    )
    plan, notes = make_plan(shape, work), [f"assumed: {device.name} (--plan-device, --plan-tflops)"]
    if config.vision_steps:
        amounts = Amounts(config.vision_steps * config.vision_batch_size, 0, 0, 0)
        flops = training_flops(shape, amounts, frozenset({"vision"}))
        hours = flops / (options.plan_mfu * device.peak * options.plan_ranks) / 3600
        notes.insert(
            0,
            "before it, the vision tower alone\n"
            f"  {'steps':<22}{config.vision_steps:>16,}\n"
            f"  {'images a step':<22}{config.vision_batch_size:>16,}\n"
            f"  {'model FLOPs':<22}{flops:>16.3e}\n"
            f"  {'hours':<22}{hours:>16,.1f}",
        )
    return plan, notes
