"""How strangers word questions: about the world, and about what is outside of it.

The questions that are evaluated are those of `questions.TEMPLATES` and of "heldout" here; training has more
wordings, so that a model that learnt from drawings alone takes a sentence it has not seen.
"""

from __future__ import annotations

import random
import re
from functools import cache

from recipes.world import looks
from shapes.questions import TEMPLATES
from shapes.world import COLOURS, SHAPES

QUESTIONS = {
    looks.TRAIN: (
        "What is the capital of France?", "Who painted this?", "How old is the man?", "What animal is this?",
        "What is the weather like?", "Write a poem.", "What is the person doing?", "Which city is this?",
        "Who are you?", "What is two plus three?", "Is the dog asleep?", "What brand is the car?",
        "How many people are there?", "What time is it?", "Translate this into German.", "Is it raining?",
        "What is the title of the chart?", "Which year has the highest value?", "What is the man wearing?",
        "How many cats do you see?", "Tell me a joke.", "What food is on the plate?", "Is this a photograph?",
        "Who won the world cup?", "What is the price?", "Where was this taken?", "What is she holding?",
        "What does the sign mean?", "How much does it cost?", "Can you write code?", "What is your name?",
        "What is the largest bar?", "Which country is this flag from?", "What kind of tree is it?",
        "Is the woman smiling?", "What sport is being played?", "What is the car's colour?", "Hello!",
        "Good morning", "How are you?", "Thank you.", "Why is the sky dark?", "What day is it today?",
        "Who is the president?", "How do I cook rice?", "What is 12 times 7?", "Help me", "What can you do?",
        "Explain gravity.", "How far is the moon?", "Is this person happy?", "How many fingers are there?",
        "What language is this?", "Who is in the photo?", "What happened here?", "Is it day or night?",
    ),
    looks.HELDOUT: (
        "What is the capital of Spain?", "How many dogs are there?", "What is the woman doing?",
        "Who wrote Hamlet?", "What breed is the cat?", "What is the highest value in the chart?",
        "Which building is this?", "What is the boy eating?", "Summarise the text.", "Is the sky cloudy?",
        "What is the name of this place?", "How tall is the tower?",
    ),
}  # fmt: skip
_ABOUT = {  # something that is not in the world
    looks.TRAIN: (
        "What colour is the {n}?", "What color is the {n}?", "How many {n}s are there?", "Where is the {n}?",
        "Is there a {n}?", "Can you see a {n}?", "Do you see the {n} here?", "What is the {n} doing?",
        "What shape is the {n}?", "Point at the {n}.", "Detect the {n}.", "Is the {n} bigger than the {m}?",
        "Is the {n} left of the {m}?", "Who made the {n}?", "Why is the {n} so {m}?", "What is a {n}?",
        "Tell me about the {n}.", "What kind of {n} is this?", "Describe the {n}.", "Draw a {n}.", "{n}",
        "Do you like the {n}?", "How do I make a {n}?", "{n} {m}", "Where can I buy a {n}?", "Find the {n}.",
        "When was the {n} built?", "What is the {n} made of?", "How old is the {n}?", "Give me a {n}.",
        "Are there more {n}s than {m}s?", "How many {n}s can you see?", "Which {n} is the {m}?",
        "How is the {n}?", "Is this a {n} or a {m}?", "What is the {m} next to the {n}?", "{n}?",
    ),
    looks.HELDOUT: (
        "Is the {n} new?", "What does the {n} cost?", "What colour are the {n}s?", "Is that a {n}?",
        "Who owns the {n}?", "How heavy is the {n}?", "What is behind the {n}?",
    ),
}  # fmt: skip
_WORDINGS = {  # beside those of `questions.TEMPLATES`
    "count": ("How many {t}?", "How many {t} are in the image?", "How many {t} are in this picture?",
              "Number of {t}?", "What's the number of {t}?", "Please count the {t}.",
              "How many {t} do you see?", "How many {t} are shown?", "How many {t} exist?",
              "How many {t} does the image contain?", "What is the count of {t}?", "Can you count the {t}?",
              "Tell me the number of {t}.", "How many {t} in total?", "How many {t} have been drawn?",
              "Give the number of {t}.", "Count of {t}?", "How many {t} here?"),
    "colour": ("What's the colour of the {t}?", "What is the color of the {t}?", "Colour of the {t}?",
               "What colour does the {t} have?", "Tell me what colour the {t} is.", "Which color is the {t}?",
               "What's the color of the {t} in the image?", "What is the colour of the {t}?",
               "In what colour is the {t}?", "What colour has the {t}?", "Give the colour of the {t}.",
               "What color does the {t} have?", "Name the color of the {t}.", "The {t} has which colour?"),
    "shape": ("Which shape is {t} here?", "What shape is {t} in the picture?", "Which of the shapes is {t}?",
              "What's the shape that is {t}?", "Which one is {t}?", "Which thing is {t}?", "What is {t}?",
              "Which object is {t}?", "What object is {t}?"),
    "exists": ("Is {t} in the picture?", "Is there {t} in the image?", "Is {t} there?", "Do you see {t}?",
               "Does it show {t}?", "Is there {t} here?", "Can {t} be seen?", "Does the drawing contain {t}?",
               "Do you spot {t}?", "Is there {t} in this image?", "Is there {t} to be seen?"),
    "position": ("Is the {a} {r} the {b} here?", "In the image, is the {a} {r} the {b}?",
                 "Do you see the {a} {r} the {b}?", "Is the {a} located {r} the {b}?",
                 "Is the {a} positioned {r} the {b}?", "Is the {a} placed {r} the {b}?",
                 "Does the {a} stand {r} the {b}?", "Is the {a} situated {r} the {b}?",
                 "Looking at the image, is the {a} {r} the {b}?", "Is it true that the {a} is {r} the {b}?"),
    "where": ("Where is the {a}, seen from the {b}?", "Where is the {a} from the {b}?",
              "In which direction from the {b} is the {a}?"),
    "size": ("Is the {a} {r} in size than the {b}?", "Is the {a} drawn {r} than the {b}?",
             "In the image, is the {a} {r} than the {b}?", "Is it true that the {a} is {r} than the {b}?"),
    "more": ("Is the number of {a} greater than the number of {b}?", "Are there more {a} here than {b}?",
             "Does the image have more {a} than {b}?"),
    "either": ("What are there more of, {a} or {b}?", "Which is more common, {a} or {b}?",
               "Which are more, {a} or {b}?"),
    "equal": ("Are there equally many {a} and {b}?", "Is there the same number of {a} and {b}?",
              "Does the image show as many {a} as {b}?"),
    "which": ("Which of them is {r}, the {a} or the {b}?", "Which is the {r} one, the {a} or the {b}?"),
    "word": ("What word is written?", "What is the word?", "What does it say?", "What is written here?",
             "What is written in the picture?", "Read the text.", "What text do you see?",
             "Which word is it?", "What does the text say?", "Which word do you see?", "What word is shown?",
             "What word is this?", "What text is written?", "Transcribe the text.",
             "What does the image say?", "What is the text?", "Read the word in the image.",
             "What does this say?", "Read this.",
             "What does the picture say?", "Read the writing.", "What's the word?", "Tell me the word."),
    "digit": ("Which digit do you see?", "What number is it?", "Which digit is it?", "What digit is written?",
              "What number do you see?", "What is the number?", "Which number is written here?",
              "What digit is shown?", "Read the digit.", "What digit is this?", "Which numeral do you see?",
              "What's the digit?", "Tell me the digit.", "Which figure is written?", "What's the number?"),
    "describe": ("What is shown?", "What is this?", "What's in the image?", "What does the image show?",
                 "What do you see in the picture?", "What is in this image?", "Describe what you see.",
                 "Describe this image.", "Describe this.", "Describe.", "Describe the drawing.",
                 "What can you see?", "Tell me what you see.", "What is in the image?",
                 "What does it show?", "Describe everything.",
                 "Give a description.", "What's in the picture?", "What is on the picture?",
                 "Can you describe the image?", "Please describe the image."),
    "place": ("Where's the {t}?", "Where in the picture is the {t}?", "Where is the {t} in the image?",
              "Can you find the {t}?", "Show me where the {t} is.", "What is the box of the {t}?",
              "Where can I find the {t}?", "Box the {t}.", "Mark the {t}."),
}  # fmt: skip
_PLACES = ("Where is the {t}?", "Find the {t}.", "Locate the {t}.", "Give the bounding box of the {t}.")

