"""Every way to an answer gives the same tokens; stopping, streams, and what is refused."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from generation.options import CacheMemoryError, GenerationOptions
from generation.prompts import ContextError
from generation.session import Session
from generation.steps import Step
from tests import invariants
from tests.invariants import collate
from tests.prompts import NO_STOP, ImageBlock, count_reads, inputs_of, record, some_rows, tiny_vlm, words
from tests.tiny import PAD_ID, VOCAB


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("entrance", "model", "sampling"), invariants.CASES)
def test_every_way_to_an_answer_gives_the_same_tokens(entrance, model, sampling):
    vlm, rows, options, expected = invariants.case(model, sampling)
    assert invariants.answers(vlm, entrance, rows, **options) == expected
    assert len({tuple(ids) for ids in expected}) > 2 and len({len(ids) for ids in expected}) > 1


@pytest.mark.parametrize("entrance", ["cached", "left padding", "session", "three slots", "graph"])
def test_no_layout_of_attention_is_relied_on(entrance, monkeypatch):
    """GPU kernels return the memory order (B, T, H, D_h), the CPU's (B, H, T, D_h)."""
    vlm, rows, options, expected = invariants.case("placeholder", "greedy")
    attention, calls = F.scaled_dot_product_attention, []

    def laid_out(*arguments, **named):
        calls.append(1)
        return attention(*arguments, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", laid_out)
    assert invariants.answers(vlm, entrance, rows, **options) == expected and calls


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["placeholder", "placeholder without embedding"])
def test_padded_hidden_states_equal_alone(model, side):
    vlm, rows, *_ = invariants.case(model, "greedy")
    invariants.padded_hidden_states_equal_alone(vlm, rows, side)


@pytest.mark.slow
def test_100_tokens_cached_and_recomputed(vlm):
    options = {"max_new_tokens": 100, "temperature": 1.0, "repetition_penalty": 1.1, "seed": 7, **NO_STOP}
    (expected,) = invariants.answers(vlm, "recomputed", some_rows(1), **options)
    assert invariants.answers(vlm, "cached", some_rows(1), **options) == [expected] and len(set(expected)) > 5


def test_a_prompt_is_encoded_and_prefilled_once_for_n_answers(vlm, monkeypatch):
    passes, images = record(monkeypatch, vlm)
    (row,) = some_rows(1)
    vlm.generate(**row, max_new_tokens=3, num_return_sequences=5, temperature=1.0, **NO_STOP)
    assert images == [1] and passes == [row["input_ids"].shape[1], 1, 1]


# --- stopping


def test_rows_stop_on_a_set_of_ids_and_then_pad(vlm):
    batch = collate(some_rows(3))
    free = vlm.generate(**batch, max_new_tokens=20, **NO_STOP)
    # Ids that end row 0 at its 3rd token and row 1 at its 6th, unless they come earlier.
    stops = (int(free[0, 2]), int(free[1, 5]), VOCAB + 9)
    result = vlm.generate_detailed(**batch, max_new_tokens=20, stop_token_ids=stops)
    lengths = []
    for index, tokens in enumerate(free.tolist()):
        ends = [place for place, token in enumerate(tokens) if token in stops]
        lengths.append(ends[0] + 1 if ends else 20)
        assert result.stop_reasons[index] == ("stop" if ends else "length")
        assert result.rows()[index] == tokens[: lengths[-1]]
        assert (result.token_ids[index, lengths[-1] :] == PAD_ID).all()
    assert result.lengths == lengths and lengths[0] <= 3 and lengths[1] <= 6
    assert result.token_ids.shape[1] == max(lengths) == result.decode_steps + 1


@pytest.mark.parametrize("pad", [None, 128_002])
def test_padding_has_an_embedding(vlm, monkeypatch, pad):
    """Idefics3's default pad id, and a stop id of the default config, may be beyond a small vocabulary."""
    batch = collate(some_rows(2))
    free = vlm.generate(**batch, max_new_tokens=6, **NO_STOP)
    monkeypatch.setattr(vlm, "config", replace(vlm.config, pad_token_id=pad))
    tokens = vlm.generate(**batch, max_new_tokens=6, stop_token_ids=(VOCAB + 9, int(free[0, 0])))
    assert (tokens[0, 1:] == free[0, 0]).all() and tokens.shape[1] == 6


