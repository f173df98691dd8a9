"""Training steps: ours packed and padded, and transformers padded with its own loss.

    python -m benchmarks.training                                  # SmolVLM-256M's shape on this CPU, float32
    python -m benchmarks.training --precision bfloat16 --documents 8
    python -m benchmarks.training --device cuda --documents 128 --peak-flops 989e12
    python -m benchmarks.training --quick --shape tiny

All systems learn from the same documents, of uneven length, with an image in every second one, and with the
same optimizer, precision and clipping; only what answers is supervised. Tokens a second count documents,
never padding: supervised ones, and all. MFU is the FLOPs that the documents need (`training/flops.py`: no
padding, each document by itself) a second, over --peak-flops, what this GPU is known for or what a product of
large matrices reaches here. Peak memory is the whole process's on a CPU.
"""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import (
    DTYPES,
    PRECISION,
    SHAPES,
    Command,
    Handler,
    build_ours,
    compare,
    execute,
    fill,
    finish,
    integers,
    median,
    memory_peak,
    names,
    now,
    option,
    reset_peak,
    shared_setup,
    take_turns,
    tile_positions,
    tile_shape,
    words,
)
from benchmarks.peers import build_transformers
from data.packing import IGNORE_INDEX, PADDING, Batch, Sample, collate, pack, pack_indices
from data.tiles import Parts
from inference.flags import positive
from models.checkpoints.load import meta_init
from models.vision_language_model import VisionLanguageModel
from training.flops import Amounts, amounts_of, costs, peak_flops, training_flops
from training.rows import RowsLoss

TRAINERS = ("ours-packed", "ours-padded", "transformers")
DEFAULTS = {
    "cpu": {"documents": 6, "row": 2048, "micro_batch": 6, "packed_micro_batch": 1, "steps": 2}
    | {"precision": "float32", "compile": False},
    "cuda": {"documents": 128, "row": 4096, "micro_batch": 16, "packed_micro_batch": 4, "steps": 10}
    | {"precision": "bfloat16", "compile": True},
}
COLUMNS = """system precision supervised_tokens_per_second:,.1f tokens_per_second:,.1f fill:.0%
    seconds_per_step:.2f mfu:.1% peak_mebibytes:,.0f over_transformers:.2f memory_over_transformers:.2f"""
MEDIAN_WORDS, SPREAD = 150, 0.9  # of a document's text: log-normal, long-tailed as instruction data are
FEWEST, MOST = 12, 1500
ANSWER = (0.2, 0.9)  # share of the text that answers
WARM_UP = {"cpu": 1, "cuda": 4}  # steps before the timed ones; on CUDA, some compile


def check(settings: argparse.Namespace) -> None:
    for name, value in DEFAULTS[settings.device].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    config = SHAPES[settings.shape]
    settings.row = min(settings.row, config.text.max_position_embeddings)
    if settings.quick:
        settings.rounds, settings.steps, settings.documents = 1, 1, min(settings.documents, 4)
    if max(settings.tiles) * tile_positions(config) + 16 > settings.row:
        raise ValueError(f"--tiles: {max(settings.tiles)} do not fit a row of {settings.row} positions")


# ------------------------------------------------------------------------------------------- documents
def documents(shape: str, count: int, tiles: list[int], longest: int, seed: int) -> list[Sample]:
    """Documents of uneven length, of at most `longest` positions; the numbers of tiles take turns."""
    config, generator, samples = SHAPES[shape], random.Random(seed), []
    for number in range(count):
        shown = tiles[number % len(tiles)]
        image = [config.image_token_id] * (shown * tile_positions(config))
        room = min(MOST, longest - len(image))
        length = min(room, max(FEWEST, round(generator.lognormvariate(np.log(MEDIAN_WORDS), SPREAD))))
        text = words(shape, 10_000 * seed + number, length).tolist()
        answer = max(1, round(length * generator.uniform(*ANSWER)))
        ids = image + text
        labels = [IGNORE_INDEX] * (len(ids) - answer) + text[-answer:]
        shapes = ((shown, *tile_shape(config)),) * bool(shown)
        samples.append(Sample(("made", number), ids, labels, (None,) * len(shapes), shapes))
    return samples


