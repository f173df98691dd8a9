"""Each benchmark end to end on the tiny shape, in this process; one of them with real children."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import metadata

import gguf
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import serve
from benchmarks import common, gpu, latency, peers, throughput, training
from benchmarks.common import SHAPES, parameters, prompt_tokens
from inference import draft
from models.checkpoints.save import written
from tests.house import json_lines
from tests.servers import running

TESTS = "tests/test_cuda.py"


@pytest.fixture
def local(monkeypatch):
    """Children in this process."""

    class Local(ThreadPoolExecutor):
        def __init__(self, *_):
            super().__init__(1)
            self.made = []

        def submit(self, answer, make, setup, job):
            def answered():
                self.made = self.made or [make(setup)]
                return json.loads(json.dumps(self.made[0](job)))

            return super().submit(answered)

    monkeypatch.setattr(common, "ProcessPoolExecutor", Local)


@pytest.fixture
def run(local, capsys):
    """A benchmark's main: the result of its last line."""

    def run(benchmark, *arguments: str) -> dict:
        shared, first = ("--shape", "tiny", "--threads", "1", "--rounds", "1"), int(benchmark is not training)
        assert benchmark.main([*arguments[:first], *shared, *arguments[first:]]) == 0
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1]) | {"printed": out}

    return run


@pytest.mark.slow
def test_load(run):
    systems = ("ours-fast", "ours-never-loaded", "transformers")
    arguments = ("--systems", ",".join(systems), "--precisions", "float32", "--tokens", "2", "--quotas", "")
    result = run(latency, "load", *arguments)
    rows = {(row["system"], row["condition"]): row for row in result["rows"]}
    assert set(rows) == {
        (system, condition)
        for system in systems
        for condition in latency.CONDITIONS
        if (system, condition) != ("ours-never-loaded", "busy")
    }
    speeds = {key: row["decode_tokens_per_second"] for key, row in rows.items()}
    loaded = rows["ours-fast", "quiet again"]
    for peer in ("never_loaded", "transformers"):
        other = peer.replace("never", "ours-never").replace("_", "-")
        expected = speeds["ours-fast", "quiet again"] / speeds[other, "quiet again"]
        assert loaded[f"over_{peer}"] == pytest.approx(expected)
    assert loaded["over_llama_cpp"] is None and loaded["first_token_seconds"] > 0


@pytest.mark.slow
def test_decode(run):
    systems = ("--systems", "ours-fast,ours-no-cache,transformers,llama.cpp")
    systems += ("--precisions", "float32,int8")
    sizes = ("--prompts", "1", "--contexts", "40", "--tokens", "2", "--batch", "3,1")
    result = run(latency, "decode", *systems, *sizes)
    rows = {tuple(row[key] for key in ("system", "precision", "context", "batch")): row
            for row in result["rows"]}  # fmt: skip
    expected = {("ours-no-cache", "float32", 24, 1)}
    kinds = [("ours-fast", "float32"), ("ours-fast", "int8"), ("transformers", "float32")]
    expected |= {(*kind, context, batch) for kind in kinds for context in (24, 40) for batch in (1, 3)}
    assert {key for key in rows if key[0] != "llama.cpp"} == expected
    fast, text = rows["ours-fast", "float32", 40, 1], SHAPES["tiny"].text
    assert fast["cache_bytes"] == 41 * 2 * text.num_hidden_layers * text.num_key_value_heads * 16 * 4
    theirs, more = rows["transformers", "float32", 40, 1], rows["ours-fast", "float32", 40, 3]
    assert fast["weight_bytes"] == pytest.approx(theirs["weight_bytes"], rel=1e-3)
    assert rows["ours-fast", "int8", 40, 1]["weight_bytes"] < 0.6 * fast["weight_bytes"]
    assert more["cache_bytes"] == 3 * fast["cache_bytes"] and fast["floor_fraction"] > 0
    other = rows["transformers", "float32", 40, 3]["decode_tokens_per_second"]  # with as many rows
    assert more["over_transformers"] == more["decode_tokens_per_second"] / other
    if importlib.util.find_spec("llama_cpp") is None:
        assert "left out: llama.cpp float32" in result["printed"]


