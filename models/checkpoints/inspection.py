"""What a checkpoint is, told without its weights: from config.json and the headers of its weights.

    print(as_text(inspect("HuggingFaceTB/SmolVLM-256M-Instruct")))

Parameters are those of our modules for this config, on the meta device, each held against the headers. Bytes
of the cache: keys and values of every layer, 2 · layers · key heads · head size · bytes of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from models.checkpoints import backbones, idefics3
from models.checkpoints.engines import TRIED, engines
from models.checkpoints.errors import CheckpointError
from models.checkpoints.headers import Headers, read_headers
from models.checkpoints.load import HEAD
from models.checkpoints.locate import CheckpointFiles, describe
from models.checkpoints.registry import choose_reader
from models.checkpoints.tensor_map import StoredTensorOf, check_shapes
from models.config import TextConfig, VisionConfig, VLMConfig
from models.language_model import LanguageModel
from models.skeleton import TABLE_PARTS, module_of, without_weights
from models.vision_language_model import VisionLanguageModel
from models.vision_transformer import VisionTransformer

_BYTES = {"float32": 4, "bfloat16": 2}  # float16 takes what bfloat16 takes


@dataclass(frozen=True)
class _Shape:
    """A checkpoint's networks without numbers, and where their tensors should lie."""

    family: str
    module: nn.Module
    prefix: str  # of the module's names in a whole model
    text: TextConfig | None
    vision: VisionConfig | None
    stored_tensor: StoredTensorOf
    is_harmless: Callable[[str], bool]
    vlm: VLMConfig | None = None


