"""Image features kept by content: a tile that was encoded once is not encoded again.

    kept = FeatureCache(model, max_bytes=64 * 2**20)
    digests = tile_digests(tiles, masks)
    features, encoded = kept.encode(tiles, masks, digests)      # (N, S, D), and how many were new

A tile's digest is taken over all that its features depend on besides the weights: the pixels as preprocessing
left them, their shape and dtype, and its mask.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from generation.options import check_integer


def tile_digests(tiles: Tensor, masks: Tensor | None = None) -> list[bytes]:
    """What tells each tile from every other one: SHA-256, since people choose the pixels.

    Args:
        tiles: (N, 3, H, W), preprocessed.
        masks: (N, H, W), 1 on real pixels; None, or all ones for a tile, where all of it is real.
    """
    digests = []
    for index, tile in enumerate(tiles):
        digest = hashlib.sha256(f"{tile.dtype} {tuple(tile.shape)}".encode())
        digest.update(_bytes(tile))
        if masks is not None and not masks[index].all():
            digest.update(_bytes(masks[index] != 0))
        digests.append(digest.digest())
    return digests


def _bytes(tensor: Tensor):
    """A buffer over a tensor's content; through uint8, since bfloat16 is unknown outside torch."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


class FeatureCache:
    """Features of the tiles used last, on the model's device, within a number of bytes.

    Several sessions on one model may share one, from several threads. It does not see the weights change:
    `clear` it then.

    Args:
        model: whose `encode_images` makes features (N, S, D) of tiles (N, 3, H, W).
        max_bytes: at most so many are kept; what was used longest ago goes first. 0 keeps nothing.
    """

    def __init__(self, model, max_bytes: int):
        check_integer("max_bytes", max_bytes, low=0)
        self.model, self.max_bytes = model, max_bytes
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()  # the one used last stands last
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        """Tiles kept."""
        return len(self._features)

    @property
    def size_in_bytes(self) -> int:
        return self._bytes

    def clear(self) -> None:
        with self._lock:
            self._features.clear()
            self._bytes = 0

    @torch.no_grad()
    def encode(self, tiles: Tensor, masks: Tensor | None, digests: Sequence[bytes]) -> tuple[Tensor, int]:
        """Features (N, S, D) of tiles (N, 3, H, W), and how many had to be encoded: all those in one call.

        Args:
            tiles, masks: as for `tile_digests`.
            digests: what that gave; equal ones are encoded once.
        """
        found = {digest: features for digest in digests if (features := self._get(digest)) is not None}
        missing = {digest: index for index, digest in enumerate(digests) if digest not in found}
        if missing:
            places = list(missing.values())
            own_masks = None if masks is None else masks[places]
            for digest, features in zip(missing, self.model.encode_images(tiles[places], own_masks)):
                found[digest] = features
                self._put(digest, features)
        return torch.stack([found[digest] for digest in digests]), len(missing)

    def _get(self, digest: bytes) -> Tensor | None:
        with self._lock:
            if digest in self._features:
                self._features.move_to_end(digest)
            return self._features.get(digest)

    def _put(self, digest: bytes, features: Tensor) -> None:
        size = features.numel() * features.element_size()
        if size > self.max_bytes:
            return
        with self._lock:
            if digest in self._features:  # another thread was faster
                return
            while self._bytes + size > self.max_bytes:
                _, oldest = self._features.popitem(last=False)
                self._bytes -= oldest.numel() * oldest.element_size()
            # A copy: a row of the batch would keep the whole batch in memory.
            self._features[digest] = features.clone()
            self._bytes += size
