"""Adapters of peft on the bases of every family: what peft makes of them, or one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

import generate
from data.processor import Processor
from eval.results import describe_model
from generation.codes import CodedWeight
from inference.checkpoint import open_checkpoint
from inference.kept import identity
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.files import EMBEDDED
from models.checkpoints.save import placed, stored_tensors, written
from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints, test_internvl, tiny
from tests.test_checkpoints_backbones import qwen, siglip
from tests.test_checkpoints_layouts import renamed
from tests.test_quantized import quantized
from tools.convert import Probe, verify
from web.engine import Engine

FAMILIES = (
    "idefics3",
    "smolvlm-tied",
    "of backbones",
    "internvl",
    "qianfan",
    *qwen_checkpoints.KINDS,
    "lfm2_vl",
    "gemma4",
)


def save_base(kind: str, folder: Path) -> Path:
    if kind in ("idefics3", "smolvlm-tied"):
        model = tiny.hf_model({"idefics3": "idefics3-biases", "smolvlm-tied": "smolvlm-2-images-tied"}[kind])
        model.save_pretrained(folder)
    elif kind == "of backbones":
        siglip(folder / "vision", alone=True)
        qwen(folder / "text", "qwen3")
        made = VisionLanguageModel.from_backbones(folder / "vision", folder / "text", scale_factor=2)
        made.save_pretrained(folder / "joined")
        return folder / "joined"
    elif kind in ("internvl", "qianfan"):
        test_internvl.save_hf({"internvl": "qwen3"}.get(kind, kind), folder)
    elif kind in qwen_checkpoints.KINDS:
        qwen_checkpoints.save_hf(kind, folder, seed=1)
    else:
        {"lfm2_vl": lfm2_checkpoints, "gemma4": gemma4_checkpoints}[kind].save_hf(folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    return {kind: save_base(kind, tmp_path_factory.mktemp(kind) / "base") for kind in FAMILIES}


def opened(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def layers(model: nn.Module, part: str) -> list[str]:
    """Names of the matrices of a part, in order."""
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and "head" not in name]
    tower = [name for name in names if ("vis" in name or "merger" in name) and "audio" not in name]
    return tower if part == "vision" else [n for n in names if n not in tower and "layers" in n]


def make(base: Path, folder: Path, model: nn.Module | None = None, **options) -> Path:
    """Made and saved by peft, with numbers that are not those of the beginning."""
    adapted = get_peft_model(opened(base) if model is None else model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, one in adapted.named_parameters():
        if one.requires_grad:
            drawn = 0.1 * torch.randn(one.shape, generator=generator)
            one.data = one.data + drawn.abs() if "magnitude" in name else one.data + drawn
    adapted.save_pretrained(folder)
    return folder


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Ours, under transformers' names."""
    model = VisionLanguageModel.from_pretrained(base, dtype="float32", adapter=adapter)
    tensors = placed(stored_tensors(model), written(model.config)[1])
    found = {name: one.make().view(one.shape) for name, one in tensors.items()}
    table = next(one for name, one in found.items() if name.endswith("embed_tokens.weight"))
    return {"lm_head.weight": table} | found


