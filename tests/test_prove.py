"""`prove`: checkpoints of all families hold, and each planted fault is found where it is."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from data.processor import Processor
from eval import proof
from eval.__main__ import main
from eval.proof import Proof
from eval.tasks import DEFAULT_MODEL
from inference.checkpoint import open_checkpoint
from models import language_model
from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints

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
