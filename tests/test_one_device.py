"""What a GPU refuses and a CPU lets pass: operations that mix devices, values that are read back, memory of
the host inside a recorded step. On the meta device, which computes nothing and refuses the same.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.tiles import Parts
from generation import kv_cache as kv
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import round_layer, to_rows
from generation.fast.quantized import ARITHMETIC, pack
from generation.options import GenerationOptions
from generation.prompts import compact, prompt_lengths
from generation.recorded import Recorder
from generation.sampling import Row, choose
from generation.steps import Step
from models.checkpoints.load import meta_init
from models.vision_language_model import VisionLanguageModel
from tests.graph_cases import SAMPLINGS
from tests.invariants import MODELS
from tests.prompts import SIDE, ImageBlock, inputs_of, tiny_vlm, words

COPIES = ("_to_copy", "copy_")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices; copies from the host too, with `recording`. Numbers,
    tensors of no dimension, may be the host's: kernels take them as arguments."""

    def __init__(self, recording: bool = False):
        super().__init__()
        self.recording, self.operations = recording, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **named or {})
        name, self.operations = function.overloadpacket.__name__, self.operations + 1
        found = [
            x for x in tree_leaves((arguments, named, result)) if isinstance(x, torch.Tensor) and x.dim()
        ]
        devices = {tensor.device.type for tensor in found}
        assert len(devices) < 2 or (name in COPIES and not self.recording), f"{function} mixes {devices}"
        return result


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int4", "Gemma 4"])
def model(request):
    if request.param == "Gemma 4":
        return tiny_vlm(**MODELS["Gemma 4"]).to("meta")
    if request.param == "int4":
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ARITHMETIC, "meta", torch.bfloat16)
            try:
                return to_rows(pack(tiny_vlm(), "int4", round_layer), torch.device("meta"))
            except NoCompiler as error:
                pytest.skip(str(error))
    with meta_init():
        made = VisionLanguageModel(tiny_vlm().config).eval()
    return made.to(getattr(torch, request.param))


def at_work(model, rows: int, **sampling) -> tuple[list[Row], kv.KVCache]:
    """What an answer's loop is given after prompts."""
    options = GenerationOptions(max_new_tokens=8, stop_token_ids=(3, 4), **sampling)
    cache = kv.allocate_for(model.language_model, rows, 40)
    return [Row(options, torch.tensor([1]), 5) for _ in range(rows)], cache


@torch.no_grad()
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_step_to_be_recorded_touches_the_device_only(model, sampling, placed, monkeypatch):
    rows, cache = at_work(model, 2, **sampling)
    if not rows[0].plain:
        pytest.skip("it is never recorded")
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=model.device)
    recorder = Recorder(GraphStep(model.language_model), tokens)
    replay = recorder.bind(cache, 2, rows[0].params, True, placed)
    monkeypatch.setattr(torch, "tensor", None)  # made on the host and copied
    with OneDevice(recording=True) as seen:
        replay()
    assert seen.operations > 30


@pytest.mark.slow(but=6)
@torch.no_grad()
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9)])
def test_the_eager_step_and_the_choice_mix_no_devices(model, lengths, sampling):
    language_model = model.language_model
    width = language_model.embed(torch.zeros(1, 1, dtype=torch.int64, device=model.device)).shape[2]
    rows, cache = at_work(model, 2, **sampling)
    start_pos = kv.per_row(lengths, model.device)
    with OneDevice() as seen:
        embeddings = torch.empty(2, 9, width, dtype=model.dtype, device=model.device)
        logits = Step(language_model).prefill(embeddings, lengths, cache)
        for _ in range(3):
            logits = Step(language_model)(choose(rows, logits).token, cache, start_pos)
            start_pos = start_pos + 1
    assert logits.dtype == model.dtype and seen.operations > 100


@torch.no_grad()
def test_images_mix_no_devices(model):
    """A processor leaves them on the host, as numbers or as bytes."""
    codes, values = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(3, 256)
    mixed = Parts.cat((Parts.of(codes, values), Parts.of(torch.zeros(1, 3, SIDE, SIDE))))
    for tiles in (torch.zeros(2, 3, SIDE, SIDE), mixed, mixed.to(model.device)):
        with OneDevice():
            features = torch.cat(tuple(model.encode_images(tiles)))
        assert features.device == model.device and features.dtype == model.dtype


@torch.no_grad()
@pytest.mark.parametrize("padded", [0, 4])
def test_nothing_is_read_back_before_the_first_token(model, padded):
    """Ids, their padding and images come from the host, where they are checked."""
    tiles = Parts.of(torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(3, 256))
    inputs = inputs_of([*words(1, 4), ImageBlock(1), ImageBlock(2), *words(2, 9)])
    ids, mask = inputs["input_ids"].repeat(2, 1), torch.ones(2, inputs["input_ids"].shape[1])
    mask[1, :padded] = 0
    ids[1, :padded] = ids[0, -1]
    lengths = prompt_lengths(model.config, ids, mask, 8)
    with OneDevice() as seen:  # what reads from the meta device raises
        x = model.embed(ids, Parts.cat((tiles, tiles)))
        rows, cache = at_work(model, 2, temperature=1.0, repetition_penalty=1.1)
        logits = Step(model.language_model).prefill(compact(x, mask, lengths).embeddings, lengths, cache)
        token = choose(rows, logits).token
    assert token.device == model.device and seen.operations > 100


def test_a_training_pass_mixes_no_devices(model, monkeypatch):
    if model.language_model.embed_tokens.weight.dtype == torch.int32:
        pytest.skip("rounded weights are not trained")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)  # not known of this device
    text = model.config.text
    documents = torch.ones(2, 12, 12, dtype=torch.bool, device=model.device)
    places = torch.zeros(2, 12, dtype=torch.int64, device=model.device)
    with OneDevice():
        embeddings = model.language_model.embed(places)
        hidden, _ = model.language_model(embeddings, documents, position_ids=places)
        model.language_model.logits(hidden).float().sum().backward()
    gradient = model.language_model.embed_tokens.weight.grad
    assert hidden.shape == (2, 12, text.hidden_size) and gradient.device == model.device
