"""What is Qwen3.5's own: what is published opens, other models are refused, new weights, packed rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3_5ForCausalLM

from data.errors import ImageError
from data.processor import Processor
from families import qwen3_5
from families.qwen_images import QwenImages
from generation.fast.network import DECODER, PACKED_TOWER
from generation.kv_cache import bytes_per_row
from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.command import EXAMPLE_IMAGE
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import empty_model, meta_init, parameter_shapes, read_config
from models.checkpoints.weights import check_shapes
from models.packed_rows import segment_places
from tests.qwen_checkpoints import CLASSES, hf_config, image_settings, save_hf, tokenizer
from tests.tiny import randomize
from tools.inspect import as_text, inspect


def published(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, values: int, tower: dict
) -> dict:
    """config.json as the Hub has it."""
    text = {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248_044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": inner, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "layer_types": [("linear" if (at + 1) % 4 else "full") + "_attention" for at in range(layers)],
        "linear_num_key_heads": 16, "linear_num_value_heads": values, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 248_320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000, "rope_type": "default",
        },
    }  # fmt: skip
    tower = tower | {
        "deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        "initializer_range": 0.02, "model_type": "qwen3_5", "num_position_embeddings": 2304,
        "out_hidden_size": width, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248_056,
        "model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True, "video_token_id": 248_057,
        "vision_config": tower, "vision_end_token_id": 248_054, "vision_start_token_id": 248_053,
    }  # fmt: skip


SMALL = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
LARGE = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
PUBLISHED = {
    "0.8B": (852_985_920, published(1024, 3584, 24, 8, 2, 16, SMALL)),
    "4B": (4_539_265_536, published(2560, 9216, 32, 16, 4, 32, LARGE)),
}


# Keys that change nothing here, or that stand elsewhere in what is written.
_UNREAD = ("attn_", "deepstack_", "dtype", "eos_", "full_attention_", "mamba_", "mlp_only_", "mtp_")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name, tmp_path):
    """Every tensor of transformers' model has its place in ours; only `mtp` of the Hub's is left over."""
    parameters, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = CLASSES["qwen3_5"](whole)
    stored = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    ours = read_config(config, name, {"eos_token_id": [248_046, 248_044]})
    expected = parameter_shapes(empty_model(VisionLanguageModel, ours))
    assert sum(map(math.prod, expected.values())) == parameters
    assert ours.eos_token_ids == (248_044, 248_046)
    with meta_init():
        empty = VisionLanguageModel(ours)
    assert PACKED_TOWER.unknown(empty.vision_model) is DECODER.unknown(empty.language_model) is None
    place = qwen3_5.tensor_map(stored)
    check_shapes(expected, place, stored | {"mtp.fc.weight": (1, 1)}, qwen3_5.IGNORABLE, name)
    with pytest.raises(CheckpointError):
        check_shapes(expected, place, stored | {"model.strange": (1,)}, qwen3_5.IGNORABLE, name)
    written = qwen3_5.write(ours, "bfloat16")
    assert qwen3_5.read_config(written, {"eos_token_id": [248_046, 248_044]}, {}) == ours
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    for section in ("text_config", "vision_config"):
        one, other = (getattr(config, section).to_dict() for config in (whole, again))
        differ = {key for key in one.keys() & config[section].keys() if other.get(key) != one[key]}
        assert not {key for key in differ if not key.startswith(_UNREAD)}, section


@pytest.mark.parametrize(
    "top, text",
    [
        ({"model_type": "qwen3_5_text", "num_experts": 8}, {}),
        ({"model_type": "qwen3_5_moe"}, {}),
        ({}, {"model_type": "qwen3_5_moe_text"}),
        ({}, {"num_experts": 8}),
        ({}, {"attn_output_gate": False}),
        ({}, {"layer_types": ["linear_attention"] * 24}),
        ({}, {"layer_types": None, "full_attention_interval": 25}),
        ({}, {"layer_types": ["sliding_attention"] * 24}),
        ({}, {"layer_types": ["full_attention"]}),
        ({}, {"linear_num_value_heads": 24}),
        ({}, {"linear_conv_kernel_dim": 60}),
        ({}, {"rope_parameters": {"mrope_section": [11, 11, 11], "partial_rotary_factor": 0.25}}),
    ],
    ids=str,
)
def test_what_is_another_model_is_refused(top, text):
    config = PUBLISHED["0.8B"][1] | top
    config["text_config"] = config["text_config"] | text
    with pytest.raises(CheckpointError):
        read_config(config, "here")


def test_tensors_that_are_left_out_and_what_a_conversation_takes(tmp_path):
    """With states stored in float32 beside bfloat16, as the Hub has them."""
    save_hf("qwen3_5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = ("A_log", "linear_attn.norm.weight")
    tensors = {name: one if name.endswith(kept) else one.bfloat16() for name, one in tensors.items()}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    told, model = inspect(str(tmp_path)), VisionLanguageModel.from_pretrained(tmp_path, dtype="bfloat16")
    assert told["fits"] == "yes" and told["left_out"] == ["mtp.fc.weight"] and "mtp.fc" in as_text(told)
    row = bytes_per_row(model.language_model.cache_layout)
    cache = told["cache"]["bfloat16"]
    assert cache["per_conversation"] == row > cache["per_snapshot"] > 0
    assert cache["full_context"] == row + cache["per_token"] * told["context"]
    assert model.language_model.layers[0].linear_attn.A_log.dtype == torch.bfloat16
    wide = VisionLanguageModel.from_pretrained(tmp_path, dtype="float32")
    stored = tensors["model.language_model.layers.0.linear_attn.A_log"]
    assert torch.equal(wide.language_model.layers[0].linear_attn.A_log, stored)


def test_new_weights_pass_activations_on(tmp_path):
    """Norms scale by one whatever they are around; decays differ."""
    save_hf("qwen3_5", tmp_path)
    model = VisionLanguageModel.from_pretrained(tmp_path)
    model.init_weights(torch.Generator().manual_seed(0))
    first, last = model.language_model.layers[0], model.language_model.layers[3]
    x = torch.randn(2, 5, 64)
    for norm in (first.input_layernorm, model.language_model.norm, last.post_attention_layernorm):
        torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(2, 5), atol=5e-3, rtol=0)
    assert first.linear_attn.norm.weight.eq(1).all() and first.linear_attn.dt_bias.eq(1).all()
    assert first.linear_attn.A_log.unique().numel() > 1 and first.linear_attn.A_log.exp().max() < 16


@pytest.mark.parametrize("autocast", [False, True])
def test_a_packed_row_is_its_segments(tmp_path, autocast):
    """Logits and gradients, however long the segments are and whatever they begin with."""
    save_hf("qwen3_5", tmp_path, seed=3)
    model = VisionLanguageModel.from_pretrained(tmp_path).train().language_model
    lengths = (1, 63, 64, 70, 2, 130, 5)  # some begin where a chunk does
    ids = torch.randint(0, 290, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = ids[:, 1] = 5

    def run(pieces) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        out = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for piece, mask, places in pieces:
                hidden, _ = model(model.embed_tokens(piece), mask, position_ids=places)
                out.append(model.logits(hidden).float())
        logits = torch.cat(out, 1)
        (logits.log_softmax(-1)[..., 7].sum()).backward()
        return logits.detach(), {name: one.grad.clone() for name, one in model.named_parameters()}

    places = torch.cat([torch.arange(length) for length in lengths])[None]
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (segments[:, None] == segments) & torch.ones(len(segments), len(segments)).tril().bool()
    together, packed = run([(ids, mask[None], places)])
    apart, alone = run([(piece, None, None) for piece in ids.split(lengths, 1)])
    assert segment_places(places).equal(places)
    torch.testing.assert_close(together, apart, atol=0.15 if autocast else 1e-4, rtol=0)
    for name, gradient in alone.items():
        scale = gradient.abs().max()
        assert (packed[name] - gradient).abs().max() <= (0.1 if autocast else 1e-4) * scale + 1e-6, name


# In the form of the published one: an answer to the last question has a block of thinking, earlier ones none.
TEMPLATE = """\
{%- set seen = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content[0].text | trim %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > seen.last %}{{- '<think>\\n' + thoughts | trim + '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is not true %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


@pytest.mark.parametrize("thoughts", ["", "two of them are red"])
@pytest.mark.parametrize(
    "earlier", [[], [("how many", "three")], [("how many", "<think>\na\n</think>\n\n3")]]
)
def test_what_is_learned_is_what_is_answered(earlier, thoughts):
    """A row is the prompt that is asked with, with thinking or without, and what the model says after it."""
    words = tokenizer()
    words.add_tokens(["<think>", "</think>"])
    processor = Processor(QwenImages(image_settings("qwen3_5")), words, TEMPLATE)
    turns = [*earlier, ("how many red", f"<think>\n{thoughts}\n</think>\n\none" if thoughts else "one")]
    conversation = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    row = processor.encode_conversation(conversation, False)
    prompt = processor.encode_conversation(conversation[:-1], True, think=bool(thoughts)).input_ids
    assert row.input_ids[: len(prompt)] == prompt
    said = [id for id, learned in zip(row.input_ids, row.assistant_mask, strict=True) if learned]
    expected = f"{thoughts}\n</think>\n\none<|im_end|>" if thoughts else "one<|im_end|>"
    answers = [answer.rpartition("\n")[2] + "<|im_end|>" for _, answer in earlier]
    assert words.decode(said) == "".join([*answers, expected])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The text model of a checkpoint, as transformers saves it alone."""
    whole, folder = hf_config("qwen3_5", 1), tmp_path_factory.mktemp("alone") / "text"
    model = Qwen3_5ForCausalLM(whole.text_config)
    randomize(model, seed=1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@torch.no_grad()
def test_the_text_model_alone(alone, tmp_path):
    """Its logits are transformers', whose it stays when it is saved; it answers, and refuses images."""
    assert json.loads((alone / "config.json").read_text())["model_type"] == qwen3_5.ALONE
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = Qwen3_5ForCausalLM.from_pretrained(alone).eval()(ids).logits
    model = VisionLanguageModel.from_pretrained(alone)
    assert (model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    model.save_pretrained(tmp_path / "again", Processor.from_pretrained(alone, config=model.config))
    again = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "again").eval()(ids).logits
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)
    answers = set()
    for folder in (alone, tmp_path / "again"):  # greedy
        checkpoint = open_checkpoint(folder, device="cpu").compiled()
        answers.add(str(ask(checkpoint, [], "Why?", GenerationOptions(max_new_tokens=6)).finish()["answers"]))
        with pytest.raises(ImageError, match="no images"):
            ask(checkpoint, [EXAMPLE_IMAGE], "Why?", GenerationOptions())
    assert len(answers) == 1
    told = inspect(str(alone))
    assert told["fits"] == "yes" and told["vision"] is told["images"] is None and "blocks" in as_text(told)
