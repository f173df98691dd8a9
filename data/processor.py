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
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from data.boxes import CoordinateForm, form_of
from data.chat import ChatEncoder
from data.conversation import Message, check_question, check_text, read_conversation
from data.errors import ImageError, ProcessorError, PromptError
from data.image_rules import Images
from data.images import ImageLimits, describe, load_image
from data.model_inputs import EncodedConversation, ModelInputs, collate
from data.reading import Reading, reading_of
from data.thinking import ThinkingMarks
from data.tiles import Parts, Visual
from data.tokenizer import AnyTokenizer, no_panic, turn_ends
from data.tools import Tool
from data.video import Clip
from data.visuals import clip_of, open_video, open_visual
from families import FAMILIES, NEW, family_of
from messages import one_line
from models.checkpoints.files import CheckpointError, Opened
from models.checkpoints.sources import open_files
from models.config import VLMConfig

LEAST_PIXELS = 1024  # that whole images may be made to fit
FRAMES_AS_IMAGES = 8  # of a video, for a model that takes images alone
Conversation = Sequence[Mapping[str, Any]]


def kind_of(source: Any) -> str:
    """The kind of a part of a message: "image" or "video"."""
    video = isinstance(source, Clip) or (isinstance(source, Visual) and bool(source.times))
    return "video" if video else "image"