_ALIKE = {  # words of a question that others may stand for
    "below": ("beneath", "under", "underneath"), "above": ("over",), "bigger": ("larger",),
    "biggest": ("largest",), "can you see": ("do you notice",),
}  # fmt: skip
_FIRST = (
    "Please tell me: ", "Hi, ", "Hello, ", "Question: ", "Tell me, ", "Please, ", "Hey, ", "Look closely: ",
    "I want to know: ", "Now tell me: ", "In this image, ", "In the picture, ", "Look at the image: ",
)  # fmt: skip
_OBJECTS = re.compile(r"\b(objects|things|figures|items|elements)\b")  # spelled letter by letter in capitals
_LAST = (" Answer briefly.", " Be brief.", " Please.", " Thanks.", " Thank you!", " Keep it short.")


@cache
def _patterns() -> list[tuple[re.Pattern, str]]:
    """What each known wording of a kind looks like, with its kind."""
    found = []
    for kind in _WORDINGS:
        templates = _PLACES if kind == "place" else TEMPLATES[kind]
        # The longest first, or "Is there {t}?" takes "a star in the picture" for {t}.
        for template in sorted(templates, key=len, reverse=True):
            what = "an? .+" if kind == "exists" else ".+"
            slots = re.sub(r"\\{(\w)\\}", rf"(?P<\1>{what})", re.escape(template))
            found.append((re.compile(slots), kind))
    return found


