"""The cache: a list with one dict per layer, what that keeps of each slot, by name: tensors (B, H, S, D). Of
attention {"key", "value"} (B, H_kv, S, D_h), of a short convolution {"conv"}, its inputs (B, 1, S, D). A
gated delta rule keeps tensors (B, H, n, D) of `STATES`, whose n is no slots: where its row stands, and a
little before that (`models/gated_delta.py`).

Slot s of a row holds token s of that row. The cache does not track its length: the decode loop owns
`start_pos`, and every slot at or after it is free. Going back is therefore only a smaller `start_pos`: a
query at position p looks at slots 0 … p, and whatever continues from there writes each slot before its first
query looks at it. A state goes back within its window; from further back it is `restore`d, as a `snapshot`
had it.

Prompts come here without padding: `compact` moves each row's real positions to slots 0 … length - 1, wherever
the padding was, so that prefill is plain causal for every batch and position equals slot. Rotary places are
the slots, or a function of a prompt's ids and image sizes, and slot + one number a row after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.protocol import Decoder

KVCache = list[dict[str, Tensor]]
# Of each layer, by name: heads, numbers of each, and how many there are where those are not slots.
Layout = Sequence[Mapping[str, tuple[int, int, int | None]]]

STEP = 1024  # positions by which a buffer grows
STATES = frozenset({"state", "recent", "inputs"})  # what does not grow with a row, in float32
VIEW_STEP = 128  # rows of different lengths read the cache up to the longest, rounded up to this


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device; with CUDA through pinned memory, so that nobody waits for it."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def per_row(numbers: Sequence[int], device: torch.device | str) -> int | Tensor:
    """One number of each row: an int where all have the same, else (B,) int64."""
    return numbers[0] if min(numbers) == max(numbers) else to_device(torch.tensor(numbers), device)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def allocate(
    layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> KVCache:
    """An empty cache for `batch` rows of `capacity` positions.

    Zeros, not uninitialised memory: a masked slot takes part in attention with weight 0, and 0 · NaN is NaN.
    """

    def empty(heads: int, width: int, count: int | None) -> Tensor:
        kind = torch.float32 if count else dtype
        return torch.zeros(batch, heads, count or capacity, width, dtype=kind, device=device)

    return [{name: empty(*sizes) for name, sizes in layer.items()} for layer in layout]


def allocate_for(
    text_config, batch: int, capacity: int, like: Tensor, dtype: torch.dtype | None = None
) -> KVCache:
    """`allocate` with the layout of a text config, on the device of `like`, in its dtype or another."""
    return allocate(text_config.cache_layout, batch, capacity, dtype or like.dtype, like.device)


class Geometry(NamedTuple):
    """What all layers of a cache have in common; `strides` are those of its first tensor of slots."""

    rows: int
    capacity: int  # positions that each row has room for
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def geometry(kv_cache: KVCache) -> Geometry:
    """The only place that looks into a cache for it: not every kind of layer has keys."""
    first = first_of(kv_cache)
    return Geometry(first.shape[0], first.shape[2], first.stride(), first.dtype, first.device)


def first_of(kv_cache: KVCache) -> Tensor:
    """The first tensor (B, H, S, D) that has slots."""
    return next(tensor for layer in kv_cache for name, tensor in layer.items() if name not in STATES)


def size_in_bytes(kv_cache: KVCache) -> int:
    """Bytes of the buffers, filled or not."""
    return sum(tensor.nbytes for layer in kv_cache for tensor in layer.values())


def numbers_per_token(layout: Layout) -> int:
    """Numbers that all layers keep of one position of one row."""
    return sum(heads * width for layer in layout for heads, width, count in layer.values() if not count)


def attended_numbers(layout: Layout) -> int:
    """Those of them that each token reads: keys and values. A convolution reads the last positions alone."""
    return numbers_per_token([layer for layer in layout if "key" in layer])


def bytes_per_row(layout: Layout) -> int:
    """Bytes that all layers keep of a row however long it is."""
    return sum(4 * heads * width * (count or 0) for layer in layout for heads, width, count in layer.values())


def bytes_per_position(language_model: Decoder) -> int:
    """Bytes of what this model keeps of one position of one row."""
    return numbers_per_token(language_model.config.cache_layout) * language_model.cache_dtype.itemsize


def grow(kv_cache: KVCache, needed: int, limit: int | None = None) -> None:
    """Make room for `needed` positions in each row and keep what is there; a cache with room stays as it is.

    The new capacity is the next multiple of `STEP`, at most `limit`; see `resize`. Views taken earlier
    (`view`) still show the old buffers.
    """
    if needed <= geometry(kv_cache).capacity:
        return
    if limit is not None and needed > limit:
        raise ValueError(f"kv cache: {needed} positions needed, limited to {limit}")
    resize(kv_cache, round_up(needed, STEP) if limit is None else min(round_up(needed, STEP), limit))


def resize(kv_cache: KVCache, target: int) -> None:
    """Have `target` positions in each row, with what the first of them held.

    The list and its dicts stay the same objects and get new tensors one at a time, so that no second whole
    cache exists meanwhile. Cut short (out of memory, Ctrl-C), it puts back the length that there was; if that
    fails as well, layers are not `even`, and another call makes them so. The first tensor, which `geometry`
    reads, comes last.
    """
    before = geometry(kv_cache).capacity
    try:
        _resize_tensors(kv_cache, target)
    except BaseException:
        _resize_tensors(kv_cache, before)
        raise


def _resize_tensors(kv_cache: KVCache, target: int) -> None:
    for layer in reversed(kv_cache):
        for name, old in reversed(layer.items()):
            batch, heads, length, dim = old.shape
            if length != target and name not in STATES:
                new, kept = old.new_zeros(batch, heads, target, dim), min(length, target)
                new[:, :, :kept] = old[:, :, :kept]
                layer[name] = new


def even(kv_cache: KVCache) -> bool:
    """Whether all layers of a kind are laid out alike, as kernels that know one layout take for granted."""
    strides: dict[str, tuple[int, ...]] = {}
    tensors = [named for layer in kv_cache for named in layer.items()]
    alike = all(tensor.stride() == strides.setdefault(name, tensor.stride()) for name, tensor in tensors)
    return alike and len({tensor.shape[2] for name, tensor in tensors if name not in STATES}) == 1


def view(kv_cache: KVCache, length: int, first: int = 0, count: int | None = None) -> KVCache:
    """`length` positions of `count` rows (None: all) from row `first` on, sharing memory with the cache."""
    count = geometry(kv_cache).rows if count is None else count
    return [
        {name: slots(name, tensor.narrow(0, first, count), length) for name, tensor in layer.items()}
        for layer in kv_cache
    ]


def slots(name: str, tensor: Tensor, end: int) -> Tensor:
    """Slots 0 … end - 1 of (B, H, S, D); of a state all that there is."""
    return tensor if name in STATES else tensor[:, :, :end]


def fork(source: KVCache, length: int, n: int, new_capacity: int) -> KVCache:
    """A new cache with the first `length` positions of every row n times in a row: (B, …) -> (B · n, …)."""
    held = geometry(source)
    if n < 1 or not 0 <= length <= min(held.capacity, new_capacity):
        raise ValueError(f"cannot fork {length} of {held.capacity} positions into {n} rows of {new_capacity}")
    target = []
    for layer in source:
        made = {}
        for name, tensor in layer.items():
            rows, heads, count, width = tensor.shape
            count = count if name in STATES else new_capacity
            made[name] = tensor.new_zeros(rows * n, heads, count, width)
            filled = slots(name, tensor, length)
            slots(name, made[name], length)[:] = filled if n == 1 else filled.repeat_interleave(n, 0)
        target.append(made)
    return target


def copy_row(kv_cache: KVCache, source: int, target: int, length: int) -> None:
    """Copy the first `length` positions of one row, and its states, over those of another."""
    for layer in kv_cache:
        for name, tensor in layer.items():
            part = slots(name, tensor, length)
            part[target] = part[source]


def snapshot(kv_cache: KVCache, row: int, position: int) -> Tensor:
    """What a row's states were at a position where a window begins, one of the last two such that the row has
    come by; flat, to be given back to `restore`."""
    return torch.cat([part.flatten() for part in _states(kv_cache, row, position)])


def restore(kv_cache: KVCache, row: int, position: int, kept: Tensor) -> None:
    """Have a row's states as a `snapshot` of that position has them."""
    targets = _states(kv_cache, row, position)
    for target, part in zip(targets, kept.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


def snapshot_numbers(layout: Layout) -> int:
    """How many numbers a `snapshot` has, each of 4 bytes."""
    return sum(
        heads * width * (1 if name == "state" else (count or 0) // 2)
        for layer in layout
        for name, (heads, width, count) in layer.items()
        if name in ("state", "inputs")
    )


def _states(kv_cache: KVCache, row: int, position: int) -> list[Tensor]:
    """Of each state a row's matrix before a position where a window begins, and the inputs of the window
    before it, which a convolution may read."""
    parts = []
    for layer in kv_cache:
        if "state" in layer:
            window = layer["inputs"].shape[2] // 2
            number = position // window
            before = (number - 1) % 2 * window
            parts += [layer["state"][row, :, number % 2], layer["inputs"][row, :, before : before + window]]
    return parts


class CachePosition:
    """Where the next token of each row goes in a cache that has `lengths` filled positions a row. It is grown
    up to `limit` when it is full, and empty when nothing is cached. A row's rotary place is its slot plus its
    one of `offsets`."""

    def __init__(
        self,
        kv_cache: KVCache,
        lengths: Sequence[int],
        device,
        limit: int | None = None,
        offsets: Sequence[int] = (0,),
    ):
        self.kv_cache, self.limit = kv_cache, limit
        self.longest = max(lengths)
        self.start_pos, self.offset = per_row(lengths, device), per_row(offsets, device)
        self._view: KVCache | None = None

    def advance(self, count: int = 1) -> tuple[KVCache, int | Tensor]:
        """(cache, start_pos) for the next `count` tokens of each row."""
        if self.kv_cache:
            grow(self.kv_cache, self.longest + count, self.limit)  # a view is too short by then as well
        self.longest += count
        start_pos = self.start_pos
        self.start_pos = start_pos + count
        if not self.kv_cache or isinstance(start_pos, int):
            return self.kv_cache, start_pos
        # With a tensor of positions attention reads all of the buffer: pass only what the longest row needs.
        if self._view is None or geometry(self._view).capacity < self.longest:
            self._view = view(self.kv_cache, view_length(self.longest, self.kv_cache))
        return self._view, start_pos

    def rewind(self, count: int) -> None:
        """Give back each row's last `count` positions."""
        self.longest -= count
        self.start_pos = self.start_pos - count


def view_length(longest: int, kv_cache: KVCache) -> int:
    """Positions of the cache that rows of different lengths read, the longest of them of `longest`."""
    return min(round_up(longest, VIEW_STEP), geometry(kv_cache).capacity)


@dataclass(frozen=True)
class Prompt:
    """Embeddings (B, L, D) with each row's real positions in front, and how many those are.

    places: rotary places (3, B, L) where they are not the slots; None where they are.
    offsets: of each row, what is added to the slot of a token after the prompt.
    """

    embeddings: Tensor
    lengths: tuple[int, ...]
    places: Tensor | None = None
    offsets: tuple[int, ...] = (0,)

    def repeat(self, n: int) -> Prompt:
        """Every row n times in a row."""
        lengths, offsets = (
            tuple(number for number in numbers for _ in range(n)) for numbers in (self.lengths, self.offsets)
        )
        places = None if self.places is None else self.places.repeat_interleave(n, 1)
        return Prompt(self.embeddings.repeat_interleave(n, 0), lengths, places, offsets)


class ContextError(ValueError):
    """Prompt and answer are longer than the model's context."""

    def __init__(self, prompt_tokens: int, new_tokens: int, context: int):
        super().__init__(
            f"the context holds {context} tokens, but the prompt has {prompt_tokens} and up to {new_tokens} "
            "new ones may follow: shorten the prompt or lower max_new_tokens"
        )
        self.prompt_tokens, self.new_tokens, self.context = prompt_tokens, new_tokens, context


def prompt_lengths(
    config, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> list[int]:
    """Real positions of each row, images included: checks shapes, and that an answer fits the context (else a
    ContextError), before any work.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 0 on padding, wherever that is; or None.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected (B, T) with at least one token, got {tuple(input_ids.shape)}")
    least, most = torch.stack(input_ids.aminmax()).tolist()
    known = max(
        config.text.vocab_size, config.image_token_id + 1
    )  # the placeholder may follow the vocabulary
    if input_ids.is_floating_point() or least < 0 or most >= known:
        raise ValueError(f"input_ids: expected ids below {known}, got {least} to {most}")
    batch, length = input_ids.shape
    lengths = [length] * batch
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape of input_ids, {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        lengths = attention_mask.bool().sum(1).tolist()
    if min(lengths) == 0:
        raise ValueError(f"row {lengths.index(0)} of the batch is all padding: there is nothing to continue")
    context = config.text.max_position_embeddings
    if max(lengths) + max_new_tokens > context:
        raise ContextError(max(lengths), max_new_tokens, context)
    return lengths


def compact(
    embeddings: Tensor,
    attention_mask: Tensor | None,
    lengths: list[int],
    places: Sequence[tuple[Tensor, int]] | None = None,
) -> Prompt:
    """Move each row's real positions to the front, in order: padding anywhere becomes right padding.

    Args:
        embeddings: (B, T, D).
        attention_mask: (B, T), or None where nothing is padding.
        lengths: of `prompt_lengths`.
        places: of `VisionLanguage.places`, a row's each.
    """
    longest = max(lengths)
    rotary: tuple[Tensor | None, tuple[int, ...]] = (None, (0,))
    if places is not None:
        padded = torch.stack([F.pad(own, (0, longest - own.shape[1])) for own, _ in places], 1)
        rotary = to_device(padded, embeddings.device), tuple(offset for _, offset in places)
    if attention_mask is None or min(lengths) == embeddings.shape[1]:
        return Prompt(embeddings, tuple(lengths), *rotary)
    padding = ~attention_mask.bool()
    order = torch.argsort(padding, dim=1, stable=True)[:, :longest]  # real ones first, order kept
    order = to_device(order, embeddings.device)[..., None].expand(-1, -1, embeddings.shape[2])
    return Prompt(embeddings.gather(1, order), tuple(lengths), *rotary)
