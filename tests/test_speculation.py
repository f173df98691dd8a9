"""Tokens that are proposed and verified together are those that would have come one at a time."""

import random
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from generation.fast.native.step import NativeStep
from generation.options import GenerationOptions, NotFiniteError
from generation.sampling import Row
from generation.session import Session
from generation.speculation import MOST, PromptLookup, propose, proposer_of
from generation.steps import Step
from tests.invariants import fast_step
from tests.prompts import NO_STOP, ImageBlock, inputs_of, tiny_vlm, words
from tests.tiny import IMAGE_ID, VOCAB


class Counted(Step):
    """A step that counts: `calls` lists the positions of each pass. Chunks are those of the step, or single
    steps one after another."""

    def __init__(self, step, stepwise: bool = False):
        self._step, self._stepwise, self.same_bits, self.calls = step, stepwise, True, []

    def __call__(self, token_ids, kv_cache, start_pos, offset=0):
        self.calls.append(1)
        return self._step(token_ids, kv_cache, start_pos, offset)

    def prefill(self, *prompt):
        return self._step.prefill(*prompt)

    def chunk(self, token_ids, kv_cache, start_pos, offset=0):
        self.calls.append(token_ids.shape[1])
        if not self._stepwise:
            return self._step.chunk(token_ids, kv_cache, start_pos, offset)
        columns = enumerate(token_ids.split(1, 1))
        return torch.stack(
            [self._step(ids, kv_cache, start_pos + place, offset) for place, ids in columns], 1
        )


def stepwise(vlm) -> Counted:
    return Counted(Step(vlm.language_model), stepwise=True)


@pytest.fixture(scope="module", params=["stepwise", "eager", "native"])
def way(request) -> tuple:
    """(a model, what makes a step of it)."""
    vlm = tiny_vlm()
    if request.param == "stepwise":
        return vlm, stepwise
    step = fast_step(vlm, NativeStep) if request.param == "native" else Step(vlm.language_model)
    return vlm, lambda _: Counted(step)


class Guess:
    """Proposes by a rule: (ids so far) -> ids."""

    def __init__(self, rule):
        self._rule = rule

    def propose(self, tokens, alone):
        return self._rule(tokens)


def offer(monkeypatch, proposer: Guess) -> None:
    """Have this one propose."""
    monkeypatch.setattr("generation.scheduler.proposer_of", lambda *about: proposer)


REPEATING = [*words(1, 9), ImageBlock(1), *words(2, 3), *words(2, 3), *words(1, 9)]
SAMPLINGS = {
    "greedy": {},
    "filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 2},
    "greedy with a penalty": {"repetition_penalty": 1.1},
    "greedy with counts": {"frequency_penalty": 0.05, "presence_penalty": 0.05},
}


def outputs(way, prompt, proposer=None, **options):
    """(output without proposals, output with), of the same tokens."""
    vlm, make_step = way
    step, single = make_step(vlm), make_step(vlm)
    plain = vlm.generate_detailed(**inputs_of(prompt), lookup="off", decode_step=single, **options)
    assert plain.decode_steps == len(single.calls) == sum(single.calls)
    with pytest.MonkeyPatch.context() as patch:
        if proposer is not None:
            offer(patch, proposer)
        offered = Session(vlm).generate_detailed(
            **inputs_of(prompt), lookup="on", decode_step=step, **options
        )
    assert offered.rows() == plain.rows() and offered.stop_reasons == plain.stop_reasons
    assert offered.decode_steps == len(step.calls) == plain.decode_steps - offered.accepted_tokens
    assert offered.proposed_tokens == sum(step.calls) - len(step.calls)
    return plain, offered


