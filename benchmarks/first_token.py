"""Seconds to the first word of an answer about an image, and what of them each part takes.

    python -m benchmarks.first_token                              # SmolVLM-256M's shape, 1 and 17 tiles
    python -m benchmarks.first_token --precisions float32 --systems ours-fast,openvino --tiles 1 --rounds 9
    python -m benchmarks.first_token --quick
    python -m benchmarks.first_token --save first-token-cpu-zen4
    python -m benchmarks.picture benchmarks/results/first-token-cpu-zen4.json assets/first-token.svg

Ocelli with the steps that a user gets, its eager reference, transformers, and, where requirements-bench.txt
is installed, OpenVINO and llama.cpp. OpenVINO has the vision tower and the projector alone, llama.cpp the
language model alone, with a prompt of the same length: what they lack is a dash.

    prepare      a photograph of 12 megapixels read and cut, beside what Pillow needs for the same sizes; it
                 comes on top of the first token, which counts from the model's inputs
    vision       the tower and the projector
    prefill      the language model up to the first logits
    draft        the first word of a draft (`generate.py --draft`), where one is made
    with draft   the first token of the answer after that draft
    alike        the least cosine between the features of a position and those of our eager float32 tower

Each ratio is of what stands left of it. Weights are random and the same in all systems, shapes are real, and
no image comes twice. Each system runs in a process of its own, all in turn, medians are shown, the last line
is JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import (
    PRECISIONS,
    Handler,
    base_parser,
    finish,
    fit_together,
    integers,
    median,
    memory_peak,
    names,
    reset_peak,
    shared_setup,
    take_turns,
)
from benchmarks.photograph import PREPARE, save_photograph
from benchmarks.shapes import SHAPES, build_ours, prompt_tokens, tile_pixels
from benchmarks.systems import READERS

PILLOW = "pillow"
SYSTEMS = (*READERS, PILLOW)
NO_INT8 = ("ours-eager", "transformers")
# What a system's reply calls the seconds of a row.
PARTS = {
    "prepare_seconds": "prepare",
    "vision_seconds": "vision",
    "prefill_seconds": "prefill",
    "first_token_seconds": "total",
    "draft_seconds": "draft",
    "with_draft_seconds": "with_draft",
}
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "tiles": "tiles",
    "prompt_tokens": "prompt:,",
    "prepare_seconds": "prepare s:.3f",
    "prepare_over_pillow": "/ Pillow:.2f",
    "vision_seconds": "vision s:.3f",
    "vision_over_openvino": "/ OpenVINO:.2f",
    "prefill_seconds": "prefill s:.3f",
    "prefill_over_llama": "/ llama.cpp:.2f",
    "first_token_seconds": "first token s:.3f",
    "first_token_over_transformers": "/ transformers:.2f",
    "draft_seconds": "draft s:.3f",
    "draft_over_first_token": "/ first token:.2f",
    "with_draft_seconds": "with draft s:.3f",
    "with_draft_over_first_token": "/ first token:.2f",
    "least_cosine": "alike:.6f",
}
# A ratio of a row -> what of it is divided by that of which other system in the same precision.
RATIOS = {
    "vision_over_openvino": ("vision_seconds", "openvino"),
    "prefill_over_llama": ("prefill_seconds", "llama.cpp"),
    "first_token_over_transformers": ("first_token_seconds", "transformers"),
    "prepare_over_pillow": ("prepare_seconds", PILLOW),
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--precisions", type=names(*PRECISIONS), metavar="P,P", help="of the weights (default all)")
    add("--systems", type=names(*SYSTEMS), metavar="S,S", help=f"out of {', '.join(SYSTEMS)} (default all)")
    add("--tiles", type=integers, default=[1, 17], metavar="N,N", help="tiles of the image (default 1,17)")
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tiles = 1, settings.tiles[:1]
    cpu = settings.device == "cpu"
    settings.precisions = settings.precisions or ["float32", "bfloat16", *(["int8"] if cpu else [])]
    settings.systems = settings.systems or list(SYSTEMS)
    limit = SHAPES[settings.shape].text.max_position_embeddings
    fitting = [
        tiles for tiles in settings.tiles if tiles > 0 and prompt_tokens(settings.shape, tiles) < limit
    ]
    if not fitting or fitting != settings.tiles:
        parser.error(f"--tiles: expected numbers of tiles that fit {limit} positions, got {settings.tiles}")
    return settings


def make_setups(settings: argparse.Namespace, folder: str) -> list[dict]:
    """One for each child: each system in each precision that it has."""
    shared = shared_setup(settings) | {"folder": folder}
    shared["longest"] = max(prompt_tokens(settings.shape, tiles) for tiles in settings.tiles) + 8
    systems = [
        (system, precision)
        for precision in settings.precisions
        for system in settings.systems
        if system != PILLOW and (precision != "int8" or system not in NO_INT8)
    ]
    systems += [(PILLOW, None)] if PILLOW in settings.systems else []
    return [{"system": system, "precision": precision, **shared} for system, precision in systems]


def photograph(folder: str) -> Path:
    return Path(folder) / "photograph.jpg"


def reference(folder: str) -> Path:
    return Path(folder) / "features.pt"


@torch.no_grad()
def save_reference(shape: str, path: Path) -> None:
    """The features (1, S, D) of one tile from our eager tower in float32."""
    torch.save(build_ours(shape, torch.float32, "cpu").encode_images(tile_pixels(shape, 1)), path)


def make_handler(setup: dict) -> Handler:
    """The child's side: the first tokens of one system, after one that does not count."""
    torch.set_num_threads(setup["threads"])
    device, folder, prepare = setup["device"], setup["folder"], PREPARE.get(setup["system"])
    system = None if setup["system"] == PILLOW else READERS[setup["system"]](setup)
    info: dict = {}
    if system is not None:
        info = dict(system.info)
        system.first_token(1, image=1000)
        features = system.features(tile_pixels(setup["shape"], 1).to(device))
        if features is not None:
            cosines = F.cosine_similarity(features.float().cpu(), torch.load(reference(folder)), dim=-1)
            info["least_cosine"] = cosines.min().item()

    def handle(job: dict) -> dict:
        reset_peak(device)
        reply = system.first_token(job["tiles"], image=job["round"]) if system else {}
        reply |= {"peak_bytes": memory_peak(device), "info": info}
        if prepare:
            reply["prepare"] = prepare(photograph(folder), setup["shape"], job["tiles"] > 1)
        return reply

    return handle


