"""Data that disappear while a run reads them: nothing trained is lost, nothing is skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import train
from tests.runs import curve, flags, named, prepared, settings_in, start, write_rows
from tests.waiting import PATIENCE, wait_for
from training.metrics import Metrics
from training.state import FOLDER, states

STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("lost"))


def settings(folder, output: str, **more) -> dict:
    return settings_in(folder, output, **({"steps": STEPS, "save_every": STEPS} | more))


def lose(path: Path, ranks: int, made: dict, there) -> list:
    """The exits of ranks whose `path` is moved away once `there` is true of what metrics.jsonl holds. They
    wait for that: they could have ended before anybody has looked."""
    lines, write = Path(made["output"], "metrics.jsonl"), Metrics.write

    def reached() -> bool:
        return lines.exists() and there(lines.read_bytes())

    def waiting(self, row):
        write(self, row)
        wait_for(lambda: not (reached() and path.exists()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "write", waiting)
        processes = start(ranks, **made)
    assert wait_for(lambda: reached() or not all(process.is_alive() for process in processes)) and reached()
    away = path.rename(path.with_name("away"))
    for process in processes:
        process.join(PATIENCE)
    away.rename(path)
    return [process.exitcode for process in processes]


def saved_step(output: Path) -> int:
    """The step of the only saved state, which is the latest that was trained."""
    (state,) = states(output / FOLDER)
    done = curve(output)[-1][0]
    assert state.name == f"step-{done:08d}"
    return done


@pytest.mark.slow
@pytest.mark.parametrize("ranks, workers", [(1, 2), (2, 0)])
def test_a_dataset_that_disappears(folder, capfd, ranks, workers):
    """The run saves and leaves; the same command resumes, and is as one that was never disturbed."""
    name, made = f"lost-{ranks}", settings(folder, f"lost-{ranks}", workers=workers)
    exits = lose(folder / "rows.jsonl", ranks, made, lambda lines: lines.count(b"\n") > 5)
    said = capfd.readouterr()
    assert exits == [2] * ranks, said.err
    assert "Traceback" not in said.err
    assert "reading the data failed" in said.err and "rows.jsonl" in said.err
    assert "rerun the same command" in said.out
    assert 5 < saved_step(folder / name) < STEPS
    if ranks == 1:
        train.main(flags(**settings(folder, name)))
        train.main(flags(**settings(folder, f"{name}-whole")))
        assert curve(folder / name) == curve(folder / f"{name}-whole")


@pytest.mark.slow
def test_held_out_data_that_disappear(folder, capfd):
    """Found out when they are looked at: what was trained is saved, on all ranks."""
    held = write_rows(folder / "held.jsonl", 8)
    more = {"eval_data": [{"path": str(held), "name": "held"}], "eval_pictures": 8, "eval_every": 10}
    exits = lose(held, 2, settings(folder, "held", **more), lambda lines: b"eval_loss" in lines)
    said = capfd.readouterr().err
    assert exits == [2, 2], said
    assert "Traceback" not in said and "reading the data failed" in said
    assert saved_step(folder / "held") % 10 == 0


@pytest.mark.slow
def test_the_rate_is_that_of_all_rows(folder, tmp_path, capfd):
    """More than allowed, which only all ranks show; what was trained on the others is kept."""
    write_rows(tmp_path / "rows.jsonl", 40)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    for number in (5, 17, 30):
        lines[number] = json.dumps(json.loads(lines[number]) | {"answer": ""})
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    made = settings_in(folder, "unused") | {"data": named(tmp_path / "rows.jsonl"), "steps": 0, "epochs": 1}
    processes = start(2, **made | {"output": str(tmp_path / "out"), "max_drop_rate": 0.05})
    for process in processes:
        process.join(PATIENCE)
    said = capfd.readouterr().err
    assert [process.exitcode for process in processes] == [2, 2] and "3 of 40 rows" in said
    assert (tmp_path / "out/model.safetensors").exists()
