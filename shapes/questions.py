"""Questions about a scene, each in several wordings, with their answers."""

from __future__ import annotations

from collections import Counter

from shapes.world import BIG, COLOURS, FAMILIES, QA, SHAPES

TEMPLATES = {
    "count": ("How many {t} are there?", "How many {t} can you see?", "Count the {t}.",
              "What is the number of {t}?", "How many {t} does the picture show?",
              "Tell me how many {t} you see."),
    "colour": ("What colour is the {t}?", "What color is the {t}?", "Which colour is the {t}?",
               "Tell me the color of the {t}.", "Name the colour of the {t}.", "The {t} is what color?"),
    "shape": ("What shape is {t}?", "Which shape is {t}?", "What kind of shape is {t}?",
              "Name the shape that is {t}.", "Tell me which shape is {t}."),
    "exists": ("Is there {t}?", "Is there {t} in the picture?", "Can you see {t}?",
               "Does the picture show {t}?", "Do you see {t} here?", "Does the image contain {t}?"),
    "position": ("Is the {a} {r} the {b}?", "Is the {a} {r} the {b} in this picture?",
                 "Does the {a} lie {r} the {b}?", "Would you say the {a} is {r} the {b}?",
                 "Can you see the {a} {r} the {b}?"),
    "where": ("Where is the {a} relative to the {b}?", "Where is the {a} compared with the {b}?",
              "In which direction is the {a} from the {b}?", "Seen from the {b}, where is the {a}?",
              "Where does the {a} lie, seen from the {b}?"),
    "side": ("Is the {a} {r} the {b}?", "Would you say the {a} is {r} the {b}?",
             "Does the {a} lie {r} the {b}?"),
    "size": ("Is the {a} {r} than the {b}?", "Would you say the {a} is {r} than the {b}?",
             "Does the {a} look {r} than the {b}?"),
    "which": ("Which is {r}, the {a} or the {b}?", "Which one is {r}, the {a} or the {b}?",
              "What is {r}, the {a} or the {b}?"),
    "word": ("What does the word say?", "Which word is written here?", "Read the word.",
             "What is the printed word?", "What word do you see?", "Which word is in the picture?"),
    "digit": ("What is the digit?", "Which digit is written here?", "Read the handwritten digit.",
              "What digit do you see?", "Which number is handwritten in the picture?"),
    "more": ("Are there more {a} than {b}?", "Does the picture show more {a} than {b}?",
             "Can you see more {a} than {b}?", "Do you see more {a} than {b}?"),
    "either": ("Are there more {a} or {b}?", "Which are there more of, {a} or {b}?",
               "Do you see more {a} or {b}?"),
    "equal": ("Are there as many {a} as {b}?", "Is the number of {a} equal to the number of {b}?",
              "Does the picture show as many {a} as {b}?"),
    "describe": ("Describe the picture.", "Describe the image.", "What is in the picture?",
                 "What do you see?", "List everything in the picture.", "Tell me what the picture shows."),
}  # fmt: skip
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
OPPOSITE = {
    "left": "right",
    "right": "left",
    "above": "below",
    "below": "above",
    "bigger": "smaller",
    "smaller": "bigger",
}
REGIONS = (  # by row and column of thirds
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)


def ask(scene, rng, family):
    """One question of a family about the scene, or None where the family does not apply."""
    if family not in FAMILIES:
        raise ValueError(f"expected a family in {FAMILIES}, got {family!r}")
    return _ASKERS[family](scene, rng)


def sample_questions(scene, rng, n, families=FAMILIES):
    """Up to n different questions, the families drawn uniformly among those that apply.

    Fewer come back only where the scene has no more to ask.
    """
    families, found = list(families), {}
    for _ in range(8 * n):
        if not families or len(found) == n:
            break
        family = rng.choice(families)
        qa = ask(scene, rng, family)
        if qa is None:
            families.remove(family)
        else:
            found.setdefault(qa.question, qa)
    return list(found.values())


def _qa(rng, family, template, answer, accept=(), things=(), **slots):
    return QA(family, rng.choice(TEMPLATES[template]).format(**slots), answer, accept, tuple(things))


def plural(name):
    """Several of what a phrase names."""
    return name + ("es" if name.endswith("cross") else "s")


def _a(colour):
    return f"{'an' if colour == 'orange' else 'a'} {colour}"


def tally(scene):
    """Counts of shapes by name, by colour and by (colour, name)."""
    shapes = scene.shapes()
    names, colours = Counter(t.name for t in shapes), Counter(t.colour for t in shapes)
    return names, colours, Counter((t.colour, t.name) for t in shapes)


def unique_phrases(scene):
    """[(thing, the noun phrases that mean only it)], for things that have one."""
    names, _, pairs = tally(scene)
    found = []
    kinds = Counter(t.kind for t in scene.things)
    for t in scene.things:
        if t.kind != "shape":
            found += [(t, (t.kind,))] if kinds[t.kind] == 1 else []
        elif names[t.name] == 1:
            found.append((t, (t.name, f"{t.colour} {t.name}")))
        elif pairs[t.colour, t.name] == 1:
            found.append((t, (f"{t.colour} {t.name}",)))
    return found