def test_stop_ids_default_to_the_checkpoints(vlm, monkeypatch):
    inputs = inputs_of(words(1, 4))
    free = vlm.generate(**inputs, max_new_tokens=5, **NO_STOP)[0].tolist()
    monkeypatch.setattr(vlm, "config", replace(vlm.config, eos_token_ids=(VOCAB + 1, free[2])))
    expected = free[: free.index(free[2]) + 1]
    assert vlm.generate(**inputs, max_new_tokens=5)[0].tolist() == expected
    assert Session(vlm).generate(**inputs, max_new_tokens=5)[0].tolist() == expected


# --- streams


def test_a_stream_gives_the_same_tokens_and_then_the_result(vlm):
    batch = collate(some_rows(3))
    expected = vlm.generate(**batch, max_new_tokens=7, **NO_STOP)
    stream = vlm.generate_stream(**batch, options=GenerationOptions(stop_token_ids=()), max_new_tokens=7)
    assert stream.result is None
    columns = [next(iter(stream))]  # a loop that is left can be taken up
    columns += [column for column in stream if torch.is_grad_enabled()]  # the caller's mode is left alone
    assert torch.equal(torch.stack(columns, 1), expected)
    assert torch.equal(stream.drain().token_ids, expected) and list(stream) == []
    assert set(stream.result.seconds) == {"vision", "prefill", "decode"}
    assert stream.result.prompt_tokens == batch["attention_mask"].sum(1).tolist()


def test_how_often_the_device_is_waited_for(vlm):
    """Once a token, for it and the largest logit, while the next step runs; twice to place images."""
    counts = []
    with count_reads() as reads:
        for stops in ((VOCAB + 1,), ()):
            for new in (5, 15):
                reads.clear()
                options = {"max_new_tokens": new, "stop_token_ids": stops, "temperature": 1.0, "seed": 0}
                vlm.generate(**inputs_of(words(1, 4)), **options)
                counts.append(len(reads))
        batch = collate(some_rows(2))
        reads.clear()
        vlm.embed(batch["input_ids"], batch["pixel_values"])
        assert len(reads) == 2  # which tiles are padding, and how many placeholders each row has
    assert counts[1] - counts[0] == counts[3] - counts[2] == 2 * 10


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


def test_the_context_can_be_filled_and_not_more(monkeypatch):
    model = tiny_vlm(max_position_embeddings=40)
    inputs = inputs_of([ImageBlock(1), *words(1, 9)])
    assert model.generate(**inputs, max_new_tokens=40 - 13, **NO_STOP).shape == (1, 40 - 13)
    monkeypatch.setattr(model, "embed", lambda *a: pytest.fail("work was done"))
    with pytest.raises(ContextError) as error:
        model.generate_stream(**inputs, max_new_tokens=41 - 13)
    assert (error.value.prompt_tokens, error.value.new_tokens, error.value.context) == (13, 28, 40)


