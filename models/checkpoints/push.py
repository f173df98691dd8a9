"""Uploading a checkpoint with its card to the Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi

from models.checkpoints.card import addressed, model_card
from models.checkpoints.hub import one_sentence
from models.checkpoints.save import CARD, MAX_SHARD_BYTES, is_checkpoint_file, save

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
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Save, then upload in one commit; the repository is made if need be. What the repository has of another
    model is deleted in the same commit, by the rule of `save`: other shards and formats of the weights, and
    with `processor` other files of a processor, old chat templates among them. All else in it stays.

    Args:
        model, processor, max_shard_bytes: as in `models.checkpoints.save.save`.
        repo_id: owner/name.
        card: text of README.md; None takes the one in the folder that the model was loaded from, with this
            repository's name in its commands, or leaves the one that the repository has, or else writes
            `model_card` with what the model itself tells.
        private: for a repository that is made now.
        revision: branch to commit to, made if need be.
        commit_message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: if it cannot be saved, or the Hub does not take it.
    """
    if card is None and (kept := card_of_origin(model)) is not None:
        card = addressed(kept, repo_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "model", processor, card, max_shard_bytes)
        api = HfApi()
        with one_sentence(repo_id, revision, "the upload"):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            held = api.list_repo_files(repo_id, revision=revision)
            if card is None and CARD not in held:
                parameters = sum(parameter.numel() for parameter in model.parameters())
                text = model_card(repo_id, model.config, parameters, with_processor=processor is not None)
                (folder / CARD).write_text(text, encoding="utf-8")
            # Of these the client keeps what is uploaded.
            replaced = [
                path for path in held if is_checkpoint_file(path.split("/")[0], processor is not None)
            ]
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=replaced or None,
            )
    return commit.commit_url


def card_of_origin(model: VisionLanguageModel) -> str | None:
    """README.md of the folder that a model was loaded from, or None."""
    if model.origin is None or not (model.origin.folder / CARD).is_file():
        return None
    return (model.origin.folder / CARD).read_text(encoding="utf-8")