def inspect(source: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that configs and headers tell about a checkpoint, as JSON-ready values.

    Raises:
        CheckpointError: it cannot be found or read, or is of no architecture that we know.
    """
    files = describe(source, revision)
    headers = read_headers(files)
    shape = _shape(files, headers)
    parameters = _parameters(shape)
    stored_type = files.config.get("model_type")
    report: dict[str, Any] = {
        "source": source,
        "commit": files.origin.commit,
        "family": shape.family,
        "architectures": files.config.get("architectures") or [],
        "parameters": parameters,
        "stored": _stored(headers),
        "fits": _fits(shape, headers, source),
        "vision": None if shape.vision is None else asdict(shape.vision),
        "text": None if shape.text is None else asdict(shape.text),
        "tile": _tile(shape),
        "context": None if shape.text is None else shape.text.max_position_embeddings,
        "cache": _cache(shape.text),
        "memory": _memory(parameters["all"], shape.text),
        "engines": engines(stored_type),
    }
    return report


# ------------------------------------------------------------------------------------------------- shapes
def _shape(files: CheckpointFiles, headers: Headers | None) -> _Shape:
    names = {} if headers is None else headers.shapes
    kind = files.config.get("model_type")
    try:
        if kind in ("siglip", "siglip_vision_model"):
            vision = backbones.read_vision_config(files.config)
            with without_weights():
                tower = VisionTransformer(vision)
            stored = backbones.vision_tensor_map(names)
            return _Shape("SigLIP vision backbone", tower, "vision_model.", None, vision, stored, _any)
        if kind == "llama":
            text = backbones.read_text_config(files.config)
            stored = backbones.text_tensor_map(names)
            tied = bool(files.config.get("tie_word_embeddings", False))
            with without_weights():
                decoder = LanguageModel(text, tied)
            return _Shape("Llama backbone", decoder, "language_model.", text, None, stored, _any)
        reader = choose_reader(files.config, files.source)
        config = reader.read_config(files.config, files.generation_config)
    except CheckpointError as error:
        raise CheckpointError(f"{files.source}: {str(error).removeprefix(f'{files.source}: ')}") from None
    with without_weights():
        model = VisionLanguageModel(config)
    stored = reader.tensor_map(names)
    head = stored(HEAD).name if config.tie_word_embeddings else None
    family = idefics3.FAMILY if reader is idefics3 else _generation(files.config)

    def is_harmless(name: str) -> bool:
        return name == head or reader.is_harmless(name)

    return _Shape(family, model, "", config.text, config.vision, stored, is_harmless, config)


def _any(name: str) -> bool:
    """A backbone's repository may hold more than the backbone: SigLIP's text tower, a stored head."""
    return True


def _generation(config: Mapping) -> str:
    if not config.get("vlm_extra_tokens"):
        return "nanoVLM v0.1"
    return "nanoVLM, today's" if "max_img_size" in config else "nanoVLM between v0.1 and today's"


def _parameters(shape: _Shape) -> dict[str, int]:
    """Numbers by part; a tied head counts nothing."""
    counted = dict.fromkeys(TABLE_PARTS, 0)
    for name, parameter in shape.module.named_parameters():
        counted[module_of(shape.prefix + name)] += parameter.numel()
    return {part: number for part, number in counted.items()} | {"all": sum(counted.values())}


def _stored(headers: Headers | None) -> dict[str, Any] | None:
    if headers is None:
        return None
    return {
        "files": headers.files,
        "tensors": len(headers.shapes),
        "numbers": headers.numbers,
        "bytes": headers.stored_bytes,
        "dtypes": headers.dtype_counts,
    }


def _fits(shape: _Shape, headers: Headers | None, source: str) -> str:
    """yes, or in a sentence what of the stored tensors is not as the config says."""
    if headers is None:
        return "no weights here"
    expected = {
        shape.prefix + name: tuple(parameter.shape) for name, parameter in shape.module.named_parameters()
    }
    try:
        check_shapes(expected, shape.stored_tensor, headers.shapes, shape.is_harmless, source)
    except CheckpointError as error:
        return f"no: {str(error).removeprefix(f'{source}: ')}"
    return "yes"


# ------------------------------------------------------------------------------------------------ numbers
def _tile(shape: _Shape) -> dict[str, Any] | None:
    """What one tile of an image is made into."""
    if shape.vision is None:
        return None
    tile: dict[str, Any] = {"pixels": shape.vision.image_size, "patches": shape.vision.num_patches}
    if shape.vlm is not None:
        tile |= {"scale_factor": shape.vlm.scale_factor, "tokens": shape.vlm.tokens_per_tile}
        tile["placement"] = shape.vlm.image_placement
    return tile


def _cache(text: TextConfig | None) -> dict[str, dict[str, int]] | None:
    """Bytes of keys and values for one token and for a full context, by dtype."""
    if text is None:
        return None
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    return {
        dtype: {"per_token": numbers * size, "full_context": numbers * size * text.max_position_embeddings}
        for dtype, size in _BYTES.items()
    }


def _memory(parameters: int, text: TextConfig | None) -> dict[str, dict[str, int]]:
    """Bytes by dtype: weights, and the cache of a full context. Activations come on top."""
    cache = _cache(text)
    out = {}
    for dtype, size in _BYTES.items():
        full = 0 if cache is None else cache[dtype]["full_context"]
        out[dtype] = {"weights": parameters * size, "cache": full, "all": parameters * size + full}
    return out


# --------------------------------------------------------------------------------------------------- text
def as_text(report: Mapping[str, Any]) -> str:
    """A report for people. With `image`, what one of a given size takes (see `data.processor.image_cost`)."""
    commit = f" at {report['commit'][:12]}" if report["commit"] else ""
    architectures = ", ".join(report["architectures"])
    lines = [
        f"{report['source']}{commit}",
        f"  {report['family']}" + f" ({architectures})" * bool(architectures),
    ]
    lines += ["parameters"]
    lines += [_row(part, f"{number:,}") for part, number in report["parameters"].items()]
    lines += _stored_lines(report)
    lines += _network_lines(report)
    if report.get("picture"):
        lines += _image_lines(report["picture"])
    if report["cache"] is not None:
        lines.append(f"cache, context of {report['context']:,} tokens")
        for dtype, size in report["cache"].items():
            full = f"{_bytes(size['full_context'])} for a full context"
            lines.append(_row(dtype, f"{size['per_token']:,} bytes a token, {full}"))
    lines.append("memory to answer one prompt in a full context, without activations")
    for dtype, size in report["memory"].items():
        parts = f"weights {_bytes(size['weights'])} + cache {_bytes(size['cache'])}"
        lines.append(_row(dtype, f"{_bytes(size['all'])} = {parts}"))
    lines.append(f"opens in ({TRIED})")
    lines += [_row(engine, how) for engine, how in report["engines"].items()]
    return "\n".join(lines)


def _stored_lines(report: Mapping[str, Any]) -> list[str]:
    stored = report["stored"]
    if stored is None:
        return ["weights", _row("files", "none here")]
    kinds = ", ".join(f"{number:,} {dtype}" for dtype, number in stored["dtypes"].items())
    return [
        "weights",
        _row("files", f"{stored['files']} with {stored['tensors']} tensors, {_bytes(stored['bytes'])}"),
        _row("numbers", kinds),
        _row("fit the config", report["fits"]),
    ]


def _network_lines(report: Mapping[str, Any]) -> list[str]:
    lines, vision, text, tile = ["network"], report["vision"], report["text"], report["tile"]
    if vision is not None:
        patches = f"tiles of {tile['pixels']} px, {tile['patches']} patches of {vision['patch_size']} px"
        layers = f"{vision['num_hidden_layers']} layers of {vision['hidden_size']}"
        lines.append(_row("vision", f"{layers}, {patches}"))
    if tile is not None and "tokens" in tile:
        fold = tile["scale_factor"]
        where = "in front of the text" if tile["placement"] == "prefix" else "at placeholders"
        lines.append(_row("a tile", f"{tile['tokens']} tokens (patches folded {fold} x {fold}), {where}"))
    if text is not None:
        heads = (
            f"{text['num_attention_heads']} heads over {text['num_key_value_heads']}, {text['head_dim']} each"
        )
        layers = f"{text['num_hidden_layers']} layers of {text['hidden_size']}"
        lines.append(_row("text", f"{layers}, {heads}, {text['vocab_size']:,} words"))
    return lines


def _image_lines(image: Mapping[str, Any]) -> list[str]:
    grid = f"{image['rows']} x {image['columns']}" if image["rows"] > 0 else "not cut"
    prompt = f"{image['prompt_tokens']:,} tokens with {image['question']!r}"
    return [
        f"an image of {image['width']} x {image['height']}",
        _row("tiles", f"{image['tiles']} ({grid})"),
        _row("image tokens", f"{image['image_tokens']:,}"),
        _row("prompt", prompt),
        _row("left for words", f"{image['left']:,} of the context"),
    ]


def _row(name: str, value: str) -> str:
    return f"  {name:<16}{value}"


def _bytes(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.2f} GiB"
