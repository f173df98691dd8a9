"""What the command lines of the entry points share, and how generate.py reads its arguments and stdin.

Nothing here imports torch, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import secrets
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from data.errors import ImageError, nearest_file
from generation.options import GenerationOptions, SamplingParams
from inference.attribution import METHODS, is_sheet
from inference.batch_files import are_images
from inference.errors import RequestError, check_text_only
from inference.grammar import MOST_BYTES, check_grammar, choice_grammar, json_grammar, read_choices
from inference.terminal import GREY, PLAIN, Lines, columns, wrapped, wrapped_lines
from inference.thinking import THINK_TOKENS, Think
from inference.votes import PICKS
from messages import counted, did_you_mean, for_terminal, one_line, printable
from models import __version__
from models.checkpoints.names import PHOTOGRAPHS, table
from models.checkpoints.sources import check_has_config, last_name, open_files, repository
from models.config import check_device

T = TypeVar("T")
# The names in data.boxes, whose import takes as long as all of this file.
BOX_FORMATS = ("qwen3-vl", "qwen2.5-vl", "lfm2.5-vl", "doctags")
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
STDIN = "-"  # the image that is read from stdin
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
LOG_AFTER = 1.0  # seconds of loading
MOST_THREADS = 512  # with more, OpenMP ends the process
STDIN_TIMEOUT = 5.0  # seconds for a piped question to begin: nobody may be writing to the pipe
_URL = re.compile(r"\w+://|data:", re.IGNORECASE)
_PATH = re.compile(r"\.{0,2}/|~\w*/")
_SUFFIX = re.compile(
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|p[bgpn]m|avif|hei[cf]|jp2|jxl|svg|pdf|mp4|m4v|mov|webm|mkv|avi)",
    re.IGNORECASE,
)
# Options of generate.py, what they cannot be combined with, and what needs them.
_LOCATING = {"detect", "point", "describe", "show_boxes"}
_ALONE = {
    "batch": {"images", "no_image", "json", "no_cache", "chat", "show_attention", "draft", "show_boxes"},
    "chat": {"json", "num_answers", "no_cache", "show_attention", *_LOCATING, "box_format"},
    "think": {"draft", "show_attention"},
    **{name: {"no_image", "num_answers", "draft"} for name in sorted(_LOCATING)},
    "show_attention": {"no_image", "num_answers", "second_question"},
    "no_image": {"images"},
    "compile_on": {"no_cache"},
    "draft": {"no_cache", "num_answers"},
    "lookup_on": {"no_cache"},
    "prefix_cache": {"no_cache"},
}
_BELONG = {
    "batch": {"out", "batch_size", "shard"},
    "json": {"logprobs"},
    "num_answers": {"pick"},
    "think": {"think_tokens"},
    "show_attention": {"method"},
}
_MANY_TOGETHER, _MOST_TOGETHER = 4, 256  # images in one question: a hint beyond, and an error
MOST_SHOWN = 5  # failures of a batch on stderr; the results have all
_ALIKE = 0.8  # text with spaces is a mistyped path if it is this similar to the name of a file


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line in one sentence with exit status 2, and has --version."""

    def __init__(self, **options):
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        version = f"%(prog)s (Ocelli) {__version__}"
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def error(self, message: str):
        if found := re.match(r"unrecognized arguments: (?:.* )?(--?\w[^\s=]*)", message):
            message = f"unknown option {found[1]}{did_you_mean(found[1], self._options())}"
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")

    def _options(self) -> list[str]:
        names = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names += [name for parser in action.choices.values() for name in parser._options()]
        return names


