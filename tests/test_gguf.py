"""GGUF files: what llama.cpp's users have opens here, with the logits that it computes."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaForCausalLM

from benchmarks.gguf_files import write_file
from data.errors import ImageError
from data.processor import Processor
from inference.coded import load_codes
from models import VisionLanguageModel
from models.checkpoints import CheckpointError, gguf_tokenizer, hub
from models.checkpoints.gguf import Place, choose, read_header
from models.checkpoints.gguf_weights import BlockEntry
from models.checkpoints.sources import check_has_config, open_files
from models.checkpoints.weights import read_tensor
from tests import gemma4_checkpoints, gguf_files, lfm2_checkpoints, qwen_checkpoints, tiny
from tests import test_internvl as internvl_checkpoints
from tests.hub_server import HubServer, point_client_at
from tests.processors import draw_image
from tools.inspect import inspect

ROOT = Path(__file__).resolve().parent.parent
# Seed, key heads, value heads, layers.
QWEN3_5 = {"qwen3_5-twice": (7, 2, 4, 5), "qwen3_5": (5, 2, 2, 4), "qwen3_5-four": (0, 1, 4, 3)}
GEMMA4 = {"gemma4": 0, "gemma4-plain": 7}  # seeds: all that there is, or as little as can be
INTERNVL = {"internvl-qwen2": "qwen2", "internvl-qwen3": "qwen3", "internvl-llama": "llama"}
KINDS = (*QWEN3_5, *GEMMA4, *INTERNVL, "idefics3", "qwen3_vl", "qwen2_5_vl", "lfm2_vl")
EMBEDDED = ROOT / "checkpoints" / "ocelli-shapes"


class Made(dict[str, Path]):
    """Folders by kind, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Path]):
        super().__init__()
        self.make = make

    def __missing__(self, kind: str) -> Path:
        self[kind] = self.make(kind)
        return self[kind]


def save_checkpoint(kind: str, folder: Path) -> Path:
    """A small checkpoint in transformers' layout, float32, or the embedded one."""
    if kind == "embedded":
        return EMBEDDED
    if kind == "idefics3":
        processor, model = tiny.model_with_processor("smolvlm-1-tile")
        theirs = tiny.save(model, folder.with_name("theirs"))
        VisionLanguageModel.from_pretrained(theirs).save_pretrained(folder, processor=processor)
    elif kind in ("qwen3_vl", "qwen2_5_vl"):
        # Of the other seeds heads have 16 numbers, and llama.cpp leaves some of those unrotated.
        qwen_checkpoints.save_hf(kind, folder, seed=5)
        path = folder / "config.json"  # the window that llama.cpp has
        path.write_text(path.read_text().replace('"window_size": 56', '"window_size": 112'))
    elif kind == "lfm2_vl":
        lfm2_checkpoints.save_hf(folder, seed=0)
    elif kind in QWEN3_5:
        seed, keys, values, layers = QWEN3_5[kind]
        more = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "num_hidden_layers": layers}
        more |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 3}
        more |= {"rms_norm_eps": 1e-6}  # llama.cpp has it in the lengths of keys as well
        if kind == "qwen3_5-twice":  # it rotates nothing where rows and columns have much less than time
            more["rope_parameters"] = {"rope_theta": 1e4, "mrope_section": [3, 3, 2]}
            more["rope_parameters"] |= {"rope_type": "default", "partial_rotary_factor": 0.5}
        qwen_checkpoints.save_hf("qwen3_5", folder, seed=seed, more=more)
    elif kind in GEMMA4:
        gemma4_checkpoints.save_hf(folder, seed=GEMMA4[kind])
        settings = gemma4_checkpoints.image_settings(280)  # all that the converter knows
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    else:
        internvl_checkpoints.save_hf(INTERNVL[kind], folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("hub")
    return Made(lambda kind: save_checkpoint(kind, folder / kind))


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("gguf")

    def convert(kind: str) -> Path:
        gguf_files.write(checkpoints[kind], folder / kind)
        if kind == "qwen3_5-twice":
            add_drafts(parts(folder / kind)[0])
        return folder / kind

    return Made(convert)


def content(path: Path) -> tuple[dict[str, Any], dict[str, tuple[Place, np.ndarray]]]:
    """A file's metadata, and its tensors as they lie."""
    header, data = read_header(path), path.read_bytes()
    places = header.tensors.items()
    raw = {name: (one, np.frombuffer(data[one.begin : one.end], np.uint8)) for name, one in places}
    return header.metadata, raw


def put(path: Path, metadata: dict[str, Any], raw: dict[str, tuple[Place, np.ndarray]]) -> None:
    write_file(path, metadata, {name: (place, lambda one=one: one) for name, (place, one) in raw.items()})


def add_drafts(path: Path) -> None:
    """A layer that drafts further tokens after those of a Qwen3.5, as llama.cpp's converter adds it."""
    metadata, raw = content(path)
    layers, width = metadata["qwen35.block_count"], metadata["qwen35.embedding_length"]
    metadata |= {"qwen35.block_count": layers + 1, "qwen35.nextn_predict_layers": 1}
    metadata["qwen35.attention.recurrent_layers"].append(False)
    front = f"blk.{layers}."
    raw |= {name.replace("blk.2.", front): one for name, one in raw.items() if name.startswith("blk.2.")}
    for name, shape in {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,)}.items():
        zeros = np.zeros(shape, np.float32)
        raw[f"{front}nextn.{name}.weight"] = Place("F32", shape, 0, zeros.nbytes), zeros
    put(path, metadata, raw)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", (*KINDS, "embedded"))
