"""Pictures the Idefics3 / SmolVLM way: transformers' own image processor (its PIL backend), and its prompt.

SmolVLM folders open as Idefics3 too: the rules are the same code, and `SmolVLMProcessor` cannot be imported
without torchvision and num2words.
"""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    _resize_output_size_rescale_to_max_len,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from data.chat import Message
from data.errors import PromptError
from data.file_limits import check_files, read_object, read_template

IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"

SMOLVLM_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class IdeficsPictures:
    """How a transformers Idefics3Processor cuts pictures and writes them into a prompt."""

    image_token: str | None = IMAGE
    string_content = False
    add_special_tokens = True
    whole_first = False  # among the tiles of a picture that is split
    flat = False  # tiles are padded per row: (B, n, 3, M, M) with a pixel mask, as transformers gives them

    def __init__(self, hf_processor: Idefics3Processor):
        self.hf_processor = hf_processor
        self.tokens_per_tile: int = hf_processor.image_seq_len
        self.tile_size: int = hf_processor.image_processor.max_image_size["longest_edge"]
        self.longest_side: int = hf_processor.image_processor.size["longest_edge"]
        self.resizes = bool(hf_processor.image_processor.do_resize)  # else `grid` is not what `tiles` makes

    def arrange(self, messages: list[Message], where: str) -> list[Message]:
        """Pictures stay where the conversation has them."""
        return messages

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """What `tiles` makes of a picture of this size: (n, rows, columns)."""
        if not self.hf_processor.image_processor.do_image_splitting:
            return 1, 0, 0
        # As `tiles`; transformers' count differs where the longest side is no multiple of the tiles'.
        height, width = _resize_output_size_rescale_to_max_len(height, width, max_len=self.longest_side)
        tile, aspect = self.tile_size, width / height
        if width >= height:
            cols = math.ceil(width / tile)
            rows = math.ceil(int(cols * tile / aspect) / tile)
        else:
            rows = math.ceil(height / tile)
            cols = math.ceil(int(rows * tile * aspect) / tile)
        return (1, 0, 0) if rows <= 1 and cols <= 1 else (rows * cols + 1, rows, cols)

    def tiles(self, image: Image.Image) -> tuple[Tensor, int, int]:
        """An RGB picture → tiles (n, 3, M, M) with the whole picture last, and their rows and columns (0, 0
        where it is not split)."""
        out = self.hf_processor.image_processor([[image]], return_row_col_info=True, return_tensors="pt")
        return out["pixel_values"][0], int(out["rows"][0][0]), int(out["cols"][0][0])

    def prompt(self, rows: int, cols: int, index: int, count: int) -> str:
        """What stands in a prompt for picture `index` of `count`.

        A tag that the tokenizer does not have (in Idefics3-8B, `<global-img>` and all of `<row_r_col_c>`) is
        read as text, as in transformers.
        """
        whole = FAKE + GLOBAL + IMAGE * self.tokens_per_tile + FAKE
        if rows == 0 and cols == 0:
            return whole
        grid = "".join(
            "".join(f"{FAKE}<row_{r}_col_{c}>" + IMAGE * self.tokens_per_tile for c in range(1, cols + 1))
            + "\n"
            for r in range(1, rows + 1)
        )
        return grid + "\n" + whole


def open_idefics(folder: Path) -> tuple[IdeficsPictures, str | None]:
    """The processor of a checkpoint folder, in today's layout or the older one, and its chat template.

    Raises:
        PromptError: see `check_files`; no tokens for pictures.
    """
    check_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    absent = [token for token in (IMAGE, FAKE) if token not in tokenizer.get_added_vocab()]
    if absent:  # Idefics3Processor would add them, with ids that the model has no embeddings for
        raise PromptError(f"tokenizer: expected the special tokens {IMAGE} and {FAKE}, {absent} are absent")
    image_processor = Idefics3ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    settings = read_object(folder / "processor_config.json")
    template = settings.get("chat_template") or tokenizer.chat_template
    template = read_object(folder / "chat_template.json").get("chat_template", template)
    written = read_template(folder)
    template = template if written is None else written
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    seq_len = {"image_seq_len": settings["image_seq_len"]} if "image_seq_len" in settings else {}
    processor = Idefics3Processor(image_processor, tokenizer, chat_template=template, **seq_len)
    return IdeficsPictures(processor), template


def new_idefics(
    tokenizer: PreTrainedTokenizerBase,
    *,
    image_size: int,
    image_seq_len: int,
    longest_edge: int | None = None,
    split: bool = False,
    chat_template: str = SMOLVLM_CHAT_TEMPLATE,
) -> IdeficsPictures:
    """A processor for a model that has none yet; see `data.processor.make_processor`."""
    needed = (IMAGE, FAKE, GLOBAL, "<end_of_utterance>", *(["<row_1_col_1>"] if split else []))
    missing = [token for token in needed if token not in tokenizer.get_added_vocab()]
    if missing:
        raise PromptError(f"tokenizer: expected the special tokens {', '.join(needed)}; {missing} are absent")
    image_processor = Idefics3ImageProcessorPil(
        do_convert_rgb=True,
        do_resize=True,
        size={"longest_edge": longest_edge or image_size * (4 if split else 1)},
        do_image_splitting=split,
        max_image_size={"longest_edge": image_size},
        do_rescale=True,
        do_normalize=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        do_pad=True,
    )
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=image_seq_len, chat_template=chat_template
    )
    return IdeficsPictures(processor)
