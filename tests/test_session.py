"""`Session` and `FeatureCache`: less work for the same tokens, interrupts, room, threads; and in generate.py.

That a session's answers are those of a fresh `generate` is in test_generate.py and test_cache_properties.py.
"""

from __future__ import annotations

import pytest
import torch

from generation.features import FeatureCache, digests_of
from generation.keyed_prompts import Item, KeyedPrompt, embed_after, first_part
from generation.session import Session
from tests.invariants import assert_close, session_holds
from tests.prompts import (
    NO_STOP,
    SIDE,
    TILE_BYTES,
    ImageBlock,
    inputs_of,
    length_of,
    record,
    tile,
    words,
)
from tests.tiny import IMAGE_ID

# --- what is saved


def test_a_conversation_prefills_only_what_is_new(vlm, monkeypatch):
    session, history = Session(vlm), [*words(1, 5), ImageBlock(1), *words(2, 4)]
    passes, images = record(monkeypatch, vlm)
    expected_new = length_of(history)
    for turn in range(3):
        passes.clear(), images.clear()
        result = session.generate_detailed(**inputs_of(history), max_new_tokens=6, **NO_STOP)
        # After the first turn: the answer's last token, which was never fed back, and five words.
        assert passes == [expected_new] + [1] * 5 and result.prefilled == expected_new
        assert images == ([1] if turn == 0 else [])
        assert (result.tiles_encoded, result.tiles_reused) == ((1, 0) if turn == 0 else (0, 1))
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(history), max_new_tokens=6, **NO_STOP))
        history += [*result.rows()[0], *words(3 + turn, 5)]
        expected_new = 1 + 5


def test_a_tile_is_encoded_once_for_all_its_prompts(vlm, monkeypatch):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    _, images = record(monkeypatch, vlm)
    prompts = [
        [1, ImageBlock(1), 2, ImageBlock(1)],
        [3, ImageBlock(1), ImageBlock(2), ImageBlock(3)],
        [4, ImageBlock(3), 5],
    ]
    results = [
        session.generate_detailed(**inputs_of(p), max_new_tokens=3, **NO_STOP) for p in [*prompts, prompts[0]]
    ]
    assert images == [1, 2]  # the missing ones of a prompt in one call
    assert [(r.tiles_encoded, r.tiles_reused) for r in results] == [(1, 1), (2, 1), (0, 1), (0, 2)]
    assert [r.reused for r in results] == [0] * 4
    for prompt, result in zip(prompts, results):
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(prompt), max_new_tokens=3, **NO_STOP))