def test_a_model_is_the_one_that_was_converted(checkpoints, converted, kind):
    before = VisionLanguageModel.from_pretrained(checkpoints[kind], dtype="float32")
    after = VisionLanguageModel.from_pretrained(converted[kind], dtype="float32")
    if kind in QWEN3_5:  # whose norms and decays are other numbers there
        expected = dict(before.named_parameters())
        for name, found in after.named_parameters():
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-6)
    else:
        assert tiny.same_weights(before, after)
    old, new = (Processor.from_pretrained(folder) for folder in (checkpoints[kind], converted[kind]))
    assert {new.tokenizer.eos_token_id} <= {*after.config.eos_token_ids}
    ids = {name: getattr(before.config, name) for name in ("pad_token_id", "bos_token_id", "eos_token_ids")}
    assert before.config == replace(after.config, **ids)  # those are the tokenizer's
    image = draw_image(90, 70)
    first, second = (one.ask(image, "How many  circles, 12 or 3?")["input_ids"] for one in (old, new))
    assert torch.equal(first, second)
    for one, other in zip(old.cut(image).parts, new.cut(image).parts, strict=True):
        assert torch.equal(one.pixels, other.pixels) and torch.equal(one.values, other.values)


@torch.no_grad()
def test_a_text_part_without_a_tower(converted, tmp_path):
    """Opens where the family has text models alone."""
    whole = VisionLanguageModel.from_pretrained(converted["qwen3_5-twice"], dtype="float32")
    text = shutil.copy(parts(converted["qwen3_5-twice"])[0], tmp_path)
    alone, processor = VisionLanguageModel.from_pretrained(text), Processor.from_pretrained(text)
    inputs = processor.ask(None, "How many circles?")
    assert torch.equal(alone(**inputs).logits, whole(**inputs).logits)
    with pytest.raises(ImageError):
        processor.ask(draw_image(90, 70), "How many?")


