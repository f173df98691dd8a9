"""What the fuzzers and the property tests found, each case once, by itself."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zlib
from urllib.error import HTTPError

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.errors import BadRow, DatasetError, FetchError, ImageError, ProcessorError, PromptError, one_line
from data.images import image_size, load_image
from data.processor import Processor
from data.sources import DatasetConfig, open_datasets, open_source
from data.tokenizer import private_tokenizer
from inference.checkpoint import RequestError
from models.checkpoints import CheckpointError
from models.checkpoints.weights import read_header
from models.config import TextConfig
from tests.processors import embedded
from training.config import TrainConfig, parse_config, write_run


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def test_exif_behind_a_pngs_pixels_turns_its_size_as_it_turns_the_image():
    buffer = io.BytesIO()
    Image.fromarray(np.arange(6 * 4, dtype=np.uint8).reshape(4, 6)).save(buffer, "PNG")
    end = png_chunk(b"IEND", b"")
    late = (
        buffer.getvalue().removesuffix(end) + png_chunk(b"eXIf", exif_of(6).removeprefix(b"Exif\0\0")) + end
    )
    assert load_image(late).size == image_size(late) == (4, 6)


@pytest.mark.parametrize("values", [[0, 257, 65_535], [0, 2**24, 2**31 - 1, -(2**31), -1]])
def test_large_grey_images_of_32_bits_are_never_copied_to_64(values):
    """At the limit on pixels the copies took over 2 GiB and 5 s."""
    image = Image.fromarray(np.tile(np.array(values, np.int32), (600, 100)))
    expected = [round(v / 257) for v in values] if max(values) < 2**16 else [v % 2**32 >> 24 for v in values]
    tracemalloc.start()
    try:
        loaded = np.asarray(load_image(image))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (loaded == np.tile(np.array(expected), (600, 100))[..., None]).all()
    assert peak < 3 * 600 * 100 * len(values) * 4


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_nested_too_deeply_is_one_bad_row(streaming, tmp_path):
    good = '{"question": "how many?", "answer": "two"}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{good}\n{'[' * 20_000}{']' * 20_000}\n{good}\n")
    mixture = open_datasets([{"path": str(path), "streaming": streaming, "allow_text_only": True}])
    lane = mixture.lane(0, 1, seed=0, epochs=1)
    rows = [mixed.row for mixed in iter(lane.next, None)]
    assert sum(isinstance(row, dict) for row in rows) == 2
    assert sum("a line that is no JSON" in row for row in rows if isinstance(row, str)) == 1


def test_a_list_of_rows_nested_too_deeply(tmp_path):
    (tmp_path / "rows.json").write_text("[" * 20_000 + "]" * 20_000)
    with pytest.raises(DatasetError, match="it is no JSON"):
        open_datasets([{"path": str(tmp_path / "rows.json")}])


@pytest.mark.parametrize("orientation", [0, 9, 14854])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, "WEBP", exif=exif_of(orientation))
    assert load_image(buffer.getvalue()).size == image_size(buffer.getvalue()) == (6, 4)


@pytest.mark.parametrize(
    "error", [ImageError, FetchError, PromptError, ProcessorError, DatasetError, RequestError]
)
def test_every_refusal_is_one_line_of_printable_characters(error):
    for said in ("\x1b]0;owned\x07\x1b[2J\nmore", "\u202e" * 100_000, "a" * 100_000):
        sentence = str(error(said))
        assert sentence.isprintable() and len(sentence) <= 2001 and str(error(sentence)) == sentence
    bad = pickle.loads(pickle.dumps(BadRow("bad", "a\x1bb")))
    assert (bad.reason, str(bad)) == ("bad", r"a\x1bb")


def test_a_template_that_refuses_with_terminal_escapes():
    p = embedded()
    template = r"{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}"
    with pytest.raises(PromptError, match=r"\\x1b\]0;owned\\x07") as caught:
        Processor(p.images, p.tokenizer, template).ask(None, "how many?")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("conversations", [7, None, True, {"role": "user"}, {1, 2}])
def test_conversations_that_are_no_list(conversations):
    with pytest.raises(PromptError, match="expected conversations as lists of messages, got"):
        embedded().prepare(conversations)


def test_a_tensor_of_infinite_length(tmp_path):
    header = b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="the safetensors header cannot be read"):
        read_header(path)


@pytest.mark.parametrize("rating", ["5", "", {"a": 1}, [4, "3"]])
def test_a_rating_that_is_no_number(rating):
    row = {"question": "how many?", "answer": "two", "relevance": rating}
    layout = open_source([row], DatasetConfig("rows", min_ratings={"relevance": 3})).layout
    with pytest.raises(BadRow, match="expected a rating as a number, got") as caught:
        layout.conversation(row)
    assert caught.value.reason == "bad rating"


def test_column_names_of_any_kind_are_told_in_one_line():
    row = {"a\nb": 1, "\x00": 2, "\u202e": 3} | {str(number): 0 for number in range(2000)}
    with pytest.raises(DatasetError) as caught:
        open_source([row], DatasetConfig("rows"))
    sentence = str(caught.value)
    assert sentence.isprintable() and r"a\nb" in sentence and len(sentence) < 2100


@pytest.mark.parametrize(
    "entry",
    [
        {"weight": "2"},
        {"weight": True},
        {"weight": float("inf")},
        {"weight": float("nan")},
        {"path": 7},
        {"split": ["train"]},
        {"subset": 1},
        {"streaming": "yes"},
        {"columns": ["question"]},
        {"columns": {"question": None}},
        {"min_ratings": {"relevance": "3"}},
    ],
)
def test_settings_of_a_dataset_that_are_of_another_kind(entry):
    with pytest.raises(DatasetError, match=f"{next(iter(entry))}: expected .*, got"):
        DatasetConfig.from_dict({"path": "rows.jsonl"} | entry)


def test_a_token_id_that_nobody_can_count_up_to():
    """To write a tokenizer out, the library counts up to its largest id: of 372 million it aborted."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 8_000_000}, merges=[]))
    with pytest.raises(PromptError, match="expected ids below 4194304, got 8000000"):
        private_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "0")


