"""`prove`: checkpoints of all families hold, and each planted fault is found where it is."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch

from data.processor import Processor
from eval import proof, reference
from eval.__main__ import main
from eval.probes import cases
from eval.proof import Proof
from eval.reference import Answer, Client, examine
from eval.tasks import DEFAULT_MODEL
from inference.checkpoint import open_checkpoint
from models import language_model
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints
from tests.planted_server import NAME, serving
from tests.runs import shapes_processor
from tests.waiting import free_port

SAVE = {kind: partial(qwen_checkpoints.save_hf, kind) for kind in ("qwen2_5_vl", "qwen3_5", "paddleocr_vl")}
SAVE |= {"lfm2_vl": lfm2_checkpoints.save_hf, "gemma4": gemma4_checkpoints.save_hf}


def begun(source, monkeypatch, *parts: str) -> Proof:
    """A quick proof, of these parts alone where some are named."""
    monkeypatch.setitem(proof.SIZES, "quick", (8, 6))
    for part in {"inputs", "numbers", "ways", "speed"} - {*parts}:
        if parts:
            monkeypatch.setattr(Proof, f"_{part}", lambda self: iter(()))
    return Proof(str(source), None, "cpu", "quick")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVE)
def test_checkpoints_of_transformers_hold(kind, tmp_path, monkeypatch):
    SAVE[kind](tmp_path / "model")
    found = begun(tmp_path / "model", monkeypatch)
    lines = list(found.steps())
    assert found.holds, [line for line in lines if line.same is False]
    assert {line.part for line in lines} == {"files", "inputs", "numbers", "ways", "speed"}


@pytest.mark.slow
def test_the_command_and_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(proof.SIZES, "quick", (8, 6))
    kept, page = tmp_path / "prove.json", tmp_path / "prove.html"
    whole = ["prove", str(DEFAULT_MODEL), "--quick", "--json", str(kept), "--html", str(page)]
    assert main(whole) == 0
    report = json.loads(kept.read_text())
    assert report["holds"] and len(report["greedy"]) == 2 and report["versions"]["torch"]
    assert report["verdict"] in page.read_text() and "://" not in page.read_text()
    assert main(["prove", "--check", str(kept)]) == 0
    report["greedy"][1][3] += 1
    kept.write_text(json.dumps(report))
    capsys.readouterr()
    assert main(["prove", "--check", str(kept)]) == 1
    assert "token 4" in capsys.readouterr().out
    kept.write_text("{}")
    assert main(["prove", "--check", str(kept)]) == 2


# --------------------------------------------------------------------------------------- planted faults
def of_model(change):
    """A fault in the weights, which `change` makes in the model of a checkpoint in float32."""

    def opened(*given, **more):
        checkpoint = open_checkpoint(*given, **more)
        if checkpoint.dtype == "float32":
            with torch.no_grad():
                change(checkpoint.model)
        return checkpoint

    return lambda patch: patch.setattr(proof, "open_checkpoint", opened)


def transposed(model):
    weight = model.language_model.layers[0].self_attn.o_proj.weight
    weight.copy_(weight.T.clone())


def untied(model):
    head = model.language_model.lm_head
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))


def swapped(patch):
    """Cosines in place of sines."""
    tables = language_model.rope_tables
    patch.setattr(language_model, "rope_tables", lambda *given: tables(*given)[::-1])


def forgetful(model):
    forward = model.language_model.forward

    def forgets(x, mask=None, kv_cache=None, *given, **more):
        if kv_cache and x.shape[1] == 1:
            kv_cache[0]["value"][:, :, 3] = 0
        return forward(x, mask, kv_cache, *given, **more)

    model.language_model.forward = forgets


def wrong_groups(patch):
    """Scales of four bits are those of the group beside."""

    def opened(*given, **more):
        checkpoint = open_checkpoint(*given, **more)
        if checkpoint.dtype == "int4":
            for layer in checkpoint.model.language_model.modules():
                if getattr(layer, "weight", None) is not None and layer.weight.dtype == torch.int32:
                    blocks = layer.weight.shape[1] // 9
                    words = layer.weight[:, 8 * blocks : 9 * blocks]
                    words.copy_((words >> 16 & 0xFFFF) | (words << 16))
        return checkpoint

    patch.setattr(proof, "open_checkpoint", opened)


def of_processor(change):
    """A fault in how prompts are made."""

    def plant(patch):
        load = Processor.from_pretrained

        def loaded(*given, **more):
            change(processor := load(*given, **more), patch)
            return processor

        patch.setattr(proof.Processor, "from_pretrained", loaded)

    return plant


def without_newline(processor, patch):
    encode = processor.encode_conversation

    def shorter(*given, **more):
        row = encode(*given, **more)
        object.__setattr__(row, "input_ids", row.input_ids[:-1])
        return row

    patch.setattr(processor, "encode_conversation", shorter)


def darker(processor, patch):
    cut = processor._cut

    def by_one(image, label):
        return cut(image.point(lambda value: max(0, value - 1)), label)

    patch.setattr(processor, "_cut", by_one)


PLANTED = {
    "a transposed projection": (of_model(transposed), "numbers", "logits in float32"),
    "rotary tables swapped": (swapped, "numbers", "logits in float32"),
    "a head that is tied, read untied": (of_model(untied), "numbers", "logits in float32"),
    "a cache that forgets a slot": (of_model(forgetful), "ways", "logprobs, cached"),
    "scales of the wrong groups": (wrong_groups, "numbers", "int4"),
    "a template that ends too early": (of_processor(without_newline), "inputs", "token ids"),
    "pixels off by one": (of_processor(darker), "inputs", "pixels, by Pillow as in transformers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    plant, part, name = PLANTED[fault]
    plant(monkeypatch)
    steps = begun(DEFAULT_MODEL, monkeypatch, part).steps()
    assert any((line.part, line.name, line.same) == (part, name, False) for line in steps)


# ------------------------------------------------------------------------------------ another engine
# What is planted in a server, and the cases that must show it.
OF_SERVERS = {
    "EXIF ignored": {f"EXIF orientation {n}" for n in range(2, 9)},
    "alpha on black": {"alpha", "palette with transparency"},
    "16 bits clipped": {"16 bits"},
    "images turned around": {"three images in order", "two images"},
    "images first": {"image after the text", "image between texts"},
    "special tokens read": {"<|im_start|> typed", "<end_of_utterance> typed"},
    "BOS twice": {"plain PNG", "text beyond ASCII"},
    "no system": {"system message"},
    "last turn alone": {"three turns"},
    "text stripped": {"white space around"},
    "max_tokens ignored": {"plain PNG"},
    "never greedy": {"plain PNG", "text beyond ASCII"},
    "second image dropped": {"two images"},
    "refusals break": {"1 x 4000"},
    "text in parts": {"plain PNG"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that is sure of nothing: whatever changes in a prompt or an image changes its answer. The
    embedded model refuses most of these images, with one certainty for all."""
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
    folder = tmp_path_factory.mktemp("sure of nothing") / "model"
    model.save_pretrained(folder, processor)
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder):
    return open_checkpoint(folder, device="cpu", dtype="float32")