def test_an_image_stands_where_the_template_of_a_text_model_has_text(converted, tmp_path):
    """As in the files that are made of OpenGVLab's own repositories."""
    shutil.copytree(converted["internvl-qwen3"], tmp_path / "wide")
    text = parts(tmp_path / "wide")[0]
    template = (
        "{% for one in messages %}{{ '<|im_start|>' + one.role + '\n' + one.content + '<|im_end|>\n' }}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    metadata, raw = content(text)
    put(text, metadata | {gguf_tokenizer.TEMPLATE: template}, raw)
    old, new = (Processor.from_pretrained(one) for one in (converted["internvl-qwen3"], tmp_path / "wide"))
    image = draw_image(90, 70)
    first, second = (one.ask([image, image], "How many?")["input_ids"] for one in (old, new))
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------- quantized
# All that the library opens; bfloat16 is read as it is.
TYPES = sorted({kind.name for kind in gguf.quants._type_traits} - {"BF16"})


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Bytes (rows, ...) of a type, whose numbers are finite."""
    known = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[known]
    raw = np.random.default_rng(0).integers(0, 256, (200, columns // block * size), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        finite = raw[np.isfinite(gguf.quants.dequantize(raw, known)).all(axis=1)]
    return finite[np.arange(rows) % len(finite)]


def with_blocks(path: Path, kinds: dict[str, str]) -> None:
    """Random blocks for a file's matrices, of the type of the first part that their names have."""
    metadata, tensors = content(path)
    for name, (place, _) in tensors.items():
        if len(place.shape) == 2 and place.shape[1] % 256 == 0:
            kind = next(kinds[part] for part in kinds if part in name)
            raw = random_blocks(kind, *place.shape)
            tensors[name] = Place(kind, place.shape, 0, raw.nbytes), raw
    put(path, metadata, tensors)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_every_type_are_opened_as_the_library_opens_them(tmp_path, kind):
    raw = random_blocks(kind, 5, 512)
    place = Place(kind, (5, 512), 0, raw.nbytes)
    write_file(tmp_path / "one.gguf", {"general.architecture": "llama"}, {"a": (place, lambda: raw)})
    tensor = gguf.GGUFReader(tmp_path / "one.gguf").tensors[0]
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(5, 512)
    entry = BlockEntry(tmp_path / "one.gguf", *read_header(tmp_path / "one.gguf").tensors["a"])
    assert torch.equal(read_tensor(entry), expected)
    assert torch.equal(read_tensor(entry, dtype=torch.bfloat16), expected.bfloat16())


def test_few_numbers_are_those_that_were_meant(tmp_path):
    """Of many, such as a vocabulary's scores, those that are stored: finding the former takes long."""
    few, many = [0.1] * 3, [0.1] * 1000
    values = {"general.architecture": "llama", "one": 1e-5, "few": few, "many": many}
    write_file(tmp_path / "one.gguf", values, {})
    found = read_header(tmp_path / "one.gguf").metadata
    assert found == values | {"many": np.float32(many).tolist()}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """GGUF files of a model of which each row is whole blocks of any type."""
    folder = tmp_path_factory.mktemp("wide")
    text = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    processor, model = tiny.model_with_processor(tiny.Case("smolvlm", text=text))
    model = VisionLanguageModel.from_pretrained(tiny.save(model, folder / "theirs"))
    model.save_pretrained(folder / "hub", processor=processor)
    gguf_files.write(folder / "hub", folder / "wide")
    return folder / "wide"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "kinds", [{"": "Q8_0"}, {"": "Q4_0"}, {"ffn_down": "Q6_K", "_v": "Q5_K", "": "Q4_K"}]
)
def test_a_quantized_text_part_is_the_one_that_transformers_opens(wide, tmp_path, kinds):
    """Which reads the text part of a Llama with the gguf library's own reader, and turns its heads."""
    shutil.copytree(wide, tmp_path / "wide")
    text, tower = parts(tmp_path / "wide")
    with_blocks(text, kinds)
    places = [place for path in (text, tower) for place in read_header(path).tensors.values()]
    told = inspect(str(tmp_path / "wide"))["stored"]
    assert told["bytes"] == sum(place.end - place.begin for place in places)
    theirs = LlamaForCausalLM.from_pretrained(text.parent, gguf_file=text.name, dtype=torch.float32)
    ours = VisionLanguageModel.from_pretrained(tmp_path / "wide", dtype="float32").language_model
    expected = {name.removeprefix("model."): one for name, one in theirs.named_parameters()}
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("kinds", "rounded"), [({"": "Q8_0"}, 0), ({"attn": "Q4_0", "": "Q4_K"}, 2)])
def test_what_llama_cpp_puts_in_another_order_keeps_its_codes(tmp_path, caplog, kinds, rounded):
    """Rows, and heads of columns but for those that share a scale with others: Qwen3.5's `out_proj`."""
    more = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}
    more |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 64}
    more |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "full_attention_interval": 3}
    more["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    qwen_checkpoints.save_hf("qwen3_5", tmp_path / "hub", seed=5, more=more)
    gguf_files.write(tmp_path / "hub", tmp_path / "wide")
    with_blocks(parts(tmp_path / "wide")[0], kinds)
    opened = open_files(tmp_path / "wide")
    floats = VisionLanguageModel.from_pretrained(opened, dtype="float32").language_model
    coded = load_codes(opened, torch.device("cpu")).language_model
    near = 0
    for name, layer in floats.named_modules():
        if isinstance(layer, nn.Linear):
            numbers = coded.get_submodule(name).codes.numbers()
            equal = torch.equal(numbers, layer.weight)
            near += not equal
            assert equal or name.endswith("out_proj")
    assert near == rounded and len(caplog.records) == bool(rounded)


# ------------------------------------------------------------------------------------------- which files
def test_of_several_files():
    names = ["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "README.md"]
    towers = ["mmproj-m-Q8_0.gguf", "mmproj-m-f16.gguf", "mmproj-other-F16.gguf"]
    assert choose(names + towers) == ("m-Q4_K_M.gguf", "mmproj-m-f16.gguf")
    assert choose(names + towers, "q8_0") == ("m-Q8_0.gguf", "mmproj-m-f16.gguf")
    assert choose(names + towers, "UD-Q4_K_XL")[0] == "m-UD-Q4_K_XL.gguf"
    assert choose(["Q-00001-of-00002.gguf", "m-BF16-00001-of-00002.gguf", *towers], "BF16")[0].startswith(
        "m-"
    )
    beside = ["M-imatrix.gguf", "M-Q8_0.gguf", "mtp-M-Q8_0.gguf"]
    assert choose([*beside, "mmproj-F16.gguf", "mmproj-BF16.gguf"]) == ("M-Q8_0.gguf", "mmproj-F16.gguf")
    assert choose([*names, "other-Q4_K_M.gguf", *towers], text="other-Q4_K_M.gguf")[1] == towers[2]
    for name in ("a.gguf", "a\nb.gguf"):
        assert choose([name, "mmproj.gguf"]) == (name, "mmproj.gguf")
    assert choose(names) == ("m-Q4_K_M.gguf",)
    for files, wanted in ((towers, ""), (names + towers, "Q5_K_M")):
        with pytest.raises(ValueError):
            choose(files, wanted)


@pytest.mark.slow
def test_a_repository(wide, tmp_path, monkeypatch):
    repo, name = tmp_path / "repo", "ggml-org/wide-GGUF"
    shutil.copytree(wide, repo)
    text, _ = parts(repo)
    shutil.copy(text, repo / "wide-Q8_0.gguf")
    with_blocks(repo / "wide-Q8_0.gguf", {"": "Q8_0"})
    local = VisionLanguageModel.from_pretrained(f"{repo}:Q8_0")
    assert not tiny.same_weights(local, VisionLanguageModel.from_pretrained(f"{repo}:F32"))
    with HubServer({name: repo}) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        monkeypatch.setattr(hub, "_PIECE", 5000)  # shorter than the headers are
        told = inspect(name)
        opened = open_files(name)
        check_has_config(name)
        assert Processor.from_pretrained(name).ask(None, "how many?")
        assert not opened.weights_here and not any((tmp_path / "cache").rglob("*.gguf"))
        assert told["fits"] == "yes" and told["stored"] == inspect(f"{repo}:Q8_0")["stored"]
        assert tiny.same_weights(local, VisionLanguageModel.from_pretrained(name))
        assert len(open_files(name).weights_here) == 2
        assert not [path for path in server.served if path.endswith(f"/{text.name}")]
        assert Processor.from_pretrained(f"{name}:Q8_0").ask(None, "how many?")
    point_client_at(monkeypatch, server.url, tmp_path / "cache", offline=True)
    assert tiny.same_weights(local, VisionLanguageModel.from_pretrained(f"{name}:Q8_0"))
    with pytest.raises(CheckpointError):
        VisionLanguageModel.from_pretrained(f"{name}:F32")  # which was not fetched


# ---------------------------------------------------------------------------------------------- tokenizers
ALPHABET = "abcxyz  \n\t\r0123456789.,!?'-_()<>\"éüßñçøАбв中文字あ한🙂́‍ \u00a0"


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = ["it's", "I'LL", "don't", "<image>", "end.\n\n", "  two", "12345", "don’t", "\r\n", "the", "…"]
    return [
        "".join(draw.choice((*words, *ALPHABET)) for _ in range(draw.randrange(1, 60))) for _ in range(count)
    ]


@pytest.fixture(scope="module", params=sorted(gguf_tokenizer.WORDS))
def tokenizer(request, tmp_path_factory) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer that cuts text as llama.cpp's of that name, and its metadata."""
    words, of_bytes = gguf_tokenizer.WORDS[request.param], request.param != "gemma4"
    backend = Tokenizer(models.BPE(**words.model))
    spec = json.loads(backend.to_str()) | {
        "pre_tokenizer": words.pre_tokenizer,
        "normalizer": words.normalizer,
    }
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>", "<image>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if of_bytes else [*ALPHABET[:40], "▁"],
        limit_alphabet=256 if of_bytes else 41,
        show_progress=False,
    )
    backend.train_from_iterator(
        [text if of_bytes else text.replace("\n", " ") for text in texts(500)], trainer
    )
    if not of_bytes:  # as SentencePiece's, with a token for each byte
        spec = json.loads(backend.to_str()) | {"decoder": words.decoder}
        vocab = spec["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        backend = Tokenizer.from_str(json.dumps(spec))
    roles = {"eos_token": "<|end|>", "bos_token": "<|end|>"}
    said = gguf_files.tokenizer_metadata(json.loads(backend.to_str()), roles, "", 1000)
    assert said["tokenizer.ggml.pre"] in gguf_tokenizer.WORDS and gguf_tokenizer.SPEC not in said
    return backend, said


@pytest.mark.slow
def test_a_tokenizer_is_the_one_that_was_converted(tokenizer):
    backend, said = tokenizer
    files, added = gguf_tokenizer.read(said)
    again = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert (
        added == {"<|end|>": 0, "<image>": 1, "<unk>": 2}
        and files["tokenizer_config.json"]["eos_token"] == "<|end|>"
    )
    for text in texts(3000):
        ids = again.encode(text, add_special_tokens=False).ids
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert again.decode(ids, False) == backend.decode(ids, False)


# ------------------------------------------------------------------------------------------ damaged files
def damaged(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        VisionLanguageModel.from_pretrained(path)
    return str(refusal.value)


@pytest.fixture
def copy(wide, tmp_path) -> Path:
    """The file of a text part beside that of its tower, which may be written to."""
    shutil.copytree(wide, tmp_path / "wide")
    return parts(tmp_path / "wide")[0]


def test_a_file_that_was_cut_short(copy):
    data = copy.read_bytes()
    for length in (0, 3, 7, 20, 24, 100, 5000, len(data) // 2, len(data) - 1):
        assert copy.name in damaged(copy, data[:length])


@pytest.mark.slow
def test_a_damaged_repository_is_not_downloaded(copy, tmp_path, monkeypatch):
    data = copy.read_bytes()
    for number, broken in enumerate((b"GGML" + data[4:], data[:5000], data[:-1])):
        copy.write_bytes(broken)
        with HubServer({"owner/wide-GGUF": copy.parent}) as server:
            point_client_at(monkeypatch, server.url, tmp_path / f"cache{number}")
            with pytest.raises(CheckpointError):
                VisionLanguageModel.from_pretrained("owner/wide-GGUF")
            assert not any((tmp_path / f"cache{number}").rglob("*.gguf"))


def test_what_is_not_there_is_said(wide, copy):
    for name in (f"{copy}:Q8_0", f"{wide.parent / 'hub'}:Q8_0"):  # no other file is opened in its place
        with pytest.raises(CheckpointError):
            open_files(name)
    parts(copy.parent)[1].unlink()
    with pytest.raises(CheckpointError, match="mmproj"):
        VisionLanguageModel.from_pretrained(copy)
    (copy.parent / "notes.txt").write_text("")
    with pytest.raises(CheckpointError):
        VisionLanguageModel.from_pretrained(copy.parent)


@pytest.mark.parametrize(("text", "tower"), [("idefics3", "qwen3_vl"), ("lfm2_vl", "idefics3")])
def test_files_of_two_models_are_told_apart(converted, tmp_path, text, tower):
    for kind, part in ((text, 0), (tower, 1)):
        shutil.copy(parts(converted[kind])[part], tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        VisionLanguageModel.from_pretrained(tmp_path)
    assert tower in str(refusal.value) and parts(tmp_path)[1].name in str(refusal.value)


# --------------------------------------------------------------------------------------------- llama.cpp
@pytest.fixture
def llama_cpp():
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (requirements-bench.txt)")


def parts(folder: Path) -> tuple[Path, Path]:
    """The files of the text part and of the tower."""
    tower, text = sorted(folder.glob("*.gguf"), key=lambda path: "mmproj" not in path.name)
    return text, tower


@pytest.mark.parametrize("kind", (*KINDS, "embedded"))
@torch.no_grad()
def test_llama_cpp_computes_the_same_logits(llama_cpp, checkpoints, converted, kind):
    model = VisionLanguageModel.from_pretrained(checkpoints[kind], dtype="float32")
    draw = random.Random(0)
    taken = {model.config.image_token_id, *model.config.marker_token_ids}
    ids = [
        one for one in (draw.randrange(model.config.text.vocab_size) for _ in range(48)) if one not in taken
    ]
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    theirs = llama_cpp.Llama(
        str(parts(converted[kind])[0]), n_ctx=256, logits_all=True, n_threads=1, verbose=False, **cache
    )
    theirs.eval(ids)
    logits = torch.from_numpy(theirs.scores[: len(ids)].copy())
    ours = model(torch.tensor([ids])).logits[0]
    bar = 2e-3 if kind in GEMMA4 else 1e-4  # its GELU is looked up, in float16
    assert (ours - logits).abs().max() < bar * max(10, ours.abs().max())


def features_of_llama_cpp(folder: Path, image: Image.Image) -> torch.Tensor:
    """(positions, D) of the first part of an image: llama.cpp's tower and projector."""
    from llama_cpp import Llama, mtmd_cpp

    text, tower = parts(folder)
    llm = Llama(str(text), n_ctx=256, n_threads=1, verbose=False)
    settings = mtmd_cpp.mtmd_context_params_default()
    settings.use_gpu, settings.n_threads, settings.warmup, settings.flash_attn_type = False, 1, False, 0
    context = mtmd_cpp.mtmd_init_from_file(str(tower).encode(), llm.model, settings)
    assert context
    raw = np.asarray(image.convert("RGB")).tobytes()
    bitmap = mtmd_cpp.mtmd_bitmap_init(*image.size, (ctypes.c_uint8 * len(raw)).from_buffer_copy(raw))
    chunks, asked = mtmd_cpp.mtmd_input_chunks_init(), b"a" + mtmd_cpp.mtmd_default_marker()
    told = mtmd_cpp.mtmd_input_text(asked, len(asked), False, True)
    assert not mtmd_cpp.mtmd_tokenize(
        context, chunks, ctypes.byref(told), (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap), 1
    )
    for index in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, index)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            break
    assert not mtmd_cpp.mtmd_encode_chunk(context, chunk)
    count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
    numbers = mtmd_cpp.mtmd_get_output_embd(context)
    return torch.from_numpy(np.ctypeslib.as_array(numbers, (count, width(llm))).copy())


def width(llm) -> int:
    """Numbers of an embedding, with those for further layers."""
    from llama_cpp import llama_cpp

    return llama_cpp.llama_model_n_embd_inp(llm.model)


# Of a size that llama.cpp does not change, and the size of the first part that it cuts.
@pytest.mark.parametrize(
    ("kind", "size", "part"),
    [
        ("idefics3", (128, 128), (32, 32)),
        ("embedded", (256, 256), (128, 128)),
        ("qwen3_vl", (128, 96), (128, 96)),
        ("qwen2_5_vl", (112, 84), (112, 84)),
        ("lfm2_vl", (80, 64), (80, 64)),
    ],
)
@torch.no_grad()
def test_llama_cpp_sees_the_same(llama_cpp, converted, kind, size, part):
    image = draw_image(*size)
    model = VisionLanguageModel.from_pretrained(converted[kind], dtype="float32")
    settings = Processor.from_pretrained(converted[kind]).images.settings
    pixels = torch.from_numpy(np.array(image.crop((0, 0, *part)))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("image_mean", "image_std"))
    ours = model.encode_images(((pixels - mean) / std)[None])[0]
    theirs = features_of_llama_cpp(converted[kind], image)
    assert theirs.shape == ours.shape
    assert (theirs - ours).abs().max() < 5e-3 * ours.abs().max()  # it looks its GELU up, in float16


def test_llama_cpp_reads_the_same_tokens(llama_cpp, tokenizer, tmp_path):
    backend, said = tokenizer
    width = {"embedding_length": 32, "feed_forward_length": 32, "block_count": 0, "context_length": 64}
    said |= {"general.architecture": "llama", **{f"llama.{name}": size for name, size in width.items()}}
    said |= {"llama.attention.head_count": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    zeros = np.zeros((1000, 32), np.float32)
    table = Place("F32", (1000, 32), 0, zeros.nbytes), lambda: zeros
    write_file(tmp_path / "words.gguf", said, {"token_embd.weight": table})
    theirs = llama_cpp.Llama(str(tmp_path / "words.gguf"), vocab_only=True, verbose=False)
    for text in texts(2000):
        if unicodedata.is_normalized("NFC", text) or said["tokenizer.ggml.pre"] not in ("qwen2", "qwen35"):
            ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
            assert ids == backend.encode(text, add_special_tokens=False).ids, text
