"""Learning from rewards: the model answers questions, and answers that are better than others grow likelier.

    python train.py configs/rewards.yaml --init-from CHECKPOINT --data rows.jsonl --rewards '{exact: 1.0}'

A step is in `RewardsTask.batches`: questions with their images, a group of answers to each from one prefill
(`roll_out`), their rewards and advantages (`Group`), and micro-batches in which each prompt stands once
(`data.packing.pack_answers`), for the loss of `training/policy.py`.

Answers depend on the seed, on the number of the batch, on a question's place in it, and on the weights: on
nothing else. So a run that resumes samples the same ones, on another number of ranks but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import DatasetError
from data.loader import LoaderConfig
from data.order import key_of
from data.packing import IGNORE_INDEX, Batch, Sample, collate, pack_answers
from data.processor import Processor
from data.tiles import Parts
from data.video import Clip
from generation.fast.cuda import graph
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep, unsupported
from generation.options import MAX_SEED, GenerationOptions
from generation.requests import Request, RequestOutput
from generation.scheduler import Scheduler
from generation.steps import Step
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import Ranks, has_codes, reshard
from training.export import answering_model
from training.policy import PolicyLoss, advantages, step_weight, token_weights
from training.rewards import Rewards
from training.rows import RowsLoss, RowsTask, grouped
from training.task import Answered, Question, Score

# Factor less 1 by which training may give a fresh token another probability than sampling did.
_MOST_OFF = {torch.float32: 1e-3, torch.bfloat16: 1.0}
# Of each `rollout_step`: its device, why it cannot run a language model, if so, and what makes it.
_STEPS = {"c": ("cpu", unsupported, NativeStep), "cuda": ("cuda", graph.unsupported, graph.GraphStep)}
_SCORED_BY = 64  # number of questions by which one has to be scored
_OF_ANSWERS = ("drawn", "advantage", "weight")


@dataclass(eq=False)
class Group:
    """A question and the answers to it: their token ids, the log-probabilities that each token was drawn by,
    and what each reward gives to each answer. `place`: the question's number in the batch of all ranks;
    `ended`: whether the model itself ended the answer, before the longest that it may be."""

    place: int
    sample: Sample
    parts: Parts | None
    ids: list[list[int]] = field(default_factory=list)
    drawn: list[list[float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    totals: list[float] = field(default_factory=list)

    @property
    def prompt_ids(self) -> list[int]:
        return self.sample.input_ids[: self.sample.prompt]

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.ids))

    @property
    def varies(self) -> bool:
        """True if one answer is better than another: else there is nothing to learn."""
        return max(self.totals) > min(self.totals)

    def answer(self, outputs: Sequence[RequestOutput], processor: Processor, rewards: Rewards) -> None:
        """Take the answers and their rewards; a ValueError says why there is no answer."""
        for output in outputs:
            if output.error is not None:
                name, number = self.sample.sample_id
                said = f"{name}, row {number}: cannot be answered: {output.error}"
                raise ValueError(said) from output.error
            self.ids.append(output.token_ids)
            self.drawn.append([float(one.logprob or 0.0) for one in output.logprobs or ()])
            self.ended.append(output.stop_reason == "stop")
        self.texts = [processor.decode(ids).strip() for ids in self.ids]
        assert self.sample.row is not None, "a question has its row"
        self.rewards = rewards(self.texts, self.sample.row)
        self.totals = rewards.totals(self.rewards) or [0.0] * len(self.texts)

    def samples(self) -> list[Sample]:
        """The prompt with each answer, which is what is learnt."""
        prompt, unlearnt = self.prompt_ids, [IGNORE_INDEX] * self.sample.prompt
        bare = replace(self.sample, row=None)
        return [replace(bare, input_ids=prompt + ids, labels=unlearnt + ids) for ids in self.ids]


def roll_out(
    model: VisionLanguageModel,
    step: Step | None,
    groups: Sequence[Group],
    options: GenerationOptions,
    seeds: Sequence[int],
    slots: int,
) -> list[list[RequestOutput]]:
    """`options.num_return_sequences` answers to the question of each group, which has its seed, `slots` at a
    time: whenever one ends, its place is the next one's. Each prompt and its images are computed once."""
    count = options.num_return_sequences
    one = replace(options, num_return_sequences=1, logprobs=0, logprobs_mode="sampler", lookup="off")
    requests = [
        Request(
            torch.tensor(group.prompt_ids),
            group.parts,
            options=replace(one, seed=(seed + answer) % MAX_SEED),
            key=(number, answer),
        )
        for number, (group, seed) in enumerate(zip(groups, seeds, strict=True))
        for answer in range(count)
    ]
    if not requests:
        return []
    # A new one each time: what it computes depends on nothing before.
    scheduler = Scheduler(model, min(slots, len(requests)), step)
    # Blocks compiled for training would be compiled again for each shape that generation has.
    with torch.compiler.set_stance("force_eager"):
        outputs = {output.key: output for output in scheduler.run(requests)}
    return [[outputs[number, answer] for answer in range(count)] for number in range(len(groups))]