def test_a_tile_that_is_real_in_part_is_refused(vlm):
    """No processor makes one: a mask is all ones, or hides a tile of padding."""
    session, inputs = Session(vlm), inputs_of([1, ImageBlock(1), 2, ImageBlock(2), 3])
    mask = torch.ones(1, 2, SIDE, SIDE, dtype=torch.int64)
    options = {"max_new_tokens": 2, **NO_STOP}
    assert torch.equal(
        session.generate(**inputs, pixel_attention_mask=mask, **options), vlm.generate(**inputs, **options)
    )
    mask[0, 1, :, SIDE // 2 :] = 0
    for answerer in (session, vlm):
        with pytest.raises(ValueError):
            answerer.generate(**inputs, pixel_attention_mask=mask, **options)


# --- interrupts


@pytest.mark.parametrize(("call", "layer"), [(0, 1), (3, 0)])
def test_ctrl_c_anywhere_in_the_decoder_leaves_the_session_true(vlm, monkeypatch, call, layer):
    """Call 0 is the prefill; the layers before the interrupt have written to the cache already."""
    session = Session(vlm)
    start = [*words(1, 5), ImageBlock(1), *words(2, 3)]
    session.generate(**inputs_of(start), max_new_tokens=4, **NO_STOP)
    other = [*words(1, 5), ImageBlock(1), 99, *words(4, 6)]
    expected = vlm.generate(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    block, calls = vlm.language_model.layers[layer], []
    forward = block.forward

    def interrupted(*arguments):
        calls.append(1)
        out = forward(*arguments)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block, "forward", interrupted)
        session.generate(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    kept = 9 if call == 0 else length_of(other) + call - 1
    assert session.held == kept
    session_holds(session, vlm, other + expected[0].tolist())
    again = session.generate_detailed(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    assert torch.equal(again.token_ids, expected) and again.reused == min(kept, length_of(other) - 1)


def test_an_unfinished_answer_cannot_go_on_after_another_one(vlm):
    session = Session(vlm)
    first, second = inputs_of([*words(1, 5), 8]), inputs_of([*words(1, 5), 9])
    stream = session.generate_stream(**first, max_new_tokens=9, **NO_STOP)
    tokens = iter(stream)
    next(tokens), next(tokens)
    expected = session.generate(**second, max_new_tokens=9, **NO_STOP)
    with pytest.raises(ValueError):
        next(tokens)
    assert session.held == 6 + 8
    session_holds(session, vlm, [*words(1, 5), 9, *expected[0].tolist()])
    stream = session.generate_stream(**second, max_new_tokens=9, **NO_STOP)
    tokens = iter(stream)
    next(tokens)
    session.reset()
    with pytest.raises(ValueError):
        next(tokens)
    assert session.held == 0


# --- room


# --- refusals


def test_what_a_session_cannot_do_is_refused_and_changes_nothing(vlm):
    session, prompt = Session(vlm), [*words(1, 5), ImageBlock(1), 9]
    answer = session.generate(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    stream = session.generate_stream(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    next(iter(stream))
    one = inputs_of([*words(1, 3), ImageBlock(2), 9])
    for inputs, options, field in (
        (one, {"max_new_tokens": 393}, "context"),
        (one, {"use_cache": False}, "use_cache"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, {}, "batch of 2"),
        ({"input_ids": torch.tensor([[10**6]])}, {}, "input_ids"),
        (one | {"pixel_values": one["pixel_values"][..., :8]}, {}, "tiles of"),
    ):
        with pytest.raises(ValueError, match=field):
            session.generate_stream(**inputs, **options)
    assert torch.equal(stream.drain().token_ids, answer)  # not even the answer that goes on
    session_holds(session, vlm, [*prompt, *answer[0].tolist()])


# --- features by content


def test_digests_tell_pixels_shape_and_dtype_apart():
    one = tile(1)[None]
    changed = one.clone()
    changed[0, 2, -1, -1] += 1e-6
    different = [
        digests_of(one),
        digests_of(changed),
        digests_of(one.view(1, 3, SIDE // 2, SIDE * 2)),
        digests_of(one.view(torch.int32)),
        digests_of(one.bfloat16()),
    ]
    assert len({digest for (digest,) in different}) == len(different)
    # A row of a batch, a channels-last copy: the same tile.
    batch = torch.stack([tile(2), tile(1)])
    assert digests_of(batch)[1] == digests_of(one)[0]
    assert digests_of(batch.to(memory_format=torch.channels_last))[1] == digests_of(one)[0]


def encode(kept: FeatureCache, *seeds: int) -> tuple[torch.Tensor, int]:
    tiles = torch.stack([tile(seed) for seed in seeds])
    features, encoded = kept.encode(tiles, digests_of(tiles))
    return torch.stack(features), encoded


def test_the_rest_of_a_prompt_whatever_its_parts_take(vlm):
    """Images whose parts take different numbers of positions, one right after another."""
    ids = torch.tensor([1, *[IMAGE_ID] * 11, 2, *[IMAGE_ID] * 3, 4])
    items = [Item(bytes([number]) * 32, positions) for number, positions in enumerate((4, 7, 3))]
    keys = ids.masked_fill(ids == IMAGE_ID, -9)
    prompt, features = KeyedPrompt(ids, None, items, keys), [torch.randn(n, 48) for _, n in items]
    whole = embed_after(vlm, prompt, 0, features)
    assert torch.equal(whole[0, ids == IMAGE_ID], torch.cat(features))
    for reused in range(len(ids)):
        rest = embed_after(vlm, prompt, reused, features[first_part(prompt, reused)[0] :])
        assert torch.equal(rest, whole[:, reused:]), reused


def test_features_are_kept_within_bounds_and_go_by_last_use(vlm):
    kept = FeatureCache(vlm, 3 * TILE_BYTES + 1)
    assert [encode(kept, seed)[1] for seed in (1, 2, 3)] == [1, 1, 1]
    assert encode(kept, 1)[1] == 0  # used again: now 2 is the oldest
    assert encode(kept, 4)[1] == 1
    assert (len(kept), kept.size_in_bytes) == (3, 3 * TILE_BYTES)
    assert [encode(kept, seed)[1] for seed in (1, 3, 4)] == [0, 0, 0]
    assert encode(kept, 2)[1] == 1
    features, encoded = encode(kept, 5, 6, 7, 8, 9, 5)  # more than it keeps
    assert encoded == 5 and len(kept) == 3
    with torch.no_grad():
        expected = vlm.encode_images(torch.stack([tile(seed) for seed in (5, 6, 7, 8, 9, 5)]))
    assert_close(features, expected, "features")
    storages = [tensor.untyped_storage().nbytes() for tensor in kept._features.values()]
    assert sum(storages) <= kept.max_bytes, "a row keeps its whole batch in memory"
    kept.clear()
    assert (len(kept), kept.size_in_bytes, encode(kept, 9)[1]) == (0, 0, 1)


# --- generate.py
