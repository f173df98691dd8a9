"""What the benchmarks share: random weights in real shapes, turns of processes, commands, tables, results.

Each system runs in a process of its own, and all take turns, so that what one does to memory or threads
reaches no other. A process that dies takes only its own system out of the run. Weights are random and shapes
real, but for `throughput serving`. What a system replies is printed at once, a line of JSON each; medians
follow in a table, and the last line is JSON, too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import torch
from torch import Tensor, nn

from data.processor import Processor
from families import FAMILIES, gemma4, qwen_vl
from generation.fast.native.panels import round_layer, to_rows
from generation.fast.quantized import pack
from generation.memory import available_bytes
from inference.checkpoint import Checkpoint
from inference.fast import has_fast_bfloat16
from inference.flags import positive
from models.checkpoints.load import meta_init, prepare_device, read_config
from models.config import TextConfig, VisionConfig, VLMConfig
from models.gemma4_text import Gemma4TextConfig
from models.gemma4_vision import Gemma4VisionConfig
from models.packed_vision_transformer import PackedVisionConfig
from models.vision_language_model import VisionLanguageModel

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 9 / 16, None: 0}  # of a weight
PROCESS_BYTES = 4e8  # of a child besides its weights
TEXT_TOKENS = 20  # of a prompt, besides its image: 84 tokens with one tile of 64, 1,108 with 17
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
ISA = "avx2 fma avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8 asimd bf16 i8mm"

Handler = Callable[[dict], dict | None]  # a job -> a reply, None where the system cannot do it


# ---------------------------------------------------------------------------------- shapes and prompts
def _vision(width: int, inner: int, layers: int, heads: int, image: int, patch: int) -> VisionConfig:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size")
    sizes: dict[str, Any] = dict(zip((*keys, "patch_size"), (width, inner, layers, heads, image, patch)))
    return VisionConfig(**sizes)


def _text(vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more) -> TextConfig:
    return TextConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, **more,
    )  # fmt: skip


def published(name: str) -> VLMConfig:
    """The shape of a checkpoint of the Hub that `configs/published.json` knows."""
    known = json.loads((ROOT / "configs/published.json").read_text(encoding="utf-8"))
    return read_config(known[name]["config.json"], name)


_BASE = _vision(768, 3072, 12, 12, 512, 16)
_LLAMA = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0}
_LARGE = {"max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "rope_theta": 273_768.0}
_TIED: dict[str, Any] = {"image_token_id": 49_151, "tie_word_embeddings": True}
_NEAR = (*["sliding"] * 4, "full") * 3  # fifteen layers with keys of their own, twenty that share them
_QWEN3 = {"head_dim": 128, "qk_norm": True, "max_position_embeddings": 262_144, "rope_theta": 5e6}
SHAPES = {
    "SmolVLM-256M": VLMConfig(_BASE, _text(49_280, 576, 1536, 30, 9, 3, **_LLAMA), 4, 49_190),
    "SmolVLM-500M": VLMConfig(_BASE, _text(49_280, 960, 2560, 32, 15, 5, **_LLAMA), 4, 49_190),
    "SmolVLM-2.2B": VLMConfig(
        _vision(1152, 4304, 27, 16, 384, 14), _text(49_155, 2048, 8192, 24, 32, 32, **_LARGE), 3, 49_153
    ),
    "Qwen3-VL-2B": VLMConfig(
        PackedVisionConfig(taps=(5, 11, 17)),
        _text(151_936, 2048, 6144, 28, 16, 8, **_QWEN3, rope_sections=(24, 20, 20), rope_interleaved=True),
        scale_factor=1,
        image_token_id=151_655,
        tie_word_embeddings=True,
        family=qwen_vl.NAME,
    ),
    "Qwen3.5-0.8B": published("Qwen/Qwen3.5-0.8B"),
    "Gemma-4-E2B": VLMConfig(
        Gemma4VisionConfig(),
        Gemma4TextConfig(
            vocab_size=262_144,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            max_position_embeddings=131_072,
            layer_types=(*_NEAR, *(f"{kind} shared" for kind in _NEAR + _NEAR[:5])),
            qk_norm=True,
            per_layer_width=256,
            per_layer_count=35,
            shared_mlp_factor=2,
            logit_cap=30.0,
        ),
        scale_factor=1,
        image_token_id=258_880,
        tie_word_embeddings=True,
        family=gemma4.NAME,
    ),
    "LFM2.5-VL-450M": published("LiquidAI/LFM2.5-VL-450M"),
    # What configs/nanovlm-*.yaml train.
    "nanoVLM-222M": VLMConfig(
        _vision(768, 3072, 12, 12, 224, 16), _text(49_152, 576, 1536, 30, 9, 3, **_LLAMA), 2, **_TIED
    ),
    "nanoVLM-460M": VLMConfig(_BASE, _text(49_152, 960, 2560, 32, 15, 5, **_LLAMA), 4, **_TIED),
    # checkpoints/ocelli-shapes
    "ocelli-shapes": VLMConfig(
        _vision(160, 640, 6, 5, 128, 8), _text(1900, 224, 576, 6, 7, 1, max_position_embeddings=2048), 2, 5
    ),
    "tiny": VLMConfig(
        _vision(32, 64, 1, 2, 32, 8), _text(320, 64, 96, 2, 4, 2, max_position_embeddings=512), 2, 319
    ),
}


@torch.no_grad()
def fill(tensor: Tensor, std: float, start: int = 0) -> Tensor:
    """Overwrite with one long stretch of noise, repeated: as fast as a copy.

    Its length is a prime number, so that no two rows of a matrix become equal.
    """
    noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    noise = noise.to(tensor.device, tensor.dtype) * std
    flat, done, place = tensor.view(-1), 0, start % len(noise)
    while done < flat.numel():
        count = min(flat.numel() - done, len(noise) - place)
        flat[done : done + count] = noise[place : place + count]
        done, place = done + count, 0
    return tensor


def fill_weights(model: nn.Module, names: Sequence[str] | None = None) -> None:
    """Random matrices that keep activations near one, norms at one, biases at zero; the same every time.

    `names` are those of its parameters in the order in which ours has them; None for our own model.
    """
    parameters = dict(model.named_parameters())
    for index, name in enumerate(names or parameters):
        parameter = parameters[name]
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        else:
            fill(parameter.data, parameter[0].numel() ** -0.5, start=7919 * index)


def build_ours(shape: str, dtype: torch.dtype, device: str) -> VisionLanguageModel:
    """Our model of a shape, in eval mode, allocated once and in place."""
    prepare_device(device)
    with meta_init():
        model = VisionLanguageModel(SHAPES[shape])
    for name, parameter in list(model.named_parameters()):  # `to_empty` would import sympy: 35 MB
        owner, leaf = name.rsplit(".", 1)
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
    if model.config.tie_word_embeddings:
        model.language_model.lm_head.weight = model.language_model.embed_tokens.weight
    fill_weights(model)
    return model.eval()


def build_checkpoint(setup: dict, fast: bool) -> Checkpoint:
    """What a user gets who opens a checkpoint of this shape and precision, without the processor.

    Args:
        fast: with the fastest steps of this machine, as `generate.py` chooses them; else the eager ones.
            `load_seconds` is what compiling them took.
    """
    shape, precision, device = setup["shape"], setup["precision"], setup["device"]
    # Where arithmetic in bfloat16 is slow, the fast steps keep the weights in it and compute in float32.
    computed = device == "cuda" or not fast or has_fast_bfloat16()
    plain = precision == "float32" or (precision == "bfloat16" and computed)
    model = build_ours(shape, DTYPES[precision] if plain else torch.float32, device)
    if precision == "int4" and device == "cuda":  # C rounds
        to_rows(pack(model.cpu(), precision, round_layer), torch.device(device))
    elif not plain:
        pack(model, precision, round_layer)
    checkpoint = Checkpoint(shape, model, cast(Processor, None), 0.0, precision)
    return checkpoint.compiled() if fast else checkpoint


def parameters(shape: str) -> int:
    """How many weights a shape has."""
    with meta_init():
        return sum(parameter.numel() for parameter in VisionLanguageModel(SHAPES[shape]).parameters())


def words(shape: str, seed: int, count: int) -> Tensor:
    """(count,) random token ids, none of them a placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPES[shape].text.vocab_size - 200, (count,), generator=generator)


