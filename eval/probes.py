"""Hard images and prompts, always the same, for another engine, and common ways of reading them wrong."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps, ImageSequence

from data.conversation import Message
from data.images import load_image

QUESTION = "What colour is the star, and how many shapes are there?"
ORIENTATION = 274  # the EXIF tag
Messages = tuple[Message, ...]
Parts = tuple[tuple[str, Any], ...]


class Case(NamedTuple):
    """`messages` hold texts and images as bytes, in order. The reference may refuse a case too."""

    name: str
    messages: Messages


# ---------------------------------------------------------------------------------------------- the images
def scene(width: int = 96, height: int = 96, background: str = "white") -> Image.Image:
    """Shapes that are different at each side, so that a picture which is turned or mirrored is another."""
    image = Image.new("RGB", (width, height), background)
    draw = ImageDraw.Draw(image)
    w, h = width, height
    draw.ellipse((w // 12, h // 12, w // 2, h // 2), fill="red")
    draw.rectangle((w * 5 // 8, h // 8, w * 15 // 16, h * 3 // 8), fill="blue")
    draw.polygon([(w // 4, h * 11 // 12), (w // 2, h * 5 // 8), (w * 3 // 4, h * 11 // 12)], fill="green")
    return image


def slope(most: int, dtype: type) -> Image.Image:
    """Grey from 0 to `most`, with a bright square."""
    values = np.linspace(0.05, 0.75, 96)[None] * np.linspace(0.3, 1, 96)[:, None]
    values[12:32, 12:48] = 1
    return Image.fromarray((values * most).astype(dtype))


def written(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def transparent() -> Image.Image:
    """Half of it is transparent; what stands there, unseen, is orange, the rest is grey."""
    image = scene(background="grey").convert("RGBA")
    alpha = Image.fromarray((np.tri(96, dtype=np.uint8) * 255)[:, ::-1].copy())
    image.putalpha(alpha)
    hidden = Image.new("RGBA", image.size, (230, 120, 0, 0))
    return Image.composite(image, hidden, alpha)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return written(scene(96, 64), "JPEG", quality=95, subsampling=0, exif=exif)


def palette() -> bytes:
    image = scene().quantize(8)
    corner = image.tobytes()[0]
    pixels = list(image.getpalette() or [])
    pixels[3 * corner : 3 * corner + 3] = [0, 80, 0]  # what stands where nothing is to be seen
    image.putpalette(pixels)
    return written(image, transparency=corner)


def images() -> dict[str, bytes]:
    """The files by name. In their order harmless ones come first."""
    plain, grey_alpha = scene(), slope(255, np.uint8).convert("LA")
    grey_alpha.putalpha(transparent().getchannel("A"))
    frames = {"save_all": True, "append_images": [scene(background="black")], "duration": 100}
    sizes = {"tall": (24, 2400), "wide": (2400, 24), "1 x 4000": (1, 4000), "4000 x 1": (4000, 1)}
    return {
        "plain PNG": written(plain),
        "progressive JPEG": written(plain, "JPEG", quality=95, subsampling=0, progressive=True),
        "WebP": written(plain, "WEBP", lossless=True),
        "alpha": written(transparent()),
        "grey with alpha": written(grey_alpha),
        "palette with transparency": palette(),
        "16 bits": written(slope(65_535, np.uint16)),
        "1 bit": written(plain.convert("1")),
        "CMYK JPEG": written(plain.convert("CMYK"), "JPEG", quality=95),
        "animation": written(plain, "GIF", **frames),
        "1 x 1": written(Image.new("RGB", (1, 1), "red")),
        "large": written(scene(3000, 2000), "JPEG", quality=90),
        **{name: written(scene(*size)) for name, size in sizes.items()},
        **{f"EXIF orientation {n}": turned(n) for n in range(2, 9)},
    }


# ----------------------------------------------------------------------------------------- the conversations
def user(*parts: str | bytes) -> Message:
    return Message("user", tuple(("text" if isinstance(part, str) else "image", part) for part in parts))


@cache
def cases() -> tuple[Case, ...]:
    """All of them. Each has an image, as there are models that need one."""
    files = images()
    one, other, third = files["plain PNG"], files["alpha"], written(scene(64, 96, "yellow"))
    system = Message("system", (("text", "Answer with a single word, in capital letters."),))
    colour = "What colour is the circle?"
    turns = (user(one, colour), Message("assistant", (("text", "red"),)), user("And the square?"))
    typed = ("<image>", "<|im_start|>", "<end_of_utterance>", "<|im_end|>", "<fake_token_around_image>")
    asked: dict[str, Message | Messages] = {
        **{name: user(data, QUESTION) for name, data in files.items()},
        "two images": user(third, one, "Which shape is in the first image?"),
        "three images in order": user(one, third, other, "Which image has a yellow background?"),
        "the same image twice": user(one, one, "How many shapes are there in all?"),
        "image after the text": user("What colour is the circle in this picture?", one),
        "image between texts": user("Look at this:", one, colour),
        "text between images": user("First:", third, "Second:", one, "Which has a circle?"),
        **{
            f"{token} typed": user(one, f"What does {token} mean, and what colour is the circle?")
            for token in typed
        },
        "system message": (system, user(one, QUESTION)),
        "three turns": turns,
        "text beyond ASCII": user(one, "Où est le cercle? ｆｕｌｌ ﬁ é 圆在哪里？ 🟥👩‍👩‍👧"),
        "white space around": user(one, f"  {colour} \n\n"),
        "empty text beside the question": user(one, "", colour),
    }
    return tuple(Case(name, (m,) if isinstance(m, Message) else m) for name, m in asked.items())


# -------------------------------------------------------------------------------------------- the mistakes
class Mistake(NamedTuple):
    """One way of reading a case wrong. What a mistake leaves unchanged, it does not explain.

    `change` takes and gives what `of` says: an image's bytes (it gives an image, or None for a file that it
    cannot happen to), a text, the parts of a message, all messages, or the token ids with the processor.
    """

    name: str
    of: str
    change: Callable[..., Any]


def misread(messages: Messages, mistake: Mistake) -> Messages:
    """The messages with a mistake made in them, unless it is one of token ids."""

    def changed(kind: str, value: Any) -> tuple[str, Any]:
        if kind != mistake.of:
            return kind, value
        read = mistake.change(value)
        if isinstance(read, Image.Image):
            read.info = {}  # what it says about itself, by which it would be turned once more
        return kind, value if read is None else read

    if mistake.of == "messages":
        return mistake.change(messages)
    if mistake.of == "parts":
        return tuple(replace(one, parts=tuple(mistake.change(one.parts))) for one in messages)
    return tuple(replace(one, parts=tuple(changed(*part) for part in one.parts)) for one in messages)


def where(
    applies: Callable[[Image.Image], bool], change: Callable[[Image.Image], Image.Image]
) -> Callable[[bytes], Image.Image | None]:
    """`change` of the images that `applies` is true for, which get both as Pillow opens them."""

    def read(data: bytes) -> Image.Image | None:
        image = Image.open(io.BytesIO(data))
        return change(image).convert("RGB") if applies(image) else None

    return read


def everywhere(change: Callable[[Image.Image], Image.Image]) -> Callable[[bytes], Image.Image]:
    """`change` of each image as it is read right."""
    return lambda data: change(load_image(data)).convert("RGB")


def deep(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[bytes], Image.Image | None]:
    """`change` of the values of an image of 16 bits."""
    as_bytes = lambda image: Image.fromarray(change(np.asarray(image)).astype(np.uint8))
    return where(lambda image: image.mode.startswith("I"), as_bytes)


def with_alpha(change: Callable[[Image.Image], Image.Image]) -> Callable[[bytes], Image.Image | None]:
    """`change` of the RGBA of an image that has transparent parts."""
    return where(lambda image: image.has_transparency_data, lambda image: change(image.convert("RGBA")))


def is_image(part: tuple[str, Any]) -> bool:
    return part[0] == "image"


def reversed_images(parts: Parts) -> Parts:
    last = [part for part in parts if is_image(part)]
    return tuple(last.pop() if is_image(part) else part for part in parts)


def first_image_alone(parts: Parts) -> Parts:
    others = [number for number, part in enumerate(parts) if is_image(part)][1:]
    return tuple(part for number, part in enumerate(parts) if number not in others)


def joined(parts: Parts) -> Parts:
    """Images in front, and the texts as one with new lines between them."""
    text = "\n".join(part[1] for part in parts if not is_image(part))
    return (*filter(is_image, parts), ("text", text))


def without_system(messages: Messages) -> Messages:
    return tuple(message for message in messages if message.role != "system")


def system_in_question(messages: Messages) -> Messages:
    system = "".join(message.text for message in messages if message.role == "system")
    first, *rest = without_system(messages)
    parts = (("text", system + "\n"), *first.parts) if system else first.parts
    return (replace(first, parts=parts), *rest)


def question_alone(messages: Messages) -> Messages:
    """The last turn, with the images of those before it, without which many a model answers nothing."""
    before = [part for message in messages[:-1] for part in message.parts if is_image(part)]
    return (replace(messages[-1], parts=(*before, *messages[-1].parts)),)


def unescaped(ids: list[int], processor) -> list[int]:
    """As the ordinary tokenizer reads the prompt: typed special tokens are special."""
    text = processor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return processor.tokenizer.encode(text, add_special_tokens=False)


def bos_twice(ids: list[int], processor) -> list[int]:
    bos = processor.tokenizer.bos_token_id
    return ids if bos is None else [bos, *ids]


def bos_missing(ids: list[int], processor) -> list[int]:
    return ids[1:] if ids[0] == processor.tokenizer.bos_token_id else ids


_MISTAKES: dict[str, dict[str, Callable[..., Any]]] = {
    "image": {
        "EXIF orientation ignored": where(lambda i: i.getexif().get(ORIENTATION, 1) != 1, Image.Image.copy),
        "alpha blended on black": with_alpha(
            lambda i: Image.alpha_composite(Image.new("RGBA", i.size, "black"), i)
        ),
        "alpha dropped, hidden colours shown": with_alpha(Image.Image.copy),
        "the last frame taken": where(
            lambda i: getattr(i, "n_frames", 1) > 1, lambda i: ImageSequence.all_frames(i)[-1]
        ),
        "16 bits clipped to 8": deep(lambda values: np.minimum(values, 255)),
        "16 bits cut to their low byte": deep(lambda values: values & 255),
        "CMYK inverted": where(lambda i: i.mode == "CMYK", lambda i: ImageOps.invert(i.convert("RGB"))),
        "image made grey": everywhere(lambda i: i.convert("L")),
        "colours swapped (BGR)": everywhere(lambda i: Image.merge("RGB", i.split()[::-1])),
        "image padded to a square": everywhere(lambda i: ImageOps.pad(i, (max(i.size),) * 2)),
        "image shrunk to 512 pixels before": everywhere(
            lambda i: ImageOps.contain(i, (512, 512)) if max(i.size) > 512 else i
        ),
    },
    "parts": {
        "images in reverse order": reversed_images,
        "images moved in front of the text": lambda parts: sorted(parts, key=is_image, reverse=True),
        "images moved behind the text": lambda parts: sorted(parts, key=is_image),
        "images in front, texts joined by new lines": joined,
        "the first image alone": first_image_alone,
        "an image that comes twice shown once": dict.fromkeys,
    },
    "messages": {
        "system message dropped": without_system,
        "system message put into the question": system_in_question,
        "earlier turns dropped": question_alone,
    },
    "text": {
        "white space around the text stripped": str.strip,
        "text normalised to NFKC": lambda text: unicodedata.normalize("NFKC", text),
        "characters beyond ASCII lost": lambda text: text.encode("ascii", "ignore").decode(),
    },
    "ids": {
        "typed special tokens not escaped": unescaped,
        "BOS twice": bos_twice,
        "BOS missing": bos_missing,
    },
}
MISTAKES = tuple(
    Mistake(name, of, change) for of, named in _MISTAKES.items() for name, change in named.items()
)
