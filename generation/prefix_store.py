"""Kept prefixes: keys and values that any later prompt that begins alike takes over, from memory or files.

    store = PrefixStore(model, max_bytes=2**30)
    matched = store.match(prompt.keys, prompt.items)           # positions from the front
    end = store.load(prompt.keys, prompt.items, kv_cache, row, start=0, end=matched)
    ...                                                          # compute the positions from `end` on
    store.save(prompt.keys, prompt.items, kv_cache, row)

A prompt is cut into blocks. A block ends with each part of an image, as that is encoded whole or not at all,
and after `TEXT_BLOCK` positions of text. Its name is the SHA-256 of the name of the block before it, of its
keys, and of the whole digests of its parts: the keys' 62 bits tell the parts of one process apart, but what
is on disk, or belongs to a stranger, must not be found by anything made to look like it. So a name stands for
all positions up to the block's end, and two prompts share the blocks whose names are equal.

A block is written once and then only read, by any number of threads. The block used longest ago goes first,
and a block never before those that follow it, which could not be found without it.

A model with states goes on only where one was kept (`SlotCache.snapshots`): such a snapshot is a block
without positions of its own, named by all that is before it, and what is found ends there.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from generation.keyed_prompts import Item, KeyedPrompt
from generation.kv_cache import (
    STATE_WINDOW,
    KVCache,
    Layout,
    by_slot,
    bytes_per_position,
    geometry,
    has_states,
    numbers_per_token,
)
from generation.memory import available_bytes
from generation.options import check_integer
from generation.protocol import VisionLanguage
from generation.slots import SlotCache, is_finite, snapshot_numbers

PREFIX_BYTES = 2**30  # in memory: 23 images of 17 tiles for SmolVLM-256M in float32
LOOK_EVERY = 1.0
TEXT_BLOCK = 32  # positions of text that are worth a block of their own
FORMAT = b"ocelli prefix 2"  # another one where blocks are cut, named or laid out otherwise


@dataclass(frozen=True)
class Block:
    """Positions start … end - 1 of a prompt; `name` (32 bytes) stands for all that it holds up to `end`."""

    name: bytes
    start: int
    end: int


class PrefixFiles(Protocol):
    """Blocks in files; `inference.prefix_files` has them."""

    def holds(self, name: bytes) -> bool: ...

    def read(
        self, blocks: Sequence[tuple[bytes, tuple[int, ...]]], dtype: torch.dtype, pin: bool
    ) -> Iterator[Tensor | None]:
        """Blocks by name and shape, in order, in memory of their own (pinned, where a GPU is to read it);
        None for one that is not there, or not as it was written."""

    def keep(
        self, blocks: Sequence[tuple[bytes, Tensor | None]], ready: Callable[[], object] | None = None
    ) -> None:
        """Note that these blocks, one after another from a prompt's front, have been used, and write those
        that come with their numbers, once `ready` has returned. Does not wait for that."""

    def close(self) -> None:
        """Wait until that is done, and take nothing more."""


def cut(keys: Tensor, items: Sequence[Item], root: bytes) -> list[Block]:
    """The whole blocks of a prompt, from its front.

    Args:
        keys: (L,) of `prefix.KeyedPrompt`, possibly with ids of an answer after them.
        items: the parts of the prompt's images.
        root: what the first block follows.
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
        if text == TEXT_BLOCK or (key < 0 and not left):
            name = hashlib.sha256(b"".join((name, raw[8 * start : 8 * end], *shown))).digest()
            blocks.append(Block(name, start, end))
            start, text, shown = end, 0, shown[-1:] if left else []
    return blocks


