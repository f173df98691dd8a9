"""Rows with boxes as conversations, and boxes that were drawn on another size of their image."""

from __future__ import annotations

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from data.box_rows import BAD_BOX, BoxRows
from data.boxes import COORDINATES
from data.errors import BadRow, DatasetError
from data.images import load_image
from data.loader import Loader, LoaderConfig, asked
from data.processor import Processor, coordinates_of
from data.sources import DatasetConfig, first_rows, open_datasets, open_source
from eval.metrics import find_metric
from eval.rows import Asking, data_task
from eval.tasks import DEFAULT_MODEL
from families.qwen_images import QwenImages
from tests import qwen_checkpoints
from training.rewards import Rewards

SIZE = (200, 100)
PLACE = (40, 20, 90, 60)  # of the one dark thing


def drawn() -> Image.Image:
    image = Image.new("RGB", SIZE, "white")
    image.paste("black", PLACE)
    return image


def dark(image: Image.Image) -> tuple[int, int, int, int]:
    box = image.convert("L").point(lambda level: 255 * (level < 128)).getbbox()
    assert box is not None
    return box


def turns(row: dict, **settings) -> list[tuple[str, str]]:
    """(question, answer) pairs of a row."""
    config = DatasetConfig("rows", boxes=settings)
    messages = open_source([row | {"image": drawn()}], config).schema.conversation(row | {"image": drawn()})
    assert messages is not None
    texts = ["".join(part["text"] for part in one["content"] if part["type"] == "text") for one in messages]
    assert messages[0]["content"][0]["type"] == "image"
    return list(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize(
    "row",
    [
        {"ref": "the block", "bbox": [40, 20, 50, 40]},
        {"ref": ["the block", "a dark thing"], "bbox": [40.0, 20.0, 50.0, 40.0]},
        {"ref": "the block", "bbox": [[40, 20, 50, 40]]},
        {"objects": {"bbox": [[40, 20, 50, 40]], "category": ["the block"]}},
        {"objects": {"bboxes": [[40, 20, 50, 40]], "classes": ["the block"]}},
        {"objects": [{"bbox": [40, 20, 50, 40], "category": "the block"}]},
    ],
)
@pytest.mark.parametrize("form", COORDINATES)
def test_columns_become_questions(row, form):
    ((question, answer),) = turns(row, form=form)
    assert "the block" in question
    found = COORDINATES[form].read(answer, SIZE)
    assert np.allclose(found.boxes[0].box, PLACE, atol=1)


@pytest.mark.parametrize("names", [["cat", "the block"], {"1": "the block"}])
def test_coco_rows_with_numbers_have_the_names_of_the_entry(names):
    config = DatasetConfig("rows", names=names, columns={"objects": "annotations"})
    row = {"image": drawn(), "annotations": [{"bbox": [40, 20, 50, 40], "category_id": 1}]}
    question, answer = open_source([row], config).schema.conversation(row)
    assert "the block" in question["content"][1]["text"] and "the block" in answer["content"][0]["text"]


def test_boxes_that_are_not_read_are_named(caplog):
    row = {"image": drawn(), "question": "Where?", "answer": "There.", "bbox": [40, 20, 50, 40]}
    open_source([row], DatasetConfig("mine"))
    assert any(record.levelname == "WARNING" and "bbox" in record.args for record in caplog.records)
    caplog.clear()
    open_source([row], DatasetConfig("mine", columns={"ref": "question"}))
    assert not caplog.records


def test_what_is_asked_for():
    """Each kind of object once, what is not there too, and corners where the entry says so."""
    read = COORDINATES["qwen3-vl"].read
    boxes = [[0, 0, 10, 10], [40, 20, 50, 40], [20, 0, 10, 10]]
    asked = turns({"objects": {"bbox": boxes, "category": ["cat", "block", "cat"]}})
    assert [len(json.loads(answer)) for _, answer in asked] == [2, 1]
    for nothing in (None, []):
        ((_, answer),) = turns({"ref": "a hat", "bbox": nothing})
        assert answer and not read(answer, SIZE).boxes
    ((_, answer),) = turns({"ref": "the block", "bbox": PLACE}, corners=True)
    assert np.allclose(read(answer, SIZE).boxes[0].box, PLACE, atol=0.2)


@pytest.mark.parametrize(
    "row",
    [
        {"ref": "x", "bbox": [150, 20, 100, 10]},  # leaves the image
        {"ref": "x", "bbox": [10, 20, -5, 10]},
        {"ref": "x", "bbox": [10, 20, float("nan"), 10]},
        {"ref": "x", "bbox": [10, 20, 5]},
        {"ref": "x", "bbox": "10 20 5 5"},
        {"ref": "", "bbox": [10, 20, 5, 5]},
        {"ref": None, "bbox": [10, 20, 5, 5]},
        {"objects": {"bbox": [[1, 2, 3, 4]], "category": [7]}},  # a number is no name
        {"objects": {"bbox": [[1, 2, 3, 4]], "category": []}},
        {"objects": {"bbox": [], "category": []}},
        {"objects": None},
    ],
)
def test_bad_boxes_are_bad_rows(row):
    with pytest.raises(BadRow) as error:
        turns(row)
    assert error.value.reason == BAD_BOX


def stored(upright: Image.Image, orientation: int) -> bytes:
    """A file whose EXIF turns what it holds into `upright`."""
    back = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 5: Image.Transpose.TRANSPOSE}
    back |= {7: Image.Transpose.TRANSVERSE, 3: Image.Transpose.ROTATE_180}
    image, exif, file = upright, Image.Exif(), io.BytesIO()
    if orientation in back:
        image = upright.transpose(back[orientation])
    exif[274] = orientation
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("layout", ["objects", "bbox"])
@pytest.mark.parametrize("shrunk", [1, 2, 2.7, 0.5])
@pytest.mark.parametrize("orientation", [1, 6])
def test_boxes_are_brought_to_the_image_that_is_there(orientation, shrunk, layout):
    """Drawn on a larger or smaller copy of it, upright."""
    size = round(SIZE[0] / shrunk), round(SIZE[1] / shrunk)
    image = stored(drawn().resize(size, Image.Resampling.BOX), orientation)
    x1, y1, x2, y2 = dark(drawn())
    row = {"image": image, "width": SIZE[0], "height": SIZE[1]}
    box = [x1, y1, x2 - x1, y2 - y1]
    one = {"objects": {"bbox": [box], "category": ["it"]}, "bbox": {"ref": "it", "bbox": box}}
    row |= {"objects": one["objects"]} if layout == "objects" else one["bbox"]
    source = open_source([row], DatasetConfig("rows"))
    question, answer = source.schema.conversation(row)
    assert load_image(question["content"][0]["image"]).size == size
    (found,) = COORDINATES["qwen3-vl"].read(answer["content"][0]["text"], size).boxes
    assert np.allclose(found.box, [at / shrunk for at in PLACE], atol=1)


