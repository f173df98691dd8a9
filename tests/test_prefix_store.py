"""`PrefixStore` in memory: the same answers, names that cannot be made up, and what goes first."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation import kv_cache as kv
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep
from generation.keyed_prompts import Item
from generation.kv_cache import Kept, bytes_per_position
from generation.options import NotFiniteError
from generation.prefix_store import TEXT_BLOCK, PrefixStore, cut
from generation.scheduler import Scheduler
from generation.session import Session
from models import VisionLanguageModel
from tests.invariants import session_holds
from tests.prompts import NO_STOP, PER_TILE, ImageBlock, inputs_of, length_of, tiny_vlm, words
from tests.test_batching import assert_as_alone, request

# Of the small model below: a layer of attention, and a short convolution.
LAYOUT = [{"key": Kept(2, 2), "value": Kept(2, 2)}, {"conv": Kept(1, 3)}]
BYTES = kv.numbers_per_token(LAYOUT) * 4  # of a position


def test_kept_prefixes_make_room_for_who_asks_now(monkeypatch):
    """Else a long question is refused, for as long as the server lives, while what could go lies there."""
    vlm = tiny_vlm(max_position_embeddings=1500)
    store = PrefixStore(vlm)
    scheduler = Scheduler(vlm, 2, prefixes=store)
    most = (2 * 1500 + 5 * 2 * TEXT_BLOCK) * kv.bytes_per_position(vlm.language_model)
    left = lambda device: most - scheduler.kv_cache_bytes - store.size_in_bytes
    monkeypatch.setattr("generation.memory.available_bytes", left)
    short = [request(words(key, 2 * TEXT_BLOCK), key, max_new_tokens=1) for key in range(10)]
    names = [(list(scheduler.run([one])), next(reversed(store._blocks)))[1] for one in short]
    monkeypatch.setattr(store, "put", lambda *given: None)
    asked = [request(words(99, 1100), "long")]
    assert_as_alone(vlm, asked, {output.key: output for output in scheduler.run(asked)})
    kept = [name in store._blocks for name in names]
    assert kept == sorted(kept) and 0 < sum(kept) < 10  # no more goes than has to, the oldest first


# --- the same answers


@pytest.mark.parametrize("kind", ["eager", "native"])
def test_answers_are_those_without_a_store(kind):
    vlm = tiny_vlm()
    step = None
    if kind == "native":
        try:
            step = NativeStep(copy.deepcopy(vlm.language_model))
        except NoCompiler as error:
            pytest.skip(str(error))
    store, options = PrefixStore(vlm), {"max_new_tokens": 6, "decode_step": step, **NO_STOP}
    # Two tiles, and text before, between and after them.
    start = [*words(1, TEXT_BLOCK + 5), ImageBlock(1), 7, ImageBlock(2), *words(2, 2 * TEXT_BLOCK)]
    prompts = [[*start, *words(3, 9)], [*start, *words(4, 40)], start[:-7], start]
    plain = []
    for prompt in prompts:
        session = Session(vlm)
        plain.append((session.generate_detailed(**inputs_of(prompt), **options), session))
    for number, (prompt, (expected, alone)) in enumerate(zip(prompts, plain)):
        session = Session(vlm, prefixes=store)
        got = session.generate_detailed(**inputs_of(prompt), **options)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert (got.reused > 0) == (number > 0) == (got.tiles_encoded == 0)
        assert got.reused + got.prefilled == length_of(prompt)
        session_holds(session, vlm, [*prompt, *got.rows()[0]])
        if kind == "native":
            held = session.held
            for ours, theirs in zip(
                session._scheduler.cache.kv_cache, alone._scheduler.cache.kv_cache, strict=True
            ):
                for name in ("key", "value"):
                    assert torch.equal(ours[name][:, :, :held], theirs[name][:, :, :held])


# --- through a scheduler


def test_a_prompt_asked_again_computes_its_last_position_alone():
    """The last block is found too, though its last position is not used: its logits are not kept."""
    vlm, prompt = tiny_vlm(), words(1, 3 * TEXT_BLOCK)
    store = PrefixStore(vlm)
    for reused in (0, len(prompt) - 1):
        (output,) = Scheduler(vlm, 1, prefixes=store).run([request(prompt, "asked")])
        assert output.reused_tokens == reused


def test_an_answer_and_a_prompt_that_was_given_up_are_kept():
    vlm = tiny_vlm()
    store, prompt = PrefixStore(vlm), words(1, 3 * TEXT_BLOCK)
    scheduler = Scheduler(vlm, 1, prefill_chunk=TEXT_BLOCK + 1, prefixes=store)
    scheduler.add(request(prompt, "given up"))
    for _ in range(2):
        scheduler.step()
    assert scheduler.cancel("given up")
    assert held(store, torch.tensor(prompt)) == 2 * TEXT_BLOCK
    (output,) = scheduler.run([request(prompt, "answered", max_new_tokens=TEXT_BLOCK + 1, **NO_STOP)])
    history = [*prompt, *output.token_ids]
    assert held(store, torch.tensor(history)) == 4 * TEXT_BLOCK
    again = Scheduler(vlm, 1, prefixes=store)
    requests = [request([*history, 5], "next turn")]
    outputs = {output.key: output for output in again.run(requests)}
    assert_as_alone(vlm, requests, outputs)
    assert outputs["next turn"].reused_tokens == 4 * TEXT_BLOCK


def test_less_is_kept_where_less_memory_is_left(monkeypatch):
    """Kept prefixes are worth less than room for what is asked now."""
    block = bytes_per_position(small_model().language_model) * TEXT_BLOCK
    store, left = PrefixStore(small_model()), [10 * block]
    monkeypatch.setattr("generation.prefix_store.available_bytes", lambda device: left[0])
    chains = [torch.arange(2 * TEXT_BLOCK) + 1000 * number for number in range(3)]
    for keys in chains[:2]:
        store.put(keys, [], filled_cache(keys, []), 1)
    assert store.size_in_bytes == 4 * block
    left[0] = 0
    store.put(chains[2], [], filled_cache(chains[2], []), 1)
    assert store.size_in_bytes == 4 * block and held(store, chains[2]) == 2 * TEXT_BLOCK
    assert held(store, chains[0]) == 0


POISON = 77  # a token whose keys and values are not finite, as where a type of small range overflows


def poisoned() -> VisionLanguageModel:
    vlm = tiny_vlm()
    with torch.no_grad():
        vlm.language_model.embed_tokens.weight[POISON] = torch.nan
        vlm.language_model.lm_head.weight[POISON] = 0
    return vlm


@pytest.mark.parametrize("stops", [(), (5,)])
@pytest.mark.parametrize("place", [3, 50])
def test_a_session_keeps_nothing_that_is_not_finite(stops, place):
    """Else the next prompt that begins alike would get it from memory, and from a folder every later process
    would: also once the weights, or what computes with them, are right."""
    vlm, prompt = poisoned(), [word % POISON for word in words(1, 3 * TEXT_BLOCK)]
    good = vlm.language_model.embed_tokens.weight[1].detach().clone()
    store, options = PrefixStore(vlm), {"max_new_tokens": 3, "stop_token_ids": stops}
    session, prompt[place] = Session(vlm, prefixes=store), POISON
    with pytest.raises(NotFiniteError):
        session.generate(**inputs_of(prompt), **options)
    assert session.held == 0 and held(store, torch.tensor(prompt)) <= place
    with torch.no_grad():
        vlm.language_model.embed_tokens.weight[POISON] = good
    expected = Session(vlm).generate(**inputs_of(prompt), **options)
    for again in (session, Session(vlm, prefixes=store)):
        assert torch.equal(again.generate(**inputs_of(prompt), **options), expected)


def test_a_prompt_given_up_in_its_middle_leaves_nothing_that_is_not_finite():
    """No logits have told yet, and zero times NaN would reach the next request's attention."""
    vlm, start = poisoned(), [word % POISON for word in words(1, 2 * TEXT_BLOCK)]
    store = PrefixStore(vlm)
    scheduler = Scheduler(vlm, 2, prefill_chunk=TEXT_BLOCK, prefixes=store)
    scheduler.add(request([*start[:5], POISON, *start], "given up"))
    for _ in range(2):
        scheduler.step()
    assert scheduler.cancel("given up") and not store._blocks
    requests = [request(start[key : 9 + 2 * key], key) for key in range(4)]
    assert_as_alone(vlm, requests, {output.key: output for output in scheduler.run(requests)})


