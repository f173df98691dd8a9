"""Pages of ten kinds as HTML, with the pieces that stand on them in reading order."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Template
from latex2mathml.converter import convert

from recipes.pages import words
from recipes.pages.tables import Table, ledger, random_table

# Faces that Debian, Windows or macOS has, then whatever the browser takes for the generic family.
FACES = {
    "serif": "'Liberation Serif', 'Times New Roman', serif",
    "charter": "'Bitstream Charter', Charter, Georgia, serif",
    "wide serif": "'DejaVu Serif', Georgia, serif",
    "sans": "'Liberation Sans', Arial, Helvetica, sans-serif",
    "wide sans": "'DejaVu Sans', Verdana, sans-serif",
    "free sans": "FreeSans, 'Helvetica Neue', sans-serif",
}
MONO = ("'Liberation Mono', 'Courier New', monospace", "'DejaVu Sans Mono', Menlo, monospace")
ACCENTS = ("#000", "#000", "#000", "#23415f", "#5b2333", "#2f4f2f")


@dataclass
class Piece:
    """A piece of a page.

    kind: title, heading, text, list_item, checkbox, table, formula, code, picture, caption, footnote,
        page_header or page_footer.
    text: as a reader would type it; LaTeX for a formula, "" for a table or a picture.
    more: level of a heading or list item (from 1), `number` of an item of a numbered list, language of code,
        html of a table, whether a checkbox is ticked.
    """

    kind: str
    text: str
    more: dict[str, Any] = field(default_factory=dict)
    table: Table | None = None


class Page:
    """A page while it is made. Methods add a piece and return its HTML, which the caller places."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind = rng, kind
        self.pieces: list[Piece] = []
        self.face = rng.choice(list(FACES))
        self.mono = rng.choice(MONO)
        self.accent = rng.choice(ACCENTS)
        self.figures = self.tables = self.notes = 0

    def add(
        self, tag: str, kind: str, text: str, inner: str | None = None, style: str = "", **more: Any
    ) -> str:
        self.pieces.append(Piece(kind, text, more))
        shown = with_formulas(text) if inner is None else inner
        return f'<{tag} class="{kind} {style}" data-piece="{len(self.pieces) - 1}">{shown}</{tag}>'

    def title(self, text: str) -> str:
        return self.add("h1", "title", text)

    def heading(self, level: int = 1, number: str = "", text: str = "") -> str:
        text = text or f"{number} {words.heading(self.rng)}".strip()
        return self.add(f"h{level + 1}", "heading", text, level=level)

    def text(self, least: int = 2, most: int = 5, note: str = "") -> str:
        """A paragraph, perhaps with the mark of a footnote at the end."""
        return self.add("p", "text", words.paragraph(self.rng, least, most) + note)

    def line(self, text: str, style: str = "") -> str:
        return self.add("p", "text", text, style=style)

    def with_formula(self) -> str:
        """A paragraph with formulas in its sentences."""
        first, second = words.inline_formula(self.rng), words.inline_formula(self.rng)
        texts = words.sentence(self.rng), words.sentence(self.rng)
        return self.line(f"{texts[0]} Here ${first}$ is known, so that ${second}$ holds as well. {texts[1]}")

    def formula(self) -> str:
        latex = words.formula(self.rng)
        return self.add("div", "formula", latex, convert(latex, display="block"))

    def code(self) -> str:
        language, text = words.code(self.rng)
        return self.add("pre", "code", text, escape(text), language=language)

    def items(self, count: int, depth: int = 1, level: int = 1, ordered: bool | None = None) -> str:
        """A list of lists, `depth` levels deep at most."""
        ordered = self.rng.random() < 0.4 if ordered is None else ordered
        made = ""
        for number in range(1, count + 1):
            more: dict[str, Any] = {"number": number} if ordered else {}
            made += "<li>" + self.add("span", "list_item", words.item(self.rng), level=level, **more)
            if level < depth and self.rng.random() < 0.5:
                made += self.items(self.rng.randint(2, 3), depth, level + 1)
            made += "</li>"
        return f"<ol>{made}</ol>" if ordered else f"<ul>{made}</ul>"

    def table(self, table: Table, caption: bool = True, style: str = "") -> str:
        self.pieces.append(Piece("table", "", {"html": table.html()}, table))
        look = style or self.rng.choice(("grid", "rules", "shaded"))
        number = len(self.pieces) - 1
        made = table.html().replace("<table>", f'<table class="{look}" data-piece="{number}">', 1)
        self.tables += caption
        return f"<figure>{made}{self.caption('Table', self.tables) if caption else ''}</figure>"

    def figure(self) -> str:
        self.figures += 1
        drawn = self.add("div", "picture", "", drawing(self.rng))
        return f"<figure>{drawn}{self.caption('Figure', self.figures)}</figure>"

    def caption(self, name: str, number: int) -> str:
        return self.add("figcaption", "caption", f"{name} {number}: {words.sentence(self.rng)}")


