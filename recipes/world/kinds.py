"""Questions whose answers are computed from the whole scene: "and", "or" and "not", exact numbers, whether
all are alike, which are so, what lies beside what, corners and halves, extremes, grounds, letters. Each is
asked in the many wordings of a grammar (`grammar.say`).

Where a person could doubt the truth (two things nearly as far left, a gap of a few pixels), nothing is asked.
"""

from __future__ import annotations

import colorsys
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from recipes.shapes.dense import box_of
from recipes.world.grammar import capital, say, with_article
from recipes.world.scene import ABSENT, Thing
from shapes.questions import (
    NUMBER_WORDS,
    apart,
    name_of,
    plural,
    reading_order,
    region,
    tally,
    unique_phrases,
)
from shapes.world import COLOURS, QA, SHAPES, Scene

Asker = Callable[[Scene, random.Random], QA | None]
_HERE = "(| there| here| in it| in the (picture|image|drawing)| in this (picture|image|drawing))"
_SEE = (
    "(are there|are there|do you see|can you see|do you count|are in the (picture|image|"
    "drawing)|have we got|)"
)
_COLOUR = "(colour|color)"
_WHAT = "(what|which)"
_ORDERS = (
    "count ",
    "list ",
    "name ",
    "tell ",
    "give ",
    "show ",
    "describe ",
    "enumerate ",
    "add ",
    "i want ",
    "please ",
)


def ask_kinds(scene: Scene, rng: random.Random, count: int) -> list[QA]:
    """Up to `count` of these questions, mostly of different kinds."""
    found: list[QA] = []
    askers = rng.sample(_KINDS, len(_KINDS))
    while askers and len(found) < count:
        qa = askers.pop()(scene, rng)
        found += [qa] if qa is not None else []
    return found


def _qa(
    family: str, rng: random.Random, pattern: str, answer: str, things: Sequence[Thing] = (), **slots
) -> QA:
    question = say(pattern, rng, **slots)
    if question.startswith(_ORDERS) and question.endswith("?"):
        question = question[:-1] + rng.choice((".", ".", ""))
    accept = (NUMBER_WORDS[int(answer)],) if answer.isdigit() and len(answer) == 1 else ()
    return QA(family, capital(question), answer, accept, tuple(things))


def _yes(said: bool) -> str:
    return "yes" if said else "no"


def _only_shapes(scene: Scene) -> bool:
    """Whether "one", "them" and the like can mean nothing but shapes."""
    return len(scene.shapes()) == len(scene.things)