@pytest.mark.parametrize("name", ["file_name", "coco_url"])
def test_a_shrunk_copy_of_a_coco_image(tmp_path, name):
    """Of COCO's file, LVIS's and a row with its size, in training and evaluation."""
    right = [105, 112, 342, 448]
    Image.new("RGB", (190, 125)).save(tmp_path / "1.png")
    image = {
        "id": 1,
        "width": 380,
        "height": 250,
        name: "1.png" if name == "file_name" else "http://x/./1.png",
    }
    found = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [40, 28, 90, 84]}
    whole = {"images": [image], "annotations": [found], "categories": [{"id": 1, "name": "it"}]}
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(whole))
    (source,) = open_datasets([{"path": str(path)}]).sources
    _, answer = source.schema.conversation(source.rows[0])
    assert json.loads(answer["content"][0]["text"])[0]["bbox_2d"] == right
    (sample,) = data_task(DatasetConfig(str(path)), find_metric("boxes"), Asking(boxes=BoxRows())).samples
    assert json.loads(sample.targets[0])[0]["bbox_2d"] == right
    assert np.allclose(sample.fields["boxes"], [[20, 14, 65, 56]])
    row = {"width": 380, "height": 250, "ref": "it", "bbox": [40, 28, 90, 84]}
    row |= {"image": Image.new("RGB", (190, 125))}
    _, answer = open_source([row], DatasetConfig("rows")).schema.conversation(row)
    assert json.loads(answer["content"][0]["text"])[0]["bbox_2d"] == right


@pytest.mark.parametrize(
    "size", [(100, 200), (300, 100), (205, 100), (-200, -100), ("200", "100"), (float("nan"), 100), (True, 1)]
)
def test_boxes_of_another_image_are_a_bad_row(size):
    row = {"ref": "it", "bbox": [1, 1, 2, 2], "image": drawn()} | dict(zip(("width", "height"), size))
    with pytest.raises(BadRow) as error:
        open_source([row], DatasetConfig("rows")).schema.conversation(row)
    assert error.value.reason == BAD_BOX


@pytest.mark.parametrize("size", [(None, None), (0, 0), (None, 100), (200, 100), (201, 100), (400.0, 200)])
def test_an_unknown_size_and_a_rounded_one_pass(size):
    row = {"ref": "it", "bbox": [1, 1, 2, 2], "image": drawn()} | dict(zip(("width", "height"), size))
    assert open_source([row], DatasetConfig("rows")).schema.conversation(row)


@pytest.mark.parametrize("boxes", [{"form": "qwen9"}, {"corner": True}, {"corners": "yes"}])
def test_bad_settings(boxes):
    with pytest.raises(DatasetError):
        DatasetConfig.from_dict({"path": "rows", "boxes": boxes})


