"""The truth of a page in the two forms that models write: Markdown with HTML tables, and DocTags."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.pages.layouts import Piece


def markdown(pieces: Sequence[Piece]) -> str:
    """Pieces in reading order, those of the header and the footer as lines of their own."""
    blocks: list[str] = []
    for before, piece in zip([None, *pieces], pieces):
        one = _block(piece)
        if before is not None and before.kind == piece.kind and piece.kind in ("list_item", "checkbox"):
            blocks[-1] += f"\n{one}"
        elif one:
            blocks.append(one)
    return "\n\n".join(blocks) + "\n"


def _block(piece: Piece) -> str:
    more = piece.more
    if piece.kind == "title":
        return f"# {piece.text}"
    if piece.kind == "heading":
        return f"{'#' * (more['level'] + 1)} {piece.text}"
    if piece.kind == "list_item":
        return f"{'    ' * (more['level'] - 1)}{mark(piece)} {piece.text}"
    if piece.kind == "checkbox":
        return f"- [{'x' if more['ticked'] else ' '}] {piece.text}"
    if piece.kind == "formula":
        return f"$$\n{piece.text}\n$$"
    if piece.kind == "code":
        return f"```{more['language'].lower()}\n{piece.text}\n```"
    return {"table": more.get("html", ""), "picture": "![]()"}.get(piece.kind, piece.text)


def mark(piece: Piece) -> str:
    """What stands before an item of a list: "-" or "2."."""
    return f"{piece.more['number']}." if "number" in piece.more else "-"


def doctags(pieces: Sequence[Piece], boxes: Sequence[Sequence[float]], size: tuple[int, int]) -> str:
    """Pieces in DocTags; boxes are (left, top, right, bottom) in pixels of a page of this size. A caption
    stands in its table or picture, nested items of lists follow one another."""
    made, at = "", 0
    while at < len(pieces):
        piece, place = pieces[at], _place(boxes[at], size)
        follows = pieces[at + 1] if at + 1 < len(pieces) else None
        if piece.kind in ("table", "picture"):
            inner = ""
            if follows is not None and follows.kind == "caption":
                at += 1
                inner = f"<caption>{_place(boxes[at], size)}{follows.text}</caption>"
            tag = "otsl" if piece.kind == "table" else "picture"
            made += f"<{tag}>{place}{inner}{piece.table.otsl() if piece.table else ''}</{tag}>\n"
        elif piece.kind == "list_item":
            tag = "ordered_list" if "number" in piece.more else "unordered_list"
            run = [at]
            while run[-1] + 1 < len(pieces) and pieces[run[-1] + 1].kind == "list_item":
                if ("number" in pieces[run[-1] + 1].more) != ("number" in piece.more):
                    break
                run.append(run[-1] + 1)
            items = "".join(
                f"<list_item>{_place(boxes[one], size)}{pieces[one].text}</list_item>\n" for one in run
            )
            made += f"<{tag}>{items}</{tag}>\n"
            at = run[-1]
        else:
            tag = _tag(piece)
            language = f"<_{piece.more['language']}_>" if piece.kind == "code" else ""
            made += f"<{tag}>{place}{language}{piece.text}</{tag}>\n"
        at += 1
    return f"<doctag>{made}</doctag>"


def _tag(piece: Piece) -> str:
    if piece.kind == "heading":
        return f"section_header_level_{piece.more['level']}"
    if piece.kind == "checkbox":
        return f"checkbox_{'' if piece.more['ticked'] else 'un'}selected"
    return piece.kind


def _place(box: Sequence[float], size: tuple[int, int]) -> str:
    """The four coordinates of a box, each from 0 to 500."""
    sides = (round(500 * min(max(one / side, 0), 1)) for one, side in zip(box, (*size, *size)))
    return "".join(f"<loc_{one}>" for one in sides)
