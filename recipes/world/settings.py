"""The settings of the world of any look: those of `TrainConfig`, and its own. Nothing here needs torch."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from recipes.shapes.settings import FROM_SCRATCH, ShapesConfig
from training.config import Data, setting

DATA = "recipes.world"  # `data` of a run on it


@dataclass(frozen=True)
class WorldConfig(ShapesConfig):
    """A run's settings. A ValueError names the flag that is wrong."""

    data: Data = setting(DATA, f"{DATA}: drawn in any look")
    tiles_per_side: int = setting(
        1, "tiles of an image's longer side; 1: not split", 1, 6, scope=FROM_SCRATCH
    )
    curriculum_pictures: int = setting(25_000, "images of a stage until scenes are hardest", 0, 10**9)
    dense_weight: float = setting(0.3, "weight of the dense vision loss in the second stage", 0, 1_000)
    fact_weight: float = setting(0.5, "weight of the losses on what nouns mean, and where", 0, 1_000)


SETTINGS = WorldConfig
