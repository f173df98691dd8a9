"""Each benchmark end to end on the tiny shape, in this process; one of them with real children."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import batching, decode, evaluation, prefix, quantization, systems, workers
from benchmarks.common import table
from benchmarks.gguf_file import tensor_shapes, write_gguf
from benchmarks.shapes import (
    SHAPES,
    build_ours,
    build_transformers,
    hf_config,
    parameters,
    prompt,
    prompt_tokens,
)

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = {
    "system",
    "precision",
    "device",
    "prompt_tokens",
    "context",
    "first_token_seconds",
    "decode_tokens_per_second",
    "floor_fraction",
    "peak_bytes",
}
SYSTEMS = "ours-fast,ours-eager,ours-no-cache,transformers,llama.cpp"
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


def test_decode(run):
    result = run(
        decode, "--systems", SYSTEMS, "--prompts", "1,2", "--contexts", "40", "--tokens", "2", "--rounds", "1"
    )
    rows = {(row["system"], row["precision"], row["context"]): row for row in result["rows"]}
    expected = {
        (system, precision, context)
        for precision in ("float32", "bfloat16")
        for system in ("ours-fast", "ours-eager", "transformers")
        for context in (24, 28, 40)
    }
    expected |= {("ours-fast", "int8", context) for context in (24, 28, 40)}
    expected |= {("ours-no-cache", precision, at) for precision in ("float32", "bfloat16") for at in (24, 28)}
    assert {key for key in rows if key[0] != "llama.cpp"} == expected
    for row in result["rows"]:
        assert row.keys() >= REQUIRED
        if row["system"] != "llama.cpp":
            assert row["vision_seconds"] + row["prefill_seconds"] <= row["first_token_seconds"] * 1.001
    fast = rows["ours-fast", "float32", 40]
    assert fast["prompt_tokens"] == 28
    text = SHAPES["tiny"].text
    assert fast["cache_bytes"] == 41 * 2 * text.num_hidden_layers * text.num_key_value_heads * 16 * 4
    assert fast["weight_bytes"] == pytest.approx(
        rows["transformers", "float32", 40]["weight_bytes"], rel=1e-3
    )
    assert rows["ours-fast", "bfloat16", 40]["weight_bytes"] < 0.6 * fast["weight_bytes"]
    assert fast["speed_over"].keys() >= {"transformers", "ours-eager"}
    own = fast["peak_bytes"] - fast["before_model_bytes"]
    least = fast["model_bytes"] + fast["cache_bytes"]
    assert fast["over_weights_and_cache"] == pytest.approx(own / least)
    if importlib.util.find_spec("llama_cpp") is None:
        assert "left out: llama.cpp float32" in result["printed"]


def test_transformers_static_cache_gives_the_tokens_of_the_dynamic_one():
    """Eagerly: what is compiled is torch's business."""
    from transformers import DynamicCache

    setup = {"shape": "tiny", "device": "cpu", "precision": "float32"}
    system = systems.TransformersStatic(setup)
    static, dynamic = system._cache(0, 1, 32), DynamicCache(config=system.model.config)
    ids = prompt("tiny", 0)["input_ids"]
    with torch.no_grad():
        for number in range(ids.shape[1]):
            token = ids[:, number : number + 1]
            got = system._one_token(token, static, torch.tensor([[number]]))
            logits = system.model(token, past_key_values=dynamic).logits
            assert torch.equal(got, logits[:, -1].argmax(-1, keepdim=True))


def test_llama_goes_back_to_each_context(tmp_path, monkeypatch):
    """With a module in its place that notes what is evaluated where."""
    fake, evaluated = ModuleType("llama_cpp"), []

    class Llama:
        def __init__(self, path, **options):
            self.n_tokens, self.options = 0, options

        def eval(self, tokens):
            evaluated.append((self.n_tokens, len(tokens)))
            self.n_tokens += len(tokens)

    fake.Llama, fake.__spec__ = Llama, ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    gguf = ModuleType("gguf")
    gguf.__spec__ = ModuleSpec("gguf", None)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    monkeypatch.setattr(systems, "write_gguf", lambda text, kind, path: path.write_bytes(b"GGUF") and 99)
    setup = {"shape": "tiny", "device": "cpu", "precision": "int8", "threads": 1, "longest": 100}
    llama = systems.LlamaCpp(setup | {"folder": str(tmp_path)})
    assert (llama.weight_bytes, llama.info, llama.llm.options["n_ctx"]) == (99, {"format": "Q8_0"}, 100)
    steps = systems.WARM_UP + 2
    # What one job has decoded is the beginning of a longer context.
    for context, prefilled in ((10, [(0, 10)]), (30, [(10 + steps, 20 - steps)]), (10, [])):
        evaluated.clear()
        assert llama.decode(context, 2, 1, None)["steps"] == 2
        assert evaluated == prefilled + [(context + step, 1) for step in range(steps)]
    evaluated.clear()
    assert llama.first_token(1)["total"] is None
    assert evaluated == [(0, 24)]
    assert llama.decode(10, 2, 8, None) is None


