"""Tiny training runs for the tests of train.py: a checkpoint, rows, train.py in processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from importlib import import_module
from pathlib import Path

import pytest
import torch

import train
from data.new_processor import make_processor
from data.processor import Processor
from eval.tasks import DEFAULT_MODEL
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests.house import data_url, edit_json, json_lines
from tests.processors import embedded
from tests.rows import WORDS, png
from tests.waiting import PATIENCE, free_port

FORK = multiprocessing.get_context("fork")
# What every run here has in common: float32, small, nothing at random but the seed.
SETTINGS = {
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "batch_size": 8,
    "sequence_length": 64,
    "steps": 20,
    "epochs": 0,
    "lr": 3e-3,
    "muon": "none",
    "ema": 0.0,
    "warmup_steps": 2,
    "log_every": 1,
    "log_samples": True,
    "save_every": 1000,
    "eval_every": 1000,
}
OF_REWARDS = {"task": "rewards", "packing": False, "answer_tokens": 6, "group_size": 4}
# Three steps of each stage on shapes.
SMALL_SHAPES = {
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "pictures": 18,
    "vision_pictures": 12,
    "vision_batch_size": 4,
    "batch_size": 2,
    "log_every": 1,
    "eval_every": 3,
    "eval_pictures": 2,
    "eval_questions": 10,
    "save_every": 4,
    "vision_layers": 1,
    "text_layers": 2,
}


def shapes_processor(config) -> Processor:
    """In place of `recipes.shapes.training.build_processor`, which takes seconds: of the embedded model's
    tokenizer, for plain drawings."""
    side = config.image_size // config.patch_size // config.scale_factor if config else 8
    tokenizer = Processor.from_pretrained(DEFAULT_MODEL).tokenizer
    size = config.image_size if config else 64
    return make_processor(tokenizer, image_size=size, image_seq_len=side * side)


def tiny_checkpoint(folder: Path) -> Path:
    """A random model of 30,000 parameters with the tests' processor."""
    processor = embedded()
    tokenizer = processor.tokenizer
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = VLMConfig(
        vision=VisionConfig(**vision, image_size=32, patch_size=8),
        text=TextConfig(**text),
        scale_factor=2,
        image_token_id=processor.image_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = VisionLanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model.save_pretrained(folder, processor)
    return folder


def embedded_of_one_tile(folder: Path) -> Path:
    """The embedded model without cutting images: one costs a fifth of the time."""
    shutil.copytree(DEFAULT_MODEL, folder)
    path = folder / "preprocessor_config.json"
    uncut = {"do_image_splitting": False, "size": {"longest_edge": 128}}
    edit_json(path, **uncut)
    return folder


def write_rows(path: Path, count: int = 60, every: int = 4) -> Path:
    """A JSONL with answers of 1 to 12 words, and an image with each row `every`."""
    rng = random.Random(3)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            row = {
                "question": " ".join(rng.choices(WORDS, k=rng.randint(1, 8))),
                "answer": " ".join(rng.choices(WORDS, k=rng.randint(1, 12))),
                "image": None,
            }
            if i % every == 0:
                row["image"] = data_url(png(seed=i))
            file.write(json.dumps(row) + "\n")
    return path


def named(rows: Path, **more) -> list[dict]:
    """A file of rows as `data`, under a name of its own. The name decides the order of the rows, and a path
    of pytest's is another on each machine: on some, rounding alone then moves weights by whole steps."""
    return [{"path": str(rows), "name": rows.stem, **more}]


def prepared(folder: Path, rows: int = 60) -> Path:
    """The folder, with a checkpoint and rows for `settings_in`."""
    tiny_checkpoint(folder / "tiny")
    write_rows(folder / "rows.jsonl", rows)
    return folder


def settings_in(folder: Path, output: str, streaming: bool = False, **more) -> dict:
    """Of a run on what `prepared` made; a stream is of the same rows in Parquet."""
    rows = folder / ("rows.parquet" if streaming else "rows.jsonl")
    if not rows.exists():
        lines = map(json.loads, rows.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
        datasets = import_module("datasets")  # takes seconds
        datasets.Dataset.from_list([*lines]).to_parquet(rows, batch_size=7)
    data = named(rows, streaming=streaming)
    made = {"init_from": str(folder / "tiny"), "data": data, "output": str(folder / output)}
    if more.get("packing", True):
        made["packing_buffer"] = 4
    return SETTINGS | made | more


def flags(**settings) -> list[str]:
    made = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            made += [f"--{dashed}", json.dumps(value) if isinstance(value, list) else str(value)]
    return made


def start(ranks: int = 1, recipe: str = "", **settings) -> list:
    """train.py in as many forked processes as ranks: they need not import everything again."""
    processes, port = [], str(free_port())
    arguments = [*filter(None, [recipe]), *flags(**(SETTINGS | settings))]
    for rank in range(ranks):
        processes.append(FORK.Process(target=_rank, args=(rank, ranks, port, arguments)))
        processes[-1].start()
    return processes


def _rank(rank: int, ranks: int, port: str, arguments: list[str]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    train.main(arguments)


def run(ranks: int = 1, recipe: str = "", **settings) -> None:
    """Train to the end."""
    assert ended(start(ranks, recipe, **settings)) == [0] * ranks


def ended(processes: list) -> list[int]:
    """Their exit codes, when they have ended."""
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def refused(capsys, arguments: list[str], act=train.main) -> str:
    """The one sentence with which train.py leaves."""
    with pytest.raises(SystemExit) as left:
        act(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2 and "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if line.startswith("train.py: error:")]
    return sentence


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(folder: Path, key: str = "step") -> list[dict]:
    """The lines of metrics.jsonl that have this key."""
    rows = json_lines(folder / "metrics.jsonl")
    return [row for row in rows if key in row]


def figures(folder: Path) -> list[dict]:
    """What does not depend on the clock, of each step."""
    clock = ("tokens_per_second", "images_per_second", "mfu", "seconds_left")
    return [{key: value for key, value in row.items() if key not in clock} for row in metrics(folder)]


def curve(folder: Path) -> list[tuple]:
    """(step, loss, samples in any order) of each step."""
    return [(row["step"], row["loss"], row["samples"]) for row in metrics(folder, "loss")]
