"""Look into checkpoints without loading them, and convert them.

    python -m models.checkpoints inspect checkpoints/ocelli-shapes --image 640x480
    python -m models.checkpoints inspect HuggingFaceTB/SmolVLM-256M-Instruct     # reads headers, no weights
    python -m models.checkpoints convert lusxvr/nanoVLM-450M nanovlm-hub         # for transformers and vLLM
    python -m models.checkpoints convert HuggingFaceTB/SmolVLM-256M-Instruct smolvlm-nano --to nanovlm
    python -m models.checkpoints convert checkpoints/ocelli-shapes runs/shapes-bf16 --dtype bfloat16
    python -m models.checkpoints convert BASE merged --adapter runs/mine-lora/adapter --push me/merged

A conversion is written under another name, opened again (in transformers' layout by transformers, too) and
put in its place only if its logits are the original's. Exit status: 0, or 2 with one sentence on what was
wrong, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from data.errors import ImageError, ProcessorError, PromptError, one_line
from inference.command_line import Parser, check_model, dtype
from inference.options import check_image_name
from models.checkpoints.atomic_folder import check_new
from models.checkpoints.errors import CheckpointError

# What needs torch is imported inside functions, after all that can be checked without it.

QUESTION = "What is in the picture?"
_SIZE = re.compile(r"(\d{1,9})[xX](\d{1,9})")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TO_HUB = (
    "note: transformers' processor names tiles first and the whole image last, nanoVLM the other way "
    "round, and resamples pixels differently: the network is the same, its prompts are not those of its "
    "training"
)
_TO_NANOVLM = (
    "note: nanoVLM looks for the folder lm_tokenizer where it is started: start it in the new folder, or set "
    "lm_tokenizer in config.json to a repository. It writes images into prompts in its own way, which this "
    "model was not trained with"
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m models.checkpoints", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|convert")
    add = _command(commands, "inspect", "what a checkpoint is and needs, from configs and headers alone")
    add("source", metavar="ID_OR_DIR", help="folder, or repository on the Hub: a model or a bare backbone")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--image", metavar="WxH|FILE", help="also: tiles and tokens of an image of this size")
    add("--question", help=f"of the prompt that is counted (default: {QUESTION})")
    add("--json", action=argparse.BooleanOptionalAction, default=False, help="one JSON object")

    add = _command(commands, "convert", "another layout or dtype, or an adapter merged; verified")
    add("source", metavar="SRC", help="folder, or repository on the Hub")
    add("target", metavar="DST", type=Path, help="folder to make")
    add("--revision", help="branch, tag or commit on the Hub")
    add(
        "--to",
        choices=("hub", "nanovlm"),
        default="hub",
        help="layout: transformers' (default), or nanoVLM's",
    )
    add(
        "--dtype",
        type=dtype,
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: the widest stored)",
    )
    add("--adapter", metavar="FOLDER", type=Path, help="merge a peft LoRA adapter, as train.py writes it")
    add("--processor", action=argparse.BooleanOptionalAction, default=True,
        help="with tokenizer, image settings and chat template")  # fmt: skip
    add("--max-shard-size", type=size, metavar="SIZE", help="of a file (default 5GB)")
    add("--overwrite", action=argparse.BooleanOptionalAction, default=False,
        help="replace the checkpoint that DST holds and its card; other files in it stay")  # fmt: skip
    add("--push", metavar="REPO_ID", help="upload the result to the Hub, with a card")
    add("--private", action=argparse.BooleanOptionalAction, help="of a repository that --push makes")
    return parser


def _command(commands, name: str, what: str):
    command = commands.add_parser(name, help=what, description=what)
    return command.add_argument


def size(text: str) -> int:
    """5GB, 500MB or 60KB in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip().upper())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB, 500MB or 60KB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


# ------------------------------------------------------------------------------------------------- inspect
def run_inspect(settings: argparse.Namespace) -> None:
    if settings.question is not None and settings.image is None:
        build_parser().error("--question counts the prompt of an image, expected it with --image")
    if settings.image is not None and not _SIZE.fullmatch(settings.image):
        check_image_name(settings.image)
    elif settings.image is not None:
        from data.images import check_sides

        check_sides(*map(int, settings.image.lower().split("x")))
    check_model(settings.source, settings.revision)
    from models.checkpoints.inspection import as_text, inspect

    report = inspect(settings.source, settings.revision)
    if settings.image is not None:
        report["picture"] = image(settings, report)
    print(json.dumps(report, ensure_ascii=False) if settings.json else as_text(report))


