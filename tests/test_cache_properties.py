"""Random conversations through a `Session`, and random batches through a `Scheduler`'s slots.

Both own a cache between calls. Whatever they took from it, each token they give must be the best one by the
logits of a pass that keeps nothing, within 1e-5 of the largest; and a session's cache must hold what one pass
over its prompt would have left. `OCELLI_SEQUENCES` sets how many are tried (default 30, of 12 steps each).
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from functools import cache
from typing import ClassVar

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep
from generation.options import GenerationOptions
from generation.prefix import FeatureCache
from generation.requests import Request
from generation.session import Session
from tests.invariants import TOLERANCE, run_all, session_holds
from tests.prompts import NO_STOP, TILE_BYTES, ImageBlock, inputs_of, length_of, tiny_vlm, words
from tests.tiny import IMAGE_ID

STEPS = ("eager", "native", "graph")
LONGEST = 120
SETTINGS = settings(
    max_examples=int(os.environ.get("OCELLI_SEQUENCES", "30")),
    stateful_step_count=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@cache
def the_model():
    return tiny_vlm(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)


@cache
def step_of(kind: str):
    """None for the eager step, and where there is no compiler."""
    try:
        make = {"eager": lambda model: None, "native": NativeStep, "graph": GraphStep}[kind]
        return make(copy.deepcopy(the_model()).language_model)
    except NoCompiler:
        return None


@torch.no_grad()
def assert_greedy(prompt: list[int], answer: list[int]) -> None:
    """Each token of an answer is the best one by the logits of one uncached pass."""
    model = the_model()
    hidden, _ = model.hidden_states(**inputs_of([*prompt, *answer[:-1]]))
    logits = model.language_model.logits(hidden[0, -len(answer) :])
    best, got = logits.amax(-1), logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    error = ((best - got) / logits.abs().amax().clamp(min=1)).max().item()
    assert error <= TOLERANCE, f"a token of {answer} is {error:.1e} below the best one of an uncached pass"


class Conversations(RuleBasedStateMachine):
    """A conversation that is gone on with, edited, shortened, broken off and forked."""

    done: ClassVar[Counter] = Counter()

    @initialize(step=st.sampled_from(STEPS))
    def begin(self, step: str) -> None:
        model = the_model()
        self.step = step_of(step)
        self.session = Session(model, FeatureCache(model, 2 * TILE_BYTES))
        self.history = self.start()

    def start(self) -> list[int]:
        return words(1, 3)

    @rule(seed=st.integers(0, 50), count=st.integers(1, 6), image=st.none() | st.integers(0, 3))
    def say(self, seed: int, count: int, image: int | None) -> None:
        if image is not None:
            self.history.append(ImageBlock(image))
        self.history += words(seed, count)
        self.done.update(("grow",))

    @rule(data=st.data())
    def edit(self, data) -> None:
        place = data.draw(st.integers(0, len(self.history) - 1))
        old = self.history[place]
        self.history[place] = ImageBlock(old + 1) if isinstance(old, ImageBlock) else (old + 1) % IMAGE_ID
        self.done.update(("rewind",))

    @rule(data=st.data())
    def shorten(self, data) -> None:
        del self.history[data.draw(st.integers(1, len(self.history))) :]
        if all(isinstance(part, ImageBlock) for part in self.history):
            self.history += words(7, 1)
        self.done.update(("rewind",))

    @rule()
    def forget(self) -> None:
        self.session.reset()
        self.done.update(("reset",))

    @rule(new=st.integers(1, 6), answers=st.sampled_from((1, 1, 1, 2)), cut=st.none() | st.integers(1, 5))
    def ask(self, new: int, answers: int, cut: int | None) -> None:
        if length_of(self.history) > LONGEST:
            self.history = self.start()
        inputs = inputs_of(self.history)
        options = {"max_new_tokens": new, "num_return_sequences": answers, "decode_step": self.step}
        columns = []
        for column in self.session.generate_stream(**inputs, **options, **NO_STOP):
            columns.append(column)
            if len(columns) == cut:
                break
        rows = torch.stack(columns, 1).tolist()
        for row in rows:
            assert_greedy(self.history, row)
        self.history += rows[0]
        session_holds(self.session, the_model(), self.history)
        self.done.update(("answer" if answers == 1 else "fork",))


# ------------------------------------------------------------------------------------------------- batches
@st.composite
def batches(draw) -> dict:
    """Prompts that begin alike or not, some with images, more of them than slots or fewer."""
    beginnings = [[], words(3, 36), words(4, 40), words(3, 36)[:34]]
    prompts = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = list(draw(st.sampled_from(beginnings)))
        image = draw(st.none() | st.integers(0, 2))
        if image is not None:
            prompt.append(ImageBlock(image))
        prompt += words(draw(st.integers(0, 20)), draw(st.integers(1, 9)))
        prompts.append((prompt, draw(st.integers(1, 7))))
    return {
        "prompts": prompts,
        "slots": draw(st.integers(1, 4)),
        "step": draw(st.sampled_from(STEPS)),
        "stops": tuple(draw(st.sets(st.integers(0, IMAGE_ID - 1), max_size=20))),
    }


def test_conversations():
    Conversations.done.clear()
    run_state_machine_as_test(Conversations, settings=SETTINGS)
    assert all(Conversations.done[what] for what in ("answer", "fork", "grow", "rewind", "reset"))


@SETTINGS
@given(case=batches())
def test_batches(case: dict) -> None:
    model = the_model()
    requests = [
        Request(
            inputs["input_ids"][0],
            inputs.get("pixel_values"),
            options=GenerationOptions(max_new_tokens=new, stop_token_ids=case["stops"]),
            key=key,
        )
        for key, (prompt, new) in enumerate(case["prompts"])
        for inputs in [inputs_of(prompt)]
    ]
    step = step_of(case["step"])
    answers, _ = run_all(model, requests, case["slots"], decode_step=step)
    for key, (prompt, new) in enumerate(case["prompts"]):
        done = answers[key]
        assert done.error is None, done.error
        ids, stopped = done.token_ids, done.token_ids[-1] in case["stops"]
        assert done.stop_reason == ("stop" if stopped else "length") and (stopped or len(ids) == new)
        assert not {*ids[:-1]} & {*case["stops"]}
        assert_greedy(prompt, ids)
