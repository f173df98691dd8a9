"""Idefics3, SmolVLM and SmolVLM2 as transformers has them: the checkpoint layout that we also write, and the
image rule, bit for bit that of transformers' own image processor (its PIL backend), with its prompt.

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub; absent
keys take the defaults of transformers' Idefics3Config (the two model types share all of them). The image
rule is ours, because transformers' takes seconds to import; `IdeficsImages.transformers` makes that one, for
saving.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from data.chat import Message, chat_template
from data.errors import PromptError
from data.tiles import Tiles
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer, check_files, open_tokenizer, read_object
from families.text import (
    both_dtypes,
    checked,
    read_ids,
    section,
    text_config,
    text_family,
    vision_config,
    write_text,
    write_vision,
)
from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.vision_transformer import ModalityProjector, VisionTransformer

NAME = "idefics3"
TITLE = "transformers Idefics3 / SmolVLM / SmolVLM2"
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
_DEFAULTS = {
    "do_convert_rgb": True,
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
    "do_pad": True,
}
_TOKENS_PER_TILE = 169
# Idefics3Processor marks these as special in any tokenizer.
_SPECIAL = {"additional_special_tokens": [FAKE, IMAGE, END]}


# ---------------------------------------------------------------------------------------------- checkpoint
def recognises(config: Mapping) -> bool:
    return config.get("model_type") in ("idefics3", "smolvlm")


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing.

    Only the top-level tie_word_embeddings counts, as in transformers.
    """
    text = section(config, "text_config")
    # In transformers rms_norm_eps is 1e-5 where there is no text_config at all, and LlamaConfig's 1e-6
    # otherwise.
    decoder = text_config(text, {} if config.get("text_config") is not None else {"rms_norm_eps": 1e-5})
    return checked(
        VLMConfig,
        family=NAME,
        vision=vision_config(section(config, "vision_config"), {}),
        text=decoder,
        scale_factor=config.get("scale_factor", 2),
        image_token_id=config.get("image_token_id", 128_257),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **read_ids(config, generation, text, decoder.vocab_size),
    )


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies; some old checkpoints leave the leading `model.` out."""
    bare = bool(stored_names) and not any(name.startswith("model.") for name in stored_names)
    return lambda name: StoredTensor(rename(name, NAMES).removeprefix("model." if bare else ""))


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), ModalityProjector(config), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json, in which nothing is left to a reader's defaults. A CheckpointError says why this layout
    cannot hold the model."""
    text, problem = config.text, None
    if config.projector_bias:
        problem = "its projector has no bias: build the model with projector_bias=False"
    elif text_family(text) == "llama" and text.hidden_size % text.num_attention_heads:
        problem = (
            f"transformers wants hidden_size ({text.hidden_size}) to be a multiple of num_attention_heads "
            f"({text.num_attention_heads})"
        )
    if problem:
        raise CheckpointError(f"the model cannot be saved in the transformers Idefics3 layout: {problem}")
    vision = {"model_type": "idefics3_vision", **write_vision(config.vision), "attention_dropout": 0.0}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        **both_dtypes(dtype),
        "image_token_id": config.image_token_id,
        "pad_token_id": config.pad_token_id,
        "scale_factor": config.scale_factor,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "text_config": write_text(config, dtype),
        "vision_config": vision | both_dtypes(dtype),
    }


