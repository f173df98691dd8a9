"""Token ids to text as they arrive, cut only where a character is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

_INCOMPLETE = "\ufffd"  # what tokenizers decode half a UTF-8 sequence to


class TextStream:
    """Incremental detokenization of one answer.

    A token may hold part of a character, and what a tokenizer makes of a token may depend on the one before:
    text is decoded from the last piece's first token on, and the part already given is cut off.

        stream = TextStream(tokenizer)
        for token_id in ids:
            print(stream.put(token_id), end="")
        print(stream.finish())
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # tokens of the last piece given, then those not yet given
        self._given = 0  # how many of them are in the text already

    def put(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        self._ids.append(int(token_id))
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text[len(before) :]

    def finish(self) -> str:
        """What is left at the end, without a character that never became complete."""
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        self._ids, self._given = [], 0
        return text[len(before) :].rstrip(_INCOMPLETE)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


def stream_text(tokens: Iterable[Tensor], tokenizer) -> Iterator[str]:
    """Text pieces of a `TokenStream` of one row.

    Raises:
        ValueError: for more than one row: they need a `TextStream` each.
    """
    text = TextStream(tokenizer)
    for column in tokens:
        if column.numel() != 1:
            raise ValueError(f"stream_text prints one answer, got {column.numel()} at once")
        if piece := text.put(int(column)):
            yield piece
    if piece := text.finish():
        yield piece
