"""The wordings of each question family, and the words that answers and phrases are built from."""

TEMPLATES = {
    "count": (
        "How many {t} are there?",
        "How many {t} can you see?",
        "Count the {t}.",
        "What is the number of {t}?",
        "How many {t} does the picture show?",
        "Tell me how many {t} you see.",
    ),
    "colour": (
        "What colour is the {t}?",
        "What color is the {t}?",
        "Which colour is the {t}?",
        "Tell me the color of the {t}.",
        "Name the colour of the {t}.",
        "The {t} is what color?",
    ),
    "shape": (
        "What shape is {t}?",
        "Which shape is {t}?",
        "What kind of shape is {t}?",
        "Name the shape that is {t}.",
        "Tell me which shape is {t}.",
    ),
    "exists": (
        "Is there {t}?",
        "Is there {t} in the picture?",
        "Can you see {t}?",
        "Does the picture show {t}?",
        "Do you see {t} here?",
        "Does the image contain {t}?",
    ),
    "position": (
        "Is the {a} {r} the {b}?",
        "Is the {a} {r} the {b} in this picture?",
        "Does the {a} lie {r} the {b}?",
        "Would you say the {a} is {r} the {b}?",
        "Can you see the {a} {r} the {b}?",
    ),
    "where": (
        "Where is the {a} relative to the {b}?",
        "Where is the {a} compared with the {b}?",
        "In which direction is the {a} from the {b}?",
        "Seen from the {b}, where is the {a}?",
        "Where does the {a} lie, seen from the {b}?",
    ),
    "side": (
        "Is the {a} {r} the {b}?",
        "Would you say the {a} is {r} the {b}?",
        "Does the {a} lie {r} the {b}?",
    ),
    "size": (
        "Is the {a} {r} than the {b}?",
        "Would you say the {a} is {r} than the {b}?",
        "Does the {a} look {r} than the {b}?",
    ),
    "which": (
        "Which is {r}, the {a} or the {b}?",
        "Which one is {r}, the {a} or the {b}?",
        "What is {r}, the {a} or the {b}?",
    ),
    "word": (
        "What does the word say?",
        "Which word is written here?",
        "Read the word.",
        "What is the printed word?",
        "What word do you see?",
        "Which word is in the picture?",
    ),
    "digit": (
        "What is the digit?",
        "Which digit is written here?",
        "Read the handwritten digit.",
        "What digit do you see?",
        "Which number is handwritten in the picture?",
    ),
    "more": (
        "Are there more {a} than {b}?",
        "Does the picture show more {a} than {b}?",
        "Can you see more {a} than {b}?",
        "Do you see more {a} than {b}?",
    ),
    "either": (
        "Are there more {a} or {b}?",
        "Which are there more of, {a} or {b}?",
        "Do you see more {a} or {b}?",
    ),
    "equal": (
        "Are there as many {a} as {b}?",
        "Is the number of {a} equal to the number of {b}?",
        "Does the picture show as many {a} as {b}?",
    ),
    "describe": (
        "Describe the picture.",
        "Describe the image.",
        "What is in the picture?",
        "What do you see?",
        "List everything in the picture.",
        "Tell me what the picture shows.",
    ),
}
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ARTICLE = {"orange": "an"}
PHRASE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
OPPOSITE = {
    "left": "right",
    "right": "left",
    "above": "below",
    "below": "above",
    "bigger": "smaller",
    "smaller": "bigger",
}
REGIONS = (
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)
