"""The ranks of a run: set up from torchrun's environment, agreed with, and wrapped around the model once.

torchrun --nproc-per-node 8 train.py RECIPE.yaml                     # DDP
torchrun --nproc-per-node 8 train.py RECIPE.yaml --parallel fsdp     # FSDP2: weights sharded
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from messages import one_line
from models.checkpoints.load import prepare_device
from models.packed_vision_transformer import PackedBlock
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig

T = TypeVar("T")

_FAILED_EXCHANGE = re.compile(r"gloo|nccl|connection (closed|reset|refused)", re.IGNORECASE)
_LONGEST_DOWNLOAD = timedelta(days=30)
_FOUND_OUT_SECONDS = 5.0  # in which torchrun sees which rank ended first


class LostRankError(ConnectionError):
    """This rank waits for another that has left."""


class Ranks:
    """This process among the others; alone without torchrun. ConnectionError where they cannot meet."""

    def __init__(self, device: torch.device):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.together = "WORLD_SIZE" in os.environ  # true for torchrun with one process, too
        if device.type == "cuda" and self.together:
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        self.device = prepare_device(device)
        if self.together and not dist.is_initialized():
            self._meet()

    def _meet(self) -> None:
        # What ranks agree on are a few numbers of the CPU's: gloo, so that no step waits for the device.
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend)
        except RuntimeError as error:
            place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            failed = f"the ranks cannot meet at {place} ({backend}): {_first_line(error)}"
            raise ConnectionError(self.reason(ConnectionError(failed))) from error

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value, summed over all ranks."""
        if not self.together:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers)
        return numbers.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def first_then_others(self, act: Callable[[], T]) -> T:
        """What `act` returns on this rank. The first rank does it first: what it downloads lies in the cache
        for the others. Of a stream nothing is kept: every rank asks where it lies, the others all at once."""
        if self.is_first:
            result = act()
            self.wait()
            return result
        self.wait()
        return act()

    def wait(self) -> None:
        """Until all ranks are here, however long one of them downloads; exchanges wait for half an hour."""
        if self.together:
            dist.barrier(dist.new_group(backend="gloo", timeout=_LONGEST_DOWNLOAD))  # ends with the others

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, an exchange that fails because another rank is gone is a `LostRankError`."""
        try:
            yield
        except RuntimeError as error:
            exchange = isinstance(error, dist.DistError) or _FAILED_EXCHANGE.search(str(error))
            if not (self.together and exchange):
                raise
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostRankError:
        # The rank that ended first is the one to name: this one does not end before torchrun knows.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_FOUND_OUT_SECONDS)
        return LostRankError(
            "another rank has left, or cannot be reached any more; the rank that left first has said why "
            f"or was killed (torchrun names it); here: {_first_line(error)}"
        )

    def reason(self, error: Exception) -> str:
        """Why this rank leaves, as a sentence that names it among others."""
        return f"rank {self.rank} of {self.world_size}: " * self.together + one_line(error)

    def close(self) -> None:
        if self.together and dist.is_initialized():
            # A thread of gloo's lets go of the last exchange's tensors, for which it needs Python's lock. A
            # group that ends before would wait for that thread with the lock held: for ever.
            for _ in range(20):
                time.sleep(0.01)
            dist.destroy_process_group()


def _first_line(error: RuntimeError) -> str:
    """Without where in C++ it was raised."""
    return one_line(str(error).split("\n")[0])


def compute_dtype(config: TrainConfig, kind: str) -> torch.dtype:
    """The dtype of products on a kind of device; weights and optimizers are always float32. A GPU without
    bfloat16 has float32: gradients in float16 would want a scale."""
    old = kind == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False)
    auto = "bfloat16" if kind == "cuda" and not old else "float32"
    return getattr(torch, auto if config.precision == "auto" else config.precision)


def blocks_of(model: VisionLanguageModel) -> list[nn.Module]:
    """The transformer blocks of the vision tower and of the language model."""
    return [*model.vision_model.layers, *model.language_model.layers]


def has_codes(model: VisionLanguageModel) -> bool:
    """Whether frozen matrices are kept in fewer bits than 32 (`training.lora.open_base`)."""
    return not isinstance(model.language_model.embed_tokens, nn.Embedding)


def prepare_blocks(model: VisionLanguageModel, recompute: bool, compiled: bool) -> None:
    """Activation checkpointing and torch.compile, block by block and in place: names stay as they are."""

    def forward(plain: Callable, *inputs):
        if not torch.is_grad_enabled():
            return plain(*inputs)
        return checkpoint(plain, *inputs, use_reentrant=False)

    for block in blocks_of(model):
        if recompute:
            block.forward = partial(forward, block.forward)
        # Whole images have other numbers of patches in each batch, and for each it would compile anew.
        if compiled and not isinstance(block, PackedBlock):
            block.compile()


def wrap(
    module: nn.Module, model: VisionLanguageModel, ranks: Ranks, parallel: str, dtype: torch.dtype
) -> nn.Module:
    """The module that computes the loss, as all ranks train it. With fsdp, its weights and those of the model
    inside become sharded DTensors in place, and those of its `references`, frozen modules that are no part of
    it, where it has some; gradients are reduced in float32, whatever `dtype` is. Beside codes, whole on each
    rank, there is next to nothing to shard.
    """
    if not ranks.together:
        return module
    if parallel == "ddp" or has_codes(model):
        devices = [ranks.local_rank] if ranks.device.type == "cuda" else None
        unused = bool(getattr(module, "leaves_parameters_out", False))
        return DistributedDataParallel(
            module,
            devices,
            broadcast_buffers=False,
            find_unused_parameters=unused,
            gradient_as_bucket_view=True,
        )
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    frozen = [(one, one.model) for one in getattr(module, "references", ())]
    for whole, part in ((module, model), *frozen):
        for block in blocks_of(part):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(whole, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # a sum: the loss is divided by the global count already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def reshard(wrapped: nn.Module) -> None:
    """Put weights back into shards. A forward pass without a backward one leaves some of them whole, and
    parameters' names then lead to these."""
    for part in wrapped.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gradient_scale(wrapped: nn.Module, ranks: Ranks) -> int:
    """The factor that undoes the mean over ranks that DDP takes of gradients."""
    return ranks.world_size if isinstance(wrapped, DistributedDataParallel) else 1


@contextmanager
def accumulating(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged after the last micro-batch of a step only."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    alone = isinstance(wrapped, DistributedDataParallel) and not last
    with wrapped.no_sync() if alone else nullcontext():  # type: ignore[operator]
        yield


def clip(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients to a norm of at most `limit` (0: leave them), and return the norm that they had."""
    norm = nn.utils.clip_grad_norm_(parameters, limit or float("inf"))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all of its shards; all ranks call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------------------------------- out of memory
_OUT_OF_MEMORY = ("t allocate memory", "not enough memory", "out of memory", "alloc_failed", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """True if the device or the machine has no memory left; PyTorch reports it with many kinds of error."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    named = any(words in text for words in _OUT_OF_MEMORY)
    return named or isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_lost_worker(error: BaseException) -> bool:
    """True if a process that reads data has died; PyTorch raises that wherever the run is."""
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)


def out_of_memory(config: TrainConfig, device: torch.device) -> str:
    """A sentence with the settings to change, cheapest first."""
    ways = "lower --micro-batch-size, --sequence-length or --max-tiles, set --activation-checkpointing, "
    ways += "shard the weights of several ranks (--parallel fsdp), or train adapters (--lora-rank)"
    where = "the GPU" if device.type == "cuda" else "this machine"
    return f"{where} is out of memory: {ways}; --plan shows what a run needs"
