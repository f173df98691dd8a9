"""config.json -> the reader of its family.

A reader is a module of pure functions: `recognises(config)`, `read_config(config, generation) -> VLMConfig`,
`tensor_map(stored names) -> (our name -> StoredTensor)`, `is_harmless(stored name)`, and
`refine(config, read) -> VLMConfig` for what only the tensors tell. A new family is one more module here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from models.checkpoints import idefics3, nanovlm
from models.checkpoints.errors import CheckpointError

READERS = (idefics3, nanovlm)


def choose_reader(config: Mapping, where: str) -> ModuleType:
    """The reader for a config.json.

    Raises:
        CheckpointError: for an architecture that none of them reads, naming those that are read.
    """
    for reader in READERS:
        if reader.recognises(config):
            return reader
    kind = config.get("model_type")
    got = f"model_type {kind!r}" if kind is not None else f"no model_type, with keys {sorted(config)[:4]}"
    supported = "; ".join(reader.FAMILY for reader in READERS)
    raise CheckpointError(
        f"{where}: unsupported architecture ({got}); supported are {supported}, and bare SigLIP and "
        f"Llama backbones "
        f"through VisionLanguageModel.from_backbones"
    )
