"""Score a model on held-out questions about the built-in picture world, with its controls.

    python -m eval.shapes                                   # the embedded model, 2,000 questions
    python -m eval.shapes --model runs/shapes --questions 500 --json results.json

Every question has a scene of its own that training never drew, with handwritten digits that training never
saw. Beside the score stand what the same model answers when the picture is blanked, and what always giving
a family's most common answer would score.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from data.errors import ProcessorError
from data.processor import Processor
from data.shapes import FAMILIES, heldout_questions, majority_answers, render, score
from inference.checkpoint import RequestError, open_checkpoint
from models.checkpoints import CheckpointError

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "ocelli-shapes"
PICTURE_SIZE = 256  # pixels a side of the drawn pictures; the processor reduces them
MAX_NEW_TOKENS = {"describe": 128}
BLANK = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), (200, 200, 200))


def answer(model, processor: Processor, pictures, questions, max_new_tokens: int) -> list[str]:
    """Greedy answers to one question for each picture, as one ragged batch."""
    conversations = [processor.conversation(*pair) for pair in zip(pictures, questions, strict=True)]
    inputs = processor.prepare(conversations).to(model.device)
    generated = model.generate_detailed(
        **inputs, max_new_tokens=max_new_tokens, stop_token_ids=processor.stop_token_ids
    )
    return [processor.decode(row).strip() for row in generated.rows()]


def evaluate(model, processor: Processor, pairs, batch_size: int = 32, label: str = "") -> list[dict]:
    """One record for each (scene, qa): family, question, target, answer, score and blind_score."""
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i][1].family, len(pairs[i][1].question)))
    records: list[dict] = [{} for _ in pairs]
    groups = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    for group in tqdm(groups, desc=label or "questions", unit="batch"):
        scenes, asked = [pairs[i][0] for i in group], [pairs[i][1] for i in group]
        questions = [qa.question for qa in asked]
        limit = max(MAX_NEW_TOKENS.get(qa.family, 16) for qa in asked)
        seen = answer(model, processor, [render(scene, PICTURE_SIZE) for scene in scenes], questions, limit)
        blind = answer(model, processor, [BLANK] * len(group), questions, limit)
        for i, qa, text, blind_text in zip(group, asked, seen, blind, strict=True):
            records[i] = {
                "family": qa.family,
                "question": qa.question,
                "target": qa.answer,
                "answer": text,
                "score": score(qa, qa.answer, text),
                "blind_score": score(qa, qa.answer, blind_text),
            }
    return records


def summarise(pairs, records: list[dict]) -> dict[str, dict[str, float]]:
    """Mean score, blanked score and majority-answer score by family, and over all questions."""
    common = majority_answers([qa for _, qa in pairs])
    table: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for (_, qa), record in zip(pairs, records, strict=True):
        row = (record["score"], record["blind_score"], score(qa, qa.answer, common[qa.family]))
        table[qa.family].append(row)
        table["overall"].append(row)
    names = ("score", "blind", "majority")
    return {
        family: {
            **{name: sum(row[k] for row in rows) / len(rows) for k, name in enumerate(names)},
            "questions": len(rows),
        }
        for family in (*FAMILIES, "overall")
        if (rows := table[family])
    }


def table_text(summary: dict[str, dict[str, float]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| questions about | score | picture blanked | majority answer | n |",
        "|---|---|---|---|---|",
    ]
    for family, row in summary.items():
        name = f"**{family}**" if family == "overall" else family
        shares = " | ".join(f"{row[column]:.1%}" for column in ("score", "blind", "majority"))
        lines.append(f"| {name} | {shares} | {row['questions']} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval.shapes", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="checkpoint folder or repository")
    parser.add_argument("--device", default="auto", help="auto (default: the best one here), cpu, cuda, mps")
    parser.add_argument("--questions", type=int, default=2000, help="how many held-out questions")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the table and every answer to this file")
    options = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.model, device=options.device, dtype="float32")
    except (RequestError, CheckpointError, ProcessorError) as error:
        print(f"eval.shapes: error: {error}", file=sys.stderr)
        return 2
    model, processor = checkpoint.model, checkpoint.processor
    pairs = heldout_questions(options.questions, options.seed)
    began = time.time()
    records = evaluate(model, processor, pairs, options.batch_size)
    summary = summarise(pairs, records)
    print(table_text(summary))
    print(f"{len(pairs)} questions, seed {options.seed}, {time.time() - began:.0f} s on {model.device}")
    wrong = [r for r in records if r["score"] < 1 and r["family"] != "describe"]
    for record in random.Random(0).sample(wrong, min(5, len(wrong))):
        print(f"  wrong: {record['question']} -> {record['answer']!r}, expected {record['target']!r}")
    if options.json:
        options.json.write_text(json.dumps({"summary": summary, "records": records}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
