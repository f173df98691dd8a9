"""Objects of one to four values as answers: numbers, booleans, colours, shapes, words, lists and boxes, under
names as people write them; and objects that nobody could fill from a drawing."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from recipes.shapes.dense import box_of
from recipes.world.computed import clear_region, extreme_size, farthest, ground, most_used
from recipes.world.grammar import capital, say, with_article
from recipes.world.scene import NOT_UNDERSTOOD
from shapes.questions import name_of, plural, reading_order, region, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

MOST = 4  # values of one object
_LONGEST = 4  # items of one list


@dataclass(frozen=True)
class Field:
    """One value of an object, and what a person would write for its type. What can be said of every scene is
    `common`: it is asked for less often, or its keys are guessed and not read."""

    key: str
    value: object
    type: str
    common: bool = False


def ask_object(scene: Scene, rng: random.Random) -> QA | None:
    """An object of one to four values. Mostly the question names its keys, and the answer is learnt whole;
    else a schema gives them, as a server's grammar does, and what that forces is not learnt."""
    if rng.random() < 0.1 and len(scene.things) <= _LONGEST:
        things = reading_order(scene.things)
        answer = json.dumps(
            {"shapes" if len(scene.shapes()) == len(things) else "things": [name_of(t) for t in things]}
        )
        return QA("json", say(_AS_A_WHOLE, rng), answer)
    known = {field.key: field for field in _fields(scene, rng) if not field.common or rng.random() < 0.3}
    if not known:
        return None
    fields = rng.sample(list(known.values()), min(len(known), rng.choice((1, 2, 2, 3, 3, 4))))
    answer = json.dumps({field.key: field.value for field in fields})
    if rng.random() < 0.75:
        return QA("json", _question(fields, rng), answer)
    question = say(
        f"({_AS_A_WHOLE}|Describe the (picture|image).|Fill in the form.|What do you see?|Fill this in.)", rng
    )
    return QA("json", question, answer, forced=_forced(answer, [field.key for field in fields]))


def ask_unknown_object(rng: random.Random) -> QA:
    """An object of which at least one value is nothing that a drawing of the world shows."""
    keys = rng.sample(_UNKNOWN, rng.choice((1, 2, 2, 3, 4)))
    fields = [Field(_key(key.split(), rng), "", "string") for key in keys]
    return QA("outside", _question(fields, rng), NOT_UNDERSTOOD)


_UNKNOWN = (
    "name", "age", "price", "date", "address", "author", "temperature", "weather", "country", "city", "email",
    "phone number", "animal", "breed", "brand", "total price", "invoice number", "currency", "person",
    "gender", "emotion", "license plate", "year", "artist", "genre", "rating", "speed", "weight", "material",
    "ingredients", "calories", "summary", "language", "first name", "last name", "birthday", "company",
    "items sold", "population", "distance", "duration", "species",
)  # fmt: skip


_AS_A_WHOLE = (
    "((Answer|Reply|Respond) (in|as|with) JSON.|Describe the (picture|image) (as|in) JSON.|"
    "Extract the (data|values|information).|JSON:|Give me JSON.|What is in the (picture|"
    "image)? Answer in JSON.)"
)


def _forced(answer: str, keys: list[str]) -> tuple[tuple[int, int], ...]:
    """The characters that a grammar forces: from a value's end up to the next value, and the last brace."""
    spans, at = [], 0
    for key in keys:
        value = answer.index(f'"{key}": ', at) + len(key) + 4
        spans.append((at + (answer[at - 1] == '"') if at else 0, value - 1))  # the space is one of two tokens
        _, at = json.JSONDecoder().raw_decode(answer, value)
    return (*spans, (len(answer) - 1, len(answer)))


