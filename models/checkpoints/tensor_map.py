"""Where one of our tensors lies in a foreign checkpoint: a name, and optionally a part of a fused tensor.

Each reader has `stored_tensor(our name) -> StoredTensor`; everything else, in both directions, follows
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoints.errors import CheckpointError, some

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Rows part/parts of the stored tensor `name`, which may carry a leading axis of length one."""

    name: str
    part: int = 0
    parts: int = 1
    leading_axis: bool = False

    def stored_shape(self, ours: Shape) -> Shape:
        """Shape of the whole stored tensor, from the shape of ours."""
        whole = (ours[0] * self.parts, *ours[1:])
        return (1, *whole) if self.leading_axis else whole


StoredTensorOf = Callable[[str], StoredTensor]


def rename(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first prefix of `prefixes` (longest first where they nest) that `name` starts with.

    Raises:
        KeyError: if no prefix fits.
    """
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    raise KeyError(f"no rule renames tensor {name}")


def check_shapes(
    expected: Mapping[str, Shape],
    stored_tensor: StoredTensorOf,
    stored: Mapping[str, Shape],
    is_harmless: Callable[[str], bool],
    where: str,
) -> None:
    """Compare a checkpoint's header with what the model needs, before any weight is allocated.

    Args:
        expected: our tensor names and shapes.
        stored_tensor: where each of ours lies.
        stored: the checkpoint's tensor names and shapes.
        is_harmless: whether a stored tensor that nothing needs may be left out.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: naming missing, wrong-shape or extra tensors, in this order.
    """
    needed = {}
    for name, shape in expected.items():
        source = stored_tensor(name)
        needed[source.name] = source.stored_shape(shape)
    missing = needed.keys() - stored.keys()
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(needed)} tensors that config.json calls for are missing: "
            f"{some(missing)}"
        )
    wrong = [name for name in needed if stored[name] != needed[name]]
    if wrong:
        name = min(wrong)
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(stored[name])}, expected {list(needed[name])} from "
            f"config.json" + (f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else "")
        )
    extra = [name for name in stored.keys() - needed.keys() if not is_harmless(name)]
    if extra:
        raise CheckpointError(
            f"{where}: {len(extra)} tensors have no place in the model that config.json describes: "
            f"{some(extra)}"
        )


def export_tensors(state: Mapping[str, Tensor], stored_tensor: StoredTensorOf) -> dict[str, Tensor]:
    """Our tensors under a checkpoint's own names: the way back, fusing what was split."""
    pieces: dict[str, dict[int, Tensor]] = {}
    leading = set()
    for name, tensor in state.items():
        source = stored_tensor(name)
        pieces.setdefault(source.name, {})[source.part] = tensor
        if source.leading_axis:
            leading.add(source.name)
    out = {}
    for name, parts in pieces.items():
        tensor = parts[0] if len(parts) == 1 else torch.cat([parts[part] for part in sorted(parts)])
        out[name] = tensor[None] if name in leading else tensor
    return out
