"""What must hold for every model, each property said once: functions that take a model and assert.

`vlm` is a `VisionLanguageModel` and `language_model` a `LanguageModel`, in float32 and eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv

TOLERANCE = 1e-5  # of hidden states, relative to their largest value


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape, (
        f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    )
    error = ((got - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    assert error <= tolerance, f"{what}: differs by {error:.2e}, at most {tolerance:.0e} allowed"


def new_cache(language_model, batch: int, capacity: int) -> kv.KVCache:
    return kv.allocate_for(language_model.config, batch, capacity, like=language_model.embed_tokens.weight)


@torch.no_grad()
def chunks_equal_one_pass(language_model, x: Tensor, sizes: Sequence[int], spare: int = 3) -> None:
    """Hidden states of x (B, T, D) fed through a cache in chunks of `sizes` equal those of one plain pass.

    Catches: a chunk on a prefix that is not causal, positions that restart, a cache read past what is filled.
    """
    assert sum(sizes) == x.shape[1], "the sizes must add up to T"
    expected, _ = language_model(x)
    cache, start, pieces = new_cache(language_model, x.shape[0], x.shape[1] + spare), 0, []
    for size in sizes:
        hidden, _ = language_model(x[:, start : start + size], kv_cache=cache, start_pos=start)
        pieces.append(hidden)
        start += size
    assert_close(torch.cat(pieces, 1), expected, f"chunks of {list(sizes)}")


@torch.no_grad()
def ragged_starts_equal_alone(language_model, rows: Sequence[Tensor], prefixes: Sequence[int], sizes) -> None:
    """Rows that stand at different places share each call: every row's hidden states equal its own one pass.

    Args:
        rows: (T_i, D) embeddings; row i has prefixes[i] of them in the cache before the shared calls.
        prefixes: at least 0, different for each row.
        sizes: chunk sizes of the shared calls; each row must hold prefixes[i] + sum(sizes).

    Catches: a scalar position applied to all rows, a row that sees what a longer one has filled.
    """
    capacity, total = max(prefixes) + sum(sizes) + 2, sum(sizes)
    cache = new_cache(language_model, len(rows), capacity)
    for layer in cache:  # a row must never look at what it has not filled
        for tensor in layer.values():
            tensor.fill_(7.0)
    for index, (row, prefix) in enumerate(zip(rows, prefixes)):
        if prefix:
            own = [{name: tensor[index : index + 1] for name, tensor in layer.items()} for layer in cache]
            language_model(row[None, :prefix], kv_cache=own)
    start, pieces, done = torch.tensor(prefixes), [], 0
    for size in sizes:
        x = torch.stack([row[p + done : p + done + size] for row, p in zip(rows, prefixes)])
        hidden, _ = language_model(x, kv_cache=cache, start_pos=start + done)
        pieces.append(hidden)
        done += size
    together = torch.cat(pieces, 1)
    for index, (row, prefix) in enumerate(zip(rows, prefixes)):
        alone, _ = language_model(row[None, : prefix + total])
        assert_close(together[index], alone[0, prefix:], f"row {index} from position {prefix}")


@torch.no_grad()
def padded_equals_alone(vlm, rows: Sequence[dict], side: str, pad_id: int = 0) -> None:
    """Hidden states and greedy tokens of padded rows equal those of each row alone.

    Args:
        rows: keyword inputs of one row each, input_ids (1, T_i) and maybe pixel_values (1, n_i, 3, H, W).
        side: "left" or "right", where the padding goes.
    """
    batch = collate(rows, side, pad_id)
    together, _ = vlm.hidden_states(**batch)
    tokens = vlm.generate(**batch, max_new_tokens=12, stop_token_ids=())
    for index, row in enumerate(rows):
        alone, _ = vlm.hidden_states(**row)
        front = together.shape[1] - batch["input_ids"].shape[1]  # image positions, all real
        mask = F.pad(batch["attention_mask"][index].bool(), (front, 0), value=True)
        assert_close(together[index][mask], alone[0], f"row {index}, {side} padding")
        expected = vlm.generate(**row, max_new_tokens=12, stop_token_ids=())
        assert torch.equal(tokens[index], expected[0]), (
            f"row {index}, {side} padding: tokens differ from alone"
        )


def collate(rows: Sequence[dict], side: str = "left", pad_id: int = 0) -> dict:
    """Rows as a processor would batch them: ids padded on one side, tiles padded with zeros."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    ids, mask, tiles = [], [], []
    for row in rows:
        gap = longest - row["input_ids"].shape[1]
        where = (gap, 0) if side == "left" else (0, gap)
        ids.append(F.pad(row["input_ids"], where, value=pad_id))
        mask.append(F.pad(torch.ones_like(row["input_ids"]), where))
        tiles.append(row.get("pixel_values"))
    batch = {"input_ids": torch.cat(ids), "attention_mask": torch.cat(mask)}
    given = [tile for tile in tiles if tile is not None]
    if given:
        most, shape = max(tile.shape[1] for tile in given), given[0].shape[2:]
        tiles = [torch.zeros(1, 0, *shape) if tile is None else tile for tile in tiles]
        batch["pixel_values"] = torch.cat(
            [torch.cat((tile, torch.zeros(1, most - tile.shape[1], *shape)), 1) for tile in tiles]
        )
    return batch


@torch.no_grad()
def forked_equals_separate(vlm, inputs: dict, answers: int, **options) -> None:
    """N answers from one prefill are the tokens of N runs: answer j is that of seed + j."""
    seed = options.pop("seed", 0)
    forked = vlm.generate(**inputs, num_return_sequences=answers, seed=seed, **options)
    for row, tokens in enumerate(forked):
        one = {name: tensor[row // answers : row // answers + 1] for name, tensor in inputs.items()}
        alone = vlm.generate(**one, seed=seed + row % answers, **options)[0]
        shared = min(len(alone), len(tokens))
        assert torch.equal(tokens[:shared], alone[:shared]), (
            f"answer {row % answers} differs from its own run"
        )


@torch.no_grad()
def cached_equals_recomputed(vlm, inputs: dict, **options) -> Tensor:
    """The same tokens with and without a cache; returns them."""
    cached = vlm.generate(**inputs, **options)
    recomputed = vlm.generate(**inputs, use_cache=False, **options)
    assert torch.equal(cached, recomputed), f"cached and recomputed tokens differ under {options}"
    return cached


@torch.no_grad()
def step_equals_eager(vlm, inputs: dict, make_step: Callable, **options) -> None:
    """A decode step that replaces the eager one (`make_step(language_model)`) gives the same tokens."""
    expected = vlm.generate(**inputs, **options)
    got = vlm.generate(**inputs, decode_step=make_step(vlm.language_model), **options)
    assert torch.equal(got, expected), "the replaced decode step changes tokens"
