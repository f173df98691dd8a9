"""Videos: frames, times, prompts and pixels are those of transformers' processors, and what a model says is
what transformers' says; strangers' files end in one sentence."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata, read_video_pyav

import serve
from data import video, visuals
from data.errors import ImageError, ProcessorError
from data.images import ImageLimits, load_image
from data.loader import Loader, LoaderConfig
from data.packing import SampleEncoder, pack
from data.processor import Processor
from data.sources import open_datasets
from data.video import Clip
from data.visuals import open_video, open_visual
from families import idefics3
from families.idefics3 import IdeficsImages
from families.idefics3_videos import SmolVideos, number_words
from families.qwen_images import QwenImages
from families.qwen_videos import QwenVideos
from generation.features import FeatureCache
from generation.options import GenerationOptions
from generation.session import Session
from inference.answer import ask_each, read_answer
from inference.answer import encode as encode_question
from inference.apart import Apart
from inference.batch import open_scheduler
from inference.checkpoint import open_checkpoint
from inference.command import DEFAULT_MODEL
from inference.conversation import Conversation
from inference.flags import machine
from inference.forms import requests_for
from models import VisionLanguageModel
from models.packed_vision_transformer import patches_of
from tests import tiny
from tests.clips import clip_of, noise, write_animation, write_clip
from tests.evaluations import save_rows
from tests.house import data_url
from tests.processors import draw_image
from tests.qwen_checkpoints import QWEN as KINDS
from tests.qwen_checkpoints import TEMPLATE, image_settings, save_hf, tokenizer
from tests.runs import metrics, run, tiny_checkpoint
from tests.servers import embedded, refused, running
from tests.waiting import PATIENCE, wait_for
from training.rows import RowsLoss
from web import engine, media, videos
from web.guard import ApiLimits
from web.media import Media, prompt_of
from web.protocol import check_request
from web.videos import open_apart

LITTLE = "tests.clips:decode_in_little_memory"
CLIPS = int(os.environ.get("OCELLI_CLIPS", 5))  # of each kind; the long run has 200
SMOL = {
    "size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True,
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 64}},
}  # fmt: skip


def smol_checkpoint(folder: Path) -> None:
    """A model of SmolVLM's form that takes videos."""
    settings = tiny_checkpoint(folder) / "preprocessor_config.json"
    own = json.loads(settings.read_text()) | {"video_sampling": SMOL["video_sampling"]}
    settings.write_text(json.dumps(own))


def settings_of_videos(draw: random.Random, patch: int) -> dict:
    """video_preprocessor_config.json."""
    area = (2 * patch) ** 2
    size = {
        "shortest_edge": draw.choice([1, 4, 16]) * area,
        "longest_edge": draw.choice([6, 40, 2000]) * area,
    }
    return {
        "size": size, "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fps": draw.choice([1, 2, 2, 5.5]),
        "max_frames": draw.choice([768, 6, 9]), "min_frames": draw.choice([4, 2]),
        "cap_pixels_per_frame": draw.choice([None, False, True]),
    }  # fmt: skip


def random_clip(draw: random.Random) -> tuple[np.ndarray, float]:
    count, rate = draw.choice([2, 3, 5, 12, 40, 90]), draw.choice([1.0, 7.5, 10.0, 24.0, 29.97, 60.0])
    width, height = draw.choice([(96, 64), (40, 90), (33, 17), (150, 20), (64, 64), (20, 30)])
    return noise(count, width, height, draw.randrange(2**30)), rate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(CLIPS))
def test_videos_of_qwen_are_those_of_transformers_processor(kind, seed):
    pytest.importorskip("torchvision")
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    draw = random.Random(f"{kind} {seed}")
    old, patch = kind == "qwen2_5_vl", 14 if kind == "qwen2_5_vl" else 16
    settings = settings_of_videos(draw, patch)
    images = QwenImages(image_settings(kind) | {"image_mean": [0.5] * 3})
    ours = QwenVideos(settings, images.known, images, 4 if old else None)
    processor, videos = (
        (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor) if old else (Qwen3VLProcessor, Qwen3VLVideoProcessor)
    )
    theirs = processor(Qwen2VLImageProcessorPil(), tokenizer(), videos(**settings), chat_template=TEMPLATE)
    frames, rate = random_clip(draw)
    metadata = VideoMetadata(len(frames), rate, *frames.shape[2:0:-1], len(frames) / rate)
    sampling = {"do_sample_frames": True, "fps": settings["fps"]}
    expected = theirs(
        text=["<|video_pad|>"], videos=[frames], video_metadata=[metadata], return_tensors="pt", **sampling
    )
    visual = ours.cut(clip_of(frames, rate))
    said = theirs.tokenizer.decode(expected["input_ids"][0])
    assert ours.prompt(visual).replace("image_pad", "video_pad") == said
    rows, columns = visual.grid
    assert expected["video_grid_thw"].tolist() == [[len(visual.parts), 2 * rows, 2 * columns]]
    pairs = visual.parts.to("cpu")
    config = type("Config", (), {"patch_size": patch, "merge_size": 2, "channels_last": False})
    own = torch.cat([patches_of(pair, config) for pair in pairs])
    assert (own - expected["pixel_values_videos"]).abs().max() < 1e-6  # a level is 8e-3
    if old:
        every = 4 * expected["second_per_grid_ts"][0]
        times = (torch.arange(len(visual.parts)) * every).long().tolist()
        assert [part.time or 0 for part in visual.parts] == times
        assert visual.parts.parts[0].time is None and None not in [part.time for part in visual.parts][1:]


