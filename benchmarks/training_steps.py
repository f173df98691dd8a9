"""Documents to train on, and the systems that take a training step on them: for benchmarks/training.py."""

from __future__ import annotations

import io
import random
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.common import now
from benchmarks.shapes import SHAPES, build_ours, build_transformers, fill, words
from data.loader import Loader, LoaderConfig
from data.packing import PADDING, Batch, collate, pack, pack_indices, segment_mask
from data.processor import make_processor
from data.samples import IGNORE_INDEX, Sample
from data.sources import DatasetConfig, Mixture, open_source
from data.tokenizer import build_tokenizer
from training.flops import Amounts, training_flops

PAD = 0
MEDIAN_WORDS, SPREAD = (
    150,
    0.9,
)  # of a document's text: log-normal, with a long tail, as instruction data have
FEWEST, MOST = 12, 1500
ANSWER = (0.2, 0.9)  # share of the text that answers
WARM_UP = {"cpu": 1, "cuda": 4}  # steps before the timed ones; there, some compile
SHARDS = 4  # of the loader: each is warm once it has made a row


# ---------------------------------------------------------------------------------------------- documents
def documents(shape: str, count: int, tiles: list[int], longest: int, seed: int) -> list[Sample]:
    """Documents of uneven length: an image of so many tiles (they take turns), a question, an answer.

    Args:
        longest: positions that none exceeds.
    """
    config, generator, made = SHAPES[shape], random.Random(seed), []
    for number in range(count):
        shown = tiles[number % len(tiles)]
        image = [config.image_token_id] * (shown * config.tokens_per_tile)
        room = min(MOST, longest - len(image))
        length = min(room, max(FEWEST, round(generator.lognormvariate(np.log(MEDIAN_WORDS), SPREAD))))
        text = words(shape, 10_000 * seed + number, length).tolist()
        answer = max(1, round(length * generator.uniform(*ANSWER)))
        ids = image + text
        labels = [IGNORE_INDEX] * (len(ids) - answer) + text[-answer:]
        images, counts = ((None,), (shown,)) if shown else ((), ())
        made.append(Sample(("made", number), ids, labels, images, counts))
    return made


def tiles_of(shape: str, sample: Sample) -> Tensor | None:
    vision = SHAPES[shape].vision
    if not sample.tiles:
        return None
    pixels = torch.empty(sample.tiles, vision.num_channels, vision.image_size, vision.image_size)
    return fill(pixels, 1.0, start=104_729 * sample.sample_id[1])


def padded_batches(shape: str, samples: list[Sample], rows: int, length: int | None) -> list[Batch]:
    """One document a row, `rows` of them in a batch, in the order they come; `length` as in `collate`."""
    made = [pack([sample], [tiles_of(shape, sample)]) for sample in samples]
    return [collate(made[i : i + rows], PAD, length) for i in range(0, len(made), rows)]


def packed_batches(
    shape: str, samples: list[Sample], rows: int, longest: int, length: int | None
) -> list[Batch]:
    """The same documents in as few rows of `longest` positions as the packer's choice makes."""
    waiting, made = list(samples), []
    while waiting:
        chosen = pack_indices([s.tokens for s in waiting], [s.tiles for s in waiting], longest, None)
        row = [waiting[i] for i in chosen]
        made.append(pack(row, [tiles_of(shape, sample) for sample in row]))
        waiting = [sample for i, sample in enumerate(waiting) if i not in set(chosen)]
    return [collate(made[i : i + rows], PAD, length) for i in range(0, len(made), rows)]


def amounts_of(samples: list[Sample]) -> Amounts:
    """What the documents are, however they are laid out: nothing counts for padding."""
    return Amounts(
        tiles=sum(sample.tiles for sample in samples),
        positions=sum(sample.tokens for sample in samples),
        pairs=sum(sample.tokens**2 for sample in samples),
        labelled=sum(label != IGNORE_INDEX for sample in samples for label in sample.labels[1:]),
    )


# ------------------------------------------------------------------------------------------------ systems
class Trainer:
    """AdamW over float32 weights, by autocast in bfloat16, gradients clipped: one step for each list of
    batches that `batches` makes of documents."""

    def __init__(self, setup: dict):
        self.setup, self.device, self.shape = setup, setup["device"], setup["shape"]
        self.autocast = setup["precision"] == "bfloat16"
        self.model = self.build().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def build(self) -> nn.Module:
        model = build_ours(self.shape, torch.float32, self.device)
        if self.setup["compile"]:
            for layer in (*model.vision_model.layers, *model.language_model.layers):
                layer.compile()
        return model

    def batches(self, samples: list[Sample]) -> list[Batch]:
        row, packed = self.setup["row"], self.setup["packed_micro_batch"]
        if self.setup["system"] == "ours-padded":
            return padded_batches(self.shape, samples, self.setup["micro_batch"], None)
        length = row if self.setup["compile"] else None  # packed rows are compiled for one length
        return packed_batches(self.shape, samples, packed, row, length)

    def learn(self, batches: list[Batch]) -> float:
        """Forward and backward of a step's batches; the mean loss of their labelled tokens."""
        count, losses = sum(batch.num_labels for batch in batches), []
        for batch in batches:
            batch = batch.to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
                total, _ = self.model.loss(
                    batch["input_ids"],
                    batch["labels"],
                    batch.get("pixel_values"),
                    attention_mask=segment_mask(batch["segment_ids"]),
                    position_ids=batch["position_ids"],
                )
            (total / count).backward()
            losses.append(total.detach() / count)
        return torch.stack(losses).sum().item()

    def step(self, batches: list[Batch]) -> float:
        loss = self.learn(batches)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def run(self, job: dict) -> dict:
        """`job["steps"]` timed steps on documents that the round decides, after some that are not timed."""
        warm_up = WARM_UP[self.device]
        groups = [
            documents(
                self.shape,
                job["documents"],
                job["tiles"],
                self.setup["row"],
                seed=1 + job["round"] * 100 + step,
            )
            for step in range(warm_up + job["steps"])
        ]
        seconds, loss, positions = 0.0, 0.0, 0
        for number, samples in enumerate(groups):
            batches = self.batches(samples)  # data are no part of what is timed
            start = now(self.device)
            loss = self.step(batches)
            if number >= warm_up:
                seconds += now(self.device) - start
                positions += sum(batch["input_ids"].numel() for batch in batches)
        timed = [amounts_of(samples) for samples in groups[warm_up:]]
        return {
            "seconds": seconds,
            "loss": loss,
            "positions": positions,
            "tokens": sum(one.positions for one in timed),
            "labelled": sum(one.labelled for one in timed),
            "tiles": sum(one.tiles for one in timed),
            "flops": sum(training_flops(SHAPES[self.shape], one) for one in timed),
        }


