"""Train a vision-language model. With its defaults: Ocelli's embedded model, from nothing, on a CPU.

    python train.py                                 # the picture world, about three hours on two CPU cores
    python train.py --pictures 2000000              # the same recipe for longer
    python train.py --output runs/try --threads 1   # another folder; run again to continue where it stopped
    python train.py --help

Two stages. First the vision tower alone learns from dense targets (what each patch shows); then the whole
model learns to answer, several questions packed behind each picture. The output folder is a checkpoint in
the Hub's Idefics3 layout, with metrics.jsonl and the training state beside it.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.errors import ProcessorError
from data.processor import Processor, make_processor
from data.shapes import FAMILIES, ask, sample_questions, sample_scene
from data.shapes_stream import ChatPieces, ShapesStream, ShapesStreamConfig, branch_mask
from data.tokenizer import build_tokenizer
from inference.checkpoint import RequestError, pick_device
from models.checkpoints.card import model_card
from models.checkpoints.errors import CheckpointError
from models.checkpoints.locate import snapshot
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from training.config import TrainConfig, parse_config
from training.dense import DenseHead, dense_loss
from training.grounding import FactHead
from training.optim import build_optimizers, schedule, update_average
from training.state import load_state, save_state

HELDOUT_SEED = 1_000_003  # in-run evaluation pictures: held-out digits, seeds that training never uses


def build_processor(config: TrainConfig):
    """The tokenizer, trained on the picture world's own sentences, and the processor around it."""
    rng = random.Random("tokenizer:0")  # the same vocabulary whatever the seed of the run
    texts = []
    for _ in range(3000):
        scene = sample_scene(rng)
        for qa in sample_questions(scene, rng, 6):
            texts += [qa.question, " " + qa.answer]
        texts += [" " + ask(scene, rng, "describe").answer, "User:", "System:", "\nAssistant:"]
    tokenizer = build_tokenizer(texts, config.vocab_size)
    tokens = (config.image_size // config.patch_size // config.scale_factor) ** 2
    return make_processor(tokenizer, image_size=config.image_size, image_seq_len=tokens)


def build_model(config: TrainConfig, tokenizer) -> VisionLanguageModel:
    vision = VisionConfig(
        hidden_size=config.vision_width,
        intermediate_size=4 * config.vision_width,
        num_hidden_layers=config.vision_layers,
        num_attention_heads=config.vision_heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
    )
    text = TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.text_width,
        intermediate_size=config.text_inner,
        num_hidden_layers=config.text_layers,
        num_attention_heads=config.text_heads,
        num_key_value_heads=config.text_kv_heads,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    )
    model = VisionLanguageModel(
        VLMConfig(
            vision=vision,
            text=text,
            scale_factor=config.scale_factor,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.init_weights(torch.Generator().manual_seed(config.seed))
    return model


def chat_pieces(tokenizer, tokens_per_tile: int) -> ChatPieces:
    """The chat template around one picture, its question and its answer, as ids."""
    picture = (
        "<fake_token_around_image><global-img>" + "<image>" * tokens_per_tile + "<fake_token_around_image>"
    )
    return ChatPieces(
        prefix=tuple(tokenizer.encode("<|im_start|>User:" + picture, add_special_tokens=False)),
        middle=tuple(tokenizer.encode("\nAssistant:", add_special_tokens=False)),
        end=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
    )


def losses(trained, batch, vision_only: bool, config: TrainConfig):
    """(loss to minimise, what to log). The picture is encoded once for all of them."""
    model, head = trained["model"], trained["head"]
    patches = model.vision_model(batch["pixel_values"])  # (B, P, D_v)
    dense, seen = dense_loss(head(patches), batch["dense"])
    logged = {"dense_loss": dense.detach(), **seen}
    if vision_only:
        return dense, logged
    hidden = answer_states(model, patches, batch)
    total, count = model.summed_loss(hidden, batch["labels"])
    answer = total / count
    nouns, pairs = trained["nouns"].loss(batch["nouns"]), trained["pairs"].loss(batch["pairs"])
    logged |= {"loss": answer.detach(), "noun_loss": nouns.detach(), "pair_loss": pairs.detach()}
    return answer + config.dense_weight * dense + config.fact_weight * (nouns + pairs), logged


def answer_states(model, patches, batch):
    ids = batch["input_ids"]
    x = model.place_features(ids, model.language_model.embed_tokens(ids), model.projector(patches))
    mask = branch_mask(batch["documents"])
    hidden, _ = model.language_model(x, attention_mask=mask, position_ids=batch["position_ids"])
    return hidden


@torch.no_grad()
def evaluate(model, head, stream: ShapesStream, batches: int, vision_only: bool) -> dict[str, float]:
    """Held-out pictures: share of answers right to the last token under greedy decoding, by family.

    The logits are teacher-forced: an answer is greedily reproduced exactly when each of its tokens is the
    argmax given the ones before it.
    """
    model.eval()
    right, asked = torch.zeros(len(FAMILIES)), torch.zeros(len(FAMILIES))
    tokens_right, tokens, seen = 0, 0, []
    for index in range(batches):
        batch = to_device(stream.batch(index), model.device)
        patches = model.vision_model(batch["pixel_values"])
        seen.append(dense_loss(head(patches), batch["dense"])[1])
        if vision_only:
            continue
        hidden = answer_states(model, patches, batch)
        targets = batch["labels"][:, 1:]
        labelled = targets != IGNORE_INDEX
        wrong = torch.zeros_like(labelled)
        wrong[labelled] = (
            model.language_model.logits(hidden[:, :-1][labelled]).argmax(-1) != targets[labelled]
        )
        tokens_right, tokens = tokens_right + (labelled & ~wrong).sum().item(), tokens + labelled.sum().item()
        count_branches(batch, wrong, right, asked)
    model.train()
    scores = {f"eval_{name}": sum(row[name].item() for row in seen) / len(seen) for name in seen[0]}
    if not vision_only:
        scores["eval_accuracy"] = (right.sum() / asked.sum()).item()
        scores["eval_token_accuracy"] = tokens_right / tokens
        scores.update(
            {f"eval_{f}": round((right[i] / asked[i]).item(), 4) for i, f in enumerate(FAMILIES) if asked[i]}
        )
    return scores


def count_branches(batch, wrong, right, asked) -> None:
    """Add each branch of a batch to its family's counts; one wrong token makes the answer wrong."""
    documents, families = batch["documents"][:, 1:], batch["families"][:, 1:]
    for document in range(1, int(documents.max()) + 1):
        here = documents == document  # (B, T - 1)
        present = here.any(1)
        family = families.masked_fill(~here, -1).amax(1)[present]
        good = ~(wrong & here).any(1)[present]
        asked.index_add_(0, family.cpu(), torch.ones(len(family)))
        right.index_add_(0, family.cpu(), good.float().cpu())


def to_device(batch: dict, device) -> dict:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def main(arguments: list[str] | None = None) -> None:
    config = parse_config(arguments, __doc__.splitlines()[0])
    try:
        train(config)
    except (RequestError, CheckpointError, ProcessorError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def train(config: TrainConfig) -> None:
    """Build or load everything that a run needs, then run it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)

    if config.init_from:
        model = VisionLanguageModel.from_pretrained(config.init_from, dtype=torch.float32, device=device)
        model.train()
        processor = Processor.from_pretrained(snapshot(config.init_from), config=model.config)
    else:
        processor = build_processor(config)
        model = build_model(config, processor.tokenizer).to(device)
    head = DenseHead(model.config.vision.hidden_size).to(device)
    width = model.config.text.hidden_size
    nouns, pairs = FactHead(width, depth=0.5).to(device), FactHead(width, depth=0.75).to(device)
    nouns.watch(model.language_model)
    pairs.watch(model.language_model)
    trained = nn.ModuleDict({"model": model, "head": head, "nouns": nouns, "pairs": pairs})
    optimizers = build_optimizers(trained, config.lr, config.matrix_lr, config.weight_decay)
    average = {name: p.detach().clone() for name, p in trained.named_parameters()}
    first = load_state(output, trained, optimizers, average, config) if config.resume else 0

    stream_config = ShapesStreamConfig(
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        image_size=config.image_size,
        patch_size=config.patch_size,
        seed=config.seed,
        curriculum_pictures=config.curriculum_pictures,
        vision_steps=config.vision_steps,
        vision_batch_size=config.vision_batch_size,
    )
    pieces = chat_pieces(processor.tokenizer, model.config.tokens_per_tile)
    stream = ShapesStream(stream_config, processor.tokenizer, pieces, start_batch=first)
    heldout_config = ShapesStreamConfig(
        **{
            **vars(stream_config),
            "seed": HELDOUT_SEED,
            "split": "heldout",
            "curriculum_pictures": 0,
            "vision_steps": 0,
            "list_probability": 0.0,
        }
    )
    heldout = ShapesStream(heldout_config, processor.tokenizer, pieces)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters:,} parameters on {device}; steps {first} to {config.steps}, "
        f"{config.vision_batch_size} pictures each for the tower, then {config.batch_size}"
    )
    loader = DataLoader(
        stream, batch_size=None, num_workers=config.workers, prefetch_factor=4 if config.workers else None
    )
    run(config, loader, heldout, trained, optimizers, average, processor, first)


def run(config, loader, heldout, trained, optimizers, average, processor, first: int) -> None:
    """The loop: one batch, one step, now and then a look at held-out pictures and a checkpoint."""
    model, head, output = trained["model"], trained["head"], Path(config.output)
    metrics = (output / "metrics.jsonl").open("a")
    bar = tqdm(total=config.steps, initial=first, unit="step", smoothing=0.02, mininterval=2)
    began, batches, scores = time.time(), iter(loader), {}
    for step in range(first, config.steps):
        batch = to_device(next(batches), model.device)
        vision_only = step < config.vision_steps
        loss, logged = losses(trained, batch, vision_only, config)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained.parameters(), config.grad_clip)
        if not torch.isfinite(norm):
            raise SystemExit(
                f"step {step}: the gradient is {norm.item()}; the last checkpoint is in {output}"
            )
        rate = schedule(step, config.steps, config.warmup_steps, config.decay_fraction, config.vision_steps)
        peaks = (config.lr, config.vision_matrix_lr if vision_only else config.matrix_lr)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        update_average(average, trained, config.ema, step)
        done = step + 1
        bar.update()
        if done % config.log_every == 0:
            row = {
                "step": done,
                "pictures": config.pictures_after(done),
                "rate": rate,
                "grad_norm": norm.item(),
            }
            row |= {name: round(value.item(), 5) for name, value in logged.items()}
            seen = config.pictures_after(done) - config.pictures_after(first)
            row["pictures_per_second"] = seen / (time.time() - began)
            write(metrics, row)
            bar.set_postfix(
                {
                    k: f"{v:.3f}"
                    for k, v in row.items()
                    if k in ("loss", "dense_loss", "patch_kind", "patch_count")
                }
            )
        if done % config.eval_every == 0 or done == config.steps:
            with averaged(trained, average):
                batch_count = math.ceil(config.eval_pictures / config.batch_size)
                scores = evaluate(model, head, heldout, batch_count, vision_only)
            write(metrics, {"step": done, "pictures": config.pictures_after(done), **scores})
            bar.write(f"step {done}: " + ", ".join(f"{k[5:]} {v:.3f}" for k, v in scores.items()))
        if done % config.save_every == 0 or done == config.steps:
            save_state(output, trained, optimizers, average, config, done)
            with averaged(trained, average):
                model.save_pretrained(output, processor, card=card(model, output, done, config, scores))


def card(model, output: Path, step: int, config: TrainConfig, scores: dict[str, float]) -> str:
    """The model card of a run as far as it has come."""
    rows = [{"held-out, in the run": k.removeprefix("eval_"), "value": f"{v:.3f}"} for k, v in scores.items()]
    return model_card(
        output.name,
        model.config,
        sum(p.numel() for p in model.parameters()),
        summary="Answers questions about the built-in picture world of Ocelli: drawn shapes, printed words, "
        "handwritten digits. It knows nothing else.",
        training_data=f"{config.pictures_after(step):,} pictures of data/shapes, drawn on the fly (seed "
        f"{config.seed}), each with several questions; digits from the UCI set that scikit-learn carries.",
        evaluation=rows,
        license="apache-2.0",
    )


def write(metrics, row: dict) -> None:
    metrics.write(json.dumps(row) + "\n")
    metrics.flush()


class averaged:
    """`with averaged(modules, average):` the modules hold their averaged weights inside."""

    def __init__(self, modules: nn.Module, average: dict):
        self.modules, self.average = modules, average

    @torch.no_grad()
    def __enter__(self):
        self.kept = {name: p.detach().clone() for name, p in self.modules.named_parameters()}
        for name, parameter in self.modules.named_parameters():
            parameter.copy_(self.average[name])

    @torch.no_grad()
    def __exit__(self, *_):
        for name, parameter in self.modules.named_parameters():
            parameter.copy_(self.kept[name])


if __name__ == "__main__":
    sys.exit(main())
