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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.chat import ChatEncoder, Message, check_text, read_conversation
from data.cutting import check_sizes, cut
from data.errors import ImageError, ProcessorError, PromptError, one_line
from data.images import ImageLimits, describe, load_image
from data.inputs import EncodedConversation, ModelInputs, TiledImage, collate
from data.nanovlm import (
    CHATML_TEMPLATE,
    V01_TEMPLATE,
    NanoVLMImages,
    is_nanovlm,
    open_nanovlm,
    read_config,
)
from data.smolvlm import (
    SMOLVLM_CHAT_TEMPLATE,
    IdeficsImages,
    new_idefics,
    open_idefics,
)
from data.tokenizer import AnyTokenizer
from data.tokenizer_limits import no_panic
from models.config import VLMConfig

if TYPE_CHECKING:
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

Conversation = Sequence[Mapping[str, Any]]

_TURN_ENDS = ("<end_of_utterance>", "<|im_end|>")


class Processor:
    """See the module's docstring. Build one with `from_pretrained` or `make_processor`."""

    def __init__(
        self,
        images: IdeficsImages | NanoVLMImages,
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
            harmless_template=chat_template in (SMOLVLM_CHAT_TEMPLATE, CHATML_TEMPLATE, V01_TEMPLATE),
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

        Raises:
            ProcessorError: there is no such checkpoint; files are missing or broken, or do not fit the model.
        """
        folder = _folder_of(source, revision)
        try:
            with no_panic():
                described = read_config(folder)
                if is_nanovlm(described):
                    images, tokenizer, template = open_nanovlm(folder, described)
                else:
                    _check_files(folder)
                    images, tokenizer, template = open_idefics(folder)
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
        from data.processor_conversion import transformers_form  # takes seconds to import

        return transformers_form(self.images, self.tokenizer, self.chat.chat_template)

    # --------------------------------------------------------------------------------------------- in
    def ask(self, images: Any, question: str, system: str | None = None, **options) -> ModelInputs:
        """Inputs for one question about one image, a list of them, or none (None or []).

        Raises:
            PromptError: the question is empty.
            ImageError: see `load_image`.
        """
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

        Raises:
            PromptError, ImageError: naming the conversation and message, or the image.
        """
        if not isinstance(conversations, Sequence):
            raise PromptError(
                f"expected conversations as lists of messages, got {type(conversations).__name__}"
            )
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        if not conversations:
            raise PromptError("expected at least one conversation, got none")
        several = len(conversations) > 1
        rows = [
            self.encode_conversation(
                conversation, add_generation_prompt, f"conversation {i}" if several else "conversation"
            )
            for i, conversation in enumerate(conversations)
        ]
        return self.collate(rows, padding_side, return_assistant_mask)

    def encode_conversation(
        self, conversation: Conversation, add_generation_prompt: bool = False, where: str = "conversation"
    ) -> EncodedConversation:
        """One conversation's ids, assistant mask and tiles, with its placeholders counted.

        Raises:
            PromptError, ImageError: see `prepare`.
        """
        messages = read_conversation(conversation, where)
        if add_generation_prompt:
            _check_question(messages, where)
        messages = self.images.arrange(messages, where)
        sources = [value for message in messages for kind, value in message.parts if kind == "image"]
        names = [_name(source) for source in sources]
        cut = self._tile_all(sources, where)
        prompts = [self.images.prompt(one.rows, one.columns, i, len(cut)) for i, one in enumerate(cut)]
        if self.image_token_id is None:  # the features stand in front; the template has no place for them
            prompts = []
        encoded = self.chat.encode(messages, prompts, add_generation_prompt, where)
        tiles = torch.cat([one.tiles for one in cut]) if cut else None
        image_tokens = self._count(encoded.input_ids, tiles, names, where)
        return EncodedConversation(encoded.input_ids, encoded.assistant_mask, tiles, image_tokens)

    def tile(self, source: Any) -> TiledImage:
        """An image (anything `load_image` takes) loaded, resized and cut, for several questions about it.

        Raises:
            ImageError: see `load_image`; too many tiles.
            ProcessorError: the checkpoint's settings make no tiles of it.
        """
        if isinstance(source, TiledImage):
            return source
        return cut(self.images, load_image(source, self.limits), describe(source), self.limits.max_tiles)

    def _tile_all(self, sources: Sequence[Any], where: str) -> list[TiledImage]:
        """`tile` of each; together they may have as many tiles as one image may."""
        made, tiles = [], 0
        for number, source in enumerate(sources, 1):
            made.append(self.tile(source))
            tiles += len(made[-1].tiles)
            if tiles > self.limits.max_tiles:
                raise ImageError(
                    f"{where}: expected images of at most {self.limits.max_tiles} tiles in all, got more "
                    f"in the first {number} of {len(sources)}; leave some out or raise ImageLimits.max_tiles"
                )
        return made

    def _count(self, input_ids: list[int], tiles: Tensor | None, names: list[str], where: str) -> int:
        count = 0 if tiles is None else len(tiles)
        expected = count * self.images.tokens_per_tile
        got = expected if self.image_token_id is None else input_ids.count(self.image_token_id)
        if got != expected:
            raise PromptError(
                f"{where}: {got} image placeholders for {count} tiles of {', '.join(names) or 'no image'}; "
                f"expected {expected}, {self.pictures.tokens_per_tile} a tile"
            )
        return expected

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
        """Text of one row of ids (T,): what `generation.streaming.TextStream` gives in pieces."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


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

    Raises:
        PromptError: the tokenizer lacks one of the special tokens.
    """
    images = new_idefics(
        tokenizer,
        image_size=image_size,
        image_seq_len=image_seq_len,
        longest_edge=longest_edge,
        split=split,
    )
    return Processor(images, tokenizer, chat_template, config)


def _folder_of(source: str | Path, revision: str | None) -> Path:
    if revision is None and Path(source).is_dir():
        return Path(source)
    from models.checkpoints.hub import (
        CheckpointError,  # and with it the Hub's client, for names only
        snapshot,
    )

    try:
        return snapshot(source, revision)
    except CheckpointError as error:
        raise ProcessorError(error) from error


def _name(source: Any) -> str:
    return source.name if isinstance(source, TiledImage) else describe(source)


def _check_question(messages: list[Message], where: str) -> None:
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None or not last.text.strip():
        got = "no user message" if last is None else repr(last.text)
        raise PromptError(f"{where}: expected a question, got {got}")


def _check_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        raise ProcessorError(
            f"{folder}: expected processor_config.json or preprocessor_config.json, found neither: "
            "the folder holds a model without the means to read images and text"
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
