"""A run's settings: a YAML recipe and a flag for each field -> `TrainConfig`. Nothing here needs torch.

config, plan = parse_command(["configs/smolvlm-256m-lora.yaml", "--data", "rows.jsonl"])
write_run(config, folder)  # run.yaml: `python train.py folder/run.yaml` is the same run
"""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, asdict, field, fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import yaml
from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from data.errors import check_rows_path, replacing
from messages import did_you_mean, named, one_line
from models import __version__
from models.checkpoints.folder import check_replaceable
from models.checkpoints.hub import check_repo_id
from models.checkpoints.sources import check_has_config, repository, resolve_source
from models.config import check_device

DEFAULT_RECIPE = Path(__file__).resolve().parent.parent / "configs" / "flags.yaml"
RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RUN_FILE = "run.yaml"
_MANY = 10**9
_STRICT = ConfigDict(allow_inf_nan=False)
# YAML's loader leaves every value as the text that was written, and pydantic reads that by its field's type:
# YAML itself would take the commit 7e8 for a number, the subset `no` for false, and the rate 1e-3 for text.
# Of a dataset, whose entries have no types here, the values of these keys are text.
_TEXT_KEYS = {"path", "name", "subset", "split", "revision", "language", "columns", "constants", "names"}
_TEXT_KEYS |= {"image_folder"}
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _plain(given: Any) -> Any:
    """The number or truth that a text stands for, within mappings and lists as well."""
    if isinstance(given, dict):
        return {key: _plain(value) for key, value in given.items()}
    if isinstance(given, list):
        return [*map(_plain, given)]
    for kind in (int, float) if isinstance(given, str) else ():
        with suppress(ValueError):
            return kind(given)
    return _TRUTHS.get(given.lower(), given) if isinstance(given, str) else given


def _written(given: Any) -> Any:
    """A list or mapping from a text in YAML or JSON, as flags have it; anything else as it is."""
    if not (isinstance(given, str) and given.lstrip().startswith(("[", "{"))):
        return given
    try:
        return yaml.load(given, yaml.BaseLoader)
    except yaml.YAMLError as error:
        if not given.lstrip().startswith(("[{", "{")):  # a pattern of paths, as [ab].jsonl
            return given
        raise ValueError(f"{getattr(error, 'problem', error)}: put texts in quotation marks") from None


def read_datasets(given: Any) -> str | list[dict[str, Any]]:
    """A path, or a list of datasets, or one."""
    read = _written(given)
    read = [read] if isinstance(read, dict) else read
    if isinstance(read, list) and all(isinstance(entry, dict) for entry in read):
        return [
            {
                key: value if key in _TEXT_KEYS else _plain(value)
                for key, value in entry.items()
                if value not in (None, "null", "~", "")  # left to its default
            }
            for entry in read
        ]
    if not isinstance(given, str):
        raise ValueError("expected a path, or a list of datasets")
    return given


def _read_weights(given: Any) -> str | dict[str, Any]:
    read = _written(given)
    if read and not isinstance(read, dict):
        raise ValueError("expected names with weights, as {exact: 1.0}")
    return _plain(read) if read else ""


Data = Annotated[str | list[dict[str, Any]], BeforeValidator(read_datasets)]
# Rewards by name: a weight, or a mapping of `weight` and options.
Weights = Annotated[str | dict[str, Any], BeforeValidator(_read_weights)]


class Scope(NamedTuple):
    """In which runs a setting has an effect, and what those need, in words."""

    holds: Callable[[Any], bool]
    needs: str


ALWAYS = Scope(lambda config: True, "")
OF_ROWS = Scope(lambda config: not config.is_drawn, "--data with rows")
OF_PACKING = Scope(
    lambda config: not config.is_drawn and config.packing and config.task == "answers",
    "--data with rows, --packing, and --task answers",
)
OF_PREFERENCES = Scope(lambda config: config.task == "preferences", "--task preferences")
# A checkpoint brings its own sizes.
FROM_BACKBONES = Scope(lambda config: bool(config.vision_from), "--vision-from and --text-from")
FROM_CHECKPOINT = Scope(
    lambda config: bool(config.init_from) and not config.is_drawn, "--data with rows, and --init-from"
)
OF_LORA = Scope(lambda config: config.lora_rank > 0, "--lora-rank")
OF_MUON = Scope(lambda config: config.muon != "none", "--muon all or language")
OF_REWARDS = Scope(lambda config: config.task == "rewards", "--task rewards")
OF_WSD = Scope(lambda config: config.schedule == "wsd", "--schedule wsd")
OF_HELD_OUT = Scope(lambda config: config.is_drawn or bool(config.held_out_data), "--eval-data or --holdout")
OF_SCORES = Scope(
    lambda config: OF_HELD_OUT.holds(config) and (config.task == "answers" or bool(config.eval_metric)),
    "--eval-data or --holdout, and --task answers or --eval-metric",
)


