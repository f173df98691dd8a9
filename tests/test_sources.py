"""Datasets from wherever they come, without a network; which files are which split; plain mistakes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import pytest

from data.errors import DatasetError
from data.images import load_image
from data.order import ShardReader
from data.sources import (
    DatasetConfig,
    JsonLines,
    LibraryStream,
    Stream,
    count_rows,
    open_datasets,
    open_rows,
)
from eval.metrics import find_metric
from eval.rows import DataConfig, data_task
from tests.rows import loader, png

COUNT = 6


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What `datasets` converts goes where the test's files go."""
    before, datasets.config.HF_DATASETS_CACHE = (
        datasets.config.HF_DATASETS_CACHE,
        tmp_path_factory.mktemp("cache"),
    )
    datasets.disable_progress_bars()
    yield
    datasets.config.HF_DATASETS_CACHE = before


def cauldron() -> datasets.Dataset:
    """As the_cauldron and FineVision lay it out; every third row is text."""
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "texts": datasets.List({"user": datasets.Value("string"), "assistant": datasets.Value("string")}),
            "relevance_ratings": datasets.List(datasets.Value("int64")),
        }
    )
    turns = [[{"user": f"question {i}", "assistant": f"answer {i}"}] for i in range(COUNT)]
    images = [[{"bytes": png(seed=i), "path": None}] if i % 3 else [] for i in range(COUNT)]
    columns = {"images": images, "texts": turns, "relevance_ratings": [[i] for i in range(COUNT)]}
    return datasets.Dataset.from_dict(columns, features=features)


def plain_rows(folder, column: str = "image") -> list[dict]:
    """The same rows, with their images beside them."""
    for i in range(COUNT):
        (folder / f"{i}.png").write_bytes(png(seed=i))
    return [
        {"question": f"question {i}", "answer": f"answer {i}"} | ({column: f"{i}.png"} if i % 3 else {})
        for i in range(COUNT)
    ]


