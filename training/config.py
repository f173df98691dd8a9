"""The run's configuration: one frozen dataclass, validated once; `training/recipe.py` reads it from a recipe
and the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Data = str | list[dict[str, Any]]
SHAPES = "shapes"  # `data` of the built-in image world

# What each number may be: bounds that no run comes near, but that memory, time and the libraries stand.
_ENDLESS = 10**9  # of what is only counted, or passed on the way
_RANGES = (
    (0, 2**63 - 1, "seed"),
    (0, 512, "threads"),  # with more, OpenMP ends the process
    (0, 128, "workers"),
    # data
    (1, 65_536, "batch_size", "vision_batch_size"),
    (0, 65_536, "micro_batch_size", "max_tiles"),
    (1, 1_048_576, "sequence_length"),
    (1, 16_384, "waiting"),
    (1, 1_048_576, "shuffle_buffer"),
    (0, 1, "max_drop_rate"),
    # length of the run, and what is done now and then
    (0, _ENDLESS, "steps", "epochs", "pictures", "vision_pictures", "curriculum_pictures"),
    (0, _ENDLESS, "warmup_steps", "max_skipped"),
    (1, _ENDLESS, "log_every", "eval_every", "save_every", "keep"),
    (0, 1_000_000, "eval_pictures"),
    (0, _ENDLESS, "eval_questions"),
    (0, 1_000, "eval_samples"),
    # optimisation
    (0, 100, "lr", "matrix_lr", "vision_matrix_lr", "weight_decay"),
    (0, 1, "lr_floor"),
    (0, 1_000, "dense_weight", "fact_weight"),
    (0, math.inf, "grad_clip"),
    (0, 1_024, "lora_rank"),
    (1e-6, 1e6, "lora_alpha"),
    # the network
    (1, 2_048, "vision_width", "text_width"),
    (1, 64, "vision_layers", "text_layers"),
    (1, 128, "vision_heads", "text_heads", "text_kv_heads"),
    (1, 512, "image_size", "patch_size"),
    (1, 64, "scale_factor"),
    (1, 8_192, "text_inner"),
    (299, 65_536, "vocab_size"),  # 256 bytes and the special tokens
    (0, 4_096, "longest_edge"),
)
_BELOW_ONE = ("beta2", "ema", "lora_dropout")
_MOST_PATCHES = 64  # a side of an image of the image world


def _field(default, help_text: str):
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `python train.py` can be told. The defaults train the embedded model from nothing.

    Raises:
        ValueError: one sentence that names the flag, what was expected and what was got.
    """

    output: str = _field("runs/shapes", "folder for the checkpoint, the metrics and the training state")
    resume: bool = _field(
        True, "continue from the newest whole training state in --output, if any; also written --resume auto"
    )
    init_from: str = _field(
        "", "start from this checkpoint's weights (folder or Hub id) instead of random ones"
    )
    vision_from: str = _field("", "start a new model from this SigLIP tower, together with --text-from")
    text_from: str = _field("", "start a new model from this Llama-family model, together with --vision-from")
    seed: int = _field(0, "seed of the weights, of every drawn image and of the order of rows")
    device: str = _field("auto", "auto, cpu, cuda or mps")
    threads: int = _field(0, "CPU threads; 0 leaves PyTorch's choice")
    workers: int = _field(1, "processes on each rank that draw, or read and decode, images")

    # data
    data: Data = field(
        default=SHAPES,
        metadata={"help": "shapes, the image world; a file, folder or Hub id; or a list of datasets"},
    )
    eval_data: Data = field(
        default="", metadata={"help": "held-out rows, named in the same way; shapes has its own"}
    )
    batch_size: int = _field(16, "images, or rows of samples, per step over all ranks and micro-batches")
    micro_batch_size: int = _field(0, "rows that one rank computes at a time; 0 takes its whole share")
    sequence_length: int = _field(256, "positions per row")
    max_tiles: int = _field(0, "tiles per row; 0 leaves that to the positions")
    packing: bool = _field(True, "several samples in a row, each blind to the others; else padded rows")
    waiting: int = _field(64, "samples to choose from when a row is packed, in each lane of the data")
    shuffle_buffer: int = _field(256, "rows of a streaming dataset that are shuffled together")
    max_drop_rate: float = _field(0.05, "share of rows that cannot be used, past which the run stops")

    # length of the run: in steps or epochs, for shapes in images
    steps: int = _field(0, "steps of the run; 0: as many as the epochs hold")
    epochs: int = _field(0, "passes over the data; 0: no limit where steps are given, else one")
    pictures: int = _field(144_000, "shapes: images to train on, all stages together; 0 leaves it to --steps")
    vision_pictures: int = _field(64_000, "shapes: of these, first, the vision tower alone on dense targets")
    curriculum_pictures: int = _field(25_000, "shapes: images until scenes are hardest; counted per stage")
    vision_batch_size: int = _field(64, "shapes: images per step while the vision tower trains alone")

    # optimisation
    lr: float = _field(2e-3, "peak rate of AdamW for the language model; 0 freezes it")
    vision_lr: float = _field(-1.0, "the same for the vision tower; 0 freezes it, -1: as --lr")
    projector_lr: float = _field(-1.0, "the same for the projector; 0 freezes it, -1: as --lr")
    muon: str = _field("all", "matrices that Muon updates: all (inside blocks and projector), language, none")
    matrix_lr: float = _field(3e-3, "peak rate of Muon")
    vision_matrix_lr: float = _field(1e-2, "shapes: the same while the vision tower trains alone")
    weight_decay: float = _field(0.1, "decoupled weight decay of matrices; norms and biases never decay")
    beta2: float = _field(0.98, "AdamW: decay of the second moment")
    warmup_steps: int = _field(100, "steps of linear warm-up, also of a new stage; at most half of it")
    schedule: str = _field("wsd", "wsd: warm-up, plateau, decay; cosine: warm-up, then decay")
    decay_fraction: float = _field(0.35, "wsd: last share of the run, over which the rate falls")
    lr_floor: float = _field(0.0, "share of its peak that every rate falls to by the end of the run")
    dense_weight: float = _field(0.3, "shapes: weight of the dense vision loss in the second stage")
    fact_weight: float = _field(0.5, "shapes: weight of the losses on what nouns mean, see grounding.py")
    grad_clip: float = _field(1.0, "largest gradient norm; 0 never clips")
    max_skipped: int = _field(0, "steps with a loss or gradient that is not finite to skip before stopping")
    ema: float = _field(0.998, "decay of the weight average that is evaluated and saved; 0 turns it off")

    # low-rank adapters, through peft
    lora_rank: int = _field(0, "rank of adapters that train in place of the weights; 0: no adapters")
    lora_alpha: float = _field(16.0, "adapters: their scale is alpha / rank")
    lora_dropout: float = _field(0.0, "adapters: dropout on their input")
    lora_targets: str = _field(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "adapters: the language model's layers"
    )

    # the machine
    parallel: str = _field("ddp", "ranks hold all of the model (ddp) or a share of each weight (fsdp)")
    precision: str = _field("auto", "compute in float32 or bfloat16, weights are float32; auto: by device")
    activation_checkpointing: bool = _field(False, "compute activations twice, to keep fewer of them")
    compile: bool = _field(False, "torch.compile the blocks")
    async_save: bool = _field(False, "under torchrun: write the training state while the run goes on")

    # the network, where it starts from nothing
    vision_width: int = _field(128, "vision tower: hidden size")
    vision_layers: int = _field(6, "vision tower: blocks")
    vision_heads: int = _field(4, "vision tower: heads")
    image_size: int = _field(64, "vision tower: pixels a side")
    patch_size: int = _field(8, "vision tower: pixels a side of a patch")
    scale_factor: int = _field(1, "pixel shuffle: patches a side folded into one token")
    text_width: int = _field(192, "language model: hidden size")
    text_layers: int = _field(4, "language model: blocks")
    text_heads: int = _field(6, "language model: query heads")
    text_kv_heads: int = _field(2, "language model: key and value heads")
    text_inner: int = _field(512, "language model: SwiGLU width")
    vocab_size: int = _field(1024, "tokenizer: largest vocabulary, special tokens included")
    longest_edge: int = _field(0, "from backbones: pixels that an image is resized to; 0: one tile")

    # watching it
    log_every: int = _field(20, "steps between lines of metrics.jsonl")
    log_samples: bool = _field(False, "name each step's samples in metrics.jsonl")
    eval_every: int = _field(500, "steps between evaluations on held-out data")
    eval_pictures: int = _field(512, "held-out images, or rows, whose loss an evaluation takes")
    eval_questions: int = _field(200, "held-out questions that are answered and scored in an evaluation")
    eval_metric: str = _field(
        "", "rows: answer held-out questions, score them by this metric; under fsdp on a whole model per rank"
    )
    eval_samples: int = _field(4, "held-out questions whose answers are kept, with images, in samples/")
    save_every: int = _field(500, "steps between checkpoints")
    keep: int = _field(2, "training states to keep; where the newest is broken, the run goes on from another")
    keep_best: bool = _field(True, "keep the model with the best evaluation, in best/")
    tracker: str = _field("none", "also log to trackio (local), wandb or tensorboard; none needs no package")
    push_to_hub: str = _field("", "at the end, upload the model to this repository")

    def __post_init__(self):
        for least, most, *names in _RANGES:
            check_range(self, least, most, *names)
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
        for name in _BELOW_ONE:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{flag(name)}: expected 0 or more, less than 1, got {value}")
        if bool(self.vision_from) != bool(self.text_from):
            raise ValueError("--vision-from and --text-from: expected both or neither")
        if self.init_from and self.vision_from:
            raise ValueError("--init-from and --vision-from: expected one of them")
        by_steps = self.steps and not self.pictures
        if self.is_shapes and not by_steps and self.vision_pictures >= self.pictures:
            raise ValueError(
                f"--vision-pictures: expected fewer than --pictures ({self.pictures}), "
                f"got {self.vision_pictures}"
            )
        self._check_combinations()
        if self.is_shapes:
            check_range(self, 0, 20_000, "eval_questions")  # which are drawn before the first step
            if not self.init_from:
                self._check_network()
        if self.push_to_hub:
            from models.checkpoints.hub import check_repo_id

            check_repo_id(self.push_to_hub)

    def _check_choice(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{flag(name)}: expected {', '.join(choices)}, got {getattr(self, name)!r}")

    def _check_combinations(self) -> None:
        if self.is_shapes:
            for name, wrong in (
                ("parallel", self.parallel == "fsdp"),
                ("micro_batch_size", self.micro_batch_size > 0),
                ("lora_rank", self.lora_rank > 0),
                ("vision_from", bool(self.vision_from)),
                ("epochs", self.epochs > 0),
            ):
                if wrong:
                    raise ValueError(f"{flag(name)}: not for the image world; name other rows with --data")
        elif not (self.init_from or self.vision_from):
            raise ValueError(
                "--data: rows need a model to start from: give --init-from, or --vision-from and --text-from"
            )
        if not (self.lr if self.lora_rank else any(self.rates.values())):
            raise ValueError("--lr: expected something that learns, got a rate of 0 for all of it")
        if self.vision_steps and not self.rates["vision_model"]:
            raise ValueError(
                "--vision-lr: expected more than 0, since at first the vision tower trains alone, got 0; or "
                "set --vision-pictures 0"
            )
        if self.eval_metric and (self.is_shapes or not self.eval_data):
            raise ValueError("--eval-metric: expected rows with --eval-data")
        if self.lora_rank and (self.vision_lr > 0 or self.projector_lr > 0):
            raise ValueError("--lora-rank: adapters train in place of all weights; set no --vision-lr")

    def _check_network(self) -> None:
        """Whether the sizes of a model from nothing go together."""
        for whole, part in (
            ("image_size", "patch_size"),
            ("vision_width", "vision_heads"),
            ("text_heads", "text_kv_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{flag(whole)}: expected a multiple of {flag(part)} {getattr(self, part)}, "
                    f"got {getattr(self, whole)}"
                )
        patches, each = self.image_size // self.patch_size, self.text_width // self.text_heads
        if patches > _MOST_PATCHES:
            raise ValueError(
                f"--patch-size: expected at most {_MOST_PATCHES} patches a side of --image-size "
                f"{self.image_size}, got {patches}"
            )
        if patches % self.scale_factor:
            raise ValueError(
                f"--scale-factor: expected a divisor of {patches}, the patches a side (--image-size / "
                f"--patch-size), got {self.scale_factor}"
            )
        if each < 2 or each % 2:
            raise ValueError(
                f"--text-width: expected {self.text_heads} heads (--text-heads) of an even width, "
                f"got {self.text_width}, heads of {each}"
            )

    # -------------------------------------------------------------------------------- what follows from it
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

    @property
    def shape_steps(self) -> int:
        """Steps of an image-world run."""
        if self.steps:
            return self.steps
        return max(1, self.vision_steps + (self.pictures - self.vision_pictures) // self.batch_size)

    @property
    def vision_steps(self) -> int:
        """Steps at the start of an image-world run in which the vision tower trains alone."""
        return self.vision_pictures // self.vision_batch_size if self.is_shapes else 0

    def pictures_after(self, step: int) -> int:
        """Drawn images seen once `step` steps are done."""
        vision = min(step, self.vision_steps)
        return vision * self.vision_batch_size + (step - vision) * self.batch_size

    def to_dict(self) -> dict:
        return asdict(self)


def check_range(settings: Any, least: float, most: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that is out of bounds, or no number (NaN)."""
    for name in names:
        value = getattr(settings, name)
        if not least <= value <= most:
            raise ValueError(f"{flag(name)}: expected from {least} to {most}, got {value}")


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def dataset_entries(data: Data) -> list[Mapping[str, Any]]:
    """`data` as `data.sources.open_datasets` takes it."""
    return [{"path": data}] if isinstance(data, str) else list(data)
