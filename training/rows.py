"""Training on datasets: rows packed or padded, the loss summed over labelled tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from data.errors import BadRow, DatasetError, ImageError, ProcessorError
from data.image_rules import Images
from data.loader import DropCount, Loader, LoaderConfig, counts_exactly, merge_states, steps_per_run
from data.new_processor import SPECIAL_TOKENS, make_processor
from data.order import ShardReader
from data.packing import Batch, segment_mask
from data.processor import Processor
from data.sources import Mixture, open_both
from data.visuals import open_video
from families import FAMILIES, NEW
from generation.draws import adjusted_scores
from generation.options import SamplingParams
from models.checkpoints.files import Opened
from models.checkpoints.save import public_name, transformers_processor, written
from models.checkpoints.sources import open_files
from models.config import VLMConfig
from models.losses import chunk_positions, log_probabilities, summed_cross_entropy
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks
from training.lora import open_base
from training.optim import part_of
from training.task import Question, Score, Task

_UNUSABLE_ROWS = 200  # passed over, at most, in the search for questions


class RowsLoss(nn.Module):
    """(summed cross-entropy over labelled tokens, what to log) of a micro-batch (`data.packing.Batch`), whose
    indices of labels and placeholders spare a GPU from counting them.

    A batch without images sends a blank one through the vision tower and adds its features times zero, so
    that every rank takes part in every exchange of gradients.
    """

    def __init__(self, model: VisionLanguageModel, blank: bool):
        super().__init__()
        self.model, self.blank = model, blank

    def forward(self, labels: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, targets = self.predicting(**inputs), labels.flatten()[inputs["labelled"]]
        return summed_cross_entropy(hidden, targets, self.model.language_model.loss_head), {}

    def predicting(
        self,
        labelled: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        placeholders: Tensor,
        pixel_values: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (L, D) of the positions before labels, which predict them. `features` of images
        (P, D), where they are known, stand for `pixel_values`."""
        language_model = self.model.language_model
        if pixel_values is not None:
            features = self.features(pixel_values)
        x = self.model.place_features(input_ids, features, placeholders)  # (B, T, D), or wider
        if features is None and self.blank:
            # Before the language model, because sharded ranks gather weights in one order.
            vision = self.model.config.vision
            shape = (1, vision.num_channels, vision.least_side, vision.least_side)
            blank = torch.ones(shape, device=self.model.device, dtype=self.model.dtype)
            x = x + 0.0 * self.features(blank).sum()
        mask = segment_mask(segment_ids)  # (B, T, T), or blocks on CUDA
        hidden, _ = language_model(x, mask, position_ids=position_ids)
        return hidden.flatten(0, 1).index_select(0, labelled - 1)

    def features(self, pixel_values: Tensor) -> Tensor:
        """(P, D), or wider, of all placeholders."""
        return torch.cat(tuple(self.model.encode_images(pixel_values)))


class LogProbabilities(RowsLoss):
    """(L,) of a micro-batch's labels under each of `every`, temperature and filters."""

    def forward(  # type: ignore[override]
        self, labels: Tensor, labelled: Tensor, *, every: Sequence[SamplingParams], **inputs: Tensor
    ) -> list[Tensor]:
        hidden, text = self.predicting(labelled, **inputs), self.model.language_model
        chunk = chunk_positions(text.config.vocab_size, hidden.device.type)

        def under(params: SamplingParams) -> Tensor:
            def scores(rows: Tensor) -> Tensor:
                return adjusted_scores(text.loss_head(rows), params)

            return log_probabilities(hidden, labels.flatten()[labelled], scores, chunk)

        return [under(params) for params in every]


class ComparedLoss(LogProbabilities):
    """A loss that compares the model with what it is now, for good: `references`, one, which is no part of
    this module, or none without `learns`. Weights that do not learn, and codes, are shared with it; adapters,
    which are put beside weights later, are not in it."""

    def __init__(self, model: VisionLanguageModel, blank: bool, learns: frozenset[str] | None):
        super().__init__(model, blank)
        self.references: tuple[LogProbabilities, ...] = ()  # in a tuple, so neither saved nor trained
        if learns is not None:
            tensors = (*model.named_parameters(), *model.named_buffers())
            shared = {id(one): one for name, one in tensors if part_of(name) not in learns}
            frozen = deepcopy(model, shared).requires_grad_(False)
            self.references = (LogProbabilities(frozen, blank),)