def positive(text: str, most: int | None = None, least: int = 1) -> int:
    """The type of an option that takes an integer of at least `least`, and at most `most`."""
    if not text.strip().lstrip("+-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
    if most is not None and int(text) > most:
        raise argparse.ArgumentTypeError(f"expected at most {most}, got {text}")
    return int(text)


def option(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of options: argparse shows the sentence of the error that `read` raises."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(one_line(error)) from None

    return convert


@option
def shard(text: str) -> tuple[int, int]:
    """One part of several, such as 2/8."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"expected a part such as 2/8, from 1/8 to 8/8, got {text!r}")
    return int(found[1]), int(found[2])


@option
def schema(name: str) -> str:
    """The grammar of the JSON schema in a file."""
    with open(name, "rb") as file:
        return check_grammar(json_grammar(file.read(MOST_BYTES + 1)))


@option
def choices(text: str) -> str:
    """The grammar of what `read_choices` reads."""
    return choice_grammar(read_choices(text))


@option
def frames_a_second(text: str) -> float:
    """A number above 0, up to 1000."""
    if not 0 < float(text) <= 1000:
        raise ValueError(f"expected more than 0 and at most 1000, got {text}")
    return float(text)


device = option(check_device)  # the name of a kind of device, with or without an index


def dtype(text: str) -> str:
    """The full name of a dtype."""
    return _DTYPE_ALIASES.get(text, text)


def add_machine(add: Callable[..., Any]) -> None:
    """Options of `inference.checkpoint.open_checkpoint`, beside --device and --dtype."""
    usual = "the variable OMP_NUM_THREADS, or one for each processor that this process may use"
    number = partial(positive, most=MOST_THREADS)
    add("--threads", type=number, metavar="N", help=f"maximum of CPU threads (default: {usual})")
    about = "pixels that larger images are made to fit, for models that take images whole (Qwen-VL, Qwen3.5, "
    about += "Gemma 4); default: 524288 on a CPU, elsewhere the checkpoint's own, which is never exceeded"
    add("--max-pixels", type=partial(positive, least=1024), metavar="N", help=about)
    second = "frames of a second of a video that are shown (default: as many as the checkpoint says)"
    add("--fps", type=frames_a_second, metavar="N", help=second)
    add("--max-frames", type=positive, metavar="N", help="most frames of a video (default: the checkpoint's)")


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """How `inference.checkpoint.open_checkpoint` is to open a model, as those options say."""
    names = ("device", "dtype", "threads", "max_pixels", "fps", "max_frames")
    return {name: getattr(args, name) for name in names}


def add_think(add: Callable[..., Any]) -> None:
    """The options of `inference.thinking.Think`."""
    first = "let the model think before it answers, if its chat template knows how (default: off)"
    add("--think", action=argparse.BooleanOptionalAction, default=False, help=first)
    most = f"maximum of tokens that it thinks, besides those of the answer (default {THINK_TOKENS})"
    add("--think-tokens", type=positive, metavar="N", help=most)


def model(name: str) -> str:
    """The type of an option that names a model: a short name becomes its repository. "list" prints the short
    names and ends the program."""
    if name == "list" and not os.path.isdir(name):
        print(table())
        sys.exit(0)
    return repository(name)


MODEL = "folder, GGUF file, repository on the Hub, or a short name such as smolvlm-256m (list: prints them)"


def check_model(source: str, revision: str | None, text_only: bool = False) -> None:
    """Refuse a model whose name is wrong or whose config.json cannot be reached, and one that needs an image
    for `text_only` questions."""
    check_has_config(source, revision)
    if text_only:
        check_text_only(open_files(source, revision).generation_config)


def check_image_name(name: str, advice: str = "") -> None:
    """Raises ImageError with the nearest name, and `advice`, if a path names no file."""
    if name == STDIN or _URL.match(name) or os.path.lexists(os.path.expanduser(name)):
        return
    hint = nearest_file(name) or f" (looked in {os.getcwd()}), check the path"
    raise ImageError(f"{name!r}: no such file{hint}{advice}")


def check_together(names: list[str], log: Callable[[str], None]) -> None:
    """Refuse names of no images, and so many that they were hardly meant to be shown in one prompt."""
    each = "to ask about each by itself: --batch IMAGE... -q TEXT --out FILE.jsonl"
    for name in names:
        check_image_name(name, " (a question that looks like a path takes -q)")
        if name != STDIN and os.path.isdir(os.path.expanduser(name)):
            log(f"{name}: its images are shown as a video; {each.replace('IMAGE...', name)}")
    if len(names) > _MOST_TOGETHER:
        raise ImageError(
            f"expected at most {_MOST_TOGETHER} images in one question, got {len(names)}; {each}"
        )
    if len(names) > _MANY_TOGETHER:
        log(f"{len(names)} images are shown together, in one question; {each}")


@contextmanager
def log_if_slow(program: str, model: str) -> Iterator[None]:
    """Says on stderr that this model is being loaded if the block takes more than a moment."""
    text = f"{program}: loading {last_name(model)}"
    timer = threading.Timer(LOG_AFTER, log, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def listen(host: str, port: int, last: int | None = None) -> socket.socket:
    """A socket on the first free port from `port` to `last`, by default on `port` alone. Raises OSError or
    ValueError without one."""
    last = port if last is None else last
    if not 0 < port <= last < 2**16:
        raise ValueError(f"--port: expected 1 to 65535, got {port}")
    for number in range(port, last + 1):
        try:
            family, *_, place = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"cannot listen on {host}, port {number}: {error}") from None
    taken = f"port {port} is" if port == last else f"ports {port} to {last} are"
    raise OSError(f"{taken} in use on {host}: give another --port")


def address(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


# ---------------------------------------------------------------------------- arguments of generate.py
def generate_parser(description: str, default_model: Path) -> argparse.ArgumentParser:
    parser = Parser(prog="generate.py", description=description)
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    images = (
        "images and videos to show together (path, URL, or - for stdin; a folder is the frames of a video). "
    )
    images += "Text that is no file is a question"
    add("images", nargs="*", metavar="IMAGE|QUESTION", help=images)
    question = "question; may be repeated. Without one, stdin is read if it is a pipe or a file"
    names = ("-q", "--question", "-p", "--prompt")
    add(*names, action="append", dest="questions", metavar="TEXT", default=[], help=question)
    add("--no-image", action="store_true", help="ask without an image, not about the example image")
    add("--chat", action="store_true", help="start a conversation; /help lists its commands")
    add("--system", metavar="TEXT", help="system message before every question")

    add = parser.add_argument_group("model").add_argument
    add("--model", type=model, default=str(default_model), help=MODEL)
    add("--revision", help="branch, tag or commit on the Hub")
    add("--device", type=device, default="auto", help="auto (default: the fastest one), cpu, cuda, mps")
    weights = "dtype of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, otherwise the "
    weights += "checkpoint's own. int8 and int4 need a CPU or CUDA, int4 a C compiler, too. bf16, fp16 "
    weights += "and fp32 are accepted"
    add("--dtype", type=dtype, default="auto", choices=DTYPES, help=weights)
    when = ("auto", "on", "off")
    compiled = "answer with compiled code (cached per machine; same float32 output); auto (default): if it "
    compiled += "is already compiled, if the model is large, and for a chat or a batch; off: never, except "
    compiled += "for --dtype int4, which C rounds to"
    add("--compile", default="auto", choices=when, help=compiled)
    add_machine(add)

    add_group = parser.add_argument_group("answer")
    add = add_group.add_argument
    add("--max-new-tokens", **number, default=256, help="maximum of tokens of the answer (default 256)")
    add_think(add)
    add("--num-answers", **number, default=1, help="answers to each question (default 1)")
    best = "print only one of them. vote: the most frequent, whatever its case, white space and final dot "
    best += "(of equally frequent ones that with the higher mean confidence). confidence: that with the "
    best += "highest mean log-probability of its tokens"
    add("--pick", choices=PICKS, help=best)
    for own in fields(SamplingParams):
        kind, about = float if isinstance(own.default, float) else int, own.metadata
        flag = {"type": kind, "default": own.default, "metavar": about["metavar"], "help": about["help"]}
        add(f"--{_dashed(own.name)}", **flag)
    form = add_group.add_mutually_exclusive_group().add_argument
    held = "answer with JSON that fits the JSON schema in this file"
    form("--schema", type=schema, dest="grammar", metavar="FILE", help=held)
    held = "answer with the likeliest of these texts (a JSON list may hold commas) or whole numbers; --json "
    held += "has the probability of each, and of numbers the expected value"
    form("--choices", type=choices, dest="grammar", metavar="A,B,...|1..5", help=held)
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    slower = "keep keys and values; without, every token recomputes everything: same answer, slower"
    add("--cache", **switch, default=True, help=slower)
    kept = "folder that keeps what prompts left in the cache: a later start computes only what is new"
    add("--prefix-cache", metavar="DIR", help=kept)
    sooner = "while an image's tiles are encoded, show in grey what the model says about it as a whole; the "
    sooner += "answer that takes its place is the same as without (default: off)"
    add("--draft", **switch, default=False, help=sooner)
    copied = "look the next tokens up where the last ones stood before, and verify several in one pass; auto "
    copied += "(default): with the compiled step on a CPU (same tokens), as long as it pays"
    add("--lookup", default="auto", choices=when, help=copied)

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object per question")
    beside = "with --json: each token's log-probability, and those of the N likeliest beside it (0: none)"
    add("--logprobs", type=partial(positive, least=0), metavar="N", help=beside)
    add("--stats", action="store_true", help="print token counts, times and memory to stderr")
    add("--debug", action="store_true", help="print the traceback of an error")

    add = parser.add_argument_group("attribution (where did it look)").add_argument
    add("--show-attention", type=Path, metavar="OUT.png", help="write a heat map for each word of the answer")
    method = "attention (default): where the decoder attends; occlusion: where greying a place makes the "
    add("--method", choices=METHODS, help=method + "answer less likely")

    add = parser.add_argument_group("boxes and points, in pixels").add_argument
    thing: dict[str, Any] = {"action": "append", "metavar": "THING", "default": []}
    add("--detect", **thing, help="put a box around each THING; may be repeated")
    add("--point", **thing, help="point to each THING; may be repeated")
    add("--describe", action="store_true", help="put a box around everything in the image")
    drawn = "write the image with all boxes and points of the answers"
    add("--show-boxes", type=Path, metavar="OUT.png", help=drawn)
    written = (
        "form of the model's coordinates (default: what its generation_config.json names, or its family's): "
    )
    add("--box-format", choices=BOX_FORMATS, metavar="NAME", help=written + ", ".join(BOX_FORMATS))

    add = parser.add_argument_group("many questions").add_argument
    many = 'file of lines {"image": ..., "question": ...}; or folders with their subfolders, globs and '
    many += "images, to ask -q (or --detect, --point, --describe) about each image"
    add("--batch", nargs="+", metavar="FILE.jsonl|FOLDER|IMAGE", help=many)
    add("--out", type=Path, metavar="FILE.jsonl", help="file for the results, one line each")
    add("--batch-size", **number, help="number of answers made at a time (default 8)")
    part = "answer the Kth of N parts of the questions, for N machines; together they are one run"
    add("--shard", type=shard, metavar="K/N", help=part)
    return parser


def parse_generate_args(
    arguments: list[str] | None, description: str, default_model: Path
) -> argparse.Namespace:
    """The arguments of generate.py, checked; `questions` holds those among IMAGE|QUESTION, too."""
    parser = generate_parser(description, default_model)
    # Intermixed, so that images may stand on both sides of -q.
    args = parser.parse_intermixed_args(arguments)
    # --batch takes all that stands after it.
    given = [*args.images, *(args.batch or [])]
    asked = [*filter(is_question, given)]
    lacking = _lacks_quotes([name for name in given if name not in asked], asked)
    args.questions = [*asked, *args.questions]
    args.images = [name for name in args.images if not is_question(name)]
    args.batch = args.batch and [name for name in args.batch if not is_question(name)]
    if message := lacking or validate_args(args):
        parser.error(message)
    return args


def validate_args(args: argparse.Namespace) -> str | None:
    """One sentence about arguments that do not go together, or None."""
    if args.batch == []:
        return "--batch: expected a FILE.jsonl, a folder or images, got a question only"
    values = vars(args) | {
        "no_cache": not args.cache,
        "num_answers": args.num_answers != 1,
        "compile_on": args.compile == "on",
        "lookup_on": args.lookup == "on",
        "second_question": len(args.questions) > 1,
    }
    given = {name for name, value in values.items() if value not in (None, False, [])}
    for name, others in _ALONE.items():
        if name in given and others & given:
            return f"{_listed({name})} cannot be combined with {_listed(others & given)}"
    for name, others in _BELONG.items():
        chat = name == "think" and args.chat  # it has /think on
        if name not in given and not chat and others & given:
            return f"{_listed(others & given)}: expected with --{_dashed(name)}"
    if not all(map(str.strip, args.questions)):
        return "-q: expected a question, got an empty one"
    if not all(map(str.strip, args.detect + args.point)):
        return "--detect, --point: expected the name of a thing, got an empty one"
    if args.batch is not None and (wrong := _wrong_batch(args)):
        return wrong
    if args.images.count(STDIN) > (0 if args.chat else 1):
        return "-: stdin holds one image, and the lines of a --chat"
    for name in ("show_attention", "show_boxes"):
        if (sheet := values[name]) and (wrong := _wrong_sheet(sheet)):
            return f"--{_dashed(name)}: {wrong}"
    return None


def _lacks_quotes(names: list[str], questions: list[str]) -> str | None:
    """A sentence about what seems to be a question of several words without quotes, or None: names of no
    files that are single words, several of them, or one beside a question of one word."""

    def is_lost(name: str) -> bool:
        inside = name.rstrip(".,;:!")  # a sentence may end in these
        named = name == STDIN or is_image_name(name) or any(mark in inside for mark in "./*?[")
        return not named and not os.path.lexists(name) and not nearest_file(name, folders=True)

    lost = [*filter(is_lost, names)]
    if not lost or len(lost) + sum(not re.search(r"\s", one.strip()) for one in questions) < 2:
        return None
    return f"{lost[0]!r}: no such file; a text of several words, such as a question, needs quotes around it"


def _wrong_batch(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments beside --batch, or None."""
    if not args.out:
        return "--batch needs --out FILE.jsonl for its results"
    asked = bool(args.questions or args.detect or args.point or args.describe)
    images = are_images(args.batch, asked)
    if images and not asked:
        return (
            f"--batch {args.batch[0]}: expected -q TEXT, a question about each image, or one FILE.jsonl alone"
        )
    if not images and (asked or args.box_format):
        return (
            f"--batch {args.batch[0]}: its lines are the questions; -q and others are for folders and images"
        )
    if args.shard and args.temperature > 0 and args.seed is None:
        return "--shard with a --temperature: expected a --seed, so that all shards are as one run"
    return None


def _wrong_sheet(sheet: Path) -> str | None:
    """Why an image of ours cannot be written there, or None."""
    if sheet.suffix.lower() != ".png":
        return f"expected a name that ends in .png, got {str(sheet)!r}"
    if os.path.lexists(sheet) and not is_sheet(sheet):
        return f"{str(sheet)!r} exists and is not one that this program drew: choose another name"
    if not os.access(sheet.parent, os.W_OK | os.X_OK):
        return f"expected a folder that can be written to, got {str(sheet.parent)!r}"
    return None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _listed(names: set[str]) -> str:
    spelled = {
        "images": "IMAGE", "questions": "-q", "second_question": "a second -q",
        "compile_on": "--compile on", "lookup_on": "--lookup on",
    }  # fmt: skip
    return ", ".join(spelled.get(name, f"--{_dashed(name)}") for name in sorted(names))


def is_question(text: str) -> bool:
    """Whether a positional argument is a question, not an image. A file that exists is an image. So is what
    looks like a path, so that a mistyped path is refused instead of asked."""
    if text == STDIN or _URL.match(text) or os.path.lexists(os.path.expanduser(text)):
        return False
    if text.rstrip().endswith(("?", "？", "؟")):
        return True
    if not any(map(str.isspace, text)):
        return not text  # one word is a name; an empty argument was meant as a question
    return not (
        _PATH.match(text) or _SUFFIX.fullmatch(os.path.splitext(text)[1]) or nearest_file(text, _ALIKE)
    )


def is_image_name(word: str) -> bool:
    """Whether one word names an image and nothing else: a URL, or what is written like a path."""
    return bool(
        (_URL.match(word) and not word.endswith(":"))
        or _SUFFIX.fullmatch(os.path.splitext(word)[1])
        or (_PATH.match(word) and word.count("/") > 1 - word.startswith((".", "~")))  # "/stats" is no path
    )


def read_stdin_image(max_bytes: int) -> bytes:
    """The bytes of the image on stdin, one more than `max_bytes` at most. Raises RequestError."""
    raw = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(max_bytes + 1)
    if not raw:
        raise RequestError("-: expected an image on stdin, got nothing; pipe a file into this command")
    return raw


def read_stdin_questions() -> list[str]:
    """All of stdin as a question. [] if stdin is a terminal, closed, /dev/null, empty, or a pipe that nobody
    writes to, as under cron and CI."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return []
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        if not select.select([sys.stdin], [], [], STDIN_TIMEOUT)[0]:
            return []
    elif not stat.S_ISREG(mode):
        return []
    try:
        question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise RequestError(
            "stdin: expected a question in UTF-8; pass - to read an image from stdin"
        ) from None
    return [question] if question else []


# ------------------------------------------------------------------------------ options and figures
def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """The options of every answer. A run that samples gets a seed, so that --json can report it. Confidences
    are computed where they may be printed."""
    seed = args.seed
    if seed is None and args.temperature > 0:
        seed = secrets.randbelow(2**31)
    own = {field.name: vars(args)[field.name] for field in fields(SamplingParams)}
    try:
        return GenerationOptions(
            num_return_sequences=args.num_answers,
            constraint=Think(args.think_tokens or THINK_TOKENS) if args.think else None,
            confidence=bool(args.json or args.stats or args.chat or args.batch or args.pick),
            logprobs=args.logprobs,
            max_new_tokens=args.max_new_tokens,
            lookup=args.lookup,
            use_cache=args.cache,
            **own | {"seed": seed},
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def log_defaults(
    args: argparse.Namespace, question: str, image: Path, checkpoint: Any, log: Callable[[str], None]
) -> None:
    """Log what the model says about itself, what was used in place of a missing image or question, and what
    is without effect; `image` is the example's name."""
    for line in (checkpoint.introduction, checkpoint.too_many_images(len(args.images))):
        if line and not args.json:
            log(line)
    log_unused(args, log)
    if not args.json and not (args.questions and (args.images or args.no_image)):
        log(f"{', '.join(args.images) or ('no image' if args.no_image else image)}: {question}")
    if not args.json and args.num_answers > 1 and args.temperature == 0:
        log("all answers are the same, the most likely one: give a --temperature to get different ones")


def log_votes(picked: dict[str, Any], log: Callable[[str], None]) -> None:
    """How many answers say what, and how sure the model was of these."""
    votes, most = picked["votes"], MOST_SHOWN
    said = [f"{one['count']} x {printable(one['answer'], 60)} ({one['confidence']:.1%})" for one in votes]
    more = f", and {len(votes) - most} others" if len(votes) > most else ""
    log(f"{sum(one['count'] for one in votes)} answers, by {picked['by']}: {', '.join(said[:most])}{more}")


MANY_POSITIONS = 1024  # of one image: some seconds to minutes on a CPU


def log_sizes(
    args: argparse.Namespace, names: list[str], images: list[Any], checkpoint: Any, log: Callable[[str], None]
) -> None:
    """Log `seen_at` of images, before they are computed."""
    rule = checkpoint.processor.images
    if args.max_pixels is not None and rule.budget is None:
        log("--max-pixels has no effect on a model whose images are cut into tiles")
    if (args.fps or args.max_frames) and rule.videos is None:
        log("--fps and --max-frames have no effect on a model that sees videos as images")
    for name, image in dict(() if args.json else zip(names, images, strict=True)).items():
        if getattr(image, "animated", False) and checkpoint.processor.few_images:
            log(f"{name}: it moves, but this model sees its first frame alone")
        if seen := seen_at(rule, checkpoint.processor.plan(image)):
            log(f"{name}: {seen}")


def seen_at(rule: Any, visual: Any) -> str:
    """What an image takes that is shown whole: where that is much, or the image is made much smaller; and
    what is shown of a video."""
    height, width = visual.parts.shape[-2:]
    if visual.times:
        times = f"{visual.times[0]:.1f} to {visual.times[-1]:.1f} of {visual.seconds:.1f} s"
        nouns = ("pair of frames", "pairs of frames") if len(visual.parts.shape) == 5 else ("frame",)
        parts = counted(len(visual.times), *nouns)
        return f"{parts}, {times}, seen at {width} x {height} pixels ({visual.positions} positions)"
    if rule.budget is None:
        return ""
    if visual.positions <= MANY_POSITIONS and 4 * width * height >= math.prod(visual.size):
        return ""
    more = "; a larger --max-pixels shows more" if rule.budget < rule.limit else ""
    return f"seen at {width} x {height} pixels ({visual.positions} positions){more}"


def log_other_model(checkpoint: Any, answers: list[str], log: Callable[[str], None]) -> None:
    """After a refusal, log which model knows photographs."""
    if other := checkpoint.other_model(answers):
        log(f"{other}: --model {PHOTOGRAPHS} (--model list shows all)")


def log_unused(args: argparse.Namespace, log: Callable[[str], None]) -> None:
    """Log the sampling options that a temperature of 0 ignores."""
    of_draws = [own for own in fields(SamplingParams) if own.metadata["of_draws"]]
    unused = [f"--{_dashed(own.name)}" for own in of_draws if vars(args)[own.name] != own.default]
    if unused and args.temperature == 0:
        log(f"{', '.join(unused)} without effect: give a --temperature to sample tokens")


def log(text: str) -> None:
    """Lines on stderr; at a terminal no word of them is cut at its edge, and none controls it."""
    text = for_terminal(text)
    print(wrapped_lines(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def shown(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of an answer as stdout is to show them."""
    return wrapped(pieces) if sys.stdout.isatty() else map(for_terminal, pieces)


def say(pieces: Iterable[str]) -> None:
    """Print an answer while it is made."""
    for piece in shown(pieces):
        print(piece, end="", flush=True)
    print(flush=True)


class Aside:
    """What a model thinks before it answers, on stderr while it is made: in grey at a terminal."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted, self._begun = wanted, False
        self._lines = Lines(columns()) if sys.stderr.isatty() else None

    def put(self, piece: str) -> None:
        """More of it."""
        self._print(piece if self._begun else f"[thinking] {piece}")
        self._begun = True

    def end(self) -> None:
        """It has come to its end, if it had begun."""
        if self._begun:
            self._print("\n\n")
        self._begun = False

    def _print(self, text: str) -> None:
        text = for_terminal(text)
        if self._lines is not None:
            text = GREY + "".join(map(self._lines.take, text)) + PLAIN
        if self._wanted:
            print(text, end="", file=sys.stderr, flush=True)

    def before(self, pieces: Iterable[tuple[int, str]]) -> Iterator[str]:
        """The pieces of an answer, which it stands before."""
        try:
            for _, piece in pieces:
                self.end()
                yield piece
        finally:
            self.end()


def stats_table(result: dict[str, Any], model: str, **more: str) -> str:
    """The size and speed of an answer, from the fields of `Reply.finish`: a line for each figure."""
    lengths = " + ".join(str(len(ids)) for ids in result["token_ids"])
    lengths += " token" if lengths == "1" else " tokens"
    reused = f", {result['reused_tokens']} kept from before" if result["reused_tokens"] else ""
    confidences = "".join(f", confidence {one:.1%}" for one in result["confidences"])
    thought = "".join(f"{counted(n, 'token')} of thinking, " for n in result.get("thinking_tokens", ()))
    ended = ", ".join(sorted(set(result["stop_reasons"])))
    rows = {
        "model": f"{model}, {result['dtype']} on {result['device']}",
        "prompt": f"{result['prompt_tokens']} tokens, {result['image_tokens']} of them image{reused}",
        "answer": f"{thought}{lengths}, ended by {ended}{confidences}",
        **{name.replace("_", " "): f"{value:.3f} s" for name, value in result["seconds"].items()},
        "kv cache": f"{result['kv_cache_bytes'] / 2**20:.2f} MiB",
        "step": result["decode_step"],
        "tower": result["vision_tower"],
    }
    if result["decode_tokens_per_second"] is not None:
        rows["decode"] += f", {result['decode_tokens_per_second']:.1f} tokens/s"
    if draft := result.get("draft"):
        seconds, first = draft["draft_seconds"], draft["first_token_seconds"]
        right = f"{draft['accepted']} of {counted(draft['tokens'], 'token')} right"
        rows["draft"] = f"{seconds:.3f} s, {first:.3f} s to the first token; {right}"
    if result.get("proposed_tokens"):
        rows["verified"] = (
            f"{result['accepted_tokens']} of {counted(result['proposed_tokens'], 'proposed token')} accepted"
        )
    for probabilities in result.get("probabilities", ()):
        rows["choices"] = ", ".join(f"{text} {share:.1%}" for text, share in probabilities.items())
    rows |= more
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())
