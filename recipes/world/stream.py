"""Drawings of any look as training batches: images in tiles, conversations, two images, text first.

A row is laid out as that of a plain image (`recipes.shapes.stream`); a branch may have several turns, and one
that asks without an image is blind to it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from torch import Tensor

from data.packing import IGNORE_INDEX, dense_mask
from families.idefics3 import IdeficsImages
from recipes.shapes.dense import DENSE, box_of, dense_map, letter_edges, owners
from recipes.shapes.questions import ask_list, meant
from recipes.shapes.stream import SHORT, ChatPieces, ShapesStream, ShapesStreamConfig
from recipes.world import asking, looks
from recipes.world.asking import as_json, ask_both, ask_either, ask_more, ask_words, of_one, thing_as_json
from recipes.world.drawings import paint, sample_drawing, sample_rows, sample_words, weather
from recipes.world.json_answers import ask_object, ask_unknown_object
from recipes.world.kinds import MORE_KINDS, ask_kinds
from recipes.world.outside import outside_image
from recipes.world.places import ask_absent, ask_absent_place, ask_everything, ask_of_it, ask_place, follow_up
from recipes.world.scene import NO_IMAGE, NOT_UNDERSTOOD, REFUSAL
from recipes.world.turns import first_or_second, lean_on, two_turns
from recipes.world.unanswerable import ask_outside
from recipes.world.wording import as_typed, lead_in, reword, system_prompt
from shapes import ask, sample_questions, sample_scene
from shapes.world import COLOURS, MAX_THINGS, QA, SHAPES, Scene, Thing

# Families are drawn from this list, which names more often what takes longer to learn.
_MIX = (*SHORT, *("position",) * 2, *("size",) * 2, *("count",) * 7, *("compare",) * 2)

_IN_ROWS = 0.12  # share of drawings that show shapes in a row or two, in the end
_FEW = 0.12  # share of the rest that show one thing or two: else one thing alone is taken for a sign
_AS_JSON = 0.1  # share of questions about drawings whose answer is short JSON
_AS_IT_IS = 0.3  # share of questions that keep the wording of those that are evaluated
_MISTYPED = 0.25  # share of the others that have a typo: it takes longest to learn
_LEAD_IN = 0.04  # share of questions after a sentence that stood before the image: templates put it there
_SYSTEM = 0.1  # share of rows with a system prompt
_OF_TILES = "pixel_values", "dense", "places"  # parts of a batch that have a row for each tile


@dataclass(frozen=True)
class WorldStreamConfig(ShapesStreamConfig):
    tokens_per_side: int = 8  # of a tile, after the projector
    outside: float = 0.16  # images that show nothing of the world
    only_words: float = 0.42  # images of words alone
    pairs: float = 0.0  # batches of two images a row
    text_first: float = 0.0  # rows whose first question stands before the image
    spelled: float = 0.0  # questions of which one word that is a token is spelled instead


_NAMED = re.compile(
    rf"Ġ?(?:{'|'.join((*COLOURS, *SHAPES, 'shape', 'word', 'digit'))})(?:e?s)?", re.IGNORECASE
)
ALONE = 1000  # segments from this one on do not see the image


def branch_mask(segment_ids: Tensor) -> Tensor:
    """(B, T) segment ids -> (B, T, T) bool: `dense_mask`, but that segments from ALONE on see no image."""
    blind = (segment_ids >= ALONE)[:, :, None] & (segment_ids == 0)[:, None, :]
    return dense_mask(segment_ids) & ~blind


def place_of(thing: Thing, scene: Scene) -> list[int]:
    """A thing's box and centre in thousandths of the image."""
    return [min(999, round(1000 * one)) for one in (*box_of(thing, scene.aspect), thing.x, thing.y)]


