"""Ask a vision-language model about images and videos.

    python generate.py                                        # the example image, the embedded model
    python generate.py photo.jpg "How many boats are there?"
    python generate.py photo.jpg -q "What is this?" -q "Where is it?" --json
    python generate.py a.png b.png -q "What differs?" --model smolvlm-256m
    python generate.py clip.mp4 "What happens?" --model smolvlm2-256m
    python generate.py photo.jpg --num-answers 3 --temperature 0.8 --stats
    python generate.py photo.jpg "How many boats are there?" --num-answers 8 --temperature 0.8 --pick vote
    python generate.py photo.jpg "Is it raining?" --choices yes,no
    python generate.py photo.jpg "Which boat is ahead?" --model runs/reasoning --think
    python generate.py photo.jpg -q "What is it?" --show-attention where.png --method occlusion
    python generate.py photo.jpg --detect "red circle" --point "the star" --show-boxes boxes.png
    python generate.py --chat photo.jpg
    curl -s https://example.org/photo.jpg | python generate.py - "What is this?"
    echo "What is this?" | python generate.py photo.jpg
    python generate.py --batch questions.jsonl --out answers.jsonl
    python generate.py --batch photos -q "How many boats are there?" --out answers.jsonl

The answer goes to stdout while it is made, everything else to stderr: also what the model thinks before it
answers. A batch reports a bad line in its results and continues. Run it again to resume where it stopped; the
bad lines are tried again.

Exit status:
    0    every question was answered
    1    some lines of a batch could not be answered; the results hold their errors
    2    an error, described in one sentence; or a line of a chat from a pipe failed
    130  Ctrl-C
    141  the reader of stdout has gone
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import ImageError
from generation.options import GenerationOptions
from inference import cli
from inference.batch_command import answer_batch
from inference.errors import user_errors, user_message
from inference.results import to_json
from inference.terminal import GreyText
from inference.thinking import held_to
from inference.votes import pick
from models.checkpoints.hub import for_terminal

# torch takes seconds to import, Pillow a tenth. What needs them is imported inside functions, after all
# that can be checked without them, so that --help and a mistake answer at once.

ROOT = Path(__file__).resolve().parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
EXAMPLE_IMAGE = ROOT / "assets" / "example.png"
DEFAULT_QUESTION = "What is in the picture?"  # in the words that the embedded model was trained on


def log(text: str) -> None:
    cli.log(f"generate.py: {text}")


def read_request(args: argparse.Namespace) -> tuple[GenerationOptions, list[str], list[Any], list[str]]:
    """Options, names of images, images and questions: all that can be checked and read without a model."""
    from data.images import ImageLimits
    from data.video import Clip
    from data.visuals import open_visual

    # A chat may be shown an image later.
    cli.check_model(args.model, args.revision, text_only=args.no_image and not args.chat)
    options = cli.generation_options(args)
    names = args.images or ([] if args.no_image else [str(EXAMPLE_IMAGE)])
    cli.check_together(names, log)
    piped = cli.read_stdin_image(ImageLimits().max_bytes) if cli.STDIN in names else b""
    images = [open_visual(piped if name == cli.STDIN else name, name=name) for name in names]
    alone = [
        name for name in ("detect", "point", "describe", "show_boxes", "show_attention") if vars(args)[name]
    ]
    if videos := [name for name, image in zip(names, images) if alone and isinstance(image, Clip)]:
        raise ImageError(f"--{alone[0].replace('_', '-')}: expected images, got the video {videos[0]}")
    questions = args.questions
    if not (questions or args.chat or piped or args.detect or args.point or args.describe):
        questions = cli.read_stdin_questions()
    return options, names, images, questions


def load(args: argparse.Namespace, options: GenerationOptions, long: bool = False):
    """The checkpoint, with decode step and tower as --compile says (`long`: many answers will be made), and
    the options with what --schema or --choices asks for."""
    from inference.checkpoint import open_checkpoint, worth_compiling

    with cli.log_if_slow("generate.py", args.model):
        checkpoint = open_checkpoint(args.model, args.revision, **cli.machine(args))
    if args.compile != "off" and args.cache:
        compiling = args.compile == "on" or worth_compiling(checkpoint.model, long)
        checkpoint = checkpoint.compiled(compiling)
        if compiling and checkpoint.decode_step is None:
            log(f"decode step {checkpoint.fast.name}")
    if args.prefix_cache is not None:
        from inference.prefix_files import with_prefixes

        checkpoint = with_prefixes(checkpoint, args.prefix_cache)
    if args.think:
        checkpoint.processor.chat.check_thinking("--think")
    if args.grammar is not None:
        options = held_to(options, checkpoint.constraint(args.grammar))
    return checkpoint, options


def answer_questions(args: argparse.Namespace) -> None:
    """Answer every question about the images."""
    options, names, images, questions = read_request(args)
    from inference.answer import ask_each

    locator = None
    if args.json or args.detect or args.point or args.describe or args.show_boxes:
        from inference.boxes import Locator

        locator = Locator(args, images, questions, log)
        questions = locator.questions
    questions = questions or [DEFAULT_QUESTION]
    checkpoint, options = load(args, options)
    cli.log_sizes(args, names, images, checkpoint, log)
    if args.show_attention is not None:
        from inference.attribution import attention, draw

        attention.check_attention(checkpoint)
    keep = args.show_attention is not None  # the maps are made from the same features
    replies = ask_each(checkpoint, images, questions, options, args.system, keep, args.draft)
    for number, (question, reply) in enumerate(zip(questions, replies, strict=True)):
        if number == 0:
            cli.log_defaults(args, question, EXAMPLE_IMAGE.relative_to(ROOT), checkpoint, log)
        if len(questions) > 1 and not args.json:
            cli.say([f"> {question}"])
        about = {"model": args.model, "images": names, "question": question, "seed": options.seed}
        result = show(reply, about, args, locator)
        if args.stats:
            print(for_terminal(cli.stats_table(result, args.model)), file=sys.stderr)
        if args.show_attention is not None:
            draw.write_attribution(checkpoint, images, question, result["token_ids"][0], args)
            log(f"{args.show_attention}: where it looked, word by word")


def show(reply, about: dict[str, Any], args: argparse.Namespace, locator) -> dict[str, Any]:
    """Print the answers of a reply, a single one while it is made. Returns the result, without `about`."""
    aside, pieces = cli.Aside(not args.json and args.num_answers == 1), reply
    reply.hear = lambda _, piece: aside.put(piece)
    if args.draft:
        pieces = reply.after_draft(GreyText(not args.json), args.json or args.stats)
    pixels = partial(reply.checkpoint.pixels, reply.row, not (args.json or args.grammar), args.box_format)
    if args.num_answers == 1 and locator is None:
        cli.say(pixels().each(aside.before(pieces)))
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
            cli.log_votes(picked, log)
    if draft := result.get("draft"):
        draft["text"] = pixels().whole(draft["text"])
    if args.json:
        print(to_json(about | result), flush=True)
    elif locator is not None:
        cli.say([locator.text(result["answers"][0])])
    elif args.num_answers > 1:
        for number in numbers:
            if thought := "".join(result.get("thinking", ())[number : number + 1]):
                log(f"thinking {number + 1}: {thought}")
            answer = result["answers"][number]
            cli.say([answer if args.pick else f"{number + 1}. {answer}"])
    if not args.json:
        cli.log_other_model(reply.checkpoint, result["answers"], log)
    return result


def chat(args: argparse.Namespace) -> int:
    """Hold a conversation, from the terminal or a pipe. Returns the exit status."""
    options, names, images, questions = read_request(args)
    from inference.chat import Chat

    checkpoint, options = load(args, options, long=True)
    cli.log_unused(args, log)
    cli.log_sizes(args, [], [], checkpoint, log)  # those of images are said as they are shown
    if names != args.images:
        log(f"{EXAMPLE_IMAGE.relative_to(ROOT)} is shown with the first question")
    talk = Chat(checkpoint, args.system, options, args.stats, args.debug, args.draft, args.think_tokens)
    for name, image in zip(names, images):
        talk.show(image, name)
    return talk.run(questions)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Errors of users and of the machine end in one sentence."""
    try:
        if args.chat:
            return chat(args)
        if args.batch is not None:
            options = cli.generation_options(args)
            return answer_batch(args, lambda: load(args, options, long=True), log)
        answer_questions(args)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, user_errors()):
            raise
        if args.debug:
            print(for_terminal(traceback.format_exc()), file=sys.stderr)
        smaller = "--num-answers" if args.batch is None else "--batch-size or --num-answers"
        log("error: " + user_message(error, f"try a smaller {smaller}, or --device cpu"))
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(cli.parse_generate_args(arguments, __doc__, DEFAULT_MODEL))
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
