"""The page: static files that the server gives at /, and what they have to know of a model.

Everything else the page does as a client of `/v1/chat/completions`; conversations live in the browser.
"""

from __future__ import annotations

import mimetypes
import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from data.errors import ImageError, ThinkingError
from inference.checkpoint import Checkpoint
from inference.coordinates import spoken_form
from web.errors import Refused

ROOT = Path(__file__).resolve().parent.parent
FILES = {f"page.{kind}": ROOT / "web" / f"page.{kind}" for kind in ("css", "js")}
EXAMPLES = {f"{name}.png": ROOT / "assets" / f"{name}.png" for name in ("example", "three", "cup", "wolf")}
PAGES = {path.name: path for path in (ROOT / "docs").glob("*.md")}
EMBEDDED = ROOT / "checkpoints" / "ocelli-shapes"
# Nothing comes from elsewhere; images are of the browser, and another server may be chosen to answer.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src data: blob:; connect-src 'self' http: https:; base-uri 'none'; form-action 'none'"
)
HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache"}
router = APIRouter(include_in_schema=False)


def about(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the page asks and offers for a model: the questions for boxes and points in the model's words,
    whether it takes videos, thinks and remembers, and where to read what it knows."""
    processor, questions = checkpoint.processor, dict[str, str]()
    if form := spoken_form(processor.coordinates, None):
        prompts = {"describe": form.describe, "detect": form.detect, "point": form.point}
        questions = {kind: prompt for kind, prompt in prompts.items() if prompt}
    can = dict.fromkeys(("videos", "thinks"), True)
    try:
        processor.check_video("a video", animated=False)
    except ImageError:
        can["videos"] = False
    try:
        processor.chat.check_thinking()
    except ThinkingError:
        can["thinks"] = False
    name, most = checkpoint.name, checkpoint.model.generation_config.get("most_images")
    card = "" if checkpoint.adapter or os.path.exists(name) else f"https://huggingface.co/{name}"
    if Path(name).resolve() == EMBEDDED:
        card = "/page/embedded-model.md"
    said = {"introduction": checkpoint.introduction, "single_turn": checkpoint.single_turn, "images": most}
    return said | can | {"questions": questions, "card": card}


@router.get("/")
async def page() -> Response:
    return FileResponse(ROOT / "web" / "page.html", headers=HEADERS, media_type="text/html; charset=utf-8")


@router.get("/page/{name}")
async def file(name: str) -> Response:
    path = (FILES | EXAMPLES | PAGES).get(name)
    if path is None or not path.is_file():
        raise Refused(404, "there is nothing of that name here")
    kind = "text/plain; charset=utf-8" if name in PAGES else mimetypes.guess_type(path)[0]
    return FileResponse(path, headers=HEADERS, media_type=kind)
