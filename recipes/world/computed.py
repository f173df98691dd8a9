"""What the questions share whose answers are computed from the whole scene: their class, pieces of wording,
sets of shapes, what lies where, what is biggest, what the colour of the ground is called. `kinds`, `where`,
`letters`, `turns` and `json_answers` ask with these.

Where a person could doubt the truth (two things nearly as far left, a gap of a few pixels), these say None.
"""

from __future__ import annotations

import colorsys
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from recipes.shapes.dense import box_of
from recipes.world.grammar import capital, say
from recipes.world.scene import ABSENT, Thing
from shapes.questions import NUMBER_WORDS, apart, name_of, reading_order, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

WHAT = "(what|which)"
COLOUR = "(colour|color)"
SEE = (
    "(are there|are there|do you see|can you see|do you count|are in the (picture|image|"
    "drawing)|have we got|)"
)
TELL = (
    "(tell me|say|please say|I wonder|I'd like to know|I want to know|let me know|can you say|"
    "could you tell me|do you know|you must tell me|any idea)"
)
IF = "(tell me if|tell me whether|say whether|I wonder if|I want to know if|check if|can you say whether)"
SO = "(so|ok so|and|hey,|well,|please,|now)"
TAG = "(, right|, yes or no|, no|, isn't it|, true or false|. Is that so|. True|, am I right|, correct)"
MIND = "(I think|I believe|I'd say|they say|my friend says|it seems to me that)"
TRUE = "(. Is that so|. Am I right|. Is it true|, is that right|, correct|, yes or no)"
COUNT_OF = (  # {t}: a plural phrase
    "{t}(:|,| -) how many( are there| of them| do you see|)|{t} =|number of {t} =|{t}: (number|count|total)|"
    "how many {t} did (I|we|they|someone) (draw|make|put there)|I drew how many {t}|there are how many {t}|"
    "(I need|I want|give me|get me|report|write down) (just |)(the number|the count|a count) of {t}.|"
    f"{TELL} how many {{t}} (there are|you see|I drew|are there).|how many {{t}} (were|have been) drawn|"
    "how many are (the {t}|they, the {t})|what is it, the number of {t}|{t} are how many|how much {t}|"
    f"{SO} how many {{t}}|how many {{t}} (can|could) (you|one|I) (count|find|see)|what number of {{t}} "
    "(is there|do you see|was drawn)|how many {t} did I draw, if any|how many is it, {t}|how many {t} it has|"
    "how many would you say there are, {t}"
)
LIST_OF = (  # {t}: a plural phrase
    "{t}(:|,| -) (which ones|list them|name them|what are they|which|which are they)|list of {t}|{t} =|"
    "(I want|I need|give me|show me|I'd like) (a list of |)the {t}.|which are they, the {t}|"
    f"{TELL} (which|what) {{t}} (there are|you see|I drew).|(which|what) {{t}} did (I|they|someone) draw|"
    "(which|what) {t} (were|have been|are) drawn|I drew (which|what) {t}|there are (which|what) {t}|"
    f"(which|what) {{t}} (can|could) (you|one) (see|find|name)|{SO} (which|what) {{t}} are there|"
    "(write down|enumerate|go through) the {t}.|the {t} are which ones|what {t} it has|"
    "what is it that I drew: which {t}"
)
COLOUR_OF = (  # {t}: a thing, with its article
    f"{{t}}(:|,| -) (what|which) {COLOUR}( is it| is that| does it have|)|{{t}}(:| -) {COLOUR}|"
    f"{COLOUR} of {{t}} =|what {COLOUR} did (I|we|they|someone) (use|pick|take|choose) for {{t}}|"
    f"in (what|which) {COLOUR} did (I|they|someone) draw {{t}}|how is {{t}} coloured|"
    f"{{t}} (was drawn|is drawn|comes) in (what|which) {COLOUR}|{{t}} (has|have) (what|which) {COLOUR}|"
    f"{TELL} (what|which) {COLOUR} {{t}} (is|has).|(name|state|report|give|identify) the {COLOUR} of "
    f"{{t}}.|what is the {COLOUR} that {{t}} has|what {COLOUR} {{t}} is|what is {{t}} {COLOUR}|"
    f"(look at|take) {{t}}. (What|Which) {COLOUR} is it|{SO} (what|which) {COLOUR} is {{t}}|"
    f"of (what|which) {COLOUR} is {{t}}|it is (what|which) {COLOUR}, {{t}}|what {COLOUR} would you "
    f"(say {{t}} is|call {{t}})|(what|which) {COLOUR} (was|has been) (used|picked|chosen) for {{t}}|"
    f"I (drew|see) {{t}}. What {COLOUR} is it|what is it for a {COLOUR} that {{t}} has"
)
SHAPE_OF = (  # {t}: a shape, with its article
    "{t}(:|,| -) (what|which) shape( is it| is that| does it have|)|shape of {t} =|what shape has {t}|"
    "as (what|which) shape did (I|they|someone) draw {t}|{t} (was|is) drawn as (what|which) shape|"
    f"{TELL} (what|which) shape {{t}} (is|has).|(name|state|report|give|identify) the shape of {{t}}.|"
    f"{{t}} (has|have) (what|which) shape|what shape {{t}} is|{SO} (what|which) shape is {{t}}|of (what|"
    "which) shape is {t}|what shape would you say {t} is|(look at|take) {t}. (What|Which) shape is it|"
    "it is (what|which) shape, {t}|what is the shape that {t} has|what is it for a shape, {t}|"
    "I (drew|see) {t}. What shape is it|what shape (was|has been) (used|picked|chosen) for {t}"
)
IS_COLOUR = (  # {t}: a thing, with its article; {c}: a colour
    f"is {{c}} the {COLOUR} of {{t}}|is {{c}} the {COLOUR} that {{t}} has|is the {COLOUR} of {{t}} {{c}}|"
    f"is it {{c}}, {{t}}|{{t}} is {{c}}{TAG}|{{t}}(:|,| -) {{c}}(, yes or no| or not|, right|)|"
    "did (I|they|someone) (draw|make) {t} (in |){c}|was {t} (drawn in|made) {c}|"
    f"{IF} {{t}} is {{c}}.|does {{t}} have the {COLOUR} {{c}}|{{c}}: is that the {COLOUR} of {{t}}|"
    f"{COLOUR} of {{t}} = {{c}}|{MIND} {{t}} is {{c}}{TRUE}|I drew {{t}} in {{c}}(, right|, didn't I|, "
    "no)|would you say {t} is {c}|can {t} be called {c}|{t} is {c} or not|is {t} {c} or not|"
    f"is {{c}} the right {COLOUR} for {{t}}|has {{t}} been drawn in {{c}}|{SO} is {{t}} {{c}}"
)
IS_SHAPE = (  # {t}: a shape, with its article; {a}: a shape's name with an article
    f"is it {{a}}, {{t}}|{{t}}(:|,| -) {{a}}(, yes or no| or not|, right|)|{{t}} is {{a}}{TAG}|"
    "is {a} what {t} is|was {t} drawn as {a}|did (I|they|someone) draw {a} as {t}|"
    f"{IF} {{t}} is {{a}}.|(does {{t}} have|has {{t}}) the (shape|form) of {{a}}|"
    f"{MIND} {{t}} is {{a}}{TRUE}|would you say {{t}} is {{a}}|is {{t}} {{a}} or not|"
    f"can {{t}} be called {{a}}|{SO} is {{t}} {{a}}|is {{a}} the shape of {{t}}|it is {{a}}, {{t}}{TAG}|"
    "shape of {t} = {a}|does {t} look like {a}"
)
WHAT_AT = (  # {p}: a place, as in "below the circle", where there is something
    "{p}(:|,| -) what (is|do you see|is there|did I draw)|{p} (is|there is|I drew|you see|sits) what|"
    f"{TELL} what (is|sits|lies|I drew|you see|there is) {{p}}.|what did (I|they|someone) (draw|put|place) "
    "{p}|what (has been|was) (drawn|put|placed) {p}|what is it that (is|lies|sits|you see) {p}|"
    "what (sits|stands|appears|shows up|can be seen|do we have|have we got|there is) {p}|"
    "something is {p}(. What is it|, but what|, what is it|: what)|there is what {p}|{p} =|"
    f"{SO} what (is|do you see) {{p}}|(say|write|name) what you (see|find) {{p}}.|it is what, {{p}}"
)
THING_AT = (
    "(name|identify|describe|I mean) the (thing|object) {p}.|the (thing|one|object) {p} is what|what is it, "
    "the thing {p}|the (thing|object) {p}(:|,| -|:) what is it|what thing (you see|there is) {p}|"
    f"thing {{p}}|I drew one thing {{p}}. What|{TELL} what the (thing|object) {{p}} is."
)
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
    "identify ",
    "say ",
    "find ",
    "read ",
    "i want ",
    "please ",
)