@pytest.mark.parametrize("seed", range(CLIPS))
def test_videos_of_smolvlm_are_those_of_transformers_processor(seed):
    pytest.importorskip("torchvision")
    pytest.importorskip("num2words")
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    draw = random.Random(f"smol {seed}")
    sampling = {"fps": draw.choice([1, 2, 8]), "max_frames": draw.choice([64, 3, 10])}
    settings = SMOL | {"video_sampling": SMOL["video_sampling"] | sampling}
    processor, images = tiny.model_with_processor("smolvlm-1-tile")[0], IdeficsImages(settings, 4)
    images.videos = SmolVideos(settings, images.known, images.values, 32, 4)
    ours = Processor(images, processor.tokenizer, processor.chat.chat_template)
    copied = {**settings, "video_sampling": dict(settings["video_sampling"])}
    theirs = SmolVLMProcessor(
        SmolVLMImageProcessorPil(), processor.tokenizer, SmolVLMVideoProcessor(**copied), image_seq_len=4
    )
    frames, rate = random_clip(draw)
    metadata = VideoMetadata(len(frames), rate, *frames.shape[2:0:-1], len(frames) / rate)
    conversation = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "how many"}]}]
    text = theirs.apply_chat_template(conversation, add_generation_prompt=True)
    given = {"num_frames": sampling["max_frames"], "fps": sampling["fps"], "do_sample_frames": True}
    expected = theirs(text=[text], videos=[[frames]], video_metadata=[metadata], return_tensors="pt", **given)
    row = ours.ask(clip_of(frames, rate), "how many")
    assert row["input_ids"].tolist() == expected["input_ids"].tolist()
    assert (row["pixel_values"] - expected["pixel_values"]).abs().max() < 1e-6


def test_numbers_are_written_as_num2words_writes_them():
    num2words = pytest.importorskip("num2words").num2words
    for number in (*range(1, 130), 200, 219, 999, 1000, 1001, 1100, 12_345):
        assert number_words(number) == num2words(number)


