"""`Session`: less work for the same tokens, interrupts, room, threads; and in generate.py.

That its answers are those of a fresh `generate` is in test_generate.py and test_cache_properties.py.
"""

from __future__ import annotations

import threading

import pytest
import torch

from generation.decoding import eager_step
from generation.fast.cuda_graph import GraphStep
from generation.fast.native.step import NativeStep, NoCompiler
from generation.prefix import FeatureCache
from generation.session import Session
from tests.prompts import (
    NO_STOP,
    PER_TILE,
    SIDE,
    TILE_BYTES,
    ImageBlock,
    assert_holds,
    inputs_of,
    positions_of,
    record,
    tiny_vlm,
    words,
)
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


# --- what is saved


def test_a_conversation_prefills_only_what_is_new(vlm, monkeypatch):
    session, history = Session(vlm), [*words(1, 5), ImageBlock(1), *words(2, 4)]
    passes, images, logits = record(monkeypatch, vlm)
    expected_new = len(positions_of(history))
    for turn in range(3):
        passes.clear(), logits.clear(), images.clear()
        result = session.generate_detailed(**inputs_of(history), max_new_tokens=6, **NO_STOP)
        # After the first turn: the answer's last token, which was never fed back, and five words.
        assert passes == [expected_new] + [1] * 5 and result.prefilled == expected_new
        assert images == ([1] if turn == 0 else [])
        assert (result.tiles_encoded, result.tiles_reused) == ((1, 0) if turn == 0 else (0, 1))
        kept = torch.cat(logits)
        logits.clear()
        fresh = vlm.generate(**inputs_of(history), max_new_tokens=6, **NO_STOP)
        assert torch.equal(result.token_ids, fresh)
        torch.testing.assert_close(kept, torch.cat(logits), rtol=1e-5, atol=1e-5)
        history += [*result.rows()[0], *words(3 + turn, 5)]
        expected_new = 1 + 5


def test_the_same_prompt_again_computes_one_position(vlm):
    session, inputs = (
        Session(vlm),
        inputs_of([*words(1, 5), ImageBlock(1)]),
    )  # ends inside an image's features
    first = session.generate_detailed(**inputs, max_new_tokens=4, **NO_STOP)
    again = session.generate_detailed(**inputs, max_new_tokens=4, **NO_STOP)
    assert (again.reused, again.prefilled, again.tiles_encoded) == (8, 1, 1)
    assert torch.equal(first.token_ids, again.token_ids)
    assert_holds(session, vlm, [*words(1, 5), ImageBlock(1), *again.rows()[0]])


def test_a_tile_is_encoded_once_for_all_its_prompts(vlm, monkeypatch):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    _, images, _ = record(monkeypatch, vlm)
    prompts = [
        [1, ImageBlock(1), 2, ImageBlock(1)],
        [3, ImageBlock(1), ImageBlock(2), ImageBlock(3)],
        [4, ImageBlock(3), 5],
    ]
    results = [
        session.generate_detailed(**inputs_of(p), max_new_tokens=3, **NO_STOP) for p in [*prompts, prompts[0]]
    ]
    assert images == [1, 2]  # the missing ones of a prompt in one call
    assert [(r.tiles_encoded, r.tiles_reused) for r in results] == [(1, 1), (2, 1), (0, 1), (0, 2)]
    assert [r.reused for r in results] == [0] * 4
    for prompt, result in zip(prompts, results):
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(prompt), max_new_tokens=3, **NO_STOP))


def test_equal_ids_with_other_pixels_are_not_confused(vlm):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    answers, options = [], {"max_new_tokens": 12, **NO_STOP}
    for images in ((1, 2), (1, 3), (4, 3), (3, 4), (1, 2)):
        prompt = [*words(1, 6), ImageBlock(images[0]), 7, ImageBlock(images[1]), *words(2, 3)]
        result = session.generate_detailed(**inputs_of(prompt), **options)
        assert torch.equal(result.token_ids, vlm.generate(**inputs_of(prompt), **options))
        answers.append((result.reused, tuple(result.rows()[0])))
    assert [reused for reused, _ in answers] == [0, 6 + PER_TILE + 1, 6, 6, 6]
    assert len({ids for _, ids in answers}) == 4 and answers[0][1] == answers[-1][1]


