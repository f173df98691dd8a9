"""Inputs at the edge of arithmetic: finite results, or an error that says which token was meant to come."""

from __future__ import annotations

import copy

import pytest
import torch

from families import FAMILIES
from generation.options import GenerationOptions, NotFiniteError
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from models.vision_language_model import VisionLanguageModel
from tests import tiny
from tests.invariants import answers
from tests.processors import draw_image

PROMPT = torch.tensor([[5, 9, 31, 7]])
LOOPS = ("cached", "recomputed", "native", "graph", "session", "one slot")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> VisionLanguageModel:
    """Float32, head and embedding apart."""
    folder = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path_factory.mktemp("numbers"))
    return VisionLanguageModel.from_pretrained(folder)


def answer(model: VisionLanguageModel, loop: str, prompt: torch.Tensor, **options) -> list[int]:
    """Six new ids, by one of the ways to an answer."""
    options = {"max_new_tokens": 6, "stop_token_ids": (159,), **options}
    return answers(model, loop, [{"input_ids": prompt}], **options)[0]


def spoilt(model: VisionLanguageModel, token: int, value: float) -> VisionLanguageModel:
    """A copy that is sound until it is shown this token."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.language_model.embed_tokens.weight[token] = value
    return other


@pytest.mark.parametrize(("value", "temperature"), [(float("nan"), 0.0), (float("inf"), 1.0)])
@pytest.mark.parametrize("loop", LOOPS)
def test_no_token_is_drawn_from_what_is_no_number(model, loop, value, temperature):
    """Shown its own n-th token, or one of its prompt, it breaks: the error names the next one."""
    options = {"temperature": temperature, "seed": 3}
    whole = answer(model, loop, PROMPT, **options)
    place = next(i for i in range(1, 5) if whole[i] not in [*PROMPT[0].tolist(), *whole[:i]])
    for token, named in ((whole[place], place + 2), (9, 1)):
        with pytest.raises(NotFiniteError) as error:
            answer(spoilt(model, token, value), loop, PROMPT, **options)
        assert error.value.token == named


@pytest.mark.parametrize("loop", LOOPS)
def test_a_prompt_of_one_token(model, loop):
    assert len(answer(model, loop, torch.tensor([[5]]))) == 6
    assert answer(model, loop, torch.tensor([[5]])) == answer(model, "recomputed", torch.tensor([[5]]))


def test_rows_that_are_masked_altogether(model):
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    inputs = PROMPT.repeat(2, 1)
    logits = model(inputs, attention_mask=mask).logits
    assert logits.isfinite().all()
    assert torch.allclose(logits[0], model(PROMPT).logits[0], atol=1e-5)
    with pytest.raises(ValueError):
        model.generate(inputs, attention_mask=mask, max_new_tokens=2)
    packed = torch.ones(4, 4, dtype=torch.bool).tril()[None].clone()
    packed[0, 2] = False  # a query that may look at nothing, as no packer makes one
    assert not model(PROMPT, attention_mask=packed).logits[0, [0, 1]].isnan().any()


def test_no_labelled_token(model):
    """A zero that has gradients, all of them zero: a rank without labels takes part in the exchange."""
    trained = copy.deepcopy(model).train()
    loss = trained(PROMPT, labels=torch.full_like(PROMPT, -100)).loss
    assert loss.item() == 0
    loss.backward()
    gradients = [p.grad for p in trained.language_model.parameters()]
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    assert any(gradient is not None for gradient in gradients)
    total, count = trained.summed_loss(torch.randn(1, 4, 48), torch.full((1, 4), -100))
    assert (total.item(), int(count)) == (0.0, 0)


def test_an_image_and_no_text(model_folder):
    """The model answers to its tiles alone; a question without text is refused before."""
    checkpoint = open_checkpoint(model_folder, device="cpu")
    model, processor = checkpoint.model, checkpoint.processor
    tiles = processor.cut(draw_image(32, 32)).parts[-1:]
    ids = torch.full((1, FAMILIES[model.config.family].positions(model.config)), model.config.image_token_id)
    assert model.generate(ids, tiles, max_new_tokens=2, stop_token_ids=()).shape == (1, 2)
    options = GenerationOptions(max_new_tokens=1)
    for empty in ("", "   ", "\u3000"):
        with pytest.raises(ValueError):
            ask(checkpoint, [draw_image(8, 8)], empty, options)
    for image in (draw_image(1, 1), draw_image(1, 100), draw_image(32, 32).point(lambda _: 0)):
        assert ask(checkpoint, [image], "how many?", options).finish()["token_ids"]
