"""`generate` against itself: cached or not, alone or in a batch, once or N times; stopping; refusals."""

from dataclasses import replace

import pytest
import torch

from generation.decoding import GenerationOptions, eager_step
from generation.prompt import seen_tokens
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests import invariants

IMAGE, PAD, VOCAB = 126, 0, 127
NO_STOP = {"stop_token_ids": ()}


def tiny_vlm(placement="placeholder", **text) -> VisionLanguageModel:
    """Random weights wide enough that greedy choices have margins."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    } | text
    config = VLMConfig(
        vision=VisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
        text=TextConfig(**fields),
        image_token_id=IMAGE if placement == "placeholder" else None,
        image_placement=placement,
        eos_token_ids=(5,),
        pad_token_id=PAD,
    )
    model = VisionLanguageModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.2, generator=generator)
    return model


def row(text_length: int, images: int, seed: int, per_tile: int = 4, size: int = 16, prefix=False) -> dict:
    """One prompt with its images' placeholders spread among the text."""
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for length in [text_length // (images + 1) + 1] * (images + 1):
        pieces += [torch.randint(1, IMAGE, (length,), generator=generator), torch.full((per_tile,), IMAGE)]
    ids = torch.cat(pieces[:-1])
    if prefix:
        ids = ids[ids != IMAGE]
    inputs = {"input_ids": ids[None]}
    if images:
        inputs["pixel_values"] = torch.randn(1, images, 3, size, size, generator=generator)
    return inputs


def ragged_rows(**options) -> list[dict]:
    shapes = ((5, 1), (12, 0), (9, 3), (1, 0))  # text length, images
    return [row(*shape, seed, **options) for seed, shape in enumerate(shapes)]


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}], ids=str
)
def test_cached_equals_recomputed_for_200_tokens(vlm, sampling):
    tokens = invariants.cached_equals_recomputed(vlm, row(9, 2, 1), max_new_tokens=200, **NO_STOP, **sampling)
    assert tokens.shape == (1, 200) and len(tokens.unique()) > 5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_cached_equals_recomputed_for_ragged_rows(vlm, sampling, side):
    batch = invariants.collate(ragged_rows(), side)
    invariants.cached_equals_recomputed(
        vlm, batch, max_new_tokens=30, num_return_sequences=2, **NO_STOP, **sampling
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_alone(vlm, side):
    invariants.padded_equals_alone(vlm, ragged_rows(), side)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_alone_with_the_image_in_front(side):
    rows = [row(length, 1, length, prefix=True) for length in (5, 11, 1, 7)]
    invariants.padded_equals_alone(tiny_vlm("prefix"), rows, side)


def test_long_ragged_rows_outgrow_their_views_and_buffers():
    """Views of 128 positions and buffers of 1,024 are both outlived."""
    model = tiny_vlm(max_position_embeddings=2000, num_hidden_layers=1)
    rows = [row(1000, 0, 1), row(980, 0, 2)]
    invariants.padded_equals_alone(model, rows, "left")
    batch, new = invariants.collate(rows), 60
    result = model.generate_detailed(**batch, max_new_tokens=new, **NO_STOP)
    needed = result.prompt_tokens[0] + new - 1
    assert needed > 1024 and result.kv_cache_bytes == 2 * needed * 2 * 2 * 8 * 4
    alone = [model.generate(**one, max_new_tokens=new, **NO_STOP)[0] for one in rows]
    assert torch.equal(result.token_ids, torch.stack(alone))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "min_p": 0.02}], ids=str)
def test_forked_answers_equal_separate_runs(vlm, sampling):
    invariants.forked_equals_separate(vlm, row(6, 2, 1), 3, max_new_tokens=25, **NO_STOP, **sampling)
    batch = invariants.collate(ragged_rows())
    text_only = {"input_ids": batch["input_ids"] % IMAGE, "attention_mask": batch["attention_mask"]}
    invariants.forked_equals_separate(vlm, text_only, 2, max_new_tokens=10, **NO_STOP, **sampling)


