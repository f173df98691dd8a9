"""Features of images that were encoded before, known by the content of the image.

    features = FeatureCache(model)
    encoded, new = features.encode(prompt.parts, prompt.digests)      # [(positions, D), …], how many were new

A part of an image is what a tower encodes as a whole: a tile. A part's digest is taken over all that its
features depend on besides the weights: the pixels as preprocessing left them, or its bytes and what they
stand for, their shape and dtype.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from generation.options import check_integer
from generation.protocol import Pixels, VisionLanguage

FEATURE_BYTES = 64 * 2**20  # of features kept for a model; SmolVLM-256M's tile takes 147 kB in float32


def digests_of(parts: Pixels) -> list[bytes]:
    """A SHA-256 of each part of images, because visitors choose the pixels: (N, 3, H, W), preprocessed; or
    cut, which know theirs."""
    if not isinstance(parts, Tensor):
        return parts.digests
    digests = []
    for part in parts:
        digest = hashlib.sha256(f"{part.dtype} {tuple(part.shape)}".encode())
        # As uint8, because numpy has no bfloat16.
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        digests.append(digest.digest())
    return digests


class FeatureCache:
    """Features of the parts of images (tiles) used last, on the model's device.

    Several sessions of one model may share one, from several threads. Call `clear` when the weights change.

    Args:
        max_bytes: size limit; the part used longest ago goes first. 0 keeps nothing.
    """

    def __init__(self, model: VisionLanguage, max_bytes: int = FEATURE_BYTES):
        check_integer("max_bytes", max_bytes, low=0)
        self.model, self.max_bytes, self.size_in_bytes = model, max_bytes, 0
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()  # the part used last is the last
        self._lock = Lock()

    def __len__(self) -> int:
        """Parts kept."""
        return len(self._features)

    def missing(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these `digests_of` would have to be encoded."""
        with self._lock:
            return set(digests) - self._features.keys()

    def clear(self) -> None:
        with self._lock:
            self._features.clear()
            self.size_in_bytes = 0

    @torch.no_grad()
    def encode(self, parts: Pixels, digests: Sequence[bytes]) -> tuple[list[Tensor], int]:
        """Features of each part with these `digests_of`, (its positions, D), and how many of them had to be
        encoded: all that are missing in one call, equal ones once."""
        found = {}
        with self._lock:
            for digest in digests:
                if digest in self._features:
                    self._features.move_to_end(digest)
                    found[digest] = self._features[digest]
        missing = {digest: index for index, digest in enumerate(digests) if digest not in found}
        if missing:
            if len(missing) < len(digests):  # else without a copy
                parts = parts[list(missing.values())]
            for digest, features in zip(missing, self.model.encode_images(parts)):
                found[digest] = features
                self._put(digest, features)
        return [found[digest] for digest in digests], len(missing)

    def _put(self, digest: bytes, features: Tensor) -> None:
        with self._lock:
            if features.nbytes > self.max_bytes or digest in self._features:  # by another thread
                return
            while self.size_in_bytes + features.nbytes > self.max_bytes:
                self.size_in_bytes -= self._features.popitem(last=False)[1].nbytes
            # A copy, because a row of the batch would keep the whole batch in memory.
            self._features[digest] = features.clone()
            self.size_in_bytes += features.nbytes
