"""Idefics3, SmolVLM and SmolVLM2 as transformers has them: the checkpoint layout that we also write, and the
image rule, bit for bit that of transformers' own image processor (its PIL backend), which takes seconds to
import.

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub; absent
keys take the defaults of transformers' Idefics3Config (the two model types share all of them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import nn

from data.chat import chat_template
from data.errors import PromptError
from data.tiles import (
    MOST_TILE_SIDE,
    Parts,
    TiledImages,
    Visual,
    check_tiles,
    pixel_rule,
    reading_settings,
    shape_within,
    tiles_of,
)
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer, image_settings, open_with
from families import keys
from families.idefics3_videos import SmolVideos
from families.saving import write_config
from families.text import text_config, text_family, vision_config, vlm_config, write_text, write_vision
from models.checkpoints.files import CheckpointError, Opened
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.vision_transformer import ModalityProjector, VisionTransformer

NAME = "idefics3"
TITLE = "transformers Idefics3 / SmolVLM / SmolVLM2"
BOX_FORMS: dict[str, str] = {}
# Buffers that old transformers versions stored follow from the config, and a tied head is the embedding.
IGNORABLE = re.compile(r".*(rotary_emb\.inv_freq|embeddings\.position_ids)|lm_head\.weight")
# Our tensor names -> theirs, the longer prefix first.
NAMES = {
    "vision_model.layers.": "model.vision_model.encoder.layers.",
    "vision_model.post_layernorm.": "model.vision_model.post_layernorm.",
    "vision_model.": "model.vision_model.embeddings.",
    "projector.": "model.connector.modality_projection.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.text_model.",
}

# transformers' settings where a file does not say.
DEFAULTS = {
    "do_resize": True,
    "size": {"longest_edge": 4 * 364},
    "resample": int(Image.Resampling.LANCZOS),
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 364},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Idefics3Processor marks these as special in any tokenizer.
SPECIAL = {"additional_special_tokens": [FAKE, IMAGE, END]}


# ---------------------------------------------------------------------------------------------- checkpoint
def recognises(config: Mapping) -> bool:
    return config.get("model_type") in ("idefics3", "smolvlm")


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing.

    Only the top-level tie_word_embeddings counts, as in transformers.
    """
    text = keys.section(config, "text_config")
    # transformers' rms_norm_eps is 1e-5 where there is no text_config at all, LlamaConfig's 1e-6 otherwise.
    defaults = {} if config.get("text_config") is not None else {"rms_norm_eps": 1e-5}
    decoder = text_config(text, defaults)
    vision = vision_config(keys.section(config, "vision_config"), {})
    parts = {"family": NAME, "vision": vision, "scale_factor": config.get("scale_factor", 2)}
    return vlm_config(config, generation, 128_257, False, decoder, **parts)


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """Where each of our tensors lies; some old checkpoints leave the leading `model.` out."""
    bare = any(name.startswith(("text_model.", "vision_model.")) for name in stored_names)
    return lambda name: StoredTensor(rename(name, NAMES).removeprefix("model." if bare else ""))


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), ModalityProjector(config), text


