"""The processor: transformers' own ids and pixels, batches, masks, refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from data.errors import BadRow, ImageError, ProcessorError, PromptError
from data.images import ImageLimits
from data.new_processor import SPECIAL_TOKENS, make_processor
from data.packing import SampleEncoder
from data.processor import Processor
from families.idefics3 import IdeficsImages
from models.config import TextConfig, VisionConfig, VLMConfig
from recipes.shapes.tokenizer import build_tokenizer
from tests.processors import (
    CORPUS,
    OWN_KINDS,
    assert_same,
    draw_image,
    embedded,
    gemma,
    nano_config,
    processor,
)

TEXTS = (
    "how many circles?",
    "  two  red\n\nsquares, 12 of them ",
    "é中文🙂 \u202ex ﬁ",
    "a     b",
    "\tdef f():\n        return 1",
    "x" * 300,
    "a <b>b</b>  <td>▁▁1</td>",
)
SIZES = ((50, 20), (9, 90), (32, 32), (1, 1), (200, 1), (33, 31))


def transformers_inputs(hf: Idefics3Processor, messages: list[dict]) -> dict[str, torch.Tensor]:
    return hf.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    )


# ------------------------------------------------------------------------------- as transformers has it
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", ["unsplit", *OWN_KINDS])
def test_ids_and_pixels_are_those_of_transformers(kind: str, monkeypatch):
    p = embedded(split=False) if kind == "unsplit" else processor(kind)
    for i, text in enumerate(TEXTS):
        for count in range(4):
            images = [draw_image(*SIZES[(i + k) % len(SIZES)], seed=k) for k in range(count)]
            for system in (None, "be brief\n"):
                messages = p.conversation(images, text, system)
                assert_same(p.prepare(messages), transformers_inputs(p.hf_processor, messages))


def test_added_tokens_of_any_flags_read_as_in_transformers():
    """Special tokens that swallow the space beside them or match normalized text, beside runs of white space
    and HTML that are added tokens as well, and texts full of both."""
    draw = random.Random(31)
    pieces = [
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "▁",
        "▁▁",
        "\u00a0",
        "\r\n",
        "a",
        "two red",
        "é",
        "中",
        "12.",
    ]
    pieces += ["<b>", "</td>", "<u>"]

    def say() -> str:
        return "".join(draw.choices(pieces, k=draw.randint(1, 12))) + "?"

    for rate in (0, 0.2, 0.6):
        tokenizer = gemma(
            lambda rate=rate: {n: draw.random() < rate for n in ("lstrip", "rstrip", "normalized")}
        )
        p = make_processor(tokenizer, image_size=32, image_seq_len=4, split=True)
        for _ in range(20):
            messages = [
                *p.conversation([draw_image(50, 20)], say(), say()),
                {"role": "assistant", "content": [{"type": "text", "text": say()}]},
                {"role": "user", "content": [{"type": "text", "text": say()}]},
            ]
            ids = p.prepare(messages)["input_ids"]
            assert torch.equal(ids, transformers_inputs(p.hf_processor, messages)["input_ids"]), messages


def test_pixels_of_any_size_and_setting_are_those_of_transformers():
    draw = random.Random(15)
    for case in range(60):
        size = (draw.randint(1, 150), draw.randint(1, 150)) if case else (200, 1)
        settings = {
            "size": {"longest_edge": draw.randint(8, 130)},
            "max_image_size": {"longest_edge": draw.choice([8, 14, 32])},
            "do_image_splitting": draw.random() < 0.8,
            "resample": draw.randint(1, 5),
            "do_rescale": case % 7 != 0,
            "rescale_factor": draw.choice([1 / 255, 1 / 127.5, 0.01]),
            "do_normalize": case % 5 != 0,
            "image_mean": draw.choice([[0.5] * 3, [0.48, 0.46, 0.41], 0.5]),
            "image_std": draw.choice([[0.5] * 3, [0.27, 0.26, 0.28], 0.3]),
            "video_sampling": {"fps": 1},
        }
        if case % 9 == 0:  # transformers' defaults
            settings = {name: settings[name] for name in ("size", "max_image_size")}
        ours, theirs = IdeficsImages(settings), Idefics3ImageProcessorPil(**settings)
        image = draw_image(*size, seed=case)
        expected = theirs([[image]], return_row_col_info=True, return_tensors="pt")
        visual, planned = ours.cut(image), ours.plan(*size)
        assert torch.equal(visual.parts.to("cpu"), expected["pixel_values"][0].float()), (size, settings)
        assert visual.grid == planned.grid == (expected["rows"][0][0], expected["cols"][0][0])
        assert planned.parts.shape == visual.parts.shape and planned.positions == visual.positions


def test_tags_that_a_tokenizer_lacks_are_text_as_in_transformers(tmp_path):
    """Idefics3-8B knows <image> and <fake_token_around_image>, but no <global-img> and no <row_1_col_1>."""
    folder = old_layout(tmp_path / "full")
    spec = json.loads((folder / "tokenizer.json").read_text())
    gone = {t for t in SPECIAL_TOKENS if t.startswith(("<row", "<global"))}
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in gone]
    spec["model"]["vocab"] = {f"~{k}" if k in gone else k: v for k, v in spec["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("global_image_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    p = Processor.from_pretrained(folder)
    assert "<row_1_col_1>" not in p.tokenizer.get_added_vocab()
    messages = p.conversation(draw_image(50, 20), "how many?")
    assert_same(p.prepare(messages), transformers_inputs(Idefics3Processor.from_pretrained(folder), messages))
    assert "<row_1_col_2>" in p.decode(p.prepare(messages)["input_ids"][0], skip_special_tokens=True)


# -------------------------------------------------------------------------------------- opening folders
def old_layout(folder: Path) -> Path:
    """The files older checkpoints on the Hub have, SmolVLM2's class names included."""
    embedded(split=True).hf_processor.save_pretrained(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    image = settings.pop("image_processor") | {"image_processor_type": "SmolVLMImageProcessor"}
    image |= {"processor_class": "SmolVLMProcessor", "video_sampling": {"fps": 1, "max_frames": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 4, "processor_class": "SmolVLMProcessor"})
    )
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "SmolVLMProcessor"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_today_s_layout_and_the_older_one_open_alike(tmp_path):
    p = embedded(split=True)
    p.hf_processor.save_pretrained(tmp_path / "new")
    messages = p.conversation([draw_image(50, 20), draw_image(9, 90)], TEXTS[1])
    expected = p.prepare(messages)
    for folder in (tmp_path / "new", old_layout(tmp_path / "old")):
        opened = Processor.from_pretrained(folder)
        assert_same(opened.prepare(messages), expected)
        assert opened.stop_token_ids == p.stop_token_ids
    assert_same(transformers_inputs(AutoProcessor.from_pretrained(tmp_path / "new"), messages), expected)