class Processor:
    """See the module's docstring. Built by `from_pretrained` or `data.new_processor.make_processor`.

    config: the model's, if it is known.
    coordinates: how the model writes boxes (`coordinates_of`).
    generation_config: what the checkpoint's file of that name says. Its `image_order` is "first" or "last"
        for a model that learnt the images of a message there (`data.conversation.in_order`).
    """

    def __init__(
        self,
        images: Images,
        tokenizer: AnyTokenizer,
        chat_template: str,
        config: VLMConfig | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
        coordinates: Any = None,
        generation_config: Mapping[str, Any] = {},
        reading: Reading | None = None,
    ):
        self.images, self.tokenizer, self.limits, self.coordinates = images, tokenizer, limits, coordinates
        self.generation_config, self.said_reading = generation_config, reading
        self.stop_token_ids = turn_ends(tokenizer)
        self.image_token_id = tokenizer.convert_tokens_to_ids(images.image_token)
        if config is not None and config.vision.num_hidden_layers:
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
    ) -> Processor:
        """The processor of a checkpoint: a folder, a repository on the Hub at a `revision`, or opened files.

        With the model's `config`, tile size, tokens per tile and placeholder id must fit it. Of a model that
        takes images whole (Qwen-VL), larger images are made to fit `max_pixels`, or the checkpoint's own
        budget where that is less. A ProcessorError says what is missing or broken.
        """
        if max_pixels is not None and (not isinstance(max_pixels, int) or max_pixels < LEAST_PIXELS):
            raise ProcessorError(f"max_pixels: expected at least {LEAST_PIXELS}, got {max_pixels!r}")
        place: Any = source
        try:
            opened = source if isinstance(source, Opened) else open_files(source, revision)
            place = opened.processor_folder
            with no_panic():
                described = opened.json("config.json")
                # A folder without a model is what transformers' Idefics3Processor writes.
                family = family_of(described) or NEW
                images, tokenizer, template = family.open_images(opened)
                if max_pixels is not None and images.budget is not None:
                    images.budget = min(images.budget, max_pixels)
                if not template:
                    raise PromptError("expected a chat template (chat_template.jinja), found none")
                generation = opened.generation_config
                if (order := generation.get("image_order")) not in (None, "first", "last"):
                    raise PromptError(
                        f"generation_config.json: image_order: expected first or last, got {order!r}"
                    )
                forms = coordinates_of(described, generation)
                reading = getattr(family, "READING", {}).get(described.get("model_type"))
                return cls(images, tokenizer, template, config, limits, forms, generation, reading)
        except ProcessorError:
            raise
        except CheckpointError as error:  # which names the file
            raise ProcessorError(error) from error
        except PromptError as error:
            raise ProcessorError(f"{place}: {error}") from error
        except Exception as error:  # transformers and tokenizers raise anything, even bare Exception
            said = f"{type(error).__name__}: {one_line(error, 300)}"
            raise ProcessorError(f"{place}: its processor cannot be opened ({said})") from error

    reading = cached_property(reading_of)  # how it is asked to read a page, and what it answers

    @property
    def thinking(self) -> ThinkingMarks | None:
        """The markers of what its model thinks before it answers; None where it does not."""
        return self.chat.thinking

    @cached_property
    def hf_processor(self) -> Any:
        """transformers' processor, for saving, made when first asked for; None where it has none."""
        tokenizer = getattr(self.tokenizer, "transformers_tokenizer", self.tokenizer)
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
        named: Any = {f"conversation {i}": one for i, one in enumerate(conversations)}
        if isinstance(conversations[0], Mapping):
            named = {"conversation": conversations}
        rows = [self.encode_conversation(one, add_generation_prompt, name) for name, one in named.items()]
        return self.collate(rows, padding_side, return_assistant_mask)

    def messages(self, conversation: Conversation, label: str = "conversation") -> list[Message]:
        """A conversation as the model learnt to read one."""
        messages = read_conversation(conversation, label, self.generation_config.get("image_order"))
        opened = [
            replace(one, parts=tuple(part for given in one.parts for part in self._opened(*given)))
            for one in messages
        ]
        return self.images.normalise_messages(opened, label)

    def _opened(self, kind: str, value: Any) -> list[tuple[str, Any]]:
        """A part of a message, or of a video what is shown as it."""
        if kind != "video" or isinstance(value, Visual):
            return [(kind, value)]
        return self._shown_as(open_video(value, self.limits))

    def _shown_as(self, clip: Clip) -> list[tuple[str, Any]]:
        """A clip as parts of a message: itself, or some of its frames; a model of few images sees the first
        frame of an image that moves. Raises ImageError as `check_video` does."""
        self.check_video(clip.name, clip.animated)
        if self.images.videos is not None:
            return [("video", clip)]
        count = 1 if self.few_images else min(FRAMES_AS_IMAGES, clip.count)
        indices = [round(number * (clip.count - 1) / max(count - 1, 1)) for number in range(count)]
        return [("image", frame) for frame in clip.frames(indices)]

    @cached_property
    def few_images(self) -> bool:
        """True if it sees videos as images, and learnt from fewer images at a time than stand for one."""
        most = self.generation_config.get("most_images")
        return isinstance(most, int) and most < FRAMES_AS_IMAGES and self.images.videos is None

    def check_video(self, name: str, animated: bool) -> None:
        """Raises ImageError for a video, which may not be open yet, if the model takes none but images that
        move, or its chat template writes none."""
        if self.images.videos is not None and not self.chat.writes_videos:
            raise ImageError(f"{name}: this model's chat template has no place for it; take another model")
        if self.few_images and not animated:
            raise ImageError(
                f"{name}: this model has learned from few images at a time, and takes no video; ask about "
                "one of its frames, or take another model (--model list)"
            )

    def encode_conversation(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = False,
        label: str = "conversation",
        think: bool = False,
        tools: Sequence[Tool] = (),
    ) -> EncodedConversation:
        """One conversation's ids, assistant mask and tiles. `label` names it in errors. `think`: the prompt
        asks for thinking. `tools`: it speaks of them. Raises ThinkingError for a model without thinking."""
        messages = self.messages(conversation, label)
        if add_generation_prompt:
            check_question(messages, label)
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
        return [replace(self.cut(one), name=shown.name) for _, one in self._shown_as(shown)]

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
        assert (len(visual.parts), visual.grid) == (len(planned.parts), planned.grid), "plans are kept to"
        return replace(visual, name=name)

    def plan(self, shown: Image.Image | Clip | tuple[int, int], name: str = "image") -> Visual:
        """The result of `cut` for a video, or an image of this size, with pixels on the meta device. Raises
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
        flat, own_sizes = self.images.flat, self.images.own_sizes
        return collate(rows, self.pad_token_id, padding_side, return_assistant_mask, flat, own_sizes)

    @property
    def pad_token_id(self) -> int:
        """The id that fills short rows; masked, so any will do where the tokenizer names none."""
        ids = (self.tokenizer.pad_token_id, *self.stop_token_ids, 0)
        return next(token_id for token_id in ids if token_id is not None)

    # -------------------------------------------------------------------------------------------- out
    def decode(self, ids: Tensor | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of one row of ids (T,): what `inference.answer.TextStream` gives in pieces."""
        return self.tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False)


def coordinates_of(config: Mapping, generation: Mapping) -> Any:
    """The form in which a checkpoint of these config.json and generation_config.json writes boxes, as
    `data.boxes.form_of` takes it: that of the second file, or the name that its family has, or None."""
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
