"""What a checkpoint is, without its weights: from config.json and the headers of its safetensors files.

    print(as_text(inspect(VisionLanguageModel, "HuggingFaceTB/SmolVLM-256M-Instruct")))

Parameters are those of our modules for this config, compared with the headers. Bytes of the cache: keys and
values of every layer, 2 · layers · key heads · head size · bytes of a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from models.checkpoints import idefics3
from models.checkpoints.backbones import TEXT, VISION
from models.checkpoints.hub import CheckpointError, CheckpointFiles, client, describe, one_sentence
from models.checkpoints.load import HEAD, choose_reader, expected_shapes
from models.checkpoints.weights import FLOATS, Shape, StoredTensorOf, check_shapes, stored_entries
from models.config import TextConfig, VisionConfig, VLMConfig

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
    if files.weights:
        entries = stored_entries(files)
        shapes = {name: entry.shape for name, entry in entries.items()}
        return Headers(shapes, {name: entry.dtype for name, entry in entries.items()}, len(files.weights))
    repo, commit = files.source, files.origin.commit
    if commit is None:
        return None
    hf = client()
    with one_sentence(repo, commit, "the header of the weights"):
        try:
            metadata = hf.HfApi().get_safetensors_metadata(repo, revision=commit)
        except hf.errors.NotASafetensorsRepoError:
            raise CheckpointError(f"repository {repo} has no safetensors weights") from None
        except hf.errors.SafetensorsParsingError as error:
            raise CheckpointError(
                f"repository {repo}: a safetensors header cannot be read ({str(error).splitlines()[0]})"
            ) from error
        except hf.errors.OfflineModeIsEnabled:
            raise CheckpointError(
                f"the weights of {repo} at {commit[:12]} are not all in the local cache: reading their "
                f"headers needs a network, and HF_HUB_OFFLINE is set"
            ) from None
    tensors = {name: info for file in metadata.files_metadata.values() for name, info in file.tensors.items()}
    return Headers(
        {name: tuple(info.shape) for name, info in tensors.items()},
        {name: info.dtype for name, info in tensors.items()},
        len(metadata.files_metadata),
    )


@dataclass(frozen=True)
class _Network:
    """The parameters that a config describes, by our names, and where they should be stored."""

    family: str
    expected: Mapping[str, Shape]
    text: TextConfig | None
    vision: VisionConfig | None
    stored_tensor: StoredTensorOf
    is_ignorable: Callable[[str], bool]
    vlm: VLMConfig | None = None


def inspect(cls: Any, source: str, revision: str | None = None) -> dict[str, Any]:
    """Everything that configs and headers tell about a checkpoint, as JSON-ready values. `cls` is the class
    of whole models, `VisionLanguageModel`."""
    files = describe(source, revision)
    headers = read_headers(files)
    try:
        network = _network(cls, files, headers)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {str(error).removeprefix(f'{source}: ')}") from None
    parameters = _parameters(network.expected)
    kind = files.config.get("model_type")
    engines = _CONVERT_FIRST if kind is None else _OPENS.get(kind, ("no",) * 5)
    return {
        "source": source,
        "commit": files.origin.commit,
        "family": network.family,
        "architectures": files.config.get("architectures") or [],
        "parameters": parameters,
        "stored": _stored(headers),
        "fits": _fits(network, headers, source),
        "vision": None if network.vision is None else asdict(network.vision),
        "text": None if network.text is None else asdict(network.text),
        "tile": _tile(network),
        "context": None if network.text is None else network.text.max_position_embeddings,
        "cache": _cache(network.text),
        "memory": _memory(parameters["all"], network.text),
        "engines": dict(zip(_ENGINES, engines)),
    }


def _network(cls: Any, files: CheckpointFiles, headers: Headers | None) -> _Network:
    names = {} if headers is None else headers.shapes
    kind = files.config.get("model_type")
    for backbones, prefix in ((VISION, "vision_model."), (TEXT, "language_model.")):
        if kind not in backbones:
            continue
        backbone = backbones[kind]
        part = backbone.read_config(files.config)
        vision, text = (part, None) if backbones is VISION else (None, part)
        # The other tower of this model is not counted.
        whole = VLMConfig(
            vision or VisionConfig(),
            text or TextConfig(),
            scale_factor=1,
            image_placement="prefix",
            tie_word_embeddings=bool(files.config.get("tie_word_embeddings", False)),
        )
        expected = {n: shape for n, shape in expected_shapes(cls, whole).items() if n.startswith(prefix)}
        stored = backbone.tensor_map(names)
        # Its repository may hold more than the backbone: SigLIP's text tower, a stored head.
        return _Network(backbone.family, expected, text, vision, stored, lambda name: True)
    reader = choose_reader(files.config, files.source)
    config = reader.read_config(files.config, files.generation_config)
    stored = reader.tensor_map(names)
    head = stored(HEAD).name if config.tie_word_embeddings else None
    return _Network(
        idefics3.FAMILY if reader is idefics3 else _nanovlm_generation(files.config),
        expected_shapes(cls, config),
        config.text,
        config.vision,
        stored,
        lambda name: name == head or reader.is_ignorable(name),
        config,
    )


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


def _parameters(expected: Mapping[str, Shape]) -> dict[str, int]:
    """Numbers by part; a tied head counts nothing."""
    counted = dict.fromkeys(PARTS, 0)
    for name, shape in expected.items():
        counted[module_of(name)] += math.prod(shape)
    return counted | {"all": sum(counted.values())}


def _stored(headers: Headers | None) -> dict[str, Any] | None:
    if headers is None:
        return None
    elements: Counter[str] = Counter()
    for name, kind in headers.dtypes.items():
        elements[kind] += math.prod(headers.shapes[name])
    named = {kind: str(FLOATS.get(kind, kind)).removeprefix("torch.") for kind in elements}
    return {
        "files": headers.files,
        "tensors": len(headers.shapes),
        "numbers": headers.num_elements,
        "bytes": sum(number * _BYTES.get(kind, 1) for kind, number in elements.items()),
        "dtypes": {named[kind]: number for kind, number in elements.most_common()},
    }


def _fits(network: _Network, headers: Headers | None, source: str) -> str:
    """yes, or in a sentence what of the stored tensors is not as the config says."""
    if headers is None:
        return "no weights here"
    try:
        check_shapes(network.expected, network.stored_tensor, headers.shapes, network.is_ignorable, source)
    except CheckpointError as error:
        return f"no: {str(error).removeprefix(f'{source}: ')}"
    return "yes"


def _tile(network: _Network) -> dict[str, Any] | None:
    """What one tile of an image becomes."""
    if network.vision is None:
        return None
    tile: dict[str, Any] = {"pixels": network.vision.image_size, "patches": network.vision.num_patches}
    if network.vlm is not None:
        tile |= {"scale_factor": network.vlm.scale_factor, "tokens": network.vlm.tokens_per_tile}
        tile["placement"] = network.vlm.image_placement
    return tile


def _cache(text: TextConfig | None) -> dict[str, dict[str, int]] | None:
    """Bytes of keys and values for one token and for a full context, by dtype."""
    if text is None:
        return None
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    return {
        dtype: {"per_token": numbers * size, "full_context": numbers * size * text.max_position_embeddings}
        for dtype, size in _CACHE_BYTES.items()
    }


def _memory(parameters: int, text: TextConfig | None) -> dict[str, dict[str, int]]:
    """Bytes by dtype: weights, and the cache of a full context. Activations come on top."""
    cache = _cache(text)
    out = {}
    for dtype, size in _CACHE_BYTES.items():
        full = 0 if cache is None else cache[dtype]["full_context"]
        out[dtype] = {"weights": parameters * size, "cache": full, "all": parameters * size + full}
    return out


# --------------------------------------------------------------------------------------------------- text
def as_text(report: Mapping[str, Any]) -> str:
    """A report for people. With `picture`, what an image takes (`commands.image_cost`)."""
    commit = f" at {report['commit'][:12]}" if report["commit"] else ""
    architectures = ", ".join(report["architectures"])
    lines = [
        f"{report['source']}{commit}",
        f"  {report['family']}" + f" ({architectures})" * bool(architectures),
        "parameters",
    ]
    lines += [_row(part, f"{number:,}") for part, number in report["parameters"].items()]
    lines.append("weights")
    if (stored := report["stored"]) is None:
        lines.append(_row("files", "none here"))
    else:
        kinds = ", ".join(f"{number:,} {dtype}" for dtype, number in stored["dtypes"].items())
        size = _bytes(stored["bytes"])
        lines += [
            _row("files", f"{stored['files']} with {stored['tensors']} tensors, {size}"),
            _row("numbers", kinds),
            _row("fit the config", report["fits"]),
        ]
    lines += _network_lines(report)
    if report.get("picture"):
        lines += _image_lines(report["picture"])
    if report["cache"] is not None:
        lines.append(f"cache, context of {report['context']:,} tokens")
        for dtype, cache in report["cache"].items():
            full = f"{_bytes(cache['full_context'])} for a full context"
            lines.append(_row(dtype, f"{cache['per_token']:,} bytes a token, {full}"))
    lines.append("memory to answer one prompt in a full context, without activations")
    for dtype, memory in report["memory"].items():
        parts = f"weights {_bytes(memory['weights'])} + cache {_bytes(memory['cache'])}"
        lines.append(_row(dtype, f"{_bytes(memory['all'])} = {parts}"))
    lines.append(f"opens in ({TRIED})")
    lines += [_row(engine, how) for engine, how in report["engines"].items()]
    return "\n".join(lines)


def _network_lines(report: Mapping[str, Any]) -> list[str]:
    lines, vision, text, tile = ["network"], report["vision"], report["text"], report["tile"]
    if vision is not None:
        patches = f"tiles of {tile['pixels']} px, {tile['patches']} patches of {vision['patch_size']} px"
        layers = f"{vision['num_hidden_layers']} layers of {vision['hidden_size']}"
        lines.append(_row("vision", f"{layers}, {patches}"))
    if tile is not None and "tokens" in tile:
        fold = tile["scale_factor"]
        place = "in front of the text" if tile["placement"] == "prefix" else "at placeholders"
        lines.append(_row("a tile", f"{tile['tokens']} tokens (patches folded {fold} x {fold}), {place}"))
    if text is not None:
        layers = f"{text['num_hidden_layers']} layers of {text['hidden_size']}"
        heads = f"{text['num_attention_heads']} heads over {text['num_key_value_heads']}"
        size = f"{text['head_dim']} each, {text['vocab_size']:,} tokens"
        lines.append(_row("text", f"{layers}, {heads}, {size}"))
    return lines


def _image_lines(image: Mapping[str, Any]) -> list[str]:
    grid = f"{image['rows']} x {image['columns']}" if image["rows"] > 0 else "one tile"
    return [
        f"an image of {image['width']} x {image['height']}",
        _row("tiles", f"{image['tiles']} ({grid})"),
        _row("image tokens", f"{image['image_tokens']:,}"),
        _row("prompt", f"{image['prompt_tokens']:,} tokens with {image['question']!r}"),
        _row("left for words", f"{image['left']:,} of the context"),
    ]


def _row(name: str, value: str) -> str:
    return f"  {name:<16}{value}"


def _bytes(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.2f} GiB"
