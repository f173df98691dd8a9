"""Questions about a scene, each in several wordings, with their answers."""

from __future__ import annotations

from collections import Counter

from shapes.wordings import ARTICLE, NUMBER_WORDS, OPPOSITE, PHRASE, REGIONS, TEMPLATES
from shapes.world import BIG, COLOURS, FAMILIES, QA, SHAPES


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


def _qa(rng, family, template, answer, accept=(), **slots):
    return QA(family, rng.choice(TEMPLATES[template]).format(**slots), answer, accept)


def _plural(name):
    return name + ("es" if name == "cross" else "s")


def _tally(scene):
    """Counts of shapes by name, by colour and by (colour, name)."""
    shapes = scene.shapes()
    return (
        Counter(t.name for t in shapes),
        Counter(t.colour for t in shapes),
        Counter((t.colour, t.name) for t in shapes),
    )


def unique_phrases(scene):
    """[(thing, the noun phrases that mean only it)], for things that have one."""
    names, _, pairs = _tally(scene)
    found = []
    for t in scene.things:
        if t.kind != "shape":
            found.append((t, (t.kind,)))
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
    names, colours, pairs = _tally(scene)
    if not names:
        return None
    by_count = {}
    total = sum(names.values())
    for count, text in (
        [(total, "shapes")]
        + [(c, _plural(n)) for n, c in names.items()]
        + [(c, f"{n} shapes") for n, c in colours.items()]
        + [(c, f"{n} {_plural(m)}") for (n, m), c in pairs.items()]
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
        return f"a {name}", _plural(name)
    if form == "colour" and gone_colours:
        colour = rng.choice(gone_colours)
        return f"{ARTICLE.get(colour, 'a')} {colour} shape", f"{colour} shapes"
    near = [(c, n) for c in (colours or COLOURS) for n in (names or SHAPES) if (c, n) not in pairs]
    half = (
        [(c, n) for c in COLOURS for n in SHAPES if (c in colours) != (n in names)]
        if rng.random() < 0.4 or not near
        else near
    )
    colour, name = rng.choice(half or near)
    return f"{ARTICLE.get(colour, 'a')} {colour} {name}", f"{colour} {_plural(name)}"


def _ask_colour(scene, rng):
    names, _, _ = _tally(scene)
    targets = [
        (t.colour, t.name if t.kind == "shape" else t.kind)
        for t in scene.things
        if t.kind != "shape" or names[t.name] == 1
    ]
    biggest, _ = _extremes(scene)
    if biggest:
        targets.append((biggest.colour, rng.choice(("biggest shape", "largest shape"))))
    if not targets:
        return None
    colour, text = rng.choice(targets)
    return _qa(rng, "colour", "colour", colour, t=text)


def _ask_shape(scene, rng):
    _, colours, _ = _tally(scene)
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
    names, colours, pairs = _tally(scene)
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
        text = rng.choice(
            (f"{ARTICLE.get(colour, 'a')} {colour} {name}",) * 2
            + (f"a {name}", f"{ARTICLE.get(colour, 'a')} {colour} shape")
        )
    return _qa(rng, "exists", "exists", answer, t=text)


def _ask_position(scene, rng):
    known = unique_phrases(scene)
    pairs = [(a, b) for a in known for b in known if a is not b]
    rng.shuffle(pairs)
    for (one, a), (two, b) in pairs:
        dx, dy = one.x - two.x, one.y - two.y
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
    word = scene.first("word")
    return word and _qa(rng, "word", "word", word.name)


def _ask_digit(scene, rng):
    digit = scene.first("digit")
    return digit and _qa(rng, "digit", "digit", digit.name, (NUMBER_WORDS[int(digit.name)],))


def _ask_compare(scene, rng):
    names, colours, _ = _tally(scene)
    if not names:
        return None
    by_name = rng.random() < 0.5
    counts, everything = (names, SHAPES) if by_name else (colours, COLOURS)
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
        slots = {"a": _plural(a), "b": _plural(b)} if by_name else {"a": f"{a} shapes", "b": f"{b} shapes"}
        answer, accept = (_plural(more), (more,)) if by_name else (more, (f"{more} shapes",))
        return _qa(rng, "compare", "either", answer, accept, **slots)
    template, answer = "more", "yes" if a == more else "no"
    if form < 0.6 and ties:
        template, answer = "equal", rng.choice(("yes", "no"))
        if answer == "yes":
            a, b = rng.choice(ties)
    elif answer == "no" and ties and rng.random() < 0.3:
        a, b = rng.choice(ties)
    slots = {"a": _plural(a), "b": _plural(b)} if by_name else {"a": f"{a} shapes", "b": f"{b} shapes"}
    return _qa(rng, "compare", template, answer, **slots)


def describe(scene):
    """The canonical description: one item a thing, row by row, then from left to right."""

    def row(t):
        return min(2, int(t.y * 3))

    items = []
    for t in sorted(scene.things, key=lambda t: (row(t), t.x)):
        region = REGIONS[row(t)][min(2, int(t.x * 3))]
        if t.kind == "shape":
            items.append(f"{'big' if t.size >= BIG else 'small'} {t.colour} {t.name} {region}")
        else:
            items.append(f"{t.kind} {t.name} {region}")
    return ", ".join(items)


def _ask_describe(scene, rng):
    return _qa(rng, "describe", "describe", describe(scene))


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
    "describe": _ask_describe,
}
