"""What a server is asked: hard images and prompts, always the same, and how they are commonly misread.

A `Case` is a conversation. A `Mistake` is one way of reading it wrong: of the image's bytes, of the messages,
or of the token ids. Where a server leaves the reference, the reference is run with each mistake in turn.
"""

from __future__ import annotations

import io
import struct
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from data.chat import Message
from data.images import load_image

Parts = tuple[tuple[str, str | bytes], ...]
QUESTION = "What colour is the star, and how many shapes are there?"


@dataclass(frozen=True)
class Case:
    """`messages` hold texts and images as bytes, in order. The reference may refuse a case too."""

    name: str
    messages: tuple[Message, ...]


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


def ramp(width: int, height: int) -> np.ndarray:
    """(H, W) from 0 to 1: a slope with a bright square."""
    values = np.linspace(0.05, 0.75, width)[None] * np.linspace(0.3, 1, height)[:, None]
    values[height // 8 : height // 3, width // 8 : width // 2] = 1
    return values


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
    exif[274] = orientation
    return written(scene(96, 64), "JPEG", quality=95, subsampling=0, exif=exif)


def palette() -> bytes:
    image = scene().quantize(8)
    corner = image.tobytes()[0]
    pixels = list(image.getpalette() or [])
    pixels[3 * corner : 3 * corner + 3] = [0, 80, 0]  # what stands where nothing is to be seen
    image.putpalette(pixels)
    return written(image, transparency=corner)


def interlaced() -> bytes:
    """Adam7, which Pillow reads but does not write."""
    pixels = np.asarray(scene())
    steps = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = b""
    for top, left, down, right in steps:
        for row in pixels[top::down, left::right]:
            rows += b"\0" + row.tobytes()

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 96, 96, 8, 2, 0, 0, 1)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(rows)) + piece(b"IEND", b"")


def images() -> dict[str, bytes]:
    """The files by name. In their order harmless ones come first."""
    plain, grey = scene(), Image.fromarray((ramp(96, 96) * 255).astype(np.uint8))
    grey_alpha = grey.convert("LA")
    grey_alpha.putalpha(transparent().getchannel("A"))
    first, second = scene(), scene(background="black")
    files = {
        "plain PNG": written(plain),
        "progressive JPEG": written(plain, "JPEG", quality=95, subsampling=0, progressive=True),
        "interlaced PNG": interlaced(),
        "WebP": written(plain, "WEBP", lossless=True),
        "alpha": written(transparent()),
        "grey with alpha": written(grey_alpha),
        "palette with transparency": palette(),
        "16 bits": written(Image.fromarray((ramp(96, 96) * 65_535).astype(np.uint16))),
        "1 bit": written(plain.convert("1")),
        "CMYK JPEG": written(plain.convert("CMYK"), "JPEG", quality=95),
        "animation": written(first, "GIF", save_all=True, append_images=[second], duration=100),
        "1 x 1": written(Image.new("RGB", (1, 1), "red")),
        "large": written(scene(3000, 2000), "JPEG", quality=90),
        "tall": written(scene(24, 2400)),
        "wide": written(scene(2400, 24)),
        "1 x 4000": written(scene(1, 4000)),
        "4000 x 1": written(scene(4000, 1)),
    }
    return files | {f"EXIF orientation {n}": turned(n) for n in range(2, 9)}


# ----------------------------------------------------------------------------------------- the conversations
def user(*parts: str | bytes) -> Message:
    return Message("user", tuple(("text" if isinstance(part, str) else "image", part) for part in parts))


@cache
def cases() -> tuple[Case, ...]:
    """All of them. Each has an image, as there are models that need one."""
    files = images()
    made = [Case(name, (user(data, QUESTION),)) for name, data in files.items()]
    one, other = files["plain PNG"], files["alpha"]
    third = written(scene(64, 96, "yellow"))
    system = Message("system", (("text", "Answer with a single word, in capital letters."),))

    def add(name: str, *messages: Message) -> None:
        made.append(Case(name, messages))

    add("two images", user(third, one, "Which shape is in the first image?"))
    add("three images in order", user(one, third, other, "Which image has a yellow background?"))
    add("the same image twice", user(one, one, "How many shapes are there in all?"))
    add("image after the text", user("What colour is the circle in this picture?", one))
    add("image between texts", user("Look at this:", one, "What colour is the circle?"))
    add("text between images", user("First:", third, "Second:", one, "Which has a circle?"))
    for token in ("<image>", "<|im_start|>", "<end_of_utterance>", "<|im_end|>", "<fake_token_around_image>"):
        add(f"{token} typed", user(one, f"What does {token} mean, and what colour is the circle?"))
    add("system message", system, user(one, QUESTION))
    add(
        "three turns",
        user(one, "What colour is the circle?"),
        Message("assistant", (("text", "red"),)),
        user("And the square?"),
    )
    add("text beyond ASCII", user(one, "Où est le cercle? ｆｕｌｌ ﬁ é 圆在哪里？ 🟥👩‍👩‍👧"))
    add("white space around", user(one, "  What colour is the circle? \n\n"))
    add("empty text beside the question", user(one, "", "What colour is the circle?"))
    return tuple(made)


# -------------------------------------------------------------------------------------------- the mistakes
@dataclass(frozen=True)
class Mistake:
    """One way of reading a case wrong: an image's bytes as another image, other messages, or other token ids.

    `image` gives None for a file that it cannot happen to. `ids` takes the right ids and the processor. What
    a mistake leaves unchanged, it does not explain.
    """

    name: str
    image: Callable[[bytes], Image.Image | None] | None = None
    messages: Callable[[tuple[Message, ...]], tuple[Message, ...]] | None = None
    ids: Callable | None = None


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def sideways(data: bytes) -> Image.Image | None:
    image = opened(data)
    return image.convert("RGB") if image.getexif().get(274, 1) != 1 else None


