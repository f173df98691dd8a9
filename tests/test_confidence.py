"""The confidence of an answer: that of its definition, from every way to decode it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from generation.fast.cuda import graph
from generation.fast.cuda.graph import Graphs, GraphStep
from generation.fast.native.step import NativeStep
from generation.options import GenerationOptions
from generation.requests import NewTokens, Request
from generation.scheduler import Scheduler
from generation.session import Session
from tests.graph_cases import batch, record_on_tape, stops_for
from tests.invariants import fast_step, run_all
from tests.prompts import NO_STOP, some_rows, tiny_vlm
from tests.test_scheduler_steps import Pattern

SAMPLINGS = ({}, {"temperature": 1.5, "top_k": 20, "repetition_penalty": 1.3, "seed": 3})
TOKENS = {"max_new_tokens": 20, "confidence": True}
CLOSE = {"rel": 1e-5, "abs": 1e-9}


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


@pytest.fixture(params=[None, NativeStep, GraphStep])
def step(request, vlm, monkeypatch):
    """The graph's with a tape for a graph."""
    always = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(graph, "no_triton", lambda language_model, rows: "it is a test")
    monkeypatch.setattr(Graphs, "_record", record_on_tape)
    monkeypatch.setattr(Graphs, "capture", always, raising=False)
    return None if request.param is None else fast_step(vlm, request.param)


def by_definition(vlm, inputs: dict, ids: list[int], stops=(), constraint=None) -> float:
    """The geometric mean of probabilities from one pass over prompt and answer."""
    held = [inputs.get(key) for key in ("pixel_values", "pixel_attention_mask")]
    start = inputs["input_ids"].shape[1]
    with torch.no_grad():
        x = vlm.embed(torch.cat((inputs["input_ids"], torch.tensor([ids])), 1), *held)
        hidden, _ = vlm.language_model(x)
        scores = vlm.language_model.logits(hidden)[0, start - 1 : -1]
    probabilities = []
    for number, token_id in enumerate(ids):
        forced = False
        if constraint is not None:
            forced = bool(constraint.forced())
            constraint.mask(scores[number])
            constraint.accept(token_id)
        if not forced and (token_id not in stops or len(ids) == 1):
            probabilities.append(float(scores[number].double().softmax(-1)[token_id]))
    return math.prod(probabilities) ** (1 / len(probabilities))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_one_prompt(vlm, step, sampling):
    for inputs in some_rows(3):
        options = TOKENS | NO_STOP | sampling
        stops = stops_for(vlm, inputs, max_new_tokens=20, **sampling)
        for more in ({}, {"stop_token_ids": stops}):
            plain = vlm.generate_detailed(**inputs, **options | more)
            expected = by_definition(vlm, inputs, plain.rows()[0], more.get("stop_token_ids", ()))
            ways = [{"decode_step": step}, {"lookup": "on"}, {"use_cache": False}]
            outputs = [vlm.generate_detailed(**inputs, **options | more | way) for way in ways]
            outputs.append(Session(vlm).generate_detailed(**inputs, **options | more, decode_step=step))
            for output in (plain, *outputs):
                assert output.confidences == pytest.approx([expected], **CLOSE)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_several_prompts(vlm, step, sampling):
    """Together and in a scheduler, where rows stop one after another and each has the number that it has
    alone."""
    rows, options = some_rows(4), TOKENS | sampling
    options["stop_token_ids"] = stops_for(vlm, batch(4), max_new_tokens=20, **sampling)
    alone = [vlm.generate_detailed(**one, **options) for one in rows]
    assert len({output.lengths[0] for output in alone}) > 1
    expected = [output.confidences[0] for output in alone]
    together = vlm.generate_detailed(**batch(4), **options, decode_step=step)
    assert together.confidences == pytest.approx(expected, **CLOSE)
    requests = [
        Request(one["input_ids"][0], one.get("pixel_values"), options=GenerationOptions(**options), key=key)
        for key, one in enumerate(rows)
    ]
    unasked = GenerationOptions(**options | {"confidence": False})
    requests.append(Request(requests[0].input_ids, requests[0].pixel_values, options=unasked, key="unasked"))
    outputs, _ = run_all(vlm, requests, 3, decode_step=step)
    assert outputs.pop("unasked").confidence is None
    assert [outputs[key].confidence for key in range(4)] == pytest.approx(expected, **CLOSE)


