"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 are transformers' own: towers, texts, places and pixels."""

from __future__ import annotations

import json
import math
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data.processor import Processor
from families import family_of, qwen_vl
from families.paddleocr_vl import PaddleImages
from families.qwen_images import QwenImages
from families.sections import TEXT_KEYS
from generation.fast.native.step import NativeStep
from generation.fast.network import DECODER, PACKED_TOWER
from generation.options import GenerationOptions
from generation.requests import Request
from generation.session import Session
from inference.checkpoint import CPU_PIXELS, open_checkpoint
from models import VisionLanguageModel
from models.checkpoints.load import empty_model, meta_init, parameter_shapes
from models.checkpoints.weights import check_shapes, rename
from models.packed_vision_transformer import PackedVisionConfig
from tests.invariants import fast_step, run_all
from tests.maps import attention_maps
from tests.processors import draw_image, seen, user
from tests.qwen_checkpoints import CLASSES, hf_config, image_settings, save_hf, transformers_inputs
from tests.stored import export_tensors
from tests.tiny import randomize

BAR = 1e-4


def qwen3_vl(width: int, inner: int, layers: int, heads: int) -> dict:
    """config.json of a published Qwen3-VL."""
    text = {
        "attention_bias": False, "head_dim": 128, "hidden_size": width, "intermediate_size": inner,
        "max_position_embeddings": 262_144, "model_type": "qwen3_vl_text", "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5_000_000, "tie_word_embeddings": True, "vocab_size": 151_936,
    }  # fmt: skip
    tower = {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": width, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "model_type": "qwen3_vl", "text_config": text, "vision_config": tower, "tie_word_embeddings": True
    }  # fmt: skip


# Parameters, and what the Hub's config.json of these say. The older of the two families has the text's keys
# at the top.
PUBLISHED: dict[str, tuple[int, dict]] = {
    "Qwen2.5-VL-3B-Instruct": (
        3_754_622_976,
        {
            "model_type": "qwen2_5_vl", "bos_token_id": 151_643, "eos_token_id": 151_645,
            "image_token_id": 151_655, "video_token_id": 151_656,
            "hidden_size": 2048, "intermediate_size": 11_008, "max_position_embeddings": 128_000,
            "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32_768,
            "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151_936,
            "vision_config": {
                "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
                "hidden_size": 1280, "in_chans": 3, "intermediate_size": 3420, "num_heads": 16,
                "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
                "window_size": 112,
            },
        },
    ),
    "Qwen3-VL-2B-Instruct": (2_127_532_032, qwen3_vl(2048, 6144, 28, 16)),
    "PaddleOCR-VL": (
        905_601_648,
        {
            "model_type": "paddleocr_vl", "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "image_token_id": 100_295, "intermediate_size": 3072, "max_position_embeddings": 131_072,
            "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0,
            "rms_norm_eps": 1e-5, "rope_is_neox_style": True, "rope_theta": 500_000, "sliding_window": None,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "tie_word_embeddings": False, "use_3d_rope": True, "use_bias": False, "video_token_id": 101_307,
            "vision_start_token_id": 101_305, "vocab_size": 103_424,
            "vision_config": {
                "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384,
                "intermediate_size": 4304, "layer_norm_eps": 1e-6, "model_type": "paddleocr_vl",
                "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
            },
        },
    ),
}  # fmt: skip


CONVERSATION = user(seen((100, 60)), "how many red squares", seen((64, 150), 1), "are there")


def older(tensors: dict) -> dict:
    """Tensors under their names of before transformers 4.52, and in PaddleOCR-VL's own code."""
    fronts = {"model.visual.": "visual.", "model.language_model.": "model.", "model.projector.": "mlp_AR."}
    return {rename(name, fronts | {"": ""}): tensor for name, tensor in tensors.items()}


