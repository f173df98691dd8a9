"""The task `pages` of `python -m eval`: pages with their truth, asked for in the model's own words.

task = pages_task(200, folder="/tmp/pages", reading=checkpoint.processor.reading)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lxml import html
from lxml.etree import LxmlError
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from data.errors import DatasetError
from data.reading import Reading
from eval.metrics import Fields, Metric, Scored
from eval.pages import Piece, page_scores, plain, table_piece
from eval.tasks import EvalSample, EvalTask
from inference.pages.document import page_document
from inference.pages.ending import MOST, PageForm
from messages import one_line

SAMPLE = Path(__file__).resolve().parent / "sample"
SCORES = ("order", "teds", "teds_structure")
DESCRIPTION = (
    "Pages without their headers and footers: 1 - the edit distance of all text over the length of the "
    "longer one, after NFKC and single spaces. order: 1 - the edit distance of the order of pieces over "
    "their number (after OmniDocBench: Ouyang et al. 2024). teds, teds_structure: TEDS of tables (Zhong et "
    "al. 2020)."
)


@dataclass(frozen=True)
class Said:
    """A piece of a page, as pages.jsonl has it; `html` is that of a table."""

    kind: str
    text: str = ""
    html: str = ""

    def piece(self) -> Piece:
        """It as it is compared."""
        if not self.html:
            return self.kind, plain(self.text), None
        rows = []
        for row in html.fromstring(self.html).iter("tr"):
            cells = [
                (cell, (cell.get("colspan", "1"), cell.get("rowspan", "1"))) for cell in row.iter("td", "th")
            ]
            rows.append([(int(wide), int(tall), plain(cell.text_content())) for cell, (wide, tall) in cells])
        return table_piece(rows)


@dataclass(frozen=True)
class Line:
    """A line of pages.jsonl: a page."""

    image: str
    pieces: tuple[Said, ...]
    kind: str = ""


def pages_task(
    pages: int,
    seed: int = 0,
    folder: str | Path | None = None,
    reading: Reading | None = None,
    limit: int | None = None,
) -> EvalTask:
    """The first pages of a folder, each to be read whole. A page's `family` is its kind.

    Args:
        seed: without effect, as pages are made before.
        folder: as recipes/pages makes it; None for the ten that are kept here.
        reading: how the model is asked, and the form of its answers.
        limit: most tokens of a page, where it is not what the page's size makes it.

    Raises DatasetError where the folder holds something else.
    """
    reading, folder = reading or Reading(), Path(folder or SAMPLE)
    lines = read_lines(folder / "pages.jsonl")[:pages]
    truth = {line.image: [piece.piece() for piece in line.pieces] for line in lines}
    if len(truth) < len(lines):
        raise DatasetError(f"{folder}: expected a page to an image, got {len(lines)} pages of {len(truth)}")
    sizes = {name: image_size(folder / name) for name in truth}

    @cache
    def scores(answer: str, name: str) -> dict[str, float]:
        return page_scores(truth[name], page_document(answer, reading, Image.new("1", sizes[name])))

    def parts(scored: Sequence[Scored]) -> dict[str, list[float]]:
        """Name -> the scores of the pages that have it."""
        each = [scores(one.answer, one.fields["page"]) for one in scored]
        return {name: found for name in SCORES if (found := [one[name] for one in each if name in one])}

    def score(answer: str, targets: Sequence[str], fields: Fields) -> float:
        return scores(answer, fields["page"])["text"]

    prompt = reading.prompt("page")
    samples = [
        EvalSample(
            id=line.image,
            question=prompt,
            prompt=prompt,
            targets=("\n".join(text for _, text, _ in truth[line.image]),),
            images=partial(list, [folder / line.image]),
            group=line.image,
            shows=(line.image,),
            max_new_tokens=limit or MOST,
            family=line.kind,
            fields={"page": line.image},
            page=partial(PageForm, reading=reading, size=sizes[line.image], limit=limit),
        )
        for line in lines
    ]
    data = {"name": "ten made pages"} if folder == SAMPLE else {"path": str(folder)}
    metric = Metric("pages", DESCRIPTION, score, parts=parts)
    return EvalTask("pages", samples, metric, prompt, data | {"form": reading.form})


def read_lines(path: Path) -> list[Line]:
    """The pages of a pages.jsonl. Raises DatasetError for what is none."""
    lines, read, number = list[Line](), TypeAdapter(Line).validate_json, 0
    try:
        for line in path.read_bytes().splitlines():
            number += 1
            lines.append(read(line))
            for piece in lines[-1].pieces:
                piece.piece()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}: expected a folder as recipes/pages makes it") from None
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise DatasetError(
            f"{path}: line {number}: {one_line(wrong['msg'])}{place and f', in {place}'}"
        ) from None
    except (ValueError, LxmlError) as error:
        raise DatasetError(f"{path}: line {number}: html of a table: {one_line(error)}") from None
    return lines


def image_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels. Raises DatasetError for no image."""
    try:
        with Image.open(path) as image:
            return image.size
    except OSError as error:
        raise DatasetError(f"{path}: expected the image of a page: {one_line(error)}") from None