def expected(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """peft's, of a model whose head and table are two tensors."""
    theirs = opened(base)
    head = theirs.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    theirs.config.tie_word_embeddings = False
    return dict(PeftModel.from_pretrained(theirs, str(adapter)).merge_and_unload().state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """All that our model has: no part that hears, no pooling."""
    names = {name for name in other if "audio" not in name and "vision_tower.head" not in name}
    assert names <= one.keys()
    return not [name for name in names if not torch.allclose(one[name], other[name], 1e-5, 1e-6)]


OPTIONS = {
    "text": {"r": 4, "lora_alpha": 16},
    "dora": {"r": 4, "use_dora": True},
    "vision": {"r": 2},
    "rslora": {"r": 3, "use_rslora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "patterns": {"r": 2, "lora_alpha": 4},
    "modules_to_save": {},
}


CASES = [
    (kind, what) for kind in FAMILIES for what in OPTIONS if kind == "idefics3" or what in ("text", "vision")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what"), CASES)
def test_merged_as_peft_merges(bases, tmp_path, kind, what):
    model, options = opened(bases[kind]), dict(OPTIONS[what])
    targets = layers(model, "vision" if what == "vision" else "text")
    with_bias = [name for name in targets if model.get_submodule(name).bias is not None]
    targets = with_bias if "bias" in what else targets[1::3]
    if not targets:
        pytest.skip("no layer has a bias")
    if what == "patterns":
        options |= {
            "rank_pattern": {targets[0]: 5},
            "alpha_pattern": {targets[-1].split(".", 1)[1]: 11, r".*\.o_proj": 3},
        }
    if what == "modules_to_save":
        norm = next(n for n, _ in model.named_modules() if n.endswith((".norm", "embedding_norm")))
        projector = [n for n in layers(model, "vision") if "layers." not in n and "blocks." not in n]
        options["modules_to_save"] = [norm, *projector[:1]]
    adapter = make(bases[kind], tmp_path / "adapter", model, target_modules=targets, **options)
    found = merged(bases[kind], adapter)
    assert same(found, expected(bases[kind], adapter))
    assert not same(found, opened(bases[kind]).state_dict())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["smolvlm-tied", "gemma4"])
@pytest.mark.parametrize(
    ("targets", "saved"),
    [
        (["lm_head"], []),
        (["embed_tokens"], []),
        ([], ["lm_head"]),
        ([], ["embed_tokens"]),
        (["lm_head", "embed_tokens"], []),
    ],
)
def test_a_tied_model_is_tied_no_longer_where_one_of_both_learns(bases, tmp_path, kind, targets, saved):
    model = opened(bases[kind])
    inside = layers(model, "text")[:2]
    adapter = make(
        bases[kind],
        tmp_path / "adapter",
        model,
        target_modules=inside + targets,
        modules_to_save=saved or None,
    )
    found = merged(bases[kind], adapter)
    assert same(found, expected(bases[kind], adapter))
    model = VisionLanguageModel.from_pretrained(bases[kind], adapter=adapter)
    model.save_pretrained(tmp_path / "to")
    assert not VisionLanguageModel.from_pretrained(tmp_path / "to").config.tie_word_embeddings
    again = opened(tmp_path / "to")
    assert not torch.equal(again.get_output_embeddings().weight, again.get_input_embeddings().weight)


# --------------------------------------------------------------------------------------------- spellings
def respelled(adapter: Path, folder: Path, spell) -> Path:
    """The adapter with other names in its file."""
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({spell(name): one for name, one in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return folder


SPELLINGS = {
    "the text class": lambda name, text: name.replace(f".{text}", ".model."),
    "before 4.52": lambda name, text: name.replace(f".{text}", ".language_model.model."),
    "of the inner model": lambda name, text: name.replace(".model.model.", ".model.", 1),
    "with a name with a dash": lambda name, text: name.replace(".weight", ".my-run.weight"),
    "with the adapter's name": lambda name, text: name.replace(".weight", ".default.weight"),
    "without peft's front": lambda name, text: name.removeprefix("base_model.model."),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_read(bases, tmp_path, kind, spelling):
    text = "model.language_model."
    targets = layers(opened(bases[kind]), "text")[::4]
    adapter = make(bases[kind], tmp_path / "adapter", target_modules=targets)
    other = respelled(adapter, tmp_path / "other", lambda name: SPELLINGS[spelling](name, text))
    names = [load_file(one / "adapter_model.safetensors").keys() for one in (adapter, other)]
    assert names[0] != names[1]
    assert same(merged(bases[kind], other), expected(bases[kind], adapter))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_before_4_52(bases, tmp_path, kind):
    adapter = make(
        bases[kind], tmp_path / "adapter", target_modules=layers(opened(bases[kind]), "vision")[:3]
    )
    other = respelled(adapter, tmp_path / "other", lambda name: name.replace(".model.visual.", ".visual."))
    assert same(merged(bases[kind], other), expected(bases[kind], adapter))


NESTED = [
    ("qwen3_5", {"model.visual.": "model.language_model.visual."}),
    ("qwen3_5", {
        "model.visual.": "model.language_model.visual.",
        "model.language_model.": "model.language_model.language_model.",
    }),
    ("qwen3_vl", {"model.visual.": "visual.", "model.language_model.": "model."}),
]  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("kind", "names"), NESTED)
def test_a_base_whose_names_transformers_does_not_know_keeps_its_weights(bases, tmp_path, kind, names):
    adapter = make(bases[kind], tmp_path / "adapter", target_modules=layers(opened(bases[kind]), "text")[:2])
    shutil.copytree(bases[kind], tmp_path / "nested")
    renamed(tmp_path / "nested", names)
    assert same(merged(tmp_path / "nested", adapter), expected(bases[kind], adapter))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("part", ["vision_tower", "model.language_model.layers.0"])
def test_all_of_a_part_with_its_scales_and_bounds(bases, tmp_path, part):
    base = bases["gemma4"]
    inside = [name for name in layers(opened(base), "text") if "layers.1." in name][:2]
    options = {"target_modules": inside, "modules_to_save": [part]}
    adapter = make(base, tmp_path / "adapter", **options)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    buffers = dict(opened(base).named_buffers()).keys()
    learnt = [name for name in tensors if name.removeprefix("base_model.model.") in buffers]
    assert learnt
    save_file(tensors | {name: tensors[name] + 0.25 for name in learnt}, path)
    assert same(merged(base, adapter), expected(base, adapter))


@pytest.mark.parametrize("two", [False, True])
def test_a_tied_model_whose_text_part_learns_keeps_its_head(bases, tmp_path, two):
    base = bases["smolvlm-tied"]
    tower = layers(opened(base), "vision")[:2]
    adapter = make(base, tmp_path / "adapter", target_modules=tower, modules_to_save=["text_model"])
    if two:
        path = adapter / "adapter_model.safetensors"
        tensors = load_file(path)
        table = next(one for name, one in tensors.items() if "embed_tokens" in name)
        tensors = {name: one for name, one in tensors.items() if "text_model" not in name}
        tensors["base_model.model.model.text_model.embed_tokens.weight"] = table
        save_file(tensors | {"base_model.model.lm_head.weight": table + 1}, path)
    found = merged(base, adapter)
    if two:
        assert torch.equal(found["lm_head.weight"], table + 1)
        assert torch.equal(found["model.text_model.embed_tokens.weight"], table)
    else:
        assert same(found, expected(base, adapter))


# --------------------------------------------------------------------------------- what does not fit
def complaint(base: Path, adapter: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        merged(base, adapter)
    return str(caught.value)


def test_whose_names_and_shapes_are_which_is_said(bases, tmp_path):
    base, other = bases["qwen3_vl"], bases["qwen3_5"]
    text = layers(opened(base), "text")
    adapter = make(base, tmp_path / "adapter", target_modules=[text[0], text[-1]])
    deeper = respelled(adapter, tmp_path / "deeper", lambda name: name.replace("layers.3.", "layers.30."))
    said = complaint(base, deeper)
    assert str(deeper) in said and "layers.30.mlp.down_proj" in said
    attention = [name for name in text if "layers.0.self_attn.q_proj" in name]
    of_another = make(base, tmp_path / "another", target_modules=attention)
    said = complaint(other, of_another)
    assert attention[0] in said and "the base" in said
    path = of_another / "adapter_model.safetensors"
    wider = {name: one.repeat(1, 2) if "lora_A" in name else one for name, one in load_file(path).items()}
    save_file(wider, path)
    said = complaint(base, of_another)
    assert "128)" in said and "64)" in said and str(of_another) in said
    lost = respelled(
        adapter, tmp_path / "lost", lambda name: re.sub(r"model\.model\..*\.lora", "stem.lora", name)
    )
    said = complaint(base, lost)
    assert "stem" in said and "stem.weight" not in said and "lm_head" not in said
    biased = respelled(adapter, tmp_path / "biased", lambda name: name)
    path = biased / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name.replace("weight", "bias"): torch.ones(len(tensors[name]))}, path)
    assert str(biased) in complaint(base, biased)
    half = respelled(adapter, tmp_path / "half", lambda name: name.replace("lora_B", "lora_A.other"))
    assert str(half) in complaint(base, half)
    cut = half / "adapter_model.safetensors"  # as a download that broke off
    cut.write_bytes(cut.read_bytes()[:-8])
    assert str(cut) in complaint(base, half)


@pytest.mark.parametrize(
    "changed", [{"target_modules": ["nowhere"], "r": 77}, {"exclude_modules": ".*"}], ids=str
)
def test_the_file_of_weights_says_which_layers_there_are(bases, tmp_path, changed):
    base = bases["idefics3"]
    adapter = make(base, tmp_path / "adapter", r=4, target_modules=layers(opened(base), "text")[::5])
    wanted = expected(base, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changed))
    assert same(merged(base, adapter), wanted)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    "changed",
    [
        {"trainable_token_indices": [1, 2]},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"peft_type": "IA3"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "pissa_niter_4"},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": "much"}},
        {"alpha_pattern": {"(": 8}},
        {"modules_to_save": 3},
        {"lora_alpha": "16"},
    ],
    ids=str,
)
def test_what_is_not_merged_is_refused(bases, tmp_path, changed):
    base = bases["idefics3"]
    adapter = make(base, tmp_path / "adapter", target_modules=layers(opened(base), "text")[::5])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changed))
    assert str(adapter) in complaint(base, adapter)


