"""generate.py --compile and --dtype int8: which decode step answers, and that its answers are the same."""

from __future__ import annotations

import pytest
import torch

from generation.native import build
from inference import checkpoint as checkpoint_module
from inference.checkpoint import RequestError


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
    assert "does not pay" in eager["decode_step"]
    (compiled,) = as_json(*ask, "--compile", "on")
    (now_there,) = as_json(*ask)
    assert compiled["decode_step"] == now_there["decode_step"] == "native C step"
    (off,) = as_json(*ask, "--compile", "off")
    assert off["decode_step"] == "eager"
    assert eager["token_ids"] == compiled["token_ids"] == off["token_ids"]


def test_several_answers_are_worth_compiling(as_json, photo, compiler):
    ask = (photo, "-q", "how many?", "-q", "where?", "--max-new-tokens", 8)
    made, plain = as_json(*ask), as_json(*ask, "--compile", "off")
    assert {one["decode_step"] for one in made} == {"native C step"}
    assert [one["token_ids"] for one in made] == [one["token_ids"] for one in plain]


def test_without_a_compiler_the_eager_step_answers_and_says_so_once(cli, photo, compiler, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    status, out, err = cli(photo, "-q", "how many?", "-q", "where?", "--max-new-tokens", 4)
    assert status == 0 and out
    assert err == "generate.py: decode step eager: no C compiler found (tried $CC, cc, gcc, clang)\n"


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