def _nouns(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A word for one shape and for several: "thing" and its kin only where nothing else is there."""
    if not _only_shapes(scene) or rng.random() < 0.6:
        return "shape", "shapes"
    one = rng.choice(("object", "thing", "figure", "item", "form"))
    return one, one + "s"


def _listed(family: str, rng: random.Random, pattern: str, things: Sequence[Thing], said, **slots) -> QA:
    """A question whose answer names things, in reading order."""
    things = reading_order(things)
    return _qa(family, rng, pattern, ", ".join(map(said, things)) or ABSENT, things, **slots)


# ----------------------------------------------------------------------------------------- sets of shapes
Set = tuple[str, list[Thing]]  # a plural phrase and the shapes that it means


def _kind(scene: Scene, rng: random.Random) -> tuple[str, str | None, str | None]:
    """A phrase for one shape with its colour and name, either of which may be None; mostly of one there."""
    pairs = list(tally(scene)[2])
    there = rng.random() < 0.8 and bool(pairs)
    colour, name = rng.choice(pairs) if there else (rng.choice(COLOURS), rng.choice(SHAPES))
    which = rng.random()
    if which < 0.42:
        return f"{colour} shape", colour, None
    return (name, None, name) if which < 0.84 else (f"{colour} {name}", colour, name)


def _of(scene: Scene, colour: str | None, name: str | None) -> list[Thing]:
    return [t for t in scene.shapes() if colour in (None, t.colour) and name in (None, t.name)]


def _two_kinds(scene: Scene, rng: random.Random) -> Set | None:
    """ "red and blue shapes", "circles or squares", "red circles and blue squares"."""
    by_colour = rng.random() < 0.5
    known = list(dict.fromkeys((t.colour if by_colour else t.name) for t in scene.shapes()))
    every = list(COLOURS if by_colour else SHAPES)
    if not known:
        return None
    one = rng.choice(known if rng.random() < 0.85 else every)
    others = [k for k in (known if rng.random() < 0.7 else every) if k != one]
    if not others:
        return None
    two, joined = rng.choice(others), rng.choice(("and", "and", "or"))
    if by_colour:
        found = [t for t in scene.shapes() if t.colour in (one, two)]
        noun = _nouns(scene, rng)[1]
        return rng.choice((f"{one} {joined} {two} {noun}", f"{one} {noun} {joined} {two} {noun}")), found
    found = [t for t in scene.shapes() if t.name in (one, two)]
    if rng.random() < 0.25:
        colours = [rng.choice([t.colour for t in scene.shapes()]) for _ in range(2)]
        found = [t for t in found if t.colour == colours[t.name == two]]
        return f"{colours[0]} {plural(one)} {joined} {colours[1]} {plural(two)}", found
    return f"{plural(one)} {joined} {plural(two)}", found


def _count_of_two(scene: Scene, rng: random.Random) -> QA | None:
    made = _two_kinds(scene, rng)
    if made is None:
        return None
    form = (
        f"(how many {{t}} {_SEE}(| in total| altogether| together)|how many {{t}}|count the {{t}}|"
        "(what is|what's) the (total |)(number|count) of {t}|the number of {t}|number of {t}|"
        "(add up|count) the {t}( together|)|(please tell me|tell me|i want to know) how many {t} there are)?"
    )
    return _qa("count", rng, form, str(len(made[1])), t=made[0])


def _not(scene: Scene, rng: random.Random) -> QA | None:
    """How many are not so, or which."""
    shapes, (_, many) = scene.shapes(), _nouns(scene, rng)
    if not shapes:
        return None
    _, colour, name = _kind(scene, rng)
    if colour and name:
        within = [t for t in shapes if t.name == name]  # "circles that are not red"
        found, many = [t for t in within if t.colour != colour], plural(name)
        put = f"{many} (that are not|that aren't|which are not|not) {colour}"
        verb = f"{many} (are not|aren't) {colour}"
    elif colour:
        found = [t for t in shapes if t.colour != colour]
        verb = f"{many} (are not|aren't|do not have the {_COLOUR}|don't have the {_COLOUR}) {colour}"
        put = (
            f"{many} (that are not|that aren't|which aren't|not) {colour}|(non-|non ){colour} {many}|"
            f"{many} (other than|except|besides|apart from) the {colour} ones|"
            f"{many} of another {_COLOUR} than {colour}"
        )
    else:
        assert name is not None
        found = [t for t in shapes if t.name != name]
        verb = f"{many} (are not|aren't) {plural(name)}"
        put = (
            f"{many} (that are not|that aren't|which are not|not) {plural(name)}|non-{name} {many}|"
            f"{many} (other than|except|except for|besides|apart from|excluding) (the |){plural(name)}|"
            f"{many} that are not {with_article(name)}"
        )
    which = rng.random()
    if which < 0.65:
        form = (
            f"(how many ({put})( are there| do you see|)|how many {verb}|how many {verb}|count the ({put})|"
            f"(what is|what's) the number of ({put}))?"
        )
        return _qa("count", rng, form, str(len(found)))
    if len(found) > 5:
        return None
    say_it = (lambda t: t.name) if colour and not name else name_of
    return _listed("list", rng, f"({_WHAT} {verb}|(list|name) (the|all|all the) ({put}))?", found, say_it)


def _exactly(scene: Scene, rng: random.Random) -> QA | None:
    """Whether there are two, exactly, at least or more than so many."""
    phrase, colour, name = _kind(scene, rng)
    if rng.random() < 0.12:
        phrase, colour, name = "shape", None, None
    count = len(_of(scene, colour, name))
    k = max(1, min(8, count + rng.choice((0, 0, 0, 1, -1, 1, 2))))
    number = rng.choice((str(k), NUMBER_WORDS[k]))
    t = phrase if k == 1 else plural(phrase)
    sees = (
        "(are there|are there|do you see|can you see|does it have|does the (picture|image) "
        "have|is it true that there are)"
    )
    which = rng.random()
    if k == 1:
        sees = sees.replace("are there", "is there")
        if which < 0.4:
            form = (
                f"({sees} (only|just|exactly) (one|1|a single) {{t}}{_HERE}|is there only one {{t}}{_HERE})?"
            )
            return _qa("exists", rng, form, _yes(count == 1), t=phrase)
        if which < 0.8:
            form = "(is there|do you see|can you see) more than (one|1) {t}" + _HERE + "?"
            return _qa("exists", rng, form, _yes(count > 1), t=phrase)
        form = f"{sees} at least (one|1) {{t}}{_HERE}?"
        return _qa("exists", rng, form, _yes(count >= 1), t=phrase)
    if which < 0.45:
        if count > k:  # then "two" is true of two of them, and false of all
            return None
        form = f"({sees} {{n}} {{t}}{_HERE}|{{n}} {{t}}, (right|correct|yes))?"
        return _qa("exists", rng, form, _yes(count == k), n=number, t=t)
    if which < 0.65:
        form = f"({sees} (exactly|just|only|precisely) {{n}} {{t}}{_HERE}|is the number of {{t}} {{n}})?"
        return _qa("exists", rng, form, _yes(count == k), n=number, t=t)
    if which < 0.78:
        form = f"({sees} at least {{n}} {{t}}{_HERE}|{sees} {{n}} or more {{t}}{_HERE})?"
        return _qa("exists", rng, form, _yes(count >= k), n=number, t=t)
    if which < 0.9:
        return _qa("exists", rng, f"{sees} more than {{n}} {{t}}{_HERE}?", _yes(count > k), n=number, t=t)
    form = f"{sees} (fewer|less) than {{n}} {{t}}{_HERE}?"
    return _qa("exists", rng, form, _yes(count < k), n=number, t=t)


def _all_alike(scene: Scene, rng: random.Random) -> QA | None:
    shapes, (_, many) = scene.shapes(), _nouns(scene, rng)
    if len(shapes) < 2:
        return None
    names, colours, _ = tally(scene)
    them = f"all (the |of the |){many}|the {many}( all|)|these {many}( all|)"
    them = f"({them}|they( all|)|all of them|these( all|))" if _only_shapes(scene) else f"({them})"
    which = rng.random()
    if which < 0.22:
        form = (
            f"(are {them} (the same|of the same|of one|one) {_COLOUR}|do {them} have the same {_COLOUR}|"
            f"(have|share) {them} (the same|one) {_COLOUR}|same {_COLOUR} for all)?"
        )
        return _qa("exists", rng, form, _yes(len(colours) == 1))
    if which < 0.4:
        form = (
            f"(are {them} (the same|of the same) (shape|kind|type|form)|do {them} have the same (shape|form)|"
            "(is there|are there) only one (kind|type|sort) of shape|same shape for all)?"
        )
        return _qa("exists", rng, form, _yes(len(names) == 1))
    if which < 0.5:
        form = (
            f"(do {them} have (different|a different) {_COLOUR}s|are {them} (differently "
            f"coloured|of different {_COLOUR}s))?"
        )
        if 1 < len(colours) < len(shapes):
            return None  # some are alike, some are not
        return _qa("exists", rng, form, _yes(len(colours) > 1))
    if which < 0.6:
        form = (
            f"((are there|do you see) (two|any two|any) {many} (of|with|that have) the same {_COLOUR}|"
            f"do (any|any two|two) {many} (have|share) (the same|a) {_COLOUR}|is any "
            f"{_COLOUR} (there|used) twice)?"
        )
        return _qa("exists", rng, form, _yes(len(colours) < len(shapes)))
    if which < 0.8:
        name = rng.choice(list(names))
        if names[name] < 2:
            return None
        said = rng.choice([t.colour for t in shapes if t.name == name] + [rng.choice(COLOURS)])
        found = [t for t in shapes if t.name == name]
        both = "both (the |of the |)|" if len(found) == 2 else ""
        them = f"({both}all (the |of the |)|the )"
        if rng.random() < 0.4:
            form = f"(are {them}{{t}}( all|) the same {_COLOUR}|do {them}{{t}} have the same {_COLOUR})?"
            return _qa("exists", rng, form, _yes(len({t.colour for t in found}) == 1), t=plural(name))
        form = f"(are {them}{{t}} {{c}}|is every {{o}} {{c}}|all {{t}} are {{c}}, (right|correct))?"
        return _qa(
            "exists", rng, form, _yes(all(t.colour == said for t in found)), t=plural(name), o=name, c=said
        )
    said = rng.choice([*colours, rng.choice(COLOURS)])
    if rng.random() < 0.5:
        form = (
            f"(are {them} {{c}}|is every {many[:-1]} {{c}}|is each {many[:-1]} {{c}}|are {them} {{c}} ones)?"
        )
        return _qa("exists", rng, form, _yes(all(t.colour == said for t in shapes)), c=said)
    name = rng.choice(list(names))
    form = f"(are {them} {{t}}|is every {many[:-1]} {{a}}|is each {many[:-1]} {{a}})?"
    return _qa("exists", rng, form, _yes(len(names) == 1), t=plural(name), a=with_article(name))


def _same_as(scene: Scene, rng: random.Random) -> QA | None:
    """Whether two things share a colour; which has the colour of another."""
    known = [t for t, phrases in unique_phrases(scene) if t.name in phrases]
    if len(known) < 2:
        return None
    one, two = rng.sample(known, 2)
    others = [t for t in scene.shapes() if t is not one and t.colour == one.colour]
    if rng.random() < 0.55 or len(others) != 1:
        alike = [(x, y) for x in known for y in known if x is not y and x.colour == y.colour]
        if alike and rng.random() < 0.5:
            one, two = rng.choice(alike)
        form = (
            f"(are the {{a}} and the {{b}} (the same|of the same) {_COLOUR}|do the {{a}} "
            f"and (the |){{b}} (have|share) the same {_COLOUR}|"
            f"(does the {{a}} have|has the {{a}}|is the {{a}}) the same {_COLOUR} as the {{b}})?"
        )
        return _qa("exists", rng, form, _yes(one.colour == two.colour), a=one.name, b=two.name)
    form = (
        f"({_WHAT} (other |)shape (has|shares) the (same |){_COLOUR} (of|as) the {{a}}|"
        f"{_WHAT} (shape |)is the same {_COLOUR} as the {{a}}|"
        f"{_WHAT} other shape is as {one.colour} as the {{a}})?"
    )
    return _qa("shape", rng, form, others[0].name, others, a=one.name)


def _which_are(scene: Scene, rng: random.Random) -> QA | None:
    """Which shapes are red; which colours the circles have."""
    names, colours, _ = tally(scene)
    shapes, (_, many) = scene.shapes(), _nouns(scene, rng)
    if not shapes:
        return None
    if rng.random() < 0.55:
        colour = rng.choice(list(colours) if rng.random() < 0.88 else COLOURS)
        found = [t for t in shapes if t.colour == colour]
        if len(found) > 5 or (len(found) > 3 and len({t.name for t in found}) == 1):
            return None
        ones = f"|{_WHAT} of (them|these) are {{c}}|{_WHAT} ones are {{c}}|{_WHAT} are {{c}}"
        form = (
            f"({_WHAT} {many} are {{c}}|{_WHAT} of the {many} are {{c}}{ones if _only_shapes(scene) else ''}|"
            f"(list|name|give me|tell me) (all |)(the |){{c}} {many}|{_WHAT} {{c}} {many} "
            f"(are there|do you see)|what are the {{c}} {many}|"
            f"(list|name|enumerate) the {many} (that are|which are|in) {{c}}|"
            f"{_WHAT} {many} have the {_COLOUR} {{c}}|"
            f"{_WHAT} {many} (are coloured|are painted|are drawn in|come in) {{c}}|{{c}} {many})?"
        )
        return _listed("list", rng, form, found, lambda t: t.name, c=colour)
    name = rng.choice(list(names))
    found = [t for t in shapes if t.name == name]
    said = list(dict.fromkeys(t.colour for t in reading_order(found)))
    if len(found) < 2:
        return None
    form = (
        f"({_WHAT} {_COLOUR}s are the {{t}}|{_WHAT} {_COLOUR}s do the {{t}} have|what are "
        f"the {_COLOUR}s of the {{t}}|"
        f"(list|name|tell me) the {_COLOUR}s of the {{t}}|{_WHAT} {_COLOUR}s (have|are) "
        f"the {{t}}|in (what|which) {_COLOUR}s are the {{t}}|"
        f"{_COLOUR}s of the {{t}}|the {{t}} have (what|which) {_COLOUR}s)?"
    )
    return _qa("list", rng, form, ", ".join(said), t=plural(name))


def _colours(scene: Scene, rng: random.Random) -> QA | None:
    """How many colours there are, and which; which is the most frequent."""
    shapes, (_, many) = scene.shapes(), _nouns(scene, rng)
    if not shapes:
        return None
    counts = Counter(t.colour for t in shapes)
    of_shapes = len(shapes) < len(scene.things) and rng.random() < 0.5
    about = shapes if of_shapes else scene.things
    said = list(dict.fromkeys(t.colour for t in reading_order(about)))
    used = f"(do the {many} have|do the {many} come in|are the {many})" if of_shapes else (
        f"({_SEE}|are used|can be seen|does (it|the picture|the image) (have|use|contain|show)|{_HERE}|)"
    )  # fmt: skip
    which = rng.random()
    if which < 0.42:
        form = (
            f"(how many (different |distinct |)(colours|colors) {used}|how many (different |"
            ")(colours|colors)|(what is|what's) the number of (different |)(colours|colors)|"
            "number of (colours|colors)|count the (colours|colors))?"
        )
        if of_shapes:
            form = f"how many (different |distinct |)(colours|colors) {used}?"
        return _qa("count", rng, form, str(len(said)))
    if which < 0.72:
        form = (
            f"({_WHAT} (colours|colors) {used}|{_WHAT} (colours|colors)|(list|name|tell me|"
            f"give me) (all |)(the |)(colours|colors)( used|{_HERE}|))?"
        )
        if of_shapes:
            form = f"({_WHAT} (colours|colors) {used}|(list|name) the (colours|colors) of the {many})?"
        return _qa("list", rng, form, ", ".join(said))
    most = counts.most_common(2)
    kinds = Counter(t.name for t in shapes).most_common(2)
    if which < 0.87 and len(most) > 1 and most[0][1] > most[1][1]:
        form = (
            f"({_WHAT} {_COLOUR} is (the |)(most common|most frequent|dominant|used most)|"
            f"(what is|what's) the (most common|most frequent|dominant|main) {_COLOUR}|"
            f"{_WHAT} {_COLOUR} (appears|occurs|is used|do you see) (most|most often|the "
            f"most)|most common {_COLOUR})?"
        )
        return _qa("colour", rng, form, most[0][0])
    if len(kinds) > 1 and kinds[0][1] > kinds[1][1]:
        form = (
            f"({_WHAT} shape is (the |)(most common|most frequent)|(what is|what's) the "
            "(most common|most frequent) (shape|kind of shape)|"
            f"{_WHAT} shape (appears|occurs|is drawn|do you see) (most|most often|the "
            "most)|of which shape are there the most|most common shape)?"
        )
        return _qa("shape", rng, form, kinds[0][0])
    return None


def _how_many_kinds(scene: Scene, rng: random.Random) -> QA | None:
    names = tally(scene)[0]
    if not names:
        return None
    form = (
        "(how many (different|kinds of|types of|sorts of|distinct|different kinds of|"
        f"different types of) shapes {_SEE}|how many (different |)(shape types|kinds of "
        "shapes))?"
    )
    return _qa("count", rng, form, str(len(names)))


# ------------------------------------------------------------------------------------------------- places
_SIDES = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}
_PUT = {
    "left": "((left of|to the left of|on the left of|on the left side of|left from) {b})",
    "right": "((right of|to the right of|on the right of|on the right side of|right from) {b})",
    "above": "((above|over|above of) {b})",
    "below": "((below|under|beneath|underneath) {b})",
}


def _bounds(scene: Scene, thing: Thing) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of its box, in shorter sides of the image."""
    wide, high = max(1.0, scene.aspect), max(1.0, 1 / scene.aspect)
    left, top, right, bottom = box_of(thing, scene.aspect)
    return left * wide, top * high, right * wide, bottom * high


def _beside(scene: Scene, thing: Thing, side: str, among: Sequence[Thing]) -> Thing | None:
    """The one of these that lies to that side of a thing: nearly straight, and no other as near or nearer."""
    axis, sign = _SIDES[side]
    own, found = _bounds(scene, thing), []
    for other in among:
        way = apart(other, thing, scene)
        if other is not thing and sign * way[axis] >= 0.06:
            its = _bounds(scene, other)
            gap = its[axis] - own[2 + axis] if sign > 0 else own[axis] - its[2 + axis]
            straight = (
                sign * way[axis] >= 0.1 and abs(way[1 - axis]) <= 0.7 * sign * way[axis] and gap > -0.03
            )
            found.append((math.hypot(*way), not straight, id(other), other))
    found.sort()
    if not found or found[0][1] or (len(found) > 1 and found[1][0] < 1.25 * found[0][0]):
        return None
    return found[0][3]


def _empty(scene: Scene, thing: Thing, side: str) -> bool:
    """Whether nothing at all lies to that side."""
    axis, sign = _SIDES[side]
    return all(sign * apart(t, thing, scene)[axis] < 0.04 for t in scene.things if t is not thing)


def _next_to(scene: Scene, thing: Thing) -> Thing | None:
    """The clearly nearest thing."""
    others = [t for t in scene.things if t is not thing]
    ranked = sorted((math.hypot(*apart(t, thing, scene)), i) for i, t in enumerate(others))
    gaps = sorted((_gap(scene, thing, t), i) for i, t in enumerate(others))
    if not ranked or ranked[0][1] != gaps[0][1] or (len(ranked) > 1 and ranked[1][0] < 1.2 * ranked[0][0]):
        return None
    return others[ranked[0][1]]


def _gap(scene: Scene, one: Thing, two: Thing) -> float:
    """How far apart the boxes of two things are, in shorter sides of the image."""
    a, b = _bounds(scene, one), _bounds(scene, two)
    return math.hypot(*(max(0.0, a[i] - b[2 + i], b[i] - a[2 + i]) for i in (0, 1)))


def _between(scene: Scene, rng: random.Random) -> tuple[Thing, Thing, Thing] | None:
    """Two things with a name of their own and the only one between them."""
    known = [t for t, _ in unique_phrases(scene)]
    pairs = [(a, b) for i, a in enumerate(known) for b in known[i + 1 :]]
    for a, b in rng.sample(pairs, len(pairs)):
        across, down = apart(b, a, scene)
        length = math.hypot(across, down)
        if length < 0.3:
            continue
        inside, doubtful = [], 0
        for t in scene.things:
            if t is a or t is b:
                continue
            x, y = apart(t, a, scene)
            along, off = (x * across + y * down) / length**2, abs(x * down - y * across) / length
            inside += [t] if 0.2 < along < 0.8 and off < 0.14 else []
            doubtful += 0.05 < along < 0.95 and 0.14 <= off < 0.3
        if len(inside) == 1 and not doubtful:
            return (a, inside[0], b) if rng.random() < 0.5 else (b, inside[0], a)
    return None


_CORNERS = {  # thirds that are clearly meant, and half of the image that must hold nothing else
    "top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1),
}  # fmt: skip
_CORNER_WORDS = {
    "top left": (
        "((top|upper) (left|left hand|left-hand) (corner|corner|part|area)|top left|upper left|"
        "left (top|upper) corner|top-left corner)"
    ),
    "top right": (
        "((top|upper) (right|right hand|right-hand) (corner|corner|part|area)|top right|upper "
        "right|right (top|upper) corner|top-right corner)"
    ),
    "bottom left": (
        "((bottom|lower) (left|left hand|left-hand) (corner|corner|part|area)|bottom left|"
        "lower left|left (bottom|lower) corner|bottom-left corner)"
    ),
    "bottom right": (
        "((bottom|lower) (right|right hand|right-hand) (corner|corner|part|area)|bottom right|"
        "lower right|right (bottom|lower) corner|bottom-right corner)"
    ),
    "middle": (
        "(middle|centre|center|middle of the (picture|image|drawing)|centre of the (picture|"
        "image)|center of the (picture|image)|very middle)"
    ),
}


def in_corner(scene: Scene, corner: str) -> list[Thing] | None:
    """What is in a corner or in the middle: one thing, or []; None in doubt."""
    if corner == "middle":
        near = [t for t in scene.things if abs(t.x - 0.5) < 0.17 and abs(t.y - 0.5) < 0.17]
        about = [t for t in scene.things if abs(t.x - 0.5) < 0.27 and abs(t.y - 0.5) < 0.27]
    else:
        right, low = _CORNERS[corner]
        places = [(abs(t.x - right), abs(t.y - low), t) for t in scene.things]
        near = [t for x, y, t in places if x < 0.34 and y < 0.34]
        about = [t for x, y, t in places if x < 0.46 and y < 0.46]
        if len(near) == 1 and len(about) == 2:
            far = next(t for t in about if t is not near[0])
            first, second = (math.hypot(abs(t.x - right), abs(t.y - low)) for t in (near[0], far))
            about = near if second > 1.5 * first else about
    if not near and any(_enters(scene, t, corner) for t in scene.things):
        return None
    return near if len(near) == len(about) < 2 else None


def _enters(scene: Scene, thing: Thing, corner: str) -> bool:
    """Whether a thing's box reaches into a corner's third, or into the middle's."""
    left, top, right, bottom = box_of(thing, scene.aspect)
    if corner == "middle":
        return left < 0.66 and right > 0.34 and top < 0.66 and bottom > 0.34
    far, low = _CORNERS[corner]
    return (right > 0.66 if far else left < 0.34) and (bottom > 0.66 if low else top < 0.34)


_EXTREMES = {
    "left": (
        "leftmost|furthest left|farthest left|most left|furthest to the left|left-most|on the "
        "far left|closest to the left edge"
    ),
    "right": (
        "rightmost|furthest right|farthest right|most right|furthest to the right|right-most|"
        "on the far right|closest to the right edge"
    ),
    "top": "topmost|highest|furthest up|uppermost|at the very top|closest to the top|highest up|top-most",
    "bottom": (
        "bottommost|lowest|furthest down|lowermost|at the very bottom|closest to the bottom|"
        "lowest down|bottom-most"
    ),
}
_BEFORE_NOUN = {
    "left": "(leftmost|left-most|left most)", "right": "(rightmost|right-most|right most)",
    "top": "(topmost|highest|uppermost|top)", "bottom": "(bottommost|lowest|bottom)",
}  # fmt: skip
_AXES = {"left": (0, -1), "right": (0, 1), "top": (1, -1), "bottom": (1, 1)}


def farthest(scene: Scene, things: Sequence[Thing], side: str, margin: float = 0.08) -> Thing | None:
    """The one of these that lies clearly farthest to a side."""
    axis, sign = _AXES[side]
    long = max(1.0, scene.aspect) if axis == 0 else max(1.0, 1 / scene.aspect)
    ordered = sorted(things, key=lambda t: -sign * (t.y if axis else t.x))
    if not ordered:
        return None
    if len(ordered) > 1:
        one, two = ((t.y if axis else t.x) * long for t in ordered[:2])
        if abs(one - two) < margin:
            return None
    return ordered[0]


def extreme_size(things: Sequence[Thing], biggest: bool) -> Thing | None:
    """The clearly biggest or smallest of two or more."""
    ordered = sorted(things, key=lambda t: t.size, reverse=biggest)
    if len(ordered) < 2:
        return None
    big, small = (ordered[0], ordered[1]) if biggest else (ordered[1], ordered[0])
    return ordered[0] if big.size >= 1.25 * small.size else None


_BIG = "(biggest|largest|biggest|largest|greatest)"
_SMALL = "(smallest|smallest|tiniest|littlest)"


def referents(scene: Scene, rng: random.Random) -> Iterator[tuple[Thing, str]]:
    """(a shape, a phrase that means it by its place or size, with "shape" for its name), in no order."""
    shapes, noun = scene.shapes(), _nouns(scene, rng)[0]
    noun = "one" if rng.random() < 0.1 and _only_shapes(scene) else noun
    for side in rng.sample(list(_AXES), 4):
        if len(shapes) > 1 and (found := farthest(scene, shapes, side)):
            in_front = say(_BEFORE_NOUN[side], rng)
            behind = rng.choice([w for w in _EXTREMES[side].split("|") if " " in w])
            yield (
                found,
                rng.choice((f"the {in_front} {noun}", f"the {in_front} {noun}", f"the {noun} {behind}")),
            )
    for biggest in rng.sample((True, False), 2):
        if found := extreme_size(shapes, biggest):
            yield found, f"the {say(_BIG if biggest else _SMALL, rng)} {noun}"
    for corner in rng.sample(list(_CORNER_WORDS), 5):
        found_there = in_corner(scene, corner)
        if found_there and found_there[0].kind == "shape":
            words = say(_CORNER_WORDS[corner], rng)
            yield found_there[0], f"the {noun} {rng.choice(('in', 'at'))} the {words}"
    for thing, phrases in rng.sample(known := unique_phrases(scene), len(known)):
        side = rng.choice(list(_SIDES))
        if near := _beside(scene, thing, side, shapes):
            yield near, f"the {noun} {say(_PUT[side], rng, b='the ' + rng.choice(phrases))}"
        nearest = _next_to(scene, thing)
        if nearest is not None and nearest.kind == "shape":
            put = rng.choice(("nearest to", "closest to", "next to", "beside", "nearest"))
            yield nearest, f"the {noun} {put} the {rng.choice(phrases)}"
    if found_between := _between(scene, rng):
        a, thing, b = found_between
        if thing.kind == "shape":
            yield thing, f"the {noun} between the {_short(a, scene)} and the {_short(b, scene)}"


def _short(thing: Thing, scene: Scene) -> str:
    """The shortest phrase that means only this thing."""
    return next(phrases[0] for t, phrases in unique_phrases(scene) if t is thing)


def _of_referent(scene: Scene, rng: random.Random) -> QA | None:
    """The colour, the shape or both of what is meant by its place or size."""
    known = list(referents(scene, rng))
    if not known:
        return None
    thing, phrase = rng.choice(known)
    which = rng.random()
    if which < 0.38:
        form = (
            f"({_WHAT} {_COLOUR} is {{t}}|(what is|what's|tell me|name) the {_COLOUR} of "
            f"{{t}}|{_WHAT} {_COLOUR} does {{t}} have|"
            f"{{t}} is (what|which) {_COLOUR}|{_COLOUR} of {{t}}|in (what|which) {_COLOUR} is {{t}})?"
        )
        return _qa("colour", rng, form, thing.colour, t=phrase)
    if which < 0.62:
        form = (
            f"({_WHAT} shape is {{t}}|(what is|what's) the shape of {{t}}|{_WHAT} (kind|type|"
            f"sort) of shape is {{t}}|{_WHAT} shape does {{t}} have|{{t}} is (what|which) "
            f"shape|tell me the shape of {{t}})?"
        )
        return _qa("shape", rng, form, thing.name, t=phrase)
    if which < 0.78:
        form = "(what is|what's|what do you call|name|describe|tell me what is) {t}?"
        return _qa("list", rng, form, name_of(thing), (thing,), t=phrase)
    if which < 0.9:
        said = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
        form = "(is {t} {c}|is {t} {c} in colour|{t} is {c}, (right|correct|isn't it)|does {t} look {c})?"
        return _qa("exists", rng, form, _yes(said == thing.colour), t=phrase, c=said)
    said = thing.name if rng.random() < 0.5 else rng.choice(SHAPES)
    form = "(is {t} {a}|{t} is {a}, (right|correct|isn't it)|would you call {t} {a})?"
    return _qa("exists", rng, form, _yes(said == thing.name), t=phrase, a=with_article(said))


def _what_beside(scene: Scene, rng: random.Random) -> QA | None:
    """What is below the circle."""
    known = unique_phrases(scene)
    for thing, phrases in rng.sample(known, len(known)):
        side, phrase = rng.choice(list(_SIDES)), "the " + rng.choice(phrases)
        if rng.random() < 0.25:  # all of them
            axis, sign = _SIDES[side]
            ways = [(sign * apart(t, thing, scene)[axis], t) for t in scene.shapes() if t is not thing]
            if any(0.03 < way < 0.1 for way, _ in ways) or not ways:
                continue
            found = [t for way, t in ways if way >= 0.1]
            if rng.random() < 0.5:
                form = f"(how many shapes are {_PUT[side]}|count the shapes {_PUT[side]})?"
                return _qa("count", rng, form, str(len(found)), b=phrase)
            form = (
                f"({_WHAT} shapes (are|lie) {_PUT[side]}|(list|name) (all |)(the |)shapes "
                f"{_PUT[side]}|what are the shapes {_PUT[side]})?"
            )
            return _listed("list", rng, form, found, name_of, b=phrase)
        what = (
            f"({_WHAT} (thing |object |one |)(is|lies|do you see)|what's|what is (there |"
            "located |placed |drawn |))"
        )
        if _empty(scene, thing, side) and rng.random() < 0.3:
            return _qa("absent", rng, f"{what} {_PUT[side]}?", ABSENT, b=phrase)
        if other := _beside(scene, thing, side, scene.things):
            form = (
                f"({what} {_PUT[side]}|(name|tell me) (what is|what's|the thing) {_PUT[side]}|"
                f"{_WHAT} shape is {_PUT[side]})?"
            )
            qa = _qa("list", rng, form, name_of(other), (other,), b=phrase)
            asks_shape = "hape is" in qa.question
            if asks_shape and other.kind != "shape":
                return None
            return QA("shape", qa.question, other.name) if asks_shape else qa
    return None


def _near_or_between(scene: Scene, rng: random.Random) -> QA | None:
    what = f"({_WHAT} (thing |object |shape |one |)is|what's|what do you see|what lies)"
    if rng.random() < 0.45 and (found := _between(scene, rng)):
        a, thing, b = found
        if thing.kind != "shape":
            what = "(what is|what's|what do you see|what lies)"
        form = f"{what} (between|in between|in the middle of) the {{a}} and (the |){{b}}?"
        return _one_of(rng, form, thing, a=_short(a, scene), b=_short(b, scene))
    known = [(t, ps, near) for t, ps in unique_phrases(scene) if (near := _next_to(scene, t))]
    if len(scene.things) < 3 or not known:
        return None
    thing, phrases, near = rng.choice(known)
    if near.kind != "shape":
        what = "(what is|what's|what do you see|what lies)"
    form = f"{what} (nearest to|closest to|nearest|next to|beside|right next to|near|close to) the {{b}}?"
    return _one_of(rng, form, near, b=rng.choice(phrases))


def _one_of(rng: random.Random, form: str, thing: Thing, **slots) -> QA:
    """A question for one thing: its name alone where a shape is asked for, else its colour too."""
    qa = _qa("list", rng, form, name_of(thing), (thing,), **slots)
    if qa.question.lower().startswith(("what shape", "which shape")):
        return QA("shape", qa.question, thing.name)
    return qa


def _corner(scene: Scene, rng: random.Random) -> QA | None:
    """What is in a corner or in the middle; which corner a thing is in."""
    if rng.random() < 0.3:
        known = [(t, ps) for t, ps in unique_phrases(scene) if clear_region(t)]
        if not known:
            return None
        thing, phrases = rng.choice(known)
        place = region(thing)
        if rng.random() < 0.4:
            said = place if rng.random() < 0.5 else rng.choice([c for c in _CORNER_WORDS if c != "middle"])
            if said not in _CORNER_WORDS:
                return None
            form = (
                f"(is the {{t}} in the {_CORNER_WORDS[said]}|can the {{t}} be found in the "
                f"{_CORNER_WORDS[said]}|is there a {{t}} in the {_CORNER_WORDS[said]})?"
            )
            return _qa("exists", rng, form, _yes(said == place), t=rng.choice(phrases))
        form = (
            "(in (which|what) (part|area|region) of the (picture|image|drawing) is the {t}|"
            "(which|what) (part|area) of the (picture|image) (is the {t} in|has the {t}))?"
        )
        if " " in place and rng.random() < 0.7:
            form = (
                "((which|what) corner is the {t} in|in (which|what) corner is the {t}|(which|"
                "what) corner (has|contains|holds) the {t}|the {t} is in (which|what) corner)?"
            )
        return _qa("region", rng, form, place, t=rng.choice(phrases))
    corners = [(c, found) for c in _CORNER_WORDS if (found := in_corner(scene, c)) is not None]
    if not corners:
        return None
    corner, found = rng.choice(
        [one for one in corners if one[1]] or corners if rng.random() < 0.85 else corners
    )
    what = (
        f"({_WHAT} (thing |object |shape |one |)(is|is shown|do you see)|what's|what is there|"
        "what can you see)"
    )
    if not found:
        form = (
            f"({what} (in|at) the {_CORNER_WORDS[corner]}|is there (anything|something) in the "
            f"{_CORNER_WORDS[corner]})?"
        )
        qa = _qa("absent", rng, form, ABSENT)
        return QA("exists", qa.question, "no") if qa.question.startswith("Is there") else qa
    if found[0].kind != "shape":
        what = "(what is|what's|what do you see|what is there)"
    form = (
        f"({what} (in|at|in) the {_CORNER_WORDS[corner]}|the {_CORNER_WORDS[corner]} (has|"
        "shows|contains) what)?"
    )
    return _one_of(rng, form, found[0])


def clear_region(thing: Thing) -> bool:
    """Whether its centre is far from the lines between the thirds."""
    return all(abs(place - line) > 0.05 for place in (thing.x, thing.y) for line in (1 / 3, 2 / 3))


def _half(scene: Scene, rng: random.Random) -> QA | None:
    """How many, or which, are in one half; whether a thing is."""
    shapes, (_, many) = scene.shapes(), _nouns(scene, rng)
    axis = rng.randrange(2)
    places = [(t.y if axis else t.x) for t in shapes]
    if not shapes:
        return None

    def crosses(thing: Thing) -> bool:
        edges = box_of(thing, scene.aspect)
        return edges[axis] < 0.5 < edges[2 + axis] or abs((thing.y if axis else thing.x) - 0.5) < 0.08

    second = rng.random() < 0.5
    half = (
        ("(left|left-hand|left hand)", "(right|right-hand|right hand)"),
        ("(top|upper)", "(bottom|lower)"),
    )[axis][second]
    where = f"((in|on) the {half} (half|side|part)|on the {half} half of the (picture|image|drawing))"
    known = [(t, ps) for t, ps in unique_phrases(scene) if not crosses(t)]
    if known and rng.random() < 0.5:
        thing, phrases = rng.choice(known)
        said = ((thing.y if axis else thing.x) > 0.5) == second
        if rng.random() < 0.4:
            pair = (
                "(on the left or on the right|on the left or the right side|left or right)",
                "(at the top or at the bottom|in the top or the bottom half|at the top or bottom)",
            )[axis]
            answer = (("left", "right"), ("top", "bottom"))[axis][(thing.y if axis else thing.x) > 0.5]
            return _qa(
                "region",
                rng,
                f"(is the {{t}} {pair}|the {{t}}: {pair})?",
                answer,
                t=rng.choice(phrases),
            )
        return _qa(
            "exists",
            rng,
            f"is the {{t}} {where}?",
            _yes(said),
            t=rng.choice(phrases),
        )
    if any(map(crosses, shapes)):
        return None
    found = [t for p, t in zip(places, shapes) if (p > 0.5) == second]
    if rng.random() < 0.6:
        return _qa(
            "count",
            rng,
            f"(how many {many} are {where}|how many {many} {where}|count the {many} {where})?",
            str(len(found)),
        )
    return _listed(
        "list",
        rng,
        f"({_WHAT} {many} are {where}|(list|name) the {many} {where})?",
        found,
        name_of,
    )


def _extreme(scene: Scene, rng: random.Random) -> QA | None:
    """Which lies farthest to a side, of all or of one kind; whether one does; the second from a side."""
    shapes, noun = scene.shapes(), _nouns(scene, rng)[0]
    side = rng.choice(list(_AXES))
    if len(shapes) > 2 and _only_shapes(scene) and side in ("left", "right") and rng.random() < 0.2:
        ordered = sorted(shapes, key=lambda t: -_AXES[side][1] * t.x)
        gaps = [abs(a.x - b.x) * max(1.0, scene.aspect) for a, b in pairwise(ordered)]
        k = rng.randint(1, min(3, len(ordered) - 1))
        if min(gaps[: k + 1]) < 0.1:
            return None
        put = f"{('second', 'third', 'fourth')[k - 1]} from the {side}"
        return _one_of(
            rng, f"({_WHAT} (shape |one |thing |)is (the |){put}|what's (the |){put})?", ordered[k]
        )
    if rng.random() < 0.3:
        several = [name for name, count in tally(scene)[0].items() if count > 1]
        if not several:
            return None
        name = rng.choice(several)
        found = farthest(scene, [t for t in shapes if t.name == name], side)
        if found is None:
            return None
        form = (
            f"({_WHAT} {_COLOUR} is the {_BEFORE_NOUN[side]} {{t}}|(what is|what's) the "
            f"{_COLOUR} of the {_BEFORE_NOUN[side]} {{t}}|the {_BEFORE_NOUN[side]} {{t}} is "
            f"(what|which) {_COLOUR})?"
        )
        return _qa("colour", rng, form, found.colour, t=name)
    found = farthest(scene, shapes, side) if len(shapes) > 1 else None
    if found is None:
        return None
    if rng.random() < 0.2:
        alone = [one for one in unique_phrases(scene) if one[0].kind == "shape"]
        if not alone:
            return None
        thing, phrases = rng.choice(alone)
        form = f"is the {{t}} (the {_BEFORE_NOUN[side]} {noun}|the {_BEFORE_NOUN[side]} one|{{s}})?"
        lies = rng.choice(_EXTREMES[side].split("|"))
        return _qa("exists", rng, form, _yes(thing is found), t=rng.choice(phrases), s=lies)
    lies = rng.choice(_EXTREMES[side].split("|"))
    ones = "|one |of them |" if _only_shapes(scene) else ""
    the = "" if lies.startswith(("on ", "at ", "closest")) else rng.choice(("", "the "))
    form = (
        f"({_WHAT} ({noun} {ones}|of the {noun}s )(is|lies) {{s}}|"
        f"{_WHAT} is the {_BEFORE_NOUN[side]} {noun}|(name|tell me) the "
        f"{_BEFORE_NOUN[side]} {noun}|{_WHAT} {noun} (do you see|comes) {{s}})?"
    )
    return _one_of(rng, form, found, s=the + lies)


def _size_of_kind(scene: Scene, rng: random.Random) -> QA | None:
    """The biggest or smallest of all, of one colour or of one kind."""
    biggest, noun = rng.random() < 0.5, _nouns(scene, rng)[0]
    most = _BIG if biggest else _SMALL

    def of_one_kind(key: str) -> tuple[str, Thing | None]:
        """A name or a colour of which one shape is clearly the biggest or smallest, and that shape."""
        kinds = dict.fromkeys(getattr(t, key) for t in scene.shapes())
        alike = {kind: [t for t in scene.shapes() if getattr(t, key) == kind] for kind in kinds}
        known = [(kind, extreme_size(alike[kind], biggest)) for kind in kinds]
        return rng.choice([one for one in known if one[1]] or [("", None)])

    which = rng.random()
    if which < 0.35:
        name, found = of_one_kind("name")
        if found is None:
            return None
        form = (
            f"({_WHAT} {_COLOUR} is the {most} {{t}}|(what is|what's) the {_COLOUR} of the "
            f"{most} {{t}}|{_WHAT} {_COLOUR} does the {most} {{t}} have|the {most} {{t}} is "
            f"(what|which) {_COLOUR}|{_COLOUR} of the {most} {{t}})?"
        )
        return _qa("colour", rng, form, found.colour, t=name)
    if which < 0.6:
        colour, found = of_one_kind("colour")
        if found is None:
            return None
        form = (
            f"({_WHAT} shape is the {most} {{c}} (one|shape|{noun})|{_WHAT} is the {most} "
            f"{{c}} {noun}|(what is|what's) the {most} {{c}} {noun}|{_WHAT} of the {{c}} "
            f"{noun}s is (the |){most})?"
        )
        return _qa("shape", rng, form, found.name, c=colour)
    found = extreme_size(scene.shapes(), biggest)
    if found is None:
        return None
    if which < 0.75:
        alone = [one for one in unique_phrases(scene) if one[0].kind == "shape"]
        if not alone:
            return None
        thing, phrases = rng.choice(
            [one for one in alone if one[0] is found] or alone if rng.random() < 0.5 else alone
        )
        form = f"(is the {{t}} the {most}( {noun}| one|)|is the {{t}} the {most} of (all|all {noun}s|them))?"
        return _qa("exists", rng, form, _yes(thing is found), t=rng.choice(phrases))
    form = (
        f"({_WHAT} ({noun} |of the {noun}s )is (the |){most}|what's the {most} {noun}|"
        f"(name|tell me) the {most} {noun}|{_WHAT} {noun} (looks|seems|appears) {most})?"
    )
    return _one_of(rng, form, found)


# ------------------------------------------------------------------------------------- ground and letters
def ground(scene: Scene) -> str | None:
    """What the colour of the ground is called; None where it has several, or stands between two names."""
    names = {_tone(rgb) for rgb in (scene.background.first, scene.background.second)}
    names = {_tone(scene.background.first)} if scene.background.kind == "plain" else names
    return names.pop() if len(names) == 1 else None


def _tone(rgb: tuple) -> str | None:
    hue, light, _ = colorsys.rgb_to_hls(*(c / 255 for c in rgb))
    vivid = (max(rgb) - min(rgb)) / 255
    if vivid < 0.06:
        return (
            "white" if light > 0.93 else "black" if light < 0.16 else "grey" if 0.25 < light < 0.87 else None
        )
    if vivid < 0.11 or light < 0.12:
        return None
    hue *= 360
    named = (
        (12, "red"), (20, None), (40, "orange"), (48, None), (66, "yellow"), (78, None), (160, "green"),
        (190, None), (252, "blue"), (262, None), (292, "purple"), (305, None), (342, "pink"), (350, None),
        (361, "red"),
    )  # fmt: skip
    name = next(said for limit, said in named if hue < limit)
    if name == "red" and light > 0.7:
        return "pink"
    dull = vivid < 0.3 or light < 0.42 or light > (0.86 if name == "pink" else 0.75)
    return None if dull and name in ("red", "orange", "yellow", "pink") else name  # brown, beige, olive


def _ground(scene: Scene, rng: random.Random) -> QA | None:
    said = ground(scene)
    if said is None or not scene.shapes():
        return None
    back = "(background|background|back ground|backdrop|ground|canvas|paper)"
    if rng.random() < 0.3:
        other = said if rng.random() < 0.5 else rng.choice((*COLOURS, "white", "grey"))
        form = f"(is the {back} {{c}}|is it on a {{c}} {back}|does the (picture|image) have a {{c}} {back})?"
        return _qa("exists", rng, form, _yes(other == said), c=other)
    form = (
        f"({_WHAT} {_COLOUR} is the {back}|(what is|what's) the {back} {_COLOUR}|(what is|"
        f"what's) the {_COLOUR} of the {back}|"
        f"{_WHAT} {_COLOUR} (does the {back} have|is behind the shapes)|{back} {_COLOUR}|"
        f"the {back} is (what|which) {_COLOUR}|"
        f"on (what|which) {_COLOUR} are the shapes( drawn|))?"
    )
    return _qa("ground", rng, form, said)


def _letters(scene: Scene, rng: random.Random) -> QA | None:
    """Letters of the only word: how many, the first, the last, whether it has one."""
    words = [t for t in scene.things if t.kind == "word"]
    if len(words) != 1:
        return None
    word = words[0].name
    noun, which = rng.choice(("word", "word", "word", "text", "printed word", "written word")), rng.random()
    if which < 0.34:
        form = (
            "(how many letters (does the {w} have|are in the {w}|has the {w}|does the {w} "
            "contain|make up the {w}|are there in the {w})|"
            "(what is|what's) the (length of the {w}|number of letters in the {w})|how "
            "long is the {w}|count the letters (of|in) the {w}|number of letters in the "
            "{w})?"
        )
        return _qa("count", rng, form, str(len(word)), w=noun)
    if which < 0.72:
        first = rng.random() < 0.6
        at = "(first|1st|initial|starting)" if first else "(last|final)"
        starts = "(start|begin)" if first else "end"
        form = (
            f"((what is|what's) the {at} letter (of|in) the {{w}}|{_WHAT} letter (does the {{w}} "
            f"{starts} with|comes {'first' if first else 'last'}( in the {{w}}|))|"
            f"{at} letter of the {{w}}|(tell me|name) the {at} letter( of the {{w}}|)|the "
            f"{{w}} {starts}s with (what|which) letter|with (which|what) letter does the "
            f"{{w}} {starts})?"
        )
        return _qa("letter", rng, form, word[0] if first else word[-1], w=noun)
    if which < 0.86:
        letter = rng.choice((word[0], rng.choice("abcdefghilmnoprstu")))
        form = "(does the {w} (start|begin) with the letter {l}|is {l} the first letter of the {w})?"
        written = rng.choice((letter, letter.upper()))
        return _qa("exists", rng, form, _yes(word[0] == letter), w=noun, l=written)
    if rng.random() < 0.5:
        letter = rng.choice((rng.choice(word), rng.choice("abcdefghilmnoprstu")))
        form = "(does the {w} (contain|have) the letter {l}|is the letter {l} in the {w})?"
        return _qa("exists", rng, form, _yes(letter in word), w=noun, l=rng.choice((letter, letter.upper())))
    said = word if rng.random() < 0.5 else rng.choice(("apple", "house", "tree", "cat", "moon", "stone"))
    form = '(is the {w} "{s}"|does (it|the {w}) say "{s}"|is "{s}" written here|does the {w} read "{s}")?'
    return _qa("exists", rng, form, _yes(said == word), w=noun, s=said)


def _of_text(scene: Scene, rng: random.Random) -> QA | None:
    """The colour of the writing or of the digit, by their other names."""
    kinds = Counter(t.kind for t in scene.things)
    known = [t for t in scene.things if t.kind != "shape" and kinds[t.kind] == 1]
    if not known:
        return None
    thing = rng.choice(known)
    noun = rng.choice(
        ("text", "writing", "lettering", "printed word", "word")
        if thing.kind == "word"
        else ("number", "numeral", "digit", "digit")
    )
    if rng.random() < 0.3:
        said = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
        return _qa(
            "exists",
            rng,
            "(is the {t} {c}|is the {t} written in {c}|is the {t} in {c})?",
            _yes(said == thing.colour),
            t=noun,
            c=said,
        )
    form = (
        f"({_WHAT} {_COLOUR} is the {{t}}|(what is|what's) the {_COLOUR} of the {{t}}|{_WHAT} "
        f"{_COLOUR} (is the {{t}} (written|printed) in|does the {{t}} have)|in (what|which) "
        f"{_COLOUR} is the {{t}} (written|printed)|{_COLOUR} of the {{t}}|{{t}} {_COLOUR})?"
    )
    return _qa("colour", rng, form, thing.colour, t=noun)


_KINDS: tuple[Asker, ...] = (
    _count_of_two, _count_of_two, _not, _not, _exactly, _exactly, _all_alike, _all_alike, _same_as,
    _which_are, _which_are, _colours, _colours, _how_many_kinds, _of_referent, _of_referent, _of_referent,
    _of_referent, _what_beside, _what_beside, _what_beside, _near_or_between, _near_or_between, _corner,
    _corner, _corner, _half, _extreme, _extreme, _size_of_kind, _size_of_kind, _ground, _ground, _letters,
    _letters, _letters, _of_text,
)  # fmt: skip


# -------------------------------------------------------------------------------------------- follow-ups
def lean_on(scene: Scene, rng: random.Random) -> list[QA]:
    """Two or three turns of which the later ones lean on those before: "And the square?", "Which ones?"."""
    makers = rng.sample(_TURNS, len(_TURNS))
    return next((turns for maker in makers if (turns := maker(scene, rng))), [])


_AND = "(and|and|what about|how about|and what about|now|also)"


def _and_the(scene: Scene, rng: random.Random) -> list[QA]:
    """The same of another thing."""
    names, colours, _ = tally(scene)
    if rng.random() < 0.55:
        alone = [(t.name, t.colour) for t in scene.shapes() if names[t.name] == 1]
        family, form = "colour", f"{_WHAT} {_COLOUR} is the {{t}}?"
        if rng.random() < 0.3:
            alone = [(f"{t.colour} (one|shape)", t.name) for t in scene.shapes() if colours[t.colour] == 1]
            family, form = "shape", f"({_WHAT} shape is|what is) the {{t}}?"
        else:
            kinds = Counter(t.kind for t in scene.things)
            alone += [(t.kind, t.colour) for t in scene.things if t.kind != "shape" and kinds[t.kind] == 1]
    else:
        family, form = "count", "(how many {t} are there|how many {t} do you see|count the {t})?"
        alone = [(plural(n), str(names[n])) for n in SHAPES if names[n] or rng.random() < 0.2]
        if rng.random() < 0.4:
            alone = [(f"{c} ones", str(colours[c])) for c in COLOURS if colours[c] or rng.random() < 0.2]
    if len(alone) < 2:
        return []
    picked = rng.sample(alone, min(len(alone), rng.choice((2, 2, 3))))
    said = [say(phrase, rng) for phrase, _ in picked]
    first = _qa(family, rng, form, picked[0][1], t=said[0].replace(" ones", " shapes"))
    the = "(the |)" if family == "count" else "the "
    return [
        first,
        *(
            _qa(family, rng, f"{_AND} {the}{{t}}?", answer, t=t)
            for t, (_, answer) in zip(said[1:], picked[1:])
        ),
    ]


def _and_a(scene: Scene, rng: random.Random) -> list[QA]:
    """Whether there is another thing, too."""
    kinds = {
        phrase: _of(scene, colour, name) for phrase, colour, name in (_kind(scene, rng) for _ in range(4))
    }
    made = [(with_article(phrase), _yes(bool(found))) for phrase, found in kinds.items()]
    if len(made) < 2:
        return []
    first = _qa("exists", rng, "(is there|do you see|can you see) {t}?", made[0][1], t=made[0][0])
    return [
        first,
        *(
            _qa("exists", rng, f"({_AND}|is there also|is there) {{t}}?", yes, t=t)
            for t, yes in made[1 : rng.choice((2, 3))]
        ),
    ]


def _of_them(scene: Scene, rng: random.Random) -> list[QA]:
    """How many of them are red; which ones."""
    names, colours, _ = tally(scene)
    several = [n for n in names if names[n] > 1]
    if rng.random() < 0.5 and several:
        name = rng.choice(several)
        them = [t for t in scene.shapes() if t.name == name]
        first = _qa("count", rng, f"how many {{t}} {_SEE}?", str(len(them)), t=plural(name))
        said = rng.choice([t.colour for t in them] + [rng.choice(COLOURS)])
        n = sum(t.colour == said for t in them)
        second = _qa(
            "count", rng, "(how many (of them|of these|of those) are {c}|how many are {c})?", str(n), c=said
        )
        third = _qa(
            "list",
            rng,
            (f"({_WHAT} {_COLOUR}s (are they|do they have)|and their (colours|colors)|{_WHAT} {_COLOUR}s)?"),
            ", ".join(dict.fromkeys(t.colour for t in reading_order(them))),
        )
        return [first, rng.choice((second, second, third))]
    several = [c for c in colours if colours[c] > 0]
    if not several:
        return []
    colour = rng.choice(several)
    them = [t for t in scene.shapes() if t.colour == colour]
    first = _qa(
        "count", rng, f"(how many {{c}} shapes {_SEE}|how many shapes are {{c}})?", str(len(them)), c=colour
    )
    return [
        first,
        _listed(
            "list",
            rng,
            (
                f"({_WHAT} (ones|ones are they|shapes|are they)|which|name them|list them|what are "
                "they|and which are they)?"
            ),
            them,
            lambda t: t.name,
        ),
    ]


def _other_one(scene: Scene, rng: random.Random) -> list[QA]:
    """Two of a kind: the colour of one, then of the other."""
    names, _, _ = tally(scene)
    pairs = [n for n in names if names[n] == 2]
    if not pairs:
        return []
    name = rng.choice(pairs)
    them = [t for t in scene.shapes() if t.name == name]
    side = rng.choice(list(_AXES))
    found = farthest(scene, them, side, 0.12)
    if found is None:
        return []
    other = next(t for t in them if t is not found)
    at = {"left": "left", "right": "right", "top": "(upper|top|higher)", "bottom": "(lower|bottom)"}[side]
    first = _qa("colour", rng, f"{_WHAT} {_COLOUR} is the {at} {{t}}?", found.colour, t=name)
    return [
        first,
        _qa(
            "colour",
            rng,
            (f"({_AND} the other( one| {{t}}|)|{_WHAT} {_COLOUR} is the other( one| {{t}}|)|the other one)?"),
            other.colour,
            t=name,
        ),
    ]


def _of_it(scene: Scene, rng: random.Random) -> list[QA]:
    """After a thing was named: its colour or shape, whether it is left of another or bigger."""
    known = list(referents(scene, rng))
    if not known:
        return []
    thing, phrase = rng.choice(known)
    if rng.random() < 0.5:
        first = _qa("colour", rng, f"{_WHAT} {_COLOUR} is {{t}}?", thing.colour, t=phrase)
        second = _qa(
            "shape",
            rng,
            f"({_WHAT} shape is it|and (its|the) shape|what is it|and what is it|what shape)?",
            thing.name,
        )
    else:
        first = _qa("shape", rng, "(what|which) shape is {t}?", thing.name, t=phrase)
        second = _qa(
            "colour",
            rng,
            (f"({_WHAT} {_COLOUR} is it|and (its|the) {_COLOUR}|{_WHAT} {_COLOUR} does it have|{_COLOUR})?"),
            thing.colour,
        )
    others = [(t, ps) for t, ps in unique_phrases(scene) if t.kind == "shape" and t is not thing]
    if others and rng.random() < 0.4:
        other, phrases = rng.choice(others)
        ratio = thing.size / other.size
        if not 0.77 < ratio < 1.3:
            bigger = rng.random() < 0.5
            word = "(bigger|larger)" if bigger else "smaller"
            return [
                first,
                _qa(
                    "size",
                    rng,
                    f"is it {word} than the {{b}}?",
                    _yes((ratio > 1) == bigger),
                    b=rng.choice(phrases),
                ),
            ]
        across, _ = apart(thing, other, scene)
        if abs(across) > 0.15:
            left = rng.random() < 0.5
            put = _PUT["left" if left else "right"]
            return [
                first,
                _qa(
                    "position",
                    rng,
                    f"is it {put}?",
                    _yes((across < 0) == left),
                    b="the " + rng.choice(phrases),
                ),
            ]
    return [first, second]


_TURNS = (
    _and_the,
    _and_the,
    _and_the,
    _and_the,
    _and_a,
    _of_them,
    _of_them,
    _other_one,
    _other_one,
    _of_it,
    _of_it,
)


# -------------------------------------------------------------------------------------------- two images
def first_or_second(scenes: tuple[Scene, Scene], rng: random.Random) -> QA | None:
    """Which of two images shows something, or more of it; whether both do."""
    kinds = [_kind(scene, rng) for scene in scenes]
    phrase, colour, name = rng.choice(kinds)
    counts = [len(_of(scene, colour, name)) for scene in scenes]
    noun = rng.choice(("image", "picture", "image", "drawing"))
    which = rng.random()
    if which < 0.35 and rng.random() < 0.4:
        kind = rng.choice(("word", "digit"))
        phrase, counts = kind, [sum(t.kind == kind for t in scene.things) for scene in scenes]
    pair = f"( the first or the second( {noun}|)|, (the |)first or (the |)second)"
    if which < 0.5:
        if bool(counts[0]) == bool(counts[1]):
            return None
        answer = "first" if counts[0] else "second"
        form = (
            f"({_WHAT} {noun} (has|shows|contains) {{a}}({pair}|)|in which {noun} is {{a}}|"
            f"is {{a}} in the first or (in |)the second {noun}|"
            f"{_WHAT} one (has|shows) {{a}}({pair}|)|where is {{a}}, in the first or (in |"
            f")the second {noun}|which of the (two |){noun}s (has|shows) {{a}})?"
        )
        return QA(
            "compare", capital(say(form, rng, a=with_article(phrase))), answer, (f"the {answer} {noun}",)
        )
    if which < 0.75:
        if counts[0] == counts[1]:
            return None
        more = rng.random() < 0.6
        answer = "first" if (counts[0] > counts[1]) == more else "second"
        sign = "more" if more else "(fewer|less)"
        form = (
            f"({_WHAT} {noun} (has|shows|contains) {sign} {{t}}({pair}|)|{_WHAT} one has "
            f"{sign} {{t}}|are there {sign} {{t}} in the first or (in |)the second {noun}|"
            f"(which|what) of the (two |){noun}s has {sign} {{t}})?"
        )
        return QA("compare", capital(say(form, rng, t=plural(phrase))), answer, (f"the {answer} {noun}",))
    if which < 0.9:
        form = (
            f"(do both {noun}s (have|show|contain) {{a}}|is there {{a}} in both {noun}s|is "
            f"{{a}} in both|do you see {{a}} in both {noun}s)?"
        )
        return QA("compare", capital(say(form, rng, a=with_article(phrase))), _yes(all(counts)))
    form = f"(does (either|any) {noun} (have|show) {{a}}|is there {{a}} in (either|any) of the {noun}s)?"
    return QA("compare", capital(say(form, rng, a=with_article(phrase))), _yes(any(counts)))
