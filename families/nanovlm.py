"""nanoVLM's checkpoints, in four generations, with its images: its resize, its tiles, its prompts.

| generation | told by | image | prompt |
|---|---|---|---|
| v0.1 (6ba9082) | no `vlm_extra_tokens` | one square, bilinear | `<|image|>` x n in front of all |
| placeholders | `vlm_extra_tokens`, no `max_img_size` | one square, bilinear | `<|image|>` x n |
| tiles | `max_img_size`, no `global_image_token` | bicubic grid of tiles | each with its name |
| today's (4e0c096) | `global_image_token` | the whole image and the grid | the whole image first |

Tensor names are the same in all. Unknown keys of config.json are ignored: nanoVLM dropped some that its
older configs have. Beyond lm_max_position_embeddings it rescales its rotary frequencies with the length, so
that its cached tokens differ from recomputed ones; we keep the plain ones. Pixels are byte / 255 with no mean
or deviation, so a black tile is zero: tiles go to the model as (N, 3, M, M), where nothing is padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from data.chat import tokenizer_template
from data.conversation import Message
from data.errors import ProcessorError, PromptError
from data.tiles import Parts, TiledImages, Visual, pixels_of, tiles_of
from data.tokenizer import AnyTokenizer, open_with
from families import idefics3
from families.keys import Key, expect, read, section
from models.checkpoints import weights
from models.checkpoints.files import Opened
from models.checkpoints.names import REPO_ID
from models.config import TextConfig, VisionConfig, VLMConfig
from models.language_model import rope_frequencies

NAME = "nanovlm"
TITLE = "nanoVLM (today's and v0.1)"
BOX_FORMS: dict[str, str] = {}
MODEL_TYPES = ("nanovlm",)  # which its config.json lacks: see `families.family_of`
GGUF: dict[str, Any] = {}
MLX: dict[str, str] = {}
INV_FREQ = "decoder.rotary_embd.inv_freq"
HEAD, EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"
# The frequencies are read by `read_config`, and a tied head is the embedding.
IGNORABLE = re.compile(re.escape(INV_FREQ) + "|" + re.escape(HEAD))
# The same network, which is saved in transformers' layout.
build, positions, write = idefics3.build, idefics3.positions, idefics3.write
PROCESSORS = idefics3.PROCESSORS

# nanoVLM's, today and in v0.1
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
V01_IMAGE = "<|image|>"  # a token of ours: v0.1 had image features in front of all text, without placeholders
V01_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|image|>Question: ' +"
    " message['content'] | replace('<|image|>', '') + ' Answer:' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)

# Our fields of the tower and of the text part -> keys of config.json.
_VISION = {
    "hidden_size": Key("vit_hidden_dim"), "intermediate_size": Key("vit_inter_dim", 3072),
    "patch_size": Key("vit_patch_size", 16), "image_size": Key("vit_img_size", 224),
    "num_attention_heads": Key("vit_n_heads", 12), "num_hidden_layers": Key("vit_n_blocks", 12),
    "layer_norm_eps": Key("vit_ln_eps", 1e-6),
}  # fmt: skip
_TEXT = {
    "hidden_size": Key("lm_hidden_dim"), "intermediate_size": Key("lm_inter_dim", 1536),
    "rms_norm_eps": Key("lm_rms_eps", 1e-5), "rope_theta": Key("lm_re_base", 100_000.0),
    "max_position_embeddings": Key("lm_max_position_embeddings", 8192),
    "vocab_size": Key("lm_vocab_size", 49_152), "num_attention_heads": Key("lm_n_heads", 9),
    "num_key_value_heads": Key("lm_n_kv_heads", 3), "num_hidden_layers": Key("lm_n_blocks", 30),
}  # fmt: skip
# Our tensor names -> theirs: how they begin, and what then stands in them.
_PREFIXES = {
    "vision_model.layers.": "vision_encoder.blocks.",
    "vision_model.patch_embedding.": "vision_encoder.patch_embedding.conv.",
    "vision_model.post_layernorm.": "vision_encoder.layer_norm.",
    "vision_model.position_embedding.weight": "vision_encoder.patch_embedding.position_embedding",
    "projector.": "MP.",
    "language_model.layers.": "decoder.blocks.",
    "language_model.lm_head.": "decoder.head.",
    "language_model.embed_tokens.": "decoder.token_embedding.",
    "language_model.": "decoder.",
}
_INSIDE = {
    **{".layer_norm1.": ".ln1.", ".layer_norm2.": ".ln2.", ".o_proj.": ".out_proj.", ".self_attn.": ".attn."},
    **{".input_layernorm.": ".norm1.", ".post_attention_layernorm.": ".norm2."},
}
_VALUES = (torch.arange(256).float() / 255).expand(3, -1).contiguous()  # what a byte stands for


# ---------------------------------------------------------------------------------------------- checkpoint
def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, weights.Entry]) -> VLMConfig:
    """nanoVLM's flat config.json -> VLMConfig. It names no stop tokens: those are the tokenizer's."""
    expect(config, {"vit_cls_flag": False, "lm_attn_scaling": 1.0})
    text = _with_stored_theta(TextConfig(**read(config, _TEXT)), stored)
    return VLMConfig(
        family=NAME,
        vision=VisionConfig(**read(config, _VISION)),
        text=text,
        scale_factor=config.get("mp_pixel_shuffle_factor", 2),
        image_token_id=_image_token_id(config, text.vocab_size),
        tie_word_embeddings=bool(config.get("lm_tie_weights", True)),
    )


def _image_token_id(config: Mapping, vocab_size: int) -> int:
    """The extra tokens take the ids after the base vocabulary, in the order of the config. v0.1 put features
    in front of the text: its placeholder is ours, and follows the vocabulary."""
    extra = section(config, "vlm_extra_tokens")
    if not extra:
        return vocab_size
    if "image_token" not in extra:
        raise ValueError(f"vlm_extra_tokens: expected an image_token, got {', '.join(extra)}")
    return config.get("lm_base_vocab_size", vocab_size - len(extra)) + list(extra).index("image_token")


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> weights.StoredTensorOf:
    """The place of each of our tensors. A tied checkpoint stores only the head."""

    def stored_tensor(name: str) -> weights.StoredTensor:
        theirs = weights.rename(name, _PREFIXES, _INSIDE)
        if theirs == EMBEDDING and EMBEDDING not in stored_names:
            return weights.StoredTensor(HEAD)
        fused = weights.part_of_qkv(theirs, "qkv_proj") if name.startswith("vision_model.") else None
        return fused or weights.StoredTensor(theirs, leading_axis="position_embedding" in theirs)

    return stored_tensor


def _with_stored_theta(text: TextConfig, entries: Mapping[str, weights.Entry]) -> TextConfig:
    """The config with the theta of the stored rotary frequencies, which override lm_re_base in nanoVLM."""
    if INV_FREQ not in entries:
        return text
    stored, half = weights.read_tensor(entries[INV_FREQ]), text.head_dim // 2
    tolerance, stored = 8 * torch.finfo(stored.dtype).eps, stored.float()
    theta = float(stored[-1].double() ** (-half / (half - 1)))
    for candidate in (text.rope_theta, round(theta), theta):
        found = replace(text, rope_theta=candidate)
        known = rope_frequencies(found)
        if known.shape == stored.shape and torch.allclose(known, stored, rtol=tolerance, atol=0):
            return found
    raise ValueError(
        f"tensor {INV_FREQ}: expected {half} rotary frequencies of some theta, got {stored.tolist()}"
    )


# -------------------------------------------------------------------------------------------------- images
class NanoVLMImages(TiledImages):
    """The rule of a nanoVLM checkpoint, by its config.json."""

    string_content = flat = whole_first = True

    def __init__(self, config: Mapping, tokenizer: AnyTokenizer):
        known = read_config(config, {}, {})
        self.tile_size: int = known.vision.image_size
        self.tile_positions: int = config.get("mp_image_token_length", positions(known))
        extra = section(config, "vlm_extra_tokens")
        self.in_front = not extra  # v0.1
        self.image_token: Any = extra.get("image_token", V01_IMAGE)
        self.global_token: str | None = extra.get("global_image_token")
        self.with_whole = self.global_token is not None
        self.max_side: int | None = config.get("max_img_size")
        self.longest_side: int = self.tile_size if self.max_side is None else self.max_side
        self.to_max_side = bool(config.get("resize_to_max_side_len", False))
        self.add_special_tokens = self.in_front  # as nanoVLM: a template's output is tokenized as it stands
        self._known = tokenizer.get_added_vocab()

    def normalise_messages(self, messages: list[Message], label: str) -> list[Message]:
        """All images in front of the first user text, as in training. v0.1: one question about one image."""
        roles = [message.role for message in messages]
        images = [("image", one) for message in messages for one in message.images]
        if self.in_front and (len(images) != 1 or roles not in (["user"], ["user", "assistant"])):
            raise PromptError(
                f"{label}: a nanoVLM v0.1 model takes one image and one question, got "
                f"{len(images)} images and messages from {', '.join(roles)}"
            )
        texts = [[part for part in message.parts if part[0] == "text"] for message in messages]
        if images:
            if "user" not in roles:
                raise PromptError(f"{label}: images need a user message to stand in front of")
            texts[roles.index("user")][:0] = images
        return [replace(message, parts=tuple(parts)) for message, parts in zip(messages, texts)]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """In nanoVLM's order of floating-point operations: for some sizes its rounding adds a row of tiles
        that exact arithmetic would not, and the checkpoints were trained with it."""
        tile, most = self.tile_size, self.max_side
        if most is None:
            return self.uncut
        long, short = max(height, width), min(height, width)
        new_long = most if self.to_max_side else min(most, math.ceil(long / tile) * tile)
        if new_long % tile:
            raise ProcessorError(f"config.json: max_img_size: expected a multiple of {tile}, got {most}")
        tiles = max(math.ceil(short * (new_long / long) / tile), 1), new_long // tile
        return tiles if width >= height else tiles[::-1]

    def cut(self, image: Image.Image) -> Visual:
        side, planned = self.tile_size, self.plan(*image.size)
        rows, cols = planned.grid
        resample = Image.Resampling.BILINEAR if self.max_side is None else Image.Resampling.BICUBIC
        image = image.resize((side * cols, side * rows), resample)
        tiles = tiles_of(image, side, _VALUES)
        if len(planned.parts) > len(tiles):
            numbers = pixels_of(image)[None].float() / 255
            whole = F.interpolate(numbers, (side, side), mode="bilinear", antialias=True)
            tiles = Parts.cat((Parts.of(whole), tiles))
        return replace(planned, parts=tiles)

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        tile, (rows, cols) = self.image_token * self.tile_positions, visual.grid
        if self.max_side is None:
            return tile
        if (rows, cols) != (1, 1) and f"<row_{rows}_col_{cols}>" not in self._known:
            raise PromptError(f"the image makes {rows} x {cols} tiles, more than the tokenizer has names for")
        cells = "".join(f"<row_{r}_col_{c}>{tile}" for r in range(1, rows + 1) for c in range(1, cols + 1))
        if self.global_token is not None:
            cells = self.global_token + tile + ("" if (rows, cols) == (1, 1) else cells)
        return (f"<image: {index}>" if count > 1 else "") + cells


def open_images(opened: Opened) -> tuple[NanoVLMImages, AnyTokenizer, str]:
    """The image rules, tokenizer and chat template. `lm_tokenizer` names a folder of the checkpoint or of the
    Hub. Absent extra tokens are added in the config's order, which gives them the ids of training."""
    config = opened.config
    named = str(config.get("lm_tokenizer", ""))
    if not REPO_ID.fullmatch(named):
        raise PromptError(f"config.json: expected lm_tokenizer to name a folder or repository, got {named!r}")
    inside = opened.folder / named
    if opened.file("tokenizer.json") is not None:
        words = opened
    else:
        words = opened.other(inside if inside.is_dir() else named)
    tokenizer = open_with(words, ())
    extra = config.get("vlm_extra_tokens") or {"image_token": V01_IMAGE}
    absent = [token for token in extra.values() if token not in tokenizer.get_vocab()]
    if absent:
        tokenizer.add_special_tokens({"additional_special_tokens": absent}, False)
    template = config.get("lm_chat_template") or tokenizer_template(words) or CHATML_TEMPLATE
    images = NanoVLMImages(config, tokenizer)
    return images, tokenizer, V01_TEMPLATE if images.in_front else template