class RowsTask(Task):
    """See `training.task.Task`. `preferences`: a row is a pair of answers (`training/preferences.py`), and
    `called` is what the model card says for rows."""

    preferences = False
    called = "rows"

    def __init__(self, config: TrainConfig, ranks: Ranks):
        super().__init__(config, ranks)
        self.mixture, self.held_out = ranks.first_then_others(self._open)
        self.model, self.processor = open_model(config, ranks.device)
        written(self.model.config)  # what cannot be saved is not trained
        self.check_context()
        transformers_processor(self.processor)  # raises now what saving would raise after the training
        self.loader_config = self._loader_config()
        self.steps = config.steps or self._steps_of_epochs()
        self.loader = Loader(self.mixture, self.processor, self.loader_config, ranks.rank, ranks.world_size)
        self._before = self.loader.state  # where the latest step's batches begin
        sees = bool(config.learns & {"vision_model", "projector"} or config.lora_vision_targets)
        self.module = self.new_loss(blank=sees or config.parallel == "fsdp")
        starts = [config.init_from] if config.init_from else [config.vision_from, config.text_from]
        self.summary = f"Fine-tuned from {' and '.join(map(public_name, starts))} with Ocelli."

    def new_loss(self, blank: bool) -> RowsLoss:
        return RowsLoss(self.model, blank)

    def _loader_config(self) -> LoaderConfig:
        config, per_rank = self.config, max(1, self.config.batch_size // self.ranks.world_size)
        return LoaderConfig(
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size or per_rank,
            sequence_length=config.sequence_length,
            max_tiles=config.max_tiles or None,
            packing=config.packing and not self.preferences,
            packing_buffer_size=config.packing_buffer,
            shuffle_buffer=config.shuffle_buffer,
            seed=config.seed,
            epochs=config.epochs or (None if config.steps else 1),
            workers=config.workers,
            max_drop_rate=config.max_drop_rate,
        )

    def _open(self) -> tuple[Mixture, Mixture | None]:
        """The rows to train on, and the held-out ones, if any."""
        config = self.config
        held_out = dataset_entries(config.eval_data) if config.eval_data else []
        return open_both(dataset_entries(config.data), held_out, config.holdout, self.preferences)

    def _steps_of_epochs(self) -> int:
        """The first rank counts. Where it cannot count all rows, the run has the estimated number of steps,
        whatever the data hold: the learning rates then end where the schedule has them end."""
        config, ranks = self.loader_config, self.ranks
        self.is_estimate = not counts_exactly(self.mixture, config)
        if self.is_estimate:
            self.loader_config = replace(config, endless=True)
        counted = steps_per_run(self.mixture, self.processor, config) if ranks.is_first else 0
        return ranks.gather(counted)[0]

    # ------------------------------------------------------------------------------------------- a step
    def batches(self) -> Iterator[list[Batch]]:
        groups = grouped(self.loader)
        while True:
            self._before = self.loader.state
            if (group := next(groups, None)) is None:
                return
            yield group

    def padding(self) -> list[Batch]:
        return self.loader.padding_step()

    def step_back(self) -> None:
        self.loader.state = self._before

    def count(self, batches: list[Batch]) -> float:
        return float(sum(batch.num_labels for batch in batches))

    # ------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict:
        return self.loader.state_dict()

    def load_state_dict(self, states: list[dict], step: int) -> None:
        self.loader.load_state_dict(merge_states(states))

    def check_rows(self) -> None:
        state, ranks = self.loader.state, self.ranks
        running = ranks.sum(len(state.ended) < len(self.loader.shards))[0]
        every = ranks.gather(state.drops)
        dropped = sum((one.dropped for one in every), Counter[str]())
        drops = DropCount(self.config.max_drop_rate, sum(one.read for one in every), dropped)
        known = sum(source.num_rows or math.inf for source in self.mixture.sources)
        if (drops.read >= known or not running) and (wrong := drops.exceeded()):
            raise DatasetError(f"{wrong}; {self.config.output} holds a model trained without them")

    # --------------------------------------------------------------------------------------- to look at
    def training_data(self, step: int) -> str:
        names = ", ".join(public_name(source.name) for source in self.mixture.sources)
        rows, tokens = self.config.batch_size, self.config.sequence_length
        return f"{names}: {step:,} steps of {rows} {self.called} of up to {tokens} tokens."

    def questions(self, count: int) -> list[Question]:
        """The first questions of held-out rows, in an order that is always the same; bad rows are skipped."""
        if self.held_out is None:
            return []
        reader = ShardReader(self.held_out, 0, 1, seed=0, epochs=1)
        found: list[Question] = []
        for _ in range(count + _UNUSABLE_ROWS):
            if len(found) == count or (row := reader.next()) is None:
                break
            try:
                schema = self.held_out.sources[row.source].schema
                messages = schema.in_words(row.row, form_for=self.processor.form)
                accept = tuple(schema.accepted(row.row).get("accept", ()))
                found.append(replace(first_question(messages, self.processor), accept=accept))
            except (BadRow, ImageError):
                continue  # the loader counts them
        return found

    @torch.no_grad()
    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
        """Mean loss per labelled token, or pair, of held-out rows, if there are any, and what else is logged.
        All ranks raise a DatasetError if no row is usable or reading them failed."""
        if self.held_out is None or not self.config.eval_pictures:
            return {}
        self.model.eval()
        losses, counted, rows, logged = [], 0.0, 0, dict[str, Tensor]()
        for batch in (batch for group in self._held_out_groups() for batch in group):
            loss, parts = wrapped(**batch.to(self.model.device))
            losses.append(loss)
            logged = added(logged, parts)
            counted += self.count([batch])
            rows += sum(map(len, batch.sample_ids))
        self.model.train()
        summed = (sum(loss.item() for loss in losses), *(value.item() for value in logged.values()))
        counted, of_rows, *sums = self.ranks.sum(counted, rows, *summed)
        if not counted:
            raise DatasetError("--eval-data: no row can be scored, on any rank")
        n = int(counted if self.preferences else of_rows)
        return {f"eval_{name}": Score(one / counted, n) for name, one in zip(("loss", *logged), sums)}

    def _held_out_groups(self) -> Iterator[list[Batch]]:
        """This rank's batches of held-out rows, those of a step together, or padding beside other ranks' last
        ones. All ranks raise a DatasetError if reading failed on one."""
        assert self.held_out is not None, "there are some"
        config = replace(self.loader_config, epochs=1, endless=False, seed=0)
        loader = Loader(self.held_out, self.processor, config, self.ranks.rank, self.ranks.world_size)
        batches = grouped(loader)
        for _ in range(math.ceil(self.config.eval_pictures / self.config.batch_size)):
            group, failed = taken(batches)
            having, failing = self.ranks.sum(group is not None, failed is not None)
            if failing:
                raise failed or DatasetError("reading another rank's held-out data failed")
            if not having:
                return
            yield group or loader.padding_step()


def taken(batches: Iterator[list[Batch]]) -> tuple[list[Batch] | None, DatasetError | None]:
    """The next step's batches, or None at their end, and why they could not be read."""
    try:
        return next(batches, None), None
    except DatasetError as error:
        return None, error


def added(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logged values of micro-batches, summed."""
    return {name: value + sums[name] if name in sums else value for name, value in more.items()}


def grouped(loader: Loader) -> Iterator[list[Batch]]:
    """A loader's batches, those of a step together."""
    group: list[Batch] = []
    for batch in loader:
        group.append(batch)
        if len(group) * loader.config.micro_batch_size == loader.rows_per_step:
            yield group
            group = []


def first_question(messages: list[dict[str, Any]], processor: Processor) -> Question:
    """The question before a conversation's first answer, with its videos opened."""
    end = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    texts: dict[str, list[str]] = {"user": [], "system": [], "assistant": []}
    images = list[Any]()
    for message in messages[: end + 1]:
        for part in message["content"]:
            if part["type"] == "text":
                texts.get(message["role"], texts["user"]).append(str(part["text"]).strip())
            elif part["type"] == "image":
                images.append(part["image"])
            else:
                images.append(open_video(part["video"], processor.limits))
    said = {role: " ".join(parts) for role, parts in texts.items()}
    return Question(tuple(images), said["user"], said["assistant"], system=said["system"])


def new_tokenizer(folder: Path):
    """A language model's tokenizer, with those of SmolVLM's special tokens added that it lacks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.eos_token = "<end_of_utterance>"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "<|im_end|>"
    return tokenizer


def open_processor(source: str | Opened, shape: VLMConfig, config: TrainConfig) -> Processor:
    """The processor of a checkpoint of this shape, with images as the run has them."""
    processor = Processor.from_pretrained(source, shape)
    processor.images = sized(processor.images, config)
    return processor


def sized(images: Images, config: TrainConfig) -> Images:
    """A rule of images as a run has it: with a budget for whole images, or with other sizes, which are saved
    with the model."""
    if config.max_pixels:
        if images.budget is None:
            raise ValueError("--max-pixels: has no effect on a model whose images are cut into tiles")
        images.budget = min(images.budget, config.max_pixels)
    if config.longest_edge:
        if not isinstance(images, NEW.IdeficsImages):
            raise ValueError("--longest-edge: expected a checkpoint of Idefics3's kind, such as SmolVLM")
        return images.resized(config.longest_edge)
    try:
        return images.within(config.image_tokens) if config.image_tokens else images
    except ProcessorError as error:
        raise ValueError(f"--image-tokens: {error}") from error


def open_model(config: TrainConfig, device: torch.device) -> tuple[VisionLanguageModel, Processor]:
    """The model to start from (`open_base`), in training mode, and its processor."""
    if config.init_from:
        model = open_base(config, device)
        assert model.origin is not None, "a loaded model knows where it came from"
        opened = open_files(config.init_from, model.origin.commit)
        return model.train(), open_processor(opened, model.config, config)
    text = open_files(config.text_from)
    tokenizer = new_tokenizer(text.processor_folder)
    model = VisionLanguageModel.from_backbones(
        config.vision_from,
        config.text_from,
        scale_factor=config.scale_factor,
        extra_tokens=max(0, len(tokenizer) - text.config["vocab_size"]),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        dtype="float32",
        device=device,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return model.train(), backbone_processor(tokenizer, model.config, config)


def backbone_processor(tokenizer, shape: VLMConfig, config: TrainConfig) -> Processor:
    """The processor of a model that starts from backbones, with images of one tile unless the run says how
    large they are."""
    processor = make_processor(
        tokenizer,
        image_size=shape.vision.image_size,
        image_seq_len=FAMILIES[shape.family].positions(shape),
        config=shape,
    )
    processor.images = sized(processor.images, config)
    return processor
