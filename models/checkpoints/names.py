"""Models of the Hub that Ocelli opens and people ask for: a short name for each, and what it is good for. And
what was meant by names that nothing has."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path, PurePath

from messages import ALIKE


@dataclass(frozen=True)
class Known:
    """gigabytes: of the download, 10⁹ bytes each; parameters times the bytes that they are stored in."""

    repo: str
    gigabytes: float
    good_for: str


# How files of weights that are not opened here are called -> whose they are.
_OTHER_WEIGHTS = {
    "openvino*.*": "OpenVINO", "*.onnx": "ONNX", "*/*.onnx": "ONNX", "pytorch_model*.bin": "PyTorch's pickle"
}  # fmt: skip
PHOTOGRAPHS = "smolvlm-256m"  # the smallest that knows them
MODELS = {
    "smolvlm-256m": Known("HuggingFaceTB/SmolVLM-256M-Instruct", 0.5, "photographs, in short answers"),
    "smolvlm-500m": Known("HuggingFaceTB/SmolVLM-500M-Instruct", 1.0, "photographs and printed text"),
    "smolvlm-2.2b": Known("HuggingFaceTB/SmolVLM-Instruct", 4.5, "photographs, charts, several images"),
    "smolvlm2-256m": Known("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 1.0, "as smolvlm-256m, and videos"),
    "smolvlm2-500m": Known("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 2.0, "as smolvlm-500m, and videos"),
    "smolvlm2-2.2b": Known("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 9.0, "photographs, documents, videos"),
    "idefics3-8b": Known("HuggingFaceM4/Idefics3-8B-Llama3", 16.9, "photographs and documents, in detail"),
    "granite-docling-258m": Known("ibm-granite/granite-docling-258M", 0.5, "pages, as text with its places"),
    "smoldocling-256m": Known("ds4sd/SmolDocling-256M-preview", 0.5, "as granite-docling-258m, older"),
    "internvl3.5-1b": Known("OpenGVLab/InternVL3_5-1B-HF", 2.1, "photographs, charts, documents"),
    "internvl3.5-2b": Known("OpenGVLab/InternVL3_5-2B-HF", 4.7, "the same, more reliably"),
    "internvl3.5-4b": Known("OpenGVLab/InternVL3_5-4B-HF", 9.5, "the same, and questions that need thought"),
    "internvl3.5-8b": Known("OpenGVLab/InternVL3_5-8B-HF", 17.1, "the same, the largest of these"),
    "lfm2.5-vl-450m": Known("LiquidAI/LFM2.5-VL-450M", 0.9, "photographs and text, quick on a laptop"),
    "lfm2.5-vl-1.6b": Known("LiquidAI/LFM2.5-VL-1.6B", 3.2, "the same, more reliably"),
    "qwen2.5-vl-3b": Known("Qwen/Qwen2.5-VL-3B-Instruct", 7.5, "documents, screens, boxes and points"),
    "qwen2.5-vl-7b": Known("Qwen/Qwen2.5-VL-7B-Instruct", 16.6, "the same, more reliably"),
    "qwen3-vl-2b": Known("Qwen/Qwen3-VL-2B-Instruct", 4.3, "documents, screens, boxes, 32 languages"),
    "qwen3-vl-4b": Known("Qwen/Qwen3-VL-4B-Instruct", 8.9, "the same, more reliably"),
    "qwen3-vl-8b": Known("Qwen/Qwen3-VL-8B-Instruct", 17.5, "the same, and questions that need thought"),
    "gemma-4-e2b": Known("google/gemma-4-E2B-it", 10.3, "photographs and documents, in 140 languages"),
    "gemma-4-e4b": Known("google/gemma-4-E4B-it", 16.0, "the same, more reliably"),
    "qwen3.5-0.8b": Known("Qwen/Qwen3.5-0.8B", 1.8, "photographs, screens, boxes; quick, long answers too"),
    "qwen3.5-2b": Known("Qwen/Qwen3.5-2B", 4.5, "the same, more reliably"),
    "qwen3.5-4b": Known("Qwen/Qwen3.5-4B", 9.3, "documents, charts, questions that need thought"),
    "qwen3.5-9b": Known("Qwen/Qwen3.5-9B", 18.8, "the same, the largest of these"),
    "nanovlm-222m": Known("lusxvr/nanoVLM-222M", 0.9, "reading and training; one image"),
    "nanovlm-230m": Known("lusxvr/nanoVLM-230M-8k", 0.9, "reading and training; several images"),
    "nanovlm-450m": Known("lusxvr/nanoVLM-450M", 1.8, "reading and training, the largest of these"),
}


def table() -> str:
    """A line for each short name."""
    rows = (f"{name:<22}{of.gigabytes:>5} GB  {of.good_for}" for name, of in MODELS.items())
    return "\n".join((f"{'name':<19}download  good for", *rows))


def short_names(text: str) -> list[str]:
    """Those that may have been meant, by themselves or by the name of their repository."""
    short = {name: name for name in MODELS} | {of.repo: name for name, of in MODELS.items()}
    return sorted({short[name] for name in alike(text, short, same_numbers=True)})


def alike(name: str, known: Iterable[str], same_numbers: bool = False) -> list[str]:
    """Those that may have been meant by a name: called the same but for owner, case and dashes, else with
    more after it, else the nearest. Of published models, those with other numbers are other models."""

    def plain(one: str) -> str:
        return re.sub(r"[-_.]", "", one.rpartition("/")[2]).lower()

    def numbers(one: str) -> Counter[str]:
        return Counter(re.findall(r"\d+(?:\.\d+)?", one.rpartition("/")[2]) if same_numbers else ())

    wanted = plain(name)
    names = {one: plain(one) for one in sorted(known) if one != name}
    if same := [one for one in names if names[one] == wanted]:
        return same
    names = {one: of for one, of in names.items() if numbers(name) <= numbers(one)}
    if len(wanted) > 3 and (longer := [one for one in names if names[one].startswith(wanted)]):
        return longer
    near = difflib.get_close_matches(wanted, names.values(), n=1, cutoff=ALIKE)
    return [one for one in names if names[one] in near]


def meant(names: Iterable[str], named: bool = False) -> str:
    """A question about a few names; of one short name alone, what it stands for, too."""
    few = [*names][:3]
    of = f" ({MODELS[few[0]].repo})" if named and len(few) == 1 else ""
    return f"did you mean {' or '.join(few)}{of}?"


def nearest_name(missing: Collection[str], there: Collection[str]) -> tuple[str, str] | None:
    """One of the first missing names, and that of those that are there whose end is most like its; None
    where no two end alike."""

    def shared(names: tuple[str, str]) -> int:
        ends = (name.split(".")[::-1] for name in names)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends)))

    pairs = ((wanted, name) for wanted in sorted(missing)[:8] for name in sorted(there))
    found = max(pairs, key=shared, default=("", ""))
    return found if shared(found) > 1 else None


def other_weights(folder: Path, names: Iterable[str] = ()) -> str:
    """The end of a sentence about a folder, or a repository with files of these names, without weights that
    open here: the format that it has instead."""
    for glob, format in _OTHER_WEIGHTS.items():
        here = (path.name for path in sorted(folder.glob(glob)))
        if name := next(chain(here, (name for name in names if PurePath(name).match(glob))), ""):
            return f"; it holds {format} weights ({name}): take the safetensors that they were made from"
    return ""
