"""What generate.py's commands share: options of the model and of its answers, and how both are opened.

Torch takes seconds to import. What needs it is imported inside functions, after all that can be checked
without it, so that --help and a mistake answer at once.
"""

from __future__ import annotations

import argparse
import math
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any

from generation.options import GenerationOptions, SamplingParams
from inference import flags, positionals
from inference.errors import RequestError
from inference.flags import Parser, option, positive
from inference.grammar import MOST_BYTES, check_grammar, choice_grammar, json_grammar, read_choices
from inference.thinking import THINK_TOKENS, Think, held_to
from inference.votes import PICKS
from messages import counted
from models.checkpoints.names import PHOTOGRAPHS

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("chat", "batch", "where")  # beside `ask`, which needs no name
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
EXAMPLE_IMAGE = ROOT / "assets" / "example.png"
# The names in data.boxes, whose import takes as long as all of this file.
BOX_FORMATS = ("qwen3-vl", "qwen2.5-vl", "lfm2.5-vl", "doctags")
MANY_POSITIONS = 1024  # of one image: some seconds to minutes on a CPU
_NUMBER: dict[str, Any] = {"type": positive, "metavar": "N"}
# The options that some commands lack.
_ABSENT = {"cache": True, "draft": False, "json": False, "num_answers": 1, "logprobs": None, "pick": None}


def log(text: str) -> None:
    flags.log(f"generate.py: {text}")


@option
def schema(name: str) -> str:
    """The grammar of the JSON schema in a file."""
    with open(name, "rb") as file:
        return check_grammar(json_grammar(file.read(MOST_BYTES + 1)))


@option
def choices(text: str) -> str:
    """The grammar of what `read_choices` reads."""
    return choice_grammar(read_choices(text))


def command_parser(name: str, description: str) -> Parser:
    """A command's parser with the options that all commands have; `name` is "" for `ask`."""
    parser = Parser(prog=f"generate.py {name}".rstrip(), description=description)
    parser.others = COMMANDS
    parser.set_defaults(**_ABSENT, no_image=False)
    parser.add_argument("--system", metavar="TEXT", help="system message before every question")
    add = parser.add_argument_group("model").add_argument
    add("--model", type=flags.model, default=str(DEFAULT_MODEL), help=flags.MODEL)
    add("--revision", help="branch, tag or commit on the Hub")
    add("--device", type=flags.device, default="auto", help="auto (default: the fastest one), cpu, cuda, mps")
    weights = "dtype of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, otherwise the "
    weights += "checkpoint's own. int8 and int4 need a CPU or CUDA, int4 a C compiler, too. bf16, fp16 "
    weights += "and fp32 are accepted"
    add("--dtype", type=flags.dtype, default="auto", choices=flags.DTYPES, help=weights)
    compiled = "answer with compiled code (cached per machine; same float32 output); auto (default): if it "
    compiled += "is already compiled, if the model is large, and for a chat or a batch; off: never (int4 "
    compiled += "weights are still rounded in C)"
    add("--compile", default="auto", choices=("auto", "on", "off"), help=compiled)
    flags.add_machine(add)

    group = parser.add_argument_group("answer")
    add = group.add_argument
    add("--max-new-tokens", **_NUMBER, default=256, help="maximum of tokens of the answer (default 256)")
    for own in fields(SamplingParams):
        kind, about = float if isinstance(own.default, float) else int, own.metadata
        flag = {"type": kind, "default": own.default, "metavar": about["metavar"], "help": about["help"]}
        add(f"--{own.name.replace('_', '-')}", **flag)
    form = group.add_mutually_exclusive_group().add_argument
    held = "answer with JSON that fits the JSON schema in this file"
    form("--schema", type=schema, dest="grammar", metavar="FILE", help=held)
    held = "answer with the likeliest of these texts (a JSON list may hold commas) or whole numbers; --json "
    held += "has the probability of each, and of numbers the expected value"
    form("--choices", type=choices, dest="grammar", metavar="A,B,...|1..5", help=held)
    flags.add_think(add)
    kept = "folder that keeps what prompts left in the cache: a later start computes only what is new"
    add("--prefix-cache", metavar="DIR", help=kept)
    copied = "look the next tokens up where the last ones stood before, and verify several in one pass; auto "
    copied += "(default): with the compiled step on a CPU (same tokens), as long as it pays"
    add("--lookup", default="auto", choices=("auto", "on", "off"), help=copied)

    add = parser.add_argument_group("output").add_argument
    add("--stats", action="store_true", help="print token counts, times and memory to stderr")
    add("--debug", action="store_true", help="print the traceback of an error")
    return parser


def add_images(parser: Parser, needed: bool = False) -> None:
    """Images with questions among and beside them; --no-image where none is `needed`."""
    images = "images and videos to show together (path, URL, or - for stdin; a folder is the frames of a "
    images += "video). Text that is no file is a question"
    parser.add_argument("images", nargs="*", metavar="IMAGE|QUESTION", help=images)
    add_questions(parser)
    if not needed:
        parser.add_argument("--no-image", action="store_true", help="ask without an image")


def add_questions(parser: Parser) -> None:
    names = ("-q", "--question", "-p", "--prompt")
    question = "question; may be repeated. Without one, stdin is read if it is a pipe or a file"
    parser.add_argument(*names, action="append", dest="questions", metavar="TEXT", default=[], help=question)


