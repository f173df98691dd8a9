"""An image cut up by a checkpoint's own settings, which are held against limits first."""

from __future__ import annotations

from PIL import Image

from data.errors import ImageError, ProcessorError, one_line
from data.inputs import TiledImage
from data.nanovlm import NanoVLMImages
from data.smolvlm import IdeficsImages

LONGEST_SIDE = 4096  # transformers' own bound on what Idefics3 makes of an image
MOST_TOKENS = 65_536
Images = IdeficsImages | NanoVLMImages


def check_sizes(images: Images) -> None:
    """Numbers of a checkpoint that memory is asked for by: an image is enlarged to `longest_side`.

    Raises:
        ProcessorError: one that no real checkpoint has.
    """
    for what, got, most in (
        ("pixels per tile side", images.tile_size, LONGEST_SIDE),
        ("pixels of an image's longest side", images.longest_side, LONGEST_SIDE),
        ("image tokens per tile", images.tokens_per_tile, MOST_TOKENS),
    ):
        if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= most:
            raise ProcessorError(f"{what}: expected an integer from 1 to {most}, got {str(got)[:80]}")
    if not images.resizes:
        raise ProcessorError(
            "preprocessor_config.json: expected do_resize to be true, got false: images of any size would "
            "be cut as they are; set it to true"
        )


def count_tiles(images: Images, width: int, height: int, name: str, most: int) -> tuple[int, int, int]:
    """(tiles, rows, columns) that an image of this size makes, at most `most` tiles.

    Raises:
        ImageError: more tiles than that.
        ProcessorError: the settings make none.
    """
    try:
        count, rows, columns = images.grid(width, height)
    except Exception as error:
        raise _unusable(name, error) from error
    if count > most:
        raise ImageError(
            f"{name}: expected at most {most} tiles, got {count} of {width} x {height} "
            "pixels; shrink the image or raise ImageLimits.max_tiles"
        )
    return count, rows, columns


def cut(images: Images, image: Image.Image, name: str, most: int) -> TiledImage:
    """An RGB image as at most `most` tiles, (n, 3, M, M), counted before they are made.

    Raises:
        ImageError: more tiles than that.
        ProcessorError: the settings make no tiles, another number, or none that the model takes.
    """
    expected = count_tiles(images, *image.size, name, most)
    try:
        tiles, rows, columns = images.tiles(image)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # what else settings may ask for
        raise _unusable(name, error) from error
    got = (len(tiles), rows, columns)
    if got != expected:
        raise ProcessorError(
            f"{name}: the checkpoint's image settings make (tiles, rows, columns) = {got} of "
            f"{image.width} x {image.height} pixels, expected {expected}; is its longest side a multiple of "
            f"its tiles' {images.tile_size}?"
        )
    shape = (3, images.tile_size, images.tile_size)
    if tuple(tiles.shape[1:]) != shape:
        raise ProcessorError(
            f"{name}: the checkpoint's image settings make tiles of shape {tuple(tiles.shape[1:])}, "
            f"expected {shape}"
        )
    return TiledImage(tiles, rows, columns, name)


def _unusable(name: str, error: Exception) -> ProcessorError:
    return ProcessorError(
        f"{name}: the checkpoint's image settings cannot be used ({type(error).__name__}: "
        f"{one_line(error, 200)})"
    )