def test_options_of_other_libraries_are_refused(vlm):
    with pytest.raises(TypeError, match=r"length_penalty, num_beams; .*max_new_tokens"):
        vlm.generate(**inputs_of(words(1, 4)), num_beams=4, length_penalty=1.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"num_return_sequences": 0},
        {"stop_token_ids": (-1,)},
        {"top_p": 2},
        {"use_cache": False, "decode_step": len},
    ],
)
def test_options_are_checked_by_value(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        GenerationOptions(**bad)


@pytest.mark.parametrize("kept", [False, True])
def test_shapes_are_checked(vlm, kept):
    answerer, ids = (Session(vlm) if kept else vlm), inputs_of(words(1, 4))["input_ids"]
    one = inputs_of([*words(1, 3), ImageBlock(2), 9])
    pixels = one["pixel_values"]
    for inputs, field in (
        ({"input_ids": ids[0]}, "input_ids"),
        ({"input_ids": torch.cat((ids, torch.tensor([[VOCAB]])), 1)}, "input_ids"),
        ({"input_ids": torch.cat((ids, torch.tensor([[-1]])), 1)}, "input_ids"),
        ({"input_ids": ids.float()}, "input_ids"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 2)}, "attention_mask"),
        ({"input_ids": ids, "attention_mask": torch.zeros_like(ids)}, "all padding"),
        ({"input_ids": one["input_ids"]}, "4 image placeholders .* 0 features"),
        (
            {"input_ids": one["input_ids"][:, :5], "pixel_values": pixels},
            "2 image placeholders .* 4 features",
        ),
        (one | {"pixel_values": pixels[0, 0]}, "pixel_values"),
        (one | {"pixel_values": pixels.repeat(2, 1, 1, 1, 1)}, "pixel_values: expected 1 rows .* got 2"),
    ):
        with pytest.raises(ValueError, match=field):
            answerer.generate(**inputs, max_new_tokens=2)


def test_images_of_another_row_are_refused(vlm):
    """The whole batch has as many placeholders as features; its rows have not."""
    good = collate([inputs_of([ImageBlock(1), 5]), inputs_of([ImageBlock(2), ImageBlock(3), 5])])
    for call in (vlm, lambda **inputs: vlm.generate(**inputs, max_new_tokens=1)):
        with pytest.raises(ValueError, match=r"row 0: .* 4 image placeholders .* 8 features"):
            call(**good | {"pixel_values": good["pixel_values"].flip(0)})
    flat = good | {"pixel_values": torch.cat((good["pixel_values"][0, :1], good["pixel_values"][1]))}
    assert torch.equal(vlm.generate(**flat, max_new_tokens=4), vlm.generate(**good, max_new_tokens=4))


def test_more_than_the_memory_is_refused_before_any_work(monkeypatch):
    model, per_position = tiny_vlm(max_position_embeddings=2500, num_hidden_layers=1), 2 * 1 * 2 * 12 * 4
    available = 1500 * per_position
    monkeypatch.setattr("generation.memory.available_bytes", lambda device: available)
    monkeypatch.setattr("generation.decoding.ASK_FROM", 0)
    session, prompt = Session(model), inputs_of(words(1, 100))
    passes, _ = record(monkeypatch, model)
    for answerer, options, needed in (
        (session, {"max_new_tokens": 1000}, 2048),  # grows in steps
        (session, {"max_new_tokens": 51, "num_return_sequences": 4}, 4 * 1024),  # a slot each
        (model, {"max_new_tokens": 1402}, 1501),
        (model, {"max_new_tokens": 251, "num_return_sequences": 5}, 5 * 350 + 100),
    ):
        with pytest.raises(CacheMemoryError, match=f"need {needed * per_position} bytes .*{available} are"):
            answerer.generate(**prompt, **options)
    assert not passes and session.kv_cache_bytes == 0
    session.generate(**prompt, max_new_tokens=2, **NO_STOP)
    available = 0  # what exists already needs nothing
    session.generate_stream(**prompt, max_new_tokens=925)  # 1024 positions
    with pytest.raises(CacheMemoryError):
        session.generate(**prompt, max_new_tokens=926, **NO_STOP)
    assert model.generate(**prompt, max_new_tokens=2, use_cache=False).shape[0] == 1


@pytest.mark.parametrize("new", [1, 2, 9])
def test_n_tokens_take_n_minus_1_decode_steps(vlm, new):
    calls, step = [], Step(vlm.language_model)
    chunk = step.chunk
    step.chunk = lambda *arguments: calls.append(1) or chunk(*arguments)
    vlm.generate(**inputs_of(words(1, 4)), max_new_tokens=new, decode_step=step, **NO_STOP)
    assert len(calls) == new - 1