def with_formulas(text: str) -> str:
    """Text as HTML, what stands between $ as MathML."""
    parts = re.split(r"\$([^$]+)\$", text)
    return "".join(convert(part) if at % 2 else escape(part) for at, part in enumerate(parts))


def drawing(rng: random.Random) -> str:
    """SVG of bars, curves or hills, without any text."""
    width, height = 300, rng.randint(110, 170)
    colours = rng.sample(["#4a6fa5", "#a54a4a", "#5a8f5a", "#8a6d3b", "#6b5b95", "#777"], 3)
    made = ""
    form = rng.randrange(3)
    if form == 0:
        count = rng.randint(4, 9)
        for at in range(count):
            tall, wide = rng.uniform(0.15, 0.95) * height, width / count
            made += f'<rect x="{at * wide + 4:.0f}" y="{height - tall:.0f}" width="{wide * 0.7:.0f}" '
            made += f'height="{tall:.0f}" fill="{colours[at % 2]}"/>'
    elif form == 1:
        for colour in colours[: rng.randint(1, 3)]:
            points = " ".join(f"{x},{rng.uniform(0.1, 0.9) * height:.0f}" for x in range(6, width, 36))
            made += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    else:
        for at, colour in enumerate(colours):
            top = height * (0.3 + 0.2 * at)
            ridge = " ".join(f"{x},{top + rng.uniform(-18, 18):.0f}" for x in range(0, width + 30, 30))
            made += f'<polygon points="0,{height} {ridge} {width},{height}" fill="{colour}" opacity="0.8"/>'
        made += f'<circle cx="{rng.randint(30, 270)}" cy="24" r="14" fill="#e0b040"/>'
    axes = f'<path d="M1 0 V{height - 1} H{width}" stroke="#333" fill="none"/>' if form < 2 else ""
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{made}{axes}</svg>'


# --------------------------------------------------------------------------------------------- kinds of page
def _sheet(page: Page, body: Callable[[], str], columns: int = 1, note: bool = False) -> str:
    """A sheet with a header, its body in columns, perhaps a footnote, and a footer with the number."""
    rng, head, made = page.rng, "", ""
    if rng.random() < 0.7:
        head = page.add(
            "header", "page_header", f"{words.place(rng)} {rng.choice(('Papers', 'Review', 'Record'))}"
        )
    top = page.title(words.heading(rng)) if columns == 2 else ""
    if top:
        top += page.line(f"{words.person(rng)} and {words.person(rng)}", "centred")
    made = body()
    notes = page.add("p", "footnote", f"¹ {words.sentence(rng)}") if note else ""
    foot = page.add(
        "footer", "page_footer", rng.choice(("{}", "Page {}", "– {} –")).format(rng.randint(2, 240))
    )
    return f'{head}{top}<div class="flow columns{columns}"><div>{made}</div></div>{notes}{foot}'


def report(page: Page) -> str:
    def body() -> str:
        made, rng = page.title(words.heading(page.rng)), page.rng
        for chapter in range(1, 5):
            made += page.heading(1, f"{chapter}") + page.text(note="¹" if chapter == 1 else "")
            made += page.heading(2, f"{chapter}.1") + page.text()
            made += page.items(rng.randint(2, 4)) if rng.random() < 0.6 else page.text()
            made += page.heading(3) + page.text(1, 3)
        return made

    return _sheet(page, body, note=True)


def article(page: Page) -> str:
    def body() -> str:
        made, rng = page.heading(text="Abstract") + page.text(3, 5), page.rng
        blocks = [page.figure, page.formula, page.with_formula, page.text, page.text]
        for chapter in range(1, 9):
            made += page.heading(1, f"{chapter}.") + page.text()
            for block in rng.sample(blocks, 2):
                made += block()
        return made

    return _sheet(page, body, columns=2)


def tables(page: Page) -> str:
    def body() -> str:
        made, rng = page.heading() + page.text(1, 2), page.rng
        for _ in range(3):
            made += page.table(random_table(rng)) + page.text(1, 3)
        return made

    return _sheet(page, body)


def lists(page: Page) -> str:
    def body() -> str:
        made = page.title(words.heading(page.rng))
        for _ in range(3):
            made += page.heading() + page.text(1, 2) + page.items(page.rng.randint(3, 5), depth=3)
        return made

    return _sheet(page, body, columns=1)


def formulas(page: Page) -> str:
    def body() -> str:
        made = page.title(words.heading(page.rng))
        for _ in range(5):
            made += page.with_formula() + page.formula() + page.text(1, 2)
            made += page.formula() if page.rng.random() < 0.5 else page.heading(2)
        return made + page.text(1, 2)

    return _sheet(page, body)


