"""Datasets from wherever they come, without a network; which files are which split; plain mistakes."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import tarfile
import threading
from collections import Counter
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DatasetError
from data.images import load_image
from data.order import ShardReader
from data.row_files import Stream
from data.sources import (
    DatasetConfig,
    Share,
    count_rows,
    open_datasets,
    open_rows,
)
from eval.metrics import find_metric
from eval.rows import Asking, data_task
from tests.rows import loader, png

COUNT = 6


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What `datasets` converts goes where the test's files go."""
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def cauldron() -> datasets.Dataset:
    """As the_cauldron and FineVision lay it out; every third row is text."""
    turn = {"user": datasets.Value("string"), "assistant": datasets.Value("string")}
    features = datasets.Features(images=datasets.List(datasets.Image()), texts=datasets.List(turn))
    turns = [[{"user": f"question {i}", "assistant": f"answer {i}"}] for i in range(COUNT)]
    images = [[{"bytes": png(seed=i), "path": None}] if i % 3 else [] for i in range(COUNT)]
    return datasets.Dataset.from_dict({"images": images, "texts": turns}, features=features)


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


def write_tar(path, samples: dict[str, dict[str, bytes]]) -> None:
    """Samples of WebDataset: name -> ending -> what the file holds."""
    with tarfile.open(path, "w") as tar:
        for name, files in samples.items():
            for ending, held in files.items():
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(held)
                tar.addfile(info, io.BytesIO(held))


