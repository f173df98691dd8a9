"""Questions whose answers are computed from the whole scene: "and", "or" and "not", exact numbers, whether
all are alike, which are so, what lies beside what, corners and halves, extremes, grounds, letters. Each is
asked in the many wordings of a grammar (`grammar.say`).

Where a person could doubt the truth (two things nearly as far left, a gap of a few pixels), nothing is asked.
"""

from __future__ import annotations

import colorsys
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Computed(QA):
    """A question of these: whoever is not sure of its answer had better say so (`training.refusal_loss`)."""


Asker = Callable[[Scene, random.Random], QA | None]
_HERE = "(| there| here| in it| in the (picture|image|drawing)| in this (picture|image|drawing))"
_SEE = (
    "(are there|are there|do you see|can you see|do you count|are in the (picture|image|"
    "drawing)|have we got|)"
)
_COLOUR = "(colour|color)"
_WHAT = "(what|which)"
_TELL = (
    "(tell me|say|please say|I wonder|I'd like to know|I want to know|let me know|can you say|"
    "could you tell me|do you know|you must tell me|any idea)"
)
_IF = "(tell me if|tell me whether|say whether|I wonder if|I want to know if|check if|can you say whether)"
_NAME = "(tell me|say|write|name|report|give me|state|spell out|I'd like to know|I want to know)"
_SO = "(so|ok so|and|hey,|well,|please,|now)"
_TAG = "(, right|, yes or no|, no|, isn't it|, true or false|. Is that so|. True|, am I right|, correct)"
_MIND = "(I think|I believe|I'd say|they say|my friend says|it seems to me that)"
_TRUE = "(. Is that so|. Am I right|. Is it true|, is that right|, correct|, yes or no)"
_COUNT_OF = (  # {t}: a plural phrase
    "{t}(:|,| -) how many( are there| of them| do you see|)|{t} =|number of {t} =|{t}: (number|count|total)|"
    "how many {t} did (I|we|they|someone) (draw|make|put there)|I drew how many {t}|there are how many {t}|"
    "(I need|I want|give me|get me|report|write down) (just |)(the number|the count|a count) of {t}.|"
    f"{_TELL} how many {{t}} (there are|you see|I drew|are there).|how many {{t}} (were|have been) drawn|"
    "how many are (the {t}|they, the {t})|what is it, the number of {t}|{t} are how many|how much {t}|"
    f"{_SO} how many {{t}}|how many {{t}} (can|could) (you|one|I) (count|find|see)|what number of {{t}} "
    "(is there|do you see|was drawn)|how many {t} did I draw, if any|how many is it, {t}|how many {t} it has|"
    "how many would you say there are, {t}"
)
_LIST_OF = (  # {t}: a plural phrase
    "{t}(:|,| -) (which ones|list them|name them|what are they|which|which are they)|list of {t}|{t} =|"
    "(I want|I need|give me|show me|I'd like) (a list of |)the {t}.|which are they, the {t}|"
    f"{_TELL} (which|what) {{t}} (there are|you see|I drew).|(which|what) {{t}} did (I|they|someone) draw|"
    "(which|what) {t} (were|have been|are) drawn|I drew (which|what) {t}|there are (which|what) {t}|"
    f"(which|what) {{t}} (can|could) (you|one) (see|find|name)|{_SO} (which|what) {{t}} are there|"
    "(write down|enumerate|go through) the {t}.|the {t} are which ones|what {t} it has|"
    "what is it that I drew: which {t}"
)
_COLOUR_OF = (  # {t}: a thing, with its article
    f"{{t}}(:|,| -) (what|which) {_COLOUR}( is it| is that| does it have|)|{{t}}(:| -) {_COLOUR}|"
    f"{_COLOUR} of {{t}} =|what {_COLOUR} did (I|we|they|someone) (use|pick|take|choose) for {{t}}|"
    f"in (what|which) {_COLOUR} did (I|they|someone) draw {{t}}|how is {{t}} coloured|"
    f"{{t}} (was drawn|is drawn|comes) in (what|which) {_COLOUR}|{{t}} (has|have) (what|which) {_COLOUR}|"
    f"{_TELL} (what|which) {_COLOUR} {{t}} (is|has).|(name|state|report|give|identify) the {_COLOUR} of "
    f"{{t}}.|what is the {_COLOUR} that {{t}} has|what {_COLOUR} {{t}} is|what is {{t}} {_COLOUR}|"
    f"(look at|take) {{t}}. (What|Which) {_COLOUR} is it|{_SO} (what|which) {_COLOUR} is {{t}}|"
    f"of (what|which) {_COLOUR} is {{t}}|it is (what|which) {_COLOUR}, {{t}}|what {_COLOUR} would you "
    f"(say {{t}} is|call {{t}})|(what|which) {_COLOUR} (was|has been) (used|picked|chosen) for {{t}}|"
    f"I (drew|see) {{t}}. What {_COLOUR} is it|what is it for a {_COLOUR} that {{t}} has"
)
_SHAPE_OF = (  # {t}: a shape, with its article
    "{t}(:|,| -) (what|which) shape( is it| is that| does it have|)|shape of {t} =|what shape has {t}|"
    "as (what|which) shape did (I|they|someone) draw {t}|{t} (was|is) drawn as (what|which) shape|"
    f"{_TELL} (what|which) shape {{t}} (is|has).|(name|state|report|give|identify) the shape of {{t}}.|"
    f"{{t}} (has|have) (what|which) shape|what shape {{t}} is|{_SO} (what|which) shape is {{t}}|of (what|"
    "which) shape is {t}|what shape would you say {t} is|(look at|take) {t}. (What|Which) shape is it|"
    "it is (what|which) shape, {t}|what is the shape that {t} has|what is it for a shape, {t}|"
    "I (drew|see) {t}. What shape is it|what shape (was|has been) (used|picked|chosen) for {t}"
)
_IS_COLOUR = (  # {t}: a thing, with its article; {c}: a colour
    f"is {{c}} the {_COLOUR} of {{t}}|is {{c}} the {_COLOUR} that {{t}} has|is the {_COLOUR} of {{t}} {{c}}|"
    f"is it {{c}}, {{t}}|{{t}} is {{c}}{_TAG}|{{t}}(:|,| -) {{c}}(, yes or no| or not|, right|)|"
    "did (I|they|someone) (draw|make) {t} (in |){c}|was {t} (drawn in|made) {c}|"
    f"{_IF} {{t}} is {{c}}.|does {{t}} have the {_COLOUR} {{c}}|{{c}}: is that the {_COLOUR} of {{t}}|"
    f"{_COLOUR} of {{t}} = {{c}}|{_MIND} {{t}} is {{c}}{_TRUE}|I drew {{t}} in {{c}}(, right|, didn't I|, "
    "no)|would you say {t} is {c}|can {t} be called {c}|{t} is {c} or not|is {t} {c} or not|"
    f"is {{c}} the right {_COLOUR} for {{t}}|has {{t}} been drawn in {{c}}|{_SO} is {{t}} {{c}}"
)
_IS_SHAPE = (  # {t}: a shape, with its article; {a}: a shape's name with an article
    f"is it {{a}}, {{t}}|{{t}}(:|,| -) {{a}}(, yes or no| or not|, right|)|{{t}} is {{a}}{_TAG}|"
    "is {a} what {t} is|was {t} drawn as {a}|did (I|they|someone) draw {a} as {t}|"
    f"{_IF} {{t}} is {{a}}.|(does {{t}} have|has {{t}}) the (shape|form) of {{a}}|"
    f"{_MIND} {{t}} is {{a}}{_TRUE}|would you say {{t}} is {{a}}|is {{t}} {{a}} or not|"
    f"can {{t}} be called {{a}}|{_SO} is {{t}} {{a}}|is {{a}} the shape of {{t}}|it is {{a}}, {{t}}{_TAG}|"
    "shape of {t} = {a}|does {t} look like {a}"
)
_WHAT_AT = (  # {p}: a place, as in "below the circle", where there is something
    "{p}(:|,| -) what (is|do you see|is there|did I draw)|{p} (is|there is|I drew|you see|sits) what|"
    f"{_TELL} what (is|sits|lies|I drew|you see|there is) {{p}}.|what did (I|they|someone) (draw|put|place) "
    "{p}|what (has been|was) (drawn|put|placed) {p}|what is it that (is|lies|sits|you see) {p}|"
    "what (sits|stands|appears|shows up|can be seen|do we have|have we got|there is) {p}|"
    "something is {p}(. What is it|, but what|, what is it|: what)|there is what {p}|{p} =|"
    f"{_SO} what (is|do you see) {{p}}|(say|write|name) what you (see|find) {{p}}.|it is what, {{p}}"
)
_THING_AT = (
    "(name|identify|describe|I mean) the (thing|object) {p}.|the (thing|one|object) {p} is what|what is it, "
    "the thing {p}|the (thing|object) {p}(:|,| -|:) what is it|what thing (you see|there is) {p}|"
    f"thing {{p}}|I drew one thing {{p}}. What|{_TELL} what the (thing|object) {{p}} is."
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


def pose(
    family: str, rng: random.Random, pattern: str, answer: str, things: Sequence[Thing] = (), **slots
) -> QA:
    question = _marked(say(pattern, rng, **slots), rng)
    if question.startswith(_ORDERS) and question.endswith("?"):
        question = question[:-1] + rng.choice((".", ".", ""))
    accept = (NUMBER_WORDS[int(answer)],) if answer.isdigit() and len(answer) == 1 else ()
    return Computed(family, capital(question), answer, accept, tuple(things))


def _marked(question: str, rng: random.Random) -> str:
    """Without the question mark of its pattern where another mark ends it."""
    if question.endswith((".?", ":?", "!?")) or (question.endswith("=?") and rng.random() < 0.5):
        return question[:-1]
    return question


def _the(form: str, phrase: str, slot: str = "{t}") -> str:
    """The form with a longer phrase, such as "the biggest {t}", in its slot."""
    return form.replace(slot, phrase)


def _asks_shape(question: str) -> bool:
    """Whether it asks for a shape and nothing else: "What shape is ..."."""
    return re.search(r"\b(what|which) shape\b", question.lower()) is not None


def yes_no(said: bool) -> str:
    return "yes" if said else "no"


def only_shapes(scene: Scene) -> bool:
    """Whether "one", "them" and the like can mean nothing but shapes."""
    return len(scene.shapes()) == len(scene.things)


def nouns_for(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A word for one shape and for several: "thing" and its kin only where nothing else is there."""
    if not only_shapes(scene) or rng.random() < 0.6:
        return "shape", "shapes"
    one = rng.choice(("object", "thing", "figure", "item", "form"))
    return one, one + "s"


def _listed(family: str, rng: random.Random, pattern: str, things: Sequence[Thing], said, **slots) -> QA:
    """A question whose answer names things, in reading order."""
    things = reading_order(things)
    return pose(family, rng, pattern, ", ".join(map(said, things)) or ABSENT, things, **slots)


# ----------------------------------------------------------------------------------------- sets of shapes
Set = tuple[str, list[Thing]]  # a plural phrase and the shapes that it means


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
        noun = nouns_for(scene, rng)[1]
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
        "(add up|count) the {t}( together|)|(please tell me|tell me|i want to know) how many {t} there are|"
        f"{_COUNT_OF})?"
    )
    return pose("count", rng, form, str(len(made[1])), t=made[0])


def _not(scene: Scene, rng: random.Random) -> QA | None:
    """How many are not so, or which."""
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
    if not shapes:
        return None
    _, colour, name = kind_of(scene, rng)
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
            f"(what is|what's) the number of ({put})|{_the(_COUNT_OF, f'({put})')})?"
        )
        return pose("count", rng, form, str(len(found)))
    if len(found) > 5:
        return None
    form = f"({_WHAT} {verb}|(list|name) (the|all|all the) ({put})|{_the(_LIST_OF, f'({put})')})?"
    return _listed("list", rng, form, found, name_of)


def _exactly(scene: Scene, rng: random.Random) -> QA | None:
    """Whether there are two, exactly, at least or more than so many."""
    phrase, colour, name = kind_of(scene, rng)
    if rng.random() < 0.12:
        phrase, colour, name = "shape", None, None
    count = len(shapes_of(scene, colour, name))
    k = max(1, min(8, count + rng.choice((0, 0, 0, 1, -1, 1, 2))))
    number = rng.choice((str(k), NUMBER_WORDS[k]))
    t = phrase if k == 1 else plural(phrase)
    sees = (
        "(are there|are there|do you see|can you see|does it have|does the (picture|image) "
        "have|is it true that there are)"
    )
    which = rng.random()
    drew = "(did (I|they|someone) draw|have I drawn|were there|would you say there are)"
    if k == 1:
        drew = drew.replace("were there", "was there").replace("there are", "there is")
        sees = sees.replace("are there", "is there")
        if which < 0.4:
            form = (
                f"({sees} (only|just|exactly) (one|1|a single) {{t}}{_HERE}|is there only one {{t}}{_HERE}|"
                f"{drew} (only|just|exactly) one {{t}}|only one {{t}}{_TAG}|one {{t}} and no more{_TAG}|"
                f"{_IF} there is (only|just|exactly) one {{t}}.|is one the number of {plural(phrase)}|"
                "there is just one {t}, (no|right|isn't there)|only one {t} here|"
                f"{_MIND} there is only one {{t}}{_TRUE}|number of {plural(phrase)} = 1|"
                f"a single {{t}}, (yes or no|right|is that all)|{plural(phrase)}: only one|"
                "is it one {t} only|was only one {t} drawn)?"
            )
            return pose("exists", rng, form, yes_no(count == 1), t=phrase)
        if which < 0.8:
            several = f"are there several {plural(phrase)}|" if count != 2 else ""  # two may be several
            form = (
                f"((is there|do you see|can you see) more than (one|1) {{t}}{_HERE}|{drew} more than one "
                f"{{t}}|"
                f"more than one {{t}}{_TAG}|{_IF} there is more than one {{t}}.|{plural(phrase)}: more than "
                f"one|{_MIND} there is more than one {{t}}{_TRUE}|{several}"
                f"is the number of {plural(phrase)} more than one|more than one {{t}} here|"
                f"was more than one {{t}} drawn|{plural(phrase)}, are there two or more)?"
            )
            return pose("exists", rng, form, yes_no(count > 1), t=phrase)
        form = (
            f"({sees} at least (one|1) {{t}}{_HERE}|{drew} at least one {{t}}|at least one {{t}}{_TAG}|"
            f"{_IF} there is at least one {{t}}.|one {{t}} or more{_TAG}|was at least one {{t}} drawn|"
            f"{_MIND} there is at least one {{t}}{_TRUE}|one {{t}} at least, is it there)?"
        )
        return pose("exists", rng, form, yes_no(count >= 1), t=phrase)
    if which < 0.45:
        if count > k:  # then "two" is true of two of them, and false of all
            return None
        form = (
            f"({sees} {{n}} {{t}}{_HERE}|{{n}} {{t}}, (right|correct|yes)|{drew} {{n}} {{t}}|{{n}} "
            f"{{t}}{_TAG}|"
            f"there are {{n}} {{t}}(, aren't there|, no|, right|. True)|{_IF} there are {{n}} {{t}}.|"
            f"{_MIND} there are {{n}} {{t}}{_TRUE}|is {{n}} the number of {{t}}|{{t}}(:|,| -) {{n}}{_TAG}|"
            "number of {t} = {n}|I drew {n} {t}(, didn't I|, right|. Is that so)|were {n} {t} drawn|"
            f"{{n}} {{t}}, are they there|are the {{t}} {{n}}|{{t}}: are there {{n}}|I count {{n}} "
            f"{{t}}{_TRUE}|"
            f"is it {{n}} {{t}} (that you see|that I drew)|{_SO} are there {{n}} {{t}}|{{n}} {{t}} here)?"
        )
        return pose("exists", rng, form, yes_no(count == k), n=number, t=t)
    if which < 0.65:
        form = (
            f"({sees} (exactly|just|only|precisely) {{n}} {{t}}{_HERE}|is the number of {{t}} {{n}}|"
            f"{drew} (exactly|just|only) {{n}} {{t}}|exactly {{n}} {{t}}{_TAG}|{_IF} there are exactly {{n}} "
            f"{{t}}.|{{n}} {{t}}, no more and no less{_TAG}|is {{n}} the exact number of {{t}}|"
            f"{_MIND} there are exactly {{n}} {{t}}{_TRUE}|{{t}}: exactly {{n}}|number of {{t}} = {{n}}|"
            "were exactly {n} {t} drawn|is {n} right for the number of {t}|exactly {n} {t} here|"
            "does the count of {t} come to {n}|is it exactly {n} {t} that I drew)?"
        )
        return pose("exists", rng, form, yes_no(count == k), n=number, t=t)
    if which < 0.78:
        form = (
            f"({sees} at least {{n}} {{t}}{_HERE}|{sees} {{n}} or more {{t}}{_HERE}|{drew} at least {{n}} "
            f"{{t}}|"
            f"at least {{n}} {{t}}{_TAG}|{{n}} {{t}} or more{_TAG}|{_IF} there are at least {{n}} {{t}}.|"
            f"{_MIND} there are at least {{n}} {{t}}{_TRUE}|{{t}}: at least {{n}}|were at least {{n}} {{t}} "
            "drawn|is the number of {t} {n} or more|is the number of {t} at least {n}|at least {n} {t} here)?"
        )
        return pose("exists", rng, form, yes_no(count >= k), n=number, t=t)
    if which < 0.9:
        form = (
            f"({sees} more than {{n}} {{t}}{_HERE}|{drew} more than {{n}} {{t}}|more than {{n}} {{t}}{_TAG}|"
            f"{_IF} there are more than {{n}} {{t}}.|{_MIND} there are more than {{n}} {{t}}{_TRUE}|"
            "{t}: more than {n}|were more than {n} {t} drawn|is the number of {t} (more|greater) than {n}|"
            "is the number of {t} above {n}|does the number of {t} exceed {n}|more than {n} {t} here)?"
        )
        return pose("exists", rng, form, yes_no(count > k), n=number, t=t)
    form = (
        f"({sees} (fewer|less) than {{n}} {{t}}{_HERE}|{drew} (fewer|less) than {{n}} {{t}}|fewer than {{n}} "
        f"{{t}}{_TAG}|{_IF} there are fewer than {{n}} {{t}}.|{_MIND} there are fewer than {{n}} "
        f"{{t}}{_TRUE}|"
        "{t}: fewer than {n}|were fewer than {n} {t} drawn|is the number of {t} (less|smaller) than {n}|"
        "is the number of {t} below {n}|less than {n} {t} here)?"
    )
    return pose("exists", rng, form, yes_no(count < k), n=number, t=t)


def _all_alike(scene: Scene, rng: random.Random) -> QA | None:
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
    if len(shapes) < 2:
        return None
    names, colours, _ = tally(scene)
    them = f"all (the |of the |){many}|the {many}( all|)|these {many}( all|)"
    them = f"({them}|they( all|)|all of them|these( all|))" if only_shapes(scene) else f"({them})"
    these = f"all (the |of the |){many}|the {many}|these {many}"  # where "they" would be "them"
    these = f"({these}|them|all of them|these)" if only_shapes(scene) else f"({these})"
    for_all = f"same {_COLOUR} for all|" if only_shapes(scene) else ""
    which = rng.random()
    if which < 0.22:
        form = (
            f"(are {them} (the same|of the same|of one|one) {_COLOUR}|do {them} have the same {_COLOUR}|"
            f"(have|share) {them} (the same|one) {_COLOUR}|{for_all}is there (only|just) one "
            f"{_COLOUR} for {these}|did I (draw|make) {these} in (the same|one) {_COLOUR}|the {many}: all of "
            f"one "
            f"{_COLOUR}|were {them} drawn in (the same|one) {_COLOUR}|the {many} are all the same "
            f"{_COLOUR}{_TAG}|"
            f"{_IF} {them} (are the same|have the same|are of one) {_COLOUR}.|one {_COLOUR} for all the "
            f"{many}|"
            f"is the {_COLOUR} of {these} the same|is it (one and |)the same {_COLOUR} for {these}|"
            f"{_MIND} {them} have the same {_COLOUR}{_TRUE}|the {many} have all same {_COLOUR}{_TAG}|"
            f"does every {many[:-1]} have the same {_COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(len(colours) == 1))
    if which < 0.4:
        form = (
            f"(are {them} (the same|of the same) (shape|kind|type|form)|do {them} have the same (shape|form)|"
            "(is there|are there) only one (kind|type|sort) of shape|same shape for all|"
            f"did I draw (only|just) one kind of shape|the {many}: all of one kind|is the shape of {these} "
            f"the "
            f"same|{_IF} {them} are of (one|the same) kind.|one kind of shape only{_TAG}|"
            f"the {many} are all of the same kind{_TAG}|were {them} drawn as the same shape|"
            f"{_MIND} {them} are of the same kind{_TRUE}|is it the same shape (again and again|every time)|"
            f"the {many} have all same shape{_TAG})?"
        )
        return pose("exists", rng, form, yes_no(len(names) == 1))
    if which < 0.5:
        form = (
            f"(do {them} have (different|a different) {_COLOUR}s|are {them} (differently "
            f"coloured|of different {_COLOUR}s)|did I (use|take) different {_COLOUR}s for {these}|"
            f"were {them} drawn in different {_COLOUR}s|{_IF} {them} have different {_COLOUR}s.|"
            f"the {many} are of different {_COLOUR}s{_TAG}|the {many}: different {_COLOUR}s|"
            f"different {_COLOUR}s for {these}|{_MIND} {them} have different {_COLOUR}s{_TRUE})?"
        )
        if 1 < len(colours) < len(shapes):
            return None  # some are alike, some are not
        return pose("exists", rng, form, yes_no(len(colours) > 1))
    if which < 0.6:
        twice = "more than once" if max(colours.values()) > 2 else "(twice|more than once)"
        bare = (
            f"is any {_COLOUR} (there|used) {twice}|did I use (any|a) {_COLOUR} {twice}|"
            f"was (a|any) {_COLOUR} used {twice}|does (any|a) {_COLOUR} "
            f"(repeat|come {twice}|appear more than once)|"
            f"same {_COLOUR} {twice}{_TAG}|"
        )
        bare = bare if only_shapes(scene) else ""  # else a word's colour may be meant, too
        form = (
            f"((are there|do you see) (two|any two|any) {many} (of|with|that have) the same {_COLOUR}|"
            f"do (any|any two|two) {many} (have the same|share a) {_COLOUR}|{bare}"
            f"two {many} of (one|the same) {_COLOUR}{_TAG}|"
            f"{_IF} (two|any two) {many} have the same {_COLOUR}.|"
            f"are there {many} that (share a|have the same) {_COLOUR}|"
            f"{_MIND} two {many} have the same {_COLOUR}{_TRUE})?"
        )
        return pose("exists", rng, form, yes_no(len(colours) < len(shapes)))
    if which < 0.8:
        name = rng.choice(list(names))
        if names[name] < 2:
            return None
        said = rng.choice([t.colour for t in shapes if t.name == name] + [rng.choice(COLOURS)])
        found = [t for t in shapes if t.name == name]
        both = "both (the |of the |)|" if len(found) == 2 else ""
        them = f"({both}all (the |of the |)|the )"
        if rng.random() < 0.4:
            form = (
                f"(are {them}{{t}}( all|) the same {_COLOUR}|do {them}{{t}} have the same {_COLOUR}|"
                f"did I draw {them}{{t}} in (one|the same) {_COLOUR}|the {{t}}: all of one {_COLOUR}|"
                f"{_IF} {them}{{t}} have the same {_COLOUR}.|the {{t}} have all same {_COLOUR}{_TAG}|"
                f"is there just one {_COLOUR} for the {{t}}|were {them}{{t}} drawn in the same {_COLOUR}|"
                f"is the {_COLOUR} of {them}{{t}} the same|{_MIND} {them}{{t}} have the same "
                f"{_COLOUR}{_TRUE}|"
                f"the {{t}}, same {_COLOUR} or not|does every {name} have the same {_COLOUR})?"
            )
            return pose("exists", rng, form, yes_no(len({t.colour for t in found}) == 1), t=plural(name))
        form = (
            f"(are {them}{{t}} {{c}}|is every {{o}} {{c}}|all {{t}} are {{c}}, (right|correct)|"
            f"did I draw {them}{{t}} in {{c}}|is {{c}} the {_COLOUR} of (all|every one of) the {{t}}|"
            f"{_IF} all the {{t}} are {{c}}.|{{t}}(:|,) all (of them |){{c}}{_TAG}|was every {{o}} drawn "
            f"in {{c}}|"
            f"does every {{o}} have the {_COLOUR} {{c}}|{_MIND} all the {{t}} are {{c}}{_TRUE}|"
            f"is {{c}} the only {_COLOUR} of the {{t}}|are all the {{t}} {{c}} or not|every {{o}} is "
            f"{{c}}{_TAG}|"
            "is it true that all the {t} are {c}|only {c} {t}, no others, (right|yes or no))?"
        )
        return pose(
            "exists", rng, form, yes_no(all(t.colour == said for t in found)), t=plural(name), o=name, c=said
        )
    said = rng.choice([*colours, rng.choice(COLOURS)])
    if rng.random() < 0.5:
        form = (
            f"(are {them} {{c}}|is every {many[:-1]} {{c}}|is each {many[:-1]} {{c}}|are {them} {{c}} ones|"
            f"did I draw {these} in {{c}}|is {{c}} the {_COLOUR} of {these}|is {{c}} the {_COLOUR} of every "
            f"{many[:-1]}|{_IF} {them} are {{c}}.|every {many[:-1]} is {{c}}{_TAG}|were {them} drawn in "
            f"{{c}}|"
            f"{_MIND} {them} are {{c}}{_TRUE}|does every {many[:-1]} have the {_COLOUR} {{c}}|{many}: all "
            f"{{c}}|"
            f"nothing but {{c}} {many}{_TAG}|are there only {{c}} {many}|are {them} {{c}} or not)?"
        )
        return pose("exists", rng, form, yes_no(all(t.colour == said for t in shapes)), c=said)
    name = rng.choice(list(names))
    form = (
        f"(are {them} {{t}}|is every {many[:-1]} {{a}}|is each {many[:-1]} {{a}}|did I draw (only|nothing "
        f"but|"
        f"just) {{t}}|are there only {{t}}|{_IF} {them} are {{t}}.|every {many[:-1]} is {{a}}{_TAG}|"
        f"{_MIND} {them} are {{t}}{_TRUE}|only {{t}} and no other {many}{_TAG}|{many}: all {{t}}|"
        f"were {them} drawn as {{t}}|is {{a}} what every {many[:-1]} is|are {them} {{t}} or not)?"
    )
    return pose("exists", rng, form, yes_no(len(names) == 1), t=plural(name), a=with_article(name))


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
            f"(does the {{a}} have|has the {{a}}|is the {{a}}) the same {_COLOUR} as the {{b}}|"
            f"the {{a}} and the {{b}}(:|,| -) (same {_COLOUR}|one {_COLOUR})(, yes or no| or not|)|same "
            f"{_COLOUR} "
            f"for the {{a}} and the {{b}}|did I (draw|make) the {{a}} and the {{b}} in (the same|one) "
            f"{_COLOUR}|"
            f"{_IF} the {{a}} (is|has) the same {_COLOUR} as the {{b}}.|were the {{a}} and the {{b}} drawn "
            f"in "
            f"the same {_COLOUR}|is the {_COLOUR} of the {{a}} (also |)(that|the {_COLOUR}) of the {{b}}|"
            f"the {{a}} has the same {_COLOUR} as the {{b}}{_TAG}|is it the same {_COLOUR}, the {{a}} and "
            f"the "
            f"{{b}}|{_MIND} the {{a}} and the {{b}} have the same {_COLOUR}{_TRUE}|is the {{a}} as "
            f"{one.colour} as "
            f"the {{b}}|{_COLOUR} of the {{a}} = {_COLOUR} of the {{b}}|the {{a}} have same {_COLOUR} like "
            f"the "
            f"{{b}}{_TAG}|do the {{a}} and the {{b}} match in {_COLOUR}|{{a}} and {{b}}: same {_COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(one.colour == two.colour), a=one.name, b=two.name)
    form = (
        f"({_WHAT} (other |)shape (has|shares) the (same |){_COLOUR} (of|as) the {{a}}|"
        f"which (other |)shape is the same {_COLOUR} as the {{a}}|"
        f"{_WHAT} other shape is as {one.colour} as the {{a}}|{_TELL} (what|which) other shape has the "
        f"{_COLOUR} "
        f"of the {{a}}.|the {{a}} has the same {_COLOUR} as which (other |)shape|apart from the {{a}}, "
        f"{_WHAT} "
        f"shape is {one.colour}|{_WHAT} other shape did I draw in the {_COLOUR} of the {{a}}|same "
        f"{_COLOUR} as the "
        f"{{a}}(:|,| -) (what|which) shape|(name|give) the other shape that has the {_COLOUR} of the {{a}}.|"
        f"{_WHAT} other shape was drawn in the {_COLOUR} of the {{a}}|with {_WHAT} shape does the {{a}} "
        f"share "
        f"its {_COLOUR}|the {{a}} and what other shape are {one.colour}|{_SO} {_WHAT} other shape has the "
        f"{_COLOUR} "
        f"of the {{a}}|{_WHAT} shape matches the {{a}} in {_COLOUR})?"
    )
    return pose("shape", rng, form, others[0].name, others, a=one.name)


def _which_are(scene: Scene, rng: random.Random) -> QA | None:
    """Which shapes are red; which colours the circles have."""
    names, colours, _ = tally(scene)
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
    if not shapes:
        return None
    if rng.random() < 0.55:
        colour = rng.choice(list(colours) if rng.random() < 0.88 else COLOURS)
        found = [t for t in shapes if t.colour == colour]
        if len(found) > 5 or (len(found) > 3 and len({t.name for t in found}) == 1):
            return None
        ones = f"|{_WHAT} of (them|these) are {{c}}|{_WHAT} ones are {{c}}|{_WHAT} are {{c}}"
        form = (
            f"({_WHAT} {many} are {{c}}|{_WHAT} of the {many} are {{c}}{ones if only_shapes(scene) else ''}|"
            f"(list|name|give me|tell me) (all |)(the |){{c}} {many}|{_WHAT} {{c}} {many} "
            f"(are there|do you see)|what are the {{c}} {many}|"
            f"(list|name|enumerate) the {many} (that are|which are|in) {{c}}|"
            f"{_WHAT} {many} have the {_COLOUR} {{c}}|"
            f"{_WHAT} {many} (are coloured|are painted|are drawn in|come in) {{c}}|{{c}} {many}|"
            f"{_the(_LIST_OF, f'{{c}} {many}')}|{_the(_LIST_OF, f'{many} in {{c}}')}|"
            f"(in|with the {_COLOUR}) {{c}}, which {many} are there|{{c}} is the {_COLOUR} of which {many}|"
            f"for which {many} was {{c}} used|which {many} did I (make|paint|draw in) {{c}})?"
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
        f"{_COLOUR}s of the {{t}}|the {{t}} have (what|which) {_COLOUR}s|the {{t}}(:|,| -) (what|which) "
        f"{_COLOUR}s|"
        f"{_COLOUR}s of the {{t}} =|(what|which) {_COLOUR}s did (I|they) (use|pick|take) for the {{t}}|"
        f"in (what|which) {_COLOUR}s did I draw the {{t}}|{_TELL} (what|which) {_COLOUR}s the {{t}} (are|"
        f"have).|"
        f"the {{t}} were drawn in (what|which) {_COLOUR}s|(what|which) {_COLOUR}s were used for the {{t}}|"
        f"I (need|want) the {_COLOUR}s of the {{t}}.|{{t}}(:| -) {_COLOUR}s|{_SO} what {_COLOUR}s are the "
        f"{{t}}|"
        f"what are they, the {_COLOUR}s of the {{t}}|what {_COLOUR}s the {{t}} have|"
        f"I drew {{t}}. In (what|which) {_COLOUR}s|how are the {{t}} coloured)?"
    )
    return pose("list", rng, form, ", ".join(said), t=plural(name))


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


def _colours(scene: Scene, rng: random.Random) -> QA | None:
    """How many colours there are, and which; which is the most frequent."""
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
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
            "number of (colours|colors)|count the (colours|colors)|"
            f"{_the(_COUNT_OF.replace('draw|make|put there', 'use|take'), '(different |){t}')})?"
        ).replace("{t}", f"{_COLOUR}s")
        form = form.replace("I drew", "I used").replace("(were|have been) drawn", "were used")
        form = form.replace("did I draw", "did I use").replace("was drawn", "was used")
        if of_shapes:
            form = (
                f"(how many (different |distinct |)(colours|colors) {used}|the {many}: how many {_COLOUR}s|"
                f"how many {_COLOUR}s did I (use|take) for the {many}|the {many} have how many {_COLOUR}s|"
                f"{_TELL} how many {_COLOUR}s the {many} have.|number of {_COLOUR}s of the {many}|"
                f"how many {_COLOUR}s were used for the {many}|in how many {_COLOUR}s are the {many})?"
            )
        return pose("count", rng, form, str(len(said)))
    if which < 0.72:
        form = (
            f"({_WHAT} (colours|colors) {used}|{_WHAT} (colours|colors)|(list|name|tell me|"
            f"give me) (all |)(the |)(colours|colors)( used|{_HERE}|)|{_COLOUR}s(:|, which| -) |{_COLOUR}s =|"
            f"(what|which) {_COLOUR}s did (I|they|someone) (use|take|pick)|{_TELL} (what|which) {_COLOUR}s "
            f"(there "
            f"are|I used|you see).|(what|which) {_COLOUR}s were used|I used (what|which) {_COLOUR}s|"
            f"I (want|need) (a list of |)all the {_COLOUR}s.|there are (what|which) {_COLOUR}s|"
            f"all {_COLOUR}s, as a list|which are the {_COLOUR}s|what are they, the {_COLOUR}s|"
            f"{_COLOUR}s, name them all|what all {_COLOUR}s are there|list of {_COLOUR}s)?"
        )
        if of_shapes:
            form = (
                f"({_WHAT} (colours|colors) {used}|(list|name) the (colours|colors) of the {many}|"
                f"the {many}: (what|which) {_COLOUR}s|(what|which) {_COLOUR}s did I use for the {many}|"
                f"{_TELL} what {_COLOUR}s the {many} have.|{_COLOUR}s of the {many}|"
                f"the {many} have (what|which) {_COLOUR}s|in what {_COLOUR}s did I draw the {many}|"
                f"what {_COLOUR}s were used for the {many})?"
            )
        return pose("list", rng, form, ", ".join(said))
    most = counts.most_common(2)
    kinds = Counter(t.name for t in shapes).most_common(2)
    if which < 0.87 and len(most) > 1 and (winner := most_used(scene)):
        chief = "|dominant" if winner[1] else ""
        main = "|dominant|main" if winner[1] else ""
        form = (
            f"({_WHAT} {_COLOUR} is (the |)(most common|most frequent{chief}|used most)|"
            f"(what is|what's) the (most common|most frequent{main}) {_COLOUR}|"
            f"{_WHAT} {_COLOUR} (appears|occurs|is used|do you see) (most|most often|the "
            f"most)|most common {_COLOUR}|what {_COLOUR} did I use (most|most often)|most used {_COLOUR}|"
            f"{_TELL} (what|which) {_COLOUR} is (used most|the most common).|most common {_COLOUR} =|"
            f"the {_COLOUR} used most(:|,) which is it|which {_COLOUR} was used most|the most common "
            f"{_COLOUR} "
            f"is (what|which)|(name|give) the most common {_COLOUR}.|of which {_COLOUR} are there the most "
            f"shapes|"
            f"what is it, the most frequent {_COLOUR}|"
            f"which {_COLOUR} has the most shapes|which {_COLOUR} wins, by number of shapes)?"
        )
        return pose("colour", rng, form, winner[0])
    if len(kinds) > 1 and kinds[0][1] > kinds[1][1]:
        form = (
            f"({_WHAT} shape is (the |)(most common|most frequent)|(what is|what's) the "
            "(most common|most frequent) (shape|kind of shape)|"
            f"{_WHAT} shape (appears|occurs|is drawn|do you see) (most|most often|the "
            "most)|of which shape are there the most|most common shape|which shape did I draw most often|"
            f"{_TELL} which shape (is the most common|there is most of).|most common shape =|"
            "the shape drawn most often(:|,) which is it|which shape was drawn most|the most common shape is "
            "(what|which one)|(name|give) the most common shape.|what is it, the most frequent shape|"
            "which shape has the highest count|which shape wins, by number|which shape is there most of|"
            "what do we have the most of, which shape)?"
        )
        return pose("shape", rng, form, kinds[0][0])
    return None


def _how_many_kinds(scene: Scene, rng: random.Random) -> QA | None:
    names = tally(scene)[0]
    if not names:
        return None
    form = (
        "(how many (different|kinds of|types of|sorts of|distinct|different kinds of|"
        f"different types of) shapes {_SEE}|how many (different |)(shape types|kinds of "
        f"shapes)|{_the(_COUNT_OF, '((different |)kinds of shapes|types of shapes|different shapes)')})?"
    )
    return pose("count", rng, form, str(len(names)))


# ------------------------------------------------------------------------------------------------- places
_SIDES = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}
_PUT = {
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


def _beside(scene: Scene, thing: Thing, side: str, among: Sequence[Thing]) -> Thing | None:
    """The one of these that lies to that side of a thing: nearly straight, and no other as near or nearer."""
    axis, sign = _SIDES[side]
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


def _empty(scene: Scene, thing: Thing, side: str) -> bool:
    """Whether nothing at all lies to that side."""
    axis, sign = _SIDES[side]
    return all(sign * apart(t, thing, scene)[axis] < 0.04 for t in scene.things if t is not thing)


def _next_to(scene: Scene, thing: Thing, clearly: float = 1.2) -> Thing | None:
    """The clearly nearest thing: any other is so many times as far."""
    others = [t for t in scene.things if t is not thing]
    ranked = sorted((math.hypot(*apart(t, thing, scene)), i) for i, t in enumerate(others))
    gaps = sorted((_gap(scene, thing, t), i) for i, t in enumerate(others))
    if not ranked or ranked[0][1] != gaps[0][1]:
        return None
    if len(ranked) > 1 and ranked[1][0] < clearly * ranked[0][0]:
        return None
    return others[ranked[0][1]]


def _close(scene: Scene, one: Thing, two: Thing) -> bool:
    """Whether two is not only nearest to one, but near it, and nothing else is."""
    return _next_to(scene, one, 1.6) is two and _gap(scene, one, two) < 0.15


def _gap(scene: Scene, one: Thing, two: Thing) -> float:
    """How far apart the boxes of two things are, in shorter sides of the image."""
    a, b = bounds(scene, one), bounds(scene, two)
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
AXES = {"left": (0, -1), "right": (0, 1), "top": (1, -1), "bottom": (1, 1)}


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


_BIG = "(biggest|largest|biggest|largest|greatest)"
_SMALL = "(smallest|smallest|tiniest|littlest)"


def referents(scene: Scene, rng: random.Random) -> Iterator[tuple[Thing, str]]:
    """(a shape, a phrase that means it by its place or size, with "shape" for its name), in no order."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    noun = "one" if rng.random() < 0.1 and only_shapes(scene) else noun
    for side in rng.sample(list(AXES), 4):
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
            close = ("next to", "beside") if _close(scene, thing, nearest) else ()
            put = rng.choice(("nearest to", "closest to", "nearest", *close))
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
            f"{{t}} is (what|which) {_COLOUR}|{_COLOUR} of {{t}}|in (what|which) {_COLOUR} is {{t}}|"
            f"{_COLOUR_OF})?"
        )
        return pose("colour", rng, form, thing.colour, t=phrase)
    if which < 0.62:
        form = (
            f"({_WHAT} shape is {{t}}|(what is|what's) the shape of {{t}}|{_WHAT} (kind|type|"
            f"sort) of shape is {{t}}|{_WHAT} shape does {{t}} have|{{t}} is (what|which) "
            f"shape|tell me the shape of {{t}}|{_SHAPE_OF})?"
        )
        return pose("shape", rng, form, thing.name, t=phrase)
    if which < 0.78:
        form = (
            "((what is|what's|what do you call|name|describe|tell me what is) {t}|{t}(:|,| -) what is it|"
            f"{{t}} is what|{_TELL} what {{t}} is.|what did I draw as {{t}}|{{t}} =|what is it, {{t}}|"
            f"(identify|describe|name|report) {{t}}.|I (drew|see) {{t}}. What is it|{_SO} what is {{t}}|"
            "what would you call {t}|what have we got as {t}|look at {t}. What is it|as what was {t} drawn|"
            "it is what, {t}|what can one call {t})?"
        )
        return pose("list", rng, form, name_of(thing), (thing,), t=phrase)
    if which < 0.9:
        said = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
        form = (
            "(is {t} {c}|is {t} {c} in colour|{t} is {c}, (right|correct|isn't it)|does {t} look {c}|"
            f"{_IS_COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(said == thing.colour), t=phrase, c=said)
    said = thing.name if rng.random() < 0.5 else rng.choice(SHAPES)
    form = (
        f"(is {{t}} {{a}}|{{t}} is {{a}}, (right|correct|isn't it)|would you call {{t}} {{a}}|{_IS_SHAPE})?"
    )
    return pose("exists", rng, form, yes_no(said == thing.name), t=phrase, a=with_article(said))


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
                form = (
                    f"(how many shapes are {_PUT[side]}|count the shapes {_PUT[side]}|"
                    f"{_the(_COUNT_OF, f'shapes {_PUT[side]}')}|{_PUT[side]}(:|,) how many shapes( are "
                    f"there|)|"
                    f"{_PUT[side]} there are how many shapes|how many shapes (lie|did I draw|are to be "
                    f"found) "
                    f"{_PUT[side]})?"
                )
                return pose("count", rng, form, str(len(found)), b=phrase)
            form = (
                f"({_WHAT} shapes (are|lie) {_PUT[side]}|(list|name) (all |)(the |)shapes "
                f"{_PUT[side]}|what are the shapes {_PUT[side]}|{_the(_LIST_OF, f'shapes {_PUT[side]}')}|"
                f"{_PUT[side]}(:|,) which shapes( are there|)|{_PUT[side]} there are which shapes|"
                f"which shapes (did I draw|are to be found|can be seen) {_PUT[side]})?"
            )
            return _listed("list", rng, form, found, name_of, b=phrase)
        what = (
            f"({_WHAT} (thing |object |one |)(is|lies|do you see)|what's|what is (there |"
            "located |placed |drawn |))"
        )
        if _empty(scene, thing, side) and rng.random() < 0.3:
            form = (
                f"({what} {_PUT[side]}|{_PUT[side]}(:|,| -) what (is|do you see)|what did I draw "
                f"{_PUT[side]}|"
                f"{_TELL} what is {_PUT[side]}.|what (has been|was) drawn {_PUT[side]}|{_SO} what is "
                f"{_PUT[side]}|"
                f"what (sits|can be seen|have we got|do we have) {_PUT[side]})?"
            )
            return pose("absent", rng, form, ABSENT, b=phrase)
        if other := _beside(scene, thing, side, scene.things):
            of_it = _PUT[side].replace("{b}", "it")
            axis, sign = _SIDES[side]
            there = [t for t in scene.things if sign * apart(t, thing, scene)[axis] > 0 and t is not thing]
            alone = len(there) == 1  # else "the thing above it" may mean another
            at = f"{_WHAT_AT}|{_THING_AT}" if alone else _WHAT_AT
            form = (
                f"({what} {_PUT[side]}|{what} {_PUT[side]}|((name|tell me) (what is|what's"
                f"{'|the thing' if alone else ''}) {_PUT[side]}|{_WHAT} shape is {_PUT[side]}|"
                f"{_the(at, _PUT[side], '{p}')}|"
                f"{_PUT[side]}(:|,) (what|which) shape (is it|is there)|{_TELL} (what|which) shape is "
                f"{_PUT[side]}.|{_WHAT} shape did I draw {_PUT[side]}|"
                f"{{b}}(:|,| -) what is {of_it}|{{b}} has what {of_it}|look at {{b}}. What is {of_it}))?"
            )
            qa = pose("list", rng, form, name_of(other), (other,), b=phrase)
            asks_shape = _asks_shape(qa.question)
            if asks_shape and other.kind != "shape":
                return None
            return Computed("shape", qa.question, other.name) if asks_shape else qa
    return None


def _near_or_between(scene: Scene, rng: random.Random) -> QA | None:
    what = f"({_WHAT} (thing |object |shape |one |)is|what's|what do you see|what lies)"
    if rng.random() < 0.45 and (found := _between(scene, rng)):
        a, thing, b = found
        if thing.kind != "shape":
            what = "(what is|what's|what do you see|what lies)"
        put = "(between|in between|in the middle of) the {a} and (the |){b}"
        more = (
            f"{_WHAT_AT}|{_THING_AT}|{{p}}, (what|which) shape is it" if thing.kind == "shape" else _WHAT_AT
        )
        form = (
            f"({what} {put}|({_the(more, put, '{p}')}|the {{a}} and the {{b}}(:|,) what (is|"
            f"lies|stands) "
            "between them|the {a} and the {b} have what between them|from the {a} to the {b}, what lies "
            "between))?"
        )
        return one_of(rng, form, thing, a=_short(a, scene), b=_short(b, scene))
    known = [(t, ps, near) for t, ps in unique_phrases(scene) if (near := _next_to(scene, t))]
    if len(scene.things) < 3 or not known:
        return None
    thing, phrases, near = rng.choice(known)
    if near.kind != "shape":
        what = "(what is|what's|what do you see|what lies)"
    close = _close(scene, thing, near)
    beside = "|next to|beside|right next to|near|close to" if close else ""
    put = f"(nearest to|closest to|nearest{beside}) the {{b}}"
    more = f"{_WHAT_AT}|{_THING_AT}|{{p}}, (what|which) shape is it" if near.kind == "shape" else _WHAT_AT
    its = (
        "|the {b}(:|,| -) what is next to it|the {b} has what (next to|beside) it|what does the {b} have "
        "(next to|beside) it|what is the neighbour of the {b}|the {b}'s neighbour is what|"
        "look at the {b}. What is next to it"
    )
    form = (
        f"({what} {put}|({_the(more, put, '{p}')}|the {{b}}(:|,| -) what is (nearest|closest) to it|"
        "what is the nearest neighbour of the {b}|the {b}'s nearest neighbour is what|"
        f"look at the {{b}}. What is closest to it{its if close else ''}))?"
    )
    return one_of(rng, form, near, b=rng.choice(phrases))


def one_of(rng: random.Random, form: str, thing: Thing, **slots) -> QA:
    """A question for one thing: its name alone where a shape is asked for, else its colour too."""
    qa = pose("list", rng, form, name_of(thing), (thing,), **slots)
    if _asks_shape(qa.question):
        return Computed("shape", qa.question, thing.name)
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
            if said in _CORNERS and place != said and set(place.split()) & set(said.split()):
                right, low = _CORNERS[said]
                if (thing.x > 0.5) == bool(right) and (thing.y > 0.5) == bool(low):
                    return None  # at the top, and left of the middle: a person may call it top left
            phrase = rng.choice(phrases)
            at = _CORNER_WORDS[said]
            form = (
                f"(is the {{t}} in the {_CORNER_WORDS[said]}|can the {{t}} be found in the "
                f"{_CORNER_WORDS[said]}|is there {{a}} in the {_CORNER_WORDS[said]}|did I (draw|put) the "
                f"{{t}} "
                f"in the {at}|the {{t}}(:|,| -) {at}{_TAG}|the {{t}} is in the {at}{_TAG}|{_IF} the {{t}} "
                f"is in "
                f"the {at}.|{_MIND} the {{t}} is in the {at}{_TRUE}|was the {{t}} (put|drawn|placed) in "
                f"the {at}|"
                f"does the {at} (hold|have|contain|show) the {{t}}|is it the {at} that the {{t}} is in|"
                f"is the {at} (where the {{t}} is|the place of the {{t}})|in the {at}, is there the {{t}}|"
                f"position of the {{t}} = {at}|is what you see in the {at} the {{t}}|{_SO} is the {{t}} in "
                f"the {at})?"
            )
            return pose("exists", rng, form, yes_no(said == place), t=phrase, a=with_article(phrase))
        form = (
            "(in (which|what) (part|area|region) of the (picture|image|drawing) is the {t}|"
            "(which|what) (part|area) of the (picture|image) (is the {t} in|has the {t})|"
            "the {t}(:|,| -) (in |)(which|what) part of the (picture|image)|in (which|what) part of the "
            "(picture|"
            f"image) did I draw the {{t}}|{_TELL} in (which|what) part of the (picture|image) the {{t}} is.|"
            "the {t} is in (which|what) part of the (picture|image)|(which|what) part of the (picture|image) "
            "did I put the {t} in|the {t} (was drawn|has been put) in (which|what) part of the (picture|"
            "image)|"
            "part of the (picture|image) with the {t}|(name|give|state) the part of the image that holds "
            "the {t}.|"
            f"{_SO} (which|what) part of the (picture|image) is the {{t}} in|look for the {{t}}. Which "
            f"part of the "
            "(picture|image) is it in|what part of the image the {t} is in)?"
        )
        if " " in place and rng.random() < 0.7:
            form = (
                "((which|what) corner is the {t} in|in (which|what) corner is the {t}|(which|"
                "what) corner (has|contains|holds) the {t}|the {t} is in (which|what) corner|"
                "the {t}(:|,| -) (in |)(which|what) corner|in (which|what) corner did I (draw|put) the {t}|"
                f"{_TELL} (which|what) corner the {{t}} is in.|corner of the {{t}}|corner with the {{t}} =|"
                "the {t} was (drawn|put|placed) in (which|what) corner|(name|give|state) the corner that "
                "has the "
                f"{{t}}.|{_SO} (which|what) corner is the {{t}} in|look for the {{t}}. Which corner is it in|"
                "what corner the {t} is in|which is the corner where the {t} is|the corner of the {t} is "
                "which|"
                "what is it, the corner that the {t} is in|to (which|what) corner do I look for the {t})?"
            )
        return pose("region", rng, form, place, t=rng.choice(phrases))
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
    at = _CORNER_WORDS[corner]
    if not found:
        form = (
            f"({what} (in|at) the {_CORNER_WORDS[corner]}|is there (anything|something) in the "
            f"{_CORNER_WORDS[corner]}|the {at}(:|,| -) what is (there|in it)|in the {at}, what do you see|"
            f"what did I draw in the {at}|{_TELL} what is in the {at}.|what (sits|can be seen|have we got) "
            f"in "
            f"the {at}|in the {at} there is what|what (was|has been) drawn in the {at}|is there (a|any) "
            f"(thing|"
            f"shape) in the {at}|is there anything drawn in the {at})?"
        )
        qa = pose("absent", rng, form, ABSENT)
        return Computed("exists", qa.question, "no") if qa.question.startswith("Is there") else qa
    if found[0].kind != "shape":
        what = "(what is|what's|what do you see|what is there)"
    more = f"{_WHAT_AT}|{_THING_AT}|{{p}}, (what|which) shape is it" if found[0].kind == "shape" else _WHAT_AT
    form = (
        f"({what} (in|at|in) the {at}|(the {at} (has|shows|contains|holds) what|"
        f"{_the(more, f'in the {at}', '{p}')}|the {at}(:|,| -) what (is there|is in it|do you see)|{at}(:| "
        f"=) what|"
        f"the {at} is (taken|filled|occupied) by what|look at the {at}. What (do you see|is there)|"
        f"what does the {at} (hold|show|have|contain)|by what is the {at} taken))?"
    )
    return one_of(rng, form, found[0])


def clear_region(thing: Thing) -> bool:
    """Whether its centre is far from the lines between the thirds."""
    return all(abs(place - line) > 0.05 for place in (thing.x, thing.y) for line in (1 / 3, 2 / 3))


def _half(scene: Scene, rng: random.Random) -> QA | None:
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
                f"{_TELL} whether the {{t}} is {pair}.|was the {{t}} (drawn|put|placed) {pair}|is it "
                f"{pair}, the "
                f"{{t}}|{pair}(:| -|,) where is the {{t}}|where is the {{t}}(:|,) {pair}|{_SO} is the "
                f"{{t}} {pair}|"
                f"{pair}, the {{t}}|look for the {{t}}. Is it {pair}|the {{t}}, is it {pair}|do you see "
                f"the {{t}} "
                f"{pair})?"
            )
            return pose("region", rng, form, answer, t=rng.choice(phrases))
        form = (
            f"(is the {{t}} {where}|did I (draw|put) the {{t}} {where}|the {{t}} is {where}{_TAG}|the "
            f"{{t}}(:|,| -) "
            f"{where}{_TAG}|{_IF} the {{t}} is {where}.|{_MIND} the {{t}} is {where}{_TRUE}|was the {{t}} "
            f"(drawn|put|"
            f"placed) {where}|do you (see|find) the {{t}} {where}|is it {where} that the {{t}} is|"
            f"can the {{t}} be found {where}|does the {{t}} (lie|sit|stand) {where}|the {{t}} is {where} "
            f"or not|"
            f"does the {half} half (hold|have|contain) the {{t}}|is the {half} half where the {{t}} is|"
            f"{_SO} is the {{t}} {where})?"
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
                f"{_the(_COUNT_OF, f'{many} {where}')})?"
            ),
            str(len(found)),
        )
    return _listed(
        "list",
        rng,
        (
            f"({_WHAT} {many} are {where}|(list|name) the {many} {where}|{where}(:|,) which {many}( are "
            f"there|)|"
            f"{where} there are which {many}|the {half} half has which {many}|which {many} does the {half} "
            f"half "
            f"have|which {many} did I put {where}|{_the(_LIST_OF, f'{many} {where}')})?"
        ),
        found,
        name_of,
    )