class TransformersTrainer(Trainer):
    """transformers' model of the same shape as its users train it: padded batches, its own loss on logits of
    all positions, no cache; the optimizer and clipping are the same."""

    def build(self) -> nn.Module:
        return build_transformers(self.shape, torch.float32, self.device)

    def batches(self, samples: list[Sample]) -> list[Batch]:
        return padded_batches(self.shape, samples, self.setup["micro_batch"], None)

    def learn(self, batches: list[Batch]) -> float:
        losses = []
        for batch in batches:
            batch = batch.to(self.device)
            inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"], "use_cache": False}
            inputs["attention_mask"] = (batch["segment_ids"] != PADDING).long()
            if "pixel_values" in batch:
                inputs["pixel_values"] = batch["pixel_values"][
                    None
                ]  # tiles one after another: none is padding
            with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
                loss = self.model(**inputs).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum().item()


class PlainProducts:
    """The most FLOP/s that a product of large matrices reaches here, in the precision of the run."""

    def __init__(self, setup: dict):
        self.device = setup["device"]
        self.dtype = torch.bfloat16 if setup["precision"] == "bfloat16" else torch.float32

    def run(self, job: dict) -> dict:
        side, seconds = job["side"], []
        a, b = (torch.randn(side, side, device=self.device, dtype=self.dtype) for _ in range(2))
        for _ in range(6):
            start = now(self.device)
            a @ b
            seconds.append(now(self.device) - start)
        return {"flops_per_second": 2 * side**3 / min(seconds)}


class LoaderAlone:
    """Rows with encoded images through `data/loader.py`, as training has them, and nothing after it."""

    def __init__(self, setup: dict):
        self.setup = setup
        config = SHAPES[setup["shape"]]
        generator = random.Random(0)
        sentences = [
            "how many red circles are there in the image",
            "there are three of them and two squares",
        ]
        tokenizer = build_tokenizer(sentences, 400)
        self.processor = make_processor(
            tokenizer, image_size=config.vision.image_size, image_seq_len=config.tokens_per_tile
        )
        vocabulary = " ".join(sentences).split()
        self.rows = []
        for number in range(64):
            count = round(generator.lognormvariate(np.log(MEDIAN_WORDS / 2), SPREAD))
            text = generator.choices(vocabulary, k=min(300, max(4, count)))
            half = len(text) // 2
            shown = setup["tiles"][number % len(setup["tiles"])] > 0
            self.rows.append(
                {
                    "question": " ".join(text[:half]),
                    "answer": " ".join(text[half:]),
                    "image": photo(number, setup["photo"]) if shown else None,
                }
            )

    def run(self, job: dict) -> dict:
        settings = LoaderConfig(
            batch_size=SHARDS,
            shards=SHARDS,
            sequence_length=max(2048, self.setup["row"]),
            workers=job["workers"],
            seed=job["round"],
        )
        mixture = Mixture([open_source(self.rows, DatasetConfig("made"))])
        batches = iter(Loader(mixture, self.processor, settings))
        for _ in range(2 * SHARDS):  # workers have started, and all shards have samples to choose from
            next(batches)
        start = now("cpu")
        made = list(islice(batches, job["batches"]))
        seconds = now("cpu") - start
        return {
            "seconds": seconds,
            "samples": sum(len(row) for batch in made for row in batch.sample_ids),
            "tokens": sum(int((batch["segment_ids"] != PADDING).sum()) for batch in made),
            "tiles": sum(len(batch["pixel_values"]) for batch in made if "pixel_values" in batch),
            "fill": sum(batch.packing_efficiency for batch in made) / len(made),
        }


def photo(seed: int, width: int) -> bytes:
    """A JPEG of `width` x 3/4 `width`, smooth with some noise, about as large as a photograph's."""
    noise = np.random.default_rng(seed)
    small = Image.fromarray(noise.integers(0, 255, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((width, width * 3 // 4), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = (smooth + noise.integers(-8, 8, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


SYSTEMS = {
    "ours-packed": Trainer,
    "ours-padded": Trainer,
    "transformers": TransformersTrainer,
    "loader": LoaderAlone,
    "peak": PlainProducts,
}
