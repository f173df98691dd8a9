"""Images and messages → what `model.generate(**inputs)` and training take; token ids → text.

    processor = Processor.from_pretrained("path/to/checkpoint", config=model.config)
    inputs = processor.ask("photo.jpg", "How many boats are there?")
    new_ids = model.generate(**inputs, max_new_tokens=32)
    print(processor.decode(new_ids[0]))

One interface over two kinds of checkpoint: those with transformers' Idefics3 / SmolVLM processor, and
nanoVLM's. What a person typed never becomes a special token (see `data/chat.py`).

`stop_token_ids` are the tokens that end a turn. `model.generate` stops at those that the checkpoint's own
files name; a nanoVLM checkpoint whose tokenizer is another repository names none, and needs
`model.generate(**inputs, stop_token_ids=processor.stop_token_ids)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from data.chat import SMOLVLM_CHAT_TEMPLATE, ChatEncoder, Message, check_text, read_conversation
from data.errors import ImageError, ProcessorError, PromptError, one_line
from data.images import ImageLimits, check_sides, describe, load_image
from data.inputs import EncodedConversation, ModelInputs, TiledImage, collate
from data.nanovlm import NanoVLMImages, open_nanovlm
from data.smolvlm import IdeficsImages, new_idefics, open_idefics
from data.tokenizer import AnyTokenizer, FolderTokenizer, folder_of, no_panic, read_object
from models.config import VLMConfig

if TYPE_CHECKING:
    from transformers import Idefics3Processor

Conversation = Sequence[Mapping[str, Any]]
ImageRules: TypeAlias = IdeficsImages | NanoVLMImages

LONGEST_SIDE = 4096  # transformers' own bound on what Idefics3 makes of an image
MOST_TOKENS = 65_536  # per tile
_TURN_ENDS = ("<end_of_utterance>", "<|im_end|>")


class Processor:
    """See the module's docstring. Build one with `from_pretrained` or `make_processor`."""

    def __init__(
        self,
        images: ImageRules,
        tokenizer: AnyTokenizer,
        chat_template: str,
        config: VLMConfig | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
    ):
        check_sizes(images)
        self.images = images
        self.tokenizer = tokenizer
        self.limits = limits
        self.stop_token_ids = _stop_token_ids(tokenizer)
        self.image_token_id = (
            None if images.image_token is None else tokenizer.convert_tokens_to_ids(images.image_token)
        )
        if config is not None:
            _check_fit(self, config)
        self.chat = ChatEncoder(
            tokenizer,
            chat_template,
            image_token=images.image_token,
            stop_token_ids=self.stop_token_ids,
            string_content=images.string_content,
            add_special_tokens=images.add_special_tokens,
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        config: VLMConfig | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
        revision: str | None = None,
    ) -> Processor:
        """The processor of a checkpoint, by the name that `VisionLanguageModel.from_pretrained` takes.

        Args:
            source: a folder with config.json (nanoVLM), or tokenizer and processor files; or a repository on
                the Hub.
            config: the model's; where given, tile size, tokens per tile and placeholder id must fit it.
            revision: branch, tag or commit of the repository.

        A ProcessorError says that there is no such checkpoint, or that its files are missing, broken or do
        not fit the model.
        """
        folder = folder_of(source, revision)
        try:
            with no_panic():
                described = read_object(folder / "config.json")
                opened: tuple[ImageRules, AnyTokenizer, str | None]
                if is_nanovlm(described):
                    opened = open_nanovlm(folder, described)
                else:
                    _check_files(folder)
                    opened = open_idefics(folder)
                images, tokenizer, template = opened
                if not template:
                    raise ProcessorError(
                        f"{folder}: expected a chat template (chat_template.jinja), found none"
                    )
                return cls(images, tokenizer, template, config, limits)
        except ProcessorError:
            raise
        except PromptError as error:
            raise ProcessorError(f"{folder}: {error}") from error
        except Exception as error:  # transformers and tokenizers raise anything, even bare Exception
            raise ProcessorError(
                f"{folder}: its tokenizer or processor cannot be opened "
                f"({type(error).__name__}: {one_line(error, 300)})"
            ) from error

    @cached_property
    def hf_processor(self) -> Idefics3Processor | None:
        """transformers' processor, for saving, made when first asked for; None for nanoVLM checkpoints."""
        if not isinstance(self.images, IdeficsImages):
            return None
        from transformers import Idefics3ImageProcessorPil, Idefics3Processor  # takes seconds

        tokenizer = self.tokenizer
        return Idefics3Processor(
            Idefics3ImageProcessorPil(**self.images.settings),
            tokenizer.transformers_tokenizer if isinstance(tokenizer, FolderTokenizer) else tokenizer,
            image_seq_len=self.images.tokens_per_tile,
            chat_template=self.chat.chat_template,
        )

    # --------------------------------------------------------------------------------------------- in
    def ask(self, images: Any, question: str, system: str | None = None, **options) -> ModelInputs:
        """Inputs for one question about one image, a list of them, or none (None or [])."""
        return self.prepare(self.conversation(images, question, system), **options)

    def conversation(self, images: Any, question: str, system: str | None = None) -> list[dict[str, Any]]:
        """The messages of `ask`."""
        if not check_text(question, "question").strip():
            raise PromptError(f"question: expected some text, got {question!r}")
        if images is None:
            images = []
        elif not isinstance(images, list | tuple):
            images = [images]
        content = [{"type": "image", "image": image} for image in images]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
        if system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return messages

    def prepare(
        self,
        conversations: Conversation | Sequence[Conversation],
        add_generation_prompt: bool = True,
        padding_side: str = "left",
        return_assistant_mask: bool = False,
    ) -> ModelInputs:
        """Model inputs for one conversation, or a batch of several with any number of images each.

        Returns:
            input_ids and attention_mask (B, T); with images, pixel_values: (B, n, 3, M, M), zero-padded,
            with pixel_attention_mask (B, n, M, M), or for nanoVLM (N, 3, M, M) alone; on request
            assistant_mask (B, T) bool.

        A PromptError names the conversation and message, an ImageError the image.
        """
        if not isinstance(conversations, Sequence):
            raise PromptError(
                f"expected conversations as lists of messages, got {type(conversations).__name__}"
            )
        if not conversations:
            raise PromptError("expected at least one conversation, got none")
        several: Sequence[Any] = conversations
        if isinstance(conversations[0], Mapping):
            rows = [self.encode_conversation(several, add_generation_prompt)]
        else:
            rows = [
                self.encode_conversation(one, add_generation_prompt, f"conversation {i}")
                for i, one in enumerate(several)
            ]
        return self.collate(rows, padding_side, return_assistant_mask)

    def encode_conversation(
        self, conversation: Conversation, add_generation_prompt: bool = False, label: str = "conversation"
    ) -> EncodedConversation:
        """One conversation's ids, assistant mask and tiles. `label` names it in error messages."""
        messages = read_conversation(conversation, label)
        if add_generation_prompt:
            _check_question(messages, label)
        messages = self.images.normalise_messages(messages, label)
        sources = [value for message in messages for kind, value in message.parts if kind == "image"]
        images = self._tile_all(sources, label)
        prompts = [self.images.prompt(one.rows, one.columns, i, len(images)) for i, one in enumerate(images)]
        if self.image_token_id is None:  # the features stand in front; the template has no place for them
            prompts = []
        encoded = self.chat.encode(messages, prompts, add_generation_prompt, label)
        image_tokens = sum(len(one.tiles) for one in images) * self.images.tokens_per_tile
        if self.image_token_id is not None:
            got = encoded.input_ids.count(self.image_token_id)
            if got != image_tokens:
                names = ", ".join(one.name for one in images) or "no image"
                raise PromptError(f"{label}: expected {image_tokens} placeholders for {names}, got {got}")
        tiles = torch.cat([one.tiles for one in images]) if images else None
        return EncodedConversation(encoded.input_ids, encoded.assistant_mask, tiles, image_tokens)

    def tile(self, source: Any) -> TiledImage:
        """An image (anything `load_image` takes) loaded, resized and cut, for several questions about it."""
        if isinstance(source, TiledImage):
            return source
        return tile_image(
            self.images, load_image(source, self.limits), describe(source), self.limits.max_tiles
        )

    def _tile_all(self, sources: Sequence[Any], label: str) -> list[TiledImage]:
        """`tile` of each; together they may have as many tiles as one image may."""
        images: list[TiledImage] = []
        for number, source in enumerate(sources, 1):
            images.append(self.tile(source))
            if sum(len(one.tiles) for one in images) > self.limits.max_tiles:
                raise ImageError(
                    f"{label}: expected images of at most {self.limits.max_tiles} tiles in all, got more "
                    f"in the first {number} of {len(sources)}; leave some out or raise ImageLimits.max_tiles"
                )
        return images

    def collate(
        self,
        rows: Sequence[EncodedConversation],
        padding_side: str = "left",
        return_assistant_mask: bool = False,
    ) -> ModelInputs:
        """Pad encoded conversations to one length; see `prepare`."""
        return collate(rows, self.pad_token_id, padding_side, return_assistant_mask, self.images.flat)

    @property
    def pad_token_id(self) -> int:
        """What fills short rows; masked, so any id will do where the tokenizer names none."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.stop_token_ids[0] if self.stop_token_ids else 0

    # -------------------------------------------------------------------------------------------- out
    def decode(self, ids: Tensor | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of one row of ids (T,): what `inference.answer.TextStream` gives in pieces."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


# ------------------------------------------------------------------------- a stranger's settings of images
def check_sizes(images: ImageRules) -> None:
    """Refuse, with a ProcessorError, numbers that memory is asked for by and that no real checkpoint has."""
    for what, got, most in (
        ("pixels per tile side", images.tile_size, LONGEST_SIDE),
        ("pixels of an image's longest side", images.longest_side, LONGEST_SIDE),
        ("image tokens per tile", images.tokens_per_tile, MOST_TOKENS),
    ):
        if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= most:
            raise ProcessorError(f"{what}: expected an integer from 1 to {most}, got {str(got)[:80]}")
    if not images.resizes:
        raise ProcessorError(
            "preprocessor_config.json: expected do_resize to be true, got false: images of any size would "
            "be cut as they are; set it to true"
        )


def count_tiles(images: ImageRules, width: int, height: int, name: str, most: int) -> tuple[int, int, int]:
    """(tiles, rows, columns) that an image of this size makes.

    An ImageError says that there are more than `most` tiles, a ProcessorError that the settings make none.
    """
    try:
        count, rows, columns = images.grid(width, height)
    except Exception as error:  # whatever settings may ask for
        raise _unusable(name, error) from error
    if count > most:
        raise ImageError(
            f"{name}: expected at most {most} tiles, got {count} of {width} x {height} "
            "pixels; shrink the image or raise ImageLimits.max_tiles"
        )
    return count, rows, columns


def tile_image(images: ImageRules, image: Image.Image, name: str, most: int) -> TiledImage:
    """An RGB image as at most `most` tiles, (n, 3, M, M), counted before they are made; see `count_tiles`."""
    expected = count_tiles(images, *image.size, name, most)
    try:
        tiles, rows, columns = images.tiles(image)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # whatever settings may ask for
        raise _unusable(name, error) from error
    got, shape = (len(tiles), rows, columns), (3, images.tile_size, images.tile_size)
    if got != expected or tuple(tiles.shape[1:]) != shape:
        raise ProcessorError(
            f"{name}: the checkpoint's image settings make (tiles, rows, columns) = {got} of shape "
            f"{tuple(tiles.shape[1:])}, expected {expected} of {shape}; is its longest side a multiple of "
            f"its tiles' {images.tile_size}?"
        )
    return TiledImage(tiles, rows, columns, name)


def _unusable(name: str, error: Exception) -> ProcessorError:
    return ProcessorError(
        f"{name}: the checkpoint's image settings cannot be used ({type(error).__name__}: "
        f"{one_line(error, 200)})"
    )


@dataclass(frozen=True)
class ImageCost:
    """`rows` x `columns` of tiles (0 or 1 where the image is not cut), `tiles` with the whole image as
    one more; `prompt_tokens` is the whole prompt of one question, image included."""

    width: int
    height: int
    rows: int
    columns: int
    tiles: int
    image_tokens: int
    prompt_tokens: int
    question: str


def image_cost(processor: Processor, width: int, height: int, question: str) -> ImageCost:
    """What an image of width x height pixels takes in a prompt, by the processor's own rules, without one."""
    check_sides(width, height)
    count, rows, columns = processor.images.grid(width, height)
    side = processor.images.tile_size
    # Tiles of shape alone: the prompt depends on how many there are, not on what they show.
    tiles = torch.empty(count, 3, side, side, device="meta")
    blank = TiledImage(tiles, rows, columns, f"an image of {width} x {height}")
    encoded = processor.encode_conversation(processor.conversation(blank, question), True)
    in_front = encoded.image_tokens if processor.image_token_id is None else 0
    prompt_tokens = len(encoded.input_ids) + in_front
    return ImageCost(width, height, rows, columns, count, encoded.image_tokens, prompt_tokens, question)


