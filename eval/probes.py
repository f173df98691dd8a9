"""Hard images and prompts, always the same, beside which another engine or transformers is put."""

from __future__ import annotations

import io
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

QUESTION = "What colour is the star, and how many shapes are there?"
ORIENTATION = 274  # the EXIF tag
TYPED = " typed"  # ends the names of cases with special tokens in their text
Messages = list[dict[str, Any]]  # of a conversation, with images as bytes


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
def message(role: str, *parts: str | bytes) -> dict[str, Any]:
    named = (("text" if isinstance(part, str) else "image", part) for part in parts)
    return {"role": role, "content": [{"type": kind, kind: part} for kind, part in named]}


user = partial(message, "user")


@cache
def cases() -> dict[str, Messages]:
    """All of them by name. Each has an image, as there are models that need one."""
    files = images()
    one, other, third = files["plain PNG"], files["alpha"], written(scene(64, 96, "yellow"))
    system = message("system", "Answer with a single word, in capital letters.")
    colour = "What colour is the circle?"
    turns = [user(one, colour), message("assistant", "red"), user("And the square?")]
    typed = ("<image>", "<|im_start|>", "<end_of_utterance>", "<|im_end|>", "<fake_token_around_image>")
    alone = {
        **{name: user(data, QUESTION) for name, data in files.items()},
        "two images": user(third, one, "Which shape is in the first image?"),
        "three images in order": user(one, third, other, "Which image has a yellow background?"),
        "the same image twice": user(one, one, "How many shapes are there in all?"),
        "image after the text": user("What colour is the circle in this picture?", one),
        "image between texts": user("Look at this:", one, colour),
        "text between images": user("First:", third, "Second:", one, "Which has a circle?"),
        **{
            f"{token}{TYPED}": user(one, f"What does {token} mean, and what colour is the circle?")
            for token in typed
        },
        "text beyond ASCII": user(one, "Où est le cercle? ｆｕｌｌ ﬁ é 圆在哪里？ 🟥👩‍👩‍👧"),
        "white space around": user(one, f"  {colour} \n\n"),
        "empty text beside the question": user(one, "", colour),
    }
    several = {"system message": [system, user(one, QUESTION)], "three turns": turns}
    return {name: [question] for name, question in alone.items()} | several
