"""From a run of train.py to the embedded model: small weights, and a card with what they were measured to do.

    python -m eval.release runs/shapes checkpoints/ocelli-shapes

The weights are stored in bfloat16, opened again from the new folder and scored on held-out questions with the
image shown and blanked; the figures go into the card, and into results.json beside it. What the run says of
its training data is kept.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from data.errors import ProcessorError
from data.processor import Processor
from eval.card import eval_results, evaluation_text
from eval.records import RESULTS
from eval.results import table_text
from eval.run import evaluate
from eval.tasks import TaskError, shapes_task
from inference.checkpoint import RequestError, open_checkpoint
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.save import model_card

SUMMARY = (
    "Ocelli's embedded model: it answers questions about one small world of drawn shapes, printed words and "
    "handwritten digits, and knows nothing else. Trained from nothing by `train.py`."
)


def training_data(run: Path) -> str:
    """What the run's own card says of its training data."""
    card = run / "README.md"
    found = re.search(
        r"## Training data\n\n(.*?)\n\n## ", card.read_text() if card.is_file() else "", re.DOTALL
    )
    return found[1] if found else "Not stated."


def release(run: Path, folder: Path, questions: int, said: str | None) -> str:
    """Write `folder`; the table of its scores."""
    model = VisionLanguageModel.from_pretrained(run, dtype=torch.bfloat16)
    processor = Processor.from_pretrained(run, config=model.config)
    model.save_pretrained(folder, processor)
    small = open_checkpoint(folder, device="cpu", dtype="float32").compiled()
    with tempfile.TemporaryDirectory() as output:
        results = evaluate(small, shapes_task(questions), Path(output), controls=True)
        card = model_card(
            folder.name,
            model.config,
            sum(parameter.numel() for parameter in model.parameters()),
            summary=SUMMARY,
            training_data=said or training_data(run),
            evaluation=evaluation_text([results]),
            license="apache-2.0",
            model_name=folder.name,
            eval_results=eval_results([results]),
        )
        model.save_pretrained(folder, processor, card=card)
        shutil.copyfile(Path(output) / RESULTS, folder / RESULTS)
    return table_text(results["families"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval.release", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder that train.py wrote")
    parser.add_argument("folder", type=Path, help="folder for the small checkpoint")
    parser.add_argument("--questions", type=int, default=2000, help="held-out questions (default 2000)")
    parser.add_argument("--training-data", metavar="TEXT", help="for the card; default: what the run's says")
    options = parser.parse_args(arguments)
    if options.questions < 1:
        parser.error(f"--questions: expected at least 1, got {options.questions}")
    try:
        print(release(options.run, options.folder, options.questions, options.training_data))
    except (TaskError, RequestError, CheckpointError, ProcessorError, OSError) as error:
        print(f"eval.release: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
