"""From an image and a question to the first token on a pretended device: what it waits for and launches."""

from __future__ import annotations

import pytest
import torch

from data.tiles import Tiles
from generation.session import Session
from inference.checkpoint import fast_step
from models.vision_language_model import VisionLanguageModel
from tests.cuda_check.pretend import pretended
from tests.prompts import NO_STOP, SIDE, ImageBlock, inputs_of, tiny_vlm, words

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}


def a_model() -> VisionLanguageModel:
    return tiny_vlm(head_dim=16, max_position_embeddings=2000).to(torch.bfloat16).to("cuda")


def question(tiles: int, more: int) -> dict:
    """As a processor makes it: tiles that are bytes still, all on the host."""
    codes = torch.arange(tiles * 3 * SIDE * SIDE).remainder(251).to(torch.uint8).view(tiles, 3, SIDE, SIDE)
    ids = inputs_of([*words(1, 3), *map(ImageBlock, range(tiles)), *words(2, more)])["input_ids"]
    pixels = Tiles.of(codes, torch.linspace(-1, 1, 256).expand(3, -1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("entrance", "recorded", "most"),
    [("generate", True, 1), ("session", True, 1), ("generate", False, 2), ("session", False, 3)],
)
def test_nothing_is_waited_for_but_the_token(entrance, recorded, most, sampling):
    """The eager step asks first whether the token is the last one, and its session for the tokens before."""
    with pretended() as seen:
        model = a_model()
        step, _ = fast_step(model.language_model) if recorded else (None, "")
        asked = Session(model) if entrance == "session" else model
        options = {"max_new_tokens": 3, "decode_step": step, "stop_token_ids": (4,), **sampling}
        list(asked.generate_stream(**question(2, 9), **options))  # what is recorded and planned once
        for counter in (seen.syncs, seen.waits, seen.pageable, seen.attention):
            counter.clear()
        stream = asked.generate_stream(**question(2, 30), **options)  # to a session, a chunk on what it has
        next(iter(stream))
        print(seen.syncs, seen.waits, seen.attention)
        assert not seen.pageable and seen.syncs.total() + seen.waits.total() <= most
        assert {name.split(",")[0] for name in seen.attention} <= {"flash", "efficient"}
        assert seen.attention["flash, torch.bfloat16"] >= model.config.text.num_hidden_layers
        stream.drain()


def test_kernels_of_a_layer():
    """Of a short prompt they decide how long it takes."""
    counts = []
    for layers in (2, 4):
        with pretended() as seen:
            model = tiny_vlm(head_dim=16, num_hidden_layers=layers).to(torch.bfloat16).to("cuda")
            seen.kernels.clear()
            model.generate(**question(2, 30), max_new_tokens=1, **NO_STOP)
        counts.append(seen.kernels.total())
    assert (counts[1] - counts[0]) / 2 <= 24
