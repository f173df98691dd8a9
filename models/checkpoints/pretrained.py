"""`from_pretrained`, `from_backbones`, `save_pretrained` and `push_to_hub` of `VisionLanguageModel`.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct", dtype="bfloat16")
model.save_pretrained("runs/mine", processor=processor)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from models.checkpoints.locate import Origin
    from models.vision_language_model import VisionLanguageModel

# The functions behind these methods build models, so they import the class that inherits from this one:
# hence the imports inside.


class Pretrained:
    """How a model comes from, and goes to, a folder or the Hub.

    origin: where it was loaded from; None for one that was not.
    generation_config: what its generation_config.json said besides token ids; saving writes it again. Nothing
        here is applied by `generate`, whose options say everything.
    """

    origin: Origin | None = None
    generation_config: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        revision: str | None = None,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
    ) -> VisionLanguageModel:
        """Load a checkpoint from a folder or a repository id, in eval mode; as on the command line in float32
        on a CPU and in bfloat16 on CUDA. dtype="stored" keeps the checkpoint's own, to save it again.

        `generate` stops at every id that config.json, generation_config.json and the tokenizer's files beside
        them call the end. nanoVLM keeps its tokenizer elsewhere: it is read where `lm_tokenizer` is a folder
        in the checkpoint's; where it is another repository the model knows no end, so give `generate` the
        `stop_token_ids` of `data.processor.Processor`.

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

    def save_pretrained(self, folder: str | Path, processor=None, card: str | None = None, **options) -> Path:
        """Write config, weights, and processor files and card where given.

        See `models.checkpoints.save.save`.
        """
        from models.checkpoints.save import save

        return save(cast("VisionLanguageModel", self), folder, processor, card, **options)

    def push_to_hub(self, repo_id: str, processor=None, card: str | None = None, **options) -> str:
        """Upload to the Hub with a model card; returns the commit's address.

        See `models.checkpoints.push.push`.
        """
        from models.checkpoints.push import push

        return push(cast("VisionLanguageModel", self), repo_id, processor, card, **options)
