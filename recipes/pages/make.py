"""Make pages and their truth: python -m recipes.pages.make --out FOLDER --count 200 --seed 0

The folder gets an image a page and pages.jsonl, a line a page. The same seed gives the same pages with the
same browser and fonts. Page n has the same text, whatever the count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.flags import positive
from recipes.pages.layouts import KINDS, Page, html
from recipes.pages.scan import save_plain, save_scanned
from recipes.pages.truth import doctags, markdown

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m recipes.pages.make", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the pages")
    add("--count", type=positive, default=200, help="number of pages (default 200)")
    add("--seed", type=int, default=0, help="seed of the pages (default 0)")
    add(
        "--scale",
        type=float,
        default=1.5,
        help="pixels to a CSS pixel, of which 96 are an inch (default 1.5)",
    )
    add("--chromium", metavar="PATH", help="a browser (default: the one that Playwright installed)")
    options = parser.parse_args(arguments)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        parser.error("needs playwright: pip install -r recipes/pages/requirements.txt")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with sync_playwright() as play, (options.out / "pages.jsonl").open("w", encoding="utf-8") as lines:
            # Without a sandbox, as root can start it: it shows what is made here alone.
            browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 860, "height": 1160}, device_scale_factor=options.scale)
            for number in range(options.count):
                line = make_page(tab, options.out, number, options.seed, options.scale)
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            browser.close()
    except (OSError, Error) as error:
        parser.error(str(error).strip().splitlines()[0])
    print(options.out / "pages.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