def _question(fields: list[Field], rng: random.Random) -> str:
    """A question that names the keys of its answer."""
    keys = [field.key for field in fields]
    quoted = [f'"{key}"' for key in keys]
    said = quoted if rng.random() < 0.5 else keys
    listed = (
        said[0]
        if len(said) == 1
        else f"{', '.join(said[:-1])}{rng.choice((' and ', ', and ', ', '))}{said[-1]}"
    )
    which = rng.random()
    if which < 0.4:
        return _in_other_forms(fields, listed, rng)
    which = (which - 0.4) / 0.6
    if which < 0.5:
        form = (
            "((Return|Give me|Answer with|Reply with|Write|Respond with|Output|Produce) (a "
            "|)JSON( object|) with (the (keys|fields|properties) |)(`K`)|"
            "(Answer|Reply|Describe the picture|Describe it|Respond) (in|as) JSON( with|, "
            "keys|:|, with) (the (keys|fields) |)(`K`)|"
            "(Extract|Tell me|Give me|I need|Get) (`K`) (as|in) JSON|JSON (with|of|for) "
            "(`K`)( please|)|(`K`) as JSON|"
            "(What are|Give) the values of (`K`)? (Use JSON|JSON)|Fill in (`K`) (as|in) JSON)(.|)"
        ).replace("(`K`)", "{k}")
        return say(form, rng, k=listed)
    if which < 0.7:
        typed = ", ".join(f"{key} ({field.type})" for key, field in zip(said, fields))
        return say(
            "(Return|Give me|Answer with|Reply with|Output) (a |)JSON( object|) with {k}.", rng, k=typed
        )
    if which < 0.9:
        types = [field.type if rng.random() < 0.8 else "..." for field in fields]
        if rng.random() < 0.5:
            types = [f'"{one}"' for one in types]
        shown = "{" + ", ".join(f'"{key}": {one}' for key, one in zip(keys, types)) + "}"
        form = (
            "((Return|Answer with|Reply with|Fill in|Output|Use)( this|) JSON( like this|)( of "
            "the form|)(:|) {k}|{k}|(Answer|Reply) (as|like) {k}|Format: {k})"
        )
        return say(form, rng, k=shown)
    schema = json.dumps(
        {"type": "object", "properties": {f.key: {"type": _SCHEMA.get(f.type, "string")} for f in fields}}
    )
    return say(
        "((Answer|Reply|Respond) (in|with) JSON (for|of|that fits) this schema|Schema|JSON schema): {k}",
        rng,
        k=schema,
    )


def _in_other_forms(fields: list[Field], listed: str, rng: random.Random) -> str:
    """The keys in a sentence, in a list, in code or in a schema, with or without words before and after."""
    keys = [field.key for field in fields]
    front = say(f"(||||What do you see? |Look at the (picture|image|drawing). |{_BEFORE}|{_BEFORE})", rng)
    front += " " if front and not front.endswith(" ") else ""
    tail = say(f"(|||| {_AFTER})", rng)
    tail = f" {tail}" if tail else ""
    which = rng.random()
    if which < 0.35:
        return front + say(_SENTENCES, rng, k=listed) + tail
    if which < 0.65:
        head = say(_HEADS, rng)
        return f"{front}{head}\n{_one_a_line(fields, rng)}{tail and chr(10) + tail.strip()}"
    if which < 0.75:
        shown = rng.choice(
            (
                "{" + ", ".join(f"{f.key}: {f.type}" for f in fields) + "}",
                "{" + ", ".join(keys) + "}",
                "{" + ", ".join(f'"{key}": <{key}>' for key in keys) + "}",
                "{" + ", ".join(f'"{key}": <{f.type}>' for key, f in zip(keys, fields)) + "}",
                "{" + ", ".join(f'"{key}": null' for key in keys) + "}",
                "{" + ", ".join(f'"{key}": ?' for key in keys) + "}",
                "{\n" + ",\n".join(f'  "{key}": ...' for key in keys) + "\n}",
                "{" + ", ".join(f"'{key}': ..." for key in keys) + "}",
            )
        )
        return f"{front}{say(_LIKE, rng)} {shown}{tail}"
    if which < 0.9:
        return f"{front}{_as_code(fields, rng)}{tail and chr(10) + tail.strip()}"
    kinds = {f.key: {"type": _SCHEMA.get(f.type, "string")} for f in fields}
    schema: dict[str, object] = {"type": "object", "properties": kinds, "required": keys}
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    shown = json.dumps(schema, indent=rng.choice((None, None, 2)))
    head = say("(Follow this schema|JSON schema|Schema|Match this JSON schema|response_format)", rng)
    return f"{front}{head}: {shown}"


