"""The run's configuration: one frozen dataclass, command-line flags generated from it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field, fields


def _field(default, help_text: str):
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `python train.py` can be told. The defaults train the embedded model from nothing."""

    output: str = _field("runs/shapes", "folder for the checkpoint, the metrics and the training state")
    resume: bool = _field(True, "continue from the training state in the output folder, if there is one")
    init_from: str = _field(
        "", "start from this checkpoint's weights (folder or Hub id) instead of random ones"
    )
    seed: int = _field(0, "seed of the weights and of every picture")
    device: str = _field("auto", "auto, cpu, cuda or mps")
    threads: int = _field(0, "CPU threads; 0 leaves PyTorch's choice")
    workers: int = _field(1, "processes that draw pictures")

    # length of the run, in pictures
    pictures: int = _field(144_000, "pictures to train on, all stages together")
    vision_pictures: int = _field(64_000, "of these, at the start: the vision tower alone, on dense targets")
    curriculum_pictures: int = _field(25_000, "pictures until scenes are at their hardest; counted per stage")
    batch_size: int = _field(16, "pictures per step")
    vision_batch_size: int = _field(64, "the same while the vision tower trains alone")
    sequence_length: int = _field(256, "positions per picture: prompt prefix and all its questions")

    # optimisation
    lr: float = _field(2e-3, "peak learning rate of AdamW (embeddings, norms, biases, patch convolution)")
    matrix_lr: float = _field(3e-3, "peak learning rate of Muon (every matrix inside the blocks)")
    vision_matrix_lr: float = _field(1e-2, "the same while the vision tower trains alone")
    weight_decay: float = _field(0.1, "decoupled weight decay of matrices")
    warmup_steps: int = _field(100, "steps of linear warm-up, also at the start of the language stage")
    decay_fraction: float = _field(
        0.35, "last share of the run, over which the rate falls to zero (1: cosine)"
    )
    dense_weight: float = _field(0.3, "weight of the dense vision loss once the language model trains too")
    fact_weight: float = _field(0.5, "weight of the losses on what a question's nouns mean, see grounding.py")
    grad_clip: float = _field(1.0, "largest gradient norm")
    ema: float = _field(0.998, "decay of the weight average that is evaluated and saved; 0 turns it off")

    # the network
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

    # watching it
    log_every: int = _field(20, "steps between lines of metrics.jsonl")
    eval_every: int = _field(500, "steps between evaluations on held-out pictures")
    eval_pictures: int = _field(512, "held-out pictures in an evaluation")
    save_every: int = _field(500, "steps between checkpoints")

    def __post_init__(self):
        for name in (
            "pictures",
            "batch_size",
            "vision_batch_size",
            "sequence_length",
            "log_every",
            "eval_every",
            "save_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}"
                )
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"--decay-fraction: expected more than 0, at most 1, got {self.decay_fraction}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"--ema: expected 0 or more, less than 1, got {self.ema}")

    @property
    def steps(self) -> int:
        return max(1, self.vision_steps + (self.pictures - self.vision_pictures) // self.batch_size)

    @property
    def vision_steps(self) -> int:
        return self.vision_pictures // self.vision_batch_size

    def pictures_after(self, step: int) -> int:
        """Pictures seen once `step` steps are done."""
        vision = min(step, self.vision_steps)
        return vision * self.vision_batch_size + (step - vision) * self.batch_size

    def to_dict(self) -> dict:
        return asdict(self)


def parse_config(arguments: list[str] | None = None, description: str = "") -> TrainConfig:
    """Command line to `TrainConfig`: a flag per field, booleans in pairs (--compile/--no-compile)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    for item in fields(TrainConfig):
        flag = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=item.default, help=item.metadata["help"]
            )
        else:
            parser.add_argument(
                flag, type=type(item.default), default=item.default, help=item.metadata["help"]
            )
    options = parser.parse_args(arguments)
    try:
        return TrainConfig(**vars(options))
    except ValueError as error:
        parser.error(str(error))
