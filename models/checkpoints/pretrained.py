"""`from_pretrained`, `from_backbones`, `save_pretrained` and `push_to_hub` of `VisionLanguageModel`.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct", dtype="bfloat16")
model.save_pretrained("runs/mine", processor=processor)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel

# The functions behind these methods build models, so they import the class that inherits from this one:
# hence the imports inside.


class Pretrained:
    """How a model comes from, and goes to, a folder or the Hub."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> VisionLanguageModel:
        """Load a checkpoint from a folder or a repository id, in eval mode.

        See `models.checkpoints.load.load`.
        """
        from models.checkpoints.load import load

        return load(source, revision, dtype, device)

    @classmethod
    def from_backbones(cls, vision: str | Path, text: str | Path, **options) -> VisionLanguageModel:
        """A new model from a SigLIP tower and a Llama-family model.

        See `models.checkpoints.backbones.from_backbones`.
        """
        from models.checkpoints.backbones import from_backbones

        return from_backbones(vision, text, **options)

    def save_pretrained(
        self: VisionLanguageModel, folder: str | Path, processor=None, card: str | None = None, **options
    ) -> Path:
        """Write config, weights, and processor files and card where given.

        See `models.checkpoints.save.save`.
        """
        from models.checkpoints.save import save

        return save(self, folder, processor, card, **options)

    def push_to_hub(
        self: VisionLanguageModel, repo_id: str, processor=None, card: str | None = None, **options
    ) -> str:
        """Upload to the Hub with a model card; returns the commit's address.

        See `models.checkpoints.push.push`.
        """
        from models.checkpoints.push import push

        return push(self, repo_id, processor, card, **options)
