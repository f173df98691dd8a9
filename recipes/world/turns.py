"""Turns that lean on those before ("And the square?", which ones, the other end, a word and then its
letters), and questions about two images.

They are asked as those of `kinds` are, and nothing is asked where a person could doubt the truth.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from recipes.world.computed import (
    AXES,
    COLOUR,
    COLOUR_OF,
    COUNT_OF,
    IF,
    MIND,
    OPPOSITE,
    PUT,
    SEE,
    SHAPE_OF,
    SO,
    TAG,
    TELL,
    TRUE,
    WHAT,
    extreme_size,
    farthest,
    fill,
    kind_of,
    listed,
    nouns_for,
    one_of,
    only_shapes,
    pose,
    referents,
    shapes_of,
    yes_no,
)
from recipes.world.grammar import capital, say, with_article
from shapes.questions import apart, name_of, plural, reading_order, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

_AND = (
    "(and|and|what about|how about|and what about|now|and for|same for|ok, and|then|the same for|"
    "what of|and now|same question for|now for|next:|plus|ok now|and how about|and with|repeat for)"
)
_ALSO = "(and|and|what about|how about|and what about|ok, and|and how about|or maybe|or|or else)"
_AND_SHORT = "(and|and|what about|how about|and what about|now)"


# ------------------------------------------------------------------------------ that lean on those before
def _and_the(scene: Scene, rng: random.Random) -> list[QA]:
    """The same of another thing."""
    names, colours, _ = tally(scene)
    if rng.random() < 0.55:
        alone = [(t.name, t.colour) for t in scene.shapes() if names[t.name] == 1]
        family = "colour"
        form = f"({WHAT} {COLOUR} is the {{t}}|{WHAT} {COLOUR} is the {{t}}|{fill(COLOUR_OF, 'the {t}')})?"
        if rng.random() < 0.3:
            noun = "(one|shape)" if only_shapes(scene) else "shape"
            alone = [(f"{t.colour} {noun}", t.name) for t in scene.shapes() if colours[t.colour] == 1]
            family = "shape"
            form = f"({WHAT} shape is the {{t}}|what is the {{t}}|{fill(SHAPE_OF, 'the {t}')})?"
        else:
            kinds = Counter(t.kind for t in scene.things)
            alone += [(t.kind, t.colour) for t in scene.things if t.kind != "shape" and kinds[t.kind] == 1]
    else:
        family, form = "count", f"(how many {{t}} (are there|do you see)|count the {{t}}|{COUNT_OF})?"
        alone = [(plural(n), str(names[n])) for n in SHAPES if names[n] or rng.random() < 0.2]
        if rng.random() < 0.4:
            alone = [(f"{c} ones", str(colours[c])) for c in COLOURS if colours[c] or rng.random() < 0.2]
    if len(alone) < 2:
        return []
    picked = rng.sample(alone, min(len(alone), rng.choice((2, 2, 3))))
    said = [say(phrase, rng) for phrase, _ in picked]
    first = pose(family, rng, form, picked[0][1], t=said[0].replace(" ones", " shapes"))
    the = "(the |)" if family == "count" else "the "
    return [
        first,
        *(
            pose(family, rng, f"({_AND} {the}{{t}}|{the}{{t}}|{the}{{t}} then)?", answer, t=t)
            for t, (_, answer) in zip(said[1:], picked[1:])
        ),
    ]


def _and_a(scene: Scene, rng: random.Random) -> list[QA]:
    """Whether there is another thing, too."""
    kinds = {
        phrase: shapes_of(scene, colour, name)
        for phrase, colour, name in (kind_of(scene, rng) for _ in range(4))
    }
    made = [(with_article(phrase), yes_no(bool(found))) for phrase, found in kinds.items()]
    if len(made) < 2:
        return []
    form = (
        f"((is there|do you see|can you see|did I draw|have we got|was there) {{t}}|{IF} there is {{t}}.|"
        f"there is {{t}}{TAG}|{{t}}, (is it there|is there one|yes or no)|{MIND} there is {{t}}{TRUE}|"
        f"does it (have|show|contain) {{t}}|is {{t}} (there|to be seen|in it)|has {{t}} been drawn|any "
        f"sign of {{t}})?"
    )
    first = pose("exists", rng, form, made[0][1], t=made[0][0])
    return [
        first,
        *(
            pose(
                "exists",
                rng,
                (
                    f"(({_AND}|also|{_ALSO}|{_ALSO}|is there also|is there|did I also draw|have we got|or is "
                    f"there) {{t}}|"
                    f"{{t}}, too|{{t}}, maybe|{{t}} then|and is {{t}} there|and {IF} there is {{t}}.)?"
                ),
                yes,
                t=t,
            )
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
        form = f"(how many {{t}} {SEE}|how many {{t}} {SEE}|{COUNT_OF})?"
        first = pose("count", rng, form, str(len(them)), t=plural(name))
        said = rng.choice([t.colour for t in them] + [rng.choice(COLOURS)])
        n = sum(t.colour == said for t in them)
        second = pose(
            "count",
            rng,
            (
                "(how many (of them|of these|of those) are {c}|how many are {c}|and how many (of them |)in "
                "{c}|"
                "of (them|these|those), how many are {c}|and {c}( ones|), how many|and how many {c} ones|"
                "how many "
                f"of them did I draw in {{c}}|{TELL} how many of them are {{c}}.|{{c}} ones(:| -|,) how "
                f"many|"
                "count the {c} ones( among them|).|how many (of them |)(were drawn in|have been drawn in) "
                "{c}|"
                "what number of them is {c}|the {c} ones(:|,) how many are they|how many {c} among them|"
                "and the number of {c} ones|for how many of them was {c} used)?"
            ),
            str(n),
            c=said,
        )
        third = pose(
            "list",
            rng,
            (
                f"({WHAT} {COLOUR}s (are they|do they have)|and their (colours|colors)|{WHAT} {COLOUR}s|"
                f"{TELL} (what|which) {COLOUR}s they (are|have).|their {COLOUR}s|in (what|which) "
                f"{COLOUR}s|"
                f"(list|name|give) their {COLOUR}s.|and in what {COLOUR}s did I draw them|{COLOUR}s|"
                f"they are (what|which) {COLOUR}s|and the {COLOUR}s|(what|which) {COLOUR}s were used "
                f"for them|"
                f"what are their {COLOUR}s|of (what|which) {COLOUR}s are they|{COLOUR}s of them)?"
            ),
            ", ".join(dict.fromkeys(t.colour for t in reading_order(them))),
        )
        return [first, rng.choice((second, second, third))]
    several = [c for c in colours if colours[c] > 0]
    if not several:
        return []
    colour = rng.choice(several)
    them = [t for t in scene.shapes() if t.colour == colour]
    first = pose(
        "count",
        rng,
        f"(how many {{c}} shapes {SEE}|how many shapes are {{c}}|{fill(COUNT_OF, '{c} shapes')})?",
        str(len(them)),
        c=colour,
    )
    return [
        first,
        listed(
            "list",
            rng,
            (
                f"({WHAT} (ones|ones are they|shapes|are they)|which|name them|list them|what are "
                "they|and which are they|which of the shapes|enumerate them|say which|tell me which|"
                f"{TELL} which ones (they are|those are).|and what shapes are they|they are which (ones|"
                f"shapes)|"
                "name each|which shapes did I draw in that colour|what shapes|and these are|and their names|"
                "as a list(, please|)|which were they|which ones did I draw|what have we got, then|"
                "(list|name) each of them)?"
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
    side = rng.choice(list(AXES))
    found = farthest(scene, them, side, 0.12)
    if found is None:
        return []
    other = next(t for t in them if t is not found)
    at = {"left": "left", "right": "right", "top": "(upper|top|higher)", "bottom": "(lower|bottom)"}[side]
    form = f"({WHAT} {COLOUR} is the {at} {{t}}|{fill(COLOUR_OF, f'the {at} {{t}}')})?"
    first = pose("colour", rng, form, found.colour, t=name)
    return [
        first,
        pose(
            "colour",
            rng,
            (
                f"({_AND} the other( one| {{t}}|)|{WHAT} {COLOUR} is the other( one| {{t}}|)|the other one|"
                f"the second one|and the second {{t}}|and that of the other( one|)|"
                f"{fill(COLOUR_OF, 'the other (one|{t})')})?"
            ),
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
        first = pose("colour", rng, f"({WHAT} {COLOUR} is {{t}}|{COLOUR_OF})?", thing.colour, t=phrase)
        second = pose(
            "shape",
            rng,
            (
                f"({WHAT} shape is it|and (its|the) shape|what is it|and what is it|what shape|its shape|"
                f"shape|"
                f"{TELL} (what|which) shape it (is|has).|(name|give|state) its shape.|it has (what|which) "
                f"shape|"
                "and what shape did I draw|and which shape (does it have|is that)|what is its shape|of "
                "what shape "
                f"is it|and the form|shape of it|what shape it is|it is which shape|{SO} what shape is it)?"
            ),
            thing.name,
        )
    else:
        first = pose("shape", rng, f"((what|which) shape is {{t}}|{SHAPE_OF})?", thing.name, t=phrase)
        second = pose(
            "colour",
            rng,
            (
                f"({WHAT} {COLOUR} is it|and (its|the) {COLOUR}|{WHAT} {COLOUR} does it have|"
                f"{COLOUR}|its "
                f"{COLOUR}|{TELL} (what|which) {COLOUR} it (is|has).|(name|give|state) its {COLOUR}.|"
                f"it has (what|which) {COLOUR}|in what {COLOUR} did I draw it|and in (what|which) "
                f"{COLOUR}|"
                f"what is its {COLOUR}|of what {COLOUR} is it|{COLOUR} of it|what {COLOUR} it is|it is "
                f"(what|which) {COLOUR}|and what {COLOUR} did I use|how is it coloured|{SO} what "
                f"{COLOUR} is it)?"
            ),
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
                pose(
                    "size",
                    rng,
                    (
                        f"(is it {word} than the {{b}}|it is {word} than the {{b}}{TAG}|and is it {word} "
                        f"than the "
                        f"{{b}}|{IF} it is {word} than the {{b}}.|{MIND} it is {word} than the "
                        f"{{b}}{TRUE}|"
                        f"{word} than the {{b}}{TAG}|compared with the {{b}}, is it {word}|did I draw it "
                        f"{word} than "
                        f"the {{b}}|was it drawn {word} than the {{b}}|{SO} is it {word} than the {{b}})?"
                    ),
                    yes_no((ratio > 1) == bigger),
                    b=rng.choice(phrases),
                ),
            ]
        across, _ = apart(thing, other, scene)
        if abs(across) > 0.15:
            left = rng.random() < 0.5
            put = PUT["left" if left else "right"]
            return [
                first,
                pose(
                    "position",
                    rng,
                    (
                        f"(is it {put}|it is {put}{TAG}|and is it {put}|{IF} it is {put}.|{MIND} it is "
                        f"{put}{TRUE}|"
                        f"{put}{TAG}|did I (draw|put) it {put}|was it (drawn|placed) {put}|does it (lie|"
                        f"stand|sit) "
                        f"{put}|do you see it {put}|{SO} is it {put}|seen from {{b}}, is it on the "
                        f"{'left' if left else 'right'})?"
                    ),
                    yes_no((across < 0) == left),
                    b="the " + rng.choice(phrases),
                ),
            ]
    return [first, second]


def _other_end(scene: Scene, rng: random.Random) -> list[QA]:
    """The biggest, then the smallest; the leftmost, then the rightmost; and the colour of that."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    if rng.random() < 0.55:
        ends = [("biggest", extreme_size(shapes, True)), ("smallest", extreme_size(shapes, False))]
    else:
        side = rng.choice(list(OPPOSITE))
        said = {"left": "leftmost", "right": "rightmost", "top": "topmost", "bottom": "lowest"}
        ends = [
            (said[s], farthest(scene, shapes, s) if len(shapes) > 1 else None) for s in (side, OPPOSITE[side])
        ]
    rng.shuffle(ends)
    (one, first), (two, second) = ends
    if first is None or second is None:
        return []
    asked = one_of(rng, f"(which|what) (is the {one} {noun}|{noun} is (the |){one})?", first)
    if rng.random() < 0.3:
        form = f"((and |)(its|the) {COLOUR}|(what|which) {COLOUR} is it|and {WHAT} {COLOUR} is that)?"
        return [asked, pose("colour", rng, form, first.colour)]
    end = f"({_AND_SHORT}|) the {two}( one| {noun}|)|(and |){WHAT} (one |)is (the |){two}( one|)|{two}"
    shape_alone = asked.answer == first.name
    answer = second.name if shape_alone else name_of(second)
    return [asked, pose("list", rng, f"({end})?", answer, () if shape_alone else (second,))]