# ---------------------------------------------------------------------------------------------------- models
def for_transformers(inputs: dict, config, seconds: list[float]) -> dict:
    """What transformers' Qwen takes for our inputs, whose videos have pairs every so many seconds."""
    side, ids = config.vision.patch_size, inputs["input_ids"].clone()
    kinds, marked = (
        torch.zeros_like(ids),
        iter((ids[0] == config.image_token_id).nonzero().flatten().tolist()),
    )
    images, videos = ([], []), ([], [])  # patches, and grids
    for numbers in inputs["pixel_values"].to("cpu"):
        video, (rows, columns) = numbers.dim() == 4, (one // side for one in numbers.shape[-2:])
        for place in itertools.islice(marked, rows * columns // 4):
            kinds[0, place] = 1 + video
            ids[0, place] = config.marker_token_ids[0] if video else config.image_token_id
        pair = numbers if video else numbers[:, None].expand(-1, 2, -1, -1)
        patches, grids = videos if video else images
        patches.append(patches_of(pair, config.vision))
        again = video and grids and grids[-1][1:] == [rows, columns]
        if again:
            grids[-1][0] += 1
        else:
            grids.append([1, rows, columns])
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds.int(),
        "pixel_values": torch.cat(images[0]),
        "image_grid_thw": torch.tensor(images[1]),
        "pixel_values_videos": torch.cat(videos[0]),
        "video_grid_thw": torch.tensor(videos[1]),
        **({"second_per_grid_ts": torch.tensor(seconds)} if config.vision.window else {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_about_videos_are_those_of_transformers(kind, tmp_path):
    """Of two clips and an image, by `generate`, by a session, and by the C step and tower."""
    theirs = save_hf(kind, tmp_path, seed=5)
    theirs.generation_config.eos_token_id = None
    checkpoint = open_checkpoint(tmp_path)
    processor, model = checkpoint.processor, checkpoint.model
    shown = [clip_of(noise(5, 96, 64), 2.0), draw_image(70, 50), clip_of(noise(6, 40, 70, 1), 1.0)]
    inputs = processor.ask(shown, "how many red")
    given = for_transformers(inputs, model.config, [5 / 4, 2.0])
    expected = theirs.generate(**given, max_new_tokens=12, do_sample=False)[:, given["input_ids"].shape[1] :]
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    session = Session(model, FeatureCache(model))
    assert session.generate(**inputs, **options).tolist() == expected.tolist()
    other = processor.ask(shown, "how many blue")
    assert session.generate(**other, **options).tolist() == model.generate(**other, **options).tolist()
    assert session.reuse["tiles_encoded"] == 0 and session.reuse["reused"] > 0
    fast = checkpoint.compiled()
    assert fast.fast.tower == "native C tower"
    again = fast.model.generate(**inputs, **options, decode_step=fast.decode_step)
    assert again.tolist() == expected.tolist()


def test_answers_of_smolvlm_about_videos_are_those_of_transformers():
    processor, theirs = tiny.model_with_processor("smolvlm-1-tile")
    images = IdeficsImages(SMOL, 4)
    images.videos = SmolVideos(SMOL, images.known, images.values, 32, 4)
    ours = Processor(images, processor.tokenizer, processor.chat.chat_template)
    inputs = ours.ask([clip_of(noise(30, 96, 64)), draw_image(70, 50)], "how many red")
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[
        :, inputs["input_ids"].shape[1] :
    ]
    config = idefics3.read_config(json.loads(theirs.config.to_json_string()), {}, {})
    model = VisionLanguageModel(config).eval()
    stored, place = theirs.state_dict(), idefics3.tensor_map(list(theirs.state_dict()))
    model.load_state_dict({name: stored[place(name).name] for name in model.state_dict()})
    got = model.generate(**inputs, max_new_tokens=12, stop_token_ids=())
    assert got.tolist() == expected.tolist()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [*KINDS, "smolvlm"])
def test_frames_that_repeat_are_encoded_once(kind, tmp_path, monkeypatch):
    """By all that asks: for one question, for a second one, and in a batch about several videos."""
    smol_checkpoint(tmp_path) if kind == "smolvlm" else save_hf(kind, tmp_path)
    checkpoint, encoded = open_checkpoint(tmp_path, device="cpu"), list[int]()
    encode = VisionLanguageModel.encode_images

    def counted(self, parts):
        features = encode(self, parts)
        encoded.append(len(features))
        return features

    monkeypatch.setattr(VisionLanguageModel, "encode_images", counted)
    first, second = (np.repeat(noise(1, 96, 64, seed), 12, axis=0) for seed in range(2))
    still, two = clip_of(first, 2.0), clip_of(np.concatenate([first[:8], second[:4]]), 2.0)
    (visual,) = checkpoint.processor.visuals(still)
    assert len(visual.parts) > 2
    options, asked = GenerationOptions(max_new_tokens=4, stop_token_ids=()), ["how many red", "how many"]
    for questions in (asked[:1], asked):
        for reply in ask_each(checkpoint, [still], questions, options):
            reply.finish()
        assert sum(encoded) == 1
        checkpoint.features.clear()
        encoded.clear()
    rows = [encode_question(checkpoint, [shown], asked[0]) for shown in (still, two, still)]
    requests = [requests_for(checkpoint, row, 4, options)[0] for row in rows]
    done = [*open_scheduler(checkpoint, 3).run(replace(one, key=key) for key, one in enumerate(requests))]
    assert sum(encoded) == 2
    monkeypatch.undo()
    prompts = [checkpoint.processor.ask(one, asked[0]) for one in (still, two, still)]
    alone = [checkpoint.model.generate(**one, options=options)[0].tolist() for one in prompts]
    assert [one.token_ids for one in sorted(done, key=lambda one: one.key)] == alone


def test_a_slower_video_of_the_same_frames_is_another_prompt(tmp_path):
    """Qwen2.5-VL has time in rotary places alone: what is kept of one video is not taken for another."""
    save_hf("qwen2_5_vl", tmp_path)
    model = VisionLanguageModel.from_pretrained(tmp_path)
    processor = Processor.from_pretrained(tmp_path, config=model.config)
    frames, options = noise(4, 96, 64), {"max_new_tokens": 8, "stop_token_ids": ()}
    session = Session(model, FeatureCache(model))
    fast, slow = (processor.ask(clip_of(frames, rate), "how many red") for rate in (2.0, 0.02))
    assert fast["input_ids"].tolist() == slow["input_ids"].tolist()
    session.generate(**fast, **options)
    assert session.generate(**slow, **options).tolist() == model.generate(**slow, **options).tolist()
    assert session.reuse["tiles_encoded"] == 0


# ----------------------------------------------------------------------------------------------------- files
@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "libx264"), ("avi", "mpeg4")]
)
def test_frames_of_a_file_are_those_of_transformers(tmp_path, suffix, codec):
    pytest.importorskip("av")
    path = write_clip(tmp_path / f"clip.{suffix}", noise(23, 64, 48), 10, codec)
    clip, chosen = open_video(path), [0, 3, 11, 22]
    frames, metadata = read_video_pyav(str(path), lambda metadata, **_: np.array(chosen))
    assert (clip.count, clip.rate, clip.size) == (metadata.total_num_frames, metadata.fps, (64, 48))
    assert np.array_equal(np.stack([np.asarray(frame) for frame in clip.frames(chosen)]), frames)
    of_bytes = open_video(path.read_bytes())
    assert [np.asarray(one).tolist() for one in of_bytes.frames([3])] == [frames[1].tolist()]


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libx264"])
def test_frames_are_counted_where_no_header_does(tmp_path, codec):
    pytest.importorskip("av")
    clip = open_video(write_clip(tmp_path / "clip.mkv", noise(23, 64, 48), 10, codec))
    assert (clip.count, clip.rate, len(list(clip.frames([0, 22])))) == (23, 10.0, 2)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_are_videos(tmp_path, suffix):
    frames = np.repeat(np.arange(0, 240, 20, dtype=np.uint8)[:, None, None, None], 3, axis=3)
    frames = np.ascontiguousarray(np.broadcast_to(frames, (12, 30, 40, 3)))
    clip = open_visual(write_animation(tmp_path / f"clip.{suffix}", frames, [100] * 6 + [300] * 6))
    # A third of the time a tenth of a second each, then three tenths: in tenths.
    assert isinstance(clip, Clip) and (clip.count, clip.rate, clip.size) == (24, 10.0, (40, 30))
    shown = [frame.getpixel((0, 0))[0] for frame in clip.frames(range(24))]
    assert shown == [20 * number for number in [*range(6), *(6 + n // 3 for n in range(18))]]


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_what_the_file_says_of_times_is_what_a_model_is_told(tmp_path, suffix):
    """A still of two seconds, then two quick frames; no delay counts as a tenth of a second."""
    path = write_animation(tmp_path / f"clip.{suffix}", noise(4, 40, 30), [2000, 50, 50, 0])
    clip = open_visual(path)
    assert (clip.count / clip.rate, 1 / clip.rate) == (pytest.approx(2.2), pytest.approx(0.05))
    first, still, second, third, fourth, last = map(np.asarray, clip.frames([0, 39, 40, 41, 42, 43]))
    assert np.array_equal(first, still) and np.array_equal(fourth, last)
    assert len({one.tobytes() for one in (still, second, third, last)}) == 4


@pytest.mark.parametrize(
    ("suffix", "milliseconds", "rate"),
    [
        ("png", 1000 / 60, 60),
        ("png", 1000 / 30, 30),
        ("webp", 15, 1000 / 15),
        ("webp", 10, 10),
        ("gif", 0, 10),
    ],
)
def test_frames_that_are_equally_long_have_the_rate_of_the_file(tmp_path, suffix, milliseconds, rate):
    clip = open_video(write_animation(tmp_path / f"clip.{suffix}", noise(6, 40, 30), milliseconds))
    assert (clip.count, clip.rate) == (6, pytest.approx(rate))
    assert len({frame.tobytes() for frame in clip.frames(range(6))}) == 6


def test_the_image_in_front_of_an_animated_png_is_no_frame(tmp_path):
    images = [*map(Image.fromarray, noise(4, 40, 30))]
    images[0].save(path := tmp_path / "clip.png", save_all=True, append_images=images[1:], default_image=True)
    clip = open_video(path)
    assert [frame.tobytes() for frame in clip.frames([0, 1, 2])] == [one.tobytes() for one in images[1:]]
    assert clip.count == 3 and load_image(path).tobytes() == images[0].tobytes()


@pytest.mark.parametrize("suffix", ["webp", "png"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_animation_is_turned_as_an_image_of_the_same_file(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    first, *others = (Image.fromarray(frame) for frame in noise(3, 40, 30))
    lossless = {"lossless": True} if suffix == "webp" else {}
    path = tmp_path / f"turned.{suffix}"
    first.save(path, save_all=True, append_images=others, duration=100, exif=exif, **lossless)
    clip, image = open_video(path), load_image(path)
    frames = list(clip.frames([0, 1, 2]))
    assert clip.size == image.size == frames[2].size == ((40, 30) if orientation < 5 else (30, 40))
    assert np.array_equal(np.asarray(frames[0]), np.asarray(image))


@pytest.mark.slow
def test_asking_opens_what_a_path_or_bytes_hold(tmp_path):
    pytest.importorskip("av")
    processor = Processor.from_pretrained(DEFAULT_MODEL)
    path = write_clip(tmp_path / "clip.mp4", noise(9, 64, 48))
    processor.few_images = False
    for source in (path, str(path), path.read_bytes(), [path]):
        asked, given = processor.ask(source, "how many"), processor.ask(open_video(path), "how many")
        assert asked["input_ids"].tolist() == given["input_ids"].tolist()
        assert torch.equal(asked["pixel_values"], given["pixel_values"])
    message = [{"type": "image", "image": str(path)}, {"type": "text", "text": "how many"}]
    with pytest.raises(ImageError, match=r"expected an image.*got a video"):
        processor.prepare([{"role": "user", "content": message}])


def test_a_phones_video_stands_upright(tmp_path):
    pytest.importorskip("av")
    frames = noise(5, 64, 48)
    path = write_clip(tmp_path / "clip.mp4", frames)
    data, upright = bytearray(path.read_bytes()), np.asarray(next(open_video(path).frames([0])))
    place = data.index(b"tkhd") + 44  # its matrix, in fixed point: a quarter turn clockwise
    matrix = (0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    data[place : place + 36] = b"".join(one.to_bytes(4, "big", signed=True) for one in matrix)
    clip = open_video(bytes(data))
    assert clip.size == (48, 64)
    assert np.array_equal(np.asarray(next(clip.frames([0]))), np.rot90(upright, -1))


@pytest.mark.slow
def test_damaged_videos_end_in_one_sentence(tmp_path):
    pytest.importorskip("av")
    draw = random.Random(0)
    for codec, suffix in (("libx264", "mp4"), ("mpeg4", "avi"), ("libvpx-vp9", "webm")):
        data = write_clip(tmp_path / f"clip.{suffix}", noise(12, 64, 48), 10, codec).read_bytes()
        for trial in range(40):
            bad = bytearray(data[: draw.randrange(1, len(data))] if trial % 2 else data)
            for _ in range(draw.choice([0, 1, 30])):
                bad[draw.randrange(len(bad))] = draw.randrange(256)
            try:
                clip = open_visual(bytes(bad))
                frames = list(clip.frames(range(clip.count))) if isinstance(clip, Clip) else []
                assert all(frame.size == clip.size for frame in frames)
            except ImageError as error:
                assert "\n" not in str(error)
    (named := tmp_path / "notes.mp4").write_bytes(b"text")
    with pytest.raises(ImageError, match="a video"):
        open_visual(named)


@pytest.mark.parametrize(
    ("limit", "most"),
    [("MOST_FRAMES", 5), ("MOST_SECONDS", 1), ("MOST_FRAME_PIXELS", 1000), ("MOST_BYTES", 100)],
)
def test_videos_are_bounded(tmp_path, monkeypatch, limit, most):
    pytest.importorskip("av")
    path = write_clip(tmp_path / "clip.mp4", noise(23, 64, 48))
    with pytest.raises(ImageError):
        open_video(path, ImageLimits(max_seconds=0))
    monkeypatch.setattr(video, limit, most)
    with pytest.raises(ImageError):
        open_video(path)


def endless(frames: int = 900, side: int = 4000) -> bytes:
    """A GIF of few bytes whose frames are large: each of them takes a tenth of a second."""
    begin = b"GIF89a" + 2 * side.to_bytes(2, "little") + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c" + bytes(4) + b"\1\0\1\0\0" + b"\2\2\x44\1\0"
    return begin + frames * frame + b";"


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_process_of_its_own_decodes_the_same_frames(tmp_path, suffix):
    if suffix == ".mp4":
        pytest.importorskip("av")
    path = (write_animation if suffix == ".gif" else write_clip)(tmp_path / f"clip{suffix}", noise(9, 64, 48))
    expected, data = open_video(path), path.read_bytes()
    assert isinstance(visuals.clip_of(data, ImageLimits(), "clip"), Clip)
    with open_apart(data, ImageLimits(), "video 1") as clip:
        assert clip.animated == expected.animated == (suffix == ".gif")
        assert (clip.count, clip.rate, clip.size) == (expected.count, expected.rate, expected.size)
        for chosen in ([0, 3, 8], [2]):
            for got, wanted in zip(clip.frames(chosen), expected.frames(chosen), strict=True):
                assert np.array_equal(got, wanted)


@pytest.mark.slow
def test_a_process_that_decodes_ends_with_its_time_its_memory_or_a_crash(tmp_path, monkeypatch, caplog):
    """The log tells a crash from what was too much."""
    data = endless()
    assert isinstance(visuals.clip_of(endless(frames=2), ImageLimits(), "video 1"), Clip)
    assert not isinstance(visuals.clip_of(b"\xff\xd8\xff", ImageLimits(), "JPEG"), Clip)
    started = []
    monkeypatch.setattr(videos, "Apart", lambda function: started.append(Apart(function)) or started[-1])
    with pytest.raises(ImageError), open_apart(data, ImageLimits(max_seconds=0.5), "video 1"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(videos, "Apart", lambda _: started.append(Apart(LITTLE)) or started[-1])
        with pytest.raises(ImageError), open_apart(data, ImageLimits(), "video 1"):
            pass
    assert not caplog.records
    small = write_animation(tmp_path / "clip.gif", noise(4, 64, 48)).read_bytes()
    with pytest.raises(ImageError), open_apart(small, ImageLimits(), "video 1") as clip:
        started[-1]._process.kill()
        list(clip.frames([0, 1]))
    assert len(caplog.records) == 1
    with pytest.raises(ImageError), open_apart(b"GIF89a and no more", ImageLimits(), "video 1"):
        pass
    assert len(started) == 4 and all(child._process.returncode is not None for child in started)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="nothing says how many threads there are")
def test_a_process_of_its_own_has_one_thread_on_every_machine():
    """NumPy's, one for each core, took more than its memory on a machine with many."""
    child = Apart("tests.clips:say_threads")
    assert child.reply() == 1 and child.status == 0


@pytest.mark.parametrize("closed", [False, True])
def test_a_video_that_nobody_waits_for_is_decoded_no_longer(closed):
    served, own = engine.Engine(embedded()), Media(ApiLimits())
    url = data_url(endless(), "video/mp4")
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "how many"}]
    asked = check_request({"model": "x", "messages": [{"role": "user", "content": parts}]})

    async def left() -> int:
        shown = await own.read(asked, "", id)
        prepare = partial(prompt_of, asked, own, shown, GenerationOptions())
        ticket = served.submit(engine.Ticket(prepare, video=True))
        assert await asyncio.to_thread(wait_for, lambda: ticket.decoding)
        (process,) = ticket.decoding
        served.close() if closed else ticket.cancel()
        return await asyncio.to_thread(lambda: process.status)

    try:
        assert asyncio.run(left()) == -signal.SIGTERM
    finally:
        served.close()


def test_videos_and_other_files_are_told_apart(tmp_path):
    """A playlist would have FFmpeg open what it names."""
    (tmp_path / "clip.mp4").write_bytes(b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "clip.mp4", tmp_path / "empty", tmp_path / "none.mp4", draw_image(8, 8)):
        with pytest.raises(ImageError):
            open_video(source)
    with pytest.raises(ImageError):
        open_video(str(tmp_path / "clip.mp4"), ImageLimits(allow_paths=False))


def test_pyav_is_optional(tmp_path, monkeypatch):
    pytest.importorskip("av")
    path = write_clip(tmp_path / "clip.mp4", noise(3, 64, 48))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImageError, match="requirements-video"):
        open_video(path)


def test_a_model_without_videos_is_shown_frames_as_images():
    processor = tiny.model_with_processor("smolvlm-1-tile")[0]
    assert processor.images.videos is None
    clip = clip_of(noise(30, 40, 30))
    message = {"role": "user", "content": [{"type": "video", "video": clip}, {"type": "text", "text": "two"}]}
    (shown,) = processor.messages([message])
    assert [kind for kind, _ in shown.parts] == ["image"] * 8 + ["text"]
    assert len(processor.visuals(clip)) == 8
    processor.few_images = True
    with pytest.raises(ImageError):
        processor.visuals(clip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_writes_no_video_refuses_one_before_it_is_decoded(kind, monkeypatch):
    images = QwenImages(image_settings(kind))
    images.videos = QwenVideos(images.settings, images.known, images, None)
    monkeypatch.setattr(Clip, "frames", lambda *_: pytest.fail("decoded"))
    message = {"role": "user", "content": [{"type": "video", "video": clip_of(noise(30, 40, 30))}]}
    for template, written in ((TEMPLATE, True), (TEMPLATE.replace("video", "film"), False)):
        processor = Processor(images, tokenizer(), template)
        assert processor.chat.writes_videos == written
        if written:
            assert processor.messages([message])[0].parts[0][0] == "video"
        else:
            with pytest.raises(ImageError):
                processor.prepare([message])


@pytest.mark.parametrize(("most", "few"), [(None, False), (2, True), (7, True), (8, False)])
def test_a_model_of_fewer_images_than_a_video_has_frames_takes_none(most, few, tmp_path):
    folder = shutil.copytree(DEFAULT_MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"most_images": most}))
    assert Processor.from_pretrained(folder).few_images == few


@pytest.mark.parametrize(
    "changed",
    [{"temporal_patch_size": 4}, {"image_mean": [0.1] * 3}],
    ids=str,
)
def test_settings_of_videos_that_no_checkpoint_has_are_refused(changed):
    images = QwenImages(image_settings("qwen3_vl"))
    with pytest.raises(ProcessorError):
        QwenVideos(changed, images.known, images, None)


# ------------------------------------------------------------------------------------------------------ rows
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_videos_are_trained_on(tmp_path, kind):
    """By path, in a column and in parts; their places are those of a prompt, and a broken one is left out."""
    save_hf(kind, tmp_path / "model")
    model = VisionLanguageModel.from_pretrained(tmp_path / "model")
    processor = Processor.from_pretrained(tmp_path / "model", config=model.config)
    for number in range(2):
        write_animation(tmp_path / f"clip{number}.gif", noise(6, 64, 48, number), 250)
    (tmp_path / "broken.gif").write_bytes(b"GIF89a and no more")
    asked = {"question": "how many red", "answer": "three"}
    save_rows(tmp_path / "rows.jsonl", [{"video": "clip0.gif", **asked}, {"video": "broken.gif", **asked}])
    parts = [{"type": "video"}, {"type": "text", "text": "how many"}, {"type": "video"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]
    save_rows(tmp_path / "chats.jsonl", [{"messages": messages, "videos": ["clip1.gif", "clip0.gif"]}])
    data = open_datasets([{"path": str(tmp_path / name)} for name in ("rows.jsonl", "chats.jsonl")])
    config = LoaderConfig(batch_size=1, sequence_length=512, epochs=1)
    trained, shown = set(), 0
    for batch in Loader(data, processor, config):
        trained |= {sample for row in batch.sample_ids for sample in row}
        shown += batch.images
        loss, _ = RowsLoss(model, blank=True)(**batch.to(model.device))
        assert loss.isfinite()
    assert len(trained) == 2 and shown == 3
    conversation = [
        {"role": "user", "content": [{"type": "video", "video": tmp_path / "clip1.gif"}, *parts[1:2]]},
        messages[1],
    ]
    encoder = SampleEncoder(processor, 512)
    sample = encoder.encode(conversation, ("toy", 0))
    packed = pack([sample], [encoder.tiles(sample)], model.config)
    ((places, _),) = model.places([torch.tensor(sample.input_ids)], packed.pixel_values)
    assert np.array_equal(packed.position_ids, places.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_a_run_on_videos_ends_in_a_model_that_answers_about_them(tmp_path, kind):
    """Files and animations train; it is asked about held-out ones, and the settings of videos stay."""
    pytest.importorskip("av")
    smol_checkpoint(tmp_path / "model") if kind == "smolvlm" else save_hf(kind, tmp_path / "model")
    for number in range(2):
        write_clip(tmp_path / f"{number}.mp4", noise(9, 64, 48, number), 4)
        write_animation(tmp_path / f"{number}.gif", noise(9, 64, 48, number), 250)
    asked = {"question": "how many red", "answer": "two"}
    rows = [asked | {"video": f"{one % 2}.{'mp4' if one < 2 else 'gif'}"} for one in range(4)]
    save_rows(tmp_path / "rows.jsonl", rows)
    save_rows(tmp_path / "held.jsonl", rows[:2])
    data, held = ([{"path": str(tmp_path / f"{name}.jsonl")}] for name in ("rows", "held"))
    model, output = str(tmp_path / "model"), tmp_path / "out"
    run(
        init_from=model, data=data, eval_data=held, output=str(output), steps=2, eval_every=2, eval_samples=2,
        batch_size=2, sequence_length=256, eval_metric="exact_match", eval_questions=2, workers=1,
    )  # fmt: skip
    checkpoint, before = open_checkpoint(output, device="cpu"), Processor.from_pretrained(model)
    assert [one["step"] for one in metrics(output, "eval_accuracy")] == [2]
    answers = output / "samples" / "step-00000002" / "answers.jsonl"
    for number, line in enumerate(map(json.loads, answers.read_text().splitlines())):
        clip = open_video(tmp_path / f"{number}.mp4")
        assert (
            before.ask(clip, "how many")["input_ids"].shape
            == checkpoint.processor.ask(clip, "how many")["input_ids"].shape
        )
        assert Image.open(answers.parent / line["pictures"][0]).size == (64, 48)


# -------------------------------------------------------------------------------------------------- over HTTP
@pytest.mark.slow
def test_a_server_is_asked_about_videos(tmp_path):
    """As `video_url`; what it may not be is refused in one sentence, and an image stays one."""
    save_hf("qwen3_vl", tmp_path / "model")
    gif = write_animation(tmp_path / "clip.gif", noise(6, 64, 48), 250)
    checkpoint = open_checkpoint(tmp_path / "model")
    row = checkpoint.processor.ask(open_video(gif), "how many")
    expected = checkpoint.model.generate(**row, max_new_tokens=5)
    text = read_answer(checkpoint, expected[0].tolist(), GenerationOptions())[1]

    def url(data: bytes) -> str:
        return data_url(data, "video/any")

    with running(tmp_path / "model") as served:

        def ask(kind: str, data: bytes, role: str = "user"):
            parts = [{"type": kind, kind: {"url": url(data)}}, {"type": "text", "text": "how many"}]
            messages = [{"role": role, "content": parts}, {"role": "user", "content": "how many"}]
            asked = {"model": "model", "messages": messages[: 1 + (role != "user")], "max_tokens": 5}
            return served.send("POST", json=asked)

        answer = ask("video_url", gif.read_bytes()).json()
        assert answer["choices"][0]["message"]["content"].rstrip() == text
        assert answer["usage"]["prompt_tokens"] == len(row["input_ids"][0])
        still = ask("image_url", gif.read_bytes()).json()
        assert still["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]
        data, shown = url(gif.read_bytes()), {"type": "text", "text": "how many"}
        for part in (
            {"type": "input_video", "video_url": data},
            {"type": "video_url", "video_url": {"url": data}},
        ):
            asked = {"model": "model", "input": [{"role": "user", "content": [part, shown]}]}
            made = served.send("POST", "v1/responses", json=asked | {"max_output_tokens": 5}).json()
            assert made["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
            assert made["output"][0]["content"][0]["text"].rstrip() == text
        part = {
            "type": "video",
            "source": {"type": "base64", "media_type": "video/mp4", "data": data.partition(",")[2]},
        }
        asked = {"model": "model", "max_tokens": 5, "messages": [{"role": "user", "content": [part, shown]}]}
        assert served.send("POST", "v1/messages", json=asked).json()["content"][0]["text"].rstrip() == text
        part["source"] = {"type": "url", "url": "https://example.org/clip.mp4"}
        assert served.send("POST", "v1/messages", json=asked).status_code == 400
        refused(ask("video_url", b"GIF89a and no more"), 400)
        refused(ask("video_url", gif.read_bytes(), role="system"), 400)
        refused(ask("image_url", b"\0\0\0\x18ftypmp42"), 400)


@pytest.mark.slow
def test_a_video_that_takes_long_holds_up_its_own_client_alone(tmp_path, monkeypatch):
    """Neither others' questions nor others' videos; what a client has waiting is bounded."""
    save_hf("qwen3_vl", tmp_path / "model")
    gif = write_animation(tmp_path / "clip.gif", noise(6, 64, 48), 250).read_bytes()
    begun, seconds, released = [], [], threading.Event()

    @contextmanager
    def held(data, limits, name):
        seconds.append(limits.max_seconds)
        if data == endless():
            begun.append(name)
            released.wait(PATIENCE)
        yield open_video(gif, limits, name)  # here: a process for each takes long where others are busy

    monkeypatch.setattr(media, "open_apart", held)
    model = tmp_path / "model"
    most = engine.SLOW_EACH + 1  # one is decoded, the others wait
    with running(model, proxies=["127.0.0.1"]) as served, ThreadPoolExecutor(most) as clients:

        def ask(client: str, data: bytes = b"", count: int = 1):
            url = {"url": data_url(data, "video/any")}
            parts = [{"type": "text", "text": "how many"}]
            parts += [{"type": "video_url", "video_url": url}] * (count * bool(data))
            asked = {"model": "model", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            return served.send("POST", json=asked, headers={"x-forwarded-for": client})

        waiting = [clients.submit(ask, "9.9.9.9", endless()) for _ in range(most)]
        assert wait_for(lambda: begun and served.engine.stats.waiting == most)
        refused(ask("9.9.9.9", gif), 429)
        for client, data in (("9.9.9.9", b""), ("8.8.8.8", b""), ("8.8.8.8", gif), ("7.7.7.7", gif)):
            assert ask(client, data).status_code == 200
        assert begun == ["video 1"] and not any(one.done() for one in waiting)
        assert ask("7.7.7.7", gif, count=2).status_code == 200
        assert sum(seconds[-2:]) == seconds[0]  # several of one request take no longer than one
        released.set()
        assert {one.result().status_code for one in waiting} == {200}


def test_servers_show_as_many_frames_as_they_are_told(tmp_path):
    save_hf("qwen3_vl", tmp_path / "model")
    told = serve.build_parser().parse_args(["--fps", "0.5", "--max-frames", "6"])
    opened = open_checkpoint(tmp_path / "model", **machine(told))
    videos = opened.processor.images.videos
    assert (videos.fps, videos.most) == (0.5, 6)


# ------------------------------------------------------------------------------------------- the command line
@pytest.mark.slow
def test_the_command_line_is_asked_about_videos(tmp_path, cli, as_json, complaint):
    """A file, fewer frames, a batch and a conversation; boxes, and a model of one image, say no."""
    save_hf("qwen3_vl", tmp_path / "model")
    gif = write_animation(tmp_path / "clip.gif", noise(12, 64, 48), 250)
    words, asked = ["-q", "how many", "--max-new-tokens", 3], {"model": tmp_path / "model"}
    for fps, most in ((None, None), (None, 4), (4.0, None)):
        processor = Processor.from_pretrained(tmp_path / "model")
        processor.choose_frames(fps, most)
        expected = processor.ask(open_video(gif), "how many")["input_ids"].shape[1]
        more = [*(["--fps", fps] if fps else []), *(["--max-frames", most] if most else [])]
        (result,) = as_json(gif, *words, *more, **asked)
        assert result["prompt_tokens"] == expected and result["images"] == [str(gif)]
    assert "video" in complaint(gif, "--detect", "circle", "--box-format", "qwen3-vl", **asked)
    Image.open(gif).save(tmp_path / "first.png")
    first, still = (as_json(name, *words, model=DEFAULT_MODEL)[0] for name in (gif, tmp_path / "first.png"))
    assert first["answers"] == still["answers"] and first["prompt_tokens"] == still["prompt_tokens"]
    assert "first frame" in cli(gif, *words, model=DEFAULT_MODEL)[2]
    save_rows(tmp_path / "questions.jsonl", [{"image": "clip.gif", "question": "how many"}])
    out, batch = tmp_path / "answers.jsonl", ["batch", tmp_path / "questions.jsonl", "--max-frames", 4]
    status, _, err = cli(*batch, "--out", out, "--max-new-tokens", 3, **asked)
    assert status == 0, err
    (answer,) = map(json.loads, out.read_text().splitlines())
    conversation = Conversation(open_checkpoint(tmp_path / "model"))
    turn = conversation.send("how many", [gif], GenerationOptions(max_new_tokens=3))
    assert turn.finish()["prompt_tokens"] > answer["prompt_tokens"]
    assert conversation.turns[0].images[0].times
    again = conversation.send("how many red", [], GenerationOptions(max_new_tokens=3)).finish()
    assert again["reused_tokens"] > 0 and again["tiles_encoded"] == 0