def tile_shape(config: VLMConfig) -> tuple[int, int, int]:
    """(3, M, M) of a tile. A tower that takes whole images is given some of 8 x 8 tokens, as SmolVLM's tile
    has."""
    vision = config.vision
    packed = isinstance(vision, PackedVisionConfig)
    side = 8 * vision.patch_size * vision.merge_size if packed else vision.image_size
    return vision.num_channels, side, side


def tile_positions(config: VLMConfig) -> int:
    """Positions that a tile takes in a prompt."""
    return FAMILIES[config.family].positions(config, *tile_shape(config)[1:])


def image_tokens(shape: str, tiles: int) -> Tensor:
    config = SHAPES[shape]
    return torch.full((tiles * tile_positions(config),), config.image_token_id)


def tile_pixels(shape: str, tiles: int, image: int = 0) -> Tensor:
    """(1, tiles, 3, M, M) pixels, all tiles and all images different."""
    pixels = torch.empty(1, tiles, *tile_shape(SHAPES[shape]))
    return fill(pixels, std=1.0, start=104_729 * image)


def prompt(
    shape: str, tiles: int, question: int = 0, device: str = "cpu", image: int = 0
) -> dict[str, Tensor]:
    """Model inputs: half of the text, an image of `tiles` tiles, the other half (as `question` seeds it)."""
    half = TEXT_TOKENS // 2
    ids = torch.cat(
        (words(shape, 1, half), image_tokens(shape, tiles), words(shape, 100 + question, TEXT_TOKENS - half))
    )
    inputs = {"input_ids": ids[None].to(device)}
    if tiles:
        inputs["pixel_values"] = tile_pixels(shape, tiles, image).to(device)
    return inputs


