"""Tensors of a model under the names that its family's files have for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.checkpoints.save import Pending, placed
from models.checkpoints.weights import StoredTensorOf


def export_tensors(state: Mapping[str, Tensor], places: StoredTensorOf) -> dict[str, Tensor]:
    """`placed`, of tensors that are there."""
    known = {name: Pending(tuple(one.shape), one.dtype, one.detach) for name, one in state.items()}
    return {name: one.make().reshape(one.shape) for name, one in placed(known, places).items()}
