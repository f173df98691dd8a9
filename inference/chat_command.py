"""`generate.py chat IMAGE...`: the command line of a conversation (`inference.chat`)."""

from __future__ import annotations

import argparse

from inference import command
from inference.command import EXAMPLE_IMAGE, ROOT, log
from inference.flags import STDIN, check_model


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("chat", "Start a conversation; /help lists its commands.")
    command.add_images(parser)
    command.add_draft(parser)
    args = command.parse_words(parser, arguments)
    if STDIN in args.images:
        parser.error("-: stdin holds the lines of the chat")
    parser.refuse_together(args, "--draft, --think")
    return args


def run(args: argparse.Namespace) -> int:
    """Hold the conversation, from a terminal or a pipe. Returns the exit status."""
    check_model(args.model, args.revision)
    options = command.generation_options(args, confidence=True)
    names = args.images or ([] if args.no_image else [str(EXAMPLE_IMAGE)])
    images = command.open_images(names)
    from inference.chat import Chat

    checkpoint, options = command.load(args, options, long=True)
    if names != args.images:
        log(f"{EXAMPLE_IMAGE.relative_to(ROOT)} is shown with the first question")
    talk = Chat(checkpoint, args, options)
    for name, image in zip(names, images):
        talk.show(image, name)
    return talk.run(args.questions)
