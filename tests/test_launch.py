"""configs/launch: Slurm's script runs here, as two ranks of torchrun, and SkyPilot's starts the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.runs import SETTINGS, tiny_checkpoint, write_rows
from tests.waiting import PATIENCE, free_port

ROOT = Path(__file__).resolve().parent.parent
LEFT_WITHIN = 60  # seconds from the death of a rank; longer where the run takes long to begin


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def pid_of_rank(rank: int, job: str) -> int:
    """The process that torchrun started as that rank of a job, by its environment."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"RANK={rank}".encode(), f"TORCHELASTIC_RUN_ID={job}".encode()} <= set(variables):
            return int(entry.parent.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_slurm_and_a_rank_that_dies(tmp_path):
    """The others leave, and which rank it was, and why, can be read."""
    for name in ("train.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name, text in (("srun", 'exec "$@"'), ("scontrol", "echo 127.0.0.1")):  # what Slurm brings
        script(tmp_path / "bin" / name, text)
    recipe = SETTINGS | {"steps": 1_000_000, "data": str(write_rows(tmp_path / "rows.jsonl"))}
    recipe |= {"init_from": str(tiny_checkpoint(tmp_path / "tiny")), "output": "runs/slurm"}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(recipe))
    port = str(free_port())
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": port, "SLURM_JOB_NODELIST": "here"}
    env |= {"SLURM_JOB_ID": port, "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    begin = time.monotonic()
    process = subprocess.Popen(
        ["bash", str(ROOT / "configs/launch/slurm.sh"), "long.yaml", "--parallel", "fsdp"],
        cwd=tmp_path,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        while not (tmp_path / "runs/slurm/metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < begin + 2 * PATIENCE
            time.sleep(0.05)
        start_up = time.monotonic() - begin
        os.kill(pid_of_rank(1, job=port), signal.SIGKILL)
        said, _ = process.communicate(timeout=max(LEFT_WITHIN, 3 * start_up))
    finally:
        if process.poll() is None:
            process.terminate()  # which ends the ranks, too
            process.communicate()
    assert process.returncode != 0
    assert "on 2 x cpu" in said and "train.py: error: rank 0 of 2: another rank has left" in said
    cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in cause and "SIGKILL" in cause
    assert "Traceback" not in said[: said.index("ChildFailedError")].rsplit("Traceback", 1)[0]


def test_sky_starts_the_same_on_each_of_its_machines(tmp_path):
    task = yaml.safe_load((ROOT / "configs/launch/sky.yaml").read_text(encoding="utf-8"))
    assert task.keys() == {"name", "num_nodes", "workdir", "envs", "resources", "file_mounts", "setup", "run"}
    assert (ROOT / task["envs"]["RECIPE"]).exists() and task["envs"]["OUTPUT"].startswith("/runs/")
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    script(tmp_path / ".venv/bin/python", "printf '%s\\n' \"$@\"")
    env = os.environ | task["envs"] | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1"}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    command = ["bash", "-c", task["run"]]
    said = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    module, *arguments = said.splitlines()[1:]
    given = parse_args(arguments)
    assert module == "torch.distributed.run" and given.training_script == "train.py"
    assert (given.nnodes, given.node_rank, given.nproc_per_node, given.master_addr) == (
        "2",
        1,
        "8",
        "10.0.0.1",
    )
    assert given.training_script_args[0] == task["envs"]["RECIPE"]
    assert given.training_script_args[-2:] == ["--output", task["envs"]["OUTPUT"]]
