"""Which options of generate.py do not go together. Nothing here needs torch: a mistake is told at once."""

from __future__ import annotations

import argparse


def mistake_in(settings: argparse.Namespace) -> str | None:
    """One sentence on what cannot be done as asked, or None."""
    if settings.batch is not None:
        if mistake := _mistake_in_batch(settings):
            return mistake
    elif settings.out is not None:
        return "--out belongs to --batch; use --json to have the results of one question on stdout"
    elif settings.batch_size is not None:
        return "--batch-size belongs to --batch: questions of the command line are asked one by one"
    if settings.chat and (settings.batch or settings.json or settings.num_answers != 1 or not settings.cache):
        return "--chat prints text from one cache: leave out --batch, --json, --num-answers, --no-cache"
    if settings.compile == "on" and not settings.cache:
        return "--compile on: the compiled step reads a cache, leave out --no-cache"
    if settings.no_image and settings.images:
        return "--no-image: expected no IMAGE, got " + ", ".join(settings.images)
    blank = next((question for question in settings.questions or () if not question.strip()), None)
    return None if blank is None else f"-q: expected a question, got {blank!r}"


def _mistake_in_batch(settings: argparse.Namespace) -> str | None:
    if settings.images or settings.questions or settings.no_image or settings.json:
        return "--batch takes pictures and questions from its file: leave out IMAGE, -q, --no-image, --json"
    if settings.out is None:
        return "--batch needs --out FILE.jsonl for its results"
    if not settings.cache:
        return "--batch shares a cache among its questions: leave out --no-cache"
    if settings.batch_size is not None and settings.batch_size < 1:
        return f"--batch-size: expected at least 1, got {settings.batch_size}"
    return None