def _extreme(scene: Scene, rng: random.Random) -> QA | None:
    """Which lies farthest to a side, of all or of one kind; whether one does; the second from a side."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    side = rng.choice(list(AXES))
    if len(shapes) > 2 and only_shapes(scene) and side in ("left", "right") and rng.random() < 0.2:
        ordered = sorted(shapes, key=lambda t: -AXES[side][1] * t.x)
        gaps = [abs(a.x - b.x) * max(1.0, scene.aspect) for a, b in pairwise(ordered)]
        k = rng.randint(1, min(3, len(ordered) - 1))
        if min(gaps[: k + 1]) < 0.1:
            return None
        put = f"{('second', 'third', 'fourth')[k - 1]} from the {side}"
        form = (
            f"({_WHAT} (shape |one |thing |)is (the |){put}|what's (the |){put}|{put}(:|,| -) what is it|"
            f"{_TELL} (what|which one) is {put}.|the {put} is what|what did I draw {put}|{put} =|"
            f"(which|what) (one|shape|thing) (comes|do you see|stands) {put}|name the {put}.|{_SO} what is "
            f"{put}|"
            f"count from the {side}: what is the {put.split()[0]}|from the {side}, which is the "
            f"{put.split()[0]} "
            f"one|the {put.split()[0]} one from the {side}, what is it|{put}, (what|which) shape is it|"
            f"going from the {side}, what comes {put.split()[0]})?"
        )
        return one_of(rng, form, ordered[k])
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
            f"(what|which) {_COLOUR}|{_the(_COLOUR_OF, f'the {_BEFORE_NOUN[side]} {{t}}')}|"
            f"of all (the |){{t}}s, (what|which) {_COLOUR} is the {_BEFORE_NOUN[side]}( one|))?"
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
        before, most = _BEFORE_NOUN[side], f"the {_BEFORE_NOUN[side]} {noun}"
        bare = (
            f"is the {{t}} (the {before} one|{{s}})|the {{t}}(:|,) {before} or not|is it the {{t}} that is "
            "{s}|does the {t} lie {s}|was the {t} drawn {s}|"
        )
        bare = bare if only_shapes(scene) else ""  # else it may be meant of words, too
        form = (
            f"({bare}is the {{t}} {most}|is the {{t}} {most}|is {most} the {{t}}|the {{t}} is {most}{_TAG}|"
            f"{_IF} the {{t}} is {most}.|{_MIND} the {{t}} is {most}{_TRUE}|{most} = the {{t}}|"
            f"did I draw the {{t}} as {most}|{most}: is it the {{t}}|is it the {{t}} that is {most}|"
            f"of all the {noun}s, is the {{t}} the {before}|{_SO} is the {{t}} {most}|"
            f"has the {{t}} been drawn as {most}|the {{t}}(:|,) {most} or not|was the {{t}} drawn as {most})?"
        )
        said = [w for w in _EXTREMES[side].split("|") if not w.startswith(("on ", "at ", "closest"))]
        lies = rng.choice(said)
        return pose("exists", rng, form, yes_no(thing is found), t=rng.choice(phrases), s=lies)
    lies = rng.choice(_EXTREMES[side].split("|"))
    ones = "|one |of them |" if only_shapes(scene) else ""
    bare = "what did I draw {s}|{s}(:|,) what is it|" if only_shapes(scene) else ""
    most = f"the {_BEFORE_NOUN[side]} {noun}"
    the = "" if lies.startswith(("on ", "at ", "closest")) else rng.choice(("", "the "))
    form = (
        f"({_WHAT} ({noun} {ones}|of the {noun}s )(is|lies) {{s}}|"
        f"{_WHAT} is the {_BEFORE_NOUN[side]} {noun}|(name|tell me) the "
        f"{_BEFORE_NOUN[side]} {noun}|{_WHAT} {noun} (do you see|comes) {{s}}|{{s}}(:|,) which "
        f"{noun} is "
        f"it|{most}(:|,| -) what is it|{most} is (what|which one)|{_TELL} what {most} is.|{_TELL} which "
        f"{noun} is "
        f"{{s}}.|{bare}which {noun} did I (draw|put) {{s}}|{most} =|which {noun} was drawn "
        f"{{s}}|"
        f"of all the {noun}s, which is {{s}}|(identify|report|give) {most}.|which {noun} is it that is {{s}}|"
        f"what is it, {most}|{_SO} which {noun} is {{s}}|which is {{s}} of the {noun}s|look at {most}. "
        f"What is it|"
        f"what have we got as {most})?"
    )
    return one_of(rng, form, found, s=the + lies)


def _size_of_kind(scene: Scene, rng: random.Random) -> QA | None:
    """The biggest or smallest of all, of one colour or of one kind."""
    biggest, noun = rng.random() < 0.5, nouns_for(scene, rng)[0]
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
            f"(what|which) {_COLOUR}|{_COLOUR} of the {most} {{t}}|{_the(_COLOUR_OF, f'the {most} {{t}}')}|"
            f"of (all |)the {plural(name)}, (what|which) {_COLOUR} is the {most}( one|)|"
            f"I drew {plural(name)}. What {_COLOUR} is the {most}( one|))?"
        )
        return pose("colour", rng, form, found.colour, t=name)
    if which < 0.6:
        colour, found = of_one_kind("colour")
        if found is None:
            return None
        form = (
            f"({_WHAT} shape is the {most} {{c}} (one|shape|{noun})|{_WHAT} is the {most} "
            f"{{c}} {noun}|(what is|what's) the {most} {{c}} {noun}|{_WHAT} of the {{c}} "
            f"{noun}s is (the |){most}|{_the(_SHAPE_OF, f'the {most} {{c}} {noun}')}|of (all |)the {{c}} "
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
            f"all{_TAG}|is it the {{t}} that is (the |){most}|{_IF} the {{t}} is the {most}.|did I "
            f"(draw|make) the {{t}} the {most}|was the {{t}} drawn (the |){most}|"
        )
        bare = bare if only_shapes(scene) else ""  # else it may be meant of words, too
        form = (
            f"({bare}is the {{t}} the {most} {noun}|is the {{t}} the {most} of all {noun}s|"
            f"is the {most} {noun} the {{t}}|the {{t}} is the {most} {noun}{_TAG}|the {{t}}(:|,) {most} of "
            f"all {noun}s{_TAG}|is it the {{t}} that is the {most} {noun}|{_IF} the {{t}} is the {most} "
            f"{noun}.|{_MIND} the {{t}} is the {most} {noun}{_TRUE}|{most} {noun} = the {{t}}|"
            f"did I (draw|make) the {{t}} the {most} {noun}|was the {{t}} drawn as the {most} {noun}|"
            f"of all the {noun}s, is the {{t}} the {most}|is no {noun} {than} than the {{t}}|"
            f"{most} {noun}: is it the {{t}}|{_SO} is the {{t}} the {most} {noun}|"
            f"is the {{t}} {than} than all (the |)other {noun}s)?"
        )
        return pose("exists", rng, form, yes_no(thing is found), t=rng.choice(phrases))
    form = (
        f"({_WHAT} ({noun} |of the {noun}s )is (the |){most}|what's the {most} {noun}|"
        f"(name|tell me) the {most} {noun}|{_WHAT} {noun} (looks|seems|appears) {most}|the {most} {noun}(:|"
        f",| -) "
        f"what is it|the {most} {noun} is (what|which one)|{_TELL} which {noun} is (the |){most}.|{most} "
        f"{noun} =|"
        f"which {noun} did I (draw|make) (the |){most}|which {noun} was drawn (the |){most}|of all the "
        f"{noun}s, "
        f"which is (the |){most}|(identify|report|give) the {most} {noun}.|what is it, the {most} {noun}|"
        f"which {noun} is it that is (the |){most}|{_SO} which {noun} is (the |){most}|what is the {noun} "
        f"that is "
        f"{most}|look at the {most} {noun}. What is it|which {noun} is "
        f"{'bigger' if biggest else 'smaller'} than "
        f"all the others|{_TELL} what the {most} {noun} is.)?"
    )
    return one_of(rng, form, found)


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
        form = (
            f"(is the {back} {{c}}|is it on a {{c}} {back}|does the (picture|image) have a {{c}} {back}|"
            f"{_the(_IS_COLOUR, f'the {back}')}|are the shapes (drawn |)on {{c}}|did I draw on {{c}} "
            f"(paper|ground)|"
            f"{{c}} {back}{_TAG}|is {{c}} behind the shapes|is what lies behind the shapes {{c}})?"
        ).replace("a {c}", with_article(other))
        return pose("exists", rng, form, yes_no(other == said), c=other)
    form = (
        f"({_WHAT} {_COLOUR} is the {back}|(what is|what's) the {back} {_COLOUR}|(what is|"
        f"what's) the {_COLOUR} of the {back}|"
        f"{_WHAT} {_COLOUR} (does the {back} have|is behind the shapes)|{back} {_COLOUR}|"
        f"the {back} is (what|which) {_COLOUR}|"
        f"on (what|which) {_COLOUR} are the shapes( drawn|)|{_the(_COLOUR_OF, f'the {back}')}|"
        f"on (what|which) {_COLOUR} did I draw|the shapes are (drawn |)on (what|which) {_COLOUR}|"
        f"what {_COLOUR} do you see behind the shapes|behind the shapes(:|,) (what|which) {_COLOUR})?"
    )
    return pose("ground", rng, form, said)


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
            "the {w}(:|,| -) how many letters|letters in the {w} =|length of the {w}(:| =|)|how many "
            "letters did "
            "I (write|use) in the {w}|how many letters long is the {w}|the {w} has how many letters|"
            f"{_TELL} how many letters (the {{w}} has|there are in the {{w}}|make up the {{w}}).|in the "
            f"{{w}}, how "
            "many letters are there|of how many letters is the {w} made|the {w} is how many letters long|how "
            "many letters long the {w} is|(I need|give me|report) the (length|letter count) of the {w}.|"
            "letter "
            "count of the {w}|I wrote a word. How many letters (has it|does it have)|the {w} is made of "
            "how many "
            "letters|how much letters has the {w}|read the {w}. How many letters does it have|how many "
            "characters (does the {w} have|long is the {w})|what is it, the number of letters in the {w}|"
            "(what is|what's) the (length of the {w}|number of letters in the {w})|how "
            "long is the {w}|count the letters (of|in) the {w}|number of letters in the "
            "{w})?"
        )
        return pose("count", rng, form, str(len(word)), w=noun)
    if which < 0.72:
        first = rng.random() < 0.6
        at = "(first|1st|initial|starting)" if first else "(last|final)"
        starts = "(start|begin)" if first else "end"
        form = (
            f"((what is|what's) the {at} letter (of|in) the {{w}}|{_WHAT} letter (does the {{w}} "
            f"{starts} with|comes {'first' if first else 'last'}( in the {{w}}|))|"
            f"{at} letter of the {{w}}|(tell me|name) the {at} letter( of the {{w}}|)|the "
            f"{{w}} {starts}s with (what|which) letter|with (which|what) letter does the "
            f"{{w}} {starts}|the {{w}}(:|,| -) {at} letter|the {{w}}: (what|which) is its {at} letter|{at} "
            f"letter of "
            f"the {{w}} =|the {at} letter of the {{w}} is (what|which)|{_TELL} (what|which) letter the "
            f"{{w}} {starts}s "
            f"with.|{_NAME} the {at} letter of the {{w}}.|read the {{w}}. What is its {at} letter|what is "
            f"it, the "
            f"{at} letter of the {{w}}|(what|which) letter did I write {'first' if first else 'last'} in "
            f"the {{w}}|"
            f"I (need|want) the {at} letter of the {{w}}.|{_WHAT} letter is {'first' if first else 'last'} "
            f"in the "
            f"{{w}}|(what|which) letter stands at the {'beginning' if first else 'end'} of the {{w}}|"
            f"in the {{w}}, (what|which) letter comes {'first' if first else 'last'}|(what|which) is the "
            f"{{w}}'s {at} "
            f"letter|the {{w}}'s {at} letter|{_SO} what is the {at} letter of the {{w}}|what letter the "
            f"{{w}} {starts}s "
            f"with|letter at the {'beginning' if first else 'end'} of the {{w}})?"
        )
        return pose("letter", rng, form, word[0] if first else word[-1], w=noun)
    if which < 0.86:
        letter = rng.choice((word[0], rng.choice("abcdefghilmnoprstu")))
        form = (
            "(does the {w} (start|begin) with the letter {l}|is {l} the first letter of the {w}|"
            f"the {{w}} (starts|begins) with {{l}}{_TAG}|{_IF} the {{w}} (starts|begins) with {{l}}.|is "
            f"the first "
            f"letter of the {{w}} {{l}}|{_MIND} the {{w}} begins with {{l}}{_TRUE}|first letter of the "
            f"{{w}} = {{l}}|"
            f"is it {{l}} that the {{w}} starts with|did I write a word (with {{l}} at its front|that "
            f"starts with "
            f"{{l}})|the {{w}}(:|,) first letter {{l}}{_TAG}|{{l}}: does the {{w}} start with it|is {{l}} "
            f"at the "
            f"(front|start|beginning) of the {{w}}|{_SO} does the {{w}} start with {{l}}|the {{w}} starts "
            f"with {{l}} "
            "or not|is the letter {l} what the {w} starts with)?"
        )
        written = rng.choice((letter, letter.upper()))
        return pose("exists", rng, form, yes_no(word[0] == letter), w=noun, l=written)
    if rng.random() < 0.5:
        letter = rng.choice((rng.choice(word), rng.choice("abcdefghilmnoprstu")))
        form = (
            "(does the {w} (contain|have) the letter {l}|is the letter {l} in the {w}|is there (a letter|the "
            f"letter) {{l}} in the {{w}}|the {{w}} has the letter {{l}}{_TAG}|{_IF} the {{w}} has the "
            f"letter {{l}}.|"
            f"{_MIND} the letter {{l}} is in the {{w}}{_TRUE}|letter {{l}} in the {{w}}{_TAG}|did I use "
            f"the letter {{l}} "
            f"in the {{w}}|was the letter {{l}} used in the {{w}}|the {{w}}(:|,) is there the letter {{l}} "
            f"in it|"
            "is {l} (one of the letters of|among the letters of) the {w}|do you find the letter {l} in the "
            "{w}|"
            f"can the letter {{l}} be found in the {{w}}|{_SO} is the letter {{l}} in the {{w}}|"
            "do you need the letter {l} to spell the {w}|the letter {l}, does the {w} have it)?"
        )
        return pose(
            "exists", rng, form, yes_no(letter in word), w=noun, l=rng.choice((letter, letter.upper()))
        )
    said = word if rng.random() < 0.5 else rng.choice(("apple", "house", "tree", "cat", "moon", "stone"))
    form = (
        '(is the {w} "{s}"|does (it|the {w}) say "{s}"|is "{s}" written here|does the {w} read "{s}"|'
        f'the {{w}} is "{{s}}"{_TAG}|{_IF} the {{w}} (is|says) "{{s}}".|{_MIND} the {{w}} is "{{s}}"{_TRUE}|'
        f'"{{s}}"(:|,) is that the {{w}}|is "{{s}}" (the {{w}}|what the {{w}} says|what is written)|the '
        f"{{w}}(:|,) "
        f'"{{s}}"{_TAG}|did I write "{{s}}"|was "{{s}}" (written|printed)|{{w}} = "{{s}}"|is it "{{s}}" '
        f"that is "
        f'written|{_SO} is the {{w}} "{{s}}"|I wrote "{{s}}"(, '
        f'didn\'t I|, right|. Is that so)|does it spell "{{s}}"|'
        'can you read "{s}" there|is the {w} {s}|does the {w} say {s})?'
    )
    return pose("exists", rng, form, yes_no(said == word), w=noun, s=said)


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
        return pose(
            "exists",
            rng,
            (
                "(is the {t} {c}|is the {t} written in {c}|is the {t} in {c}|did I write the {t} in {c}|"
                f"was the {{t}} (written|printed) in {{c}}|{_the(_IS_COLOUR, 'the {t}')})?"
            ),
            yes_no(said == thing.colour),
            t=noun,
            c=said,
        )
    form = (
        f"({_WHAT} {_COLOUR} is the {{t}}|(what is|what's) the {_COLOUR} of the {{t}}|{_WHAT} "
        f"{_COLOUR} (is the {{t}} (written|printed) in|does the {{t}} have)|in (what|which) "
        f"{_COLOUR} is the {{t}} (written|printed)|{_COLOUR} of the {{t}}|{{t}} {_COLOUR}|in (what|which) "
        f"{_COLOUR} "
        f"did I write the {{t}}|the {{t}} was (written|printed) in (what|which) {_COLOUR}|"
        f"{_the(_COLOUR_OF, 'the {t}')})?"
    )
    return pose("colour", rng, form, thing.colour, t=noun)


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


_AND = (
    "(and|and|what about|how about|and what about|now|and for|same for|ok, and|then|the same for|"
    "what of|and now|same question for|now for|next:|plus|ok now|and how about|and with|repeat for)"
)
_ALSO = "(and|and|what about|how about|and what about|ok, and|and how about|or maybe|or|or else)"


def _and_the(scene: Scene, rng: random.Random) -> list[QA]:
    """The same of another thing."""
    names, colours, _ = tally(scene)
    if rng.random() < 0.55:
        alone = [(t.name, t.colour) for t in scene.shapes() if names[t.name] == 1]
        family = "colour"
        form = (
            f"({_WHAT} {_COLOUR} is the {{t}}|{_WHAT} {_COLOUR} is the {{t}}|{_the(_COLOUR_OF, 'the {t}')})?"
        )
        if rng.random() < 0.3:
            noun = "(one|shape)" if only_shapes(scene) else "shape"
            alone = [(f"{t.colour} {noun}", t.name) for t in scene.shapes() if colours[t.colour] == 1]
            family = "shape"
            form = f"({_WHAT} shape is the {{t}}|what is the {{t}}|{_the(_SHAPE_OF, 'the {t}')})?"
        else:
            kinds = Counter(t.kind for t in scene.things)
            alone += [(t.kind, t.colour) for t in scene.things if t.kind != "shape" and kinds[t.kind] == 1]
    else:
        family, form = "count", f"(how many {{t}} (are there|do you see)|count the {{t}}|{_COUNT_OF})?"
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
        f"((is there|do you see|can you see|did I draw|have we got|was there) {{t}}|{_IF} there is {{t}}.|"
        f"there is {{t}}{_TAG}|{{t}}, (is it there|is there one|yes or no)|{_MIND} there is {{t}}{_TRUE}|"
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
                    f"{{t}}, too|{{t}}, maybe|{{t}} then|and is {{t}} there|and {_IF} there is {{t}}.)?"
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
        form = f"(how many {{t}} {_SEE}|how many {{t}} {_SEE}|{_COUNT_OF})?"
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
                f"of them did I draw in {{c}}|{_TELL} how many of them are {{c}}.|{{c}} ones(:| -|,) how "
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
                f"({_WHAT} {_COLOUR}s (are they|do they have)|and their (colours|colors)|{_WHAT} {_COLOUR}s|"
                f"{_TELL} (what|which) {_COLOUR}s they (are|have).|their {_COLOUR}s|in (what|which) "
                f"{_COLOUR}s|"
                f"(list|name|give) their {_COLOUR}s.|and in what {_COLOUR}s did I draw them|{_COLOUR}s|"
                f"they are (what|which) {_COLOUR}s|and the {_COLOUR}s|(what|which) {_COLOUR}s were used "
                f"for them|"
                f"what are their {_COLOUR}s|of (what|which) {_COLOUR}s are they|{_COLOUR}s of them)?"
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
        f"(how many {{c}} shapes {_SEE}|how many shapes are {{c}}|{_the(_COUNT_OF, '{c} shapes')})?",
        str(len(them)),
        c=colour,
    )
    return [
        first,
        _listed(
            "list",
            rng,
            (
                f"({_WHAT} (ones|ones are they|shapes|are they)|which|name them|list them|what are "
                "they|and which are they|which of the shapes|enumerate them|say which|tell me which|"
                f"{_TELL} which ones (they are|those are).|and what shapes are they|they are which (ones|"
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
    form = f"({_WHAT} {_COLOUR} is the {at} {{t}}|{_the(_COLOUR_OF, f'the {at} {{t}}')})?"
    first = pose("colour", rng, form, found.colour, t=name)
    return [
        first,
        pose(
            "colour",
            rng,
            (
                f"({_AND} the other( one| {{t}}|)|{_WHAT} {_COLOUR} is the other( one| {{t}}|)|the other one|"
                f"the second one|and the second {{t}}|and that of the other( one|)|"
                f"{_the(_COLOUR_OF, 'the other (one|{t})')})?"
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
        first = pose("colour", rng, f"({_WHAT} {_COLOUR} is {{t}}|{_COLOUR_OF})?", thing.colour, t=phrase)
        second = pose(
            "shape",
            rng,
            (
                f"({_WHAT} shape is it|and (its|the) shape|what is it|and what is it|what shape|its shape|"
                f"shape|"
                f"{_TELL} (what|which) shape it (is|has).|(name|give|state) its shape.|it has (what|which) "
                f"shape|"
                "and what shape did I draw|and which shape (does it have|is that)|what is its shape|of "
                "what shape "
                f"is it|and the form|shape of it|what shape it is|it is which shape|{_SO} what shape is it)?"
            ),
            thing.name,
        )
    else:
        first = pose("shape", rng, f"((what|which) shape is {{t}}|{_SHAPE_OF})?", thing.name, t=phrase)
        second = pose(
            "colour",
            rng,
            (
                f"({_WHAT} {_COLOUR} is it|and (its|the) {_COLOUR}|{_WHAT} {_COLOUR} does it have|"
                f"{_COLOUR}|its "
                f"{_COLOUR}|{_TELL} (what|which) {_COLOUR} it (is|has).|(name|give|state) its {_COLOUR}.|"
                f"it has (what|which) {_COLOUR}|in what {_COLOUR} did I draw it|and in (what|which) "
                f"{_COLOUR}|"
                f"what is its {_COLOUR}|of what {_COLOUR} is it|{_COLOUR} of it|what {_COLOUR} it is|it is "
                f"(what|which) {_COLOUR}|and what {_COLOUR} did I use|how is it coloured|{_SO} what "
                f"{_COLOUR} is it)?"
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
                        f"(is it {word} than the {{b}}|it is {word} than the {{b}}{_TAG}|and is it {word} "
                        f"than the "
                        f"{{b}}|{_IF} it is {word} than the {{b}}.|{_MIND} it is {word} than the "
                        f"{{b}}{_TRUE}|"
                        f"{word} than the {{b}}{_TAG}|compared with the {{b}}, is it {word}|did I draw it "
                        f"{word} than "
                        f"the {{b}}|was it drawn {word} than the {{b}}|{_SO} is it {word} than the {{b}})?"
                    ),
                    yes_no((ratio > 1) == bigger),
                    b=rng.choice(phrases),
                ),
            ]
        across, _ = apart(thing, other, scene)
        if abs(across) > 0.15:
            left = rng.random() < 0.5
            put = _PUT["left" if left else "right"]
            return [
                first,
                pose(
                    "position",
                    rng,
                    (
                        f"(is it {put}|it is {put}{_TAG}|and is it {put}|{_IF} it is {put}.|{_MIND} it is "
                        f"{put}{_TRUE}|"
                        f"{put}{_TAG}|did I (draw|put) it {put}|was it (drawn|placed) {put}|does it (lie|"
                        f"stand|sit) "
                        f"{put}|do you see it {put}|{_SO} is it {put}|seen from {{b}}, is it on the "
                        f"{'left' if left else 'right'})?"
                    ),
                    yes_no((across < 0) == left),
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
            f"({_WHAT} {noun} (has|shows|contains) {{a}}({pair}|)|in which {noun} is {{a}}|"
            f"is {{a}} in the first or (in |)the second {noun}|"
            f"{_WHAT} one (has|shows) {{a}}({pair}|)|where is {{a}}, in the first or (in |"
            f")the second {noun}|which of the (two |){noun}s (has|shows) {{a}}|{{a}}(:|,| -) (which|what) "
            f"{noun}|"
            f"{{a}} is in (which|what) {noun}|in which {noun} did I draw {{a}}|{_TELL} which {noun} has "
            f"{{a}}|"
            f"{noun} with {{a}}|first or second {noun}(:|,) where is {{a}}|the {noun} with {{a}}(:|,) "
            f"which is it|"
            f"which {noun} is it that (has|shows) {{a}}|in which of the (two |){noun}s can {{a}} be seen|"
            f"{{a}}(:|,) (in the |)first or (in the |)second {noun}|{_SO} which {noun} has {{a}}|which is "
            f"the {noun} "
            f"with {{a}}|of the two {noun}s, which has {{a}}|do I find {{a}} in the first or in the second "
            f"{noun})?"
        )
        return Computed(
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
            f"(which|what) of the (two |){noun}s has {sign} {{t}}|{sign} {{t}}(:|,| -) which {noun}|in "
            f"which {noun} did "
            f"I draw {sign} {{t}}|{_TELL} which {noun} has {sign} {{t}}|{noun} with {sign} {{t}}|the "
            f"{noun} with {sign} "
            f"{{t}} is which|first or second {noun}(:|,) where are there {sign} {{t}}|in which {noun} are "
            f"there {sign} "
            f"{{t}}|which {noun} is it that has {sign} {{t}}|in which of the two can {sign} {{t}} be seen|"
            f"{_SO} which {noun} has {sign} {{t}}|of the two {noun}s, which has {sign} {{t}}|does the "
            f"first or the "
            f"second {noun} have {sign} {{t}}|compare the {noun}s: which has {sign} {{t}})?"
        )
        return Computed(
            "compare", capital(say(form, rng, t=plural(phrase))), answer, (f"the {answer} {noun}",)
        )
    if which < 0.9:
        form = (
            f"(do both {noun}s (have|show|contain) {{a}}|is there {{a}} in both {noun}s|is "
            f"{{a}} in both|do you see {{a}} in both {noun}s|did I draw {{a}} in both {noun}s|{{a}} in "
            f"both {noun}s"
            f"{_TAG}|both {noun}s (have|show) {{a}}{_TAG}|{_IF} there is {{a}} in both {noun}s|{_MIND} "
            f"both {noun}s "
            f"have {{a}}{_TRUE}|does each {noun} have {{a}}|does the first {noun} as well as the second "
            f"have {{a}}|"
            f"can {{a}} be seen in both {noun}s|is {{a}} in the first {noun} and in the second one, too|"
            f"{_SO} is {{a}} in both {noun}s|{{a}}(:|,) in both {noun}s|was {{a}} drawn in both {noun}s)?"
        )
        return Computed("compare", capital(say(form, rng, a=with_article(phrase))), yes_no(all(counts)))
    form = (
        f"(does (either|any) {noun} (have|show) {{a}}|is there {{a}} in (either|any) of the {noun}s|did I "
        f"draw {{a}} "
        f"in (either|any) of the {noun}s|{{a}} in any of the {noun}s{_TAG}|at least one {noun} has "
        f"{{a}}{_TAG}|"
        f"{_IF} any {noun} has {{a}}|does at least one of the {noun}s have {{a}}|can {{a}} be seen in "
        f"(either|any) "
        f"{noun}|was {{a}} drawn in any {noun}|{_MIND} some {noun} has {{a}}{_TRUE}|is {{a}} anywhere in the "
        f"two {noun}s|{_SO} is {{a}} in any of the {noun}s|{{a}}(:|,) in any of the {noun}s)?"
    )
    return Computed("compare", capital(say(form, rng, a=with_article(phrase))), yes_no(any(counts)))
