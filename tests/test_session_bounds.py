"""A `Session` that is interrupted, outgrows its cache, or is asked what it cannot do; and in generate.py."""

from __future__ import annotations

import weakref

import pytest
import torch

from generation import kv_cache as kv
from generation.decoding import eager_step
from generation.fast.cuda_graph import GraphStep
from generation.fast.native.step import NativeStep, NoCompiler, find_compiler
from generation.kv_cache import CacheMemoryError
from generation.prefix import FeatureCache
from generation.session import Session
from tests.prompts import (
    NO_STOP,
    TILE_BYTES,
    ImageBlock,
    assert_holds,
    inputs_of,
    positions_of,
    record,
    tile,
    tiny_vlm,
    words,
)


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


# --- interrupts


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("call", range(5))
def test_ctrl_c_anywhere_in_the_decoder_leaves_the_session_true(vlm, monkeypatch, call, layer):
    """Call 0 is the prefill; the layers before the interrupt have written to the cache already."""
    session = Session(vlm)
    start = [*words(1, 5), ImageBlock(1), *words(2, 3)]
    session.generate(**inputs_of(start), max_new_tokens=4, **NO_STOP)
    other = [*words(1, 5), ImageBlock(1), 99, *words(4, 6)]
    expected = vlm.generate(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    block, calls = vlm.language_model.layers[layer], []
    forward = block.forward

    def interrupted(*arguments):
        calls.append(1)
        out = forward(*arguments)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block, "forward", interrupted)
        session.generate(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    kept = 9 if call == 0 else len(positions_of(other)) + call - 1
    assert session.held == kept
    assert_holds(session, vlm, other + expected[0].tolist())
    again = session.generate_detailed(**inputs_of(other), max_new_tokens=8, **NO_STOP)
    assert torch.equal(again.token_ids, expected) and again.reused == min(kept, len(positions_of(other)) - 1)


def test_ctrl_c_while_a_image_is_encoded_changes_nothing(vlm, monkeypatch):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    prompt = [*words(1, 5), ImageBlock(1), 9]
    first = session.generate_detailed(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(*arguments):
            raise KeyboardInterrupt

        patch.setattr(vlm, "encode_images", interrupted)
        session.generate(**inputs_of([*words(1, 5), ImageBlock(2), 9]), max_new_tokens=4, **NO_STOP)
    assert session.held == len(positions_of(prompt)) + 3
    assert_holds(session, vlm, prompt + first.rows()[0])


@pytest.mark.parametrize("kind", ["eager", "native", "graph"])
@pytest.mark.parametrize("after", [1, 5])
def test_ctrl_c_while_an_answer_is_shown_keeps_the_session(vlm, kind, after):
    """Raised where the tokens are printed, as a person at a terminal does."""
    if kind == "native" and find_compiler_or_none() is None:
        pytest.skip("no C compiler on this machine")
    make = {"eager": eager_step, "native": NativeStep, "graph": lambda lm: GraphStep(lm, capture=False)}
    options = {
        "max_new_tokens": 12,
        "decode_step": make[kind](vlm.language_model),
        "stop_token_ids": (10**6,),
    }
    session, shown = Session(vlm), []
    first = [*words(1, 5), ImageBlock(1), *words(2, 3)]

    def show() -> None:
        for column in session.generate_stream(**inputs_of(first), **options):
            shown.extend(column.tolist())
            if len(shown) == after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show()
    assert session.held == len(positions_of(first)) + after - 1
    second = [*first, *shown, *words(4, 4)]
    made = session.generate_detailed(**inputs_of(second), **options)
    assert torch.equal(made.token_ids, vlm.generate(**inputs_of(second), max_new_tokens=12, **NO_STOP))
    assert made.reused == len(positions_of(first)) + after - 1
    assert_holds(session, vlm, second + made.rows()[0])


def find_compiler_or_none() -> str | None:
    try:
        return find_compiler()
    except NoCompiler:
        return None


def test_an_unfinished_answer_cannot_go_on_after_another_one(vlm):
    session = Session(vlm)
    first, second = inputs_of([*words(1, 5), 8]), inputs_of([*words(1, 5), 9])
    stream = session.generate_stream(**first, max_new_tokens=9, **NO_STOP)
    tokens = iter(stream)
    next(tokens), next(tokens)
    expected = session.generate(**second, max_new_tokens=9, **NO_STOP)
    with pytest.raises(ValueError, match="left unfinished when its session began another"):
        next(tokens)
    assert session.held == 6 + 8
    assert_holds(session, vlm, [*words(1, 5), 9, *expected[0].tolist()])
    stream = session.generate_stream(**second, max_new_tokens=9, **NO_STOP)
    tokens = iter(stream)
    next(tokens)
    session.reset()
    with pytest.raises(ValueError, match="or was reset"):
        next(tokens)
    assert session.held == 0


# --- room


def test_the_cache_grows_in_steps_up_to_the_context():
    model = tiny_vlm(max_position_embeddings=2500, num_hidden_layers=1)
    session, history, position = Session(model), [ImageBlock(1), *words(1, 1000)], 2 * 1 * 2 * 12 * 4
    assert session.kv_cache_bytes == 0
    for more, new, capacity in ((0, 1, 1024), (0, 10, 1024), (0, 30, 2048), (1100, 20, 2500)):
        history += words(2, more)
        result = session.generate_detailed(**inputs_of(history), max_new_tokens=new, **NO_STOP)
        assert session.kv_cache_bytes == result.kv_cache_bytes == capacity * position
        history += result.rows()[0]
    assert_holds(session, model, history)
    fork = session.generate_detailed(
        **inputs_of(history[:500]), max_new_tokens=9, num_return_sequences=2, **NO_STOP
    )
    assert fork.kv_cache_bytes == (2500 + 2 * 511) * position
    assert torch.equal(
        session.generate(**inputs_of(history[:900]), max_new_tokens=20, **NO_STOP),
        model.generate(**inputs_of(history[:900]), max_new_tokens=20, **NO_STOP),
    )
    session.reset()
    assert session.kv_cache_bytes == session.held == 0


@pytest.mark.parametrize("when", range(4))
def test_a_growth_cut_short_can_be_tried_again(monkeypatch, when):
    cache = kv.allocate(2, 1, 1, 3, 2, torch.float32)
    for layer in cache:
        for tensor in layer.values():
            tensor += torch.arange(3.0)[:, None]
    new_zeros, calls = torch.Tensor.new_zeros, []

    def interrupted(self, *shape):
        calls.append(1)
        if len(calls) == when + 1:
            raise KeyboardInterrupt
        return new_zeros(self, *shape)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "new_zeros", interrupted)
        kv.grow(cache, 10, limit=12)
    assert kv.capacity(cache) == 3
    kv.grow(cache, 8, limit=9)
    for layer in cache:
        for tensor in layer.values():
            assert tensor.shape[2] >= 9 and tensor[0, 0, :3, 1].tolist() == [0, 1, 2]


def test_more_than_the_memory_is_refused_before_any_work(monkeypatch):
    model, per_position = tiny_vlm(max_position_embeddings=2500, num_hidden_layers=1), 2 * 1 * 2 * 12 * 4
    had = 1500 * per_position
    monkeypatch.setattr("generation.kv_cache.available_bytes", lambda device: had)
    session, prompt = Session(model), inputs_of(words(1, 100))
    passes, _, _ = record(monkeypatch, model)
    for ask, options, needed in (
        (session.generate_stream, {"max_new_tokens": 1000}, 2048),  # grows in steps
        (session.generate_stream, {"max_new_tokens": 51, "num_return_sequences": 4}, 1024 + 4 * 150),
        (model.generate_stream, {"max_new_tokens": 1402}, 1501),
        (model.generate_stream, {"max_new_tokens": 251, "num_return_sequences": 5}, 5 * 350 + 100),
    ):
        with pytest.raises(CacheMemoryError, match=f"need {needed * per_position} bytes .*, {had} are to be"):
            ask(**prompt, **options)
    assert not passes and session.kv_cache_bytes == 0
    session.generate(**prompt, max_new_tokens=2, **NO_STOP)
    had = 0  # what is there already needs nothing
    session.generate_stream(**prompt, max_new_tokens=925)  # 1024 positions
    with pytest.raises(
        CacheMemoryError, match=rf"2048 positions need .*, {1024 * per_position} are to be had"
    ):
        session.generate(**prompt, max_new_tokens=926, **NO_STOP)
    assert model.generate(**prompt, max_new_tokens=2, use_cache=False).shape[0] == 1


@pytest.mark.parametrize("kept", [False, True])
def test_pixels_are_let_go_of_once_they_are_prefilled(vlm, kept):
    inputs = inputs_of([*words(1, 5), ImageBlock(1), 9])
    memory = inputs["pixel_values"].numpy().copy()
    inputs["pixel_values"], alive = torch.from_numpy(memory), weakref.ref(memory)
    stream = (Session(vlm) if kept else vlm).generate_stream(**inputs, max_new_tokens=4, **NO_STOP)
    del inputs, memory
    assert alive() is not None
    next(iter(stream))
    assert alive() is None


# --- refusals


def test_what_cannot_be_done_is_refused_and_changes_nothing(vlm, monkeypatch):
    session = Session(vlm)
    prompt = [*words(1, 5), ImageBlock(1), 9]
    answer = session.generate(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    held, turn = session.held, session._turn
    passes, images, _ = record(monkeypatch, vlm)
    one = inputs_of([*words(1, 3), ImageBlock(2), 9])
    two_rows = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    lacking = {"input_ids": one["input_ids"][:, :5], "pixel_values": one["pixel_values"]}
    for inputs, options, complaint in (
        (one, {"max_new_tokens": 393}, "context holds 400 tokens; the prompt has 8, and 393"),
        (one, {"use_cache": False}, "a session is a kept cache"),
        (one, {"top_p": 3.0}, "top_p: expected"),
        (two_rows, {}, "one prompt at a time, got a batch of 2"),
        (lacking, {}, "holds 2 image placeholders .* give 4 features"),
        ({"input_ids": one["input_ids"]}, {}, "holds 4 image placeholders .* give 0 features"),
        ({"input_ids": one["input_ids"][0]}, {}, r"expected \(B, T\)"),
        (one | {"pixel_values": tile(1)}, {}, r"pixel_values: expected \(N, 3, H, W\)"),
        (one | {"pixel_values": one["pixel_values"].repeat(2, 1, 1, 1, 1)}, {}, "expected 1 rows .* got 2"),
        (one | {"attention_mask": torch.zeros(1, 8)}, {}, "all padding"),
    ):
        with pytest.raises(ValueError, match=complaint):
            session.generate_stream(**inputs, **options)
    with pytest.raises(TypeError, match="max_length"):
        session.generate_stream(**one, max_length=3)
    assert not passes and not images and (session.held, session._turn) == (held, turn)
    assert_holds(session, vlm, [*prompt, *answer[0].tolist()])


def test_other_refusals(vlm):
    with pytest.raises(ValueError, match="another model's"):
        Session(vlm, FeatureCache(tiny_vlm(), 100))
    with pytest.raises(ValueError, match="max_bytes: expected an integer"):
        FeatureCache(vlm, -1)
    two = inputs_of([ImageBlock(1), ImageBlock(2), 3], in_front=True)
    with pytest.raises(ValueError, match="one image in front of each row: expected 1 images"):
        Session(tiny_vlm("prefix")).generate_stream(**two)


def test_the_context_can_be_filled():
    session, prompt = Session(tiny_vlm(max_position_embeddings=60)), words(1, 6)
    for _ in range(2):
        answer = session.generate(**inputs_of(prompt), max_new_tokens=60 - len(prompt), **NO_STOP)
        assert answer.shape == (1, 60 - len(prompt)) and session.held == 59
        prompt = prompt + answer[0, :20].tolist()


# --- generate.py


def test_several_questions_share_a_session(as_json, photo):
    questions = ("how many circles?", "what colour is it?", "how many?")
    ask = [part for question in questions for part in ("-q", question)]
    options = ("--dtype", "float32", "--max-new-tokens", 8)
    together = as_json(photo, *ask, *options)
    recomputed = as_json(photo, *ask, *options, "--no-cache")
    assert [made["reused_tokens"] for made in recomputed] == [0, 0, 0]
    assert together[0]["reused_tokens"] == 0
    for made, plain, question in zip(together, recomputed, questions):
        (alone,) = as_json(photo, "-q", question, *options)
        assert alone["reused_tokens"] == 0
        for key in ("answers", "token_ids", "prompt_tokens", "image_tokens"):
            assert made[key] == alone[key] == plain[key]
    for made in together[1:]:
        assert made["image_tokens"] < made["reused_tokens"] < made["prompt_tokens"]


def test_an_answer_larger_than_the_memory_is_one_sentence(complaint, photo, monkeypatch):
    monkeypatch.setattr("generation.kv_cache.available_bytes", lambda device: 1000)
    said = complaint(photo, "-q", "how many?", "--num-answers", 9, "--max-new-tokens", 8)
    assert "bytes of cache, 1000 are to be had: take fewer answers at once, or shorter ones" in said


def test_stats_tell_what_was_kept(cli, photo):
    _, _, err = cli(photo, "-q", "how many?", "-q", "what colour?", "--max-new-tokens", 2, "--stats")
    assert err.count("kept from the last question") == 1
