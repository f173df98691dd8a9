"""The settings of the world of any look: those of `TrainConfig`, and its own. Nothing here needs torch."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic.dataclasses import dataclass

from recipes.shapes.settings import FROM_SCRATCH, ShapesConfig
from training.config import Data, setting

DATA = "recipes.world"  # `data` of a run on it


@dataclass(frozen=True)
class WorldConfig(ShapesConfig):
    """A run's settings. A ValueError names the flag that is wrong."""

    fixed: ClassVar[tuple[str, ...]] = (*ShapesConfig.fixed, "frozen")

    data: Data = setting(DATA, f"{DATA}: drawn in any look")
    tiles_per_side: int = setting(
        1, "tiles of an image's longer side; 1: not split", 1, 6, scope=FROM_SCRATCH
    )
    curriculum_pictures: int = setting(25_000, "images of a stage until scenes are hardest", 0, 10**9)
    only_words: float = setting(0.42, "share of drawings that show words alone: to learn to read from", 0, 1)
    dense_weight: float = setting(0.3, "weight of the dense vision loss in the second stage", 0, 1_000)
    fact_weight: float = setting(0.5, "weight of the losses on what nouns mean, and where", 0, 1_000)
    frozen: str = setting(
        "", "parameters that stay as they are: a regular expression found in their names, as vision_model|mlp"
    )

    def __post_init__(self):
        super().__post_init__()
        try:
            re.compile(self.frozen)
        except re.error as error:
            said = f"--frozen: expected a regular expression, got {self.frozen!r} ({error})"
            raise ValueError(said) from None
        if not self.rates["vision_model"]:  # the heads of training have the tower's rate: random for ever
            raise ValueError(
                "--vision-lr: expected more than 0, because heads that only training has learn at this rate; "
                "--frozen vision_model keeps the tower as it is"
            )
        if self.vision_steps and self.frozen:
            raise ValueError("--frozen: the vision tower trains alone first; set --vision-pictures 0")


SETTINGS = WorldConfig
