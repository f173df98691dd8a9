"""Training on plain drawings: a model of plain drawings, its losses and its held-out images.

There are two stages. First the vision tower alone learns from dense targets; then the whole model learns to
answer, with several questions packed after each image. Heads that exist in training only help both stages:

- One word of an answer tells a new vision tower little. The generator knows for each patch which object
  covers it, its colour, where its centre lies, how large it is and, where the whole image is seen, how many
  of its shapes are like it. A linear head on the patch features learns to say so.
- Whether one thing is left of another takes two look-ups and a comparison, and an answer of one word rewards
  none of the three alone. A linear head on each noun's hidden state, half way up, learns where its thing is,
  how large it is and how many there are (`facts`). Another, four fifths up, where the answer
  begins, learns the difference between the question's two nouns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from data.loader import outliving_signals
from data.new_processor import make_processor
from data.packing import IGNORE_INDEX, Batch, dense_mask
from data.processor import Processor
from families import FAMILIES
from models.checkpoints.load import meta_init
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel, part_size
from recipes.shapes.dense import NUM_KINDS
from recipes.shapes.settings import ShapesConfig
from recipes.shapes.stream import ChatPieces, ShapesStream, ShapesStreamConfig
from recipes.shapes.tokenizer import build_tokenizer
from shapes import (
    COLOURS,
    MAX_THINGS,
    ask,
    heldout_questions,
    render,
    sample_questions,
    sample_scene,
)
from training.config import PlanOptions, flag
from training.distributed import Ranks
from training.flops import Amounts, amounts_of, costs, tower_amounts, training_flops
from training.optim import Muon, decay_fraction, schedule, set_rates
from training.plan import AverageRow, choose_device, line, make_plan, stored_shape
from training.rows import open_model
from training.task import Question, Score, Task

EVALUATION_SEED = 1_000_003  # of the images for `evaluate`: held-out digits, seeds that training never uses
SAMPLE_SIZE = 128  # pixels a side of an image whose answer is kept
_COUNTS = 3 * MAX_THINGS  # one class for each count, for each of three ways of being alike
_LETTERS = 26
_PARTS = NUM_KINDS, len(COLOURS), 3, 1, _COUNTS, 4, _LETTERS  # of the dense head's predictions


def build_processor(config: ShapesConfig) -> Processor:
    """The tokenizer, trained on sentences about shapes, and the processor around it."""
    rng = random.Random("tokenizer:0")  # the same vocabulary whatever the seed of the run
    tokens = (config.image_size // config.patch_size // config.scale_factor) ** 2
    texts = []
    for _ in range(3000):
        scene = sample_scene(rng)
        for qa in sample_questions(scene, rng, 6):
            texts += [qa.question, " " + qa.answer]
        texts += [" " + ask(scene, rng, "describe").answer, "User:", "System:", "\nAssistant:"]
    tokenizer = build_tokenizer(texts, config.vocab_size)
    return make_processor(tokenizer, image_size=config.image_size, image_seq_len=tokens, images_first=True)


def model_config(config: ShapesConfig, tokenizer) -> VLMConfig:
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


def stream_settings(config: ShapesConfig) -> dict[str, Any]:
    """Those of a stream that a run's settings decide."""
    return {
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "seed": config.seed,
        "vision_steps": config.vision_steps,
        "vision_batch_size": config.vision_batch_size,
    }


def tile_positions(shape: VLMConfig) -> int:
    """Positions of an image, or a ValueError if the model has no square tiles."""
    if not isinstance(shape.vision, VisionConfig):
        raise ValueError(
            "--init-from: drawn images need a model of square tiles, got one of images of their own shape; "
            "name rows with --data"
        )
    return FAMILIES[shape.family].positions(shape)


def chat_pieces(tokenizer, image_tokens: int) -> ChatPieces:
    """The chat template around one image, its question and its answer, as ids."""
    image = "<fake_token_around_image><global-img>" + "<image>" * image_tokens + "<fake_token_around_image>"
    return ChatPieces(
        prefix=tuple(tokenizer.encode("<|im_start|>User:" + image, add_special_tokens=False)),
        middle=tuple(tokenizer.encode("\nAssistant:", add_special_tokens=False)),
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
    )


