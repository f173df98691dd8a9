"""Prove on a machine, with a model's own weights, that every way to an answer gives transformers' answer.

    python -m eval prove checkpoints/ocelli-shapes          # a minute, offline; needs transformers alone
    python -m eval prove Qwen/Qwen3-VL-2B-Instruct --json prove.json --html prove.html
    python -m eval prove runs/mine --device cuda --full     # longer answers
    python -m eval prove --check prove.json                 # another's page: the same greedy tokens here?
    python -m eval prove MODEL --url http://127.0.0.1:8000/v1 --name M      # another engine's answers

Without --url and --check it goes through files, inputs (ids and pixels beside transformers'), numbers
(logits, and what rounding costs), ways (uncached, cached, chunks, batches, sessions, kept prefixes,
schedulers, lookups, compiled) and speed. With --url 39 hard images and prompts are asked.
Exit status: 0 if nothing differs, 1 if something does, 2 with one sentence if it cannot be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.card import open_card, put_section
from eval.results import write_json, write_text
from inference.errors import RequestError
from inference.flags import MODEL, Parser, check_model, device, model
from messages import for_terminal

MARKS = {True: "ok", False: "DIFFERS", None: "-"}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m eval prove", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", type=model, help=MODEL)
    add("--revision", help="branch, tag or commit of the model on the Hub")
    add("--device", type=device, default="auto", help="auto (default: the best available), cpu, cuda, mps")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="shorter answers")
    size.add_argument("--full", action="store_true", help="longer answers")
    add("--json", type=Path, metavar="FILE", help="write what was found, with versions and tokens")
    add("--html", type=Path, metavar="FILE", help="write it as one page, for an issue or a model card")
    add("--card", action="store_true", help="write it into the README.md of the model's folder, as its Proof")
    add("--check", type=Path, metavar="FILE", help="repeat the greedy tokens of somebody's prove.json")
    add("--url", help="a server of OpenAI's protocol that has the model, with its /v1")
    add("--name", help="the model's name on the server (default: its folder's); OPENAI_API_KEY is its key")
    tolerance = "nats within which a server's logprobs are rounded (default 0.02; 0.2 suits bfloat16)"
    add("--tolerance", type=float, default=0.02, metavar="NATS", help=tolerance)
    return parser


def main(arguments: list[str]) -> int:
    """The exit status; a user's error is raised."""
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if settings.check is not None:
        settings.model = settings.model or read(settings.check)["model"]
    if settings.model is None:
        parser.error("expected a model, or --check with a prove.json")
    check_model(settings.model, settings.revision)
    card = open_card(Path(settings.model)) if settings.card else None
    for path in filter(None, (settings.json, settings.html)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # whether it can be written, before minutes of work
    from eval.proof import Client, Proof, of_server, repeated  # imports torch and transformers

    size = "quick" if settings.quick else "full" if settings.full else "usual"
    on = "cpu" if settings.url else settings.device
    proof = Proof(settings.model, settings.revision, on, size)
    if settings.url:
        name = settings.name or Path(settings.model).name
        client = Client(settings.url, name, os.environ.get("OPENAI_API_KEY"))
        lines = of_server(proof, client, settings.tolerance)
    else:
        lines = proof.steps() if settings.check is None else repeated(proof, read(settings.check)["greedy"])
    part = ""
    for line in lines:
        if line.part != part:
            print(f"\n{(part := line.part)}")
        print(for_terminal(f"  {MARKS[line.same]:8} {line.name}: {line.said}"), flush=True)
        if line.same is False and line.repeat:
            print(for_terminal(f"           shown by: {line.repeat}"))
    print(f"\n{proof.verdict()}")
    report = proof.report()
    if settings.json:
        write_json(settings.json, report)
    if settings.html:
        write_text(settings.html, page(report))
    if card is not None:
        rows = [f"| {MARKS[one.same]} | {one.part}: {one.name} | {one.said} |" for one in proof.lines]
        table = "\n".join(["| | checked | found |", "|---|---|---|", *rows])
        put_section(card, "Proof", f"{report['verdict']}\n\n{table}")
        card.save(Path(settings.model) / "README.md")
    return int(not proof.holds)


def read(path: Path) -> dict:
    """An earlier prove.json. Raises RequestError where the file is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found | {"model": str(found["model"]), "greedy": list(found["greedy"])}
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{path}: expected a prove.json, got something else") from None


def page(report: dict) -> str:
    """The report as one page without any request."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("prove.html.jinja").render(report=report, marks=MARKS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
