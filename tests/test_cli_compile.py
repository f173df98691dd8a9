"""generate.py --compile and --dtype int8: which decode step answers, and that its answers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.shapes import SHAPES
from generation import fast_decode
from generation.native import build
from inference import checkpoint as checkpoint_module
from inference.checkpoint import RequestError
from models.language_model import LanguageModel


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """An empty cache for compiled steps, and a compiler; a test without one is skipped."""
    try:
        build.find_compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path / "compiled"))
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def test_one_short_answer_is_not_worth_compiling(as_json, photo, compiler):
    ask = (photo, "-q", "how many?", "--max-new-tokens", 8)
    (eager,) = as_json(*ask)
    assert eager["decode_step"].startswith("eager: compiling pays from ")
    assert eager["decode_step"].endswith(" decode steps on, at most 8 are to come")
    (compiled,) = as_json(*ask, "--compile", "on")
    (now_there,) = as_json(*ask)
    assert compiled["decode_step"] == now_there["decode_step"] == "native C step"
    (off,) = as_json(*ask, "--compile", "off")
    assert off["decode_step"] == "eager"
    assert eager["token_ids"] == compiled["token_ids"] == off["token_ids"]


@pytest.mark.parametrize("questions", [["how many?"], ["how many?", "where?"]])
def test_what_may_come_decides(as_json, cli, photo, compiler, monkeypatch, questions):
    """As many tokens as pay, for one answer or for several; the choice is printed with --stats."""
    monkeypatch.setattr(fast_decode, "steps_that_pay", lambda language_model: 24)
    ask = [photo, *(part for question in questions for part in ("-q", question))]
    enough = 24 // len(questions)
    few = as_json(*ask, "--max-new-tokens", enough - 1)
    assert {one["decode_step"][:16] for one in few} == {"eager: compiling"}
    _, _, err = cli(*ask, "--max-new-tokens", enough, "--stats")
    assert err.count("    step  native C step\n") == len(questions)


def test_a_batch_pays_for_compiling_by_its_rounds(cli, photo, compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(fast_decode, "steps_that_pay", lambda language_model: 24)
    (tmp_path / "in.jsonl").write_text(f'{{"image": "{photo}", "question": "how many?"}}\n' * 6)
    for size, step in ((3, "eager: compiling"), (2, "native C step")):  # 2 and 3 rounds of 8 tokens
        out = tmp_path / f"{size}.jsonl"
        status, _, err = cli("--batch", tmp_path / "in.jsonl", "--out", out, "--batch-size", size,
                             "--max-new-tokens", 8, "--stats")  # fmt: skip
        assert status == 0 and f"decode step: {step}" in err


def test_how_many_steps_pay_goes_by_blocks_and_by_what_they_read():
    """3 s of gcc against 52 ms a step (benchmarks/results/decode-cpu-zen3.json), whatever the step reads."""

    def steps(config) -> int:
        return fast_decode.steps_that_pay(LanguageModel(config))

    tiny = SHAPES["tiny"].text
    assert steps(tiny) > 1000
    assert steps(replace(tiny, num_hidden_layers=20)) == pytest.approx(steps(tiny) / 10, rel=0.05)
    wide = replace(tiny, vocab_size=200_000)  # a head of 51 MB
    assert 600 < steps(wide) < 700


def test_without_a_compiler_the_eager_step_answers_and_says_so_once(cli, photo, compiler, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    ask = (photo, "-q", "how many?", "-q", "where?", "--max-new-tokens", 4)
    said = "generate.py: decode step eager: no C compiler found (tried $CC, cc, gcc, clang)\n"
    for how, expected in (("on", said), ("auto", "")):  # so few tokens would not be compiled for anyway
        status, out, err = cli(*ask, "--compile", how)
        assert status == 0 and out and err == expected
    monkeypatch.setattr(fast_decode, "steps_that_pay", lambda language_model: 8)
    assert cli(*ask)[2] == said


def test_a_compiled_step_without_a_cache_is_refused(complaint, photo):
    assert "--compile on: the compiled step reads a cache, leave out --no-cache" in complaint(
        photo, "-q", "how many?", "--no-cache", "--compile", "on"
    )


def test_int8_weights(as_json, photo, compiler):
    ask = (photo, "-q", "how many?", "--dtype", "int8", "--max-new-tokens", 4)
    (made,), (eager,) = as_json(*ask, "--compile", "on"), as_json(*ask, "--compile", "off")
    assert made["dtype"] == eager["dtype"] == "int8"
    assert (made["decode_step"], eager["decode_step"]) == ("native C step", "eager")
    assert made["token_ids"] == eager["token_ids"]


def test_int8_is_for_a_cpu(monkeypatch, model_folder):
    monkeypatch.setattr(checkpoint_module, "pick_device", lambda name: torch.device("cuda"))
    with pytest.raises(RequestError, match="int8: expected device cpu, got cuda"):
        checkpoint_module.open_checkpoint(model_folder, dtype="int8")