def test_equal_pixels_with_another_mask_are_not_confused(vlm):
    session = Session(vlm, FeatureCache(vlm, 10 * TILE_BYTES))
    inputs, results = inputs_of([1, ImageBlock(1), 2, ImageBlock(2), 3]), []
    for real in (SIDE, SIDE // 2, SIDE // 4, SIDE):
        mask = torch.zeros(1, 2, SIDE, SIDE, dtype=torch.int64)
        mask[0, 0, : SIDE // 2] = 1
        mask[0, 1, :, :real] = 1
        options = {"pixel_attention_mask": mask, "max_new_tokens": 8, **NO_STOP}
        results.append(session.generate_detailed(**inputs, **options))
        assert torch.equal(results[-1].token_ids, vlm.generate(**inputs, **options))
    assert [r.reused for r in results] == [0, 6, 6, 6]
    assert [r.tiles_encoded for r in results] == [2, 1, 1, 0]
    assert len({tuple(r.rows()[0]) for r in results}) == 3  # the mask can be told from the answer


@pytest.mark.parametrize("answers", [1, 3])
def test_of_several_answers_only_the_prompt_is_kept(vlm, answers):
    session, prompt = Session(vlm), [*words(1, 5), ImageBlock(1), *words(2, 6)]
    options = {
        "max_new_tokens": 20,
        "num_return_sequences": answers,
        "temperature": 1.0,
        "seed": 5,
        **NO_STOP,
    }
    result = session.generate_detailed(**inputs_of(prompt), **options)
    assert session.held == len(positions_of(prompt)) + (19 if answers == 1 else 0)
    assert_holds(session, vlm, prompt + (result.rows()[0] if answers == 1 else []))


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
    make = {"eager": eager_step, "native": NativeStep, "graph": lambda lm: GraphStep(lm, capture=False)}
    try:
        step = make[kind](vlm.language_model)
    except NoCompiler as error:
        pytest.skip(str(error))
    options = {"max_new_tokens": 12, "decode_step": step, "stop_token_ids": (10**6,)}
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


def test_an_unfinished_answer_cannot_go_on_after_another_one(vlm):
    session = Session(vlm)
    first, second = inputs_of([*words(1, 5), 8]), inputs_of([*words(1, 5), 9])
    stream = session.generate_stream(**first, max_new_tokens=9, **NO_STOP)
    tokens = iter(stream)
    next(tokens), next(tokens)
    expected = session.generate(**second, max_new_tokens=9, **NO_STOP)
    with pytest.raises(ValueError, match="unfinished"):
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


# --- refusals


def test_what_a_session_cannot_do_is_refused_and_changes_nothing(vlm):
    session, prompt = Session(vlm), [*words(1, 5), ImageBlock(1), 9]
    answer = session.generate(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    stream = session.generate_stream(**inputs_of(prompt), max_new_tokens=4, **NO_STOP)
    next(iter(stream))
    one = inputs_of([*words(1, 3), ImageBlock(2), 9])
    for inputs, options, field in (
        (one, {"max_new_tokens": 393}, "context"),
        (one, {"use_cache": False}, "use_cache"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, {}, "batch of 2"),
        ({"input_ids": torch.tensor([[10**6]])}, {}, "input_ids"),
        (one | {"pixel_values": one["pixel_values"][..., :8]}, {}, "pixel_values"),
    ):
        with pytest.raises(ValueError, match=field):
            session.generate_stream(**inputs, **options)
    assert torch.equal(stream.drain().token_ids, answer)  # not even the answer that goes on
    assert_holds(session, vlm, [*prompt, *answer[0].tolist()])


def test_a_feature_cache_is_of_its_model(vlm):
    with pytest.raises(ValueError, match="feature_cache"):
        Session(vlm, FeatureCache(tiny_vlm(), 100))
    with pytest.raises(ValueError, match="max_bytes"):
        FeatureCache(vlm, -1)


# --- threads


def test_threads_that_share_a_session_wait_for_each_other(vlm):
    """The second asks while the first is in the middle of a step: both get the answers of a fresh model."""
    prompts = [inputs_of(words(seed, 6)) for seed in (1, 2)]
    expected = [vlm.generate(**prompt, max_new_tokens=6, **NO_STOP) for prompt in prompts]
    session, got, second_is_there = Session(vlm), {}, threading.Event()
    eager = eager_step(vlm.language_model)

    def step(token_ids, kv_cache, start_pos):
        if threading.current_thread() is threads[0]:
            if not threads[1].ident:
                threads[1].start()
            second_is_there.wait(0.05)
        else:
            second_is_there.set()
        return eager(token_ids, kv_cache, start_pos)

    def ask(index: int):
        got[index] = session.generate(**prompts[index], max_new_tokens=6, **NO_STOP, decode_step=step)

    threads = [threading.Thread(target=ask, args=[index]) for index in (0, 1)]
    threads[0].start()
    threads[0].join(PATIENCE)
    threads[1].join(PATIENCE)
    assert [got[index].tolist() for index in (0, 1)] == [tokens.tolist() for tokens in expected]


def test_a_streamed_answer_that_another_thread_cut_short_says_so(vlm):
    session, options = Session(vlm), {"max_new_tokens": 6} | NO_STOP
    stream = session.generate_stream(**inputs_of(words(1, 6)), **options)
    next(iter(stream))
    other = threading.Thread(target=session.generate, kwargs=inputs_of(words(2, 6)) | options)
    other.start()
    other.join(PATIENCE)
    with pytest.raises(ValueError, match="unfinished"):
        stream.drain()


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
    monkeypatch.setattr("generation.memory.available_bytes", lambda device: 1000)
    assert "1000" in complaint(photo, "-q", "how many?", "--num-answers", 9, "--max-new-tokens", 8)


def test_stats_tell_what_was_kept(cli, photo):
    _, _, err = cli(photo, "-q", "how many?", "-q", "what colour?", "--max-new-tokens", 2, "--stats")
    assert err.count("kept from the last question") == 1
