"""Families of type that drawings are printed in: files of packages that requirements.txt names, and
of matplotlib. README.md has their licences. Whole families are held out."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

from recipes.world import looks

# fmt: off
_PACKAGES = {  # fontpkg-NAME on PyPI
    looks.TRAIN: (
        "open-sans", "lato", "montserrat", "inter", "poppins", "oswald", "raleway", "nunito", "work-sans",
        "quicksand", "archivo-narrow", "barlow-condensed", "exo-2", "comfortaa", "pt-sans", "fira-sans",
        "arimo", "josefin-sans", "dosis", "orbitron", "roboto-condensed", "league-spartan",
        "merriweather", "playfair-display", "lora", "pt-serif", "libre-baskerville", "eb-garamond",
        "crimson-text", "roboto-slab", "arvo", "bitter", "abril-fatface", "alfa-slab-one", "cinzel",
        "bodoni-moda",
        "ibm-plex-mono", "jetbrains-mono", "source-code-pro", "space-mono", "inconsolata", "press-start-2p",
        "amiri", "cormorant-garamond", "yanone-kaffeesatz", "gravitas-one", "rowdies",
        "bebas-neue", "anton", "bungee", "luckiest-guy", "righteous", "black-ops-one", "russo-one",
        "unbounded", "lilita-one", "syne", "chakra-petch",
        *(  # scripts take longest to learn
            "dancing-script", "pacifico", "caveat", "lobster", "great-vibes", "indie-flower",
            "kalam", "oleo-script", "shadows-into-light", "delius", "zeyada", "permanent-marker",
        ) * 2,
    ),
    looks.HELDOUT: (
        "rubik", "cabin", "dm-sans", "titillium-web", "teko", "varela-round",
        "spectral", "vollkorn", "zilla-slab", "dm-serif-display",
        "fira-code", "roboto-mono", "share-tech",
        "satisfy", "yellowtail", "lobster-two",
        "titan-one", "fjalla-one", "changa-one",
    ),
}
# fmt: on
_OF_MATPLOTLIB = {
    looks.TRAIN: ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmtt10", "cmr10")
}
_FACE = re.compile(r"[-_](Regular|Bold|Italic|BoldItalic|Light|Black)\.ttf$|^[^-]+\.ttf$|\[")


@cache
def families(split: str) -> tuple[tuple[str, ...], ...]:
    """Each family's faces, as `drawing.word_mask` takes them. FileNotFoundError names what is missing."""
    found = []
    for package in _PACKAGES[split]:
        folder = looks.package_file(f"fontpkg_{package.replace('-', '_')}/files")
        files = sorted(file for file in folder.iterdir() if _FACE.search(file.name))
        found.append(tuple(face for file in files for face in _weights(file, split)))
    for stem in _OF_MATPLOTLIB.get(split, ()):
        folder = looks.package_file(f"matplotlib/mpl-data/fonts/ttf/{stem}.ttf").parent
        found.append(
            tuple(str(file) for file in sorted(folder.glob(f"{stem}*.ttf")) if "Display" not in file.name)
        )
    return tuple(found)


def _weights(file: Path, split: str) -> tuple[str, ...]:
    """A file's faces. What is held out is drawn by programs, too, which know the first alone."""
    varies = "wght" in file.name and split == looks.TRAIN
    return (str(file), f"{file}@700") if varies else (str(file),)


def face(rng: random.Random, split: str) -> str:
    """A face of any family, each as often as the others."""
    return rng.choice(rng.choice(families(split)))