def for_transformers(inputs: dict, config) -> dict:
    """What transformers' model takes for our inputs."""
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "mm_token_type_ids": (inputs["input_ids"] == config.image_token_id).int(),
        **transformers_inputs(inputs["pixel_values"].to("cpu"), config),
    }


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", (*qwen_vl.KINDS, "paddleocr_vl"))
def test_logits_and_places_are_those_of_transformers(kind, seed):
    described = hf_config(kind, seed)
    model, described = CLASSES[kind](described).eval(), json.loads(described.to_json_string())
    randomize(model, seed=seed)
    family = family_of(described)
    assert family.NAME in ("qwen_vl", kind)
    config = family.read_config(described, {}, {})
    image_token_id = config.image_token_id
    names = ("vision_model", "projector", "language_model")
    ours = nn.ModuleDict(dict(zip(names, family.build(config), strict=True))).eval()
    stored = model.state_dict()
    place = family.tensor_map(list(stored))
    wanted = {name: place(name) for name in ours.state_dict()}
    assert stored.keys() - {one.name for one in wanted.values()} <= {"lm_head.weight"}
    ours.load_state_dict({n: stored[one.name].chunk(one.parts)[one.part] for n, one in wanted.items()})
    written = export_tensors(ours.state_dict(), place)
    assert all(torch.equal(written[name], stored[name]) for name in written)

    draw = random.Random(seed)
    grids = [(draw.randint(1, 5), draw.randint(1, 6)) for _ in range(draw.randint(1, 3))]
    side, merge = config.vision.patch_size, config.vision.merge_size
    images = [torch.randn(3, merge * side * rows, merge * side * columns) for rows, columns in grids]
    ids = []
    for rows, columns in grids:
        ids += [
            *(draw.randrange(290) for _ in range(draw.randint(1, 9))),
            297,
            *[image_token_id] * (rows * columns),
            298,
        ]
    ids = torch.tensor([[*ids, 1, 2, 3]])
    given = transformers_inputs(images, config)
    kinds = (ids == image_token_id).int()
    with torch.no_grad():
        expected = model(input_ids=ids, mm_token_type_ids=kinds, **given).logits
        sizes = iter([(*image.shape[1:], None) for image in images])
        position_ids, offset = family.places(config, ids[0].tolist(), sizes)
        of_transformers, delta = model.model.get_rope_index(ids, kinds, given["image_grid_thw"])
        assert torch.equal(position_ids, of_transformers[:, 0])
        assert offset == delta.item()
        features = ours["projector"](ours["vision_model"](images))
        x = ours["language_model"].embed_tokens(ids)
        x = nn.functional.pad(x, (0, features.shape[1] - x.shape[2]))
        x[ids == image_token_id] = features
        hidden, _ = ours["language_model"](x, position_ids=position_ids[:, None])
        got = ours["language_model"].logits(hidden)
        alone = torch.cat([ours["projector"](ours["vision_model"]([image])) for image in images])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone, features, atol=1e-5, rtol=1e-4)


def draw_sizes(count: int) -> list[tuple[int, int]]:
    """Widths and heights: usual ones, tiny ones, and some next to 200 times as long as wide."""
    draw, sizes = random.Random(0), [(1, 1), (1, 200), (200, 1), (13, 2600), (31, 33), (3, 7)]
    while len(sizes) < count:
        most = draw.choice([40, 300, 900])
        size = [draw.randint(1, most), draw.randint(1, most)]
        if draw.random() < 0.1:
            size = [size[0] % 20 + 1, (size[0] % 20 + 1) * draw.randint(100, 200)]
            draw.shuffle(size)
        if max(size) <= 200 * min(size):
            sizes.append((size[0], size[1]))
    return sizes


OTHERS = ("architectures", "image_size", "out_hidden_size", "temporal_patch_size", "tokens_per_second")
RULES = {kind: (Qwen2VLImageProcessorPil, QwenImages) for kind in qwen_vl.KINDS}
RULES["paddleocr_vl"] = PaddleOCRVLImageProcessorPil, PaddleImages


