"""`generate.py where IMAGE QUESTION`: an answer, and where the model looked for each of its words."""

from __future__ import annotations

import argparse

from data.errors import ImageError
from inference import command, flags
from inference.attribution import sheet
from inference.command import log
from inference.errors import RequestError
from inference.printing import stats_table


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("where", "Draw where the model looked, for each word of its answer.")
    command.add_images(parser, needed=True)
    drawn = "image to write: a heat map for each word of the answer (default where.png)"
    parser.add_argument("--out", type=flags.option(sheet), metavar="OUT.png", default="where.png", help=drawn)
    args = command.parse_words(parser, arguments)
    if not args.images or len(args.questions) != 1:
        parser.error("expected an image and one question")
    return args


def run(args: argparse.Namespace) -> int:
    """Answer the question and write the map."""
    flags.check_model(args.model, args.revision)
    options = command.generation_options(args, confidence=False)
    images, (question,) = command.open_images(args.images), args.questions
    from inference.answer import ask_each
    from inference.attribution import attention, draw

    if clips := [one.name for one in images if hasattr(one, "animated")]:
        raise ImageError(f"where: expected images, got the video {clips[0]}")
    checkpoint, options = command.load(args, options)
    command.log_sizes(args.images, images, checkpoint)
    attention.check_attention(checkpoint)
    # The map is made from the features that the answer was.
    (reply,) = ask_each(checkpoint, images, args.questions, options, args.system, keep=True)
    flags.say(checkpoint.pixels(reply.row, not args.grammar, None).each(piece for _, piece in reply))
    result = reply.finish()
    if args.stats:
        flags.log(stats_table(result, args.model))
    ids = result["token_ids"][0]
    if not (words := attention.answer_words(checkpoint, ids)):
        raise RequestError("the answer has no word to draw a map for")
    found = attention.drained(attention.attention_steps(checkpoint, images, question, ids, args.system))
    draw.save_signed(draw.draw_maps(found, words, question), args.out)
    log(f"{args.out}: where it looked, word by word")
    return 0