_BEFORE = (
    "(Analyse|Analyze|Inspect|Look at|Read) (the|this) (picture|image|drawing)(.| and answer in JSON.)|"
    "You (are given|see) (a drawing|an image).|I need structured output."
)
_AFTER = (
    "(Output only valid JSON, no markdown.|No markdown.|JSON only.|Only JSON, please.|No other text.|"
    "Nothing else.|Do not explain.|Return valid JSON only.|No extra keys.|Just the object.|"
    "Use exactly these keys.|Thanks.)"
)
_SENTENCES = (
    "((Return|Give me|Output|Make|Build|Send|I want) (a dict|a dictionary|an object|a map|a JSON object|"
    "one JSON "
    "object|a JSON) with (the keys |keys |the fields |fields |){k}.|JSON keys: {k}|Keys: {k}. Format: JSON.|"
    "(as|in) JSON( please|): {k}|{k} -> JSON|{k}: as JSON( please|).|(Could|Can) you (give|send|get) me "
    "{k} (as|in) "
    "JSON?|JSON output with {k}|I (need|want|would like) a JSON with {k}.|The keys of the (JSON|object) "
    "are {k}.|"
    "Your answer (is|must be|should be) a JSON object with {k}.|json {k}|Please fill {k} in a JSON object.|"
    "Reply in JSON. (Keys|Fields|Use the keys|The fields are)(:|) {k}.|What are {k}? (JSON|As JSON|In "
    "JSON), please.|"
    "Extract {k}( and return them|) as JSON.|{k} should be in the JSON.|A JSON object that has {k}.|"
    "Put {k} into (a |)JSON.|Which values have {k}? Answer as JSON.|Find {k}; output JSON.|parse to json: "
    "{k}|"
    "(The|One) object must (have|contain) {k}.|fields = {k}|Write me down {k} like JSON.)"
)
_HEADS = (
    "((Return|Give me|Output|Write) (a |)JSON( object|) with( these keys| the following keys| these fields|"
    "):|"
    "JSON with:|Keys:|Fields:|Answer in JSON with the keys|Extract (the following|these) as JSON:|As JSON, "
    "please:|"
    "Fill in, as JSON:|I need these in JSON:|JSON keys, one a line:|The JSON has these fields:|Return a "
    "dict with)"
)
_LIKE = (
    "((Return|Answer|Output|Reply)( exactly|) (like this|in this format|in this shape):|Format:|Template:|"
    "Fill in the template:|Output format:|JSON:|Complete:|Expected:|Replace the placeholders:|Use this:)"
)
_TYPES = {"integer": ("number", "int"), "boolean": ("boolean", "bool"), "array": ("any[]", "list"),
          "string": ("string", "str")}  # fmt: skip


def _as_code(fields: list[Field], rng: random.Random) -> str:
    """A type that the answer is to have, as programs write it, and a word before it."""
    head = say(
        "((Return|Answer with|Output|Give me) (a |)JSON (for|of|that fits|matching):|JSON for|Type:|)", rng
    )
    language = rng.randrange(5)
    kinds = [_TYPES[_SCHEMA.get(field.type, "string")][language > 1] for field in fields]
    keys = [field.key if field.key.isidentifier() else f'"{field.key}"' for field in fields]
    name = rng.choice(("Answer", "Result", "Output", "Scene", "Drawing", "Response"))
    lines = [f"{key}: {kind}" for key, kind in zip(keys, kinds)]
    if language < 2:
        opens = f"interface {name} {{" if language == 0 else f"type {name} = {{"
        made = opens + (
            " " + "; ".join(lines) + " }" if rng.random() < 0.4 else "\n  " + ";\n  ".join(lines) + ";\n}"
        )
    else:
        opens = (f"class {name}(BaseModel):", f"@dataclass\nclass {name}:", f"class {name}(TypedDict):")[
            language - 2
        ]
        made = opens + "\n    " + "\n    ".join(lines)
    return f"{head}\n{made}" if head else f"{made}\nReturn it as JSON."


def _one_a_line(fields: list[Field], rng: random.Random) -> str:
    """The keys in a list, often each with what it means."""
    mark = rng.choice(("- ", "- ", "* ", "", "1", "1", "\u2022 "))
    explained, between = rng.random() < 0.65, rng.choice((": ", ": ", " - ", " = ", " -> "))
    ticks = rng.choice(("", "", "`", '"'))
    lines = []
    for i, field in enumerate(fields, 1):
        said = between + (_meaning(field, rng) if rng.random() < 0.75 else field.type) if explained else ""
        lines.append((f"{i}. " if mark == "1" else mark) + f"{ticks}{field.key}{ticks}{said}")
    return "\n".join(lines)