def pose(
    family: str, rng: random.Random, pattern: str, answer: str, things: Sequence[Thing] = (), **slots
) -> QA:
    question = _marked(say(pattern, rng, **slots), rng)
    if question.startswith(_ORDERS) and question.endswith("?"):
        question = question[:-1] + rng.choice((".", ".", ""))
    accept = (NUMBER_WORDS[int(answer)],) if answer.isdigit() and len(answer) == 1 else ()
    return QA(family, capital(question), answer, accept, tuple(things))


def _marked(question: str, rng: random.Random) -> str:
    """Without the question mark of its pattern where another mark ends it."""
    if question.endswith((".?", ":?", "!?")) or (question.endswith("=?") and rng.random() < 0.5):
        return question[:-1]
    return question


def listed(family: str, rng: random.Random, pattern: str, things: Sequence[Thing], said, **slots) -> QA:
    """A question whose answer names things, in reading order."""
    things = reading_order(things)
    return pose(family, rng, pattern, ", ".join(map(said, things)) or ABSENT, things, **slots)


def one_of(rng: random.Random, form: str, thing: Thing, **slots) -> QA:
    """A question for one thing: its name alone where a shape is asked for, else its colour too."""
    qa = pose("list", rng, form, name_of(thing), (thing,), **slots)
    if asks_for_shape(qa.question):
        return QA("shape", qa.question, thing.name)
    return qa


