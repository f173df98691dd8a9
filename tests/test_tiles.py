"""Tiles travel as bytes, are the same numbers to the bit where they arrive, and equal ones are known."""

from __future__ import annotations

import pickle
from hashlib import sha256
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from data.tiles import Tiles
from tests.processors import KINDS, draw_image, processor

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


def mixed() -> tuple[Tiles, torch.Tensor]:
    """Tiles of both kinds, the bytes' values in several tensors, and their numbers."""
    parts = (codes(2, 0), codes(1, 1))
    tiles = [Tiles.of(part, VALUES.clone()) for part in parts]
    return (
        Tiles.cat((Tiles.of(noise(1)), tiles[0], Tiles.of(noise(2)), tiles[1])),
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
        assert torch.equal(own._on_device(device, dtype, True).cpu(), same.to(dtype))


@pytest.mark.parametrize(("megabytes", "piped"), [(64, True), (10_000, False)])
def test_where_shared_memory_is_short_images_go_through_the_pipe(monkeypatch, megabytes, piped):
    """Docker gives 64 MB of it, and a process that writes more is killed."""
    space = SimpleNamespace(f_bavail=megabytes * 2**8, f_frsize=2**12)
    monkeypatch.setattr("data.tiles.os.statvfs", lambda path: space)
    tiles = Tiles.of(codes(6, 1, side=512), VALUES)
    sent = ForkingPickler.dumps(tiles)
    assert (len(sent) > tiles.nbytes) == piped
    assert torch.equal(pickle.loads(sent).to("cpu"), tiles.to("cpu"))
    tiles, expected = mixed()
    there = pickle.loads(ForkingPickler.dumps(tiles))
    assert torch.equal(there.to("cpu"), expected) and there.digests == tiles.digests


@pytest.mark.parametrize("kind", KINDS)
def test_processors_cut_bytes_and_know_equal_tiles(kind):
    """A photograph has no equal tiles; a blank page has few different ones, its whole view perhaps."""
    tiles = processor(kind).images.tiles(draw_image(150, 90))[0]
    assert len(set(tiles.digests)) == len(tiles)
    assert sum(tile.values is None for tile in tiles) <= 1  # nanoVLM's whole image is computed with
    assert tiles.nbytes < 0.5 * tiles.to("cpu").nbytes
    again = processor(kind).images.tiles(draw_image(150, 90))[0]
    assert again.digests == tiles.digests
    blank = processor(kind).images.tiles(Image.new("RGB", (150, 90), (250, 250, 250)))[0]
    assert len(set(blank.digests)) <= 2 and not set(blank.digests) & set(tiles.digests)


def test_digests_tell_bytes_what_they_stand_for_and_shape_apart():
    one = codes(1, 3)
    changed, values = one.clone(), VALUES.clone()
    changed[0, 2, -1, -1] ^= 1
    values[2, 255] += 1e-6
    different = [
        Tiles.of(one, VALUES),
        Tiles.of(changed, VALUES),
        Tiles.of(one, values),
        Tiles.of(one.view(1, 3, 8, 32), VALUES),
        Tiles.of(numbers(one)),
    ]
    assert len({digest for tiles in different for digest in tiles.digests}) == len(different)
    twice = Tiles.of(torch.cat((codes(1, 4), one)), VALUES.clone())
    assert twice.digests[1:] == different[0].digests


def test_a_tile_is_hashed_once_however_often_it_is_joined(monkeypatch):
    tiles, hashed = Tiles.of(codes(3, 5), VALUES), []
    monkeypatch.setattr("data.tiles.hashlib.sha256", lambda text: hashed.append(text) or sha256(text))
    joined = Tiles.cat((tiles, tiles[:1], tiles[[2]]))
    assert joined.digests == [*tiles.digests, tiles.digests[0], tiles.digests[2]]
    assert len(hashed) == 3


def test_numbers_are_writable_and_the_bytes_stay():
    """What a caller does to its numbers reaches no other's."""
    pixels = codes(2, 6)
    tiles = Tiles.of(pixels, VALUES)
    tiles.to("cpu").zero_()
    assert torch.equal(tiles.to("cpu"), numbers(pixels))