def _of_word(scene: Scene, rng: random.Random) -> list[QA]:
    """The word, then how long it is, its first or last letter, its colour."""
    words = [t for t in scene.things if t.kind == "word"]
    if len(words) != 1:
        return []
    word = words[0]
    read = (
        "((what|which) (word|text) is (it|this|there|written|printed)|what does (it|the word|the text) say|"
        "read the (word|text)|what is written( here| there|)|which word do you see)?"
    )
    first = pose("word", rng, read, word.name, (word,))
    letters = (
        "(how many letters (does it have|are in it|has it|are those|are there|)|(and |)how long is it|"
        "(and |)the number of letters|count (its|the) letters|number of letters|what is its length|"
        "how many letters are (they|there in it)|(and |)of how many letters)?"
    )
    start = (
        "((and |)(what is |)(its|the) first letter|what does it (start|begin) with|which letter is first)?"
    )
    end = start.replace("first", "last").replace("(start|begin) with", "end with")
    colour = (
        f"((and |)(what is |)(its|the) {COLOUR}|{WHAT} {COLOUR} (is it|has it|is it (printed|written)"
        f" in)|in {WHAT} {COLOUR} is it)?"
    )
    turns = [
        pose("count", rng, letters, str(len(word.name))),
        pose("letter", rng, start, word.name[0]),
        pose("letter", rng, end, word.name[-1]),
        pose("colour", rng, colour, word.colour),
    ]
    later = rng.sample(turns, 2)
    return [first, turns[0]] if rng.random() < 0.5 else [first, *later[: rng.choice((1, 2))]]


