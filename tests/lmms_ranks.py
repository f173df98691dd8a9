"""The drawn task of tests/test_lmms.py on the ranks that torchrun starts.

torchrun --nproc-per-node 2 -m tests.lmms_ranks drawn.parquet FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from eval.lmms import run_lmms
from inference.checkpoint import open_checkpoint, pick_device
from training.distributed import Ranks


def main(data: str, folder: str) -> None:
    root = Path(__file__).resolve().parent
    ranks = Ranks(pick_device("cpu"))
    checkpoint = open_checkpoint(root.parent / "checkpoints" / "ocelli-shapes", device="cpu", dtype="float32")
    source = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": data}}}
    run_lmms(
        [{"task": "ocelli_drawn"} | source],
        checkpoint,
        batch_size=3,
        output=Path(folder),
        include_path=root / "fixtures" / "lmms",
        progress=False,
    )
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
