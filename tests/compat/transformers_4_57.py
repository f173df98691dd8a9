"""Does transformers 4.57 open the folders that we save, with the same rope theta and the same text logits?

It cannot be installed beside our own transformers, so this runs in an environment of its own:

    python -m venv /tmp/v457
    /tmp/v457/bin/pip install transformers==4.57.6 torch==2.13.0 pillow jinja2
    .venv/bin/python tests/compat/transformers_4_57.py --make /tmp/portable   # here: folders, references
    /tmp/v457/bin/python tests/compat/transformers_4_57.py /tmp/portable      # there: one JSON line

Any one folder of ours can be checked too: `transformers_4_57.py FOLDER` opens everything in it; without a
reference beside it no logits are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

REFERENCE = "reference.safetensors"  # beside the checkpoint's folder, as <name>.reference.safetensors
BAR = 1e-4


def make(out: Path) -> None:
    """Save tiny models with a processor, and what they compute, with our code."""
    import torch
    from safetensors.torch import save_file

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from models import VisionLanguageModel
    from tests import tiny

    for name in ("idefics3-1-tile", "idefics3-llama3-rope", "smolvlm-linear-rope", "smolvlm-2-images-tied"):
        processor, hf_model = tiny.model_with_processor(name)
        theirs = tiny.save(hf_model, out / f"{name}-v5")
        model = VisionLanguageModel.from_pretrained(theirs)
        model.save_pretrained(out / name, processor=processor)
        ids = torch.arange(60, 160)[None]  # text only: 4.57's float32 image positions are off by one
        text = [{"type": "text", "text": "how many?"}]
        prompt = processor.hf_processor.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        prompt_ids = processor.tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits
        reference = {"input_ids": ids, "logits": logits, "prompt_ids": prompt_ids}
        save_file(reference, out / f"{name}.{REFERENCE}")


def check(folder: Path) -> dict:
    """Open one folder with AutoConfig, AutoModel and AutoProcessor, and compare with its reference."""
    import torch
    from PIL import Image
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    stored = json.loads((folder / "config.json").read_text())["text_config"]
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    problems = [kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]]
    theta = model.config.text_config.rope_theta
    if theta != stored["rope_parameters"]["rope_theta"]:
        problems.append(f"rope theta {theta} for {stored['rope_parameters']['rope_theta']}")
    result = {"folder": folder.name, "rope_theta": theta, "dtype": str(model.dtype)}
    reference = None
    if folder.with_name(f"{folder.name}.{REFERENCE}").exists():
        reference = load_file(folder.with_name(f"{folder.name}.{REFERENCE}"))
        with torch.no_grad():
            logits = model.eval()(input_ids=reference["input_ids"]).logits
        result["max_logit_difference"] = float((logits - reference["logits"]).abs().max())
        if not result["max_logit_difference"] <= BAR:
            problems.append("text logits differ")
    if (folder / "processor_config.json").exists():
        processor = AutoProcessor.from_pretrained(folder)
        result["processor"] = type(processor).__name__
        text = [{"type": "text", "text": "how many?"}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        ids = processor.tokenizer(prompt, return_tensors="pt")["input_ids"]
        if reference is not None and not torch.equal(ids, reference["prompt_ids"]):
            problems.append("the prompt's token ids differ")
        image = [{"role": "user", "content": [{"type": "image"}, *text]}]
        prompt = processor.apply_chat_template(image, add_generation_prompt=True)
        inputs = processor(text=prompt, images=[Image.new("RGB", (70, 50), "red")], return_tensors="pt")
        new = model.generate(**inputs, max_new_tokens=3)
        result["generated"] = new[0, inputs["input_ids"].shape[1] :].tolist()
    return result | {"problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint, or a folder of them")
    parser.add_argument("--make", action="store_true", help="write the folders to check, with our own code")
    args = parser.parse_args()
    if args.make:
        make(args.folder)
        return
    import transformers

    single = (args.folder / "config.json").exists()
    references = sorted(args.folder.glob(f"*.{REFERENCE}"))
    folders = [args.folder] if single else [p.with_name(p.name[: -len(REFERENCE) - 1]) for p in references]
    results = [check(folder) for folder in folders]
    print(json.dumps({"transformers": transformers.__version__, "results": results}))
    sys.exit(1 if not results or any(result["problems"] for result in results) else 0)


if __name__ == "__main__":
    main()
