"""The native step gives what the eager step gives, to the bit the same in any batch, packed weights included.

That its answers are those of the eager step is in test_generate.py.
"""

import copy
import random
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from generation import kv_cache as kv
from generation.decoding import prefill
from generation.fast import quantized
from generation.fast.cuda.graph import GraphStep
from generation.fast.native import build
from generation.fast.native.panels import PanelLinear, PanelWeight, round_layer, second_moments, to_rows
from generation.fast.native.step import NativeStep, unsupported
from generation.fast.quantized import PackedLinear, pack, quantize_rows
from generation.fast.tower import FastTower
from generation.processors import limit_threads
from generation.prompts import Prompt
from generation.steps import Step
from inference.checkpoint import open_checkpoint
from inference.fast import fast_step, has_fast_bfloat16, speed_up
from models import TextConfig, VisionConfig, VisionLanguageModel, VLMConfig
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import read_tensor
from models.gemma4_text import Gemma4TextConfig
from models.gemma4_vision import Gemma4VisionConfig
from tests.prompts import keys, tiny_vlm
from tests.qwen_checkpoints import save_hf

SHAPES = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    "one group": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    "seven heads": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 44},
    "four heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    "no groups": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 10},
    "two a group": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
}
IMAGE_PLACES = {"rope_sections": (4, 5, 3), "rope_interleaved": True}  # of heads of 24
# Qwen3.5's, in three layers; more heads of values than of keys.
STATES = {
    "layer_types": ("delta", "attention", "delta"), "conv_kernel": 4,
    "delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 32, "delta_value_dim": 96,
    "attention_gate": True, "zero_centered_norms": True, "qk_norm": True,
}  # fmt: skip
# Gemma 4's: windows that end within a run of tokens and within a chunk of keys, and layers that share keys.
GEMMA = {
    "num_hidden_layers": 5, "layer_types": ("sliding", "full", "sliding", "sliding shared", "full shared"),
    "sliding_window": 37, "full_head_dim": 80, "shared_mlp_factor": 2, "per_layer_width": 12,
    "per_layer_count": 5, "per_layer_vocab": 211, "logit_cap": 3.0,
}  # fmt: skip
KINDS = {"attention": {"qk_norm": True}, "states": STATES, "Gemma 4": GEMMA}
of_each_kind = pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS)


def make_model(shape="grouped", tied=False, dtype=torch.float32, **parts):
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 211, "hidden_size": 56, "intermediate_size": 100, "num_hidden_layers": 3,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    gemma = "sliding_window" in parts
    text = (Gemma4TextConfig if gemma else TextConfig)(**sizes | SHAPES[shape] | parts)
    vision = VisionConfig(16, 32, 1, 2, 3, 32, 16)
    family = {"family": "gemma4"} if gemma else {}
    if gemma:
        vision = Gemma4VisionConfig(16, 32, 1, 2, patch_size=16, merge_size=1, table_side=8)
    config = VLMConfig(
        vision=vision, text=text, scale_factor=1, image_token_id=3, tie_word_embeddings=tied, **family
    )
    model = VisionLanguageModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_(0.8 * name.endswith("layer_scalar"))
    return model.to(dtype)


@torch.no_grad()
def walk(step, language_model, rows, count, dtype=torch.float32, starts=None, offset=0):
    """Logits (count, B, V) of `count` steps; teacher-forced, so that both sides see the same tokens. Rows
    that start later find keys before them: without any, a wrong angle at all of a row's positions would not
    show."""
    text = language_model.config
    cache = kv.allocate(language_model.cache_layout, rows, 160, dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in (tensor for layer in cache for tensor in layer.values()):
        for row, start in enumerate(starts or ()):
            tensor[row, :, :start].normal_(generator=generator)
    position = 0 if starts is None else torch.tensor(starts)
    logits = []
    for _ in range(count):
        token = torch.randint(0, text.vocab_size, (rows, 1), generator=generator)
        logits.append(step(token, cache, position, offset).float().clone())
        position = position + 1
    return torch.stack(logits), cache


@pytest.fixture(autouse=True)
def needs_compiler():
    try:
        build.find_compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler on this machine")


PARTS = (
    *({"attention_bias": True, "qkv_bias_only": True}, {"mlp_bias": True}, {"attention_bias": True}),
    *({"qk_norm": True}, GEMMA, GEMMA | {"per_layer_width": 0, "logit_cap": None, "mlp_bias": True}),
)


@pytest.mark.slow(but=4)
@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "rows", "precision", "parts"),
    [
        *(("grouped", 2, "float32", parts) for parts in PARTS),
        *((shape, *how, {}) for shape in SHAPES for how in ((1, "float32"), (2, "int8"))),
    ],
)
def test_native_equals_eager(shape, rows, precision, parts):
    lm = make_model(shape, **parts).language_model
    for name, parameter in lm.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            parameter.normal_(std=0.5)
    if precision == "int8":  # keys and values are bfloat16, a few of them rounded the other way
        pack(lm, precision)
    near = {"atol": 2e-5, "rtol": 1e-5} if precision == "float32" else {"atol": 8e-3, "rtol": 2**-7}
    # Beyond 64 positions attention runs in several chunks that have to be merged.
    expected, cache = walk(Step(lm), lm, rows, 140, lm.cache_dtype)
    got, own_cache = walk(NativeStep(lm), lm, rows, 140, lm.cache_dtype)
    torch.testing.assert_close(got, expected, **near)
    torch.testing.assert_close(own_cache, cache, **near)


