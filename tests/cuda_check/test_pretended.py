"""Ocelli from end to end on a pretended device: what a GPU would refuse, and how often it is waited for.

What is recorded is the eager step, except where a test is marked `triton`: then its kernels compute in the
interpreter, from the same numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import generate
import train
from data import packing
from generation.options import GenerationOptions
from generation.requests import Request
from generation.scheduler import Scheduler
from generation.session import Session
from inference.checkpoint import fast_step
from tests.cuda_check.pretend import Device, pretended
from tests.graph_cases import batch
from tests.prompts import NO_STOP, ImageBlock, inputs_of, some_rows, tiny_vlm, words
from tests.runs import SETTINGS, flags, named, write_rows
from web.engine import Engine
from web.models import Models
from web.service import AskRequest, Service, Visitor

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED, PICTURE = str(ROOT / "checkpoints/ocelli-shapes"), str(ROOT / "assets/three.png")
FLOATS = (torch.float32, torch.bfloat16)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
TOKENS = 8


class Costs(NamedTuple):
    """Of one token, step or question: waits for the device, for an event, copies from pageable memory."""

    syncs: float
    waits: float
    pageable: float


def costs_of_one(run: Callable[[int], object], few: int, many: int) -> Costs:
    """What `run(number)` costs for each of its number, whatever it costs once."""
    counted = []
    for number in (few, many):
        with pretended() as seen:
            run(number)
        counted.append(seen)
    for name in Costs._fields:  # which a failing test shows
        print(name, dict(getattr(counted[1], name) - getattr(counted[0], name)))
    return Costs(
        *(
            (getattr(counted[1], n).total() - getattr(counted[0], n).total()) / (many - few)
            for n in Costs._fields
        )
    )


def a_model(dtype: torch.dtype = torch.float32):
    return tiny_vlm(head_dim=16, max_position_embeddings=2000).to(dtype)


def on_device(dtype: torch.dtype = torch.float32, recorded: bool = True):
    """(the model, its decode step or None) on the device."""
    model = a_model(dtype).to("cuda")
    step, name = fast_step(model.language_model) if recorded else (None, "eager")
    assert (step is not None) == recorded, name
    return model, step


def assert_fused(seen: Device) -> None:
    """cuDNN would plan its attention anew for every length; what is not fused reads its scores back."""
    assert seen.attention and not [name for name in seen.attention if name.startswith(("cudnn", "math"))]


# -------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_are_those_of_the_cpu(dtype, rows, recorded):
    expected = a_model().generate(**batch(rows), max_new_tokens=TOKENS, **NO_STOP)
    with pretended() as seen:
        model, step = on_device(dtype, recorded)
        got = model.generate(**batch(rows, "cuda"), max_new_tokens=TOKENS, decode_step=step, **NO_STOP).cpu()
    assert got.shape == expected.shape and (dtype != torch.float32 or torch.equal(got, expected))
    assert not recorded or (seen.graphs and step.failure is None)
    if dtype == torch.bfloat16:
        assert_fused(seen)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_a_token_waits_for_its_flags_only(recorded, sampling):
    """The eager step's tokens are read one by one."""

    def run(tokens: int) -> None:
        model, step = on_device(recorded=recorded)
        stream = model.generate_stream(
            **batch(2, "cuda"), max_new_tokens=tokens, decode_step=step, **NO_STOP, **sampling
        )
        for column in stream:
            assert not step or not column.is_cuda

    syncs, waits, pageable = costs_of_one(run, TOKENS, 2 * TOKENS)
    assert syncs + waits <= 1 and pageable == 0 and not (recorded and syncs)


def test_a_question_costs_few_waits():
    """From the second on: what is loaded, recorded and planned once is left out."""

    def run(questions: int) -> None:
        model, step = on_device()
        for number in range(questions):
            inputs = {
                name: tensor for name, tensor in inputs_of([*words(number, 9), ImageBlock(number)]).items()
            }
            model.generate(**inputs, max_new_tokens=2, decode_step=step, **NO_STOP)

    syncs, _, pageable = costs_of_one(run, 1, 3)
    assert syncs <= 4 and pageable <= 2


