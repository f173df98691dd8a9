"""A stranger's config.json of LFM2-VL, Qwen-VL, Qwen3.5 or Gemma 4 is read, or refused in one sentence,
before memory is asked for by its numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from data.errors import ProcessorError
from data.processor import Processor
from families import gemma4, lfm2_vl, qwen3_5, qwen_vl
from families.keys import Names
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import choose_family, empty_model
from tests import lfm2_checkpoints, qwen_checkpoints

STRANGE = (-1, 0, 10**12, 10**400, float("inf"), "16", [], [-1], [1, 1], ["a"], [[1]], {"a": 1}, 0.5)


def section(names: Names) -> dict:
    """Every key of a table, with its default."""
    return {key.name: key.default for key in names.values()}


_LFM2 = {"full_attn_idxs": [2], "block_ff_dim": None, "layer_types": None}
BASES = {
    "lfm2_vl": {
        "text_config": lfm2_vl._TEXT | section(lfm2_vl._OWN_TEXT) | _LFM2,
        "vision_config": section(lfm2_vl._VISION),
        **section(lfm2_vl._PROJECTOR), "projector_hidden_size": 64, "image_token_id": 396,
    },
    **{
        kind: {
            "text_config": qwen_vl._TEXT[kind] | {"rope_scaling": {"mrope_section": [16, 24, 24]}},
            "vision_config": section(qwen_vl._TOWERS[kind]) | {"window_size": 112},
        }
        for kind in qwen_vl.KINDS
    },
    "qwen3_5": {
        "text_config": qwen3_5._TEXT | section(qwen3_5._DELTA) | {
            "layer_types": None, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
            "rope_parameters": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
        },
        "vision_config": section(qwen_vl._TOWERS["qwen3_5"]),
    },
    "gemma4": {
        "text_config": section(gemma4._TEXT) | {
            "num_kv_shared_layers": 10, "layer_types": None, "global_head_dim": 512,
            "rope_parameters": {
                "sliding_attention": section(gemma4._NEAR), "full_attention": section(gemma4._FAR),
            },
        },
        "vision_config": section(gemma4._VISION) | {"rope_parameters": section(gemma4._TURNS)},
    },
}  # fmt: skip


def read(kind: str, config: dict) -> None:
    config = config | {"model_type": kind}
    empty_model(VisionLanguageModel, choose_family(config, "here").read_config(config, {}, {}))


def paths(config: dict, *above: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, *above, name)


def changed(config: dict, path: tuple[str, ...], value: object) -> dict:
    within = config = copy.deepcopy(config)
    for name in path[:-1]:
        within = within[name]
    within[path[-1]] = value
    return config


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", BASES)
def test_any_value_of_any_key(kind):
    read(kind, BASES[kind])
    for path in paths(BASES[kind]):
        for value in STRANGE:
            with suppress(CheckpointError):
                read(kind, changed(BASES[kind], path, value))


@pytest.mark.parametrize(
    "kind, path, value",
    [
        ("lfm2_vl", "text_config.layer_types", 3),
        ("lfm2_vl", "text_config.block_multiple_of", 0),
        ("lfm2_vl", "text_config.block_ffn_dim_multiplier", float("inf")),
        ("lfm2_vl", "vision_config.num_patches", -1),
        ("qwen2_5_vl", "text_config.rope_scaling.mrope_section", []),
        ("qwen2_5_vl", "text_config.rope_scaling.mrope_section", [True, 31, 32]),
        ("qwen2_5_vl", "vision_config.fullatt_block_indexes", 7),
        ("qwen2_5_vl", "vision_config.window_size", 13),
        ("qwen3_vl", "vision_config.deepstack_visual_indexes", [16, 8, 24]),
        ("qwen3_vl", "vision_config.deepstack_visual_indexes", [8, 8]),
        ("qwen3_vl", "vision_config.deepstack_visual_indexes", [8, 27]),
        ("qwen3_vl", "vision_config.num_position_embeddings", 10**12),
    ],
)
def test_what_would_be_another_model_is_refused(kind, path, value):
    with pytest.raises(CheckpointError):
        read(kind, changed(BASES[kind], tuple(path.split(".")), value))


def test_many_layers_without_their_types():
    text = {"num_hidden_layers": 10**12}
    with pytest.raises(CheckpointError):
        read("lfm2_vl", {"text_config": text})


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind != "gemma4"])
def test_image_settings_are_missed(kind, tmp_path):
    """Those of another model would be guessed."""
    saved = lfm2_checkpoints if kind == "lfm2_vl" else qwen_checkpoints
    model = saved.hf_config() if kind == "lfm2_vl" else saved.hf_config(kind)
    saved.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.to_dict(), default=str))
    (tmp_path / "chat_template.jinja").write_text(saved.TEMPLATE)
    with pytest.raises(ProcessorError, match=r"preprocessor_config\.json"):
        Processor.from_pretrained(tmp_path)
