"""A look at the rows of a run before it starts, as `train.py RECIPE --show 3` prints it, without weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np

from data.box_rows import SIZES
from data.loader import LoaderConfig, look
from data.packing import IGNORE_INDEX, Sample
from data.processor import Processor
from data.row_schemas import OF_BOXES
from data.sources import Source, open_both
from messages import counted, for_terminal
from models.checkpoints.sources import open_files
from training.config import TrainConfig, dataset_entries
from training.plan import network
from training.rows import backbone_processor, new_tokenizer, open_processor

_LOOKED_AT = 200  # rows, at least


def describe_rows(config: TrainConfig, count: int) -> str:
    """A description of the first rows and of those left out, and `count` samples with their labels marked."""
    if config.is_drawn:
        raise ValueError("--show: expected --data with rows; this run draws its images")
    mixture, _ = open_both(dataset_entries(config.data), [], config.holdout, config.task == "preferences")
    shape, _ = network(config)
    if config.init_from:
        processor = open_processor(config.init_from, shape, config)
    else:
        tokenizer = new_tokenizer(open_files(config.text_from).processor_folder)
        shape = replace(shape, image_token_id=tokenizer.convert_tokens_to_ids("<image>"))
        processor = backbone_processor(tokenizer, shape, config)
    limits = LoaderConfig(
        sequence_length=config.sequence_length,
        max_tiles=config.max_tiles or None,
        seed=config.seed,
        questions=config.task == "rewards",
    )
    samples, dropped = look(mixture, processor, limits, max(_LOOKED_AT, count))
    lines = [*map(_described, mixture.sources, mixture.shares)]
    read = len(samples) + len(dropped)
    lines += [
        f"\nof the first {counted(read, 'row')} in the order of the run, {len(samples):,} can be trained on"
    ]
    if config.task == "rewards":
        lines.append("  the model learns from its own answers; rewards compare these with the rows' answers")
        samples = [replace(sample, labels=[IGNORE_INDEX] * len(sample.labels)) for sample in samples]
    for reason, number in Counter(one.reason for one in dropped).most_common():
        example = next(one for one in dropped if one.reason == reason)
        lines.append(f"  {number:,} {reason}, such as {example.row}: {example.message}")
    if samples:
        lines.append(f"{'':20}{'median':>10}{'95 %':>10}{'most':>10}")
    columns = {
        "tokens": [sample.tokens for sample in samples],
        "labelled tokens": [sum(label != IGNORE_INDEX for label in sample.labels) for sample in samples],
        "images": [len(sample.images) for sample in samples],
        "tiles": [sample.tiles for sample in samples],
    }
    for name, values in columns.items() if samples else ():
        numbers = "".join(f"{np.quantile(values, share):>10,.0f}" for share in (0.5, 0.95, 1))
        lines.append(f"  {name:18}{numbers}")
    lines += [_shown(sample, processor) for sample in samples[:count]]
    return for_terminal("\n".join(lines))


def _described(source: Source, share: float) -> str:
    """A dataset's number of rows, its share of what is read, and the columns that it is read from."""
    schema, number = source.schema, source.num_rows
    named = {
        one: f"always {schema.constants[one]!r}" if one in schema.constants else schema.columns.get(one, one)
        for one in dict.fromkeys((*schema.text_columns, *schema.columns, *schema.constants))
        if one not in SIZES or schema.text_columns in OF_BOXES
    }
    read = ", ".join(one if one == theirs else f"{one} ({theirs})" for one, theirs in named.items())
    rows = "a stream" if number is None else counted(number, "row")
    return f"{source.name}: {rows}, {share:.1%} of what is read, from {read}"


def _shown(sample: Sample, processor: Processor) -> str:
    """Its text, with special tokens, each row of image positions as one, and what is learned in ⟦ ⟧."""
    name, number = sample.sample_id
    tiles = ""
    if sample.images:
        tiles = f", {counted(len(sample.images), 'image')} of {counted(sample.tiles, 'tile')}"
    text = ""
    tokens = zip(sample.input_ids, sample.labels, strict=True)
    kinds = ((label != IGNORE_INDEX, token == processor.image_token_id, token) for token, label in tokens)
    for (learned, is_image), run in groupby(kinds, lambda one: one[:2]):
        ids = [token for *_, token in run]
        said = processor.decode(ids[:1] if is_image else ids, skip_special_tokens=False)
        text += f"⟦{said}⟧" if learned else f"{said} x {len(ids)} " if is_image else said
    return f"\n--- {name}, row {number}: {counted(sample.tokens, 'token')}{tiles}\n{text}"