@pytest.mark.slow
def test_first_token(run, monkeypatch, tmp_path):
    """Every system that is installed, with what it has, and a picture of it."""
    monkeypatch.setattr(draft, "LEAST_WAIT", 0)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    precisions = ("--precisions", "float32,int8")
    result = run(latency, "first-token", "--tiles", "1,17", *precisions, "--save", "one")
    rows = {(row["system"], row["precision"], row["tiles"]): row for row in result["rows"]}
    whole = [(system, "float32") for system in ("ours-fast", "ours-eager", "transformers")]
    whole.append(("ours-fast", "int8"))
    for (system, precision), tiles in ((one, tiles) for one in whole for tiles in (1, 17)):
        row = rows[system, precision, tiles]
        assert row["prompt_tokens"] == prompt_tokens("tiny", tiles)
        parts = row["vision_seconds"] + row["prefill_seconds"]
        assert 0 < parts <= row["first_token_seconds"] * 1.001
        assert row["least_cosine"] > (0.9999 if precision == "float32" else 0.99)
        assert (row["draft_seconds"] is not None) == (system == "ours-fast" and tiles == 17)
        if row["draft_seconds"]:
            assert row["draft_seconds"] < row["with_draft_seconds"]
    ours, theirs = (rows[system, "float32", 17] for system in ("ours-fast", "transformers"))
    ratio = ours["first_token_seconds"] / theirs["first_token_seconds"]
    assert ours["first_token_over_transformers"] == ratio
    for package, system, part in (
        ("openvino", "openvino", "vision_seconds"), ("llama_cpp", "llama.cpp", "prefill_seconds")
    ):  # fmt: skip
        if importlib.util.find_spec(package) is None:
            assert f"left out: {system} float32" in result["printed"]
        else:
            row = rows[system, "float32", 1]
            assert row[part] > 0 and row["first_token_seconds"] is None
            assert row.get("least_cosine", 1) > 0.9999
    assert latency.main(["picture", str(tmp_path / "one.json"), str(tmp_path / "one.svg")]) == 0
    ET.parse(tmp_path / "one.svg")


def test_the_picture_of_decoding_is_drawn_from_its_result(tmp_path):
    result = common.RESULTS / "decode-cpu-zen4.json"
    assert latency.main(["picture", str(result), str(tmp_path / "decode.svg")]) == 0
    bars = ET.parse(tmp_path / "decode.svg").findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 1 + 8  # the ground, and the systems that each precision has
    with pytest.raises(SystemExit) as stopped:
        latency.main(["picture", str(common.RESULTS / "batching-cpu-zen3.json"), str(tmp_path / "no.svg")])
    assert stopped.value.code == 2 and not (tmp_path / "no.svg").exists()


