"""Questions about places and sizes: what lies beside, between, in a corner or a half, what is leftmost, the
second from the left, in a row or a column, the biggest and the smallest.

They are asked as those of `kinds` are, and nothing is asked where a person could doubt the truth.
"""

from __future__ import annotations

import random
from itertools import pairwise

from recipes.shapes.dense import box_of
from recipes.world.computed import (
    AXES,
    BEFORE_NOUN,
    BIGGEST,
    COLOUR,
    COLOUR_OF,
    CORNER_WORDS,
    CORNERS,
    COUNT_OF,
    EXTREMES,
    IF,
    IS_COLOUR,
    IS_SHAPE,
    LIST_OF,
    MIND,
    OPPOSITE,
    PUT,
    SHAPE_OF,
    SIDES,
    SMALLEST,
    SO,
    TAG,
    TELL,
    THING_AT,
    TRUE,
    WHAT,
    WHAT_AT,
    asks_for_shape,
    bounds,
    clear_region,
    extreme_size,
    farthest,
    fill,
    in_corner,
    is_close,
    listed,
    nearest_to,
    none_beside,
    nouns_for,
    one_of,
    only_shapes,
    pose,
    referents,
    short_phrase,
    thing_beside,
    thing_between,
    yes_no,
)
from recipes.world.grammar import with_article
from recipes.world.scene import ABSENT, Thing
from shapes.questions import apart, name_of, plural, region, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene


# ---------------------------------------------------------------------------------------- by their places
def ask_referent(scene: Scene, rng: random.Random) -> QA | None:
    """The colour, the shape or both of what is meant by its place or size."""
    known = list(referents(scene, rng))
    if not known:
        return None
    thing, phrase = rng.choice(known)
    which = rng.random()
    if which < 0.38:
        form = (
            f"({WHAT} {COLOUR} is {{t}}|(what is|what's|tell me|name) the {COLOUR} of "
            f"{{t}}|{WHAT} {COLOUR} does {{t}} have|"
            f"{{t}} is (what|which) {COLOUR}|{COLOUR} of {{t}}|in (what|which) {COLOUR} is {{t}}|"
            f"{COLOUR_OF})?"
        )
        return pose("colour", rng, form, thing.colour, t=phrase)
    if which < 0.62:
        form = (
            f"({WHAT} shape is {{t}}|(what is|what's) the shape of {{t}}|{WHAT} (kind|type|"
            f"sort) of shape is {{t}}|{WHAT} shape does {{t}} have|{{t}} is (what|which) "
            f"shape|tell me the shape of {{t}}|{SHAPE_OF})?"
        )
        return pose("shape", rng, form, thing.name, t=phrase)
    if which < 0.78:
        form = (
            "((what is|what's|what do you call|name|describe|tell me what is) {t}|{t}(:|,| -) what is it|"
            f"{{t}} is what|{TELL} what {{t}} is.|what did I draw as {{t}}|{{t}} =|what is it, {{t}}|"
            f"(identify|describe|name|report) {{t}}.|I (drew|see) {{t}}. What is it|{SO} what is {{t}}|"
            "what would you call {t}|what have we got as {t}|look at {t}. What is it|as what was {t} drawn|"
            "it is what, {t}|what can one call {t})?"
        )
        return pose("list", rng, form, name_of(thing), (thing,), t=phrase)
    if which < 0.9:
        said = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
        form = (
            "(is {t} {c}|is {t} {c} in colour|{t} is {c}, (right|correct|isn't it)|does {t} look {c}|"
            f"{IS_COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(said == thing.colour), t=phrase, c=said)
    said = thing.name if rng.random() < 0.5 else rng.choice(SHAPES)
    form = f"(is {{t}} {{a}}|{{t}} is {{a}}, (right|correct|isn't it)|would you call {{t}} {{a}}|{IS_SHAPE})?"
    return pose("exists", rng, form, yes_no(said == thing.name), t=phrase, a=with_article(said))


def ask_beside(scene: Scene, rng: random.Random) -> QA | None:
    """What is below the circle."""
    known = unique_phrases(scene)
    for thing, phrases in rng.sample(known, len(known)):
        side, phrase = rng.choice(list(SIDES)), "the " + rng.choice(phrases)
        if rng.random() < 0.25:  # all of them
            axis, sign = SIDES[side]
            ways = [(sign * apart(t, thing, scene)[axis], t) for t in scene.shapes() if t is not thing]
            if any(0.03 < way < 0.1 for way, _ in ways) or not ways:
                continue
            found = [t for way, t in ways if way >= 0.1]
            if rng.random() < 0.5:
                form = (
                    f"(how many shapes are {PUT[side]}|count the shapes {PUT[side]}|"
                    f"{fill(COUNT_OF, f'shapes {PUT[side]}')}|{PUT[side]}(:|,) how many shapes( are "
                    f"there|)|"
                    f"{PUT[side]} there are how many shapes|how many shapes (lie|did I draw|are to be "
                    f"found) "
                    f"{PUT[side]})?"
                )
                return pose("count", rng, form, str(len(found)), b=phrase)
            form = (
                f"({WHAT} shapes (are|lie) {PUT[side]}|(list|name) (all |)(the |)shapes "
                f"{PUT[side]}|what are the shapes {PUT[side]}|{fill(LIST_OF, f'shapes {PUT[side]}')}|"
                f"{PUT[side]}(:|,) which shapes( are there|)|{PUT[side]} there are which shapes|"
                f"which shapes (did I draw|are to be found|can be seen) {PUT[side]})?"
            )
            return listed("list", rng, form, found, name_of, b=phrase)
        what = (
            f"({WHAT} (thing |object |one |)(is|lies|do you see)|what's|what is (there |"
            "located |placed |drawn |))"
        )
        if none_beside(scene, thing, side) and rng.random() < 0.3:
            form = (
                f"({what} {PUT[side]}|{PUT[side]}(:|,| -) what (is|do you see)|what did I draw "
                f"{PUT[side]}|"
                f"{TELL} what is {PUT[side]}.|what (has been|was) drawn {PUT[side]}|{SO} what is "
                f"{PUT[side]}|"
                f"what (sits|can be seen|have we got|do we have) {PUT[side]})?"
            )
            return pose("absent", rng, form, ABSENT, b=phrase)
        if other := thing_beside(scene, thing, side, scene.things):
            of_it = PUT[side].replace("{b}", "it")
            axis, sign = SIDES[side]
            there = [t for t in scene.things if sign * apart(t, thing, scene)[axis] > 0 and t is not thing]
            alone = len(there) == 1  # else "the thing above it" may mean another
            at = f"{WHAT_AT}|{THING_AT}" if alone else WHAT_AT
            form = (
                f"({what} {PUT[side]}|{what} {PUT[side]}|((name|tell me) (what is|what's"
                f"{'|the thing' if alone else ''}) {PUT[side]}|{WHAT} shape is {PUT[side]}|"
                f"{fill(at, PUT[side], '{p}')}|"
                f"{PUT[side]}(:|,) (what|which) shape (is it|is there)|{TELL} (what|which) shape is "
                f"{PUT[side]}.|{WHAT} shape did I draw {PUT[side]}|"
                f"{{b}}(:|,| -) what is {of_it}|{{b}} has what {of_it}|look at {{b}}. What is {of_it}))?"
            )
            qa = pose("list", rng, form, name_of(other), (other,), b=phrase)
            asks_shape = asks_for_shape(qa.question)
            if asks_shape and other.kind != "shape":
                return None
            return QA("shape", qa.question, other.name) if asks_shape else qa
    return None


def ask_near_or_between(scene: Scene, rng: random.Random) -> QA | None:
    what = f"({WHAT} (thing |object |shape |one |)is|what's|what do you see|what lies)"
    if rng.random() < 0.45 and (found := thing_between(scene, rng)):
        a, thing, b = found
        if thing.kind != "shape":
            what = "(what is|what's|what do you see|what lies)"
        put = "(between|in between|in the middle of) the {a} and (the |){b}"
        more = f"{WHAT_AT}|{THING_AT}|{{p}}, (what|which) shape is it" if thing.kind == "shape" else WHAT_AT
        form = (
            f"({what} {put}|({fill(more, put, '{p}')}|the {{a}} and the {{b}}(:|,) what (is|"
            f"lies|stands) "
            "between them|the {a} and the {b} have what between them|from the {a} to the {b}, what lies "
            "between))?"
        )
        return one_of(rng, form, thing, a=short_phrase(a, scene), b=short_phrase(b, scene))
    known = [(t, ps, near) for t, ps in unique_phrases(scene) if (near := nearest_to(scene, t))]
    if len(scene.things) < 3 or not known:
        return None
    thing, phrases, near = rng.choice(known)
    if near.kind != "shape":
        what = "(what is|what's|what do you see|what lies)"
    close = is_close(scene, thing, near)
    beside = "|next to|beside|right next to|near|close to" if close else ""
    put = f"(nearest to|closest to|nearest{beside}) the {{b}}"
    more = f"{WHAT_AT}|{THING_AT}|{{p}}, (what|which) shape is it" if near.kind == "shape" else WHAT_AT
    its = (
        "|the {b}(:|,| -) what is next to it|the {b} has what (next to|beside) it|what does the {b} have "
        "(next to|beside) it|what is the neighbour of the {b}|the {b}'s neighbour is what|"
        "look at the {b}. What is next to it"
    )
    form = (
        f"({what} {put}|({fill(more, put, '{p}')}|the {{b}}(:|,| -) what is (nearest|closest) to it|"
        "what is the nearest neighbour of the {b}|the {b}'s nearest neighbour is what|"
        f"look at the {{b}}. What is closest to it{its if close else ''}))?"
    )
    return one_of(rng, form, near, b=rng.choice(phrases))


def ask_corner(scene: Scene, rng: random.Random) -> QA | None:
    """What is in a corner or in the middle; which corner a thing is in."""
    if rng.random() < 0.3:
        known = [(t, ps) for t, ps in unique_phrases(scene) if clear_region(t)]
        if not known:
            return None
        thing, phrases = rng.choice(known)
        place = region(thing)
        if rng.random() < 0.4:
            said = place if rng.random() < 0.5 else rng.choice([c for c in CORNER_WORDS if c != "middle"])
            if said not in CORNER_WORDS:
                return None
            if said in CORNERS and place != said and set(place.split()) & set(said.split()):
                right, low = CORNERS[said]
                if (thing.x > 0.5) == bool(right) and (thing.y > 0.5) == bool(low):
                    return None  # at the top, and left of the middle: a person may call it top left
            phrase = rng.choice(phrases)
            at = CORNER_WORDS[said]
            form = (
                f"(is the {{t}} in the {CORNER_WORDS[said]}|can the {{t}} be found in the "
                f"{CORNER_WORDS[said]}|is there {{a}} in the {CORNER_WORDS[said]}|did I (draw|put) the "
                f"{{t}} "
                f"in the {at}|the {{t}}(:|,| -) {at}{TAG}|the {{t}} is in the {at}{TAG}|{IF} the {{t}} "
                f"is in "
                f"the {at}.|{MIND} the {{t}} is in the {at}{TRUE}|was the {{t}} (put|drawn|placed) in "
                f"the {at}|"
                f"does the {at} (hold|have|contain|show) the {{t}}|is it the {at} that the {{t}} is in|"
                f"is the {at} (where the {{t}} is|the place of the {{t}})|in the {at}, is there the {{t}}|"
                f"position of the {{t}} = {at}|is what you see in the {at} the {{t}}|{SO} is the {{t}} in "
                f"the {at})?"
            )
            return pose("exists", rng, form, yes_no(said == place), t=phrase, a=with_article(phrase))
        form = (
            "(in (which|what) (part|area|region) of the (picture|image|drawing) is the {t}|"
            "(which|what) (part|area) of the (picture|image) (is the {t} in|has the {t})|"
            "the {t}(:|,| -) (in |)(which|what) part of the (picture|image)|in (which|what) part of the "
            "(picture|"
            f"image) did I draw the {{t}}|{TELL} in (which|what) part of the (picture|image) the {{t}} is.|"
            "the {t} is in (which|what) part of the (picture|image)|(which|what) part of the (picture|image) "
            "did I put the {t} in|the {t} (was drawn|has been put) in (which|what) part of the (picture|"
            "image)|"
            "part of the (picture|image) with the {t}|(name|give|state) the part of the image that holds "
            "the {t}.|"
            f"{SO} (which|what) part of the (picture|image) is the {{t}} in|look for the {{t}}. Which "
            f"part of the "
            "(picture|image) is it in|what part of the image the {t} is in)?"
        )
        if " " in place and rng.random() < 0.7:
            form = (
                "((which|what) corner is the {t} in|in (which|what) corner is the {t}|(which|"
                "what) corner (has|contains|holds) the {t}|the {t} is in (which|what) corner|"
                "the {t}(:|,| -) (in |)(which|what) corner|in (which|what) corner did I (draw|put) the {t}|"
                f"{TELL} (which|what) corner the {{t}} is in.|corner of the {{t}}|corner with the {{t}} =|"
                "the {t} was (drawn|put|placed) in (which|what) corner|(name|give|state) the corner that "
                "has the "
                f"{{t}}.|{SO} (which|what) corner is the {{t}} in|look for the {{t}}. Which corner is it in|"
                "what corner the {t} is in|which is the corner where the {t} is|the corner of the {t} is "
                "which|"
                "what is it, the corner that the {t} is in|to (which|what) corner do I look for the {t})?"
            )
        return pose("region", rng, form, place, t=rng.choice(phrases))
    corners = [(c, found) for c in CORNER_WORDS if (found := in_corner(scene, c)) is not None]
    if not corners:
        return None
    corner, found = rng.choice(
        [one for one in corners if one[1]] or corners if rng.random() < 0.85 else corners
    )
    what = (
        f"({WHAT} (thing |object |shape |one |)(is|is shown|do you see)|what's|what is there|"
        "what can you see)"
    )
    at = CORNER_WORDS[corner]
    if not found:
        form = (
            f"({what} (in|at) the {CORNER_WORDS[corner]}|is there (anything|something) in the "
            f"{CORNER_WORDS[corner]}|the {at}(:|,| -) what is (there|in it)|in the {at}, what do you see|"
            f"what did I draw in the {at}|{TELL} what is in the {at}.|what (sits|can be seen|have we got) "
            f"in "
            f"the {at}|in the {at} there is what|what (was|has been) drawn in the {at}|is there (a|any) "
            f"(thing|"
            f"shape) in the {at}|is there anything drawn in the {at})?"
        )
        qa = pose("absent", rng, form, ABSENT)
        return QA("exists", qa.question, "no") if qa.question.startswith("Is there") else qa
    if found[0].kind != "shape":
        what = "(what is|what's|what do you see|what is there)"
    more = f"{WHAT_AT}|{THING_AT}|{{p}}, (what|which) shape is it" if found[0].kind == "shape" else WHAT_AT
    form = (
        f"({what} (in|at|in) the {at}|(the {at} (has|shows|contains|holds) what|"
        f"{fill(more, f'in the {at}', '{p}')}|the {at}(:|,| -) what (is there|is in it|do you see)|{at}(:| "
        f"=) what|"
        f"the {at} is (taken|filled|occupied) by what|look at the {at}. What (do you see|is there)|"
        f"what does the {at} (hold|show|have|contain)|by what is the {at} taken))?"
    )
    return one_of(rng, form, found[0])


def ask_half(scene: Scene, rng: random.Random) -> QA | None:
    """How many, or which, are in one half; whether a thing is."""
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
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
            form = (
                f"(is the {{t}} {pair}|the {{t}}(:|,| -) {pair}|the {{t}} is {pair}|did I draw the {{t}} "
                f"{pair}|"
                f"{TELL} whether the {{t}} is {pair}.|was the {{t}} (drawn|put|placed) {pair}|is it "
                f"{pair}, the "
                f"{{t}}|{pair}(:| -|,) where is the {{t}}|where is the {{t}}(:|,) {pair}|{SO} is the "
                f"{{t}} {pair}|"
                f"{pair}, the {{t}}|look for the {{t}}. Is it {pair}|the {{t}}, is it {pair}|do you see "
                f"the {{t}} "
                f"{pair})?"
            )
            return pose("region", rng, form, answer, t=rng.choice(phrases))
        form = (
            f"(is the {{t}} {where}|did I (draw|put) the {{t}} {where}|the {{t}} is {where}{TAG}|the "
            f"{{t}}(:|,| -) "
            f"{where}{TAG}|{IF} the {{t}} is {where}.|{MIND} the {{t}} is {where}{TRUE}|was the {{t}} "
            f"(drawn|put|"
            f"placed) {where}|do you (see|find) the {{t}} {where}|is it {where} that the {{t}} is|"
            f"can the {{t}} be found {where}|does the {{t}} (lie|sit|stand) {where}|the {{t}} is {where} "
            f"or not|"
            f"does the {half} half (hold|have|contain) the {{t}}|is the {half} half where the {{t}} is|"
            f"{SO} is the {{t}} {where})?"
        )
        return pose("exists", rng, form, yes_no(said), t=rng.choice(phrases))
    if any(map(crosses, shapes)):
        return None
    found = [t for p, t in zip(places, shapes) if (p > 0.5) == second]
    if rng.random() < 0.6:
        return pose(
            "count",
            rng,
            (
                f"(how many {many} are {where}|how many {many} {where}|count the {many} {where}|{where}(:|"
                f",) how "
                f"many {many}( are there|)|{where} there are how many {many}|the {half} half has how many "
                f"{many}|"
                f"how many {many} does the {half} half have|how many {many} did I put {where}|"
                f"{fill(COUNT_OF, f'{many} {where}')})?"
            ),
            str(len(found)),
        )
    return listed(
        "list",
        rng,
        (
            f"({WHAT} {many} are {where}|(list|name) the {many} {where}|{where}(:|,) which {many}( are "
            f"there|)|"
            f"{where} there are which {many}|the {half} half has which {many}|which {many} does the {half} "
            f"half "
            f"have|which {many} did I put {where}|{fill(LIST_OF, f'{many} {where}')})?"
        ),
        found,
        name_of,
    )


# ------------------------------------------------------------------------------- extremes, order and rows
def ask_extreme(scene: Scene, rng: random.Random) -> QA | None:
    """Which lies farthest to a side, of all or of one kind; whether one does."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    side = rng.choice(list(AXES))
    if rng.random() < 0.3:
        several = [name for name, count in tally(scene)[0].items() if count > 1]
        if not several:
            return None
        name = rng.choice(several)
        found = farthest(scene, [t for t in shapes if t.name == name], side)
        if found is None:
            return None
        form = (
            f"({WHAT} {COLOUR} is the {BEFORE_NOUN[side]} {{t}}|(what is|what's) the "
            f"{COLOUR} of the {BEFORE_NOUN[side]} {{t}}|the {BEFORE_NOUN[side]} {{t}} is "
            f"(what|which) {COLOUR}|{fill(COLOUR_OF, f'the {BEFORE_NOUN[side]} {{t}}')}|"
            f"of all (the |){{t}}s, (what|which) {COLOUR} is the {BEFORE_NOUN[side]}( one|))?"
        ).replace("{t}s", plural(name))
        return pose("colour", rng, form, found.colour, t=name)
    found = farthest(scene, shapes, side) if len(shapes) > 1 else None
    if found is None:
        return None
    if rng.random() < 0.2:
        alone = [one for one in unique_phrases(scene) if one[0].kind == "shape"]
        if not alone:
            return None
        thing, phrases = rng.choice(alone)
        before, most = BEFORE_NOUN[side], f"the {BEFORE_NOUN[side]} {noun}"
        bare = (
            f"is the {{t}} (the {before} one|{{s}})|the {{t}}(:|,) {before} or not|is it the {{t}} that is "
            "{s}|does the {t} lie {s}|was the {t} drawn {s}|"
        )
        bare = bare if only_shapes(scene) else ""  # else it may be meant of words, too
        form = (
            f"({bare}is the {{t}} {most}|is the {{t}} {most}|is {most} the {{t}}|the {{t}} is {most}{TAG}|"
            f"{IF} the {{t}} is {most}.|{MIND} the {{t}} is {most}{TRUE}|{most} = the {{t}}|"
            f"did I draw the {{t}} as {most}|{most}: is it the {{t}}|is it the {{t}} that is {most}|"
            f"of all the {noun}s, is the {{t}} the {before}|{SO} is the {{t}} {most}|"
            f"has the {{t}} been drawn as {most}|the {{t}}(:|,) {most} or not|was the {{t}} drawn as {most})?"
        )
        said = [w for w in EXTREMES[side].split("|") if not w.startswith(("on ", "at ", "closest"))]
        lies = rng.choice(said)
        return pose("exists", rng, form, yes_no(thing is found), t=rng.choice(phrases), s=lies)
    lies = rng.choice(EXTREMES[side].split("|"))
    ones = "|one |of them |" if only_shapes(scene) else ""
    bare = "what did I draw {s}|{s}(:|,) what is it|" if only_shapes(scene) else ""
    most = f"the {BEFORE_NOUN[side]} {noun}"
    the = "" if lies.startswith(("on ", "at ", "closest")) else rng.choice(("", "the "))
    form = (
        f"({WHAT} ({noun} {ones}|of the {noun}s )(is|lies) {{s}}|"
        f"{WHAT} is the {BEFORE_NOUN[side]} {noun}|(name|tell me) the "
        f"{BEFORE_NOUN[side]} {noun}|{WHAT} {noun} (do you see|comes) {{s}}|{{s}}(:|,) which "
        f"{noun} is "
        f"it|{most}(:|,| -) what is it|{most} is (what|which one)|{TELL} what {most} is.|{TELL} which "
        f"{noun} is "
        f"{{s}}.|{bare}which {noun} did I (draw|put) {{s}}|{most} =|which {noun} was drawn "
        f"{{s}}|"
        f"of all the {noun}s, which is {{s}}|(identify|report|give) {most}.|which {noun} is it that is {{s}}|"
        f"what is it, {most}|{SO} which {noun} is {{s}}|which is {{s}} of the {noun}s|look at {most}. "
        f"What is it|"
        f"what have we got as {most})?"
    )
    return one_of(rng, form, found, s=the + lies)


_NTH = (("second", "2nd"), ("third", "3rd"), ("fourth", "4th"), ("fifth", "5th"), ("sixth", "6th"))


def ask_in_order(scene: Scene, rng: random.Random) -> QA | None:
    """The second, the third and so on from a side."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    if not only_shapes(scene) or len(shapes) < 3:
        return None
    side = rng.choice(("left", "left", "right", "right", "top", "bottom"))
    axis, sign = AXES[side]
    ordered = sorted(shapes, key=lambda t: -sign * (t.y if axis else t.x))
    long = max(1.0, scene.aspect) if axis == 0 else max(1.0, 1 / scene.aspect)
    gaps = [abs((b.y - a.y) if axis else (b.x - a.x)) * long for a, b in pairwise(ordered)]
    clear = next((i for i, gap in enumerate(gaps) if gap < 0.08), len(ordered))
    k = rng.randint(1, max(1, min(len(_NTH), clear - 1)))
    if k >= len(ordered) or k >= clear:
        return None
    nth = rng.choice(_NTH[k - 1])
    put = f"{nth} {noun}( counted| when you count| counting|) from (the |){side}|{nth} from (the |){side}"
    form = (
        f"({WHAT} ({noun} |one |thing |)is (the |){nth} from (the |){side}|what's (the |)({put})|"
        f"(counting|starting|going) from the {side}, (what|which) (is|would be) the {nth}( {noun}| one|)|"
        f"from (the |){side}(,|:|) the {nth}( {noun}| one)|(name|tell me) the ({put})|{put}|"
        f"(look|go) from {side} to {OPPOSITE[side]}(:|,) {WHAT} {noun} (is|comes) {nth}|"
        f"{WHAT} {noun} (comes|stands|is) {nth} (from the {side}|if you count from the {side}))?"
    )
    if rng.random() < 0.25:
        colour = f"({WHAT} {COLOUR} (is|has) the ({put})|(what's|what is|name) the {COLOUR} of the ({put}))?"
        return pose("colour", rng, colour, ordered[k].colour)
    return one_of(rng, form, ordered[k])


def _rows(scene: Scene, axis: int) -> list[list[Thing]]:
    """The things in rows (axis 1) or columns (axis 0), where they clearly stand in two or more; else []."""
    ordered = sorted(scene.things, key=lambda t: t.y if axis else t.x)
    boxes = {id(t): bounds(scene, t) for t in ordered}
    middles = [(boxes[id(t)][axis] + boxes[id(t)][2 + axis]) / 2 for t in ordered]
    if len(ordered) < 3:
        return []
    gaps = [b - a for a, b in pairwise(middles)]
    wide = max(gaps)
    if wide < 0.12 or any(0.3 * wide < gap < 0.6 * wide for gap in gaps):
        return []
    rows: list[list[Thing]] = [[ordered[0]]]
    for gap, thing in zip(gaps, ordered[1:]):
        rows += [[]] if gap >= 0.6 * wide else []
        rows[-1].append(thing)
    middle = dict(zip(map(id, ordered), middles))
    spread = max(middle[id(row[-1])] - middle[id(row[0])] for row in rows)
    apart = all(
        max(boxes[id(t)][2 + axis] for t in one) < min(boxes[id(t)][axis] for t in two)
        for one, two in pairwise(rows)
    )
    return rows if apart and spread < 0.5 * wide and max(map(len, rows)) > 1 else []


def ask_row(scene: Scene, rng: random.Random) -> QA | None:
    """What stands in a row or a column."""
    axis = int(rng.random() < 0.75)
    rows, (_, many) = _rows(scene, axis), nouns_for(scene, rng)
    if not rows or not only_shapes(scene):
        return None
    noun = "(row|row|line)" if axis else "column"
    i = rng.choice([i for i, row in enumerate(rows) if len(row) > 1])
    upper, lower = ("|upper", "|lower") if len(rows) == 2 else ("", "")
    names = [(f"(top{upper}|first|topmost)", "(left|first|leftmost|left-hand)")[1 - axis]] if i == 0 else []
    if i == len(rows) - 1:
        names.append((f"(bottom{lower}|last|lowest)", "(right|last|rightmost|right-hand)")[1 - axis])
    names += [_NTH[i - 1][0]] if 0 < i <= len(_NTH) else []
    names += ["middle"] if len(rows) == 3 and i == 1 else []
    row = f"{rng.choice(names)} {noun}"
    things = rows[i] if axis else sorted(rows[i], key=lambda t: t.y)
    things = sorted(things, key=lambda t: t.x) if axis else things
    if rng.random() < 0.3:
        form = (
            f"(how many {many} (are|do you see|stand) in the {row}|count the {many} (in|of) the {row}|"
            f"the {row} has how many {many}|number of {many} in the {row})?"
        )
        return pose("count", rng, form, str(len(things)))
    if len(things) > 5:
        return None
    form = (
        f"({WHAT} {many} (are|do you see|stand|can be seen) in the {row}|what (is|do you see|"
        f"stands|is there) "
        f"in the {row}|(list|name|tell me|give me) the {many} (in|of) the {row}|(the |){row}(:| -|,) "
        f"{WHAT} {many}( are there| are in it|)|the {row}, what is in it|what (does the {row} "
        f"(show|have|contain)"
        f"|are the {many} of the {row})|read me the {row} from "
        f"{'left to right' if axis else 'top to bottom'}|"
        f"in the {row}, (what|which {many}) do you see)?"
    )
    return pose("list", rng, form, ", ".join(map(name_of, things)), things)


# -------------------------------------------------------------------------------------------------- sizes
def ask_size(scene: Scene, rng: random.Random) -> QA | None:
    """The biggest or smallest of all, of one colour or of one kind."""
    biggest, noun = rng.random() < 0.5, nouns_for(scene, rng)[0]
    most = BIGGEST if biggest else SMALLEST

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
            f"({WHAT} {COLOUR} is the {most} {{t}}|(what is|what's) the {COLOUR} of the "
            f"{most} {{t}}|{WHAT} {COLOUR} does the {most} {{t}} have|the {most} {{t}} is "
            f"(what|which) {COLOUR}|{COLOUR} of the {most} {{t}}|{fill(COLOUR_OF, f'the {most} {{t}}')}|"
            f"of (all |)the {plural(name)}, (what|which) {COLOUR} is the {most}( one|)|"
            f"I drew {plural(name)}. What {COLOUR} is the {most}( one|))?"
        )
        return pose("colour", rng, form, found.colour, t=name)
    if which < 0.6:
        colour, found = of_one_kind("colour")
        if found is None:
            return None
        form = (
            f"({WHAT} shape is the {most} {{c}} (one|shape|{noun})|{WHAT} is the {most} "
            f"{{c}} {noun}|(what is|what's) the {most} {{c}} {noun}|{WHAT} of the {{c}} "
            f"{noun}s is (the |){most}|{fill(SHAPE_OF, f'the {most} {{c}} {noun}')}|of (all |)the {{c}} "
            f"{noun}s, "
            f"which is (the |){most}|what shape is the {most} {noun} in {{c}}|the {most} {{c}} {noun} is "
            f"(what|which "
            f"shape)|which {{c}} {noun} is (the |){most}|the {most} {{c}} one: what shape)?"
        )
        return pose("shape", rng, form, found.name, c=colour)
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
        than = "bigger" if biggest else "smaller"
        bare = (
            f"is the {{t}} the {most}( one|)|is the {{t}} the {most} of (all|them)|the {{t}}(:|,) {most} of "
            f"all{TAG}|is it the {{t}} that is (the |){most}|{IF} the {{t}} is the {most}.|did I "
            f"(draw|make) the {{t}} the {most}|was the {{t}} drawn (the |){most}|"
        )
        bare = bare if only_shapes(scene) else ""  # else it may be meant of words, too
        form = (
            f"({bare}is the {{t}} the {most} {noun}|is the {{t}} the {most} of all {noun}s|"
            f"is the {most} {noun} the {{t}}|the {{t}} is the {most} {noun}{TAG}|the {{t}}(:|,) {most} of "
            f"all {noun}s{TAG}|is it the {{t}} that is the {most} {noun}|{IF} the {{t}} is the {most} "
            f"{noun}.|{MIND} the {{t}} is the {most} {noun}{TRUE}|{most} {noun} = the {{t}}|"
            f"did I (draw|make) the {{t}} the {most} {noun}|was the {{t}} drawn as the {most} {noun}|"
            f"of all the {noun}s, is the {{t}} the {most}|is no {noun} {than} than the {{t}}|"
            f"{most} {noun}: is it the {{t}}|{SO} is the {{t}} the {most} {noun}|"
            f"is the {{t}} {than} than all (the |)other {noun}s)?"
        )
        return pose("exists", rng, form, yes_no(thing is found), t=rng.choice(phrases))
    return ask_biggest(scene, rng)


