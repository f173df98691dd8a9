"""What a checkpoint is, without its weights: from config.json and the headers of its safetensors files.

    print(as_text(inspect("HuggingFaceTB/SmolVLM-256M-Instruct")))

Parameters are those of our modules for this config, compared with the headers. Bytes of the cache: keys and
values of every layer, 2 · layers · key heads · head size · bytes of a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.errors import ProcessorError
from data.images import TiledImage, check_sides, load_image
from data.processor import Processor
from models.checkpoints import idefics3
from models.checkpoints.backbones import TEXT, VISION
from models.checkpoints.hub import CheckpointError, CheckpointFiles, client, describe, one_sentence, snapshot
from models.checkpoints.load import choose_reader, expected_shapes
from models.checkpoints.weights import FLOATS, Shape, check_shapes, stored_entries
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel

PARTS = ("vision", "projector", "embeddings", "blocks", "head")
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # all others: 1
_CACHE_BYTES = {"float32": 4, "bfloat16": 2}  # float16 takes as much as bfloat16

# Which programs open a checkpoint, from the name of its architecture: what the engines said in 2026 (vLLM's
# supported models, SGLang's `srt/models`, llama.cpp's `conversion`, mlx-vlm's pull requests).
TRIED = "by its architecture; tried with transformers alone"
_ENGINES = ("transformers", "vLLM", "SGLang", "llama.cpp", "MLX")
_CONVERT_FIRST = ("no: convert it first (python -m models.checkpoints convert)",) * 5
_NO_TOWERS = "no: a vision tower answers nothing by itself"
_IDEFICS = (
    "yes: AutoModelForImageTextToText",
    "yes: vllm serve",
    "not by a model of its own; at most through its transformers backend",
    "if it knows the tokenizer, as two GGUF files: convert_hf_to_gguf.py, again with --mmproj",
    "yes: mlx-vlm",
)
_OPENS = {
    None: _CONVERT_FIRST,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llama": (
        "yes: AutoModelForCausalLM",
        "yes: vllm serve",
        "yes",
        "if it knows the tokenizer, as GGUF: convert_hf_to_gguf.py",
        "yes: mlx-lm",
    ),
    "siglip": ("yes: AutoModel", "as embeddings, the pair of towers", *(_NO_TOWERS,) * 3),
    "siglip_vision_model": ("yes: AutoModel", *(_NO_TOWERS,) * 4),
}


@dataclass(frozen=True)
class Headers:
    """Stored tensors by name, their dtypes as safetensors calls them, and how many files hold them."""

    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    files: int

    @property
    def num_elements(self) -> int:
        """Of all stored tensors together."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_headers(files: CheckpointFiles) -> Headers | None:
    """The headers of a checkpoint's weights; None for a folder that holds none.

    Headers of a folder or of a downloaded repository are read from the files. Those of other repositories
    come by range requests, at most the first 100 kB of a file unless its header is longer; nothing is kept.
    """
    tensors: dict[str, Any]
    repo, commit = files.source, files.origin.commit
    if files.weights:
        tensors, count = stored_entries(files), len(files.weights)
    elif commit is None:
        return None
    else:
        with one_sentence(repo, commit, "the header of the weights"):
            metadata = client().HfApi().get_safetensors_metadata(repo, revision=commit)
        tensors = {n: info for file in metadata.files_metadata.values() for n, info in file.tensors.items()}
        count = len(metadata.files_metadata)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Headers(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, count)