def test_an_adapter_is_not_put_on_the_run_that_has_merged_it(bases, tmp_path):
    run, base = tmp_path / "run", bases["idefics3"]
    make(base, run / "adapter", target_modules=layers(opened(base), "text")[::5])
    shutil.copytree(base, run, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="merged already"):
        VisionLanguageModel.from_pretrained(run, adapter=run / "adapter")


def test_the_check_is_measured_against_the_spread_of_the_logits():
    logits = 100 + 1e-3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    verify("equal", logits, logits, lambda line: None)
    with pytest.raises(CheckpointError):
        verify("shifted", logits, logits + 1e-4, lambda line: None)
    wide = 1e4 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    verify("rounded", wide, wide * (1 + 1e-6), lambda line: None)


# --------------------------------------------------------------------------------------- while it runs
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["internvl", "idefics3", "qwen3_5"])
@torch.no_grad()
def test_logits_are_those_of_peft(bases, tmp_path, kind):
    """Unmerged there: of text, tower and projector together."""
    adapter = make(bases[kind], tmp_path / "adapter", r=3, target_modules="all-linear")
    model = VisionLanguageModel.from_pretrained(bases[kind], dtype="float32", adapter=adapter)
    probe = Probe.of(model.config, None)
    theirs = PeftModel.from_pretrained(opened(bases[kind]), str(adapter)).eval()
    verify("with an adapter", probe.theirs(theirs, model.config), probe.ours(model), lambda line: None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["awq", "nf4", "fp8"])
