"""MiniCPM-V 4.6 and MiniCPM-OCR 1.0 as transformers has them: a SigLIP tower that makes one patch of four
after an early layer, an overview and slices of a large image, each in a shape of its own, and Qwen3.5's text
model. The two differ in their image rules.

Config keys and tensor names are those of transformers 5.23.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from data import tiles
from data.chat import chat_template
from data.errors import ProcessorError
from data.reading import Reading
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families import keys, qwen3_5, qwen_vl
from families.qwen_vl import positions
from families.resizing import CLIP_PIXELS, MODES, resized
from families.saving import SavedProcessor, write_config
from families.sections import vlm_config
from models.checkpoints.files import Opened
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionConfig, PatchMerger

__all__ = ["positions"]

NAME, OCR = "minicpmv4_6", "minicpm_ocr"
TITLE = "transformers MiniCPM-V 4.6 / MiniCPM-OCR"
CLASSES = {NAME: "MiniCPMV4_6", OCR: "MiniCPMOcr"}
MODEL_TYPES = (*CLASSES,)
BOX_FORMS: dict[str, Any] = {}
GGUF = MLX = BOX_FORMS
_ASKED = {"table": "Table Recognition:", "formula": "Formula Recognition:"}
READING = {OCR: Reading("markdown", dict.fromkeys(("page", "ocr"), "Text Recognition:") | _ASKED)}
PROCESSORS = {kind: (f"{name}Processor", f"{name}ImageProcessor") for kind, name in CLASSES.items()}
IGNORABLE = re.compile(r"lm_head\.weight|(model\.)?mtp\..*")
# Defaults are those of transformers' MiniCPMV4_6VisionConfig and MiniCPMV4_6Config.
_VISION = keys.same(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, num_channels=3,
    patch_size=16,
) | {"norm_eps": keys.Key("layer_norm_eps", 1e-6)}  # fmt: skip
_INSERTED = {"insert_layer": keys.Key("insert_layer_id", 6)}
# How many patches become one position; with "4x" the window merger is left out.
_OWN = {NAME: {"downsample_mode": "16x"}, OCR: {"downsample_mode": "4x", "small_image_upsize": "always"}}
_MARKERS = {"video_token_id": 248_057}
# Other values need code that is not here.
_PLAIN = {"merge_kernel_size": [2, 2]}
_PLAIN_VISION = {"hidden_act": "gelu_pytorch_tanh", "window_kernel_size": [2, 2]}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    kind, vision, own = config["model_type"], keys.section(config, "vision_config"), keys.present(config)
    keys.expect(config, _PLAIN)
    keys.expect(vision, _PLAIN_VISION)
    values = keys.read(vision, _VISION) | keys.read(config, _INSERTED)
    inserts = (_OWN[kind] | own)["downsample_mode"] != "4x"
    tower = PackedVisionConfig(
        **values,
        inserts=inserts,
        merge_size=2 ** (own.get("merger_times", 1) + inserts),
        temporal_patch_size=1,
        table_side=keys.present(vision).get("image_size", 224) // values["patch_size"],
        table_fit="nearest",
        rotary=False,
        last_norm=True,
        kind=kind,
    )
    text = qwen3_5.read_text(keys.section(config, "text_config"), places=False)
    parts: dict[str, Any] = {"family": NAME, "vision": tower, "scale_factor": 1}
    return vlm_config(config, generation, 248_056, kind == OCR, text, _MARKERS, **parts)


_NAMES = {
    "vision_model.layers.": "model.vision_tower.encoder.layers.",
    "vision_model.norm.": "model.vision_tower.post_layernorm.",
    "vision_model.window_merger.": "model.vision_tower.vit_merger.",
    "vision_model.": "model.vision_tower.embeddings.",
    "projector.": "model.merger.mlp.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
}
_INSIDE = {
    "vision_model": {".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2."},
    "projector": {".norm.": ".pre_norm.", ".fc": ".linear_"},
    "language_model": {".conv_weight": ".conv1d.weight"},
}


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors."""
    return lambda name: StoredTensor(rename(name, _NAMES, _INSIDE[name.partition(".")[0]]))


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text. Each round of the projector makes one of four patches."""
    tower, _, text = qwen_vl.build(config)
    square = replace(config.vision, merge_size=2)
    widths = [*[square.hidden_size] * (config.vision.merger_times - 1), config.text.hidden_size]
    return tower, nn.Sequential(*(PatchMerger(square, width, "block") for width in widths)), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' class for this model."""
    tower, name = config.vision, f"{CLASSES[config.vision.kind]}ForConditionalGeneration"
    vision = {
        "model_type": f"{tower.kind}_vision",
        "image_size": tower.table_side * tower.patch_size,
        **_PLAIN_VISION,
        **keys.write(tower, _VISION | _INSERTED),
    }
    more: dict[str, Any] = _PLAIN | keys.write(tower, _INSERTED)
    more |= {"merger_times": tower.merger_times, "downsample_mode": "16x" if tower.inserts else "4x"}
    text = qwen3_5.write(replace(config, vision=PackedVisionConfig(num_hidden_layers=0)), dtype)
    return write_config(config, dtype, name, tower.kind, text, vision, _MARKERS, **more)


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    side = config.vision.patch_size
    cut = pixels[0].unflatten(2, (-1, side)).unflatten(1, (-1, side))  # (3, rows, side, columns, side)
    sizes = torch.tensor([[cut.shape[1], cut.shape[3]]])
    return {"pixel_values": cut.transpose(1, 2).reshape(1, 3, side, -1), "target_sizes": sizes}


