"""Valid inputs made invalid: bytes, JSON values and the numbers in headers; and texts, images and values of
any kind. All decided by one random generator."""

from __future__ import annotations

import copy
import io
import random
from functools import cache
from typing import Any

from data.tokenizer import SPECIAL_TOKENS
from tests.processors import draw_image

NUMBERS = (
    0, 1, 2, 3, 7, 8, 16, 255, 256, 1023, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
)  # fmt: skip
# What a value of JSON may be and no reader expects.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 65_536, 2**31, 2**63, 10**30, -(2**63), 0.0, 0.5, -0.0, 1e-300,
    1e308, float("inf"), float("nan"), "", " ", "a", "0", "-1", "\x00", "\ud800", "💥", "<image>", "../..",
    "/etc/passwd", "x" * 3000, [], {}, [[]], [None], [1, "a"], {"a": 1}, {"": {}}, [0] * 300, [[[[[]]]]],
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """Some random changes: bits, numbers, pieces lost, doubled, new or from another input."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 9))):
        size = len(out)
        at = rng.randrange(size + 1) if rng.random() < 0.6 else rng.randrange(min(size, 64) + 1)
        kind = rng.randrange(8)
        if kind == 0 and at < size:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            out[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, order)
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 4, 8, rng.randrange(size + 1)))]
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice((1, 4, 16, 64))] * rng.choice((1, 2, 30))
        elif kind == 4:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 40)))
        elif kind == 5:
            del out[at:]
        elif kind == 6 and others:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            out[at : at + rng.choice((0, 8, size))] = other[begin : begin + rng.choice((4, 32, 4096))]
        else:
            out[at:at] = rng.choice((b"\x00", b"\n", b'"', b"{", b"[", b"}", b"\\", b"\xff\xfe"))
    return bytes(out)


def mutate_json(rng: random.Random, value: Any, odd: tuple[Any, ...] = ODD_VALUES) -> Any:
    """A copy in which some values at random places are others, gone, doubled, nested or swapped."""
    out = [copy.deepcopy(value)]  # so that the whole has a place, too
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        holder, key = rng.choice(_places(out))
        old, kind = holder[key], rng.randrange(6)
        if kind == 0 and holder is not out:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("", "x", f"{key}_", *map(str, holder)))] = holder.pop(key)
        elif kind == 2:
            other, name = rng.choice(_places(out))
            holder[key] = rng.choice(([old], {"a": old}, copy.deepcopy(other[name])))
        elif kind == 3 and isinstance(old, int) and not isinstance(old, bool):
            holder[key] = rng.choice((old * 2, -old, old + 1, old * 2**20))
        elif kind == 4 and isinstance(old, str):
            at = rng.randrange(len(old) + 1)
            piece = rng.choice(("", " ", "\n", "\x00", "/", "..", "\ud800", "é", "<image>", "{{", "}", "%"))
            holder[key] = old[:at] + piece + old[at + rng.choice((0, 0, 1, 5)) :]
        else:
            holder[key] = copy.deepcopy(rng.choice(odd))
    return out[0]


def _places(value: list) -> list[tuple[Any, Any]]:
    """(holder, key) of everything in a value, not counting what is below 500 places."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [value]
    while waiting and len(found) < 500:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


# ------------------------------------------------------------------------------- texts, images, anything else
PIECES = (
    *SPECIAL_TOKENS[:9], "<|image|>", "<|global_image|>", "＜image＞", "<im\u200bage>", "<image", ">",
    "\ue000", "\ue001", "\x00", "\ud800", "\u202e", "é", "e\u0301", "👩\u200d👩\u200d👧", "\ufeff", "\n",
    "    ", "{{ 7*7 }}", "{% endfor %}", "%s", "how many?", "two", "𝟟", "\ufdfa", "a" * 900, "İ", "ß",
    "\u0130\u0307",
)  # fmt: skip
ODD_SOURCES = (
    "", ".", "..", "/", "/etc/passwd", "/dev/zero", "no such file.png", "\x00", "http://127.0.0.1:1/a.png",
    "https://[::1/", "data:,", "data:image/png;base64,AAAA", "data:image/png;base64,%", "file:///etc/passwd",
    "~nobody-of-this-name/a.png", "a" * 5000, "\ud800.png", "a.png", "HTTP://127.0.0.1:1/",
)  # fmt: skip
SIDES = (1, 2, 3, 31, 32, 33, 63, 64, 65, 97, 128, 129, 200)
KEYS = ("role", "content", "type", "text", "image", "user", "bytes", "path", "url", "", "x")


def text(rng: random.Random) -> str:
    pieces = [
        rng.choice(PIECES) if rng.random() < 0.7 else chr(rng.randrange(0x3000))
        for _ in range(rng.randrange(5))
    ]
    return "".join(pieces)


def scalar(rng: random.Random) -> Any:
    odd = rng.choice((*ODD_VALUES[:32], *ODD_SOURCES, 10**400, b"\xff", rng.randbytes(8)))
    return text(rng) if rng.random() < 0.2 else odd


def anything(rng: random.Random, depth: int = 3) -> Any:
    """A value of any kind, nested a little."""
    kind = rng.randrange(4) if depth else 0
    if kind == 2:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        return {rng.choice(KEYS): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    return scalar(rng)


def mostly(rng: random.Random, usual: Any, other: Any = None) -> Any:
    """What belongs there; one time in eight `other`, or anything."""
    if rng.randrange(8):
        return usual
    return anything(rng) if other is None else other


def size(rng: random.Random) -> tuple[int, int]:
    """Width and height: ordinary ones, edges of tiles, and thin ones."""
    return rng.choice((*SIDES, rng.randint(1, 140))), rng.choice((*SIDES, rng.randint(1, 140)))


@cache
def image_bytes(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    draw_image(width, height).save(buffer, kind)
    return buffer.getvalue()


def encoded_image(rng: random.Random) -> bytes:
    """An image as a file; some cut short, some nothing of the kind."""
    whole = image_bytes(*size(rng), rng.choice(("PNG", "JPEG", "GIF")))
    return rng.choice((whole, whole, whole, whole[: rng.randrange(len(whole))], rng.randbytes(30)))
