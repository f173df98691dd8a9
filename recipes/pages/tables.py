"""Tables with cells that span rows and columns, as HTML and as OTSL."""

from __future__ import annotations

import random
from dataclasses import dataclass
from html import escape

from recipes.pages import words


@dataclass(frozen=True)
class Cell:
    text: str
    rows: int = 1
    columns: int = 1
    head: bool = False


@dataclass(frozen=True)
class Table:
    """Cells by the row in which they begin, from left to right."""

    rows: tuple[tuple[Cell, ...], ...]

    def html(self) -> str:
        made = ""
        for row in self.rows:
            made += "<tr>"
            for cell in row:
                tag = "th" if cell.head else "td"
                spans = f' rowspan="{cell.rows}"' if cell.rows > 1 else ""
                spans += f' colspan="{cell.columns}"' if cell.columns > 1 else ""
                made += f"<{tag}{spans}>{escape(cell.text, quote=False)}</{tag}>"
            made += "</tr>"
        return f"<table>{made}</table>"

    def otsl(self) -> str:
        """Rows of <fcel>, <ecel> (empty), <ched> (head), and <lcel>, <ucel>, <xcel>: merged with the cell on
        the left, above, and both."""
        grid: dict[tuple[int, int], str] = {}
        for at, row in enumerate(self.rows):
            column = 0
            for cell in row:
                while (at, column) in grid:
                    column += 1
                for down in range(cell.rows):
                    for right in range(cell.columns):
                        merged = ("", "<lcel>", "<ucel>", "<xcel>")[2 * (down > 0) + (right > 0)]
                        own = "<ched>" if cell.head else "<fcel>" if cell.text else "<ecel>"
                        grid[at + down, column + right] = merged or own + cell.text
        count = max(column for _, column in grid) + 1
        return "".join(
            "".join(grid[at, column] for column in range(count)) + "<nl>" for at in range(len(self.rows))
        )


def random_table(rng: random.Random, most_rows: int = 9) -> Table:
    """A head of one row or two, rows in groups or not, and perhaps a row over the whole width."""
    columns, count = rng.randint(3, 6), rng.randint(3, most_rows)
    grouped = rng.random() < 0.5  # the first cells span the rows of a group
    two_heads = rng.random() < 0.5
    names = [words.label(rng).split()[-1].capitalize() for _ in range(columns)]
    rows: list[tuple[Cell, ...]] = []
    if two_heads:
        wide = rng.randint(2, columns - 1)
        top = [Cell(names[0], rows=2, head=True), Cell(words.label(rng), columns=wide, head=True)]
        top += [Cell(name, rows=2, head=True) for name in names[1 + wide :]]
        rows += [tuple(top), tuple(Cell(name, head=True) for name in names[1 : 1 + wide])]
    else:
        rows.append(tuple(Cell(name, head=True) for name in names))
    kinds = [rng.choice((words.number, words.number, words.date, words.place)) for _ in range(columns - 1)]
    made = 0
    while made < count:
        group = min(count - made, rng.randint(2, 3)) if grouped else 1
        for at in range(group):
            cells = [Cell(words.label(rng), rows=group)] if at == 0 else []
            cells += [Cell("" if rng.random() < 0.06 else kind(rng)) for kind in kinds]
            if len(cells) > 3 and rng.random() < 0.12:  # two values in one cell
                cells[-2:] = [Cell(words.item(rng)[:28].rsplit(" ", 1)[0], columns=2)]
            rows.append(tuple(cells))
        made += group
    if rng.random() < 0.3:
        rows.append((Cell(words.sentence(rng), columns=columns),))
    return Table(tuple(rows))


def ledger(rng: random.Random) -> Table:
    """Goods with their prices, and what they sum to."""
    total = 0.0
    rows: list[tuple[Cell, ...]] = [tuple(Cell(name, head=True) for name in ("Item", "No.", "Price"))]
    for _ in range(rng.randint(4, 14)):
        count, price = rng.choice((1, 1, 1, 2, 3)), words.money(rng)
        total += count * price
        rows.append((Cell(words.goods(rng)), Cell(str(count)), Cell(f"{count * price:.2f}")))
    rows.append((Cell("Total", columns=2), Cell(f"{total:.2f}")))
    tax = rng.choice((5, 7, 19, 20))
    rows.append((Cell(f"of which tax {tax}%", columns=2), Cell(f"{total * tax / (100 + tax):.2f}")))
    return Table(tuple(rows))
