"""More questions whose answers are computed from the whole scene: "both", "either" and "none", what there is
fewer of, rows and columns, the second from the left, two words of one turn and the next.

They are asked as those of `kinds` are, and nothing is asked where a person could doubt the truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from recipes.world.grammar import say, with_article
from recipes.world.kinds import (
    AXES,
    bounds,
    extreme_size,
    farthest,
    kind_of,
    nouns_for,
    one_of,
    only_shapes,
    pose,
    shapes_of,
    yes_no,
)
from recipes.world.scene import Thing
from shapes.questions import name_of, plural, reading_order, tally
from shapes.world import COLOURS, QA, SHAPES, Scene

_WHAT = "(what|which)"
_COLOUR = "(colour|color)"
_PICTURE = "(picture|image|drawing)"
_HERE = f"(||| there| here| in it| in the {_PICTURE}| in this {_PICTURE})"


def ask_sets(scene: Scene, rng: random.Random, count: int) -> list[QA]:
    """Up to `count` of these questions, mostly of different kinds."""
    askers = rng.sample(_ASKERS, len(_ASKERS))
    found = (asker(scene, rng) for asker in askers)
    return [qa for _, qa in zip(range(count), (qa for qa in found if qa is not None))]


def _two(scene: Scene, rng: random.Random) -> tuple[str, list[Thing], str, list[Thing]] | None:
    """Two phrases that are not the same, each with the shapes that it means; often one of them with none."""
    one = kind_of(scene, rng)
    for _ in range(8):
        two = kind_of(scene, rng)
        if rng.random() < 0.35:
            colour, name = rng.choice(COLOURS), rng.choice(SHAPES)
            two = (f"{colour} shape", colour, None) if rng.random() < 0.5 else (name, None, name)
        alike = (one[1] is None) == (two[1] is None) and (one[2] is None) == (two[2] is None)
        if one[0] != two[0] and (alike or rng.random() < 0.15):
            return one[0], shapes_of(scene, *one[1:]), two[0], shapes_of(scene, *two[1:])
    return None


def _both(scene: Scene, rng: random.Random) -> QA | None:
    """Whether there are both, either or neither of two kinds."""
    pair = _two(scene, rng)
    if pair is None:
        return None
    one, ones, two, twos = pair
    a, b = (with_article(one), with_article(two)) if rng.random() < 0.6 else (plural(one), plural(two))
    sees = is_there = "(is there|do you see|can you see|can you find|does it have|has it got|does it show)"
    if a == plural(one):
        is_there = is_there.replace("is there", "are there")
    which = rng.random()
    if which < 0.45:
        if ones and twos and len({id(t) for t in (*ones, *twos)}) < 2:
            return None  # one thing is both
        form = (
            f"({is_there} {{a}} and {{b}}{_HERE}|{is_there} both {{a}} and {{b}}{_HERE}|"
            f"{is_there} {{a}} as well as {{b}}{_HERE}|(are|is) both {{a}} and {{b}}( there| present| shown)|"
            f"both {{a}} and {{b}}( there|{_HERE}|)|{{a}} and {{b}}: are both there|"
            f"does the {_PICTURE} (show|contain|have|include) (both |){{a}} and {{b}}|"
            f"did (i|they|someone) draw (both |){{a}} and {{b}}|there (is|are) (both |){{a}} and {{b}}, "
            f"(right|correct|true)|(can|could) both {{a}} and {{b}} be (seen|found))?"
        )
        return pose("exists", rng, form, yes_no(bool(ones and twos)), a=a, b=b)
    if which < 0.9:
        form = (
            f"({is_there} {{a}} or {{b}}{_HERE}|{is_there} either {{a}} or {{b}}{_HERE}|"
            f"{sees} ((at least|even) one {{e}} or {{f}}|at least one of them, {{a}} or {{b}})|"
            f"any {{c}} or {{d}}{_HERE}|"
            f"(are there|do you see|can you see|does it have) any {{c}} or( any|) {{d}}{_HERE}|"
            f"does the {_PICTURE} (show|contain|have|include) {{a}} or {{b}}|{{c}} or {{d}}, any of "
            f"them{_HERE}|"
            f"did (i|they|someone) draw (any {{c}} or {{d}}|{{a}} or {{b}})|"
            f"is there (at least |)one {{e}} or {{f}}{_HERE})(?|?|, yes or no?)"
        )
        slots = {"c": plural(one), "d": plural(two), "e": one, "f": two}
        return pose("exists", rng, form, yes_no(bool(ones or twos)), a=a, b=b, **slots)
    form = (
        f"(is there neither {{a}} nor {{b}}{_HERE}|are there no {{c}} and no {{d}}{_HERE}|"
        "is it right that there is neither {a} nor {b})?"
    )
    none = yes_no(not ones and not twos)
    return pose(
        "exists", rng, form, none, a=with_article(one), b=with_article(two), c=plural(one), d=plural(two)
    )


def _any_other(scene: Scene, rng: random.Random) -> QA | None:
    """Whether anything is not so."""
    shapes, (noun, many) = scene.shapes(), nouns_for(scene, rng)
    if not shapes:
        return None
    by_colour = rng.random() < 0.6
    said = rng.choice([(t.colour if by_colour else t.name) for t in shapes])
    others = [t for t in shapes if (t.colour if by_colour else t.name) != said]
    thing = "thing" if only_shapes(scene) else f" {noun}"
    kind = f"{_COLOUR}" if by_colour else "(shape|kind|form)"
    so = said if by_colour else with_article(said)
    sees = "(is there|do you see|can you see|can you find|does it have)"
    form = (
        f"({sees} (any {noun}|{with_article(noun)}|one {noun}|at least one {noun}|some {noun}) "
        f"(that is not|that isn't|which is not|which isn't) "
        f"{so}{_HERE}|is any{thing} not {so}{_HERE}|are there (any |){many} (that are not|that "
        f"aren't|which aren't) {said if by_colour else plural(said)}|{sees} (any {noun}|"
        f"{with_article(noun)}|some {noun}) (of another|"
        f"of a different|in another|with a different) {kind} than "
        f"{said if by_colour else 'the ' + plural(said)}"
        f"|(any|are there any|are there) {many} (besides|other than|apart from|except|beside) "
        f"{'the ' + said + ' ones' if by_colour else 'the ' + plural(said)}|"
        f"(any|is there any) non-{said} {noun}{_HERE}|is (anything|something) (here|there|) (not|other than) "
        f"{so})?"
    )
    if not only_shapes(scene):
        form = form.replace("(anything|something)", f"any {noun}")
    return pose("exists", rng, form, yes_no(bool(others)))


def _fewer(scene: Scene, rng: random.Random) -> QA | None:
    """Which of two kinds there are more or fewer of, named."""
    names, colours, _ = tally(scene)
    by_name = rng.random() < 0.5
    counts, every = (names, SHAPES) if by_name else (colours, COLOURS)
    if not counts:
        return None
    one = rng.choice(list(counts))
    two = rng.choice(list(counts) if rng.random() < 0.8 else list(every))
    if counts[one] == counts[two]:
        return None
    fewer = rng.random() < 0.65
    least = min(one, two, key=lambda kind: counts[kind])
    answer = least if fewer else one if least == two else two
    sign, less = ("(fewer|fewer|less)", "(rarer|less common|less frequent|fewer|less)")
    often, group = "(less often|least often|less|the least)", "less numerous"
    if not fewer:
        sign, less = "more", "(more common|more frequent|more|more numerous)"
        often, group = "(more often|most often|more|the most)", "more numerous"
    form = (
        f"({_WHAT} (are there|do you see|do we have|is there|can you see) {sign} of(,|:| here,) "
        f"{{a}} or {{b}}|"
        f"(are there|do you see|did i draw|did they draw|can you count|does it have) {sign} {{a}} or"
        f"( {sign}|) {{b}}{_HERE}|{{a}} or {{b}}(,|:| -) ({_WHAT} (are|is) {less}|{_WHAT} are there "
        f"{sign} of|"
        f"of which are there {sign})|{sign} {{a}} or( {sign}|) {{b}}{_HERE}|{_WHAT} (is|are) {less}"
        f"(,|:|{_HERE},) {{a}} or {{b}}|(between|of|comparing|among) (the |){{a}} and (the |){{b}}, {_WHAT} "
        f"(are there {sign} of|are {less}|is {less})|{_WHAT} (appears|occurs|was drawn|do you see) {often}, "
        f"{{a}} or {{b}}|(say|name|tell me) (what|which) there (is|are) {sign} of(:|,) {{a}} or {{b}}|"
        f"which (group|set) is {group}(,|:) (the |){{a}} or (the |){{b}})?"
    )
    noun = plural if by_name else "{} shapes".format
    said = plural(answer) if by_name else answer
    return pose("compare", rng, form, said, a=noun(one), b=noun(two))


_ORDER = (("second", "2nd"), ("third", "3rd"), ("fourth", "4th"), ("fifth", "5th"), ("sixth", "6th"))


def _in_order(scene: Scene, rng: random.Random) -> QA | None:
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
    k = rng.randint(1, max(1, min(len(_ORDER), clear - 1)))
    if k >= len(ordered) or k >= clear:
        return None
    nth = rng.choice(_ORDER[k - 1])
    put = f"{nth} {noun}( counted| when you count| counting|) from (the |){side}|{nth} from (the |){side}"
    form = (
        f"({_WHAT} ({noun} |one |thing |)is (the |){nth} from (the |){side}|what's (the |)({put})|"
        f"(counting|starting|going) from the {side}, (what|which) (is|would be) the {nth}( {noun}| one|)|"
        f"from (the |){side}(,|:|) the {nth}( {noun}| one)|(name|tell me) the ({put})|{put}|"
        f"(look|go) from {side} to {_OTHER[side]}(:|,) {_WHAT} {noun} (is|comes) {nth}|"
        f"{_WHAT} {noun} (comes|stands|is) {nth} (from the {side}|if you count from the {side}))?"
    )
    if rng.random() < 0.25:
        colour = (
            f"({_WHAT} {_COLOUR} (is|has) the ({put})|(what's|what is|name) the {_COLOUR} of the ({put}))?"
        )
        return pose("colour", rng, colour, ordered[k].colour)
    return one_of(rng, form, ordered[k])


_OTHER = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


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
    spread = max(abs(a.y - b.y) if axis else abs(a.x - b.x) for row in rows for a in row for b in row)
    apart = all(
        max(boxes[id(t)][2 + axis] for t in one) < min(boxes[id(t)][axis] for t in two)
        for one, two in pairwise(rows)
    )
    return rows if apart and spread < 0.5 * wide and max(map(len, rows)) > 1 else []


def _row(scene: Scene, rng: random.Random) -> QA | None:
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
    names += [_ORDER[i - 1][0]] * (i > 0)
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
        f"({_WHAT} {many} (are|do you see|stand|can be seen) in the {row}|what (is|do you see|"
        f"stands|is there) "
        f"in the {row}|(list|name|tell me|give me) the {many} (in|of) the {row}|(the |){row}(:| -|,) "
        f"{_WHAT} {many}( are there| are in it|)|the {row}, what is in it|what (does the {row} "
        f"(show|have|contain)"
        f"|are the {many} of the {row})|read me the {row} from "
        f"{'left to right' if axis else 'top to bottom'}|"
        f"in the {row}, (what|which {many}) do you see)?"
    )
    return pose("list", rng, form, ", ".join(map(name_of, things)), things)


def _biggest(scene: Scene, rng: random.Random) -> QA | None:
    """The biggest or smallest of all: it is asked for more often than `kinds` does."""
    biggest, noun = rng.random() < 0.5, nouns_for(scene, rng)[0]
    found = extreme_size(scene.shapes(), biggest)
    if found is None:
        return None
    most = "(biggest|largest|greatest|most big)" if biggest else "(smallest|tiniest|littlest|least big)"
    ones = f"of (the {noun}s|all {noun}s|all the {noun}s)"
    form = (
        f"({_WHAT} (is|was|would be) the {most} {noun}|{_WHAT} {noun} (is|was drawn|did they draw|"
        f"looks|has been "
        f"drawn) (the |){most}|{_WHAT} {ones} is (the |){most}|the {most} {noun}( is what| is which|"
        f", please|)|"
        f"(find|name|identify|give me|tell me|say|show) the {most} {noun}|{most} {noun}|"
        f"{_WHAT} {noun} has the {most} size|(what's|what is) the {most}( one|)( of (all|them)|) {ones})?"
    )
    if rng.random() < 0.3:
        form = (
            f"({_WHAT} {_COLOUR} (is|has) the {most} {noun}|(what's|what is|name) the {_COLOUR} of "
            f"the {most} "
            f"{noun}|the {most} {noun}(:|,) {_WHAT} {_COLOUR}( is it|)|{_COLOUR} of (the |){most} {noun})?"
        )
        return pose("colour", rng, form, found.colour)
    return one_of(rng, form, found)


_ASKERS = (
    _both, _both, _both, _any_other, _any_other, _fewer, _fewer, _in_order, _in_order, _row, _row, _row, _row,
    _biggest, _biggest, _biggest, _biggest,
)  # fmt: skip


# -------------------------------------------------------------------------------------------- follow-ups
_AND = "(and|and|what about|how about|and what about|now)"


def two_turns(scene: Scene, rng: random.Random) -> list[QA]:
    """Two or three turns of which the later ones lean on those before: the smallest after the biggest, the
    other end, a word and its letters."""
    makers = rng.sample(_TURNS, len(_TURNS))
    return next((turns for maker in makers if (turns := maker(scene, rng))), [])


def _other_end(scene: Scene, rng: random.Random) -> list[QA]:
    """The biggest, then the smallest; the leftmost, then the rightmost; and the colour of that."""
    shapes, noun = scene.shapes(), nouns_for(scene, rng)[0]
    if rng.random() < 0.55:
        ends = [("biggest", extreme_size(shapes, True)), ("smallest", extreme_size(shapes, False))]
    else:
        side = rng.choice(list(_OTHER))
        said = {"left": "leftmost", "right": "rightmost", "top": "topmost", "bottom": "lowest"}
        ends = [
            (said[s], farthest(scene, shapes, s) if len(shapes) > 1 else None) for s in (side, _OTHER[side])
        ]
    rng.shuffle(ends)
    (one, first), (two, second) = ends
    if first is None or second is None:
        return []
    asked = one_of(rng, f"(which|what) (is the {one} {noun}|{noun} is (the |){one})?", first)
    if rng.random() < 0.3:
        form = f"((and |)(its|the) {_COLOUR}|(what|which) {_COLOUR} is it|and {_WHAT} {_COLOUR} is that)?"
        return [asked, pose("colour", rng, form, first.colour)]
    end = f"({_AND}|) the {two}( one| {noun}|)|(and |){_WHAT} (one |)is (the |){two}( one|)|{two}"
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
        f"((and |)(what is |)(its|the) {_COLOUR}|{_WHAT} {_COLOUR} (is it|has it|is it (printed|written)"
        f" in)|in {_WHAT} {_COLOUR} is it)?"
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
    what = "shapes" if shape else f"{_COLOUR}s"
    values = [t.name for t in ordered] if shape else list(dict.fromkeys(t.colour for t in ordered))
    which = pose(
        "list",
        rng,
        f"(and |)({_WHAT} {what} (are they|do they have)|their {what}|{what})?",
        ", ".join(values),
    )
    if shape or rng.random() < 0.5 or one.colour == two.colour:
        return [first, which]
    other = (
        f"one (of them |)is {ordered[0].colour}. "
        f"({_WHAT} {_COLOUR} (is|has) the other( one|)|the other( one|))?"
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
    if len(known) < 2:
        return []
    picked = rng.sample(known, min(len(known), 3))
    first = "(how many {t} (are there|do you see|did i draw|does it have)|count the {t})?"
    said = [say(phrase, rng) for phrase, _ in picked]
    turns = [pose("count", rng, first, str(picked[0][1]), t=said[0].replace(" ones", " shapes"))]
    for phrase, (_, count) in zip(said[1:], picked[1:]):
        later = "({a} (the |){t}|{t}|and how many {t}|how many {t})?"
        turns.append(pose("count", rng, later, str(count), t=phrase, a=say(_AND, rng)))
    return turns


_TURNS = (_other_end, _other_end, _of_word, _of_word, _other_of_two, _more_things)
