"""Rows of any layout as questions: what is asked, what is accepted, and what is refused in one sentence."""

from __future__ import annotations

import pytest
from datasets import Dataset, Features, Image, List, Value

from data.errors import DatasetError, ImageError
from data.images import load_image
from data.row_schemas import looks_like_image
from data.sources import open_datasets
from eval.metrics import find_metric
from eval.rows import DataConfig, data_task
from tests.evaluations import blank_image, save_rows
from tests.rows import png


def task_of(tmp_path, rows: list[dict], allow_text_only: bool = True, **config):
    path = str(save_rows(tmp_path / "rows.jsonl", rows))
    return data_task(DataConfig(path, allow_text_only=allow_text_only, **config), find_metric("exact_match"))


def refusal(tmp_path, rows: list[dict], **config) -> str:
    with pytest.raises(DatasetError) as caught:
        task_of(tmp_path, rows, **config)
    return str(caught.value)


# ----------------------------------------------------------------------------------------- what is asked
def test_rows_become_samples(tmp_path):
    name = blank_image(tmp_path)
    rows = [
        {"image": name, "question": "How many?", "answers": ["3", "three", "three"], "hint": "few"},
        {"image": name, "question": "How {old}?", "answers": 7, "hint": None},
    ]
    task = task_of(tmp_path, rows, prompt="{question}\nBriefly.", system="Be kind.", max_new_tokens=9)
    first, second = task.samples
    assert first.prompt == "How many?\nBriefly." and second.prompt == "How {old}?\nBriefly."
    assert first.targets == ("3", "three", "three") and second.targets == ("7",)
    assert first.likeliest_target == "three" and task.majority() == {"": "three"}
    assert (first.id, second.id) == ("1", "2") and first.group == second.group
    assert first.fields["hint"] == "few" and "image" not in first.fields
    assert (first.system, first.max_new_tokens) == ("Be kind.", 9)
    assert load_image(first.images()[0]).size == (48, 48)


def test_columns_by_other_names_and_the_limit(tmp_path):
    rows = [{"q": f"What {n}?", "label": "x", "pic": blank_image(tmp_path), "kind": "k"} for n in range(5)]
    columns = {"question": "q", "answer": "label", "image": "pic", "family": "kind"}
    task = task_of(tmp_path, rows, columns=columns, limit=3)
    assert [sample.question for sample in task.samples] == ["What 0?", "What 1?", "What 2?"]
    assert task.samples[0].family == "k" and task.samples[0].images()


def test_choices_are_shown_with_letters_and_an_index_means_one(tmp_path):
    rows = [
        {"question": "Which?", "choices": ["red", "blue"], "answer": 1},
        {"question": "Which?", "choices": ["red", "blue"], "answer": "A"},
    ]
    first, second = task_of(tmp_path, rows).samples
    assert first.prompt.startswith("Which?\nA. red\nB. blue\nAnswer with the option's letter")
    assert first.targets == ("B",) and second.targets == ("A",)
    assert first.fields["choices"] == ["red", "blue"]
    assert "answer 2: expected an index of 2 choices" in refusal(tmp_path, [rows[0] | {"answer": 2}])


@pytest.mark.parametrize(
    "answers",
    [{"text": ["yes", "ja"]}, [{"answer": "yes"}, {"answer": "ja"}], ["yes", None, "ja"]],
)
def test_answers_as_known_sets_hold_them(tmp_path, answers):
    assert task_of(tmp_path, [{"question": "Is it?", "answers": answers}]).samples[0].targets == ("yes", "ja")


def test_images_in_parquet_are_grouped_by_their_bytes_and_opened_late(tmp_path):
    rows = {
        "images": [[png(seed=0)], [png(seed=1)], [png(seed=0)], []],
        "question": ["a?", "b?", "c?", "d?"],
        "answer": ["a", "b", "c", "d"],
    }
    features = Features(images=List(Image()), question=Value("string"), answer=Value("string"))
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    samples = data_task(DataConfig(str(tmp_path / "rows.parquet")), find_metric("exact_match")).samples
    groups = [sample.group for sample in samples]
    assert groups[0] == groups[2] and len(set(groups)) == 3
    assert load_image(samples[1].images()[0]).size == (8, 6) and samples[3].images() == []


