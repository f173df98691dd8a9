"""Strategies for what rows and conversations may hold: texts, images as plain data, values of any kind."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from data.tokenizer import SPECIAL_TOKENS
from tests.processors import draw_image

PIECES = (
    *SPECIAL_TOKENS[:9], "<|image|>", "<|global_image|>", "＜image＞",
    "<im\u200bage>", "<image", ">", "\ue000", "\ue001",
    "\x00", "\ud800", "\u202e", "é", "e\u0301", "👩‍👩‍👧", "\ufeff", "\n",
    "    ", "{{ 7*7 }}", "{% endfor %}", "%s", "how many?", "two", "𝟟",
    "\ufdfa", "a" * 900, "İ", "ß", "\u0130\u0307",
)  # fmt: skip
ODD_SOURCES = (
    "", ".", "..", "/", "/etc/passwd", "/dev/zero", "no such file.png", "\x00", "http://127.0.0.1:1/a.png",
    "https://[::1/", "data:,", "data:image/png;base64,AAAA", "data:image/png;base64,%", "file:///etc/passwd",
    "~nobody-of-this-name/a.png", "a" * 5000, "\ud800.png", "a.png", "HTTP://127.0.0.1:1/",
)  # fmt: skip


def texts() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(PIECES) | st.text(st.characters(), max_size=8)
    return st.lists(pieces, max_size=5).map("".join)


@cache
def image_bytes(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    draw_image(width, height).save(buffer, kind)
    return buffer.getvalue()


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    """Widths and heights: ordinary ones, edges of tiles, and thin ones."""
    side = st.sampled_from((1, 2, 3, 31, 32, 33, 63, 64, 65, 97, 128, 129, 200)) | st.integers(1, 140)
    return st.tuples(side, side)


def encoded_images() -> st.SearchStrategy[bytes]:
    """Images as files; some cut short, some nothing of the kind."""
    whole = st.builds(
        lambda size, kind: image_bytes(*size, kind), sizes(), st.sampled_from(("PNG", "JPEG", "GIF"))
    )
    cut = st.builds(lambda data, share: data[: int(len(data) * share)], whole, st.floats(0, 1))
    return st.one_of(whole, whole, whole, cut, st.binary(max_size=30))


def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), texts(), st.binary(max_size=8),
        st.sampled_from(ODD_SOURCES), st.just(10**400), st.just(b"\xff"),
    )  # fmt: skip


def anything() -> st.SearchStrategy[Any]:
    """Values of any kind, nested a little; keys are those that rows have, too."""
    keys = (
        st.sampled_from(("role", "content", "type", "text", "image", "user", "bytes", "path", "url", ""))
        | texts()
    )
    return st.recursive(
        scalars(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def mostly(
    usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any] | None = None
) -> st.SearchStrategy[Any]:
    """What belongs there, and one time in eight anything."""
    odd = anything() if other is None else other
    return st.integers(0, 7).flatmap(lambda n: odd if n == 7 else usual)


def white(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height))