def prompt_tokens(shape: str, tiles: int) -> int:
    return tiles * tile_positions(SHAPES[shape]) + TEXT_TOKENS


# -------------------------------------------------------------------------------------------- hardware
def hardware(device: str, threads: int) -> dict:
    """The machine in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text() if cpuinfo.is_file() else ""
    known = dict(re.findall(r"^([^\n\t:]+)\s*: (.*)$", lines, re.M))  # of the last core
    flags = (known.get("flags") or known.get("Features") or "").split()
    return {
        "cpu": known.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": [flag for flag in ISA.split() if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def now(device: str) -> float:
    """Seconds, after the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> None:
    """Begin a new peak. Where the kernel does not allow that, the peak is the whole process's."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device: str) -> int:
    """Most bytes since `reset_peak`: of the GPU's allocator, or of the whole process, Python included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(peak) * 1024


# ------------------------------------------------------------------------------------------- processes
class Unavailable(RuntimeError):
    """This system cannot run here; the message says why."""


class Measured(NamedTuple):
    """What a system replied to a job: one reply of each round that it took part in."""

    setup: dict
    job: dict
    replies: list[Any]


_systems: list[Handler] = []  # in a child: its own, from the first job on


def _answer(make: Callable[[dict], Handler], setup: dict, job: dict) -> dict | None:
    if not _systems:
        _systems.append(make(setup))
    return _systems[0](job)


def name_of(setup: dict) -> str:
    return " ".join(str(setup[key]) for key in ("system", "precision", "quota") if setup.get(key))