def test_seen_tokens_are_those_of_the_prompt_without_padding():
    seen = seen_tokens(torch.tensor([[0, 0, 3], [4, 0, 4]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), 6, 2)
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[3], [3], [0, 4], [0, 4]]


def test_a_penalty_does_not_count_padding(vlm):
    options = {"max_new_tokens": 30, "repetition_penalty": 1.8, **NO_STOP}
    rows = ragged_rows()
    batch = vlm.generate(**invariants.collate(rows), **options)
    for index, one in enumerate(rows):
        assert torch.equal(batch[index], vlm.generate(**one, **options)[0])


def test_prompts_encode_and_prefill_once_for_n_answers(vlm, monkeypatch):
    images, passes = [], []
    encode, forward = vlm.encode_images, vlm.language_model.forward
    monkeypatch.setattr(vlm, "encode_images", lambda *a: images.append(1) or encode(*a))
    monkeypatch.setattr(
        vlm.language_model, "forward", lambda x, **k: passes.append(tuple(x.shape[:2])) or forward(x, **k)
    )
    inputs = row(6, 2, 1)
    vlm.generate(**inputs, max_new_tokens=3, num_return_sequences=5, temperature=1.0, **NO_STOP)
    assert len(images) == 1 and passes == [(1, inputs["input_ids"].shape[1]), (5, 1), (5, 1)]


# --- stopping


def counting_step(calls: list):
    def make(language_model):
        eager = eager_step(language_model)
        return lambda *arguments: calls.append(1) or eager(*arguments)

    return make


@pytest.mark.parametrize("new", [1, 2, 9])
def test_n_tokens_take_n_minus_1_decode_steps(vlm, new):
    calls = []
    invariants.step_equals_eager(vlm, row(4, 1, 1), counting_step(calls), max_new_tokens=new, **NO_STOP)
    assert len(calls) == new - 1


def test_rows_stop_on_a_set_of_ids_and_then_pad(vlm):
    rows = ragged_rows()
    free = vlm.generate(**invariants.collate(rows), max_new_tokens=20, **NO_STOP)
    # Ids that end row 0 at its 3rd token and row 1 at its 6th, wherever they stand first.
    stops = (int(free[0, 2]), int(free[1, 5]))
    calls = []
    result = vlm.generate_detailed(
        **invariants.collate(rows),
        max_new_tokens=20,
        stop_token_ids=stops,
        decode_step=counting_step(calls)(vlm.language_model),
    )
    lengths = []
    for index, tokens in enumerate(free.tolist()):
        ends = [place for place, token in enumerate(tokens) if token in stops]
        lengths.append(ends[0] + 1 if ends else 20)
        assert result.stop_reasons[index] == ("stop" if ends else "length")
        assert result.rows()[index] == tokens[: lengths[-1]]
        assert (result.token_ids[index, lengths[-1] :] == PAD).all()
    assert result.lengths == lengths and lengths[0] <= 3 and lengths[1] <= 6
    assert result.token_ids.shape[1] == max(lengths) and len(calls) == result.decode_steps == max(lengths) - 1


def test_early_exit_when_every_row_has_stopped(vlm):
    inputs = row(4, 1, 1)
    free = vlm.generate(**inputs, max_new_tokens=10, **NO_STOP)[0].tolist()
    calls, place = [], free.index(free[4])
    step = counting_step(calls)(vlm.language_model)
    result = vlm.generate_detailed(
        **inputs,
        max_new_tokens=10,
        stop_token_ids=(VOCAB + 9, free[4]),
        num_return_sequences=2,
        decode_step=step,
    )
    assert result.token_ids.tolist() == [free[: place + 1]] * 2 and len(calls) == place
    assert result.stop_reasons == ["stop", "stop"]


