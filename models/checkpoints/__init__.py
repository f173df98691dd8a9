"""Checkpoints: finding, reading and writing them in the Hub's formats."""

from models.checkpoints.files import CheckpointError

__all__ = ["CheckpointError"]