def fill(form: str, phrase: str, slot: str = "{t}") -> str:
    """The form with a longer phrase, such as "the biggest {t}", in its slot."""
    return form.replace(slot, phrase)


def asks_for_shape(question: str) -> bool:
    """Whether it asks for a shape and nothing else: "What shape is ..."."""
    return re.search(r"\b(what|which) shape\b", question.lower()) is not None


def yes_no(said: bool) -> str:
    return "yes" if said else "no"


# ----------------------------------------------------------------------------------------- sets of shapes
def only_shapes(scene: Scene) -> bool:
    """Whether "one", "them" and the like can mean nothing but shapes."""
    return len(scene.shapes()) == len(scene.things)


def nouns_for(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A word for one shape and for several: "thing" and its kin only where nothing else is there."""
    if not only_shapes(scene) or rng.random() < 0.6:
        return "shape", "shapes"
    one = rng.choice(("object", "thing", "figure", "item", "form"))
    return one, one + "s"


def kind_of(scene: Scene, rng: random.Random) -> tuple[str, str | None, str | None]:
    """A phrase for one shape with its colour and name, either of which may be None; mostly of one there."""
    pairs = list(tally(scene)[2])
    there = rng.random() < 0.8 and bool(pairs)
    colour, name = rng.choice(pairs) if there else (rng.choice(COLOURS), rng.choice(SHAPES))
    which = rng.random()
    if which < 0.42:
        return f"{colour} shape", colour, None
    return (name, None, name) if which < 0.84 else (f"{colour} {name}", colour, name)


def shapes_of(scene: Scene, colour: str | None, name: str | None) -> list[Thing]:
    return [t for t in scene.shapes() if colour in (None, t.colour) and name in (None, t.name)]


def most_used(scene: Scene) -> tuple[str, bool] | None:
    """The colour that most shapes have, clearly and also where words and digits count; and whether those
    shapes are the largest area, too."""
    of_shapes = Counter(t.colour for t in scene.shapes()).most_common(2)
    of_all = Counter(t.colour for t in scene.things).most_common(2)
    for most in (of_shapes, of_all):
        if not most or (len(most) > 1 and most[0][1] == most[1][1]):
            return None
    colour = of_shapes[0][0]
    if of_all[0][0] != colour:
        return None
    area: Counter[str] = Counter()
    for thing in scene.shapes():
        area[thing.colour] += thing.size**2
    return colour, all(area[colour] > area[other] for other in area if other != colour)


# --------------------------------------------------------------------------------------- places and sizes
SIDES = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}
PUT = {
    "left": "((left of|to the left of|on the left of|on the left side of|left from) {b})",
    "right": "((right of|to the right of|on the right of|on the right side of|right from) {b})",
    "above": "((above|over|above of) {b})",
    "below": "((below|under|beneath|underneath) {b})",
}


def bounds(scene: Scene, thing: Thing) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of its box, in shorter sides of the image."""
    wide, high = max(1.0, scene.aspect), max(1.0, 1 / scene.aspect)
    left, top, right, bottom = box_of(thing, scene.aspect)
    return left * wide, top * high, right * wide, bottom * high


def thing_beside(scene: Scene, thing: Thing, side: str, among: Sequence[Thing]) -> Thing | None:
    """The one of these that lies to that side of a thing: nearly straight, and no other as near or nearer."""
    axis, sign = SIDES[side]
    own, found = bounds(scene, thing), []
    for other in among:
        way = apart(other, thing, scene)
        if other is not thing and sign * way[axis] >= 0.06:
            its = bounds(scene, other)
            gap = its[axis] - own[2 + axis] if sign > 0 else own[axis] - its[2 + axis]
            straight = (
                sign * way[axis] >= 0.1 and abs(way[1 - axis]) <= 0.7 * sign * way[axis] and gap > -0.03
            )
            found.append((math.hypot(*way), not straight, id(other), other))
    found.sort()
    if not found or found[0][1] or (len(found) > 1 and found[1][0] < 1.25 * found[0][0]):
        return None
    return found[0][3]


def none_beside(scene: Scene, thing: Thing, side: str) -> bool:
    """Whether nothing at all lies to that side."""
    axis, sign = SIDES[side]
    return all(sign * apart(t, thing, scene)[axis] < 0.04 for t in scene.things if t is not thing)


def nearest_to(scene: Scene, thing: Thing, clearly: float = 1.2) -> Thing | None:
    """The clearly nearest thing: any other is so many times as far."""
    others = [t for t in scene.things if t is not thing]
    ranked = sorted((math.hypot(*apart(t, thing, scene)), i) for i, t in enumerate(others))
    gaps = sorted((_gap(scene, thing, t), i) for i, t in enumerate(others))
    if not ranked or ranked[0][1] != gaps[0][1]:
        return None
    if len(ranked) > 1 and ranked[1][0] < clearly * ranked[0][0]:
        return None
    return others[ranked[0][1]]


def is_close(scene: Scene, one: Thing, two: Thing) -> bool:
    """Whether two is not only nearest to one, but near it, and nothing else is."""
    return nearest_to(scene, one, 1.6) is two and _gap(scene, one, two) < 0.15


def _gap(scene: Scene, one: Thing, two: Thing) -> float:
    """How far apart the boxes of two things are, in shorter sides of the image."""
    a, b = bounds(scene, one), bounds(scene, two)
    return math.hypot(*(max(0.0, a[i] - b[2 + i], b[i] - a[2 + i]) for i in (0, 1)))


def thing_between(scene: Scene, rng: random.Random) -> tuple[Thing, Thing, Thing] | None:
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


CORNERS = {  # thirds that are clearly meant, and half of the image that must hold nothing else
    "top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1),
}  # fmt: skip
CORNER_WORDS = {
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
        right, low = CORNERS[corner]
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
    far, low = CORNERS[corner]
    return (right > 0.66 if far else left < 0.34) and (bottom > 0.66 if low else top < 0.34)


def clear_region(thing: Thing) -> bool:
    """Whether its centre is far from the lines between the thirds."""
    return all(abs(place - line) > 0.05 for place in (thing.x, thing.y) for line in (1 / 3, 2 / 3))


EXTREMES = {
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
BEFORE_NOUN = {
    "left": "(leftmost|left-most|left most)", "right": "(rightmost|right-most|right most)",
    "top": "(topmost|highest|uppermost|top)", "bottom": "(bottommost|lowest|bottom)",
}  # fmt: skip
AXES = {"left": (0, -1), "right": (0, 1), "top": (1, -1), "bottom": (1, 1)}
OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


def farthest(scene: Scene, things: Sequence[Thing], side: str, margin: float = 0.08) -> Thing | None:
    """The one of these that lies clearly farthest to a side."""
    axis, sign = AXES[side]
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


BIGGEST = "(biggest|largest|biggest|largest|greatest)"
SMALLEST = "(smallest|smallest|tiniest|littlest)"


def referents(scene: Scene, rng: random.Random) -> Iterator[tuple[Thing, str]]:
    """(a shape, a phrase that means it by its place or size, with "shape" for its name), in no order."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    noun = "one" if rng.random() < 0.1 and only_shapes(scene) else noun
    for side in rng.sample(list(AXES), 4):
        if len(shapes) > 1 and (found := farthest(scene, shapes, side)):
            in_front = say(BEFORE_NOUN[side], rng)
            behind = rng.choice([w for w in EXTREMES[side].split("|") if " " in w])
            yield (
                found,
                rng.choice((f"the {in_front} {noun}", f"the {in_front} {noun}", f"the {noun} {behind}")),
            )
    for biggest in rng.sample((True, False), 2):
        if found := extreme_size(shapes, biggest):
            yield found, f"the {say(BIGGEST if biggest else SMALLEST, rng)} {noun}"
    for corner in rng.sample(list(CORNER_WORDS), 5):
        found_there = in_corner(scene, corner)
        if found_there and found_there[0].kind == "shape":
            words = say(CORNER_WORDS[corner], rng)
            yield found_there[0], f"the {noun} {rng.choice(('in', 'at'))} the {words}"
    for thing, phrases in rng.sample(known := unique_phrases(scene), len(known)):
        side = rng.choice(list(SIDES))
        if near := thing_beside(scene, thing, side, shapes):
            yield near, f"the {noun} {say(PUT[side], rng, b='the ' + rng.choice(phrases))}"
        nearest = nearest_to(scene, thing)
        if nearest is not None and nearest.kind == "shape":
            close = ("next to", "beside") if is_close(scene, thing, nearest) else ()
            put = rng.choice(("nearest to", "closest to", "nearest", *close))
            yield nearest, f"the {noun} {put} the {rng.choice(phrases)}"
    if found_between := thing_between(scene, rng):
        a, thing, b = found_between
        if thing.kind == "shape":
            yield thing, f"the {noun} between the {short_phrase(a, scene)} and the {short_phrase(b, scene)}"


def short_phrase(thing: Thing, scene: Scene) -> str:
    """The shortest phrase that means only this thing."""
    return next(phrases[0] for t, phrases in unique_phrases(scene) if t is thing)


# ------------------------------------------------------------------------------------------------ grounds
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