def test_a_processor_must_fit_its_model(tmp_path):
    embedded().hf_processor.save_pretrained(tmp_path)
    vision = VisionConfig(hidden_size=8, num_attention_heads=1, image_size=32, patch_size=16)
    text = TextConfig(vocab_size=400, hidden_size=8, num_attention_heads=1)
    token = embedded().image_token_id
    config = VLMConfig(vision=vision, text=text, scale_factor=1, image_token_id=token)
    assert Processor.from_pretrained(tmp_path, config).images.tile_positions == 4
    for change, what in (
        ({"vision": replace(vision, patch_size=8)}, "image tokens per tile"),
        ({"vision": replace(vision, image_size=64, patch_size=32)}, "tiles of 64"),
        ({"image_token_id": 3}, "image token id"),
    ):
        with pytest.raises(ProcessorError, match=what):
            Processor.from_pretrained(tmp_path, replace(config, **change))


BROKEN = {
    "processor_config.json": (None, "hello"),
    "chat_template.jinja": (None,),
    "tokenizer.json": (None, '{"version": "1.0", "added'),
    "config.json": (json.dumps(nano_config(lm_tokenizer="../../etc")),),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_give_one_sentence(name, tmp_path):
    for text in BROKEN[name]:
        embedded().hf_processor.save_pretrained(tmp_path)
        (tmp_path / name).unlink(missing_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ProcessorError) as error:
            Processor.from_pretrained(tmp_path)
        assert str(error.value).isprintable()
    with pytest.raises(ProcessorError):
        Processor.from_pretrained(tmp_path / "absent")


# ------------------------------------------------------------------------------------- batches and masks
@pytest.mark.parametrize("kind", ["embedded", "nanovlm-current"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(kind: str, side: str):
    p = processor(kind)
    rows = [
        p.conversation(draw_image(50, 20), "how many circles are there in the picture?"),
        p.conversation([], "two"),
        p.conversation([draw_image(9, 90), draw_image(200, 100)], "compare"),
    ]
    batch = p.prepare(rows, padding_side=side)
    taken = 0
    for i, row in enumerate(rows):
        alone = p.prepare(row)
        keep = batch["attention_mask"][i] == 1
        assert torch.equal(batch["input_ids"][i][keep], alone["input_ids"][0])
        assert keep[-1 if side == "left" else 0]
        assert batch.image_tokens[i] == alone.image_tokens[0]
        if "pixel_values" not in alone:
            continue
        tiles = alone["pixel_values"] if p.images.flat else alone["pixel_values"][0]
        if p.images.flat:
            assert torch.equal(batch["pixel_values"][taken : taken + len(tiles)], tiles)
            taken += len(tiles)
        else:
            assert torch.equal(batch["pixel_values"][i, : len(tiles)], tiles)
            assert not batch["pixel_values"][i, len(tiles) :].any()
            assert batch["pixel_attention_mask"][i].flatten(1).all(1).sum() == len(tiles)
    assert not batch["attention_mask"].all()
    if not p.images.flat:
        assert not batch["pixel_values"][1].any()
        assert not batch["pixel_attention_mask"][1].any()


@pytest.mark.parametrize("kind", ["embedded", "llama", "unigram", "nanovlm-current"])
def test_assistant_mask_is_what_generation_would_have_to_say(kind: str):
    """Prompt ids + masked ids = the whole, so that training teaches exactly what generation continues."""
    p = processor(kind)
    for answer in ("two red squares", "3", "12 of them"):
        asked = p.conversation(draw_image(50, 20), "how many <image>?")
        whole = p.encode_conversation([*asked, {"role": "assistant", "content": answer}])
        prompt = p.encode_conversation(asked, add_generation_prompt=True)
        said = [i for i, mine in zip(whole.input_ids, whole.assistant_mask) if mine]
        first = whole.assistant_mask.index(True)
        assert whole.input_ids[:first] == prompt.input_ids
        assert said == whole.input_ids[first : first + len(said)]
        assert said[-1] in p.stop_token_ids
        assert p.decode(said).strip() == answer
        assert len(whole.assistant_mask) == len(whole.input_ids)
        assert not any(prompt.assistant_mask)


# ---------------------------------------------------------------------------------------------- refusals
def test_refused_conversations(tmp_path):
    p = embedded()
    user = {"role": "user", "content": "how many?"}
    contents = (3, ["x"], [{"type": "video"}], [{"type": "audio"}], [{"type": "image"}], "half \ud83d", " \n",
                [{"type": "text", "text": None}], [{"type": "text", "text": "x" * 600_000}] * 2)  # fmt: skip
    wrong = [([{"role": "user", "content": content}], "conversation") for content in contents]
    wrong += [([], "conversation"), ([[]], "message"), ("how many?", "list of"), ({1, 2}, "set")]
    wrong += [
        (None, "NoneType"),
        ([{"role": "user"}], "content"),
        ([{"role": "<image>", "content": "x"}], "role"),
    ]
    wrong += [
        ([{"role": "assistant", "content": "x"}], "question"),
        ([[user], [user | {"content": ""}]], "tion 1"),
    ]
    for messages, field in wrong:
        with pytest.raises(PromptError, match=field) as error:
            p.prepare(messages)
        assert str(error.value).isprintable()
    for question in ("", "  \n"):
        with pytest.raises(PromptError):
            p.ask(None, question)
    with pytest.raises(ValueError):
        p.prepare([user], padding_side="middle")
    with pytest.raises(ImageError):
        p.ask([draw_image(8, 8), tmp_path / "none.png"], "how many?")


# ------------------------------------------------------------------------------ a stranger's image settings
def test_tiles_are_counted_before_they_are_made_and_together(monkeypatch):
    """A thousand names of one file fill no memory."""
    p, opened = embedded(split=True), []
    strict = Processor(p.images, p.tokenizer, p.chat.chat_template, limits=ImageLimits(max_tiles=40))
    assert len(strict.ask([draw_image(40, 30)] * 2, "what?")["input_ids"]) == 1
    cut, strict.cut = strict.cut, lambda source: opened.append(source) or cut(source)
    with pytest.raises(ImageError):
        strict.ask([draw_image(40, 30)] * 1000, "what?")
    assert len(opened) < 10
    few = Processor(p.images, p.tokenizer, p.chat.chat_template, limits=ImageLimits(max_tiles=16))
    monkeypatch.setattr(IdeficsImages, "cut", lambda *_: pytest.fail("cut before it was counted"))
    with pytest.raises(ImageError):
        few.cut(draw_image(30, 30))
    row = [*p.conversation(draw_image(30, 30), "how many?"), {"role": "assistant", "content": "two"}]
    with pytest.raises(BadRow) as caught:
        SampleEncoder(few, 100_000).encode(row, ("toy", 0))
    assert caught.value.reason == "too many tiles"


def test_a_template_that_loses_text_or_images_is_refused():
    p = embedded()
    for template, image, fault in (
        ("<|im_start|>{{ messages[0]['role'] }}", None, "leaves out part of the text"),
        ("{{ messages[0]['content'][1]['text'] }}", draw_image(8, 8), "0 places for 1"),
        ("{{ raise_exception('no\nway') }}", None, "chat template refuses it"),
    ):
        with pytest.raises(PromptError, match=fault):
            Processor(p.images, p.tokenizer, template).ask(image, "how many?")


# ------------------------------------------------------------------------------------------- new tokenizers
def test_build_tokenizer():
    tokenizer = build_tokenizer(CORPUS, 400)
    assert len(tokenizer) <= 400
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.tokenize("12 circles") == ["1", "2", "Ġcircles"]  # digits alone, words merged
    every_byte = "".join(chr(i) for i in range(0x300)) + "🙂中"
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte
    assert build_tokenizer(CORPUS, 400).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError):
        build_tokenizer(CORPUS, 256)
