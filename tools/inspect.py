"""What a checkpoint is, without its weights: from config.json and the headers of its safetensors files.

    print(as_text(inspect("HuggingFaceTB/SmolVLM-256M-Instruct")))

Parameters are those of our modules for this config, compared with the headers. Bytes of the cache: what
every layer keeps of a position, keys and values or a convolution's inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from data.errors import ProcessorError
from data.images import ImageLimits, check_size, load_image
from data.processor import Processor
from generation.fast.quantized import rounded_bytes
from generation.kv_cache import Layout, bytes_per_row, numbers_per_token
from generation.states import snapshot_numbers
from messages import some
from models.checkpoints.backbones import TEXT, VISION, Backbone
from models.checkpoints.files import CheckpointError, Opened, naming
from models.checkpoints.load import choose_family, empty_model, parameter_shapes, quantization, read_config
from models.checkpoints.missing import instead
from models.checkpoints.sizes import PARTS, Headers, module_of, read_headers
from models.checkpoints.sources import open_files
from models.checkpoints.weights import FLOATS, Shape, check_shapes
from models.config import TextConfig, VisionConfig, VLMConfig
from models.packed_vision_transformer import PackedVisionConfig
from models.vision_language_model import VisionLanguageModel

# Of a tower, in the text for people: --json has them.
_LEFT_OUT = {"taps", "table_antialias", "tokens_per_second", "merger_norm", "merger_norm_eps"}
# How names of a text part's fields begin -> the layers that they are about.
_MIXERS = {"delta_": {"delta"}, "conv_": {"conv", "delta"}}
_CACHE_BYTES = {"float32": 4, "bfloat16": 2}  # float16 takes as much as bfloat16


def inspect(source: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that configs and headers tell about a checkpoint, as JSON-ready values."""
    opened = open_files(source, revision)
    headers = read_headers(opened)
    kind = opened.config.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    reader: Any = (VISION | TEXT).get(kind) or choose_family(opened.config, source)
    vision: VisionConfig | PackedVisionConfig | None = None
    text: TextConfig | None = None
    if kind in VISION or kind in TEXT:
        with naming(source):
            part, tied = reader.read_config(opened.config), bool(opened.config.get("tie_word_embeddings"))
        vision, text = (part, None) if kind in VISION else (None, part)
        # The other tower of this model is not counted.
        towers = vision or VisionConfig(), text or TextConfig()
        config = VLMConfig(*towers, scale_factor=1, image_token_id=0, tie_word_embeddings=tied)
        prefix = "vision_model." if vision else "language_model."
    else:
        config = read_config(opened.config, source, opened.generation_config)
        vision, text, prefix = config.vision, config.text, ""
    shapes = parameter_shapes(empty_model(VisionLanguageModel, config))
    expected = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    parameters = dict.fromkeys(PARTS, 0)  # a tied head counts nothing
    for name, shape in expected.items():
        parameters[module_of(name)] += math.prod(shape)
    parameters["all"] = sum(parameters.values())
    cache, quantized = None, quantization(opened.config)
    if text is not None:
        with torch.device("meta"):
            decoder = VisionLanguageModel(config).language_model
        cache = _cache(decoder.cache_layout, text.max_position_embeddings)
    stored = {dtype: parameters["all"] * size for dtype, size in _CACHE_BYTES.items()}
    for dtype in ("int8", "int4"):
        stored[dtype] = sum(rounded_bytes(dtype, name, shape) for name, shape in expected.items())
    fits = f"no: {quantized}" if quantized else _fits(expected, reader, headers, opened)
    memory = {}
    for dtype, weights in stored.items():  # whose cache is in bfloat16 where it has none of its own
        full = cache[dtype if dtype in cache else "bfloat16"]["full_context"] if cache else 0
        memory[dtype] = {"weights": weights, "cache": full, "all": weights + full}
    return {
        "source": source,
        "commit": opened.commit,
        "family": reader.TITLE if prefix == "" else reader.family,
        "architectures": opened.config.get("architectures") or [],
        "parameters": parameters,
        "stored": None if headers is None else _stored(headers),
        "fits": fits,
        "left_out": [] if headers is None or quantized else _left_out(expected, reader, headers),
        "vision": None if vision is None else asdict(vision),
        "text": None if text is None else asdict(text),
        "images": None if vision is None else vision.images(config.scale_factor),
        "context": None if text is None else text.max_position_embeddings,
        "cache": cache,
        "memory": memory,
    }


def _fits(expected: Mapping[str, Shape], reader: Any, headers: Headers | None, opened: Opened) -> str:
    """Whether the stored tensors are those of the config, and if not, why."""
    if headers is None:
        return f"no weights here{instead(opened.files.names())}"
    ignorable = reader.ignorable if isinstance(reader, Backbone) else reader.IGNORABLE
    try:
        names = headers.shapes
        check_shapes(expected, reader.tensor_map(names), names, ignorable, opened.source)
    except CheckpointError as error:
        return f"no: {str(error).removeprefix(f'{opened.source}: ')}"
    return "yes"


def _left_out(expected: Mapping[str, Shape], reader: Any, headers: Headers) -> list[str]:
    """Stored tensors that the model here does not have: Qwen3.5's `mtp`, a tower's pooling."""
    place = reader.tensor_map(headers.shapes)
    return sorted(headers.shapes.keys() - {place(name).name for name in expected})


def _stored(headers: Headers) -> dict[str, Any]:
    elements: Counter[str] = Counter()
    for name, kind in headers.dtypes.items():
        elements[kind] += math.prod(headers.shapes[name])
    dtypes = {str(FLOATS.get(kind, kind)).removeprefix("torch."): n for kind, n in elements.most_common()}
    return {
        "files": headers.files,
        "tensors": len(headers.shapes),
        "numbers": headers.num_elements,
        "bytes": headers.num_bytes,
        "dtypes": dtypes,
    }


def _cache(layout: Layout, context: int) -> dict[str, dict[str, int]]:
    """Bytes of keys and values for one token and for a full context, by dtype; where layers keep states, also
    what these take of each conversation whatever its length, and of a place that it may go back to."""
    numbers, fixed = numbers_per_token(layout), bytes_per_row(layout)
    states = {"per_conversation": fixed, "per_snapshot": 4 * snapshot_numbers(layout)}
    return {
        dtype: {"per_token": numbers * size}
        | (states if fixed else {})
        | {"full_context": numbers * size * context + fixed}
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
            f"{report['source']} is a bare backbone: only a whole model has prompts to count"
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
    for part, values in report.items():
        if part == "context" and values is not None:
            lines.append(f"context of {values:,} tokens")
        elif part == "fits":
            lines.append(f"weights fit the config: {values}")
        elif part == "left_out" and values:
            lines.append(f"left out of the weights: {some(values)}")
        elif part == "images" and values is not None:
            lines.append(f"images: {values}")
        elif isinstance(values, dict):
            in_bytes = part in ("cache", "memory")
            lines.append(part + (", without activations" if part == "memory" else ""))
            kinds = {"attention", *values.get("layer_types", ())}
            without = tuple(start for start, users in _MIXERS.items() if not kinds & users)
            shown = {
                name: value
                for name, value in values.items()
                if name not in _LEFT_OUT and not name.startswith(without)
            }
            lines += [f"  {name.replace('_', ' '):<26}{_shown(v, in_bytes)}" for name, v in shown.items()]
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
