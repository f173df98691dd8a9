"""Every phase of the Triton decode step, in Triton's interpreter, against the eager step.

    TRITON_INTERPRET=1 python -m pytest tests/cuda_check/test_kernels.py     # numpy < 2.4

Programs run one after another there: what they read of one another between two phases shows, a race does not.
"""

from __future__ import annotations

import copy

import pytest
import torch

triton = pytest.importorskip("triton")

from generation import kv_cache as kv  # noqa: E402
from generation.fast import quantized  # noqa: E402
from generation.fast.cuda.decoder import TritonDecoder, unsupported  # noqa: E402
from generation.fast.native.panels import round_layer, to_rows  # noqa: E402
from generation.fast.quantized import pack  # noqa: E402
from models.config import RopeScaling, TextConfig  # noqa: E402
from models.gemma4_text import Gemma4LanguageModel, Gemma4TextConfig  # noqa: E402
from models.language_model import LanguageModel  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 is not set")

CHUNK, SHARE = 64, 128  # keys at once, the fewest of a share
VOCAB = 59
DELTA = {
    "delta_key_heads": 2, "delta_value_heads": 2, "delta_key_dim": 16, "delta_value_dim": 40, "qk_norm": True,
    "attention_gate": True, "zero_centered_norms": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
GEMMA = {
    "layer_types": ("sliding", "full", "sliding", "sliding shared", "full shared"), "sliding_window": 20,
    "full_head_dim": 32, "shared_mlp_factor": 2, "per_layer_width": 24, "per_layer_count": 5,
    "per_layer_vocab": VOCAB, "logit_cap": 5.0, "placeholder_id": 7, "hidden_size": 80, "qk_norm": True,
}  # fmt: skip
SHAPES = {
    "9:3": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "15:5": {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64},
    "32:8": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16},
    "4:4": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "4:1, 128": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128},
    "3:1, 512": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 512},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "biases of queries, keys and values": {"attention_bias": True, "qkv_bias_only": True},
    "norms of queries and keys": {"qk_norm": True},
    "places of images": {"rope_sections": (4, 2, 2), "rope_interleaved": True},
    "short convolutions": {"layer_types": ("conv", "attention"), "qk_norm": True, "hidden_size": 320},
    "their biases": {"layer_types": ("attention", "conv"), "conv_bias": True, "conv_kernel": 4},
    "gated delta rules": {"layer_types": ("delta", "attention"), "conv_kernel": 4, **DELTA},
    "groups of them": {
        "layer_types": ("attention", "delta"),
        "conv_kernel": 2,
        **DELTA,
        "delta_value_heads": 4,
        "delta_key_dim": 24,
        "head_dim": 32,
        "partial_rotary_factor": 0.75,
    },
    "Gemma 4": GEMMA,
    "Gemma 4, biases": {
        "layer_types": ("full", "sliding", "full shared", "sliding shared"),
        "sliding_window": 130,
        "num_attention_heads": 12,
        "head_dim": 64,
        "full_head_dim": 16,
        "qk_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3 positions": {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=64)},
}


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch):
    """The interpreter cuts float32 off where a GPU rounds it to the nearest bfloat16."""
    interpreter = triton.runtime.interpreter
    convert, bfloat16, float32 = interpreter._convert_float, triton.language.bfloat16, triton.language.float32

    def nearest(data, source, target, mode):
        if (source, target) != (float32, bfloat16):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(data.copy()).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view("uint16").reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make(dtype=torch.float32, **other) -> LanguageModel:
    """A model with every number random, of a width that fills no tile, and a layer of each type."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 48} | other
    sizes |= {"vocab_size": VOCAB, "intermediate_size": 72, "max_position_embeddings": 8192}
    sizes["num_hidden_layers"] = len(other.get("layer_types", "1"))
    torch.manual_seed(1)
    if "sliding_window" in other:
        config = Gemma4TextConfig(**sizes)
        model = Gemma4LanguageModel(config, tie_word_embeddings=True, soft_ids=(VOCAB - 1, 3))
    else:
        model = LanguageModel(TextConfig(**sizes, rope_theta=10_000.0))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("layer_scalar"):
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            # Gemma 4's scores are not divided by anything.
            parameter.mul_(0.3 if "q_norm" in name and "sliding_window" in other else 1)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[1] ** 0.5)
    model.embed_tokens.weight.copy_(torch.randn_like(model.embed_tokens.weight))
    return model.to(dtype).eval()


def cache_of(model: LanguageModel, rows: int, capacity: int, filled: bool = True) -> kv.KVCache:
    cache = kv.allocate_for(model, rows, capacity)
    torch.manual_seed(2)
    for layer in cache if filled else []:
        for name, tensor in layer.items():
            tensor.copy_(torch.randn(tensor.shape))
            if name == "recent":  # its last number is a decay
                tensor[..., -1] *= -0.3 * tensor[..., -1].sign()
    return cache


def eager(model: LanguageModel, token, cache: kv.KVCache, position, offsets=None) -> torch.Tensor:
    """(B, V) of the ordinary step: row by row, as each would be alone."""
    logits = []
    for row, start in enumerate(position.tolist()):
        own = [{name: tensor[row : row + 1] for name, tensor in layer.items()} for layer in cache]
        x, offset = model.embed(token[row : row + 1]), 0 if offsets is None else int(offsets[row])
        hidden, _ = model(x, kv_cache=own, start_pos=start, offset=offset)
        logits.append(model.logits(hidden[:, -1]))
    return torch.cat(logits)


def run(model, position: list[int], capacity: int, programs: int = 7, filled=True):
    """(logits, cache) of the Triton step, and of the eager one on the same tokens and cache."""
    rows = len(position)
    token = torch.randint(VOCAB, (rows, 1), generator=torch.Generator().manual_seed(3))
    at = torch.tensor(position)
    mine = cache_of(model, rows, capacity, filled)
    theirs = copy.deepcopy(mine)
    offsets = 3 - 5 * torch.arange(rows) if model.config.rope_sections else None
    decoder = TritonDecoder(model, programs)
    logits = decoder(token, mine, at, offsets).clone()
    return logits, mine, eager(model, token, theirs, at, offsets), theirs


def assert_same(model, position: list[int], capacity: int, tolerance: float = 2e-5, **how) -> None:
    got, mine, expected, theirs = run(model, position, capacity, **how)
    assert got.dtype == model.norm.weight.dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    for ours, reference in zip(mine, theirs, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], reference[name], atol=tolerance, rtol=tolerance)


# --- float32: the eager step's numbers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_shapes(shape, rows):
    assert_same(make(**SHAPES[shape]), [70, 5, 131][:rows], 140, programs=24)


@pytest.mark.parametrize("rows", [1, 2, 4, 9, 17, 64])
def test_rows_of_different_lengths(rows):
    position = ([0, 63, 64, 200, 1, 127, 128, 129] * 8)[-rows:]
    assert_same(make(), position, 208, programs=60)


def around(*edges: int) -> list[int]:
    return [edge + offset for edge in edges for offset in (-1, 0, 1)]


EDGES = [0, *around(CHUNK, SHARE, SHARE + CHUNK, 2 * SHARE, 4 * SHARE), 1, 2, 3, 700, 511, 800, 100, 99]


@pytest.mark.parametrize("programs", [3, 160])
@pytest.mark.parametrize("positions", [EDGES[:8], EDGES[8:16], EDGES[16:]], ids=str)
def test_lengths_around_the_edges_of_chunks_and_shares(positions, programs):
    assert_same(make(), positions, 801, programs=programs)


@pytest.mark.parametrize("position", [0, 128, *around(1024, 2048, 4096)])
def test_one_row_at_any_length(position):
    assert_same(make(), [position], position + 1, programs=40)


@pytest.mark.parametrize("shape", ["gated delta rules", "groups of them"])
@pytest.mark.parametrize("positions", [[0, 14, 15, 16, 30, 31, 47, 1], [15], [31]], ids=str)
def test_windows_of_a_gated_delta_rule(shape, positions):
    """The last slot of each folds what they have added into the matrix that the next one begins with."""
    assert_same(make(**SHAPES[shape]), positions, 48)


@pytest.mark.parametrize("positions", [[0, 18, 19, 20, 38, 39, 40, 3], [63]], ids=str)
def test_slots_that_a_layer_does_not_see(positions):
    """Those before the window of sliding layers, and those from the token's own on, which it writes."""
    model, at = make(**GEMMA), torch.tensor(positions)
    cache, token = cache_of(model, len(at), 64), torch.randint(VOCAB, (len(at), 1))
    clean = copy.deepcopy(cache)
    for kind, layer in zip(GEMMA["layer_types"], cache, strict=True):
        for tensor in layer.values():
            for row, position in enumerate(positions):
                tensor[row, :, position:] = torch.nan
                tensor[row, :, : max(0, position - 19) if kind == "sliding" else 0] = torch.nan
    got = TritonDecoder(model, programs=24)(token, cache, at)
    torch.testing.assert_close(got, eager(model, token, clean, at), atol=5e-5, rtol=5e-5)


