"""Kept prefixes: keys and values that any later prompt that begins alike takes over, from memory or files.

    store = PrefixStore(model, max_bytes=2**30)
    found = store.find(prompt.keys, prompt.items, len(prompt) - 1)     # found.end positions from the front
    end, states = store.take(found, kv_cache, row, start=0)
    ...                                                      # compute the positions from `end` on
    store.put(prompt.keys, prompt.items, kv_cache, row)

A prompt is cut into blocks. A block ends with each part of an image, as that is encoded whole or not at all,
and after `TEXT_BLOCK` positions of text. Its name is the SHA-256 of the name of the block before it, of its
keys, and of the whole digests of its parts: the keys' 62 bits tell the parts of one process apart, but what
is on disk, or belongs to a stranger, must not be found by anything made to look like it. So a name stands for
all positions up to the block's end, and two prompts share the blocks whose names are equal.

A block is written once and then only read, by any number of threads. The block used longest ago goes first,
and a block never before those that follow it, which could not be found without it.

A model with states goes on only where a snapshot of them was kept: that is a block without positions of its
own (`start` is `end`), named by all that is before it, and what is found ends there.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from generation.keyed_prompts import Item
from generation.kv_cache import (
    STATE_WINDOW,
    Geometry,
    KVCache,
    by_slot,
    bytes_per_position,
    geometry,
    has_states,
    numbers_per_token,
)
from generation.memory import available_bytes
from generation.options import check_integer
from generation.protocol import VisionLanguage
from generation.states import snapshot_numbers

PREFIX_BYTES = 2**30  # in memory: 23 images of 17 tiles for SmolVLM-256M in float32
TEXT_BLOCK = 32  # positions of text that are worth a block of their own
FORMAT = b"ocelli prefix 3"  # another one where blocks are cut, named or laid out otherwise


class Block(NamedTuple):
    """Positions start … end - 1 of a prompt, or the states at `end`; `name` (32 bytes) stands for all that
    comes before `end`."""

    name: bytes
    start: int
    end: int


class Prefix(NamedTuple):
    """Blocks that hold the first `end` positions of a prompt."""

    blocks: list[Block]
    end: int


def cut(keys: Tensor, items: Sequence[Item], root: bytes, states: bool = False) -> list[Block]:
    """The whole blocks of a prompt, from its front.

    Args:
        keys: (L,) of `KeyedPrompt`, possibly with ids of an answer after them.
        items: the parts of the prompt's images.
        root: what the first block follows.
        states: also the blocks of snapshots, one wherever a window ends.
    """
    raw = keys.contiguous().view(torch.uint8).numpy().data  # 8 bytes a key
    blocks: list[Block] = []
    name, start, text, shown = root, 0, 0, list[bytes]()  # shown: parts that the block has positions of
    rest, left = iter(items), 0  # left: positions of the last of them that are still to come
    for end, key in enumerate(keys.tolist(), 1):
        if key >= 0:
            text += 1
        else:
            if not left:
                digest, left = next(rest)
                shown.append(digest)
            left -= 1
        whole, snapshot = text == TEXT_BLOCK or (key < 0 and not left), states and end % STATE_WINDOW == 0
        if whole or snapshot:
            known = hashlib.sha256(b"".join((name, raw[8 * start : 8 * end], *shown))).digest()
            if snapshot:
                blocks.append(Block(hashlib.sha256(b"state" + known).digest(), end, end))
            if whole:
                blocks.append(Block(known, start, end))
                name, start, text, shown = known, end, 0, shown[-1:] if left else []
    return blocks


class PrefixStore:
    """See the module's docstring.

    Args:
        model: whose keys and values these are. Call `drop` when its weights change.
        max_bytes: of blocks in memory. Where less is free, what was used longest ago makes room.
        files: an `inference.kept.PrefixFolder`: blocks outlive the process there.
        identity: all that the numbers depend on besides the prompt; needed with files, as others write there.
    """

    def __init__(
        self,
        model: VisionLanguage,
        max_bytes: int = PREFIX_BYTES,
        files: Any = None,
        identity: bytes = b"",
    ):
        check_integer("max_bytes", max_bytes, low=0)
        if files is not None and not identity:
            raise ValueError("identity: expected what the weights and the arithmetic are, with files")
        self.model, self.max_bytes, self.size_in_bytes = model, max_bytes, 0
        self._layout = model.language_model.cache_layout
        self._states = has_states(self._layout)
        self._most = max_bytes  # that fit into memory now
        self._files, self._root = files, hashlib.sha256(FORMAT + identity).digest()
        # Of a block in one dimension: what it has for each tensor of a cache, one after another. The last
        # block is the one used last.
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = Lock()

    def find(self, keys: Tensor, items: Sequence[Item], most: int) -> Prefix:
        """What is held of a prompt from its front, `most` positions at most."""
        chain = cut(keys, items, self._root, self._states)
        held = list(takewhile(self._holds, (block for block in chain if block.start < block.end)))
        end = min(held[-1].end, most) if held else 0
        if self._states:
            kept = (block for block in reversed(chain) if block.start == block.end <= end)
            snapshot = next(filter(self._holds, kept), Block(b"", 0, 0))
            end = snapshot.end
            held = [*(block for block in held if block.start < end), snapshot]
        return Prefix(held if end else [], end)

    def _holds(self, block: Block) -> bool:
        return block.name in self._blocks or bool(self._files and self._files.holds(block.name))

    def take(self, found: Prefix, kv_cache: KVCache, row: int, start: int) -> tuple[int, Tensor | None]:
        """Copy positions start … found.end - 1 into a row of a cache, as far as they are held: the end that
        was reached, which is less where a block has gone since `find` or is damaged; and the snapshot of the
        states there, if it was found."""
        into = geometry(kv_cache)
        wanted = [block for block in found.blocks if block.end > start]
        # A snapshot first: without it the positions are worth nothing.
        numbers = self._read(sorted(wanted, key=lambda block: block.start < block.end), into)
        reached, parts, states = start, [], None
        shapes = [kept for layer in self._layout for kept in layer.values() if not kept.fixed]
        for block in wanted:
            if (own := numbers.get(block.name)) is None:
                break
            if block.start == block.end:
                states = own
                continue
            part, flat = slice(max(start - block.start, 0), found.end - block.start), own.to(into.device)
            length = block.end - block.start
            flats = flat.split([kept.heads * length * kept.width for kept in shapes])
            shaped = (one.view(kept.heads, length, kept.width) for one, kept in zip(flats, shapes))
            parts.append([one[:, part] for one in shaped])
            reached = min(found.end, block.end)
        if parts:
            # A call for each layer's keys and one for its values, and no copy between.
            for (layer, name), pieces in zip(by_slot(kv_cache), zip(*parts), strict=True):
                torch.cat(pieces, 1, out=layer[name][row, :, start:reached])
        self._use(found.blocks, numbers)
        if self._files:
            self._files.keep([(block.name, None) for block in found.blocks if block.end <= reached])
        return reached, states

    def put(
        self,
        keys: Tensor,
        items: Sequence[Item],
        kv_cache: KVCache,
        row: int,
        states: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Keep the whole blocks of a row's first len(keys) positions, and `states`, snapshots by position,
        that are not kept already. What does not fit goes from the end. No block is kept that is not finite,
        nor any after it."""
        chain, free = cut(keys, items, self._root, self._states), available_bytes(torch.device("cpu"))
        last = max((block.end for block in chain if block.start < block.end), default=0)
        chain = [one for one in chain if one.end <= last and (one.start < one.end or one.end in states)]
        self._most = self.max_bytes if free is None else min(self.max_bytes, self.size_in_bytes + free)
        new, size, each = {}, 0, bytes_per_position(self.model.language_model)
        for number, block in enumerate(chain):
            kept = states[block.end] if block.start == block.end else None
            size += (block.end - block.start) * each if kept is None else kept.nbytes
            fits = size <= self._most and block.name not in self._blocks
            if fits or (self._files and not self._files.holds(block.name)):
                tensor = self._blocks.get(block.name)
                if tensor is None:
                    own = (layer[name][row, :, block.start : block.end] for layer, name in by_slot(kv_cache))
                    tensor = torch.cat([part.flatten() for part in own]) if kept is None else kept
                    tensor = tensor.cpu()
                    if not is_finite(tensor):
                        del chain[number:]
                        break
                new[block.name] = tensor
        self._use(chain, new)
        if self._files and chain:
            self._files.keep([(block.name, new.get(block.name)) for block in chain])

    def drop(self, keep: float = 0.0) -> bool:
        """Forget what was used longest ago of what is in memory, all but a share of its bytes; False where
        nothing is."""
        with self._lock:
            return self._shrink(int(keep * self.size_in_bytes))

    def close(self) -> None:
        """Wait until the files are written."""
        if self._files:
            self._files.close()

    def _read(self, blocks: list[Block], into: Geometry) -> dict[bytes, Tensor]:
        """The numbers of blocks by name, up to the first that is neither in memory nor in the files."""
        with self._lock:
            found = {block.name: self._blocks[block.name] for block in blocks if block.name in self._blocks}
        absent = [block for block in blocks if block.name not in found]
        if self._files and absent:
            each, of_states = numbers_per_token(self._layout), snapshot_numbers(self._layout)
            sizes = [
                (name, each * (end - start), into.dtype) if start < end else (name, of_states, torch.float32)
                for name, start, end in absent
            ]
            for block, numbers in zip(absent, self._files.read(sizes, into.device.type == "cuda")):
                if numbers is None:
                    break
                found[block.name] = numbers
        return found

    def _use(self, chain: list[Block], numbers: dict[bytes, Tensor]) -> None:
        """Make a chain's blocks, with these new ones, those that were used last, its head the very last."""
        fitting, size = [], 0
        for block in chain:
            tensor = self._blocks.get(block.name, numbers.get(block.name))
            size += 0 if tensor is None else tensor.nbytes
            if tensor is None or size > self._most:
                break
            fitting.append((block.name, tensor))
        with self._lock:
            for name, tensor in reversed(fitting):
                if name not in self._blocks:
                    self._blocks[name] = tensor
                    self.size_in_bytes += tensor.nbytes
                self._blocks.move_to_end(name)
            self._shrink(self._most)

    def _shrink(self, most: int) -> bool:
        """Have at most so many bytes in memory; whether that took any away. The lock is held."""
        before = len(self._blocks)
        while self.size_in_bytes > most:
            self.size_in_bytes -= self._blocks.popitem(last=False)[1].nbytes
        return len(self._blocks) < before


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of it is NaN or infinite. Waits for the device."""
    # NaN and infinity go into any sum; so would numbers far beyond what a cache holds.
    return math.isfinite(tensor.sum(dtype=torch.float32).item())
