"""What generate.py's commands share: options of the model and of its answers, and how both are opened.

Torch takes seconds to import. What needs it is imported inside functions, after all that can be checked
without it, so that --help and a mistake answer at once.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import fields
from pathlib import Path
from select import select
from typing import Any

from data.errors import ImageError
from generation.options import GenerationOptions, SamplingParams
from inference import flags
from inference.errors import RequestError
from inference.flags import STDIN, Parser, check_image_name, is_question, option, positive, said
from inference.grammar import MOST_BYTES, choice_grammar, json_grammar, read_choices, refusal
from inference.printing import seen_at
from inference.thinking import THINK_TOKENS, Think, held_to

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("chat", "batch", "where", "read")  # beside the question itself, which needs no name
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
EXAMPLE_IMAGE = ROOT / "assets" / "example.png"
# The names in data.boxes, whose import takes as long as all of this file.
BOX_FORMATS = ("qwen3-vl", "qwen2.5-vl", "lfm2.5-vl", "doctags")
MOST_TOGETHER = 256  # images in one question
STDIN_TIMEOUT = 5.0  # seconds for a piped question to begin: nobody may be writing to the pipe
_NUMBER: dict[str, Any] = {"type": positive, "metavar": "N"}
# The options that some commands lack.
_ABSENT: dict[str, Any] = {"cache": True, "num_answers": 1, "logprobs": None, "grammar": None}
_ABSENT |= {"draft": False, "json": False, "no_image": False, "think": False, "think_tokens": None}


def log(text: str) -> None:
    flags.log(f"generate.py: {text}")


@option
def schema(name: str) -> str:
    """The grammar of the JSON schema in a file."""
    with open(name, "rb") as file:
        grammar = json_grammar(file.read(MOST_BYTES + 1))
    from inference.compiling import problem  # a fifth of a second: before a model is loaded

    if found := problem(grammar):
        raise RequestError(refusal(found))
    return grammar


@option
def choices(text: str) -> str:
    """The grammar of what `read_choices` reads."""
    return choice_grammar(read_choices(text))


def command_parser(name: str, description: str) -> Parser:
    """A command's parser with the options that all commands have; `name` is "" for a question."""
    parser = Parser(prog=f"generate.py {name}".rstrip(), description=description)
    parser.set_defaults(**_ABSENT)
    parser.add_argument("--system", metavar="TEXT", help="system message before every question")
    add = parser.add_argument_group("model").add_argument
    add("--model", type=flags.model, default=str(DEFAULT_MODEL), help=flags.MODEL)
    add("--revision", help="branch, tag or commit on the Hub")
    add("--device", type=flags.device, default="auto", help="auto (default: the fastest one), cpu, cuda, mps")
    weights = "dtype of weights; auto (default): on a CPU float32, or a quantized checkpoint's own codes, "
    weights += "bfloat16 on CUDA (float16 before Ampere), and elsewhere the checkpoint's"
    add("--dtype", type=flags.dtype, default="auto", choices=flags.DTYPES, help=weights)
    compiled = "answer with compiled code, with the same float32 output; auto (default): if it is compiled "
    compiled += "already, or worth it for a large model, a chat or a batch"
    add("--compile", default="auto", choices=("auto", "on", "off"), help=compiled)
    flags.add_machine(add)

    group = parser.add_argument_group("answer")
    add = group.add_argument
    most = "maximum of tokens of the answer (default 256; of a page: by its size)"
    add("--max-new-tokens", **_NUMBER, default=256, help=most)
    for own in fields(SamplingParams):
        kind, about = float if isinstance(own.default, float) else int, own.metadata
        flag = {"type": kind, "default": own.default, "metavar": about["metavar"], "help": about["help"]}
        add(f"--{own.name.replace('_', '-')}", **flag)
    if name != "read":
        form = group.add_mutually_exclusive_group().add_argument
        held = "answer with JSON that fits the JSON schema in this file"
        form("--schema", type=schema, dest="grammar", metavar="FILE", help=held)
        held = "answer with the likeliest of these texts (or a JSON list of texts) or whole numbers"
        form("--choices", type=choices, dest="grammar", metavar="A,B,...|1..5", help=held)
    if name not in ("where", "read"):
        flags.add_think(add)
    kept = "folder that keeps what prompts left in the cache: a later start computes only what is new"
    add("--prefix-cache", metavar="DIR", help=kept)
    copied = "copy likely tokens from the text so far and verify several in a pass; auto (default): where it "
    copied += "pays, with compiled code on a CPU"
    add("--lookup", default="auto", choices=("auto", "on", "off"), help=copied)

    add = parser.add_argument_group("output").add_argument
    add("--stats", action="store_true", help="print token counts, times and memory to stderr")
    add("--debug", action="store_true", help="print the traceback of an error")
    return parser