def guesses(answer: list[int]) -> dict:
    """Rules of proposers that know the answer, and use it or not."""
    chance = random.Random(0)

    def mixed(ids):
        return [
            chance.choice((token_id, 3)) for token_id in answer[len(ids) : len(ids) + chance.randrange(9)]
        ]

    return {
        "right": lambda ids: answer[len(ids) : len(ids) + 4],
        "wrong": lambda ids: [(token_id + 1) % VOCAB for token_id in [*answer, 0][len(ids) :][:4]],
        "right and more": lambda ids: answer[len(ids) :] + [7] * 50,
        "by chance": mixed,
        "none": lambda ids: [],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guess", "sampling"),
    [("by chance", sampling) for sampling in SAMPLINGS]
    + [(guess, "filters") for guess in ("right", "wrong", "right and more", "none")],
)
def test_tokens_are_those_of_single_steps(way, sampling, guess):
    options = SAMPLINGS[sampling] | {"max_new_tokens": 30}
    free = way[0].generate(**inputs_of(REPEATING), **options, **NO_STOP)[0].tolist()
    for stop_ids in [(), (free[0],), (free[7],), (free[17], free[25])]:
        proposer = Guess(guesses(free)[guess])
        plain, offered = outputs(way, REPEATING, proposer, stop_token_ids=stop_ids, **options)
        if guess == "right":
            assert offered.decode_steps == -(-plain.decode_steps // 5)
        if guess in ("wrong", "none"):
            assert offered.accepted_tokens == 0


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("new", [1, 40])
def test_looked_up_tokens_are_those_of_single_steps(way, sampling, new):
    for seed in range(2):
        prompt = [*words(seed, 12), ImageBlock(seed), *words(seed, 12)]
        outputs(way, prompt, max_new_tokens=new, **SAMPLINGS[sampling])


class Toll:
    """A constraint: of ten tokens three are forced, and five have even ids."""

    thinking = full = False
    choice = None

    def __init__(self):
        self._count = 0

    def close(self, scores):
        pass

    def allows(self, token_id):
        return token_id in self.forced()[:1] if self.forced() else token_id % 2 == 0 or self._count % 10 > 4

    def mask(self, scores):
        scores[[not self.allows(token_id) for token_id in range(len(scores))]] = -torch.inf

    def accept(self, token_id):
        self._count += 1

    def forced(self):
        return [20, 21, 22][self._count % 10 - 7 :] if self._count % 10 > 6 else []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_looked_up_stands_beside_what_is_forced(way, sampling):
    vlm, make_step = way
    options = {"max_new_tokens": 40, "constraint": Toll, **SAMPLINGS[sampling], **NO_STOP}
    made = [
        Session(vlm).generate_detailed(
            **inputs_of(REPEATING), decode_step=make_step(vlm), lookup=lookup, **options
        )
        for lookup in ("off", "on")
    ]
    assert made[0].rows() == made[1].rows()
    assert made[0].accepted_tokens == made[0].proposed_tokens == 11  # what is forced is right
    assert sampling != "greedy" or made[1].accepted_tokens > 11


def test_lookup_by_itself_is_for_a_row_that_is_decoded_alone():
    rows = [Row(GenerationOptions(stop_token_ids=()), torch.tensor([1, 2, 3, 4] * 9)) for _ in range(2)]
    for row in rows:
        row.proposer = proposer_of(row, SimpleNamespace(same_bits=True), None)
        row.tokens = [1, 2, 3]
    assert propose(rows, 9) == [[], []]
    assert propose(rows[:1], 9)[0][:1] == [4]
    rows[1].proposer = None
    assert propose(rows, 9)[0] == []


def test_logits_that_are_not_finite_are_reported_for_their_token(vlm):
    class Breaks(Counted):
        def chunk(self, *arguments):
            logits = super().chunk(*arguments)
            logits[:, 2:] = torch.nan
            return logits

    step = Breaks(Step(vlm.language_model))
    answer = vlm.generate(**inputs_of(REPEATING), max_new_tokens=9, **NO_STOP)[0].tolist()
    for options in ({}, NO_STOP):
        right = Guess(lambda ids: answer[len(ids) :][:4])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NotFiniteError) as failed:
            offer(patch, right)
            Session(vlm).generate(**inputs_of(REPEATING), max_new_tokens=9, decode_step=step, **options)
        assert failed.value.token == 4  # one from the prompt's logits, then two


# ------------------------------------------------------------------------------------- what is proposed


def found(prompt: list[int], *new_ids: list[int]) -> list[int]:
    lookup = PromptLookup(torch.tensor(prompt), IMAGE_ID)
    return [lookup.propose(ids, True) for ids in accumulate(new_ids)][-1]


def test_what_followed_the_longest_and_latest_match_is_proposed():
    assert found([1, 2, 3, 4, 5, 9, 2, 3, 7, 8], [6, 2, 3])[:2] == [7, 8]
    assert found([1, 2, 3, 4, 5, 9, 2, 3, 7, 8], [1, 2, 3])[:2] == [4, 5]
    assert found([1, 2, 3], [8, 9, 8, 9]) == [8, 9] * (MOST // 2)
    assert found([1, 2, 3], [4], [5], [4, 5])[:2] == [4, 5]
    assert found([1, 2, 3], [3], [1]) == found([], [1]) == found([], [1, 2]) == []


def test_images_are_neither_matched_nor_proposed():
    image = [IMAGE_ID] * 4
    assert found([*image, *image, 1, *image], image) == []
    assert found([1, 2, 3, 4, *image, 5], [1, 2]) == [3, 4]
    assert found([1, 2, *image, 5], [1, 2]) == []


# -------------------------------------------------------------------------------------- what is likely


def passes(prompt: list[int], answer: list[int]) -> list[tuple[int, int]]:
    """(ids proposed, ids of them that were right) of each pass of an answer."""
    lookup = PromptLookup(torch.tensor(prompt), IMAGE_ID, always=False)
    done, seen = 1, []
    while done < len(answer):
        ids = lookup.propose(answer[:done], True)[: len(answer) - done - 1]
        right = next((n for n, token in enumerate(ids) if token != answer[done + n]), len(ids))
        done += right + 1
        seen.append((len(ids), right))
    return seen


def test_what_repeats_is_proposed_whole_and_takes_a_quarter_of_the_passes():
    text = [random.Random(0).randrange(5, 150) for _ in range(200)]
    seen = passes(text, text)
    assert len(seen) < len(text) / 4 and seen[-3][0] == MOST


@pytest.mark.parametrize("start", [0, 60])
def test_pairs_that_are_followed_by_something_else_each_time_are_left_alone_soon(start):
    """Also after proposals that were right: what they cost is bounded, whatever a pass costs."""
    text = list(range(100, 160))
    wrong = [token for number in range(150) for token in (7, 8, 1000 + number)]
    seen = passes(text, [*text[:start], *wrong])
    costly = [proposed for proposed, right in seen if proposed > right]
    assert len(costly) < 30 and seen[-100:] == [(0, 0)] * 100