@pytest.mark.parametrize("kind", RULES)
def test_pixels_are_those_of_transformers(kind):
    rng, patch = np.random.default_rng(0), image_settings(kind)["patch_size"]
    own = (65_536, 16_777_216) if kind == "qwen3_vl" else (3136, 12_845_056)
    theirs, rule = RULES[kind]
    family = family_of({"model_type": kind})
    config = SimpleNamespace(family=family.NAME, vision=PackedVisionConfig(patch_size=patch))
    for index, (width, height) in enumerate(draw_sizes(100)):
        least, most = [own, (4 * patch**2, 50_000), (own[0], 200_000), (30_000, 30_000)][index % 4]
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        budget = {"size": {"shortest_edge": least, "longest_edge": most}}
        if index % 2:  # as the Hub's Qwen2.5-VL says it
            budget = {"min_pixels": least, "max_pixels": most}
        settings = image_settings(kind) | budget
        expected, images = theirs(**settings)(image, return_tensors="pt"), rule(settings)
        visual = images.cut(image)
        planned = images.plan(width, height)
        assert (visual.grid, visual.parts.shape) == (planned.grid, planned.parts.shape)
        for name, got in transformers_inputs(visual.parts.to("cpu"), config).items():
            assert torch.equal(got, expected[name])
        assert expected["image_grid_thw"].tolist() == [[1, 2 * visual.grid[0], 2 * visual.grid[1]]]


@pytest.mark.slow
def test_a_budget_of_pixels(both, as_json, tmp_path):
    """It holds in Python and at the command line, never goes beyond the checkpoint's, and is not saved."""
    _, folder, ours, processor = both
    large = tmp_path / "large"
    shutil.copytree(folder, large)
    stored = image_settings("qwen3_vl" if ours.config.text.rope_interleaved else "qwen2_5_vl", 10**7)
    (large / "preprocessor_config.json").write_text(json.dumps(stored))
    photo = draw_image(1600, 1200)
    side = processor.images.factor
    for budget in (4 * side**2, 30_000, 300_000):
        limited = Processor.from_pretrained(large, ours.config, max_pixels=budget)
        visual = limited.cut(photo)
        assert budget / 2 <= visual.positions * side**2 <= budget
        assert limited.images.settings == stored
    own = Processor.from_pretrained(folder, max_pixels=10**7).cut(photo)
    assert own.parts.digests == processor.cut(photo).parts.digests
    assert open_checkpoint(large, device="cpu").processor.images.budget == CPU_PIXELS
    photo.save(tmp_path / "photo.png")
    ask = (tmp_path / "photo.png", "-q", "how many", "--max-new-tokens", 2, "--max-pixels", 30_000)
    (made,) = as_json(*ask, model=large)
    assert made["image_tokens"] == Processor.from_pretrained(large, max_pixels=30_000).cut(photo).positions
    assert made["max_pixels"] == "30000"


@pytest.fixture(scope="module", params=CLASSES)
def both(request, tmp_path_factory):
    """transformers' model, its folder, and what Ocelli makes of that."""
    folder = tmp_path_factory.mktemp("qwen") / request.param
    theirs = save_hf(request.param, folder)
    ours = VisionLanguageModel.from_pretrained(folder)
    return theirs, folder, ours, Processor.from_pretrained(folder, ours.config)


@pytest.mark.slow(but=2)
@torch.no_grad()
@pytest.mark.parametrize("fast", [False, True])
def test_answers_are_those_of_transformers(both, fast):
    """Greedy, in a batch of unequal rows, in slots with prompts in chunks, and in a session."""
    theirs, _, ours, processor = both
    asked = [CONVERSATION, user("are there two"), user("and", seen((200, 90), 2), "circles", seen((64, 64)))]
    step, inputs = fast_step(ours, NativeStep) if fast else None, processor.prepare(asked)
    options = GenerationOptions(max_new_tokens=12, stop_token_ids=())
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(**for_transformers(inputs, ours.config), **greedy)[:, -12:].tolist()
    assert ours.generate(**inputs, options=options, decode_step=step).tolist() == expected
    rows = [processor.encode_conversation(one, True) for one in asked]
    prompts = [(torch.tensor([row.input_ids]), row.parts) for row in rows]
    requests = [Request(ids[0], parts, options=options, key=key) for key, (ids, parts) in enumerate(prompts)]
    outputs, _ = run_all(ours, requests, 2, prefill_chunk=9, decode_step=step)
    assert [outputs[key].token_ids for key in range(3)] == expected
    session = Session(ours)
    for key in (2, 2, 0):
        assert session.generate(*prompts[key], options=options, decode_step=step).tolist() == [expected[key]]


