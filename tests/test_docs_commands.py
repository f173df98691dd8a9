"""What the pages tell a reader to run is run as written, in a copy of the checkout, or says what it needs.

Commands of python start in a process that is forked from one that has imported the libraries, because
importing them takes longer than most of the commands.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from tests.documents import PAGES, ROOT, Block, anchors, blocks, inline_code, links, prose, shell_commands
from tests.evaluations import save_rows
from tests.waiting import PATIENCE

# Commands that another test runs, in full or as a reader would make them small.
RUN_ELSEWHERE = {
    ".venv/bin/transformers serve checkpoints/ocelli-shapes --dtype float32": "tests/test_served.py",
    "make demo": "tests/test_docs_commands.py",  # test_the_page_of_make_demo
    "make serve": "tests/test_serve.py",
    ".venv/bin/python train.py runs/mine/run.yaml": "tests/test_finetune.py",
    ".venv/bin/python -m pytest tests/test_cli.py -k json": "tests/test_cli.py",
    '.venv/bin/python generate.py -q "Describe the picture." --no-cache --stats': "tests/test_cli.py",
    ".venv/bin/python -m eval --tasks shapes --model runs/shapes --limit 20 --controls": "tests/test_eval.py",
    ".venv/bin/python -m eval --tasks shapes --limit 20 --controls": "tests/test_eval.py",
    ".venv/bin/python -m tests.walks": "tests/test_architecture.py",
    # Of those that need minutes, with a small model, few questions, one round:
    ".venv/bin/python -m benchmarks.latency decode --systems ours-fast,transformers,llama.cpp --prompts 1 "
    "--contexts 1108,8000 --tokens 24 --rounds 5": "tests/test_benchmarks.py",
    ".venv/bin/python -m benchmarks.latency decode --systems ours-fast,llama.cpp --batch 1,8,16 "
    '--contexts "" --tokens 24 --rounds 5': "tests/test_benchmarks.py",
    ".venv/bin/python -m eval prove checkpoints/ocelli-shapes --url http://127.0.0.1:8000/v1 --name "
    "ocelli-shapes": "tests/test_prove.py",
    ".venv/bin/python -m eval prove --check prove.json": "tests/test_prove.py",
    ".venv/bin/python -m eval prove checkpoints/ocelli-shapes --quick": "tests/test_prove.py",
    ".venv/bin/python -m benchmarks.latency first-token --rounds 5": "tests/test_benchmarks.py",
    ".venv/bin/python -m benchmarks.latency load": "tests/test_benchmarks.py",
    ".venv/bin/python -m benchmarks.throughput prefix": "tests/test_benchmarks.py",
    ".venv/bin/python -m benchmarks.throughput batching": "tests/test_benchmarks.py",
}
ELSEWHERE_PYTHON = {"localhost:8000": "tests/test_serve.py"}  # by what stands in the block
NEEDS = re.compile(
    r"((a |an )?(network|GPU|GPUs|hours|minutes|token|Mac|Slurm cluster|SkyPilot|cloud|run of train\.py"
    r"|Ray|chromium|serve\.py|balancer|docker|llama\.cpp|vllm|sglang|mlx-vlm|optimum-onnx|torchvision|requirements-\w+\.txt|recipes/\w+/requirements\.txt)"
    r"(, | and |, and )?)+"
)
PROGRAMS = r"(python |torchrun |pip |make [a-z]|vllm |optimum-cli |transformers |playwright |\S+\.py )"
LIBRARIES = [
    *("torch", "torch._dynamo", "torch.nn.attention.flex_attention", "transformers.modeling_utils"),
    *("transformers.models.idefics3", "transformers.models.auto.tokenization_auto", "datasets", "PIL.Image"),
]
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
LISTED = [command for page in PAGES for command in shell_commands(page)]
SERVER = multiprocessing.get_context("forkserver")


def runnable() -> list[tuple[str, str | None]]:
    """Each different command that is to be run here, and what it has to print where a page shows it."""
    found: dict[str, str | None] = {}
    for block in ALL_BLOCKS:
        for command in (listed := block.commands() if block.language == "bash" else []):
            if command.need is None and command.line not in RUN_ELSEWHERE:
                found[command.line] = (block.output if len(listed) == 1 else None) or found.get(command.line)
    return list(found.items())


def is_run_here(block: Block) -> bool:
    elsewhere = block.need or any(mark in block.text for mark in ELSEWHERE_PYTHON)
    return block.language == "python" and not elsewhere


# ------------------------------------------------------------------------------------------------ a checkout
@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A copy of the checkout with this environment as its .venv, and what the pages take for granted: a
    photo, rows and questions about it, and a model of one's own."""
    folder = tmp_path_factory.mktemp("docs") / "ocelli"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "tests", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=left_out)
    venv = folder / ".venv"
    venv.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "requirements.installed":
            (venv / entry.name).symlink_to(entry)
    shutil.copy(folder / "requirements.txt", venv / "requirements.installed")
    with Image.open(ROOT / "assets/example.png") as image:
        image.convert("RGB").save(folder / "photo.jpg")
    questions = ("What colour is the star?", "How many shapes are there?", "What word do you see?")
    rows = [{"image": "photo.jpg", "question": question} for question in questions]
    save_rows(folder / "questions.jsonl", rows)
    save_rows(folder / "rows.jsonl", [row | {"answer": "blue"} for row in rows])
    for name in ("mine", "shapes", "flags"):
        shutil.copytree(folder / "checkpoints/ocelli-shapes", folder / "runs" / name)
    return folder


