"""`Session` against a fresh `generate`: the same tokens and cache whatever came before, at less work."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from generation.decoding import eager_step
from generation.prefix import FeatureCache
from generation.session import Session
from tests.invariants import assert_close
from tests.prompts import (
    NO_STOP,
    PER_TILE,
    SIDE,
    TILE_BYTES,
    ImageBlock,
    assert_holds,
    inputs_of,
    positions_of,
    record,
    shared,
    tiny_vlm,
    words,
)
from tests.tiny import IMAGE_ID, PAD_ID
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


# --- any sequence of turns


class Conversation:
    """A random conversation: `ACTIONS` change the history, and say what will happen to the next answer."""

    def __init__(self, model, seed: int, in_front: bool):
        self.random, self.model, self.in_front = random.Random(seed), model, in_front
        self.session = Session(model, FeatureCache(model, 3 * TILE_BYTES))
        self.history: list[int] = [ImageBlock(1)] if in_front else words(1, 3)
        self.turns = [len(self.history)]  # where each turn began
        self.held: list = []

    def new_words(self) -> list[int]:
        return [self.random.randrange(IMAGE_ID) for _ in range(self.random.randint(1, 6))]

    def ask(self) -> None:
        self.turns.append(len(self.history))
        if not self.in_front and self.random.random() < 0.4:
            self.history.append(ImageBlock(self.random.randrange(5)))
        self.history += self.new_words()

    def edit(self) -> None:
        place = self.random.randrange(len(self.history))
        old = self.history[place]
        self.history[place] = ImageBlock(old + 1) if isinstance(old, ImageBlock) else (old + 1) % IMAGE_ID

    def undo(self) -> None:
        if len(self.turns) > 1:
            del self.history[self.turns.pop() :]
        self.history += self.new_words()

    def again(self) -> None:
        self.history = self.history or self.new_words()

    def forget(self) -> None:
        self.session.reset()
        self.held = []
        self.ask()

    def other_images(self) -> None:
        self.history = [
            ImageBlock(part + 7) if isinstance(part, ImageBlock) else part for part in self.history
        ]
        self.history += self.new_words()

    ACTIONS = (ask, ask, ask, edit, undo, again, forget, other_images)

    def turn(self) -> None:
        self.random.choice(self.ACTIONS)(self)
        if len(self.history) > 150 or not any(not isinstance(part, ImageBlock) for part in self.history):
            self.history = [*([ImageBlock(2)] if self.in_front else []), *self.new_words()]
            self.turns = [1]
        new = self.random.randint(1, 8)
        inputs, options = inputs_of(self.history, self.in_front), {"max_new_tokens": new, **NO_STOP}
        expected = self.model.generate(**inputs, **options)[0].tolist()
        prompt = positions_of(self.history)
        stream = self.session.generate_stream(**inputs, **options)
        cut = self.random.randint(1, new) if self.random.random() < 0.3 else None
        got = []
        for column in stream:
            got += column.tolist()
            if len(got) == cut:
                break
        assert got == expected[: len(got)] and len(got) == (cut or new)
        if cut is None:
            result, reused = stream.result, min(shared(prompt, self.held), len(prompt) - 1)
            assert (result.reused, result.prefilled) == (reused, len(prompt) - reused)
            tiles = sum(isinstance(part, ImageBlock) for part in self.history)
            assert result.tiles_encoded + result.tiles_reused == tiles
            assert result.token_ids.tolist() == [expected] and result.prompt_tokens == [len(prompt)]
        self.held = prompt + got[:-1]
        assert self.session.held == len(self.held)
        assert self.session.feature_cache.size_in_bytes <= 3 * TILE_BYTES
        assert_holds(self.session, self.model, self.history + got, self.in_front)
        self.history += got


@pytest.mark.parametrize("placement", ["placeholder", "prefix"])
@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_turns_equals_fresh_answers(placement, seed):
    conversation = Conversation(tiny_vlm(placement), seed, placement == "prefix")
    for _ in range(25):
        conversation.turn()


# --- what is spared


def test_a_conversation_prefills_only_what_is_new(vlm, monkeypatch):
    session, history = Session(vlm), [*words(1, 5), ImageBlock(1), *words(2, 4)]
    passes, images, logits = record(monkeypatch, vlm)
    expected_new = len(positions_of(history))
    for turn in range(3):
        passes.clear(), logits.clear(), images.clear()
        result = session.generate_detailed(**inputs_of(history), max_new_tokens=6, **NO_STOP)
        # After the first turn: the answer's last token, which was never fed back, and five words.
        assert passes == [expected_new] + [1] * 5 and result.prefilled == expected_new
        assert images == ([1] if turn == 0 else [])
        assert (result.tiles_encoded, result.tiles_reused) == ((1, 0) if turn == 0 else (0, 1))
        kept = torch.cat(logits)
        logits.clear()
        fresh = vlm.generate(**inputs_of(history), max_new_tokens=6, **NO_STOP)
        assert torch.equal(result.token_ids, fresh)
        assert_close(kept, torch.cat(logits), "logits")
        history += [*result.rows()[0], *words(3 + turn, 5)]
        expected_new = 1 + 5


@pytest.mark.parametrize("placement", ["placeholder", "prefix"])
def test_many_questions_about_one_image(placement, monkeypatch):
    model = tiny_vlm(placement)
    session, in_front = Session(model), placement == "prefix"
    start = [ImageBlock(3), *words(1, 4)] if in_front else [*words(1, 4), ImageBlock(3), ImageBlock(4)]
    passes, images, _ = record(monkeypatch, model)
    for number in range(4):
        inputs = inputs_of([*start, 10 + number, *words(number, 3)], in_front)
        passes.clear()
        result = session.generate_detailed(**inputs, max_new_tokens=5, **NO_STOP)
        kept = len(positions_of(start)) if number else 0
        assert passes[0] == result.prefilled == len(positions_of(start)) + 4 - kept
        assert result.reused == kept
        assert torch.equal(result.token_ids, model.generate(**inputs, max_new_tokens=5, **NO_STOP))
    # The session encoded them once, the fresh calls each time.
    assert images == [1 if in_front else 2] * (1 + 4)


def test_the_same_prompt_again_computes_one_position(vlm):
    session, inputs = (
        Session(vlm),
        inputs_of([*words(1, 5), ImageBlock(1)]),
    )  # ends inside an image's features
    first = session.generate_detailed(**inputs, max_new_tokens=4, **NO_STOP)
    again = session.generate_detailed(**inputs, max_new_tokens=4, **NO_STOP)
    assert (again.reused, again.prefilled, again.tiles_encoded) == (8, 1, 1)
    assert torch.equal(first.token_ids, again.token_ids)
    assert_holds(session, vlm, [*words(1, 5), ImageBlock(1), *again.rows()[0]])


def test_a_tile_is_encoded_once_for_all_its_prompts(vlm, monkeypatch):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    _, images, _ = record(monkeypatch, vlm)
    prompts = [
        [1, ImageBlock(1), 2, ImageBlock(1)],
        [3, ImageBlock(1), ImageBlock(2), ImageBlock(3)],
        [4, ImageBlock(3), 5],
    ]
    results = [
        session.generate_detailed(**inputs_of(p), max_new_tokens=3, **NO_STOP) for p in [*prompts, prompts[0]]
    ]
    assert images == [1, 2]  # the missing ones of a prompt in one call
    assert [(r.tiles_encoded, r.tiles_reused) for r in results] == [(1, 1), (2, 1), (0, 1), (0, 2)]
    assert [r.reused for r in results] == [0] * 4
    for prompt, result in zip(prompts, results):
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(prompt), max_new_tokens=3, **NO_STOP))


# --- pixels count


def test_equal_ids_with_other_pixels_are_not_confused(vlm):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    answers, options = [], {"max_new_tokens": 12, **NO_STOP}
    for images in ((1, 2), (1, 3), (4, 3), (3, 4), (1, 2)):
        prompt = [*words(1, 6), ImageBlock(images[0]), 7, ImageBlock(images[1]), *words(2, 3)]
        result = session.generate_detailed(**inputs_of(prompt), **options)
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(prompt), **options))
        answers.append((result.reused, tuple(result.rows()[0])))
    assert [reused for reused, _ in answers] == [0, 6 + PER_TILE + 1, 6, 6, 6]
    assert len({ids for _, ids in answers}) == 4 and answers[0][1] == answers[-1][1]


def test_equal_pixels_with_another_mask_are_not_confused(vlm):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    inputs, results = inputs_of([1, ImageBlock(1), 2, ImageBlock(2), 3]), []
    for real in (SIDE, SIDE // 2, SIDE // 4, SIDE):
        mask = torch.zeros(1, 2, SIDE, SIDE, dtype=torch.int64)
        mask[0, 0, : SIDE // 2] = 1
        mask[0, 1, :, :real] = 1
        options = {"pixel_attention_mask": mask, "max_new_tokens": 8, **NO_STOP}
        results.append(session.generate_detailed(**inputs, **options))
        assert torch.equal(results[-1].token_ids, vlm.generate(**inputs, **options))
    assert [r.reused for r in results] == [0, 6, 6, 6]
    assert [r.tiles_encoded for r in results] == [2, 1, 1, 0]
    assert len({tuple(r.rows()[0]) for r in results}) == 3  # the mask can be told from the answer


# --- options


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"temperature": 0.7, "repetition_penalty": 1.5, "seed": 8},
        {"num_return_sequences": 3, "temperature": 1.0, "seed": 5},
        {"num_return_sequences": 2, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_sampling_is_that_of_generate(vlm, options):
    session, answers = Session(vlm), options.get("num_return_sequences", 1)
    for number in range(3):
        prompt = [*words(1, 5), ImageBlock(1), *words(number, 6)]
        result = session.generate_detailed(**inputs_of(prompt), max_new_tokens=20, **NO_STOP, **options)
        fresh = vlm.generate(**inputs_of(prompt), max_new_tokens=20, **NO_STOP, **options)
        assert torch.equal(result.token_ids, fresh)
        # Of several answers none is kept.
        assert session.held == len(positions_of(prompt)) + (19 if answers == 1 else 0)
        assert_holds(session, vlm, prompt + (result.rows()[0] if answers == 1 else []))


def test_stop_ids_and_a_replaced_step(vlm):
    session, inputs, calls = Session(vlm), inputs_of([*words(1, 5), ImageBlock(1), 9]), []
    free = vlm.generate(**inputs, max_new_tokens=10, **NO_STOP)[0].tolist()
    end = free.index(free[3]) + 1

    def step(*arguments):
        calls.append(1)
        return eager_step(vlm.language_model)(*arguments)

    options = {"max_new_tokens": 10, "stop_token_ids": (free[3],), "decode_step": step}
    result = session.generate_detailed(**inputs, **options)
    assert result.rows() == [free[:end]] and result.stop_reasons == ["stop"] and len(calls) == end - 1
    assert session.held == 10 + end - 1
    assert session.generate(**inputs, max_new_tokens=1).shape == (1, 1)


def test_the_checkpoints_stop_ids_are_the_default():
    model = tiny_vlm()
    torch.nn.init.zeros_(model.language_model.lm_head.weight)  # all logits equal: the first id, 0
    object.__setattr__(model.config, "eos_token_ids", (0,))
    assert Session(model).generate(**inputs_of([1, 2]), max_new_tokens=5).tolist() == [[0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_taken_off(vlm, side):
    session, ids = Session(vlm), inputs_of([*words(1, 5), ImageBlock(1), 9])
    expected = session.generate(**ids, max_new_tokens=5, **NO_STOP)
    gap = (3, 0) if side == "left" else (0, 3)
    padded = {
        "input_ids": torch.nn.functional.pad(ids["input_ids"], gap, value=PAD_ID),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids["input_ids"]), gap),
        "pixel_values": torch.cat((ids["pixel_values"], torch.zeros(1, 2, 3, SIDE, SIDE)), 1),
    }
    result = session.generate_detailed(**padded, max_new_tokens=5, **NO_STOP)
    assert torch.equal(result.token_ids, expected) and (result.reused, result.prompt_tokens) == (9, [10])


# --- threads


def test_threads_that_share_a_session_wait_for_each_other(vlm):
    """The second asks while the first is in the middle of a step: both get the answers of a fresh model."""
    prompts = [inputs_of(words(seed, 6)) for seed in (1, 2)]
    expected = [vlm.generate(**prompt, max_new_tokens=6, **NO_STOP) for prompt in prompts]
    session, got, second_is_there = Session(vlm), {}, threading.Event()
    eager = eager_step(vlm.language_model)

    def step(token_ids, kv_cache, start_pos):
        if threading.current_thread() is threads[0]:
            if not threads[1].ident:
                threads[1].start()
            second_is_there.wait(0.05)
        else:
            second_is_there.set()
        return eager(token_ids, kv_cache, start_pos)

    def ask(index: int):
        got[index] = session.generate(**prompts[index], max_new_tokens=6, **NO_STOP, decode_step=step)

    threads = [threading.Thread(target=ask, args=[index]) for index in (0, 1)]
    threads[0].start()
    threads[0].join(PATIENCE)
    threads[1].join(PATIENCE)
    assert [got[index].tolist() for index in (0, 1)] == [tokens.tolist() for tokens in expected]


def test_a_streamed_answer_that_another_thread_cut_short_says_so(vlm):
    session, options = Session(vlm), {"max_new_tokens": 6} | NO_STOP
    stream = session.generate_stream(**inputs_of(words(1, 6)), **options)
    next(iter(stream))
    other = threading.Thread(target=session.generate, kwargs=inputs_of(words(2, 6)) | options)
    other.start()
    other.join(PATIENCE)
    with pytest.raises(ValueError, match="unfinished"):
        stream.drain()