def ask_biggest(scene: Scene, rng: random.Random) -> QA | None:
    """The biggest or smallest of all: which it is, or its colour."""
    biggest, noun = rng.random() < 0.5, nouns_for(scene, rng)[0]
    found = extreme_size(scene.shapes(), biggest)
    if found is None:
        return None
    most = "(biggest|largest|greatest|most big)" if biggest else "(smallest|tiniest|littlest|least big)"
    it, all_of = f"the {most} {noun}", f"of (the|all|all the) {noun}s"
    if rng.random() < 0.25:
        form = (
            f"({WHAT} {COLOUR} (is|has) {it}|(what's|what is|name) the {COLOUR} of {it}|"
            f"{it}(:|,) {WHAT} {COLOUR}( is it|)|{COLOUR} of (the |){most} {noun})?"
        )
        return pose("colour", rng, form, found.colour)
    form = (
        f"({WHAT} (is|was|would be) {it}|what's {it}|{it}( is what| is which| is which one|, please|)|"
        f"{WHAT} {noun} (is|was drawn|did they draw|did I (draw|make)|looks|seems|appears|has been drawn) "
        f"(the |){most}|{WHAT} ({all_of}|of them all) is (the |){most}|{most} {noun}( =|)|"
        f"(name|identify|report|give|give me|tell me|say) {it}.|{WHAT} {noun} has the {most} size|"
        f"(what's|what is) the {most}( one|) {all_of}|{it}(:|,| -) what is it|{TELL} (which|what) {it} is.|"
        f"{TELL} which {noun} is (the |){most}.|of all the {noun}s, which is (the |){most}|"
        f"what is it, {it}|which {noun} is it that is (the |){most}|{SO} which {noun} is (the |){most}|"
        f"what is the {noun} that is {most}|look at {it}. What is it|"
        f"which {noun} is {'bigger' if biggest else 'smaller'} than all the others)?"
    )
    if not only_shapes(scene):
        form = form.replace("|of them all)", ")")
    return one_of(rng, form, found)
