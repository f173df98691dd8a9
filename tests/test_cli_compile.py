"""generate.py --compile and --dtype int8: which decode step answers, and that its answers are the same."""

from __future__ import annotations

import pytest
import torch

from generation.fast.native import build
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
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # compiled in a third of the time
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


@pytest.mark.slow
def test_which_step_answers(as_json, cli, photo, compiler, monkeypatch, tmp_path):
    """What is compiled already, or what a large model or a long run make worth compiling; the same tokens."""
    short = (photo, "-q", "how many?", "--max-new-tokens", 8)
    (eager,), (off,) = as_json(*short), as_json(*short, "--compile", "off")
    assert eager["decode_step"].startswith("eager: ") and off["decode_step"] == "eager"
    (tmp_path / "in.jsonl").write_text(f'{{"image": "{photo}", "question": "how many?"}}\n')
    _, _, err = cli(
        "batch", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--max-new-tokens", 8, "--stats"
    )
    assert "decode step: native C step" in err
    (now_there,) = as_json(*short)
    assert now_there["decode_step"] == "native C step"
    packed = (*short, "--dtype", "int8")
    (first,), (four,) = as_json(*packed), as_json(*short, "--dtype", "int4")
    assert four["dtype"] == "int4" and four["token_ids"]
    monkeypatch.setattr(checkpoint_module, "LARGE", 1000)
    (large,), (without,) = as_json(*packed), as_json(*packed, "--compile", "off")
    assert first["decode_step"].startswith("eager: ") and large["decode_step"] == "native C step"
    assert eager["token_ids"] == off["token_ids"] == now_there["token_ids"]
    assert first["token_ids"] == large["token_ids"] == without["token_ids"] and large["dtype"] == "int8"


def test_without_a_compiler_the_eager_step_answers_and_says_so_once(cli, photo, compiler, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    ask = (photo, "-q", "how many?", "-q", "where?", "--max-new-tokens", 4)
    for how, lines in (("on", 1), ("auto", 0)):  # so small a model would not be compiled anyway
        status, out, err = cli(*ask, "--compile", how)
        assert status == 0 and out and err.count("no C compiler found") == err.count("\n") == lines
    status, _, err = cli(*ask, "--dtype", "int4")
    assert status == 2 and err.count("\n") == 1 and "no C compiler found" in err
    monkeypatch.setattr(checkpoint_module, "LARGE", 1000)
    assert "no C compiler found" in cli(*ask)[2]


def test_rounded_weights_are_for_a_cpu_and_for_cuda(monkeypatch, model_folder):
    monkeypatch.setattr(checkpoint_module, "pick_device", lambda name: torch.device("mps"))
    for dtype in ("int8", "int4"):
        with pytest.raises(RequestError, match=dtype):
            checkpoint_module.open_checkpoint(model_folder, dtype=dtype)
