"""Text as it arrives: cut at characters, special tokens skipped, the pieces adding up to the whole."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.processor import Processor
from inference.answer_text import TextStream


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte, and <end>: every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


TEXTS = [
    "two red circles",
    "naïve café",
    "日本語のテキスト",
    "a 👩\u200d🚀 in space 🚀!",
    " leading\n\n and trailing  ",
    "",
]


def test_a_character_that_never_completes_is_dropped(tokenizer):
    stream = TextStream(tokenizer)
    pieces = [stream.put(token_id) for token_id in tokenizer.encode("ok 🚀")[:-1]]
    assert "".join(pieces) == "ok " and stream.finish() == ""
    assert stream.put(tokenizer.encode("x")[0]) == "x", "a finished stream starts afresh"


@pytest.mark.parametrize("text", [*TEXTS, "is n't it , or ?"])
def test_pieces_are_whole_characters_and_add_up_to_what_the_processor_decodes(tokenizer, monkeypatch, text):
    """Some tokenizers clean spaces up by default: a stream cannot, so neither may."""
    for setting in ("", "_for_bpe_even_though_it_will_corrupt_output"):
        monkeypatch.setattr(tokenizer, f"clean_up_tokenization_spaces{setting}", True)
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    stream, processor = TextStream(tokenizer), object.__new__(Processor)
    processor.tokenizer = tokenizer
    pieces = [stream.put(token_id) for token_id in ids]
    assert [piece for piece in pieces if piece] == list(text) and stream.finish() == ""
    assert processor.decode(ids) == text
