"""What a checkpoint is, without its weights: from config.json and the headers of its safetensors files.

    print(as_text(inspect("HuggingFaceTB/SmolVLM-256M-Instruct")))

Parameters are those of our modules for this config, compared with the headers. Bytes of the cache: what
every layer keeps of a position, keys and values or a convolution's inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from data.errors import ProcessorError
from data.images import ImageLimits, check_size, load_image
from data.processor import Processor
from families.keys import quantization
from generation.fast.network import decoder_of
from generation.fast.quantized import UNPACKED, rounded_bytes
from generation.kv_cache import bytes_per_row, numbers_per_token
from generation.states import snapshot_numbers
from inference.checkpoint import kept_formats
from messages import some
from models.checkpoints.backbones import TEXT, VISION, Backbone
from models.checkpoints.files import CheckpointError, Opened, instead, naming
from models.checkpoints.load import choose_family, empty_model, parameter_shapes, read_config
from models.checkpoints.quantized import keeps_codes, kept_bytes, unreadable
from models.checkpoints.sizes import PARTS, Headers, module_of, read_headers
from models.checkpoints.sources import open_files
from models.checkpoints.weights import FLOATS, Shape, StoredTensorOf, check_shapes
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel

_CACHE_BYTES = {"float32": 4, "bfloat16": 2}  # float16 takes as much as bfloat16


def inspect(source: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that configs and headers tell about a checkpoint, as JSON-ready values."""
    opened = open_files(source, revision)
    headers, refused = read_headers(opened), quantization(opened.config) and unreadable(opened.config)
    reader, config, prefix = _read(opened)
    vision = None if prefix.startswith("language") or not config.vision.num_hidden_layers else config.vision
    text = config.text if not prefix.startswith("vision") else None
    model = empty_model(VisionLanguageModel, config)
    shapes = parameter_shapes(model)
    expected = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    parameters = dict.fromkeys((*PARTS, "all"), 0)  # a tied head counts nothing
    for name, shape in expected.items():
        parameters[module_of(name)] += math.prod(shape)
        parameters["all"] += math.prod(shape)
    cache = _cache(config) if text else None
    stored = {dtype: parameters["all"] * size for dtype, size in _CACHE_BYTES.items()}
    for dtype in ("int8", "int4"):
        stored[dtype] = sum(rounded_bytes(dtype, name, shape) for name, shape in expected.items())
    fits, left_out = f"no: {refused}", list[str]()
    if not refused:
        fits, left_out = _fits(expected, reader, headers, opened)
    formats = kept_formats(opened, "auto", torch.device("cpu")) if text and not refused else ()
    if headers and formats and fits == "yes":
        size, formats = _of_codes(expected, reader.tensor_map(headers.shapes), headers)
        stored = {"codes": size} | stored
    memory = {}
    for dtype, weights in stored.items():  # whose cache is in bfloat16 where it has none of its own
        full = cache[dtype if dtype in cache else "bfloat16"]["full_context"] if cache else 0
        memory[dtype] = {"weights": weights, "cache": full, "all": weights + full}
    return {
        "source": source,
        "commit": opened.commit,
        "family": reader.family if prefix else reader.TITLE,
        "architectures": opened.config.get("architectures") or [],
        "parameters": parameters,
        "stored": headers and _stored(headers),
        "quantized": ", ".join(formats),
        "step": text
        and (
            decoder_of(model.language_model).unknown(model.language_model)
            or "in C on a CPU, recorded on CUDA"
        ),
        "fits": fits,
        "left_out": left_out,
        "vision": vision and _settings(vision),
        "text": text and _settings(text),
        "images": vision and vision.images(config.scale_factor),
        "context": text and text.max_position_embeddings,
        "cache": cache,
        "memory": memory,
    }


def _read(opened: Opened) -> tuple[Any, VLMConfig, str]:
    """A checkpoint's reader, its config, and the prefix of its parameters: a bare backbone is one tower of a
    model whose other is not counted."""
    kind = str(opened.config.get("model_type"))
    reader: Any = (VISION | TEXT).get(kind) or choose_family(opened.config, opened.source)
    if not isinstance(reader, Backbone):
        return reader, read_config(opened.config, opened.source, opened.generation_config), ""
    with naming(opened.source):
        part, tied = reader.read_config(opened.config), bool(opened.config.get("tie_word_embeddings"))
        vision, text = (part, TextConfig()) if kind in VISION else (VisionConfig(), part)
        config = VLMConfig(vision, text, scale_factor=1, image_token_id=0, tie_word_embeddings=tied)
    return reader, config, "vision_model." if kind in VISION else "language_model."