def add_images(parser: Parser, needed: bool = False) -> None:
    """Images with questions among and beside them; --no-image where none is `needed`."""
    images = "images and videos to show together: paths, URLs, - for stdin; other text is a question"
    parser.add_argument("images", nargs="*", type=said, metavar="IMAGE|QUESTION", help=images)
    add_questions(parser)
    if not needed:
        parser.add_argument("--no-image", action="store_true", help="ask without an image")


def add_questions(parser: Parser) -> None:
    names = ("-q", "--question", "-p", "--prompt")
    about: dict[str, Any] = {"action": "append", "dest": "questions", "metavar": "TEXT", "default": []}
    question = "question; may be repeated. Without one, stdin is read if it is a pipe or a file"
    parser.add_argument(*names, type=said, **about, help=question)


def add_draft(parser: Parser) -> None:
    sooner = "show in grey what the model says about a small picture while the large one is encoded"
    parser.add_argument("--draft", action=argparse.BooleanOptionalAction, default=False, help=sooner)


def add_several(parser: Parser) -> None:
    """Several answers to each question, and boxes: for a question and `batch`."""
    add = parser.add_argument_group("several answers").add_argument
    add("--num-answers", **_NUMBER, default=1, help="answers to each question (default 1)")
    add = parser.add_argument_group("boxes and points, in pixels").add_argument
    thing: dict[str, Any] = {"action": "append", "type": said, "metavar": "THING", "default": []}
    add("--detect", **thing, help="put a box around each THING; may be repeated")
    add("--point", **thing, help="point to each THING; may be repeated")
    add("--describe", action="store_true", help="put a box around everything in the image")
    written = f"form of the model's coordinates (default: what its files name): {', '.join(BOX_FORMATS)}"
    add("--box-format", choices=BOX_FORMATS, metavar="NAME", help=written)


def parse_words(parser: Parser, arguments: list[str], dest: str = "images") -> argparse.Namespace:
    """The arguments, with the questions among the words without an option moved to `questions`."""
    args = parser.parse_intermixed_args(arguments)  # images may stand on both sides of -q
    words = vars(args)[dest]
    args.questions = [*filter(is_question, words), *args.questions]
    setattr(args, dest, [word for word in words if not is_question(word)])
    if args.no_image and args.images:
        parser.error("--no-image cannot be combined with IMAGE")
    if args.think_tokens and not (args.think or parser.prog.endswith("chat")):
        parser.error("--think-tokens: expected with --think")
    if words.count(STDIN) > 1:
        parser.error("-: stdin holds one image")
    return args