def setting(default, description: str, ge=None, le=None, *, lt=None, scope: Scope = ALWAYS) -> Any:
    """A setting and its help text, with the bounds of a number."""
    bounds = {"ge": ge, "le": le, "lt": lt}
    known = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"description": description, "scope": scope} | known)


of_rows, of_pairs, of_rewards, of_lora, held_out = (
    partial(setting, scope=scope) for scope in (OF_ROWS, OF_PREFERENCES, OF_REWARDS, OF_LORA, OF_HELD_OUT)
)


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """All settings of `python train.py`; a recipe that draws its images may have more (`settings_class`).

    A ValueError names the flag that is wrong.
    """

    is_drawn: ClassVar[bool] = False  # whether images and questions are made up while it trains
    # What weights, averages and momenta of a saved state depend on.
    fixed: ClassVar[tuple[str, ...]] = (
        *("init_from", "vision_from", "text_from", "scale_factor", "task", "muon"),
        *("lora_rank", "lora_targets", "lora_vision_targets", "weights"),
        *("longest_edge", "max_pixels", "image_tokens"),
    )

    output: str = setting("runs/mine", "folder for the checkpoint, the metrics and the training state")
    resume: bool = setting(True, "continue from the newest training state in --output, if any")
    init_from: str = setting("", "checkpoint to start from (folder, Hub id or short name)")
    vision_from: str = setting("", "SigLIP vision tower for a new model, together with --text-from")
    text_from: str = setting("", "Llama, Qwen2 or Qwen3 for a new model, together with --vision-from")
    seed: int = setting(0, "seed of new weights and of the order of rows", 0, 2**63 - 1)
    device: str = setting("auto", "auto, cpu, cuda or mps")
    # With more than 512, OpenMP ends the process.
    threads: int = setting(0, "maximum of CPU threads; 0: one for each processor that it may use", 0, 512)
    workers: int = setting(1, "processes per rank that read and decode images", 0, 128)

    # data
    task: Literal["answers", "preferences", "rewards"] = of_rows(
        "answers",
        "what is learned: the answers of rows, which of two is better, or what earns the model rewards",
    )
    data: Data = setting("", "rows to learn: a file, folder, Hub id, list of datasets")
    eval_data: Data = of_rows("", "held-out rows, like --data")
    holdout: float = of_rows(
        0.0, "share of --data's rows, shuffled and by class, to hold out in place of --eval-data", 0, lt=1
    )
    batch_size: int = setting(
        16, "sequences per step, over all ranks: with --packing each of as many rows of the data as fit into "
        "--sequence-length, else of one", 1, 65_536,
    )  # fmt: skip
    micro_batch_size: int = of_rows(
        0, "sequences that a rank computes at a time; 0: its whole share", 0, 65_536
    )
    sequence_length: int = setting(256, "positions per sequence", 1, 1_048_576)
    max_tiles: int = of_rows(0, "maximum number of tiles per sequence; 0: as many as fit", 0, 65_536)
    max_pixels: int = setting(
        0, "maximum number of pixels of an image, where none is cut into tiles; 0: the checkpoint's",
        0, _MANY, scope=FROM_CHECKPOINT,
    )  # fmt: skip
    packing: bool = of_rows(True, "pack several rows into a sequence, each blind to the others; else pad")
    packing_buffer: int = setting(
        64, "rows buffered per shard of the data; more gives fuller sequences", 1, 16_384, scope=OF_PACKING
    )
    shuffle_buffer: int = of_rows(
        1024, "rows of streams and of Parquet to shuffle together, in each shard", 1, 1_048_576
    )
    max_drop_rate: float = of_rows(0.05, "share of unusable rows above which the run stops", 0, 1)

    # length of the run
    steps: int = setting(0, "number of optimizer steps; 0: as many as the epochs hold", 0, _MANY)
    epochs: int = of_rows(0, "passes over the data; 0: no limit with --steps, else one", 0, _MANY)

    # optimisation
    lr: float = setting(2e-3, "peak AdamW learning rate of the language model; 0 freezes it", 0, 100)
    vision_lr: float = setting(-1.0, "the same for the vision tower; 0 freezes it, -1: as --lr", -1, 100)
    projector_lr: float = setting(
        -1.0, "the same for the projector; 0 freezes it, -1: as --lr, but frozen beside LoRA", -1, 100
    )
    muon: Literal["all", "language", "none"] = setting(
        "all", "matrices of blocks and projector that Muon updates"
    )
    matrix_lr: float = setting(3e-3, "peak learning rate of Muon", 0, 100, scope=OF_MUON)
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices (not of norms, biases)", 0, 100)
    beta2: float = setting(0.98, "AdamW's decay of the second moment", 0, lt=1)
    warmup_steps: int = setting(100, "steps of linear warm-up, at most half of a stage", 0, _MANY)
    schedule: Literal["wsd", "cosine"] = setting("wsd", "learning rate over time; cosine has no plateau")
    decay_fraction: float = setting(
        0.35, "wsd: last share of the run, in which the rate decays", 1e-9, 1, scope=OF_WSD
    )
    lr_floor: float = setting(0.0, "share of its peak at which every rate ends", 0, 1)
    grad_clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", 0, _MANY)
    ema: float = setting(0.998, "decay of the weight average that is evaluated and saved; 0: none", 0, lt=1)

    # preferences (DPO)
    dpo_beta: float = of_pairs(0.1, "DPO: how closely answers keep to the first model", 1e-6, 1e3)
    dpo_smoothing: float = of_pairs(0.0, "DPO: share of pairs taken to be the wrong way round", 0, 0.5)
    dpo_sft: float = of_pairs(0.0, "DPO: weight of the chosen answer's loss per token", 0, 1e3)

    # learning from rewards
    rewards: Weights = of_rewards("", "rewards by name with their weights, as {exact: 1.0, length: 0.1}")
    group_size: int = of_rewards(8, "number of answers sampled for each question", 2, 4_096)
    policy_loss: Literal["grpo", "dr_grpo", "dapo"] = of_rewards(
        "dapo", "mean over answers, sum divided by --answer-tokens, or mean over tokens"
    )
    clip: float = of_rewards(0.2, "a token's probability ratio is clipped this far below 1, and above", 0, 1)
    clip_high: float = of_rewards(-1.0, "the same above 1 alone; -1: 0.28 for dapo, else as --clip", -1, 1e6)
    kl: float = of_rewards(0.0, "weight of the KL divergence from the first weights; 0: none", 0, 1e3)
    temperature: float = of_rewards(1.0, "sampling temperature of the answers", 1e-3, 100)
    top_k: int = of_rewards(0, "answers: sample from the K likeliest tokens; 0: all", 0, _MANY)
    top_p: float = of_rewards(1.0, "answers: sample from the likeliest tokens of this mass", 1e-9, 1)
    answer_tokens: int = of_rewards(64, "maximum number of tokens of an answer", 1, 1_048_576)
    answers_at_once: int = of_rewards(
        64, "maximum number of answers that a rank samples at a time", 1, 65_536
    )
    rollout_step: Literal["eager", "c", "cuda"] = of_rewards(
        "eager", "what samples: the training forward's own operations, C, or a GPU's recorded step"
    )
    most_off_policy: float = of_rewards(
        0.0, "stop if training and sampling disagree on a fresh token's probability by more than this; 0: "
        "0.001 in float32, 1 in bfloat16 or beside weights in fewer bits", 0, 1e6,
    )  # fmt: skip

    # low-rank adapters, as peft has them
    lora_rank: int = setting(0, "rank of LoRA adapters, trained in place of the weights; 0: none", 0, 1_024)
    lora_alpha: float = of_lora(16.0, "LoRA: adapters are scaled by alpha / rank", 1e-6, 1e6)
    lora_dropout: float = of_lora(0.0, "LoRA: dropout on the adapters' input", 0, lt=1)
    lora_targets: str = of_lora(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "LoRA: layers of the language model"
    )
    lora_vision_targets: str = of_lora(
        "", "LoRA: layers of the vision tower, as q_proj,k_proj,v_proj,out_proj,fc1,fc2"
    )
    weights: Literal["auto", "float32", "bfloat16", "int8", "int4"] = of_lora(
        "auto", "LoRA: what frozen matrices are kept in; auto: a quantized checkpoint's codes, else float32"
    )

    # the machine
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "each rank holds the model, or a shard of it")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "compute dtype; weights stay float32, or as --weights says. On CUDA, float32 is multiplied in TF32",
    )
    activation_checkpointing: bool = setting(False, "recompute activations in backward to save memory")
    compile: bool = setting(False, "torch.compile the blocks, but not those of towers for whole images")

    # the model
    scale_factor: int = setting(
        1, "pixel shuffle: patches per side that become one token", 1, 64, scope=FROM_BACKBONES
    )
    longest_edge: int = of_rows(
        0, "pixels of an image's longer side, cut into tiles; 0: the checkpoint's, or one tile", 0, 4_096
    )
    image_tokens: int = of_rows(
        0, "maximum number of positions of an image, saved with the model; 0: the checkpoint's", 0, 65_536
    )

    # watching it
    log_every: int = setting(20, "steps between lines of metrics.jsonl", 1, _MANY)
    log_samples: bool = setting(False, "name each step's samples in metrics.jsonl")
    eval_every: float = setting(
        500, "steps between evaluations on held-out data; below 1: a share of the run's steps", 1e-9, _MANY
    )
    eval_on_start: bool = held_out(False, "evaluate before the first step, too, with all questions")
    patience: int = held_out(0, "stop after so many evaluations without a better one; 0: never", 0, _MANY)
    eval_pictures: int = held_out(512, "held-out rows for the loss of an evaluation", 0, 1_000_000)
    eval_questions: int = setting(
        200, "held-out questions to answer and score in an evaluation; without --eval-metric, of rows 32 at "
        "most before the last evaluation", 0, _MANY, scope=OF_SCORES,
    )  # fmt: skip
    eval_metric: str = setting(
        "", "metric for answers to held-out rows, by default exact_match; under fsdp, each rank holds a model"
    )
    eval_samples: int = held_out(4, "held-out questions whose answers are kept, in samples/", 0, 1_000)
    save_every: float = setting(500, "steps between checkpoints; below 1: as --eval-every", 1e-9, _MANY)
    keep: int = setting(2, "number of training states to keep, in case the newest is broken", 1, _MANY)
    keep_best: bool = setting(True, "keep the model with the best evaluation, in best/")
    tracker: Literal["none", "trackio", "wandb", "tensorboard"] = setting("none", "tracker to log to as well")
    push_to_hub: str = setting("", "repository to upload the model to when the run ends")

    def __post_init__(self):
        object.__setattr__(self, "init_from", repository(self.init_from))  # an adapter names it to peft
        for name in ("eval_every", "save_every"):
            if (every := getattr(self, name)) >= 1 and every % 1:
                raise ValueError(f"{flag(name)}: expected whole steps, or a share below 1, got {every}")
        sizes = [*filter(None, (self.max_pixels, self.longest_edge, self.image_tokens))]
        rows, rewards = not self.is_drawn, self.task == "rewards"
        no_model = rows and not (self.init_from or self.vision_from)
        nothing_learns = not (self.lr if self.lora_rank else any(self.rates.values()))
        small = self.weights not in ("auto", "float32") and not (rows and self.lora_rank and self.init_from)
        for wrong, said in (
            (bool(self.vision_from) != bool(self.text_from), "--vision-from and --text-from: expected both"),
            (self.init_from and self.vision_from, "--init-from and --vision-from: expected one of them"),
            (self.patience and not self.keep_best, "--patience: expected --keep-best beside it"),
            (0 < self.max_pixels < 1024, f"--max-pixels: expected at least 1024, got {self.max_pixels}"),
            (len(sizes) > 1, "--max-pixels, --longest-edge, --image-tokens: expected one of them at most"),
            (not self.data, "--data: expected rows (a file, folder, Hub id or list of datasets), got none"),
            (no_model, "--data: rows need a model: give --init-from, or --vision-from and --text-from"),
            (nothing_learns, "--lr: expected something that learns, got a rate of 0 for all of it"),
            (self.lora_rank and self.vision_lr > 0, "--lora-rank: set no --vision-lr, adapters train alone"),
            (small, "--weights: set --lora-rank and --init-from, adapters learn beside weights in few bits"),
            (rewards and not (rows and self.init_from), "--task rewards: expected rows, and --init-from"),
            (rewards and not self.rewards, "--rewards: expected names with their weights, as {exact: 1.0}"),
            (rewards and self.lora_dropout, "--lora-dropout: expected 0: answers are sampled without it"),
            (self.eval_data and self.holdout, "--eval-data and --holdout: expected one of them"),
            (self.eval_metric and not (rows and self.held_out_data), "--eval-metric: expected held-out rows"),
        ):
            if wrong:
                raise ValueError(said)
        if self.push_to_hub:
            check_repo_id(self.push_to_hub)

    @property
    def held_out_data(self) -> Data:
        """The datasets of held-out rows, of which `holdout` says the share; "" for none."""
        return self.eval_data or (self.data if self.holdout else "")

    @property
    def rates(self) -> dict[str, float]:
        """Peak rate of AdamW by part of the model; 0 is frozen."""
        return {
            "language_model": self.lr,
            "vision_model": self.lr if self.vision_lr < 0 else self.vision_lr,
            "projector": self.lr if self.projector_lr < 0 else self.projector_lr,
        }

    @property
    def learns(self) -> frozenset[str]:
        """Parts whose own weights learn. With LoRA, adapters do in their place, and beside them the projector
        if it has a rate of its own."""
        if self.lora_rank:
            return frozenset({"projector"} if self.projector_lr > 0 else ())
        return frozenset(part for part, rate in self.rates.items() if rate)