def write_lines(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")


def check(path, expected: range = range(COUNT), **entry) -> None:
    """One epoch holds every row once, with its number, its text and its image."""
    mixture, seen = open_datasets([{"path": str(path)} | entry]), set()
    (source,) = mixture.sources
    assert isinstance(source.rows, Stream) is entry.get("streaming", False)
    reader = ShardReader(mixture, 0, 1, seed=0, epochs=1)
    while (read := reader.next()) is not None:
        messages = source.schema.conversation(read.row)
        *images, question = messages[0]["content"]
        i = int(question["text"].split()[1])
        assert messages[1]["content"][0]["text"] == f"answer {i}"
        assert read.number == i - expected.start and len(images) == bool(i % 3)
        for image in images:
            assert isinstance(
                image["image"], bytes | Path
            )  # not decoded: rows are read before they are needed
            assert load_image(image["image"]).tobytes() == load_image(png(seed=i)).tobytes()
        seen.add(i)
    assert seen == set(expected)


def test_a_folder_of_save_to_disk(tmp_path):
    datasets.DatasetDict(train=cauldron()).save_to_disk(str(tmp_path / "two"))
    cauldron().save_to_disk(str(tmp_path / "one"))
    check(tmp_path / "two")
    check(tmp_path / "one", split="test")  # one without splits is whatever split is asked for
    check(tmp_path / "one", range(2, 5), split="train[2:5]")
    check(tmp_path / "one", streaming=True)
    with pytest.raises(DatasetError, match=r"'test'.* train"):
        open_datasets([{"path": str(tmp_path / "two"), "split": "test"}])


def test_parquet_files(tmp_path):
    cauldron().to_parquet(str(tmp_path / "all.parquet"))
    check(tmp_path / "all.parquet")
    check(tmp_path / "all.parquet", streaming=True)
    check(tmp_path / "*.parquet", range(4), split="train[:4]")
    check(tmp_path)  # as a repository lies on the disk


def test_csv_and_webdataset_files(tmp_path):
    rows = plain_rows(tmp_path)
    datasets.Dataset.from_list([{"image": None} | row for row in rows]).to_csv(str(tmp_path / "rows.csv"))
    check(tmp_path / "rows.csv")
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for i in (1, 2, 4, 5):
            for ending, held in (("png", png(seed=i)), ("q", f"question {i}"), ("a", f"answer {i}")):
                held = held.encode() if isinstance(held, str) else held
                info = tarfile.TarInfo(f"{i}.{ending}.txt" if ending != "png" else f"{i}.png")
                info.size = len(held)
                tar.addfile(info, io.BytesIO(held))
    columns = {"image": "png", "question": "q.txt", "answer": "a.txt"}
    (source,) = open_datasets([{"path": str(tmp_path / "rows.tar"), "columns": columns}]).sources
    conversations = [source.schema.conversation(row) for row in source.rows]
    assert [talk[1]["content"][0]["text"] for talk in conversations] == [f"answer {i}" for i in (1, 2, 4, 5)]
    assert load_image(conversations[0][0]["content"][0]["image"]).size == (8, 6)


def test_json_lines_with_images_beside_them(tmp_path):
    write_lines(tmp_path / "rows.jsonl", plain_rows(tmp_path))
    check(tmp_path / "rows.jsonl")
    check(tmp_path / "rows.jsonl", streaming=True)
    check(tmp_path / "rows.jsonl", range(3, 6), split="train[50%:]")
    (tmp_path / "list.json").write_text(json.dumps(plain_rows(tmp_path)))
    check(tmp_path / "list.json", range(4), split="train[:4]")
    check(tmp_path)


def test_an_image_folder(tmp_path):
    write_lines(tmp_path / "metadata.jsonl", [row for row in plain_rows(tmp_path, "file_name")])
    check(tmp_path)


def test_json_lines_keep_types_and_name_lines_that_are_none(tmp_path):
    """The `datasets` library makes dates of such answers, and cannot open a file with a broken line."""
    (tmp_path / "a.jsonl").write_bytes(b'{"answer": "2020-01-01"}\n\nnonsense\n{"answer": 3}')
    (tmp_path / "b.jsonl").write_bytes(b'{"answer": [1]}')
    rows = JsonLines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [rows[0], rows[2], rows[3]] == [{"answer": "2020-01-01"}, {"answer": 3}, {"answer": [1]}]
    assert len(rows) == 4 and rows[1].startswith("a.jsonl: ")


def test_a_stream_of_the_library_is_read_file_by_file():
    rows = datasets.Dataset.from_dict({"question": [f"{i}" for i in range(10)], "answer": ["a"] * 10})
    stream = LibraryStream(rows.to_iterable_dataset(num_shards=3))
    seen = [row["question"] for file in range(stream.num_files) for row in stream.open(file, 0)]
    assert stream.num_files == 3 and sorted(seen) == sorted(rows["question"])
    assert [row["question"] for row in stream.open(0, 2)] == seen[2:4]


@pytest.mark.parametrize(
    "entry, field",
    [
        ({"path": "{}/none.jsonl"}, "none.jsonl"),
        ({"path": "{}/empty.jsonl"}, "no rows"),
        ({"path": "{}/nonsense.jsonl"}, "nonsense.jsonl"),
        ({"path": "{}/rows.xyz"}, ".xyz"),
        ({"path": "{}/rows.jsonl", "columns": {"question": "what"}}, "what.* caption"),
        ({"path": "{}/rows.jsonl"}, "caption.* columns"),
        ({"path": "{}/good.jsonl", "columns": {"text": "question"}}, "text"),
        ({"path": "{}/good.jsonl", "min_ratings": {"score": 3}}, "score"),
        ({"path": "{}/good.jsonl", "columns": "question"}, "columns"),
        ({"path": "{}/good.jsonl", "split": "train[a:b]"}, "split"),
        ({"path": "{}/good.jsonl", "split": "train[:1]", "streaming": True}, "split"),
        ({"path": "{}/good.jsonl", "wieght": 3}, "wieght.* path"),
        ({"path": "{}/good.jsonl", "weight": 0}, "weight"),
        ({"path": ""}, "path"),
        ({"subset": "x"}, "no path"),
        ({"path": "{}/broken.parquet"}, "broken.parquet"),
        ({"path": "{}/broken.json"}, "broken.json"),
    ],
)
def test_one_clear_sentence(tmp_path, entry, field):
    write_lines(tmp_path / "rows.jsonl", [{"caption": "a", "picture": "b"}])
    write_lines(tmp_path / "good.jsonl", [{"question": "a", "answer": "b"}])
    (tmp_path / "nonsense.jsonl").write_text("nonsense\n")
    (tmp_path / "broken.json").write_text("[nonsense")
    for name in ("empty.jsonl", "rows.xyz"):
        (tmp_path / name).touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    entry = {k: v.replace("{}", str(tmp_path)) if isinstance(v, str) else v for k, v in entry.items()}
    with pytest.raises(DatasetError, match=field) as error:
        open_datasets([entry])
    assert "\n" not in str(error.value)


def test_what_a_mixture_refuses(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    path = str(tmp_path / "a.jsonl")
    for entries, field in (
        ([{"path": path, "allow_text_only": True}] * 2, "twice"),
        ([{"path": path}, {"path": path, "name": "b", "streaming": True}], "weight"),
        ([{"path": path}], "allow_text_only"),
        ([], "at least one"),
    ):
        with pytest.raises(DatasetError, match=field):
            open_datasets(entries)
    assert DatasetConfig("org/name", subset="ai2d").name == "org/name/ai2d"


@pytest.mark.parametrize("named", ["{}/secret.csv", "../secret.csv"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_readme_names_no_data_file_outside_of_its_folder(tmp_path, named, streaming):
    """Its first line would be columns, which are shown, and its lines would be rows."""
    (tmp_path / "secret.csv").write_text("token,question,answer\n1,2,3\n")
    (tmp_path / "rows").mkdir()
    cauldron().to_parquet(str(tmp_path / "rows" / "train.parquet"))
    configs = [{"config_name": "default", "data_files": [{"split": "train", "path": named.format(tmp_path)}]}]
    (tmp_path / "rows" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with pytest.raises(DatasetError, match=r"secret\.csv") as caught:
        open_datasets([{"path": str(tmp_path / "rows"), "streaming": streaming}])
    assert "token" not in str(caught.value)


def test_rows_that_lie_here_are_counted(tmp_path, monkeypatch):
    """Also those that a pattern names; of Parquet no row is read."""
    table = cauldron()
    table.save_to_disk(str(tmp_path / "saved"))
    write_lines(tmp_path / "lines" / "a.jsonl", [{"question": "?", "answer": "a"}] * COUNT)
    (tmp_path / "parquet").mkdir()
    for part in ("train-0", "train-1", "test-0"):
        table.to_parquet(str(tmp_path / "parquet" / f"{part}.parquet"))
    monkeypatch.setattr(datasets, "load_dataset", None)
    for path, split, expected in (
        ("saved", "train", COUNT),
        ("saved", "train[:50%]", COUNT // 2),
        ("lines", "train", COUNT),
        ("lines/a.jsonl", "train[:50%]", COUNT // 2),
        ("lines/*.jsonl", "train", COUNT),
        ("parquet", "train", 2 * COUNT),
        ("parquet", "test", COUNT),
        ("parquet/train-*.parquet", "train[:50%]", COUNT),
        ("parquet/test-0.parquet", "train", COUNT),
    ):
        assert count_rows(str(tmp_path / path), None, split) == expected, (path, split)
    assert count_rows("someone/rows", None, "train") is None


# ----------------------------------------------------------------------------------------------- splits
def write(path, *names: str, **more) -> None:
    """A row for each name, which is its answer."""
    write_lines(path, [{"question": "which?", "answer": name} | more for name in names])


def answers(path, split: str, streaming: bool = False) -> list[str]:
    rows, _ = open_rows(str(path), None, split, streaming)
    found = [row for file in range(rows.num_files) for row in rows.open(file, 0)] if streaming else list(rows)
    return [row["answer"] for row in found]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "train, image",
    [
        ("train/metadata.jsonl", "train/a.png"),
        ("my-train-1/rows.jsonl", "my-train-1/a.png"),
        ("train/rows.jsonl", "a.png"),  # paths that start where the dataset does, as other tools write them
    ],
)
def test_where_the_images_of_a_split_lie(tmp_path, train, image, streaming):
    column = "file_name" if train.endswith("metadata.jsonl") else "image"
    write(tmp_path / train, "a", **{column: "a.png"})
    (tmp_path / image).write_bytes(png())
    write(tmp_path / "test" / "rows.jsonl", "b")
    mixture = open_datasets([{"path": str(tmp_path), "streaming": streaming}])
    (batch,) = loader(mixture, epochs=1, batch_size=1)
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
    write(tmp_path / "heldout.jsonl", "d")  # if names name splits, a file that names none belongs to none
    assert answers(tmp_path, "train", streaming) == ["a", "b"]
    for asked in ("validation", "val"):
        assert answers(tmp_path, asked, streaming) == ["c"]
    with pytest.raises(DatasetError, match=r"'test'.* train"):
        answers(tmp_path, "test", streaming)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"train.jsonl": "ab", "test.jsonl": "cd"}, {"train[1:]": "b", "eval[:50%]": "c"}),
        ({"train.jsonl": "a", "own/rows.jsonl": "ef"}, {"own[1:]": "f"}),  # a folder of any name
        ({"a.jsonl": "a", "contest.jsonl": "b"}, {"train": "ab", "": "ab"}),  # contest is not test
        (
            {"rows.jsonl": "a", "test.jsonl": "b", "val/metadata.jsonl": "c"},
            {"train": "a", "test": "b", "val": "c"},
        ),
        ({"train/rows.jsonl": "a", "train_images/metadata.jsonl": "b"}, {"train": "a"}),  # the very name
        ({"train.jsonl": "a", "test.jsonl": "c"}, {"": "ca"}),  # an evaluation that names no split
        ({"train/rows.jsonl": "a", "test/rows.jsonl": "b"}, {"": "a"}),
    ],
)
def test_which_files_are_which_split(tmp_path, files, expected):
    for name, rows in files.items():
        write(tmp_path / name, *rows)
    assert {split: "".join(answers(tmp_path, split)) for split in expected} == expected


def test_an_evaluation_reads_the_same_splits(tmp_path):
    write(tmp_path / "train.jsonl", "a", "b")
    write(tmp_path / "test.jsonl", "c")
    for split, expected in (("", ["c", "a", "b"]), ("test", ["c"])):
        config = DataConfig(str(tmp_path), split=split, allow_text_only=True)
        task = data_task(config, find_metric("exact_match"))
        assert [target for sample in task.samples for target in sample.targets] == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "test.jsonl", "list.json", "*.jsonl"])
def test_files_named_one_by_one_are_train(tmp_path, name):
    write(tmp_path / "rows.jsonl", "a")
    write(tmp_path / "test.jsonl", "b")
    (tmp_path / "list.json").write_text(json.dumps([{"question": "which?", "answer": "c"}]))
    expected = {"rows.jsonl": ["a"], "test.jsonl": ["b"], "list.json": ["c"], "*.jsonl": ["a", "b"]}[name]
    assert answers(tmp_path / name, "train") == expected
    with pytest.raises(DatasetError, match=r"'test'.* train"):
        answers(tmp_path / name, "test[:1]")


def test_one_list_of_the_images_of_several_splits(tmp_path):
    """It does not say which rows are held out."""
    write(tmp_path / "metadata.jsonl", "a", file_name="train/a.png")
    (tmp_path / "train").mkdir()
    assert answers(tmp_path, "train") == ["a"]
    (tmp_path / "val").mkdir()
    with pytest.raises(DatasetError, match=r"train.* validation"):
        answers(tmp_path, "train")
