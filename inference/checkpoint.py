"""A checkpoint opened for questions: model and processor on a device that exists, in a dtype that suits it.

checkpoint = open_checkpoint("HuggingFaceTB/SmolVLM-256M-Instruct", device="auto", dtype="int8")
checkpoint = checkpoint.compiled()           # answers with the fastest decode step of this machine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from data.processor import EncodedConversation, Processor
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import to_rows
from generation.fast.quantized import pack, pack_layer, put_layers
from generation.features import FeatureCache
from generation.prefix_store import PrefixStore
from generation.steps import DecodeStep
from generation.threads import limit_threads
from inference.coordinates import PixelText
from inference.errors import RequestError as RequestError
from inference.errors import check_text_only
from inference.fast import speed_up
from inference.forms import Forms
from inference.kept_weights import KeptWeights
from inference.thoughts import Thinking
from models.checkpoints.files import Opened
from models.checkpoints.load import meta_init, prepare_device, put_parameter
from models.checkpoints.names import MODELS, PHOTOGRAPHS
from models.checkpoints.sources import one_version
from models.checkpoints.weights import trim
from models.config import check_device
from models.vision_language_model import VisionLanguageModel

# Pixels of images that are taken whole, on a CPU: with so many Qwen3-VL-2B computes about 3 TFLOP for a 4:3
# photograph, as SmolVLM-256M for its 13 tiles. Checkpoints' own budgets are up to 16 million.
CPU_PIXELS = 2**19
LARGE = 50_000_000  # weights from which on compiling, 3 to 8 seconds, pays with the first answer
PACKED = dict.fromkeys(("int8", "int4"), ("cpu", "cuda"))  # dtypes of weights alone, and devices for them


@dataclass(frozen=True)
class Fast:
    """The chosen decode step (None: the eager one), its name and the tower's, or why they are the eager
    ones."""

    step: DecodeStep | None = None
    chosen: str = "eager"
    tower: str = "eager"

    @property
    def name(self) -> str:
        """The decode step that was chosen, and why it has been replaced since."""
        failure = self.step.failure if isinstance(self.step, GraphStep) else None
        return self.chosen + (f", eager since: {failure}" if failure else "")


EAGER = Fast()


@dataclass(frozen=True)
class Checkpoint:
    """A model and its processor."""

    name: str  # the folder or repository
    model: VisionLanguageModel
    processor: Processor
    load_seconds: float  # a decode step's compilation included
    dtype: str = "float32"  # of the weights: float32, bfloat16, float16, int8 or int4
    fast: Fast = EAGER  # decode step and vision tower
    prefixes: PrefixStore | None = None  # kept of earlier prompts: see `inference.prefix_files`

    @cached_property
    def features(self) -> FeatureCache:
        """The features of the latest tiles, for all who answer with it or look for what an answer
        came from. They hold as long as the weights do."""
        return FeatureCache(self.model)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the config's and generation_config's, and the tokenizer's."""
        return tuple(sorted({*self.model.config.eos_token_ids, *self.processor.stop_token_ids}))

    @property
    def decode_step(self) -> DecodeStep | None:
        """None is the eager one."""
        return self.fast.step

    @property
    def settings(self) -> dict[str, str]:
        """The settings that every result reports."""
        steps = {"decode_step": self.fast.name, "vision_tower": self.fast.tower}
        budget = self.processor.images.budget
        seen = {} if budget is None else {"max_pixels": str(budget)}
        return {"device": str(self.model.device), "dtype": self.dtype, **steps, **seen}

    @property
    def device_name(self) -> str:
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)

    @property
    def num_parameters(self) -> int:
        """The number of parameters by its config: a compiled step packs weights, which are no parameters
        then."""
        with meta_init():
            return sum(parameter.numel() for parameter in type(self.model)(self.model.config).parameters())

    @property
    def context(self) -> int:
        return self.model.config.text.max_position_embeddings

    @property
    def single_turn(self) -> bool:
        """True if its generation_config.json says that it was trained on one question at a time. Such a model
        often gets a follow-up question wrong."""
        return bool(self.model.generation_config.get("single_turn", False))

    def too_many_images(self, count: int) -> str:
        """See `too_many_images`."""
        return too_many_images(self.name, self.model.generation_config, count)

    def other_model(self, answers: Iterable[str]) -> str:
        """See `other_model`."""
        return other_model(self.model.generation_config, answers)

    @property
    def introduction(self) -> str:
        """The model's name and what it knows, or "" where its generation_config.json does not say it."""
        text = " ".join(str(self.model.generation_config.get("knows") or "").split())
        knows = "".join(filter(str.isprintable, text))[:200]  # a stranger's text, on a terminal
        return f"{Path(self.name).name} knows {knows}" if knows else ""

    @property
    def knows_tools(self) -> bool:
        """False where its generation_config.json says that it did not learn to write JSON, as calls hold."""
        return self.model.generation_config.get("json", True) is not False

    @cached_property
    def thinking(self) -> Thinking | None:
        """How the model thinks before it answers; None where it does not."""
        marks = self.processor.thinking
        return None if marks is None else Thinking(self.processor.tokenizer, marks)

    @cached_property
    def forms(self) -> Forms:
        """The grammars, choices and tools that its answers are held to."""
        size = self.model.config.text.vocab_size
        return Forms(self.processor, self.thinking, size, self.stop_token_ids, self.knows_tools)

    def pixels(self, row: EncodedConversation, lines: bool = True, form: str | None = None) -> PixelText:
        """A writer of the coordinates in an answer to this prompt as pixels: lines for a person, or JSON.
        They are read in the form of that name, or in the model's."""
        return PixelText(form or self.processor.coordinates, row.sizes, lines)

    def check_images(self, count: int) -> None:
        """Raises RequestError for a question without an image if the model needs one."""
        if count == 0:
            check_text_only(self.model.generation_config)

    def worth_compiling(self, long: bool) -> bool:
        """True if `compiled` saves more time than it takes: in a long run, and for a large model. Where there
        is no fast step, as on MPS, it never does."""
        size = sum(one.numel() for one in (*self.model.parameters(), *self.model.buffers()))
        return self.model.device.type != "mps" and (long or size >= LARGE)

    def compiled(self, compiling: bool = True) -> Checkpoint:
        """This checkpoint with the fastest decode step and vision tower of this machine (see `speed_up`); the
        answers are the same. The model's weights are rearranged in place."""
        began = time.perf_counter()
        fast = Fast(*speed_up(self.model, compiling))
        trim()
        return replace(self, fast=fast, load_seconds=self.load_seconds + time.perf_counter() - began)


