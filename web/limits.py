"""What one visitor may ask of a page at once. Each limit is named in the message of whoever meets it."""

from __future__ import annotations

from dataclasses import dataclass

from data.images import ImageLimits


@dataclass(frozen=True)
class PageLimits:
    """max_file_bytes, max_pixels: of one image.
    max_images: shown together.
    max_characters: of one question.
    max_answers, max_new_tokens: made at once, and of each.
    max_turns: of the conversation that is shown; the first ones are forgotten behind it.
    max_uploaded_bytes, max_uploaded_files: kept of all visitors together; see `Uploads` for what goes first.
    """

    max_file_bytes: int = 10 * 2**20
    max_pixels: int = 24_000_000
    max_images: int = 8
    max_characters: int = 4_000
    max_answers: int = 8
    max_new_tokens: int = 1_024
    max_turns: int = 50
    max_uploaded_bytes: int = 2**30
    max_uploaded_files: int = 2_000

    @property
    def images(self) -> ImageLimits:
        """For the image loader, which is given bytes: neither URLs nor paths come from a visitor."""
        return ImageLimits(
            max_bytes=self.max_file_bytes, max_pixels=self.max_pixels, allow_urls=False, allow_paths=False
        )