def _words(key: str) -> str:
    """The words of a key: "numRedCircles" is "num red circles"."""
    return re.sub(r"[_\- ]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", key).lower().strip()


def _meaning(field: Field, rng: random.Random) -> str:
    """What a value is, in the words of its key, which say it; and of what type."""
    many = r"^(num|n|nr of|nr|number of|amount of|count of|how many) "
    words = re.sub(many, "number of ", _words(field.key))
    words = re.sub(r"^(.+) count$", lambda found: f"count of {_several(found[1])}", words)
    words = re.sub(r"\bbbox\b", "bounding box", words)
    if _SCHEMA.get(field.type) == "boolean":
        words = rng.choice((f"true or false: {words}", f"{words}, true or false", f"{words} (yes = true)"))
    elif rng.random() < 0.3:
        words = f"{words} ({field.type})"
    elif not re.match(r"(number|count|where|the|what|which|all|amount|nr|total|list|how)\b", words):
        words = rng.choice(("the ", "", "")) + words
    return capital(words) if rng.random() < 0.2 else words


def _several(words: str) -> str:
    """The plural of words that may be one already: "red cross", "letters"."""
    return words if words.endswith("s") and not words.endswith("cross") else plural(words)


_SCHEMA = {
    "number": "integer",
    "integer": "integer",
    "int": "integer",
    "boolean": "boolean",
    "true or false": "boolean",
    "bool": "boolean",
    "true/false": "boolean",
    "list": "array",
    "array": "array",
    "list of strings": "array",
    "box": "array",
}


def _key(words: list[str], rng: random.Random) -> str:
    """A name of these words as people write it."""
    which = rng.random()
    if which < 0.72 or len(words) == 1:
        return "_".join(words)
    if which < 0.86:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if which < 0.88:
        return "".join(word.capitalize() for word in words)
    return ("-" if which < 0.92 else " ").join(words)


def _pick(rng: random.Random, *names: str) -> list[str]:
    return rng.choice(names).split()


