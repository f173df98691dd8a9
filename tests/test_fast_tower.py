"""The C tower gives what the eager tower gives, for each precision, shape and instruction set, and the
features of a tile, or of an image of its own size, are the same bits in any company."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generation.fast.native import build
from generation.fast.quantized import pack
from generation.fast.tower import FastTower, fast_tower
from generation.processors import limit_threads
from inference.fast import speed_up
from models import VisionConfig, VisionLanguageModel
from models.checkpoints.save import stored_tensors
from models.gemma4_vision import Gemma4VisionConfig, Gemma4VisionTransformer
from models.packed_vision_transformer import PackedVisionConfig, PackedVisionTransformer
from models.vision_transformer import VisionTransformer
from tests import gemma4_checkpoints, minicpm_checkpoints, test_internvl, tiny
from tests.qwen_checkpoints import KINDS, save_hf
from tests.test_fast_decode import needs_compiler  # noqa: F401  (for every test here)

# Widths, head sizes and numbers of patches that fill no panel, no unit and no group of rows.
SHAPES = {
    "heads of 64": (128, 256, 2, 64, 8, "gelu_pytorch_tanh"),
    "heads of 32": (96, 200, 3, 40, 8, "gelu_pytorch_tanh"),
    "heads of 72": (144, 538, 2, 56, 14, "gelu_pytorch_tanh"),  # SmolVLM-2.2B's: 4304 is 16 times 269
    "odd widths": (66, 131, 2, 24, 4, "gelu"),
    "tiles that end within a patch": (96, 200, 2, 41, 14, "gelu_pytorch_tanh"),  # as of SigLIP at 384 / 14
}
# The parts of a tower of each shape, and those that InternViT has and SigLIP has not, of odd widths.
PARTS = {
    **{shape: {} for shape in SHAPES},
    "class token, layer scale, no last norm": {"class_token": True, "layer_scale": True, "last_norm": False},
    "RMS norms, no biases": {"class_token": True, "norm_type": "rms_norm", "attention_bias": False},
}
# A bound on the error of each feature, whose size is about one, and on its cosine with the eager one. Where a
# processor multiplies bfloat16 and bytes, what they are multiplied with is rounded as well.
BOUNDS = {
    "float32": (2e-5, 0.99999),
    "bfloat16": (0.1 if torch.cpu._is_avx512_bf16_supported() else 6e-2, 0.9995),
    "int8": (0.2, 0.995 if torch.cpu._is_vnni_supported() else 0.997),
}
OTHER_MACHINES = {
    "AVX2": (("-march=x86-64", "-mavx2", "-mfma", "-mf16c"), torch.cpu._is_avx2_supported()),
    "AVX-512 without dot products": (("-march=skylake-avx512",), torch.cpu._is_avx512_supported()),
    "any x86": (("-march=x86-64",), torch.cpu._is_avx2_supported()),
}


def make_tower(shape: str, seed: int = 1, **parts) -> VisionTransformer:
    width, inner, heads, image, patch, act = SHAPES[shape]
    config = VisionConfig(width, inner, 2, heads, 3, image, patch, hidden_act=act, **parts)
    return randomised(VisionTransformer(config).eval(), seed)


def randomised(tower, seed: int):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(0.2 * noise + ("norm" in name and name.endswith("weight")))
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
    return tower


def packed_tower(kind: str, seed: int) -> PackedVisionTransformer:
    """Of one of the families, with widths, windows and taps as the seed has them."""
    draw = random.Random(seed)
    heads = draw.randint(2, 4)
    if kind == "gemma4":
        return gemma4_tower(draw, heads)
    sizes = (heads * draw.choice((20, 32, 72)), draw.randint(30, 150), draw.randint(1, 4), heads)
    family = {
        "table_side": draw.randint(2, 9),
        "taps": tuple(sorted(draw.sample(range(sizes[2]), sizes[2] // 2))),
    }
    if kind == "lfm2_vl":
        family = {"table_side": draw.randint(2, 9), "table_fit": "picture", "rotary": False}
        family |= {"channels_last": True, "last_norm": True}
    if kind == "minicpm":
        family = {
            "table_side": draw.randint(2, 9),
            "table_fit": "nearest",
            "rotary": False,
            "last_norm": True,
        }
        family |= {"insert_layer": draw.randrange(sizes[2]), "inserts": seed != 4, "merge_size": 4}
    if kind == "paddleocr_vl":
        family = {"table_side": draw.randint(2, 9), "table_fit": "edges", "last_norm": True}
        family |= {"temporal_patch_size": 1}
    if kind == "qwen2_5_vl":
        family = {"norm": "rms", "gated_mlp": True, "patch_bias": False, "table_side": 0}
        family |= {"window": 2 * draw.randint(1, 5), "whole_layers": (sizes[2] - 1,)}
    config = PackedVisionConfig(*sizes, patch_size=draw.choice((3, 8)), **family)
    return randomised(PackedVisionTransformer(config).eval(), seed)


def gemma4_tower(draw: random.Random, heads: int) -> Gemma4VisionTransformer:
    config = Gemma4VisionConfig(
        hidden_size=heads * draw.choice((4, 20, 32, 64, 72)),
        intermediate_size=draw.randint(30, 150),
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads,
        patch_size=draw.choice((3, 8)),
        merge_size=draw.randint(1, 3),
        table_side=64,
        clips=draw.random() < 0.7,
        standardizes=draw.random() < 0.5,
    )
    tower = randomised(Gemma4VisionTransformer(config).eval(), draw.randint(0, 99))
    for name, parameter in tower.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data *= 0.3  # scores are not divided by the width of a head
        elif name.endswith(("_min", "_max")):  # now of three layers with the same inputs, now of each its own
            sign = 1 if name.endswith("_max") else -1
            parameter.data.fill_(sign * draw.choice((1.0, 1.5, 1.5, 1.5, torch.inf)))
    return tower


def images(tower, seed: int = 0) -> list[torch.Tensor]:
    """A single block, more patches than meet at a time, and others."""
    draw, block = random.Random(seed), tower.config.patch_size * tower.config.merge_size
    grids = [(1, 1), (5, 21), *((draw.randint(1, 8), draw.randint(1, 8)) for _ in range(2))]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, block * rows, block * columns, generator=generator) for rows, columns in grids]


def tiles(tower, count: int = 3) -> torch.Tensor:
    config = tower.config
    return torch.randn(count, 3, config.image_size, config.image_size, generator=torch.manual_seed(2))


def in_c(tower, precision: str) -> FastTower:
    tower = copy.deepcopy(tower)
    made, _ = fast_tower(tower if precision == "float32" else pack(tower, precision))
    assert isinstance(made, FastTower)
    return made


def check(features: torch.Tensor, expected: torch.Tensor, precision: str) -> None:
    error, cosine = BOUNDS[precision]
    assert features.shape == expected.shape and features.dtype == torch.float32
    assert (features - expected).abs().max() < error
    assert F.cosine_similarity(features, expected, dim=-1).min() >= cosine


@torch.inference_mode()
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("parts", PARTS)
def test_it_equals_the_eager_tower_and_a_tile_is_the_same_in_any_company(parts, precision):
    tower = make_tower(parts if parts in SHAPES else "odd widths", **PARTS[parts])
    native, pixels = in_c(tower, precision), tiles(tower)
    features = native(pixels)
    check(features, tower(pixels), precision)
    try:
        for count in (3, 2, 1):
            limit_threads(count)
            assert torch.cat([native(pixels[:count]), *(native(one[None]) for one in pixels[count:])]).equal(
                features
            )
    finally:
        limit_threads(1)


@pytest.mark.slow(but=3)
@torch.no_grad()
@pytest.mark.parametrize("side", [33, 38, 39])
@pytest.mark.parametrize("kind", ["idefics3", "internvl"])
def test_tiles_that_end_within_a_patch_are_cropped_as_transformers_does(tmp_path, kind, side):
    if kind == "idefics3":
        theirs = tiny.CLASSES[kind](tiny.config_for(tiny.Case(image_size=side))).eval()
        tiny.randomize(theirs, 0)
        tiny.save(theirs, tmp_path)
    else:
        theirs = test_internvl.save_hf("qwen3", tmp_path, image_size=[side, side], patch_size=[8, 8])
    model = VisionLanguageModel.from_pretrained(tmp_path)
    pixels = 2 * torch.rand(1, 2, 3, side, side) - 1
    places = [model.config.image_token_id] * (4 * 2)
    ids = torch.tensor([[*places, 3, 4, 5]])
    given = pixels if kind == "idefics3" else pixels[0]
    expected = theirs(input_ids=ids, pixel_values=given).logits
    assert (model(ids, pixels).logits - expected).abs().max() < 1e-4
    assert speed_up(model)[2] == FastTower.NAME
    assert (model(ids, pixels).logits - expected).abs().max() < 1e-4


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("kind", (*KINDS, "lfm2_vl", "gemma4", "minicpm"))
def test_images_of_their_own_sizes(kind, precision):
    for seed in range(7):
        tower = packed_tower(kind, seed)
        native, given = in_c(tower, precision), images(tower, seed)
        expected, features = tower(given), native(given)
        size = 2 * expected.std()
        check(features / size, expected / size, precision)
        for threads, pictures in ((1, given), (2, given[::-1])):
            limit_threads(threads)
            alone = [native([picture]) for picture in pictures]
            assert torch.cat(alone[:: 1 if threads == 1 else -1]).equal(features)
        limit_threads(1)
        with pytest.raises(ValueError):
            native([given[1][:, 1:]])
        with pytest.raises(ValueError):
            native([given[1][:2]])


@pytest.mark.slow(but=1)
@torch.inference_mode()
@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", (*KINDS, "gemma4", "minicpm"))
def test_a_model_in_c_is_saved_as_it_was_loaded(kind, precision, tmp_path):
    if kind == "gemma4":
        theirs = gemma4_checkpoints.save_hf(tmp_path, seed=0).model  # with clips
    elif kind == "minicpm":
        minicpm_checkpoints.save_hf(tmp_path, seed=1)
    else:
        save_hf(kind, tmp_path)
    model = VisionLanguageModel.from_pretrained(tmp_path, dtype=precision)
    before = {name: tensor.make().clone() for name, tensor in stored_tensors(model).items()}
    pixels = images(model.vision_model)
    expected = model.projector(model.vision_model([image.to(model.dtype) for image in pixels])).float()
    assert speed_up(model)[2] == FastTower.NAME
    features = model.projector(model.vision_model(pixels))
    if kind == "gemma4" and precision == "float32":
        given = gemma4_checkpoints.transformers_inputs(pixels, model.config.vision)
        expected = torch.cat([*theirs.get_image_features(**given).pooler_output])
    check(features / expected.std(), expected / expected.std(), precision)
    after = {name: tensor.make() for name, tensor in stored_tensors(model).items()}
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)


def test_a_part_that_c_does_not_have_is_refused():
    class Another(nn.GELU): ...

    packed = packed_tower("qwen3_vl", 3)
    packed.layers[0].mlp = Another()
    made, how = fast_tower(packed)
    assert made is None and "Another" in how
    tower = make_tower("odd widths", qk_norm=True)
    made, how = fast_tower(tower)
    assert made is None and "qk_norm" in how


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("machine", OTHER_MACHINES)
def test_other_machines(machine, monkeypatch):
    """Compiled for other processors, as far as this one runs what is compiled for them."""
    flags, runs = OTHER_MACHINES[machine]
    if not runs:
        pytest.skip("this processor does not run it")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags, "-O1"))  # is compiled in half the time
    build.load_library.cache_clear()
    try:
        towers = [make_tower(shape) for shape in ("heads of 72", "odd widths")]
        for tower in (*towers, *(packed_tower(kind, 3) for kind in (*KINDS, "gemma4", "minicpm"))):
            pixels = tiles(tower) if tower in towers else images(tower)
            expected = tower(pixels)
            size = 1 if tower in towers else 2 * expected.std()
            for precision in BOUNDS:
                native = in_c(tower, precision)
                features, alone = native(pixels), native(pixels[:1])
                check(features / size, expected / size, precision)
                assert alone.flatten().equal(features.flatten()[: alone.numel()])
    finally:
        build.load_library.cache_clear()


@pytest.mark.parametrize("kind", ("tiles", *KINDS, "gemma4", "minicpm"))
def test_no_second_copy_of_the_weights(kind):
    tower = make_tower("heads of 64") if kind == "tiles" else packed_tower(kind, 3)
    native = in_c(tower, "float32")
    panel = native._panel  # rows of a panel, which are as many as the processor's registers hold
    rows = [torch.atleast_1d(one) for one in tower.parameters()]
    weights = sum((len(one) + -len(one) % panel) * one[0].nbytes for one in rows)
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in (*native.parameters(), *native.buffers())}
    assert sum(kept.values()) <= 1.05 * weights


def test_copies_and_bad_input_are_refused():
    """A copy's addresses would be those of the first one's weights."""
    native = FastTower(make_tower("heads of 64"))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copied(nn.Sequential(native))
    for pixels in (torch.zeros(1, 1, 64, 64), torch.zeros(1, 3, 4, 64), torch.zeros(1, 3, 128, 64)):
        with pytest.raises(ValueError):
            native(pixels)


@pytest.mark.slow
@torch.inference_mode()
def test_which_tower_is_chosen(monkeypatch, tmp_path):
    tower = make_tower("heads of 64")
    assert fast_tower(copy.deepcopy(tower).half())[0] is None
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    build.load_library.cache_clear()
    for prepared in (tower, pack(copy.deepcopy(tower), "int8")):
        assert fast_tower(copy.deepcopy(prepared), compiling=False)[0] is None
    many, how = fast_tower(copy.deepcopy(tower))
    assert isinstance(many, FastTower) and how == "native C tower"
    build.load_library.cache_clear()
    again, _ = fast_tower(copy.deepcopy(tower), compiling=False)  # compiled already
    assert isinstance(again, FastTower)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.load_library.cache_clear()
    without, why = fast_tower(tower)
    build.load_library.cache_clear()
    assert without is None and "no C compiler" in why