def rounded(model: LanguageModel, precision: str) -> LanguageModel:
    """As a checkpoint is opened on CUDA."""
    if precision == "int8":
        return pack(model, precision)
    return to_rows(pack(model, precision, round_layer), torch.device("cpu"))


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("shape", [{}, SHAPES["their biases"], SHAPES["groups of them"], GEMMA], ids=str)
def test_rounded_weights(shape, precision):
    model = rounded(make(**shape), precision)
    assert_same(model, [130], 140, tolerance=1e-2)
    assert_same(model, [130, 8], 140, tolerance=1e-2, programs=24)  # the cache is in bfloat16


@pytest.mark.parametrize("shape", [{}, SHAPES["short convolutions"], SHAPES["gated delta rules"]], ids=str)
def test_a_cache_that_is_part_of_a_larger_one(shape):
    model, position = make(**shape), torch.tensor([20, 9])
    token, large = torch.tensor([[3], [4]]), cache_of(model, 4, 64)
    part = kv.view(large, 40, 1, 2)
    small = [{name: tensor.clone() for name, tensor in layer.items()} for layer in part]
    before = copy.deepcopy(large)
    got = TritonDecoder(model, programs=1)(token, part, position)
    torch.testing.assert_close(got, eager(model, token, small, position), atol=2e-5, rtol=2e-5)
    for layer, old in zip(large, before, strict=True):
        for name, tensor in layer.items():
            changed = (tensor != old[name]).any(-1).any(1).nonzero().tolist()
            expected = [] if name == "state" else [[1, 20], [2, 9]]
            assert changed == expected, "the new positions and nothing else"