def _other_of_two(scene: Scene, rng: random.Random) -> list[QA]:
    """Two of a kind or of a colour: the one, and the other one."""
    names, colours, _ = tally(scene)
    alike = [(n, [t for t in scene.shapes() if t.name == n]) for n in names if names[n] == 2]
    alike += [
        (f"{c} shape", [t for t in scene.shapes() if t.colour == c]) for c in colours if colours[c] == 2
    ]
    if not alike:
        return []
    phrase, (one, two) = rng.choice(alike)
    ordered = reading_order((one, two))
    shape = phrase.endswith(" shape")
    first = pose(
        "count", rng, "(how many {t} are there|how many {t} do you see|count the {t})?", "2", t=plural(phrase)
    )
    what = "shapes" if shape else f"{COLOUR}s"
    values = [t.name for t in ordered] if shape else list(dict.fromkeys(t.colour for t in ordered))
    which = pose(
        "list",
        rng,
        f"(and |)({WHAT} {what} (are they|do they have)|their {what}|{what})?",
        ", ".join(values),
    )
    if shape or rng.random() < 0.5 or one.colour == two.colour:
        return [first, which]
    other = (
        f"one (of them |)is {ordered[0].colour}. "
        f"({WHAT} {COLOUR} (is|has) the other( one|)|the other( one|))?"
    )
    return [first, pose("colour", rng, other, ordered[1].colour)]


