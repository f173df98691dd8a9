"""`generate.py IMAGE... QUESTION`: answers to questions about images, printed while they are made."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from inference import command, printing
from inference.attribution import wrong_sheet
from inference.command import EXAMPLE_IMAGE, ROOT, log
from inference.flags import Parser, check_model, positive
from inference.positionals import STDIN, read_stdin_questions
from inference.results import to_json
from inference.terminal import GreyText
from inference.votes import pick
from messages import for_terminal

DEFAULT_QUESTION = "What is in the picture?"  # in the words that the embedded model was trained on


def parser(description: str) -> Parser:
    made = command.command_parser("", description)
    command.add_images(made)
    command.add_several(made)
    drawn = "write the image with all boxes and points of the answers"
    made.add_argument("--show-boxes", type=Path, metavar="OUT.png", help=drawn)
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
    command.refuse_several(own, args)
    several, things = {"--num-answers": args.num_answers > 1}, {"--draft": args.draft}
    compiled = {"--compile on": args.compile == "on", "--lookup on": args.lookup == "on"}
    sheet = args.show_boxes and wrong_sheet(args.show_boxes)
    things |= several | {"--no-image": args.no_image}
    command.refuse(
        own,
        located(args) and command.apart("a box or a point", things),
        args.draft
        and command.apart("--draft", several | {"--think": args.think, "--no-cache": not args.cache}),
        None if args.cache else command.apart("--no-cache", compiled | {"--prefix-cache": args.prefix_cache}),
        "--logprobs: expected with --json" * (args.logprobs is not None and not args.json),
        "-: stdin holds one image" * (args.images.count(STDIN) > 1),
        sheet and f"--show-boxes: {sheet}",
    )
    return args


def located(args: argparse.Namespace) -> bool:
    """Whether boxes or points are asked for."""
    return bool(args.detect or args.point or args.describe or args.show_boxes)


def run(args: argparse.Namespace) -> int:
    """Answer every question about the images."""
    check_model(args.model, args.revision, text_only=args.no_image)
    options = command.generation_options(args, confidence=args.json)
    names = args.images or ([] if args.no_image else [str(EXAMPLE_IMAGE)])
    images = command.open_images(names)
    questions = args.questions
    if not (questions or STDIN in names or args.detect or args.point or args.describe):
        questions = read_stdin_questions()
    from inference import answer, draft

    locator = None
    if args.json or located(args):
        from inference.boxes import Locator

        locator = Locator(args, images, questions, log)
        questions = locator.questions
    questions = questions or [DEFAULT_QUESTION]
    checkpoint, options = command.load(args, options)
    command.log_sizes(args, names, images, checkpoint)
    ask_each = draft.ask_each if args.draft else answer.ask_each
    replies = ask_each(checkpoint, images, questions, options, args.system)
    for number, (question, reply) in enumerate(zip(questions, replies, strict=True)):
        if number == 0:
            log_defaults(args, question, checkpoint)
        if len(questions) > 1 and not args.json:
            printing.say([f"> {question}"])
        about = {"model": args.model, "images": names, "question": question, "seed": options.seed}
        result = show(reply, about, args, locator)
        if args.stats:
            print(for_terminal(printing.stats_table(result, args.model)), file=sys.stderr)
    return 0


def show(reply, about: dict[str, Any], args: argparse.Namespace, locator) -> dict[str, Any]:
    """Print the answers of a reply, a single one while it is made. Returns the result, without `about`."""
    aside, pieces = printing.Aside(not args.json and args.num_answers == 1), reply
    reply.hear = lambda _, piece: aside.put(piece)
    if args.draft:
        pieces = reply.after_draft(GreyText(not args.json), args.json or args.stats)
    pixels = partial(reply.checkpoint.pixels, reply.row, not (args.json or args.grammar), args.box_format)
    if args.num_answers == 1 and locator is None:
        printing.say(pixels().each(aside.before(pieces)))
    for _ in aside.before(pieces):  # what is left
        pass
    result = reply.finish()
    if locator is not None:
        result |= locator.locate(reply.checkpoint, result)
    result["answers"] = [pixels().whole(answer) for answer in result["answers"]]
    numbers = [*range(args.num_answers)]
    if args.pick:
        picked = result["picked"] = pick(result["answers"], result["confidences"], args.pick)
        numbers = [picked["number"]]
        if not args.json:
            log(printing.votes_line(picked))
    if draft := result.get("draft"):
        draft["text"] = pixels().whole(draft["text"])
    if args.json:
        print(to_json(about | result), flush=True)
        return result
    if locator is not None:
        printing.say([locator.text(result["answers"][0])])
    elif args.num_answers > 1:
        for number in numbers:
            if thought := "".join(result.get("thinking", ())[number : number + 1]):
                log(f"thinking {number + 1}: {thought}")
            answer = result["answers"][number]
            printing.say([answer if args.pick else f"{number + 1}. {answer}"])
    command.log_other_model(reply.checkpoint, result["answers"])
    return result


def log_defaults(args: argparse.Namespace, question: str, checkpoint: Any) -> None:
    """Log what the model says about itself, what was used in place of a missing image or question, and what
    is without effect."""
    command.log_unused(args)
    if args.json:
        return
    for line in filter(None, (checkpoint.introduction, checkpoint.too_many_images(len(args.images)))):
        log(line)
    if not (args.questions and (args.images or args.no_image)):
        example = "no image" if args.no_image else EXAMPLE_IMAGE.relative_to(ROOT)
        log(f"{', '.join(args.images) or example}: {question}")
    if args.num_answers > 1 and args.temperature == 0:
        log("all answers are the same, the most likely one: give a --temperature to get different ones")