def positions(config: VLMConfig, *size: int) -> int:
    """Positions in the language model that a part of (height, width) pixels takes. Tiles are squares of one
    size, which is meant where none is given; others are a ValueError."""
    side = config.vision.image_size
    if size and size != (side, side):
        got = " x ".join(map(str, size))
        raise ValueError(f"expected tiles of {side} x {side} pixels, as the processor cuts them, got {got}")
    return (config.vision.grid // config.scale_factor) ** 2


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json, in which nothing is left to a reader's defaults. A CheckpointError says why this layout
    cannot hold the model."""
    text, problem = config.text, ""
    if config.image_token_id >= text.vocab_size:
        problem = "its image placeholder is beyond the vocabulary (nanoVLM v0.1): `tools convert` mends it"
    elif config.projector_bias:
        problem = "its projector has no bias: build the model with projector_bias=False"
    elif text_family(text) == "llama" and text.hidden_size % text.num_attention_heads:
        problem = f"its hidden_size must be a multiple of num_attention_heads ({text.num_attention_heads})"
    if problem:
        raise CheckpointError(f"the model cannot be saved in the transformers Idefics3 layout: {problem}")
    vision = {"model_type": "idefics3_vision", **write_vision(config.vision), "attention_dropout": 0.0}
    more = {"pad_token_id": config.pad_token_id, "scale_factor": config.scale_factor, "use_cache": True}
    described = write_text(config, dtype)
    return write_config(config, dtype, "Idefics3ForConditionalGeneration", NAME, described, vision, **more)


def processor_classes(config: VLMConfig) -> tuple[str, str]:
    return "Idefics3Processor", "Idefics3ImageProcessor"


# -------------------------------------------------------------------------------------------------- images
class IdeficsImages(TiledImages):
    """How a transformers Idefics3Processor cuts images and writes them into a prompt. `settings` are what
    preprocessor_config.json has, `tile_positions` is its `image_seq_len`."""

    image_token = IMAGE
    uncut = (0, 0)

    def __init__(self, settings: Mapping[str, Any], tile_positions: int = 169):
        self.settings = dict(settings)
        known: dict[str, Any] = DEFAULTS | self.settings
        self.known = known
        self.tile_positions = tile_positions
        self.splits = bool(known["do_image_splitting"])
        with reading_settings(known):
            self.tile_size: int = known["max_image_size"]["longest_edge"]
            self.longest_side: int = known["size"]["longest_edge"]
            self._resample, self.values = pixel_rule(known)
        check_tiles(self.tile_size, self.longest_side, tile_positions)

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor  # takes seconds

        pictures, seen = Idefics3ImageProcessorPil(**self.settings), self.tile_positions
        return Idefics3Processor(pictures, tokenizer, image_seq_len=seen, chat_template=chat_template)

    def resized(self, longest_side: int) -> IdeficsImages:
        """This rule for images whose longer side has so many pixels, which are tiles where it is longer."""
        size = {"size": {"longest_edge": longest_side}, "do_image_splitting": longest_side > self.tile_size}
        other = IdeficsImages(self.settings | size, self.tile_positions)
        other.videos = self.videos
        return other

    def within(self, positions: int) -> IdeficsImages:
        side = max(1, math.isqrt(self._tiles_within(positions) - 1))
        return self.resized(min(side, MOST_TILE_SIDE // self.tile_size) * self.tile_size)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        if not self.splits:
            return self.uncut
        width, height = self._cut_size(*shape_within(width, height, self.longest_side))
        rows, cols = height // self.tile_size, width // self.tile_size
        return (rows, cols) if max(rows, cols) > 1 else self.uncut

    def _cut_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in whole tiles."""
        tile, aspect = self.tile_size, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return width, math.ceil(int(width / aspect) / tile) * tile
        height = math.ceil(height / tile) * tile
        return math.ceil(int(height * aspect) / tile) * tile, height

    def cut(self, image: Image.Image) -> Visual:
        """The image is resampled up to three times, each time rounded to bytes: so transformers does."""
        tile, planned = self.tile_size, self.plan(*image.size)
        image = image.resize(shape_within(*image.size, self.longest_side), self._resample)
        if self.splits:
            image = image.resize(self._cut_size(*image.size), self._resample)
        parts = tiles_of(image.resize((tile, tile), self._resample), tile, self.values)
        if planned.grid != self.uncut:
            parts = Parts.cat((tiles_of(image, tile, self.values), parts))
        return replace(planned, parts=parts)

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        """Of a video, what its rule says. A tag that the tokenizer does not have (in Idefics3-8B,
        `<global-img>` and all of `<row_r_col_c>`) is read as text, as in transformers."""
        if visual.times and self.videos:
            return self.videos.prompt(visual)
        tile, prompt, (rows, cols) = IMAGE * self.tile_positions, "", visual.grid
        for r in range(1, rows + 1):
            prompt += "".join(f"{FAKE}<row_{r}_col_{c}>{tile}" for c in range(1, cols + 1)) + "\n"
        return (prompt + "\n" if prompt else "") + FAKE + GLOBAL + tile + FAKE


def image_rule(settings: Mapping[str, Any], config: VLMConfig) -> IdeficsImages:
    """The rule of a model with these settings, where there is no folder."""
    return IdeficsImages(settings, positions(config))


def new_images(
    tokenizer: AnyTokenizer, image_size: int, image_seq_len: int, longest_edge: int | None, split: bool
) -> IdeficsImages:
    """The rule of a new model (see `data.processor.make_processor`), whose tokens the tokenizer gets."""
    needed = [IMAGE, FAKE, GLOBAL, END, *(["<row_1_col_1>"] if split else [])]
    if missing := [token for token in needed if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected the special tokens {', '.join(needed)}; {missing} are absent")
    tokenizer.add_special_tokens(SPECIAL)
    settings = DEFAULTS | {
        "size": {"longest_edge": longest_edge or image_size * (4 if split else 1)},
        "do_image_splitting": split,
        "max_image_size": {"longest_edge": image_size},
    }
    return IdeficsImages(settings, image_seq_len)


def open_images(opened: Opened) -> tuple[IdeficsImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint, in today's layout or the older."""
    if not any(map(opened.file, ("processor_config.json", "preprocessor_config.json"))):
        raise PromptError("expected processor_config.json or preprocessor_config.json, found neither")
    tokenizer = open_with(opened, (IMAGE, FAKE))
    tokenizer.add_special_tokens(SPECIAL)
    seen = opened.json("processor_config.json").get("image_seq_len", 169)
    images = IdeficsImages(image_settings(opened), seen)
    video = opened.json("processor_config.json").get("video_processor")
    video = video or opened.json("video_preprocessor_config.json") or images.settings
    sampling = {"max_frames": video.get("num_frames"), "fps": video.get("fps")}
    if None not in (sampling | (video.get("video_sampling") or {})).values():  # which SmolVLM2 has
        images.videos = SmolVideos(video, images.known, images.values, images.tile_size, seen)
    return images, tokenizer, chat_template(opened)
