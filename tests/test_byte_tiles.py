"""Images travel as bytes, and are the same numbers to the bit where they arrive."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch

from data.packing import LEVELS, ByteTiles
from tests.processors import draw_image, processor


def levels(count: int, which: int, side: int = 16) -> torch.Tensor:
    codes = torch.randint(256, (count, 3, side, side), generator=torch.Generator().manual_seed(which))
    return LEVELS[which][codes]


def noise(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(7))


MIXED = torch.cat((noise(1), levels(2, 0), noise(1), levels(1, 1), torch.ones(1, 3, 16, 16), noise(1)))


@pytest.mark.parametrize("tiles", [levels(3, 0), levels(3, 1), noise(2), MIXED, MIXED[4:5], MIXED.flip(0)])
def test_every_tile_comes_back_to_the_bit_and_in_its_place(tiles):
    assert torch.equal(ByteTiles.of(tiles).to("cpu"), tiles)
    parts = [ByteTiles.of(part) for part in tiles.split(2)]
    whole = ByteTiles.cat(parts)
    assert len(whole) == len(tiles) and torch.equal(whole.to("cpu"), tiles)


@pytest.mark.parametrize("kind", ["llama", "embedded", "nanovlm-current"])
def test_the_tiles_of_real_processors_are_bytes(kind):
    made = processor(kind).images.tiles(draw_image(150, 90))[0]
    bytes_ = ByteTiles.of(made)
    assert torch.equal(bytes_.to("cpu"), made)
    assert len(bytes_.others) <= 1  # nanoVLM's whole image is interpolated in floating point
    assert kind.startswith("nanovlm") or bytes_.nbytes < 0.26 * made.nbytes


@pytest.mark.parametrize(("megabytes", "piped"), [(64, True), (10_000, False)])
def test_where_shared_memory_is_short_images_go_through_the_pipe(monkeypatch, megabytes, piped):
    """Docker gives 64 MB of it, and a process that writes more is killed."""
    space = SimpleNamespace(f_bavail=megabytes * 2**8, f_frsize=2**12)
    monkeypatch.setattr("data.packing.os.statvfs", lambda path: space)
    tiles = ByteTiles.of(levels(6, 1, side=512))
    sent = ForkingPickler.dumps(tiles)
    assert (len(sent) > tiles.nbytes) == piped
    assert torch.equal(pickle.loads(sent).to("cpu"), tiles.to("cpu"))
