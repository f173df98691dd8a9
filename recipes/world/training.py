"""Training on drawings of any look: what `recipes.shapes.training` does, and more heads, in training only.

- A tower that learns lengths from its patches alone keeps where these are to half a patch: another linear
  head says each patch's column and row (`GridHead`).
- Coordinates are a token each, and one that is nearly right is worth more than one that is far off: the
  targets are spread over the numbers near them (`number_loss`). A linear head on the image's tokens, half
  way up, learns where the box lies that each of them shows; another, two thirds up, on nouns where their
  thing is, before each thing that an answer lists where that thing is, and before each letter that it spells
  where that letter is printed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.new_processor import make_processor
from data.packing import IGNORE_INDEX, Batch
from data.processor import Processor
from families.idefics3 import IdeficsImages
from models.vision_language_model import VisionLanguageModel
from recipes.shapes.questions import ask_list
from recipes.shapes.settings import ShapesConfig
from recipes.shapes.stream import ChatPieces
from recipes.shapes.training import FactHead, ShapesLoss, ShapesTask, loss_counts, stream_settings
from recipes.world import looks
from recipes.world.asking import as_json, ask_both, ask_more, of_one, thing_as_json
from recipes.world.attention import AttentionOnCPU
from recipes.world.faces import families
from recipes.world.json_answers import ask_object
from recipes.world.kinds import MORE_KINDS, ask_kinds
from recipes.world.outside import check_installed
from recipes.world.places import DESCRIBE, FORM, ask_absent, ask_place, follow_up
from recipes.world.scene import KNOWS, NO_IMAGE, NOT_UNDERSTOOD, REFUSAL
from recipes.world.settings import WorldConfig
from recipes.world.stream import WorldStream, WorldStreamConfig, branch_mask
from recipes.world.turns import first_or_second, lean_on, two_turns
from recipes.world.vocabulary import MOST_NUMBER, build_tokenizer
from recipes.world.wording import as_typed, lead_in, reword, system_prompt
from shapes import ask, sample_questions, sample_scene
from training.distributed import Ranks
from training.task import Score

_IN_PAIRS = 0.12  # share of batches that show two images in each row
_SPELLED = 0.35  # share of questions with a word that is spelled: then a typo is not far from it
_TEXT_FIRST = 0.12  # share of rows whose first question stands before the image: prompts without a template


def build_processor(config: WorldConfig) -> Processor:
    """The tokenizer, trained on sentences about drawings, and the processor around it."""
    rng = random.Random("tokenizer:0")  # the same vocabulary whatever the seed of the run
    tokens = (config.image_size // config.patch_size // config.scale_factor) ** 2
    tokenizer = build_tokenizer(_texts_of_drawings(rng), config.vocab_size)
    side, count = config.image_size, config.tiles_per_side
    return make_processor(
        tokenizer, image_size=side, image_seq_len=tokens, split=count > 1, longest_edge=count * side,
        images_first=True,
    )  # fmt: skip


def _texts_of_drawings(rng: random.Random) -> Iterator[str]:
    """What is asked and answered about drawings, but the words that are printed in them: they are spelled,
    so that any string is read alike, and so is what is asked about anything else. "list" and "name" may be
    printed words too, but questions begin with them, so each stays one token."""
    for _ in range(3000):
        scene = sample_scene(rng)
        asked = [*sample_questions(scene, rng, 6), ask(scene, rng, "describe"), ask_list(scene, rng)]
        asked += [
            ask_place(scene, rng),
            ask_place(scene, rng),
            ask_absent(scene, rng),
            *follow_up(scene, rng),
            *ask_more(scene, rng, 3),
            *(
                qa
                for qa in ask_kinds(scene, rng, 6)
                if not scene.first("word") or scene.first("word").name not in qa.question
            ),
            *ask_kinds(scene, rng, 3, MORE_KINDS),
            *lean_on(scene, rng),
            *two_turns(scene, rng),
            ask_object(scene, rng),
            thing_as_json(scene, rng),
        ]
        asked += [of_one(qa, rng.randrange(2), rng) for qa in asked[:3] if qa is not None]
        both = scene, sample_scene(rng)
        asked += [ask_both(both, rng), first_or_second(both, rng)]
        asked += [as_json(qa, rng) for qa in asked[:2] if qa]
        word = scene.first("word")
        for qa in asked:
            if qa is not None and qa.family != "word":
                answer = re.sub(rf"(?<=[ \"])\b{word.name}\b", "", qa.answer) if word else qa.answer
                question = as_typed(reword(qa.question, rng), rng, typos=0)
                yield from (question, " " + question, " " + answer)  # at first, and in a later turn
        yield from (" " + REFUSAL, " " + NOT_UNDERSTOOD, " " + NO_IMAGE, system_prompt(rng), lead_in(rng))
        yield from ("User:", "\nUser:", "System:", "\nAssistant:")


# ---------------------------------------------------------------------------------------------- losses
class GridHead(nn.Module):
    """(N, P, D_v) patch features -> mean cross-entropy of each patch's column and row in its tile.

    A tower that learns lengths from its patches alone keeps where these are to half a patch: too little for a
    box.
    """

    def __init__(self, width: int, side: int):
        super().__init__()
        self.linear, self.side = nn.Linear(width, 2 * side), side

    def forward(self, features: Tensor) -> Tensor:
        at = torch.arange(self.side, device=features.device)
        columns, rows = (
            at.repeat(len(features) * self.side),
            at.repeat_interleave(self.side).repeat(len(features)),
        )
        across, down = self.linear(features).flatten(0, 1).split(self.side, dim=-1)
        return F.cross_entropy(across, columns) + F.cross_entropy(down, rows)


def spread(values: Tensor, size: int, width: float) -> Tensor:
    """(N,) numbers -> (N, size) probabilities, a bell around each of them with this standard deviation."""
    distance = torch.arange(size, device=values.device) - values[:, None]
    return torch.softmax(-0.5 * (distance / width) ** 2, dim=-1)


class PlaceHead(FactHead):
    """(B, T, D) hidden states -> the edges of a box and its centre, each as one of BINS."""

    BINS = 100

    def __init__(self, width: int, depth: float):
        super().__init__(width, depth, outputs=6 * self.BINS)

    def place_loss(self, where: Tensor, places: Tensor, count: Tensor) -> Tensor:
        """Cross-entropy of a bin. `places` (N, 6) as `stream.place_of` has them, or -1, belong to the N
        positions `where` (B, T) is True; it is divided by the `count` of all ranks' known places."""
        assert self._hidden is not None, "the model runs first, with gradients"
        hidden, self._hidden = self._hidden[where], None
        known = places[:, 0] >= 0
        bins = places[known].flatten() * (self.BINS / 1000) - 0.5
        predicted = self.linear(self.norm(hidden[known])).view(-1, self.BINS)
        total = F.cross_entropy(predicted, spread(bins, self.BINS, 1.0), reduction="sum")
        return total / (6 * count.clamp(min=1).float())