def batches(
    shape: str, samples: list[Sample], rows: int, packed: int | None, length: int | None = None
) -> list[Batch]:
    """Batches of `rows` rows: one document in each, or as many as the packer puts into `packed` positions."""
    config, waiting, packed_rows = SHAPES[shape], list(samples), []
    while waiting:
        chosen = [0]
        if packed is not None:
            chosen = pack_indices([s.tokens for s in waiting], [s.tiles for s in waiting], packed, None)
        row, tiles = [waiting[i] for i in chosen], []
        for sample in row:
            size = (sample.tiles, *tile_shape(config))
            pixels = fill(torch.empty(size), 1.0, start=104_729 * sample.sample_id[1])
            tiles.append(Parts.of(pixels) if sample.tiles else None)
        packed_rows.append(pack(row, tiles))
        waiting = [sample for i, sample in enumerate(waiting) if i not in set(chosen)]
    starts = range(0, len(packed_rows), rows)
    return [collate(packed_rows[i : i + rows], 0, length, config.image_token_id) for i in starts]


# --------------------------------------------------------------------------------------------- systems
class Trainer:
    """AdamW over float32 weights, with autocast in bfloat16, gradients clipped."""

    def __init__(self, setup: dict):
        self.setup, self.device, self.shape = setup, setup["device"], setup["shape"]
        self.autocast = setup["precision"] == "bfloat16"
        self.packed = setup["system"] == "ours-packed"
        build = build_transformers if setup["system"] == "transformers" else build_ours
        self.model = build(self.shape, torch.float32, self.device).train()
        if setup["system"] != "transformers":
            if setup["compile"]:
                for layer in (*self.model.vision_model.layers, *self.model.language_model.layers):
                    layer.compile()
            self.module = RowsLoss(self.model, blank=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def loss(self, batch: Batch, labelled: int, count: int) -> Tensor:
        """A batch's part of a step's mean loss."""
        if self.setup["system"] != "transformers":
            return self.module(**batch)[0] / labelled
        # As its users train it: its own loss on logits of all positions, no cache.
        inputs = {key: batch[key] for key in ("input_ids", "labels")}
        inputs["attention_mask"] = (batch["segment_ids"] != PADDING).long()
        if "pixel_values" in batch:
            inputs["pixel_values"] = batch["pixel_values"][None]  # tiles one after another: none is padding
        return self.model(**inputs, use_cache=False).loss / count

    def step(self, step_batches: list[Batch]) -> float:
        losses, labelled = [], sum(batch.num_labels for batch in step_batches)
        for batch in step_batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
                loss = self.loss(batch.to(self.device), labelled, len(step_batches))
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().item()

    def run(self, job: dict) -> dict:
        """`job["steps"]` timed steps on documents that the round decides, after some that are not timed."""
        setup, first = self.setup, 1 + job["round"] * 100
        warm_up, count = WARM_UP[self.device], job["documents"]
        groups = [
            documents(self.shape, count, setup["tiles"], setup["row"], seed=first + step)
            for step in range(warm_up + job["steps"])
        ]
        seconds, loss, positions = 0.0, 0.0, 0
        timed: list[Amounts] = []
        for number, samples in enumerate(groups):
            if self.packed:  # packed rows are compiled for one length
                length = setup["row"] if setup["compile"] else None
                batch_list = batches(self.shape, samples, setup["packed_micro_batch"], setup["row"], length)
            else:
                batch_list = batches(self.shape, samples, setup["micro_batch"], None)
            start = now(self.device)
            loss = self.step(batch_list)
            if number >= warm_up:
                seconds += now(self.device) - start
                positions += sum(batch["input_ids"].numel() for batch in batch_list)
                timed += (amounts_of(batch, SHAPES[self.shape].vision) for batch in batch_list)
        with meta_init():
            each = costs(VisionLanguageModel(SHAPES[self.shape]))
        return {
            "seconds": seconds,
            "loss": loss,
            "positions": positions,
            "tokens": sum(one.positions for one in timed),
            "labelled": sum(one.labelled for one in timed),
            "tiles": sum(one.tiles for one in timed),
            "flops": sum(training_flops(each, one) for one in timed),
        }


def handler(setup: dict) -> Handler:
    """The child's side: answers jobs with one system, and with the memory that they took."""
    torch.set_num_threads(setup["threads"])
    device = setup["device"]
    if setup["system"] == "peak":
        known = peak_flops(torch.device(device), DTYPES[setup["precision"]])
        return lambda job: dict(zip(("flops", "how"), known))
    trainer = Trainer(setup)

    def handle(job: dict) -> dict:
        reset_peak(device)
        return trainer.run(job) | {"peak_bytes": memory_peak(device)}

    return handle


def run(settings: argparse.Namespace, folder: str) -> None:
    shared = shared_setup(
        settings, "precision", "row", "micro_batch", "packed_micro_batch", "compile", "tiles"
    )
    systems = ["peak", *settings.systems] if settings.peak_flops is None else settings.systems
    setups = [{"system": system, **shared} for system in systems]
    job = {key: getattr(settings, key) for key in ("documents", "steps")}
    # One model in memory at a time: training takes four times its weights, and activations.
    measured, failed = take_turns(
        handler, setups, lambda setup: [job], settings.rounds, False, [f"peak {settings.precision}"]
    )
    by_system = {setup["system"]: replies for setup, _, replies in measured}
    (known, *_) = by_system.pop("peak", [{}])
    peak, how = settings.peak_flops or known["flops"], known.get("how", "given")
    rows = [make_row(settings, system, replies, peak) for system, replies in by_system.items()]
    compare(rows, "tokens_per_second", (), ["transformers"])
    compare(rows, "peak_mebibytes", (), ["transformers"], "memory_")
    print(f"{settings.shape} on {settings.device}: a peak of {peak / 1e12:.3g} TFLOP/s ({how})")
    finish("training", settings, COLUMNS, rows, peak_flops=peak, peak_is=how, left_out=failed)


def make_row(settings: argparse.Namespace, system: str, replies: list[dict], peak: float) -> dict:
    """One line: medians over the rounds."""
    rate = {
        name: median(reply[name] / reply["seconds"] for reply in replies)
        for name in ("labelled", "tokens", "flops")
    }
    memory = min(reply["peak_bytes"] for reply in replies)  # later rounds hold what the allocator keeps
    return {
        "system": system,
        **{key: getattr(settings, key) for key in ("precision", "device", "shape", "steps", "documents")},
        "labelled_tokens": [reply["labelled"] for reply in replies],
        **{key: [reply[key] for reply in replies] for key in ("tokens", "tiles", "loss")},
        "supervised_tokens_per_second": rate["labelled"],
        "tokens_per_second": rate["tokens"],
        "fill": median(reply["tokens"] / reply["positions"] for reply in replies),
        "seconds_per_step": median(reply["seconds"] for reply in replies) / settings.steps,
        "seconds_of_rounds": [reply["seconds"] for reply in replies],
        "flops_per_second": rate["flops"],
        "mfu": rate["flops"] / peak,
        "peak_mebibytes": memory / 2**20,
    }


COMMANDS = {"": Command(run, check, {
    "--precision": PRECISION | {"choices": tuple(DTYPES), "default": None, "help": "default: of the device"},
    "--systems": option(names(*TRAINERS), TRAINERS, "which", "all"),
    "--documents": option(positive, None, "documents of a step", "6; 128 on CUDA"),
    "--tiles": option(integers, [1, 0], "tiles of their images", "1,0"),
    "--row": option(positive, None, "positions of a packed row", "2048; 4096 on CUDA"),
    "--micro-batch": option(positive, None, "padded rows of a batch", "6; 16 on CUDA"),
    "--packed-micro-batch": option(positive, None, "packed rows of one", "1; 4 on CUDA"),
    "--steps": option(positive, None, "timed steps of a round", "2; 10 on CUDA"),
    "--peak-flops": option(float, None, "FLOP/s of the device", "those of a matrix product"),
    "--compile": {"action": argparse.BooleanOptionalAction, "help": "compile our blocks (default: on CUDA)"},
})}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    return execute(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
