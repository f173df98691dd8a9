"""Models of the Hub that Ocelli opens and people ask for: a short name for each, and what it is good for."""

from __future__ import annotations

import re
from dataclasses import dataclass

REPO_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


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
    "paddleocr-vl-1.6": Known("PaddlePaddle/PaddleOCR-VL-1.6", 1.9, "tables, formulas, charts, text alone"),
    "internvl3.5-1b": Known("OpenGVLab/InternVL3_5-1B-HF", 2.1, "photographs, charts, documents"),
    "internvl3.5-2b": Known("OpenGVLab/InternVL3_5-2B-HF", 4.7, "the same, more reliably"),
    "internvl3.5-4b": Known("OpenGVLab/InternVL3_5-4B-HF", 9.5, "the same, and questions that need thought"),
    "internvl3.5-8b": Known("OpenGVLab/InternVL3_5-8B-HF", 17.1, "the same, the largest of these"),
    "qianfan-ocr": Known("baidu/Qianfan-OCR", 9.5, "pages as Markdown, tables and formulas in detail"),
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
    "minicpm-v-4.6": Known("openbmb/MiniCPM-V-4.6", 2.6, "photographs, documents, printed text; quick"),
    "minicpm-ocr": Known("openbmb/MiniCPM-OCR-1.0", 2.6, "text, tables and formulas of pages"),
    "nanovlm-222m": Known("lusxvr/nanoVLM-222M", 0.9, "reading and training; one image"),
    "nanovlm-230m": Known("lusxvr/nanoVLM-230M-8k", 0.9, "reading and training; several images"),
    "nanovlm-450m": Known("lusxvr/nanoVLM-450M", 1.8, "reading and training, the largest of these"),
}


def table() -> str:
    """A line for each short name."""
    rows = (f"{name:<22}{of.gigabytes:>5} GB  {of.good_for}" for name, of in MODELS.items())
    return "\n".join((f"{'name':<19}download  good for", *rows))