def lay_out(folder) -> None:
    """The rows in every form that is known."""
    datasets.DatasetDict(train=cauldron()).save_to_disk(str(folder / "two"))
    cauldron().save_to_disk(str(folder / "one"))
    (folder / "parquet").mkdir()
    cauldron().to_parquet(str(folder / "parquet" / "all.parquet"))
    rows = plain_rows(folder)
    write_lines(folder / "rows.jsonl", rows)
    (folder / "list.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list([{"image": None} | row for row in rows]).to_csv(str(folder / "rows.csv"))
    (folder / "images").mkdir()
    write_lines(folder / "images" / "metadata.jsonl", plain_rows(folder / "images", "file_name"))
    texts = {"q.txt": b"question %d", "a.txt": b"answer %d"}
    samples = {
        f"{i}": {one: text % i for one, text in texts.items()} | {"png": png(seed=i)} for i in range(COUNT)
    }
    write_tar(folder / "rows.tar", samples)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    lay_out(folder)
    return folder


WEBDATASET = {"columns": {"question": "q.txt", "answer": "a.txt"}}


@pytest.mark.parametrize(
    "path, rows, entry",
    [
        ("two", range(COUNT), {}),
        ("one", range(COUNT), {"split": "test"}),  # one without splits is whatever split is asked for
        ("one", range(2, 5), {"split": "train[2:5]"}),
        ("parquet", range(COUNT), {}),  # as a repository lies on the disk
        ("parquet/all.parquet", range(COUNT), {"streaming": True}),
        ("parquet/*.parquet", range(4), {"split": "train[:4]"}),
        ("rows.csv", range(COUNT), {}),
        ("rows.tar", range(COUNT), WEBDATASET),
        ("rows.tar", range(COUNT), WEBDATASET | {"streaming": True}),
        ("rows.tar", range(2, 5), WEBDATASET | {"split": "train[2:5]"}),
        ("rows.jsonl", range(COUNT), {}),
        ("rows.jsonl", range(3, 6), {"split": "train[50%:]"}),
        ("list.json", range(4), {"split": "train[:4]"}),
        ("images", range(COUNT), {}),
    ],
)
def test_an_epoch_of_every_format_holds_every_row_once(layouts, path, rows, entry):
    """With its number, its text and its image, which is not decoded before it is needed."""
    mixture, seen, numbers = open_datasets([{"path": str(layouts / path)} | entry]), [], []
    (source,) = mixture.sources
    assert isinstance(source.rows, Stream) is entry.get("streaming", False)
    assert source.num_rows == (None if entry.get("streaming") else len(rows))
    reader = ShardReader(mixture, 0, 1, seed=0, epochs=1)
    while (read := reader.next()) is not None:
        messages = source.schema.conversation(read.row)
        *images, question = messages[0]["content"]
        i = int(question["text"].split()[1])
        assert messages[1]["content"][0]["text"] == f"answer {i}"
        assert len(images) == bool(i % 3 or path == "rows.tar")
        for image in images:
            assert isinstance(image["image"], bytes | Path)
            assert load_image(image["image"]).tobytes() == load_image(png(seed=i)).tobytes()
        seen.append(i)
        numbers.append(read.number)
    assert sorted(seen) == list(rows)
    if isinstance(source.rows, Stream):
        assert len(set(numbers)) == len(rows)
    else:
        assert numbers == [i - rows.start for i in seen]


@pytest.mark.parametrize(
    "path, split, expected",
    [
        ("rows.jsonl", "train[:50%]", COUNT // 2),
        ("parquet", "train", COUNT),
        ("parquet/*.parquet", "train[:50%]", COUNT // 2),
        ("someone/rows", "train", None),
    ],
)
def test_rows_that_lie_here_are_counted(layouts, path, split, expected):
    assert count_rows(path if expected is None else str(layouts / path), None, split) == expected


def test_llavas_file_beside_a_folder_of_images(tmp_path):
    """A list of conversations, some without an image, whose paths start somewhere else."""
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco" / "1.png").write_bytes(png())
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a star"}]
    rows = [{"id": "a", "image": "1.png", "conversations": turns}]
    rows += [{"id": "b", "conversations": [{"from": "human", "value": "hello"}, turns[1]]}]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    entry = {"path": str(tmp_path / "llava.json"), "image_folder": str(tmp_path / "coco")}
    batches = [*loader(open_datasets([entry]), epochs=1, micro_batch_size=4)]
    assert sum(batch.images for batch in batches) == 1 and sum(batch.num_labels for batch in batches) > 4


def write_coco(path, indent=None, **more) -> None:
    """Images 7 and 8 of 20 x 10 pixels, and 9 without annotations; a dog in one, a cat and a crowd of dogs in
    the other; two captions of one."""
    (path.parent / "val").mkdir(exist_ok=True)
    for number in (7, 8, 9):
        (path.parent / "val" / f"{number}.png").write_bytes(png(20, 10, number))
    polygon = {"segmentation": [[1, 2, 3.5]], "area": 9.5}
    images = [{"id": number, "file_name": f"{number}.png", "height": 10} for number in (9, 8, 7)]
    boxes = [(8, 18, 0), (7, 18, 1), (7, 17, 0), (7, 18, 0)]
    found = [
        polygon
        | {"id": at, "image_id": image, "category_id": kind, "bbox": [at, 2, 5.5, 6], "iscrowd": crowd}
        for at, (image, kind, crowd) in enumerate(boxes)
    ]
    said = [{"id": at, "image_id": 7 + at % 2, "caption": f"caption {at}"} for at in range(3)]
    whole = {"info": {}, "images": images, "annotations": said if "caption" in path.name else found}
    named = [{"id": 17, "name": "cat", "supercategory": "animal"}, {"id": 18, "name": "dog"}]
    path.write_text(json.dumps(whole | {"categories": named} | more, indent=indent))


@pytest.mark.parametrize("indent", [None, 1])
def test_cocos_files(tmp_path, indent):
    """Boxes by the names of their categories, without a category that has a crowd; a row for each caption,
    with the image's others as right answers; other objects are refused in a sentence."""
    path, said = (tmp_path / f"{name}_val.json" for name in ("instances", "captions"))
    write_coco(path, indent)
    write_coco(said, indent)
    entry = {"path": str(path), "image_folder": str(tmp_path / "val")}
    (source,) = open_datasets([entry]).sources
    first, second = map(source.schema.conversation, source.rows)
    assert [Path(one[0]["content"][0]["image"]).name for one in (first, second)] == ["8.png", "7.png"]
    texts = [message["content"][-1]["text"] for message in first + second]
    assert '"dog"' in texts[0] and json.loads(texts[1]) == [{"bbox_2d": [0, 200, 275, 800], "label": "dog"}]
    assert '"cat"' in texts[2] and json.loads(texts[3]) == [{"bbox_2d": [100, 200, 375, 800], "label": "cat"}]
    (source,) = open_datasets([entry | {"names": {18: "Hund"}, "split": "train[:1]"}]).sources
    assert source.num_rows == 1 and '"Hund"' in str(source.schema.conversation(source.rows[0]))
    more = {"path": str(said), "constants": {"question": "Describe it."}}
    (source,) = open_datasets([entry | more]).sources
    assert [row["answer"] for row in source.rows] == [
        ["caption 1"], ["caption 0", "caption 2"], ["caption 2", "caption 0"],
    ]  # fmt: skip
    box = {"id": 1, "image_id": 7, "bbox": [0, 2, 5.5, 6]}
    for found in ([{"id": 1, "image_id": 7}], [box], None):  # no box, no category, or images alone
        write_coco(path, indent, annotations=found)
        with pytest.raises(DatasetError, match=r"instances_val\.json: expected"):
            open_datasets([entry])
    write_coco(path, indent, annotations=[box | {"category_id": 17, "caption": "a cat"}])
    (source,) = open_datasets([entry]).sources
    assert [*source.rows[0]] == ["image", "objects"]


@pytest.mark.parametrize("first", ["", '{"a": 1,', '{"a": {"b": 1}', '{"a": 1 "b": 2}', '"text"'])
def test_a_first_line_that_is_no_object_costs_a_file_of_lines_one_row(tmp_path, first):
    row = {"question": "what?", "answer": "a star"}
    (tmp_path / "rows.json").write_text(f"{first}\n{json.dumps(row)}\n")
    rows, _ = open_rows(str(tmp_path / "rows.json"), None, "", streaming=False)
    assert rows[len(rows) - 1] == row and len(rows) == 1 + bool(first)
    row |= {"images": ["a.png"], "categories": ["x"]}  # as COCO's files have, but these are no objects
    (tmp_path / "one.json").write_text(json.dumps(row))
    assert [*open_rows(str(tmp_path / "one.json"), None, "", streaming=False)[0]] == [row]


@pytest.mark.parametrize("streaming", [False, True])
def test_samples_of_webdataset(tmp_path, streaming):
    """A folder of tars with an image and a json of conversations, which may say where the image came from; or
    of a caption to a question that is always the same."""
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a star"}]
    held = [{"conversations": turns, "license": one, "image": "from/0.png"} for one in (2, 3)]
    samples = {
        f"a/{i:03}": {"jpg": png(seed=i), "json": json.dumps(one).encode()} for i, one in enumerate(held)
    }
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "train-1.tar", samples)
    write_tar(tmp_path / "shards" / "train-2.tar", {"c/long" + "g" * 120: samples["a/000"]})
    write_tar(tmp_path / "shards" / "val-0.tar", {"x": samples["a/000"]})
    for path, split, count in (
        ("shards", "train", 3),
        ("shards", "validation", 1),
        ("shards/t*.tar", "train", 3),
    ):
        entry = {"path": str(tmp_path / path), "split": split, "streaming": streaming}
        batches = [*loader(open_datasets([entry]), epochs=1, micro_batch_size=4)]
        assert sum(batch.images for batch in batches) == count
    write_tar(tmp_path / "3.tar", {"c": {"png": png(), "json": b'{"text": "a sun", "n": 0}', "cls": b"1\n"}})
    for column, answer in (("json.text", "a sun"), ("cls", "dog")):
        more = {"columns": {"answer": column}, "constants": {"question": "What?"}, "names": ["cat", "dog"]}
        (source,) = open_datasets([entry | more | {"path": str(tmp_path / "3.tar")}]).sources
        (row,) = source.rows
        question, said = source.schema.conversation(row)
        assert question["content"] == [{"type": "image", "image": png()}, {"type": "text", "text": "What?"}]
        assert said["content"][0]["text"] == answer


@pytest.mark.parametrize("streaming", [False, True])
def test_sorted_rows_of_parquet_come_well_mixed(tmp_path, monkeypatch, streaming):
    """Each epoch otherwise. As a stream they are read where they lie; else they can be looked up, too."""
    rows = [{"question": f"{i}", "answer": "x"} for i in range(2_000)]
    for part in range(2):
        some = datasets.Dataset.from_list(rows[1_000 * part : 1_000 * (part + 1)])
        some.to_parquet(str(tmp_path / f"{part}.parquet"), batch_size=50)
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    entry = {"path": str(tmp_path / "*.parquet"), "allow_text_only": True, "streaming": streaming}
    mixture = open_datasets([entry])
    readers = [ShardReader(mixture, shard, 16, seed=0, epochs=2) for shard in range(16)]
    turns = itertools.chain(*itertools.zip_longest(*(iter(reader.next, None) for reader in readers)))
    order = [int(read.row["question"]) for read in turns if read is not None]
    assert Counter(order) == dict.fromkeys(range(2_000), 2)
    first, second = order[:1_600], order[2_400:]
    for window in (first[at : at + 160] for at in range(0, 1_600, 160)):
        assert max(Counter(number // 200 for number in window).values()) < 60  # 16 are expected
    assert sum(a == b for a, b in zip(first, second)) < 20
    assert bool([*cache.rglob("*.arrow")]) is not streaming
    held = mixture.sources[0].rows
    if streaming:
        assert held.num_sections == 40
    else:
        assert [held[i]["question"] for i in (0, 1, 1_999, 49, 50)] == ["0", "1", "1999", "49", "50"]


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_parquet_may_have_columns_that_others_lack(tmp_path, streaming):
    """Or nothing but null in a column, in the first of them too."""
    rows: list[dict] = [{"question": "a", "answer": "b"}, {"note": None}, {"note": "c"}, {"more": 1}]
    for number, more in enumerate(rows):
        table = pyarrow.table({key: [one] for key, one in (rows[0] | more).items()})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    entry = {"path": str(tmp_path), "allow_text_only": True, "streaming": streaming}
    (source,) = open_datasets([entry]).sources
    read = list(source.rows)
    assert [{**row, "note": row.get("note")} | {"more": row.get("more")} for row in read] == [
        {"note": None, "more": None} | rows[0] | more for more in rows
    ]


def test_shards_read_their_own_parts_of_a_file(tmp_path, monkeypatch):
    """Row groups: each row once."""
    rows = [{"question": f"{i}", "answer": "x" * (i % 7 * 100 if i != 50 else 70_000)} for i in range(400)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"), batch_size=10)
    entry = {"path": str(tmp_path / "rows.parquet"), "streaming": True, "allow_text_only": True}
    mixture, read, seen = open_datasets([entry]), [], []
    stream = type(mixture.sources[0].rows)
    its = stream.read
    monkeypatch.setattr(stream, "read", lambda *args: (read.append(row) or row for row in its(*args)))
    for shard in range(16):
        reader = ShardReader(mixture, shard, 16, seed=0, epochs=1)
        given = [int(row.row["question"]) for row in iter(reader.next, None)]
        assert len(given) in (20, 30)
        seen += given
    assert sorted(seen) == [*range(400)]
    assert len(read) == 400


@pytest.fixture
def addresses(layouts):
    """Rows where fsspec finds them: in its own memory, and at a server."""
    memory = fsspec.filesystem("memory")
    for name in ("rows.jsonl", "parquet/all.parquet", "rows.csv"):
        memory.pipe(f"/bucket/{name}", (layouts / name).read_bytes())
    handler = partial(SimpleHTTPRequestHandler, directory=layouts)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"memory": "memory://bucket", "http": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
    memory.rm("/bucket", recursive=True)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("where", ["memory", "http"])
@pytest.mark.parametrize("name", ["parquet/all.parquet", "rows.jsonl"])
def test_rows_at_an_address_are_read_as_files_here(addresses, where, name, streaming):
    """An object store's, or a server's: to train on, and to evaluate with."""
    entry = {"path": f"{addresses[where]}/{name}", "streaming": streaming, "allow_text_only": True}
    mixture = open_datasets([entry])
    reader = ShardReader(mixture, 0, 1, seed=0, epochs=1)
    assert len([*iter(reader.next, None)]) == COUNT
    if not streaming and name == "parquet/all.parquet":
        task = data_task(DatasetConfig(entry["path"], allow_text_only=True), find_metric("exact_match"))
        assert len(task.samples) == COUNT and task.samples[1].images()


def test_json_lines_at_an_address_keep_types_and_name_lines_that_are_none():
    """As here: an answer that looks like a date stays text, and one broken line costs one row."""
    lines = [json.dumps({"question": "when?", "answer": f"2024-05-{day:02}"}) for day in range(1, 29)]
    memory = fsspec.filesystem("memory")
    memory.pipe("/lines/rows.jsonl", "\n".join([*lines[:14], "nonsense", *lines[14:]]).encode())
    memory.pipe("/lines/more.jsonl", lines[0].encode())
    entry = {"path": "memory://lines/*.jsonl", "streaming": True, "allow_text_only": True}
    mixture = open_datasets([entry])
    readers = [ShardReader(mixture, shard, 4, seed=0, epochs=1) for shard in range(4)]
    turns = itertools.chain(*itertools.zip_longest(*(iter(reader.next, None) for reader in readers)))
    rows = [read.row for read in turns if read is not None]
    memory.rm("/lines", recursive=True)
    answers = [row["answer"] for row in rows if isinstance(row, dict)]
    assert sorted(answers) == sorted(["2024-05-01", *(f"2024-05-{day:02}" for day in range(1, 29))])
    (broken,) = (row for row in rows if not isinstance(row, dict))
    assert broken.startswith("rows.jsonl: ")


@pytest.mark.parametrize(
    "path, said",
    [
        ("s3://bucket/rows.parquet", "s3fs"),
        ("memory://bucket/none.jsonl", "none.jsonl"),
        ("telepathy://bucket/rows.parquet", "telepathy://"),
        ("memory://bucket/rows", r"\.parquet"),
        ("http://127.0.0.1:1/rows.parquet", "rows.parquet"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_in_a_sentence(monkeypatch, path, said):
    """A package that is missing is named, and no file or folder here is looked for."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DatasetError, match=said) as caught:
        open_datasets([{"path": path}])
    assert "\n" not in str(caught.value) and "folder" not in str(caught.value)


GOOD = {"path": "{}/good.jsonl"}
STREAM = {"path": "{}/good.parquet", "streaming": True}


@pytest.mark.parametrize(
    "entries, field",
    [
        ([{"path": "{}/none.jsonl"}], "none.jsonl"),
        ([{"path": "{}/empty.jsonl"}], "no rows"),
        ([{"path": "{}/nonsense.jsonl"}], "nonsense.jsonl"),
        ([{"path": "{}/rows.xyz"}], ".xyz"),
        ([{"path": "{}/broken.parquet"}], "broken.parquet"),
        ([{"path": "{}/broken.json"}], "broken.json"),
        ([{"path": "{}/rows.jsonl", "columns": {"question": "what"}}], "what.* caption"),
        ([{"path": "{}/rows.jsonl"}], "caption.* columns"),
        ([GOOD | {"columns": {"text": "question"}}], "text"),
        ([GOOD | {"columns": "question"}], "columns"),
        ([GOOD | {"constants": {"text": "a"}}], "text"),
        ([GOOD | {"names": {"cat": "1"}}], "names"),
        ([GOOD | {"columns": {"question": "question.a"}}], r"question\.a"),
        ([GOOD | {"split": "train[a:b]"}], "split"),
        ([STREAM | {"split": "train[:1]"}], "split"),
        ([GOOD | {"split": "train[:1]+train[1:]"}], "one slice"),
        ([GOOD | {"split": "test[:1]"}], r"'test'.* train"),
        ([GOOD | {"wieght": 3}], "wieght.* path"),
        ([GOOD | {"weight": 0}], "weight"),
        ([{"path": ""}], "path"),
        ([{"subset": "x"}], "path"),
        ([GOOD], "allow_text_only"),
        ([GOOD | {"allow_text_only": True}] * 2, "twice"),
        ([GOOD, STREAM], "weight"),
        ([], "at least one"),
    ],
)
def test_a_mistake_in_a_recipe_is_named_in_one_sentence(tmp_path, entries, field):
    write_lines(tmp_path / "rows.jsonl", [{"caption": "a", "picture": "b"}])
    write_lines(tmp_path / "good.jsonl", good := [{"question": "a", "answer": "b"}])
    datasets.Dataset.from_list(good).to_parquet(tmp_path / "good.parquet")
    broken = {"nonsense.jsonl": "nonsense\n", "broken.json": "[nonsense", "broken.parquet": "PAR1 no more"}
    for name, text in (broken | {"empty.jsonl": "", "rows.xyz": ""}).items():
        (tmp_path / name).write_text(text)
    here = [
        entry | {"path": entry["path"].format(tmp_path)} if "path" in entry else entry for entry in entries
    ]
    with pytest.raises(DatasetError, match=field) as error:
        open_datasets(here)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------- splits
def write(path, *names: str, **more) -> None:
    """A row for each name, which is its answer."""
    write_lines(path, [{"question": "which?", "answer": name} | more for name in names])


def answers(path, split: str) -> str:
    rows, _ = open_rows(str(path), None, split, streaming=False)
    return "".join(row["answer"] for row in rows)


@pytest.mark.parametrize(
    "files, expected",
    [
        # if names name splits, a file that names none belongs to none
        ({"train.jsonl": "ab", "validation.jsonl": "c", "x.jsonl": "d"}, {"train": "ab", "val": "c"}),
        ({"Train_2.jsonl": "a", "valid 1.jsonl": "c", "x.jsonl": "d"}, {"train": "a", "val": "c"}),
        ({"training.jsonl": "a", "val/rows.jsonl": "c"}, {"train": "a", "validation": "c", "val": "c"}),
        ({"train/a.jsonl": "a", "dev-set/metadata.jsonl": "c"}, {"train": "a", "validation": "c"}),
        ({"rows.jsonl": "a", "test.jsonl": "b", "val/metadata.jsonl": "c"}, {"train": "a", "test": "b"}),
        ({"train.jsonl": "ab", "own/rows.jsonl": "ef"}, {"train[1:]": "b", "own[1:]": "f"}),  # of any name
        ({"a.jsonl": "a", "contest.jsonl": "b"}, {"train": "ab", "": "ab"}),  # contest is not test
        ({"train.jsonl": "a", "test.jsonl": "c"}, {"": "ca"}),  # an evaluation that names no split
        ({"train/rows.jsonl": "a", "test/rows.jsonl": "b"}, {"": "a"}),
    ],
)
def test_which_files_are_which_split(tmp_path, files, expected):
    for name, rows in files.items():
        write(tmp_path / name, *rows)
    assert {split: answers(tmp_path, split) for split in expected} == expected
    with pytest.raises(DatasetError, match=r"'no'.* train"):
        answers(tmp_path, "no")
    for split in expected:
        task = data_task(
            DatasetConfig(str(tmp_path), split=split, allow_text_only=True), find_metric("exact_match")
        )
        assert "".join(sample.targets[0] for sample in task.samples) == expected[split]


@pytest.mark.parametrize(
    "name, rows", [("rows.jsonl", "a"), ("test.jsonl", "b"), ("list.json", "c"), ("*.jsonl", "ab")]
)
def test_files_named_one_by_one_are_train(tmp_path, name, rows):
    write(tmp_path / "rows.jsonl", "a")
    write(tmp_path / "test.jsonl", "b")
    (tmp_path / "list.json").write_text(json.dumps([{"question": "which?", "answer": "c"}]))
    assert answers(tmp_path / name, "train") == rows
    with pytest.raises(DatasetError, match=r"'test'.* train"):
        answers(tmp_path / name, "test[:1]")


def test_the_page_names_every_key_of_a_dataset():
    """A key that stands nowhere is one that nobody has; one that is gone ends a run."""
    page = (Path(__file__).parent.parent / "docs" / "train-reference.md").read_text(encoding="utf-8")
    table = page[page.index("## The keys of a dataset") : page.index("## Boxes")]
    named = [
        key for row in re.findall(r"^\| (`[^|]+) \|", table, re.M) for key in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(named) == sorted(item.name for item in fields(DatasetConfig))


# ---------------------------------------------------------------------------------------- held-out rows
CLASSES = ("daisy", "rose", "tulip")
FLOWERS = {"columns": {"answer": "label"}, "constants": {"question": "Which flower?"}}


def flowers(folder, stored: str) -> dict:
    """An entry for ten images of each class, one class after another."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            (folder / name / f"{i}.png").write_bytes(png(seed=number * 10 + i))
    rows: datasets.Dataset = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    if stored == "folder":
        return {"path": str(folder), **FLOWERS}
    if stored == "saved":
        rows.save_to_disk(folder.parent / "saved")
        return {"path": str(folder.parent / "saved"), **FLOWERS}
    if stored == "parquet":
        rows.to_parquet(folder.parent / "rows.parquet", batch_size=7)
        return {"path": str(folder.parent / "rows.parquet"), **FLOWERS}
    found = [{"image": f"{name}/{i}.png", "answer": name} for name in CLASSES for i in range(10)]
    if stored == "list":
        (folder / "rows.json").write_text(json.dumps(found))
    else:
        write_lines(folder / "rows.jsonl", found)
    return {"path": str(folder / f"rows.json{'l' * (stored == 'lines')}"), "constants": FLOWERS["constants"]}


def said(entry: dict, share: Share | None) -> list[tuple[str, bytes]]:
    """The answer of each row and its image."""
    (source,) = open_datasets([entry], share=share).sources
    found = [source.schema.conversation(row) for row in source.rows]
    return [
        (answer["content"][0]["text"], load_image(question["content"][0]["image"]).tobytes())
        for question, answer in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "train[:20]"])
@pytest.mark.parametrize("stored", ["folder", "saved", "parquet", "list", "lines"])
def test_rows_are_held_out_at_random_and_by_class(tmp_path, stored, split):
    """Each row is learnt or held out, always the same ones; of a sorted folder, all classes are in both."""
    entry = flowers(tmp_path / "flowers", stored) | {"split": split}
    whole = said(entry, None)
    learnt, held_out = (said(entry, Share(0.2, part)) for part in (False, True))
    assert Counter(learnt) + Counter(held_out) == Counter(whole)
    assert len(held_out) == round(0.2 * len(whole)) and said(entry, Share(0.2, True)) == held_out
    of_class = Counter(answer for answer, _ in held_out)
    if stored in ("folder", "saved", "parquet"):
        assert of_class == {answer: 2 for answer, _ in whole}
    entry.pop("split")
    task = data_task(DatasetConfig(**entry, split=split), find_metric("exact_match"), Asking(holdout=0.2))
    assert [sample.targets[0] for sample in task.samples] == [answer for answer, _ in held_out]


def test_rows_that_cannot_be_held_out(tmp_path):
    for stored, more in (("parquet", {"streaming": True}), ("lines", {"split": "train[:1]"})):
        entry = flowers(tmp_path / stored, stored)
        with pytest.raises(DatasetError, match=re.escape(entry["path"])):
            open_datasets([entry | more], share=Share(0.2, True))


def test_no_more_than_the_share_is_held_out_where_answers_are_many():
    """A row of each answer would be: a fifth of all."""
    rows = datasets.Dataset.from_dict({"answer": [str(number % 200) for number in range(1000)]})
    for share in (0.01, 0.1):
        assert len(Share(share, True).of(rows, "rows")) == 1000 * share
    assert len({*Share(0.2, True).of(rows, "rows")["answer"]}) == 200


def test_each_row_in_a_class_of_its_own_is_said(tmp_path):
    rows = datasets.Dataset.from_dict({"label": [*range(4)]})
    rows = rows.cast_column("label", datasets.ClassLabel(num_classes=4))
    with pytest.raises(DatasetError, match="own"):
        Share(0.2, True).of(rows, "rows")
