"""Random conversations through sessions, and random requests through a `Scheduler`'s slots.

Both own a cache between calls, and share kept prefixes, in memory and in files that get damaged.
Whatever they took from there, each token they give must have the probabilities that a pass without a cache
gives it, within 1e-5 of the logits' spread, and be the best one by them. Models differ in what their layers
keep: keys and values, inputs of short convolutions, states that do not forget.

    OCELLI_SEQUENCES=3000 python -m pytest tests/test_cache_properties.py        # so many of each
    OCELLI_SEQUENCES=217-218 python -m pytest tests/test_cache_properties.py     # by their numbers
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from linecache import getline
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import TokenLogprobs
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep
from generation.features import FeatureCache
from generation.options import GenerationOptions
from generation.prefix_store import PrefixStore
from generation.protocol import Proposer
from generation.requests import NewTokens, Request
from generation.sampling import Row
from generation.scheduler import Scheduler
from generation.session import Session
from generation.slots import SlotCache
from generation.speculation import proposer_of
from inference.draft import Draft
from inference.kept import PrefixFolder
from tests.invariants import MODELS, TOLERANCE, assert_close, session_holds
from tests.prompts import NO_STOP, TILE_BYTES, ImageBlock, inputs_of, length_of, packed, tiny_vlm, words
from tests.test_draft import ALWAYS
from tests.tiny import IMAGE_ID, VOCAB

STEPS = ("eager", "native", "graph")
LONGEST = 120
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "attention": SMALL,
    "short convolutions": SMALL | {"layer_types": ("conv", "attention", "conv"), "num_hidden_layers": 3},
    "Qwen3.5": MODELS["Qwen3.5"]
    | SMALL
    | {"layer_types": ("delta", "attention", "delta"), "num_hidden_layers": 3, "head_dim": 12}
    | {"rms_norm_eps": 1e-2},  # else a head's result near 0 becomes one of its size, rounding errors and all
}
_first, _, _end = os.environ.get("OCELLI_SEQUENCES", "20").rpartition("-")
FIRST, END = int(_first or 0), int(_end)


def sequences(about: str) -> Iterator[random.Random]:
    """What the sequences that are tried draw from. One that fails says its number."""
    for number in range(FIRST, END):
        try:
            yield random.Random(f"{about} {number}")
        except BaseException as error:
            error.add_note(f"sequence {number}")
            raise


@cache
def model_of(kind: str):
    return tiny_vlm(**KINDS[kind])


@cache
def step_of(model: str, kind: str):
    """None for the eager step, and where there is no compiler, or none for such a model."""
    try:
        make = {"eager": lambda model: None, "native": NativeStep, "graph": GraphStep}[kind]
        return make(copy.deepcopy(model_of(model)).language_model)
    except (NoCompiler, ValueError):
        return None


def given_to(model, prompt: list[int]) -> dict[str, Any]:
    """Inputs of a prompt, with images as the model's family has them."""
    inputs = inputs_of(prompt)
    return packed(inputs) if model.config.family == "qwen3_5" else inputs


@torch.no_grad()
def assert_right(
    model, prompt: list[int], answer: list[int], reports: Sequence[TokenLogprobs] | None = None
) -> None:
    """Each token of an answer is the best one by the logits of one uncached pass, and reported so."""
    hidden, _ = model.hidden_states(**given_to(model, [*prompt, *answer[:-1]]))
    logits = model.language_model.logits(hidden[0, -len(answer) :])
    best, got = logits.amax(-1), logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    spread = (logits.amax() - logits.amin()).item()
    error = (best - got).max().item() / spread
    assert error <= TOLERANCE, f"a token of {answer} is {error:.1e} below the best one of an uncached pass"
    for place, (report, row) in enumerate(zip(reports or (), logits.log_softmax(-1))):
        ids, reported = zip(*report.top)
        error = (row[list(ids)] - torch.tensor(reported)).abs().max().item() / spread
        assert len(ids) == VOCAB and error <= TOLERANCE, f"logits {place} of {answer} differ by {error:.1e}"