@torch.no_grad()
def test_images_and_their_places_must_agree(both):
    """By every door, and where a mask hides some of them: other places would be other answers."""
    _, _, model, processor = both
    inputs = processor.ask([draw_image(60, 60), draw_image(90, 40)], "how many")
    ids, parts = inputs["input_ids"], inputs["pixel_values"]
    image = (ids == model.config.image_token_id)[0].nonzero()[:, 0]
    hidden = torch.ones_like(ids)
    hidden[0, image[: model.positions(parts)[0]]] = 0
    for given in ({"pixel_values": None}, {"pixel_values": parts[:1]}, {"attention_mask": hidden}):
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="placeholders"):
                model.generate(**{**inputs, **given}, max_new_tokens=2, use_cache=use_cache)
    swapped = ids.clone()  # as many placeholders, and the second image has one of the first's
    swapped[0, image[0]], swapped[0, image[-1] + 1] = ids[0, image[-1] + 1], ids[0, image[0]]
    with pytest.raises(ValueError, match="side by side"):
        model.generate(swapped, parts, max_new_tokens=2)


def test_transformers_opens_what_is_saved(both, tmp_path):
    theirs, folder, ours, processor = both
    (folder / "video_preprocessor_config.json").write_text('{"fps": 2}')
    processor = Processor.from_pretrained(folder, ours.config)
    saved = ours.save_pretrained(tmp_path / "saved", processor)
    again, loading = type(theirs).from_pretrained(saved, output_loading_info=True)
    assert not any(loading.values())
    inputs = processor.prepare(CONVERSATION)
    given = for_transformers(inputs, ours.config)
    assert torch.equal(again(**given).logits, theirs(**given).logits)
    for name in ("image", "video", "vision_start", "vision_end"):
        assert getattr(again.config, f"{name}_token_id") == getattr(theirs.config, f"{name}_token_id")
    reopened = VisionLanguageModel.from_pretrained(saved)
    state = reopened.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())
    others = Processor.from_pretrained(saved, reopened.config).prepare(CONVERSATION)
    assert torch.equal(others["input_ids"], inputs["input_ids"])
    assert others["pixel_values"].digests == inputs["pixel_values"].digests
    images = AutoImageProcessor.from_pretrained(saved, backend="pil")
    stored = json.loads((folder / "preprocessor_config.json").read_text())
    assert (images.patch_size, images.size.longest_edge) == (
        stored["patch_size"],
        stored["size"]["longest_edge"],
    )
    described = json.loads((saved / "processor_config.json").read_text())
    assert described["processor_class"] == PROCESSOR_MAPPING_NAMES[theirs.config.model_type]
    if not processor.images.videos:  # their processor needs no torchvision
        of_files = AutoProcessor.from_pretrained(saved)
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        expected = of_files.apply_chat_template(CONVERSATION, **how)
        assert expected["input_ids"] == inputs["input_ids"].tolist()
    else:
        assert json.loads((saved / "video_preprocessor_config.json").read_text()) == {"fps": 2}