@pytest.mark.triton
def test_tokens_and_kernels_of_triton():
    """A token is five kernels a layer, the beginning, the end and the choice; nothing of torch's."""
    small = {"head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    expected = tiny_vlm(**small).generate(**batch(1), max_new_tokens=4, **NO_STOP)
    with pretended() as seen:
        model = tiny_vlm(**small).to("cuda")
        step, name = fast_step(model.language_model)
        assert "Triton" in name
        got = model.generate(**batch(1, "cuda"), max_new_tokens=4, decode_step=step, **NO_STOP).cpu()
    assert torch.equal(got, expected) and step.failure is None
    assert max(graph.kernels for graph in seen.graphs) <= 5 * 1 + 3


def test_kernels_of_a_recorded_eager_step():
    counts = []
    for layers in (1, 3):
        with pretended() as seen:
            model = tiny_vlm(head_dim=16, num_hidden_layers=layers).to("cuda")
            fast_step(model.language_model)
        counts.append(max(graph.kernels for graph in seen.graphs))
    assert (counts[1] - counts[0]) / 2 <= 40


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_session(dtype):
    """The second prompt is a chunk on a kept prefix."""
    first = [*words(1, 9), ImageBlock(1)]
    prompts = [inputs_of(prompt) for prompt in (first, [*first, *words(3, 9)])]
    alone = Session(a_model(dtype))
    expected = [alone.generate(**prompt, max_new_tokens=5, **NO_STOP) for prompt in prompts]
    with pretended() as seen:
        model, step = on_device(dtype)
        session = Session(model)
        got = [
            session.generate(**prompt, max_new_tokens=5, decode_step=step, **NO_STOP) for prompt in prompts
        ]
        got = [torch.as_tensor(tokens).cpu() for tokens in got]
    if dtype == torch.float32:
        assert [tokens.tolist() for tokens in got] == [torch.as_tensor(t).tolist() for t in expected]
    else:
        assert_fused(seen)


# ------------------------------------------------------------------------------------------ many at once
def requests(tokens: int, **options) -> list[Request]:
    options = GenerationOptions(max_new_tokens=tokens, **NO_STOP, **options)
    return [
        Request(row["input_ids"][0], row.get("pixel_values"), options=options, key=number)
        for number, row in enumerate(some_rows(4))
    ]


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scheduler(dtype, recorded):
    expected = {one.key: one.token_ids for one in Scheduler(a_model(), 3).run(requests(TOKENS))}
    with pretended() as seen:
        model, step = on_device(dtype, recorded)
        got = {one.key: one for one in Scheduler(model, 3, decode_step=step).run(requests(TOKENS))}
    assert not [str(one.error) for one in got.values() if one.error is not None]
    if dtype == torch.float32:
        assert {key: one.token_ids for key, one in got.items()} == expected
    else:
        assert_fused(seen)


@pytest.mark.parametrize("sampling", [[{}], [SAMPLED], [{}, SAMPLED], [{"repetition_penalty": 1.2}]])
def test_a_step_of_the_scheduler_waits_for_flags_only(sampling):
    """Also where rows are sampled in different ways."""

    def run(tokens: int) -> None:
        model, step = on_device()
        asked = [
            replace(one, options=replace(one.options, **sampling[number % len(sampling)]))
            for number, one in enumerate(requests(tokens))
        ]
        assert len(list(Scheduler(model, 4, decode_step=step).run(asked))) == 4

    syncs, waits, pageable = costs_of_one(run, TOKENS, 2 * TOKENS)
    assert (syncs, pageable) == (0, 0) and waits <= 1


def test_service_of_the_page():
    request = AskRequest((PICTURE,), "How many shapes are there?", EMBEDDED)

    async def last_view(service: Service):
        return [view async for view in service.ask(Visitor(), request)][-1]

    answers = []
    for device in ("cpu", "cuda"):
        with pretended():
            service = Service(Engine(Models([EMBEDDED], device=device, dtype="float32")))
            try:
                view = asyncio.run(last_view(service))
            finally:
                service.close()
        assert not view.failed, view.notice
        answers.append(view.log[-1].answers)
    assert answers[0] == answers[1]


# ------------------------------------------------------------------------------------------- commands
@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype", "float32"],
        ["--dtype", "bfloat16"],
        ["--dtype", "int8"],
        ["--dtype", "float32", "--compile", "off"],
        ["--dtype", "float32", "--num-answers", "3", "--temperature", "0.8", "--seed", "1"],
        ["--dtype", "float32", "--no-cache"],
        ["--dtype", "float32", "--lookup", "on"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_generate_py(arguments, capsys):
    asked = [PICTURE, "-q", "How many shapes are there?", "--max-new-tokens", "6", "--json", *arguments]
    answers = {}
    for device in ("cpu", "cuda"):
        with pretended():
            assert generate.main([*asked, "--device", device]) == 0, capsys.readouterr().err
        made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(one["device"].startswith(device) for one in made)
        answers[device] = [one["answers"] for one in made]
    assert "float32" not in arguments or answers["cpu"] == answers["cuda"]


def test_generate_py_on_a_file_of_questions(tmp_path):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    asked = ("How many shapes are there?", "Describe the picture.", "What colour is the circle?")
    questions.write_text("".join(json.dumps({"image": PICTURE, "question": q}) + "\n" for q in asked))
    arguments = [
        "--batch",
        str(questions),
        "--out",
        str(answers),
        "--max-new-tokens",
        "5",
        "--device",
        "cuda",
    ]
    with pretended():
        assert generate.main(arguments) == 0
    assert len(answers.read_text().splitlines()) == len(asked)


def test_training(tmp_path, monkeypatch):
    """Steps of two micro-batches, an evaluation and a saved state: the losses are the CPU's."""
    # flex_attention has no kernel here: the same mask, dense.
    monkeypatch.setattr(packing, "block_mask", packing.dense_mask)
    rows = named(write_rows(tmp_path / "rows.jsonl"))

    def run(steps: int, device: str = "cuda", **more) -> list[dict]:
        output = tmp_path / f"{device}-{steps}-{len(more)}"
        settings = SETTINGS | {
            "device": device, "precision": "float32", "steps": steps, "micro_batch_size": 4, "log_every": 100,
            "sequence_length": 256, "init_from": EMBEDDED, "data": rows, "output": output,
        }  # fmt: skip
        train.main(flags(**settings | more))
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    expected = run(2, "cpu", eval_data=rows)
    with pretended():
        got = run(2, eval_data=rows)
    for key in ("loss", "eval_loss"):
        values = [next(row[key] for row in rows if row.get(key) is not None) for rows in (got, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3)