def test_every_turn_of_a_conversation_is_a_question(tmp_path):
    name = blank_image(tmp_path)
    texts = [{"user": "Which colour?", "assistant": "grey"}, {"user": "Which shape?", "assistant": "none"}]
    first, second = task_of(tmp_path, [{"images": [name], "texts": texts}]).samples
    assert (first.prompt, first.targets) == ("Which colour?", ("grey",))
    assert (second.id, second.prompt, second.targets) == ("1.2", "Which shape?", ("none",))
    assert first.group == second.group and len(second.images()) == 1
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "grey"}]},
    ]
    (sample,) = task_of(tmp_path, [{"images": [name], "messages": messages}]).samples
    assert (sample.prompt, sample.targets) == ("What?", ("grey",)) and len(sample.images()) == 1


def test_each_row_may_have_answer_or_answers(tmp_path):
    rows = [{"question": "?", "answer": "3"}, {"question": "?", "answers": ["4", "four"]}]
    assert [sample.targets for sample in task_of(tmp_path, rows).samples] == [("3",), ("4", "four")]


def test_an_index_among_gaps_is_still_an_index(tmp_path):
    """A column of integers with a null becomes one of floats."""
    rows = [
        {"question": "?", "choices": ["red", "blue"], "answer": 1.0, "answers": None},
        {"question": "?", "choices": ["red", "blue"], "answer": None, "answers": [0.0]},
    ]
    assert [sample.targets for sample in task_of(tmp_path, rows).samples] == [("B",), ("A",)]


def test_too_few_answers_for_a_metric_are_told_once(tmp_path):
    rows = [{"question": "?", "answers": ["3"] * count} for count in (1, 3, 4)]
    config = DataConfig(str(save_rows(tmp_path / "rows.jsonl", rows)), allow_text_only=True)
    metric = find_metric("vqa_accuracy")
    task = data_task(config, metric)
    assert [metric.score("3", one.targets, {}) == 1 for one in task.samples] == [False, False, True]
    assert str(task).count("2 questions have fewer than 4 answers (some have 1)") == 1
    assert "warning" not in str(data_task(config, find_metric("exact_match")))


# ------------------------------------------------------------------------------------- what is refused
ROW = {"question": "How many?", "answer": "3", "image": "a.png"}