# ---------------------------------------------------------------------------------------------- losses
def dense_head(width: int) -> nn.Linear:
    """(N, P, D_v) patch features -> (N, P, kinds + colours + 4 + 3 counts of up to 8 + 4 edges + 26 letters)
    predictions."""
    head = nn.Linear(width, sum(_PARTS))
    nn.init.normal_(head.weight, std=width**-0.5)
    nn.init.zeros_(head.bias)
    return head


def dense_counts(targets: Tensor) -> Tensor:
    """How many patches there are, with a colour, with an object, how many counts, and how many patches with a
    letter: (5,). The sums in `dense_loss` are divided by these; `targets` (N, P, DENSE) are described in
    `dense.dense_map`."""
    kind, colour, shared, letter = targets[..., 0], targets[..., 1], targets[..., 6:9], targets[..., 13]
    counts = [
        (kind >= 0).sum(),
        (colour >= 0).sum(),
        (kind > 0).sum(),
        (shared > 0).sum(),
        (letter >= 0).sum(),
    ]
    return torch.stack(counts).double()


def dense_loss(predictions: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over patches, and what share of object patches was named right.

    Args:
        predictions: (N, P, the sum of _PARTS).
        targets: (N, P, DENSE), as `dense.dense_map` has them.
        counts: `dense_counts` of these, or of all ranks' patches.
    """
    patches, coloured, objects, counted, lettered = counts.clamp(min=1).float()
    predictions, targets = predictions.flatten(0, 1), targets.flatten(0, 1)
    kinds, colours, geometry, centre, alike, edges, letters = predictions.split(_PARTS, dim=-1)
    kind, colour = targets[:, 0].long(), targets[:, 1].long()
    foreground = kind > 0
    kind_loss = F.cross_entropy(kinds, kind, reduction="sum") / patches
    centre_loss = F.binary_cross_entropy_with_logits(centre[:, 0], targets[:, 5], reduction="sum") / patches
    colour_loss = F.cross_entropy(colours, colour, ignore_index=-1, reduction="sum") / coloured
    distance = F.smooth_l1_loss(geometry, targets[:, 2:5], reduction="none").sum(-1)
    distance = distance + F.smooth_l1_loss(edges, targets[:, 9:13], reduction="none", beta=0.25).sum(-1)
    letter = targets[:, 13].long()
    letter_loss = F.cross_entropy(letters, letter, ignore_index=-1, reduction="sum") / lettered
    geometry_loss = (distance * foreground).sum() / objects
    shared = targets[:, 6:9].long() - 1  # -1 where there is nothing to count
    alike = alike.unflatten(-1, (3, MAX_THINGS))  # (N · P, 3, 8)
    count_loss = (
        F.cross_entropy(alike.flatten(0, 1), shared.flatten(), ignore_index=-1, reduction="sum") / counted
    )
    loss = kind_loss + centre_loss + letter_loss + 0.5 * (colour_loss + geometry_loss + count_loss)
    with torch.no_grad():
        right_kind = ((kinds.argmax(-1) == kind) & foreground).sum() / objects
        right_colour = ((colours.argmax(-1) == colour) & foreground).sum() / objects
        right_count = (alike.argmax(-1) == shared).sum() / counted  # -1 is no argmax
        right_letter = ((letters.argmax(-1) == letter) & (letter >= 0)).sum() / lettered
    return loss, {
        "patch_kind": right_kind,
        "patch_colour": right_colour,
        "patch_count": right_count,
        "patch_letter": right_letter,
    }


class FactHead(nn.Module):
    """(B, T, D) hidden states after the share `depth` of the layers -> (B, T, 4) facts; see `facts`."""

    def __init__(self, width: int, depth: float, outputs: int = 4):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.linear = nn.Linear(width, outputs)
        self.depth = depth
        self._hidden: Tensor | None = None

    def watch(self, language_model) -> None:
        """Keep that layer's output of every pass, for `loss` to take."""
        layers = language_model.layers
        layers[max(1, round(self.depth * len(layers))) - 1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs, output: Tensor) -> None:
        self._hidden = output if torch.is_grad_enabled() else None

    def loss(self, targets: Tensor, count: Tensor) -> Tensor:
        """Distance over the facts that are known (`targets` (B, T, 4) that are not NaN), divided by their
        count, that of all ranks."""
        assert self._hidden is not None, "the model runs first, with gradients"
        known = ~targets.isnan()
        hidden, self._hidden = self._hidden, None
        places = known.any(-1)
        predicted = self.linear(self.norm(hidden[places]))
        distance = F.smooth_l1_loss(predicted, targets[places].nan_to_num(), reduction="none")
        return (distance * known[places]).sum() / count.clamp(min=1).float()


class ShapesLoss(nn.Module):
    """(loss to minimise, what to log) of a batch; the image is encoded once for all of them. The heads
    exist in training only.

    Each part is a sum divided by its entry of `counts` (see `loss_counts`): with the mean of all ranks'
    counts there, the mean of the ranks' losses is the loss of all their images as one batch.
    """

    leaves_parameters_out = True  # the first stage has no language model

    def __init__(self, model: VisionLanguageModel, dense_weight: float = 0.3, fact_weight: float = 0.5):
        super().__init__()
        self.model, width = model, model.config.text.hidden_size
        self.head = dense_head(model.config.vision.hidden_size)
        self.nouns, self.pairs = FactHead(width, depth=0.5), FactHead(width, depth=0.8)
        for head in (self.nouns, self.pairs):
            head.watch(model.language_model)
        self.dense_weight, self.fact_weight = dense_weight, fact_weight  # in the second stage

    def forward(
        self, batch: dict[str, Tensor], vision_only: bool, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        model, ids = self.model, batch["input_ids"]
        patches = model.vision_model(batch["pixel_values"])  # (B, P, D_v)
        dense, logged = self.of_patches(patches, batch["dense"], counts)
        if vision_only:
            return dense, logged
        x = model.place_features(ids, model.projector(patches).flatten(0, 1))
        mask = self.mask(batch["segment_ids"])
        hidden, _ = model.language_model(x, attention_mask=mask, position_ids=batch["position_ids"])
        answer = self.of_answers(hidden, batch["labels"]) / counts[5].clamp(min=1).float()
        known, seen = self.of_facts(batch, counts)
        logged |= {"loss": answer.detach(), **seen}
        return answer + self.dense_weight * dense + self.fact_weight * known, logged

    def of_patches(
        self, patches: Tensor, targets: Tensor, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the vision tower's features say of the image."""
        dense, seen = dense_loss(self.head(patches), targets, counts[:5])
        return dense, {"dense_loss": dense.detach(), **seen}

    def mask(self, segment_ids: Tensor) -> Tensor:
        """(B, T) segment ids -> (B, T, T) bool: what each position sees."""
        return dense_mask(segment_ids)

    def of_answers(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed over labelled tokens."""
        return self.model.summed_loss(hidden, labels)[0]

    def of_facts(self, batch: dict[str, Tensor], counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What hidden states say of the nouns of questions."""
        nouns = self.nouns.loss(batch["nouns"], counts[6])
        pairs = self.pairs.loss(batch["pairs"], counts[7])
        return nouns + pairs, {"noun_loss": nouns.detach(), "pair_loss": pairs.detach()}


def loss_counts(batch: dict[str, Tensor]) -> Tensor:
    """What the parts of a batch's loss are divided by: `dense_counts`, labelled tokens, known facts of nouns
    and of pairs, (8,)."""
    labelled = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
    known = [(~batch[name].isnan()).sum() for name in ("nouns", "pairs")]
    return torch.cat([dense_counts(batch["dense"]), torch.stack([labelled, *known]).double()])


class ShapesTask(Task):
    """See `training.task.Task`. A step is one batch, drawn from its number alone: that is all its state."""

    config: ShapesConfig
    module: ShapesLoss
    best_by = ("eval_accuracy", True)
    license = "apache-2.0"
    summary = (
        "Answers questions about the built-in image world of Ocelli: drawn shapes, printed words, digits."
    )
    # Of a model that starts from scratch. Like all its questions, of which none is answered in JSON.
    generation_config: ClassVar[dict[str, Any]] = {
        "needs_image": True, "single_turn": True, "image_order": "first", "json": False, "most_images": 1,
    }  # fmt: skip
    heldout_settings: ClassVar[dict[str, Any]] = {  # of the stream that is evaluated on
        "seed": EVALUATION_SEED, "split": "heldout", "curriculum_pictures": 0, "vision_steps": 0,
        "list_probability": 0.0,
    }  # fmt: skip

    def __init__(self, config: ShapesConfig, ranks: Ranks):
        super().__init__(config, ranks)
        for name in ("batch_size", "vision_batch_size"):
            if getattr(config, name) % ranks.world_size:
                raise ValueError(f"{flag(name)}: expected a multiple of {ranks.world_size} ranks")
        self.steps, self.answers_after, device = config.total_steps, config.vision_steps, ranks.device
        if config.init_from:
            self.model, self.processor = open_model(config, device)
        else:
            self.processor = self.new_processor(config)
            self.model = VisionLanguageModel(model_config(config, self.processor.tokenizer))
            self.model.init_weights(torch.Generator().manual_seed(config.seed))
            self.model.generation_config = dict(self.generation_config)
        self.check_context()
        pieces = chat_pieces(self.processor.tokenizer, tile_positions(self.model.config))
        vision = self.model.config.vision
        for name, taken in (("image_size", vision.image_size), ("patch_size", vision.patch_size)):
            if (drawn := getattr(config, name)) != taken:
                raise ValueError(f"{flag(name)}: expected {taken}, as the model has it, got {drawn}")
        self.module = self.new_loss().to(device)
        if config.sequence_length <= len(pieces.prefix):
            raise ValueError(
                f"--sequence-length: expected more than the {len(pieces.prefix)} positions of an image, "
                f"got {config.sequence_length}"
            )
        made = partial(self.new_stream, config, self.processor, pieces)
        self.stream = made(rank=ranks.rank, world_size=ranks.world_size)
        self.heldout = made(**self.heldout_settings)

    # ---------------------------------------------------------------------------- what a recipe replaces
    @classmethod
    def new_processor(cls, config: ShapesConfig) -> Processor:
        return build_processor(config)

    def new_loss(self) -> ShapesLoss:
        return ShapesLoss(self.model)

    @classmethod
    def new_stream(
        cls,
        config: ShapesConfig,
        processor: Processor,
        pieces: ChatPieces,
        rank: int = 0,
        world_size: int = 1,
        **changes: Any,
    ) -> ShapesStream:
        """What a run trains on, with `changes` of its settings."""
        settings = ShapesStreamConfig(**stream_settings(config) | changes)
        return ShapesStream(settings, processor.tokenizer, pieces, rank, world_size)

    def counts(self, batch: Batch) -> Tensor:
        return loss_counts(batch)

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

    def count(self, batches: list[Batch]) -> float:
        return float(len(batches))

    def inputs(self, batch: Batch, step: int) -> dict:
        counts = self.counts(batch)
        if self.ranks.world_size > 1:
            shared = [count / self.ranks.world_size for count in self.ranks.sum(*counts.tolist())]
            counts = torch.tensor(shared, dtype=counts.dtype, device=counts.device)
        return {"batch": batch, "vision_only": step < self.answers_after, "counts": counts}

    def amounts(self, batch: Batch, step: int) -> Amounts:
        if step < self.answers_after:
            return Amounts(*tower_amounts(self.model.config.vision, map(part_size, batch["pixel_values"])))
        return super().amounts(batch, step)

    def set_rates(self, optimizers: list[Optimizer], step: int) -> None:
        """Each stage warms up; the decay is that of the whole run."""
        first, steps, warmup = self.answers_after, self.steps, self.config.warmup_steps
        if step >= first:
            decay = decay_fraction(self.config) * steps / (steps - first)
            share = schedule(step - first, steps - first, warmup, decay, self.config.lr_floor)
            return set_rates(optimizers, share)
        share = schedule(step, first, warmup, 0.0)
        set_rates(optimizers, share)
        for muon in optimizers:
            for group in muon.param_groups if isinstance(muon, Muon) else ():
                group["lr"] = self.config.vision_matrix_lr * share

    # ------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, states: list[dict], step: int) -> None:
        self.stream.start_batch = step

    # ----------------------------------------------------------------------------------------- evaluation
    def training_data(self, step: int) -> str:
        return (
            f"{self.config.images_after(step):,} images of shapes, drawn on the fly (seed "
            f"{self.config.seed}), each with several questions; digits from the UCI set that scikit-learn "
            "carries."
        )

    def questions(self, count: int) -> list[Question]:
        return [
            Question((render(scene, SAMPLE_SIZE),), qa.question, qa.answer, tuple(qa.accept))
            for scene, qa in heldout_questions(count)
        ]

    @torch.no_grad()
    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
        """What the vision tower sees in held-out images; the first rank evaluates alone."""
        if not self.ranks.is_first or not self.config.eval_pictures:
            return {}
        model, seen = self.model, []
        model.eval()
        for index in range(math.ceil(self.config.eval_pictures / self.config.batch_size)):
            batch = {name: value.to(model.device) for name, value in self.heldout.batch(index).items()}
            patches, targets = model.vision_model(batch["pixel_values"]), batch["dense"]
            seen.append(dense_loss(self.module.head(patches), targets, dense_counts(targets))[1])
        model.train()
        n = len(seen) * self.config.batch_size
        means = {name: sum(row[name].item() for row in seen) / len(seen) for name in seen[0]}
        return {f"eval_{name}": Score(mean, n) for name, mean in means.items()}

    # --------------------------------------------------------------------------------------------- --plan
    @classmethod
    def describe_plan(cls, config: ShapesConfig, options: PlanOptions) -> str:
        """The plan of a run: the stage in which the whole model learns, and a note on the one before. A row
        is an image."""
        if options.plan_device == "auto" and not torch.cuda.is_available():
            options = replace(options, plan_device="cpu")
        processor, device = cls.new_processor(config), choose_device(config, options)
        if config.init_from:
            shape = stored_shape(config.init_from)
        else:
            shape = model_config(config, processor.tokenizer)
        pieces = chat_pieces(processor.tokenizer, tile_positions(shape))
        stream = cls.new_stream(config, processor, pieces)
        alone = config.vision_steps
        drawn = amounts_of(stream.batch(alone), shape.vision)
        row = AverageRow(
            tiles=drawn.tiles / config.batch_size,
            fill=drawn.positions / (config.batch_size * config.sequence_length),
            labelled=drawn.labelled / drawn.positions,
            total_samples=(config.total_steps - alone) * config.batch_size,
        )
        lines = [make_plan(config, options, device, shape, row).table()]
        if alone:
            side, pictures = shape.vision.image_size, alone * config.vision_batch_size
            amounts = Amounts(*tower_amounts(shape.vision, [(side, side)], pictures))
            with meta_init():
                flops = training_flops(costs(VisionLanguageModel(shape)), amounts)
            hours = flops / (options.plan_mfu * device.peak * options.plan_ranks) / 3600
            lines += [
                "before it, the vision tower alone",
                line("steps", f"{alone:,}"),
                line("images a step", f"{config.vision_batch_size:,}"),
                line("model FLOPs", f"{flops:.3e}"),
                line("hours", f"{hours:,.1f}"),
            ]
        return "\n".join([*lines, f"assumed: {device.name} (--plan-device, --plan-tflops)"])


TASK = ShapesTask
