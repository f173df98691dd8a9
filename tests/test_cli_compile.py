"""generate.py --compile and --dtype int8: which decode step answers, and that its answers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.common import SHAPES
from generation.fast.native import build
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


def test_which_step_answers(as_json, cli, photo, compiler, monkeypatch):
    """By the tokens of all questions together, and by what is compiled already; with the same tokens."""
    monkeypatch.setattr(checkpoint_module, "break_even_steps", lambda language_model: 24)
    one, two = (photo, "-q", "how many?"), (photo, "-q", "how many?", "-q", "where?")
    for ask, limit, steps in ((one, 23, 23), (two, 11, 22)):
        chosen = {made["decode_step"] for made in as_json(*ask, "--max-new-tokens", limit)}
        assert chosen == {f"eager: compiling pays from 24 decode steps on, at most {steps} are expected"}
    short = (*one, "--max-new-tokens", 8)
    (eager,), (off,) = as_json(*short), as_json(*short, "--compile", "off")
    _, _, err = cli(*two, "--max-new-tokens", 12, "--stats")
    assert err.count("    step  native C step\n") == 2
    (compiled,), (now_there,) = as_json(*short, "--compile", "on"), as_json(*short)
    assert (off["decode_step"], compiled["decode_step"]) == ("eager", "native C step")
    assert now_there["decode_step"] == "native C step"
    assert eager["token_ids"] == off["token_ids"] == compiled["token_ids"] == now_there["token_ids"]
    packed = (*short, "--dtype", "int8")
    (made,), (eager,) = as_json(*packed, "--compile", "on"), as_json(*packed, "--compile", "off")
    assert made["dtype"] == eager["dtype"] == "int8" and made["decode_step"] == "native C step"
    assert made["token_ids"] == eager["token_ids"]


def test_what_may_come_of_a_batch_goes_by_its_rounds(cli, photo, compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_module, "break_even_steps", lambda language_model: 100)
    (tmp_path / "in.jsonl").write_text(f'{{"image": "{photo}", "question": "how many?"}}\n' * 6)
    for size, rounds in ((3, 2), (2, 3), (8, 1)):
        out = tmp_path / f"{size}.jsonl"
        status, _, err = cli("--batch", tmp_path / "in.jsonl", "--out", out, "--batch-size", size,
                             "--max-new-tokens", 8, "--stats")  # fmt: skip
        assert status == 0
        assert f"decode step: eager: compiling pays from 100 decode steps on, at most {8 * rounds} are" in err


def test_how_many_steps_pay_goes_by_blocks_and_by_what_they_read():
    """3 s of gcc against 52 ms a step, whatever the step reads."""

    def steps(config) -> int:
        return checkpoint_module.break_even_steps(LanguageModel(config))

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
    monkeypatch.setattr(checkpoint_module, "break_even_steps", lambda language_model: 8)
    assert cli(*ask)[2] == said


def test_int8_is_for_a_cpu_and_for_cuda(monkeypatch, model_folder):
    monkeypatch.setattr(checkpoint_module, "pick_device", lambda name: torch.device("mps"))
    with pytest.raises(RequestError, match="int8"):
        checkpoint_module.open_checkpoint(model_folder, dtype="int8")