class RewardsTask(RowsTask):
    """See `training.task.Task`."""

    best_by = ("eval_reward", True)

    def __init__(self, config: TrainConfig, ranks: Ranks):
        assert isinstance(config.rewards, Mapping), "the settings were checked"
        self.rewards = Rewards(config.rewards)
        super().__init__(config, ranks)
        self.options = GenerationOptions(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            max_new_tokens=config.answer_tokens,
            stop_token_ids=tuple({*self.model.config.eos_token_ids, *self.processor.stop_token_ids}),
            num_return_sequences=config.group_size,
        )
        self.groups: list[Group] = []
        self.scored: list[bool] | None = []  # whether each question so far was; None: one was, all ranks know
        # Since the latest line of metrics.jsonl: sums with their counts, and the greatest disagreement.
        self.sums: dict[str, tuple[float, float]] = {}
        self.most_off = 0.0

    def check_context(self) -> None:
        super().check_context()
        context, config = self.model.config.text.max_position_embeddings, self.config
        if config.sequence_length + config.answer_tokens > context:
            raise ValueError(
                f"--sequence-length: expected at most {context - config.answer_tokens}, the context less "
                f"--answer-tokens, got {config.sequence_length}"
            )

    def new_loss(self, blank: bool) -> RowsLoss:
        return PolicyLoss(self.model, blank, self.config)

    def _loader_config(self) -> LoaderConfig:
        """A question a batch, of rows without end, so that no rank has none."""
        config = super()._loader_config()
        return replace(config, packing=False, micro_batch_size=1, questions=True, endless=True)

    def _steps_of_epochs(self) -> int:
        if (rows := self.mixture.num_rows) is None:
            raise DatasetError("steps: a stream has no known length; set --steps")
        return math.ceil(rows * (self.config.epochs or 1) / self.config.batch_size)

    # ------------------------------------------------------------------------------------------- a step
    def batches(self) -> Iterator[list[Batch]]:
        questions = grouped(self.loader)
        while True:
            self._before = self.loader.state
            number = self._before.rows // self.loader.rows_per_step + 1
            # Before rows are read: ranks do both together, and reading may fail on one.
            self._check_scores()
            model, step = self._answering()
            self.groups = self._asked(next(questions))
            seeds = [key_of(self.config.seed, "answers", number, group.place) for group in self.groups]
            self._answer(self.groups, model, step, self.options, seeds)
            self._describe(self.groups)
            if self.scored is not None:
                self.scored += [bool(group.rewards) for group in self.groups]
            del model, step
            yield self._packed()

    def _check_scores(self) -> None:
        """Raises ValueError where no reward suits any row so far."""
        if self.scored is None:
            return
        asked, scored = self.ranks.sum(len(self.scored), sum(self.scored))
        if scored:
            self.scored = None
        elif asked >= _SCORED_BY:
            latest = self.groups[-1].sample.row if self.groups else None
            raise ValueError(
                f"--rewards: none could score any of {asked:.0f} questions: "
                f"{'; '.join(self.rewards.refused.values())}; the latest row has "
                f"{', '.join(latest or ())}, of which target is its last answer"
            )

    def _answering(self) -> tuple[VisionLanguageModel, Step | None]:
        """The model with its weights of now, and the step that samples; None is the eager one."""
        name, got = self.config.rollout_step, self.ranks.device.type
        # The steps that are not eager know no adapters: a copy has them merged.
        model = answering_model(self, copied=name == "c" or (name == "cuda" and self.config.lora_rank > 0))
        if name == "eager":
            return model, None
        device, refused, new_step = _STEPS[name]
        reason = "adapters beside codes" if has_codes(model) else refused(model.language_model)
        if got != device:
            reason = f"expected the device {device}, got {got}"
        try:
            if not reason:
                return model, new_step(model.language_model)
        except NoCompiler as error:
            reason = str(error)
        raise ValueError(f"--rollout-step {name}: {reason}; use eager")

    def _asked(self, batches: list[Batch]) -> list[Group]:
        """A group for each question of this rank, whose batches have one each, or padding."""
        first = self.ranks.rank * len(batches)
        return [
            Group(first + number, batch.samples[0], batch.get("pixel_values"))
            for number, batch in enumerate(batches)
            if batch.samples
        ]

    def _answer(
        self,
        groups: list[Group],
        model: VisionLanguageModel,
        step: Step | None,
        options: GenerationOptions,
        seeds: list[int],
    ) -> None:
        """Give the groups their answers, and these their rewards."""
        model.eval()
        outputs = roll_out(model, step, groups, options, seeds, self.config.answers_at_once)
        self.model.train()
        for group, of_group in zip(groups, outputs, strict=True):
            group.answer(of_group, self.processor, self.rewards)

    def _packed(self) -> list[Batch]:
        """Micro-batches of the groups that say something, and of padding as far as ranks need some."""
        telling = [group for group in self.groups if group.varies or self.config.kl]
        of_rank = self.config.batch_size // self.ranks.world_size
        micro = self.config.micro_batch_size or of_rank
        batches = [self._batch(telling[at : at + micro]) for at in range(0, len(telling), micro)]
        wanted = math.ceil(of_rank / micro) if self.ranks.together else 1  # ranks exchange as often
        return batches + [self._batch([]) for _ in range(wanted - len(batches))]

    def _batch(self, groups: list[Group]) -> Batch:
        config, image = self.model.config, self.processor.image_token_id
        rows = [pack_answers(group.samples(), group.parts, config) for group in groups]
        batch = collate(rows or [None], self.processor.pad_token_id, None, image)
        batch.sample_ids = [(group.sample.sample_id,) for group in groups] or [()]
        answers = list[tuple[list[float], float, float]]()
        for group in groups:
            (gained,) = advantages(torch.tensor([group.totals]), self.config.policy_loss).tolist()
            answers += zip(group.drawn, gained, token_weights(group.lengths, self.config), strict=True)
        # A model may say an image's placeholder, too, where no image is meant.
        places, said = batch["placeholders"], batch["labelled"]
        batch["placeholders"] = places[~torch.isin(places, said)]
        batch["drawn"] = torch.tensor([one for drawn, _, _ in answers for one in drawn])
        batch["advantage"] = torch.tensor([one for drawn, one, _ in answers for _ in drawn])
        batch["weight"] = torch.tensor([one for drawn, _, one in answers for _ in drawn])
        return batch

    @torch.no_grad()
    def inputs(self, batch: Batch, step: int) -> dict[str, Any]:
        """With what the reference says. Here, because ranks compute it together: none of them has failed to
        read its rows."""
        if not self.config.kl:
            return super().inputs(batch, step)
        assert isinstance(self.module, PolicyLoss), "it compares"
        (reference,), device = self.module.references, self.ranks.device
        inputs = {name: value for name, value in batch.to(device).items() if name not in _OF_ANSWERS}
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            (logprobs,) = reference(every=(self.module.unfiltered,), **inputs)
        reshard(reference)
        return super().inputs(batch, step) | {"reference": logprobs}

    def padding(self) -> list[Batch]:
        raise AssertionError("rows without end")

    def count(self, batches: list[Batch]) -> float:
        return step_weight([length for group in self.groups for length in group.lengths], self.config)

    # ------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Where the rows stand, and what the next line of metrics.jsonl is to say."""
        scored = self.scored is None or any(self.scored)
        rows = super().state_dict()
        return {"rows": rows, "sums": self.sums, "off_policy": self.most_off, "scored": scored}

    def load_state_dict(self, states: list[dict], step: int) -> None:
        super().load_state_dict([state["rows"] for state in states], step)
        # Where nothing was scored it is counted anew: by then the rewards may be others.
        self.scored = None if any(state.get("scored", True) for state in states) else []
        for state in states[self.ranks.rank :: self.ranks.world_size]:
            for name, (total, count) in state["sums"].items():
                self._note(name, total, count=count)
            self.most_off = max(self.most_off, state.get("off_policy", 0.0))

    # --------------------------------------------------------------------------------------- to look at
    def _describe(self, groups: list[Group]) -> None:
        """Note what metrics.jsonl says of answers."""
        for group in groups:
            self._note("reward", *(group.totals if group.rewards else ()))
            self._note("unscored", len(group.rewards) < len(self.rewards.weights))
            for name, values in group.rewards.items() if len(group.rewards) > 1 else ():
                self._note(f"reward_{name}", *values)
            self._note("unvaried", not group.varies)
            self._note("answer_tokens", *group.lengths)
            self._note("cut_off", *(not ended for ended in group.ended))
            self._note("entropy", *(-one for drawn in group.drawn for one in drawn))

    def _note(self, name: str, *values: float, count: float | None = None) -> None:
        total, before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = total + math.fsum(values), before + (len(values) if count is None else count)

    def note(self, parts: list[dict[str, Tensor]]) -> None:
        """Raises ValueError where training and sampling disagree about fresh answers."""
        found = [{name: value.item() for name, value in part.items()} for part in parts]
        tokens = sum(part["tokens"] for part in found)
        for name in ("clipped", "kl"):
            self._note(name, *(part[name] for part in found if name in part), count=tokens)
        off = max(part["most"] for part in found)
        self.most_off = max(self.most_off, off)
        # By rounding, a token at the edge of a filter comes in, and takes from the probability of others.
        if self.config.top_k or self.config.top_p < 1:
            off = sum(part["off"] for part in found) / max(tokens, 1)
        rounded = torch.bfloat16 if has_codes(self.model) else self.dtype  # as kept keys and values are
        bound = self.config.most_off_policy or _MOST_OFF[rounded]
        if bound < off < math.inf:
            raise ValueError(
                "sampling and training disagree about the probability of a fresh token by a factor of 1 + "
                f"{off:.2g}, expected at most 1 + {bound:g}: set --rollout-step eager, "
                "--precision float32, --top-p 1, --top-k 0 or --most-off-policy"
            )

    def row(self, parts: list[dict[str, Tensor]], loss: float, labels: float) -> dict[str, float]:
        gathered = self.ranks.gather((self.sums, self.most_off))
        self.sums, self.most_off = {}, 0.0
        row = {"policy_loss": loss / max(labels, 1.0), "off_policy": max(off for _, off in gathered)}
        for name in dict.fromkeys(name for sums, _ in gathered for name in sums):
            totals, counts = map(sum, zip(*(sums.get(name, (0.0, 0.0)) for sums, _ in gathered)))
            row |= {name: totals / counts} if counts else {}
        return row

    def answered(self) -> list[Answered]:
        """The best and the worst answer of two groups, with their images."""
        shown = []
        for group in sorted(self.groups, key=lambda group: not group.varies)[:2]:
            row = group.sample.row or {}
            images = tuple(one for one in group.sample.images if not isinstance(one, Clip))
            question = Question(images, str(row["question"]), str(row["target"]))
            order = sorted(range(len(group.totals)), key=lambda answer: group.totals[answer])
            for answer in (order[-1], order[0]):
                ended = "stop" if group.ended[answer] else "length"
                shown.append(Answered(question, group.texts[answer], group.totals[answer], ended))
        return shown

    @torch.no_grad()
    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
        """Mean reward of the likeliest answers to held-out questions, and the share that was cut off."""
        if self.held_out is None or not self.config.eval_pictures:
            return {}
        model, native = self._answering()
        options = replace(self.options, temperature=0.0, num_return_sequences=1)
        found = list[tuple[float, bool]]()  # of each answer, its reward and whether it was cut off
        for batches in self._held_out_groups():
            groups = self._asked(batches)
            self._answer(groups, model, native, options, [0] * len(groups))
            scored = (group for group in groups if group.rewards)
            found += [(one, not end) for group in scored for one, end in zip(group.totals, group.ended)]
        found = [one for of_rank in self.ranks.gather(found) for one in of_rank]
        if not found:
            raise DatasetError("--eval-data: no row can be scored, on any rank")
        return dict(zip(("eval_reward", "eval_cut_off"), map(Score.of, zip(*found))))