def letter_places(word: Thing, scene: Scene) -> list[list[int]]:
    """`place_of` for each letter of a printed word."""
    left, top, right, bottom, _, _ = place_of(word, scene)
    shares = letter_edges(word.text, word.font)
    edges = [round(left + (right - left) * share) for share in (0.0, *shares)]
    middle = (top + bottom) // 2
    return [[x1, top, x2, bottom, (x1 + x2) // 2, middle] for x1, x2 in pairwise(edges)]


class WorldStream(ShapesStream):
    """Yields batches as dicts of tensors, as `ShapesStream` does. `images` cuts drawings into tiles.

    With N tiles in all, those of an image after one another, its whole last: pixel_values (N, 3, S, S), dense
    (N, P, DENSE), after the first stage places (N, tokens, 6), see `_places`. And noun_places (B, T, 6),
    `place_of` one thing, or -1: in a question where a noun that names one thing ends, in an answer of the
    thing, or of the letter of a printed word, that comes next.
    """

    config: WorldStreamConfig

    def __init__(
        self,
        config: WorldStreamConfig,
        tokenizer,
        pieces: ChatPieces,
        images: IdeficsImages,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__(config, tokenizer, pieces, rank, world_size)
        self.images = images

    def batch(self, index: int) -> dict[str, Tensor]:
        batch = super().batch(index)
        return batch | {key: batch[key].flatten(0, 1) for key in _OF_TILES if key in batch}

    def rows(self, index: int) -> list[dict[str, np.ndarray]]:
        orient = random.Random(f"{self.config.seed}:{index}")
        across = self._tiles_across(orient)
        wide = orient.random() < 0.5
        numbers = self.numbers(index)
        if self._in_pairs(index, orient):
            pairs = zip(numbers[::2], numbers[1::2])
            return [self.drawing_row(one, across, wide, other) for one, other in pairs]
        return [self.drawing_row(number, across, wide) for number in numbers]

    def _tiles_across(self, rng: random.Random) -> int:
        """How many tiles the shorter side of a batch's images has: all of an image's rows are alike."""
        most = self.images.longest_side // self.images.tile_size
        return most if rng.random() < 0.65 else rng.randint(1, most)

    def _in_pairs(self, index: int, rng: random.Random) -> bool:
        """Whether a batch's rows show two images each; not before scenes are hardest."""
        config = self.config
        ready = (index - config.vision_steps) * config.batch_size >= config.curriculum_pictures
        drawn = rng.random() < config.pairs
        return drawn and ready and len(self.numbers(index)) % 2 == 0 and index >= config.vision_steps

    def drawing_row(self, index: int, across: int, wide: bool, second: int = -1) -> dict[str, np.ndarray]:
        """Drawing number `index`, `across` tiles high if `wide`, else wide: its tiles with their dense
        targets, and its packed questions. Of those for the tower alone, two of them. With drawing number
        `second` the row shows that one after it, and is asked about either and both."""
        config, images = self.config, self.images
        rng = random.Random(f"{config.split}:{config.seed}:{index}")
        alone = index < config.vision_pictures
        shown = [self._drawn(number, across, wide) for number in (index, second) if number >= 0]
        if alone:
            _, only_words, pixels, dense, *_ = shown[0]
            parts = len(pixels) - 1
            two = only_words and parts > 0  # in the whole of most images letters are too narrow to tell
            kept = rng.sample(range(parts), 2) if two else [rng.randrange(parts + 1), parts]
            row: dict[str, np.ndarray] = {"pixel_values": pixels[kept], "dense": dense[kept]}
            return row | self._conversations(self._prefix("<|im_start|>User:"), [], None)
        row = {
            name: np.concatenate([one[at] for one in shown])
            for name, at in (("pixel_values", 2), ("dense", 3))
        }
        row["places"] = np.concatenate(
            [self._places(scene, *visual.grid) for scene, _, _, _, visual in shown]
        )
        prompt = "".join(images.prompt(visual, i, len(shown)) for i, (*_, visual) in enumerate(shown))
        scene, only_words = shown[0][:2]
        if len(shown) > 1:
            questions, scene = self._of_two([one[0] for one in shown], rng), None
        elif scene is None:
            questions = self._of_outside(rng)
        else:
            questions = self._of_words(scene, rng) if only_words else self._of_drawing(scene, rng)
        questions = [
            [self._worded(qa, rng, not i, scene) for i, qa in enumerate(turns)] for turns in questions
        ]
        opening = None
        if rng.random() < config.text_first:
            questions = [turns for turns in questions if turns[0].family != "alone"]
            (opening, *later), *questions = questions
            questions = [later, *questions] if later else questions
            text = f"User: {opening.question}{prompt}"
        else:
            text = "User:" + prompt
        if config.split != looks.HELDOUT and rng.random() < _SYSTEM:
            text = f"System: {system_prompt(rng)}<end_of_utterance>\n{text}"
        text = "<|im_start|>" + text
        return row | self._conversations(self._prefix(text), questions, scene, opening, rng)

    def _drawn(self, index: int, across: int, wide: bool):
        """Drawing number `index`: its scene, or None outside of the world; whether it shows words alone; its
        tiles (n, 3, S, S) and their dense targets; rows and columns of tiles."""
        config, images = self.config, self.images
        rng = random.Random(f"{config.split}:{config.seed}:{index}:drawn")
        difficulty = self.difficulty(index)
        most = images.longest_side // images.tile_size
        if across == most:
            aspect = 1.0 if rng.random() < 0.5 else rng.uniform(1.0, 0.97 * most / max(most - 1, 0.6))
            wide = rng.random() < 0.5
        else:
            aspect = rng.uniform(
                1.03 * most / across, 0.97 * most / (across - 1) if across > 1 else 1.6 * most
            )
        aspect = aspect if wide else 1 / aspect
        while True:
            scene, only_words = None, False
            if rng.random() < config.outside * difficulty:
                image = weather(outside_image(rng, config.split, aspect), rng)
            else:
                only_words = rng.random() < config.only_words
                if only_words:
                    scene = sample_words(rng, config.split, aspect)
                elif rng.random() < _IN_ROWS * difficulty:
                    scene = sample_rows(rng, config.split, aspect)
                else:
                    few = rng.random() < _FEW * difficulty
                    scene = sample_drawing(rng, config.split, difficulty, aspect)
                    while few and len(scene.things) > 2:
                        scene = sample_drawing(rng, config.split, difficulty, aspect)
                if any(t.kind == "word" and len(self.encode(f" {t.name}")) == 1 for t in scene.things):
                    continue  # what is printed is spelled, so that any string is read alike
                image = paint(scene, rng, 160 if only_words else looks.SMALLEST_IMAGE)
            visual = images.cut(image)
            rows, columns = visual.grid
            if min(rows, columns) == (across if most > 1 else 0):
                break  # else the pixels of a small image, which are whole, made it longer or shorter
        pixels = np.stack([tile.pixels.numpy() for tile in visual.parts])
        return scene, only_words, pixels, self._dense_tiles(scene, rows, columns), visual

    def _dense_tiles(self, scene: Scene | None, rows: int, columns: int) -> np.ndarray:
        """`dense_map` for each tile, (n, P, DENSE), with lengths in eighths of a tile."""
        grid = self.config.image_size // self.config.patch_size
        if scene is None:
            dense = np.zeros((rows * columns + 1, grid * grid, DENSE), np.float32)
            dense[..., 1] = dense[..., 13] = -1
            return dense
        whole = dense_map(scene, grid, grid)[None]
        if rows * columns:
            cells = dense_map(scene, columns * grid, rows * grid, grid)
            cells[:, 6:9] = 0  # a part does not show how many there are in the whole
            cells = cells.reshape(rows, grid, columns, grid, DENSE).transpose(0, 2, 1, 3, 4)
            whole = np.concatenate([cells.reshape(rows * columns, grid * grid, DENSE), whole])
        whole[..., 2:4] *= 8 / grid
        whole[..., 9:13] *= 8 / grid
        return whole

    def _places(self, scene: Scene | None, rows: int, columns: int) -> np.ndarray:
        """Where in the whole image each tile's tokens show a thing: (n, tokens, 6), its box and its centre in
        thousandths; -1 where there is none."""
        side = self.config.tokens_per_side
        if scene is None:
            return np.full((rows * columns + 1, side * side, 6), -1, np.int64)
        values = np.array([[-1] * 6, *(place_of(thing, scene) for thing in scene.things)])
        tiles = values[owners(scene, side, side)[0] + 1][None]
        if rows * columns:
            cells = values[owners(scene, columns * side, rows * side)[0] + 1]
            cells = cells.reshape(rows, side, columns, side, 6).transpose(0, 2, 1, 3, 4)
            tiles = np.concatenate([cells.reshape(-1, side * side, 6), tiles])
        return tiles

    def _of_drawing(self, scene: Scene, rng: random.Random) -> list[list[QA]]:
        """Conversations about a drawing: mostly of one question, some of two or three."""
        config = self.config
        asked: list[QA | None] = [ask_place(scene, rng, many=0.45, most=MAX_THINGS) for _ in range(2)]
        if rng.random() < config.describe_probability or len(scene.things) <= 2:
            asked.append(ask(scene, rng, "describe"))
        asked += [asking.count_any(scene, rng) for _ in range(2)]  # the others prefer high counts
        asked.append(asking.count_all(scene, rng))
        if rng.random() < 0.6 * config.list_probability:
            asked.append(ask_list(scene, rng))
        asked += [ask_absent(scene, rng) for _ in range(rng.choice((1, 2, 2)))]
        asked += [self._not_understood(rng) for _ in range(rng.choice((1, 2, 3)))]
        asked += ask_more(scene, rng, rng.randint(2, 4))
        asked += ask_kinds(scene, rng, rng.randint(8, 12)) + ask_kinds(
            scene, rng, rng.randint(6, 9), MORE_KINDS
        )
        if rng.random() < 0.1:
            asked.append(thing_as_json(scene, rng))
        asked += sample_questions(scene, rng, 18, _MIX)
        single = [self._as_json(qa, rng) for qa in asked if qa is not None]
        rng.shuffle(single)
        # What is not understood has no turn before it: "How many" may lean on one.
        found = [[qa] for qa in single if qa.family == "outside"]
        single, at = [qa for qa in single if qa.family != "outside"], 0
        while at < len(single):
            turns = rng.choice((1, 1, 1, 1, 2, 2, 3))
            found.append(single[at : at + turns])
            at += turns
        rng.shuffle(found)
        if rng.random() < 0.5 and (turns_of_one := follow_up(scene, rng)):
            found.insert(0, turns_of_one)
        if rng.random() < 0.5 and (turns_of_one := ask_of_it(scene, rng)):
            found.insert(0, turns_of_one)
        known = [ask(scene, rng, kind) for kind in ("word", "digit", "size", "compare", "count")]
        found = [[qa] for qa in known if qa is not None] + found  # what little was asked of was forgotten
        for leaning in (lean_on, two_turns):
            if turns_of_one := leaning(scene, rng):
                found.insert(0, turns_of_one)
        if rng.random() < 0.15:
            found.insert(0, [QA("alone", rng.choice(single).question, NO_IMAGE)])
        found = [[made] for _ in range(3) if rng.random() < 0.8 and (made := ask_object(scene, rng))] + found
        return found

    def _not_understood(self, rng: random.Random) -> QA:
        """A question that no drawing of the world answers."""
        if rng.random() < 0.08:
            return ask_unknown_object(rng)
        return QA("outside", ask_outside(rng, self.config.split), NOT_UNDERSTOOD)

    def _as_json(self, qa: QA, rng: random.Random) -> QA:
        """Mostly the question as it is."""
        return as_json(qa, rng) or qa if rng.random() < _AS_JSON else qa

    def _of_two(self, scenes: list[Scene | None], rng: random.Random) -> list[list[QA]]:
        """What can be asked about two images, of which one or both may show nothing of the world."""
        drawn = [scene for scene in scenes if scene is not None]
        asked: list[QA | None] = []
        for which, scene in enumerate(scenes):
            if scene is None:
                other = sample_scene(rng, self.config.split)
                about: list[QA | None] = [*sample_questions(other, rng, 3)]
                about = [QA("outside", qa.question, REFUSAL) for qa in about if qa is not None]
            else:
                about = [
                    *sample_questions(scene, rng, 7, _MIX),
                    *ask_more(scene, rng, 2),
                    *ask_kinds(scene, rng, 2),
                    *ask_kinds(scene, rng, 2, MORE_KINDS),
                ]
                about += [ask_place(scene, rng, most=MAX_THINGS), ask_absent(scene, rng)]
                about += [ask(scene, rng, "describe")] * (rng.random() < 0.2)
            asked += [of_one(replace(qa, scene=scene), which, rng) for qa in about if qa is not None]
        if len(drawn) == 2:
            both = drawn[0], drawn[1]
            asked += [ask_both(both, rng) for _ in range(5)] + [ask_either(both, rng) for _ in range(2)]
            asked += [first_or_second(both, rng) for _ in range(7)]
        asked.append(self._not_understood(rng))
        found = [self._as_json(qa, rng) for qa in asked if qa is not None]
        rng.shuffle(found)
        return [[qa] for qa in found]

    def _worded(self, qa: QA, rng: random.Random, first: bool, scene: Scene | None) -> QA:
        """What is evaluated keeps its wording, and so does a part of what is trained."""
        if self.config.split == looks.HELDOUT or rng.random() < _AS_IT_IS:
            return qa
        question, about = reword(qa.question, rng), qa.scene or scene
        if qa.family == "shape" and about and len(about.shapes()) < len(about.things):
            question = question if "shape" in question.lower() else qa.question  # "the red one" may be a word
        question = as_typed(question, rng, _MISTYPED)
        if first and rng.random() < _LEAD_IN:
            question = lead_in(rng) + rng.choice((" ", "\n")) + question
        return replace(qa, question=question)

    def _of_words(self, scene: Scene, rng: random.Random) -> list[list[QA]]:
        """What can be asked about several words: a language model learns to read from them as well."""
        asked = [ask_list(scene, rng, "across"), ask_list(scene, rng, "down"), ask(scene, rng, "describe")]
        asked += [ask_absent_place(scene, rng), self._not_understood(rng)]
        asked += [
            *ask_words(scene, rng),
            ask_everything(scene, rng),
            *ask_more(scene, rng, 3),
            *ask_kinds(scene, rng, 4),
        ]
        if len(scene.things) == 1:
            asked += [ask(scene, rng, kind) for kind in ("word", "word", "colour", "exists")]
        asked = [self._as_json(qa, rng) for qa in asked if qa is not None]
        rng.shuffle(asked)
        found = [[qa] for qa in asked]
        return [turns, *found] if (turns := two_turns(scene, rng)) else found

    def _of_outside(self, rng: random.Random) -> list[list[QA]]:
        """Conversations about an image that shows nothing of the world."""
        scene = sample_scene(rng, self.config.split)
        asked = [
            *sample_questions(scene, rng, 3),
            ask_place(scene, rng),
            ask_list(scene, rng),
            *ask_kinds(scene, rng, 2),
            *ask_kinds(scene, rng, 2, MORE_KINDS),
            *two_turns(scene, rng)[:1],
        ]
        asked += [ask_object(scene, rng)] if rng.random() < 0.3 else []
        asked += [QA("outside", ask_outside(rng, self.config.split), "") for _ in range(2)]
        rng.shuffle(asked)
        refused = [QA("outside", qa.question, REFUSAL) for qa in asked if qa is not None]
        return [refused[:2], *([qa] for qa in refused[2:5])]

    @lru_cache(maxsize=64)  # noqa: B019
    def _prefix(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _conversations(
        self,
        prefix,
        conversations: list[list[QA]],
        scene: Scene | None,
        opening: QA | None = None,
        rng: random.Random | None = None,
    ) -> dict[str, np.ndarray]:
        """Branches until the row is full; a branch that does not fit is left out, never cut. `scene` is what
        questions are about that do not name another. `opening` is a question that stands in the prefix: it is
        answered there, and the others are asked after it. With `rng` some words of questions are spelled."""
        config, pieces = self.config, self.pieces
        answered = self._answer(opening) if opening else ([], [])
        if opening:
            prefix = [*prefix, pieces.end, *pieces.middle, *answered[0]]
        length, start = config.sequence_length, len(prefix)
        row = self.blank_row(prefix)
        if opening:
            first = start - len(answered[0])
            row["labels"][first:start] = answered[1]
            self._mark_answer(row, first, answered[0], opening, opening.scene or scene)
        at, document = start, 0
        for turns in conversations:
            blind = turns[0].family == "alone"
            texts = [("User: " if blind else "\nUser: " if opening else "") + turns[0].question]
            texts += ["\nUser: " + qa.question for qa in turns[1:]]
            asked = [self._spelled(text, rng) if rng else (self.encode(text), 0, 0) for text in texts]
            questions = [[*ids, pieces.end, *pieces.middle] for ids, *_ in asked]
            if blind:
                questions[0].insert(0, prefix[0])
            answers = [self._answer(qa) for qa in turns]
            end = at + sum(map(len, questions)) + sum(len(ids) for ids, _ in answers)
            if end > length:
                continue
            document += 1
            first = 0 if blind else start
            row["position_ids"][at:end] = np.arange(first, first + end - at)
            row["segment_ids"][at:end] = document + ALONE * blind
            for qa, text, question, (answer, labels), moved in zip(turns, texts, questions, answers, asked):
                stop = at + len(question) + len(answer)
                row["input_ids"][at:stop] = question + answer
                row["labels"][stop - len(answer) : stop] = labels
                about = qa.scene or scene
                if about is not None and not blind:
                    self.mark_nouns(row, at, text, at + len(question) - 1, about)
                    self._move_marks(row, at, *moved)
                    self._mark_answer(row, stop - len(answer), answer, qa, about)
                at = stop
        return row

    def _spelled(self, text: str, rng: random.Random) -> tuple[list[int], int, int]:
        """A question's ids, of which one word may be spelled although it is a token, mostly one that names
        something: so its letters come to mean what it means, and a typo is near (as BPE-dropout has it,
        Provilkov et al., 2020). And which token that is, and how many more it became."""
        ids = self.encode(text)
        if rng.random() >= self.config.spelled:
            return ids, 0, 0
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        words = [i for i, token in enumerate(tokens) if len(token) > 2 and token.removeprefix("Ġ").isalpha()]
        named = [i for i in words if _NAMED.fullmatch(tokens[i])] if rng.random() < 0.6 else []
        if not words:
            return ids, 0, 0
        at = rng.choice(named or words)
        letters = self.tokenizer.convert_tokens_to_ids([*tokens[at]])
        return [*ids[:at], *letters, *ids[at + 1 :]], at, len(letters) - 1

    @staticmethod
    def _move_marks(row, at: int, ids: list[int], spelled: int, more: int) -> None:
        """Move the marks of a question that begins at `at` to where its tokens are after one was spelled."""
        if more:
            first, last = at + spelled, at + len(ids) - more
            for name, empty in (("nouns", np.nan), ("noun_places", -1)):
                marks = row[name][first:last].copy()
                row[name][first : first + more] = empty
                row[name][first + more : last + more] = marks

    def _answer(self, qa: QA) -> tuple[list[int], list[int]]:
        """An answer's ids with the end of its turn, and which of them are to be learnt."""
        ids = [*self.encode(" " + qa.answer), self.pieces.end]
        spans = qa.forced if isinstance(qa.forced, tuple) else ((0, qa.forced),) if qa.forced else ()
        if not spans:
            return ids, ids
        offsets = self.tokenizer(" " + qa.answer, add_special_tokens=False, return_offsets_mapping=True)
        forced = [
            any(first <= max(0, at - 1) < last for first, last in spans)
            for at, _ in offsets["offset_mapping"]
        ]
        return ids, [IGNORE_INDEX if one else i for i, one in zip(ids, [*forced, False])]

    def _mark_answer(self, row, at: int, answer: list[int], qa: QA, scene: Scene | None) -> None:
        """Mark where the things of an answer that begins at `at` lie."""
        if scene is not None:
            tokens = self.tokenizer.convert_ids_to_tokens(answer)
            self._mark_items(row, at, tokens, qa.things, scene)
            self._mark_letters(row, at, tokens, qa.things or scene.things, scene)

    def _mark_items(self, row, at: int, tokens: list[str], things: tuple[Thing, ...], scene) -> None:
        """Mark in an answer that begins at `at` where the thing lies that comes next: before each item, and
        before its first coordinate."""
        ends = [i for i, token in enumerate(tokens) if token in (",", '"},')]
        if len(ends) != len(things) - 1:  # no things, or a tokenizer that splits otherwise
            return
        places = [place_of(thing, scene) for thing in things]
        row["noun_places"][at - 1] = places[0]
        for end, place in zip(ends, places[1:]):  # also where it is decided whether there is a next one
            row["noun_places"][at + end - 1 : at + end + 1] = place
        opened = [i for i, token in enumerate(tokens) if token == "Ġ["]
        for i, place in zip(opened, places):
            row["noun_places"][at + i] = place

    def _mark_letters(self, row, at: int, tokens: list[str], things: tuple[Thing, ...], scene) -> None:
        """Where each letter lies of those of the things that are spelled in an answer that begins at `at`."""
        spelled = "".join(token if len(token) == 1 else "-" for token in tokens)
        for word in things:
            found = [*re.finditer(rf"Ġ{word.name}(?![a-z])", spelled)] if word.kind == "word" else []
            if len(found) == 1:
                first = at + found[0].start()  # says the first letter next
                row["noun_places"][first : first + len(word.name)] = letter_places(word, scene)

    def blank_row(self, prefix) -> dict[str, np.ndarray]:
        places = np.full((self.config.sequence_length, 6), -1, np.int64)
        return super().blank_row(prefix) | {"noun_places": places}

    def mark_nouns(self, row, at: int, text: str, answer: int, scene: Scene) -> None:
        super().mark_nouns(row, at, text, answer, scene)
        for place, noun in self.nouns(text):
            if not noun.plural and len(things := meant(scene, noun)) == 1:
                row["noun_places"][at + place] = place_of(things[0], scene)
