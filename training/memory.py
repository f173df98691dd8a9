"""A run whose memory does not suffice: what to lower, in one sentence."""

from __future__ import annotations

import errno

import torch

from training.config import TrainConfig

_SAID = ("t allocate memory", "not enough memory", "out of memory", "alloc_failed", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine has no memory left; PyTorch says so with many kinds of error."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


def out_of_memory(config: TrainConfig, device: torch.device, world_size: int) -> str:
    """What to lower, or to set, in the order in which it costs least."""
    if config.is_shapes:
        ways = [
            f"--vision-batch-size ({config.vision_batch_size}) or --batch-size ({config.batch_size})",
            "the sizes of the network",
        ]
    else:
        rows = config.micro_batch_size or max(1, config.batch_size // world_size)
        ways = [f"--micro-batch-size (a rank computes {rows} rows at a time)"] if rows > 1 else []
        ways += [f"--sequence-length ({config.sequence_length})", "--max-tiles"]
    if not config.activation_checkpointing:
        ways.append("set --activation-checkpointing")
    if world_size > 1 and config.parallel == "ddp":
        ways.append("set --parallel fsdp")
    if not (config.is_shapes or config.lora_rank):
        ways.append("train adapters (--lora-rank)")
    where = "the GPU" if device.type == "cuda" else "this machine"
    return (
        f"{where} is out of memory: lower {', or '.join(ways)}; --plan says what a run needs, and what was "
        f"saved last is in {config.output}"
    )
