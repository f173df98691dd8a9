"""What rounding weights to bfloat16 or int8 does to the answers of the embedded model.

    python -m benchmarks.quantization                    # 200 held-out questions
    python -m benchmarks.quantization --questions 1000 --model runs/shapes

The float32 model answers each question greedily. Every other system is then fed the same tokens
(teacher-forced), and its logits are compared with float32's: the largest and the mean difference, and on how
many tokens the likeliest one is the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from torch import Tensor

from benchmarks.common import table
from eval.tasks import DEFAULT_MODEL, IMAGE_SIZE
from generation import kv_cache as kv
from generation.steps import DecodeStep, Step, step_of
from inference.checkpoint import open_checkpoint
from inference.cli import positive
from shapes import heldout_questions, render

COLUMNS = {
    "system": "system",
    "largest_logit_error": "largest logit error:.3f",
    "mean_logit_error": "mean logit error:.4f",
    "top1_agreement": "same likeliest token:.2%",
    "tokens": "tokens",
}


@torch.no_grad()
def forced_logits(model, step: DecodeStep, inputs: dict, answer: list[int]) -> Tensor:
    """(len(answer), V) float32 logits before each token of `answer`, through prefill and decode step."""
    text = model.language_model
    features = model.encode_images(inputs["pixel_values"], inputs.get("pixel_attention_mask"))
    embeddings = model.place_features(
        inputs["input_ids"], text.embed_tokens(inputs["input_ids"]), features.flatten(0, 1)[None]
    )
    length = embeddings.shape[1]
    cache = kv.allocate_for(text.config, 1, length + len(answer), like=embeddings, dtype=text.cache_dtype)
    logits = [Step(text).prefill(embeddings, [length], cache)]
    for place, token in enumerate(answer[:-1]):
        logits.append(step(torch.tensor([[token]]), cache, length + place).clone())
    return torch.cat(logits).float()


def compare(name: str, questions: int) -> list[dict]:
    """One row a system: tokens, largest and mean logit error, top-1 agreement with float32."""
    model = open_checkpoint(name, device="cpu", dtype="float32")
    eager, expected = Step(model.model.language_model), []
    for scene, qa in heldout_questions(questions, 0):
        inputs = model.processor.ask(render(scene, IMAGE_SIZE), qa.question)
        generated = model.model.generate_detailed(
            **inputs, max_new_tokens=64, stop_token_ids=model.stop_token_ids
        )
        answer = generated.rows()[0]
        expected.append((inputs, answer, forced_logits(model.model, eager, inputs, answer)))
    plain = model.model.to(torch.bfloat16)
    systems = [("eager bfloat16", plain, Step(plain.language_model))]
    for dtype in ("bfloat16", "int8"):
        fast = open_checkpoint(name, device="cpu", dtype=dtype).compiled()
        step = step_of(fast.decode_step, fast.model.language_model)
        systems.append((f"{fast.decode_step_chosen} {dtype}", fast.model, step))
    tokens, rows = sum(len(answer) for _, answer, _ in expected), []
    for system, other, step in systems:
        got = [forced_logits(other, step, inputs, answer) for inputs, answer, _ in expected]
        logits, right = torch.cat(got), torch.cat([logits for *_, logits in expected])
        error, same = (logits - right).abs(), logits.argmax(-1) == right.argmax(-1)
        row = {"system": system, "tokens": tokens, "largest_logit_error": error.max().item()}
        rows.append(
            row | {"mean_logit_error": error.mean().item(), "top1_agreement": same.float().mean().item()}
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.quantization", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="checkpoint folder or repository")
    parser.add_argument("--questions", type=positive, default=200, help="shapes questions (default 200)")
    options = parser.parse_args(arguments)
    rows = compare(options.model, options.questions)
    print(table(COLUMNS, rows))
    print(json.dumps({"benchmark": "quantization", "model": options.model, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
