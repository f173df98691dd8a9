"""Models of the Hub that Ocelli opens and people ask for: a short name for each, and what it is good for; and
which of them, or of the checkpoints here, a person meant by a name that nothing has."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from messages import ALIKE, some
from models.checkpoints.files import EMBEDDED, CheckpointError
from models.checkpoints.gguf import SUFFIX
from models.checkpoints.missing import is_checkpoint

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
REPO_ID = re.compile(rf"({_NAME.pattern}/)?{_NAME.pattern}", re.ASCII)
_WEB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")


@dataclass(frozen=True)
class Known:
    """gigabytes: of the download, 10⁹ bytes each; parameters times the bytes that they are stored in."""

    repo: str
    gigabytes: float
    good_for: str


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


KNOWN = tuple(known.repo for known in MODELS.values())


def table() -> str:
    """A line for each short name."""
    rows = (f"{name:<22}{of.gigabytes:>5} GB  {of.good_for}" for name, of in MODELS.items())
    return "\n".join((f"{'name':<19}download  good for", *rows))


def short_names(text: str) -> list[str]:
    """The short names that a text may mean, by themselves or by the name of their repository."""
    short = {name: name for name in MODELS} | {of.repo: name for name, of in MODELS.items()}
    return sorted({short[name] for name in alike(text, short, same_numbers=True)})


def alike(name: str, known: Iterable[str], same_numbers: bool = False) -> list[str]:
    """The known names that a name may mean: called the same but for owner, case and dashes, else with
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


# ------------------------------------------------------------------------------------------------- slips
def _checkpoints_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if is_checkpoint(folder / name))
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return []


def refuse_slip(text: str, path: str, only_path: bool, quantized: bool, revision: str | None) -> None:
    """Raise CheckpointError for a name of no folder here that cannot be a repository's (`only_path`, or its
    letters), or that was meant for something here. A `revision` says that it is a repository's."""
    if os.path.isfile(path):
        raise CheckpointError(
            f"{text} is a file: expected the folder of a checkpoint, such as {os.path.dirname(path) or '.'}, "
            f"a GGUF file, or a repository id such as owner/name"
        )
    if quantized and text.lower() in MODELS:
        raise CheckpointError(
            f"{text}: a short name takes no quantization: name a repository of GGUF files, such as "
            f"ggml-org/SmolVLM-256M-Instruct-GGUF:Q8_0"
        )
    if match := _WEB.fullmatch(text):
        raise CheckpointError(f"there is no folder {text}: did you mean the repository {match[1]}?")
    if not only_path and not REPO_ID.fullmatch(text):
        raise CheckpointError(
            f"{text!r} is neither a folder here nor a valid repository id such as owner/name"
        )
    place = Path(os.path.normpath(path))
    here = _checkpoints_in(place.parent)
    embedded = _checkpoints_in(EMBEDDED) if str(place.parent) in (".", EMBEDDED.name) else []
    looks_local = only_path or bool(len(place.parts) > 1 and here)
    if revision is not None and not only_path:
        return
    if found := alike(place.name, here + embedded):
        hint = meant(str(place.parent / name) for name in found)
    elif not only_path and len(place.parts) == 1 and (found := short_names(text)):
        hint = f"{meant(found, named=True)} (--model list shows the short names)"
        raise CheckpointError(f"there is no folder and no model {text}: {hint}")
    elif looks_local and here:
        hint = f"{place.parent} has {some(here)}"
    elif looks_local:
        hint = "expected a checkpoint folder, a GGUF file or a repository id such as owner/name"
    else:
        return
    if not only_path:
        hint += " (for a repository of that name give its revision, such as main, or start elsewhere)"
    raise CheckpointError(f"there is no {'file' if text.endswith(SUFFIX) else 'folder'} {text}: {hint}")


def hints(repo: str, cached: Mapping[str, bool], answered: bool) -> str:
    """The end of a sentence about a repository that was not found: which of those in the client's cache (name
    -> whether it opens) or of the known ones may have been meant; without the Hub's answer, what is here."""
    said = []
    if repo not in KNOWN and (similar := alike(repo, [*cached, *KNOWN], same_numbers=True)):
        said.append(meant(similar))
    if not answered:
        here = [*_checkpoints_in(EMBEDDED), *(name for name, opens in cached.items() if opens)]
        said.append(f"without the Hub there are {some(here)}, and any folder of a checkpoint")
    return "".join(f"; {hint}" for hint in said)