def reword(question: str, rng: random.Random) -> str:
    """The same question as another stranger may write it: other words, no capital, no question mark."""
    if rng.random() < 0.6:
        for pattern, kind in _patterns():
            if match := pattern.fullmatch(question):
                question = rng.choice(_WORDINGS[kind]).format(**match.groupdict())
                break
    if rng.random() < 0.2:
        question = question.replace("picture", rng.choice(("image", "drawing")))
    for said, others in _ALIKE.items():
        if rng.random() < 0.15:
            question = re.sub(rf"\b{said}\b", rng.choice(others), question)
    which = rng.random()
    if which < (0.4 if _OBJECTS.search(question) else 0.14):
        return question.upper()
    if which < 0.18:
        return question + rng.choice(_LAST)
    if which < 0.24:
        shown = any(word in question for word in ("picture", "image", "drawing"))
        return rng.choice(_FIRST[: 10 if shown else None]) + question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    return question.rstrip("?.") if rng.random() < 0.2 else question


def ask_outside(rng: random.Random, split: str) -> str:
    """A question that no drawing of the world answers."""
    if rng.random() < 0.3:
        return rng.choice(QUESTIONS[split])
    which = rng.choice(_ABOUT[split])
    nouns = _nouns(split)
    made = which.format(n=rng.choice(nouns), m=rng.choice(nouns))
    return made[0].upper() + made[1:]


@cache
def _nouns(split: str) -> tuple[str, ...]:
    """Words that name nothing of the world: of each ten, two are held out."""
    free = [word for word in looks.MORE_WORDS if word not in (*SHAPES, *COLOURS)]
    return tuple(word for i, word in enumerate(free) if (i % 10 < 2) == (split == looks.HELDOUT))
