"""Ask a vision-language model about images and videos.

    python generate.py                                        # the example image, the embedded model
    python generate.py photo.jpg "How many boats are there?"
    python generate.py photo.jpg -q "What is this?" -q "Where is it?" --json
    python generate.py a.png b.png -q "What differs?" --model smolvlm-256m
    python generate.py clip.mp4 "What happens?" --model smolvlm2-256m
    python generate.py photo.jpg --num-answers 3 --temperature 0.8 --stats
    python generate.py photo.jpg "How many boats are there?" --num-answers 8 --temperature 0.8
    python generate.py photo.jpg "Is it raining?" --choices yes,no
    python generate.py photo.jpg "Which boat is ahead?" --model runs/reasoning --think
    python generate.py photo.jpg --detect "red circle" --point "the star" --show-boxes boxes.png
    curl -s https://example.org/photo.jpg | python generate.py - "What is this?"
    echo "What is this?" | python generate.py photo.jpg

Four more commands have options of their own (python generate.py chat --help):

    python generate.py chat photo.jpg                         # a conversation
    python generate.py batch questions.jsonl --out answers.jsonl
    python generate.py batch photos -q "How many boats are there?" --out answers.jsonl
    python generate.py where photo.jpg "What is it?" --out where.png
    python generate.py read scan.pdf                          # into read/scan.md

The answer goes to stdout while it is made, everything else to stderr: also what the model thinks before it
answers. A batch reports a bad line in its results and continues. Run it again to resume where it stopped; the
bad lines are tried again.

Exit status:
    0    every question was answered
    1    some lines of a batch or pages could not be answered; the results hold their errors
    2    an error, described in one sentence; or a line of a chat from a pipe failed
    130  Ctrl-C
    141  the reader of stdout has gone
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from inference import command, flags
from inference.attribution import sheet
from inference.command import EXAMPLE_IMAGE, ROOT, log
from inference.errors import user_errors, user_message
from inference.flags import STDIN, Parser, positive
from inference.printing import Aside, print_result, stats_table
from messages import for_terminal

DEFAULT_QUESTION = "What is in the picture?"  # in the words that the embedded model was trained on
_LOCATED = ("--detect", "--point", "--describe", "--show-boxes")  # ask for boxes or points


def ask_parser() -> Parser:
    made = command.command_parser("", __doc__ or "")
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


def parse(arguments: list[str]) -> argparse.Namespace:
    own = ask_parser()
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


def ask(args: argparse.Namespace) -> int:
    """Answer every question about the images, while the answers are made."""
    flags.check_model(args.model, args.revision, text_only=args.no_image)
    options = command.generation_options(args, confidence=args.json)
    names = args.images or ([] if args.no_image else [str(EXAMPLE_IMAGE)])
    images = command.open_images(names)
    asks_for_things = args.detect or args.point or args.describe
    questions = args.questions
    if not (questions or STDIN in names or asks_for_things):
        questions = command.read_question()
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
        pieces = reply.after_draft(not args.json, args.json or args.stats)
    texts: Iterator[str] = (piece for _, piece in pieces)
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


# ------------------------------------------------------------------------------------- all commands
def run(arguments: list[str]) -> int:
    """Do what the arguments say. Errors of users and of the machine end in one sentence."""
    if arguments[:1] and arguments[0] in command.COMMANDS:
        chosen = import_module(f"{command.__package__}.{arguments[0]}_command")
        do, args = chosen.run, chosen.parse(arguments[1:])
    else:
        do, args = ask, parse(arguments)
    try:
        return do(args)
    except user_errors() as error:
        if isinstance(error, BrokenPipeError):
            raise
        if args.debug:
            print(for_terminal(traceback.format_exc()), file=sys.stderr)
        smaller = "--batch-size or --num-answers" if "batch_size" in args else "--num-answers"
        log("error: " + user_message(error, f"try a smaller {smaller}, or --device cpu"))
        return 2


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        log("interrupted")
        return 130
    except BrokenPipeError:  # as `head` does when it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    # Characters that the terminal cannot show are escaped; bytes of stdin that are no text are refused later.
    if sys.stdout is None:  # as `>&-` leaves it
        log("error: stdout is closed: expected a place for the answer, such as a file or a pipe")
        sys.exit(2)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    sys.exit(main())