@pytest.mark.parametrize("kind", qwen_checkpoints.QWEN)
def test_a_family_learns_its_own_form_for_the_image_that_it_sees(kind):
    """However the image is resized for the model."""
    images = QwenImages(qwen_checkpoints.image_settings(kind, most=10_000))
    said, tokenizer = coordinates_of({"model_type": kind}, {}), qwen_checkpoints.tokenizer()
    processor = Processor(images, tokenizer, qwen_checkpoints.TEMPLATE, coordinates=said)
    for times in range(1, 9):
        image = drawn().resize((SIZE[0] * times, SIZE[1] * times), Image.Resampling.NEAREST)
        row = {"ref": "the block", "bbox": [one * times for one in (40, 20, 50, 40)], "image": image}
        source = open_source([row], DatasetConfig("rows"))
        _, answer = source.schema.conversation(row, processor.form)
        steps = images.cut(image).parts.shape[:1:-1] if kind == "qwen2_5_vl" else (1000, 1000)
        (thing,) = json.loads(answer["content"][0]["text"])
        pixels = [one * image.size[at % 2] / steps[at % 2] for at, one in enumerate(thing["bbox_2d"])]
        assert np.allclose(
            pixels, dark(image), atol=1 + max(image.width / steps[0], image.height / steps[1]) / 2
        )


@pytest.mark.parametrize(
    ("layout", "stored"), [("columns", "saved"), ("list", "parquet"), ("ref", "stream"), ("list", "stream")]
)
def test_numbered_categories_have_the_names_of_the_library(tmp_path, layout, stored):
    """COCO's `objects` as Hub datasets have them, in training and evaluation."""
    file = io.BytesIO()
    drawn().save(file, "PNG")
    label = datasets.ClassLabel(names=["cat", "the block"])
    corner = datasets.List(datasets.Value("float32"))
    one = {"bbox": [40.0, 20.0, 50.0, 40.0], "iscrowd": 0, "category": 1}
    kinds = {"bbox": corner, "iscrowd": datasets.ClassLabel(names=["no", "yes"]), "category": label}
    if layout == "ref":
        row, features = {"ref": 1, "bbox": one["bbox"]}, {"ref": label, "bbox": corner}
    elif layout == "list":
        row, features = {"objects": [one]}, {"objects": datasets.List(kinds)}
    else:
        row = {"objects": {key: [value] for key, value in one.items()}}
        features = {"objects": {key: datasets.List(kind) for key, kind in kinds.items()}}
    row |= {"image": {"bytes": file.getvalue(), "path": None}}
    features |= {"image": datasets.Image()}
    rows = datasets.Dataset.from_list([row] * 2, features=datasets.Features(features))
    if stored == "parquet":
        path = tmp_path / "rows.parquet"
        rows.to_parquet(path)
    else:
        path = tmp_path / "rows"
        rows.save_to_disk(path)
    (source,) = open_datasets([{"path": str(path), "streaming": stored == "stream"}]).sources
    question, answer, *_ = source.schema.conversation(next(iter(first_rows(source.rows))))
    assert "the block" in question["content"][-1]["text"]
    (found,) = COORDINATES["qwen3-vl"].read(answer["content"][0]["text"], SIZE).boxes
    assert found.label == "the block" and np.allclose(found.box, PLACE, atol=0.2)
    task = data_task(DatasetConfig(str(path)), find_metric("boxes"), Asking(boxes=BoxRows()))
    assert [one.fields["thing"] for one in task.samples] == ["the block"] * 2


def test_training_rows(tmp_path):
    """A file of rows is read to the labels of a batch, the same in each epoch."""
    drawn().save(tmp_path / "image.png")
    row = {"image": "image.png", "ref": "the block", "bbox": [40, 20, 50, 40]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    processor = Processor.from_pretrained(DEFAULT_MODEL)

    mixture = open_datasets([{"path": str(tmp_path / "rows.jsonl")}])
    config = LoaderConfig(batch_size=1, sequence_length=512, epochs=4, packing=False)
    texts = [processor.decode(batch["input_ids"][0]) for batch in Loader(mixture, processor, config)]
    assert len(texts) == 4 and len(set(texts)) == 1 and "bbox_2d" in texts[0]


def test_rewards_score_boxes_by_what_a_row_asks_for():
    row = {"image": drawn(), "ref": "the block", "bbox": [40, 20, 50, 40], "note": 7}
    messages = open_source([row], DatasetConfig("rows", boxes={"form": "doctags"})).schema.conversation(row)
    seen = asked([*messages, {"role": "user", "content": []}], row)
    assert seen["note"] == 7 and "image" not in seen
    given = Rewards({"iou": 1.0, "exact": 1.0})([seen["target"], "no"], seen)
    assert given["iou"] == [pytest.approx(1, abs=0.05), 0] and given["exact"] == [1, 0]
