"""JSON lines: which files are which split, where images are looked for, how long a line may be."""

from __future__ import annotations

import json
import tracemalloc

import datasets
import pytest

from data import lines
from data.datasets import open_datasets
from data.errors import DatasetError
from data.row_schemas import BAD_CONVERSATION
from data.sources import open_rows
from eval.metrics import find_metric
from eval.rows import DataConfig, data_task
from tests.rows import loader, png


def write(path, *names: str, **more) -> None:
    """A row for each name, which is its answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": "which?", "answer": n} | more) + "\n" for n in names))


def answers(path, split: str, streaming: bool = False) -> list[str]:
    rows, _ = open_rows(str(path), None, split, streaming)
    found = [row for file in range(rows.num_files) for row in rows.open(file, 0)] if streaming else list(rows)
    return [row["answer"] for row in found]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name, column", [("metadata.jsonl", "file_name"), ("rows.jsonl", "image")])
@pytest.mark.parametrize("folder", ["train", "training", "my-train-1"])
def test_images_beside_the_rows_of_a_split(tmp_path, folder, name, column, streaming):
    write(tmp_path / folder / name, "a", **{column: "a.png"})
    (tmp_path / folder / "a.png").write_bytes(png())
    write(tmp_path / "test" / name, "b", **{column: "b.png"})
    (batch,) = loader(
        open_datasets([{"path": str(tmp_path), "streaming": streaming}]), epochs=1, batch_size=1
    )
    assert "pixel_values" in batch


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "train, validation",
    [
        ("train.jsonl", "validation.jsonl"),
        ("mine-train-1.jsonl", "mine.dev.jsonl"),
        ("Train_2.jsonl", "valid 1.jsonl"),
        ("training.jsonl", "val/rows.jsonl"),
        ("train/a.jsonl", "dev-set/metadata.jsonl"),
        ("train/train.jsonl", "validation/train.jsonl"),
    ],
)
def test_held_out_rows_are_those_of_their_split(tmp_path, train, validation, streaming):
    write(tmp_path / train, "a", "b")
    write(tmp_path / validation, "c")
    write(tmp_path / "heldout.jsonl", "d")  # where names name splits, what names none belongs to none
    assert answers(tmp_path, "train", streaming) == ["a", "b"]
    for asked in ("validation", "val"):
        assert answers(tmp_path, asked, streaming) == ["c"]
    with pytest.raises(DatasetError, match=r"no split 'test'; it has (train, validation|validation, train)$"):
        answers(tmp_path, "test", streaming)


def test_slices_are_of_one_split(tmp_path):
    write(tmp_path / "train.jsonl", "a", "b")
    write(tmp_path / "test.jsonl", "c", "d")
    write(tmp_path / "own" / "rows.jsonl", "e", "f")
    assert answers(tmp_path, "train[1:]") == ["b"] and answers(tmp_path, "eval[:50%]") == ["c"]
    assert answers(tmp_path, "own[1:]") == ["f"]  # a folder of any name


def test_files_that_name_no_split_are_all_train(tmp_path):
    write(tmp_path / "a.jsonl", "a")
    write(tmp_path / "contest.jsonl", "b")
    (tmp_path / "train").mkdir()  # of images only
    assert answers(tmp_path, "train") == ["a", "b"]
    with pytest.raises(DatasetError, match=r"no split 'validation'; it has train$"):
        answers(tmp_path, "validation")


@pytest.mark.parametrize("name", ["rows.jsonl", "test.jsonl", "list.json", "*.jsonl"])
def test_files_named_one_by_one_are_train(tmp_path, name):
    write(tmp_path / "rows.jsonl", "a")
    write(tmp_path / "test.jsonl", "b")
    (tmp_path / "list.json").write_text(json.dumps([{"question": "which?", "answer": "c"}]))
    expected = {"rows.jsonl": ["a"], "test.jsonl": ["b"], "list.json": ["c"], "*.jsonl": ["a", "b"]}[name]
    assert answers(tmp_path / name, "train") == expected
    for split in ("test", "test[:1]"):
        with pytest.raises(DatasetError, match="no split 'test'; it has train, as all files that are named"):
            answers(tmp_path / name, split)


def test_rows_beside_held_out_ones_are_train(tmp_path):
    write(tmp_path / "rows.jsonl", "a")
    write(tmp_path / "test.jsonl", "b")
    write(tmp_path / "val" / "metadata.jsonl", "c")
    assert [answers(tmp_path, split) for split in ("train", "test", "val")] == [["a"], ["b"], ["c"]]


def test_one_list_of_the_images_of_several_splits(tmp_path):
    write(tmp_path / "metadata.jsonl", "a", file_name="train/a.png")
    (tmp_path / "train").mkdir()
    assert answers(tmp_path, "train") == ["a"]
    (tmp_path / "val").mkdir()
    with pytest.raises(DatasetError, match="images are train and which validation; put one into"):
        answers(tmp_path, "train")


def test_a_folder_of_the_very_name_is_the_split(tmp_path):
    """A name that only holds the word is another's."""
    write(tmp_path / "train" / "rows.jsonl", "a")
    write(tmp_path / "train_images" / "metadata.jsonl", "b", file_name="x.png")
    assert answers(tmp_path, "train") == ["a"]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_in_a_folder_beside_the_splits(tmp_path, streaming):
    """Paths that start where the dataset does, as other tools write them."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    write(tmp_path / "train" / "rows.jsonl", "a", image="images/a.png")
    data = [{"path": str(tmp_path), "streaming": streaming}]
    (batch,) = loader(open_datasets(data), epochs=1, batch_size=1)
    assert "pixel_values" in batch


def test_an_evaluation_that_names_no_split_is_of_all_rows(tmp_path):
    write(tmp_path / "train.jsonl", "a", "b")
    write(tmp_path / "test.jsonl", "c")
    for split, expected in (("", ["c", "a", "b"]), ("test", ["c"])):
        task = data_task(
            DataConfig(str(tmp_path), split=split, allow_text_only=True), find_metric("exact_match")
        )
        assert [target for sample in task.samples for target in sample.targets] == expected


def test_an_evaluation_of_several_folders_that_names_no_split_is_of_train(tmp_path):
    for split, answer in (("train", "a"), ("test", "b")):
        write(tmp_path / split / "rows.jsonl", answer)
    task = data_task(DataConfig(str(tmp_path), allow_text_only=True), find_metric("exact_match"))
    assert [list(sample.targets) for sample in task.samples] == [["a"]]


def test_a_saved_dataset_is_the_split_that_is_asked_for(tmp_path):
    rows = datasets.Dataset.from_dict({"question": ["which?"], "answer": ["a"]})
    rows.save_to_disk(str(tmp_path / "rows"))
    assert answers(tmp_path / "rows", "train") == answers(tmp_path / "rows", "test") == ["a"]


# -------------------------------------------------------------------------------------------------- lines
@pytest.fixture
def short(monkeypatch) -> int:
    """The longest line, for once a short one."""
    monkeypatch.setattr(lines, "MAX_LINE", 2**16)
    return 2**16


def row(answer: str, length: int = 0) -> bytes:
    line = json.dumps({"question": "which?", "answer": answer, "more": ""}).encode()
    return line[:-2] + b"x" * max(0, length - len(line)) + line[-2:]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("longer", [1, 2, 2**16, 2**20 - 1, 2**20, 2**21])
def test_a_line_that_is_too_long_is_a_bad_row(tmp_path, short, streaming, longer):
    whole = [row("a"), b"", row("b", short), row("c", short + longer), row("d")]
    for end in (b"", b"\n", b"\n" + row("e", short + longer)):
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(whole) + end)
        data = {"path": str(tmp_path / "rows.jsonl"), "allow_text_only": True}
        (only,) = open_datasets([data | {"streaming": streaming}]).sources
        found = list(only.rows.open(0, 0) if streaming else only.rows)
        said = [one if isinstance(one, str) else one["answer"] for one in found]
        bad = "rows.jsonl: a line longer than 128 MiB"
        assert said == ["a", "b", bad, "d", *([bad] if len(end) > 1 else [])]
    one = loader(open_datasets([data]), epochs=1, sequence_length=512)
    assert len([i for batch in one for rows in batch.sample_ids for i in rows]) == 3
    assert one.place.drops.dropped == {BAD_CONVERSATION: 2}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_line_without_end_is_never_held(tmp_path, short, streaming):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(64 * 2**20)  # of nothing, and sparse
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=r"rows.jsonl: no row can be read: .*: a line longer than"):
            open_datasets([{"path": str(path), "streaming": streaming}])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23


def test_a_line_of_very_many_values_is_a_bad_row(tmp_path):
    """Python's objects would take thirty times its bytes."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row("a") + b'\n{"answer": [' + b"[]," * 1_300_000 + b"0]}\n")
    (only,) = open_datasets([{"path": str(path), "allow_text_only": True}]).sources
    assert "expected at most 2500000 values of JSON, got more" in only.rows[1]


def test_a_list_of_rows_has_its_limit(tmp_path):
    with (tmp_path / "rows.json").open("wb") as file:
        file.write(b"[")
        file.truncate(513 * 2**20)
    with pytest.raises(DatasetError, match="expected a list of rows of at most 512 MiB, got 513; write JSON"):
        open_datasets([{"path": str(tmp_path / "rows.json")}])