def unread(name: str, slots: int, position: int, shape: dict) -> list[int]:
    """The slots of a cache's tensor that a step at this position does not read."""
    window = position // kv.STATE_WINDOW
    begin = {"key": 0, "value": 0, "recent": window * kv.STATE_WINDOW}
    first = begin.get(name, max(0, position + 1 - shape.get("conv_kernel", 3)))
    read = {slot % slots for slot in range(first, position)}
    if name == "state":
        read = {window % 2} if window else set()
    return sorted({*range(slots)} - read)


@pytest.mark.parametrize("shape", [{}, SHAPES["their biases"], SHAPES["groups of them"], GEMMA], ids=str)
def test_a_row_knows_nothing_of_the_others(shape):
    """Garbage in one row, in slots that a row does not read, or in buffers, does not reach another."""
    model, token, position = make(**shape), torch.tensor([[3], [4], [5]]), torch.tensor([20, 33, 7])
    cache, decoder = cache_of(model, 3, 200), TritonDecoder(model, programs=40)
    clean = decoder(token, cache, position).clone()
    for name, tensor in ((name, tensor) for layer in cache for name, tensor in layer.items()):
        tensor[1] = torch.nan
        for row in (0, 2):
            tensor[row, :, unread(name, tensor.shape[2], int(position[row]), shape)] = torch.nan
    for name, buffer in (*vars(decoder).items(), *decoder._logits.items()):
        if isinstance(buffer, torch.Tensor) and buffer.is_floating_point() and name != "_frequencies":
            buffer.fill_(torch.nan)
    dirty = decoder(token, cache, position)
    assert dirty[1].isnan().any()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("shape", [{}, SHAPES["short convolutions"], SHAPES["gated delta rules"]], ids=str)
def test_five_tokens_are_those_of_the_eager_step(shape):
    """From the second token on the cache holds what the step itself has written."""
    model = make(**shape)
    decoder, mine = TritonDecoder(model, programs=9), cache_of(model, 2, 20, filled=False)
    theirs = copy.deepcopy(mine)
    token, position = torch.tensor([[7], [9]]), torch.tensor([0, 13])
    for _ in range(5):
        got, expected = decoder(token, mine, position), eager(model, token, theirs, position)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        token, position = expected.argmax(-1, keepdim=True), position + 1


# --- half precision: no further from float32 than the eager step is


def errors(dtype, rows: int, **other):
    """How far the logits of the Triton and of the eager step are from those of float32."""
    exact, model = make(**other), make(**other).to(dtype)
    for to, parameter in zip(exact.parameters(), model.parameters(), strict=True):
        to.copy_(parameter)  # of the rounded weights
    position = [70, 150, 3, 64, 129, 1, 40, 127][:rows]
    got, _, expected, _ = run(model, position, 152, 24)
    token = torch.randint(VOCAB, (rows, 1), generator=torch.Generator().manual_seed(3))
    cache = [{name: tensor.float() for name, tensor in layer.items()} for layer in cache_of(model, rows, 152)]
    truth = eager(exact, token, cache, torch.tensor(position))
    return [(logits.float() - truth).norm() / truth.norm() for logits in (got, expected)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "shape", ["9:3", "norms of queries and keys", "biases", "their biases", "groups of them"]
)
def test_rounding(dtype, rows, shape):
    ours, eager_error = errors(dtype, rows, **SHAPES[shape])
    assert 0 < ours < 1.5 * eager_error, f"{ours:.5f} from float32, the eager step {eager_error:.5f}"


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rounded_weights_in_bfloat16(rows, precision, monkeypatch):
    """As CUDA computes with them: bfloat16 around them."""
    position, biases = [70, 150, 3][:rows], {"attention_bias": True, "mlp_bias": True}
    _, _, exact, _ = run(rounded(make(**biases), precision), position, 152)
    monkeypatch.setitem(quantized.ARITHMETIC, "cpu", torch.bfloat16)
    model = rounded(make(**biases), precision)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    got, _, expected, _ = run(model, position, 152)
    ours, theirs = ((logits.float() - exact).norm() for logits in (got, expected))
    assert got.dtype == torch.bfloat16 and 0 < ours < 1.5 * theirs


# --- what it takes


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"head_dim": 24}, "24"),
        ({"intermediate_size": 16_400}, "16400"),
    ],
)
def test_sizes_that_it_does_not_take(change, reason):
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = LanguageModel(TextConfig(**(sizes | heads | change)))
    assert reason in unsupported(model)
    with pytest.raises(ValueError, match=reason):
        TritonDecoder(model)
