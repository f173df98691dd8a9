"""A run's settings: a YAML recipe and a flag for each field -> `TrainConfig`. Nothing here needs torch.

config, plan = parse_command(["configs/shapes.yaml", "--pictures", "2000"])
write_run(config, folder)  # run.yaml: `python train.py folder/run.yaml` is the same run
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from data.errors import did_you_mean, one_line
from data.files import check_rows_path, nearest_file, replacing
from models import __version__
from models.checkpoints.folder import check_replaceable
from models.checkpoints.hub import check_has_config, check_repo_id, resolve_source
from models.config import check_device

Data = str | list[dict[str, Any]]
SHAPES = "shapes"  # `data` of the built-in synthetic shapes
DEFAULT_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "shapes.yaml"
RUN_FILE = "run.yaml"
_MANY = 10**9


def _about(help_text: str, *bounds: float) -> dict[str, Any]:
    return {"help": help_text, "bounds": bounds}


def _field(default, help_text: str, *bounds: float):
    """A setting with its help text and, for a number, the least and the most that it may be."""
    return field(default=default, metadata=_about(help_text, *bounds))


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `python train.py` can be told. The defaults train the embedded model from scratch.

    Raises:
        ValueError: one sentence that names the flag, what was expected and what was got. The settings for
            shapes alone are checked by `shapes.settings.check_settings`.
    """

    output: str = _field("runs/shapes", "folder for the checkpoint, the metrics and the training state")
    resume: bool = _field(
        True, "continue from the newest whole training state in --output, if any; also written --resume auto"
    )
    init_from: str = _field("", "checkpoint to start from (folder or Hub id); by default, random weights")
    vision_from: str = _field("", "SigLIP vision tower for a new model, together with --text-from")
    text_from: str = _field("", "Llama-family language model for a new model, together with --vision-from")
    seed: int = _field(0, "seed of the weights, the drawn images and the order of rows", 0, 2**63 - 1)
    device: str = _field("auto", "auto, cpu, cuda or mps")
    # With more than 512, OpenMP ends the process.
    threads: int = _field(0, "number of CPU threads; 0: PyTorch's choice", 0, 512)
    workers: int = _field(1, "processes per rank that read and decode, or draw, images", 0, 128)

    # data
    data: Data = field(
        default=SHAPES,
        metadata=_about("training rows: shapes (drawn), a file, folder or Hub id, or a list of datasets"),
    )
    eval_data: Data = field(
        default="", metadata=_about("held-out rows, given like --data; shapes has its own")
    )
    batch_size: int = _field(16, "rows (for shapes: images) per step, over all ranks", 1, 65_536)
    micro_batch_size: int = _field(0, "rows that a rank computes at a time; 0: its whole share", 0, 65_536)
    sequence_length: int = _field(256, "positions per row", 1, 1_048_576)
    max_tiles: int = _field(0, "maximum number of tiles per row; 0: as many as fit", 0, 65_536)
    packing: bool = _field(True, "pack several samples into a row, each blind to the others; else pad rows")
    waiting: int = _field(64, "samples to choose from when a row is packed, per shard of the data", 1, 16_384)
    shuffle_buffer: int = _field(256, "rows of a streaming dataset to shuffle together", 1, 1_048_576)
    max_drop_rate: float = _field(0.05, "share of unusable rows above which the run stops", 0, 1)

    # length of the run: in steps or epochs, for shapes in images
    steps: int = _field(0, "number of optimizer steps; 0: as many as the epochs hold", 0, _MANY)
    epochs: int = _field(0, "passes over the data; 0: no limit with --steps, else one", 0, _MANY)
    pictures: int = _field(144_000, "shapes: images to train on, in all; 0: use --steps", 0, _MANY)
    vision_pictures: int = _field(
        64_000, "shapes: how many of these train the vision tower alone, on dense targets", 0, _MANY
    )
    curriculum_pictures: int = _field(
        25_000, "shapes: images until scenes are hardest, in each stage", 0, _MANY
    )
    vision_batch_size: int = _field(64, "shapes: images per step of the vision tower alone", 1, 65_536)

    # optimisation
    lr: float = _field(2e-3, "peak AdamW learning rate of the language model; 0 freezes it", 0, 100)
    vision_lr: float = _field(-1.0, "the same for the vision tower; 0 freezes it, -1: as --lr")
    projector_lr: float = _field(-1.0, "the same for the projector; 0 freezes it, -1: as --lr")
    muon: str = _field("all", "matrices that Muon updates: all (in blocks and projector), language, none")
    matrix_lr: float = _field(3e-3, "peak learning rate of Muon", 0, 100)
    vision_matrix_lr: float = _field(1e-2, "shapes: the same for the vision tower alone", 0, 100)
    weight_decay: float = _field(0.1, "decoupled weight decay of matrices (not of norms, biases)", 0, 100)
    beta2: float = _field(0.98, "AdamW's decay of the second moment")
    warmup_steps: int = _field(100, "steps of linear warm-up, at most half of a stage", 0, _MANY)
    schedule: str = _field("wsd", "wsd: warm-up, plateau, decay; cosine: warm-up, then decay")
    decay_fraction: float = _field(0.35, "wsd: last share of the run, in which the rate decays")
    lr_floor: float = _field(0.0, "share of its peak at which every rate ends", 0, 1)
    dense_weight: float = _field(0.3, "shapes: weight of the dense vision loss in the second stage", 0, 1_000)
    fact_weight: float = _field(0.5, "shapes: weight of the losses on what nouns mean", 0, 1_000)
    grad_clip: float = _field(1.0, "maximum gradient norm; 0: no clipping", 0, math.inf)
    max_skipped: int = _field(0, "steps with a non-finite gradient to skip before the run stops", 0, _MANY)
    ema: float = _field(0.998, "decay of the weight average that is evaluated and saved; 0: no average")

    # low-rank adapters, through peft
    lora_rank: int = _field(0, "rank of LoRA adapters, trained in place of the weights; 0: none", 0, 1_024)
    lora_alpha: float = _field(16.0, "LoRA: adapters are scaled by alpha / rank", 1e-6, 1e6)
    lora_dropout: float = _field(0.0, "LoRA: dropout on the adapters' input")
    lora_targets: str = _field(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "LoRA: layers of the language model"
    )

    # the machine
    parallel: str = _field("ddp", "ddp: every rank holds the model; fsdp: every rank holds a shard")
    precision: str = _field("auto", "compute in float32 or bfloat16 (weights stay float32); auto: by device")
    activation_checkpointing: bool = _field(False, "recompute activations in backward to save memory")
    compile: bool = _field(False, "torch.compile the transformer blocks")
    async_save: bool = _field(False, "under torchrun: write the training state in the background")

    # the network, where it starts from scratch
    vision_width: int = _field(128, "vision tower: hidden size", 1, 2_048)
    vision_layers: int = _field(6, "vision tower: blocks", 1, 64)
    vision_heads: int = _field(4, "vision tower: heads", 1, 128)
    image_size: int = _field(64, "vision tower: pixels per side", 1, 512)
    patch_size: int = _field(8, "vision tower: pixels per side of a patch", 1, 512)
    scale_factor: int = _field(1, "pixel shuffle: patches per side that become one token", 1, 64)
    text_width: int = _field(192, "language model: hidden size", 1, 2_048)
    text_layers: int = _field(4, "language model: blocks", 1, 64)
    text_heads: int = _field(6, "language model: query heads", 1, 128)
    text_kv_heads: int = _field(2, "language model: key and value heads", 1, 128)
    text_inner: int = _field(512, "language model: SwiGLU width", 1, 8_192)
    # The least is 256 bytes and the special tokens.
    vocab_size: int = _field(1024, "tokenizer: maximum vocabulary, with special tokens", 299, 65_536)
    longest_edge: int = _field(
        0, "from backbones: pixels that an image's longer side is resized to; 0: one tile", 0, 4_096
    )

    # watching it
    log_every: int = _field(20, "steps between lines of metrics.jsonl", 1, _MANY)
    log_samples: bool = _field(False, "name each step's samples in metrics.jsonl")
    eval_every: int = _field(500, "steps between evaluations on held-out data", 1, _MANY)
    eval_pictures: int = _field(512, "held-out rows (or images) for the loss of an evaluation", 0, 1_000_000)
    eval_questions: int = _field(200, "held-out questions to answer and score in an evaluation", 0, _MANY)
    eval_metric: str = _field("", "metric for answers to held-out rows; under fsdp, each rank holds a model")
    eval_samples: int = _field(4, "held-out questions whose answers are kept, in samples/", 0, 1_000)
    save_every: int = _field(500, "steps between checkpoints", 1, _MANY)
    keep: int = _field(2, "number of training states to keep, in case the newest is broken", 1, _MANY)
    keep_best: bool = _field(True, "keep the model with the best evaluation, in best/")
    tracker: str = _field("none", "tracker to log to as well: none, trackio (local), wandb or tensorboard")
    push_to_hub: str = _field("", "repository to upload the model to when the run ends")

    def __post_init__(self):
        check_bounds(self)
        self._check_choice("muon", "all", "language", "none")
        self._check_choice("schedule", "wsd", "cosine")
        self._check_choice("parallel", "ddp", "fsdp")
        self._check_choice("precision", "auto", "float32", "bfloat16")
        self._check_choice("tracker", "none", "trackio", "wandb", "tensorboard")
        for name in ("vision_lr", "projector_lr"):
            if (value := getattr(self, name)) != -1 and not 0 <= value <= 100:
                raise ValueError(f"{flag(name)}: expected from 0 to 100, or -1 for --lr's, got {value}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"--decay-fraction: expected more than 0, at most 1, got {self.decay_fraction}")
        for name in ("beta2", "ema", "lora_dropout"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{flag(name)}: expected 0 or more, less than 1, got {value}")
        if bool(self.vision_from) != bool(self.text_from):
            raise ValueError("--vision-from and --text-from: expected both or neither")
        if self.init_from and self.vision_from:
            raise ValueError("--init-from and --vision-from: expected one of them")
        if not (self.is_shapes or self.init_from or self.vision_from):
            raise ValueError(
                "--data: rows need a model to start from: give --init-from, or --vision-from and --text-from"
            )
        if not (self.lr if self.lora_rank else any(self.rates.values())):
            raise ValueError("--lr: expected something that learns, got a rate of 0 for all of it")
        if self.lora_rank and (self.vision_lr > 0 or self.projector_lr > 0):
            raise ValueError("--lora-rank: adapters train in place of all weights; set no --vision-lr")
        if self.eval_metric and (self.is_shapes or not self.eval_data):
            raise ValueError("--eval-metric: expected rows with --eval-data")
        if self.push_to_hub:
            check_repo_id(self.push_to_hub)

    def _check_choice(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{flag(name)}: expected {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def is_shapes(self) -> bool:
        return self.data == SHAPES

    @property
    def rates(self) -> dict[str, float]:
        """Peak rate of AdamW by part of the model; 0 is frozen."""
        return {
            "language_model": self.lr,
            "vision_model": self.lr if self.vision_lr == -1 else self.vision_lr,
            "projector": self.lr if self.projector_lr == -1 else self.projector_lr,
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# What data sheets say of each GPU: FLOP/s of dense bfloat16 products with float32 sums, and of float32
# products without TF32.
PEAKS = {
    "A10": (125e12, 31.2e12),
    "A100": (312e12, 19.5e12),
    "RTX A6000": (154.8e12, 38.7e12),
    "L4": (121e12, 30.3e12),
    "L40S": (362e12, 91.6e12),
    "H100": (989.4e12, 66.9e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H200": (989.4e12, 66.9e12),
    "GH200": (989.4e12, 66.9e12),
    "B200": (2250e12, 75e12),
    "RTX 3090": (71e12, 35.6e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 5090": (209.5e12, 104.8e12),
}


@dataclass(frozen=True)
class PlanOptions:
    """The flags of `train.py --plan`: what a plan assumes besides the recipe."""

    plan: bool = _field(False, "print the run's parameters, memory, FLOPs and hours, and exit")
    plan_ranks: int = _field(1, "plan: number of processes, one per device", 1, 1_000_000)
    plan_device: str = _field("auto", f"plan: cpu, {', '.join(PEAKS)}; auto: this machine's GPU, else H100")
    plan_tflops: float = _field(0.0, "plan: peak TFLOP/s of a device; 0: looked up by its name", 0, 1e6)
    plan_mfu: float = _field(0.4, "plan: share of the peak that the model's FLOPs reach", 1e-9, 1)
    plan_tiles: float = _field(-1.0, "plan: tiles per sample; -1: those of one 4:3 image")
    plan_text: int = _field(100, "plan: text tokens per sample", 1, 1_000_000)
    plan_labelled: float = _field(0.4, "plan: share of the text tokens that are answers", 1e-9, 1)
    plan_rows: int = _field(0, "plan: number of rows in the data; 0: counted if the data is local", 0, 10**12)

    def __post_init__(self):
        check_bounds(self)
        devices = {name.lower(): name for name in ("auto", "cpu", *PEAKS)}
        if self.plan_device.lower() not in devices:
            known = ", ".join(devices.values())
            raise ValueError(
                f"--plan-device: expected {known}, got {self.plan_device!r}; for others, give --plan-tflops"
            )
        object.__setattr__(self, "plan_device", devices[self.plan_device.lower()])
        if self.plan_tiles != -1 and not 0 <= self.plan_tiles <= 65_536:
            raise ValueError(
                f"--plan-tiles: expected from 0 to 65536, or -1 for a 4:3 image, got {self.plan_tiles}"
            )


def check_bounds(settings: Any) -> None:
    """Raises ValueError for the first number that is out of its field's bounds, or NaN."""
    for item in fields(settings):
        value, bounds = getattr(settings, item.name), item.metadata["bounds"]
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise ValueError(f"{flag(item.name)}: expected from {bounds[0]} to {bounds[1]}, got {value}")


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def dataset_entries(data: Data) -> list[Mapping[str, Any]]:
    """`data` as `data.sources.open_datasets` takes it."""
    return [{"path": data}] if isinstance(data, str) else list(data)


# ---------------------------------------------------------------------------------- the command line
_FIELDS = {item.name: item for described in (TrainConfig, PlanOptions) for item in fields(described)}
_KINDS = typing.get_type_hints(TrainConfig) | typing.get_type_hints(PlanOptions)
Check = Callable[[TrainConfig], None]


def parse_config(arguments: list[str] | None = None, check: Check | None = None) -> TrainConfig:
    """The run's configuration alone; see `parse_arguments`."""
    return parse_arguments(arguments, check=check)[0]


def parse_arguments(
    arguments: list[str] | None = None, description: str = "", check: Check | None = None
) -> tuple[TrainConfig, PlanOptions]:
    """The recipe named first (configs/shapes.yaml by default) with the flags put over it, and --plan's flags.

    Exits with status 2 and one sentence for a recipe that is missing or not YAML, an unknown key or flag, a
    value of the wrong type or out of range, or a ValueError of `check`.
    """
    arguments = _without_auto(list(sys.argv[1:] if arguments is None else arguments))
    recipe = DEFAULT_RECIPE
    if arguments and not arguments[0].startswith("-"):
        recipe = Path(arguments.pop(0))
    given = vars(_Parser(description).parse_args(arguments))
    try:
        settings = read_recipe(recipe) | given
        plan = PlanOptions(**{name: settings.pop(name) for name in list(settings) if name.startswith("plan")})
        config = TrainConfig(**settings)
        if check is not None:
            check(config)
        return config, plan
    except ValueError as error:
        leave(error)


def parse_command(
    arguments: list[str] | None = None, description: str = "", check: Check | None = None
) -> tuple[TrainConfig, PlanOptions]:
    """`parse_arguments`, and a look at the device, models, rows and output folder that the settings name.

    None of this needs torch, so a mistake is reported at once. Of several ranks each looks later, where all
    of them hear what one of them lacks.
    """
    config, options = parse_arguments(arguments, description, check)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return config, options
    try:
        check_device(config.device)
        sources = [*filter(None, (config.init_from, config.vision_from, config.text_from))]
        for source in sources:
            resolve_source(source)  # a slip that shows here, before the Hub is asked for any
        if not options.plan:
            check_replaceable(Path(config.output))
            for data in (config.data, config.eval_data):
                if data and data != SHAPES:
                    for entry in dataset_entries(data):
                        check_rows_path(str(entry.get("path", "")))
            if sources:
                for source in sources:
                    check_has_config(source)
    except (ValueError, OSError) as error:
        leave(error)
    return config, options


def leave(error: Exception | str) -> typing.NoReturn:
    print(f"train.py: error: {one_line(error)}", file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """A flag for each field. Only what was given is in the result: the rest is the recipe's."""

    def __init__(self, description: str):
        super().__init__(
            prog="train.py", usage="train.py [RECIPE.yaml] [flags]", description=description,
            allow_abbrev=False, argument_default=argparse.SUPPRESS,
        )  # fmt: skip
        self.add_argument("--version", action="version", version=f"train.py (Ocelli) {__version__}")
        for name, item in _FIELDS.items():
            shown = item.default if item.default != "" else "none"
            options: dict[str, Any] = {"help": f"{item.metadata['help']} (default: {shown})"}
            if _KINDS[name] is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                kind = getattr(_KINDS[name], "__name__", "str or list").upper()
                options |= {"type": _converter(name), "metavar": kind}
            self.add_argument(flag(name), **options)

    def parse_known_args(self, args=None, namespace=None):
        for argument in args or ():
            name = argument.split("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                near = did_you_mean(name, self._option_string_actions)
                leave(f"unknown flag {name}{near}; --help lists them all")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        leave(message.removeprefix("argument "))


def _without_auto(arguments: list[str]) -> list[str]:
    """`--resume auto`, as other trainers have it, as the switch that it is here."""
    plain = ["--resume" if argument == "--resume=auto" else argument for argument in arguments]
    return [one for before, one in zip(["", *plain], plain) if (before, one) != ("--resume", "auto")]


def _converter(name: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return value_of(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def value_of(name: str, given: Any) -> Any:
    """A field's value from what a recipe or a flag says: text, or for datasets lists and mappings of texts.

    Raises:
        ValueError: what was expected and what was got.
    """
    kind = _KINDS[name]
    if kind == Data:
        return _datasets(given)
    if not isinstance(given, str):
        raise ValueError(f"expected one value, got a {type(given).__name__}")
    if kind is str:
        return given
    if (name, given) == ("resume", "auto"):
        return True
    value = _plain(given)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1e300 else math.inf
    if type(value) is not kind:
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"expected {expected}, got {given!r}")
    return value


# ---------------------------------------------------------------------------------------- the recipe
_TEXT_KEYS = {"path", "name", "subset", "split", "revision", "columns"}  # of a dataset, whose values are text


class _Loader(yaml.SafeLoader):
    """Every value is the text that was written; what it means depends on its field. YAML itself would take
    the commit 7e8 for a number, the subset `no` for false, and the rate 1e-3 for text."""

    yaml_implicit_resolvers: ClassVar = {
        "<": yaml.SafeLoader.yaml_implicit_resolvers["<"]
    }  # `<<` merges, still
    yaml_constructors: ClassVar = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")))
    }

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:  # YAML would take the last
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"expected each key once, got {twice[0]} twice in line {line} and after it")
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """A recipe's settings.

    Raises:
        ValueError: no such file, not YAML, an unknown key, or a value of the wrong type.
    """
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} cannot be read: {error}{nearest_file(path)}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected keys and values, got {type(recipe).__name__}")
    known = [item.name for item in fields(TrainConfig)]
    if unknown := sorted(str(key) for key in recipe if key not in known):
        near = did_you_mean(unknown[0], known)
        raise ValueError(
            f"recipe {path}: unknown key {', '.join(unknown)}{near}; train.py --help lists them all"
        )
    settings = {}
    for key, given in recipe.items():
        try:
            settings[key] = value_of(key, given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"recipe {path}: {key}: {error}") from None
    return settings


def _datasets(given: Any) -> Data:
    """A path, or a list of datasets; the command line writes the list in YAML or JSON."""
    if isinstance(given, str):
        try:
            read = yaml.load(given, _Loader) if given.lstrip().startswith("[") else None
        except (yaml.YAMLError, RecursionError):
            return given  # a pattern of paths, as [ab].jsonl
        if not (isinstance(read, list) and all(isinstance(entry, dict) for entry in read)):
            return given
        given = read
    if not (isinstance(given, list) and all(isinstance(entry, dict) for entry in given)):
        raise ValueError(f"expected a path, or a list of datasets with keys and values, got {given!r:.80}")
    for entry in given:
        for key in _TEXT_KEYS & entry.keys():
            if not isinstance(entry[key], dict if key == "columns" else str):
                raise ValueError(f"{key}: expected {'keys and values' if key == 'columns' else 'text'}")
    return [
        {
            key: value if key in _TEXT_KEYS else _values(value)
            for key, value in entry.items()
            if value not in ("null", "~", "")  # left to its default
        }
        for entry in given
    ]


def _values(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _values(value) for key, value in given.items()}
    return [_values(value) for value in given] if isinstance(given, list) else _plain(given)


def _plain(text: str) -> Any:
    """The number or truth that a text stands for, else the text."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf"))
        except ValueError:
            continue
    return text


def write_run(config: TrainConfig, folder: Path) -> None:
    """The resolved configuration as a recipe, run.yaml."""
    with replacing(folder / RUN_FILE) as temporary:
        text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        temporary.write_text(text, encoding="utf-8")
