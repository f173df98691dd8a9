"""Dense vision targets: what each patch shows, so that a tower trained from nothing learns to see quickly.

A one-word answer tells a vision tower little. The image generator knows, for each patch, which object
covers it, its colour, where its centre lies, how large it is and how many shapes of the image are like it;
a linear head on the patch features learns to say so. The head exists in training only and is not part of the
saved model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes import COLOURS, MAX_THINGS, NUM_KINDS

_COUNTS = 3 * MAX_THINGS  # one class a count, for each of three ways of being alike


class DenseHead(nn.Module):
    """(N, P, D_v) patch features -> (N, P, kinds + colours + 4 + 3 counts of up to 8) predictions."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, NUM_KINDS + len(COLOURS) + 4 + _COUNTS)
        nn.init.normal_(self.linear.weight, std=width**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


def dense_counts(targets: Tensor) -> Tensor:
    """How many patches there are, with a colour, with an object, and how many counts: (4,), what the sums in
    `dense_loss` are divided by.

    Args:
        targets: (N, P, 9), see `dense_loss`.
    """
    kind, colour, shared = targets[..., 0], targets[..., 1], targets[..., 6:]
    counts = [(kind >= 0).sum(), (colour >= 0).sum(), (kind > 0).sum(), (shared > 0).sum()]
    return torch.stack(counts).double()


def dense_loss(
    predictions: Tensor, targets: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over patches, and what share of object patches was named right.

    Args:
        predictions: (N, P, kinds + colours + 4 + 3 · 8).
        targets: (N, P, 9): kind, colour (-1 on background), dx, dy, log size, is_centre, and how many shapes
            share the name, the colour, both (0 where there is no shape).
        counts: what to divide by, where other ranks have patches too; by default, `dense_counts` of these.
    """
    counts = dense_counts(targets) if counts is None else counts
    patches, coloured, objects, counted = counts.clamp(min=1).float()
    predictions, targets = predictions.flatten(0, 1), targets.flatten(0, 1)
    kinds, colours, geometry, centre, alike = predictions.split(
        (NUM_KINDS, len(COLOURS), 3, 1, _COUNTS), dim=-1
    )
    kind, colour = targets[:, 0].long(), targets[:, 1].long()
    foreground = kind > 0
    kind_loss = F.cross_entropy(kinds, kind, reduction="sum") / patches
    centre_loss = F.binary_cross_entropy_with_logits(centre[:, 0], targets[:, 5], reduction="sum") / patches
    colour_loss = F.cross_entropy(colours, colour, ignore_index=-1, reduction="sum") / coloured
    distance = F.smooth_l1_loss(geometry, targets[:, 2:5], reduction="none").sum(-1)
    geometry_loss = (distance * foreground).sum() / objects
    shared = targets[:, 6:].long() - 1  # -1 where there is nothing to count
    alike = alike.unflatten(-1, (3, MAX_THINGS))  # (N · P, 3, 8)
    count_loss = (
        F.cross_entropy(alike.flatten(0, 1), shared.flatten(), ignore_index=-1, reduction="sum") / counted
    )
    loss = kind_loss + centre_loss + 0.5 * colour_loss + 0.5 * geometry_loss + 0.5 * count_loss
    with torch.no_grad():
        right_kind = ((kinds.argmax(-1) == kind) & foreground).sum() / objects
        right_colour = ((colours.argmax(-1) == colour) & foreground).sum() / objects
        right_count = (alike.argmax(-1) == shared).sum() / counted  # -1 is no argmax
    return loss, {"patch_kind": right_kind, "patch_colour": right_colour, "patch_count": right_count}