def generation_options(args: argparse.Namespace, confidence: bool) -> GenerationOptions:
    """The options of every answer; `confidence`: it will be shown. A run that samples gets a seed, so that
    --json can report it."""
    own = {field.name: vars(args)[field.name] for field in fields(SamplingParams)}
    if args.seed is None and args.temperature > 0:
        own["seed"] = secrets.randbelow(2**31)
    try:
        return GenerationOptions(
            num_return_sequences=args.num_answers,
            constraint=Think(args.think_tokens or THINK_TOKENS) if args.think else None,
            confidence=bool(confidence or args.stats),
            logprobs=args.logprobs,
            max_new_tokens=args.max_new_tokens or 1,  # a page has a limit of its own
            lookup=args.lookup,
            use_cache=args.cache,
            **own,
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def open_images(names: list[str]) -> list[Any]:
    """Images and videos by their names, as far as they are read without a model; "-" is stdin."""
    if len(names) > MOST_TOGETHER:
        each = "to ask about each by itself: generate.py batch IMAGE... -q TEXT --out FILE.jsonl"
        raise ImageError(f"expected at most {MOST_TOGETHER} images in one question, got {len(names)}; {each}")
    for name in names:
        check_image_name(name)
    from data.images import ImageLimits
    from data.visuals import open_visual

    piped = read_image(ImageLimits().max_bytes) if STDIN in names else b""
    return [open_visual(piped if name == STDIN else name, name=name) for name in names]


def load(args: argparse.Namespace, options: GenerationOptions, long: bool = False):
    """The checkpoint, with decode step and tower as --compile says (`long`: many answers will be made), and
    the options with what --schema or --choices asks for."""
    from inference.checkpoint import open_checkpoint

    with flags.log_if_slow("generate.py", args.model):
        checkpoint = open_checkpoint(args.model, args.revision, **flags.machine(args))
    if args.compile != "off" and args.cache:
        compiling = args.compile == "on" or checkpoint.worth_compiling(long)
        checkpoint = checkpoint.compiled(compiling)
        if compiling and checkpoint.decode_step is None:
            log(f"decode step {checkpoint.fast.name}")
    if args.prefix_cache is not None:
        from inference.kept import with_prefixes

        checkpoint = with_prefixes(checkpoint, args.prefix_cache)
    if args.think:
        checkpoint.processor.chat.check_thinking("--think")
    if args.grammar is not None:
        options = held_to(options, checkpoint.forms.constraint(args.grammar))
    of_draws = [own for own in fields(SamplingParams) if own.metadata["of_draws"]]
    unused = [f"--{own.name.replace('_', '-')}" for own in of_draws if vars(args)[own.name] != own.default]
    if unused and args.temperature == 0:
        log(f"{', '.join(unused)} without effect: give a --temperature to sample tokens")
    return checkpoint, options


def log_sizes(names: list[str], images: list[Any], checkpoint: Any) -> None:
    """Log what is shown of images and videos, before they are computed."""
    processor = checkpoint.processor
    for name, image in dict(zip(names, images, strict=True)).items():
        is_clip = hasattr(image, "animated")
        if is_clip and image.animated and processor.few_images:
            log(f"{name}: it moves, but this model sees its first frame alone")
        shown_whole = is_clip or processor.images.budget
        if shown_whole and (seen := seen_at(processor.images, processor.plan(image))):
            log(f"{name}: {seen}")


# ------------------------------------------------------------------------------------- what comes from a pipe
def read_image(max_bytes: int) -> bytes:
    """The bytes of the image on stdin, one more than `max_bytes` at most. Raises RequestError."""
    raw = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(max_bytes + 1)
    if not raw:
        raise RequestError("-: expected an image on stdin, got nothing; pipe a file into this command")
    return raw


def read_question() -> list[str]:
    """All of stdin as a question. [] if it is a terminal, closed, empty, or a pipe that nobody writes to, as
    under cron and CI."""
    try:
        if sys.stdin is None or sys.stdin.isatty() or not select([sys.stdin], [], [], STDIN_TIMEOUT)[0]:
            return []
        question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        said = "stdin: expected a question in UTF-8; pass - to read an image from stdin"
        raise RequestError(said) from None
    except (OSError, ValueError):
        return []
    return [question] if question else []
