"""The built-in image world as something to train on: its model, its losses, its held-out images.

Two stages. First the vision tower alone learns from dense targets (what each patch shows); then the whole
model learns to answer, several questions packed behind each image.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data.loader import outliving_signals
from data.packing import Batch, dense_mask
from data.processor import Processor, make_processor
from data.tokenizer import build_tokenizer
from models.checkpoints.hub import snapshot
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from shapes import ask, sample_questions, sample_scene
from shapes.dense import DenseHead, dense_counts, dense_loss
from shapes.grounding import FactHead
from shapes.stream import ChatPieces, ShapesStream, ShapesStreamConfig
from training.config import TrainConfig, flag
from training.costs import Amounts
from training.distributed import Ranks
from training.samples import Question, questions_of_shapes
from training.throughput import amounts_of

HELDOUT_SEED = 1_000_003  # in-run evaluation images: held-out digits, seeds that training never uses


def build_processor(config: TrainConfig) -> Processor:
    """The tokenizer, trained on the image world's own sentences, and the processor around it."""
    rng = random.Random("tokenizer:0")  # the same vocabulary whatever the seed of the run
    texts = []
    for _ in range(3000):
        scene = sample_scene(rng)
        for qa in sample_questions(scene, rng, 6):
            texts += [qa.question, " " + qa.answer]
        texts += [" " + ask(scene, rng, "describe").answer, "User:", "System:", "\nAssistant:"]
    tokenizer = build_tokenizer(texts, config.vocab_size)
    tokens = (config.image_size // config.patch_size // config.scale_factor) ** 2
    return make_processor(tokenizer, image_size=config.image_size, image_seq_len=tokens)


def model_config(config: TrainConfig, tokenizer) -> VLMConfig:
    """The shape of a model of the config's sizes."""
    vision = VisionConfig(
        hidden_size=config.vision_width,
        intermediate_size=4 * config.vision_width,
        num_hidden_layers=config.vision_layers,
        num_attention_heads=config.vision_heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
    )
    text = TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.text_width,
        intermediate_size=config.text_inner,
        num_hidden_layers=config.text_layers,
        num_attention_heads=config.text_heads,
        num_key_value_heads=config.text_kv_heads,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    )
    return VLMConfig(
        vision=vision,
        text=text,
        scale_factor=config.scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


def build_model(config: TrainConfig, tokenizer) -> VisionLanguageModel:
    """A model of the config's sizes, at random weights that its seed decides."""
    model = VisionLanguageModel(model_config(config, tokenizer))
    model.init_weights(torch.Generator().manual_seed(config.seed))
    model.generation_config = {"needs_image": True, "single_turn": True}  # as are all its questions
    return model


def stream_config(config: TrainConfig) -> ShapesStreamConfig:
    """What the run draws."""
    return ShapesStreamConfig(
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        image_size=config.image_size,
        patch_size=config.patch_size,
        seed=config.seed,
        curriculum_pictures=config.curriculum_pictures,
        vision_steps=config.vision_steps,
        vision_batch_size=config.vision_batch_size,
    )


def chat_pieces(tokenizer, tokens_per_tile: int) -> ChatPieces:
    """The chat template around one image, its question and its answer, as ids."""
    image = (
        "<fake_token_around_image><global-img>" + "<image>" * tokens_per_tile + "<fake_token_around_image>"
    )
    return ChatPieces(
        prefix=tuple(tokenizer.encode("<|im_start|>User:" + image, add_special_tokens=False)),
        middle=tuple(tokenizer.encode("\nAssistant:", add_special_tokens=False)),
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
    )


class ShapesWorldLoss(nn.Module):
    """(loss to minimise, what to log) of a batch; the image is encoded once for all of them. The heads
    exist in training only.

    Each part is a sum divided by its entry of `counts` (see `loss_counts`): with the mean of all ranks'
    counts there, the mean of the ranks' losses is the loss of all their images as one batch.
    """

    leaves_parameters_out = True  # the first stage has no language model

    def __init__(self, model: VisionLanguageModel, config: TrainConfig):
        super().__init__()
        self.model, width = model, model.config.text.hidden_size
        self.head = DenseHead(model.config.vision.hidden_size)
        self.nouns, self.pairs = FactHead(width, depth=0.5), FactHead(width, depth=0.75)
        self.nouns.watch(model.language_model)
        self.pairs.watch(model.language_model)
        self.dense_weight, self.fact_weight = config.dense_weight, config.fact_weight

    def forward(
        self, batch: dict[str, Tensor], vision_only: bool, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        patches = self.model.vision_model(batch["pixel_values"])  # (B, P, D_v)
        dense, seen = dense_loss(self.head(patches), batch["dense"], counts[:4])
        logged = {"dense_loss": dense.detach(), **seen}
        if vision_only:
            return dense, logged
        hidden = answer_states(self.model, patches, batch)
        total, _ = self.model.summed_loss(hidden, batch["labels"])
        answer = total / counts[4].clamp(min=1).float()
        nouns = self.nouns.loss(batch["nouns"], counts[5])
        pairs = self.pairs.loss(batch["pairs"], counts[6])
        logged |= {"loss": answer.detach(), "noun_loss": nouns.detach(), "pair_loss": pairs.detach()}
        return answer + self.dense_weight * dense + self.fact_weight * (nouns + pairs), logged


def loss_counts(batch: dict[str, Tensor]) -> Tensor:
    """What the parts of a batch's loss are divided by: `dense_counts`, labelled tokens, known facts of nouns
    and of pairs, (7,)."""
    told = torch.stack(
        [
            (batch["labels"][:, 1:] != IGNORE_INDEX).sum(),
            (~batch["nouns"].isnan()).sum(),
            (~batch["pairs"].isnan()).sum(),
        ]
    )
    return torch.cat([dense_counts(batch["dense"]), told.double()])


def answer_states(model: VisionLanguageModel, patches: Tensor, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    x = model.place_features(ids, model.language_model.embed_tokens(ids), model.projector(patches))
    mask = dense_mask(batch["segment_ids"])
    hidden, _ = model.language_model(x, attention_mask=mask, position_ids=batch["position_ids"])
    return hidden


class ShapesWorldTask:
    """See `training.tasks.Task`. A step is one batch, drawn from its number alone: that is all its state."""

    def __init__(self, config: TrainConfig, ranks: Ranks):
        for name in ("batch_size", "vision_batch_size"):
            if getattr(config, name) % ranks.world_size:
                raise ValueError(f"{flag(name)}: expected a multiple of {ranks.world_size} ranks")
        self.config, self.ranks, self.steps = config, ranks, config.shape_steps
        device = ranks.device
        if config.init_from:
            self.model = VisionLanguageModel.from_pretrained(
                config.init_from, dtype=torch.float32, device=device
            )
            self.model.train()
            self.processor = Processor.from_pretrained(snapshot(config.init_from), config=self.model.config)
        else:
            self.processor = build_processor(config)
            self.model = build_model(config, self.processor.tokenizer)
        self._check_fit()
        self.module = ShapesWorldLoss(self.model, config).to(device)
        self.second_stage = config.vision_steps
        stream = stream_config(config)
        heldout = replace(
            stream,
            seed=HELDOUT_SEED,
            split="heldout",
            curriculum_pictures=0,
            vision_steps=0,
        )
        pieces = chat_pieces(self.processor.tokenizer, self.model.config.tokens_per_tile)
        if config.sequence_length <= len(pieces.prefix):
            raise ValueError(
                f"--sequence-length: expected more than the {len(pieces.prefix)} positions of an image, "
                f"got {config.sequence_length}"
            )
        self.stream = ShapesStream(
            stream, self.processor.tokenizer, pieces, rank=ranks.rank, world_size=ranks.world_size
        )
        self.heldout = ShapesStream(replace(heldout, list_probability=0.0), self.processor.tokenizer, pieces)

    def _check_fit(self) -> None:
        """Whether what is drawn is what the model takes, which may be one that was trained before."""
        vision, context = self.model.config.vision, self.model.config.text.max_position_embeddings
        for name, taken in (("image_size", vision.image_size), ("patch_size", vision.patch_size)):
            if (drawn := getattr(self.config, name)) != taken:
                raise ValueError(f"{flag(name)}: expected {taken}, as the model has it, got {drawn}")
        if self.config.sequence_length > context:
            raise ValueError(
                f"--sequence-length: expected at most {context}, the model's context, "
                f"got {self.config.sequence_length}"
            )

    # ------------------------------------------------------------------------------------------- a step
    def batches(self) -> Iterator[list[Batch]]:
        workers = self.config.workers
        loader = DataLoader(
            self.stream,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=outliving_signals(),
        )
        for number, drawn in enumerate(loader, self.stream.start_batch):
            batch = Batch(drawn)
            batch.sample_ids = [(("shapes", index),) for index in self.stream.numbers(number)]
            batch.images = len(batch.sample_ids)
            yield [batch]

    def padding(self) -> list[Batch]:
        raise AssertionError("drawn images never end")

    def step_back(self) -> None:
        raise AssertionError("nothing keeps images from being drawn")

    def count(self, batches: list[Batch]) -> float:
        return float(len(batches))

    def inputs(self, batch: Batch, step: int) -> dict:
        counts = loss_counts(batch)
        if self.ranks.world_size > 1:
            shared = [count / self.ranks.world_size for count in self.ranks.sum(*counts.tolist())]
            counts = torch.tensor(shared, dtype=counts.dtype, device=counts.device)
        return {"batch": batch, "vision_only": step < self.config.vision_steps, "counts": counts}

    def amounts(self, batch: Batch, step: int) -> Amounts:
        if step < self.config.vision_steps:
            return Amounts(tiles=len(batch["pixel_values"]), positions=0, pairs=0, labelled=0)
        return amounts_of(batch)

    def matrix_peak(self, step: int) -> float | None:
        return self.config.vision_matrix_lr if step < self.config.vision_steps else None

    # ------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, states: list[dict], step: int) -> None:
        self.stream.start_batch = step

    def check_rows(self) -> None:
        """They are all good."""

    # --------------------------------------------------------------------------------------- to look at
    def seen(self, step: int) -> dict[str, int]:
        return {"pictures": self.config.pictures_after(step)}

    def training_data(self, step: int) -> str:
        return (
            f"{self.config.pictures_after(step):,} images of shapes, drawn on the fly (seed "
            f"{self.config.seed}), each with several questions; digits from the UCI set that scikit-learn "
            "carries."
        )

    summary = (
        "Answers questions about the built-in image world of Ocelli: drawn shapes, printed words, "
        "handwritten digits. It knows nothing else."
    )

    best_by = ("eval_accuracy", True)

    def questions(self, count: int) -> list[Question]:
        return questions_of_shapes(self.processor, count)

    @torch.no_grad()
    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, float]:
        """What the vision tower makes out in held-out images; the first rank looks alone."""
        if not self.ranks.is_first or not self.config.eval_pictures:
            return {}
        model, seen = self.model, []
        model.eval()
        for index in range(math.ceil(self.config.eval_pictures / self.config.batch_size)):
            batch = {name: value.to(model.device) for name, value in self.heldout.batch(index).items()}
            patches = model.vision_model(batch["pixel_values"])
            seen.append(dense_loss(self.module.head(patches), batch["dense"])[1])
        model.train()
        return {f"eval_{name}": sum(row[name].item() for row in seen) / len(seen) for name in seen[0]}