@pytest.mark.slow(but=2)
@torch.no_grad()
@of_each_kind
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_is_the_same_to_the_bit_in_any_company(precision, parts):
    """Greedy answers may not depend on the batch, not even where two tokens are nearly as likely."""
    lm = make_model(**parts).language_model
    if precision != "float32":
        pack(lm, precision, round_layer)
    step = NativeStep(lm)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    lengths = [7, 700, 31, 32, 513, 1, 512, 64, 129]
    whole = kv.allocate(lm.cache_layout, len(lengths), 704, dtype)
    for tensor in (tensor for layer in whole for tensor in layer.values()):
        tensor.normal_(std=0.5)
    tokens = torch.arange(len(lengths))[:, None] * 5

    def logits(rows):
        cache = [{name: kept[rows].clone() for name, kept in layer.items()} for layer in whole]
        return step(tokens[rows], cache, torch.tensor(lengths)[rows]).clone()

    alone = torch.cat([logits([row]) for row in range(len(lengths))])
    for company in ([0, 1], [3, 2, 1], [4, 5, 6, 7], [8, 0, 1, 2, 3], list(range(8)), list(range(9))):
        assert torch.equal(logits(company), alone[company]), f"{len(company)} rows"
    try:
        limit_threads(3)
        assert torch.equal(logits([0]), alone[[0]])
    finally:
        limit_threads(1)


@torch.no_grad()
@of_each_kind
def test_rows_that_have_ended_take_no_part(parts):
    """Many more rows than tokens, as in the last chunk of prompts of which one is longest."""
    lm = make_model(**parts).language_model
    step, ids = NativeStep(lm), torch.randint(0, 50, (64, 3))
    cache = kv.allocate_for(lm, 64, 8)
    expected = step.prefill(lm.embed(ids[63:]), [3], kv.view(cache, 8, 63, 1))
    kept = copy.deepcopy(cache)
    got = step.prefill(lm.embed(ids), [*[0] * 63, 3], cache)
    assert torch.equal(got[63:], expected)
    assert all(
        torch.equal(a, b) for one, other in zip(cache, kept) for a, b in zip(one.values(), other.values())
    )