def test_children_are_processes_and_one_that_fails_is_left_out():
    command = [sys.executable, "benchmarks/decode.py", "--shape", "tiny", "--quick", "--threads", "1"]
    command += ["--systems", "ours-eager,llama.cpp", "--precisions", "float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"][0]["system"] == "ours-eager"
    assert result["rows"][0].keys() >= REQUIRED
    assert ("llama.cpp float32" in result["hardware"]["left_out"]) == (len(result["rows"]) == 1)


def test_a_child_that_dies_is_reported(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import sys; sys.stdin.readline() if 0 else sys.exit('no memory')")
    worker = workers.Worker(str(script), {"name": "x", "threads": 1})
    with pytest.raises(workers.Unavailable, match="status 1: no memory"):
        worker.ask({})
    worker.close()


@pytest.mark.parametrize("together", [True, False])
def test_systems_take_turns(monkeypatch, together):
    asked = []

    class Recorder(workers.Worker):
        def ask(self, job):
            if self.setup["name"] == "bad":
                raise workers.Unavailable("not here")
            asked.append((self.setup["name"], job["number"]))
            return {}

    monkeypatch.setattr(workers, "Worker", Recorder)
    setups = [{"name": name, "threads": 1} for name in ("a", "bad", "b")]
    jobs = [{"number": number} for number in range(2)]
    replies, failed = workers.interleave("", setups, lambda setup: jobs, 2, together)
    if together:  # all rounds of a job, then the next one
        assert asked == [("a", 0), ("b", 0)] * 2 + [("a", 1), ("b", 1)] * 2
    else:
        assert asked == [("a", 0), ("a", 1), ("b", 0), ("b", 1)] * 2
    assert failed == {1: "not here"}
    assert [[len(job) for job in own] for own in replies] == [[2, 2], [0, 0], [2, 2]]


def test_prefix(run):
    result = run(
        prefix, "--tiles", "2", "--questions", "4", "--answers", "3", "--tokens", "3", "--rounds", "1"
    )
    rows = {(row["what"], row["system"]): row for row in result["rows"]}
    assert rows["4 questions", "ours, session"]["equal_answers"] == "4/4"
    assert rows.keys() >= {("1 answer", "ours"), ("3 answers", "ours"), ("4 questions", "transformers")}
    assert all(row["ratio"] > 0 and row["prompt_tokens"] == 28 for row in result["rows"])


@pytest.mark.parametrize("images", [0, 2])
def test_batching(run, images, monkeypatch):
    monkeypatch.setattr(batching, "LONGEST", 12)
    result = run(batching, "--requests", "6", "--slots", "2", "--rounds", "1", "--pictures", str(images))
    rows = {row["system"]: row for row in result["rows"]}
    assert set(rows) == set(batching.SYSTEMS)
    assert all(row["identical_to_alone"] for row in rows.values())
    assert rows["scheduler"]["decode_steps"] <= rows["padded batches"]["decode_steps"]


def test_answer_lengths_are_mostly_short_with_some_of_full_length():
    lengths = batching.answer_lengths(64)
    assert lengths == batching.answer_lengths(64)
    assert (min(lengths), max(lengths)) == (4, 128)
    assert sorted(lengths)[48] < 40


@pytest.mark.parametrize(
    ("shape", "count", "tokens"),
    [
        ("SmolVLM-256M", 256_484_928, (84, 1108)),
        ("SmolVLM-500M", 507_482_304, (84, 1108)),
        ("SmolVLM-2.2B", 2_246_272_880, (101, 1397)),
    ],
)
def test_shapes_are_the_published_ones(shape, count, tokens):
    from transformers import Idefics3ForConditionalGeneration

    assert parameters(shape) == count
    assert (prompt_tokens(shape, 1), prompt_tokens(shape, 17)) == tokens
    with torch.device("meta"):
        theirs = Idefics3ForConditionalGeneration(hf_config(shape))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count


def test_models_of_a_shape_take_its_prompts():
    ours, theirs = (make("tiny", torch.float32, "cpu") for make in (build_ours, build_transformers))
    assert theirs.config._attn_implementation == "sdpa"
    inputs = prompt("tiny", 2)
    assert ours.generate(**inputs, max_new_tokens=3).shape == (1, 3)
    logits = theirs(**inputs).logits
    assert logits.isfinite().all() and logits.shape == (1, prompt_tokens("tiny", 2), 320)
    rows = ours.language_model.lm_head.weight
    assert len(rows.unique(dim=0)) == len(rows)


def test_table_shows_what_is_missing_as_a_dash():
    text = table(
        {"a": "name", "b": "x", "c": "ms:.1f"},
        [{"a": "one", "b": "y", "c": None}, {"a": "t", "b": "z", "c": 2}],
    )
    assert text.splitlines() == ["name  x   ms", "one   y    -", "t     z  2.0"]


@needs_gguf
@pytest.mark.parametrize(("kind", "bits"), [("F32", 32), ("BF16", 16), ("Q8_0", 8.5)])
def test_gguf(tmp_path, kind, bits):
    from gguf import GGUFReader

    text = SHAPES["tiny"].text
    read = write_gguf(text, kind, tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    shapes = {tensor.name: tuple(int(size) for size in tensor.shape) for tensor in reader.tensors}
    # GGUF names the columns first.
    assert shapes == {name: shape[::-1] for name, shape in tensor_shapes(text).items()}
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.ffn_down.weight"] == kind and kinds["output_norm.weight"] == "F32"
    matrices = sum(
        a * b for a, b in (s for n, s in shapes.items() if len(s) == 2 and n != "token_embd.weight")
    )
    norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert read == matrices * bits / 8 + norms * 4
    fields = {
        name: reader.fields[f"llama.{name}"].contents() for name in ("attention.head_count_kv", "vocab_size")
    }
    assert fields == {"attention.head_count_kv": 2, "vocab_size": 320}
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 320


def test_gguf_has_every_weight_of_the_text_part():
    text = SHAPES["SmolVLM-256M"].text
    total = sum(torch.Size(shape).numel() for shape in tensor_shapes(text).values())
    ours = parameters("SmolVLM-256M")
    with torch.device("meta"):
        from models.language_model import LanguageModel

        assert total == sum(parameter.numel() for parameter in LanguageModel(text).parameters()) < ours


def test_quantization_holds_rounded_weights_against_float32(capsys):
    assert quantization.main(["--questions", "8"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    eager, bfloat16, int8 = rows = result["rows"]
    assert {row["tokens"] for row in rows} == {eager["tokens"]} and eager["tokens"] >= 8
    for row in rows:
        assert 0 < row["mean_logit_error"] <= row["largest_logit_error"]
        assert 0.5 < row["top1_agreement"] <= 1
    assert bfloat16["mean_logit_error"] < int8["mean_logit_error"]
    assert bfloat16["top1_agreement"] >= eager["top1_agreement"] - 0.005 and result["within_bar"]


def test_quantization_says_what_is_wrong(capsys):
    assert quantization.main(["--model", "nowhere/none/at/all"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.quantization: error: ")


# -------------------------------------------------------------------------------------------- evaluation


def test_evaluation(run):
    result = run(evaluation, "--quick", "--tokens", "5", "--slots", "3")
    ours, *theirs = result["rows"]
    assert ours["system"] == "ours" and [row["batch"] for row in theirs] == [1, 4]
    assert (ours["questions"], ours["tiles"], ours["tokens"]) == (12, 2, 60)
    for row in theirs:  # the same answers, from a tile for each question
        assert row["questions"] == row["tiles"] == row["equal_answers"] == 4 and row["tokens"] == 20
    best = max(row["samples_per_second"] for row in theirs)
    assert ours["over_best"] == pytest.approx(ours["samples_per_second"] / best)
