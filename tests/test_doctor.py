"""The doctor: a sound server passes without an alarm, each planted fault is found, and most are named."""

from __future__ import annotations

import json

import pytest

from eval.__main__ import main
from eval.doctor.cases import MISTAKES, cases, images
from eval.doctor.checks import CHECKS, FAULT, GOOD, OPTIONAL, REFUSED, Finding
from eval.doctor.client import Client
from eval.doctor.command import examine
from eval.doctor.reference import Reference
from eval.tasks import DEFAULT_MODEL
from inference.checkpoint import open_checkpoint
from tests.doctor_server import NAME, serving
from tests.waiting import free_port

# What is planted, the cases that must show it, and the mistake that they name (a check names none).
FAULTS = {
    "EXIF ignored": ({f"EXIF orientation {n}" for n in range(2, 9)}, "EXIF orientation ignored"),
    "alpha on black": ({"alpha", "palette with transparency"}, "alpha blended on black"),
    "16 bits clipped": ({"16 bits"}, "16 bits clipped to 8"),
    "images turned around": ({"three images in order", "two images"}, "images in reverse order"),
    "images first": ({"image after the text", "image between texts"}, "images moved in front of the text"),
    "special tokens read": ({"<|im_start|> typed", "<end_of_utterance> typed"}, "special tokens not escaped"),
    "BOS twice": ({"plain PNG", "text beyond ASCII"}, "BOS twice"),
    "no system": ({"system message"}, "system message dropped"),
    "last turn alone": ({"three turns"}, "earlier turns dropped"),
    "text stripped": ({"white space around"}, "white space around the text stripped"),
    "max_tokens ignored": ({"max_tokens"}, ""),
    "stop ignored": ({"stop strings"}, ""),
    "stream loses a letter": ({"stream"}, ""),
    "never greedy": ({"the same answer twice"}, ""),
    "n ignored": ({"n"}, ""),
    "no logprobs": ({"logprobs"}, ""),
    "seed ignored": ({"seed"}, ""),
    "refusals break": ({"refusals"}, ""),
    "text in parts": ({"usage", "max_tokens", "plain PNG"}, ""),
}


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference():
    return Reference(str(DEFAULT_MODEL), tolerance=0.02, tokens=8)


def findings(url: str, reference: Reference | None) -> dict[str, Finding]:
    return {one.case: one for one in examine(Client(url, NAME), reference, tokens=8)}


def test_a_sound_server_raises_no_alarm(checkpoint, reference):
    with serving(checkpoint) as url:
        found = findings(url, reference)
    assert len(found) == len(CHECKS) + len(OPTIONAL) + len(cases())
    assert not [one for one in found.values() if one.kind not in (GOOD, REFUSED)]
    assert {name for name, one in found.items() if one.kind == REFUSED} == {"1 x 4000", "4000 x 1"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault, checkpoint, reference):
    shown, name = FAULTS[fault]
    with serving(checkpoint, fault) as url:
        found = findings(url, reference)
    assert shown <= {case for case, one in found.items() if one.kind == FAULT}
    assert not {case: found[case].said for case in shown if name not in found[case].said}


def test_the_names_of_mistakes_and_cases_are_their_own():
    for names in ([one.name for one in MISTAKES], [*CHECKS, *OPTIONAL, *(one.name for one in cases())]):
        assert len(names) == len(set(names))
    assert images().keys() <= {one.name for one in cases()}


def test_the_command_with_a_reference_and_without(checkpoint, tmp_path, capsys):
    file = tmp_path / "findings.json"
    with serving(checkpoint) as url:
        missing = str(tmp_path / "none" / "findings.json")
        assert main(["doctor", url, "--model", NAME, "--json", missing]) == 2
        assert "good" not in capsys.readouterr().out  # it says so before it asks
        assert main(["doctor", url, "--model", NAME, "--json", str(file), "--api-key", "clé"]) == 0
        assert main(["doctor", url, "--model", NAME, "--reference", str(DEFAULT_MODEL)]) == 0
    with serving(checkpoint, "stop ignored") as url:
        assert main(["doctor", url, "--model", NAME, "--json", str(file)]) == 1
    faults = [one["case"] for one in json.loads(file.read_text()) if one["kind"] == FAULT]
    assert faults == ["stop strings"]


@pytest.mark.parametrize("url", ["no address", f"http://127.0.0.1:{free_port()}/v1", "ftp://127.0.0.1/v1"])
def test_a_server_that_cannot_be_asked_is_one_sentence(url, capsys):
    assert main(["doctor", url, "--model", "m"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
