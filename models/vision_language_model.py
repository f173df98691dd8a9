"""`VisionLanguageModel`: image features placed among token embeddings, the loss, and answers.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
new_ids = model.generate(**processor_output, max_new_tokens=64)      # (B, T_new)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation import kv_cache as kv
from generation.decoding import (
    CacheCursor,
    Chooser,
    Generated,
    GenerationOptions,
    Stopwatch,
    TokenStream,
    answer,
    eager_step,
    initial_capacity,
    prefill,
    recompute_step,
)
from generation.foreign_options import check_names
from generation.memory import check_answers_fit
from generation.prompt import Prompt, check_placeholders, compact, prompt_lengths, seen_tokens, tiles_of_rows
from models.checkpoints.backbones import from_backbones
from models.checkpoints.hub import Origin
from models.checkpoints.load import load
from models.checkpoints.save import push, save
from models.config import VLMConfig
from models.language_model import KVCache, LanguageModel
from models.losses import summed_cross_entropy
from models.modality_projector import ModalityProjector
from models.vision_transformer import VisionTransformer

IGNORE_INDEX = -100  # label of a position that carries no loss, as in cross_entropy


@dataclass
class VLMOutput:
    """`logits` (B, T, V); `loss`, a mean over labelled tokens, where labels were given."""

    logits: Tensor
    loss: Tensor | None = None


def prepare_device(device: torch.device | str) -> torch.device:
    """The device, ready to compute on: whoever chooses a device calls this. What it sets holds for the
    process."""
    device = torch.device(device)
    if device.type == "cuda":
        # On Hopper and Blackwell PyTorch asks cuDNN's attention first, which plans anew for each key length:
        # while decoding, for each token. Flash and memory-efficient attention plan nothing.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Convolutions in float32 would keep 10 bits of each factor: float32 is to mean float32.
        torch.backends.cudnn.allow_tf32 = False
    return device


class VisionLanguageModel(nn.Module):
    """A ViT, a projector and a decoder.

    Call names are transformers': a processor's output passes straight in as keyword arguments.

    origin: where it was loaded from; None for one that was not.
    generation_config: what its generation_config.json said besides token ids; saving writes it again. Nothing
        here is applied by `generate`, whose options say everything.
    """

    origin: Origin | None = None
    generation_config: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.config = config
        self.vision_model = VisionTransformer(config.vision)
        self.projector = ModalityProjector(config)
        self.language_model = LanguageModel(config.text, config.tie_word_embeddings)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        revision: str | None = None,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
    ) -> VisionLanguageModel:
        """Load a checkpoint from a folder or a repository id, in eval mode; see `models.checkpoints.load`.

        `generate` stops at every id that config.json, generation_config.json and the tokenizer's files call
        the end. Where nanoVLM's `lm_tokenizer` is another repository the model knows no end: give `generate`
        the `stop_token_ids` of `data.processor.Processor`.
        """
        model = load(cls, source, revision, dtype, device)
        prepare_device(model.device)
        return model

    @classmethod
    def from_backbones(cls, vision: str | Path, text: str | Path, **options) -> VisionLanguageModel:
        """A new model from a SigLIP tower and a Llama-family model; see `models.checkpoints.backbones`."""
        model = from_backbones(cls, vision, text, **options)
        prepare_device(model.device)
        return model

    def save_pretrained(self, folder: str | Path, processor=None, card: str | None = None, **options) -> Path:
        """Write config, weights, and processor files and card where given; see `models.checkpoints.save`."""
        return save(self, folder, processor, card, **options)

    def push_to_hub(self, repo_id: str, processor=None, card: str | None = None, **options) -> str:
        """Upload to the Hub with a model card; returns the commit's address; see `push` there."""
        return push(self, repo_id, processor, card, **options)

    @property
    def device(self) -> torch.device:
        return self.language_model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in; packed weights (generation/fast/quantized.py) take less."""
        return self.language_model.norm.weight.dtype

    def to(self, *arguments, **named) -> VisionLanguageModel:
        moved = super().to(*arguments, **named)
        prepare_device(moved.device)
        return moved

    def cuda(self, device: int | torch.device | None = None) -> VisionLanguageModel:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def init_weights(self, generator: torch.Generator | None = None, prefix: str = "") -> None:
        """Initialise every weight whose name starts with `prefix`, in this one place.

        Variance-preserving Normal(0, 1 / sqrt(fan_in)), the two projections that write into the residual
        stream of the text scaled by 1 / sqrt(2 · layers) as in GPT-2; norms at one, biases at zero. Token
        embeddings have unit scale, so that a token is still known after the first block, unless the head
        shares them (0.02, as in Llama).
        """
        depth = 1 / math.sqrt(2 * self.config.text.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if not name.startswith(prefix):
                continue
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif "embed_tokens" in name and not self.config.tie_word_embeddings:
                nn.init.normal_(parameter, std=1.0, generator=generator)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight", "position_embedding.weight")):
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                std = parameter[0].numel() ** -0.5
                if name.startswith("language_model") and name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= depth
                nn.init.normal_(parameter, std=std, generator=generator)

    def encode_images(self, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None) -> Tensor:
        """Images to language-model embeddings.

        Args:
            pixel_values: (N, 3, H, W), or (B, n, 3, H, W) with padding; see `generation.prompt.real_tiles`.
            pixel_attention_mask: (N, H, W) or (B, n, H, W), 1 on real pixels.

        Returns:
            (N, tokens per tile, D), one row for each real tile, in order.
        """
        tiles, mask, _ = tiles_of_rows(pixel_values, pixel_attention_mask)
        patch_mask = None
        if mask is not None and not mask.all():
            patch = self.config.vision.patch_size
            patch_mask = mask.unfold(1, patch, patch).unfold(2, patch, patch).flatten(3).any(-1)
        features = self.vision_model(tiles.to(self.device, self.dtype), patch_mask)
        return self.projector(features)

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings with image features in their places: (B, T, D), or (B, S + T, D) where the
        features stand in front of the text."""
        x = self.language_model.embed_tokens(input_ids)
        features = row_tiles = None
        if pixel_values is not None and pixel_values.numel():
            tiles, mask, row_tiles = tiles_of_rows(pixel_values, pixel_attention_mask)
            features = self.encode_images(tiles, mask)  # (N, S, D)
        return self.place_features(input_ids, x, features, row_tiles)

    def place_features(
        self, input_ids: Tensor, x: Tensor, features: Tensor | None, row_tiles: list[int] | None = None
    ) -> Tensor:
        """Put features (N, S, D) among the embeddings x (B, T, D) of input_ids (B, T)."""
        self.check_places(input_ids, *((None, 0) if features is None else features.shape[:2]), row_tiles)
        if features is None:
            return x
        if self.config.image_placement == "prefix":
            return torch.cat((features, x), dim=1)
        places = input_ids == self.config.image_token_id
        return x.masked_scatter(places[..., None], features.to(x.dtype))

    def check_places(
        self, input_ids: Tensor, tiles: int | None, per_tile: int, row_tiles: list[int] | None = None
    ) -> None:
        """Raises ValueError unless `tiles` (None: no image) of `per_tile` features fit input_ids (B, T),
        and, where `row_tiles` tells how many of them are whose, unless each row has its own."""
        batch = len(input_ids)
        if row_tiles is not None and len(row_tiles) != batch:
            raise ValueError(f"pixel_values: expected {batch} rows as in input_ids, got {len(row_tiles)}")
        if self.config.image_placement == "prefix":
            if tiles is not None and (tiles != batch or set(row_tiles or [1]) != {1}):
                raise ValueError(
                    "this checkpoint puts one image in front of each row: "
                    f"expected {batch} images, got {row_tiles if tiles == batch else tiles}"
                )
            return
        check_placeholders((input_ids == self.config.image_token_id).sum(1), tiles or 0, per_tile, row_tiles)

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> VLMOutput:
        """Logits of every position, and the mean next-token loss where labels are given.

        Args:
            input_ids: (B, T) int64.
            pixel_values: (B, n, 3, H, W) or (N, 3, H, W), or None.
            pixel_attention_mask: (B, n, H, W) or (N, H, W), or None.
            attention_mask: (B, T), 0 on padding, or (B, T, T) bool for packed segments.
            labels: (B, T), the ids themselves, -100 where there is no loss; shifted here.
            position_ids: (B, T), for packed segments.
            logits_to_keep: compute logits of only the last so many positions; 0 means all.

        Returns:
            `VLMOutput`; logits are (B, T, V), with the image positions in front for "prefix" checkpoints.
        """
        hidden, _ = self.hidden_states(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, position_ids=position_ids
        )
        loss = None
        if labels is not None:
            total, count = self.summed_loss(hidden, labels)
            loss = total / count.clamp(min=1)
        return VLMOutput(logits=self.language_model.logits(hidden[:, -logits_to_keep:]), loss=loss)

    def hidden_states(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        start_pos: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Everything up to the head: (hidden (B, T, D), kv_cache). See `LanguageModel.forward`."""
        x = self.embed(input_ids, pixel_values, pixel_attention_mask)
        front = x.shape[1] - input_ids.shape[1]
        if attention_mask is not None and front and attention_mask.dim() == 2:
            attention_mask = F.pad(attention_mask, (front, 0), value=1)
        return self.language_model(x, attention_mask, kv_cache, start_pos, position_ids)

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options,
    ) -> Tensor:
        """New token ids (B · N, T_new), stop tokens included, the pad id behind a row's stop.

        Args:
            input_ids: (B, T).
            pixel_values: (B, n, 3, H, W) or (N, 3, H, W), or None.
            pixel_attention_mask: (B, n, H, W) or (N, H, W), or None.
            attention_mask: (B, T), 0 on padding, on either side; every row gets what it gets alone.
            **options: fields of `GenerationOptions`: max_new_tokens, temperature (0 is greedy), top_k, top_p,
                min_p, repetition_penalty, seed, num_return_sequences, stop_token_ids, use_cache, decode_step.

        Raises:
            TypeError: an option that does not exist, with what to use in its place.
            ValueError: bad options or shapes, too long for the context or the memory, logits not finite.
        """
        return self.generate_detailed(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, **options
        ).token_ids

    def generate_detailed(self, *inputs, **inputs_and_options) -> Generated:
        """`generate`, with stop reasons, timings and sizes. Takes the same arguments."""
        return self.generate_stream(*inputs, **inputs_and_options).drain()

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options,
    ) -> TokenStream:
        """`generate`, token by token: iterate for (B · N,) ids, then read `.result`."""
        options = self.generation_options(**options)
        has_images = pixel_values is not None and pixel_values.numel() > 0
        prefix = self.config.image_placement == "prefix" and has_images
        lengths = prompt_lengths(
            input_ids,
            attention_mask,
            front=self.config.tokens_per_tile if prefix else 0,
            max_new_tokens=options.max_new_tokens,
            context=self.config.text.max_position_embeddings,
        )
        if options.use_cache:
            check_answers_fit(self.language_model, lengths, options)
        input_ids = input_ids.to(self.device)
        attention_mask = None if attention_mask is None else attention_mask.to(self.device)

        def embed_prompt() -> Prompt:
            x = self.embed(input_ids, pixel_values, pixel_attention_mask)
            return compact(x, attention_mask, lengths)

        seen = None
        if options.repetition_penalty != 1:
            vocab, answers = self.config.text.vocab_size, options.num_return_sequences
            seen = seen_tokens(input_ids, attention_mask, vocab, answers)
        return TokenStream(self._generate(embed_prompt, lengths, options, seen))

    def generation_options(self, **options) -> GenerationOptions:
        """Checked options, with this checkpoint's stop ids where none were given.

        Raises:
            TypeError: an option that does not exist, with what to use in its place.
            ValueError: a value that cannot be.
        """
        check_names(options, [option.name for option in fields(GenerationOptions)])
        options = GenerationOptions(**options)
        if options.stop_token_ids is None:
            options = replace(options, stop_token_ids=tuple(self.config.eos_token_ids))
        return options

    def _generate(self, embed_prompt, lengths: list[int], options: GenerationOptions, seen: Tensor | None):
        """Yield (B · N,) ids, return `Generated`: one prefill pass, then token by token through the cache."""
        language_model, text, answers = self.language_model, self.config.text, options.num_return_sequences
        needed, start = max(lengths) + options.max_new_tokens - 1, max(lengths)
        room = initial_capacity(start, options.max_new_tokens)
        watch = Stopwatch(self.device)
        with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
            prompt = embed_prompt()
            watch.lap("vision")
            kv_cache = None
            if options.use_cache:
                like, own_room = prompt.embeddings, room if answers == 1 else start
                kv_cache = kv.allocate_for(text, len(lengths), own_room, like, language_model.cache_dtype)
            logits = prefill(language_model, prompt, kv_cache).repeat_interleave(answers, 0)  # (B · N, V)
        if options.use_cache:
            if answers > 1:
                kv_cache = kv.fork(kv_cache, start, answers, room)
            step = options.decode_step or eager_step(language_model)
            del embed_prompt
        else:
            step = recompute_step(language_model, lambda: embed_prompt().repeat(answers))
        watch.lap("prefill")

        chooser = Chooser(options, len(lengths), self.pad_id(options), self.device, seen)
        row_lengths = tuple(length for length in lengths for _ in range(answers))
        cursor = CacheCursor(kv_cache, row_lengths, self.device, limit=needed)
        return (yield from answer(step, logits, chooser, cursor, options.max_new_tokens, lengths, watch))

    def pad_id(self, options: GenerationOptions) -> int:
        """What a row that has stopped goes on with: an id with an embedding, which not all configs name."""
        ids = (self.config.pad_token_id, *options.stop_token_ids, 0)
        return next(i for i in ids if i is not None and i < self.config.text.vocab_size)

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy, number of labelled tokens); the head runs on labelled positions only.

        A training step divides by the number of labelled tokens of the whole global batch, which no
        single call knows: hence the sum. Logits exist a chunk at a time (`models/losses.py`).
        """
        hidden, _ = self.hidden_states(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, position_ids=position_ids
        )
        return self.summed_loss(hidden, labels)

    def summed_loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`loss` from hidden states (B, T, D) on; the position before a labelled token predicts it."""
        front = hidden.shape[1] - labels.shape[1]  # image positions in front carry no loss
        hidden = hidden[:, front - 1 : -1] if front else hidden[:, :-1]
        targets = labels if front else labels[:, 1:]
        chosen = targets != IGNORE_INDEX
        head = self.language_model.lm_head
        return summed_cross_entropy(hidden[chosen], targets[chosen], head), chosen.sum()