def examined(checkpoint, url, name):
    messages = cases()[name]
    return examine(checkpoint, messages, Client(url, NAME).ask(messages, 8), tolerance=0.02, tokens=8)


@pytest.mark.slow
def test_a_sound_server_raises_no_alarm(checkpoint):
    with serving(checkpoint) as url:
        found = {name: examined(checkpoint, url, name) for name in cases()}
    assert {said for same, said in found.values() if same is not None} == {"the same answer"}
    assert {name for name, (same, _) in found.items() if same is None} == {"1 x 4000", "4000 x 1"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_SERVERS)
def test_a_planted_fault_of_a_server_is_found(fault, checkpoint):
    with serving(checkpoint, fault) as url:
        for name in OF_SERVERS[fault]:
            same, said = examined(checkpoint, url, name)
            assert same is False and said, name


@pytest.mark.slow
def test_a_likely_enough_token_is_rounding_and_its_answer_is_followed(checkpoint):
    messages = cases()["plain PNG"]
    row = checkpoint.processor.encode_conversation(messages, True)
    second = [*reference._after(checkpoint, row, [], 1)[0]][1]
    ids = [second, *(next(iter(one)) for one in reference._after(checkpoint, row, [second], 7))]
    text = checkpoint.processor.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def examined(text, tolerance):
        return examine(checkpoint, messages, Answer(text, len(row.input_ids)), tolerance, tokens=8)

    assert examined(text, 0)[0] is False
    same, said = examined(text, 100)
    assert same and "rounding" in said
    assert examined(f"{text} and more", 100)[0] is False


@pytest.mark.slow
def test_a_server_is_proved(folder, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(proof, "cases", lambda: dict([*cases().items()][:2]))
    with serving(checkpoint) as url:
        assert main(["prove", str(folder), "--url", url, "--name", NAME]) == 0
    with serving(checkpoint, "max_tokens ignored") as url:
        assert main(["prove", str(folder), "--url", url, "--name", NAME]) == 1


@pytest.mark.parametrize("url", ["no address", "http://127.0.0.1:PORT/v1", "ftp://127.0.0.1/v1"])
def test_a_server_that_cannot_be_asked_is_one_sentence(url, capsys):
    url = url.replace("PORT", str(free_port()))
    assert main(["prove", str(DEFAULT_MODEL), "--url", url, "--name", "m"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