@pytest.mark.parametrize(
    ("rows", "config", "sentence"),
    [
        ([{"query": "?", "answer": "3"}], {}, "no column question; it has query, answer: name yours with"),
        ([{"question": "?"}], {}, "no column answer or answers; it has question"),
        ([ROW], {"columns": {"question": "query"}}, "no column query; it has question, answer, image"),
        ([ROW], {"columns": {"colour": "question"}}, "--columns: expected names out of question, answer"),
        ([ROW, ROW | {"answer": []}], {}, "row 2: expected at least one answer, got []"),
        ([ROW | {"answer": None}, ROW | {"answer": " "}], {}, "got none (and 1 more such rows)"),
        ([ROW | {"question": ""}], {}, "row 1: expected a question, got ''"),
        ([ROW | {"id": "a"}, ROW | {"id": "a"}], {}, "two questions have the id 'a'"),
        ([ROW], {"prompt": "{question} {hint}"}, "no column hint; it has question, answer, image"),
        ([ROW], {"prompt": "{question"}, "prompt '{question': expected '}'"),
        ([ROW], {"prompt": "{question:>5d}"}, "got a format or conversion of question"),
        ([ROW], {"prompt": "{question!z}"}, "got a format or conversion of question"),
        ([ROW | {"hint": "x"}, ROW], {"prompt": "{hint}"}, "row 2: the prompt needs hint"),
        ([ROW | {"choices": "red"}], {}, "row 1: choices: expected a list of at most 26"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, rows, config, sentence):
    assert sentence in refusal(tmp_path, rows, **config)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = save_rows(tmp_path / "rows.jsonl", [ROW])
    path.write_text(path.read_text() + "{'a': 1}\n")
    with pytest.raises(
        DatasetError, match=r"row 2: expected an object with columns, got rows\.jsonl: a line"
    ):
        data_task(DataConfig(str(path)), find_metric("exact_match"))


def test_nothing_there(tmp_path):
    with pytest.raises(DatasetError, match="no such file or folder"):
        data_task(DataConfig(str(tmp_path / "none.jsonl")), find_metric("exact_match"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DatasetError, match="has no rows"):
        data_task(DataConfig(str(tmp_path / "empty.jsonl")), find_metric("exact_match"))


# -------------------------------------------------------------------------------------- where images are
@pytest.mark.parametrize("streaming", [False, True])
def test_images_in_a_column_of_another_name_are_asked_for(tmp_path, streaming):
    """Else a model would be trained, or scored, on text alone."""
    rows = [{"question": "What?", "answer": "grey", "picture": blank_image(tmp_path)}] * 3
    assert "write --columns image=image" in refusal(tmp_path, rows, allow_text_only=False)
    entry = {"path": str(tmp_path / "rows.jsonl"), "streaming": streaming}
    with pytest.raises(DatasetError, match=r"image may hold images: write columns: {image: image}"):
        open_datasets([entry])
    open_datasets([entry | {"columns": {"image": "picture"}}])
    open_datasets([entry | {"allow_text_only": True}])
    task = task_of(tmp_path, rows, allow_text_only=False, columns={"image": "picture"})
    assert "3 questions about 1 different images" in str(task)


@pytest.mark.parametrize(
    "held",
    [{"bytes": png(), "path": None}, png(), [{"bytes": None, "path": "a.webp"}], "a/B.JPG", "http://a/b.png?c",
     "data:image/png;base64,AAAA"],
)  # fmt: skip
def test_what_looks_like_an_image(held):
    assert looks_like_image(held) and not looks_like_image("a cat. It is grey") and not looks_like_image(7)


def test_rows_of_text_alone_are_meant_or_stand_beside_images(tmp_path):
    sums = [{"question": "1 + 1?", "answer": "2"}]
    text = {"path": str(save_rows(tmp_path / "text.jsonl", sums)), "name": "sums"}
    for refused in (
        lambda: open_datasets([text]),
        lambda: data_task(DataConfig(text["path"]), find_metric("exact_match")),
    ):
        with pytest.raises(DatasetError, match=r"no image .* their columns are question, answer: write"):
            refused()
    seen = {"question": "What?", "answer": "grey", "image": blank_image(tmp_path)}
    mixed = save_rows(tmp_path / "mixed.jsonl", [*sums, seen])
    open_datasets([text, {"path": str(mixed)}])
    open_datasets([text | {"allow_text_only": True}])
    task = data_task(DataConfig(str(mixed)), find_metric("exact_match"))
    assert "2 questions about 1 different images" in str(task)


@pytest.mark.parametrize(
    "named", ["/{}/secret.png", "../secret.png", "a/../../secret.png", "link.png", "~/x.png"]
)
def test_rows_name_no_file_outside_of_their_folder(tmp_path, monkeypatch, named):
    blank_image(tmp_path, "secret.png")
    (tmp_path / "x.png").symlink_to(tmp_path / "secret.png")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)  # a path that begins in "." could be of a home
    named = named.format(str(tmp_path).strip("/"))
    path = str(save_rows(folder / "rows.jsonl", [{"question": "?", "answer": "a", "image": named}]))
    for where in (path, "rows.jsonl"):
        if named.startswith("~"):  # a folder of that name, which is not there
            (source,) = data_task(DataConfig(where), find_metric("exact_match")).samples[0].images()
            with pytest.raises(ImageError, match="no such file"):
                load_image(source)
            continue
        for refused in (
            lambda where=where: open_datasets([{"path": where}]),
            lambda where=where: data_task(DataConfig(where), find_metric("exact_match")),
        ):
            with pytest.raises(DatasetError, match="outside of the dataset's folder"):
                refused()
        task = data_task(DataConfig(where, allow_outside=True), find_metric("exact_match"))
        assert load_image(task.samples[0].images()[0]).size == (48, 48)
        (source,) = open_datasets([{"path": where, "allow_outside": True}]).sources
        assert len(source.schema.images(source.rows[0])) == 1


def test_a_snapshot_of_the_hubs_cache_links_to_its_own_files(tmp_path):
    cache = tmp_path / "datasets--a--b"
    folder = cache / "snapshots" / "7e8d9f"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    blank_image(cache / "blobs", "0a1b.png")
    (folder / "a.png").symlink_to("../../blobs/0a1b.png")
    path = save_rows(folder / "rows.jsonl", [{"question": "?", "answer": "a", "image": "a.png"}])
    (sample,) = data_task(DataConfig(str(path)), find_metric("exact_match")).samples
    assert load_image(sample.images()[0]).size == (48, 48)
