"""Rows of any layout as questions: what is asked, what is accepted, and what is refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
from datasets import Dataset, Features, Image, List, Value

from data.errors import DatasetError
from data.images import load_image
from data.sources import DatasetConfig, open_datasets
from eval.held_out import scored_tasks
from eval.metrics import find_metric
from eval.results import summarise
from eval.rows import Asking, data_task
from eval.run import evaluate
from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from tests import lfm2_checkpoints, qwen_checkpoints
from tests.clips import noise, write_animation
from tests.evaluations import blank_image, run, samples_of, save_rows
from tests.rows import ListStream, png
from training.config import TrainConfig

EXACT = find_metric("exact_match")
ROW = {"question": "How many?", "answer": "3", "image": "a.png"}
CHOICE = {"question": "Which?", "choices": ["red", "blue"]}


def task_of(tmp_path, rows: list[dict], allow_text_only: bool = True, metric=EXACT, **config):
    path = str(save_rows(tmp_path / "rows.jsonl", rows))
    asked = {key: config.pop(key) for key in [*config] if key in Asking.__dataclass_fields__}
    entry = DatasetConfig(path, split="", allow_text_only=allow_text_only, **config)
    return data_task(entry, metric, Asking(**asked))


def test_rows_become_samples(tmp_path):
    name = blank_image(tmp_path)
    rows = [
        {"pic": name, "q": "How many?", "answers": ["3", "three", "three"], "hint": "few", "kind": "k"},
        {"pic": name, "q": "How {old}?", "answers": 7, "hint": None},
        {"pic": name, "q": "Beyond the limit?", "answers": 7},
    ]
    columns = {"question": "q", "image": "pic", "family": "kind"}
    task = task_of(
        tmp_path, rows, False, columns=columns, prompt="{question}\nBriefly.", system="Hi.", limit=2
    )
    first, second = task.samples
    assert first.prompt == "How many?\nBriefly." and second.prompt == "How {old}?\nBriefly."
    assert first.targets == ("3", "three", "three") and second.targets == ("7",)
    assert first.likeliest_target == "three" and task.majority() == {"k": "three", "": "7"}
    assert (first.id, second.id, first.system) == ("1", "2", "Hi.") and first.group == second.group
    assert (first.fields["hint"], first.family) == ("few", "k") and "pic" not in first.fields
    assert load_image(first.images()[0]).size == (48, 48)
    assert "2 questions about 1 different image" in str(task)


def test_what_is_in_json_or_constant_does_not_hide_what_a_row_has(tmp_path):
    """A column that happens to be called json; and a name of ours for rows of conversations."""
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "3"}]
    for row in (ROW | {"json": {"answers": ["x", "y"]}}, {"messages": turns}):
        (sample,) = task_of(tmp_path, [row], constants={"family": "k"}).samples
        assert sample.targets == ("3",) and sample.family == "k"


def test_rows_are_read_as_training_reads_them(tmp_path, monkeypatch):
    """Columns within others, constants, names of numbers and a folder of images, from an entry of a recipe,
    as `--data` here takes it and as `--eval-data` with `--eval-metric` does."""
    (tmp_path / "images").mkdir()
    blank_image(tmp_path / "images")
    rows = [{"meta": {"class": at, "about": "grey.png"}} for at in (1, 2)]
    entry = {
        "path": str(save_rows(tmp_path / "rows.jsonl", rows)),
        "image_folder": str(tmp_path / "images"),
        "columns": {"answer": "meta.class", "image": "meta.about"},
        "constants": {"question": "What is it?", "system": "Be brief."},
        "names": ["cat", "dog", "owl"],
    }
    tasks: list = []
    monkeypatch.setattr("eval.command._run_own", lambda task, *_: tasks.append(task))
    assert run("--data", json.dumps([entry])) == 0
    tasks += scored_tasks(
        TrainConfig(init_from="x", data="rows.jsonl", eval_data=[entry], eval_metric="exact_match"), None
    )
    assert len(tasks) == 2
    for task in tasks:
        assert [(one.prompt, one.targets) for one in task.samples] == [
            ("What is it?", ("dog",)), ("What is it?", ("owl",)),
        ]  # fmt: skip
        assert all(one.system == "Be brief." and one.shows == ("grey.png",) for one in task.samples)
        assert load_image(task.samples[0].images()[0]).size == (48, 48)
    assert run("--data", json.dumps([entry, entry])) == 2
    assert run("--data", json.dumps([entry | {"name": "mine"}])) == 0 and tasks[-1].name == "mine"
    for idle in ({"streaming": True}, {"weight": 2}, {"boxes": {"corners": True}}):
        assert run("--data", json.dumps([entry | idle])) == 2


def test_of_a_few_questions_about_rows_of_the_hub_few_rows_are_read(monkeypatch):
    """Not the whole split; and what is asked is the same."""
    rows = [{"question": f"What is {i}?", "answer": f"{i}", "image": png(seed=i)} for i in range(500)]
    stream = ListStream(rows)

    def open_rows(path, subset, split, streaming, revision):
        return (stream if streaming else rows), None

    monkeypatch.setattr("eval.rows.open_rows", open_rows)
    few = data_task(DatasetConfig("owner/rows", split=""), EXACT, Asking(limit=7))
    seen = stream.rows_read
    every = data_task(DatasetConfig("owner/rows", split=""), EXACT)
    assert len(every.samples) == 500 and stream.rows_read == seen < 350  # the first ones are looked at, too
    assert few.samples and [sample.prompt for sample in few.samples] == [f"What is {i}?" for i in range(7)]
    assert [sample.images()[0] for sample in few.samples] == [row["image"] for row in rows[:7]]


@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ({"answers": {"text": ["yes", "ja"]}}, ("yes", "ja")),
        ({"answers": [{"answer": "yes"}, {"answer": "ja"}]}, ("yes", "ja")),
        ({"answers": ["yes", None, "ja"]}, ("yes", "ja")),
        ({"answer": "3", "answers": None}, ("3",)),
        (CHOICE | {"answer": 1}, ("B",)),
        (CHOICE | {"answer": "A"}, ("A",)),
        (CHOICE | {"answer": None, "answers": [0.0]}, ("A",)),  # a column of integers with a null
    ],
)
def test_answers_as_known_sets_hold_them(tmp_path, row, targets):
    (sample,) = task_of(tmp_path, [{"question": "Is it?"} | row]).samples
    assert sample.targets == targets
    if "choices" in row:
        assert sample.prompt.startswith("Which?\nA. red\nB. blue\nAnswer with the option's letter")
        assert sample.fields["choices"] == ["red", "blue"]


def test_images_in_parquet_are_grouped_by_their_bytes_and_opened_late(tmp_path):
    rows = {"images": [[png(seed=0)], [png(seed=1)], [png(seed=0)], []]}
    rows |= {"question": ["a?", "b?", "c?", "d?"], "answer": ["a", "b", "c", "d"]}
    features = Features(images=List(Image()), question=Value("string"), answer=Value("string"))
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    samples = data_task(DatasetConfig(str(tmp_path / "rows.parquet")), EXACT).samples
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "lfm2_vl"])
def test_videos_of_rows_are_asked_about(tmp_path, kind):
    """As everywhere, by models that take them and those that are shown frames; one that is broken scores 0,
    and blanked they are as long."""
    save = lfm2_checkpoints.save_hf if kind == "lfm2_vl" else partial(qwen_checkpoints.save_hf, kind)
    save(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model", device="cpu")
    for number in range(2):
        write_animation(tmp_path / f"{number}.gif", noise(6, 64, 48, number), 250)
    (tmp_path / "broken.gif").write_bytes(b"GIF89a and no more")
    still = blank_image(tmp_path)
    parts = [{"type": "video"}, {"type": "text", "text": "which colour"}]
    rows = [{"question": "how many", "answer": "two", "video": f"{one}.gif"} for one in (0, 0, 1, "broken")]
    rows[1] |= {"question": "how many red", "image": still}
    task = task_of(tmp_path, rows, False)
    assert len({sample.group for sample in task.samples}) == 4
    assert "4 questions about 4 different" in str(task)
    results = evaluate(checkpoint, task, tmp_path / "out", 2, controls=True)
    assert [one["id"] for one in results["errors"]["samples"]] == ["4"]
    blind = {one["id"]: one["answer"] for one in samples_of(tmp_path / "out", "samples-blind.jsonl")}
    assert len(blind) == 4
    for record in samples_of(tmp_path / "out"):
        row = rows[int(record["id"]) - 1]
        shown = [tmp_path / row["image"]] if "image" in row else []
        shown += [] if row["video"] == "broken.gif" else checkpoint.processor.visuals(tmp_path / row["video"])
        if record["id"] != "4":
            reply = ask(checkpoint, shown, row["question"], GenerationOptions(max_new_tokens=32))
            assert [record["answer"]] == reply.finish()["answers"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/webp") >= 3
    asked = ["--data", tmp_path / "rows.jsonl", "--model", tmp_path / "model", "--max-new-tokens", 4]
    for most, status in ((4, 0), (4, 0), (6, 2 if kind == "qwen3_vl" else 0)):  # frames are part of a score
        assert run(*asked, "--max-frames", most, "--output", tmp_path / "few") == status
    earlier = json.loads((tmp_path / "few" / "run.json").read_text())
    del earlier["model"]["frames"]  # as in folders of versions without videos, which are resumed
    (tmp_path / "few" / "run.json").write_text(json.dumps(earlier))
    assert run(*asked, "--max-frames", 4, "--output", tmp_path / "few") == 0
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    (sample,) = task_of(tmp_path, [{"messages": messages, "videos": ["0.gif"]}], False).samples
    (clip,) = sample.images()
    assert clip.count == 6 and len(sample.shows) == 1


def test_too_few_answers_for_a_metric_are_reported(tmp_path):
    rows = [{"question": "?", "answers": ["3"] * count} for count in (1, 3, 4)]
    assert "fewer than the 4 answers" in str(task_of(tmp_path, rows, metric=find_metric("vqa_accuracy")))


@pytest.mark.parametrize(
    ("rows", "config", "named"),
    [
        ([{"query": "?", "answer": "3"}], {}, "question"),
        ([{"question": "?"}], {}, "answer or answers"),
        ([ROW], {"columns": {"question": "query"}}, "query"),
        ([ROW], {"columns": {"colour": "question"}}, "colour"),
        ([ROW | {"answer": None}, ROW | {"answer": " "}], {}, "1 more"),
        ([ROW, ROW | {"question": ""}], {}, "row 2"),
        ([ROW, "no JSON"], {}, "row 2"),
        ([ROW | {"id": "a"}, ROW | {"id": "a"}], {}, "id 'a'"),
        ([ROW], {"prompt": "{question} {hint}"}, "hint"),
        ([ROW], {"prompt": "{question"}, "{question"),
        ([ROW], {"prompt": "{question:>5d}"}, "question:>5d"),
        ([ROW | {"hint": "x"}, ROW], {"prompt": "{hint}"}, "row 2"),
        ([ROW | {"choices": "red"}], {}, "choices"),
        ([CHOICE | {"answer": 2}], {}, "answer 2"),
        ([], {}, "no rows"),
        ([{"question": "?", "answer": "a", "pic": "a.png"}], {"allow_text_only": False}, "image=pic"),
        ([{"question": "?", "answer": "a"}], {"allow_text_only": False}, "--allow-text-only"),
    ],
)
def test_mistakes_name_the_row_or_the_column(tmp_path, rows, config, named):
    with pytest.raises(DatasetError) as caught:
        task_of(tmp_path, rows, **config)
    assert named in str(caught.value)


@pytest.mark.parametrize("named", ["/{}/secret.png", "../secret.png", "a/../../secret.png", "link.png"])
def test_rows_name_no_file_outside_of_their_folder(tmp_path, monkeypatch, named):
    """What they name would be shown to a model and kept in reports."""
    blank_image(tmp_path, "secret.png")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    monkeypatch.chdir(folder)
    named = named.format(str(tmp_path).strip("/"))
    path = str(save_rows(folder / "rows.jsonl", [{"question": "?", "answer": "a", "image": named}]))
    for where in (path, "rows.jsonl"):
        with pytest.raises(DatasetError, match="outside"):
            data_task(DatasetConfig(where), EXACT)
        (sample,) = data_task(DatasetConfig(where, allow_outside=True), EXACT).samples
        assert load_image(sample.images()[0]).size == (48, 48)


# ------------------------------------------------------------------------ the same rules where one trains
def test_images_in_a_column_of_another_name_are_missed(tmp_path):
    """Otherwise a model would be trained on text alone."""
    rows = [{"question": "What?", "answer": "grey", "picture": blank_image(tmp_path)}] * 3
    entry = {"path": str(save_rows(tmp_path / "rows.jsonl", rows))}
    with pytest.raises(DatasetError, match="picture"):
        open_datasets([entry])
    open_datasets([entry | {"columns": {"image": "picture"}}])
    open_datasets([entry | {"allow_text_only": True}])


def test_a_snapshot_of_the_hubs_cache_links_to_its_own_files(tmp_path):
    cache = tmp_path / "datasets--a--b"
    folder = cache / "snapshots" / "7e8d9f"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    blank_image(cache / "blobs", "0a1b.png")
    (folder / "a.png").symlink_to("../../blobs/0a1b.png")
    path = save_rows(folder / "rows.jsonl", [{"question": "?", "answer": "a", "image": "a.png"}])
    (sample,) = data_task(DatasetConfig(str(path)), EXACT).samples
    assert load_image(sample.images()[0]).size == (48, 48)


def test_labels_in_a_csv_are_held_out_by_class_and_have_a_confusion_table(tmp_path):
    name = blank_image(tmp_path)
    labels = ["cat", "dog"] * 10 + ["owl"] * 8
    (tmp_path / "rows.csv").write_text("photo,label\n" + "".join(f"{name},{one}\n" for one in labels))
    columns, constants = {"answer": "label", "image": "photo"}, {"question": "What is it?"}
    entry = DatasetConfig(str(tmp_path / "rows.csv"), columns=columns, constants=constants, split="")
    task = data_task(entry, find_metric("exact_match"), Asking(holdout=0.2))
    said = {"cat": ["Cat", "DOG"], "dog": ["dog", "dog"], "owl": ["an owl", ""]}
    left = {name: list(answers) for name, answers in said.items()}
    records = {}
    for sample in task.samples:
        answer = left[sample.targets[0]].pop(0)
        records[sample.id] = {"answer": answer, "score": task.metric.score(answer, sample.targets, {})}
    assert not any(left.values()), "a fifth of each class"
    cat, dog, owl = summarise(task, records)["classes"]
    assert cat["answers"] == {"cat": 1, "dog": 1} and cat["interval"][0] < 0.5 == cat["score"]
    assert dog["answers"] == {"dog": 2} and owl["answers"] == {"an owl": 1, "": 1} and owl["n"] == 2
    babbled = {id: one | {"answer": f"{id}\n" * 50, "score": 0.0} for id, one in records.items()}
    for row in summarise(task, babbled)["classes"]:
        assert all(len(answer) <= 40 and "\n" not in answer for answer in row["answers"])
