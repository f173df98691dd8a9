"""`generate.py IMAGE... QUESTION`: answers to questions about images, printed while they are made."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from inference import command, flags
from inference.attribution import sheet
from inference.command import EXAMPLE_IMAGE, ROOT, log
from inference.flags import STDIN, Parser, positive
from inference.printing import print_result, stats_table
from inference.stdin import read_question
from inference.terminal import Aside, GreyText

DEFAULT_QUESTION = "What is in the picture?"  # in the words that the embedded model was trained on
_LOCATED = ("--detect", "--point", "--describe", "--show-boxes")  # ask for boxes or points


def parser(description: str) -> Parser:
    made = command.command_parser("", description)
    command.add_images(made)
    command.add_several(made)
    drawn = "write the image with all boxes and points of the answers"
    made.add_argument("--show-boxes", type=flags.option(sheet), metavar="OUT.png", help=drawn)
    made.add_argument("--json", action="store_true", help="print one JSON object per question")
    beside = "with --json: each token's log-probability, and those of the N likeliest beside it (0: none)"
    made.add_argument("--logprobs", type=partial(positive, least=0), metavar="N", help=beside)
    slower = "keep keys and values; without, every token recomputes everything: same answer, slower"
    made.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True, help=slower)
    command.add_draft(made)
    return made


def parse(arguments: list[str], description: str) -> argparse.Namespace:
    own = parser(description)
    args = command.parse_words(own, arguments)
    if args.logprobs is not None and not args.json:
        own.error("--logprobs: expected with --json")
    own.refuse_together(
        args,
        *(f"{one}, --num-answers, --draft, --no-image" for one in _LOCATED),
        "--draft, --num-answers, --think, --no-cache",
        "--no-cache, --compile on, --lookup on, --prefix-cache",
    )
    return args


def run(args: argparse.Namespace) -> int:
    """Answer every question about the images."""
    flags.check_model(args.model, args.revision, text_only=args.no_image)
    options = command.generation_options(args, confidence=args.json)
    names = args.images or ([] if args.no_image else [str(EXAMPLE_IMAGE)])
    images = command.open_images(names)
    asks_for_things = args.detect or args.point or args.describe
    questions = args.questions
    if not (questions or STDIN in names or asks_for_things):
        questions = read_question()
    from inference.answer import ask_each

    locator = None
    if args.json or asks_for_things or args.show_boxes:
        from inference.boxes import Locator

        locator = Locator(args, images, questions, log)
        questions = locator.questions
    questions = questions or [DEFAULT_QUESTION]
    checkpoint, options = command.load(args, options)
    if not args.json:
        command.log_sizes(names, images, checkpoint)
    if args.draft:
        from inference.draft import ask_each  # type: ignore[assignment]
    replies = ask_each(checkpoint, images, questions, options, args.system)
    for number, (question, reply) in enumerate(zip(questions, replies, strict=True)):
        if number == 0 and not args.json:
            log_defaults(args, question, checkpoint)
        if len(questions) > 1 and not args.json:
            flags.say([f"> {question}"])
        about = {"model": args.model, "images": names, "question": question, "seed": options.seed}
        result = show(reply, about, args, locator)
        if args.stats:
            flags.log(stats_table(result, args.model))
    return 0


def show(reply, about: dict[str, Any], args: argparse.Namespace, locator) -> dict[str, Any]:
    """Print the answers of a reply, a single one while it is made. Returns the result, without `about`."""
    pixels = partial(reply.checkpoint.pixels, reply.row, not (args.json or args.grammar), args.box_format)
    single, pieces = args.num_answers == 1 and not args.json, reply
    if args.draft:
        pieces = reply.after_draft(GreyText(not args.json), args.json or args.stats)
    texts = (piece for _, piece in pieces)
    if single and reply.checkpoint.thinking is not None:
        aside = Aside()
        reply.hear, texts = lambda _, piece: aside.put(piece), aside.before(pieces)
    if single and locator is None:
        flags.say(pixels().each(texts))
    for _ in texts:  # what is left
        pass
    result = reply.finish()
    if not single or locator is not None:
        print_result(result, about, args, locator, pixels, reply.checkpoint)
    if not args.json and (other := reply.checkpoint.other_model(result["answers"])):
        log(other)
    return result


def log_defaults(args: argparse.Namespace, question: str, checkpoint: Any) -> None:
    """Log what the model says about itself, and what was used in place of a missing image or question."""
    if checkpoint.introduction:
        log(checkpoint.introduction)
    if not (args.questions and (args.images or args.no_image)):
        example = "no image" if args.no_image else EXAMPLE_IMAGE.relative_to(ROOT)
        log(f"{', '.join(args.images) or example}: {question}")
    if args.num_answers > 1 and args.temperature == 0:
        log("all answers are the same, the most likely one: give a --temperature to get different ones")
