"""What rounding weights to bfloat16 or int8 does to the answers of a real model.

    python -m benchmarks.quantization                    # the embedded model, 200 held-out questions
    python -m benchmarks.quantization --model runs/shapes --questions 1000

The float32 model answers each question greedily. Every other system is then fed the same tokens
(teacher-forced), and its logits are compared with float32's: the largest and the mean difference, and on how
many tokens the likeliest one is the same. Our bfloat16 may agree with float32 half a percentage point less
often than PyTorch's own (the bar), not more. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from eval.tasks import DEFAULT_MODEL, IMAGE_SIZE, is_user_error
from generation import kv_cache as kv
from generation.decoding import DecodeStep, eager_step, prefill
from generation.fast.choose_step import fast_step, has_fast_bfloat16, set_precision
from generation.prompt import Prompt
from inference.checkpoint import Checkpoint, open_checkpoint
from inference.cli import positive
from shapes import heldout_questions, render

BAR = -0.005  # agreement of the fast bfloat16 step less the eager one's


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
    logits = [prefill(text, Prompt(embeddings, (length,)), cache)]
    for place, token in enumerate(answer[:-1]):
        logits.append(step(torch.tensor([[token]]), cache, length + place).clone())
    return torch.cat(logits).float()


def systems(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.nn.Module, DecodeStep]]:
    """(name, model, its decode step), one at a time."""
    model = copy.deepcopy(checkpoint.model).to(torch.bfloat16)
    yield "eager bfloat16", model, eager_step(model.language_model)
    for precision in ("bfloat16", "int8"):
        model = copy.deepcopy(checkpoint.model)
        if precision == "bfloat16" and has_fast_bfloat16():
            model.to(torch.bfloat16)  # as `open_checkpoint` has it
        else:
            set_precision(model, precision)
        step, how = fast_step(model.language_model)
        yield f"{how if step else 'eager'} {precision}", model, step or eager_step(model.language_model)


def compare(checkpoint: Checkpoint, questions: int) -> list[dict]:
    """One row a system: tokens, largest and mean logit error, top-1 agreement with float32."""
    answered, step = [], eager_step(checkpoint.model.language_model)
    for scene, qa in heldout_questions(questions, 0):
        inputs = checkpoint.processor.ask(render(scene, IMAGE_SIZE), qa.question)
        generated = checkpoint.model.generate_detailed(
            **inputs, max_new_tokens=64, stop_token_ids=checkpoint.stop_token_ids
        )
        answer = generated.rows()[0]
        answered.append((inputs, answer, forced_logits(checkpoint.model, step, inputs, answer)))
    tokens, rows = sum(len(answer) for _, answer, _ in answered), []
    for name, model, own_step in systems(checkpoint):
        largest, total, same = 0.0, 0.0, 0
        for inputs, answer, expected in answered:
            got = forced_logits(model, own_step, inputs, answer)
            error = (got - expected).abs()
            largest, total = max(largest, error.max().item()), total + error.mean(1).sum().item()
            same += int((got.argmax(-1) == expected.argmax(-1)).sum())
        row = {"system": name, "tokens": tokens, "largest_logit_error": largest}
        rows.append(row | {"mean_logit_error": total / tokens, "top1_agreement": same / tokens})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.quantization", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="checkpoint folder or repository")
    parser.add_argument("--questions", type=positive, default=200, help="shapes questions (default 200)")
    options = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.model, device="cpu", dtype="float32")
    except Exception as error:
        if not is_user_error(error):
            raise
        print(f"benchmarks.quantization: error: {error}", file=sys.stderr)
        return 2
    rows = compare(checkpoint, options.questions)
    print("| system | largest logit error | mean logit error | same likeliest token | tokens |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['system']} | {row['largest_logit_error']:.3f} | {row['mean_logit_error']:.4f} "
            f"| {row['top1_agreement']:.2%} | {row['tokens']} |"
        )
    eager, fast, _ = (row["top1_agreement"] for row in rows)
    print(f"{rows[1]['system']} less {rows[0]['system']}: {fast - eager:+.2%}, bar {BAR:+.2%}")
    result = {"benchmark": "quantization", "model": options.model, "rows": rows}
    print(json.dumps(result | {"bfloat16_less_eager": fast - eager, "within_bar": fast - eager >= BAR}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