@pytest.mark.parametrize("text", ["1e-3", "2026-01-31", "2017", "true", "a: b", "[a]"])
def test_what_looks_like_something_else_comes_back_as_the_text_it_was(text, tmp_path):
    config = TrainConfig(init_from="x", data=[{"path": "a", "subset": text, "weight": 1e-3}])
    write_run(config, tmp_path)
    assert parse_config([str(tmp_path / "run.yaml")]) == config
    (tmp_path / "plain.yaml").write_text("init_from: x\ndata: [{path: a, weight: 1e-3, split: 2026-01-31}]")
    (entry,) = parse_config([str(tmp_path / "plain.yaml")]).data
    assert entry == {"path": "a", "weight": 0.001, "split": "2026-01-31"}


def test_whole_numbers_of_a_config_are_the_floats_they_are_used_as():
    """A rope_theta of 10**30 was saved and came back as another number."""
    assert repr(TextConfig(rope_theta=10**30).rope_theta) == "1e+30"


def test_the_systems_errors_on_one_line():
    """With both of two files, and never without a reason."""
    moved = OSError(18, "Invalid cross-device link", "/a", None, "/b")
    assert one_line(FileNotFoundError(2, "No such file", "a b")) == "a b: No such file"
    assert "/a" in one_line(moved) and "/b" in one_line(moved)
    assert one_line(HTTPError("http://x", 404, None, None, None)) == "HTTP Error 404: None"
    assert one_line(KeyError()) == "KeyError" and one_line("a\n  b\x1b", 4) == "a b…"


def test_a_refusal_of_a_recipe_prints_no_control_characters(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('curriculum_pictures: "\\e]0;owned\\a\\0"\n')
    with pytest.raises(SystemExit):
        parse_config([str(recipe)])
    said = capsys.readouterr().err
    assert said[:-1].isprintable() and r"\x1b]0;owned\x07\x00" in said