@pytest.mark.slow
@torch.no_grad()
@of_each_kind
@pytest.mark.parametrize(
    ("precision", "offset"), [("float32", 0), ("float32", -7), ("bfloat16", 40), ("int8", 0), ("int4", 0)]
)
def test_a_token_is_the_same_to_the_bit_prefilled_verified_and_decoded(precision, offset, parts):
    """Prompts of several passes, chunks across the lengths at which attention changes its chunks; with an
    offset, rotary places of three axes in prompts."""
    axes = bool(offset) and parts is not GEMMA
    lm = make_model(**parts, **IMAGE_PLACES if axes else {}).language_model
    places = (torch.arange(540) + offset).expand(3, 3, -1) if axes else None
    offset = offset if axes else 0
    if precision != "float32":
        pack(lm, precision, round_layer)
    step, text, lengths = NativeStep(lm), lm.config, (540, 3, 130)
    ids = torch.randint(0, text.vocab_size, (3, 540), generator=torch.Generator().manual_seed(0))
    empty = lambda rows: kv.allocate_for(lm, rows, 640)
    cache = empty(1)
    single = torch.stack([step(ids[:1, t : t + 1], cache, t, offset)[0] for t in range(540)])
    other = empty(1)
    chunks = torch.cat([step.chunk(ids[:1, t : t + 9], other, t, offset)[0] for t in range(0, 540, 9)])
    assert torch.equal(chunks, single)
    ragged = empty(3)
    logits = step.prefill(lm.embed(ids), lengths, ragged, 0, places)
    assert torch.equal(logits[0], single[-1])
    for own, kept in zip(cache, other, strict=True):
        for name, tensor in own.items():
            assert torch.equal(tensor[0], kept[name][0])
    for own, layer in zip(kv.view(cache, 540), kv.view(ragged, 540), strict=True):
        assert all(torch.equal(tensor[0], layer[name][0]) for name, tensor in own.items())
    for row in (1, 2):
        own = ids[row : row + 1, : lengths[row]]
        own_places = None if places is None else places[:, :1, : lengths[row]]
        expected = step.prefill(lm.embed(own), lengths[row : row + 1], empty(1), 0, own_places)
        assert torch.equal(logits[row], expected[0])
    # On a prefix of its own in each row, too.
    after = step.chunk(ids[:, :4], ragged, torch.tensor(lengths), torch.tensor([offset, 3, -3]))
    assert torch.equal(after[0], step.chunk(ids[:1, :4], other, 540, offset)[0])


@torch.no_grad()
def test_tokens_in_vain_leave_no_trace():
    """As many proposals as there may be, all of them wrong, before each token: across windows of states."""
    lm = make_model(**STATES).language_model
    step, ids = NativeStep(lm), torch.arange(60)[None] * 5 % 211
    clean, other = (kv.allocate_for(lm, 1, 80) for _ in range(2))
    for at in range(60):
        step.chunk(210 - ids[:, : 1 + kv.STATE_WINDOW // 2], other, at)
        expected = step(ids[:, at : at + 1], clean, at)
        assert torch.equal(step(ids[:, at : at + 1], other, at), expected)


@torch.no_grad()
def test_of_a_window_no_more_is_read_than_it_has():
    """Nor of any layer what comes after a token."""
    lm, window, held = make_model(**GEMMA).language_model, GEMMA["sliding_window"], 90
    step, ids = NativeStep(lm), torch.arange(held + 9)[None] * 5 % 211
    cache = kv.allocate_for(lm, 1, 128)
    step.chunk(ids[:, :held], cache, 0)
    other = copy.deepcopy(cache)
    for kind, layer in zip(lm.config.layer_types, other, strict=True):
        for kept in layer.values():
            kept[:, :, held:] = torch.nan
            kept[:, :, : held + 1 - window if kind == "sliding" else 0] = torch.nan
    expected = step.chunk(ids[:, held:], cache, held)
    assert torch.equal(step.chunk(ids[:, held:], other, held), expected)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, torch.tensor([-2, 30, 0])])
def test_native_rows_at_their_own_positions_and_in_views(offset):
    lm = make_model(tied=True).language_model
    expected, _ = walk(Step(lm), lm, 3, 60, starts=[0, 70, 9], offset=offset)
    step = NativeStep(lm)
    through_view = lambda ids, cache, *where: step(ids, kv.view(cache, 132), *where)
    got, _ = walk(through_view, lm, 3, 60, starts=[0, 70, 9], offset=offset)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def gemma_of_any_size(draw):
    """Layers of both kinds, of which the last ones share keys, or none does."""
    count, own = draw.randint(3, 6), ["sliding", "full"]
    kinds = [*own, *(draw.choice(own) for _ in range(count - 2))]
    for at in range(count - draw.randint(0, count - 2), count):
        kinds[at] += " shared"
    return GEMMA | {
        "num_hidden_layers": count, "per_layer_count": count,
        "layer_types": tuple(kinds),
        "sliding_window": draw.choice([1, 7, 32, 130]), "full_head_dim": draw.choice([16, 36, 512]),
        "full_rotary_factor": draw.choice([0.25, 0.6, 1.0]), "shared_mlp_factor": draw.choice([1, 2]),
        "per_layer_width": draw.choice([0, 5, 64]), "logit_cap": draw.choice([None, 2.0]),
    }  # fmt: skip


