"""A checkpoint opened for questions: model and processor on a device that exists, in a dtype that suits it.

checkpoint = open_checkpoint("HuggingFaceTB/SmolVLM-256M-Instruct", device="auto", dtype="int8")
checkpoint = checkpoint.compiled()           # answers with the fastest decode step of this machine
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from data.processor import EncodedConversation, Processor
from families.keys import quantization
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.quantized import pack
from generation.features import FeatureCache
from generation.prefix_store import PrefixStore
from generation.processors import limit_threads
from generation.steps import Step
from inference.coded import load_codes, quantized_as
from inference.coordinates import PixelText
from inference.errors import RequestError as RequestError
from inference.errors import check_text_only
from inference.fast import has_fast_bfloat16, put_int8, speed_up
from inference.forms import Forms
from inference.kept import load_int4
from inference.thinking import Thinking
from messages import one_line
from models.checkpoints.adapter import read_adapter
from models.checkpoints.files import Opened
from models.checkpoints.load import meta_init, prepare_device
from models.checkpoints.names import PHOTOGRAPHS
from models.checkpoints.sources import last_name, one_version
from models.checkpoints.weights import trim
from models.config import check_device
from models.vision_language_model import VisionLanguageModel

CPU_PIXELS = 2**19  # of images that are taken whole: Qwen3-VL-2B computes 3 TFLOP for a 4:3 photograph
LARGE = 50_000_000  # weights from which on compiling, 3 to 8 seconds, pays with the first answer
PACKED = dict.fromkeys(("int8", "int4"), ("cpu", "cuda"))  # dtypes of weights alone, and devices for them


@dataclass(frozen=True)
class Fast:
    """The chosen decode step (None: the eager one), its name and the tower's, or why they are eager."""

    step: Step | None = None
    chosen: str = "eager"
    tower: str = "eager"

    @property
    def name(self) -> str:
        """The decode step that was chosen, and what of it has been given up since."""
        return self.step.name if isinstance(self.step, GraphStep) else self.chosen


