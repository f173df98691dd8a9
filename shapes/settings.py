"""The settings of `TrainConfig` that only a run on shapes has: what they mean, and whether they fit together.
Nothing here needs torch."""

from __future__ import annotations

from training.config import TrainConfig, flag

MAX_QUESTIONS = 20_000  # all are drawn before the first step
MAX_PATCHES = 64  # per side of an image


def check_settings(config: TrainConfig) -> None:
    """Raises ValueError where a run on shapes cannot have these settings; other runs pass."""
    if not config.is_drawn:
        return
    for name in ("micro_batch_size", "lora_rank", "vision_from", "epochs"):
        if getattr(config, name):
            raise ValueError(f"{flag(name)}: not for shapes; name other rows with --data")
    if config.parallel == "fsdp":
        raise ValueError("--parallel: expected ddp for shapes, got fsdp")
    if config.eval_questions > MAX_QUESTIONS:
        raise ValueError(
            f"--eval-questions: expected at most {MAX_QUESTIONS} for shapes, got {config.eval_questions}"
        )
    by_steps = config.steps and not config.pictures
    if not by_steps and config.vision_pictures >= config.pictures:
        raise ValueError(
            f"--vision-pictures: expected fewer than --pictures ({config.pictures}), "
            f"got {config.vision_pictures}"
        )
    if vision_steps(config) and not config.rates["vision_model"]:
        raise ValueError(
            "--vision-lr: expected more than 0, because the vision tower trains alone first, got 0; or set "
            "--vision-pictures 0"
        )
    if not config.init_from:
        _check_network(config)


def _check_network(config: TrainConfig) -> None:
    """Whether the sizes of a new model go together."""
    for whole, part in (
        ("image_size", "patch_size"),
        ("vision_width", "vision_heads"),
        ("text_heads", "text_kv_heads"),
    ):
        if getattr(config, whole) % getattr(config, part):
            raise ValueError(
                f"{flag(whole)}: expected a multiple of {flag(part)} {getattr(config, part)}, "
                f"got {getattr(config, whole)}"
            )
    patches, head = config.image_size // config.patch_size, config.text_width // config.text_heads
    if patches > MAX_PATCHES:
        raise ValueError(
            f"--patch-size: expected at most {MAX_PATCHES} patches a side of --image-size "
            f"{config.image_size}, got {patches}"
        )
    if patches % config.scale_factor:
        raise ValueError(
            f"--scale-factor: expected a divisor of {patches}, the patches a side (--image-size / "
            f"--patch-size), got {config.scale_factor}"
        )
    if head < 2 or head % 2:
        raise ValueError(
            f"--text-width: expected {config.text_heads} heads (--text-heads) of an even width, "
            f"got {config.text_width}, heads of {head}"
        )


def vision_steps(config: TrainConfig) -> int:
    """Steps at the start of the run in which the vision tower trains alone."""
    return config.vision_pictures // config.vision_batch_size


def total_steps(config: TrainConfig) -> int:
    if config.steps:
        return config.steps
    return max(1, vision_steps(config) + (config.pictures - config.vision_pictures) // config.batch_size)


def images_after(config: TrainConfig, step: int) -> int:
    """Images drawn in the first `step` steps."""
    vision = min(step, vision_steps(config))
    return vision * config.vision_batch_size + (step - vision) * config.batch_size