def test_what_a_constraint_leaves_no_choice_about_does_not_count(vlm, step):
    inputs = some_rows(1)[0]
    options = GenerationOptions(**TOKENS | NO_STOP, constraint=Pattern, decode_step=step)
    output = vlm.generate_detailed(**inputs, options=options)
    expected = by_definition(vlm, inputs, output.rows()[0], constraint=Pattern())
    assert output.confidences == pytest.approx([expected], **CLOSE)
    own = GenerationOptions(**TOKENS | NO_STOP, constraint=Pattern)
    outputs, _ = run_all(vlm, [Request(inputs["input_ids"][0], inputs["pixel_values"], options=own)])
    assert outputs[None].confidence == pytest.approx(expected, **CLOSE)


def reported(vlm, options: GenerationOptions, inputs: dict) -> list:
    """What a scheduler reports of each token."""
    scheduler = Scheduler(vlm, 2)
    scheduler.add(Request(inputs["input_ids"][0], inputs.get("pixel_values"), options=options))
    events = []
    while not scheduler.idle:
        events += scheduler.step()
    return [one for event in events if isinstance(event, NewTokens) for one in event.logprobs]


@pytest.mark.parametrize("constraint", [None, Pattern])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probabilities_of_tokens(vlm, step, sampling, constraint):
    """The model's own, whatever the sampler filters out, and the same from every way to decode; of what a
    constraint forced there are none."""
    inputs = some_rows(1)[0]
    options = GenerationOptions(max_new_tokens=20, logprobs=3, constraint=constraint, **NO_STOP, **sampling)
    expected = reported(vlm, options, inputs)
    assert len(expected) == 20 and any(one.logprob is None for one in expected) == (constraint is not None)
    ways = [{}, {"decode_step": step}, {"use_cache": False}]
    ways += [] if constraint else [{"lookup": "on"}, {"lookup": "on", "decode_step": step}]
    outputs = [vlm.generate_detailed(**inputs, options=options, **way) for way in ways]
    outputs.append(Session(vlm).generate_detailed(**inputs, options=options, decode_step=step))
    for output in outputs:
        (own,) = output.logprobs
        assert [[one for one, _ in report.top] for report in own] == [
            [one for one, _ in report.top] for report in expected
        ]
        for report, other in zip(own, expected, strict=True):
            assert (report.logprob is None) == (other.logprob is None)
            assert [report.logprob or 0, *(value for _, value in report.top)] == pytest.approx(
                [other.logprob or 0, *(value for _, value in other.top)], **CLOSE
            )
    assert vlm.generate_detailed(**inputs, max_new_tokens=2).logprobs == []


def test_json_has_log_probabilities(as_json, photo):
    (made,) = as_json(photo, "how many?", "--max-new-tokens", 4, "--logprobs", 2)
    (ids,), (told,) = made["token_ids"], made["logprobs"]
    assert [one["id"] for one in told] == ids and all(len(one["top"]) == 2 for one in told)
    assert all(one["top"][0] == {key: one[key] for key in ("id", "token", "logprob")} for one in told)


def test_json_batches_and_stats_say_it(cli, as_json, photo, tmp_path):
    ask = ("how many?", "--num-answers", 2, "--temperature", 1, "--seed", 1, "--max-new-tokens", 8)
    (made,) = as_json(photo, *ask)
    assert len(made["confidences"]) == 2 and all(0 < one < 1 for one in made["confidences"])
    (tmp_path / "q.jsonl").write_text(json.dumps({"image": str(photo), "question": ask[0]}) + "\n")
    assert cli("--batch", tmp_path / "q.jsonl", "--out", tmp_path / "a.jsonl", *ask[1:])[0] == 0
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert line["confidences"] == pytest.approx(made["confidences"], abs=1e-4)
    *_, err = cli(photo, *ask, "--stats")
    assert all(f"{one:.1%}" in err for one in made["confidences"])