class Guesses:
    """Proposes what follows, right up to a random place and wrong from there on."""

    def __init__(self, answer: Sequence[int], seed: int):
        self._answer, self._draw = answer, random.Random(seed)

    def propose(self, tokens: list[int], alone: bool) -> list[int]:
        ids = [*self._answer[len(tokens) :], *range(40)][: self._draw.choice((0, 3, 40))]
        right = self._draw.choice((0, 1, 5, 40))
        return [*ids[:right], *((one + 1) % IMAGE_ID for one in ids[right:])]


@contextmanager
def guessing(answers: dict[tuple[int, ...], list[int]], seed: int) -> Iterator[None]:
    """Have `Guesses` propose for rows whose prompts these are."""

    def guessing_of(row: Row, *about) -> Proposer | None:
        answer = answers.get(tuple(row.prompt_ids.tolist()))
        return proposer_of(row, *about) if answer is None else Guesses(answer, seed)

    with patch("generation.scheduler.proposer_of", guessing_of):
        yield


@contextmanager
def interrupted(after: int | None, *where: str) -> Iterator[None]:
    """Ctrl-C once so many lines of functions, whose "file:name" has one of these, have run; not in the line
    that leaves a `with`, where no signal arrives."""
    left = after

    def traced(frame, event, argument):
        nonlocal left
        file = frame.f_code.co_filename
        if event == "call":
            name = f"{file}:{frame.f_code.co_name}"
            return traced if any(part in name for part in where) else None
        left -= event == "line"
        if left < 0 and not getline(file, frame.f_lineno).lstrip().startswith("with "):
            raise KeyboardInterrupt
        return traced

    before = sys.gettrace()
    if after is not None:
        sys.settrace(traced)
    try:
        yield
    except KeyboardInterrupt:
        assert left is not None and left < 0
    finally:
        sys.settrace(before)


class Conversation:
    """One that is gone on with, edited, shortened, broken off, interrupted and forked, in one process after
    another."""

    def __init__(self, draw: random.Random, folder: Path, done: Counter[str]):
        kind = draw.choice([*KINDS, "Qwen3.5"])
        self.draw, self.folder, self.done = draw, folder, done
        self.model, self.step = model_of(kind), step_of(kind, draw.choice(STEPS))
        self.features = FeatureCache(self.model, 2 * TILE_BYTES)
        self.kept, self.store = draw.choice((None, 3000, 10**6)), None
        self.history = words(1, 3)
        self.restart()

    def restart(self) -> None:
        """Another process, which finds what is in the folder."""
        self.close()
        if self.kept is not None:
            self.files = PrefixFolder(self.folder, 10 * self.kept)
            self.store = PrefixStore(self.model, self.kept, self.files, b"these weights")
        self.session = Session(self.model, self.features, self.store)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def damage(self) -> None:
        """A file of a kept prefix is lost, or has another bit."""
        if self.store is not None:
            self.files.flush()
            self.store.drop()
            if files := sorted(self.folder.glob("*.safetensors")):
                file = self.draw.choice(files)
                if self.draw.random() < 0.5:
                    file.unlink()
                else:
                    file.write_bytes(file.read_bytes()[:-1] + b"?")

    def reset(self) -> None:
        self.session.reset()

    def say(self) -> None:
        self.history += [ImageBlock(self.draw.randrange(4))] if self.draw.random() < 0.4 else []
        self.history += words(self.draw.randrange(50), self.draw.randint(1, 40))

    def edit(self) -> None:
        place = self.draw.randrange(len(self.history))
        old = self.history[place]
        self.history[place] = ImageBlock(old + 1) if isinstance(old, ImageBlock) else (old + 1) % IMAGE_ID

    def shorten(self) -> None:
        self.history[self.draw.randint(1, len(self.history)) :] = words(7, 1)

    def ask(self) -> None:
        draw, model = self.draw, self.model
        if length_of(self.history) > LONGEST:
            self.history = words(1, 3)
        inputs, new = given_to(model, self.history), draw.choice((1, 2, 3, 5, 8, 40))
        options: dict[str, Any] = {"max_new_tokens": new, "decode_step": self.step, **NO_STOP}
        options["prefill_chunk"] = draw.choice((None, draw.randint(1, 40)))
        known = {}
        if guesses := draw.random() < 0.3:
            answer = model.generate_detailed(**inputs, **options)
            known[(*inputs["input_ids"][0].tolist(),)] = answer.rows()[0]
        answers = draw.choice((1, 1, 1, 3))
        if reported := draw.random() < 0.7:
            options["logprobs"] = VOCAB
        interrupt = draw.randrange(8000) if draw.random() < 0.3 else None
        drafted = answers == 1 and draw.random() < 0.2
        columns, stream, cut = list[Tensor](), None, draw.choice((None, None, draw.randint(1, 9)))
        always = patch.multiple("inference.draft", **ALWAYS)
        with always, guessing(known, draw.randrange(99)), interrupted(interrupt, "/generation/", "/models/"):
            if drafted:
                short, most = given_to(model, [ImageBlock(9), 5]), draw.randrange(5)
                for number, _ in enumerate(Draft(self.session, inputs, short, GenerationOptions(**options))):
                    if number == most:
                        break
            stream = self.session.generate_stream(**inputs, **options, num_return_sequences=answers)
            for column in stream:
                columns.append(column)
                if len(columns) == cut:
                    break
        result = None if stream is None else stream.result
        if columns:
            rows = torch.stack(columns, 1).tolist()
            reports = result.logprobs if reported and result else [()] * answers
            for row, report in zip(rows, reports):
                assert_right(model, self.history, row, report)
            self.history += rows[0]
            ahead = guesses and result is None  # it may hold more than it gave
            if interrupt is None and not ahead:
                session_holds(self.session, model, given_to(model, self.history), 1e-4)  # no logits yet
        kinds = {"guesses": guesses, "interrupt": interrupt, "draft": drafted, "fork": answers > 1}
        self.done.update(kind for kind, is_so in kinds.items() if is_so)
        self.done["reused"] += self.session.reuse.get("reused", 0) > 0


