"""docs/train.md's lines for rows of one's own, run as they stand on a small machine: a new task is learnt,
and the result is the same model in transformers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

import generate
import train
from tests.house import json_lines
from tests.runs import FORK, embedded_of_one_tile, metrics
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Which colour comes next?"
NEXT = {"red": "green", "orange": "red", "green": "orange"}
MODEL = "checkpoints/ocelli-shapes"
MACHINE = ["--device", "cpu", "--threads", "1", "--workers", "0", "--no-activation-checkpointing"]
MACHINE += ["--batch-size", "1"]  # images of one tile: a row holds as many samples as four of the page's

pytestmark = pytest.mark.slow  # all of them need two runs


def lines_of_the_page() -> tuple[list[str], list[list[str]]]:
    """The four commands, and the flags that make each of the first two small."""
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    section = text[text.index("## Your own rows") :]
    block = section[section.index("```bash\n") + 8 :].split("```")[0]
    (small,) = re.findall(r"`(--init-from [^`]+)`", section)
    paragraph = section[section.index(small) :].split("\n\n")[0]
    rates = re.findall(r"`(--lr [^`]+)`", paragraph)
    return block.splitlines(), [shlex.split(f"{small} {rate}") for rate in rates]


def draw_light(rng: random.Random, lit: str) -> Image.Image:
    """A traffic light on a pale wall, somewhere in the image."""
    image = Image.new("RGB", (96, 96), tuple(rng.randint(190, 255) for _ in range(3)))
    draw, x, y = ImageDraw.Draw(image), rng.randint(4, 50), rng.randint(2, 8)
    draw.rounded_rectangle((x, y, x + 34, y + 86), 6, fill=(40, 40, 40))
    for i, colour in enumerate(NEXT):
        middle = y + 16 + 27 * i
        fill = colour if colour == lit else (80, 80, 80)
        draw.ellipse((x + 6, middle - 11, x + 28, middle + 11), fill=fill)
    return image


def write_lights(folder: Path, name: str, count: int, rng: random.Random) -> None:
    (folder / "images").mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for i in range(count):
            lit, path = list(NEXT)[i % 3], f"images/{name}-{i}.png"
            draw_light(rng, lit).save(folder / path)
            file.write(json.dumps({"question": QUESTION, "answer": NEXT[lit], "image": path}) + "\n")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder in which the page's four lines were run, the first of them interrupted."""
    folder, rng = tmp_path_factory.mktemp("finetune"), random.Random(0)
    (folder / "configs").symlink_to(ROOT / "configs")
    embedded_of_one_tile(folder / MODEL)
    write_lights(folder, "rows", 45, rng)
    write_lights(folder, "heldout", 12, rng)
    draw_light(rng, "red").save(folder / "photo.jpg")
    (full, lora, resume, ask), (small_full, small_lora) = lines_of_the_page()
    first = start(folder, full, small_full + MACHINE)
    assert wait_for(lambda: (folder / "runs/mine/metrics.jsonl").exists() or not first.is_alive())
    os.kill(first.pid, signal.SIGINT)
    other = start(
        folder, lora, [*small_lora, *MACHINE, "--eval-data", "heldout.jsonl", "--eval-every", "0.5"]
    )
    finish(first)
    finish(start(folder, resume, []))
    finish(other)
    finish(start(folder, ask.replace("What is it?", QUESTION), []))
    return folder


def start(folder: Path, line: str, more: list[str]):
    """A line of the page in a forked process, which need not import everything again."""
    python, script, *arguments = shlex.split(line, comments=True)
    main = {"train.py": train.main, "generate.py": generate.main}[script]
    assert python == ".venv/bin/python"

    def run() -> None:
        os.chdir(folder)
        torch.set_num_threads(1)
        with open(f"{script}.out", "w") as out, contextlib.redirect_stdout(out):
            sys.exit(main([*arguments, *more]))

    process = FORK.Process(target=run)
    process.start()
    return process


def finish(process) -> None:
    process.join(2 * PATIENCE)
    assert process.exitcode == 0


def answers(folder: Path, model: str) -> list[str]:
    """What generate.py answers to the held-out rows."""
    out = folder / f"{Path(model).name}.jsonl"
    made = ["batch", str(folder / "heldout.jsonl"), "--out", str(out), "--model", str(folder / model)]
    assert generate.main([*made, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8"]) == 0
    rows = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda row: row["line"])
    return [row["answers"][0] for row in rows]


def right(here: Path, model: str) -> float:
    """Share of the held-out rows that a model answers as they say."""
    rows = json_lines(here / "heldout.jsonl")
    said = answers(here, model)
    return sum(a == row["answer"] for a, row in zip(said, rows, strict=True)) / len(rows)


def theirs(model, processor, folder: Path, count: int) -> list[str]:
    """transformers' greedy answers to the first held-out rows."""
    said = []
    for line in (folder / "heldout.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        content = [{"type": "image", "image": str(folder / row["image"])}]
        content.append({"type": "text", "text": row["question"]})
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        said.append(
            processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        )
    return said


def test_without_options(tmp_path, monkeypatch, capsys):
    """A few of its steps: scores before and after, the model, and what to do next."""
    monkeypatch.chdir(ROOT)
    few = ["--steps", "2", "--eval-questions", "4", "--eval-pictures", "4", "--output", str(tmp_path / "run")]
    train.main([*few, *MACHINE])
    out = capsys.readouterr().out
    assert re.search(r"exact_match: 0.000 \(95% interval .*, n 4\) before, .* after", out)
    assert f'generate.py IMAGE -q "Whose flag is it?" --model {tmp_path / "run"}' in out
    assert [row["step"] for row in metrics(tmp_path / "run", "eval_exact_match")] == [0, 2]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_task_is_learnt(here):
    """Across the interruption, one step after another."""
    assert right(here, MODEL) < 0.5
    assert right(here, "runs/mine") >= 0.9 and right(here, "runs/mine-lora") >= 0.9
    assert "green" in (here / "generate.py.out").read_text()  # the photo shows a red light
    steps = [row["step"] for row in metrics(here / "runs/mine", "loss")]
    assert steps == sorted(set(steps))


def test_the_score_of_the_run_is_that_of_its_model(here):
    """On all held-out rows."""
    last = metrics(here / "runs/mine-lora", "eval_exact_match")[-1]
    assert last["eval_exact_match"] == pytest.approx(right(here, "runs/mine-lora"))
    assert last["eval_exact_match_n"] == 12


@pytest.mark.parametrize("run", ["runs/mine", "runs/mine-lora"])
def test_the_folder_opens_in_transformers(here, run):
    model = AutoModelForImageTextToText.from_pretrained(here / run, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(here / run)
    assert theirs(model, processor, here, 3) == answers(here, run)[:3]