def make_processor(
    tokenizer: AnyTokenizer,
    *,
    image_size: int,
    image_seq_len: int,
    longest_edge: int | None = None,
    split: bool = False,
    chat_template: str = SMOLVLM_CHAT_TEMPLATE,
    config: VLMConfig | None = None,
) -> Processor:
    """A processor for a new model, in transformers' Idefics3 form (`.hf_processor`).

    Args:
        tokenizer: with SmolVLM's special tokens, such as `data.tokenizer.build_tokenizer` gives.
        image_size: side of a tile in pixels, the vision model's.
        image_seq_len: language-model positions a tile takes, `VLMConfig.tokens_per_tile`.
        longest_edge: what an image is resized to before it is split, or, unsplit, squashed into a tile; one
            tile by default, four with `split`.

    A PromptError names the special tokens that the tokenizer lacks.
    """
    images = new_idefics(
        tokenizer,
        image_size=image_size,
        image_seq_len=image_seq_len,
        longest_edge=longest_edge,
        split=split,
    )
    return Processor(images, tokenizer, chat_template, config)


def is_nanovlm(config: Mapping[str, Any]) -> bool:
    """The rule of `models.checkpoints.nanovlm.recognises`, which this package may not import."""
    return "model_type" not in config and "vit_hidden_dim" in config and "lm_hidden_dim" in config


def _check_question(messages: list[Message], label: str) -> None:
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None or not last.text.strip():
        got = "no user message" if last is None else repr(last.text)
        raise PromptError(f"{label}: expected a question, got {got}")


def _check_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        raise ProcessorError(
            f"{folder}: expected processor_config.json or preprocessor_config.json, found neither: "
            "the folder holds a model without the files that prepare images and text for it"
        )


def _check_fit(processor: Processor, config: VLMConfig) -> None:
    images = processor.images
    for what, got, expected in (
        ("image tokens per tile", images.tokens_per_tile, config.tokens_per_tile),
        ("pixels per tile side", images.tile_size, config.vision.image_size),
        ("image token id", processor.image_token_id, config.image_token_id),
    ):
        if got != expected and not (what == "image token id" and config.image_placement == "prefix"):
            raise ProcessorError(f"{what}: the model expects {expected}, its processor gives {got}")


def _stop_token_ids(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    known = tokenizer.get_added_vocab()
    stops = {known[token] for token in _TURN_ENDS if token in known}
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return tuple(sorted(stops))