@dataclass(frozen=True, config=_STRICT)
class PlanOptions:
    """The flags of `train.py --plan` and `--show`: what a plan assumes besides the recipe."""

    plan: bool = setting(False, "print the run's parameters, memory, FLOPs and hours, and exit")
    show: int = setting(
        -1, "print this many samples and what the first rows are like, and exit; -1: train", -1, 10_000
    )
    plan_ranks: int = setting(1, "plan: number of processes, one per device", 1, 1_000_000)
    plan_device: str = setting("auto", "plan: cpu, or a GPU as H100; auto: this machine's GPU, else H100")
    plan_tflops: float = setting(0.0, "plan: peak TFLOP/s of a device; 0: looked up by its name", 0, 1e6)
    plan_mfu: float = setting(0.4, "plan: share of the peak that the model's FLOPs reach", 1e-9, 1)
    plan_tiles: float = setting(-1.0, "plan: tiles per sample; -1: those of one 4:3 image", -1, 65_536)
    plan_text: int = setting(100, "plan: text tokens per sample", 1, 1_000_000)
    plan_labelled: float = setting(0.4, "plan: share of the text tokens that are answers", 1e-9, 1)
    plan_rows: int = setting(
        0, "plan: number of rows in the data; 0: counted if the data is local", 0, 10**12
    )


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def dataset_entries(data: Data) -> list[Mapping[str, Any]]:
    """`data` as `data.sources.open_datasets` takes it."""
    return [{"path": data}] if isinstance(data, str) else list(data)