# --- names


@st.composite
def prompts(draw) -> tuple[torch.Tensor, list[Item]]:
    """(keys, items) of a prompt of few different parts, so that prompts begin alike. Images of two sizes take
    different numbers of positions, and may follow one another without text."""
    keys, items = [], []
    for part in draw(st.lists(st.integers(0, 5), max_size=8)):
        if part < 2:  # two tiles whose keys, 62 bits of a digest, are the same
            positions = PER_TILE + 3 * part
            keys += [-1 - 77] * positions
            items.append(Item(bytes(8) + bytes([part]) * 24, positions))
        else:
            keys += [part] * (TEXT_BLOCK // 2)
    return torch.tensor(keys, dtype=torch.int64), items


def spelled(keys: torch.Tensor, items: list[Item]) -> list:
    """Of each position all that it stands for."""
    tiles = [item.digest for item in items for _ in range(item.positions)]
    return [tiles.pop(0) if key < 0 else key for key in keys.tolist()]


@given(prompts(), prompts())
@settings(max_examples=300, deadline=None)
def test_two_prompts_share_the_blocks_of_what_they_share(one, other):
    blocks = [cut(*prompt, b"root") for prompt in (one, other)]
    for prompt, own in zip((one, other), blocks):
        assert [block.start for block in own] == [0, *(block.end for block in own)][: len(own)]
        assert len(prompt[0]) - (own[-1].end if own else 0) < TEXT_BLOCK + PER_TILE + 3
    written = [spelled(*prompt) for prompt in (one, other)]
    for first, second in zip(*blocks):
        alike = first.end == second.end and written[0][: first.end] == written[1][: first.end]
        assert (first.name == second.name) == alike
    assert not {b.name for b in blocks[0]} & {b.name for b in cut(*other, b"another root")}


# --- what is kept, against a list


def held(store: PrefixStore, keys: torch.Tensor) -> int:
    """Positions of a text that are held."""
    return store.find(keys, [], len(keys)).end


def small_model() -> SimpleNamespace:
    decoder = SimpleNamespace(cache_layout=LAYOUT, cache_dtype=torch.float32)
    return SimpleNamespace(language_model=decoder)


def filled_cache(keys: torch.Tensor, items: list[Item], rows: int = 2, row: int = 1) -> kv.KVCache:
    """A cache whose row holds numbers that depend on all that stands before them, as real ones do."""
    cache = kv.allocate(LAYOUT, rows, len(keys) + 3, torch.float32)
    numbers, seen = [], 0
    for what in spelled(keys, items):
        seen = hash((seen, what)) % 2**20
        numbers.append(float(seen))
    for index, layer in enumerate(cache):
        for offset, tensor in enumerate(layer.values()):
            tensor[row, :, : len(keys)] = torch.tensor(numbers)[:, None] + 2 * index + offset
    return cache


def check_loaded(store: PrefixStore, keys: torch.Tensor, items: list[Item], start: int = 0) -> int:
    """Load all that is held into an empty row, beside another one, and compare it with what was computed."""
    found = store.find(keys, items, len(keys))
    expected = filled_cache(keys, items)
    cache = kv.allocate(LAYOUT, 2, len(keys) + 3, torch.float32)
    end, _ = store.take(found, cache, 1, start)
    for layer, right in zip(cache, expected):
        for name, tensor in layer.items():
            assert torch.equal(tensor[1, :, start:end], right[name][1, :, start:end])
            assert not tensor[0].any() and not tensor[1, :, :start].any() and not tensor[1, :, end:].any()
    return end


class Reference:
    """What a store of so many bytes holds: names in the order of their last use."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.sizes = max_bytes, {}

    def use(self, chain: list[tuple[bytes, int]], new: bool) -> None:
        fitting = []
        for name, size in chain:
            if (not new and name not in self.sizes) or sum(s for _, s in fitting) + size > self.max_bytes:
                break
            fitting.append((name, size))
        for name, size in reversed(fitting):
            self.sizes.pop(name, None)
            self.sizes[name] = size
        while sum(self.sizes.values()) > self.max_bytes:
            del self.sizes[next(iter(self.sizes))]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.booleans(), prompts()), min_size=1, max_size=25),
    st.integers(0, 4 * TEXT_BLOCK * BYTES),
)
@settings(max_examples=200, deadline=None)
def test_what_was_used_last_stays_within_the_bytes(steps, max_bytes):
    store, reference = PrefixStore(small_model(), max_bytes), Reference(max_bytes)
    for save, (keys, items) in steps:
        blocks = cut(keys, items, store._root)
        chain = [(block.name, (block.end - block.start) * BYTES) for block in blocks]
        if save:
            store.put(keys, items, filled_cache(keys, items), 1)
            reference.use(chain, new=True)
        else:
            held = check_loaded(store, keys, items)
            expected = [block.end for block in blocks if block.name in reference.sizes]
            assert held == max(expected, default=0)
            reference.use([pair for block, pair in zip(blocks, chain) if block.end <= held], new=False)
        assert list(store._blocks) == list(reference.sizes)
        assert store.size_in_bytes == sum(reference.sizes.values()) <= max_bytes
        # Whatever is held can be found: the blocks before it are held as well.
        held_alone = [block.name in store._blocks for block in blocks]
        assert held_alone == sorted(held_alone, reverse=True)


def test_a_block_does_not_change_with_the_cache_it_came_from():
    store, keys = PrefixStore(small_model()), torch.arange(TEXT_BLOCK)
    cache = filled_cache(keys, [])
    store.put(keys, [], cache, 1)
    for layer in cache:
        for tensor in layer.values():
            tensor.fill_(torch.nan)
    assert check_loaded(store, keys, []) == TEXT_BLOCK


def test_threads_share_a_store():
    store, wrong = PrefixStore(small_model(), 6 * TEXT_BLOCK * BYTES), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(60):
                parts = torch.randint(3, (4,), generator=generator).repeat_interleave(TEXT_BLOCK)
                store.put(parts, [], filled_cache(parts, []), 1)
                check_loaded(store, parts, [])
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.size_in_bytes == sum(t.nbytes for t in store._blocks.values())
    assert store.size_in_bytes <= store.max_bytes
