"""The settings of a run on plain drawings: those of `TrainConfig`, and its own. Nothing here needs torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from training.config import Data, Scope, TrainConfig, flag, setting

DATA = "recipes.shapes"  # `data` of such a run
MAX_QUESTIONS = 20_000  # all are drawn before the first step
MAX_PATCHES = 64  # per side of an image

OF_VISION_STAGE = Scope(lambda config: config.vision_pictures > 0, "--vision-pictures")
OF_VISION_MUON = Scope(
    lambda config: config.vision_pictures > 0 and config.muon != "none",
    "--vision-pictures, and --muon all or language",
)
FROM_SCRATCH = Scope(lambda config: not config.init_from, "no --init-from")


@dataclass(frozen=True)
class ShapesConfig(TrainConfig):
    """A run's settings. A ValueError names the flag that is wrong."""

    is_drawn: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = (
        *TrainConfig.fixed,
        *("vision_width", "vision_layers", "vision_heads", "image_size", "patch_size"),
        *("text_width", "text_layers", "text_heads", "text_kv_heads", "text_inner", "vocab_size"),
    )

    output: str = setting("runs/shapes", "folder for the checkpoint, the metrics and the training state")
    data: Data = setting(DATA, f"{DATA}: drawn while it trains")
    pictures: int = setting(144_000, "images to train on, in all; 0: use --steps", 0, 10**9)
    vision_pictures: int = setting(64_000, "how many of these train the vision tower alone", 0, 10**9)
    vision_batch_size: int = setting(
        64, "images per step of the vision tower alone", 1, 65_536, scope=OF_VISION_STAGE
    )
    vision_matrix_lr: float = setting(
        1e-2, "peak learning rate of Muon for the vision tower alone", 0, 100, scope=OF_VISION_MUON
    )

    # the network, where it starts from scratch
    vision_width: int = setting(128, "vision tower: hidden size", 1, 2_048, scope=FROM_SCRATCH)
    vision_layers: int = setting(6, "vision tower: blocks", 1, 64, scope=FROM_SCRATCH)
    vision_heads: int = setting(4, "vision tower: heads", 1, 128, scope=FROM_SCRATCH)
    image_size: int = setting(64, "vision tower: pixels per side", 1, 512)
    patch_size: int = setting(8, "vision tower: pixels per side of a patch", 1, 512)
    scale_factor: int = setting(
        1, "pixel shuffle: patches per side that become one token", 1, 64, scope=FROM_SCRATCH
    )
    text_width: int = setting(192, "language model: hidden size", 1, 2_048, scope=FROM_SCRATCH)
    text_layers: int = setting(4, "language model: blocks", 1, 64, scope=FROM_SCRATCH)
    text_heads: int = setting(6, "language model: query heads", 1, 128, scope=FROM_SCRATCH)
    text_kv_heads: int = setting(2, "language model: key and value heads", 1, 128, scope=FROM_SCRATCH)
    text_inner: int = setting(512, "language model: SwiGLU width", 1, 8_192, scope=FROM_SCRATCH)
    # The least is 256 bytes and the special tokens.
    vocab_size: int = setting(
        1024, "tokenizer: maximum vocabulary, with special tokens", 299, 65_536, scope=FROM_SCRATCH
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("micro_batch_size", "lora_rank", "vision_from", "epochs"):
            if getattr(self, name):
                raise ValueError(f"{flag(name)}: not for drawings; name rows with --data")
        if self.parallel == "fsdp":
            raise ValueError("--parallel: expected ddp for drawings, got fsdp")
        if self.eval_questions > MAX_QUESTIONS:
            raise ValueError(
                f"--eval-questions: expected at most {MAX_QUESTIONS} for drawings, got {self.eval_questions}"
            )
        by_steps = self.steps and not self.pictures
        if not by_steps and self.vision_pictures >= self.pictures:
            raise ValueError(
                f"--vision-pictures: expected fewer than --pictures ({self.pictures}), "
                f"got {self.vision_pictures}"
            )
        if self.vision_steps and not self.rates["vision_model"]:
            raise ValueError(
                "--vision-lr: expected more than 0, because the vision tower trains alone first, got 0; or "
                "set --vision-pictures 0"
            )
        if not self.init_from:
            self._check_network()

    def _check_network(self) -> None:
        """Whether the sizes of a new model go together."""
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
        patches, head = self.image_size // self.patch_size, self.text_width // self.text_heads
        if patches > MAX_PATCHES:
            raise ValueError(
                f"--patch-size: expected at most {MAX_PATCHES} patches a side of --image-size "
                f"{self.image_size}, got {patches}"
            )
        if patches % self.scale_factor:
            raise ValueError(
                f"--scale-factor: expected a divisor of {patches}, the patches a side (--image-size / "
                f"--patch-size), got {self.scale_factor}"
            )
        if head < 2 or head % 2:
            raise ValueError(
                f"--text-width: expected {self.text_heads} heads (--text-heads) of an even width, "
                f"got {self.text_width}, heads of {head}"
            )

    @property
    def vision_steps(self) -> int:
        """Steps at the start of the run in which the vision tower trains alone."""
        return self.vision_pictures // self.vision_batch_size

    @property
    def total_steps(self) -> int:
        if self.steps:
            return self.steps
        return max(1, self.vision_steps + (self.pictures - self.vision_pictures) // self.batch_size)

    def images_after(self, step: int) -> int:
        """Images drawn in the first `step` steps."""
        vision = min(step, self.vision_steps)
        return vision * self.vision_batch_size + (step - vision) * self.batch_size


SETTINGS = ShapesConfig