def settings_class(settings: Mapping[str, Any]) -> type[TrainConfig]:
    """`TrainConfig`, or, where `data` names a package of recipes/, that package's own `settings.SETTINGS`."""
    data = settings.get("data")
    package, _, name = data.partition(".") if isinstance(data, str) else ("", "", "")
    if package == RECIPES.name and (RECIPES / name / "settings.py").is_file():
        return resolve_name(f"{data}.settings:SETTINGS")
    return TrainConfig


# ---------------------------------------------------------------------------------- the command line
def _fields(kind: type[TrainConfig]) -> dict[str, Field]:
    """All settings of recipes and flags, by name."""
    return {item.name: item for described in (kind, PlanOptions) for item in fields(described)}


def parse_arguments(
    arguments: list[str] | None = None, description: str = ""
) -> tuple[TrainConfig, PlanOptions]:
    """The recipe named first with the flags put over it, and --plan's flags. Without a recipe and --data it
    is configs/flags.yaml.

    Exits with status 2 and one sentence for what is wrong in them.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    recipe = None if any(one.split("=")[0] == "--data" for one in arguments) else DEFAULT_RECIPE
    if arguments and not arguments[0].startswith("-"):
        recipe = Path(arguments.pop(0))
    flags: dict[str, Any] = {}
    try:
        settings = read_recipe(recipe) if recipe else {}
        kind = settings_class(settings)  # its flags are shown to those who name its recipe
        flags = _read_flags(kind, arguments, description)
        if settings_class(settings | flags) is not kind:
            raise ValueError(f"--data: {flags['data']!r} has settings of its own; name a recipe of it")
        of_plan = {item.name: flags[item.name] for item in fields(PlanOptions) if item.name in flags}
        plan = PlanOptions(**of_plan)
        config = kind(**settings | {name: given for name, given in flags.items() if name not in of_plan})
        if of_plan.keys() - {"plan", "show"} and not plan.plan:
            name = next(name for name in of_plan if name not in ("plan", "show"))
            raise ValueError(f"{flag(name)}: has no effect without --plan; leave it out, or set --plan")
        check_effects(config, flags.keys() - of_plan.keys())
        return config, plan
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        if first["loc"]:
            name = str(first["loc"][0])
            where = flag(name) if name in flags else f"recipe {recipe}: {name}"
            said = f"{where}: {said}, got {first['input']!r:.80}"
        leave(said)
    except ValueError as error:
        leave(error)


def _read_flags(kind: type[TrainConfig], arguments: list[str], description: str) -> dict[str, Any]:
    """The values of the flags that were given, as text, by setting."""
    parser = _Parser(
        prog=named("train.py"), usage=named("train.py [RECIPE.yaml] [flags]"), description=named(description),
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=named(f"train.py (Ocelli) {__version__}"))
    types = typing.get_type_hints(kind) | typing.get_type_hints(PlanOptions)
    known = _fields(kind)
    for name, item in known.items():
        words = ", ".join(typing.get_args(types[name])) if typing.get_origin(types[name]) is Literal else ""
        choice = f"one of {words}; " if words else ""
        shown = item.default if item.default != "" else "none"
        options: dict[str, Any] = {"help": f"{item.metadata['description']} ({choice}default: {shown})"}
        if types[name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = "STR" if words else getattr(types[name], "__name__", "str or list").upper()
        parser.add_argument(flag(name), **options)
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].split("=")[0]
        leave(f"unknown argument {name}{did_you_mean(name, map(flag, known))}; --help lists the flags")
    return vars(given)


def check_effects(config: TrainConfig, flags: Iterable[str]) -> None:
    """Raises ValueError for a flag without effect in this run. What turns something off passes."""
    known = _fields(type(config))
    for name in flags:
        scope: Scope = known[name].metadata["scope"]
        if getattr(config, name) and not scope.holds(config):
            raise ValueError(f"{flag(name)}: has no effect in this run, it needs {scope.needs}; leave it out")


def parse_command(
    arguments: list[str] | None = None, description: str = ""
) -> tuple[TrainConfig, PlanOptions]:
    """`parse_arguments`, and a look at the device, models, rows and output folder that the settings name.

    None of this needs torch, so a mistake is reported at once. Of several ranks each looks later, where all
    of them hear what one of them lacks.
    """
    config, options = parse_arguments(arguments, description)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return config, options
    try:
        check_device(config.device)
        sources = [*filter(None, (config.init_from, config.vision_from, config.text_from))]
        for source in sources:
            resolve_source(source)  # a slip that shows here, before the Hub is asked for any
        if not options.plan and options.show < 0:
            check_replaceable(Path(config.output))
            for data in (config.data, config.eval_data) if not config.is_drawn else ():
                for entry in dataset_entries(data) if data else ():
                    check_rows_path(str(entry.get("path", "")))
            for source in sources:
                check_has_config(source)
    except (ValueError, OSError) as error:
        leave(error)
    return config, options


def leave(error: Exception | str) -> typing.NoReturn:
    print(named(f"train.py: error: {one_line(error)}"), file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        leave(message)


# ---------------------------------------------------------------------------------------- the recipe
def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's settings, as they are written. ValueError: no such file, not YAML, or an unknown key."""
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.load(text, yaml.BaseLoader) or {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"recipe {path} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected keys and values, got {type(recipe).__name__}")
    keys = [key.value for key, _ in yaml.compose(text, yaml.BaseLoader).value] if recipe else []
    if len(keys) > len(recipe):  # YAML takes the last
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"recipe {path}: expected each key once, got {twice} again")
    known = [item.name for item in fields(settings_class(recipe))]
    if unknown := [str(key) for key in recipe if key not in known]:
        near = did_you_mean(unknown[0], known)
        raise ValueError(f"recipe {path}: unknown key {unknown[0]}{near}; train.py --help lists them all")
    return recipe


def write_run(config: TrainConfig, folder: Path) -> None:
    """The resolved configuration as a recipe, run.yaml."""
    with replacing(folder / RUN_FILE) as temporary:
        text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
        temporary.write_text(text, encoding="utf-8")
