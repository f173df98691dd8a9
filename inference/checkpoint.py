"""A checkpoint opened for questions: model and processor on a device that exists, in a dtype that suits it.

checkpoint = open_checkpoint("HuggingFaceTB/SmolVLM-256M-Instruct", device="auto", dtype="int8")
checkpoint = checkpoint.compiled()           # answers with the fastest decode step of this machine
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data.processor import Processor
from generation.fast.choose_step import break_even_steps, has_fast_bfloat16, set_precision, speed_up
from generation.fast.cuda_graph import GraphStep
from generation.steps import DecodeStep
from inference.errors import RequestError as RequestError
from inference.errors import check_text_only
from models.checkpoints.hub import snapshot
from models.checkpoints.load import one_version
from models.config import check_device
from models.vision_language_model import VisionLanguageModel, prepare_device

PHOTOGRAPH = (4000, 3000)  # pixels of an image, where nothing is known about it


@dataclass(frozen=True)
class Checkpoint:
    """A model and its processor."""

    name: str  # the folder or repository
    model: VisionLanguageModel
    processor: Processor
    load_seconds: float  # a decode step's compilation included
    dtype: str = "float32"  # of the weights: float32, bfloat16, float16 or int8
    decode_step: DecodeStep | None = None  # None is the eager one
    decode_step_chosen: str = "eager"  # its name, or why it is the eager one
    vision_tower: str = "eager"  # likewise

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: the config's and generation_config's, and the tokenizer's."""
        return tuple(sorted({*self.model.config.eos_token_ids, *self.processor.stop_token_ids}))

    @property
    def decode_step_name(self) -> str:
        """The decode step that was chosen, and why it has been replaced since."""
        failure = self.decode_step.failure if isinstance(self.decode_step, GraphStep) else None
        return self.decode_step_chosen + (f", eager since: {failure}" if failure else "")

    @property
    def settings(self) -> dict[str, str]:
        """What every result reports about the machine."""
        device = str(self.model.device)
        steps = {"decode_step": self.decode_step_name, "vision_tower": self.vision_tower}
        return {"device": device, "dtype": self.dtype, **steps}

    @property
    def context(self) -> int:
        return self.model.config.text.max_position_embeddings

    @property
    def single_turn(self) -> bool:
        """Whether its generation_config.json says that it was trained on one question at a time. Such a model
        often gets a follow-up question wrong."""
        return bool(self.model.generation_config.get("single_turn", False))

    def check_images(self, count: int) -> None:
        """Raises RequestError for a question without an image if the model needs one."""
        if count == 0:
            check_text_only(self.model.generation_config)

    def eager_in_vain(self, steps: int | None) -> bool:
        """Whether `compiled(steps)` found no compiled step though it would have paid."""
        pays = steps is None or steps >= break_even_steps(self.model.language_model)
        return self.decode_step is None and pays

    def compiled(self, steps: int | None = None, images: int | None = None) -> Checkpoint:
        """This checkpoint with the fastest decode step and vision tower of this machine; the answers are the
        same. The model's weights are rearranged in place.

        Args:
            steps, images: how many decode steps and images are expected at most. If they are too few to be
                worth compiling, only what was compiled before is used. None always compiles.
        """
        began = time.perf_counter()
        tiles = None if images is None else images * self.processor.images.grid(*PHOTOGRAPH)[0]
        step, name, tower = speed_up(self.model, steps, tiles)
        return replace(
            self,
            decode_step=step,
            decode_step_chosen=name,
            vision_tower=tower,
            load_seconds=self.load_seconds + time.perf_counter() - began,
        )


def open_checkpoint(
    source: str | Path, revision: str | None = None, device: str = "auto", dtype: str = "auto"
) -> Checkpoint:
    """Load model and processor from a folder or the Hub.

    `device` is auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1 or mps; `dtype` is as for
    `VisionLanguageModel.from_pretrained`, or int8 (weights only, CPU only). A CPU without bfloat16 arithmetic
    keeps bfloat16 weights and multiplies in float32.
    """
    chosen, began = pick_device(device), time.perf_counter()
    if dtype == "int8" and chosen.type != "cpu":
        raise RequestError(f"dtype int8: expected device cpu, got {chosen}; use bfloat16 there")

    def read() -> tuple[VisionLanguageModel, Processor]:
        model = VisionLanguageModel.from_pretrained(
            source, revision=revision, dtype=loading_dtype(dtype), device=chosen
        )
        assert model.origin is not None, "a loaded model knows where it came from"
        # The commit of the weights: the branch may have moved on meanwhile.
        folder = snapshot(source, model.origin.commit or revision)
        return model, Processor.from_pretrained(folder, config=model.config)

    model, processor = one_version(source, revision, read)
    name = dtype if dtype == "int8" else str(model.dtype).removeprefix("torch.")
    if dtype == "int8" or (name == "bfloat16" and chosen.type == "cpu" and not has_fast_bfloat16()):
        set_precision(model, name)
    return Checkpoint(str(source), model, processor, time.perf_counter() - began, name)


def loading_dtype(dtype: str) -> str:
    """The dtype in which `open_checkpoint` loads the weights before it converts them to `dtype`."""
    return "stored" if dtype == "int8" else dtype


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
