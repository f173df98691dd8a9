"""The Hub's configs as they are published, with their absent keys, built on the meta device."""

from __future__ import annotations

import json
import math

import pytest
from transformers import AutoConfig

from families import idefics3
from families.saving import text_family
from families.sections import TEXT_KEYS, VISION_KEYS
from generation.fast.network import DECODER
from generation.fast.quantized import rounded_bytes
from models import VisionLanguageModel
from models.checkpoints.load import empty_model, parameter_shapes
from models.checkpoints.names import MODELS
from training.config import parse_arguments
from training.plan import plan_of, stored_shape

SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
SIGLIP_BASE = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
SMOLLM = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
SMOLLM_135M = SMOLLM | {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "rope_theta": 100_000,
}  # fmt: skip
# name: (parameters, tokens per tile, config.json). What the published files leave to transformers' defaults
# (vision layers and widths, head counts, head_dim) is left out here as well.
PUBLISHED = {
    "SmolVLM-256M-Instruct": (
        256_484_928,
        64,
        {
            "model_type": "idefics3",
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 49190, "scale_factor": 4, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "text_config": SMOLLM_135M
            | {
                "_flash_attn_2_enabled": True, "is_llama_config": True, "pad_token_id": 2,
                "rope_interleaved": False, "use_resampler": False, "vocab_size": 49280,
            },
            "vision_config": SIGLIP_BASE
            | {"max_image_size": {"longest_edge": 512}, "model_type": "idefics3"},
        },
    ),
    "SmolVLM2-2.2B-Instruct": (
        2_246_272_880,
        81,
        {
            "model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"],
            "image_token_id": 49153, "scale_factor": 3,
            "text_config": {
                "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
                "max_position_embeddings": 16384, "num_hidden_layers": 24, "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5, "rope_theta": 273_768.0, "vocab_size": 49155,
            },
            "vision_config": SO400M | {"image_size": 384},
        },
    ),
    "Idefics3-8B-Llama3": (
        8_462_086_384,
        169,
        {
            "model_type": "idefics3", "image_token_id": 128_257, "scale_factor": 2,
            "text_config": {
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0, "vocab_size": 128_259,
            },
            "vision_config": SO400M | {"image_size": 364},
        },
    ),
}  # fmt: skip
# Hardly a key given: no text_config (eps 1e-5), an empty one (1e-6), theta in three places.
SMALL_GRID = {"vision_config": {"image_size": 64, "patch_size": 16}, "image_token_id": 31_999}
THETAS = {"model_type": "llama", "rope_theta": 5e5, "rope_parameters": {"rope_theta": 7e4}}
BARE = [
    {"model_type": "idefics3", "image_token_id": 31_999, "vision_config": {"image_size": 256}},
    {"model_type": "smolvlm", "text_config": {"model_type": "llama"}, **SMALL_GRID},
    {"model_type": "smolvlm", "tie_word_embeddings": True, **SMALL_GRID},
    {"model_type": "idefics3", "text_config": THETAS, **SMALL_GRID},
    {
        "model_type": "idefics3",
        "text_config": THETAS | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        **SMALL_GRID,
    },
]


@pytest.mark.parametrize(("parameters", "tokens", "published"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameter_counts(parameters, tokens, published):
    config = idefics3.read_config(published, {}, {})
    assert (
        sum(math.prod(shape) for shape in parameter_shapes(empty_model(VisionLanguageModel, config)).values())
        == parameters
    )
    assert idefics3.positions(config) == tokens


@pytest.mark.parametrize("published", [*(config for _, _, config in PUBLISHED.values()), *BARE])
def test_defaults_are_those_of_transformers(published, tmp_path):
    """Our reading of a config against transformers' own, default for default."""
    (tmp_path / "config.json").write_text(json.dumps(published))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = idefics3.read_config(published, {}, {})
    text, vision = theirs.text_config, theirs.vision_config
    assert text_family(ours.text) == text.model_type
    for section, other, names in ((ours.text, text, TEXT_KEYS), (ours.vision, vision, VISION_KEYS)):
        for name in names:
            if not name.startswith("rope_"):
                assert getattr(section, name) == getattr(other, name), name
    assert ours.text.rope_theta == text.rope_parameters["rope_theta"]
    assert (ours.scale_factor, ours.image_token_id) == (theirs.scale_factor, theirs.image_token_id)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "parameters", "in_four_bits"),
    [
        ("qwen3-vl-8b", 8_767_123_696, 5.21),
        ("qwen3.5-9b", 9_409_813_744, 5.52),
        ("qwen2.5-vl-7b", 8_292_166_656, 4.98),
        ("internvl3.5-8b", 8_528_318_464, 4.96),
    ],
)
def test_the_largest_sizes(name, parameters, in_four_bits):
    """Of what a plan needs no network for: the download that is listed, and what a CPU has of it in int4."""
    known = MODELS[name]
    model = empty_model(VisionLanguageModel, stored_shape(known.repo))
    shapes = parameter_shapes(model)
    assert sum(map(math.prod, shapes.values())) == parameters
    assert abs(known.gigabytes - 2e-9 * parameters) < 0.06
    rounded = 1e-9 * sum(rounded_bytes("int4", name, shape) for name, shape in shapes.items())
    assert rounded == pytest.approx(in_four_bits, abs=0.006)
    assert DECODER.unknown(model.language_model) is None
    run = ["--init-from", name, "--data", "assets/rows.jsonl", "--batch-size", "1"]
    run += ["--sequence-length", "4096"] if name.startswith("internvl") else ["--max-pixels", "99999"]
    assert plan_of(*parse_arguments([*run, "--plan"]))[0].memory
