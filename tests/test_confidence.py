"""Confidence and log-probabilities: those of their definitions, from every way to an answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from generation.draws import adjusted_scores
from generation.fast.cuda import graph
from generation.options import GenerationOptions
from generation.requests import NewTokens, Request, RequestOutput
from generation.scheduler import Scheduler
from tests import invariants
from tests.graph_cases import tape_graphs
from tests.prompts import NO_STOP, some_rows, tiny_vlm
from tests.test_scheduler_steps import Pattern

CLOSE = {"rel": 1e-4, "abs": 1e-6}


@pytest.fixture(autouse=True)
def taped(monkeypatch):
    """A tape for a graph."""
    monkeypatch.setattr(graph, "no_triton", lambda language_model, rows: "it is a test")
    tape_graphs(monkeypatch)


def logprobs_of(vlm, inputs: dict, ids: list[int], constraint=None) -> tuple[torch.Tensor, list[bool]]:
    """(T, V) log-probabilities from one pass over prompt and answer, within a constraint; and whether it left
    a choice."""
    start = inputs["input_ids"].shape[1]
    with torch.no_grad():
        x = vlm.embed(torch.cat((inputs["input_ids"], torch.tensor([ids])), 1), inputs.get("pixel_values"))
        hidden, _ = vlm.language_model(x)
        scores, free = vlm.language_model.logits(hidden)[0, start - 1 : -1].double(), [True] * len(ids)
    for number, token_id in enumerate(ids) if constraint is not None else ():
        free[number] = not constraint.forced()
        constraint.mask(scores[number])
        constraint.accept(token_id)
    return scores.log_softmax(-1), free


def assert_told(reports: list, ids: list[int], expected: torch.Tensor, free: list[bool]) -> None:
    """The model's own, whatever the sampler filters out; of what a constraint forced there are none."""
    assert len(reports) == len(ids)
    for report, token_id, row, asked in zip(reports, ids, expected, free, strict=True):
        assert report.logprob == (pytest.approx(row[token_id].item(), **CLOSE) if asked else None)
        likeliest = row.topk(len(report.top))
        assert [one for one, _ in report.top] == likeliest.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(likeliest.values.tolist(), **CLOSE)
        assert len(report.top) == 2 * asked


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("entrance", "sampling"),
    [
        *((entrance, "sampled") for entrance in invariants.ENTRANCES),
        *((entrance, "two answers, penalty") for entrance in ("recomputed", "three slots", "graph session")),
    ],
)
def test_every_way_to_an_answer_tells_how_likely_it_is(entrance, sampling):
    """An answer's end does not count, but for one that is nothing else."""
    vlm, rows, options, ids = invariants.case("placeholder", sampling)
    found = invariants.details(vlm, entrance, rows, **options, confidence=True, logprobs=2)
    assert [answer.token_ids for answer in found] == ids
    prompts = [row for row in rows for _ in range(options.get("num_return_sequences", 1))]
    for inputs, answer in zip(prompts, found, strict=True):
        expected, free = logprobs_of(vlm, inputs, answer.token_ids)
        counted = len(answer.token_ids)
        counted -= answer.token_ids[-1] in options["stop_token_ids"] and counted > 1
        own = expected[range(counted), answer.token_ids[:counted]]
        assert answer.confidence == pytest.approx(math.exp(own.mean()), **CLOSE)
        if answer.logprobs is not None:
            assert_told(answer.logprobs, answer.token_ids, expected, free)
    unasked = invariants.details(vlm, entrance, rows, **options)
    assert all(one.confidence is None and one.logprobs is None for one in unasked)


def test_the_sampler_tells_what_it_drew_by():
    """After temperature and filters, beside rows that ask for the model's own; an answer's tokens are those
    that it has without."""
    vlm, rows = tiny_vlm(), some_rows(2)
    own = GenerationOptions(
        max_new_tokens=8, temperature=1.7, top_k=5, top_p=0.8, seed=3, logprobs=1, **NO_STOP
    )
    modes = {"sampler": replace(own, logprobs_mode="sampler"), "model": own}
    requests = [
        Request(row["input_ids"][0], row.get("pixel_values"), options=options, key=(number, mode))
        for number, row in enumerate(rows)
        for mode, options in modes.items()
    ]
    found = {output.key: output for output in Scheduler(vlm, 3).run(requests)}
    for number, inputs in enumerate(rows):
        drawn, plain = found[number, "sampler"], found[number, "model"]
        assert drawn.token_ids == plain.token_ids
        logprobs = logprobs_of(vlm, inputs, drawn.token_ids)[0]
        expected = adjusted_scores(logprobs, own).log_softmax(-1)
        for report, model, token_id, row in zip(drawn.logprobs, plain.logprobs, drawn.token_ids, expected):
            assert report.logprob == pytest.approx(row[token_id].item(), **CLOSE)
            assert report.top[0] == (model.top[0][0], pytest.approx(row.max().item(), **CLOSE))
    with pytest.raises(ValueError, match="logprobs_mode"):
        replace(modes["sampler"], repetition_penalty=1.1)


@pytest.mark.parametrize("constraint", [None, Pattern])
def test_a_scheduler_reports_each_token_and_what_is_forced_does_not_count(constraint):
    vlm, inputs = tiny_vlm(), some_rows(1)[0]
    more = {"confidence": True, "logprobs": 2, "constraint": constraint, **NO_STOP}
    options = GenerationOptions(max_new_tokens=20, **more)
    scheduler, reports = Scheduler(vlm, 2), []
    scheduler.add(Request(inputs["input_ids"][0], inputs.get("pixel_values"), options=options))
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, NewTokens):
                reports += event.logprobs
            elif isinstance(event, RequestOutput):
                output = event
    alone = vlm.generate_detailed(**inputs, options=options)
    assert alone.rows() == [output.token_ids]
    made = None if constraint is None else constraint()
    expected, free = logprobs_of(vlm, inputs, output.token_ids, made)
    assert all(free) == (constraint is None)
    own = expected[range(20), output.token_ids][torch.tensor(free)]
    for confidence, told in ((output.confidence, reports), (alone.confidences[0], alone.logprobs[0])):
        assert confidence == pytest.approx(math.exp(own.mean()), **CLOSE)
        if constraint is None:
            assert_told(told, output.token_ids, expected, free)
        else:
            assert [one.logprob is not None for one in told] == free


def test_json_has_log_probabilities(as_json, photo):
    (made,) = as_json(photo, "how many?", "--max-new-tokens", 4, "--logprobs", 2)
    (ids,), (told,) = made["token_ids"], made["logprobs"]
    assert [one["id"] for one in told] == ids and all(len(one["top"]) == 2 for one in told)
    assert all(one["top"][0] == {key: one[key] for key in ("id", "token", "logprob")} for one in told)
