"""Ask any server of OpenAI's protocol hard images and prompts, and say where it leaves its checkpoint.

    python -m eval doctor http://127.0.0.1:8000/v1 --model ocelli-shapes --reference checkpoints/ocelli-shapes

The server's weights run here as the reference, in float32 through the eager path. Prompt tokens, tokens and,
where the server gives them, logprobs are compared. Where they differ, known mistakes are tried, and those
that lead to the server's answer are named.
Exit status: 0 if every case passes, 1 if one does not, 2 with one sentence if the server cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path

from eval.probes import cases
from inference.flags import MODEL, Parser, check_model, model, positive
from messages import for_terminal


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m eval doctor", description=__doc__)
    add = parser.add_argument
    add("url", help="address of the server, with its /v1")
    add("--model", required=True, help="the model's name on the server")
    add("--reference", type=model, required=True, metavar="CHECKPOINT", help=f"the same weights: {MODEL}")
    key = os.environ.get("OPENAI_API_KEY")
    add("--api-key", default=key, metavar="KEY", help="key of the server (default: OPENAI_API_KEY)")
    add("--json", type=Path, metavar="FILE", help="write the findings there, too")
    tolerance = "nats within which a difference of logprobs is rounding (default 0.02; 0.2 suits bfloat16)"
    add("--tolerance", type=float, default=0.02, metavar="NATS", help=tolerance)
    add("--tokens", type=positive, default=8, metavar="N", help="tokens of each answer (default 8)")
    seconds = "seconds that a request may take (default 600)"
    add("--timeout", type=positive, default=600, metavar="SECONDS", help=seconds)
    return parser


def main(arguments: list[str]) -> int:
    """The exit status; a user's error is raised."""
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if not settings.tolerance >= 0:
        parser.error(f"--tolerance: expected 0 or more, got {settings.tolerance}")
    check_model(settings.reference, None)
    from eval.reference import FAULT, Client, Reference, ServerError  # imports torch

    client = Client(settings.url, settings.model, settings.api_key, settings.timeout)
    client.check()
    if settings.json:
        settings.json.touch()  # whether it can be written, before minutes of questions
    reference = Reference(settings.reference, settings.tolerance, settings.tokens)
    findings, answered = [], False
    for case in cases():
        answer = client.ask(case.messages, settings.tokens)
        finding = reference.examine(case, answer)
        findings.append(finding)
        answered = answered or not answer.problem
        said = f": {finding.said}" if finding.said else ""
        print(for_terminal(f"{finding.kind:9} {finding.case}{said}"), flush=True)
    counts = Counter(finding.kind for finding in findings)
    if settings.json:
        settings.json.write_text(json.dumps([one._asdict() for one in findings], indent=2) + "\n")
    print(f"{len(findings)} cases: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if not answered:
        raise ServerError(
            f"{settings.url}: the server answered nothing; is {settings.model!r} its model's name?"
        )
    return int(counts[FAULT] > 0)