def manual(page: Page) -> str:
    def body() -> str:
        made = page.title(words.heading(page.rng))
        for _ in range(4):
            made += page.heading() + page.text(1, 2) + page.code() + page.text(1, 2)
        return made

    return _sheet(page, body)


def receipt(page: Page) -> str:
    rng = page.rng
    made = page.title(f"{words.place(rng)} {rng.choice(('Market', 'Stores', 'Grocers', 'Bakery'))}")
    made += page.line(words.address(rng), "centred")
    made += page.line(f"Receipt {rng.randint(1000, 99999)}, {words.date(rng)}", "centred")
    made += page.table(ledger(rng), caption=False, style="bare")
    made += page.line(
        f"Paid by {rng.choice(('card', 'cash', 'voucher'))}. You were served by {words.person(rng)}."
    )
    made += page.line(
        rng.choice(("Thank you, come again!", "Goods may be returned within 14 days.")), "centred"
    )
    return made


def form(page: Page) -> str:
    rng = page.rng
    made = page.title(rng.choice(("Application for a permit", "Report of a fault", "Order of spare parts")))
    made += page.line(f"Office of works, {words.place(rng)}. Please write in capitals.", "small")
    fields = (
        *(("Name", words.person), ("Address", words.address), ("Date of birth", words.date)),
        *(("Trade", words.label), ("Place of work", words.place), ("Amount claimed", words.quantity)),
        *(("Object", words.label), ("Valid from", words.date), ("Contact", words.person)),
    )
    made += page.heading(text=f"A. {rng.choice(('Applicant', 'Particulars', 'Your details'))}")
    chosen = rng.sample(fields, rng.randint(6, 9))
    cells = [page.line(f"{name}: {value(rng)}", "field") for name, value in chosen]
    made += f'<div class="fields">{"".join(cells)}</div>'
    made += page.heading(text=f"B. {rng.choice(('Declarations', 'Tick what applies', 'Conditions'))}")
    for _ in range(rng.randint(3, 6)):
        ticked, text = rng.random() < 0.5, words.item(rng)
        mark = f'<i class="box">{"✕" if ticked else ""}</i> {escape(text)}'
        made += page.add("p", "checkbox", text, mark, ticked=ticked)
    made += page.heading(text=f"C. {rng.choice(('For the office', 'Enclosures', 'Records'))}")
    made += page.table(random_table(rng, most_rows=4), caption=False, style="grid")
    made += page.line(f"Signed at {words.place(rng)} on {words.date(rng)}", "sign")
    return f'<div class="flow columns1"><div>{made}</div></div>'


def figures(page: Page) -> str:
    def body() -> str:
        made = page.title(words.heading(page.rng)) + page.text(1, 2)
        for _ in range(3):
            made += page.figure() + page.text(1, 3)
        return made

    return _sheet(page, body)


def letter(page: Page) -> str:
    rng, writer, reader = page.rng, words.person(page.rng), words.person(page.rng)
    made = page.line(f"{writer}, {words.address(rng)}", "right") + page.line(words.date(rng), "right")
    made += page.line(f"{reader}, {words.address(rng)}", "left") + page.heading()
    made += page.line(f"Dear {reader},")
    for at in range(rng.randint(3, 6)):
        made += page.text(note="¹" if at == 0 else "")
    made += page.items(rng.randint(2, 4)) + page.text(1, 2)
    made += page.line("Yours sincerely,") + page.line(writer, "sign")
    note = page.add("p", "footnote", f"¹ {words.sentence(rng)}")
    return f'<div class="flow columns1"><div>{made}</div></div>{note}'


KINDS: dict[str, Callable[[Page], str]] = {
    one.__name__: one
    for one in (report, article, tables, lists, formulas, manual, receipt, form, figures, letter)
}


def html(page: Page) -> str:
    """The whole page: its kind's body, in a style that is drawn after it."""
    body, rng = KINDS[page.kind](page), page.rng
    style: dict[str, Any] = {
        "face": FACES[page.face],
        "mono": page.mono,
        "accent": page.accent,
        "size": rng.choice((12, 13, 14)),
    }
    style |= {
        "line": rng.choice((1.3, 1.4, 1.5)),
        "gap": rng.choice((7, 9, 11)),
        "margin": rng.randint(50, 84),
    }
    style |= {"align": rng.choice(("left", "justify")), "title": rng.choice(("left", "center"))}
    style |= dict(zip(("width", "height"), rng.choice(((794, "1123px"), (816, "1056px")))))  # A4, Letter
    if page.kind == "receipt":
        style |= {"width": rng.choice((300, 340, 380)), "height": "auto", "margin": 18}
        style |= {"face": page.mono} if rng.random() < 0.7 else {}
    template = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    return Template(template).render(body=body, **style)
