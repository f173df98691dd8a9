"""The cache's own operations, and that cached equals uncached for any split."""

import pytest
import torch

from generation import kv_cache as kv
from generation import memory
from models.config import RopeScaling, TextConfig
from models.language_model import LanguageModel
from tests import invariants
from tests.prompts import keys


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
    "norms of queries and keys": {"qk_norm": True},
    "llama3 rope": {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16)},
    "short convolutions": {"layer_types": ("conv", "attention")},
    "gated delta rules": {
        "layer_types": ("delta", "attention"),
        "delta_key_heads": 2,
        "delta_value_heads": 4,
        "delta_key_dim": 6,
        "delta_value_dim": 5,
    },
}


def filled_cache(batch=1, capacity=6, layers=2, heads=2, dim=4, dtype=torch.float32):
    cache = kv.allocate(keys(layers, heads, dim), batch, capacity, dtype)
    for index, layer in enumerate(cache):
        layer["key"].copy_(torch.randn(layer["key"].shape))
        layer["value"].fill_(index + 1)
    return cache


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("sizes", [[17], [1] * 17, [5, 12], [1, 7, 2, 7], [9, 1, 1, 6]])
def test_chunks_equal_one_pass(changes, sizes):
    invariants.chunks_equal_one_pass(language_model(**changes), torch.randn(2, 17, 32), sizes)


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("sizes", [[1] * 5, [5], [2, 1, 2]])
def test_rows_at_different_places_equal_alone(changes, sizes):
    prefixes = [0, 3, 11, 4]
    rows = [torch.randn(prefix + 5, 32) for prefix in prefixes]
    invariants.ragged_starts_equal_alone(language_model(**changes), rows, prefixes, sizes)


def test_a_cache_that_grows_keeps_contents_and_objects():
    cache = filled_cache(capacity=6)
    layers, before = list(cache), [layer["key"].clone() for layer in cache]
    kv.resize(cache, 1024)
    assert kv.geometry(cache).capacity == 1024
    assert all(layer is old for layer, old in zip(cache, layers))
    assert all(torch.equal(layer["key"][:, :, :6], old) for layer, old in zip(cache, before))
    assert all(not tensor[:, :, 6:].any() for layer in cache for tensor in layer.values())


@torch.no_grad()
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_going_back_then_on_equals_never_having_been_there(changes):
    model, x, other = language_model(**changes), torch.randn(1, 12, 32), torch.randn(1, 4, 32)
    cache = invariants.new_cache(model, 1, 20)
    model(x, kv_cache=cache)
    hidden, _ = model(other, kv_cache=cache, start_pos=5)
    expected, _ = model(torch.cat((x[:, :5], other), 1))
    invariants.assert_close(hidden, expected[:, 5:], "from position 5 on")


@pytest.mark.parametrize("fails", [{1}, {2}, {4}, {2, 3}, {4, 5}], ids=str)
@pytest.mark.parametrize("target", [9, 3], ids=["longer", "shorter"])
def test_a_change_of_length_cut_short_leaves_layers_alike_and_can_be_tried_again(monkeypatch, target, fails):
    """Where it could not be undone either, it can be seen: kernels take one layout for all layers."""
    cache = kv.allocate(keys(2, 1, 2), 1, 6, torch.float32)
    for layer in cache:
        for tensor in layer.values():
            tensor[:, :, :3] += torch.arange(3.0)[:, None]
    new_zeros, calls = torch.Tensor.new_zeros, []

    def interrupted(self, *shape):
        calls.append(1)
        if len(calls) in fails:
            raise KeyboardInterrupt
        return new_zeros(self, *shape)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "new_zeros", interrupted)
        kv.resize(cache, target)
    assert kv.geometry(cache).capacity == 6 and kv.even(cache) == (len(fails) == 1)
    for length in (6, target):
        kv.resize(cache, length)
        for layer in cache:
            for tensor in layer.values():
                assert tensor.shape[2] == length and tensor[0, 0, :3, 1].tolist() == [0, 1, 2]
        assert kv.even(cache)


def test_fork_copies_only_what_is_filled():
    source = filled_cache(batch=2)
    forked = kv.fork(source, 4, 3, 9)
    assert kv.geometry(forked).rows == 6 and kv.geometry(forked).capacity == 9
    for old, new in zip(source, forked):
        for name in ("key", "value"):
            assert torch.equal(new[name][:, :, :4], old[name][:, :, :4].repeat_interleave(3, 0))
            assert not new[name][:, :, 4:].any()
    forked[0]["key"].zero_()
    assert source[0]["key"].any(), "a fork must not share memory"


# --- memory


def test_control_groups_leave_what_their_limits_say(tmp_path):
    """Both versions, any depth, and a group that a container shows as the root."""

    def group(folder, names, limit, used, droppable):
        folder.mkdir(parents=True)
        for name, text in zip(names, (limit, used, f"anon 7\n{names[3]} {droppable}"), strict=False):
            (folder / name).write_text(f"{text}\n")

    def left(membership, root=tmp_path):
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text(membership)
        return memory.cgroup_available(root)

    second = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "a", second, 1000, 700, 50)
    group(mount / "a/b", second, "max", 600, 0)
    group(mount / "memory/c", first, 900, 1000, 20)
    group(mount / "memory/c/d", first, 5000, 1000, 30)
    group(tmp_path / "container/sys/fs/cgroup", second, 1000, 700, 50)
    assert left("0::/a/b\n") == [350]
    assert left("5:cpu,memory:/c/d\n3:cpu:/a\n0::/\n") == [4030, 0]
    assert left("0::/docker/not/seen/here\n", tmp_path / "container") == [350]
    assert left("") == []
