"""Small processors of every kind, for tests: built here or read from the golden folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import families
from data.new_processor import SPECIAL_TOKENS, make_processor
from data.processor import Processor
from models.checkpoints.sources import open_files
from recipes.shapes.tokenizer import build_tokenizer

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
CORPUS = (
    "how many circles are there? 3 or 12 of them, and two red squares",
    "what colour is the big triangle on the left? it is blue",
    "describe the image: a green star above a small image of a row",
)
LLAMA_TEMPLATE = (
    "<|begin_of_text|>{% for message in messages %}{{message['role']|capitalize}}:"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %} {{line['text'] | trim}}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
OWN_KINDS = ("embedded", "llama", "merged", "nfkc", "unigram", "gemma")
KINDS = (*OWN_KINDS, "nanovlm-current", "nanovlm-base", "nanovlm-v0.1")


def nano_config(**changes) -> dict:
    """config.json of today's golden nanoVLM checkpoint."""
    return json.loads((GOLDEN / "nanovlm-current" / "config.json").read_text()) | changes


def assert_same(ours: dict, theirs: dict) -> None:
    """The same tensors under the same names."""
    assert set(ours) == set(theirs)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def draw_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: a wrong crop, order or resampling filter shows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def user(*content) -> list[dict]:
    """A conversation of one message, of texts and of parts such as `seen`."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": parts}]


def seen(size: tuple[int, int], seed: int = 0) -> dict:
    return {"type": "image", "image": draw_image(*size, seed)}


@cache
def embedded(split: bool = False) -> Processor:
    return make_processor(build_tokenizer(CORPUS, 400), image_size=32, image_seq_len=4, split=split)


@cache
def processor(kind: str) -> Processor:
    """One of KINDS."""
    if kind == "embedded":
        return embedded(split=True)
    if kind == "nanovlm-base":  # the Hub's situation: lm_tokenizer without the extra tokens
        opened = open_files(GOLDEN / "nanovlm-current")
        opened.config.update(nano_config(lm_tokenizer="tokenizer_base"))
        images, tokenizer, template = families.nanovlm.open_images(opened)
        return Processor(images, tokenizer, template)
    if kind.startswith("nanovlm"):
        return Processor.from_pretrained(GOLDEN / kind)
    made = {"llama": _llama, "merged": _merged, "nfkc": _nfkc, "unigram": _unigram, "gemma": gemma}
    tokenizer = made[kind]()
    template = {"chat_template": LLAMA_TEMPLATE} if kind == "llama" else {}
    return make_processor(tokenizer, image_size=32, image_seq_len=4, split=True, **template)


def _fast(backend: Tokenizer, eos: str = "<end_of_utterance>", **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token="<|im_end|>", **names)


def _llama() -> PreTrainedTokenizerFast:
    """Llama 3's: the tokenizer adds a BOS by itself, and looks whole words up before merging."""
    backend = build_tokenizer(CORPUS, 400).backend_tokenizer
    spec = json.loads(backend.to_str())
    spec["model"]["ignore_merges"] = True
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.add_special_tokens(["<|begin_of_text|>"])
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[bos])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return _fast(backend, bos_token="<|begin_of_text|>")


def _merged() -> PreTrainedTokenizerFast:
    """Merges learnt from text full of special tokens, so that plain merging leads to them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*CORPUS, *SPECIAL_TOKENS * 3, "<image>s are <image>s"], trainer)
    assert backend.encode("<image>").tokens == ["<image>"]
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return _fast(backend)


def _nfkc() -> PreTrainedTokenizerFast:
    """Full-width letters become ASCII before anything is looked up; special tokens match normalized text,
    swallow spaces, or are not marked special at all."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    )
    for i, token in enumerate(SPECIAL_TOKENS):
        added = AddedToken(token, normalized=i % 2 == 0, special=True, lstrip=i % 3 == 0, rstrip=i % 3 == 1)
        backend.add_special_tokens([added])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("    ", special=False)])
    return _fast(backend)


def _unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's: special tokens are pieces that any text may match; unknown characters have an id."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
        ),
    )
    return _fast(backend, unk_token="<unk>")


def gemma(flags: Callable[[], dict[str, bool]] = dict) -> PreTrainedTokenizerFast:
    """Gemma's: a space is `▁` before anything is looked up, other bytes have pieces, and runs of spaces, of
    tabs and of newlines are added tokens that the merges build as well, as HTML is. `flags()` are those of
    the next special token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    replace = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    runs = [one * n for one in "▁\t\n" for n in range(2, 9)]
    indented = [f"x{run.replace('▁', ' ')}y" for run in runs]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *bytes_], show_progress=False)
    backend.train_from_iterator([*CORPUS, *indented * 4], trainer)
    assert "▁▁▁▁" in backend.get_vocab()
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in bytes_]
    backend = Tokenizer.from_str(json.dumps(spec))
    text = [*runs, "\n", "\t", *(f"<{mark}{name}>" for name in ("b", "td", "h1") for mark in ("", "/"))]
    backend.add_tokens([AddedToken(one, normalized=False) for one in text])
    for name in SPECIAL_TOKENS:
        given = {"normalized": False} | flags()
        backend.add_special_tokens([AddedToken(name, special=True, **given)])
    return _fast(backend, unk_token="<unk>")