# -------------------------------------------------------------------------------------------------- images
class IdeficsImages:
    """How a transformers Idefics3Processor cuts images and writes them into a prompt. `settings` are what
    preprocessor_config.json has, `tokens_per_tile` is its `image_seq_len`."""

    image_token: str | None = IMAGE
    string_content = False
    add_special_tokens = True
    whole_first = False  # among the tiles of an image that is split
    uncut = 0, 0  # rows and columns of an image that is not
    flat = False  # tiles are padded per row: (B, n, 3, M, M) with a pixel mask, as transformers gives them

    def __init__(self, settings: Mapping[str, Any], tokens_per_tile: int = _TOKENS_PER_TILE):
        self.settings = dict(settings)
        known: dict[str, Any] = _DEFAULTS | self.settings
        self.tokens_per_tile = tokens_per_tile
        self.resizes = bool(known["do_resize"])  # else `grid` is not what `tiles` makes
        self.splits = bool(known["do_image_splitting"])
        try:
            self.tile_size: int = known["max_image_size"]["longest_edge"]
            self.longest_side: int = known["size"]["longest_edge"]
            self._resample = Image.Resampling(known["resample"])
            self._values = _pixel_values(known)
        except (KeyError, ValueError, TypeError) as error:
            raise PromptError(f"image settings: {type(error).__name__}: {error}") from error

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor  # takes seconds

        return Idefics3Processor(
            Idefics3ImageProcessorPil(**self.settings),
            tokenizer,
            image_seq_len=self.tokens_per_tile,
            chat_template=chat_template,
        )

    def normalise_messages(self, messages: list[Message], label: str) -> list[Message]:
        """Images stay where the conversation has them."""
        return messages

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """What `tiles` makes of an image of this size: (n, rows, columns)."""
        if not self.splits:
            return 1, 0, 0
        width, height = self._cut_size(*_resized(width, height, self.longest_side))
        rows, cols = height // self.tile_size, width // self.tile_size
        return (1, 0, 0) if rows <= 1 and cols <= 1 else (rows * cols + 1, rows, cols)

    def _cut_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in whole tiles."""
        tile, aspect = self.tile_size, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return width, math.ceil(int(width / aspect) / tile) * tile
        height = math.ceil(height / tile) * tile
        return math.ceil(int(height * aspect) / tile) * tile, height

    def tiles(self, image: Image.Image) -> tuple[Tiles, int, int]:
        """An RGB image → tiles (n, 3, M, M) with the whole image last, and their rows and columns (0, 0
        where it is not split).

        The image is resampled up to three times, each time rounded to bytes: so transformers does.
        """
        tile = self.tile_size
        image = image.resize(_resized(*image.size, self.longest_side), self._resample)
        rows = cols = 0
        cells = np.empty((0, 3, tile, tile), np.uint8)
        if self.splits:
            image = image.resize(self._cut_size(*image.size), self._resample)
            cols, rows = image.width // tile, image.height // tile
            if rows <= 1 and cols <= 1:
                rows = cols = 0
            else:
                grid = np.asarray(image).reshape(rows, tile, cols, tile, 3)
                cells = grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, tile, tile)
        whole = np.asarray(image.resize((tile, tile), self._resample)).transpose(2, 0, 1)
        pixels = np.concatenate((cells, whole[None]))  # (n, 3, M, M) uint8
        return Tiles.of(torch.from_numpy(pixels), self._values), rows, cols

    def prompt(self, rows: int, cols: int, index: int, count: int) -> str:
        """What stands in a prompt for image `index` of `count`.

        A tag that the tokenizer does not have (in Idefics3-8B, `<global-img>` and all of `<row_r_col_c>`) is
        read as text, as in transformers.
        """
        tile, prompt = IMAGE * self.tokens_per_tile, ""
        for r in range(1, rows + 1):
            prompt += "".join(f"{FAKE}<row_{r}_col_{c}>{tile}" for c in range(1, cols + 1)) + "\n"
        return (prompt + "\n" if prompt else "") + FAKE + GLOBAL + tile + FAKE


def _resized(width: int, height: int, longest_side: int) -> tuple[int, int]:
    """(width, height) with the longest side as long as that, and the other even."""
    aspect = width / height
    if width >= height:
        other = int(longest_side / aspect)
        return longest_side, max(other + other % 2, 1)
    other = int(longest_side * aspect)
    return max(other + other % 2, 1), longest_side


def _pixel_values(settings: Mapping[str, Any]) -> Tensor:
    """What the 256 values of a byte become in each colour, (3, 256) float32: in transformers' precisions.
    ValueError or TypeError where mean or deviation is neither a number nor three."""
    values = np.arange(256, dtype=np.uint8)
    scale = float(settings["rescale_factor"]) if settings["do_rescale"] else 1.0
    rescaled = values.astype(np.float64) * scale
    table = np.repeat(rescaled.astype(np.float32)[:, None], 3, axis=1)
    if settings["do_normalize"]:
        mean, std = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
        if not {mean.shape, std.shape} <= {(), (3,)}:
            raise ValueError("expected image_mean and image_std as a number or three")
        with np.errstate(all="ignore"):
            table = (table - mean) / std
    if not np.isfinite(table).all():
        raise ValueError("expected image_mean, image_std and rescale_factor to make finite pixels")
    return torch.from_numpy(np.ascontiguousarray(table.T))


def open_images(folder: Path, config: Mapping) -> tuple[IdeficsImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint folder, in today's layout or the older
    one."""
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        raise PromptError("expected processor_config.json or preprocessor_config.json, found neither")
    check_files(folder)
    tokenizer = open_tokenizer(folder)
    absent = [token for token in (IMAGE, FAKE) if token not in tokenizer.get_added_vocab()]
    if absent:  # Idefics3Processor would add them, with ids that the model has no embeddings for
        raise PromptError(f"tokenizer: expected the special tokens {IMAGE} and {FAKE}, {absent} are absent")
    tokenizer.add_special_tokens(_SPECIAL)
    settings = read_object(folder / "processor_config.json")
    image_settings = settings.get("image_processor") or read_object(folder / "preprocessor_config.json")
    images = IdeficsImages(image_settings, settings.get("image_seq_len", _TOKENS_PER_TILE))
    return images, tokenizer, chat_template(folder)


def new_images(
    tokenizer: AnyTokenizer,
    image_size: int,
    image_seq_len: int,
    longest_edge: int | None = None,
    split: bool = False,
) -> IdeficsImages:
    """The image rules of a model that has none yet.

    Args:
        image_size: side of a tile in pixels, the vision model's.
        image_seq_len: language-model positions a tile takes, `VLMConfig.tokens_per_tile`.
        longest_edge: what an image is resized to before it is split, or, unsplit, squashed into a tile; one
            tile by default, four with `split`.
    """
    needed = [IMAGE, FAKE, GLOBAL, END, *(["<row_1_col_1>"] if split else [])]
    if missing := [token for token in needed if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected the special tokens {', '.join(needed)}; {missing} are absent")
    tokenizer.add_special_tokens(_SPECIAL)
    settings = _DEFAULTS | {
        "size": {"longest_edge": longest_edge or image_size * (4 if split else 1)},
        "do_image_splitting": split,
        "max_image_size": {"longest_edge": image_size},
    }
    return IdeficsImages(settings, image_seq_len)