@dataclass(frozen=True)
class Checkpoint:
    """A model and its processor."""

    name: str  # the folder or repository, or the last names of that and of an adapter
    model: VisionLanguageModel
    processor: Processor
    load_seconds: float  # a decode step's compilation included
    dtype: str = "float32"  # of the weights: float32, bfloat16, float16, int8, int4, or the file's
    fast: Fast = Fast()  # decode step and vision tower
    prefixes: PrefixStore | None = None  # kept of earlier prompts: see `inference.kept`
    adapter: str = ""  # the folder or repository of one that changes its weights

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
    def decode_step(self) -> Step | None:
        """None is the eager one."""
        return self.fast.step

    @property
    def settings(self) -> dict[str, str]:
        """The settings that every result reports."""
        steps = {"decode_step": self.fast.name, "vision_tower": self.fast.tower}
        budget = self.processor.images.budget
        seen = {} if budget is None else {"max_pixels": str(budget)}
        own = {"adapter": self.adapter} if self.adapter else {}
        return {"device": str(self.model.device), "dtype": self.dtype, **own, **steps, **seen}

    @property
    def context(self) -> int:
        return self.model.config.text.max_position_embeddings

    @property
    def device_name(self) -> str:
        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)

    @property
    def num_parameters(self) -> int:
        """By its config: a compiled step packs weights, which are no parameters then."""
        with meta_init():
            return sum(one.numel() for one in type(self.model)(self.model.config).parameters())

    # ----------------------------------------------- what its generation_config.json says (docs/hub.md)
    @property
    def single_turn(self) -> bool:
        """True if it was trained on one question at a time."""
        return bool(self.model.generation_config.get("single_turn", False))

    @property
    def knows_tools(self) -> bool:
        """False if it did not learn to write JSON, as calls of tools hold it."""
        return self.model.generation_config.get("json", True) is not False

    @property
    def knows(self) -> str:
        """What it knows, in words that also stand in its refusals; else ""."""
        return str(self.model.generation_config.get("knows") or "")

    @property
    def introduction(self) -> str:
        """The model's name and what it knows; else ""."""
        return f"{Path(self.name).name} knows {one_line(self.knows, 200)}" if self.knows else ""

    def other_model(self, answers: Iterable[str]) -> str:
        """Which model to take for photographs, if an answer is a refusal; else ""."""
        if not self.knows or not any(self.knows in answer for answer in answers):
            return ""
        return f"for photographs take --model {PHOTOGRAPHS} (--model list shows all)"

    def check_images(self, count: int) -> None:
        """Raises RequestError for a question without an image if the model needs one."""
        if count == 0:
            check_text_only(self.model.generation_config)

    # ------------------------------------------------------------------------------------------- answers
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


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    max_pixels: int | None = None,
    fps: float | None = None,
    max_frames: int | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Load model and processor from a folder or the Hub, with a LoRA `adapter` of either.

    `device` is auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1 or mps; `dtype` is as for
    `VisionLanguageModel.from_pretrained`, or on a CPU and on CUDA int8 (compiled C rounds activations as
    well) and int4 (with a C compiler: the language model's matrices have four bits, all others int8); auto
    keeps the codes of quantized weights there. A CPU without bfloat16 arithmetic multiplies bfloat16 weights
    in float32. `threads` is that of `limit_threads`, `max_pixels` of `Processor.from_pretrained` (on a CPU,
    by default CPU_PIXELS), `fps` and `max_frames` of `Processor.choose_frames`.
    """
    limit_threads(threads)
    chosen, began = pick_device(device), time.perf_counter()
    if chosen.type not in PACKED.get(dtype, chosen.type):
        expected = " or ".join(PACKED[dtype])
        raise RequestError(f"dtype {dtype}: expected device {expected}, got {chosen}; use bfloat16 there")

    name, changed = dtype if dtype in PACKED else "", None if adapter is None else read_adapter(adapter)

    def read(opened: Opened) -> tuple[VisionLanguageModel, Processor]:
        nonlocal name
        if formats := kept_formats(opened, dtype, chosen):
            name, model = ", ".join(formats), load_codes(opened, chosen)
        elif dtype == "int4":
            model = load_int4(opened, chosen)
        elif dtype == "int8":
            model = VisionLanguageModel.from_pretrained(opened, None, "stored", chosen, put_int8)
        else:
            model = VisionLanguageModel.from_pretrained(opened, None, dtype, chosen)
        pixels = pixel_budget(chosen, max_pixels)
        return model, Processor.from_pretrained(opened, config=model.config, max_pixels=pixels)

    try:
        model, processor = one_version(source, revision, read, changed)
    except NoCompiler as error:
        raise RequestError(f"dtype {dtype}: {error}; use int8, which needs none") from None
    name = name or str(model.dtype).removeprefix("torch.")
    if name == "bfloat16" and chosen.type == "cpu" and not has_fast_bfloat16():
        pack(model, name)
    processor.choose_frames(fps, max_frames)
    trim()
    own = "" if adapter is None else str(adapter)
    named = own.removesuffix("/").removesuffix("/adapter")  # where train.py puts a run's
    called = f"{last_name(str(source))}+{last_name(named)}" if own else str(source)
    seconds = time.perf_counter() - began
    return Checkpoint(called, model, processor, seconds, name, adapter=own)


def kept_formats(opened: Opened, dtype: str, device: torch.device) -> tuple[str, ...]:
    """The formats whose codes `open_checkpoint` keeps; () where it opens floats or rounds them itself, as on
    CUDA, where no kernel multiplies with codes."""
    quantized = opened.files.gguf or quantization(opened.config)
    return quantized_as(opened) if quantized and dtype == "auto" and device.type == "cpu" else ()


def pixel_budget(device: torch.device, max_pixels: int | None) -> int | None:
    """The `max_pixels` with which `open_checkpoint` opens a processor."""
    return CPU_PIXELS if max_pixels is None and device.type == "cpu" else max_pixels


def pick_device(name: str) -> torch.device:
    """The device of that name, ready to compute on. Raises RequestError if it does not exist here."""
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    try:
        kind, _, index = check_device(name).partition(":")
    except ValueError as error:
        raise RequestError(error) from None
    if name == "auto":
        return prepare_device(next(kind for kind, count in counts.items() if count))
    if int(index or 0) >= counts[kind]:
        raise RequestError(f"device {name}: PyTorch finds {counts[kind] or 'none'} here; use auto or cpu")
    return prepare_device(name)