def too_many_images(name: str, generation_config: Mapping[str, Any], count: int) -> str:
    """A sentence for a question about more images than one question showed a model in training, as far as its
    generation_config.json says how many those were; else ""."""
    most = generation_config.get("most_images")
    if not isinstance(most, int) or count <= most:
        return ""
    several, fewer = ("one image", "one") if most == 1 else (f"{most} images", "fewer")
    short = Path(name).name
    return f"{short} has learned from {several} at a time: it answers about {count} as if they were {fewer}."


def other_model(generation_config: Mapping[str, Any], answers: Iterable[str]) -> str:
    """If an answer says what its model `knows`, as a refusal does: the beginning of a sentence that names
    a model for photographs; else ""."""
    knows = generation_config.get("knows")
    if not (knows and isinstance(knows, str) and any(knows in answer for answer in answers)):
        return ""
    return (
        f"for photographs take the model {PHOTOGRAPHS} ({MODELS[PHOTOGRAPHS].gigabytes} GB, downloaded once)"
    )


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    max_pixels: int | None = None,
    fps: float | None = None,
    max_frames: int | None = None,
) -> Checkpoint:
    """Load model and processor from a folder or the Hub.

    `device` is auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1 or mps; `dtype` is as for
    `VisionLanguageModel.from_pretrained`, or on a CPU and on CUDA int8 (compiled C rounds activations as
    well) and int4 (with a C compiler: the language model's matrices have four bits, all others int8). A CPU
    without bfloat16 arithmetic keeps bfloat16 weights and multiplies in float32. `threads` is for all
    that this process computes: see `generation.threads.limit_threads`. `max_pixels` is that of
    `Processor.from_pretrained`, by default CPU_PIXELS on a CPU; `fps` and `max_frames` are those of
    `Processor.choose_frames`.
    """
    limit_threads(threads)
    chosen, began = pick_device(device), time.perf_counter()
    pixels = pixel_budget(chosen, max_pixels)
    if chosen.type not in PACKED.get(dtype, chosen.type):
        expected = " or ".join(PACKED[dtype])
        raise RequestError(f"dtype {dtype}: expected device {expected}, got {chosen}; use bfloat16 there")

    def read(opened: Opened) -> tuple[VisionLanguageModel, Processor]:
        kept = KeptWeights(opened) if dtype == "int4" else None
        put = kept.put if kept else put_int8 if dtype == "int8" else put_parameter
        place = "cpu" if kept else chosen  # where C rounds
        load = partial(VisionLanguageModel.from_pretrained, opened, None, loading_dtype(dtype), place, put)
        model = kept.load(load) if kept else load()
        if kept and chosen.type != "cpu":
            to_rows(model, chosen)
        return model, Processor.from_pretrained(opened, config=model.config, max_pixels=pixels)

    try:
        model, processor = one_version(source, revision, read)
    except NoCompiler as error:
        raise RequestError(f"dtype {dtype}: {error}; use int8, which needs none") from None
    name = dtype if dtype in PACKED else str(model.dtype).removeprefix("torch.")
    if name == "bfloat16" and chosen.type == "cpu" and not has_fast_bfloat16():
        pack(model, name)
    processor.choose_frames(fps, max_frames)
    trim()
    return Checkpoint(str(source), model, processor, time.perf_counter() - began, name)


def put_int8(model: torch.nn.Module, names: Sequence[str], read: Callable[[], torch.Tensor]) -> None:
    put_layers(model, names, read(), partial(pack_layer, "int8"))


def pixel_budget(device: torch.device, max_pixels: int | None) -> int | None:
    """The `max_pixels` with which `open_checkpoint` opens a processor."""
    return CPU_PIXELS if max_pixels is None and device.type == "cpu" else max_pixels


def has_fast_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def loading_dtype(dtype: str) -> str:
    """The dtype in which `open_checkpoint` loads the weights before it converts them to `dtype`."""
    return "stored" if dtype in PACKED else dtype


def pick_device(name: str) -> torch.device:
    """The device of that name, ready to compute on. Raises RequestError if it does not exist here."""
    try:
        check_device(name)
    except ValueError as error:
        raise RequestError(str(error)) from None
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if name == "auto":
        name = next(kind for kind, count in counts.items() if count)
    kind, _, index = name.partition(":")
    if int(index or 0) >= counts[kind]:
        raise RequestError(
            f"device {name}: PyTorch {torch.__version__} finds {counts[kind] or 'none'} here; use auto or cpu"
        )
    return prepare_device(name)
