"""The tasks `drawings` (what `heldout` asks) and `strangers` of `python -m eval`, and what is right there."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from eval.boxes import Asked, ious, score_of
from eval.metrics import Metric
from eval.results import RUN, SAMPLES, read_samples
from eval.tasks import DESCRIBE_TOKENS, EvalSample, EvalTask
from recipes.world.drawings import paint
from recipes.world.heldout import BY_QUESTION, DrawingQuestion, drawing_questions
from recipes.world.places import FORM
from recipes.world.scene import KNOWS
from recipes.world.strangers import GROUPS, Stranger, judge, strangers
from shapes import score
from shapes.world import FAMILIES, QA, Scene


def drawings_task(questions: int, seed: int = 0) -> EvalTask:
    """Held-out questions about drawings in looks that training never sees, by other programs as well; about
    places, about what is not there and about what is no drawing; second and third ones, after turns with the
    right answers."""
    asked = drawing_questions(questions, seed)
    metric = Metric(
        "drawings",
        'Exact match after lower-casing and dropping a final dot; "describe": F1 over the things named; '
        'where one thing is asked for, "box": IoU of the first box, "box at 0.5": whether it is at least '
        '0.5, "point": whether the first point lies in the thing\'s box; "boxes": F1 at an IoU of 0.5; '
        '"in JSON": the same value under one key, that which the question names, if it names one.',
        lambda answer, targets, fields: score_drawing(asked[fields["number"]], answer),
    )
    samples = [
        EvalSample(
            id=str(number),
            question=one.qa.question,
            prompt=one.qa.question,
            targets=(one.qa.answer, *one.qa.accept),
            images=one.images,
            group=f"drawing {one.seed}",
            shows=tuple(f"drawing {one.seed}{part}" for part in ("", ", second")[: 1 + bool(one.second)]),
            earlier=tuple((turn.question, turn.answer) for turn in one.earlier),
            max_new_tokens=DESCRIBE_TOKENS if one.qa.family in ("describe", "place", "list") else 32,
            family=one.family,
            fields={"family": one.family, "number": number},
        )
        for number, one in enumerate(asked)
    ]
    return EvalTask("drawings", samples, metric, "{question}", {"name": "drawings, held out", "seed": seed})


def strangers_task(questions: int, seed: int = 0) -> EvalTask:
    """Questions by another hand, that nothing trains on: the groups of `strangers` in turn."""
    each = -(-questions // len(GROUPS))
    asked = [one for group in GROUPS for one in strangers(each, group, seed)]
    metric = Metric(
        "strangers",
        "Right as `judge` of recipes/world/strangers.py has it; in the group outside, a refusal is right.",
        lambda answer, targets, fields: float(judge(asked[fields["number"]][1], answer) == "right"),
    )

    def sample(number: int, scenes: Scene | tuple[Scene, ...], one: Stranger) -> EvalSample:
        shown = scenes if isinstance(scenes, tuple) else (scenes,)
        names = tuple(f"stranger's drawing {number}, {i}" for i in range(len(shown)))
        return EvalSample(
            id=str(number),
            question=one.question,
            prompt=f"{one.before}\n{one.asked}" if one.before else one.asked,
            targets=tuple(map(str, one.accept)) or (json.dumps(one.truth),),
            images=lambda: [paint(scene, random.Random(name)) for scene, name in zip(shown, names)],
            group=names[0],
            shows=names,
            earlier=one.earlier,
            system=one.system,
            max_new_tokens=DESCRIBE_TOKENS if one.group in ("json", "near kinds") else 32,
            family=one.group,
            fields={"family": one.group, "number": number},
        )

    samples = [sample(number, *one) for number, one in enumerate(asked)]
    data = {"name": "questions in strangers' words", "seed": seed}
    return EvalTask("strangers", samples, metric, "{question}", data)


def verdicts(folder: Path) -> str:
    """What came of a run of `strangers`, as a table: how many of each group were right, refused and wrong."""
    data = json.loads((folder / RUN).read_text(encoding="utf-8"))["task"]
    each = data["samples"] // len(GROUPS)
    asked = [one for group in GROUPS for _, one in strangers(each, group, data["data"]["seed"])]
    found: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for name, record in read_samples(folder / SAMPLES).items():
        one = asked[int(name)]
        found[one.group][judge(one, record["answer"])] += 1
    rows = ["| questions | right | refused | wrong |", "|---|---|---|---|"]
    for group, counts in found.items():
        shares = (f"{counts[verdict] / counts.total():.1%}" for verdict in ("right", "refused", "wrong"))
        rows.append(f"| {group} ({counts.total()}) | {' | '.join(shares)} |")
    return "\n".join(rows)


def score_drawing(asked: DrawingQuestion, answer: str) -> float:
    """1 or 0; for "describe" and "boxes" an F1, for "box" the IoU of the first box. See `eval.boxes`."""
    qa = asked.qa
    kind = qa.family if asked.family in BY_QUESTION else asked.family.partition(", ")[0]
    kind = "describe" if kind == "list" else kind
    if kind in FAMILIES:
        return score(QA(kind, qa.question, qa.answer, qa.accept), qa.answer, answer)
    if kind == "in JSON":
        return float(_says(_object(answer), json.loads(qa.answer), qa.question))
    if kind == "absent":
        return float(answer.strip().lower() == qa.answer.lower())
    if kind == "outside question":
        return float(answer.strip().lower().startswith("i did not understand the question"))
    if kind == "outside image":  # models say it with what can be asked, or without
        return float(answer.strip().lower().startswith(f"i only know {KNOWS}"))
    places = Asked(asked.boxes, FORM.read(answer, (1000, 1000)))
    if kind == "box":
        return float(ious(places.boxes[:1], asked.boxes[:1]).sum())
    return score_of(places, points="point_2d" in qa.answer)


def _says(said: dict, wanted: dict, question: str) -> bool:
    """Whether an object says the same under one key: that which the question names, if it names one."""
    named = any(f'"{key}"' in question for key in wanted)
    meant = [[_meaning(one) for one in made.values()] for made in (said, wanted)]
    return meant[0] == meant[1] and (not named or said.keys() == wanted.keys())


def _meaning(value) -> str:
    """4, 4.0 and "4" alike, and so are true and "yes"."""
    return {"true": "yes", "false": "no"}.get(text := str(value).lower(), text.removesuffix(".0"))


def _object(answer: str) -> dict:
    with suppress(ValueError):
        if isinstance(made := json.loads(answer), dict):
            return made
    return {}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / SAMPLES).is_file():
        sys.exit("python -m recipes.world.evaluation FOLDER: expected that of a run of --tasks strangers")
    print(verdicts(Path(sys.argv[1])))
