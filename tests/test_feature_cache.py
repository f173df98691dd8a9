"""Features by content: what tells tiles apart, what is kept, and what goes first."""

from __future__ import annotations

import pytest
import torch

from generation.prefix import FeatureCache, tile_digests
from tests.invariants import assert_close
from tests.prompts import SIDE, TILE_BYTES, tile, tiny_vlm


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


def test_digests_tell_pixels_shape_dtype_and_mask_apart():
    one, ones = tile(1)[None], torch.ones(1, SIDE, SIDE)
    half = ones.clone()
    half[:, :, 8:] = 0
    changed = one.clone()
    changed[0, 2, -1, -1] += 1e-6
    different = [
        tile_digests(one),
        tile_digests(changed),
        tile_digests(one.view(1, 3, SIDE // 2, SIDE * 2)),
        tile_digests(one.view(torch.int32)),
        tile_digests(one.bfloat16()),
        tile_digests(one, half),
    ]
    assert len({digest for (digest,) in different}) == len(different)
    # A row of a batch, a channels-last copy, a mask that hides nothing: the same tile.
    batch = torch.stack([tile(2), tile(1)])
    assert tile_digests(batch)[1] == tile_digests(one)[0] == tile_digests(one, ones.bool())[0]
    assert tile_digests(batch.to(memory_format=torch.channels_last))[1] == tile_digests(one)[0]


# --- the feature cache


def encode(kept: FeatureCache, *seeds: int) -> tuple[torch.Tensor, int]:
    tiles = torch.stack([tile(seed) for seed in seeds])
    return kept.encode(tiles, None, tile_digests(tiles))


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
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept._features.values()
    }
    assert sum(storage.nbytes() for storage in memory.values()) <= kept.max_bytes
    kept.clear()
    assert (len(kept), kept.size_in_bytes, encode(kept, 9)[1]) == (0, 0, 1)


@pytest.mark.parametrize("max_bytes", [0, TILE_BYTES - 1])
def test_a_tile_that_does_not_fit_is_not_kept(vlm, max_bytes):
    kept = FeatureCache(vlm, max_bytes)
    assert [encode(kept, 1)[1], encode(kept, 1)[1]] == [1, 1] and len(kept) == kept.size_in_bytes == 0
