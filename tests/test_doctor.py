"""The doctor: a sound server passes without an alarm, each planted fault is found, and most are named."""

from __future__ import annotations

import json
import re

import pytest
import torch

from eval import doctor
from eval.__main__ import main
from eval.probes import MISTAKES, cases
from eval.reference import FAULT, GOOD, REFUSED, Client, Reference
from eval.tasks import DEFAULT_MODEL
from inference.checkpoint import open_checkpoint
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests.doctor_server import NAME, serving
from tests.runs import shapes_processor
from tests.waiting import free_port

# What is planted, the cases that must show it, and the mistake that they name (a check names none).
FAULTS = {
    "EXIF ignored": ({f"EXIF orientation {n}" for n in range(2, 9)}, "EXIF orientation ignored"),
    "alpha on black": ({"alpha", "palette with transparency"}, "alpha blended on black"),
    "16 bits clipped": ({"16 bits"}, "16 bits clipped to 8"),
    "images turned around": ({"three images in order", "two images"}, "images in reverse order"),
    "images first": ({"image after the text", "image between texts"}, "images moved in front of the text"),
    "special tokens read": ({"<|im_start|> typed", "<end_of_utterance> typed"}, "special tokens not escaped"),
    "BOS twice": ({"plain PNG", "text beyond ASCII"}, "BOS twice"),
    "no system": ({"system message"}, "system message dropped"),
    "last turn alone": ({"three turns"}, "earlier turns dropped"),
    "text stripped": ({"white space around"}, "white space around the text stripped"),
    "max_tokens ignored": ({"plain PNG"}, "goes on"),
    "never greedy": ({"plain PNG", "text beyond ASCII"}, ""),
    "refusals break": ({"1 x 4000"}, "500"),
    "text in parts": ({"plain PNG"}, ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that is sure of nothing: whatever changes in a prompt or an image changes its answer. The
    embedded model refuses most of the doctor's images, with one certainty for all."""
    torch.manual_seed(0)
    processor = shapes_processor(None)
    tokenizer = processor.tokenizer
    vision = VisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                          image_size=64, patch_size=8)  # fmt: skip
    text = TextConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)  # fmt: skip
    model = VisionLanguageModel(
        VLMConfig(vision, text, scale_factor=1, image_token_id=processor.image_token_id,
                  eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id)
    )  # fmt: skip
    words = [i for token, i in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{2,}", token)]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
    with torch.no_grad():
        model.language_model.embed_tokens.weight.normal_()
        head = model.language_model.lm_head.weight
        head.zero_()[words] = torch.randn(len(words), head.shape[1]) * 0.5  # it says nothing but words
    folder = tmp_path_factory.mktemp("doctor") / "model"
    model.save_pretrained(folder, processor)
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder):
    return open_checkpoint(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(str(folder), tolerance=0.02, tokens=8)


@pytest.mark.slow
def test_a_sound_server_raises_no_alarm(checkpoint, reference):
    with serving(checkpoint) as url:
        client = Client(url, NAME)
        found = [reference.examine(case, client.ask(case.messages, 8)) for case in cases()]
    assert {one.case: one.said for one in found if one.kind not in (GOOD, REFUSED)} == {}
    assert {one.case for one in found if one.kind == REFUSED} == {"1 x 4000", "4000 x 1"}
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault, checkpoint, reference):
    shown, cause = FAULTS[fault]
    with serving(checkpoint, fault) as url:
        for case in (case for case in cases() if case.name in shown):
            found = reference.examine(case, Client(url, NAME).ask(case.messages, 8))
            assert found.kind == FAULT and cause in found.said, found


@pytest.mark.slow
def test_the_command(checkpoint, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "cases", lambda: cases()[:2])
    file, whole = tmp_path / "findings.json", ["--model", NAME, "--reference", str(folder)]
    with serving(checkpoint) as url:
        assert main(["doctor", url, *whole, "--json", str(tmp_path / "none" / "findings.json")]) == 2
        assert "good" not in capsys.readouterr().out  # it says so before it asks
        assert main(["doctor", url, *whole, "--json", str(file), "--api-key", "clé"]) == 0
        assert [one["kind"] for one in json.loads(file.read_text())] == [GOOD, GOOD]
    with serving(checkpoint, "max_tokens ignored") as url:
        assert main(["doctor", url, *whole]) == 1


@pytest.mark.parametrize("url", ["no address", "http://127.0.0.1:PORT/v1", "ftp://127.0.0.1/v1"])
def test_a_server_that_cannot_be_asked_is_one_sentence(url, capsys):
    url = url.replace("PORT", str(free_port()))
    assert main(["doctor", url, "--model", "m", "--reference", str(DEFAULT_MODEL)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
