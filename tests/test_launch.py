"""configs/launch: the examples are well-formed, and what they run runs here, as two ranks of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.runs import SETTINGS, curve, tiny_checkpoint, write_rows
from tests.waiting import PATIENCE, free_port

ROOT = Path(__file__).resolve().parent.parent
LEFT_WITHIN = 60  # seconds from the death of a rank; longer where the run takes long to begin
SLURM, SKY = ROOT / "configs/launch/slurm.sh", ROOT / "configs/launch/sky.yaml"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A checkout with a tiny recipe, and stand-ins for what Slurm brings: one node, this one."""
    folder = tmp_path_factory.mktemp("launch")
    for name in ("train.py", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    recipe = SETTINGS | {"steps": 3, "data": str(write_rows(folder / "rows.jsonl"))}
    recipe |= {"init_from": str(tiny_checkpoint(folder / "tiny"))}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "long.yaml").write_text(yaml.safe_dump(recipe | {"steps": 1_000_000}))
    (folder / "bin").mkdir()
    for name, text in (("srun", 'exec "$@"'), ("scontrol", "echo 127.0.0.1")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def start(folder: Path, command: list[str], **env: str) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())} | env
    env["PATH"] = f"{folder / 'bin'}:{env['PATH']}"
    said = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **said)


def end_of(process: subprocess.Popen, seconds: float) -> str:
    """What all its processes said, once they have ended by themselves.

    Raises:
        subprocess.TimeoutExpired: they had not after so long, and were killed.
    """
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def pid_of_rank(rank: int, port: str) -> int:
    """The process that torchrun started as that rank, by its environment."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and f"MASTER_PORT={port}".encode() in variables:
            return int(entry.parent.name)
    raise AssertionError(f"no process of rank {rank}")


def test_slurm(here):
    """The whole script, which has to parse for that."""
    flags = ["tiny.yaml", "--parallel", "fsdp", "--output", "runs/slurm"]
    process = start(
        here,
        ["bash", str(SLURM), *flags],
        **{"SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"},
    )
    said = end_of(process, 2 * PATIENCE)
    assert process.returncode == 0, said
    assert "on 2 x cpu" in said and len(curve(here / "runs/slurm")) == 3


def test_sky_and_a_rank_that_dies(here):
    """The others leave, and which rank it was, and what of, can be read."""
    task = yaml.safe_load(SKY.read_text(encoding="utf-8"))
    assert task.keys() == {"name", "num_nodes", "workdir", "envs", "resources", "file_mounts", "setup", "run"}
    assert (ROOT / task["envs"]["RECIPE"]).exists() and task["envs"]["OUTPUT"].startswith("/runs/")
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    port = str(free_port())
    given = {"RECIPE": "long.yaml", "OUTPUT": "runs/sky", "MASTER_PORT": port}
    given |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    process = start(here, ["bash", "-c", task["run"]], **given, SKYPILOT_NUM_GPUS_PER_NODE="2")
    start_up = time.monotonic()
    while not (here / "runs/sky/metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    start_up = time.monotonic() - start_up
    os.kill(pid_of_rank(1, port), signal.SIGKILL)
    said = end_of(process, max(LEFT_WITHIN, 3 * start_up))
    assert process.returncode != 0
    assert "train.py: error: rank 0 of 2: another rank has left" in said
    cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in cause and "SIGKILL" in cause
    assert "Traceback" not in said[: said.index("ChildFailedError")].rsplit("Traceback", 1)[0]
