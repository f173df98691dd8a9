"""Tiles travel as bytes, are the same numbers to the bit where they arrive, and equal ones are known."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from PIL import Image

from data.part_tensors import on_device
from data.tiles import Parts
from generation.options import GenerationOptions
from generation.requests import Request
from generation.scheduler import Scheduler
from generation.session import Session
from tests.processors import KINDS, draw_image, processor
from tests.prompts import NO_STOP, SIDE, ImageBlock, inputs_of, record, words

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VALUES = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))


def codes(count: int, which: int, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(which)
    return torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def numbers(pixels: torch.Tensor) -> torch.Tensor:
    """Float64 would hide nothing: each is one of 256 numbers of its colour."""
    return torch.stack([VALUES[colour][pixels[:, colour].long()] for colour in range(3)], dim=1)


def noise(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(7))


def mixed() -> tuple[Parts, torch.Tensor]:
    """Tiles of both kinds, the bytes' values in several tensors, and their numbers."""
    parts = (codes(2, 0), codes(1, 1))
    tiles = [Parts.of(part, VALUES.clone()) for part in parts]
    return (
        Parts.cat((Parts.of(noise(1)), tiles[0], Parts.of(noise(2)), tiles[1])),
        torch.cat((noise(1), numbers(parts[0]), noise(2), numbers(parts[1]))),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_tile_comes_back_to_the_bit_and_in_its_place(dtype):
    tiles, expected = mixed()
    for own, same in ((tiles, expected), (tiles[1:3], expected[1:3]), (tiles[[5, 0]], expected[[5, 0]])):
        assert torch.equal(own.to("cpu", dtype), same.to(dtype))
        assert own.shape == same.shape and len(own) == len(same) and own.numel() == same.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_device_gets_bytes_and_makes_the_same_numbers(device, dtype):
    tiles, expected = mixed()
    for own, same in ((tiles, expected), (tiles[1:3], expected[1:3]), (tiles[:1], expected[:1])):
        assert torch.equal(on_device(own.parts, torch.device(device), dtype).cpu(), same.to(dtype))


def test_between_processes_images_go_through_the_pipe():
    """Docker gives 64 MB of shared memory, and a process that writes more is killed."""
    tiles = Parts.of(codes(6, 1, side=512), VALUES)
    sent = ForkingPickler.dumps(tiles)
    assert len(sent) > tiles.numel()
    assert torch.equal(pickle.loads(sent).to("cpu"), tiles.to("cpu"))
    tiles = Parts.cat((Parts.of(codes(1, 2, side=32), VALUES), mixed()[0]))  # of two sizes
    there = pickle.loads(ForkingPickler.dumps(tiles))
    assert all(map(torch.equal, there.to("cpu"), tiles.to("cpu"))) and there.digests == tiles.digests


@pytest.mark.parametrize("kind", KINDS)
def test_processors_cut_bytes_and_know_equal_tiles(kind):
    """A photograph has no equal tiles; a blank page has few different ones, its whole view perhaps."""
    tiles = processor(kind).images.cut(draw_image(150, 90)).parts
    assert len(set(tiles.digests)) == len(tiles)
    assert sum(tile.values is None for tile in tiles) <= 1  # nanoVLM's whole image is computed with
    again = processor(kind).images.cut(draw_image(150, 90)).parts
    assert again.digests == tiles.digests
    blank = processor(kind).images.cut(Image.new("RGB", (150, 90), (250, 250, 250))).parts
    assert len(set(blank.digests)) <= 2 and not set(blank.digests) & set(tiles.digests)


# ------------------------------------------------------------------------------ equal tiles are encoded once
def prompt_of(tiles: list[int], *text: int) -> dict:
    """Model inputs of one prompt: tiles by their seeds, as `prompts.inputs_of` gives them, then text."""
    return inputs_of([*map(ImageBlock, tiles), *text])


@pytest.mark.parametrize("entrance", ["model", "session", "scheduler"])
def test_bytes_give_the_answer_of_their_numbers(vlm, monkeypatch, entrance):
    pixels = codes(3, 8, SIDE)
    tiles = Parts.cat([Parts.of(pixels, VALUES), Parts.of(pixels[1:2], VALUES)])
    ids = prompt_of([1, 2, 3, 4], *words(1, 5))["input_ids"]
    options = {"max_new_tokens": 8, **NO_STOP}
    expected = vlm.generate(ids, tiles.to("cpu"), **options)
    _, images = record(monkeypatch, vlm)
    if entrance == "scheduler":
        request = Request(ids[0], tiles, options=GenerationOptions(**options))
        (output,) = Scheduler(vlm, 2).run([request])
        assert output.token_ids == expected[0].tolist()
    else:
        generate = vlm.generate if entrance == "model" else Session(vlm).generate
        assert torch.equal(generate(ids, tiles, **options), expected)
    assert images == ([4] if entrance == "model" else [3])
    with pytest.raises(ValueError):
        vlm.generate(ids, tiles, torch.ones(4, SIDE, SIDE), **options)
