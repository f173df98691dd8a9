"""What lmms-eval's own scorers say to the cases of `tests.metric_cases`, and the file that keeps it.

    python -m tests.official_scores      # writes tests/fixtures/metrics.json.gz; needs requirements-eval.txt

Every score is computed by lmms-eval's code, but for ROUGE-L: its longest common subsequence is that of the
library that lmms-eval scores captions with, its words and F1 are written here. Nothing here knows our code.
Where a scorer guesses at random, its guesses are enumerated and averaged.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from tests.metric_cases import LETTERS, Case, cases

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "metrics.json.gz"
POPE_SAMPLES = 40  # of one summary


def of_lmms_eval(name: str):
    """A module of lmms-eval by its name within it."""
    return import_module(f"lmms_eval.{name}")


def exact_match(case: Case, **options) -> float:
    """As `Task.process_results` scores a generated answer with several targets."""
    score = of_lmms_eval("api.metrics").exact_match_hf_evaluate
    matches = [score(predictions=[case.answer], references=[target], **options) for target in case.targets]
    return float(any(match["exact_match"] for match in matches))


def vqav2(case: Case) -> float:
    answers = [{"answer": target, "answer_id": n} for n, target in enumerate(case.targets)]
    score = of_lmms_eval("tasks.vqav2.utils").vqav2_process_results
    return score({"answers": answers, "question_id": 0}, [case.answer])["exact_match"]


def textvqa(case: Case) -> float:
    score = of_lmms_eval("tasks.textvqa.utils").textvqa_process_results
    return score({"answers": list(case.targets), "question_id": 0}, [case.answer])["exact_match"]


def anls(case: Case) -> float:
    return of_lmms_eval("api.metrics").anls(case.targets, [case.answer])["anls"]


def chartqa(case: Case) -> float:
    document = {"type": "human_test", "answer": case.targets[0]}
    score = of_lmms_eval("tasks.chartqa.utils").chartqa_process_results
    return score(document, [case.answer])["relaxed_overall"]


def mmstar(case: Case) -> float:
    """With as many letters as the case has choices; MMStar itself always has four."""
    extract = of_lmms_eval("tasks._task_utils.mcq_extract").extract_mcq_answer
    return float(extract(case.answer, list(LETTERS[: len(case.fields["choices"])])) == case.targets[0])


def mmmu(case: Case) -> float:
    """The mean over everything that the scorer may guess."""
    scorer, choices = of_lmms_eval("tasks.mmmu.utils"), case.fields["choices"]
    document = {"question_type": "multiple-choice", "options": repr(choices), "id": "validation_Art_1"}
    right = []
    for guess in range(len(choices)):
        with mock.patch("random.choice", lambda letters, guess=guess: letters[guess]):
            result = scorer.mmmu_process_results({**document, "answer": case.targets[0]}, [case.answer])
        right.append(scorer.evaluate_mmmu([result["mmmu_acc"]])[1]["acc"])
    return sum(right) / len(right)


def scienceqa(case: Case) -> float:
    document = {"choices": case.fields["choices"], "answer": LETTERS.index(case.targets[0])}
    return of_lmms_eval("tasks.scienceqa.utils").sqa_process_results(document, [case.answer])["exact_match"]


def pope_results(case: Case) -> dict:
    document = {"answer": case.targets[0], "question_id": 0}
    return of_lmms_eval("tasks.pope.utils").pope_process_results(document, [case.answer])


def rouge_l(case: Case) -> float:
    """From the longest common subsequence of pycocoevalcap, which lmms-eval scores captions with."""
    longest = import_module("pycocoevalcap.rouge.rouge").my_lcs

    def words(text: str) -> list[str]:
        return "".join(c if c.isascii() and c.isalnum() else " " for c in text.lower()).split()

    best, answer = 0.0, words(case.answer)
    for target in map(words, case.targets):
        if common := longest(target, answer) if target and answer else 0:
            precision, recall = common / len(answer), common / len(target)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


# (metric, its options) of ours -> the kind of cases, and what they officially score
SCORERS: dict[str, tuple[str, dict, str, Callable[[Case], float]]] = {
    "exact_match": ("exact_match", {"strip": False, "ignore_case": False}, "text", exact_match),
    "exact_match, case ignored": (
        "exact_match",
        {"strip": False, "ignore_punctuation": True},
        "text",
        lambda case: exact_match(case, ignore_case=True, ignore_punctuation=True),
    ),
    "vqa_accuracy": ("vqa_accuracy", {}, "vqa", vqav2),
    "vqa_accuracy, textvqa": ("vqa_accuracy", {"style": "textvqa"}, "vqa", textvqa),
    "anls": ("anls", {}, "text", anls),
    "relaxed_accuracy": ("relaxed_accuracy", {}, "number", chartqa),
    "multiple_choice": ("multiple_choice", {}, "choice", mmstar),
    "multiple_choice, mmmu": ("multiple_choice", {"style": "mmmu"}, "choice", mmmu),
    "multiple_choice, letter": ("multiple_choice", {"style": "letter"}, "choice", scienceqa),
    "pope": ("pope", {}, "yes_no", lambda case: pope_results(case)["pope_accuracy"]["score"]),
    "rouge_l": ("rouge_l", {}, "caption", rouge_l),
}


def official_scores(name: str) -> list[float]:
    """What the cases of one of `SCORERS` score."""
    _, _, kind, score = SCORERS[name]
    return [float(score(case)) for case in cases(kind)]


def groups() -> list[list[Case]]:
    """The POPE cases, some at a time."""
    asked = cases("yes_no")
    return [asked[at : at + POPE_SAMPLES] for at in range(0, len(asked), POPE_SAMPLES)]


def official_summaries() -> list[dict[str, float]]:
    """POPE's figures over each of `groups`, by our names."""
    pope = of_lmms_eval("tasks.pope.utils")
    figures = {
        "score": pope.pope_aggregate_accuracy,
        "precision": pope.pope_aggregate_precision,
        "recall": pope.pope_aggregate_recall,
        "f1": pope.pope_aggregate_f1_score,
        "target_yes_rate": pope.pope_aggregate_yes_ratio,
    }
    results = [[pope_results(case)["pope_accuracy"] for case in group] for group in groups()]
    return [{name: float(figure(group)) for name, figure in figures.items()} for group in results]


def main() -> None:
    said = {
        "source": f"lmms-eval {version('lmms_eval')}, pycocoevalcap {version('pycocoevalcap')}",
        "cases": {
            kind: [[case.answer, case.targets, case.fields] for case in cases(kind)]
            for kind in sorted({kind for _, _, kind, _ in SCORERS.values()})
        },
        "scores": {name: official_scores(name) for name in SCORERS},
        "pope_summaries": official_summaries(),
    }
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    FIXTURE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{FIXTURE}: {FIXTURE.stat().st_size:,} bytes, {sum(map(len, said['scores'].values())):,} scores")


if __name__ == "__main__":
    main()
