"""Uploaded images before they are asked about: smaller copies, and how large the images themselves are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.errors import ImageError
from tests.pages import EXAMPLE, make_service
from web.pictures import original_size

EDGE = 1024  # of what the embedded model's page keeps


@pytest.fixture(scope="module")
def service():
    service = make_service()
    service.models.open(service.models.default)
    yield service
    service.close()


def picture(width: int, height: int) -> Image.Image:
    """Red on the left, blue on the right, with a white line between them at the top."""
    image = Image.new("RGB", (width, height), "red")
    image.paste("blue", (width // 2, 0, width, height))
    image.paste("white", (width // 4, 0, 3 * width // 4, height // 4))
    return image


def looks_alike(one: Image.Image, other: Image.Image) -> bool:
    small = [np.asarray(image.convert("RGB").resize((32, 32)), int) for image in (one, other)]
    return abs(small[0] - small[1]).mean() < 8


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", [(4000, 3000), (3000, 4000), (1025, 7), (2049, 2047)])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif"])
def test_a_large_image_becomes_a_copy_that_knows_how_large_it_was(service, tmp_path, size, suffix):
    path = tmp_path / f"photo{suffix}"
    picture(*size).save(path)
    copy = service.take_in(str(path))
    assert [str(file) for file in tmp_path.iterdir()] == [copy]
    image = Image.open(copy)
    assert max(image.size) == service.edge == EDGE and looks_alike(image, picture(*size))
    assert original_size(copy, image.size) == size
    assert service.take_in(copy) == copy and original_size(copy, image.size) == size


def test_a_copy_outlives_its_image_where_file_systems_know_no_case(service, tmp_path, monkeypatch):
    path, unlink = tmp_path / "IMG_1.JPG", Path.unlink

    def without_case(self, missing_ok=False):
        for file in self.parent.iterdir():
            if file.name.lower() == self.name.lower():
                unlink(file)

    picture(4000, 3000).save(path)
    monkeypatch.setattr(Path, "unlink", without_case)
    assert Image.open(service.take_in(str(path))).size == (1024, 768)


def test_what_a_browser_shows_stays_as_it_is_and_the_rest_is_made_such(service, tmp_path):
    plain, turned = tmp_path / "plain.png", tmp_path / "turned"
    plain.write_bytes(Path(EXAMPLE).read_bytes())
    assert service.take_in(str(plain)) == str(plain) and plain.read_bytes() == Path(EXAMPLE).read_bytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    content = io.BytesIO()
    picture(60, 40).transpose(Image.Transpose.ROTATE_90).save(content, "TIFF", exif=exif)
    turned.write_bytes(content.getvalue())
    copy = Path(service.take_in(str(turned)))
    image = Image.open(copy)
    assert copy.suffix == ".png" and image.size == (60, 40) and looks_alike(image, picture(60, 40))
    assert not turned.exists()


@pytest.mark.parametrize("content", [b"", b"no image", Path(EXAMPLE).read_bytes()[:900]])
def test_what_cannot_be_read_is_not_kept(service, tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"broken\.png"):
        service.take_in(str(path))
    assert not path.exists()


@pytest.mark.parametrize("said", ["400x300", "99999x99999", "4000x1000", "10x8", "0x0", "40x30", "x"])
def test_a_size_that_cannot_be_that_of_a_copys_image_is_not_believed(tmp_path, said):
    """Whoever uploads a file writes its first bytes."""
    path, content = tmp_path / "a.jpg", io.BytesIO()
    picture(40, 30).save(content, "JPEG")
    comment = f"ocelli {said}".encode()
    data = content.getvalue()
    path.write_bytes(data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + data[2:])
    assert Image.open(path).size == (40, 30)
    assert original_size(str(path), (40, 30)) == ((400, 300) if said == "400x300" else (40, 30))
