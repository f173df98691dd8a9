"""Images and messages → what `model.generate(**inputs)` and training take; token ids → text.

    processor = Processor.from_pretrained("path/to/checkpoint", config=model.config)
    inputs = processor.ask("photo.jpg", "How many boats are there?")
    new_ids = model.generate(**inputs, max_new_tokens=32)
    print(processor.decode(new_ids[0]))

One interface over all families of checkpoints. What a person typed never becomes a special token (see
`data/chat.py`).

`stop_token_ids` are the tokens that end a turn. `model.generate` stops at those that the checkpoint's own
files name; a nanoVLM checkpoint whose tokenizer is another repository names none, and needs
`model.generate(**inputs, stop_token_ids=processor.stop_token_ids)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from PIL import Image
from torch import Tensor

from data.boxes import CoordinateForm, form_of
from data.chat import ChatEncoder, read_image_order
from data.conversation import Message, check_question, check_text, read_conversation
from data.errors import ImageError, ProcessorError, PromptError
from data.frames import check_video, few_images, shown_as
from data.images import ImageLimits, describe, load_image
from data.thinking import ThinkingMarks
from data.tiles import Images, Parts, Sizes, Visual
from data.tokenizer import (
    AnyTokenizer,
    FolderTokenizer,
    no_panic,
    turn_ends,
)
from data.tools import Tool
from data.video import Clip
from data.visuals import clip_of, open_video, open_visual
from families import FAMILIES, NEW, family_of
from messages import one_line, unknown_arguments
from models.checkpoints.files import CheckpointError, Opened
from models.checkpoints.sources import open_files
from models.config import VLMConfig

# What people bring from transformers' processors, and what to use here instead.
_INSTEAD = {
    "__call__": "use ask(images, question), or prepare(messages)",
    "apply_chat_template": "use prepare(messages), which gives the model's inputs, images included",
    "batch_decode": "use [processor.decode(row) for row in ids]",
    "post_process_image_text_to_text": "use [processor.decode(row) for row in ids]",
    "save_pretrained": "use model.save_pretrained(folder, processor), which writes both",
    "push_to_hub": "use model.push_to_hub(name, processor), which uploads both",
    "image_processor": "use hf_processor.image_processor, which is transformers' own",
}
LEAST_PIXELS = 1024  # that whole images may be made to fit
Conversation = Sequence[Mapping[str, Any]]


def kind_of(source: Any) -> str:
    """Of what a part of a message shows: "image" or "video"."""
    video = isinstance(source, Clip) or (isinstance(source, Visual) and bool(source.times))
    return "video" if video else "image"


class ModelInputs(dict):
    """Tensors for the model, by argument name; `image_tokens[i]` positions of row i are images."""

    image_tokens: list[int]

    def to(self, *args, **kwargs) -> ModelInputs:
        """The same on another device; as `Tensor.to`, but a dtype reaches only the pixels."""
        device = self["input_ids"].to(*args, **kwargs).device
        moved = ModelInputs(
            (name, value.to(*args, **kwargs) if value.is_floating_point() else value.to(device))
            for name, value in self.items()
            if isinstance(value, Tensor)
        )
        if isinstance(parts := self.get("pixel_values"), Parts):  # the model's to move, when it needs numbers
            moved["pixel_values"] = parts
        moved.image_tokens = self.image_tokens
        return moved


@dataclass(frozen=True)
class EncodedConversation:
    """One conversation, unpadded.

    `parts` are those of its images, still bytes, or None; `assistant_mask` marks what the assistant says, end
    of turn included; `image_tokens` counts the positions that images take.
    `sizes` is what an answer's coordinates are of: those of the images of the last message that has some, or
    None where there is none or they differ.
    """

    input_ids: list[int]
    assistant_mask: list[bool]
    parts: Parts | None
    image_tokens: int
    sizes: Sizes | None = None


class Processor:
    """See the module's docstring. Built by `from_pretrained` or `data.new_processor.make_processor`.

    image_order: see `data.conversation.in_order`; None for a model that learnt images anywhere.
    config: the model's, whose context bounds what is tokenized of a prompt.
    coordinates: how the model writes boxes (`coordinates_of`).
    generation_config: what the checkpoint's file of that name says.
    """

    def __init__(
        self,
        images: Images,
        tokenizer: AnyTokenizer,
        chat_template: str,
        config: VLMConfig | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
        image_order: str | None = None,
        coordinates: Any = None,
        generation_config: Mapping[str, Any] = {},
    ):
        self.images, self.image_order, self.coordinates = images, image_order, coordinates
        self.generation_config, self.tokenizer, self.limits = generation_config, tokenizer, limits
        self.stop_token_ids = turn_ends(tokenizer)
        self.image_token_id = tokenizer.convert_tokens_to_ids(images.image_token)
        if config is not None:
            _check_fit(self, config)
        self.config = config
        self.chat = ChatEncoder(
            tokenizer,
            chat_template,
            image_token=images.image_token,
            stop_token_ids=self.stop_token_ids,
            string_content=images.string_content,
            add_special_tokens=images.add_special_tokens,
            video_token=images.videos.token if images.videos else None,
            video_template=images.videos.template if images.videos else None,
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | Opened,
        config: VLMConfig | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
        revision: str | None = None,
        max_pixels: int | None = None,
        **unknown,
    ) -> Processor:
        """The processor of a checkpoint: a folder, a repository on the Hub at a `revision`, or opened files.

        With the model's `config`, tile size, tokens per tile and placeholder id must fit it. Of a model that
        takes images whole (Qwen-VL), larger images are made to fit `max_pixels`, or the checkpoint's own
        budget where that is less. A ProcessorError says what is missing or broken, and a TypeError what to
        use in place of arguments that are `unknown` here.
        """
        if unknown:
            known = ("config", "limits", "revision", "max_pixels")
            raise TypeError(unknown_arguments(unknown, known))
        if max_pixels is not None and (not isinstance(max_pixels, int) or max_pixels < LEAST_PIXELS):
            raise ProcessorError(f"max_pixels: expected at least {LEAST_PIXELS}, got {max_pixels!r}")
        try:
            opened = source if isinstance(source, Opened) else open_files(source, revision)
            folder = opened.processor_folder
        except CheckpointError as error:
            raise ProcessorError(error) from error
        try:
            with no_panic():
                described = opened.json("config.json")
                # A folder without a model is what transformers' Idefics3Processor writes.
                family = family_of(described) or NEW
                images, tokenizer, template = family.open_images(opened)
                if max_pixels is not None and images.budget is not None:
                    images.budget = min(images.budget, max_pixels)
                if not template:
                    raise PromptError("expected a chat template (chat_template.jinja), found none")
                generation, order = opened.generation_config, read_image_order(opened)
                forms = coordinates_of(described, generation)
                return cls(images, tokenizer, template, config, limits, order, forms, generation)
        except ProcessorError:
            raise
        except CheckpointError as error:  # which names the file
            raise ProcessorError(error) from error
        except PromptError as error:
            raise ProcessorError(f"{folder}: {error}") from error
        except Exception as error:  # transformers and tokenizers raise anything, even bare Exception
            said = f"{type(error).__name__}: {one_line(error, 300)}"
            raise ProcessorError(f"{folder}: its processor cannot be opened ({said})") from error

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _INSTEAD:
                raise AttributeError(f"Processor has no {name}: {_INSTEAD[name]}")
            return self.__getattribute__(name)  # which says why there is none

    def __call__(self, *args, **kwargs) -> NoReturn:
        raise TypeError(f"Processor cannot be called: {_INSTEAD['__call__']}")

    @property
    def thinking(self) -> ThinkingMarks | None:
        """The markers of what its model thinks before it answers; None where it does not."""
        return self.chat.thinking

    @cached_property
    def hf_processor(self) -> Any:
        """transformers' processor, for saving, made when first asked for; None where it has none."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, FolderTokenizer):
            tokenizer = tokenizer.transformers_tokenizer
        return self.images.transformers(tokenizer, self.chat.chat_template)

    # --------------------------------------------------------------------------------------------- in
    def ask(self, images: Any, question: str, system: str | None = None, **options) -> ModelInputs:
        """Inputs for one question about one image or video, a list of them, or none (None or [])."""
        return self.prepare(self.conversation(images, question, system), **options)

    def conversation(self, images: Any, question: str, system: str | None = None) -> list[dict[str, Any]]:
        """The messages of `ask`."""
        if not check_text(question, "question").strip():
            raise PromptError(f"question: expected some text, got {question!r}")
        if not isinstance(images, list | tuple):
            images = [] if images is None else [images]
        shown = [clip_of(image, self.limits, describe(image)) for image in images]
        content = [{(kind := kind_of(one)): one, "type": kind} for one in shown]
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

        They are input_ids and attention_mask (B, T); with images, pixel_values (B, n, 3, M, M), zero-padded,
        with pixel_attention_mask (B, n, M, M), or for nanoVLM (N, 3, M, M) alone; on request assistant_mask
        (B, T) bool. Where images have sizes of their own (Qwen-VL), pixel_values are `Parts`.
        """
        if not isinstance(conversations, Sequence) or not conversations:
            got = "none" if isinstance(conversations, Sequence) else type(conversations).__name__
            raise PromptError(f"expected conversations as lists of messages, got {got}")
        if isinstance(conversations[0], Mapping):
            rows = [self.encode_conversation(conversations, add_generation_prompt)]  # type: ignore[arg-type]
        else:
            rows = [
                self.encode_conversation(one, add_generation_prompt, f"conversation {i}")  # type: ignore
                for i, one in enumerate(conversations)
            ]
        return self.collate(rows, padding_side, return_assistant_mask)

    def messages(self, conversation: Conversation, label: str = "conversation") -> list[Message]:
        """A conversation as the model learnt to read one: its parts in the order of `image_order`."""
        messages = read_conversation(conversation, label, self.image_order)
        opened = [
            replace(one, parts=tuple(part for given in one.parts for part in self._opened(*given)))
            for one in messages
        ]
        return self.images.normalise_messages(opened, label)

    def _opened(self, kind: str, value: Any) -> list[tuple[str, Any]]:
        """A part of a message, or of a video what is shown as it."""
        if kind != "video" or isinstance(value, Visual):
            return [(kind, value)]
        return shown_as(self, open_video(value, self.limits))

    @cached_property
    def few_images(self) -> bool:
        """Whether it sees videos as images, and learnt from fewer images than stand for one."""
        return few_images(self.generation_config, self.images)

    def check_video(self, name: str, animated: bool) -> None:
        """ImageError for a video, which may not be open yet, that the model does not take."""
        check_video(self, name, animated)

    def encode_conversation(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = False,
        label: str = "conversation",
        think: bool = False,
        tools: Sequence[Tool] = (),
    ) -> EncodedConversation:
        """One conversation's ids, assistant mask and tiles. `label` names it in error messages. `think`: the
        prompt asks for thinking. `tools`: it speaks of them. Raises PromptTooLong for a prompt that is far
        beyond the model's context, and ThinkingError for a model that has no thinking."""
        messages = self.messages(conversation, label)
        if add_generation_prompt:
            check_question(messages, label)
            if self.config is not None:
                context = self.config.text.max_position_embeddings
                self.chat.check_length((message.text for message in messages), context, label)
        newest = next((len(one.images) for one in reversed(messages) if one.images), 0)
        sources = [source for message in messages for source in message.images]
        images, count, most = list[Visual](), 0, self.limits.max_tiles
        for source in sources:  # together at most as many tiles as one image may have
            images.append(self.cut(source))
            count += len(images[-1].parts)
            if count > most:
                raise ImageError(
                    f"{label}: expected images of at most {most} tiles in all, got more in the first "
                    f"{len(images)} of {len(sources)}; leave some out or raise ImageLimits.max_tiles"
                )
        prompts = [self.images.prompt(one, i, len(images)) for i, one in enumerate(images)]
        encoded = self.chat.encode(messages, prompts, add_generation_prompt, label, think, tools)
        image_tokens = sum(one.positions for one in images)
        if (got := encoded.input_ids.count(self.image_token_id)) != image_tokens:
            raise PromptError(f"{label}: expected {image_tokens} placeholders for its images, got {got}")
        parts = Parts.cat(one.parts for one in images) if images else None
        sizes = {one.sizes for one in images[len(images) - newest :]}
        size = sizes.pop() if len(sizes) == 1 else None
        return EncodedConversation(encoded.input_ids, encoded.assistant_mask, parts, image_tokens, size)

    def visuals(self, source: Any) -> list[Visual]:
        """`cut` of what `open_visual` takes: an image, a video, or the frames that stand for one."""
        if isinstance(source, Visual):
            return [source]
        shown = open_visual(source, self.limits)
        if isinstance(shown, Image.Image):
            return [self._cut(shown, describe(source))]
        return [replace(self.cut(one), name=shown.name) for _, one in shown_as(self, shown)]

    def cut(self, source: Any) -> Visual:
        """An image (anything `load_image` takes) loaded, resized and cut, for several questions about it; or
        a Clip, where the family takes videos."""
        if isinstance(source, Visual):
            return source
        if isinstance(source, Clip) and self.images.videos is not None:
            return self._cut(source, source.name)
        return self._cut(load_image(source, self.limits), describe(source))

    def _cut(self, shown: Image.Image | Clip, name: str) -> Visual:
        """The parts are counted before they are made."""
        planned = self.plan(shown, name)
        rule: Any = self.images.videos if isinstance(shown, Clip) else self.images
        visual = rule.cut(shown)
        assert (visual.parts.shape, visual.grid) == (planned.parts.shape, planned.grid), "plans are kept to"
        return replace(visual, name=name)

    def plan(self, shown: Image.Image | Clip | tuple[int, int], name: str = "image") -> Visual:
        """What `cut` makes of a video, or of an image of this size, with pixels on the meta device. Raises
        ImageError for more parts than `max_tiles`."""
        if isinstance(shown, Clip) and self.images.videos is not None:
            planned = self.images.videos.plan(shown)
        else:
            planned = self.images.plan(*(shown if isinstance(shown, tuple) else shown.size))
        if (count := len(planned.parts)) > (most := self.limits.max_tiles):
            size = " x ".join(map(str, planned.size))
            raise ImageError(
                f"{name}: expected at most {most} tiles, got {count} of {size} pixels; shrink the image or "
                "raise ImageLimits.max_tiles"
            )
        return planned

    def choose_frames(self, fps: float | None = None, most: int | None = None) -> None:
        """Have videos show so many frames a second, and of each no more than `most`; None changes nothing."""
        if (videos := self.images.videos) is not None:
            videos.fps, videos.most = fps or videos.fps, min(most or videos.most, videos.most)

    def form(self, size: tuple[int, int], name: str = "") -> CoordinateForm | None:
        """The form of that name, or else the model's, for an image of `size`; None where it is not known.
        ImageError for a size that the model does not take."""
        form = form_of(self.coordinates, name)
        return form and form.on(self.images.plan(*size).sizes[1])

    def collate(
        self,
        rows: Sequence[EncodedConversation],
        padding_side: str = "left",
        return_assistant_mask: bool = False,
    ) -> ModelInputs:
        """Pad encoded conversations to one length; see `prepare`."""
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side: expected left or right, got {padding_side!r}")
        longest = max(len(row.input_ids) for row in rows)
        inputs = ModelInputs(
            input_ids=torch.full((len(rows), longest), self.pad_token_id, dtype=torch.int64),
            attention_mask=torch.zeros(len(rows), longest, dtype=torch.int64),
        )
        if return_assistant_mask:
            inputs["assistant_mask"] = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            length = len(row.input_ids)
            place = slice(longest - length, None) if padding_side == "left" else slice(0, length)
            inputs["input_ids"][i, place] = torch.tensor(row.input_ids)
            inputs["attention_mask"][i, place] = 1
            if return_assistant_mask:
                inputs["assistant_mask"][i, place] = torch.tensor(row.assistant_mask)
        parts = [row.parts for row in rows]
        real = [one for one in parts if one is not None]
        if real and self.images.flat:
            together = Parts.cat(real)
            inputs["pixel_values"] = together if self.images.own_sizes else together.to("cpu")  # (N, 3, M, M)
        elif real:
            most = max(map(len, real))
            # (B, n, 3, M, M), and a mask (B, n, M, M); a row with fewer tiles ends in zeros.
            pixels = inputs["pixel_values"] = torch.zeros(len(rows), most, *real[0].shape[1:])
            mask = torch.zeros(len(rows), most, *real[0].shape[2:], dtype=torch.int64)
            for i, own in enumerate(parts):
                if own is not None:
                    mask[i, : len(own)] = 1
                    for part, place in zip(own, pixels[i]):
                        part.write(place)
            inputs["pixel_attention_mask"] = mask
        inputs.image_tokens = [row.image_tokens for row in rows]
        return inputs

    @property
    def pad_token_id(self) -> int:
        """What fills short rows; masked, so any id will do where the tokenizer names none."""
        ids = (self.tokenizer.pad_token_id, *self.stop_token_ids, 0)
        return next(token_id for token_id in ids if token_id is not None)

    # -------------------------------------------------------------------------------------------- out
    def decode(self, ids: Tensor | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of one row of ids (T,): what `inference.answer.TextStream` gives in pieces."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def coordinates_of(config: Mapping, generation: Mapping) -> Any:
    """In which form a checkpoint of these config.json and generation_config.json writes boxes and points, for
    `data.boxes.form_of`: what the second says, or else the name that its family has, or None."""
    forms = {kind: form for family in FAMILIES.values() for kind, form in family.BOX_FORMS.items()}
    return generation.get("coordinates", forms.get(str(config.get("model_type"))))


def _check_fit(processor: Processor, config: VLMConfig) -> None:
    """Raises ProcessorError for a processor whose images the model cannot take."""
    visual, positions = processor.images.plan(1, 1), FAMILIES[config.family].positions
    try:
        needed = sum(positions(config, *part.pixels.shape[1:]) for part in visual.parts)
    except ValueError as error:
        raise ProcessorError(f"the processor does not fit the model: {error}") from None
    for what, got, expected in (
        ("image tokens per tile", visual.positions, needed),
        ("image token id", processor.image_token_id, config.image_token_id),
    ):
        if got != expected:
            raise ProcessorError(f"{what}: the model expects {expected}, its processor gives {got}")