def make_rows(
    settings: argparse.Namespace, setups: list[dict], replies: list[list[list[dict]]]
) -> list[dict]:
    """Medians of every system that is still there, for each number of tiles."""
    rows = []
    for setup, own in zip(setups, replies, strict=True):
        for tiles, rounds in zip(settings.tiles, own, strict=True):
            if not rounds:
                continue
            seconds = {key: [reply.get(part) for reply in rounds] for key, part in PARTS.items()}
            rows.append(
                {
                    **{key: setup[key] for key in ("system", "precision", "device", "shape")},
                    "tiles": tiles,
                    "prompt_tokens": prompt_tokens(setup["shape"], tiles),
                    **{key: median(values) for key, values in seconds.items()},
                    "seconds_of_rounds": {key: values for key, values in seconds.items() if any(values)},
                    "peak_bytes": max(reply["peak_bytes"] for reply in rounds),
                    **rounds[0]["info"],
                }
            )
    for row in rows:
        for name, (key, system) in RATIOS.items():
            row[name] = ratio(row, rows, key, system)
        for key in ("draft_seconds", "with_draft_seconds"):
            made, whole = row[key], row["first_token_seconds"]
            row[key.replace("seconds", "over_first_token")] = made / whole if made else None
    return rows


def ratio(row: dict, rows: list[dict], key: str, system: str) -> float | None:
    """What a row needs of what that system needs for the same; None where either has none."""
    for other in rows:
        same_precision = other["precision"] in (row["precision"], None)
        if other["system"] == system and other["tiles"] == row["tiles"] and same_precision:
            return row[key] / other[key] if row[key] and other[key] else None
    return None


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="ocelli-bench-") as folder:
        save_photograph(photograph(folder))
        save_reference(settings.shape, reference(folder))
        setups = make_setups(settings, folder)
        jobs = [{"tiles": tiles} for tiles in settings.tiles]
        replies, failed = take_turns(
            make_handler, setups, lambda setup: jobs, settings.rounds, fit_together(setups)
        )
    print(f"{settings.shape} on {settings.device}, {settings.threads} threads: seconds to the first token")
    finish("first_token", settings, COLUMNS, make_rows(settings, setups, replies), left_out=failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
