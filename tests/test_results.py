"""The one store of results: what a killed run left is mended; what is no result is left alone."""

from __future__ import annotations

import pytest

from inference.checkpoint import RequestError
from inference.results import ResultsFile


@pytest.fixture
def results(tmp_path) -> ResultsFile:
    return ResultsFile(
        tmp_path / "a[b].jsonl", "line", lambda record: "answer" in record or "error" in record
    )


def test_ranks_and_runs_make_one_file(results):
    for rank, lines in enumerate(([3, 1], [2, 3], [4])):
        with results.appending(rank) as write:
            for line in lines:
                write({"line": line, "answer": f"{rank} \ud800 é"})
    assert [record["line"] for record in results] == [3, 1, 2, 3, 4]
    results.compact(errors=True)
    assert [(record["line"], record["answer"][0]) for record in results] == [
        (3, "0"), (1, "0"), (2, "1"), (4, "2")
    ]  # fmt: skip
    assert list(results.path.parent.iterdir()) == [results.path]
    results.compact(errors=True, ordered=True)
    assert [record["line"] for record in results] == [1, 2, 3, 4]
    assert results.path.read_text("utf-8").splitlines()[0] == '{"line": 1, "answer": "0 \\ud800 é"}'


@pytest.mark.parametrize("half", ["", "{", '{"li', '{"line": 3, "ans', '{"line": 3, "answer": "c"}'])
def test_a_killed_run_is_mended(results, half):
    whole = '{"line": 1, "answer": "a"}\n'
    results.path.write_text(whole + '{"line": 2, "error": "no such file"}\n' + half)
    results.compact(errors=False)
    assert results.path.read_text() == whole + (half + "\n" if half.endswith("}") else "")


@pytest.mark.parametrize("foreign", ["milk", '{"a": 1}', '{"line": 1}\n', "[" * 100_000, "3\n"])
def test_what_is_no_result_is_left_alone(results, foreign):
    results.path.write_text('{"line": 1, "answer": "a"}\n' + foreign)
    before = results.path.read_bytes()
    with pytest.raises(RequestError, match="earlier run"):
        results.compact(errors=False)
    assert results.path.read_bytes() == before
