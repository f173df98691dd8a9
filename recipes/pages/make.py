"""Make pages and their truth: python -m recipes.pages.make --out FOLDER --count 200 --seed 0

The folder gets an image a page and pages.jsonl, a line a page. The same seed gives the same pages with the
same browser and fonts. Page n has the same text, whatever the count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pkgutil import resolve_name

from inference.flags import positive


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
        make_pages = resolve_name("recipes.pages.browser:make_pages")
        make_pages(options.out, options.count, options.seed, options.scale, options.chromium)
    except ImportError as error:
        parser.error(f"needs {error.name}: pip install -r recipes/pages/requirements.txt")
    except OSError as error:
        parser.error(str(error))
    print(options.out / "pages.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