def add_several(parser: Parser) -> None:
    """Several answers to each question, and boxes: for `ask` and `batch`."""
    add = parser.add_argument_group("several answers").add_argument
    add("--num-answers", **_NUMBER, default=1, help="answers to each question (default 1)")
    best = "print only one of them. vote: the most frequent, whatever its case, white space and final dot "
    best += "(of equally frequent ones that with the higher mean confidence). confidence: that with the "
    best += "highest mean log-probability of its tokens"
    add("--pick", choices=PICKS, help=best)
    add = parser.add_argument_group("boxes and points, in pixels").add_argument
    thing: dict[str, Any] = {"action": "append", "metavar": "THING", "default": []}
    add("--detect", **thing, help="put a box around each THING; may be repeated")
    add("--point", **thing, help="point to each THING; may be repeated")
    add("--describe", action="store_true", help="put a box around everything in the image")
    written = "form of the model's coordinates (default: what its generation_config.json names, or its "
    written += f"family's): {', '.join(BOX_FORMATS)}"
    add("--box-format", choices=BOX_FORMATS, metavar="NAME", help=written)


def add_draft(parser: Parser) -> None:
    sooner = "while an image's tiles are encoded, show in grey what the model says about it as a whole; the "
    sooner += "answer that takes its place is the same as without (default: off)"
    parser.add_argument("--draft", action=argparse.BooleanOptionalAction, default=False, help=sooner)


def parse_words(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """The arguments, with the questions among IMAGE|QUESTION moved to `questions`."""
    args = parser.parse_intermixed_args(arguments)  # images may stand on both sides of -q
    asked = [*filter(positionals.is_question, args.images)]
    args.images = [name for name in args.images if name not in asked]
    args.questions = [*asked, *args.questions]
    refuse(
        parser,
        positionals.lacks_quotes(args.images, asked),
        "-q: expected a question, got ''" * (not all(map(str.strip, args.questions))),
        args.no_image and apart("--no-image", {"IMAGE": args.images}),
    )
    return args


def refuse_several(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse what is wrong with the options of `add_several` and of thinking."""
    refuse(
        parser,
        "--pick: expected with --num-answers" * bool(args.pick and args.num_answers == 1),
        "--think-tokens: expected with --think" * bool(args.think_tokens and not args.think),
        "" if all(map(str.strip, args.detect + args.point)) else "--detect, --point: expected a name, got ''",
    )


def refuse(parser: Parser, *mistakes: str | bool | None) -> None:
    """End in the first of these sentences that is one."""
    for mistake in mistakes:
        if mistake:
            parser.error(str(mistake))


def apart(first: str, others: dict[str, Any]) -> str | None:
    """A sentence about an option that is given beside others which it cannot be combined with, or None."""
    given = ", ".join(name for name, value in others.items() if value)
    return f"{first} cannot be combined with {given}" if given else None


def generation_options(args: argparse.Namespace, confidence: bool) -> GenerationOptions:
    """The options of every answer; `confidence`: it will be shown. A run that samples gets a seed, so that
    --json can report it."""
    seed = args.seed
    if seed is None and args.temperature > 0:
        seed = secrets.randbelow(2**31)
    own = {field.name: vars(args)[field.name] for field in fields(SamplingParams)}
    try:
        return GenerationOptions(
            num_return_sequences=args.num_answers,
            constraint=Think(args.think_tokens or THINK_TOKENS) if args.think else None,
            confidence=bool(confidence or args.stats or args.pick),
            logprobs=args.logprobs,
            max_new_tokens=args.max_new_tokens,
            lookup=args.lookup,
            use_cache=args.cache,
            **own | {"seed": seed},
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def open_images(names: list[str]) -> list[Any]:
    """Images and videos by their names, as far as they are read without a model; "-" is stdin."""
    from data.images import ImageLimits
    from data.visuals import open_visual

    positionals.check_together(names, log)
    piped = positionals.read_stdin_image(ImageLimits().max_bytes) if positionals.STDIN in names else b""
    return [open_visual(piped if name == positionals.STDIN else name, name=name) for name in names]


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
        from inference.prefix_files import with_prefixes

        checkpoint = with_prefixes(checkpoint, args.prefix_cache)
    if args.think:
        checkpoint.processor.chat.check_thinking("--think")
    if args.grammar is not None:
        options = held_to(options, checkpoint.forms.constraint(args.grammar))
    return checkpoint, options


def log_unused(args: argparse.Namespace) -> None:
    """Log the sampling options that a temperature of 0 ignores."""
    of_draws = [own for own in fields(SamplingParams) if own.metadata["of_draws"]]
    unused = [f"--{own.name.replace('_', '-')}" for own in of_draws if vars(args)[own.name] != own.default]
    if unused and args.temperature == 0:
        log(f"{', '.join(unused)} without effect: give a --temperature to sample tokens")


def log_sizes(args: argparse.Namespace, names: list[str], images: list[Any], checkpoint: Any) -> None:
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


def log_other_model(checkpoint: Any, answers: list[str], log=log) -> None:
    """After a refusal, log which model knows photographs."""
    if other := checkpoint.other_model(answers):
        log(f"{other}: --model {PHOTOGRAPHS} (--model list shows all)")
