"""Datasets from every place they come from, without a network: the same rows, and clear words where not."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import datasets
import pytest

from data.datasets import DatasetConfig, Mixture, open_datasets
from data.errors import DatasetError
from data.images import load_image
from data.order import MapReader, StreamReader, shuffled
from data.sources import HubStream, JsonLines, count_rows
from tests.rows import ListStream, png, source

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


def turns(i: int) -> list[dict]:
    return [{"user": f"question {i}", "assistant": f"answer {i}"}]


def cauldron() -> datasets.Dataset:
    """As the_cauldron and FineVision lay it out; every third row is text."""
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "texts": datasets.List({"user": datasets.Value("string"), "assistant": datasets.Value("string")}),
            "relevance_ratings": datasets.List(datasets.Value("int64")),
        }
    )
    images = [[{"bytes": png(seed=i), "path": None}] if i % 3 else [] for i in range(COUNT)]
    return datasets.Dataset.from_dict(
        {
            "images": images,
            "texts": [turns(i) for i in range(COUNT)],
            "relevance_ratings": [[i] for i in range(COUNT)],
        },
        features=features,
    )


def plain_lines(folder) -> list[dict]:
    for i in range(COUNT):
        (folder / f"{i}.png").write_bytes(png(seed=i))
    return [
        {"question": f"question {i}", "answer": f"answer {i}"} | ({"image": f"{i}.png"} if i % 3 else {})
        for i in range(COUNT)
    ]


def write_lines(path, rows) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")


def check(mixture: Mixture, expected: range = range(COUNT), streamed: bool = False) -> None:
    """One epoch holds every row once, with its text and its image."""
    reader, seen = mixture.lane(0, 1, seed=0, epochs=1), set()
    assert mixture.sources[0].streaming is streamed
    while (read := reader.next()) is not None:
        messages = mixture.sources[0].layout.conversation(read.row)
        *images, question = messages[0]["content"]
        i = int(question["text"].split()[1])
        assert messages[1]["content"][0]["text"] == f"answer {i}"
        assert read.number == i - expected.start and len(images) == bool(i % 3)
        for image in images:
            assert load_image(image["image"]).tobytes() == load_image(png(seed=i)).tobytes()
        seen.add(i)
    assert seen == set(expected)


def test_a_folder_of_save_to_disk(tmp_path):
    datasets.DatasetDict(train=cauldron()).save_to_disk(str(tmp_path / "two"))
    cauldron().save_to_disk(str(tmp_path / "one"))
    check(open_datasets([{"path": str(tmp_path / "two")}]))
    check(open_datasets([{"path": str(tmp_path / "one"), "split": "train[2:5]"}]), range(2, 5))
    check(open_datasets([{"path": str(tmp_path / "one"), "streaming": True}]), streamed=True)
    with pytest.raises(DatasetError, match="no split 'test'; it has train"):
        open_datasets([{"path": str(tmp_path / "two"), "split": "test"}])


def test_parquet_files(tmp_path):
    rows = cauldron()
    rows.to_parquet(str(tmp_path / "all.parquet"))
    path = str(tmp_path / "all.parquet")
    check(open_datasets([{"path": path}]))
    check(open_datasets([{"path": path, "streaming": True}]), streamed=True)
    check(open_datasets([{"path": str(tmp_path / "*.parquet"), "split": "train[:4]"}]), range(4))
    check(open_datasets([{"path": str(tmp_path)}]))  # as a repository lies on the disk


def test_json_lines_with_images_beside_them(tmp_path):
    write_lines(tmp_path / "rows.jsonl", plain_lines(tmp_path))
    path = str(tmp_path / "rows.jsonl")
    check(open_datasets([{"path": path}]))
    check(open_datasets([{"path": path, "streaming": True}]), streamed=True)
    check(open_datasets([{"path": path, "split": "train[50%:]"}]), range(3, 6))
    (tmp_path / "list.json").write_text(json.dumps(plain_lines(tmp_path)))
    check(open_datasets([{"path": str(tmp_path / "list.json"), "split": "train[:4]"}]), range(4))
    check(open_datasets([{"path": str(tmp_path)}]))


def test_an_image_folder(tmp_path):
    rows = plain_lines(tmp_path)
    shown = [row | {"file_name": row.pop("image")} for row in rows if "image" in row]
    write_lines(tmp_path / "metadata.jsonl", shown)
    mixture = open_datasets([{"path": str(tmp_path)}])
    (only,) = mixture.sources
    for i, row in enumerate(shown):
        messages = only.layout.conversation(only.rows[i])
        assert load_image(messages[0]["content"][0]["image"]).size == (8, 6)
        assert messages[1]["content"][0]["text"] == row["answer"]


def test_json_lines_keep_types_and_name_lines_that_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"answer": "2020-01-01"}\n\nnonsense\n{"answer": 3}')
    (tmp_path / "b.jsonl").write_bytes(b'{"answer": [1]}')
    rows = JsonLines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [rows[0], rows[2], rows[3]] == [{"answer": "2020-01-01"}, {"answer": 3}, {"answer": [1]}]
    assert len(rows) == 4 and rows[1].startswith("a.jsonl: a line that is no JSON")


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"path": "{}/none.jsonl"}, "no such file or folder"),
        ({"path": "{}/empty.jsonl"}, "split 'train' has no rows"),
        ({"path": "{}/rows.csv"}, "expected Parquet or JSON-lines files, got .csv"),
        (
            {"path": "{}/rows.jsonl", "columns": {"question": "what"}},
            "no column what; it has caption, image",
        ),
        ({"path": "{}/rows.jsonl"}, "it has caption, image: name yours under columns"),
        (
            {"path": "{}/good.jsonl", "min_ratings": {"score": 3}},
            "no rating column score; it has question, answer",
        ),
        ({"path": "{}/good.jsonl", "split": "train[a:b]"}, "split 'train.a:b.'"),
        ({"path": "{}/good.jsonl", "split": "train[:1]", "streaming": True}, "a stream has no known length"),
        ({"path": "{}/good.jsonl", "wieght": 3}, "unknown key wieght; its keys are path"),
        ({"path": "{}/good.jsonl", "weight": 0}, "weight: expected a positive number, got 0"),
        ({"subset": "x"}, "no path; its keys are"),
        ({"path": "{}/broken.parquet"}, "cannot be opened"),
    ],
)
def test_one_clear_sentence(tmp_path, entry, message):
    write_lines(tmp_path / "rows.jsonl", [{"caption": "a", "picture": "b"}])
    write_lines(tmp_path / "good.jsonl", [{"question": "a", "answer": "b"}])
    for name in ("empty.jsonl", "rows.csv"):
        (tmp_path / name).touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    entry = {k: v.replace("{}", str(tmp_path)) if isinstance(v, str) else v for k, v in entry.items()}
    with pytest.raises(DatasetError, match=message) as error:
        open_datasets([entry])
    assert "\n" not in str(error.value)


def test_what_a_mixture_refuses(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(DatasetError, match="named twice"):
        open_datasets([{"path": path, "allow_text_only": True}] * 2)
    with pytest.raises(DatasetError, match="a stream among other datasets needs a weight"):
        open_datasets([{"path": path}, {"path": path, "name": "b", "streaming": True}])
    with pytest.raises(DatasetError, match="at least one"):
        open_datasets([])


@pytest.mark.parametrize("named", ["{}/secret.csv", "../secret.csv"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_readme_names_no_data_file_outside_of_its_folder(tmp_path, named, streaming):
    """Its first line would be columns, which are shown, and its lines would be rows."""
    (tmp_path / "secret.csv").write_text("token,question,answer\n1,2,3\n")
    (tmp_path / "rows").mkdir()
    cauldron().to_parquet(str(tmp_path / "rows" / "train.parquet"))
    configs = [{"config_name": "default", "data_files": [{"split": "train", "path": named.format(tmp_path)}]}]
    (tmp_path / "rows" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with pytest.raises(DatasetError, match="names a data file outside of it") as caught:
        open_datasets([{"path": str(tmp_path / "rows"), "streaming": streaming}])
    assert "token" not in str(caught.value)


@pytest.mark.parametrize("kind", ["lines", "parquet", "saved", "list"])
def test_rows_that_lie_here_are_counted(tmp_path, kind, monkeypatch):
    """Also those that a run would stream, or that a pattern names; of Parquet no row is read."""
    table = cauldron()
    if kind == "saved":
        table.save_to_disk(str(tmp_path / "rows"))
        paths = ["rows"]
    elif kind == "parquet":
        (tmp_path / "rows").mkdir()
        for part in ("train-0", "train-1", "test-0"):
            table.to_parquet(str(tmp_path / "rows" / f"{part}.parquet"))
        monkeypatch.setattr(datasets, "load_dataset", None)
        assert count_rows(str(tmp_path / "rows"), None, "test") == COUNT
        assert count_rows(str(tmp_path / "rows" / "test-0.parquet"), None, "train[:50%]") == COUNT // 2
        paths = ["rows", "rows/train-*.parquet"]
    else:
        (tmp_path / "rows").mkdir()
        rows = [{"question": "?", "answer": "a"}] * (2 * COUNT)
        if kind == "lines":
            write_lines(tmp_path / "rows" / "a.jsonl", rows)
        else:
            (tmp_path / "rows" / "a.json").write_text(json.dumps(rows))
        paths = ["rows", "rows/a.jsonl", "rows/*.jsonl"] if kind == "lines" else ["rows/a.json"]
    whole = COUNT if kind == "saved" else 2 * COUNT
    for path in paths:
        assert count_rows(str(tmp_path / path), None, "train") == whole, path
        assert count_rows(str(tmp_path / path), None, "train[:50%]") == whole // 2, path
    assert count_rows("someone/rows", None, "train") is None


# ------------------------------------------------------------------------------------------------ order
def drain(reader, most: int = 10_000) -> list[int]:
    numbers = []
    while len(numbers) < most and (read := reader.next()) is not None:
        numbers.append(read.number)
    return numbers


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000])
def test_a_shuffle_is_a_permutation_that_its_key_decides(length):
    one = [shuffled(i, length, 1) for i in range(length)]
    assert sorted(one) == list(range(length))
    assert length < 7 or one not in ([shuffled(i, length, 2) for i in range(length)], list(range(length)))


def test_a_shuffle_leaves_no_order_behind():
    places = [shuffled(i, 4096, 3) for i in range(4096)]
    follows = sum(b == a + 1 for a, b in itertools.pairwise(places))
    assert follows < 12  # one is expected
    quarters = Counter((i // 1024, place // 1024) for i, place in enumerate(places))
    assert all(abs(count - 256) < 70 for count in quarters.values())


def test_lanes_share_the_rows_of_each_epoch():
    rows = list(range(23))
    lanes = [drain(MapReader(rows, 5, lane, 4, epochs=2)) for lane in range(4)]
    assert Counter(n for lane in lanes for n in lane) == dict.fromkeys(rows, 2)
    interleaved = [lanes[i % 4][i // 4] for i in range(46)]
    assert sorted(interleaved[:23]) == rows and interleaved[:23] != interleaved[23:]


@pytest.mark.parametrize("files", [(23,), (5, 9, 2), (4, 4, 4, 4), (3, 1, 7, 2, 6, 4)])
def test_streams_share_their_rows_and_go_on_anywhere(files):
    stream = ListStream(*[[{"row": (f, i)} for i in range(count)] for f, count in enumerate(files)])
    numbers = []
    for lane in range(4):
        reader = StreamReader(stream, 5, lane, 4, epochs=2, block=3)
        whole = []
        while True:
            state = reader.state()
            again = StreamReader(stream, 5, lane, 4, epochs=2, block=3)
            again.restore(state)
            read, same = reader.next(), again.next()
            assert read == same, state
            if read is None:
                break
            whole.append(read)
        assert reader.again([read.place for read in whole[:5]]) == whole[:5]
        assert sorted(r.number for r in whole if r.place[0] == 0) == sorted(
            r.number for r in whole if r.place[0]
        )
        numbers += [(read.number, tuple(read.row["row"])) for read in whole]
    assert Counter(numbers) == {
        (i * len(files) + f, (f, i)): 2 for f, n in enumerate(files) for i in range(n)
    }


def test_a_stream_of_the_library_is_read_file_by_file():
    rows = datasets.Dataset.from_dict({"question": [f"{i}" for i in range(10)], "answer": ["a"] * 10})
    stream = HubStream(rows.to_iterable_dataset(num_shards=3))
    assert stream.num_files == 3
    seen = [row["question"] for file in range(3) for row in stream.open(file, 0)]
    assert sorted(seen) == sorted(rows["question"])
    assert [row["question"] for row in stream.open(0, 2)] == seen[2:4]


@pytest.mark.parametrize("files", [(1,), (10,), (3, 7), (2, 0, 3)])
@pytest.mark.parametrize("block", [1, 2, 8])
def test_a_lane_without_a_row_of_its_own_borrows_one_and_goes_on_anywhere(files, block):
    stream = ListStream(*[[{"row": (f, i)} for i in range(count)] for f, count in enumerate(files)])
    seen = Counter()
    for lane in range(16):
        reader, whole = StreamReader(stream, 5, lane, 16, None, block), []
        for _ in range(20):
            again = StreamReader(stream, 5, lane, 16, None, block)
            again.restore(reader.state())
            read = reader.next()
            assert read == again.next()
            whole.append(read)
        assert reader.again([read.place for read in whole]) == whole
        seen.update(tuple(read.row["row"]) for read in whole)
    assert len(seen) == sum(files)
    lanes = [drain(StreamReader(stream, 5, lane, 16, 3, block)) for lane in range(16)]
    every = {i * len(files) + f for f, count in enumerate(files) for i in range(count)}
    assert Counter(n for lane in lanes for n in lane) == dict.fromkeys(every, 3)


def test_a_lane_whose_files_are_empty_says_so():
    empty = ListStream([{}], [])
    reader = StreamReader(empty, 0, 3, 4, epochs=None, block=2, name="mine")
    with pytest.raises(DatasetError, match="mine: no row for lane 3, all of whose 1 files are empty; remove"):
        reader.next()
    assert drain(StreamReader(empty, 0, 3, 4, epochs=2, block=2)) == []


def test_mixing_keeps_to_the_weights():
    data = [
        source([{"question": "a", "answer": "b"}] * n, name, weight=w)
        for n, name, w in ((5, "a", 3.0), (50, "b", 1.0))
    ]
    reader = Mixture(data).lane(1, 4, seed=0)
    drawn = [reader.next().source for _ in range(100)]
    for taken in range(1, 100):
        assert abs(drawn[:taken].count(0) - 0.75 * taken) <= 1.5, taken
    by_size = Mixture([source([{"question": "a", "answer": "b"}] * n, str(n)) for n in (10, 30)])
    assert by_size.shares == [0.25, 0.75] and by_size.num_rows == 40
    ends = by_size.lane(0, 2, seed=0, epochs=1)
    assert Counter(iter_sources(ends)) == {0: 5, 1: 15}


def iter_sources(reader):
    while (read := reader.next()) is not None:
        yield read.source


def test_names_and_defaults():
    assert DatasetConfig("org/name", subset="ai2d").name == "org/name/ai2d"
