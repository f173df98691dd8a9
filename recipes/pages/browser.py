"""Pages drawn by Chromium: their images, and what lies where on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from playwright.sync_api import Error, sync_playwright
from playwright.sync_api import Page as Tab

from recipes.pages.layouts import KINDS, Page, html
from recipes.pages.scan import save_plain, save_scanned
from recipes.pages.truth import doctags, markdown

SCANNED = 0.35  # of the pages
# Removes what does not fit on the page, from its end, and headings that nothing follows then. Gives the
# boxes of what is left, by number of the piece.
FIT = """() => {
    const boxes = {}, all = [...document.querySelectorAll('.flow [data-piece]')];
    const flow = document.querySelector('.flow')?.getBoundingClientRect();
    const outside = (one) => {
        const box = one.getBoundingClientRect();
        return box.bottom > flow.bottom + 1 || box.right > flow.right + 1;
    };
    for (let last = all.pop(); last; last = all.pop()) {
        if (!outside(last) && !/^H[1-6]$/.test(last.tagName)) break;
        const parent = last.closest('li') ?? last, list = parent.parentElement;
        parent.remove();
        if (!list.children.length && list.tagName !== 'DIV') list.remove();
    }
    for (const one of document.querySelectorAll('[data-piece]')) {
        const {left, top, right, bottom} = one.getBoundingClientRect();
        boxes[one.dataset.piece] = [left, top, right, bottom];
    }
    return boxes;
}"""


def make_page(tab: Tab, out: Path, number: int, seed: int, scale: float) -> dict[str, Any]:
    """Draw one page, write its image, and give its line of pages.jsonl."""
    rng = random.Random(f"{seed} {number}")
    page = Page(rng, list(KINDS)[number % len(KINDS)])
    tab.set_content(html(page))
    found = {int(piece): box for piece, box in tab.evaluate(FIT).items()}
    pieces = [page.pieces[piece] for piece in sorted(found)]
    boxes = [[scale * side for side in found[piece]] for piece in sorted(found)]
    shot = tab.locator("main").screenshot(type="png")
    scanned = rng.random() < SCANNED
    path = out / f"page-{number:03}{'.jpg' if scanned else '.png'}"
    size, boxes = save_scanned(shot, path, boxes, rng) if scanned else (save_plain(shot, path), boxes)
    return {
        "image": path.name, "kind": page.kind, "scanned": scanned, "face": page.face, "size": list(size),
        "pieces": [
            {"kind": piece.kind, "text": piece.text, **piece.more, "box": [round(side) for side in box]}
            for piece, box in zip(pieces, boxes)
        ],
        "markdown": markdown(pieces),
        "doctags": doctags(pieces, boxes, size),
    }  # fmt: skip


def make_pages(out: Path, count: int, seed: int, scale: float, chromium: str | None = None) -> None:
    """Write `count` pages and pages.jsonl into the folder `out`. Raises OSError where a file cannot be
    written, or where Chromium cannot be started.

    Args:
        scale: pixels to a CSS pixel.
        chromium: the path of a browser; default: the one that Playwright installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as play, (out / "pages.jsonl").open("w", encoding="utf-8") as lines:
            # Without a sandbox, so that root can start it: it shows what is made here alone.
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page(device_scale_factor=scale, viewport={"width": 860, "height": 1160})
            for number in range(count):
                line = make_page(tab, out, number, seed, scale)
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            browser.close()
    except Error as error:
        raise OSError(str(error).strip().splitlines()[0]) from error