def image(settings: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    """What an image of the size that was asked for takes; its tokenizer and image settings are read."""
    from dataclasses import asdict

    from data.errors import ProcessorError
    from data.image_cost import image_cost
    from data.images import load_image
    from data.processor import Processor
    from models.checkpoints.locate import describe, snapshot
    from models.checkpoints.registry import choose_reader

    match = _SIZE.fullmatch(settings.image)
    if match is not None:
        width, height = int(match[1]), int(match[2])
    else:
        width, height = load_image(settings.image).size
    if report["tile"] is None or "tokens" not in report["tile"]:
        raise ProcessorError(f"{settings.source} is a bare backbone: only a whole model has prompts to count")
    folder = snapshot(settings.source, report["commit"])
    files = describe(str(folder))
    config = choose_reader(files.config, files.source).read_config(files.config, files.generation_config)
    processor = Processor.from_pretrained(folder, config=config)  # refused where it is not this model's
    cost = asdict(image_cost(processor, width, height, settings.question or QUESTION))
    return cost | {"left": report["context"] - cost["prompt_tokens"]}


# ------------------------------------------------------------------------------------------------- convert
def run_convert(settings: argparse.Namespace) -> None:
    refuse_without_effect(settings)
    check_new(settings.target, settings.overwrite)
    if settings.adapter is not None and not settings.adapter.is_dir():
        raise CheckpointError(f"--adapter: expected a folder, found none at {settings.adapter}")
    if settings.push:
        from models.checkpoints.hub import check_repo_id

        check_repo_id(settings.push)
    check_model(settings.source, settings.revision)
    from models.checkpoints.convert import Request, convert, upload
    from models.checkpoints.save import MAX_SHARD_BYTES

    shard = settings.max_shard_size or MAX_SHARD_BYTES
    request = Request(
        source=settings.source,
        target=settings.target,
        layout=settings.to,
        dtype=settings.dtype,
        adapter=settings.adapter,
        revision=settings.revision,
        overwrite=settings.overwrite,
        push=settings.push,
        max_shard_bytes=shard,
    )
    result = convert(request, companion_opener(settings), tell=note)
    if settings.push:
        note(f"uploaded to {upload(result, settings.push, settings.private, shard)}")


def refuse_without_effect(settings: argparse.Namespace) -> None:
    """Options of `convert` that would do nothing beside the others."""
    error = build_parser().error
    if settings.to == "nanovlm":
        if settings.push:
            error("--push uploads transformers' layout, expected it without --to nanovlm")
        if not settings.processor:
            error("nanoVLM's layout has its tokenizer in it, expected --no-processor without --to nanovlm")
        if settings.max_shard_size:
            error("nanoVLM's layout is one file of weights, expected --max-shard-size without --to nanovlm")
    if settings.private is not None and not settings.push:
        error("--private is of a repository that is uploaded to, expected it with --push")


def companion_opener(settings: argparse.Namespace):
    """What `convert` calls for the processor: tokenizers are opened here, not in `models/`."""
    from data.errors import ProcessorError
    from data.processor import Processor
    from data.processor_conversion import as_idefics, as_nanovlm
    from models.checkpoints.convert import NANOVLM, Companion

    def open_companion(folder: Path, from_nanovlm: bool) -> Companion:
        if settings.to == NANOVLM:
            tokenizer, fields = as_nanovlm(folder)
            note(_TO_NANOVLM)
            return Companion(tokenizer=tokenizer, fields=fields)
        held = from_nanovlm or any((folder / name).is_file() for name in _PROCESSOR_FILES)
        if not settings.processor or not held:
            note("note: the result has no processor" + ("" if held else ", as the original has none"))
            return Companion()
        try:
            if from_nanovlm:
                processor = as_idefics(folder)
                note(_TO_HUB)
            else:
                processor = Processor.from_pretrained(folder).hf_processor
        except ProcessorError as error:
            raise ProcessorError(f"{error}; --no-processor converts the weights alone") from error
        return Companion(processor=processor)

    return open_companion


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    settings = build_parser().parse_args(arguments)
    try:
        (run_inspect if settings.command == "inspect" else run_convert)(settings)
    except (CheckpointError, ImageError, ProcessorError, PromptError, OSError, MemoryError) as error:
        note(f"python -m models.checkpoints: error: {one_line(error)}")
        return 2
    except KeyboardInterrupt:
        note("\npython -m models.checkpoints: interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
