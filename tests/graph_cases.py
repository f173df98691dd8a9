"""What a `GraphStep` must give: the eager step's tokens, in every respect. On the CPU and on CUDA."""

from __future__ import annotations

import torch

from generation.decoding import Generated
from generation.graph_step import GraphStep
from tests import invariants
from tests.prompts import NO_STOP, Picture, inputs_of, words

SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.4},
    {"temperature": 0.7, "repetition_penalty": 0.8, "seed": 1, "num_return_sequences": 2},
]


def rows(count: int) -> list[dict]:
    """Prompts of several lengths, some with a picture."""
    prompts = [
        [*words(1, 5), Picture(1), *words(2, 3)],
        words(3, 14),
        [Picture(2), 7],
        [*words(4, 2), Picture(1), Picture(3), *words(5, 30)],
    ]
    return [inputs_of(prompt) for prompt in prompts[:count]]


def batch(count: int, device="cpu") -> dict:
    inputs = invariants.collate(rows(count)) if count > 1 else rows(1)[0]
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def stops_for(model, inputs: dict, **options) -> tuple[int, ...]:
    """Ids that end each row somewhere else: row r at the latest at its token 3 + 4 r."""
    free = model.generate(**inputs, **options, **NO_STOP)
    return tuple({int(tokens[min(3 + 4 * row, len(tokens) - 1)]) for row, tokens in enumerate(free)})


def assert_as_eager(model, step: GraphStep, inputs: dict, **options) -> Generated:
    """Tokens, lengths, reasons and counts of both; the stream hands out what the result holds."""
    expected = model.generate_detailed(**inputs, **options)
    stream = model.generate_stream(**inputs, decode_step=step, **options)
    columns = list(stream)
    got = stream.result
    assert torch.equal(torch.stack(columns, 1), expected.token_ids)
    assert torch.equal(got.token_ids, expected.token_ids)
    for name in ("lengths", "stop_reasons", "prompt_tokens", "decode_steps"):
        assert getattr(got, name) == getattr(expected, name), name
    return got