@pytest.mark.parametrize(
    ("kind", "bits", "layer_types"), [("F32", 32, ("conv", "attention")), ("BF16", 16, ()), ("Q8_0", 8.5, ())]
)
def test_gguf(tmp_path, kind, bits, layer_types):
    text = replace(SHAPES["tiny"].text, layer_types=layer_types)
    read = peers.write_gguf(replace(SHAPES["tiny"], text=text), kind, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    shapes = [tensor.shape for tensor in reader.tensors]
    sizes = [torch.Size(shape).numel() for shape in shapes if len(shape) == 2 and shape[0] >= 32]
    plain = [shape for shape in shapes if len(shape) == 1 or shape[0] < 32]  # norms, and what convolves
    norms = sum(torch.Size(shape).numel() for shape in plain)
    assert read == (sum(sizes) - text.vocab_size * text.hidden_size) * bits / 8 + norms * 4
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == text.vocab_size


SETUPS = [{"system": name, "threads": 1} for name in ("a", "bad", "b")]


@pytest.mark.parametrize("together", [True, False])
def test_systems_take_turns(local, capfd, together):
    def make(setup):
        if setup["system"] == "bad":
            raise common.Unavailable("not here")
        return lambda job: job

    jobs = [{"number": number} for number in range(2)]
    measured, failed = common.take_turns(make, SETUPS, lambda setup: jobs, 2, together)
    asked = [line.split()[2][:-1] for line in capfd.readouterr().err.splitlines()]
    # Together, all rounds of a job stand before the next one.
    assert [name for name in asked if name != "bad"] == [*("abab" * 2 if together else "aabb" * 2)]
    assert failed == {"bad": "not here"}
    assert [(one.setup["system"], one.job["number"], len(one.replies)) for one in measured] == [
        ("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)
    ]  # fmt: skip
    assert measured[3].replies[0] == {"number": 1, "round": 0}
    with pytest.raises(SystemExit):
        common.take_turns(make, SETUPS, lambda setup: jobs, 1, together, needed=["bad"])


def test_prefix(run):
    result = run(throughput, "prefix", "--tiles", "2", "--questions", "4", "--answers", "3", "--tokens", "3")
    rows = {(row["what"], row["system"]): row for row in result["rows"]}
    assert rows["4 questions", "ours, session"]["equal_answers"] == "4/4"
    assert rows.keys() >= {("1 answer", "ours"), ("3 answers", "ours"), ("4 questions", "transformers")}
    assert all(row["ratio"] > 0 and row["prompt_tokens"] == 28 for row in result["rows"])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("images", [0, 2])
def test_batching(run, images, monkeypatch):
    """The scheduler, padded batches and transformers' model all give each request's own tokens."""
    monkeypatch.setattr(throughput, "LONGEST", 12)
    sizes = ("--requests", "6", "--slots", "2", "--pictures", str(images))
    result = run(throughput, "batching", *sizes, "--peers", "transformers")
    rows = {row["system"]: row for row in result["rows"]}
    assert set(rows) == set(throughput.BATCHED)
    assert all(row["identical_to_alone"] for row in rows.values())
    assert rows["scheduler"]["decode_steps"] <= rows["padded batches"]["decode_steps"]


@pytest.mark.parametrize(
    ("shape", "count", "tokens"),
    [
        ("SmolVLM-256M", 256_484_928, (84, 1108)),
        ("SmolVLM-2.2B", 2_246_272_880, (101, 1397)),
        ("Qwen3-VL-2B", 2_127_532_032, (84, 1108)),
    ],
)
def test_shapes_are_the_published_ones(shape, count, tokens):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    assert parameters(shape) == count
    assert (prompt_tokens(shape, 1), prompt_tokens(shape, 17)) == tokens
    if SHAPES[shape].family == "qwen_vl":  # its shapes are compared in tests/test_qwen_vl.py
        return
    with torch.device("meta"):
        theirs = Idefics3ForConditionalGeneration(Idefics3Config.from_dict(written(SHAPES[shape])[0]))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count


# ------------------------------------------------------------------------------------------ the GPU's run
def test_every_section_of_the_gpu_run_is_parsed():
    """On CUDA, too: the benchmarks take what they are asked."""
    commands = {
        "benchmarks.latency": latency.COMMANDS,
        "benchmarks.throughput": throughput.COMMANDS,
        "benchmarks.training": training.COMMANDS,
    }
    for device in ("cpu", "cuda"):
        for name, (_, arguments, _) in gpu.sections(device).items():
            if arguments[1] in commands:
                assert common.parse(None, commands[arguments[1]], arguments[2:]).device == device
            else:
                assert name in ("env", "probe", "profile", "prove") or arguments[-1] == TESTS


def test_a_section_that_hangs_or_dies_takes_no_other_with_it(tmp_path, monkeypatch, capsys):
    result = json.loads((common.RESULTS / "decode-cpu-zen4.json").read_text())
    (tmp_path / "decode.json").write_text(json.dumps(result | {"rows": [
        row | {"step": "a step"} for row in result["rows"]
    ]}))  # fmt: skip
    scripts = {
        "tests": "print('{\"error\": 0.25}', flush=True); import time; time.sleep(600)",
        "env": "import os; os.kill(os.getpid(), 9)",
        "decode": f"print(open({str(tmp_path / 'decode.json')!r}).read())",
    }
    found = {name: gpu.Section(60, ["-c", script]) for name, script in scripts.items()}
    found["tests"] = found["tests"]._replace(seconds=1)
    found["prove"] = gpu.Section(60, [], ("no_such_package",))
    monkeypatch.setattr(gpu, "sections", lambda *_: found)
    assert gpu.main(["--output", str(tmp_path / "run")]) == 1
    lines = json_lines(tmp_path / "run/gpu.jsonl")
    assert [(line["section"], line.get("status")) for line in lines] == [
        ("tests", None), ("tests", "ended after 1 s"), ("env", -9), ("decode", None), ("decode", None)
    ]  # fmt: skip
    shown = (tmp_path / "run/gpu.md").read_text()
    assert "0.25" in shown and "needs no_such_package" in shown  # what was measured before the end is kept
    assert shown.count("a step") == len(result["rows"]) and shown in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- training
TRAINING = ("--documents", "4", "--row", "128", "--steps", "1")


# What a machine that is lent has, of what the run imports; and what these need, but for a new typer.
LENT = ("torch", "transformers", "pillow", "psutil", "httpx", "xxhash", "pytest")


@pytest.mark.slow
def test_the_gpu_run_starts_where_little_is_installed(tmp_path):
    """On a CPU; with what each section imports that needs nothing else, and the tests."""
    wanted, allowed = [*LENT], set[str]()
    while wanted:
        if (name := canonicalize_name(wanted.pop())) not in allowed | {"pydantic"}:
            allowed.add(name)
            with suppress(metadata.PackageNotFoundError):
                needs = map(Requirement, metadata.requires(name) or ())
                wanted += [
                    one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})
                ]
    blocked = [
        module
        for module, owners in metadata.packages_distributions().items()
        if not allowed & {*map(canonicalize_name, owners)}
    ]
    assert {"jsonschema", "gguf", "llguidance", "pydantic", "fastapi", "datasets"} <= {*blocked}
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules |= dict.fromkeys({blocked})")
    imported = (
        "benchmarks.latency, benchmarks.throughput, tests.conftest, tests.test_cuda, benchmarks.gpu as gpu"
    )
    started = f"gpu.main(['--device', 'cpu', '--only', 'env,prove', '--output', {str(tmp_path)!r}])"
    ran = subprocess.run(
        [sys.executable, "-c", f"import {imported}; {started}"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=common.ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    sections = json.loads(ran.stdout.splitlines()[-1])["sections"]
    assert [one.get("status") for one in sections] == [None, "needs pydantic"], ran.stdout


@pytest.mark.slow
def test_training(run):
    result = run(training, *TRAINING, "--rounds", "2")
    rows = {row["system"]: row for row in result["rows"]}
    assert rows.keys() == set(training.TRAINERS)
    for row in (rows[name] for name in training.TRAINERS):
        for name in ("labelled_tokens", "tokens", "tiles"):  # the same documents
            assert row[name] == rows["transformers"][name] and len(row[name]) == 2
        assert 0 < row["supervised_tokens_per_second"] < row["tokens_per_second"]
        assert row["mfu"] > 0 and row["seconds_per_step"] > 0
    assert rows["ours-packed"]["fill"] > rows["ours-padded"]["fill"] == rows["transformers"]["fill"]
    assert rows["ours-packed"]["over_transformers"] > 0
    # Packed or padded, the same weights see the same documents.
    assert rows["ours-packed"]["loss"] == pytest.approx(rows["ours-padded"]["loss"], rel=1e-3)
    assert result["hardware"]["peak_is"].startswith("measured")


# --------------------------------------------------------------------------------------------- serving
@pytest.mark.slow
def test_serving(run, monkeypatch):
    """Over HTTP as alone. The servers' own start is other tests': it takes half a minute."""
    with running() as served:
        monkeypatch.setattr(throughput, "started", lambda *_: nullcontext(f"{served.url}v1"))
        (row,) = run(throughput, "serving", "--quick", "--systems", "ocelli", "--tokens", "8")["rows"]
    assert row["same_text"] == "4/4" and row["requests_per_second"] > 0 and row["over_transformers"] is None
    assert 0 < row["first_word_median"] <= row["first_word_p95"] < row["seconds"]
    settings = common.parse(None, throughput.COMMANDS, ["serving"])
    flags = throughput.command_of("ocelli", settings, 1234)[2:]
    assert serve.build_parser().parse_args(flags).port == 1234
