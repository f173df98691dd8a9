"""Questions that strangers ask of a drawing beside those of `questions`: about none and any, whether a thing
has a colour, lists without places, answers as short JSON, two images at once."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from recipes.world.grammar import with_article
from recipes.world.scene import REFUSAL, Thing
from shapes.questions import NUMBER_WORDS, ask, plural, reading_order, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

_READ = ("Read the {c} word.", "What does the {c} word say?")
_Asker = Callable[[Scene, random.Random], QA | None]


def ask_more(scene: Scene, rng: random.Random, count: int) -> list[QA]:
    """Up to `count` of these questions, each of another kind."""
    found: list[QA] = []
    for asker in rng.sample(_ASKERS, len(_ASKERS)):
        qa = asker(scene, rng) if len(found) < count else None
        found += [qa] if qa is not None else []
    return found


def ask_words(scene, rng) -> list[QA]:
    """What each word says that is the only one of its colour."""
    words = [t for t in scene.things if t.kind == "word"]
    colours = Counter(t.colour for t in words)
    return [
        QA("list", rng.choice(_READ).format(c=t.colour), t.name, things=(t,))
        for t in words
        if colours[t.colour] == 1
    ]


def _named(things: list[Thing]) -> str:
    return ", ".join(f"{t.colour} {t.name}" for t in things)


def _any_phrase(scene: Scene, rng: random.Random) -> tuple[str, int]:
    """A phrase for shapes (one of them) and how many there are: none as often as some."""
    names, colours, pairs = tally(scene)
    phrases = [(name, names[name]) for name in SHAPES]
    phrases += [(f"{colour} shape", colours[colour]) for colour in COLOURS]
    phrases += [(f"{c} {n}", pairs[c, n]) for c in (colours or COLOURS) for n in (names or SHAPES)]
    wanted = rng.random() < 0.5
    fitting = [one for one in phrases if bool(one[1]) == wanted]
    return rng.choice(fitting or phrases)


def count_any(scene: Scene, rng: random.Random) -> QA:
    """How many there are of what is there or is not: mostly one or none, where `ask` prefers high counts."""
    phrase, count = _any_phrase(scene, rng)
    phrase = phrase if scene.shapes() or rng.random() < 0.5 else "shape"
    form = rng.choice((
        "How many {t} are there?", "How many {t} can you see?", "Count the {t}.",
        "What is the number of {t}?", "How many {t} do you see?", "How many {t} are in the picture?",
    ))  # fmt: skip
    accept = (NUMBER_WORDS[count],) if count else ("zero", "none")
    return QA("count", form.format(t=plural(phrase)), str(count), accept)


def count_all(scene, rng):
    """Of objects, where nothing but shapes could be one; of words, digits, colours or kinds of shape."""
    shapes, words = scene.shapes(), [t for t in scene.things if t.kind == "word"]
    names, colours, _ = tally(scene)
    which = rng.choice(("objects", "objects", "words", "digits", "colours", "kinds"))
    if which == "objects":
        if len(shapes) < len(scene.things):
            return None
        noun = rng.choice(("objects", "objects", "things", "figures", "items", "elements"))
        form = rng.choice((
            "How many {t} are there?", "How many {t} do you see?", "How many {t} are in the image?",
            "Count the {t}.", "How many {t} can you see in total?", "What is the total number of {t}?",
        ))  # fmt: skip
        count, question = len(shapes), form.format(t=noun)
    elif which in ("words", "digits"):
        count = len(words) if which == "words" else len(scene.things) - len(shapes) - len(words)
        question = rng.choice(("How many {t} are there?", "How many {t} do you see?", "Count the {t}."))
        question = question.format(t=which)
    elif not shapes or len(shapes) < len(scene.things):
        return None
    elif which == "colours":
        noun = rng.choice(("colours", "colors", "different colours", "different colors"))
        count = len(colours)
        question = rng.choice(("How many {t} are there?", "How many {t} do you see?")).format(t=noun)
    else:
        noun = rng.choice(("kinds of shape", "types of shape", "different shapes", "kinds of shapes"))
        count, question = len(names), f"How many {noun} are there?"
    return QA("count", question, str(count), (NUMBER_WORDS[count],))


def _any(scene, rng):
    """Whether there are any."""
    if rng.random() < 0.12:
        phrase, count = "shape", len(scene.shapes())
    else:
        phrase, count = _any_phrase(scene, rng)
    form = rng.choice((
        "Are there any {p}?", "Are there any {p}?", "Are there {p}?", "Is there any {t}?", "Any {p}?",
        "Do you see any {p}?", "Can you see any {p}?", "Does the picture have any {p}?",
        "Are there any {p} in the image?", "Can you find {a} here?", "Can you find {a}?",
        "Do you find {a}?", "Does it have {a}?", "Does the image have {a}?", "Could you find {a}?",
        "Is at least one {t} there?", "Have you found {a}?", "Is {a} visible?", "Is {a} present?",
        "Is {a} shown?", "Is there {a} anywhere?", "Does this contain {a}?", "Is {a} drawn here?",
    ))  # fmt: skip
    question = form.format(p=plural(phrase), t=phrase, a=with_article(phrase))
    return QA("exists", question, "yes" if count else "no")


def _list_shapes(scene, rng):
    shapes = reading_order(scene.shapes())
    if not shapes:
        return None
    form = rng.choice((
        "What shapes are there?", "Which shapes are there?", "List the shapes.", "List all shapes.",
        "List all the shapes.", "What shapes do you see?", "Which shapes can you see?", "Name the shapes.",
        "Name all shapes.", "What shapes are in the picture?", "What shapes are shown?",
        "Which shapes does the image show?", "Tell me the shapes.", "What are the shapes?",
        "What shapes can you see?", "Enumerate the shapes.", "Give me a list of the shapes.",
    ))  # fmt: skip
    return QA("list", form, _named(shapes), things=tuple(shapes))


def _list_colours(scene, rng):
    shapes = reading_order(scene.shapes())
    if not shapes or len(shapes) < len(scene.things):
        return None
    form = rng.choice((
        "What colours are there?", "What colors are there?", "Which colours do you see?", "List the colours.",
        "What colors do you see?", "Which colors are used?", "Name the colours.", "List the colors.",
        "What are the colours?", "Which colours are in the picture?", "What colors are in the image?",
    ))  # fmt: skip
    return QA("list", form, ", ".join(dict.fromkeys(t.colour for t in shapes)))


def _is_it(scene, rng):
    """Whether the star is red, or whether it is red or blue; whether the red shape is a star."""
    names, colours, _ = tally(scene)
    shapes = scene.shapes()
    alone = [(t, t.name, "colour") for t in shapes if names[t.name] == 1]
    alone += [(t, f"{t.colour} shape", "name") for t in shapes if colours[t.colour] == 1]
    if not alone:
        return None
    thing, phrase, asked = rng.choice(alone)
    truth = getattr(thing, asked)
    other = rng.choice([one for one in (COLOURS if asked == "colour" else SHAPES) if one != truth])
    say = str if asked == "colour" else with_article
    if rng.random() < 0.3:
        pair = [truth, other] if rng.random() < 0.5 else [other, truth]
        family = "colour" if asked == "colour" else "shape"
        return QA(family, f"Is the {phrase} {say(pair[0])} or {say(pair[1])}?", truth)
    answer = rng.choice(("yes", "no"))
    said = say(truth if answer == "yes" else other)
    form = rng.choice(("Is the {t} {s}?", "Is the {t} {s}?", "Would you say the {t} is {s}?"))
    return QA("exists", form.format(t=phrase, s=said), answer)


def _shape_of_colour(scene, rng):
    """What the only shape of a colour is."""
    _, colours, _ = tally(scene)
    alone = [t for t in scene.shapes() if colours[t.colour] == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    form = rng.choice((
        "What is the {c} shape?", "What is the shape of the {c} thing?", "What is the {c} thing?",
        "What is the shape of the {c} object?", "What {c} shape is there?", "Which {c} shape do you see?",
    ))  # fmt: skip
    return QA("shape", form.format(c=thing.colour), thing.name)


def _are_all(scene, rng):
    """Whether all shapes have one colour, or one shape."""
    names, colours, _ = tally(scene)
    if len(scene.shapes()) < 2:
        return None
    if rng.random() < 0.5:
        said = rng.choice(list(colours))
        return QA("exists", f"Are all shapes {said}?", "yes" if len(colours) == 1 else "no")
    said = rng.choice(list(names))
    return QA("exists", f"Are all shapes {plural(said)}?", "yes" if len(names) == 1 else "no")


def _colour_of_all(scene, rng):
    """The colour of shapes of one kind that all have the same."""
    names, _, pairs = tally(scene)
    alike = [(name, colour) for (colour, name), count in pairs.items() if count == names[name] > 1]
    if not alike:
        return None
    name, colour = rng.choice(alike)
    form = rng.choice(("What colour are the {t}?", "What color are the {t}?", "Which colour are the {t}?"))
    return QA("colour", form.format(t=plural(name)), colour)


_FARTHEST = {
    "leftmost": (0, -1), "rightmost": (0, 1), "topmost": (1, -1), "bottommost": (1, 1), "highest": (1, -1),
    "lowest": (1, 1),
}  # fmt: skip


def _farthest(scene, rng):
    """The shape or the colour of what lies farthest to one side, clearly."""
    shapes = scene.shapes()
    if len(shapes) < 2:
        return None
    said = rng.choice(list(_FARTHEST))
    axis, sign = _FARTHEST[said]
    long = max(1.0, scene.aspect) if axis == 0 else max(1.0, 1 / scene.aspect)
    ordered = sorted(shapes, key=lambda t: -sign * (t.y if axis else t.x))
    places = [(t.y if axis else t.x) * long for t in ordered[:2]]
    if abs(places[0] - places[1]) < 0.1:
        return None
    if rng.random() < 0.5:
        form = rng.choice(("What colour is the {s} shape?", "What color is the {s} shape?"))
        return QA("colour", form.format(s=said), ordered[0].colour)
    form = rng.choice(("What is the {s} shape?", "Which shape is the {s}?", "What shape is the {s} one?"))
    return QA("shape", form.format(s=said), ordered[0].name)


def _any_text(scene, rng):
    """Whether anything is written, where no digit makes that doubtful."""
    if scene.first("digit"):
        return None
    form = rng.choice((
        "Is there any text?", "Is there text in the image?", "Is anything written?", "Are there any words?",
        "Is there any writing?", "Does the picture have text?", "Is a word written here?",
    ))  # fmt: skip
    return QA("exists", form, "yes" if scene.first("word") else "no")


def _any_digit(scene, rng):
    form = rng.choice(("Is there any digit?", "Are there any digits?", "Is there a digit here?"))
    return QA("exists", form, "yes" if scene.first("digit") else "no")


_ASKERS: tuple[_Asker, ...] = (
    count_any, count_any, count_all, count_all, _any, _any, _any, _list_shapes, _list_shapes,
    _list_colours,
    _is_it, _is_it, _shape_of_colour, _are_all, _colour_of_all, _farthest, _any_text, _any_digit,
)  # fmt: skip


# ---------------------------------------------------------------------------------------- short JSON
_KEYS = {
    "count": (*("count",) * 3, "number", "n", "total", "answer", "value", "result", "how_many", "amount"),
    "colour": ("colour", "color", "color", "answer", "value", "result", "name"),
    "shape": ("shape", "shape", "answer", "value", "result", "name", "kind"),
    "exists": ("exists", "answer", "present", "found", "value", "result", "is_there", "visible"),
    "position": ("answer", "position", "value", "result", "direction", "where"),
    "size": ("answer", "value", "result", "size"),
    "compare": ("answer", "value", "result", "more"),
    "word": ("word", "text", "answer", "value", "label"),
    "digit": ("digit", "number", "answer", "value"),
    "list": ("shapes", "items", "objects", "answer", "values", "things", "names", "list"),
}
_IN_JSON = (
    " Answer in JSON.", " Answer as JSON.", " Reply in JSON.", " Give the answer as JSON.", " JSON please.",
)  # fmt: skip


def as_json(qa: QA, rng: random.Random) -> QA | None:
    """The same question with its answer as short JSON. Mostly nothing says so: then a grammar forces its
    start, as a server does that is given a schema."""
    keys = _KEYS.get(qa.family)
    if keys is None or qa.answer == REFUSAL:
        return None
    value: object = qa.answer
    if qa.family == "list":
        value = qa.answer.split(", ")
    elif qa.family in ("count", "digit"):
        value = rng.choice((int, int, int, int, float, str) if qa.family == "count" else (int, str))(
            qa.answer
        )
    elif qa.answer in ("yes", "no") and rng.random() < 0.6:
        value = qa.answer == "yes"
    key = rng.choice(keys)
    if rng.random() < 0.2:
        question = qa.question + rng.choice((*_IN_JSON, f' Answer in JSON with the key "{key}".'))
        return replace(qa, question=question, answer=json.dumps({key: value}))
    if isinstance(value, str | list) and rng.random() < 0.15:
        said = json.dumps(value)
        return replace(qa, answer=said, forced=1 + isinstance(value, list))
    return replace(qa, answer=json.dumps({key: value}), forced=len(key) + 4)


def thing_as_json(scene: Scene, rng: random.Random) -> QA | None:
    """A shape that is meant alone, as an object of two keys."""
    known = [(t, phrases) for t, phrases in unique_phrases(scene) if t.kind == "shape"]
    if not known:
        return None
    thing, phrases = rng.choice(known)
    about = (("shape", thing.name), (rng.choice(("colour", "color")), thing.colour))
    made = json.dumps(dict(rng.sample(about, 2)))
    question = rng.choice(("Describe the {t}.", "What is the {t}?", "What do you know about the {t}?"))
    return QA("json", question.format(t=rng.choice(phrases)), made, forced=made.index(":") + 1)


# ------------------------------------------------------------------------------------------ two images
_SHOWN = re.compile(r"\b(pictures?|images?|drawings?|here)\b")  # what says so needs no second time


_TAG = re.compile(r"[,:] [\w' ]+\?$")  # ", right?" stays at the end


def of_one(qa: QA, which: int, rng: random.Random) -> QA:
    """A question about image `which` of two."""
    said, noun = ("first", "second")[which], rng.choice(("image", "image", "picture", "drawing"))
    first = qa.question[0].lower() + qa.question[1:]
    if rng.random() < 0.15:
        said = f"{noun} {which + 1}"
    else:
        said = f"the {said} {noun}"
    fits = qa.question[-1] in "?." and not _SHOWN.search(qa.question) and not _TAG.search(qa.question)
    if fits and rng.random() < 0.6:
        return replace(qa, question=f"{qa.question[:-1]} in {said}{qa.question[-1]}")
    return replace(qa, question=f"In {said}, {first}")


_BOTH = (
    "in both images", "in both pictures", "in the two images", "in both images together", "in all", "in total"
)  # fmt: skip


def ask_both(scenes: tuple[Scene, Scene], rng: random.Random) -> QA | None:
    """A question about two images together: how many, whether, which of them."""
    (one, _), (two, _) = (_any_phrase(scene, rng) for scene in scenes)
    phrase = rng.choice(("shape", one, two))
    counts = [_count_of(scene, phrase) for scene in scenes]
    which = rng.random()
    if which < 0.4:
        said = rng.choice(("", "", *_BOTH))
        form = rng.choice(("How many {t} are there{s}?", "How many {t} do you see{s}?", "Count the {t}{s}."))
        question = form.format(t=plural(phrase), s=f" {said}" if said else "")
        return QA("count", question, str(sum(counts)), _number(sum(counts)))
    noun = rng.choice(("image", "picture"))
    if which < 0.7:
        if counts[0] == counts[1]:
            return None
        sign = rng.choice(("more", "more", "fewer"))
        more = counts[0] > counts[1]
        answer = "first" if more == (sign == "more") else "second"
        question = rng.choice((f"Which {noun} has {sign} {{t}}?", f"Which {noun} shows {sign} {{t}}?"))
        return QA("compare", question.format(t=plural(phrase)), answer, (f"the {answer} {noun}",))
    if which < 0.85:
        if (counts[0] > 0) == (counts[1] > 0):
            return None
        answer = "first" if counts[0] else "second"
        question = rng.choice(
            (f"Which {noun} has {{a}}?", f"In which {noun} is {{a}}?", f"Which {noun} shows {{a}}?")
        )
        return QA("compare", question.format(a=with_article(phrase)), answer, (f"the {answer} {noun}",))
    answer = "yes" if counts[0] == counts[1] else "no"
    return QA("compare", f"Do both {noun}s have the same number of {plural(phrase)}?", answer)


def _number(count: int) -> tuple[str, ...]:
    return (NUMBER_WORDS[count],) if count < len(NUMBER_WORDS) else ()


def _count_of(scene: Scene, phrase: str) -> int:
    names, colours, pairs = tally(scene)
    colour, _, noun = phrase.rpartition(" ")
    if noun == "shape":
        return colours[colour] if colour else sum(names.values())
    return pairs[colour, noun] if colour else names[noun]


def ask_either(scenes: tuple[Scene, Scene], rng: random.Random) -> QA | None:
    """About the colour or the shape of something that one of two images alone shows, without naming it."""
    both = Counter(t.name for scene in scenes for t in scene.shapes())
    alone = [t for scene in scenes for t in scene.shapes() if both[t.name] == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    return QA(
        "colour",
        rng.choice(("What colour is the {t}?", "What color is the {t}?")).format(t=thing.name),
        thing.colour,
    )


def ask_of_one(scenes: tuple[Scene, Scene], rng: random.Random, families: tuple[str, ...]) -> QA | None:
    """One of the scored questions, about one of two images."""
    which = rng.randrange(2)
    qa = ask(scenes[which], rng, rng.choice(families))
    return of_one(replace(qa, scene=scenes[which]), which, rng) if qa else None
