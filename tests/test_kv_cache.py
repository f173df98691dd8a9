"""The cache's own operations, and that cached equals uncached for any split."""

import pytest
import torch

from generation import kv_cache as kv
from models.config import RopeScaling, TextConfig
from models.language_model import LanguageModel
from tests import invariants


def language_model(**changes) -> LanguageModel:
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    } | changes
    model = LanguageModel(TextConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.2, generator=generator)
    return model


MODELS = {
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "no grouping, own head_dim": {"num_key_value_heads": 4, "head_dim": 16},
    "llama3 rope": {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16)},
}


def filled_cache(batch=1, capacity=6, layers=2, heads=2, dim=4, dtype=torch.float32):
    cache = kv.allocate(layers, batch, heads, capacity, dim, dtype)
    for index, layer in enumerate(cache):
        layer["key"].copy_(torch.randn(layer["key"].shape))
        layer["value"].fill_(index + 1)
    return cache


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("sizes", [[17], [1] * 17, [16, 1], [5, 12], [1, 7, 2, 7], [9, 1, 1, 6]])
def test_chunks_equal_one_pass(changes, sizes):
    invariants.chunks_equal_one_pass(language_model(**changes), torch.randn(2, 17, 32), sizes)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("sizes", [[1] * 5, [5], [2, 1, 2]])
def test_rows_at_different_places_equal_alone(changes, sizes):
    prefixes = [0, 3, 11, 4]
    rows = [torch.randn(prefix + 5, 32) for prefix in prefixes]
    invariants.ragged_starts_equal_alone(language_model(**changes), rows, prefixes, sizes)


def test_allocate_shapes_and_bytes():
    cache = kv.allocate(3, 2, 4, 10, 8, torch.bfloat16)
    assert len(cache) == 3 and all(set(layer) == {"key", "value"} for layer in cache)
    assert all(t.shape == (2, 4, 10, 8) and t.dtype == torch.bfloat16 for c in cache for t in c.values())
    per_token = kv.bytes_per_token(3, 4, 8, torch.bfloat16)
    assert per_token == 2 * 3 * 4 * 8 * 2
    assert kv.size_in_bytes(cache) == 2 * 10 * per_token
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        kv.allocate(3, 2, 4, 0, 8, torch.float32)


def test_grow_keeps_contents_and_objects():
    cache = filled_cache(capacity=6)
    layers, before = list(cache), [layer["key"].clone() for layer in cache]
    kv.grow(cache, 6)
    assert kv.capacity(cache) == 6
    kv.grow(cache, 7)
    assert kv.capacity(cache) == 1024
    assert all(layer is old for layer, old in zip(cache, layers))
    assert all(torch.equal(layer["key"][:, :, :6], old) for layer, old in zip(cache, before))
    assert all(not tensor[:, :, 6:].any() for layer in cache for tensor in layer.values())
    kv.grow(cache, 1025)
    assert kv.capacity(cache) == 2048
    kv.grow(cache, 2049, limit=2100)
    assert kv.capacity(cache) == 2100
    with pytest.raises(ValueError, match="2101 positions needed, limited to 2100"):
        kv.grow(cache, 2101, limit=2100)


@torch.no_grad()
def test_rewind_then_continue_equals_never_having_gone_on():
    model, x = language_model(), torch.randn(1, 12, 32)
    cache = invariants.new_cache(model, 1, 20)
    model(x, kv_cache=cache)
    start = kv.rewind(cache, 12, 5)
    other = torch.randn(1, 4, 32)
    hidden, _ = model(other, kv_cache=cache, start_pos=start)
    expected, _ = model(torch.cat((x[:, :5], other), 1))
    invariants.assert_close(hidden, expected[:, 5:], "after a rewind")
    for bad in (-1, 13):
        with pytest.raises(ValueError, match=f"cannot rewind to {bad}"):
            kv.rewind(cache, 12, bad)
    with pytest.raises(ValueError, match="21 of 20"):
        kv.rewind(cache, 21, 3)


def test_view_shares_memory():
    cache = filled_cache()
    kv.view(cache, 3)[1]["value"][:, :, 2] = 9
    assert (cache[1]["value"][:, :, 2] == 9).all() and kv.capacity(kv.view(cache, 3)) == 3


def test_fork_copies_only_what_is_filled():
    source = filled_cache(batch=2)
    forked = kv.fork(source, 4, 3, new_capacity=9)
    assert kv.rows(forked) == 6 and kv.capacity(forked) == 9
    for old, new in zip(source, forked):
        for name in ("key", "value"):
            assert torch.equal(new[name][:, :, :4], old[name][:, :, :4].repeat_interleave(3, 0))
            assert not new[name][:, :, 4:].any()
    forked[0]["key"].zero_()
    assert source[0]["key"].any(), "a fork must not share memory"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"layers": 3}, "2 layers, the target 3"),
        ({"heads": 4}, "expected 2 heads of 4 .* got 4"),
        ({"dim": 8}, "got 2 of 8"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"capacity": 3}, "4 positions do not fit"),
        ({"batch": 3}, "3 rows are no multiple of the source's 2"),
    ],
)
def test_fork_into_refuses_another_geometry(target, message):
    with pytest.raises(ValueError, match=message):
        kv.fork_into(filled_cache(batch=2), filled_cache(**({"batch": 4} | target)), 4)


def test_fork_into_refuses_a_target_in_use():
    source = filled_cache()
    with pytest.raises(ValueError, match="holds 2 positions: expected an empty one"):
        kv.fork_into(source, filled_cache(batch=3), 4, target_length=2)
    with pytest.raises(ValueError, match="into itself"):
        kv.fork_into(source, source, 4)
    with pytest.raises(ValueError, match="7 positions do not fit"):
        kv.fork(source, 7, 2)
    with pytest.raises(ValueError, match="into 0 rows"):
        kv.fork(source, 4, 0)


def test_fork_of_nothing_between_slots_of_one_cache():
    """Views without positions have no address: they are not the same cache for it."""
    cache = filled_cache(batch=2)
    first, second = (
        [{name: tensor[row : row + 1, :, :0] for name, tensor in layer.items()} for layer in cache]
        for row in (0, 1)
    )
    kv.fork_into(first, second, 0)
