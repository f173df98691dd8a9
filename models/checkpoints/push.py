"""Uploading a checkpoint with its card to the Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi

from models.checkpoints.card import model_card
from models.checkpoints.errors import CheckpointError
from models.checkpoints.locate import HUB_ERRORS, hub_sentence
from models.checkpoints.save import save

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel


def push(
    model: VisionLanguageModel,
    repo_id: str,
    processor=None,
    card: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Save, then upload in one commit; the repository is made if need be.

    Args:
        model, processor: as in `models.checkpoints.save.save`.
        repo_id: owner/name.
        card: text of README.md; None writes `model_card` with what the model itself tells.
        private: for a repository that is made now.
        revision: branch to commit to.
        commit_message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: if it cannot be saved, or the Hub does not take it.
    """
    if card is None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        card = model_card(repo_id, model.config, parameters)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "model", processor, card)
        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        except HUB_ERRORS as error:
            raise CheckpointError(hub_sentence(error, repo_id, revision, "the upload")) from error
    return commit.commit_url