@pytest.mark.parametrize("pad", [None, 128_002])
def test_padding_has_an_embedding(vlm, monkeypatch, pad):
    """Idefics3's default pad id, and a stop id of the default config, may lie beyond a small vocabulary."""
    batch = invariants.collate(ragged_rows())
    free = vlm.generate(**batch, max_new_tokens=6, **NO_STOP)
    monkeypatch.setattr(vlm, "config", replace(vlm.config, pad_token_id=pad))
    tokens = vlm.generate(**batch, max_new_tokens=6, stop_token_ids=(VOCAB + 9, int(free[0, 0])))
    assert (tokens[0, 1:] == free[0, 0]).all() and tokens.shape[1] == 6


def test_stop_ids_default_to_the_checkpoints(vlm, monkeypatch):
    free = vlm.generate(**row(4, 1, 1), max_new_tokens=5, **NO_STOP)[0].tolist()
    monkeypatch.setattr(vlm, "config", replace(vlm.config, eos_token_ids=(1, free[2])))
    assert vlm.generate(**row(4, 1, 1), max_new_tokens=5)[0].tolist() == free[: free.index(free[2]) + 1]


def test_stream_gives_the_same_tokens_and_then_the_result(vlm):
    inputs = invariants.collate(ragged_rows())
    expected = vlm.generate(**inputs, max_new_tokens=7, **NO_STOP)
    stream = vlm.generate_stream(**inputs, max_new_tokens=7, **NO_STOP)
    assert stream.result is None
    columns = [column for column in stream if torch.is_grad_enabled()]  # the caller's mode is left alone
    assert torch.equal(torch.stack(columns, 1), expected)
    assert torch.equal(stream.result.token_ids, expected) and not expected.requires_grad
    assert set(stream.result.seconds) == {"vision", "prefill", "decode"}
    assert stream.result.prompt_tokens == inputs["attention_mask"].sum(1).tolist()


def test_a_stream_that_is_broken_off_can_be_taken_up(vlm):
    inputs = row(4, 1, 1)
    expected = vlm.generate(**inputs, max_new_tokens=5, **NO_STOP)
    stream = vlm.generate_stream(**inputs, max_new_tokens=5, **NO_STOP)
    for _ in stream:
        break
    assert torch.equal(stream.drain().token_ids, expected)
    assert list(stream) == [] and torch.equal(stream.drain().token_ids, expected)


def test_one_read_back_a_token(vlm, monkeypatch):
    """`finished` is the only place in the loop that reads from the device."""
    reads, counts = [], []
    for name in ("item", "tolist", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, original=original: reads.append(1) or original(t))
    for stops in ((VOCAB + 1,), ()):
        for new in (5, 15):
            reads.clear()
            vlm.generate(**row(4, 0, 1), max_new_tokens=new, stop_token_ids=stops, temperature=1.0, seed=0)
            counts.append(len(reads))
    monkeypatch.undo()
    assert counts[1] - counts[0] == 10 and counts[3] == counts[2]


# --- refusals


def test_a_context_that_is_too_long_is_refused_before_any_work(vlm, monkeypatch):
    monkeypatch.setattr(vlm, "embed", lambda *a: pytest.fail("work was done"))
    inputs = row(9, 1, 1)
    length = inputs["input_ids"].shape[1]
    with pytest.raises(
        ValueError, match=f"context holds 256 tokens; the prompt has {length}, and {257 - length}"
    ):
        vlm.generate_stream(**inputs, max_new_tokens=257 - length)


def test_the_context_can_be_filled(vlm):
    inputs = row(9, 0, 1)
    new = 256 - inputs["input_ids"].shape[1]
    assert vlm.generate(**inputs, max_new_tokens=new, **NO_STOP).shape == (1, new)
    model, inputs = tiny_vlm("prefix"), row(9, 1, 1, prefix=True)
    new = 256 - 4 - inputs["input_ids"].shape[1]
    assert model.generate(**inputs, max_new_tokens=new, **NO_STOP).shape == (1, new)
    with pytest.raises(ValueError, match="context holds 256"):
        model.generate(**inputs, max_new_tokens=new + 1)


@pytest.mark.parametrize("stops", [(5,), ()])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(value, stops):
    model = tiny_vlm()
    torch.nn.init.constant_(model.language_model.lm_head.weight[3:4], value)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(**row(4, 0, 1), max_new_tokens=4, temperature=1.0, stop_token_ids=stops)


