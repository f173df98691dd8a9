"""What nanoVLM itself computed, for its layout of today and for v0.1: data in tests/fixtures/golden."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import family_of, nanovlm
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.load import read_config
from models.config import VLMConfig
from tests.prompts import loss_of
from tests.stored import export_tensors

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
CURRENT, OLD = "nanovlm-current", "nanovlm-v0.1"
CASES = [(CURRENT, case) for case in ("single", "batch", "text_only", "end_to_end")]
CASES += [(OLD, case) for case in ("single", "batch", "end_to_end")]
BAR = 1e-4
PER_IMAGE = 4  # positions of an image in v0.1


@cache
def loaded(folder: str) -> VisionLanguageModel:
    return VisionLanguageModel.from_pretrained(GOLDEN / folder)


@cache
def expected(folder: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / folder / "expected.safetensors")


def processed(name: str) -> torch.Tensor:
    """Tiles of a preprocessing case, the global one first, float32 in [0, 1]."""
    stored = load_file(GOLDEN / "preprocessing-current" / "expected.safetensors")
    tiles = stored[f"{name}.tiles_u8"].float() / 255
    whole = stored.get(f"{name}.global_f32")
    return tiles if whole is None else torch.cat((whole[None], tiles))


def golden_images(folder: str, case: str) -> torch.Tensor | None:
    stored = expected(folder)
    if (folder, case) == (CURRENT, "end_to_end"):
        return processed("wide_100x40.to_max")
    if f"{case}.images_u8" in stored:
        return stored[f"{case}.images_u8"].float() / 255
    return stored.get(f"{case}.images")


def prompt_ids(folder: str, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple:
    """Ids and their mask as our model takes them: v0.1 put features in front of a row's text, where ours has
    placeholders."""
    if folder == CURRENT:
        return ids, mask
    image = torch.full((len(ids), PER_IMAGE), loaded(folder).config.image_token_id)
    ones = None if mask is None else torch.cat((torch.ones_like(image), mask), 1)
    return torch.cat((image, ids), 1), ones


def comparable(folder: str, case: str) -> list[int]:
    """Rows to compare. A v0.1 row with padding between image and text differs from the same row alone in
    nanoVLM; ours gives it what it gets alone, so only rows without padding are compared.
    """
    mask = expected(folder).get(f"{case}.attention_mask")
    if mask is None:
        return [0]
    return [row for row in range(len(mask)) if folder == CURRENT or mask[row].all()]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return (got - wanted).abs().max().item()


@pytest.mark.parametrize(("folder", "case"), CASES)
@torch.no_grad()
def test_vision_projector_and_logits(folder, case):
    model, stored, images = loaded(folder), expected(folder), golden_images(folder, case)
    if images is not None:
        features = model.vision_model(images)
        assert difference(features, stored[f"{case}.vision_out"]) <= BAR
        assert difference(model.projector(features), stored[f"{case}.projector_out"]) <= BAR
    ids, mask = prompt_ids(folder, stored[f"{case}.input_ids"], stored.get(f"{case}.attention_mask"))
    got = model(ids, images, attention_mask=mask).logits
    wanted = stored[f"{case}.logits"]
    assert got.shape == wanted.shape
    rows = comparable(folder, case)
    assert rows
    for row in rows:
        real = slice(None) if mask is None else mask[row].bool()
        assert difference(got[row, real], wanted[row, real]) <= BAR


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("folder", "case"), CASES)
def test_greedy_ids(folder, case):
    stored = expected(folder)
    ids, mask = prompt_ids(folder, stored[f"{case}.input_ids"], stored.get(f"{case}.attention_mask"))
    wanted = stored[f"{case}.generated_raw"]
    got = loaded(folder).generate(
        ids,
        golden_images(folder, case),
        attention_mask=mask,
        max_new_tokens=wanted.shape[1],
        stop_token_ids=(),
    )
    rows = comparable(folder, case)
    assert torch.equal(got[rows], wanted[rows])


@pytest.mark.parametrize("folder", [CURRENT, OLD])
def test_training_loss_and_gradient(folder):
    """Their labels are shifted already. In v0.1 padding takes positions: given as position_ids."""
    stored, model = expected(folder), VisionLanguageModel.from_pretrained(GOLDEN / folder)
    ids, mask = stored["train.input_ids"], stored["train.attention_mask"]
    labels = torch.full_like(ids, -100)
    labels[:, 1:] = stored["train.labels"][:, :-1]
    assert (stored["train.labels"][:, -1] == -100).all()
    if folder == CURRENT:
        images = torch.cat((processed("square_60x60.no_max"), processed("wide_100x40.no_max")))
        positions = None
    else:
        images = torch.cat((golden_images(OLD, "single"), golden_images(OLD, "end_to_end")))
        ids, mask = prompt_ids(folder, ids, mask)
        labels = torch.nn.functional.pad(labels, (PER_IMAGE, 0), value=-100)
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    inputs = {"input_ids": ids, "pixel_values": images, "attention_mask": mask}
    total, count = loss_of(model, labels, **inputs, position_ids=positions)
    loss = total / count
    assert abs(loss.item() - stored["train.loss"].item()) <= 1e-5
    loss.backward()
    gradient = model.projector.proj.weight.grad
    assert difference(gradient, stored["train.grad.MP.proj.weight"]) <= 1e-4


@pytest.mark.parametrize("folder", [CURRENT, OLD])
def test_tensors_go_back_bit_for_bit(folder):
    """Split and renamed on the way in, fused and named theirs on the way out."""
    model = loaded(folder)
    stored = load_file(GOLDEN / folder / "model.safetensors")
    back = export_tensors(dict(model.named_parameters()), nanovlm.tensor_map(stored))
    assert back.keys() == stored.keys() - {nanovlm.INV_FREQ}
    assert all(torch.equal(back[name], stored[name]) for name in back)


class TestConfig:
    def config(self, **changes) -> VLMConfig:
        stored = json.loads((GOLDEN / CURRENT / "config.json").read_text())
        stored = {name: value for name, value in (stored | changes).items() if value is not ...}
        assert family_of(stored) is nanovlm
        return read_config(stored, "here")

    def test_generations_are_told_by_keys(self):
        assert self.config().image_token_id == 334
        between = self.config(
            max_img_size=..., resize_to_max_side_len=..., vlm_extra_tokens={"image_token": "<|image|>"}
        )
        assert between.image_token_id == 334
        old = self.config(vlm_extra_tokens=...)
        assert old.image_token_id == old.text.vocab_size

    def test_image_token_follows_the_base_vocabulary(self):
        counted = self.config(lm_base_vocab_size=..., extra_token_amount=66)
        assert counted.image_token_id == 334
        tokens = {"first": "<a>", "image_token": "<|image|>"}
        assert self.config(vlm_extra_tokens=tokens).image_token_id == 335

    @pytest.mark.parametrize(("key", "value"), [("vit_cls_flag", True), ("lm_attn_scaling", 0.5)])
    def test_what_we_do_not_compute_is_refused(self, key, value):
        with pytest.raises(CheckpointError, match=key):
            self.config(**{key: value})


class TestInverseFrequencies:
    """The stored rotary frequencies override lm_re_base."""

    def copy(self, tmp_path, **tensors) -> Path:
        shutil.copytree(GOLDEN / CURRENT, tmp_path / "copy", copy_function=shutil.copyfile)
        path = tmp_path / "copy" / "model.safetensors"
        save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
        return tmp_path / "copy"

    @pytest.mark.parametrize("theta", [10_000.0, 123_456.0, 2.5])
    def test_theta_is_recovered(self, tmp_path, theta):
        frequencies = 1.0 / theta ** (torch.arange(0, 16, 2).float() / 16)
        folder = self.copy(tmp_path, **{nanovlm.INV_FREQ: frequencies})
        got = VisionLanguageModel.from_pretrained(folder).config.text.rope_theta
        assert got == pytest.approx(theta, rel=1e-6)

    @pytest.mark.parametrize(
        "frequencies", [torch.linspace(1, 0.1, 8), torch.zeros(8), torch.full((8,), torch.nan), torch.ones(4)]
    )
    def test_anything_else_is_refused(self, tmp_path, frequencies):
        folder = self.copy(tmp_path, **{nanovlm.INV_FREQ: frequencies})
        with pytest.raises(CheckpointError):
            VisionLanguageModel.from_pretrained(folder)
