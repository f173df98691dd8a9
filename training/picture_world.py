"""The built-in picture world as something to train on: its model, its losses, its held-out pictures.

Two stages. First the vision tower alone learns from dense targets (what each patch shows); then the whole
model learns to answer, several questions packed behind each picture.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data.document_masks import dense_mask
from data.packing import Batch
from data.processor import Processor, make_processor
from data.shapes import FAMILIES, ask, sample_questions, sample_scene
from data.shapes_stream import ChatPieces, ShapesStream, ShapesStreamConfig
from data.tokenizer import build_tokenizer
from models.checkpoints.locate import snapshot
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from training.config import TrainConfig
from training.dense import DenseHead, dense_counts, dense_loss
from training.distributed import Ranks
from training.grounding import FactHead

HELDOUT_SEED = 1_000_003  # in-run evaluation pictures: held-out digits, seeds that training never uses


def build_processor(config: TrainConfig) -> Processor:
    """The tokenizer, trained on the picture world's own sentences, and the processor around it."""
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


def build_model(config: TrainConfig, tokenizer) -> VisionLanguageModel:
    """A model of the config's sizes, at random weights that its seed decides."""
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
    model = VisionLanguageModel(
        VLMConfig(
            vision=vision,
            text=text,
            scale_factor=config.scale_factor,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.init_weights(torch.Generator().manual_seed(config.seed))
    return model


def chat_pieces(tokenizer, tokens_per_tile: int) -> ChatPieces:
    """The chat template around one picture, its question and its answer, as ids."""
    picture = (
        "<fake_token_around_image><global-img>" + "<image>" * tokens_per_tile + "<fake_token_around_image>"
    )
    return ChatPieces(
        prefix=tuple(tokenizer.encode("<|im_start|>User:" + picture, add_special_tokens=False)),
        middle=tuple(tokenizer.encode("\nAssistant:", add_special_tokens=False)),
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
    )


class PictureWorldLoss(nn.Module):
    """(loss to minimise, what to log) of a batch; the picture is encoded once for all of them. The heads
    exist in training only.

    Each part is a sum divided by its entry of `counts` (see `loss_counts`): with the mean of all ranks'
    counts there, the mean of the ranks' losses is the loss of all their pictures as one batch.
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
    mask = dense_mask(batch["documents"])
    hidden, _ = model.language_model(x, attention_mask=mask, position_ids=batch["position_ids"])
    return hidden


class PictureWorldTask:
    """See `training.tasks.Task`. A step is one batch, drawn from its number alone: that is all its state."""

    def __init__(self, config: TrainConfig, ranks: Ranks):
        for name in ("batch_size", "vision_batch_size"):
            if getattr(config, name) % ranks.world_size:
                raise ValueError(f"{name}: expected a multiple of {ranks.world_size} ranks")
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
        self.module = PictureWorldLoss(self.model, config).to(device)
        self.second_stage = config.vision_steps
        stream = ShapesStreamConfig(
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            image_size=config.image_size,
            patch_size=config.patch_size,
            seed=config.seed,
            curriculum_pictures=config.curriculum_pictures,
            vision_steps=config.vision_steps,
            vision_batch_size=config.vision_batch_size,
        )
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
                f"--sequence-length: expected more than the {len(pieces.prefix)} positions of a picture, "
                f"got {config.sequence_length}"
            )
        self.stream = ShapesStream(
            stream, self.processor.tokenizer, pieces, rank=ranks.rank, world_size=ranks.world_size
        )
        self.heldout = ShapesStream(replace(heldout, list_probability=0.0), self.processor.tokenizer, pieces)

    # ------------------------------------------------------------------------------------------- a step
    def batches(self) -> Iterator[list[Batch]]:
        workers = self.config.workers
        loader = DataLoader(
            self.stream, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None
        )
        for number, drawn in enumerate(loader, self.stream.start_batch):
            batch = Batch(drawn)
            batch.sample_ids = [(("shapes", index),) for index in self.stream.numbers(number)]
            yield [batch]

    def padding(self) -> list[Batch]:
        raise AssertionError("drawn pictures never end")

    def count(self, batches: list[Batch]) -> float:
        return float(len(batches))

    def inputs(self, batch: Batch, step: int) -> dict:
        counts = loss_counts(batch)
        if self.ranks.world_size > 1:
            shared = [count / self.ranks.world_size for count in self.ranks.sum(*counts.tolist())]
            counts = torch.tensor(shared, dtype=counts.dtype, device=counts.device)
        return {"batch": batch, "vision_only": step < self.config.vision_steps, "counts": counts}

    def matrix_peak(self, step: int) -> float | None:
        return self.config.vision_matrix_lr if step < self.config.vision_steps else None

    # ------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, states: list[dict], step: int) -> None:
        self.stream.start_batch = step

    # --------------------------------------------------------------------------------------- to look at
    def seen(self, step: int) -> dict[str, int]:
        return {"pictures": self.config.pictures_after(step)}

    def training_data(self, step: int) -> str:
        return (
            f"{self.config.pictures_after(step):,} pictures of data/shapes, drawn on the fly (seed "
            f"{self.config.seed}), each with several questions; digits from the UCI set that scikit-learn "
            "carries."
        )

    summary = (
        "Answers questions about the built-in picture world of Ocelli: drawn shapes, printed words, "
        "handwritten digits. It knows nothing else."
    )

    @torch.no_grad()
    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, float]:
        """Held-out pictures: share of answers right to the last token under greedy decoding, by family.

        The logits are teacher-forced: an answer is greedily reproduced exactly when each of its tokens is the
        argmax given the ones before it. `step` are finished; the first rank looks alone.
        """
        if not self.ranks.is_first:
            return {}
        model, vision_only = self.model, step <= self.config.vision_steps
        model.eval()
        right, asked = torch.zeros(len(FAMILIES)), torch.zeros(len(FAMILIES))
        tokens_right, tokens, seen = 0, 0, []
        for index in range(math.ceil(self.config.eval_pictures / self.config.batch_size)):
            batch = {name: value.to(model.device) for name, value in self.heldout.batch(index).items()}
            patches = model.vision_model(batch["pixel_values"])
            seen.append(dense_loss(self.module.head(patches), batch["dense"])[1])
            if vision_only:
                continue
            hidden = answer_states(model, patches, batch)
            targets = batch["labels"][:, 1:]
            labelled = targets != IGNORE_INDEX
            wrong = torch.zeros_like(labelled)
            wrong[labelled] = (
                model.language_model.logits(hidden[:, :-1][labelled]).argmax(-1) != targets[labelled]
            )
            tokens_right += (labelled & ~wrong).sum().item()
            tokens += labelled.sum().item()
            _count_branches(batch, wrong, right, asked)
        model.train()
        scores = {f"eval_{name}": sum(row[name].item() for row in seen) / len(seen) for name in seen[0]}
        if not vision_only:
            scores["eval_accuracy"] = (right.sum() / asked.sum()).item()
            scores["eval_token_accuracy"] = tokens_right / tokens
            families = {f: right[i] / asked[i] for i, f in enumerate(FAMILIES) if asked[i]}
            scores.update({f"eval_{family}": round(share.item(), 4) for family, share in families.items()})
        return scores


def _count_branches(batch, wrong, right, asked) -> None:
    """Add each branch of a batch to its family's counts; one wrong token makes the answer wrong."""
    documents, families = batch["documents"][:, 1:], batch["families"][:, 1:]
    for document in range(1, int(documents.max()) + 1):
        here = documents == document  # (B, T - 1)
        present = here.any(1)
        family = families.masked_fill(~here, -1).amax(1)[present]
        good = ~(wrong & here).any(1)[present]
        asked.index_add_(0, family.cpu(), torch.ones(len(family)))
        right.index_add_(0, family.cpu(), good.float().cpu())