CHANGES = ("ask",) * 6 + ("say",) * 3 + ("edit", "shorten", "restart", "reset", "damage")


@pytest.mark.slow
def test_conversations(tmp_path):
    done = Counter[str]()
    for number, draw in enumerate(sequences("conversation")):
        (tmp_path / str(number)).mkdir()
        conversation = Conversation(draw, tmp_path / str(number), done)
        try:
            for _ in range(12):
                what = draw.choice(CHANGES)
                getattr(conversation, what)()
                done[what] += 1
        finally:
            conversation.close()
        shutil.rmtree(tmp_path / str(number))
    print(done)
    assert len(done) == 12


@pytest.mark.slow
def test_batches():
    """Requests that begin alike or not, more of them than slots or fewer; some are given up, and what is held
    is given back in between."""
    alike = [[], words(3, 36), words(4, 40), words(3, 34), [*words(3, 20), ImageBlock(1), *words(6, 30)]]
    for draw in sequences("batch"):
        kind, stops = draw.choice([*KINDS, "Qwen3.5"]), draw.sample(range(IMAGE_ID), draw.randint(0, 20))
        model, step = model_of(kind), step_of(kind, draw.choice(STEPS))
        prompts, queue, known = [], [], {}
        for key in range(draw.randint(1, 7)):
            image = [ImageBlock(draw.randrange(3))] if draw.random() < 0.5 else []
            prompt = [*draw.choice(alike), *image, *words(draw.randrange(20), draw.randint(1, 30))]
            inputs, new = given_to(model, prompt), draw.choice((1, 4, 12, 40))
            options = GenerationOptions(max_new_tokens=new, stop_token_ids=stops, logprobs=VOCAB)
            if draw.random() < 0.4:
                answer = model.generate(**inputs, options=options)[0].tolist()
                known[(*inputs["input_ids"][0].tolist(),)] = answer
            queue.append(
                Request(inputs["input_ids"][0], inputs.get("pixel_values"), options=options, key=key)
            )
            prompts.append((prompt, new))
        store = PrefixStore(model, draw.choice((3000, 10**6))) if draw.random() < 0.6 else None
        chunk, given_up = draw.choice((None, draw.randint(1, 40))), {draw.randrange(9)}
        scheduler = Scheduler(model, draw.randint(1, 4), step, None, chunk, store)
        scheduler.lag = draw.randrange(2)
        reports, done = {key: [] for key in range(len(queue))}, {}
        with guessing(known, draw.randrange(99)):
            while queue or not scheduler.idle:
                while queue and scheduler.free and (scheduler.idle or draw.random() < 0.7):
                    scheduler.add(queue.pop(0))
                for event in scheduler.step():
                    if isinstance(event, NewTokens):
                        reports[event.key] += event.logprobs
                    else:
                        done[event.key] = event
                if draw.random() < 0.1:
                    scheduler.give_back()
                if draw.random() < 0.2:
                    for key in given_up:
                        scheduler.cancel(key)
        assert done.keys() >= {*range(len(prompts))} - given_up
        for key, output in done.items():
            prompt, new = prompts[key]
            assert output.error is None, output.error
            ids, stopped = output.token_ids, output.token_ids[-1] in stops
            assert output.stop_reason == ("stop" if stopped else "length") and (stopped or len(ids) == new)
            assert not {*ids[:-1]} & {*stops}
            assert_right(model, prompt, ids, reports[key])