@pytest.mark.slow(but=3)
@torch.no_grad()
@pytest.mark.parametrize("seed", [14, 15, *range(14), 16, 17])
def test_native_prompts_of_images_equal_eager(seed):
    """Rotary places in three axes and DeepStack, cut anywhere, and then tokens at offsets of their own; from
    seed 8 on with states, and heads of which half is rotated; from seed 14 on Gemma 4's of any sizes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = draw.choice(list(SHAPES))
    half, rows = SHAPES[shape]["head_dim"] // 2, draw.randint(1, 4)
    parts = {"qk_norm": seed % 2}
    if seed >= 8:
        half //= 2
        sizes = {"delta_key_dim": draw.choice([16, 48, 64]), "delta_value_dim": draw.choice([32, 96])}
        parts = {**STATES, **sizes, "conv_kernel": draw.choice([2, 4])}
        parts["partial_rotary_factor"] = 2 * half / SHAPES[shape]["head_dim"]
    parts |= {"rope_sections": (half - 2 * (half // 4), half // 4, half // 4), "rope_interleaved": seed % 2}
    if seed >= 14:
        parts = gemma_of_any_size(draw)
    lm = make_model(shape, **parts).language_model
    lengths = [draw.randint(2, 300) for _ in range(rows)]
    longest, deep = max(lengths), 1 + draw.randint(1, 2) * (seed % 2)
    x = torch.randn(rows, longest, 56 * deep, generator=generator)
    places = torch.randint(0, longest, (3, rows, longest), generator=generator)
    if seed >= 14:
        x, places = lm.embed(torch.randint(0, 211, (rows, longest), generator=generator)), None
    empty = lambda: kv.allocate_for(lm, rows, 320)
    eager, native, whole, cut = Step(lm), NativeStep(copy.deepcopy(lm)), empty(), empty()
    expected = eager.prefill(x, lengths, reference := empty(), 0, places)
    got = native.prefill(x, lengths, whole, 0, places)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    chunk = draw.randint(1, longest)
    assert torch.equal(prefill(native, Prompt(x, tuple(lengths), places), cut, chunk), got)
    offsets = [draw.randint(-longest, 9) for _ in range(rows)]
    ids = [[draw.randrange(211) for _ in range(draw.randint(1, 5))] for _ in range(rows)]
    cases = (eager, reference), (native, whole), (native, cut)
    for expected, got, other in zip(*(step.ragged(ids, cache, lengths, offsets) for step, cache in cases)):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(got, other)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_native_equals_packed_eager(precision, tied):
    model = make_model("four heads", tied)
    exact, _ = walk(Step(model.language_model), model.language_model, 2, 20)
    lm = pack(copy.deepcopy(model), precision, round_layer).language_model
    assert not tied or lm.lm_head.weight is lm.embed_tokens.weight
    expected, _ = walk(Step(lm), lm, 2, 20)
    got, _ = walk(NativeStep(lm), lm, 2, 20)
    # int8 weights meet activations rounded to 16 bits: hundreds of times finer than the weights. bfloat16
    # meets bfloat16 where the processor has products of them, else floats. Four bits meet bytes, eager too.
    rounded = {"bfloat16": 2e-2 if has_fast_bfloat16() else 2e-5, "int8": 6e-4, "int4": 2e-2}[precision]
    torch.testing.assert_close(got, expected, atol=rounded, rtol=1e-5)
    least, most = (0.05, 0.4) if precision == "int4" else (0, 0.1)
    assert least < (expected - exact).abs().mean() / exact.abs().mean() < most


def test_quantized_rows_are_within_half_a_step():
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    stored, scale = quantize_rows(weight)
    assert (stored.float() * scale[:, None] - weight).abs().le(scale[:, None] / 2 + 1e-7).all()
    assert stored.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127, 127]


def test_what_cannot_run_natively_says_so(monkeypatch):
    lm = make_model(dtype=torch.float16).language_model
    assert "float16" in unsupported(lm) and fast_step(lm)[0] is None
    assert "gated delta" in unsupported(make_model(**STATES | {"delta_key_dim": 8}).language_model)
    monkeypatch.setattr("generation.fast.native.build.shutil.which", lambda name: None)
    build.load_library.cache_clear()
    step, why = fast_step(make_model().language_model)
    build.load_library.cache_clear()
    assert step is None and "no C compiler" in why


@pytest.mark.parametrize("make_step", [NativeStep, GraphStep])
@torch.no_grad()
def test_a_cache_that_shares_some_tensors_with_the_last_one_is_another_cache(make_step):
    """Freed memory is reused in part: two caches may agree in their first and last address only."""
    lm = make_model().language_model
    step, token = make_step(lm), torch.tensor([[7]])
    first = kv.allocate(keys(3, 2, 24), 1, 64, torch.float32)
    step(token, first, 0)
    second = kv.allocate(keys(3, 2, 24), 1, 64, torch.float32)
    second[0]["key"], second[-1]["value"] = first[0]["key"], first[-1]["value"]
    reference = [{name: tensor.clone() for name, tensor in layer.items()} for layer in second]
    expected = Step(lm)(token, reference, 1)
    torch.testing.assert_close(step(token, second, 1), expected, atol=2e-5, rtol=1e-5)
    assert first[1]["key"][:, :, 1].abs().max() == 0, "the old cache was written to"


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_integer_sums_do_not_overflow_at_any_width(bits):
    """All weights and activations the largest there are, at widths around the ends of integer sums."""
    for width in (500, 516, 520, 1024, 1028, 4100):
        ones = torch.ones(16, width)
        layer = PanelLinear(*quantize_rows(ones), None) if bits == 8 else PanelLinear(ones, bits=4)
        torch.testing.assert_close(layer(ones[:1]), torch.full((1, 16), float(width)), rtol=2e-2, atol=0)


@torch.no_grad()
def test_four_bits_lose_no_more_than_those_of_others():
    """Root mean square errors of llama.cpp's Q4_K, as many bits a weight, on the same kinds of weights."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(70, 2048, generator=generator)
    outliers = torch.where(torch.arange(2048) % 97 == 0, 8.0, 1.0) * normal
    even = torch.rand(70, 2048, generator=generator) - 0.5
    for weight, most in ((normal, 0.0714), (outliers, 0.0899), (even, 0.0545)):
        for scale in (1.0, 1e-6, 1e6):
            stored = PanelLinear(weight * scale, bits=4).unpacked() / scale
            assert (stored - weight).square().mean().sqrt() < most * weight.std()
    odd = torch.tensor([[0.0] * 40, [3.0] * 40, [-1.0] * 40, [0.0] * 39 + [7.0], [torch.nan] * 40])
    torch.testing.assert_close(PanelLinear(odd, bits=4).unpacked(), odd, rtol=2e-2, atol=0, equal_nan=True)
    x = torch.randn(5, 2048, generator=generator)
    layer = PanelLinear(normal, bias=normal[:, 0], bits=4)
    expected = F.linear(x, layer.unpacked(), normal[:, 0])
    assert (layer(x) - expected).std() < 0.01 * expected.std(), "activations have a byte each"
    assert layer(torch.full((1, 2048), torch.inf)).isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_rows_for_a_gpu_hold_the_numbers_of_the_panels(tied, monkeypatch):
    """To the bit, biases too: the language model's in four bits, all others in int8."""
    monkeypatch.setattr(quantized, "PARTIAL_FLOATS", 500)  # a few rows are widened at a time
    model, expected = pack(make_model("four heads", tied, attention_bias=True), "int4", round_layer), {}
    for name, part in model.named_modules():
        if isinstance(part, PanelWeight):
            scale = 1 if part.weight.dtype == torch.int32 else part.scale[: part.out_features, None]
            bias = None if part.bias is None else part.bias[: part.out_features].clone()
            expected[name] = part.unpacked() * scale, bias
    to_rows(model, torch.device("cpu"))
    for name, (matrix, bias) in expected.items():
        part, one = model.get_submodule(name), torch.eye(matrix.shape[1])
        if isinstance(part, PackedLinear):
            torch.testing.assert_close(part(one), F.linear(one, matrix, bias), rtol=1e-6, atol=0)
        else:
            assert torch.equal(part(torch.arange(len(matrix))), matrix)
    lm = model.language_model
    assert (lm.lm_head.weight is lm.embed_tokens.weight) == tied


