"""docs/deploy.md: `transformers serve` on the embedded model answers OpenAI's client as generate.py does."""

from __future__ import annotations

import base64
import io
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from data.images import load_image
from tests.documents import ROOT, python_blocks, shell_commands
from tests.waiting import free_port

FOLDER = "checkpoints/ocelli-shapes"
EXAMPLE = "assets/example.png"


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Of the server that the page's command starts, on CPU and offline."""
    (command,) = [
        command.line
        for command in shell_commands(ROOT / "docs/deploy.md")
        if "transformers serve" in command.line
    ]
    port, log = free_port(), tmp_path_factory.mktemp("served") / "log"
    words = [*shlex.split(command)[1:], "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [Path(sys.executable).with_name("transformers"), *words],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
        )
        try:
            deadline = time.monotonic() + 600
            while not healthy(port):
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            server.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def ask(port):
    """Put messages to the server: (text, finish reason, tokens), in one piece or streamed."""
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)

    def ask(messages: list[dict], stream: bool = False, **options) -> tuple[str, str, int]:
        made = client.chat.completions.create(model=FOLDER, messages=messages, stream=stream, **options)
        if not stream:
            (choice,) = made.choices
            return choice.message.content, choice.finish_reason, made.usage.completion_tokens
        chunks = list(made)
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        tokens = chunks[-1].usage.completion_tokens
        assert len(pieces) == tokens - 1  # token by token, the last one is the stop
        return "".join(pieces), chunks[-1].choices[0].finish_reason, tokens

    return ask


def message(question: str, *images: str | Path) -> dict:
    """As the page says to send it: `load_image` makes PNG of any image."""
    content: list[dict] = []
    for name in images:
        load_image(ROOT / name).save(png := io.BytesIO(), "PNG")
        url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}


def check(as_json, answer: tuple[str, str, int], *arguments, model=ROOT / FOLDER) -> None:
    """Against what generate.py says, in the server's terms."""
    (made,) = as_json(*arguments, "--dtype", "float32", "--device", "cpu", model=model)
    text, *rest = answer
    assert text.removeprefix(" ") == made["answers"][0]
    assert rest == [made["stop_reasons"][0], len(made["token_ids"][0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "stream"),
    [
        ("What colour is the star?", False),
        ("How many shapes are there?", True),
    ],
)
def test_an_image(ask, as_json, question, stream):
    check(as_json, ask([message(question, EXAMPLE)], stream), ROOT / EXAMPLE, "-q", question)


@pytest.mark.slow
def test_two_images_and_a_system_message(ask, as_json):
    images, question, told = ("assets/three.png", EXAMPLE), "How many shapes are there?", "Be short."
    answer = ask([{"role": "system", "content": told}, message(question, *images)])
    check(as_json, answer, *(ROOT / name for name in images), "-q", question, "--system", told)


@pytest.mark.slow
def test_the_client_of_the_page(port, capsys):
    """That of serve.py, as docs/deploy.md says, with the folder for a name."""
    block = next(block for block in python_blocks(ROOT / "docs/serve.md") if "OpenAI(" in block)
    assert "localhost:8000" in block and '"ocelli-shapes"' in block  # the default port of both
    block = block.replace("localhost:8000", f"localhost:{port}").replace('Path("', f'Path("{ROOT}/')
    exec(compile(block.replace('"ocelli-shapes"', f'"{FOLDER}"'), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out == " blue\n"
