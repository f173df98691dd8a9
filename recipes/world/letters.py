"""Questions about what is printed: how many letters the word has, which, and the colour of the writing."""

from __future__ import annotations

import random
from collections import Counter

from recipes.world.computed import (
    COLOUR,
    COLOUR_OF,
    IF,
    IS_COLOUR,
    MIND,
    SO,
    TAG,
    TELL,
    TRUE,
    WHAT,
    fill,
    pose,
    yes_no,
)
from shapes.world import COLOURS, QA, Scene

_NAME = "(tell me|say|write|name|report|give me|state|spell out|I'd like to know|I want to know)"


def ask_letters(scene: Scene, rng: random.Random) -> QA | None:
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
            f"{TELL} how many letters (the {{w}} has|there are in the {{w}}|make up the {{w}}).|in the "
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
            f"((what is|what's) the {at} letter (of|in) the {{w}}|{WHAT} letter (does the {{w}} "
            f"{starts} with|comes {'first' if first else 'last'}( in the {{w}}|))|"
            f"{at} letter of the {{w}}|(tell me|name) the {at} letter( of the {{w}}|)|the "
            f"{{w}} {starts}s with (what|which) letter|with (which|what) letter does the "
            f"{{w}} {starts}|the {{w}}(:|,| -) {at} letter|the {{w}}: (what|which) is its {at} letter|{at} "
            f"letter of "
            f"the {{w}} =|the {at} letter of the {{w}} is (what|which)|{TELL} (what|which) letter the "
            f"{{w}} {starts}s "
            f"with.|{_NAME} the {at} letter of the {{w}}.|read the {{w}}. What is its {at} letter|what is "
            f"it, the "
            f"{at} letter of the {{w}}|(what|which) letter did I write {'first' if first else 'last'} in "
            f"the {{w}}|"
            f"I (need|want) the {at} letter of the {{w}}.|{WHAT} letter is {'first' if first else 'last'} "
            f"in the "
            f"{{w}}|(what|which) letter stands at the {'beginning' if first else 'end'} of the {{w}}|"
            f"in the {{w}}, (what|which) letter comes {'first' if first else 'last'}|(what|which) is the "
            f"{{w}}'s {at} "
            f"letter|the {{w}}'s {at} letter|{SO} what is the {at} letter of the {{w}}|what letter the "
            f"{{w}} {starts}s "
            f"with|letter at the {'beginning' if first else 'end'} of the {{w}})?"
        )
        return pose("letter", rng, form, word[0] if first else word[-1], w=noun)
    if which < 0.86:
        letter = rng.choice((word[0], rng.choice("abcdefghilmnoprstu")))
        form = (
            "(does the {w} (start|begin) with the letter {l}|is {l} the first letter of the {w}|"
            f"the {{w}} (starts|begins) with {{l}}{TAG}|{IF} the {{w}} (starts|begins) with {{l}}.|is "
            f"the first "
            f"letter of the {{w}} {{l}}|{MIND} the {{w}} begins with {{l}}{TRUE}|first letter of the "
            f"{{w}} = {{l}}|"
            f"is it {{l}} that the {{w}} starts with|did I write a word (with {{l}} at its front|that "
            f"starts with "
            f"{{l}})|the {{w}}(:|,) first letter {{l}}{TAG}|{{l}}: does the {{w}} start with it|is {{l}} "
            f"at the "
            f"(front|start|beginning) of the {{w}}|{SO} does the {{w}} start with {{l}}|the {{w}} starts "
            f"with {{l}} "
            "or not|is the letter {l} what the {w} starts with)?"
        )
        written = rng.choice((letter, letter.upper()))
        return pose("exists", rng, form, yes_no(word[0] == letter), w=noun, l=written)
    if rng.random() < 0.5:
        letter = rng.choice((rng.choice(word), rng.choice("abcdefghilmnoprstu")))
        form = (
            "(does the {w} (contain|have) the letter {l}|is the letter {l} in the {w}|is there (a letter|the "
            f"letter) {{l}} in the {{w}}|the {{w}} has the letter {{l}}{TAG}|{IF} the {{w}} has the "
            f"letter {{l}}.|"
            f"{MIND} the letter {{l}} is in the {{w}}{TRUE}|letter {{l}} in the {{w}}{TAG}|did I use "
            f"the letter {{l}} "
            f"in the {{w}}|was the letter {{l}} used in the {{w}}|the {{w}}(:|,) is there the letter {{l}} "
            f"in it|"
            "is {l} (one of the letters of|among the letters of) the {w}|do you find the letter {l} in the "
            "{w}|"
            f"can the letter {{l}} be found in the {{w}}|{SO} is the letter {{l}} in the {{w}}|"
            "do you need the letter {l} to spell the {w}|the letter {l}, does the {w} have it)?"
        )
        return pose(
            "exists", rng, form, yes_no(letter in word), w=noun, l=rng.choice((letter, letter.upper()))
        )
    said = word if rng.random() < 0.5 else rng.choice(("apple", "house", "tree", "cat", "moon", "stone"))
    form = (
        '(is the {w} "{s}"|does (it|the {w}) say "{s}"|is "{s}" written here|does the {w} read "{s}"|'
        f'the {{w}} is "{{s}}"{TAG}|{IF} the {{w}} (is|says) "{{s}}".|{MIND} the {{w}} is "{{s}}"{TRUE}|'
        f'"{{s}}"(:|,) is that the {{w}}|is "{{s}}" (the {{w}}|what the {{w}} says|what is written)|the '
        f"{{w}}(:|,) "
        f'"{{s}}"{TAG}|did I write "{{s}}"|was "{{s}}" (written|printed)|{{w}} = "{{s}}"|is it "{{s}}" '
        f"that is "
        f'written|{SO} is the {{w}} "{{s}}"|I wrote "{{s}}"(, '
        f'didn\'t I|, right|. Is that so)|does it spell "{{s}}"|'
        'can you read "{s}" there|is the {w} {s}|does the {w} say {s})?'
    )
    return pose("exists", rng, form, yes_no(said == word), w=noun, s=said)


def ask_of_text(scene: Scene, rng: random.Random) -> QA | None:
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
                f"was the {{t}} (written|printed) in {{c}}|{fill(IS_COLOUR, 'the {t}')})?"
            ),
            yes_no(said == thing.colour),
            t=noun,
            c=said,
        )
    form = (
        f"({WHAT} {COLOUR} is the {{t}}|(what is|what's) the {COLOUR} of the {{t}}|{WHAT} "
        f"{COLOUR} (is the {{t}} (written|printed) in|does the {{t}} have)|in (what|which) "
        f"{COLOUR} is the {{t}} (written|printed)|{COLOUR} of the {{t}}|{{t}} {COLOUR}|in (what|which) "
        f"{COLOUR} "
        f"did I write the {{t}}|the {{t}} was (written|printed) in (what|which) {COLOUR}|"
        f"{fill(COLOUR_OF, 'the {t}')})?"
    )
    return pose("colour", rng, form, thing.colour, t=noun)
