"""Questions whose answers are computed from the whole scene: "and", "or" and "not", "both" and "either",
exact numbers, whether all are alike, which are so, colours, the ground. Each is asked in the many wordings of
a grammar (`grammar.say`), and drawn together with those of `where` and `letters`.

Where a person could doubt the truth (one thing that is both, two colours as frequent), nothing is asked.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from recipes.world.computed import (
    COLOUR,
    COLOUR_OF,
    COUNT_OF,
    IF,
    IS_COLOUR,
    LIST_OF,
    MIND,
    SEE,
    SO,
    TAG,
    TELL,
    TRUE,
    WHAT,
    fill,
    ground,
    kind_of,
    listed,
    most_used,
    nouns_for,
    only_shapes,
    pose,
    shapes_of,
    yes_no,
)
from recipes.world.grammar import with_article
from recipes.world.letters import ask_letters, ask_of_text
from recipes.world.scene import Thing
from recipes.world.where import (
    ask_beside,
    ask_biggest,
    ask_corner,
    ask_extreme,
    ask_half,
    ask_in_order,
    ask_near_or_between,
    ask_referent,
    ask_row,
    ask_size,
)
from shapes.questions import NUMBER_WORDS, name_of, plural, reading_order, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

_HERE = "(| there| here| in it| in the (picture|image|drawing)| in this (picture|image|drawing))"
_PICTURE = "(picture|image|drawing)"
_THERE = f"(||| there| here| in it| in the {_PICTURE}| in this {_PICTURE})"


# ----------------------------------------------------------------------------- numbers and sets of shapes
Set = tuple[str, list[Thing]]  # a plural phrase and the shapes that it means


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
        f"(how many {{t}} {SEE}(| in total| altogether| together)|how many {{t}}|count the {{t}}|"
        "(what is|what's) the (total |)(number|count) of {t}|the number of {t}|number of {t}|"
        "(add up|count) the {t}( together|)|(please tell me|tell me|i want to know) how many {t} there are|"
        f"{COUNT_OF})?"
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
        verb = f"{many} (are not|aren't|do not have the {COLOUR}|don't have the {COLOUR}) {colour}"
        put = (
            f"{many} (that are not|that aren't|which aren't|not) {colour}|(non-|non ){colour} {many}|"
            f"{many} (other than|except|besides|apart from) the {colour} ones|"
            f"{many} of another {COLOUR} than {colour}"
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
            f"(what is|what's) the number of ({put})|{fill(COUNT_OF, f'({put})')})?"
        )
        return pose("count", rng, form, str(len(found)))
    if len(found) > 5:
        return None
    form = f"({WHAT} {verb}|(list|name) (the|all|all the) ({put})|{fill(LIST_OF, f'({put})')})?"
    return listed("list", rng, form, found, name_of)


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
                f"{drew} (only|just|exactly) one {{t}}|only one {{t}}{TAG}|one {{t}} and no more{TAG}|"
                f"{IF} there is (only|just|exactly) one {{t}}.|is one the number of {plural(phrase)}|"
                "there is just one {t}, (no|right|isn't there)|only one {t} here|"
                f"{MIND} there is only one {{t}}{TRUE}|number of {plural(phrase)} = 1|"
                f"a single {{t}}, (yes or no|right|is that all)|{plural(phrase)}: only one|"
                "is it one {t} only|was only one {t} drawn)?"
            )
            return pose("exists", rng, form, yes_no(count == 1), t=phrase)
        if which < 0.8:
            several = f"are there several {plural(phrase)}|" if count != 2 else ""  # two may be several
            form = (
                f"((is there|do you see|can you see) more than (one|1) {{t}}{_HERE}|{drew} more than one "
                f"{{t}}|"
                f"more than one {{t}}{TAG}|{IF} there is more than one {{t}}.|{plural(phrase)}: more than "
                f"one|{MIND} there is more than one {{t}}{TRUE}|{several}"
                f"is the number of {plural(phrase)} more than one|more than one {{t}} here|"
                f"was more than one {{t}} drawn|{plural(phrase)}, are there two or more)?"
            )
            return pose("exists", rng, form, yes_no(count > 1), t=phrase)
        form = (
            f"({sees} at least (one|1) {{t}}{_HERE}|{drew} at least one {{t}}|at least one {{t}}{TAG}|"
            f"{IF} there is at least one {{t}}.|one {{t}} or more{TAG}|was at least one {{t}} drawn|"
            f"{MIND} there is at least one {{t}}{TRUE}|one {{t}} at least, is it there)?"
        )
        return pose("exists", rng, form, yes_no(count >= 1), t=phrase)
    if which < 0.45:
        if count > k:  # then "two" is true of two of them, and false of all
            return None
        form = (
            f"({sees} {{n}} {{t}}{_HERE}|{{n}} {{t}}, (right|correct|yes)|{drew} {{n}} {{t}}|{{n}} "
            f"{{t}}{TAG}|"
            f"there are {{n}} {{t}}(, aren't there|, no|, right|. True)|{IF} there are {{n}} {{t}}.|"
            f"{MIND} there are {{n}} {{t}}{TRUE}|is {{n}} the number of {{t}}|{{t}}(:|,| -) {{n}}{TAG}|"
            "number of {t} = {n}|I drew {n} {t}(, didn't I|, right|. Is that so)|were {n} {t} drawn|"
            f"{{n}} {{t}}, are they there|are the {{t}} {{n}}|{{t}}: are there {{n}}|I count {{n}} "
            f"{{t}}{TRUE}|"
            f"is it {{n}} {{t}} (that you see|that I drew)|{SO} are there {{n}} {{t}}|{{n}} {{t}} here)?"
        )
        return pose("exists", rng, form, yes_no(count == k), n=number, t=t)
    if which < 0.65:
        form = (
            f"({sees} (exactly|just|only|precisely) {{n}} {{t}}{_HERE}|is the number of {{t}} {{n}}|"
            f"{drew} (exactly|just|only) {{n}} {{t}}|exactly {{n}} {{t}}{TAG}|{IF} there are exactly {{n}} "
            f"{{t}}.|{{n}} {{t}}, no more and no less{TAG}|is {{n}} the exact number of {{t}}|"
            f"{MIND} there are exactly {{n}} {{t}}{TRUE}|{{t}}: exactly {{n}}|number of {{t}} = {{n}}|"
            "were exactly {n} {t} drawn|is {n} right for the number of {t}|exactly {n} {t} here|"
            "does the count of {t} come to {n}|is it exactly {n} {t} that I drew)?"
        )
        return pose("exists", rng, form, yes_no(count == k), n=number, t=t)
    if which < 0.78:
        form = (
            f"({sees} at least {{n}} {{t}}{_HERE}|{sees} {{n}} or more {{t}}{_HERE}|{drew} at least {{n}} "
            f"{{t}}|"
            f"at least {{n}} {{t}}{TAG}|{{n}} {{t}} or more{TAG}|{IF} there are at least {{n}} {{t}}.|"
            f"{MIND} there are at least {{n}} {{t}}{TRUE}|{{t}}: at least {{n}}|were at least {{n}} {{t}} "
            "drawn|is the number of {t} {n} or more|is the number of {t} at least {n}|at least {n} {t} here)?"
        )
        return pose("exists", rng, form, yes_no(count >= k), n=number, t=t)
    if which < 0.9:
        form = (
            f"({sees} more than {{n}} {{t}}{_HERE}|{drew} more than {{n}} {{t}}|more than {{n}} {{t}}{TAG}|"
            f"{IF} there are more than {{n}} {{t}}.|{MIND} there are more than {{n}} {{t}}{TRUE}|"
            "{t}: more than {n}|were more than {n} {t} drawn|is the number of {t} (more|greater) than {n}|"
            "is the number of {t} above {n}|does the number of {t} exceed {n}|more than {n} {t} here)?"
        )
        return pose("exists", rng, form, yes_no(count > k), n=number, t=t)
    form = (
        f"({sees} (fewer|less) than {{n}} {{t}}{_HERE}|{drew} (fewer|less) than {{n}} {{t}}|fewer than {{n}} "
        f"{{t}}{TAG}|{IF} there are fewer than {{n}} {{t}}.|{MIND} there are fewer than {{n}} "
        f"{{t}}{TRUE}|"
        "{t}: fewer than {n}|were fewer than {n} {t} drawn|is the number of {t} (less|smaller) than {n}|"
        "is the number of {t} below {n}|less than {n} {t} here)?"
    )
    return pose("exists", rng, form, yes_no(count < k), n=number, t=t)


def _two_phrases(scene: Scene, rng: random.Random) -> tuple[str, list[Thing], str, list[Thing]] | None:
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
    pair = _two_phrases(scene, rng)
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
            f"({is_there} {{a}} and {{b}}{_THERE}|{is_there} both {{a}} and {{b}}{_THERE}|"
            f"{is_there} {{a}} as well as {{b}}{_THERE}|(are|is) both {{a}} and {{b}}( there| present| "
            f"shown)|both {{a}} and {{b}}( there|{_THERE}|)|{{a}} and {{b}}: are both there|"
            f"does the {_PICTURE} (show|contain|have|include) (both |){{a}} and {{b}}|"
            f"did (i|they|someone) draw (both |){{a}} and {{b}}|there (is|are) (both |){{a}} and {{b}}, "
            f"(right|correct|true)|(can|could) both {{a}} and {{b}} be (seen|found))?"
        )
        return pose("exists", rng, form, yes_no(bool(ones and twos)), a=a, b=b)
    if which < 0.9:
        form = (
            f"({is_there} {{a}} or {{b}}{_THERE}|{is_there} either {{a}} or {{b}}{_THERE}|"
            f"{sees} ((at least|even) one {{e}} or {{f}}|at least one of them, {{a}} or {{b}})|"
            f"any {{c}} or {{d}}{_THERE}|"
            f"(are there|do you see|can you see|does it have) any {{c}} or( any|) {{d}}{_THERE}|"
            f"does the {_PICTURE} (show|contain|have|include) {{a}} or {{b}}|{{c}} or {{d}}, any of "
            f"them{_THERE}|"
            f"did (i|they|someone) draw (any {{c}} or {{d}}|{{a}} or {{b}})|"
            f"is there (at least |)one {{e}} or {{f}}{_THERE})(?|?|, yes or no?)"
        )
        slots = {"c": plural(one), "d": plural(two), "e": one, "f": two}
        return pose("exists", rng, form, yes_no(bool(ones or twos)), a=a, b=b, **slots)
    form = (
        f"(is there neither {{a}} nor {{b}}{_THERE}|are there no {{c}} and no {{d}}{_THERE}|"
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
    kind = f"{COLOUR}" if by_colour else "(shape|kind|form)"
    so = said if by_colour else with_article(said)
    sees = "(is there|do you see|can you see|can you find|does it have)"
    form = (
        f"({sees} (any {noun}|{with_article(noun)}|one {noun}|at least one {noun}|some {noun}) "
        f"(that is not|that isn't|which is not|which isn't) "
        f"{so}{_THERE}|is any{thing} not {so}{_THERE}|are there (any |){many} (that are not|that "
        f"aren't|which aren't) {said if by_colour else plural(said)}|{sees} (any {noun}|"
        f"{with_article(noun)}|some {noun}) (of another|"
        f"of a different|in another|with a different) {kind} than "
        f"{said if by_colour else 'the ' + plural(said)}"
        f"|(any|are there any|are there) {many} (besides|other than|apart from|except) "
        f"{'the ' + said + ' ones' if by_colour else 'the ' + plural(said)}|"
        f"(any|is there any) non-{said} {noun}{_THERE}|is (anything|something) (here|there|) (not|other "
        f"than) {so})?"
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
        f"({WHAT} (are there|do you see|do we have|is there|can you see) {sign} of(,|:| here,) "
        f"{{a}} or {{b}}|"
        f"(are there|do you see|did i draw|did they draw|can you count|does it have) {sign} {{a}} or"
        f"( {sign}|) {{b}}{_THERE}|{{a}} or {{b}}(,|:| -) ({WHAT} (are|is) {less}|{WHAT} are there "
        f"{sign} of|"
        f"of which are there {sign})|{sign} {{a}} or( {sign}|) {{b}}{_THERE}|{WHAT} (is|are) {less}"
        f"(,|:|{_THERE},) {{a}} or {{b}}|(between|of|comparing|among) (the |){{a}} and (the |){{b}}, {WHAT} "
        f"(are there {sign} of|are {less}|is {less})|{WHAT} (appears|occurs|was drawn|do you see) {often}, "
        f"{{a}} or {{b}}|(say|name|tell me) (what|which) there (is|are) {sign} of(:|,) {{a}} or {{b}}|"
        f"which (group|set) is {group}(,|:) (the |){{a}} or (the |){{b}})?"
    )
    noun = plural if by_name else "{} shapes".format
    said = plural(answer) if by_name else answer
    return pose("compare", rng, form, said, a=noun(one), b=noun(two))


def _how_many_kinds(scene: Scene, rng: random.Random) -> QA | None:
    names = tally(scene)[0]
    if not names:
        return None
    form = (
        "(how many (different|kinds of|types of|sorts of|distinct|different kinds of|"
        f"different types of) shapes {SEE}|how many (different |)(shape types|kinds of "
        f"shapes)|{fill(COUNT_OF, '((different |)kinds of shapes|types of shapes|different shapes)')})?"
    )
    return pose("count", rng, form, str(len(names)))


# ------------------------------------------------------------------------ what is alike, and which are so
def _all_alike(scene: Scene, rng: random.Random) -> QA | None:
    shapes, (_, many) = scene.shapes(), nouns_for(scene, rng)
    if len(shapes) < 2:
        return None
    names, colours, _ = tally(scene)
    them = f"all (the |of the |){many}|the {many}( all|)|these {many}( all|)"
    them = f"({them}|they( all|)|all of them|these( all|))" if only_shapes(scene) else f"({them})"
    these = f"all (the |of the |){many}|the {many}|these {many}"  # where "they" would be "them"
    these = f"({these}|them|all of them|these)" if only_shapes(scene) else f"({these})"
    for_all = f"same {COLOUR} for all|" if only_shapes(scene) else ""
    which = rng.random()
    if which < 0.22:
        form = (
            f"(are {them} (the same|of the same|of one|one) {COLOUR}|do {them} have the same {COLOUR}|"
            f"(have|share) {them} (the same|one) {COLOUR}|{for_all}is there (only|just) one "
            f"{COLOUR} for {these}|did I (draw|make) {these} in (the same|one) {COLOUR}|the {many}: all of "
            f"one "
            f"{COLOUR}|were {them} drawn in (the same|one) {COLOUR}|the {many} are all the same "
            f"{COLOUR}{TAG}|"
            f"{IF} {them} (are the same|have the same|are of one) {COLOUR}.|one {COLOUR} for all the "
            f"{many}|"
            f"is the {COLOUR} of {these} the same|is it (one and |)the same {COLOUR} for {these}|"
            f"{MIND} {them} have the same {COLOUR}{TRUE}|the {many} have all same {COLOUR}{TAG}|"
            f"does every {many[:-1]} have the same {COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(len(colours) == 1))
    if which < 0.4:
        form = (
            f"(are {them} (the same|of the same) (shape|kind|type|form)|do {them} have the same (shape|form)|"
            "(is there|are there) only one (kind|type|sort) of shape|same shape for all|"
            f"did I draw (only|just) one kind of shape|the {many}: all of one kind|is the shape of {these} "
            f"the "
            f"same|{IF} {them} are of (one|the same) kind.|one kind of shape only{TAG}|"
            f"the {many} are all of the same kind{TAG}|were {them} drawn as the same shape|"
            f"{MIND} {them} are of the same kind{TRUE}|is it the same shape (again and again|every time)|"
            f"the {many} have all same shape{TAG})?"
        )
        return pose("exists", rng, form, yes_no(len(names) == 1))
    if which < 0.5:
        form = (
            f"(do {them} have (different|a different) {COLOUR}s|are {them} (differently "
            f"coloured|of different {COLOUR}s)|did I (use|take) different {COLOUR}s for {these}|"
            f"were {them} drawn in different {COLOUR}s|{IF} {them} have different {COLOUR}s.|"
            f"the {many} are of different {COLOUR}s{TAG}|the {many}: different {COLOUR}s|"
            f"different {COLOUR}s for {these}|{MIND} {them} have different {COLOUR}s{TRUE})?"
        )
        if 1 < len(colours) < len(shapes):
            return None  # some are alike, some are not
        return pose("exists", rng, form, yes_no(len(colours) > 1))
    if which < 0.6:
        twice = "more than once" if max(colours.values()) > 2 else "(twice|more than once)"
        bare = (
            f"is any {COLOUR} (there|used) {twice}|did I use (any|a) {COLOUR} {twice}|"
            f"was (a|any) {COLOUR} used {twice}|does (any|a) {COLOUR} "
            f"(repeat|come {twice}|appear more than once)|"
            f"same {COLOUR} {twice}{TAG}|"
        )
        bare = bare if only_shapes(scene) else ""  # else a word's colour may be meant, too
        form = (
            f"((are there|do you see) (two|any two|any) {many} (of|with|that have) the same {COLOUR}|"
            f"do (any|any two|two) {many} (have the same|share a) {COLOUR}|{bare}"
            f"two {many} of (one|the same) {COLOUR}{TAG}|"
            f"{IF} (two|any two) {many} have the same {COLOUR}.|"
            f"are there {many} that (share a|have the same) {COLOUR}|"
            f"{MIND} two {many} have the same {COLOUR}{TRUE})?"
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
                f"(are {them}{{t}}( all|) the same {COLOUR}|do {them}{{t}} have the same {COLOUR}|"
                f"did I draw {them}{{t}} in (one|the same) {COLOUR}|the {{t}}: all of one {COLOUR}|"
                f"{IF} {them}{{t}} have the same {COLOUR}.|the {{t}} have all same {COLOUR}{TAG}|"
                f"is there just one {COLOUR} for the {{t}}|were {them}{{t}} drawn in the same {COLOUR}|"
                f"is the {COLOUR} of {them}{{t}} the same|{MIND} {them}{{t}} have the same "
                f"{COLOUR}{TRUE}|"
                f"the {{t}}, same {COLOUR} or not|does every {name} have the same {COLOUR})?"
            )
            return pose("exists", rng, form, yes_no(len({t.colour for t in found}) == 1), t=plural(name))
        form = (
            f"(are {them}{{t}} {{c}}|is every {{o}} {{c}}|all {{t}} are {{c}}, (right|correct)|"
            f"did I draw {them}{{t}} in {{c}}|is {{c}} the {COLOUR} of (all|every one of) the {{t}}|"
            f"{IF} all the {{t}} are {{c}}.|{{t}}(:|,) all (of them |){{c}}{TAG}|was every {{o}} drawn "
            f"in {{c}}|"
            f"does every {{o}} have the {COLOUR} {{c}}|{MIND} all the {{t}} are {{c}}{TRUE}|"
            f"is {{c}} the only {COLOUR} of the {{t}}|are all the {{t}} {{c}} or not|every {{o}} is "
            f"{{c}}{TAG}|"
            "is it true that all the {t} are {c})?"
        )
        return pose(
            "exists", rng, form, yes_no(all(t.colour == said for t in found)), t=plural(name), o=name, c=said
        )
    said = rng.choice([*colours, rng.choice(COLOURS)])
    alone = only_shapes(scene)
    if rng.random() < 0.5:
        form = (
            f"(are {them} {{c}}|is every {many[:-1]} {{c}}|is each {many[:-1]} {{c}}|are {them} {{c}} ones|"
            f"did I draw {these} in {{c}}|is {{c}} the {COLOUR} of {these}|is {{c}} the {COLOUR} of every "
            f"{many[:-1]}|{IF} {them} are {{c}}.|every {many[:-1]} is {{c}}{TAG}|were {them} drawn in "
            f"{{c}}|"
            f"{MIND} {them} are {{c}}{TRUE}|does every {many[:-1]} have the {COLOUR} {{c}}|{many}: all "
            f"{{c}}|"
            f"{f'nothing but {{c}} {many}{TAG}|are there only {{c}} {many}|' if alone else ''}"
            f"are {them} {{c}} or not)?"
        )
        return pose("exists", rng, form, yes_no(all(t.colour == said for t in shapes)), c=said)
    name = rng.choice(list(names))
    form = (
        f"(are {them} {{t}}|is every {many[:-1]} {{a}}|is each {many[:-1]} {{a}}|"
        f""
        f"{'did I draw (only|nothing but|just) {t}|are there only {t}|' if alone else ''}"
        f"{IF} {them} are {{t}}.|every {many[:-1]} is {{a}}{TAG}|"
        f"{MIND} {them} are {{t}}{TRUE}|only {{t}} and no other {many}{TAG}|{many}: all {{t}}|"
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
            f"(are the {{a}} and the {{b}} (the same|of the same) {COLOUR}|do the {{a}} "
            f"and (the |){{b}} (have|share) the same {COLOUR}|"
            f"(does the {{a}} have|has the {{a}}|is the {{a}}) the same {COLOUR} as the {{b}}|"
            f"the {{a}} and the {{b}}(:|,| -) (same {COLOUR}|one {COLOUR})(, yes or no| or not|)|same "
            f"{COLOUR} "
            f"for the {{a}} and the {{b}}|did I (draw|make) the {{a}} and the {{b}} in (the same|one) "
            f"{COLOUR}|"
            f"{IF} the {{a}} (is|has) the same {COLOUR} as the {{b}}.|were the {{a}} and the {{b}} drawn "
            f"in "
            f"the same {COLOUR}|is the {COLOUR} of the {{a}} (also |)(that|the {COLOUR}) of the {{b}}|"
            f"the {{a}} has the same {COLOUR} as the {{b}}{TAG}|is it the same {COLOUR}, the {{a}} and "
            f"the "
            f"{{b}}|{MIND} the {{a}} and the {{b}} have the same {COLOUR}{TRUE}|is the {{a}} as "
            f"{one.colour} as "
            f"the {{b}}|{COLOUR} of the {{a}} = {COLOUR} of the {{b}}|the {{a}} have same {COLOUR} like "
            f"the "
            f"{{b}}{TAG}|do the {{a}} and the {{b}} match in {COLOUR}|{{a}} and {{b}}: same {COLOUR})?"
        )
        return pose("exists", rng, form, yes_no(one.colour == two.colour), a=one.name, b=two.name)
    form = (
        f"({WHAT} (other |)shape (has|shares) the (same |){COLOUR} (of|as) the {{a}}|"
        f"which (other |)shape is the same {COLOUR} as the {{a}}|"
        f"{WHAT} other shape is as {one.colour} as the {{a}}|{TELL} (what|which) other shape has the "
        f"{COLOUR} "
        f"of the {{a}}.|the {{a}} has the same {COLOUR} as which (other |)shape|apart from the {{a}}, "
        f"{WHAT} "
        f"shape is {one.colour}|{WHAT} other shape did I draw in the {COLOUR} of the {{a}}|same "
        f"{COLOUR} as the "
        f"{{a}}(:|,| -) (what|which) shape|(name|give) the other shape that has the {COLOUR} of the {{a}}.|"
        f"{WHAT} other shape was drawn in the {COLOUR} of the {{a}}|with {WHAT} shape does the {{a}} "
        f"share "
        f"its {COLOUR}|the {{a}} and what other shape are {one.colour}|{SO} {WHAT} other shape has the "
        f"{COLOUR} "
        f"of the {{a}}|{WHAT} shape matches the {{a}} in {COLOUR})?"
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
        ones = f"|{WHAT} of (them|these) are {{c}}|{WHAT} ones are {{c}}|{WHAT} are {{c}}"
        form = (
            f"({WHAT} {many} are {{c}}|{WHAT} of the {many} are {{c}}{ones if only_shapes(scene) else ''}|"
            f"(list|name|give me|tell me) (all |)(the |){{c}} {many}|{WHAT} {{c}} {many} "
            f"(are there|do you see)|what are the {{c}} {many}|"
            f"(list|name|enumerate) the {many} (that are|which are|in) {{c}}|"
            f"{WHAT} {many} have the {COLOUR} {{c}}|"
            f"{WHAT} {many} (are coloured|are painted|are drawn in|come in) {{c}}|{{c}} {many}|"
            f"{fill(LIST_OF, f'{{c}} {many}')}|{fill(LIST_OF, f'{many} in {{c}}')}|"
            f"(in|with the {COLOUR}) {{c}}, which {many} are there|{{c}} is the {COLOUR} of which {many}|"
            f"for which {many} was {{c}} used|which {many} did I (make|paint|draw in) {{c}})?"
        )
        return listed("list", rng, form, found, lambda t: t.name, c=colour)
    name = rng.choice(list(names))
    found = [t for t in shapes if t.name == name]
    said = list(dict.fromkeys(t.colour for t in reading_order(found)))
    if len(found) < 2:
        return None
    form = (
        f"({WHAT} {COLOUR}s are the {{t}}|{WHAT} {COLOUR}s do the {{t}} have|what are "
        f"the {COLOUR}s of the {{t}}|"
        f"(list|name|tell me) the {COLOUR}s of the {{t}}|{WHAT} {COLOUR}s (have|are) "
        f"the {{t}}|in (what|which) {COLOUR}s are the {{t}}|"
        f"{COLOUR}s of the {{t}}|the {{t}} have (what|which) {COLOUR}s|the {{t}}(:|,| -) (what|which) "
        f"{COLOUR}s|"
        f"{COLOUR}s of the {{t}} =|(what|which) {COLOUR}s did (I|they) (use|pick|take) for the {{t}}|"
        f"in (what|which) {COLOUR}s did I draw the {{t}}|{TELL} (what|which) {COLOUR}s the {{t}} (are|"
        f"have).|"
        f"the {{t}} were drawn in (what|which) {COLOUR}s|(what|which) {COLOUR}s were used for the {{t}}|"
        f"I (need|want) the {COLOUR}s of the {{t}}.|{{t}}(:| -) {COLOUR}s|{SO} what {COLOUR}s are the "
        f"{{t}}|"
        f"what are they, the {COLOUR}s of the {{t}}|what {COLOUR}s the {{t}} have|"
        f"I drew {{t}}. In (what|which) {COLOUR}s|how are the {{t}} coloured)?"
    )
    return pose("list", rng, form, ", ".join(said), t=plural(name))


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
        f"({SEE}|are used|can be seen|does (it|the picture|the image) (have|use|contain|show)|{_HERE}|)"
    )  # fmt: skip
    which = rng.random()
    if which < 0.42:
        form = (
            f"(how many (different |distinct |)(colours|colors) {used}|how many (different |"
            ")(colours|colors)|(what is|what's) the number of (different |)(colours|colors)|"
            "number of (colours|colors)|count the (colours|colors)|"
            f"{fill(COUNT_OF.replace('draw|make|put there', 'use|take'), '(different |){t}')})?"
        ).replace("{t}", f"{COLOUR}s")
        form = form.replace("I drew", "I used").replace("(were|have been) drawn", "were used")
        form = form.replace("did I draw", "did I use").replace("was drawn", "was used")
        if of_shapes:
            form = (
                f"(how many (different |distinct |)(colours|colors) {used}|the {many}: how many {COLOUR}s|"
                f"how many {COLOUR}s did I (use|take) for the {many}|the {many} have how many {COLOUR}s|"
                f"{TELL} how many {COLOUR}s the {many} have.|number of {COLOUR}s of the {many}|"
                f"how many {COLOUR}s were used for the {many}|in how many {COLOUR}s are the {many})?"
            )
        return pose("count", rng, form, str(len(said)))
    if which < 0.72:
        form = (
            f"({WHAT} (colours|colors) {used}|{WHAT} (colours|colors)|(list|name|tell me|"
            f"give me) (all |)(the |)(colours|colors)( used|{_HERE}|)|{COLOUR}s(:|, which| -) |{COLOUR}s =|"
            f"(what|which) {COLOUR}s did (I|they|someone) (use|take|pick)|{TELL} (what|which) {COLOUR}s "
            f"(there "
            f"are|I used|you see).|(what|which) {COLOUR}s were used|I used (what|which) {COLOUR}s|"
            f"I (want|need) (a list of |)all the {COLOUR}s.|there are (what|which) {COLOUR}s|"
            f"all {COLOUR}s, as a list|which are the {COLOUR}s|what are they, the {COLOUR}s|"
            f"{COLOUR}s, name them all|what all {COLOUR}s are there|list of {COLOUR}s)?"
        )
        if of_shapes:
            form = (
                f"({WHAT} (colours|colors) {used}|(list|name) the (colours|colors) of the {many}|"
                f"the {many}: (what|which) {COLOUR}s|(what|which) {COLOUR}s did I use for the {many}|"
                f"{TELL} what {COLOUR}s the {many} have.|{COLOUR}s of the {many}|"
                f"the {many} have (what|which) {COLOUR}s|in what {COLOUR}s did I draw the {many}|"
                f"what {COLOUR}s were used for the {many})?"
            )
        return pose("list", rng, form, ", ".join(said))
    most = counts.most_common(2)
    kinds = Counter(t.name for t in shapes).most_common(2)
    if which < 0.87 and len(most) > 1 and (winner := most_used(scene)):
        chief = "|dominant" if winner[1] else ""
        main = "|dominant|main" if winner[1] else ""
        form = (
            f"({WHAT} {COLOUR} is (the |)(most common|most frequent{chief}|used most)|"
            f"(what is|what's) the (most common|most frequent{main}) {COLOUR}|"
            f"{WHAT} {COLOUR} (appears|occurs|is used|do you see) (most|most often|the "
            f"most)|most common {COLOUR}|what {COLOUR} did I use (most|most often)|most used {COLOUR}|"
            f"{TELL} (what|which) {COLOUR} is (used most|the most common).|most common {COLOUR} =|"
            f"the {COLOUR} used most(:|,) which is it|which {COLOUR} was used most|the most common "
            f"{COLOUR} "
            f"is (what|which)|(name|give) the most common {COLOUR}.|of which {COLOUR} are there the most "
            f"shapes|"
            f"what is it, the most frequent {COLOUR}|"
            f"which {COLOUR} has the most shapes|which {COLOUR} wins, by number of shapes)?"
        )
        return pose("colour", rng, form, winner[0])
    if len(kinds) > 1 and kinds[0][1] > kinds[1][1]:
        form = (
            f"({WHAT} shape is (the |)(most common|most frequent)|(what is|what's) the "
            "(most common|most frequent) (shape|kind of shape)|"
            f"{WHAT} shape (appears|occurs|is drawn|do you see) (most|most often|the "
            "most)|of which shape are there the most|most common shape|which shape did I draw most often|"
            f"{TELL} which shape (is the most common|there is most of).|most common shape =|"
            "the shape drawn most often(:|,) which is it|which shape was drawn most|the most common shape is "
            "(what|which one)|(name|give) the most common shape.|what is it, the most frequent shape|"
            "which shape has the highest count|which shape wins, by number|which shape is there most of|"
            "what do we have the most of, which shape)?"
        )
        return pose("shape", rng, form, kinds[0][0])
    return None


# ------------------------------------------------------------------------------------------------ grounds
def _ground(scene: Scene, rng: random.Random) -> QA | None:
    said = ground(scene)
    if said is None or not scene.shapes():
        return None
    back = "(background|background|back ground|backdrop|ground|canvas|paper)"
    if rng.random() < 0.3:
        other = said if rng.random() < 0.5 else rng.choice((*COLOURS, "white", "grey"))
        form = (
            f"(is the {back} {{c}}|is it on a {{c}} {back}|does the (picture|image) have a {{c}} {back}|"
            f"{fill(IS_COLOUR, f'the {back}')}|are the shapes (drawn |)on {{c}}|did I draw on {{c}} "
            f"(paper|ground)|"
            f"{{c}} {back}{TAG}|is {{c}} behind the shapes|is what lies behind the shapes {{c}})?"
        ).replace("a {c}", with_article(other))
        return pose("exists", rng, form, yes_no(other == said), c=other)
    form = (
        f"({WHAT} {COLOUR} is the {back}|(what is|what's) the {back} {COLOUR}|(what is|"
        f"what's) the {COLOUR} of the {back}|"
        f"{WHAT} {COLOUR} (does the {back} have|is behind the shapes)|{back} {COLOUR}|"
        f"the {back} is (what|which) {COLOUR}|"
        f"on (what|which) {COLOUR} are the shapes( drawn|)|{fill(COLOUR_OF, f'the {back}')}|"
        f"on (what|which) {COLOUR} did I draw|the shapes are (drawn |)on (what|which) {COLOUR}|"
        f"what {COLOUR} do you see behind the shapes|behind the shapes(:|,) (what|which) {COLOUR})?"
    )
    return pose("ground", rng, form, said)


Asker = Callable[[Scene, random.Random], QA | None]
KINDS: tuple[Asker, ...] = (
    _count_of_two, _count_of_two, _not, _not, _exactly, _exactly, _all_alike, _all_alike, _same_as,
    _which_are, _which_are, _colours, _colours, _how_many_kinds, ask_referent, ask_referent,
    ask_referent, ask_referent, ask_beside, ask_beside, ask_beside, ask_near_or_between,
    ask_near_or_between, ask_corner, ask_corner, ask_corner, ask_half, ask_extreme, ask_extreme,
    ask_size, ask_size, _ground, _ground, ask_letters, ask_letters, ask_letters, ask_of_text,
)  # fmt: skip
MORE_KINDS: tuple[Asker, ...] = (
    _both, _both, _both, _any_other, _any_other, _fewer, _fewer, ask_in_order, ask_in_order, ask_row,
    ask_row, ask_row, ask_row, ask_biggest, ask_biggest, ask_biggest, ask_biggest,
)  # fmt: skip


def ask_kinds(scene: Scene, rng: random.Random, count: int, askers: tuple[Asker, ...] = KINDS) -> list[QA]:
    """Up to `count` of these questions, mostly of different kinds."""
    found: list[QA] = []
    left = rng.sample(askers, len(askers))
    while left and len(found) < count:
        qa = left.pop()(scene, rng)
        found += [qa] if qa is not None else []
    return found
