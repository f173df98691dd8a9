"""Random sequences of what can be done to a cache, each result held against passes without one.

The machine owns what decoding owns: the positions. It remembers which tokens every row of the cache holds,
does something to the cache, and compares hidden states or logits of whatever was computed with those of one
pass over the row's tokens that keeps nothing. What no row has filled is filled with 7, so that a look there
shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import eager_step, prefill
from generation.fast.native import step as build
from generation.fast.native.step import NativeStep
from generation.prompt import Prompt
from models.config import RopeScaling, TextConfig
from models.language_model import LanguageModel
from tests.invariants import assert_close
from tests.tiny import randomize

VOCAB, LONGEST, MOST_ROWS = 61, 40, 6
SHAPES = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one kv head": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "no groups, llama3 rope": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16),
    },
}


@cache
def language_model(shape: str) -> LanguageModel:
    config = TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        max_position_embeddings=LONGEST,
        **SHAPES[shape],
    )
    model = LanguageModel(config).eval()
    randomize(model, seed=0)
    return model


@cache
def steps(shape: str) -> dict[str, Callable]:
    """Decode steps by name; the native one where there is a compiler."""
    model = language_model(shape)
    found: dict[str, Callable] = {"eager": eager_step(model)}
    with suppress(build.NoCompiler):
        found["native"] = NativeStep(model)
    return found


@cache
def has_compiler() -> bool:
    return "native" in steps("grouped")


class CacheRows(RuleBasedStateMachine):
    """`done` counts what all machines have done, `worst` is the largest difference that any of them met."""

    done: ClassVar[Counter] = Counter()
    worst = 0.0

    @initialize(shape=st.sampled_from(sorted(SHAPES)), rows=st.integers(1, 3), capacity=st.integers(1, 12))
    def allocate(self, shape: str, rows: int, capacity: int) -> None:
        self.shape, self.model = shape, language_model(shape)
        like = self.model.embed_tokens.weight
        self.cache = kv.allocate_for(self.model.config, rows, capacity, like=like)
        for layer in self.cache:
            for tensor in layer.values():
                tensor.fill_(7.0)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.computed: list[tuple[tuple[int, ...], Tensor, str, bool]] = []
        self.count("sequences", "allocate")

    def count(self, *names: str) -> None:
        self.done.update(names)

    # ------------------------------------------------------------------------------------ what is done
    @rule(size=st.integers(1, 7), seed=st.integers(0, 999), slack=st.integers(0, 9), own=st.booleans())
    def chunk(self, size: int, seed: int, slack: int, own: bool) -> None:
        """The same number of tokens for every row: a prefill where rows are empty, else a chunk or a step.

        own: a position for each row, even where one would do for all.
        """
        size = min(size, LONGEST - max(map(len, self.rows)))
        if size < 1:
            return
        new = self.tokens(seed, size)
        cache, start = self.place(size, slack, own)
        with torch.no_grad():
            hidden, same = self.model(self.model.embed_tokens(new), kv_cache=cache, start_pos=start)
        assert same is cache
        self.count("chunk" if max(map(len, self.rows)) else "prefill")
        self.append(new.tolist())
        self.remember(hidden, [size] * len(self.rows), "hidden states of a chunk")

    @rule(data=st.data(), seed=st.integers(0, 999), slack=st.integers(0, 9))
    def uneven_prefill(self, data, seed: int, slack: int) -> None:
        """A chunk of its own length for each row, padded on the right."""
        most = min(7, LONGEST - max(map(len, self.rows)))
        if most < 1:
            return
        each = st.integers(1, most)
        lengths = data.draw(st.lists(each, min_size=len(self.rows), max_size=len(self.rows)))
        new = self.tokens(seed, max(lengths))
        cache, start = self.place(max(lengths), slack, own=False)
        prompt = Prompt(self.model.embed_tokens(new), tuple(lengths))
        with torch.no_grad():
            logits = prefill(self.model, prompt, cache, start)
        self.count("uneven prefill")
        self.append([ids[:length] for ids, length in zip(new.tolist(), lengths)])
        self.remember(logits[:, None], [1] * len(lengths), "logits behind an uneven prefill", head=True)

    @rule(
        native=st.booleans(), seed=st.integers(0, 999), slack=st.integers(0, 9), own=st.booleans(),
        count=st.integers(1, 3),
    )  # fmt: skip
    def decode(self, native: bool, seed: int, slack: int, own: bool, count: int) -> None:
        """Some tokens, one by one, through the eager step or the one in C."""
        name = "native" if native and has_compiler() else "eager"
        for number in range(min(count, LONGEST - max(map(len, self.rows)))):
            new = self.tokens(seed + number, 1)
            cache, start = self.place(1, slack, own)
            with torch.no_grad():
                logits = steps(self.shape)[name](new, cache, start)
            self.count(f"{name} step")
            self.append(new.tolist())
            self.remember(logits[:, None], [1] * len(self.rows), f"logits of the {name} step", head=True)

    @rule(more=st.integers(1, 20), limit=st.one_of(st.none(), st.integers(1, 60)))
    def grow(self, more: int, limit: int | None) -> None:
        needed, before = kv.capacity(self.cache) + more, kv.capacity(self.cache)
        if limit is not None and needed > limit:
            with pytest.raises(ValueError, match="limited to"):
                kv.grow(self.cache, needed, limit)
            assert kv.capacity(self.cache) == before
        else:
            kv.grow(self.cache, needed, needed + 3 if limit is None else limit)
            assert needed <= kv.capacity(self.cache) <= (limit or needed + 3)
        self.count("grow")

    @rule(data=st.data())
    def rewind(self, data) -> None:
        """Some rows give up their ends."""
        for number, row in enumerate(self.rows):
            to = data.draw(st.integers(0, len(row)))
            self.rows[number] = row[: kv.rewind(self.cache, len(row), to)]
        self.count("rewind")

    @precondition(lambda self: len(self.rows) < MOST_ROWS)
    @rule(times=st.integers(1, 3), slack=st.integers(0, 5))
    def fork(self, times: int, slack: int) -> None:
        """Every row several times, in a cache of its own."""
        times = min(times, MOST_ROWS // len(self.rows))
        filled = max(map(len, self.rows))
        old = [{name: tensor.clone() for name, tensor in layer.items()} for layer in self.cache]
        source, self.cache = self.cache, kv.fork(self.cache, filled, times, filled + 1 + slack)
        for layer, before in zip(source, old):
            assert all(torch.equal(layer[name], before[name]) for name in layer), "a fork changed its source"
            for tensor in layer.values():
                tensor.fill_(7.0)  # nobody's any more
        self.rows = [list(row) for row in self.rows for _ in range(times)]
        self.count("fork")

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def share(self, data) -> None:
        """A slot is given to another prompt, which begins as that of a neighbour does."""
        source, target = data.draw(st.permutations(range(len(self.rows))))[:2]
        length = data.draw(st.integers(0, len(self.rows[source])))
        kv.fork_into(self.slots(source, 1, length), self.slots(target, 1, length), length)
        self.rows[target] = self.rows[source][:length]
        self.count("slot shared")

    @precondition(lambda self: len(self.rows) > 1)
    @rule(count=st.integers(1, 2))
    def narrow(self, count: int) -> None:
        """The last slots have become idle: those in front go on in the same memory."""
        count = min(count, len(self.rows) - 1)
        self.rows = self.rows[:-count]
        self.cache = self.slots(0, len(self.rows), kv.capacity(self.cache))
        self.count("slots left")

    # --------------------------------------------------------------------------------- how it is done
    def slots(self, first: int, count: int, length: int) -> kv.KVCache:
        return [
            {name: tensor.narrow(0, first, count).narrow(2, 0, length) for name, tensor in layer.items()}
            for layer in self.cache
        ]

    def tokens(self, seed: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCAB, (len(self.rows), size), generator=generator)

    def place(self, size: int, slack: int, own: bool) -> tuple[kv.KVCache, int | Tensor]:
        """Room for `size` more positions; the cache, or a view of it, and where they go."""
        lengths = [len(row) for row in self.rows]
        needed = max(lengths) + size
        kv.grow(self.cache, needed, needed + slack)
        if not own and min(lengths) == max(lengths):
            return self.cache, lengths[0]
        return kv.view(self.cache, min(needed + slack, kv.capacity(self.cache))), torch.tensor(lengths)

    def append(self, new: list[list[int]]) -> None:
        for row, ids in zip(self.rows, new, strict=True):
            row += ids

    def remember(self, got: Tensor, lengths: list[int], what: str, head: bool = False) -> None:
        """What was computed for the last `lengths` positions of each row, to be compared at the end."""
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            name = (
                f"{what}, row {number} of {len(self.rows)}, positions {len(row) - length} to {len(row) - 1}"
            )
            self.computed.append((tuple(row), got[number, :length].clone(), name, head))

    @torch.no_grad()
    def teardown(self) -> None:
        """All of it against one pass without a cache, in which every row that ever was stands for itself,
        padded behind its end, where causal attention does not look."""
        if not getattr(self, "computed", None):
            return
        rows = sorted({row for row, *_ in self.computed})
        padded = torch.tensor([[*row, *[0] * (LONGEST - len(row))] for row in rows])
        hidden, _ = self.model(self.model.embed_tokens(padded))
        logits, place = self.model.logits(hidden), {row: number for number, row in enumerate(rows)}
        for row, got, name, head in self.computed:
            expected = (logits if head else hidden)[place[row], len(row) - len(got) : len(row)]
            assert_close(got, expected, name)
            error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
            CacheRows.worst = max(CacheRows.worst, error.item())
