"""What a server can be held to without any reference: the protocol, and its own answers.

Each check takes a client and returns a `Finding`, or None where all is well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval.doctor.cases import QUESTION, scene, user, written
from eval.doctor.client import Answer, Client

GOOD, ROUNDING, REFUSED, FAULT = "good", "rounding", "refused", "FAULT"
LONG = 24  # tokens of an answer that a check would like to have


@dataclass(frozen=True)
class Finding:
    """What came out of a case: one of the four kinds above, and what is to be said of it."""

    case: str
    kind: str
    said: str = ""


def plain(question: str = QUESTION):
    return [user(written(scene()), question)]


def broken(answer: Answer) -> str:
    """What is wrong with an answer whoever gave it, "" if nothing is."""
    if answer.problem:
        return answer.problem if answer.status in (0, 200) else f"status {answer.status}: {answer.problem}"
    if answer.status != 200:
        return f"status {answer.status}: {answer.error}"
    if not answer.texts:
        return "no choices"
    return ""


def twice(client: Client) -> str:
    first, second = (client.ask(plain(), max_tokens=LONG) for _ in range(2))
    if said := broken(first) or broken(second):
        return said
    same = first.texts == second.texts
    return "" if same else f"two greedy answers differ: {first.text!r}, {second.text!r}"


def streamed(client: Client) -> str:
    whole, pieces = client.ask(plain(), max_tokens=LONG), client.ask(plain(), max_tokens=LONG, stream=True)
    if said := broken(whole) or broken(pieces):
        return said
    if whole.texts != pieces.texts:
        return f"the stream has {pieces.text!r}, the whole answer is {whole.text!r}"
    if whole.finish != pieces.finish:
        return f"the stream ends with {pieces.finish}, the whole answer with {whole.finish}"
    counts = whole.prompt_tokens, whole.completion_tokens
    if pieces.prompt_tokens is not None and counts != (pieces.prompt_tokens, pieces.completion_tokens):
        return "the stream's usage is another than the whole answer's"
    return ""


def limited(client: Client) -> str:
    whole = client.ask(plain(), max_tokens=LONG)
    answer = client.ask(plain(), max_tokens=1)
    if said := broken(whole) or broken(answer):
        return said
    if answer.completion_tokens is not None and answer.completion_tokens > 1:
        return f"max_tokens 1 gave {answer.completion_tokens} tokens"
    if not whole.text.strip().startswith(answer.text.strip()):
        return f"max_tokens 1 gave {answer.text!r}, which {whole.text!r} does not begin with"
    if (whole.completion_tokens or 0) > 2 and len(answer.text) >= len(whole.text):
        return f"max_tokens 1 gave the whole answer {answer.text!r}"
    if len(answer.text) < len(whole.text) and answer.finish != ["length"]:
        return f"an answer cut by max_tokens ends with {answer.finish[0]!r}, expected 'length'"
    return ""


def counted(client: Client) -> str:
    answer = client.ask(plain(), max_tokens=LONG)
    if said := broken(answer):
        return said
    if answer.prompt_tokens is None:
        return "usage is missing"
    return "" if answer.prompt_tokens > 1 else f"usage: prompt_tokens is {answer.prompt_tokens}"


def stopped(client: Client) -> str:
    whole = client.ask(plain(), max_tokens=LONG)
    if said := broken(whole):
        return said
    if len(whole.text) < 2:
        return ""
    stop = whole.text[len(whole.text) // 2 :][:3]
    expected = whole.text[: whole.text.index(stop)]
    for stream in (False, True):
        answer = client.ask(plain(), max_tokens=LONG, stop=[stop], stream=stream)
        if said := broken(answer):
            return said
        if answer.text.strip() != expected.strip():
            return f"with stop {stop!r} the answer is {answer.text!r}, expected {expected!r}"
        if answer.finish != ["stop"]:
            return f"an answer that a stop string ended has finish_reason {answer.finish[0]!r}"
    return ""


def several(client: Client) -> str:
    one, answer = client.ask(plain(), max_tokens=LONG), client.ask(plain(), max_tokens=LONG, n=2)
    if said := broken(one) or broken(answer):
        return said
    if len(answer.texts) != 2:
        return f"n=2 gave {len(answer.texts)} answers"
    return "" if set(answer.texts) == set(one.texts) else f"greedy answers of n=2 differ: {answer.texts}"


def scored(client: Client) -> str:
    plainly = client.ask(plain(), max_tokens=LONG)
    answer = client.ask(plain(), max_tokens=LONG, logprobs=True)
    if said := broken(plainly) or broken(answer):
        return said
    tokens = answer.logprobs[0]
    if tokens is None:
        return "logprobs were asked for, and none came"
    if answer.texts != plainly.texts:
        return f"the answer changes with logprobs: {plainly.text!r}, {answer.text!r}"
    if any(not logprob <= 1e-6 for _, logprob in tokens):
        return "a logprob is above zero"
    text = "".join(token for token, _ in tokens)
    if "\ufffd" not in text and not text.strip().startswith(answer.text.strip()):
        return f"the tokens of the logprobs make {text!r}, the answer is {answer.text!r}"
    return ""


def seeded(client: Client) -> str:
    asked = {"max_tokens": LONG, "temperature": 1.5, "seed": 11}  # much to choose from
    first, *others = (client.ask(plain("Describe the picture."), **asked) for _ in range(3))
    for other in others:
        if said := broken(first) or broken(other):
            return said
        if first.texts != other.texts:
            return f"two answers of one seed differ: {first.text!r}, {other.text!r}"
    return ""


def nonsense(client: Client) -> str:
    """What cannot be answered is refused, and the server goes on."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGFuIGltYWdl"}}
    message = {"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}
    for what, body in (
        ("an image that is none", {"model": client.model, "messages": [message], "max_tokens": 2}),
        ("messages that are a text", {"model": client.model, "messages": "hello", "max_tokens": 2}),
        ("no messages at all", {"model": client.model}),
    ):
        answer = client.send(body)
        if not answer.refused:
            return f"{what} got status {answer.status or answer.problem}, expected a refusal (400)"
        if answer.problem:
            return f"{what} got status {answer.status}, {answer.problem}"
    return broken(client.ask(plain(), max_tokens=2))


def unlisted(client: Client) -> str:
    names = client.models()
    if names is None:
        return "/models has no list of models"
    return "" if client.model in names else f"/models does not list {client.model!r}"


CHECKS: dict[str, Callable[[Client], str]] = {
    "list of models": unlisted,
    "usage": counted,
    "the same answer twice": twice,
    "stream": streamed,
    "max_tokens": limited,
    "refusals": nonsense,
}
# What a server may do without, if it says so by a status from 400 on.
OPTIONAL: dict[str, Callable[[Client], str]] = {
    "stop strings": stopped,
    "n": several,
    "logprobs": scored,
    "seed": seeded,
}


def run_check(name: str, client: Client) -> Finding:
    said = (CHECKS | OPTIONAL)[name](client)
    if not said:
        return Finding(name, GOOD)
    refused = name in OPTIONAL and said.startswith("status 4")
    return Finding(name, REFUSED if refused else FAULT, said)