@torch.no_grad()
def test_four_bits_count_errors_by_what_meets_them():
    """A network whose channels differ as those of trained ones do, which no weight shows."""
    generator = torch.Generator().manual_seed(0)
    weight, large = torch.randn(96, 256, generator=generator), torch.ones(256)
    large[::50] = 30
    x = torch.randn(64, 256, generator=generator) * large
    alike, weighted = (PanelLinear(weight, bits=4, moments=moments) for moments in (None, large.square()))
    off = [(F.linear(x, one.unpacked()) - F.linear(x, weight)).square().mean() for one in (alike, weighted)]
    assert off[1] < off[0] / 2
    for strange in (large * 0, large * torch.nan, large * torch.inf):
        assert PanelLinear(weight, bits=4, moments=strange).unpacked().isfinite().all()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_rearranged_weights_are_saved_as_they_were_loaded(loaded, tied, tmp_path):
    """To the bit and the type, after each step of being made fast; they are not moved."""
    model = make_model("four heads", tied)
    model.to(getattr(torch, loaded)).save_pretrained(tmp_path / "first")
    if loaded == "bfloat16":
        pack(model, loaded)
        model.save_pretrained(tmp_path / "packed")
    tower = speed_up(model)[2]
    assert tower == FastTower.NAME
    model.save_pretrained(tmp_path / "panels")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    for saved in set(tmp_path.iterdir()):
        assert sorted(path.name for path in saved.iterdir()) == names
        assert all((saved / name).read_bytes() == (tmp_path / "first" / name).read_bytes() for name in names)
    model.to("cpu")
    with pytest.raises(RuntimeError):
        model.half()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])  # head and embedding are one, or two
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights_are_opened_without_a_copy_of_all(tmp_path, monkeypatch, seed, precision):
    """What was read is gone before the next tensor comes; the weights are those of a model that is packed, of
    four bits for the second time."""
    save_hf("qwen3_vl", tmp_path, seed)
    first = pack(VisionLanguageModel.from_pretrained(tmp_path), precision, round_layer)
    make = partial(round_layer, moments=second_moments(first.language_model))
    packed = pack(VisionLanguageModel.from_pretrained(tmp_path), precision, make).state_dict()
    read, held = [], []

    def watched(*arguments):
        held.append(sum(tensor().numel() for tensor in read if tensor() is not None))
        tensor = read_tensor(*arguments)
        read.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr("models.checkpoints.load.read_tensor", watched)
    opened = open_checkpoint(tmp_path, device="cpu", dtype=precision).model
    assert opened.state_dict().keys() == packed.keys()
    assert all(torch.equal(tensor, packed[name]) for name, tensor in opened.state_dict().items())
    assert (opened.language_model.lm_head.weight is opened.language_model.embed_tokens.weight) == (seed == 0)
    assert max(held) < sum(tensor.numel() for tensor in packed.values()) / 4


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_that_were_rounded_are_not_saved(tmp_path, precision):
    """A checkpoint without most of its weights would be the worst of outcomes."""
    model = tiny_vlm(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    pack(model, precision, round_layer)
    for made_fast in (False, True):
        if made_fast:
            speed_up(model)
        with pytest.raises(CheckpointError):
            model.save_pretrained(tmp_path / "model")
    assert not any(tmp_path.iterdir())


@torch.no_grad()
def test_native_refuses_what_would_lead_out_of_its_memory():
    lm = make_model().language_model
    step, cache = NativeStep(lm), kv.allocate_for(lm, 1, 8)
    with_axes, both = NativeStep(make_model(**IMAGE_PLACES).language_model), kv.fork(cache, 0, 2, 8)
    one, unlike = torch.tensor([[5]]), kv.allocate_for(lm, 1, 8)
    unlike[1] |= kv.allocate_for(lm, 1, 16)[1]  # layers of unlike lengths: one layout is taken for all
    expected = step(one, cache, 0)
    assert torch.equal(step(one.int(), cache, 0), expected)
    for wrong in (lambda: step(torch.tensor([[211]]), cache, 0), lambda: step(-one, cache, 0),
                  lambda: step(one, unlike, 0), lambda: step(one, cache, 8), lambda: step(one, cache, -1),
                  lambda: step(one.expand(2, 1), cache, 0),
                  lambda: step.prefill(torch.zeros(1, 4, 40), [4], cache),
                  lambda: step.prefill(torch.zeros(1, 4, 56), [0], cache),
                  lambda: step.prefill(torch.zeros(1, 4, 0), [4], cache),
                  lambda: step.prefill(torch.zeros(1, 4, 56), [4], cache, 0, torch.zeros(3, 1, 4)),
                  lambda: with_axes.prefill(torch.zeros(1, 4, 56), [4], cache, 0, torch.zeros(3, 1, 3)),
                  lambda: step.ragged([[5], [5]], both, [0, 0], [1])):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()
