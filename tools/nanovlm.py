"""nanoVLM checkpoints of any generation as transformers' Idefics3: weights, processor, prompts.

Token ids stay what they are; weights need more than other names:
- Pixels. nanoVLM's run from 0 to 1, Idefics3's from -1 to 1. The difference goes into the first convolution,
  W x + b = (W / 2)(2 x - 1) + (b + sum(W) / 2): halves and doubles are exact, the bias is rounded once.
  (Pixels of 0 to 1 would do in transformers too, but for black tiles: all zeros there, as padding is.)
- Placeholders. nanoVLM v0.1 has none; in transformers' layout `<image>` needs a row, and its processor three
  more names. Ids beyond the vocabulary get rows that are the mean of the old ones: their logits are means of
  logits, so no greedy answer changes.

What stands in front of a question does not stay: Idefics3's processor names the tiles first and the whole
image last, nanoVLM the other way round and with no `<fake_token_around_image>`. The two also resample
differently. So a converted model sees prompts that it was not trained with (`NOTE`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Resampling
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from data.processor import Processor
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer
from families import family_of, idefics3
from families.nanovlm import NAME, NanoVLMImages
from models.checkpoints.backbones import with_mean_rows

NOTE = (
    "note: transformers' processor names tiles first and the whole image last, nanoVLM the other way "
    "round, and resamples pixels differently: the network is the same, its prompts are not those of its "
    "training"
)

_ROLES = {
    "image_token": IMAGE,
    "fake_image_token": FAKE,
    "global_image_token": GLOBAL,
    "end_of_utterance_token": END,
}
_TILE_NAME = re.compile(r"<row_(\d+)_col_(\d+)>")

# Messages with parts -> messages with text, for a template that takes a message's content as one string. As
# in nanoVLM's training, all images stand in front of the first thing a user says, numbered if several.
_PARTS_TO_TEXT = (
    "{%- set ns = namespace(shown=[], prefix='', count=0, seen=0) -%}"
    "{%- for message in messages -%}{%- if message['content'] is not string -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
    "{%- set ns.count = ns.count + 1 -%}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- for number in range(ns.count) -%}{%- set ns.prefix = ns.prefix"
    " + ('<image: ' ~ number ~ '>' if ns.count > 1 else '') + '<image>' -%}{%- endfor -%}"
    "{%- for message in messages -%}{%- set text = namespace(all='') -%}"
    "{%- if message['content'] is string -%}{%- set text.all = message['content'] -%}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}"
    "{%- set text.all = text.all + part['text'] -%}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'user' and ns.seen == 0 -%}{%- set ns.seen = 1 -%}"
    "{%- set text.all = ns.prefix + text.all -%}{%- endif -%}"
    "{%- set ns.shown = ns.shown + [{'role': message['role'], 'content': text.all}] -%}{%- endfor -%}"
    "{%- set messages = ns.shown -%}"
)


def recognises(config: Mapping) -> bool:
    """Whether a config.json is nanoVLM's."""
    family = family_of(config)
    return family is not None and family.NAME == NAME


@torch.no_grad()
def rewrite(model: Any, processor: Idefics3Processor | None) -> None:
    """Make a nanoVLM model one of Idefics3's layout, for this processor if there is one."""
    convolution = model.vision_model.patch_embedding
    weight = convolution.weight.data
    convolution.bias.data += (0.5 * weight.sum((1, 2, 3), dtype=torch.float64)).to(weight.dtype)
    convolution.weight.data = 0.5 * weight

    config, language_model = model.config, model.language_model
    image_token_id = config.image_token_id if processor is None else processor.image_token_id
    rows = max(
        config.text.vocab_size, image_token_id + 1, 0 if processor is None else len(processor.tokenizer)
    )
    if more := rows - config.text.vocab_size:
        embedding, head = language_model.embed_tokens, language_model.lm_head
        embedding.weight = with_mean_rows(embedding.weight, more, torch.float64)
        tied = config.tie_word_embeddings
        head.weight = embedding.weight if tied else with_mean_rows(head.weight, more, torch.float64)
    text = replace(config.text, vocab_size=rows)
    model.config = replace(config, text=text, family=idefics3.NAME, image_token_id=image_token_id)


def as_idefics(folder: str | Path) -> Idefics3Processor:
    """transformers' processor for a nanoVLM checkpoint of any generation.

    The image tokens take Idefics3's names and keep their ids. Names that nanoVLM has no token for
    (`<fake_token_around_image>`, `<end_of_utterance>`, in v0.1 all of them) go to tokens of tiles beyond the
    largest grid, which nothing was trained with, or where there are none to new ids after the tokenizer's.
    """
    opened = Processor.from_pretrained(folder)
    images, tokenizer, template = opened.images, opened.tokenizer, opened.chat.chat_template
    assert isinstance(images, NanoVLMImages), "the caller has looked at config.json"
    renamed = ((images.image_token, IMAGE), (images.global_token, GLOBAL))
    names = {theirs: ours for theirs, ours in renamed if theirs is not None}
    spare: list[str] = []  # names of tiles that no image has
    if images.max_side is not None:
        grid = math.ceil(images.max_side / images.tile_size)
        tiles = filter(None, map(_TILE_NAME.fullmatch, sorted(tokenizer.get_added_vocab())))
        spare = [name[0] for name in tiles if max(int(name[1]), int(name[2])) > grid]
    for name in (FAKE, END, GLOBAL):
        if name not in names.values() and name not in tokenizer.get_vocab() and spare:
            names[spare.pop()] = name
    tokenizer = _renamed(tokenizer, names)
    template = template.replace(images.image_token, IMAGE)  # which v0.1's has
    return Idefics3Processor(
        # Idefics3's cutting with nanoVLM's sizes. Normalised to -1 … 1, by a mean and deviation of 0.5: the
        # converted model's first convolution is made for that (`rewrite`), since an
        # all-black tile must not become all zeros, which transformers takes for padding.
        Idefics3ImageProcessorPil(
            size={"longest_edge": images.longest_side},
            resample=int(Resampling.BILINEAR if images.max_side is None else Resampling.BICUBIC),
            do_image_splitting=images.max_side is not None,
            max_image_size={"longest_edge": images.tile_size},
        ),
        tokenizer,
        image_seq_len=images.tile_positions,
        chat_template=_PARTS_TO_TEXT + template,
    )


def _renamed(tokenizer: AnyTokenizer, names: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """The same tokenizer with some special tokens called otherwise, under the same ids; those of `_ROLES`
    that it lacks are added."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in backend["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocab = backend["model"].get("vocab")
    if isinstance(vocab, dict):
        backend["model"]["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    standard = {
        name: names.get(token, token)
        for name, token in tokenizer.special_tokens_map.items()
        if name in ("bos_token", "eos_token", "unk_token", "pad_token") and isinstance(token, str)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(_ROLES),
        **standard,
    )
