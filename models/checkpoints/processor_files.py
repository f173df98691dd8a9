"""A transformers processor written so that transformers 4.57 and 5 both open it.

v5 alone writes a tokenizer class, a list of extra special tokens and nested image settings that 4.57 does not
know; the older forms written here are read by both.
"""

from __future__ import annotations

import json
from pathlib import Path

from models.checkpoints.errors import CheckpointError
from models.checkpoints.strict_json import read_json
from models.config import VLMConfig

# Kept out of the extra special tokens: these have a place of their own in every tokenizer.
_STANDARD = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}


def transformers_processor(processor):
    """The transformers processor inside one of ours (`data.processor.Processor`), or the one given.

    Raises:
        CheckpointError: for nanoVLM's, which has no form in transformers.
    """
    inner = getattr(processor, "hf_processor", processor)
    if inner is None:
        raise CheckpointError(
            "a nanoVLM processor has no transformers form: save without a processor, or give an "
            "Idefics3Processor"
        )
    return inner


def check_processor(processor, config: VLMConfig) -> None:
    """Refuse to save a processor beside a model that it does not fit.

    Raises:
        CheckpointError: if its image token, tokens per tile or vocabulary are not the model's.
    """
    for what, got, expected in (
        ("image token id", processor.image_token_id, config.image_token_id),
        ("tokens per tile (image_seq_len)", processor.image_seq_len, config.tokens_per_tile),
    ):
        if got != expected:
            raise CheckpointError(
                f"the processor's {what} is {got}, the model's is {expected}: they do not fit"
            )
    if len(processor.tokenizer) > config.text.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {len(processor.tokenizer)} tokens, the model only "
            f"{config.text.vocab_size} embeddings"
        )


def write_processor(processor, folder: Path) -> None:
    """Processor, tokenizer and chat template of a transformers Idefics3Processor, in the portable forms."""
    processor.save_pretrained(folder)
    settings = read_json(folder / "processor_config.json")
    settings["processor_class"] = "Idefics3Processor"
    # Image settings nested in processor_config.json are v5's; both read them from a file of their own.
    image = settings.pop("image_processor", None)
    if image is not None:
        image |= {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
        write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "processor_config.json", settings)
    tokenizer = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", _portable_tokenizer(tokenizer))


def _portable_tokenizer(config: dict) -> dict:
    """tokenizer_config.json with the class and the dictionary of extra special tokens that 4.57 expects."""
    config = {name: value for name, value in config.items() if name not in ("backend", "is_local")}
    extra = config.get("extra_special_tokens") or {}
    named = {
        name: config[name]
        for name in config
        if name.endswith("_token") and name not in _STANDARD and isinstance(config[name], str)
    }
    if isinstance(extra, list):
        for index, token in enumerate(extra):
            if token not in named.values():
                named[f"extra_{index}_token"] = token
    else:
        named |= extra
    config |= {
        "extra_special_tokens": named,
        # Without it 4.57 also returns token_type_ids, which the model does not take.
        "model_input_names": ["input_ids", "attention_mask"],
        "processor_class": "Idefics3Processor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return config


def write_json(path: Path, value: dict, sort_keys: bool = True) -> None:
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