@torch.no_grad()
def test_beside_codes(bases, tmp_path, kind):
    """What the opened weights give with the adapter merged into them."""
    torch.manual_seed(0)
    shutil.copytree(bases["qwen3_vl"], tmp_path / "base")
    text = layers(opened(bases["qwen3_vl"]), "text")
    adapter = make(
        bases["qwen3_vl"], tmp_path / "adapter", lora_alpha=64, target_modules=[*text[::2], "lm_head"]
    )
    quantized(tmp_path / "base", kind)
    checkpoint = open_checkpoint(tmp_path / "base", adapter=adapter)
    alone = open_checkpoint(tmp_path / "base")
    assert checkpoint.dtype == alone.dtype and checkpoint.settings != alone.settings
    whole = VisionLanguageModel.from_pretrained(tmp_path / "base", dtype="float32", adapter=adapter)
    ids = torch.tensor([[5, 6, 7, 8]])

    def logits(model: VisionLanguageModel) -> torch.Tensor:
        lm = model.language_model
        return lm.logits(lm(lm.embed(ids))[0])

    kept = 0
    for name, layer in checkpoint.model.named_modules():
        if isinstance(layer, CodedWeight):
            low = getattr(layer, "low", None)
            numbers = layer.codes.numbers() + (0 if low is None else layer.high @ low)
            own = whole.get_submodule(name)
            kept += torch.allclose(own.weight, numbers, atol=1e-5)
            own.weight = nn.Parameter(numbers)
    assert kept == (0 if kind == "nf4" else len(text))  # all but table and head
    expected = logits(whole)
    assert (logits(checkpoint.model) - expected).norm() < 1e-4 * expected.norm()
    assert (logits(alone.model) - expected).norm() > 0.2 * expected.norm()
    assert (logits(checkpoint.compiled().model) - expected).norm() < 0.05 * expected.norm()


@pytest.fixture(scope="module")
def of_embedded(tmp_path_factory) -> Path:
    """An adapter of the embedded model, with which it says something else."""
    folder, base = tmp_path_factory.mktemp("adapter") / "mine", opened(EMBEDDED / "ocelli-shapes")
    return make(
        EMBEDDED / "ocelli-shapes", folder, base, r=2, lora_alpha=64, target_modules=layers(base, "text")
    )


def test_generate_answers_with_it(of_embedded, capsys):
    """As with the model that has it merged; rounded weights that are kept, and kept prefixes, are others."""
    asked = ["assets/example.png", "-q", "What colour is the star?", "--json", "--max-new-tokens", "8"]
    answers = {}
    for dtype in ("float32", "int8", "int4"):
        for more in ([], ["--adapter", str(of_embedded)]):
            assert generate.main([*asked, "--dtype", dtype, *more]) == 0
            said = json.loads(capsys.readouterr().out)
            assert said.get("adapter") == (more[1] if more else None)
            answers[dtype, bool(more)] = said["token_ids"]
    assert answers["float32", True] != answers["float32", False]
    model = VisionLanguageModel.from_pretrained("ocelli-shapes", adapter=of_embedded)
    processor = Processor.from_pretrained("ocelli-shapes", config=model.config)
    inputs = processor.ask("assets/example.png", "What colour is the star?")
    assert model.generate(**inputs, max_new_tokens=8).tolist() == answers["float32", True]
    assert answers["int4", True] != answers["int4", False]
    one, other = (open_checkpoint("ocelli-shapes", adapter=own) for own in (None, of_embedded))
    assert identity(one) != identity(other) and describe_model(one) != describe_model(other)
    assert Engine(other).checkpoint.name == "ocelli-shapes+mine"
