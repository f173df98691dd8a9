"""What must hold for every model and every way to an answer, each property said once.

`vlm` is a `VisionLanguageModel` and `language_model` a `LanguageModel`, in float32 and eval mode.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tiles import Parts
from generation import kv_cache as kv
from generation.confidence import TokenLogprobs
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep
from generation.features import FeatureCache
from generation.options import GenerationOptions
from generation.output import GenerationOutput
from generation.prefix_store import PrefixStore
from generation.requests import Request, each_answer
from generation.scheduler import Scheduler
from generation.score import Decision
from generation.session import Session
from models.config import RopeScaling
from tests.prompts import NO_STOP, inputs_of, packed, some_rows, tiny_vlm
from tests.tiny import IMAGE_ID, VOCAB

TOLERANCE = 1e-5  # of hidden states, relative to their largest value


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape, (
        f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    )
    error = ((got - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    assert error <= tolerance, f"{what}: differs by {error:.2e}, at most {tolerance:.0e} allowed"


def new_cache(language_model, batch: int, capacity: int) -> kv.KVCache:
    return kv.allocate_for(language_model, batch, capacity)


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
def padded_hidden_states_equal_alone(vlm, rows: Sequence[dict], side: str) -> None:
    """Of rows that are inputs of one row each: input_ids (1, T_i), maybe pixel_values (1, n_i, 3, H, W)."""
    batch = collate(rows, side)
    together, _ = vlm.hidden_states(**batch)
    for index, row in enumerate(rows):
        alone, _ = vlm.hidden_states(**row)
        front = together.shape[1] - batch["input_ids"].shape[1]  # image positions, all real
        mask = F.pad(batch["attention_mask"][index].bool(), (front, 0), value=True)
        assert_close(together[index][mask], alone[0], f"row {index}, {side} padding")


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
    if given and isinstance(given[0], Parts):
        batch["pixel_values"] = Parts.cat(given)
    elif given:
        most, shape = max(tile.shape[1] for tile in given), given[0].shape[2:]
        tiles = [torch.zeros(1, 0, *shape) if tile is None else tile for tile in tiles]
        batch["pixel_values"] = torch.cat(
            [torch.cat((tile, torch.zeros(1, most - tile.shape[1], *shape)), 1) for tile in tiles]
        )
    return batch


@torch.no_grad()
def session_holds(session: Session, vlm, prompt: list[int] | dict, tolerance: float = TOLERANCE) -> None:
    """One of a session's slots is what one pass over (the beginning of) a prompt, or its inputs, would have
    left there."""
    inputs = inputs_of(prompt) if isinstance(prompt, list) else prompt
    x = vlm.embed(**inputs)
    places = vlm.places([*inputs["input_ids"]], inputs.get("pixel_values"))
    position_ids = None if places is None else places[0][0][:, None]
    scheduler, wrong = session._scheduler, []
    for slot, held in enumerate(scheduler.cache.filled):
        if not 0 < held <= x.shape[1] or held < min(session.held, x.shape[1] - 2):
            continue  # another answer's
        expected = new_cache(vlm.language_model, 1, held)
        own = None if position_ids is None else position_ids[..., :held]
        vlm.language_model(x[:, :held], kv_cache=expected, position_ids=own)
        try:
            pair = scheduler.cache.kv_cache, expected
            for (got, name), (layer, _) in zip(*map(kv.by_slot, pair), strict=True):
                assert_close(got[name][slot : slot + 1, :, :held], layer[name], name, tolerance)
            return
        except AssertionError as error:  # so it may be, too
            wrong.append(error)
    raise wrong[0] if wrong else AssertionError(f"held {scheduler.cache.filled} of {x.shape[1]} positions")


# ------------------------------------------------------------------------------------------ answers
# Every way to an answer gives the same tokens: those of the slow reference, which computes everything anew
# for each token. What this catches: a mask shifted by one, a position that restarts, a cache row swapped,
# overwritten or read past its end, a prefix that ignores pixels, a random number that depends on the batch.

ENTRANCES = (
    "cached", "left padding", "right padding", "session", "session backwards", "one slot", "three slots",
    "graph", "graph padded", "graph session", "graph slots", "native", "native padded", "native session",
    "native slots", "chunks right padding", "chunks session", "chunks native padded", "lookup three slots",
    "lookup native slots", "kept session", "kept native session", "kept three slots",
)  # fmt: skip
DELTA = {
    "layer_types": ("delta", "attention"),
    "conv_kernel": 4,
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_key_dim": 16,
    "delta_value_dim": 32,
    "attention_gate": True,
    "zero_centered_norms": True,
    "partial_rotary_factor": 0.5,
    "qk_norm": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "placeholder": {},
    "placeholder without embedding": {"image_token_id": VOCAB},
    "one kv head, own head size": {"num_key_value_heads": 1, "head_dim": 20},
    "biases, llama3 rope": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16),
    },
    "biases on q, k, v": {"attention_bias": True, "qkv_bias_only": True},
    "InternVL, norms of queries and keys": {"family": "internvl", "qk_norm": True, "head_dim": 20},
    "short convolutions": {"layer_types": ("conv", "attention"), "conv_kernel": 4, "qk_norm": True},
    "Gemma 4": {
        "family": "gemma4",
        "num_hidden_layers": 4,
        "layer_types": ("full", "sliding", "sliding shared", "full shared"),
        "sliding_window": 6,
        "full_head_dim": 16,
        "per_layer_width": 4,
        "per_layer_count": 4,
        "per_layer_vocab": VOCAB,
        "logit_cap": 10.0,
    },
    "Qwen2.5-VL": {
        "family": "qwen_vl",
        "rope_sections": (2, 2, 2),
        "attention_bias": True,
        "qkv_bias_only": True,
    },
    "Qwen3-VL": {
        "family": "qwen_vl",
        "rope_sections": (4, 3, 3),
        "rope_interleaved": True,
        "qk_norm": True,
        "head_dim": 20,
    },
    "gated delta rules": DELTA,
    "Qwen3.5": DELTA | {"family": "qwen3_5", "rope_sections": (1, 1, 1), "rope_interleaved": True},
}
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 3},
    "two answers, penalty": {
        "temperature": 1.1, "repetition_penalty": 1.4, "seed": 7, "num_return_sequences": 2
    },
    "two answers, counts": {
        "temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.7, "presence_penalty": -0.4,
        "seed": 7, "num_return_sequences": 2,
    },
}  # fmt: skip
# Every way with every sampling for one model; for the others, those that a model can differ in, with the
# sampling that needs most.
CASES = [(entrance, "placeholder", sampling) for entrance in ENTRANCES for sampling in SAMPLINGS]
CASES += [
    (entrance, model, "two answers, penalty")
    for entrance in (
        *("cached", "left padding", "session", "three slots", "graph slots", "native padded"),
        *("chunks native padded", "lookup native slots", "kept session"),
    )
    for model in MODELS
    if model != "placeholder"
]


@cache
def case(model: str, sampling: str) -> tuple:
    """(model, rows, options, expected answers): uneven rows, half of which stop."""
    vlm, options = tiny_vlm(**MODELS[model]), {"max_new_tokens": 14, **SAMPLINGS[sampling]}
    rows = some_rows(4)
    for row in rows:
        ids = row["input_ids"]
        row["input_ids"] = ids.masked_fill(ids == IMAGE_ID, vlm.config.image_token_id)
    if vlm.config.family in ("qwen_vl", "qwen3_5", "gemma4"):
        rows = list(map(packed, rows))
    free = answers(vlm, "recomputed", rows, **options, **NO_STOP)
    options["stop_token_ids"] = (free[0][2], free[-1][6])
    return vlm, rows, options, answers(vlm, "recomputed", rows, **options)


class Answer(NamedTuple):
    """`confidence` and `logprobs` are None where they were not asked for; a scheduler reports `logprobs` with
    each token and not with the answer."""

    token_ids: list[int]
    confidence: float | None
    logprobs: list[TokenLogprobs] | None
    decision: Decision | None = None


def answers(vlm, entrance: str, rows: Sequence[dict], **options) -> list[list[int]]:
    """The ids of `details`."""
    return [answer.token_ids for answer in details(vlm, entrance, rows, **options)]


def details(vlm, entrance: str, rows: Sequence[dict], **options) -> list[Answer]:
    """The answers to each row, of several answers side by side, by one of the `ENTRANCES`, or "recomputed",
    the slow reference. Raises the error of a request that fails."""
    more = entrance.partition(" ")[0]
    store = None
    if more in ("chunks", "lookup", "kept"):
        entrance = entrance[len(more) + 1 :]
        options |= {"chunks": {"prefill_chunk": 3}, "lookup": {"lookup": "on"}}.get(more, {})
        if more == "kept":  # the second time, from what others of their prompts have left
            store = PrefixStore(vlm)
            for row in rows:
                Session(vlm, prefixes=store).generate_detailed(**row, max_new_tokens=1, decode_step=None)
            assert store.size_in_bytes
    step, kind, way = None, entrance.split()[0], entrance
    if kind in ("native", "graph"):
        step, way = (
            fast_step(vlm, NativeStep if kind == "native" else GraphStep),
            entrance[len(kind) + 1 :],
        )
    if way in ("slots", "one slot", "three slots"):
        requests = [
            Request(row["input_ids"][0], row.get("pixel_values"), options=own, key=(index, number))
            for index, row in enumerate(rows)
            for number, own in enumerate(each_answer(GenerationOptions(**options)))
        ]
        slots = 1 if way == "one slot" else 3
        outputs, _ = run_all(vlm, requests, slots, decode_step=step, prefixes=store)
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        made = [outputs[key] for key in sorted(outputs)]
        return [Answer(one.token_ids, one.confidence, None, one.decision) for one in made]
    options |= {"decode_step": step, "use_cache": entrance != "recomputed"}
    if "pad" in way:
        return _each(vlm.generate_detailed(**collate(rows, way.partition(" ")[0]), **options))
    if "session" not in way:
        return [one for row in rows for one in _each(vlm.generate_detailed(**row, **options))]
    session, order = Session(vlm, FeatureCache(vlm, 2**16), store), list(enumerate(rows))
    found = {}
    for index, row in reversed(order) if way.endswith("backwards") else order:
        for _ in range(2):  # again, when the prompt is there already
            found[index] = _each(session.generate_detailed(**row, **options))
    return [one for index in sorted(found) for one in found[index]]


def _each(output: GenerationOutput) -> list[Answer]:
    columns = output.rows(), output.confidences, output.logprobs, output.decisions
    return [Answer(*one) for one in zip_longest(*columns)]


def fast_step(vlm, kind: type[NativeStep] | type[GraphStep]) -> NativeStep | GraphStep:
    """A fast step with weights of its own, as the C step rearranges them; skips the test where there is no
    compiler or the step cannot run the model."""
    try:
        return kind(copy.deepcopy(vlm.language_model))
    except (NoCompiler, ValueError) as error:
        pytest.skip(str(error))


def run_all(vlm, requests: Sequence[Request], slots: int = 3, **options) -> tuple[dict, Scheduler]:
    """The outputs of a `Scheduler` by key, one for each request, and the scheduler."""
    scheduler = Scheduler(vlm, slots, **options)
    outputs = list(scheduler.run(requests))
    by_key = {output.key: output for output in outputs}
    assert len(by_key) == len(outputs) == len(requests)
    return by_key, scheduler
