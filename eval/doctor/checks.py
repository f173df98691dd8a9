"""What a server can be held to without any reference: the protocol, and its own answers.

Each check takes a client, and raises a `Fault` where the server does not do as it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eval.doctor.cases import QUESTION, scene, user, written
from eval.doctor.client import Answer, Client
from messages import counted

GOOD, ROUNDING, REFUSED, FAULT = "good", "rounding", "refused", "FAULT"
LONG = 24  # tokens of an answer that a check would like to have


class Finding(NamedTuple):
    """What came out of a case: one of the four kinds above, and what is to be said of it."""

    case: str
    kind: str
    said: str = ""


class Fault(Exception):
    """What a server does wrong, in words; `refused`: it says that it cannot do this."""

    def __init__(self, said: str, refused: bool = False):
        super().__init__(said)
        self.refused = refused


def broken(answer: Answer) -> str:
    """What is wrong with an answer whoever gave it, "" if nothing is."""
    if answer.problem:
        return answer.problem if answer.status in (0, 200) else f"status {answer.status}: {answer.problem}"
    if answer.status != 200:
        return f"status {answer.status}: {answer.error}"
    return "" if answer.texts else "no choices"


def ask(client: Client, question: str = QUESTION, **fields) -> Answer:
    """A sound answer to a question about the plain image. Raises Fault."""
    answer = client.ask([user(written(scene()), question)], **{"max_tokens": LONG, **fields})
    if said := broken(answer):
        raise Fault(said, answer.refused)
    return answer


def expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise Fault(f"{what} {got!r}, expected {expected!r}")


def lists_its_model(client: Client) -> None:
    names = client.models()
    if names is None:
        raise Fault("/models has no list of models")
    expect(f"/models: whether it lists {client.model!r} is", client.model in names, True)


def counts_tokens(client: Client) -> None:
    prompt = ask(client).prompt_tokens
    expect(f"usage: whether prompt_tokens is above 1 is (it is {prompt})", (prompt or 0) > 1, True)


def repeats_itself(client: Client) -> None:
    first = ask(client)
    expect("the second of two greedy answers is", ask(client).texts, first.texts)


def streams(client: Client) -> None:
    whole, pieces = ask(client), ask(client, stream=True)
    expect("the stream has", pieces.texts, whole.texts)
    expect("the stream ends with", pieces.finish, whole.finish)
    if pieces.prompt_tokens is not None:
        expect("the stream counts in its prompt", pieces.prompt_tokens, whole.prompt_tokens)
        expect("the stream counts in its answer", pieces.completion_tokens, whole.completion_tokens)


def obeys_max_tokens(client: Client) -> None:
    whole, answer = ask(client), ask(client, max_tokens=1)
    got = f"max_tokens 1 gave {answer.first.text!r}"
    if (answer.completion_tokens or 0) > 1:
        raise Fault(f"{got}, of {answer.completion_tokens} tokens")
    if not whole.first.text.strip().startswith(answer.first.text.strip()):
        raise Fault(f"{got}, which {whole.first.text!r} does not begin with")
    if len(answer.first.text) < len(whole.first.text):
        expect("an answer cut by max_tokens ends with", answer.finish, ["length"])
    elif (whole.completion_tokens or 0) > 2:
        raise Fault(f"{got}, the whole answer")


def refuses_nonsense(client: Client) -> None:
    """What cannot be answered is refused, and the server goes on."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGFuIGltYWdl"}}
    message = {"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}
    for what, body in {
        "an image that is none": {"messages": [message], "max_tokens": 2},
        "messages that are a text": {"messages": "hello", "max_tokens": 2},
        "no messages at all": {},
    }.items():
        answer = client.send({"model": client.model, **body})
        if not answer.refused or answer.problem:
            raise Fault(f"{what} got status {answer.status} ({answer.problem}), expected a refusal (400)")
    ask(client, max_tokens=2)


def obeys_stop_strings(client: Client) -> None:
    text = ask(client).first.text
    if len(text) < 2:
        return
    stop = text[len(text) // 2 :][:3]
    expected = text[: text.index(stop)]
    for stream in (False, True):
        answer = ask(client, stop=[stop], stream=stream)
        expect(f"with stop {stop!r} the answer is", answer.first.text.strip(), expected.strip())
        expect("an answer that a stop string ended ends with", answer.finish, ["stop"])


def gives_several(client: Client) -> None:
    one, answer = ask(client), ask(client, n=2)
    if len(answer.texts) != 2:
        raise Fault(f"n=2 gave {counted(len(answer.texts), 'answer')}")
    expect("greedy answers of n=2 are", answer.texts, one.texts * 2)


def gives_logprobs(client: Client) -> None:
    plainly, answer = ask(client), ask(client, logprobs=True)
    tokens = answer.first.logprobs
    if tokens is None:
        raise Fault("logprobs were asked for, and none came")
    expect("with logprobs the answer is", answer.texts, plainly.texts)
    if not all(logprob <= 1e-6 for _, logprob in tokens):
        raise Fault("a logprob is above zero")
    text = "".join(token for token, _ in tokens)
    if "\ufffd" not in text and not text.strip().startswith(answer.first.text.strip()):
        raise Fault(f"the tokens of the logprobs make {text!r}, the answer is {answer.first.text!r}")


def obeys_seeds(client: Client) -> None:
    sampled = {"temperature": 1.5, "seed": 11}  # much to choose from
    first, *others = (ask(client, "Describe the picture.", **sampled).texts for _ in range(3))
    expect("of one seed, answers are", others, [first] * 2)


CHECKS: dict[str, Callable[[Client], None]] = {
    "list of models": lists_its_model,
    "usage": counts_tokens,
    "the same answer twice": repeats_itself,
    "stream": streams,
    "max_tokens": obeys_max_tokens,
    "refusals": refuses_nonsense,
}
# What a server may do without, if it says so by a status from 400 to 499.
OPTIONAL: dict[str, Callable[[Client], None]] = {
    "stop strings": obeys_stop_strings,
    "n": gives_several,
    "logprobs": gives_logprobs,
    "seed": obeys_seeds,
}


def run_check(name: str, client: Client) -> Finding:
    try:
        (CHECKS | OPTIONAL)[name](client)
    except Fault as fault:
        refused = name in OPTIONAL and fault.refused
        return Finding(name, REFUSED if refused else FAULT, str(fault))
    return Finding(name, GOOD)
