"""generate.py batch with folders and names of images, and shards of any batch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from data.images import load_image
from inference.batch_files import questions_of_images
from models.vision_language_model import VisionLanguageModel
from tests.house import edit_json, json_lines
from tests.processors import draw_image

ALONE = ("answers", "token_ids", "stop_reasons", "prompt_tokens", "image_tokens")
NAMES = ("b.png", "a.JPG", "deep/er/c.webp", "deep/a b.png", "B.png", "deep/[1].png")
ASK = ("-q", "how many?", "--max-new-tokens", 5)


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """A folder of images and of what else people and systems leave in folders; the tests start beside it."""
    folder = tmp_path / "photos"
    for number, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        draw_image(20 + 9 * number, 30, seed=number).save(folder / name)
    others = (".DS_Store", "Thumbs.db", "notes.txt", "deep/more.TXT", "README", ".hidden/x.png", "._b.png")
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no image")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.png")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def run(cli):
    """Run a batch into a file: (its records, stderr)."""

    def run(*arguments, out="out.jsonl", status=(0,), **options) -> tuple[list[dict], str]:
        got, printed, err = cli("batch", *arguments, "--out", out, **options)
        assert got in status and printed == "", err
        return json_lines(Path(out)), err

    return run


def test_each_image_of_a_folder_as_alone(photos, run, as_json):
    records, err = run("photos", *ASK, "--batch-size", 3)
    assert [record["id"] for record in records] == sorted(NAMES)
    assert "6 questions" in err
    for record in records:
        assert (
            record["images"] == [record["id"]] and record["question"] == "how many?" and "line" not in record
        )
        (single,) = as_json(photos / record["id"], *ASK)
        assert {key: record[key] for key in ALONE} == {key: single[key] for key in ALONE}


def test_several_questions_have_ids_of_their_own(photos, run):
    one, _ = run("photos", *ASK, out="one.jsonl")
    records, err = run("photos", *ASK, "-q", "what is it?", "Where is it?")
    assert [record["id"] for record in records] == [
        f"{name}#{n}" for name in sorted(NAMES) for n in (1, 2, 3)
    ]
    assert "18 answered" in err
    numbered = {(record["id"].partition("#")[2], record["question"]) for record in records}
    assert len(numbered) == len(dict(numbered)) == 3
    firsts = [record for record in records if record["question"] == "how many?"]
    assert [r["answers"] for r in firsts] == [r["answers"] for r in one]


def test_unreadable_images_are_reported_and_do_not_stop_the_run(photos, run):
    whole = (photos / "b.png").read_bytes()
    (photos / "cut.png").write_bytes(whole[: len(whole) // 2])
    (photos / "empty.png").write_bytes(b"")
    (photos / "gone.png").symlink_to("nowhere.png")
    (photos / "text.jpg").write_text("a page of text")
    records, err = run("photos", *ASK, status=(1,))
    bad = {record["id"]: record["error"] for record in records if "error" in record}
    assert bad.keys() == {"cut.png", "empty.png", "gone.png", "text.jpg"}
    assert all(name in said and name in err and "\n" not in said for name, said in bad.items())
    assert "6 answered, 4 failed, 0 skipped" in err
    shutil.copy(photos / "b.png", photos / "cut.png")
    records, err = run("photos", *ASK, status=(1,))
    assert (
        "1 answered, 3 failed, 6 skipped" in err
        and "answers" in dict((r["id"], r) for r in records)["cut.png"]
    )


def test_a_folder_that_cannot_be_read_is_told(photos, run, monkeypatch):
    scan = os.scandir

    def refused(path):
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    records, err = run("photos", *ASK, status=(1,))
    assert len(records) == 5 and "deep/er: Permission denied" in err


# --------------------------------------------------------------------------------------------- which images
def ids(*names: str) -> list[str]:
    return [name for name, _ in questions_of_images(names, ["what?"]).entries]


def test_names_and_folders(photos):
    deep = [f"photos/{name}" for name in sorted(NAMES) if name.startswith("deep/")]
    assert ids("photos/") == ids(str(photos)) == sorted(NAMES)
    assert ids("photos/b.png", "photos/B.png") == ["photos/B.png", "photos/b.png"]
    assert ids("photos/deep", "photos/deep/er") == deep
    shown = [f"photos/{name.name}" for name in photos.iterdir() if not name.name.startswith(".")]
    shown.remove("photos/loop")
    assert ids(*shown) == [f"photos/{name}" for name in sorted(NAMES)]  # as a shell writes photos/*
    assert ids("photos/deep/[1].png", "photos/b.png")[1] == "photos/deep/[1].png"
    assert ids("./photos/b.png", "photos/../photos/b.png", "photos/B.png") == ["photos/B.png", "photos/b.png"]


def test_names_that_are_no_text_or_look_like_something_else(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [b"\xff\xfe.png", b"~root.png", b"data:a.png", b"#1.png", "é".encode() + b'".png']
    for number, name in enumerate(names):
        draw_image(20, 20, seed=number).save(tmp_path / "x.png")
        os.replace(tmp_path / "x.png", os.path.join(os.fsencode(tmp_path), name))
    for arguments in ((".",), tuple(map(os.fsdecode, names))):
        records, err = run(*arguments, *ASK, out="out-of-it.jsonl")
        assert sorted(os.fsencode(record["id"]) for record in records) == sorted(names), err
        _, err = run(*arguments, *ASK, out="out-of-it.jsonl")
        assert "0 answered, 0 failed, 5 skipped" in err


def test_images_are_read_when_their_turn_comes(photos, run, monkeypatch):
    """Ten thousand need no memory for ten thousand."""
    for number in range(40):
        draw_image(16, 16, seed=number).save(photos / f"more-{number}.png")
    opened, ahead = [], []

    def noted(source, *limits):
        opened.append(source)
        written = len(Path("out.jsonl").read_text().splitlines())
        ahead.append(len(opened) - written)
        return load_image(source, *limits)

    monkeypatch.setattr("data.visuals.load_image", noted)
    records, _ = run("photos", *ASK, "--batch-size", 2)
    assert len(records) == len(opened) == 46 and max(ahead) <= 5


# ------------------------------------------------------------------------------------------------- resuming
def test_a_folder_that_grew_is_gone_on_with_and_one_that_shrank_is_not(photos, run, complaint):
    first, _ = run("photos", *ASK)
    draw_image(33, 33).save(photos / "aa.png")
    grown, err = run("photos", *ASK)
    assert "1 answered, 0 failed, 6 skipped" in err
    assert [r for r in grown if r["id"] != "aa.png"] == first and [r["id"] for r in grown] == ids("photos")
    kept = Path("out.jsonl").read_text()
    Path("out.jsonl").write_text(kept[: len(kept) * 2 // 3])  # as a kill leaves it
    again, _ = run("photos", *ASK)
    assert again == grown and Path("out.jsonl").read_text() == kept
    arguments = ("batch", "photos", "--out", "out.jsonl", "--max-new-tokens", 5)
    assert "another" in complaint(*arguments, "-q", "why?")
    (photos / "aa.png").unlink()
    assert "aa.png" in complaint(*arguments, "-q", "how many?")
    assert Path("out.jsonl").read_text() == kept


# --------------------------------------------------------------------------------------------------- shards
def joined(run, count: int, *arguments) -> list[dict]:
    """The records of all shards of a batch, one file after another, which are then made one by a run that has
    nothing left to do; in one order of the shards, which is not theirs."""
    parts = []
    for number in [*range(2, count + 1), 1]:
        records, _ = run(*arguments, "--shard", f"{number}/{count}", out=f"part-{number}.jsonl")
        parts += records
        assert run(*arguments, "--shard", f"{number}/{count}", out=f"part-{number}.jsonl")[0] == records
    Path("joined.jsonl").write_text("".join(Path(f"part-{n}.jsonl").read_text() for n in range(1, count + 1)))
    return parts


def test_shards_of_a_folder_are_one_run(photos, run, monkeypatch):
    arguments = ("photos", *ASK, "-q", "what is it?")
    whole, _ = run(*arguments)
    parts = joined(run, 3, *arguments)
    assert sorted(parts, key=lambda record: record["id"]) == whole
    monkeypatch.setattr(VisionLanguageModel, "from_pretrained", None)  # there is nothing to ask it
    run(*arguments, out="joined.jsonl")
    assert Path("joined.jsonl").read_bytes() == Path("out.jsonl").read_bytes()


def test_shards_of_a_file_are_one_run(photos, run):
    lines = [
        {"image": f"photos/{name}", "question": f"how many {n}?", "id": n} for n, name in enumerate(NAMES)
    ]
    lines += [
        {"question": "what?"},
        {"image": "photos/absent.png", "question": "what?"},
        lines[1] | {"id": "z"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{half\n\n"
    Path("questions.jsonl").write_text(text)
    arguments = ("questions.jsonl", "--max-new-tokens", 4)
    whole, _ = run(*arguments, status=(1,))
    parts = []
    for number in (1, 2, 3):
        shard = ("--shard", f"{number}/3")
        records, _ = run(*arguments, *shard, out=f"part-{number}.jsonl", status=(0, 1))
        assert abs(len(records) - len(whole) / 3) < 1
        parts += records
    assert sorted(parts, key=lambda record: record["line"]) == whole


def test_an_image_stays_in_its_shard_whatever_comes_beside_it(photos):
    def shards() -> dict[str, int]:
        found = questions_of_images(["photos"], ["how many?", "what?"])
        return {key: n for n in range(1, 6) for key, _ in found.part(found.entries, n, 5)}

    before = shards()
    assert len(before) == 12 and all(before[f"{name}#1"] == before[f"{name}#2"] for name in NAMES)
    for number in range(200):
        (photos / f"{number}.png").write_bytes(b"")
    after = shards()
    assert {key: after[key] for key in before} == before
    assert all(60 < sum(shard == n for shard in after.values()) < 105 for n in range(1, 6))


# ----------------------------------------------------------------------------------- boxes, forms, mistakes
@pytest.fixture(scope="module")
def boxes_folder(model_folder, tmp_path_factory) -> Path:
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("model") / "boxes")
    path = folder / "generation_config.json"
    edit_json(path, coordinates="qwen3-vl")
    return folder


def test_things_are_located_in_each_image(photos, run, as_json, boxes_folder, complaint):
    asked = ("--detect", "red circle", "--point", "star", "--max-new-tokens", 5)
    records, _ = run("photos", *asked, model=boxes_folder)
    assert len(records) == 12
    for name in ("b.png", "deep/a b.png"):
        alone = as_json(photos / name, *asked, model=boxes_folder)
        for number, single in enumerate(alone, 1):
            (record,) = [record for record in records if record["id"] == f"{name}#{number}"]
            for key in (*ALONE, "question", "boxes", "points", "malformed"):
                assert record[key] == single[key], key
    assert "--box-format" in complaint("batch", "photos", *asked, "--out", "x.jsonl")
    named = ("--point", "star", "--box-format", "qwen2.5-vl", "--max-new-tokens", 5)
    records, _ = run("photos", *named, out="named.jsonl")
    (single,) = as_json(photos / "b.png", *named)
    (record,) = [record for record in records if record["id"] == "b.png"]
    assert record["points"] == single["points"] and record["options"]["box_format"] == "qwen2.5-vl"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("batch photos --out o", "-q"),
        ("batch photos/b.png --out o", "-q"),
        ("batch photos -q x", "--out"),
        ("batch x? --out o", "question only"),
        ("batch phots -q x --out o", "phots"),
        ("batch photos/*.gif -q x --out o", "photos/*.gif"),
        ("batch questions.jsonl --describe --out o", "its lines"),
        ("batch photos -q x --out o --shard 9/8", "--shard"),
        ("batch photos -q x --out o --shard 1/2 --temperature 1", "--seed"),
    ],
)
def test_mistakes(photos, complaint, arguments, named):
    assert named in complaint(*arguments.split())
    assert not Path("o").exists()


def test_a_folder_without_images(tmp_path, complaint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    assert "no images" in complaint("batch", "empty", *ASK, "--out", "o")


def test_very_many_images_in_one_question_are_an_error(photos, complaint):
    assert "batch" in complaint(*[photos / name for name in NAMES] * 50, *ASK)