def _more_things(scene: Scene, rng: random.Random) -> list[QA]:
    """How many of one kind, then of more kinds, each by its name alone."""
    names, colours, _ = tally(scene)
    known: Sequence[tuple[str, int]] = [
        (plural(n), names[n]) for n in SHAPES if names[n] or rng.random() < 0.3
    ]
    if rng.random() < 0.4:
        known = [(f"{c} (ones|shapes)", colours[c]) for c in COLOURS if colours[c] or rng.random() < 0.3]
    if len(known) < 2 or not names:
        return []
    picked = rng.sample(known, min(len(known), 3))
    first = "(how many {t} (are there|do you see|did i draw|does it have)|count the {t})?"
    said = [say(phrase, rng) for phrase, _ in picked]
    turns = [pose("count", rng, first, str(picked[0][1]), t=said[0].replace(" ones", " shapes"))]
    for phrase, (_, count) in zip(said[1:], picked[1:]):
        later = "({a} (the |){t}|{t}|and how many {t}|how many {t})?"
        turns.append(pose("count", rng, later, str(count), t=phrase, a=say(_AND_SHORT, rng)))
    return turns


_LEANING = (
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
_TWO_TURNS = (_other_end, _other_end, _of_word, _of_word, _other_of_two, _more_things)


def lean_on(scene: Scene, rng: random.Random) -> list[QA]:
    """Two or three turns of which the later ones lean on those before: "And the square?", "Which ones?"."""
    makers = rng.sample(_LEANING, len(_LEANING))
    return next((turns for maker in makers if (turns := maker(scene, rng))), [])


def two_turns(scene: Scene, rng: random.Random) -> list[QA]:
    """Two or three turns of which the later ones lean on those before: the smallest after the biggest, the
    other end, a word and its letters."""
    makers = rng.sample(_TWO_TURNS, len(_TWO_TURNS))
    return next((turns for maker in makers if (turns := maker(scene, rng))), [])


# --------------------------------------------------------------------------------------------- two images
def first_or_second(scenes: tuple[Scene, Scene], rng: random.Random) -> QA | None:
    """Which of two images shows something, or more of it; whether both do."""
    kinds = [kind_of(scene, rng) for scene in scenes]
    phrase, colour, name = rng.choice(kinds)
    counts = [len(shapes_of(scene, colour, name)) for scene in scenes]
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
            f"({WHAT} {noun} (has|shows|contains) {{a}}({pair}|)|in which {noun} is {{a}}|"
            f"is {{a}} in the first or (in |)the second {noun}|"
            f"{WHAT} one (has|shows) {{a}}({pair}|)|where is {{a}}, in the first or (in |"
            f")the second {noun}|which of the (two |){noun}s (has|shows) {{a}}|{{a}}(:|,| -) (which|what) "
            f"{noun}|"
            f"{{a}} is in (which|what) {noun}|in which {noun} did I draw {{a}}|{TELL} which {noun} has "
            f"{{a}}|"
            f"{noun} with {{a}}|first or second {noun}(:|,) where is {{a}}|the {noun} with {{a}}(:|,) "
            f"which is it|"
            f"which {noun} is it that (has|shows) {{a}}|in which of the (two |){noun}s can {{a}} be seen|"
            f"{{a}}(:|,) (in the |)first or (in the |)second {noun}|{SO} which {noun} has {{a}}|which is "
            f"the {noun} "
            f"with {{a}}|of the two {noun}s, which has {{a}}|do I find {{a}} in the first or in the second "
            f"{noun})?"
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
            f"({WHAT} {noun} (has|shows|contains) {sign} {{t}}({pair}|)|{WHAT} one has "
            f"{sign} {{t}}|are there {sign} {{t}} in the first or (in |)the second {noun}|"
            f"(which|what) of the (two |){noun}s has {sign} {{t}}|{sign} {{t}}(:|,| -) which {noun}|in "
            f"which {noun} did "
            f"I draw {sign} {{t}}|{TELL} which {noun} has {sign} {{t}}|{noun} with {sign} {{t}}|the "
            f"{noun} with {sign} "
            f"{{t}} is which|first or second {noun}(:|,) where are there {sign} {{t}}|in which {noun} are "
            f"there {sign} "
            f"{{t}}|which {noun} is it that has {sign} {{t}}|in which of the two can {sign} {{t}} be seen|"
            f"{SO} which {noun} has {sign} {{t}}|of the two {noun}s, which has {sign} {{t}}|does the "
            f"first or the "
            f"second {noun} have {sign} {{t}}|compare the {noun}s: which has {sign} {{t}})?"
        )
        return QA("compare", capital(say(form, rng, t=plural(phrase))), answer, (f"the {answer} {noun}",))
    if which < 0.9:
        form = (
            f"(do both {noun}s (have|show|contain) {{a}}|is there {{a}} in both {noun}s|is "
            f"{{a}} in both|do you see {{a}} in both {noun}s|did I draw {{a}} in both {noun}s|{{a}} in "
            f"both {noun}s"
            f"{TAG}|both {noun}s (have|show) {{a}}{TAG}|{IF} there is {{a}} in both {noun}s|{MIND} "
            f"both {noun}s "
            f"have {{a}}{TRUE}|does each {noun} have {{a}}|does the first {noun} as well as the second "
            f"have {{a}}|"
            f"can {{a}} be seen in both {noun}s|is {{a}} in the first {noun} and in the second one, too|"
            f"{SO} is {{a}} in both {noun}s|{{a}}(:|,) in both {noun}s|was {{a}} drawn in both {noun}s)?"
        )
        return QA("compare", capital(say(form, rng, a=with_article(phrase))), yes_no(all(counts)))
    form = (
        f"(does (either|any) {noun} (have|show) {{a}}|is there {{a}} in (either|any) of the {noun}s|did I "
        f"draw {{a}} "
        f"in (either|any) of the {noun}s|{{a}} in any of the {noun}s{TAG}|at least one {noun} has "
        f"{{a}}{TAG}|"
        f"{IF} any {noun} has {{a}}|does at least one of the {noun}s have {{a}}|can {{a}} be seen in "
        f"(either|any) "
        f"{noun}|was {{a}} drawn in any {noun}|{MIND} some {noun} has {{a}}{TRUE}|is {{a}} anywhere in the "
        f"two {noun}s|{SO} is {{a}} in any of the {noun}s|{{a}}(:|,) in any of the {noun}s)?"
    )
    return QA("compare", capital(say(form, rng, a=with_article(phrase))), yes_no(any(counts)))