@torch.no_grad()
def assert_slots_hold(model, cache: SlotCache) -> None:
    """A slot has what its keys say, which are all text, and a row can go on wherever it says."""
    for slot, filled in enumerate(cache.filled):
        ids = cache.keys(slot)
        for end in {filled, filled // 16 * 16, *cache.snapshots[slot]}:
            if not 0 < cache.resumed(slot, end) == end:
                continue
            x = model.language_model.embed_tokens(torch.cat((ids[:end], torch.tensor([7])))[None])
            expected, _ = model.language_model(x)
            other = copy.copy(cache)
            other.kv_cache = kv.fork(cache.kv_cache, cache.capacity, 1, cache.capacity + 1)
            other.filled, other._states_at = list(cache.filled), list(cache._states_at)
            other.snapshots, other._keys = list(map(dict, cache.snapshots)), cache._keys.clone()
            other._hold(slot, ids[:end], slot, end)
            row = kv.view(other.kv_cache, end + 1, slot, 1)
            got, _ = model.language_model(x[:, -1:], kv_cache=row, start_pos=end)
            assert_close(got, expected[:, -1:], f"slot {slot}, position {end} of {filled}")


FILES = ("slots", "kv_cache")


def text_request(key: int, ids: list[int], new: int) -> Request:
    options = GenerationOptions(max_new_tokens=new, stop_token_ids=())
    return Request(torch.tensor(ids), options=options, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "Qwen3.5"])
def test_ctrl_c_at_any_line_that_changes_slots_leaves_them_true(kind):
    """While rows come, share, leave and are moved to the front."""
    model, start = model_of(kind), words(1, 45)
    prompts = [(words(2, 40), 2), (start, 6), ([*start[:40], *words(4, 9)], 4)]
    changing = ("take", "_hold", "move", "restore", "keep", "put", "compute", "copy", "_copy")
    line, over = 0, False
    while not over:
        scheduler = Scheduler(model, 3, prefill_chunk=24)
        for key, (ids, new) in enumerate(prompts):
            scheduler.add(text_request(key, ids, new))
        with interrupted(line, *(f"{file}.py:{name}" for file in FILES for name in changing)):
            while not scheduler.idle:
                scheduler.step()
            over = True
        for key in range(3):
            scheduler.cancel(key)
        assert_slots_hold(model, scheduler.cache)
        line += 4
    assert line > 50


@pytest.mark.parametrize("kind", ["attention", "Qwen3.5"])
def test_a_full_slot_holds_what_it_says(kind, monkeypatch):
    """Where tokens are read a step late, a row that has ended idles beside one that decodes: here at the very
    end of its slot."""
    monkeypatch.setattr(kv, "STEP", 64)
    model = model_of(kind)
    scheduler = Scheduler(model, 2)
    scheduler.lag = 1
    scheduler.add(text_request(0, words(0, 50), 15))
    scheduler.add(text_request(1, words(1, 40), 16))
    while not scheduler.idle:
        scheduler.step()
    assert_slots_hold(model, scheduler.cache)