# -------------------------------------------------------------------------------------------------- images
IMAGE = "<|image_pad|>"
# What transformers' processor asks a tokenizer for.
ROLES = {
    "image_token": IMAGE, "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    **CLIP_PIXELS, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_slice_nums": 9, "patch_size": 14,
    "scale_resolution": 448, "slice_mode": True, "use_image_id": True,
}  # fmt: skip
# By small_image_upsize: whether small images grow, and whether their writing has a say.
_UPSIZE = {"always": (True, False), "never": (False, False), "adaptive": (True, True)}


class MiniCPMImages(tiles.TiledImages):
    """The rule of transformers' MiniCPMV4_6ImageProcessorPil: an image has an overview of its own shape, of
    about `scale_resolution`² pixels, and a larger one slices of such a size as well. Or of its
    MiniCPMOcrImageProcessor, which resizes by torchvision and may leave small images and slices as they are.
    `settings` are those of preprocessor_config.json; those of `video` are kept for saving."""

    image_token = IMAGE
    flat = own_sizes = whole_first = True

    def __init__(self, settings: Mapping[str, Any], kind: str = NAME, video: Mapping[str, Any] | None = None):
        own = _DEFAULTS | _OWN[kind]
        self.settings = own | {key: settings[key] for key in own if settings.get(key) is not None}
        self.kind, self.video = kind, video
        with tiles.reading_settings(self.settings):
            self._resample, self._values = tiles.pixel_rule(self.settings)
            known = SimpleNamespace(**{"small_image_upsize": "always", **self.settings})
            for name in ("max_slice_nums", "scale_resolution", "patch_size"):
                if type(self.settings[name]) is not int or self.settings[name] < 1:
                    raise ValueError(f"{name}: expected a whole number above 0, got {self.settings[name]!r}")
            if kind == OCR and known.do_rescale and known.do_normalize:  # both at once, as there
                both = (torch.tensor(of) for of in (known.image_mean, known.image_std))
                mean, deviation = ((of * (1.0 / known.rescale_factor)).expand(3)[:, None] for of in both)
                self._values = (torch.arange(256.0) - mean) / deviation
            self.grows, self.adapts = _UPSIZE[known.small_image_upsize]
            self.factor = known.patch_size * (2 if known.downsample_mode == "4x" else 4)
            self.side, self.most = known.scale_resolution, known.max_slice_nums if known.slice_mode else 1
            self.longest_side = self.side * self.most

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        images = self.settings | {"image_processor_type": PROCESSORS[self.kind][1]}
        video = self.video or {"downsample_mode": self.settings["downsample_mode"]}
        video = {**video, "video_processor_type": f"{CLASSES[self.kind]}VideoProcessor"}
        described = {"image_processor": images, "video_processor": video}
        return SavedProcessor(tokenizer, chat_template, IMAGE, described, roles=ROLES)

    def within(self, positions: int) -> MiniCPMImages:
        if positions < 1:
            raise ProcessorError(f"expected at least one position, got {positions}")
        # A part of a · b positions is rounded to (a + 1/2) · (b + 1/2) at most, which is less than `each`
        # unless one is more than four times the other.
        along, settings = self.side / self.factor, dict(self.settings)
        each = along * (along + 1.25) + 0.25
        settings["max_slice_nums"] = max(1, min(self.most, int(positions // each) - 1))
        if each > positions:
            settings["scale_resolution"] = int(self.factor * (math.sqrt(4 * positions + 0.5625) - 1.25) / 2)
        return MiniCPMImages(settings, self.kind, self.video)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        if (count := min(math.ceil(width * height / self.side**2), self.most)) <= 1:
            return self.uncut
        counts = [one for one in (count - 1, count, count + 1) if 1 < one <= self.most]
        grids = [(rows, one // rows) for one in counts for rows in range(1, one + 1) if one % rows == 0]
        # Of two that relate to the image's sides alike, the one of more rows.
        apart = lambda rows, columns: abs(math.log(width / height) - math.log(columns / rows))
        return min(grids, key=lambda grid: (apart(*grid), -grid[0]))

    def _shape(self, height: int, width: int, grows: bool, side: int | None = None) -> tuple[int, int]:
        """Height and width of a part of `side`² pixels. A small one keeps its own, rounded, unless it
        `grows`."""
        if grows or height * width > self.side**2:
            aspect = width / height
            height = int((side or self.side) / math.sqrt(aspect))
            width = int(height * aspect)
        high, wide = (max(round(one / self.factor), 1) * self.factor for one in (height, width))
        return high, wide

    def plan(self, width: int, height: int) -> tiles.Visual:
        """The parts that are cut, or larger ones where what an image shows has a say."""
        grid = self.grid(width, height)
        parts = tiles.Parts.planned(1, *self._shape(height, width, self.grows and grid == self.uncut))
        if grid != self.uncut:
            high, wide = (max(round(side / count), 1) for side, count in zip((height, width), grid))
            cells = tiles.Parts.planned(math.prod(grid), *self._shape(high, wide, True))
            parts = tiles.Parts.cat((parts, cells))
        return tiles.Visual(parts, self.positions(parts), grid, (width, height))

    def positions(self, parts: tiles.Parts) -> int:
        return sum(math.prod(part.pixels.shape[1:]) for part in parts) // self.factor**2

    def cut(self, image: Image.Image) -> tiles.Visual:
        planned = self.plan(*image.size)
        (rows, columns), (first, *cells) = planned.grid, (part.pixels.shape[1:] for part in planned.parts)
        made = [self._resized(image, *first)]
        if cells:
            high, wide = cells[0]
            grown = self._resized(image, rows * high, columns * wide).view(3, rows, high, columns, wide)
            made += grown.permute(1, 3, 0, 2, 4).reshape(-1, 3, high, wide)
            x, y = (
                [round(side * at / n) for at in range(n + 1)] for side, n in zip(image.size, (columns, rows))
            )
            for at in range(rows * columns if self.adapts else 0):
                row, column = divmod(at, columns)
                own = image.crop((x[column], y[row], x[column + 1], y[row + 1]))
                made[1 + at] = self._adapted(own, made[1 + at])
        elif self.adapts:
            side = _enlarged_to(image, self.side)
            made = [self._resized(image, *self._shape(image.height, image.width, side is not None, side))]
        parts = tiles.Parts(tuple(tiles.Part(one, self._values) for one in made))
        return replace(planned, parts=parts, positions=self.positions(parts))

    def _adapted(self, shown: Image.Image, usual: Tensor) -> Tensor:
        """A slice in fewer pixels than `usual`, where its writing asks for no more."""
        width, height = shown.size
        if not 0 < width * height <= self.side**2 or (side := _enlarged_to(shown, self.side)) == self.side:
            return usual
        shape = self._shape(height, width, side is not None, side)
        small = math.prod(shape) < usual[0].numel()  # bicubic there, whatever the others are
        return resized(tiles.pixels_of(shown), *shape[::-1], "bicubic") if small else usual

    def _resized(self, image: Image.Image, height: int, width: int) -> Tensor:
        if self.kind == OCR:
            return resized(tiles.pixels_of(image), width, height, MODES[self._resample])
        return tiles.pixels_of(image.resize((width, height), self._resample))

    def prompt(self, visual: tiles.Visual, index: int, count: int) -> str:
        first, *others = (IMAGE * self.positions(tiles.Parts((part,))) for part in visual.parts)
        cells, columns = [f"<slice>{one}</slice>" for one in others], visual.grid[1]
        lines = ("".join(cells[at : at + columns]) for at in range(0, len(cells), columns))
        name = f"<image_id>{index}</image_id>" if self.settings["use_image_id"] else ""
        return f"{name}<image>{first}</image>" + "\n".join(lines)


def _enlarged_to(image: Image.Image, side: int) -> int | None:
    """The side of a square of as many pixels as an RGB image is enlarged to: `side` where its writing is
    small and dense, 84 where all of it is tiny, else None. Glyphs are connected components of what Otsu's
    threshold parts from the ground (doi:10.1109/TSMC.1979.4310076), as OpenCV finds both."""
    from scipy import ndimage  # takes half a second

    gray = np.asarray(image.convert("L"))
    dark = gray <= _threshold((np.bincount(gray.ravel(), minlength=256) * (1.0 / gray.size)).tolist())
    labels, _ = ndimage.label(~dark if dark.mean() > 0.5 else dark, np.ones((3, 3)))
    areas, heights = np.bincount(labels.ravel()), []
    for index, place in enumerate(ndimage.find_objects(labels), start=1):
        high, wide = (along.stop - along.start for along in place)
        if areas[index] >= 3 and high >= 2 and wide < 0.9 * image.width and high < 0.9 * image.height:
            heights.append(high)
    if heights and np.median(heights) <= 12 and len(heights) * 1000.0 / gray.size >= 2:
        return side
    return 84 if gray.size < 6272 else None


def _threshold(shares: list[float]) -> int:
    """Of 256 levels with these shares of all pixels the last one below Otsu's threshold."""
    best, most, below, mean = 0, 0.0, 0.0, 0.0
    whole = sum(level * share for level, share in enumerate(shares))
    for level, share in enumerate(shares):
        mean, below = mean * below, below + share
        above = 1.0 - below
        if min(below, above) >= 2**-23 and max(below, above) <= 1 - 2**-23:
            mean = (mean + level * share) / below
            apart = below * above * (mean - (whole - below * mean) / above) ** 2
            best, most = (level, apart) if apart > most else (best, most)
    return best


image_rule = lambda settings, config: MiniCPMImages(settings)  # where there is no folder


def open_images(opened: Opened) -> tuple[MiniCPMImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    video = opened.json("processor_config.json").get("video_processor")
    video = video or opened.json("video_preprocessor_config.json")
    tokenizer = open_with(opened, [token for role, token in ROLES.items() if role != "video_token"])
    images = MiniCPMImages(image_settings(opened), opened.config["model_type"], video)
    return images, tokenizer, chat_template(opened)