def _extremes(scene):
    """(clearly biggest shape or None, clearly smallest shape or None)."""
    shapes = sorted(scene.shapes(), key=lambda t: t.size)
    if len(shapes) < 2:
        return None, None
    return (
        shapes[-1] if shapes[-1].size >= 1.25 * shapes[-2].size else None,
        shapes[0] if shapes[1].size >= 1.25 * shapes[0].size else None,
    )


def _ask_count(scene, rng):
    names, colours, pairs = tally(scene)
    if not names:
        return None
    by_count = {}
    total = sum(names.values())
    for count, text in (
        [(total, "shapes")]
        + [(c, plural(n)) for n, c in names.items()]
        + [(c, f"{n} shapes") for n, c in colours.items()]
        + [(c, f"{n} {plural(m)}") for (n, m), c in pairs.items()]
    ):
        by_count.setdefault(count, []).append(text)
    if rng.random() < 0.1:
        count, text = 0, _absent(rng, names, colours, pairs)[1]
    else:  # high counts are rarer among scenes, so they are preferred within one
        count = rng.choices(list(by_count), weights=[c**1.2 for c in by_count])[0]
        text = rng.choice(by_count[count])
    return _qa(rng, "count", "count", str(count), (NUMBER_WORDS[count],), t=text)


def _absent(rng, names, colours, pairs):
    """(singular with article, plural) of shapes that the scene lacks, mostly near misses."""
    form = rng.choice(("pair", "pair", "name", "colour"))
    gone_names = [n for n in SHAPES if n not in names]
    gone_colours = [c for c in COLOURS if c not in colours]
    if form == "name" and gone_names:
        name = rng.choice(gone_names)
        return f"a {name}", plural(name)
    if form == "colour" and gone_colours:
        colour = rng.choice(gone_colours)
        return f"{_a(colour)} shape", f"{colour} shapes"
    near = [(c, n) for c in (colours or COLOURS) for n in (names or SHAPES) if (c, n) not in pairs]
    half = (
        [(c, n) for c in COLOURS for n in SHAPES if (c in colours) != (n in names)]
        if rng.random() < 0.4 or not near
        else near
    )
    colour, name = rng.choice(half or near)
    return f"{_a(colour)} {name}", f"{colour} {plural(name)}"


def absent(scene, rng):
    """A phrase for what a scene lacks: a shape, or now and then the word or the digit."""
    lacking = [kind for kind in ("word", "digit") if not scene.first(kind)]
    if lacking and rng.random() < 0.25:
        return rng.choice(lacking)
    return _absent(rng, *tally(scene))[0].split(" ", 1)[1]


def _ask_colour(scene, rng):
    names, kinds = tally(scene)[0], Counter(t.kind for t in scene.things)
    targets = [
        (t.colour, t.name if t.kind == "shape" else t.kind)
        for t in scene.things
        if (names[t.name] if t.kind == "shape" else kinds[t.kind]) == 1
    ]
    biggest, _ = _extremes(scene)
    if biggest:
        targets.append((biggest.colour, rng.choice(("biggest shape", "largest shape"))))
    if not targets:
        return None
    colour, text = rng.choice(targets)
    return _qa(rng, "colour", "colour", colour, t=text)


def _ask_shape(scene, rng):
    _, colours, _ = tally(scene)
    targets = [(t.name, t.colour) for t in scene.shapes() if colours[t.colour] == 1]
    biggest, smallest = _extremes(scene)
    if biggest:
        targets.append((biggest.name, rng.choice(("the biggest", "the largest"))))
    if smallest:
        targets.append((smallest.name, "the smallest"))
    if not targets:
        return None
    name, text = rng.choice(targets)
    return _qa(rng, "shape", "shape", name, t=text)


def _ask_exists(scene, rng):
    names, colours, pairs = tally(scene)
    present = [k for k in ("word", "digit") if scene.first(k)]
    lacking = [k for k in ("word", "digit") if k not in present]
    answer = rng.choice(("yes", "no"))
    text_kinds = present if answer == "yes" else lacking
    if text_kinds and (rng.random() < 0.2 or (answer == "yes" and not names)):
        text = f"a {rng.choice(text_kinds)}"
    elif answer == "no":
        text = _absent(rng, names, colours, pairs)[0]
    else:
        colour, name = rng.choice(list(pairs))
        text = rng.choice((f"{_a(colour)} {name}",) * 2 + (f"a {name}", f"{_a(colour)} shape"))
    return _qa(rng, "exists", "exists", answer, t=text)