def _fields(scene: Scene, rng: random.Random) -> Iterator[Field]:
    """What can be said of a scene, each under one of its names."""
    shapes = scene.shapes()
    names, colours, _ = tally(scene)
    number = rng.choice(("number", "integer", "int", "number"))
    yes_no = rng.choice(("boolean", "true or false", "bool", "true/false"))
    text, many = rng.choice(("string", "text", "string")), rng.choice(("list", "array", "list of strings"))
    tint = rng.choice(("colour", "color"))

    def make(value: object, type: str, *keys: str) -> Field:
        return Field(_key(_pick(rng, *keys), rng), value, type)

    only_shapes = len(shapes) == len(scene.things)
    for _ in range(4):
        colour, name = rng.choice([(t.colour, t.name) for t in shapes] or [(None, None)])
        if colour is None or rng.random() < 0.25:
            colour, name = rng.choice(COLOURS), rng.choice(SHAPES)
        which = rng.random()
        one, count = (name, names[name]) if which < 0.45 else (f"{colour} shape", colours[colour])
        if which > 0.8:
            one, count = f"{colour} {name}", sum((t.colour, t.name) == (colour, name) for t in shapes)
        if rng.random() < 0.55:
            s = plural(one)
            bare: tuple[str, ...] = (
                () if one.endswith(" shape") else (s, s)
            )  # "red shapes" may be a list of them
            yield make(
                count,
                number,
                *bare,
                f"num {s}",
                f"number of {s}",
                f"n {s}",
                f"{one} count",
                f"count of {s}",
                f"how many {s}",
                f"{s} count",
                f"total {s}",
                f"count {s}",
                f"{s} total",
                f"amount of {s}",
                f"nr of {s}",
            )
        else:
            keys = (
                f"contains {one}",
                f"is there {with_article(one)}",
                f"{one} present",
                f"any {plural(one)}",
                f"has {with_article(one)}",
                f"{one} exists",
                f"has any {plural(one)}",
                f"{one} visible",
                f"there is {with_article(one)}",
                f"shows {one}",
                f"is {one} present",
                f"includes {one}",
            )
            yield make(count > 0, yes_no, f"has {one}", f"has {one}", *keys)
    yield from _comparisons(scene, rng, make, yes_no)
    yield replace(
        make(
            len(shapes),
            number,
            "count",
            "shapes count",
            "count of shapes",
            "n shapes",
            "shapes total",
            "num shapes",
            "number of shapes",
            "total shapes",
            "shape count",
            "total",
            "how many shapes",
        ),
        common=True,
    )
    yield replace(
        make(
            scene.first("word") is not None,
            yes_no,
            "has text",
            "has word",
            "contains text",
            "text present",
            "is there text",
            "any text",
            "word present",
            "is there a word",
            "contains a word",
            "has a word",
        ),
        common=True,
    )
    yield replace(
        make(
            scene.first("digit") is not None,
            yes_no,
            "has digit",
            "contains digit",
            "has a digit",
            "digit present",
            "is there a digit",
            "any digit",
            "contains a digit",
        ),
        common=True,
    )
    if shapes and only_shapes:
        yield make(
            len(colours), number, f"num {tint}s", f"number of {tint}s", f"{tint} count", f"how many {tint}s"
        )
        kinds_of = ("number of kinds of shapes", "number of different shapes", "num different shapes")
        yield make(len(names), number, "num kinds", "number of kinds", "num shape kinds", *kinds_of)
        yield make(len(colours) == 1, yes_no, f"same {tint}", f"all same {tint}", f"one {tint}")
    if shapes:
        listed = list(dict.fromkeys(t.colour for t in reading_order(shapes if only_shapes else scene.things)))
        if len(listed) <= _LONGEST:
            yield make(
                listed, many, f"{tint}s", f"{tint}s", f"list of {tint}s", f"all {tint}s", f"{tint} list"
            )
        if len(shapes) <= _LONGEST:
            in_order = reading_order(shapes)
            which = rng.random()
            if which < 0.25:
                yield make([t.name for t in in_order], many, "shape names", "names of shapes")
            elif which < 0.5:
                types = list(dict.fromkeys(t.name for t in in_order))
                yield make(types, many, "shape types", "kinds")
            else:
                named = "shapes", "shapes", "objects", "list of shapes", "all shapes", "things", "items"
                yield make([name_of(t) for t in in_order], many, *named)
    kinds = [kind for kind in ("word", "digit") if sum(t.kind == kind for t in scene.things) == 1]
    for thing, phrases in rng.sample(known := unique_phrases(scene), min(3, len(known))):
        phrase = rng.choice(phrases)
        which = rng.random()
        if which < 0.55 and (thing.kind != "shape" or thing.name == phrase):
            yield make(
                thing.colour,
                rng.choice((tint, text, "string")),
                f"{phrase} {tint}",
                f"{tint} of {phrase}",
                f"{phrase} {tint}",
                f"{tint} of the {phrase}",
                f"what {tint} is the {phrase}",
                f"{tint} {phrase}",
            )
        elif which < 0.75:
            if not clear_region(thing):
                continue
            yield make(
                region(thing),
                text,
                f"{phrase} position",
                f"position of {phrase}",
                f"{phrase} location",
                f"where is the {phrase}",
                f"where is {phrase}",
                f"position of the {phrase}",
                f"location of the {phrase}",
                f"{phrase} place",
                f"{phrase} region",
            )
        else:
            edges = [min(999, round(1000 * edge)) for edge in box_of(thing, scene.aspect)]
            yield make(
                edges,
                rng.choice(("box", "list", "array")),
                f"{phrase} box",
                f"{phrase} bbox",
                f"box of {phrase}",
                f"bbox of the {phrase}",
                f"{phrase} bounding box",
                f"bounding box of the {phrase}",
                f"bbox {phrase}",
                f"box of the {phrase}",
                f"bounding box {phrase}",
            )
    alone = [t for t in shapes if colours[t.colour] == 1]
    if alone:
        thing = rng.choice(alone)
        yield make(
            thing.name,
            rng.choice(("shape", text)),
            f"{thing.colour} shape",
            f"the {thing.colour} shape",
            *(
                (f"shape of the {thing.colour} one", f"{thing.colour} thing")
                if only_shapes
                else (f"name of the {thing.colour} shape", f"which shape is {thing.colour}")
            ),
        )
    more: tuple[str, ...]
    side = rng.choice(("left", "right", "top", "bottom"))
    found = farthest(scene, shapes, side) if len(shapes) > 1 else None
    if found:
        ways = {"left": ("leftmost",), "right": ("rightmost",), "top": ("topmost", "highest", "top")}
        said = rng.choice(ways.get(side, ("lowest", "bottom")))
        if rng.random() < 0.6:
            more = (f"{said} shape name", f"which shape is {said}", f"name of {said} shape")
            more += (f"shape furthest {side}",) if side in ("left", "right") else ()
            more += (f"furthest {side}",) if side in ("left", "right") and only_shapes else ()
            more += (said,) if only_shapes else ()
            yield make(found.name, rng.choice(("shape", text)), f"{said} shape", f"{said} shape", *more)
        else:
            bare = (f"{said} {tint}",) if only_shapes else ()
            yield make(found.colour, tint, *bare, f"{said} shape {tint}", f"{tint} of {said} shape")
    biggest = rng.random() < 0.5
    found = extreme_size(shapes, biggest)
    if found:
        said = rng.choice(("biggest", "largest")) if biggest else "smallest"
        if rng.random() < 0.6:
            more = (f"which shape is {said}", f"name of {said} shape", f"shape {said}")
            more += (said, f"which is {said}") if only_shapes else ()
            yield make(found.name, rng.choice(("shape", text)), f"{said} shape", f"{said} shape", *more)
        else:
            bare = (f"{said} {tint}",) if only_shapes else ()
            yield make(found.colour, tint, *bare, f"{said} shape {tint}", f"{tint} of {said} shape")
        said_of_it = rng.choice((found.colour, rng.choice(COLOURS)))
        yield make(
            found.colour == said_of_it,
            yes_no,
            f"is {said} shape {said_of_it}",
            f"is the {said} shape {said_of_it}",
            f"{said} shape is {said_of_it}",
            *((f"{said} is {said_of_it}",) if only_shapes else ()),
        )
    for kind in kinds:
        thing = next(t for t in scene.things if t.kind == kind)
        if kind == "word":
            yield make(thing.name, text, "word", "text", "word", "printed word", "text content", "word text")
            written = ("letters in word", "word length", "number of letters", "letter count", "num letters")
            yield make(len(thing.name), number, *written, "letters in the word", "how many letters")
            yield make(thing.name[0], text, "first letter", "first letter of word", "initial letter")
        else:
            yield make(int(thing.name), number, "digit", "number", "digit", "digit value", "value of digit")
        if clear_region(thing):
            places = (f"{kind} position", f"where is the {kind}", f"position of {kind}", f"{kind} location")
            yield make(region(thing), text, *places, f"position of the {kind}", f"{kind} place")
    if len(colours) > 1 and (winner := most_used(scene)):
        yield make(
            winner[0],
            tint,
            *((f"dominant {tint}", f"main {tint}") if winner[1] else ()),
            f"most common {tint}",
            f"most frequent {tint}",
            f"most used {tint}",
            f"{tint} used most",
        )
    if back := ground(scene):
        yield make(
            back, tint, f"background {tint}", f"background {tint}", "background", f"{tint} of background"
        )


