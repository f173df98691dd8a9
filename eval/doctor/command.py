"""Ask any server of OpenAI's protocol hard images and prompts, and say where it leaves the reference.

    python -m eval doctor http://127.0.0.1:8000/v1 --model ocelli-shapes --reference checkpoints/ocelli-shapes
    python -m eval doctor https://example.org/v1 --model M --json findings.json     # its form alone

With --reference the same weights run here, in float32 through the eager path: prompt tokens, tokens and,
where the server gives them, logprobs are compared; where they differ, known mistakes are tried and those that
lead to the server's answer are named. Without it, the protocol and the server's own consistency are checked.
Exit status: 0 if every case passes, 1 if one does not, 2 with one sentence if the server cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eval.doctor.cases import Case, cases
from eval.doctor.checks import CHECKS, FAULT, GOOD, OPTIONAL, REFUSED, ROUNDING, Finding, broken, run_check
from eval.doctor.client import CannotAnswer, Client, ServerError
from inference.flags import MODEL, Parser, check_model, model, positive
from messages import for_terminal

if TYPE_CHECKING:
    from eval.doctor.reference import Reference


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m eval doctor", description=__doc__)
    add = parser.add_argument
    add("url", help="address of the server, with its /v1")
    add("--model", required=True, help="the model's name on the server")
    add("--reference", type=model, metavar="CHECKPOINT", help=f"the same weights: {MODEL}")
    key = os.environ.get("OPENAI_API_KEY")
    add("--api-key", default=key, metavar="KEY", help="key of the server (default: OPENAI_API_KEY)")
    add("--json", type=Path, metavar="FILE", help="write the findings there, too")
    tolerance = "nats within which a difference of logprobs is rounding (default 0.02; 0.2 suits bfloat16)"
    add("--tolerance", type=float, default=0.02, metavar="NATS", help=tolerance)
    add("--tokens", type=positive, default=8, metavar="N", help="tokens of each answer (default 8)")
    seconds = "seconds that a request may take (default 600)"
    add("--timeout", type=positive, default=600, metavar="SECONDS", help=seconds)
    return parser


def examine(client: Client, reference: Reference | None, tokens: int) -> Iterator[Finding]:
    """A finding for each check and each case, as they come."""
    logprobs = False
    for name in (*CHECKS, *OPTIONAL):
        yield (finding := run_check(name, client))
        logprobs = logprobs or (name == "logprobs" and finding.kind == GOOD)
    for case in cases():
        yield examine_case(case, client, reference, tokens, logprobs)


def examine_case(
    case: Case, client: Client, reference: Reference | None, tokens: int, logprobs: bool = False
) -> Finding:
    """How the server's answer to a case compares. It may refuse what the reference refuses, too; without a
    reference it may refuse anything, if it does so with a status from 400 to 499."""
    answer = client.ask(case.messages, max_tokens=tokens, **({"logprobs": True} if logprobs else {}))
    said = broken(answer)
    if reference is None:
        return Finding(case.name, (REFUSED if answer.refused else FAULT) if said else GOOD, said)
    try:
        reference.encode(case.messages)
        difference = None if said else reference.compare(case.messages, answer)
    except CannotAnswer as error:
        fault = bool(said) and not answer.refused
        return Finding(case.name, FAULT if fault else REFUSED, said or f"the reference refuses it: {error}")
    if said or difference is None:
        return Finding(case.name, FAULT if said else GOOD, said)
    if difference.rounding:
        return Finding(case.name, ROUNDING, difference.said)
    causes = reference.explain(case.messages, answer)
    cause = " or ".join(causes) if causes else "no known mistake leads to this answer"
    return Finding(case.name, FAULT, f"{difference.said}: {cause}")


def main(arguments: list[str]) -> int:
    """The exit status; a user's error is raised."""
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if not settings.tolerance >= 0:
        parser.error(f"--tolerance: expected 0 or more, got {settings.tolerance}")
    if settings.reference:
        check_model(settings.reference, None)
    client = Client(settings.url, settings.model, settings.api_key, settings.timeout)
    client.models()  # whether anybody answers
    if settings.json:
        settings.json.touch()  # whether it can be written, before minutes of questions
    reference = None
    if settings.reference:
        from eval.doctor.reference import Reference  # imports torch

        reference = Reference(settings.reference, settings.tolerance, settings.tokens)
    findings = []
    for finding in examine(client, reference, settings.tokens):
        findings.append(finding)
        said = f": {finding.said}" if finding.said else ""
        print(for_terminal(f"{finding.kind:9} {finding.case}{said}"), flush=True)
    counts = Counter(finding.kind for finding in findings)
    if settings.json:
        settings.json.write_text(json.dumps([one._asdict() for one in findings], indent=2) + "\n")
    print(f"{len(findings)} cases: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if not counts[GOOD] + counts[ROUNDING]:
        raise ServerError(
            f"{settings.url}: the server answered nothing; is {settings.model!r} its model's name?"
        )
    return int(counts[FAULT] > 0)