@pytest.fixture(scope="module")
def measured(here) -> None:
    """The folders of three evaluations, of two models and on rows of one's own."""
    words = ["-m", "eval", "--data", "rows.jsonl", "--metric", "exact_match", "--output", "runs/eval/a"]
    fork_python(here, words)
    for name in ("b", "rows-mine"):
        if not (here / "runs/eval" / name).exists():  # as the pages' own commands leave it
            shutil.copytree(here / "runs/eval/a", here / "runs/eval" / name)


# --------------------------------------------------------------------------------------------------- running
def fork_python(folder: Path, words: list[str]) -> str:
    """`python WORDS` in a folder: what it printed to stdout. It must exit with 0."""
    SERVER.set_forkserver_preload(LIBRARIES)
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        process = SERVER.Process(target=be_python, args=(str(folder), words, str(out), str(err)))
        process.start()
    process.join()
    assert process.exitcode == 0, err.read_text(encoding="utf-8") + out.read_text(encoding="utf-8")[-2000:]
    return out.read_text(encoding="utf-8")


def be_python(folder: str, words: list[str], out: str, err: str) -> None:
    """Become `python WORDS`, started in a folder. In a process of its own."""
    for path, number in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
    os.chdir(folder)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry and Path(entry) != ROOT)]
    if words[0] == "-c":
        sys.argv = ["-c"]
        exec(compile(words[1], "<example>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def run(folder: Path, line: str) -> str:
    """A line as a shell would run it in a folder: what it printed. It must exit with 0."""
    words = shlex.split(line)
    if words[0] == ".venv/bin/python" and not re.search(r"[|&;<>$*]", line):
        return fork_python(folder, words[1:])
    environment = {name: value for name, value in os.environ.items() if name not in ("IMAGE", "QUESTION")}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("line", "shown"), [pytest.param(*each, id=each[0]) for each in runnable()])
def test_a_command_ends_well(line, shown, here, request):
    if "runs/eval/" in line:
        request.getfixturevalue("measured")
    printed = run(here, line)
    assert shown is None or printed.strip() == shown.strip()


@pytest.mark.slow
@pytest.mark.parametrize("block", [*filter(is_run_here, ALL_BLOCKS)], ids=lambda block: block.text[:40])
def test_a_python_example_ends_well(block: Block, here):
    printed = fork_python(here, ["-c", block.text])
    assert block.output is None or printed.rstrip() == block.output.rstrip()


@pytest.mark.slow
def test_the_page_of_make_demo(here):
    """It runs until somebody stops it, and then ends as make does after Ctrl-C, without a complaint."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["make", "demo"], cwd=here, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    watchdog = threading.Timer(2 * PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        said = next((line for line in process.stderr if "http://" in line or "error" in line), "nothing")
        *_, address = re.findall(r"http://\S+", said) or [said]  # for programs, then for people
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            assert answer.status == 200 and b"Ocelli" in answer.read()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE)
        watchdog.cancel()
    # make itself ends by the signal; of a program that ends with a status it says "*** [...] Error".
    assert process.returncode in (0, -signal.SIGINT)
    assert "Traceback" not in rest and "***" not in rest, rest


# ---------------------------------------------------------------------------------------------- what is said
def test_every_block_is_one_that_is_checked():
    """A mistyped need or language would only leave a command unchecked."""
    assert {block.language for block in ALL_BLOCKS} <= {"bash", "python", "text"}
    assert not [need for command in LISTED if (need := command.need) and not NEEDS.fullmatch(need)]
    assert {command.line for command in LISTED} >= RUN_ELSEWHERE.keys()
    assert all((ROOT / file).exists() for file in (*RUN_ELSEWHERE.values(), *ELSEWHERE_PYTHON.values()))
    for page in PAGES:
        assert "```" not in prose(page), f"{page.name}: a fence without its end"
        assert not re.search(r"^    \S", prose(page), re.MULTILINE), f"{page.name}: an indented block"


def test_commands_in_the_text_are_those_of_the_blocks():
    """Prose names commands, or their beginnings, that stand in a block somewhere."""
    listed = [bare(command.line) for command in LISTED]
    for page in PAGES:
        for span in inline_code(page):
            if re.match(PROGRAMS, bare(span)):
                assert any(line.startswith(bare(span)) for line in listed), f"{page.name}: {span}"


def bare(line: str) -> str:
    """Without variables in front of it, and without what differs from one environment to another."""
    line = re.sub(r"^(\w+=\S+ )+", "", line).replace(".venv/bin/", "").replace("python3 ", "python ")
    return re.sub(r"^python (?=\S+\.py\b)", "", line)


def test_the_readme_names_every_folder_of_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = {path.name for path in ROOT.iterdir() if any(path.glob("*.py")) and path.name[0] != "."}
    assert {"models", "benchmarks", "tests"} <= folders
    assert not [name for name in folders if f"`{name}/`" not in text]
    assert not [path.name for path in ROOT.glob("*.py") if f"`{path.name}`" not in text]


def test_links_lead_somewhere():
    found = [(page, target) for page in PAGES for target in links(page) if not re.match(r"[a-z]+:", target)]
    docs = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"]
    assert {target for page, target in found if page == ROOT / "docs/README.md"} >= set(docs)
    for page, target in found:
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
