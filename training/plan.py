"""What a training run will need, before it starts: `python train.py CONFIG --plan`.

    plan = make_plan(config, Workload(micro_batch=2, sequence_length=4096, tiles_per_row=17, world_size=8,
                                      distribution="ddp", total_samples=1_000_000, samples_per_row=4,
                                      mfu=0.45, peak_flops=989e12))
    print(plan.table())
    plan.memory["activations"], plan.memory_bytes, plan.steps, plan.hours

Arithmetic alone: no download, no GPU, no weights. The formulas are in `training/costs.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from models.checkpoints.inspect import module_of
from models.config import VLMConfig
from models.losses import chunk_positions
from training.costs import (
    AUTOCAST,
    BFLOAT16,
    FLOAT32,
    PARTS,
    Amounts,
    Widths,
    count,
    head_bytes,
    is_muon_matrix,
    language_bytes,
    lora_parameters,
    meta_parameters,
    part_of,
    projector_bytes,
    training_flops,
    vision_bytes,
)

CHOICES = {
    "distribution": ("none", "ddp", "fsdp"),
    "optimizer": ("adamw", "muon", "muon-all"),
    "precision": ("float32", "bfloat16"),
}
_MODULES = ("vision", "projector", "embeddings", "blocks", "head")


@dataclass(frozen=True)
class Workload:
    """A run, as far as arithmetic needs to know it.

    Args:
        micro_batch: rows of one batch on one rank.
        accumulation: such batches in one optimizer step.
        sequence_length: positions of a row.
        tiles_per_row: images' tiles in a row, on average.
        samples_per_row: documents in a row, on average; 1 without packing.
        fill: share of positions that is not padding.
        labelled: share of the filled positions that carries a label.
        world_size: ranks.
        distribution: "none", "ddp" (everything on every rank, gradients in the buckets' own memory) or "fsdp"
            (weights, gradients and optimizer state in shards, a block gathered at a time).
        optimizer: "adamw"; or AdamW beside Muon, "muon" for the matrices of the language model's blocks,
            "muon-all" for those of all blocks and of the projector.
        precision: "float32"; or "bfloat16" products over float32 master weights, by autocast, or with "fsdp"
            by gathering weights in bfloat16.
        frozen: those of "vision", "projector" and "language" that do not learn.
        checkpointing: blocks keep their input alone, and run forward again in backward.
        lora_rank: of adapters on the blocks' linear layers; the language model's own weights then are frozen.
        lora_targets: which linear layers; empty: all.
        average: a moving average of the weights that learn is kept beside them.
        device: "cpu" or "cuda": how large chunks of logits are.
        total_samples, total_tokens: when the run ends, by whichever is given; of filled positions.
        mfu: share of the peak that model FLOPs reach.
        peak_flops: of one device, FLOP/s in this precision.

    Raises:
        ValueError: what is unknown, out of range, or leaves nothing to learn.
    """

    micro_batch: int = 1
    accumulation: int = 1
    sequence_length: int = 4096
    tiles_per_row: float = 1.0
    samples_per_row: float = 1.0
    fill: float = 1.0
    labelled: float = 0.25
    world_size: int = 1
    distribution: str = "none"
    optimizer: str = "adamw"
    precision: str = "bfloat16"
    frozen: frozenset[str] = frozenset()
    checkpointing: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    average: bool = False
    device: str = "cuda"
    total_samples: int | None = None
    total_tokens: int | None = None
    mfu: float = 0.4
    peak_flops: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "frozen", frozenset(self.frozen))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        for name in ("micro_batch", "accumulation", "sequence_length", "world_size", "samples_per_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("tiles_per_row", "labelled", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("fill", "labelled", "mfu"):
            if not 0 < getattr(self, name) <= 1 and (name, self.labelled) != ("labelled", 0):
                raise ValueError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")
        if unknown := self.frozen - set(PARTS):
            raise ValueError(f"frozen: expected some of {PARTS}, got {sorted(unknown)}")
        if self.distribution == "none" and self.world_size > 1:
            raise ValueError(f"distribution: {self.world_size} ranks need ddp or fsdp, got none")
        if not self.learning and not self.lora_rank:
            raise ValueError("frozen: all parts are, so nothing would learn")

    @property
    def learning(self) -> frozenset[str]:
        """Parts whose own weights learn; under LoRA, the language model's do not."""
        return frozenset(PARTS) - self.frozen - ({"language"} if self.lora_rank else set())

    def adapters(self, config: VLMConfig) -> int:
        """Weights of the adapters."""
        return lora_parameters(config.text, self.lora_rank, self.lora_targets)

    @property
    def widths(self) -> Widths:
        if self.precision == "float32":
            return FLOAT32
        return BFLOAT16 if self.distribution == "fsdp" else AUTOCAST


@dataclass(frozen=True)
class Plan:
    """What `make_plan` works out. Everything "a step" is of all ranks together.

    `parameters` and `trainable` count weights by module. `memory` is bytes on each rank by what takes them;
    not in it: the libraries' own (on CUDA half a GiB or so), what the allocator cannot use, short-lived
    buffers within a block. Without accumulation, gradients fill up while activations are let go of: then the
    sum is more than the peak. `flops_per_step` are the model's (MFU counts these), `run_flops_per_step` those
    that are run, with blocks run again by activation checkpointing. `steps`, `total_flops` and `hours` are
    None where the workload does not say what they need.
    """

    workload: Workload
    parameters: dict[str, int]
    trainable: dict[str, int]
    memory: dict[str, int]
    chunk: int
    rows_per_step: int
    positions_per_step: int
    tokens_per_step: float
    labels_per_step: float
    tiles_per_step: float
    samples_per_step: float
    flops_per_step: float
    run_flops_per_step: float
    steps: int | None
    total_flops: float | None
    hours: float | None

    @property
    def memory_bytes(self) -> int:
        """Of one rank, all parts together."""
        return sum(self.memory.values())

    def table(self) -> str:
        """The plan as text, for people."""
        work, lines = self.workload, ["parameters"]
        for name in self.parameters:
            learns = self.trainable.get(name, 0)
            note = "" if learns == self.parameters[name] else "frozen" if not learns else f"{learns:,} learn"
            lines.append(f"  {name:<22}{self.parameters[name]:>16,}  {note}".rstrip())
        lines.append(f"  {'all':<22}{sum(self.parameters.values()):>16,}")
        ranks = "1 rank" if work.world_size == 1 else f"each of {work.world_size} ranks ({work.distribution})"
        lines.append(f"memory of {ranks}, {work.precision}, {work.optimizer}")
        for name, size in self.memory.items():
            lines.append(f"  {name:<22}{size / 2**30:>16,.2f} GiB")
        lines.append(f"  {'all':<22}{self.memory_bytes / 2**30:>16,.2f} GiB")
        lines.append("a step, all ranks")
        for name, value in {
            "rows": self.rows_per_step,
            "positions": self.positions_per_step,
            "tokens": self.tokens_per_step,
            "labelled tokens": self.labels_per_step,
            "tiles": self.tiles_per_step,
            "samples": self.samples_per_step,
        }.items():
            lines.append(f"  {name:<22}{round(value):>16,}")
        lines.append(f"  {'model FLOPs':<22}{self.flops_per_step:>16.3e}")
        if self.run_flops_per_step != self.flops_per_step:
            lines.append(f"  {'FLOPs run':<22}{self.run_flops_per_step:>16.3e}")
        lines.append("the run")
        if self.steps is None:
            lines.append("  no length given: say how many rows the data have (--plan-rows), or --steps")
        else:
            lines.append(f"  {'steps':<22}{self.steps:>16,}")
            lines.append(f"  {'model FLOPs':<22}{self.total_flops:>16.3e}")
        if self.hours is not None and work.peak_flops is not None:
            rate = f"{work.mfu:.0%} of {work.world_size} x {work.peak_flops / 1e12:,.4g} TFLOP/s"
            lines.append(f"  {'hours':<22}{self.hours:>16,.1f}  at {rate}")
        return "\n".join(lines)


def make_plan(config: VLMConfig, work: Workload) -> Plan:
    """Work everything out; see `Plan`."""
    parameters = meta_parameters(config)
    by_module = count(parameters, module_of)
    if config.tie_word_embeddings:
        by_module["head"] = 0  # the embeddings' weights
    shown = {name: by_module[name] for name in _MODULES}
    trainable = count({n: p for n, p in parameters.items() if part_of(n) in work.learning}, module_of)
    if work.lora_rank:
        shown["adapters"] = trainable["adapters"] = work.adapters(config)

    rows = work.micro_batch * work.accumulation * work.world_size
    positions = rows * work.sequence_length
    tokens = positions * work.fill
    amounts = Amounts(
        tiles=rows * work.tiles_per_row,
        positions=tokens,
        # Documents of one row are blind to each other: each position pairs with its own alone.
        pairs=tokens * work.sequence_length * work.fill / work.samples_per_row,
        labelled=tokens * work.labelled,
    )
    flops = training_flops(config, amounts, work.learning, work.adapters(config))
    run = training_flops(config, amounts, work.learning, work.adapters(config), work.checkpointing)
    samples = rows * work.samples_per_row
    steps = None
    if work.total_samples is not None:
        steps = math.ceil(work.total_samples / samples)
    elif work.total_tokens is not None:
        steps = math.ceil(work.total_tokens / tokens)
    total = None if steps is None else steps * flops
    hours = None
    if total is not None and work.peak_flops is not None:
        hours = total / (work.mfu * work.peak_flops * work.world_size) / 3600
    return Plan(
        workload=work,
        parameters=shown,
        trainable=trainable,
        memory=memory(config, work),
        chunk=chunk_positions(config.text.vocab_size, work.device),
        rows_per_step=rows,
        positions_per_step=positions,
        tokens_per_step=tokens,
        labels_per_step=amounts.labelled,
        tiles_per_step=amounts.tiles,
        samples_per_step=samples,
        flops_per_step=flops,
        run_flops_per_step=run,
        steps=steps,
        total_flops=total,
        hours=hours,
    )


# ------------------------------------------------------------------------------------------------- memory
def memory(config: VLMConfig, work: Workload) -> dict[str, int]:
    """Bytes on each rank by what takes them, for one micro-batch; what `Plan.memory` says."""
    parameters = meta_parameters(config)
    learns = {name: p for name, p in parameters.items() if part_of(name) in work.learning}
    every = sum(p.numel() for p in parameters.values())
    adapters = work.adapters(config)
    learning = sum(p.numel() for p in learns.values()) + adapters
    shards = work.world_size if work.distribution == "fsdp" else 1

    master = 4 * (every + adapters) / shards
    gathered = gathered_parameters(parameters) if work.distribution == "fsdp" else 0
    gradients = 4 * learning / shards
    if work.precision == "float32":
        # FSDP gathers a block in float32, too, and its gradient is whole until it is scattered.
        weights, masters = master + 4 * gathered, 0.0
        gradients += 4 * gathered if learns else 0
    else:
        # Autocast keeps a bfloat16 copy of each matrix until backward is through.
        copied = gathered or cast_parameters(config, parameters, work.frozen)
        weights, masters = 2 * copied, master
        gradients += 2 * gathered if learns else 0
    muon = 0
    if work.optimizer != "adamw":
        everywhere = work.optimizer == "muon-all"
        muon = sum(p.numel() for name, p in learns.items() if is_muon_matrix(name, p, everywhere))
    result = {
        "weights": weights,
        "master weights": masters,
        "gradients": gradients,
        # Two moments of AdamW (arXiv:1711.05101), one momentum of Muon; float32.
        "optimizer state": (8 * (learning - muon) + 4 * muon) / shards,
        "weight average": 4 * learning / shards if work.average else 0,
        "activations": activation_bytes(config, work),
        "logits of a chunk": head_bytes(
            config,
            work.widths,
            work.micro_batch * work.sequence_length * work.fill * work.labelled,
            chunk_positions(config.text.vocab_size, work.device),
        ),
    }
    return {name: round(size) for name, size in result.items() if size or name in ("weights", "gradients")}


def gathered_parameters(parameters) -> int:
    """Weights that FSDP has whole at a time: the largest block, the next one coming, and what is in none."""
    blocks: dict[str, int] = {}
    for name, parameter in parameters.items():
        head, found, rest = name.partition(".layers.")
        key = f"{head}.{rest.split('.')[0]}" if found else ""
        blocks[key] = blocks.get(key, 0) + parameter.numel()
    outside = blocks.pop("", 0)
    return outside + 2 * max(blocks.values(), default=0)


def cast_parameters(config: VLMConfig, parameters, frozen: frozenset[str]) -> int:
    """Weights that autocast has in fewer bits until backward: matrices and their biases, but neither tables
    nor norms, and nothing that backward does not reach."""
    # Gradients come from behind: what is in front of all that learns is not reached.
    unreached = frozen if {"vision", "projector"} <= frozen else frozen & {"vision"}
    unreached -= {"language"}
    tables = ("norm", "embed_tokens", "position_embedding")
    cast = sum(
        p.numel()
        for name, p in parameters.items()
        if part_of(name) not in unreached and not any(table in name for table in tables)
    )
    # A tied head is multiplied with as well.
    return cast + (config.text.vocab_size * config.text.hidden_size if config.tie_word_embeddings else 0)


def activation_bytes(config: VLMConfig, work: Workload) -> float:
    """What one micro-batch keeps for backward on one rank, the head's share aside."""
    widths, learning = work.widths, work.learning
    tiles = work.micro_batch * work.tiles_per_row
    positions = work.micro_batch * work.sequence_length
    size = 0.0
    if work.device == "cpu" and work.samples_per_row > 1:  # the mask between documents, T² a row
        size += positions * work.sequence_length * widths.product
    if "vision" in learning:
        size += tiles * vision_bytes(config, widths, work.checkpointing)
    if "projector" in learning:
        size += tiles * projector_bytes(config, widths)
    # Adapters sit in the first block: gradients pass the whole decoder, whatever learns.
    return size + positions * language_bytes(
        config.text, widths, work.checkpointing, "language" in learning, work.lora_rank > 0
    )
