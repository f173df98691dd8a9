"""Which positions of a packed row see each other, as SDPA and flex_attention want to be told.

`documents` (B, T) numbers the documents of a row from 1. Two numbers are special: -1 is padding, which sees
itself alone so that no softmax runs over nothing, and 0 is a prefix that all documents of the row see, as the
image world packs its questions (`shapes/stream.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def document_mask(documents: Tensor) -> Tensor | BlockMask | None:
    """What `LanguageModel.forward` takes as its attention mask: flex_attention's on CUDA, else SDPA's; None
    where plain causal attention shows every document what its mask would."""
    if documents.is_cuda:
        return block_mask(documents)
    return None if is_causal(documents) else dense_mask(documents)


def is_causal(documents: Tensor) -> bool:
    """Whether each row is one document with padding behind it at most: then nothing that counts looks at
    padding or at another document. A GPU would have to be waited for to know."""
    real = documents >= 0
    one = (documents == 1) | ~real
    return bool(one.all() and (real[:, :-1] >= real[:, 1:]).all())


def dense_mask(documents: Tensor) -> Tensor:
    """(B, T) documents → (B, T, T) bool, True where a query (dim 1) sees a key (dim 2)."""
    length = documents.shape[1]
    query, key = documents[:, :, None], documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=documents.device)
    return causal & (key >= 0) & ((query == key) | (key == 0)) | itself


def block_mask(documents: Tensor) -> BlockMask:
    """The same as `dense_mask`, in blocks: those that no query sees into are skipped, not masked."""

    def sees(batch, head, query, key):
        theirs = documents[batch, key]
        same = (documents[batch, query] == theirs) | (theirs == 0)
        return ((query >= key) & (theirs >= 0) & same) | (query == key)

    rows, length = documents.shape
    return create_block_mask(sees, rows, None, length, length, device=documents.device)