@torch.no_grad()
def test_older_names_are_the_same_model(both, tmp_path):
    """`visual.` and `model.layers`, with the text's keys at the top of config.json: Qwen2.5-VL on the Hub."""
    theirs, folder, ours, _ = both
    config = json.loads((folder / "config.json").read_text())
    if not ours.config.text.rope_interleaved:
        config = config.pop("text_config") | config
    for naming in (dict, older):
        other = tmp_path / naming.__name__
        other.mkdir()
        tensors = naming({name: tensor.clone() for name, tensor in theirs.state_dict().items()})
        save_file(tensors, other / "model.safetensors")
        (other / "config.json").write_text(json.dumps(config))
        opened = VisionLanguageModel.from_pretrained(other).state_dict()
        assert all(torch.equal(tensor, opened[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name, tmp_path):
    """Every tensor of transformers' model has its place in ours, and nothing else has one; so of old ones."""
    parameters, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    whole = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = CLASSES[published["model_type"]](whole)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    family = family_of(published)
    ours = family.read_config(published, {}, shapes)
    expected = parameter_shapes(empty_model(VisionLanguageModel, ours))
    assert sum(map(math.prod, expected.values())) == parameters
    with meta_init():
        empty = VisionLanguageModel(ours)
    assert PACKED_TOWER.unknown(empty.vision_model) is DECODER.unknown(empty.language_model) is None
    for stored in (shapes, older(shapes)):
        check_shapes(expected, family.tensor_map(stored), stored, family.IGNORABLE, name)
    written = family.write(ours, "bfloat16")
    assert family.read_config(written, {}, {}) == ours
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    for section in ("text_config", "vision_config"):
        one, other = (getattr(config, section).to_dict() for config in (whole, again))
        for described in (one, other):
            described["rope_parameters"].pop("type", "")  # for transformers 4.57
        differ = {name: value for name, value in one.items() if other.get(name) != value}
        assert differ.keys() <= {
            "architectures",
            "dtype",
            "max_window_layers",
            "in_chans",
            "spatial_patch_size",
            *((*OTHERS, "eos_token_id", "tie_word_embeddings") if name == "PaddleOCR-VL" else ()),
        }


@pytest.mark.parametrize("kind", RULES)
def test_defaults_are_those_of_transformers(kind, tmp_path):
    """What a config.json leaves out, read as transformers reads it."""
    family = family_of({"model_type": kind})
    described = {"model_type": kind, "text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), family.read_config(described, {}, {})
    for name in TEXT_KEYS:
        if hasattr(theirs.text_config, name) and not name.startswith("rope_"):
            assert getattr(ours.text, name) == getattr(theirs.text_config, name), name
    assert ours.text.rope_theta == theirs.text_config.rope_parameters["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(family.write(ours, "float32")))
    again = AutoConfig.from_pretrained(tmp_path).vision_config.to_dict()
    tower = theirs.vision_config.to_dict() | {"out_hidden_size": ours.text.hidden_size}
    differ = {name: value for name, value in tower.items() if again.get(name) != value}
    assert differ.keys() <= {"dtype", "rope_parameters", *(OTHERS if kind == "paddleocr_vl" else ())}
    theirs, rule = RULES[kind][0](), RULES[kind][1]({})
    assert [rule.least, rule.limit] == [theirs.size.shortest_edge, theirs.size.longest_edge]
    for name in ("image_mean", "image_std", "resample", "patch_size", "merge_size"):
        assert np.array_equal(rule.known[name], getattr(theirs, name))


# ------------------------------------------------------------------------------------------------ drafts
@pytest.mark.parametrize("kind", qwen_vl.KINDS)
@pytest.mark.parametrize("size", [(1200, 900), (300, 1500), (90, 60)])
def test_a_small_picture_of_an_image(kind, size):
    images = QwenImages(image_settings(kind, 400_000))
    visual = images.cut(draw_image(*size))
    whole = images.whole(visual)
    if visual.positions <= 3 * 48:
        assert whole is visual
        return
    assert whole.size == size and 16 < whole.positions <= max(48, visual.positions // 8)
    rows, columns = visual.grid
    assert rows / columns / 2 < whole.grid[0] / whole.grid[1] < rows / columns * 2
    images.budget = max(48, visual.positions // 8) * images.factor**2
    assert whole.grid == images.plan(*visual.parts.shape[:1:-1]).grid


# ----------------------------------------------------------------------------------------- where it looked
@torch.no_grad()
def test_attention_is_that_of_transformers(both):
    """Of two images, each token's where it lies in the image."""
    theirs, folder, ours, processor = both
    answer, images = [7, 9, 200], [draw_image(100, 60), draw_image(64, 150, 1)]
    found = attention_maps(open_checkpoint(folder, device="cpu"), images, "how many red squares", answer)
    inputs = processor.ask(images, "how many red squares")
    prompt = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([answer])), 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    theirs.set_attn_implementation("eager")
    layers = theirs(**for_transformers(inputs, ours.config), output_attentions=True).attentions
    theirs.set_attn_implementation("sdpa")
    rows = torch.stack(layers)[:, 0, :, prompt - 1 : -1].mean((0, 1))
    rows = rows[:, inputs["input_ids"][0] == ours.config.image_token_id]
    grids = [processor.cut(image).grid for image in images]
    parts = rows.split([math.prod(grid) for grid in grids], dim=1)
    for got, grid, expected in zip(found.maps, grids, parts, strict=True):
        np.testing.assert_allclose(got, expected.view(-1, *grid).numpy(), atol=1e-5)
