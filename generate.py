"""Ask a vision-language model about images.

    python generate.py                                        # the example image, the embedded model
    python generate.py photo.jpg "How many boats are there?"
    python generate.py photo.jpg -q "What is this?" -q "Where is it?" --json
    python generate.py a.png b.png -q "What differs?" --model HuggingFaceTB/SmolVLM-256M-Instruct
    python generate.py photo.jpg --num-answers 3 --temperature 0.8 --stats
    python generate.py photo.jpg -q "What is it?" --show-attention where.png --method occlusion
    python generate.py --chat photo.jpg
    curl -s https://example.org/photo.jpg | python generate.py - "What is this?"
    echo "What is this?" | python generate.py photo.jpg
    python generate.py --batch questions.jsonl --out answers.jsonl

The answer goes to stdout as it is made, everything else to stderr. A batch reports a bad line in its results
and goes on; started again, it picks up where it stopped, and tries the bad lines again.

Exit status:
    0    everything was answered
    1    lines of a batch could not be answered: their errors stand in the results
    2    nothing was done, for a reason told in one sentence; or a line of a chat from a pipe failed
    130  Ctrl-C
    141  whoever read stdout has gone
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.attribution.options import add_where_options, mistake_about_where
from inference.command_line import DTYPES, Parser, check_model, device, dtype, positive, told_if_slow
from inference.mistakes import RequestError, check_images, mistakes, sentence
from inference.options import (
    STDIN,
    check_image_name,
    is_question,
    mistake_in,
    piped_question,
    read_image,
)

# Everything that imports torch is imported inside functions, after all that can be checked without it: --help
# and a mistake answer at once.

ROOT = Path(__file__).resolve().parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
EXAMPLE_IMAGE = ROOT / "assets" / "example.png"
DEFAULT_QUESTION = "What is in the picture?"
# What answers depend on besides model, images and question. A seed that was not given is drawn anew.
ASKED = (
    "revision", "system", "max_new_tokens", "num_answers", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "seed",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="generate.py", description=__doc__)
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGE|QUESTION", help="images: path, URL, or - for stdin; several are "
        "shown together. What is no file and reads as text is a question")  # fmt: skip
    add(
        "-q",
        "--question",
        "-p",
        "--prompt",
        action="append",
        dest="questions",
        metavar="TEXT",
        default=[],
        help="may be given several times; without one, stdin is read if it is a pipe or a file",
    )
    add("--no-image", action="store_true", help="ask without an image, not about the example image")
    add("--chat", action="store_true", help="a conversation, begun with -q; /help lists its commands")
    add("--system", metavar="TEXT", help="system message in front of every question")

    group = parser.add_argument_group("model")
    group.add_argument("--model", default=str(DEFAULT_MODEL), help="folder, or repository on the Hub")
    group.add_argument("--revision", help="branch, tag or commit on the Hub")
    group.add_argument(
        "--device", type=device, default="auto", help="auto (default: the best one here), cpu, cuda, mps"
    )
    group.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        choices=DTYPES,
        help="of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, elsewhere the checkpoint's "
        "own; int8 on a CPU only; bf16, fp16 and fp32 are understood",
    )
    group.add_argument(
        "--compile",
        default="auto",
        choices=("auto", "on", "off"),
        help="the decode step, once for this machine: same answer in float32, faster; auto (default): where "
        "that has been done before, or --max-new-tokens and the number of questions may pay for it",
    )

    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-new-tokens", type=positive, default=256, metavar="N", help="at most (default 256)"
    )
    group.add_argument(
        "--num-answers", type=positive, default=1, metavar="N", help="answers to each question"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest token"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="among the K likeliest; 0 is off")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="among this much probability")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="at least P times the likeliest")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="over 1 repeats less"
    )
    group.add_argument("--seed", type=int, help="of sampling; answer N draws from SEED + N - 1")
    group.add_argument(
        "--cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep keys and values; without it everything is recomputed for every token: same answer, slower",
    )

    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object per question on stdout")
    group.add_argument("--stats", action="store_true", help="tokens, seconds and bytes on stderr")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")

    add_where_options(parser)

    group = parser.add_argument_group("many questions")
    group.add_argument(
        "--batch", type=Path, metavar="FILE.jsonl", help='lines of {"image": ..., "question": ...}'
    )
    group.add_argument("--out", type=Path, metavar="FILE.jsonl", help="results, one line each")
    group.add_argument("--batch-size", type=int, metavar="N", help="at once (default 8)")
    return parser


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    # Intermixed, so that images may stand on both sides of -q.
    settings = parser.parse_intermixed_args(arguments)
    settings.questions = [*filter(is_question, settings.images), *settings.questions]
    settings.images = [name for name in settings.images if not is_question(name)]
    if mistake := mistake_in(settings) or mistake_about_where(settings):
        parser.error(mistake)
    if settings.batch is not None and settings.batch_size is None:
        settings.batch_size = 8
    return settings


def generation_options(settings: argparse.Namespace):
    """`GenerationOptions` of the command line. A run that samples gets a seed, for --json to name."""
    from generation.options import GenerationOptions

    seed = settings.seed
    if seed is None and settings.temperature > 0:
        seed = secrets.randbelow(2**31)
    try:
        return GenerationOptions(
            max_new_tokens=settings.max_new_tokens,
            num_return_sequences=settings.num_answers,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            seed=seed,
            use_cache=settings.cache,
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def note(text: str) -> None:
    print(f"generate.py: {text}", file=sys.stderr)


@dataclass(frozen=True)
class Asked:
    """What was asked for, checked and read as far as that needs no model.

    names: of the images, as given.
    questions: as given; none where there were none.
    """

    options: Any
    names: list[str]
    images: list[Any]
    questions: list[str]


def read_request(settings: argparse.Namespace) -> Asked:
    """Check and read everything but the model: what is wrong is told before torch is imported.

    Raises:
        CheckpointError, ImageError, RequestError: see `check_model`, `load_image`, `piped_question`.
    """
    check_model(settings.model, settings.revision)
    if settings.no_image and not settings.chat:  # a chat may be shown one later
        from models.checkpoints.locate import describe

        check_images(describe(settings.model, settings.revision).generation_config, 0)
    options = generation_options(settings)
    names = settings.images or ([] if settings.no_image else [str(EXAMPLE_IMAGE)])
    for name in names:
        check_image_name(name, " (a question that looks like a path takes -q)")
    from data.images import load_image

    images = [load_image(read_image(), name=STDIN) if name == STDIN else load_image(name) for name in names]
    questions = settings.questions
    if not (questions or settings.chat or STDIN in names) and (piped := piped_question(note)):
        questions = [piped]
    return Asked(options, names, images, questions)


def opened(settings: argparse.Namespace, answers: int):
    """The checkpoint, for so many answers one after another."""
    from inference.checkpoint import open_checkpoint

    with told_if_slow("generate.py", settings.model):
        checkpoint = open_checkpoint(settings.model, settings.revision, settings.device, settings.dtype)
    return compiled(checkpoint, settings, answers)


def answer_questions(settings: argparse.Namespace) -> None:
    """Ask every question about the images: the answer as text while it is made, or one JSON object each."""
    asked = read_request(settings)
    from generation.session import Session
    from inference.answer import ask
    from inference.attribution.show import check_where, write_where
    from inference.stats import as_table, stats_rows

    questions, options, images = asked.questions or [DEFAULT_QUESTION], asked.options, asked.images
    checkpoint = opened(settings, answers=len(questions))
    check_where(checkpoint, settings)
    if len(questions) > 1:
        images = [checkpoint.processor.tile(image) for image in images]  # once for all of them
    session = Session(checkpoint.model) if len(questions) > 1 and options.use_cache else None
    for number, question in enumerate(questions):
        reply = ask(checkpoint, images, question, options, settings.system, session)
        if number == 0:
            tell_unused(settings)
            if not settings.json:
                tell_assumptions(settings, questions[0])
        if len(questions) > 1 and not settings.json:
            print(f"> {question}", flush=True)
        about = {"model": settings.model, "images": asked.names, "question": question}
        made = show(reply, about | {"seed": options.seed}, settings)
        if settings.stats:
            print(as_table(stats_rows(made)), file=sys.stderr)
        if settings.show_attention is not None:
            write_where(checkpoint, images, question, made["token_ids"][0], settings)
            note(f"{settings.show_attention}: where it looked, word by word")


def chat(settings: argparse.Namespace) -> int:
    """A conversation, from the terminal or a pipe: the exit status."""
    asked = read_request(settings)
    from inference.chat import Chat
    from inference.conversation import Conversation

    checkpoint = opened(settings, answers=16)  # or so: does compiling pay?
    tell_unused(settings)
    if asked.names != settings.images:
        note(f"{EXAMPLE_IMAGE.relative_to(ROOT)} is shown with the first question")
    talk = Chat(Conversation(checkpoint, settings.system), asked.options, settings.stats, settings.debug)
    for name, image in zip(asked.names, asked.images):
        talk.show(image, name)
    return talk.run(asked.questions)


def compiled(checkpoint, settings: argparse.Namespace, answers: int):
    """The checkpoint with a decode step as --compile says, for so many answers one after another. That it had
    to be the eager one is told once."""
    from generation.fast.choose_step import steps_that_pay

    if settings.compile == "off" or not settings.cache:
        return checkpoint
    steps = None if settings.compile == "on" else answers * settings.max_new_tokens
    checkpoint = checkpoint.compiled(steps)
    enough = steps_that_pay(checkpoint.model.language_model)
    if checkpoint.decode_step is None and (steps is None or steps >= enough):
        note(f"decode step {checkpoint.decode_step_name}")
    return checkpoint


def tell_assumptions(settings: argparse.Namespace, question: str) -> None:
    """Say what was put in the place of something not given."""
    if not settings.questions or not (settings.images or settings.no_image):
        images = settings.images or ["no image" if settings.no_image else EXAMPLE_IMAGE.relative_to(ROOT)]
        note(f"{', '.join(map(str, images))}: {question}")
    if settings.num_answers > 1 and settings.temperature == 0:
        note("all answers are the same, the likeliest: give a --temperature to have different ones")


def tell_unused(settings: argparse.Namespace) -> None:
    """Say which options have nothing to choose among, because the likeliest token is taken."""
    given = {
        "--top-k": settings.top_k != 0,
        "--top-p": settings.top_p != 1,
        "--min-p": settings.min_p != 0,
        "--seed": settings.seed is not None,
    }
    unused = [name for name, is_given in given.items() if is_given]
    if unused and settings.temperature == 0:
        note(f"{', '.join(unused)} without effect: give a --temperature to have tokens drawn")


def show(reply, asked: dict, settings: argparse.Namespace) -> dict:
    """Print the answers of a reply while they are made; everything about them, for --stats."""
    from inference.results import to_json

    if settings.num_answers == 1 and not settings.json:
        for _, piece in reply:
            print(piece, end="", flush=True)
        print(flush=True)
    made = asked | reply.finish()
    if settings.json:
        print(to_json(made), flush=True)
    elif settings.num_answers > 1:
        for number, answer in enumerate(made["answers"], 1):
            print(f"{number}. {answer}", flush=True)
    return made


def answer_batch(settings: argparse.Namespace) -> int:
    """Answer the lines of a file; what is wrong with one of them stands in the results: the exit status."""
    from inference.batch_files import BatchFiles

    check_model(settings.model, settings.revision)
    options = generation_options(settings)
    asked = {name: vars(settings)[name] for name in ASKED}
    files = BatchFiles(settings.batch, settings.out, settings.model, asked)
    tell_unused(settings)
    from inference.batch import BatchJob, Summary

    summary = Summary(skipped=files.total)
    if files.remaining:
        waves = -(-files.remaining * settings.num_answers // settings.batch_size)
        checkpoint = opened(settings, answers=waves)
        summary = BatchJob(files).run(checkpoint, options, settings.system, settings.batch_size, tell=note)
    note(f"{summary}: {settings.out}")
    if summary.unused_keys:
        note(f"keys without a meaning here, kept under 'other': {', '.join(sorted(summary.unused_keys))}")
    if settings.stats:
        took = ", ".join(f"{name} {value:.3f} s" for name, value in summary.seconds.items())
        how = f"; decode step: {checkpoint.decode_step_name}" if files.remaining else ""
        note(f"{summary.new_tokens} new tokens; {took or 'nothing computed'}{how}")
    return 1 if summary.failed else 0


def run(settings: argparse.Namespace) -> int:
    """Do what was asked. What people get wrong, and what the machine lacks, ends in one sentence."""
    from inference.locks import only_writer

    try:
        if settings.chat:
            return chat(settings)
        if settings.batch is not None:
            with only_writer(settings.out, "--out"):
                return answer_batch(settings)
        answer_questions(settings)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, mistakes()):
            raise
        if settings.debug:
            traceback.print_exc()
        smaller = "--num-answers" if settings.batch is None else "--batch-size or --num-answers"
        note("error: " + sentence(error, f"try a smaller {smaller}, or --device cpu"))
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(parse_arguments(arguments))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        note("interrupted")
        return 130
    except BrokenPipeError:  # whoever read our stdout has gone, as `head` does: nothing to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character still goes on
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are told about, line by line
    sys.exit(main())