def test_bad_requests(vlm):
    inputs = row(4, 0, 1)
    for foreign, instead in (
        ({"max_length": 20}, "max_new_tokens"),
        ({"do_sample": True}, "temperature"),
        ({"num_beams": 4, "length_penalty": 1.0}, "num_return_sequences"),
        ({"eos_token_id": 2}, "stop_token_ids"),
        ({"streamer": None}, "generate_stream"),
        ({"max_new_token": 4}, "did you mean max_new_tokens"),
        ({"unheard_of": 4}, "expected some of .*temperature"),
    ):
        with pytest.raises(TypeError, match=f"generate takes no {next(iter(foreign))}: .*{instead}"):
            vlm.generate(**inputs, **foreign)
    for bad in ({"max_new_tokens": 0}, {"num_return_sequences": 0}, {"stop_token_ids": (-1,)}, {"top_p": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
            vlm.generate(**inputs, **bad)
    with pytest.raises(ValueError, match="cannot go with use_cache=False"):
        vlm.generate(**inputs, use_cache=False, decode_step=eager_step(vlm.language_model))
    with pytest.raises(ValueError, match=r"input_ids: expected \(B, T\)"):
        vlm.generate(inputs["input_ids"][0])
    with pytest.raises(ValueError, match="attention_mask: expected the shape"):
        vlm.generate(**inputs, attention_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="row 0 of the batch is all padding"):
        vlm.generate(**inputs, attention_mask=torch.zeros_like(inputs["input_ids"]))


def test_options_normalise_stop_ids():
    assert GenerationOptions(stop_token_ids=7).stop_token_ids == (7,)
    assert GenerationOptions(stop_token_ids=[7, 8]).stop_token_ids == (7, 8)


def test_images_of_another_row_are_refused(vlm):
    """The whole batch has as many placeholders as features; its rows have not."""
    good = invariants.collate([row(5, 1, 1), row(6, 2, 2)])
    swapped = good | {"pixel_values": good["pixel_values"].flip(0)}
    assert vlm.generate(**good, max_new_tokens=1).shape == (2, 1)
    with pytest.raises(ValueError, match=r"row 0: the prompt holds 4 image placeholders .* give 8 features"):
        vlm.generate(**swapped, max_new_tokens=1)
    with pytest.raises(ValueError, match="row 0: the prompt holds 4"):
        vlm(**swapped)
    one_row = {"pixel_values": good["pixel_values"][1:]}
    with pytest.raises(ValueError, match="pixel_values: expected 2 rows as in input_ids, got 1"):
        vlm.generate(**good | one_row, max_new_tokens=1)
    flat = good | {"pixel_values": torch.cat((good["pixel_values"][0, :1], good["pixel_values"][1]))}
    assert torch.equal(vlm.generate(**flat, max_new_tokens=4), vlm.generate(**good, max_new_tokens=4))


def test_a_image_in_front_of_each_row():
    model = tiny_vlm("prefix")
    good = invariants.collate([row(5, 1, 1, prefix=True), row(6, 1, 2, prefix=True)])
    pixels = torch.cat((good["pixel_values"], torch.zeros_like(good["pixel_values"])), 1)
    pixels[0, 1], pixels[1, 0] = pixels[1, 0].clone(), 0.0  # both images are the first row's
    with pytest.raises(ValueError, match=r"in front of each row: expected 2 images, got \[2, 0\]"):
        model.generate(**good | {"pixel_values": pixels}, max_new_tokens=1)


def test_placing_images_reads_back_once(vlm, monkeypatch):
    batch, reads = invariants.collate([row(5, 1, 1), row(6, 2, 2)]), []
    for name in ("item", "tolist", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, original=original: reads.append(1) or original(t))
    vlm.embed(**{name: batch[name] for name in ("input_ids", "pixel_values")})
    assert len(reads) == 2  # which tiles are padding, and how many placeholders each row has