def inspect(source: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that configs and headers tell about a checkpoint, as JSON-ready values."""
    files = describe(source, revision)
    headers = read_headers(files)
    kind = str(files.config["model_type"]) if "model_type" in files.config else None
    names = {} if headers is None else headers.shapes
    reader: Any = (VISION | TEXT).get(kind or "") or choose_reader(files.config, source)
    vision: VisionConfig | None = None
    text: TextConfig | None = None
    tile: dict[str, Any] | None = None
    try:
        if kind in VISION or kind in TEXT:
            part, tied = reader.read_config(files.config), bool(files.config.get("tie_word_embeddings"))
            vision, text = (part, None) if kind in VISION else (None, part)
            # The other tower of this model is not counted.
            towers = vision or VisionConfig(), text or TextConfig()
            config = VLMConfig(*towers, scale_factor=1, image_placement="prefix", tie_word_embeddings=tied)
            family, prefix = reader.family, "vision_model." if vision else "language_model."
        else:
            config = reader.read_config(files.config, files.generation_config)
            vision, text, prefix = config.vision, config.text, ""
            family = idefics3.FAMILY if reader is idefics3 else _nanovlm_generation(files.config)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    shapes = expected_shapes(VisionLanguageModel, config)
    expected = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    parameters = dict.fromkeys(PARTS, 0)  # a tied head counts nothing
    for name, shape in expected.items():
        parameters[module_of(name)] += math.prod(shape)
    parameters["all"] = sum(parameters.values())
    fits = "yes" if headers is not None else "no weights here"
    if headers is not None:
        try:
            check_shapes(expected, reader.tensor_map(names), names, reader.is_ignorable, source)
        except CheckpointError as error:
            fits = f"no: {str(error).removeprefix(f'{source}: ')}"
    if vision is not None:
        tile = {"pixels": vision.image_size, "patches": vision.num_patches}
    if tile is not None and text is not None:
        tile |= {"scale_factor": config.scale_factor, "tokens": config.tokens_per_tile}
        tile["placement"] = config.image_placement
    cache = _cache(text)
    memory = {}
    for dtype, size in _CACHE_BYTES.items():
        weights, full = parameters["all"] * size, cache[dtype]["full_context"] if cache else 0
        memory[dtype] = {"weights": weights, "cache": full, "all": weights + full}
    return {
        "source": source,
        "commit": files.origin.commit,
        "family": family,
        "architectures": files.config.get("architectures") or [],
        "parameters": parameters,
        "stored": _stored(headers),
        "fits": fits,
        "vision": None if vision is None else asdict(vision),
        "text": None if text is None else asdict(text),
        "tile": tile,
        "context": None if text is None else text.max_position_embeddings,
        "cache": cache,
        "memory": memory,
        "engines": dict(zip(_ENGINES, _OPENS.get(kind, ("no",) * 5))),
    }


def _nanovlm_generation(config: Mapping) -> str:
    if not config.get("vlm_extra_tokens"):
        return "nanoVLM v0.1"
    return "nanoVLM, today's" if "max_img_size" in config else "nanoVLM between v0.1 and today's"


def module_of(name: str) -> str:
    """The one of PARTS that a parameter of a `VisionLanguageModel` belongs to."""
    owner, _, rest = name.partition(".")
    if owner != "language_model":
        return {"vision_model": "vision", "projector": "projector"}[owner]
    return {"embed_tokens": "embeddings", "lm_head": "head"}.get(rest.partition(".")[0], "blocks")


def _stored(headers: Headers | None) -> dict[str, Any] | None:
    if headers is None:
        return None
    elements: Counter[str] = Counter()
    for name, kind in headers.dtypes.items():
        elements[kind] += math.prod(headers.shapes[name])
    return {
        "files": headers.files,
        "tensors": len(headers.shapes),
        "numbers": headers.num_elements,
        "bytes": sum(number * _BYTES.get(kind, 1) for kind, number in elements.items()),
        "dtypes": {
            str(FLOATS.get(kind, kind)).removeprefix("torch."): number
            for kind, number in elements.most_common()
        },
    }


def _cache(text: TextConfig | None) -> dict[str, dict[str, int]] | None:
    """Bytes of keys and values for one token and for a full context, by dtype."""
    if text is None:
        return None
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    return {
        dtype: {"per_token": numbers * size, "full_context": numbers * size * text.max_position_embeddings}
        for dtype, size in _CACHE_BYTES.items()
    }


def inspect_image(report: Mapping[str, Any], image: str | tuple[int, int], question: str) -> dict[str, Any]:
    """What an image, a file or (width, height), takes of the context of a checkpoint that was inspected; its
    tokenizer and image settings are read."""
    width, height = image if isinstance(image, tuple) else load_image(image).size
    if report["vision"] is None or report["text"] is None:
        raise ProcessorError(
            f"{report['source']} is a bare backbone: only a whole model has prompts to count"
        )
    folder = snapshot(report["source"], report["commit"])
    files = describe(folder)
    config = choose_reader(files.config, files.source).read_config(files.config, files.generation_config)
    processor = Processor.from_pretrained(folder, config=config)  # refused where it is not this model's
    cost = image_cost(processor, width, height, question)
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


def as_text(report: Mapping[str, Any]) -> str:
    """A report for people: a table of headings and rows. "picture" is of `inspect_image`, where it is asked
    for."""
    stored, vision, text, tile = (report[name] for name in ("stored", "vision", "text", "tile"))
    table: dict[str, dict[str, str]] = {
        "parameters": {part: f"{number:,}" for part, number in report["parameters"].items()},
        "weights": {"files": "none here"},
        "network": {},
    }
    if stored is not None:
        table["weights"] = {
            "files": f"{stored['files']} with {stored['tensors']} tensors, {_bytes(stored['bytes'])}",
            "numbers": ", ".join(f"{number:,} {dtype}" for dtype, number in stored["dtypes"].items()),
            "fit the config": report["fits"],
        }
    if vision is not None:
        table["network"]["vision"] = (
            f"{vision['num_hidden_layers']} layers of {vision['hidden_size']}, "
            f"tiles of {tile['pixels']} px, {tile['patches']} patches of {vision['patch_size']} px"
        )
    if tile is not None and "tokens" in tile:
        place = "in front of the text" if tile["placement"] == "prefix" else "at placeholders"
        folded = "patches folded {0} x {0}".format(tile["scale_factor"])
        table["network"]["a tile"] = f"{tile['tokens']} tokens ({folded}), {place}"
    if text is not None:
        table["network"]["text"] = (
            f"{text['num_hidden_layers']} layers of {text['hidden_size']}, "
            f"{text['num_attention_heads']} heads over {text['num_key_value_heads']}, "
            f"{text['head_dim']} each, {text['vocab_size']:,} tokens"
        )
    if image := report.get("picture"):
        grid = f"{image['rows']} x {image['columns']}" if image["rows"] > 0 else "one tile"
        table[f"an image of {image['width']} x {image['height']}"] = {
            "tiles": f"{image['tiles']} ({grid})",
            "image tokens": f"{image['image_tokens']:,}",
            "prompt": f"{image['prompt_tokens']:,} tokens with {image['question']!r}",
            "left for words": f"{image['left']:,} of the context",
        }
    if report["cache"] is not None:
        table[f"cache, context of {report['context']:,} tokens"] = {
            dtype: f"{size['per_token']:,} bytes a token, {_bytes(size['full_context'])} for a full context"
            for dtype, size in report["cache"].items()
        }
    table["memory to answer one prompt in a full context, without activations"] = {
        dtype: f"{_bytes(size['all'])} = weights {_bytes(size['weights'])} + cache {_bytes(size['cache'])}"
        for dtype, size in report["memory"].items()
    }
    table[f"opens in ({TRIED})"] = report["engines"]
    commit = f" at {report['commit'][:12]}" if report["commit"] else ""
    architectures = f" ({', '.join(report['architectures'])})" if report["architectures"] else ""
    lines = [f"{report['source']}{commit}", f"  {report['family']}{architectures}"]
    for heading, rows in table.items():
        lines += [heading, *(f"  {name:<16}{value}" for name, value in rows.items())]
    return "\n".join(lines)


def _bytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
