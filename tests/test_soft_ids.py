"""Ids of images, videos and sounds that a model writes itself: it goes on as transformers does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from data.processor import Processor
from models import VisionLanguageModel
from tests import (
    gemma4_checkpoints,
    lfm2_checkpoints,
    minicpm_checkpoints,
    qwen_checkpoints,
    test_internvl,
    tiny,
)
from tests.invariants import answers, new_cache
from tests.processors import draw_image

KINDS = ("idefics3", "internvl", *qwen_checkpoints.KINDS, "lfm2_vl", "minicpmv4_6", "gemma4")
TOKENS = 12


def save_hf(kind, folder, monkeypatch) -> nn.Module:
    if kind == "idefics3":
        model = tiny.hf_model("idefics3-1-tile").eval()
        model.save_pretrained(folder)
    elif kind == "internvl":
        model = test_internvl.save_hf("qwen3", folder)
    elif kind in qwen_checkpoints.KINDS:
        model = qwen_checkpoints.save_hf(kind, folder, seed=2)
    elif kind == "lfm2_vl":
        model = lfm2_checkpoints.save_hf(folder)
    elif kind == "minicpmv4_6":
        model = minicpm_checkpoints.save_hf(folder)
    else:  # its own ids are beyond the vocabulary of a small one
        of_seed = gemma4_checkpoints.hf_config

        def hf_config(seed):
            config = of_seed(seed)
            config.video_token_id, config.audio_token_id = 330, 331
            return config

        monkeypatch.setattr(gemma4_checkpoints, "hf_config", hf_config)
        model = gemma4_checkpoints.save_hf(folder, seed=1)
    return model


@pytest.mark.slow(but=1)
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_is_that_of_transformers(kind, tmp_path, monkeypatch):
    """One token at a time, and several at once behind what is cached: the logits after each."""
    theirs = save_hf(kind, tmp_path, monkeypatch)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    named = (getattr(theirs.config, f"{name}_token_id", None) for name in ("image", "video", "audio"))
    soft = [one for one in named if one is not None]
    prompt, written = [3, 7, 9, 11], [soft[0], 5, *soft, 6, soft[-1], 8]
    known = theirs(input_ids=torch.tensor([prompt]), use_cache=True)
    cache = new_cache(ours.language_model, 1, 32)
    ours.hidden_states(torch.tensor([prompt]), kv_cache=cache)
    step = []
    for at, token in enumerate(written):
        known = theirs(
            input_ids=torch.tensor([[token]]), past_key_values=known.past_key_values, use_cache=True
        )
        x = ours.embed_tokens(torch.tensor([[token]]))
        hidden, _ = ours.language_model(x, kv_cache=cache, start_pos=len(prompt) + at)
        step.append(ours.language_model.logits(hidden)[0, -1])
        expected = known.logits[0, -1]
        assert (step[-1] - expected).abs().max() <= 1e-4 * expected.std(), (at, token)
    whole, _ = ours.language_model(ours.embed_tokens(torch.tensor([prompt + written])))
    logits = ours.language_model.logits(whole)[0, len(prompt) :]
    assert (logits - torch.stack(step)).abs().max() <= 1e-4 * logits.std()


@pytest.mark.slow
@torch.no_grad()
def test_gemma_4_writes_them_and_goes_on(tmp_path, monkeypatch):
    """After an image, by every way to an answer. The rows of its head are exchanged until it writes them."""
    theirs = save_hf("gemma4", tmp_path, monkeypatch)
    processor = Processor.from_pretrained(tmp_path)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    inputs = processor.ask(draw_image(40, 30), "how many circles are there")
    ids = inputs["input_ids"]
    given = {"input_ids": ids, "mm_token_type_ids": (ids == ours.config.image_token_id).int()}
    pixels = inputs["pixel_values"].to("cpu", torch.float32)
    given |= gemma4_checkpoints.transformers_inputs(pixels, ours.config.vision)
    head = theirs.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    theirs.config.tie_word_embeddings = False
    soft = [theirs.config.image_token_id, 330, 331]
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    for at, one in enumerate(soft):
        answer = theirs.generate(**given, **options)[0, ids.shape[1] :]
        there = int(answer[2 * at])
        pair = torch.tensor([one, there])
        head.weight[pair] = head.weight[pair.flip(0)]
    answer = theirs.generate(**given, **options)[0, ids.shape[1] :].tolist()
    assert {*soft} <= {*answer[: TOKENS - 1]}
    theirs.save_pretrained(tmp_path / "untied")
    ours = VisionLanguageModel.from_pretrained(tmp_path / "untied")
    assert not ours.config.tie_word_embeddings
    row = {"input_ids": ids, "pixel_values": pixels}
    for entrance in ("recomputed", "cached", "session", "three slots", "chunks session", "lookup session"):
        got = answers(ours, entrance, [row], max_new_tokens=TOKENS, stop_token_ids=[])
        assert got == [answer], entrance
