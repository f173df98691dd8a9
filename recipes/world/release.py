"""From a run of train.py to a released model: small weights, and a card with its measured scores.

    python -m recipes.world.release runs/world checkpoints/ocelli-shapes

The weights are stored in bfloat16, opened again from the new folder and scored on held-out questions, with
the images shown and blanked. The figures go into the card, and into results.json beside it. The card keeps
what the run's own card says about its training data.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from data.processor import Processor
from eval.__main__ import above_zero, guarded
from eval.card import update_card
from eval.results import RESULTS, table_text
from eval.run import evaluate
from eval.tasks import shapes_task
from inference.checkpoint import open_checkpoint
from inference.flags import Parser, option, positive
from messages import for_terminal
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from models.checkpoints.save import model_card

SUMMARY = (
    "Ocelli's embedded model: it answers questions about drawn shapes, printed words and digits, says where "
    "they are, and says so where it is asked about anything else. Trained from nothing by `train.py`."
)


def training_data(run: Path) -> str:
    """What the run's own card says of its training data."""
    card = run / "README.md"
    text = card.read_text() if card.is_file() else ""
    found = re.search(r"## Training data\n\n(.*?)\n\n## ", text, re.DOTALL)
    return found[1] if found else "Not stated."


def mix_in(model: VisionLanguageModel, others: Sequence[tuple[float, Path]]) -> None:
    """Make a model's weights the mean of its own and of others, each with its share: of one run what was
    forgotten since an earlier state comes back so (WiSE-FT, Wortsman et al., 2022). Raises CheckpointError
    where the shares leave none for the model itself."""
    own = 1 - sum(share for share, _ in others)
    if own <= 0:
        raise CheckpointError(f"--mix-in: expected shares of less than 1 together, got {1 - own:g}")
    mean = {name: own * tensor for name, tensor in model.state_dict().items()}
    for share, folder in others:
        found = VisionLanguageModel.from_pretrained(folder, dtype=torch.float32).state_dict()
        mean = {name: tensor + share * found[name] for name, tensor in mean.items()}
    model.load_state_dict(mean)


def release(
    run: Path,
    folder: Path,
    questions: int,
    trained_on: str | None,
    temperature: float = 1.0,
    others: Sequence[tuple[float, Path]] = (),
) -> str:
    """Write `folder`; returns the table of its scores. `temperature` divides the logits, so that confidences
    agree with scores (temperature scaling, Guo et al., 2017); the likeliest token stays. See `mix_in`."""
    model = VisionLanguageModel.from_pretrained(run, dtype=torch.float32)
    mix_in(model, others)
    model.language_model.norm.weight.data.div_(temperature)  # the head after it has no bias
    model = model.to(torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    learnt = trained_on or training_data(run)
    card = model_card(folder.name, model.config, size, SUMMARY, learnt, license="apache-2.0")
    model.save_pretrained(folder, Processor.from_pretrained(run, config=model.config), card=card)
    small = open_checkpoint(folder, device="cpu", dtype="float32").compiled()
    with tempfile.TemporaryDirectory() as output:
        results = evaluate(small, shapes_task(questions), Path(output), controls=True)
        shutil.copyfile(Path(output) / RESULTS, folder / RESULTS)
    update_card(folder, [results])
    return table_text(results["families"])


def _share(text: str) -> tuple[float, Path]:
    share, _, folder = text.partition(":")
    with suppress(ValueError):
        if folder:
            return above_zero(share), Path(folder)
    raise ValueError(f"expected SHARE:FOLDER such as 0.15:runs/before, got {text!r}")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m recipes.world.release", description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="folder that train.py wrote")
    add("folder", type=Path, help="folder for the released checkpoint")
    add("--questions", type=positive, default=2000, help="number of held-out questions (default 2000)")
    add("--training-data", metavar="TEXT", help="the card's words on its data (default: those of the run)")
    scaled = "divide the logits by T, so that confidences agree with scores (default 1)"
    add("--temperature", type=option(above_zero), metavar="T", default=1.0, help=scaled)
    mixed = "folder of an earlier state of the run, which gets this share of the weights' mean (repeatable)"
    add("--mix-in", type=option(_share), metavar="SHARE:FOLDER", action="append", default=[], help=mixed)
    options = parser.parse_args(arguments)
    data, scale, others = options.training_data, options.temperature, options.mix_in
    settings = (options.run, options.folder, options.questions, data, scale, others)
    return guarded(parser.prog, lambda: print(for_terminal(release(*settings))))


if __name__ == "__main__":
    sys.exit(main())