_SPREAD = 4.0  # thousandths: a pixel of what the tower sees of a large image


def number_loss(logits: Tensor, numbers: Tensor, values: Tensor) -> Tensor:
    """Summed cross-entropy of (N, vocabulary) logits whose target is a number: `numbers` are the ids of 0, 1,
    2, ..., and `values` (N,) which of them."""
    known = logits.float().log_softmax(-1)[:, numbers]
    return -(spread(values, len(numbers), _SPREAD) * known).sum()


class WorldLoss(ShapesLoss):
    """See `ShapesLoss`; of drawings, in tiles."""

    numbers: Tensor  # ids of 0, 1, 2, ... where each number is a token, else none

    def __init__(self, model: VisionLanguageModel, config: WorldConfig, tokenizer):
        super().__init__(model, config.dense_weight, config.fact_weight)
        for name, parameter in model.named_parameters():
            if config.frozen and re.search(config.frozen, name):
                parameter.requires_grad_(False)
        self.tower_learns = any(one.requires_grad for one in model.vision_model.parameters())
        if not self.tower_learns:  # then nothing is to be said of patches
            del self.head
        self.leaves_parameters_out = config.vision_steps > 0  # of one that starts with the tower alone
        vocab, width = tokenizer.get_vocab(), model.config.text.hidden_size
        one_token = str(MOST_NUMBER) in vocab
        numbers = [vocab[str(number)] for number in range(MOST_NUMBER + 1)] if one_token else []
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.long), persistent=False)
        if self.tower_learns:
            side = config.image_size // config.patch_size
            self.grid = GridHead(model.config.vision.hidden_size, side)
        self.places, self.noun_places = PlaceHead(width, depth=0.5), PlaceHead(width, depth=0.7)
        for head in (self.places, self.noun_places):
            head.watch(model.language_model)
        # Neither where the forward pass runs again in the backward pass nor where it is compiled.
        self.keeps = not (config.activation_checkpointing or config.compile)

    def forward(
        self, batch: dict[str, Tensor], vision_only: bool, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with AttentionOnCPU() if self.keeps else nullcontext():
            return super().forward(batch, vision_only, counts)

    def of_patches(
        self, patches: Tensor, targets: Tensor, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.tower_learns:
            return patches.new_zeros(()), {}
        dense, logged = super().of_patches(patches, targets, counts)
        grid = self.grid(patches)
        return dense + grid, logged | {"grid_loss": grid.detach()}

    def mask(self, segment_ids: Tensor) -> Tensor:
        return branch_mask(segment_ids)

    def of_answers(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed over labelled tokens. Those of one digit are as often a count: they are like any word."""
        head = self.model.language_model.lm_head
        is_number = torch.isin(labels, self.numbers[10:])
        total = super().of_answers(hidden, labels.masked_fill(is_number, IGNORE_INDEX))
        values = torch.searchsorted(self.numbers[10:], labels[is_number]) + 10
        return total + number_loss(head(hidden[:, :-1][is_number[:, 1:]]), self.numbers, values)

    def of_facts(self, batch: dict[str, Tensor], counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        known, logged = super().of_facts(batch, counts)
        token, named = self.model.config.image_token_id, batch["noun_places"][..., 0] >= 0
        assert token is not None, "the model sees images"
        image = batch["input_ids"].eq(token)
        places = self.places.place_loss(image, batch["places"].flatten(0, 1), counts[8])
        of_nouns = self.noun_places.place_loss(named, batch["noun_places"][named], counts[9])
        logged |= {"place_loss": places.detach(), "noun_place_loss": of_nouns.detach()}
        return known + places + of_nouns, logged


class WorldTask(ShapesTask):
    """See `ShapesTask`."""

    config: WorldConfig
    module: WorldLoss
    generation_config: ClassVar[dict[str, Any]] = {
        "coordinates": {"form": FORM.name, "describe": DESCRIBE}, "knows": KNOWS, "image_order": "first",
        "json": False, "most_images": 2,
    }  # fmt: skip
    heldout_settings: ClassVar[dict[str, Any]] = ShapesTask.heldout_settings | {
        "only_words": 0.0, "pairs": 0.0, "text_first": 0.0, "spelled": 0.0,
    }  # fmt: skip

    def __init__(self, config: WorldConfig, ranks: Ranks):
        families(looks.TRAIN)  # what is not installed is said here, and not by each worker
        check_installed()
        super().__init__(config, ranks)

    @classmethod
    def new_processor(cls, config: ShapesConfig) -> Processor:
        assert isinstance(config, WorldConfig), "settings.SETTINGS"
        return build_processor(config)

    def new_loss(self) -> WorldLoss:
        return WorldLoss(self.model, self.config, self.processor.tokenizer)

    @classmethod
    def new_stream(
        cls,
        config: ShapesConfig,
        processor: Processor,
        pieces: ChatPieces,
        rank: int = 0,
        world_size: int = 1,
        **changes: Any,
    ) -> WorldStream:
        assert isinstance(config, WorldConfig), "settings.SETTINGS"
        if not isinstance(processor.images, IdeficsImages):
            raise ValueError("--init-from: expected a model whose processor cuts images as SmolVLM's does")
        made = stream_settings(config) | {
            "tokens_per_side": config.image_size // config.patch_size // config.scale_factor,
            "curriculum_pictures": config.curriculum_pictures,
            "only_words": config.only_words,
            "pairs": _IN_PAIRS,
            "text_first": _TEXT_FIRST,
            "spelled": _SPELLED,
        }
        settings = WorldStreamConfig(**made | changes)
        return WorldStream(settings, processor.tokenizer, pieces, processor.images, rank, world_size)

    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
        """See `ShapesTask.evaluate`; nothing where the tower stays as it is."""
        return super().evaluate(wrapped, step) if self.module.tower_learns else {}

    def counts(self, batch: Batch) -> Tensor:
        """`loss_counts`, and known places of the image's tokens and of what is named: (10,)."""
        counts = loss_counts(batch)
        shown = [(batch[name][..., 0] >= 0).sum() for name in ("places", "noun_places") if name in batch]
        shown = [torch.zeros_like(shown[0])] * (2 - len(shown)) + shown
        return torch.cat([counts, torch.stack(shown).double()])


TASK = WorldTask
