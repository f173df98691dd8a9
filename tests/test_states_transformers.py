"""Qwen3.5, LFM2-VL and MiniCPM-V of many small random configs: all at once as transformers' chunked forms
have it, and token by token as its recurrent ones."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest
import torch

from data.processor import Processor
from models import VisionLanguageModel
from tests import lfm2_checkpoints, minicpm_checkpoints, qwen_checkpoints
from tests.processors import draw_image
from tests.test_qwen_vl import for_transformers, user

BAR = 1e-4  # of the logits' spread
SAVES = {"qwen3_5": partial(qwen_checkpoints.save_hf, "qwen3_5"), "lfm2_vl": lfm2_checkpoints.save_hf}
SAVES["minicpmv4_6"] = minicpm_checkpoints.save_hf
# MiniCPM-V has Qwen3.5's text.
CASES = [(kind, seed) for kind, count in zip(SAVES, (28, 40, 12)) for seed in range(count)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Inputs of three conversations of unequal lengths with images, or of the first, of one of four kinds."""

    @cache
    def processor(kind: str, seed: int) -> Processor:
        SAVES[kind](folder := tmp_path_factory.mktemp(kind), seed)
        return Processor.from_pretrained(folder)

    @cache
    def prepare(kind: str, number: int, alone: bool, seed: int) -> dict:
        draw, asked = random.Random(number), []
        for row, words in enumerate(("how many red squares are there", "are there two", "and circles")):
            count = draw.randint(row == 0, 2)
            images = [draw_image(draw.randint(8, 120), draw.randint(8, 90), image) for image in range(count)]
            parts = [{"type": "image", "image": image} for image in images]
            asked.append(user(*parts, " ".join([words] * draw.randint(1, 12))))
        return processor(kind, seed).prepare(asked[:1] if alone else asked)

    return prepare


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_logits_and_tokens_are_those_of_transformers(kind, seed, prepared, tmp_path):
    theirs, new = SAVES[kind](tmp_path, seed), 10
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    # Where a convolution has a bias, padding has inputs in transformers: no row is padded then.
    inputs = prepared(kind, seed % 4, ours.config.text.conv_bias, seed * (kind == "minicpmv4_6"))
    if kind != "qwen3_5":
        images = inputs["pixel_values"].to("cpu", torch.float32)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if kind == "lfm2_vl":
            given |= lfm2_checkpoints.transformers_inputs(images, ours.config.vision.patch_size)
        else:
            given |= minicpm_checkpoints.transformers_inputs(images)
    else:
        given = for_transformers(inputs, ours.config)
    real = inputs["attention_mask"].bool()
    expected = theirs(**given).logits[real]
    bar = BAR * (expected.max() - expected.min()).item()
    torch.testing.assert_close(ours(**inputs).logits[real], expected, atol=bar, rtol=0)

    greedy = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    recurrent = theirs.generate(**given, **greedy, return_dict_in_generate=True, output_logits=True)
    chunk = (None, seed + 1)[seed % 2]
    options = {"max_new_tokens": new, "stop_token_ids": [], "prefill_chunk": chunk}
    output = ours.generate_detailed(**inputs, **options, logprobs=10**6)
    assert torch.equal(output.token_ids, recurrent.sequences[:, -new:])
    for row, reports in enumerate(output.logprobs):
        for logits, report in zip(recurrent.logits, reports, strict=True):
            ids, logprobs = zip(*report.top)
            expected = logits[row].log_softmax(-1)[list(ids)]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=bar, rtol=0)
