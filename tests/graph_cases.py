"""What a `GraphStep` must give: the eager step's tokens, in every respect. On the CPU and on CUDA.

`Tape` stands in for CUDA graphs where there is no GPU: like them it knows addresses and constants only.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from generation.fast.cuda.graph import Graphs, GraphStep
from generation.output import GenerationOutput
from tests.invariants import collate
from tests.prompts import NO_STOP, some_rows

SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.3, "presence_penalty": 0.5},
    {"confidence": True},
    {"temperature": 0.7, "repetition_penalty": 0.8, "seed": 1, "num_return_sequences": 2},
]


def batch(count: int, device="cpu") -> dict:
    inputs = collate(some_rows(count)) if count > 1 else some_rows(1)[0]
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def stops_for(model, inputs: dict, **options) -> tuple[int, ...]:
    """Ids that end each row somewhere else: row r at the latest at its token 3 + 4 r."""
    free = model.generate(**inputs, **options, **NO_STOP)
    return tuple({int(tokens[min(3 + 4 * row, len(tokens) - 1)]) for row, tokens in enumerate(free)})


def assert_as_eager(model, step: GraphStep, inputs: dict, **options) -> GenerationOutput:
    """Tokens, lengths, reasons and counts of both; the stream hands out what the result holds."""
    expected = model.generate_detailed(**inputs, **options)
    stream = model.generate_stream(**inputs, decode_step=step, **options)
    columns, got = list(stream), stream.result
    assert torch.equal(torch.stack(columns, 1), expected.token_ids.cpu())
    assert torch.equal(got.token_ids, expected.token_ids)
    for name in ("lengths", "stop_reasons", "prompt_tokens", "decode_steps"):
        assert getattr(got, name) == getattr(expected, name), name
    assert got.confidences == pytest.approx(expected.confidences, rel=1e-3)
    assert not step.graphs.failures
    return got


class Tape(TorchDispatchMode):
    """Records every operation on the very tensors that it ran on, and runs them again.

    What a graph would not do is not done here either: Python that decides anew, numbers that have changed,
    tensors that have been replaced.
    """

    def __init__(self):
        super().__init__()
        self._operations: list[tuple] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value is read back while recording")
        result = function(*arguments, **named)
        self._operations.append((function, arguments, named, result))
        return result

    def replay(self) -> None:
        for function, arguments, named, result in self._operations:
            again = function(*arguments, **named)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # A view of what is recorded, or that itself, is up to date already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record_on_tape(self, function, shape, restore):
    """`Graphs._record` with a tape. Recording changes no state, as capturing does not."""
    tape = Tape()
    with tape:
        function()
    restore()
    return tape.replay


def tape_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tapes for graphs."""
    monkeypatch.setattr(Graphs, "_record", record_on_tape)
    capture = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(Graphs, "capture", capture, raising=False)