class PrefixStore:
    """See the module's docstring.

    Args:
        model: whose keys and values these are. Call `clear` when its weights change.
        max_bytes: of blocks in memory. Where less is free, what was used longest ago makes room.
        files: blocks outlive the process there.
        identity: all that the numbers depend on besides the prompt; needed with files, as others write there.
    """

    def __init__(
        self,
        model: VisionLanguage,
        max_bytes: int = PREFIX_BYTES,
        files: PrefixFiles | None = None,
        identity: bytes = b"",
    ):
        check_integer("max_bytes", max_bytes, low=0)
        if files is not None and not identity:
            raise ValueError("identity: expected what the weights and the arithmetic are, with files")
        self.model, self.max_bytes, self.size_in_bytes = model, max_bytes, 0
        self._most, self._next_look = max_bytes, 0.0  # see `_look`
        self._files, self._root = files, hashlib.sha256(FORMAT + identity).digest()
        # As `_flat` has them; the last is the one used last.
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Blocks in memory."""
        return len(self._blocks)

    def clear(self) -> None:
        """Forget what is in memory."""
        with self._lock:
            self._shrink(0)

    def give_back(self) -> bool:
        """Let go of the quarter of what is in memory that was used longest ago; False where nothing is."""
        with self._lock:
            return self._shrink(self.size_in_bytes * 3 // 4)

    def match(self, keys: Tensor, items: Sequence[Item]) -> int:
        """How many positions of a prompt, from its front, `load` may be asked for; see `cut`."""
        end = 0
        for block in self._cut(keys, items):
            if not self._holds(block.name):
                break
            end = block.end
        if not has_states(self._layout):
            return end
        names = self._names_of_states(keys[: min(end, len(keys) - 1)], items)
        return next((at for at in reversed(names) if self._holds(names[at])), 0)

    def _holds(self, name: bytes) -> bool:
        return name in self._blocks or bool(self._files and self._files.holds(name))

    def _names_of_states(self, keys: Tensor, items: Sequence[Item]) -> dict[int, bytes]:
        """Of snapshots at all positions where there may be one, each after all that is before it."""
        window, names = STATE_WINDOW, dict[int, bytes]()
        raw = keys.contiguous().view(torch.uint8).numpy().data  # 8 bytes a key
        name, shown, rest = hashlib.sha256(b"state" + self._root), (keys < 0).cumsum(0).tolist(), iter(items)
        begun = 0  # positions of the parts that have begun
        for end in range(window, len(keys) + 1, window):
            name.update(raw[8 * (end - window) : 8 * end])
            while begun < shown[end - 1]:
                part = next(rest)
                name.update(part.digest)
                begun += part.positions
            names[end] = name.copy().digest()
        return names

    def _load_states(self, keys: Tensor, items: Sequence[Item], position: int) -> Tensor | None:
        """A snapshot; None where it has gone since `match`."""
        name = self._names_of_states(keys[:position], items)[position]
        with self._lock:
            states = self._blocks.get(name)
        if states is None and self._files:
            numbers = snapshot_numbers(self._layout)
            (states,) = self._files.read([(name, (numbers,))], torch.float32, False)
        if states is not None:
            self._use([Block(name, position, position)], {name: states})
        return states

    def load(
        self, keys: Tensor, items: Sequence[Item], kv_cache: KVCache, row: int, start: int, end: int
    ) -> int:
        """Copy positions start … end - 1 of a prompt into a row of a cache, as far as they are held: the end
        that was reached, which is less than `end` where a block has gone since `match` or is damaged."""
        chain = [block for block in self._cut(keys, items) if block.start < end]
        wanted = [block for block in chain if block.end > start]
        with self._lock:
            tensors = {block.name: self._blocks[block.name] for block in wanted if block.name in self._blocks}
        size = numbers_per_token(self._layout)
        absent = [(one.name, (size * (one.end - one.start),)) for one in wanted if one.name not in tensors]
        into = geometry(kv_cache)
        pin = into.device.type == "cuda"
        read = self._files.read(absent, into.dtype, pin) if self._files and absent else iter(())
        reached, numbers = start, []
        for block in wanted:
            if block.name not in tensors and (tensor := next(read, None)) is not None:
                tensors[block.name] = tensor
            if block.name not in tensors:
                break
            part = slice(max(start - block.start, 0), end - block.start)
            flat = tensors[block.name].to(into.device, non_blocking=True)
            numbers.append([layer[:, part] for layer in self._unflat(flat, block.end - block.start)])
            reached = min(end, block.end)
        if numbers:
            # A call for each layer's keys and one for its values, and no copy between.
            for target, parts in zip(_tensors(kv_cache), zip(*numbers), strict=True):
                torch.cat(parts, 1, out=target[row, :, start:reached])
        self._use(chain, tensors)
        if self._files:
            self._files.keep([(block.name, None) for block in chain if block.end <= reached])
        return reached

    def save(
        self,
        keys: Tensor,
        items: Sequence[Item],
        kv_cache: KVCache,
        row: int,
        states: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Keep the whole blocks of a row's first len(keys) positions, and `states`, snapshots by position,
        that are not kept already. What does not fit goes from the end. No block is kept that is not finite,
        nor any after it; of a GPU's row the caller knows that it is."""
        chain, on_gpu = self._cut(keys, items), geometry(kv_cache).device.type == "cuda"
        names = self._names_of_states(keys[: chain[-1].end], items) if states and chain else {}
        chain += [Block(names[at], at, at) for at in states or () if at in names]
        chain.sort(key=lambda block: block.end)
        new, size = {}, 0
        self._look()
        for number, block in enumerate(chain):
            kept = states[block.end] if states and block.start == block.end else None
            nbytes = (block.end - block.start) * bytes_per_position(self.model.language_model)
            size += nbytes if kept is None else kept.nbytes
            fits = size <= self._most and block.name not in self._blocks
            if fits or (self._files and not self._files.holds(block.name)):
                tensor = self._blocks.get(block.name)
                if tensor is None:
                    tensor = _copy_of(kv_cache, row, block) if kept is None else _to_host(kept)
                    if not on_gpu and not is_finite(tensor):  # there it would have to wait
                        del chain[number:]
                        break
                new[block.name] = tensor
        self._use(chain, new)
        if self._files and chain:
            ready = None
            if new and on_gpu:
                event = torch.cuda.Event()
                event.record()
                ready = event.synchronize  # the copies are under way
            self._files.keep([(block.name, new.get(block.name)) for block in chain], ready)

    def _look(self) -> None:
        """How much memory is left for blocks, at most once in `LOOK_EVERY` seconds: asking takes a while."""
        if (now := time.monotonic()) >= self._next_look:
            free = available_bytes(torch.device("cpu"))
            self._most = self.max_bytes if free is None else min(self.max_bytes, self.size_in_bytes + free)
            self._next_look = now + LOOK_EVERY

    def extend(self, slots: SlotCache, slot: int, prompt: KeyedPrompt, shared: int) -> int:
        """Load what is held of a prompt beyond the `shared` positions that its slot was assigned with.
        Returns how many the slot has then; never all, because the last position's logits are not kept."""
        keys, items, last = prompt.keys, prompt.items, len(prompt) - 1
        matched = min(self.match(keys, items), last)
        if matched > shared:
            states, going = None, has_states(self._layout)
            # First, because without it the positions are worth nothing.
            if going and (states := self._load_states(keys, items, matched)) is None:
                return shared
            reached = self.load(keys, items, slots.kv_cache, slot, shared, matched)
            if states is not None:
                if reached < matched:
                    return shared
                slots.restore(slot, matched, states)
            shared = slots.filled[slot] = reached
        return shared

    def close(self) -> None:
        """Wait until the files are written."""
        if self._files:
            self._files.close()

    def _cut(self, keys: Tensor, items: Sequence[Item]) -> list[Block]:
        return cut(keys, items, self._root)

    @property
    def _layout(self) -> Layout:
        return self.model.language_model.cache_layout

    def _unflat(self, flat: Tensor, length: int) -> list[Tensor]:
        """What a block of `length` positions has for each tensor of a cache: (H, length, D)."""
        kept = [one for layer in self._layout for one in layer.values()]
        shapes = [(heads, length, width) for heads, width, count in kept if not count]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

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


def _tensors(kv_cache: KVCache) -> list[Tensor]:
    return [layer[name] for layer, name in by_slot(kv_cache)]


def _copy_of(kv_cache: KVCache, row: int, block: Block) -> Tensor:
    """A block of a row in host memory, one tensor after another; from a GPU, once its stream gets there."""
    block_of_row = torch.cat(
        [tensor[row, :, block.start : block.end].flatten() for tensor in _tensors(kv_cache)]
    )
    return _to_host(block_of_row)


def _to_host(numbers: Tensor) -> Tensor:
    if not numbers.is_cuda:
        return numbers
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