def on_black(data: bytes) -> Image.Image | None:
    image = opened(data)
    if not image.has_transparency_data:
        return None
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image).convert("RGB")


def without_alpha(data: bytes) -> Image.Image | None:
    image = opened(data)
    return image.convert("RGBA").convert("RGB") if image.has_transparency_data else None


def last_frame(data: bytes) -> Image.Image | None:
    image = opened(data)
    if (frames := getattr(image, "n_frames", 1)) == 1:
        return None
    image.seek(frames - 1)
    return image.convert("RGB")


def clipped(data: bytes) -> Image.Image | None:
    return of_16_bits(data, lambda values: np.minimum(values, 255))


def low_byte(data: bytes) -> Image.Image | None:
    return of_16_bits(data, lambda values: values & 255)


def of_16_bits(data: bytes, change: Callable[[np.ndarray], np.ndarray]) -> Image.Image | None:
    image = opened(data)
    if not image.mode.startswith("I"):
        return None
    return Image.fromarray(change(np.asarray(image)).astype(np.uint8)).convert("RGB")


def inverted(data: bytes) -> Image.Image | None:
    image = opened(data)
    return ImageOps.invert(image.convert("RGB")) if image.mode == "CMYK" else None


def padded(data: bytes) -> Image.Image:
    image = load_image(data)
    return ImageOps.pad(image, (max(image.size),) * 2)


def shrunk(data: bytes) -> Image.Image:
    image = load_image(data)
    image.thumbnail((512, 512))
    return image


def grey(data: bytes) -> Image.Image:
    return load_image(data).convert("L").convert("RGB")


def swapped(data: bytes) -> Image.Image:
    return Image.fromarray(np.asarray(load_image(data))[:, :, ::-1].copy())


def each(change: Callable[[Message], Message]) -> Callable[[tuple[Message, ...]], tuple[Message, ...]]:
    return lambda messages: tuple(map(change, messages))


def images_in_front(message: Message) -> Message:
    return replace(message, parts=tuple(sorted(message.parts, key=lambda part: part[0] != "image")))


def images_at_the_end(message: Message) -> Message:
    return replace(message, parts=tuple(sorted(message.parts, key=lambda part: part[0] == "image")))


def images_reversed(message: Message) -> Message:
    reverse = iter([part for part in message.parts if part[0] == "image"][::-1])
    return replace(message, parts=tuple(next(reverse) if p[0] == "image" else p for p in message.parts))


def first_image_alone(message: Message) -> Message:
    first = next((part for part in message.parts if part[0] == "image"), None)
    seen, kept = False, []
    for part in message.parts:
        if part[0] != "image" or not seen:
            kept.append(part)
        seen = seen or part is first
    return replace(message, parts=tuple(kept))


def images_once(message: Message) -> Message:
    return replace(message, parts=tuple(dict.fromkeys(message.parts)))


def of_texts(change: Callable[[str], str]) -> Callable[[tuple[Message, ...]], tuple[Message, ...]]:
    def changed(message: Message) -> Message:
        parts = [(kind, change(str(value)) if kind == "text" else value) for kind, value in message.parts]
        return replace(message, parts=tuple(parts))

    return each(changed)


def normalised(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def joined(message: Message) -> Message:
    """Images in front, and the texts as one with new lines between them."""
    images = [part for part in message.parts if part[0] == "image"]
    texts = [str(value) for kind, value in message.parts if kind == "text"]
    return replace(message, parts=(*images, ("text", "\n".join(texts))))


def without_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.role != "system")


def system_in_question(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    system = "".join(message.text for message in messages if message.role == "system")
    rest = without_system(messages)
    if not system:
        return messages
    return (replace(rest[0], parts=(("text", system + "\n"), *rest[0].parts)), *rest[1:])


def question_alone(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The last turn, with the images of those before it, without which many a model answers nothing."""
    before = [part for message in messages[:-1] for part in message.parts if part[0] == "image"]
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


MISTAKES = (
    Mistake("EXIF orientation ignored", image=sideways),
    Mistake("alpha blended on black", image=on_black),
    Mistake("alpha dropped, hidden colours shown", image=without_alpha),
    Mistake("the last frame taken", image=last_frame),
    Mistake("16 bits clipped to 8", image=clipped),
    Mistake("16 bits cut to their low byte", image=low_byte),
    Mistake("CMYK inverted", image=inverted),
    Mistake("image made grey", image=grey),
    Mistake("colours swapped (BGR)", image=swapped),
    Mistake("image padded to a square", image=padded),
    Mistake("image shrunk to 512 pixels before", image=shrunk),
    Mistake("images in reverse order", messages=each(images_reversed)),
    Mistake("images moved in front of the text", messages=each(images_in_front)),
    Mistake("images moved behind the text", messages=each(images_at_the_end)),
    Mistake("images in front, texts joined by new lines", messages=each(joined)),
    Mistake("the first image alone", messages=each(first_image_alone)),
    Mistake("an image that comes twice shown once", messages=each(images_once)),
    Mistake("system message dropped", messages=without_system),
    Mistake("system message put into the question", messages=system_in_question),
    Mistake("earlier turns dropped", messages=question_alone),
    Mistake("white space around the text stripped", messages=of_texts(str.strip)),
    Mistake("text normalised to NFKC", messages=of_texts(normalised)),
    Mistake(
        "characters beyond ASCII lost", messages=of_texts(lambda t: t.encode("ascii", "ignore").decode())
    ),
    Mistake("typed special tokens not escaped", ids=unescaped),
    Mistake("BOS twice", ids=bos_twice),
    Mistake("BOS missing", ids=bos_missing),
)