def _comparisons(
    scene: Scene, rng: random.Random, make: Callable[..., Field], yes_no: str
) -> Iterator[Field]:
    """Whether there are more, fewer or as many of one kind as of another."""
    names, colours, _ = tally(scene)
    by_name = rng.random() < 0.6
    counts, every = (names, SHAPES) if by_name else (colours, COLOURS)
    known = [kind for kind in every if counts[kind]]
    if not known:
        return
    one = rng.choice(known)
    two = rng.choice(
        [kind for kind in (known if len(known) > 1 and rng.random() < 0.8 else every) if kind != one]
    )
    if rng.random() < 0.5:
        one, two = two, one
    a, b = (plural(one), plural(two)) if by_name else (one, two)
    more, fewer, same = counts[one] > counts[two], counts[one] < counts[two], counts[one] == counts[two]
    which = rng.random()
    if which < 0.45:
        keys = f"more {a} than {b}", f"are there more {a} than {b}", f"has more {a} than {b}"
        yield make(more, yes_no, keys[0], *keys)
    elif which < 0.8:
        keys = f"fewer {a} than {b}", f"are there fewer {a} than {b}", f"less {a} than {b}"
        yield make(fewer, yes_no, keys[0], *keys)
    else:
        yield make(same, yes_no, f"as many {a} as {b}", f"same number of {a} and {b}", f"equal {a} and {b}")