def take_turns(
    make: Callable[[dict], Handler],
    setups: list[dict],
    jobs: Callable[[dict], list[dict]],
    rounds: int,
    together: bool | None = None,
    needed: Iterable[str] = (),
) -> tuple[list[Measured], dict[str, str]]:
    """Ask every system for its jobs, round after round, in turn.

    Args:
        make: a setup -> what answers jobs; a function of a module, as it is called in the child.
        setups: of the systems, each with "system", "threads" and possibly "precision", "quota" and
            "environment", in which None is a variable that is not set.
        jobs: a setup -> its jobs; each is sent with its "round", from 0.
        together: keep all children alive, change the system after each job, and do all rounds of a job before
            the next one, so that what a child has in its cache is there in the next round. Otherwise a child
            ends when its turn is over, and only one model is in memory. By default, whether all fit.
        needed: the program ends where one of these systems drops out.

    Returns:
        What was measured, in the order of the setups and their jobs; and by name of a system why it dropped
        out.
    """
    together = fit_together(setups) if together is None else together
    asked = [(system, n, job) for system, setup in enumerate(setups) for n, job in enumerate(jobs(setup))]
    replies: list[list[Any]] = [[] for _ in asked]
    failed: dict[str, str] = {}
    children: dict[int, ProcessPoolExecutor] = {}
    order = [(number, place) for number in range(rounds) for place in range(len(asked))]
    if together:
        order.sort(key=lambda one: (asked[one[1]][1], one[0]))
    turns = [(number, asked[place][0]) for number, place in order]
    try:
        for turn, (number, place) in enumerate(order):
            system, _, job = asked[place]
            setup = setups[system]
            name = name_of(setup)
            if name in failed:
                continue
            print(f"round {number + 1}/{rounds}: {name}: {job}", file=sys.stderr)
            variables = {"OMP_NUM_THREADS": str(setup["threads"]), **setup.get("environment", {})}
            for key, value in variables.items():  # a child reads these when it imports torch
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
            if system not in children:
                children[system] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                reply = children[system].submit(_answer, make, setup, job | {"round": number}).result()
                replies[place] += [] if reply is None else [reply]
                show(setup | job, reply or {})
            except Exception as error:  # whatever a system dies of, the others go on
                failed[name] = str(error) if isinstance(error, Unavailable) else repr(error)
                print(f"left out: {name}: {failed[name]}", flush=True)
            if name in failed or not (together or turns[turn + 1 : turn + 2] == [turns[turn]]):
                children.pop(system).shutdown()
    finally:
        for child in children.values():
            child.shutdown()
    if lost := [name for name in needed if name in failed]:
        sys.exit(f"error: {lost[0]}: {failed[lost[0]]}")
    return [Measured(setups[s], job, got) for (s, _, job), got in zip(asked, replies) if got], failed


def show(asked: dict, reply: dict) -> None:
    """A line of JSON: what was asked and replied, without long lists."""
    keys = ("system", "precision", "shape", "tiles", "context", "batch", "slots", "condition", "what")
    point = {key: asked[key] for key in keys if asked.get(key) is not None}
    point |= {key: value for key, value in reply.items() if isinstance(value, int | float | str)}
    print(json.dumps(point), flush=True)


def fit_together(setups: list[dict]) -> bool:
    """Whether the models of all children fit into memory at the same time."""
    free = available_bytes(torch.device("cpu"))
    needed = sum(parameters(setup["shape"]) * BYTES[setup["precision"]] + PROCESS_BYTES for setup in setups)
    return free is None or needed < 0.8 * free


# ------------------------------------------------------------------------------------ commands, results
class Command(NamedTuple):
    """A benchmark as a command.

    run: gets the settings and a folder that is there as long as it runs. Its docstring is the help.
    check: completes the settings; a ValueError says which option is wrong.
    options: what `add_argument` gets for each, by flag; besides those that all measurements have.
    measures: whether it is a measurement.
    """

    run: Callable[[argparse.Namespace, str], None]
    check: Callable[[argparse.Namespace], None]
    options: dict[str, dict[str, Any]]
    measures: bool = True


def option(kind: Callable[[str], Any], default: Any, text: str, shown: str | None = None) -> dict[str, Any]:
    """One that has a value. `shown` is the default in words."""
    metavar, said = (
        "X,X" if isinstance(default, list | tuple) else "X",
        f"{text} (default {shown or default})",
    )
    return {"type": kind, "default": default, "metavar": metavar, "help": said}