def _ask_position(scene, rng):
    known = unique_phrases(scene)
    pairs = [(a, b) for a in known for b in known if a is not b]
    rng.shuffle(pairs)
    for (one, a), (two, b) in pairs:
        dx, dy = apart(one, two, scene)
        axes = [("right" if dx > 0 else "left")] if abs(dx) >= 0.12 else []
        axes += [("below" if dy > 0 else "above")] if abs(dy) >= 0.12 else []
        if not axes:
            continue
        a, b, truth = rng.choice(a), rng.choice(b), rng.choice(axes)
        form = rng.random()
        long, short = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
        if form < 0.3 and long >= 0.15 and long >= 1.6 * short:
            truth = axes[0] if abs(dx) > abs(dy) else axes[-1]
            return _qa(rng, "position", "where", truth, _also(truth), a=a, b=b)
        if form < 0.6:
            text = "left or right of" if truth in ("left", "right") else "above or below"
            return _qa(rng, "position", "side", truth, _also(truth), a=a, b=b, r=text)
        answer = rng.choice(("yes", "no"))
        said = PHRASE[truth if answer == "yes" else OPPOSITE[truth]]
        if said.endswith("of") and rng.random() < 0.5:
            said = "to the " + said
        return _qa(rng, "position", "position", answer, a=a, b=b, r=said)
    return None


def apart(one, two, scene):
    """(to the right, down): how far one thing is from the other, in shorter sides of the image."""
    return (one.x - two.x) * max(1.0, scene.aspect), (one.y - two.y) * max(1.0, 1 / scene.aspect)


def _also(direction):
    return (f"to the {direction}", f"{direction} of") if direction in ("left", "right") else ()


def _ask_size(scene, rng):
    known = [k for k in unique_phrases(scene) if k[0].kind == "shape"]
    pairs = [(a, b) for a in known for b in known if a[0].size >= 1.3 * b[0].size]
    if not pairs:
        return None
    (_, big), (_, small) = rng.choice(pairs)
    big, small = rng.choice(big), rng.choice(small)
    a, b = (big, small) if rng.random() < 0.5 else (small, big)
    said = rng.choice(("bigger", "smaller"))
    if rng.random() < 0.5:
        return _qa(rng, "size", "which", big if said == "bigger" else small, a=a, b=b, r=said)
    truth = "bigger" if a == big else "smaller"
    return _qa(rng, "size", "size", "yes" if said == truth else "no", a=a, b=b, r=said)


def _ask_word(scene, rng):
    words = [t for t in scene.things if t.kind == "word"]
    word = words[0] if len(words) == 1 else None
    return word and _qa(rng, "word", "word", word.name)


def _ask_digit(scene, rng):
    digit = scene.first("digit")
    return digit and _qa(rng, "digit", "digit", digit.name, (NUMBER_WORDS[int(digit.name)],))


def _ask_compare(scene, rng):
    names, colours, _ = tally(scene)
    if not names:
        return None
    by_name = rng.random() < 0.5
    counts, everything = (names, SHAPES) if by_name else (colours, COLOURS)
    noun = plural if by_name else "{} shapes".format
    kinds = list(counts)
    ties = [(a, b) for a in kinds for b in kinds if a != b and counts[a] == counts[b]]
    unequal = [(a, b) for a in kinds for b in kinds if counts[a] > counts[b]]
    if not unequal or rng.random() < 0.15:  # an absent kind is the easy case: only now and then
        gone = [k for k in everything if k not in counts]
        if gone:
            unequal = [(rng.choice(kinds), rng.choice(gone))]
    if not unequal:
        return None
    more, fewer = rng.choice(unequal)
    a, b = (more, fewer) if rng.random() < 0.5 else (fewer, more)
    form = rng.random()
    if form < 0.35:
        answer, accept = (plural(more), (more,)) if by_name else (more, (f"{more} shapes",))
        return _qa(rng, "compare", "either", answer, accept, a=noun(a), b=noun(b))
    template, answer = "more", "yes" if a == more else "no"
    if form < 0.6 and ties:
        template, answer = "equal", rng.choice(("yes", "no"))
        if answer == "yes":
            a, b = rng.choice(ties)
    elif answer == "no" and ties and rng.random() < 0.3:
        a, b = rng.choice(ties)
    return _qa(rng, "compare", template, answer, a=noun(a), b=noun(b))


def _row(thing):
    return min(2, int(thing.y * 3))


def region(thing):
    return REGIONS[_row(thing)][min(2, int(thing.x * 3))]


def name_of(thing):
    return f"{thing.colour} {thing.name}" if thing.kind == "shape" else f"{thing.kind} {thing.name}"


def reading_order(things):
    """Row by row, then from left to right."""
    return sorted(things, key=lambda t: (_row(t), t.x))


def describe(scene):
    """The canonical description: one item a thing, row by row, then from left to right."""
    items = []
    for t in reading_order(scene.things):
        size = ("big " if t.size >= BIG else "small ") if t.kind == "shape" else ""
        items.append(f"{size}{name_of(t)} {region(t)}")
    return ", ".join(items)


_ASKERS = {
    "count": _ask_count,
    "colour": _ask_colour,
    "shape": _ask_shape,
    "exists": _ask_exists,
    "position": _ask_position,
    "size": _ask_size,
    "word": _ask_word,
    "digit": _ask_digit,
    "compare": _ask_compare,
    "describe": lambda scene, rng: _qa(
        rng, "describe", "describe", describe(scene), things=reading_order(scene.things)
    ),
}