def _settings(config: Any) -> dict[str, Any]:
    """The fields of a config that are not at their defaults."""
    values = {item.name: (getattr(config, item.name), item.default) for item in fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _fits(
    expected: Mapping[str, Shape], reader: Any, headers: Headers | None, opened: Opened
) -> tuple[str, list[str]]:
    """Whether the stored tensors are those of the config, and if not, why; and those of them that the model
    here does not have: Qwen3.5's `mtp`, a tower's pooling."""
    if headers is None:
        return f"no weights here{instead(opened.files.names())}", []
    ignorable = reader.ignorable if isinstance(reader, Backbone) else reader.IGNORABLE
    place, stored = reader.tensor_map(headers.shapes), headers.shapes
    for name, shape in expected.items():  # bitsandbytes' are in the files
        if stored.get(place(name).name) == (place(name).parts * math.prod(shape),):
            stored[place(name).name] = place(name).stored_shape(shape)
    left_out = sorted(stored.keys() - {place(name).name for name in expected})
    try:
        check_shapes(expected, place, stored, ignorable, opened.source)
    except CheckpointError as error:
        return f"no: {str(error).removeprefix(f'{opened.source}: ')}", left_out
    return "yes", left_out


def _of_codes(
    expected: Mapping[str, Shape], place: StoredTensorOf, headers: Headers
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the weights as `inference.coded.load_codes` opens them, and their formats, most first."""
    total, formats = 0, Counter[str]()
    for name, shape in expected.items():
        if len(shape) != 2 or UNPACKED in name:
            total += 4 * math.prod(shape)
        elif name.startswith("language_model."):
            entry = headers.entries[place(name).name]
            formats[entry.dtype + " kept" * keeps_codes(entry)] += math.prod(shape)
            total += kept_bytes(entry) // place(name).parts
        else:
            total += 2 * math.prod(shape)
    kept = (
        name if name.endswith("kept") else f"{name} rounded to 8 bits" for name, _ in formats.most_common()
    )
    return total, (*kept,)


def _stored(headers: Headers) -> dict[str, Any]:
    elements: Counter[str] = Counter()
    for entry in headers.entries.values():
        elements[entry.dtype] += math.prod(entry.shape)
    return {
        "files": headers.files,
        "tensors": len(headers.shapes),
        "numbers": headers.num_elements,
        "bytes": headers.num_bytes,
        "dtypes": {
            str(FLOATS.get(kind, kind)).removeprefix("torch."): n for kind, n in elements.most_common()
        },
    }


def _cache(config: VLMConfig) -> dict[str, dict[str, int]]:
    """Bytes of keys and values for one token and for a full context, by dtype; where layers keep states, also
    what these take of each conversation whatever its length, and of a place that it may go back to."""
    with torch.device("meta"):
        layout = VisionLanguageModel(config).language_model.cache_layout
    numbers, fixed = numbers_per_token(layout), bytes_per_row(layout)
    context = config.text.max_position_embeddings
    states = {"per_conversation": fixed, "per_snapshot": 4 * snapshot_numbers(layout)} if fixed else {}
    return {
        dtype: {"per_token": numbers * size, **states, "full_context": numbers * size * context + fixed}
        for dtype, size in _CACHE_BYTES.items()
    }


def inspect_image(
    report: Mapping[str, Any], image: str | tuple[int, int], question: str, max_pixels: int | None = None
) -> dict[str, Any]:
    """What an image, a file or (width, height), takes of the context of a checkpoint that was inspected, by
    its processor's own rules.

    `rows` x `columns` of tiles (0 or 1 where the image is not cut), `tiles` with the whole image as one more;
    an image that its family leaves whole is one tile, of `tile_pixels`, and has rows and columns of tokens.
    `prompt_tokens` is the whole prompt of one question, image included; `left` is the rest of the context.
    """
    width, height = image if isinstance(image, tuple) else load_image(image).size
    if report["vision"] is None or report["text"] is None:
        raise ProcessorError(
            f"{report['source']} lacks a tower or a text part: only a whole model has prompts to count"
        )
    check_size(width, height, ImageLimits(), f"an image of {width} x {height}")
    opened = open_files(report["source"], report["commit"])
    config = read_config(opened.config, opened.source)
    # Refused where it is not this model's.
    processor = Processor.from_pretrained(opened, config=config, max_pixels=max_pixels)
    if max_pixels is not None and processor.images.budget is None:
        raise ProcessorError("--max-pixels has no effect on a model whose images are cut into tiles")
    # No pixels: the prompt depends on how many tiles there are, not on what they show.
    planned = processor.images.plan(width, height)
    encoded = processor.encode_conversation(processor.conversation(planned, question), True)
    prompt = len(encoded.input_ids)
    return {
        "width": width,
        "height": height,
        "rows": planned.grid[0],
        "columns": planned.grid[1],
        "tiles": len(planned.parts),
        "tile_pixels": "{3} x {2}".format(*planned.parts.shape),
        "image_tokens": encoded.image_tokens,
        "prompt_tokens": prompt,
        "question": question,
        "left": report["context"] - prompt,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """A report for people: its parts as headings with rows."""
    commit = f" at {report['commit'][:12]}" if report["commit"] else ""
    lines = [f"{report['source']}{commit}", f"  {report['family']}"]
    sentences = {
        "quantized": "codes on a CPU without --dtype: {}",
        "step": "decode step: {}",
        "fits": "weights fit the config: {}",
        "left_out": "left out of the weights: {}",
        "images": "images: {}",
        "context": "context of {:,} tokens",
    }
    for part, values in report.items():
        if part in sentences and values:
            lines.append(sentences[part].format(some(values) if part == "left_out" else values))
        elif isinstance(values, dict):
            in_bytes = part in ("cache", "memory")
            lines.append(part + (", without activations" if part == "memory" else ""))
            lines += [f"  {name.replace('_', ' '):<26}{_shown(v, in_bytes)}" for name, v in values.items()]
    return "\n".join(lines)


def _shown(value: object, in_bytes: bool) -> str:
    if isinstance(value, dict):
        names = {name: name if name.isupper() else name.replace("_", " ") for name in value}  # Q4_K: a dtype
        return ", ".join(f"{names[name]} {_shown(v, in_bytes)}" for name, v in value.items())
    if not isinstance(value, int) or isinstance(value, bool):
        return str(value)
    if not in_bytes or value < 2**16:
        return f"{value:,}" + (" bytes" if in_bytes else "")
    return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"