def parse(
    description: str | None, commands: dict[str, Command], arguments: list[str] | None
) -> argparse.Namespace:
    """The checked settings, whose `command` is the one that was called; "" is the program itself."""
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=description, **form)
    each = None if "" in commands else parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in commands.items():
        said = inspect.getdoc(command.run) or ""
        brief = said.split("\n")[0].rstrip(".")
        own = parser if each is None else each.add_parser(name, help=brief, description=said, **form)
        own.set_defaults(command=command, parser=own)
        for flag, known in ((SHARED if command.measures else {}) | command.options).items():
            own.add_argument(flag, **known)
    settings = parser.parse_args(arguments)
    try:
        settings.command.check(settings)
    except ValueError as error:
        settings.parser.error(str(error))
    return settings


def execute(description: str | None, commands: dict[str, Command], arguments: list[str] | None) -> int:
    settings = parse(description, commands, arguments)
    with tempfile.TemporaryDirectory(prefix="ocelli-bench-") as folder:
        settings.command.run(settings, folder)
    return 0


SHARED: dict[str, dict[str, Any]] = {
    "--shape": {"choices": SHAPES, "default": "SmolVLM-256M", "help": "model shape (default SmolVLM-256M)"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "device (default cpu)"},
    "--rounds": option(positive, 3, "repetitions; medians are shown"),
    "--threads": option(positive, torch.get_num_threads(), "CPU threads"),
    "--save": {"metavar": "NAME", "help": "write benchmarks/results/NAME.json"},
    "--quick": {"action": "store_true", "help": "one round of little work, to see whether it runs"},
}
PRECISION = {"choices": PRECISIONS, "default": "float32", "help": "of the weights (default float32)"}


def precisions_of(settings: argparse.Namespace) -> list[str]:
    """Those that were asked for, or all: int8 on a CPU only, where there is nothing between."""
    cpu = settings.device == "cpu"
    return settings.precisions or ["float32", "bfloat16", *(["int8"] if cpu else [])]


def integers(text: str) -> list[int]:
    """ "1,17" -> [1, 17]; "" -> []."""
    return [int(part) for part in text.split(",") if part]


def names(*allowed: str) -> Callable[[str], list[str]]:
    """An argument type: comma-separated names out of `allowed`."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {name!r}")
        return text.split(",")

    return parse


def shared_setup(settings: argparse.Namespace, *keys: str) -> dict:
    """What the setups of all systems have in common."""
    return {key: getattr(settings, key) for key in ("threads", "device", "shape", *keys)}


def median(values: Iterable[float | None]) -> Any:
    """Of the values that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare(rows: list[dict], key: str, same: Collection[str], peers: Sequence[str], part: str = "") -> None:
    """Add to each row, as "PARTover_PEER", its own value of `key` divided by that of each of the `peers`.

    A peer's row is that of its system which has equal values of `same`, or None in place of them. None where
    there is no such row, where either has no value, and for the peer itself.
    """
    for row in rows:
        for peer in peers:
            of_peer = (one for one in rows if one["system"] == peer and one is not row)
            other = next((one for one in of_peer if all(one[n] in (row[n], None) for n in same)), {key: None})
            name = f"{part}over_{re.sub(r'[^a-z]', '_', peer.removeprefix('ours-'))}"
            row[name] = row[key] / other[key] if row[key] and other[key] else None


def table(columns: str, rows: list[dict]) -> str:
    """Rows in Markdown. `columns` are "key" or "key:format", e.g. "system ms_per_token:.2f"; None is shown as
    a dash, and a column without any value not at all."""
    keys = [column.partition(":")[::2] for column in columns.split()]
    keys = [(key, form) for key, form in keys if any(row.get(key) is not None for row in rows)]
    lines = [[key.replace("_", " ") for key, _ in keys]]
    for row in rows:
        values = [(row.get(key), form) for key, form in keys]
        lines.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def finish(benchmark: str, settings: argparse.Namespace, columns: str, rows: list[dict], **more) -> None:
    """Show the table, save where requested, and end with the one JSON line."""
    print(table(columns, rows))
    hidden = ("save", "command", "parser")
    result = {
        "benchmark": benchmark,
        "hardware": hardware(settings.device, settings.threads) | more,
        "settings": {key: value for key, value in vars(settings).items() if key not in hidden},
        "rows": rows,
    }
    if settings.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{settings.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
