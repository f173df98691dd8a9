"""The work of `python -m models.checkpoints`, after its command line has been checked."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data.errors import ProcessorError
from data.images import TiledImage, check_sides, load_image
from data.processor import Processor
from data.processor_conversion import as_idefics, as_nanovlm
from models.checkpoints.convert import NANOVLM, ProcessorBundle, Request, convert, upload
from models.checkpoints.hub import describe, snapshot
from models.checkpoints.inspect import as_text, inspect
from models.checkpoints.load import choose_reader
from models.checkpoints.save import MAX_SHARD_BYTES
from models.vision_language_model import VisionLanguageModel

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


def run_inspect(settings: Namespace, note: Callable[[str], None]) -> None:
    report = inspect(VisionLanguageModel, settings.source, settings.revision)
    if settings.image is not None:
        report["picture"] = _image(settings, report)
    print(json.dumps(report, ensure_ascii=False) if settings.json else as_text(report))


def _image(settings: Namespace, report: dict[str, Any]) -> dict[str, Any]:
    """What an image takes; the checkpoint's tokenizer and image settings are read."""
    width, height = settings.size or load_image(settings.image).size
    if report["tile"] is None or "tokens" not in report["tile"]:
        raise ProcessorError(f"{settings.source} is a bare backbone: only a whole model has prompts to count")
    folder = snapshot(settings.source, report["commit"])
    files = describe(str(folder))
    config = choose_reader(files.config, files.source).read_config(files.config, files.generation_config)
    processor = Processor.from_pretrained(folder, config=config)  # refused where it is not this model's
    cost = image_cost(processor, width, height, settings.question)
    return cost | {"left": report["context"] - cost["prompt_tokens"]}


def image_cost(processor: Processor, width: int, height: int, question: str) -> dict[str, Any]:
    """What an image of width x height pixels takes in a prompt, by the processor's own rules, without one.

    `rows` x `columns` of tiles (0 or 1 where the image is not cut), `tiles` with the whole image as one more;
    `prompt_tokens` is the whole prompt of one question, image included.
    """
    check_sides(width, height)
    count, rows, columns = processor.images.grid(width, height)
    side = processor.images.tile_size
    # Tiles of shape alone: the prompt depends on how many there are, not on what they show.
    tiles = torch.empty(count, 3, side, side, device="meta")
    blank = TiledImage(tiles, rows, columns, f"an image of {width} x {height}")
    encoded = processor.encode_conversation(processor.conversation(blank, question), True)
    in_front = encoded.image_tokens if processor.image_token_id is None else 0
    return {
        "width": width,
        "height": height,
        "rows": rows,
        "columns": columns,
        "tiles": count,
        "image_tokens": encoded.image_tokens,
        "prompt_tokens": len(encoded.input_ids) + in_front,
        "question": question,
    }


def run_convert(settings: Namespace, note: Callable[[str], None]) -> None:
    def open_processor(folder: Path, from_nanovlm: bool) -> ProcessorBundle:
        """What goes beside the weights; see `convert`."""
        if settings.to == NANOVLM:
            tokenizer, fields = as_nanovlm(folder)
            note(_TO_NANOVLM)
            return ProcessorBundle(tokenizer=tokenizer, fields=fields)
        names = ("processor_config.json", "preprocessor_config.json")
        held = from_nanovlm or any((folder / name).is_file() for name in names)
        if not settings.processor or not held:
            note("note: the result has no processor" + ("" if held else ", as the original has none"))
            return ProcessorBundle()
        try:
            if from_nanovlm:
                processor = as_idefics(folder)
                note(_TO_HUB)
            else:
                processor = Processor.from_pretrained(folder).hf_processor
        except ProcessorError as error:
            raise ProcessorError(f"{error}; --no-processor converts the weights alone") from error
        return ProcessorBundle(processor=processor)

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
    result = convert(VisionLanguageModel, request, open_processor, log=note)
    if settings.push:
        address = upload(VisionLanguageModel, result, settings.push, settings.private, shard)
        note(f"uploaded to {address}")
