"""`VisionLanguageModel`: picture features placed among token embeddings, the loss, and answers.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
new_ids = model.generate(**processor_output, max_new_tokens=64)      # (B, T_new)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    decode,
    eager_step,
    initial_capacity,
    prefill,
    recompute_step,
)
from generation.prompt import Prompt, compact, prompt_lengths, seen_tokens
from models.checkpoints.pretrained import Pretrained
from models.config import VLMConfig
from models.language_model import KVCache, LanguageModel
from models.modality_projector import ModalityProjector
from models.vision_transformer import VisionTransformer

IGNORE_INDEX = -100  # label of a position that carries no loss, as in cross_entropy


@dataclass
class VLMOutput:
    """`logits` (B, T, V); `loss`, a mean over labelled tokens, where labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class VisionLanguageModel(Pretrained, nn.Module):
    """A ViT, a projector and a decoder.

    Call names are transformers': a processor's output passes straight in as keyword arguments.
    """

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.config = config
        self.vision_model = VisionTransformer(config.vision)
        self.projector = ModalityProjector(config)
        self.language_model = LanguageModel(config.text, config.tie_word_embeddings)

    @property
    def device(self) -> torch.device:
        return self.language_model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.embed_tokens.weight.dtype

    def init_weights(self, generator: torch.Generator | None = None, prefix: str = "") -> None:
        """Initialise every weight whose name starts with `prefix`, in this one place.

        Normal(0, 0.02) for text as in Llama, with the two projections that write into the residual stream
        scaled by 1 / sqrt(2 · layers) as in GPT-2; variance-preserving Normal(0, 1 / sqrt(fan_in)) for vision
        and projector; norms at one, biases at zero.
        """
        depth = 1 / math.sqrt(2 * self.config.text.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if not name.startswith(prefix):
                continue
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif name.startswith("language_model"):
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (depth if residual else 1.0), generator=generator)
            elif "position_embedding" in name:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=fan_in**-0.5, generator=generator)

    def encode_images(self, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None) -> Tensor:
        """Pictures to language-model embeddings.

        Args:
            pixel_values: (N, 3, H, W) tiles, or (B, n, 3, H, W) as processors pad them: there, a tile that is
                zero throughout is padding and is dropped.
            pixel_attention_mask: (N, H, W) or (B, n, H, W), 1 on real pixels.

        Returns:
            (N, tokens per tile, D), one row for each real tile, in order.
        """
        mask = pixel_attention_mask
        if pixel_values.dim() == 5:
            pixel_values = pixel_values.flatten(0, 1)
            mask = None if mask is None else mask.flatten(0, 1)
            real = (pixel_values != 0).flatten(1).any(1)
            if not real.all():
                pixel_values, mask = pixel_values[real], None if mask is None else mask[real]
        if pixel_values.dim() != 4:
            raise ValueError(
                f"pixel_values: expected (N, 3, H, W) or (B, n, 3, H, W), got {tuple(pixel_values.shape)}"
            )
        patch_mask = None
        if mask is not None and not mask.all():
            patch = self.config.vision.patch_size
            patch_mask = mask.unfold(1, patch, patch).unfold(2, patch, patch).flatten(3).any(-1)
        features = self.vision_model(pixel_values.to(self.device, self.dtype), patch_mask)
        return self.projector(features)

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings with picture features in their places: (B, T, D), or (B, S + T, D) where the
        features stand in front of the text.

        Raises:
            ValueError: if placeholders and features do not match in number.
        """
        x = self.language_model.embed_tokens(input_ids)
        features = None
        if pixel_values is not None and pixel_values.numel():
            features = self.encode_images(pixel_values, pixel_attention_mask)  # (N, S, D)
        return self.place_features(input_ids, x, features)

    def place_features(self, input_ids: Tensor, x: Tensor, features: Tensor | None) -> Tensor:
        """Put features (N, S, D) among the embeddings x (B, T, D) of input_ids (B, T)."""
        if self.config.image_placement == "prefix":
            if features is not None and features.shape[0] != x.shape[0]:
                raise ValueError(
                    "this checkpoint puts one picture in front of each row: "
                    f"expected {x.shape[0]} pictures, got {features.shape[0]}"
                )
            return x if features is None else torch.cat((features, x), dim=1)
        places = input_ids == self.config.image_token_id
        expected, got = int(places.sum()), 0 if features is None else features.shape[0] * features.shape[1]
        if expected != got:
            raise ValueError(
                f"the prompt holds {expected} image placeholders (id {self.config.image_token_id}) but the "
                f"pictures give {got} features ({self.config.tokens_per_tile} a tile): build both with the "
                "same processor"
            )
        if features is None:
            return x
        return x.masked_scatter(places[..., None], features.to(x.dtype))

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
            attention_mask: (B, T), 0 on padding, or (B, T, T) bool for packed documents.
            labels: (B, T), the ids themselves, -100 where there is no loss; shifted here.
            position_ids: (B, T), for packed documents.
            logits_to_keep: compute logits of only the last so many positions; 0 means all.

        Returns:
            `VLMOutput`; logits are (B, T, V), with the picture positions in front for "prefix" checkpoints.
        """
        hidden, _ = self.hidden_states(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, position_ids=position_ids
        )
        loss = None
        if labels is not None:
            total, count = self._summed_loss(hidden, labels)
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
            **options: fields of `GenerationOptions`: max_new_tokens, temperature (0, the default, is greedy),
                top_k, top_p, min_p, repetition_penalty, seed, stop_token_ids, num_return_sequences,
                use_cache.

        Raises:
            TypeError: an option that does not exist.
            ValueError: bad options or shapes, prompt and answer too long for the context, logits not finite.
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
        options = GenerationOptions(**options)
        if options.stop_token_ids is None:
            options = replace(options, stop_token_ids=tuple(self.config.eos_token_ids))
        has_pictures = pixel_values is not None and pixel_values.numel() > 0
        prefix = self.config.image_placement == "prefix" and has_pictures
        lengths = prompt_lengths(
            input_ids,
            attention_mask,
            front=self.config.tokens_per_tile if prefix else 0,
            max_new_tokens=options.max_new_tokens,
            context=self.config.text.max_position_embeddings,
        )
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

    @torch.no_grad()
    def _generate(self, embed_prompt, lengths: list[int], options: GenerationOptions, seen: Tensor | None):
        """Yield (B · N,) ids, return `Generated`: one prefill pass, then token by token through the cache."""
        language_model, text, answers = self.language_model, self.config.text, options.num_return_sequences
        needed, start = max(lengths) + options.max_new_tokens - 1, max(lengths)
        room = initial_capacity(start, options.max_new_tokens)
        watch = Stopwatch(self.device)
        prompt = embed_prompt()
        watch.lap("vision")

        kv_cache = None
        if options.use_cache:
            own_room = room if answers == 1 else start
            kv_cache = kv.allocate_for(text, len(lengths), own_room, like=prompt.embeddings)
        logits = prefill(language_model, prompt, kv_cache).repeat_interleave(answers, 0)  # (B · N, V)
        if options.use_cache:
            if answers > 1:
                kv_cache = kv.fork(kv_cache, start, answers, room)
            step = options.decode_step or eager_step(language_model)
        else:
            step = recompute_step(language_model, lambda: embed_prompt().repeat(answers))
        watch.lap("prefill")

        chooser = Chooser(options, len(lengths), self._pad_id(options), self.device, seen)
        row_lengths = tuple(length for length in lengths for _ in range(answers))
        cursor = CacheCursor(kv_cache, row_lengths, self.device, limit=needed)
        tokens = []
        for token in decode(step, logits, chooser, cursor, options.max_new_tokens):
            tokens.append(token)
            yield token[:, 0]
        watch.lap("decode")
        return Generated(
            token_ids=torch.cat(tokens, dim=1),
            lengths=chooser.lengths.tolist(),
            stop_reasons=["stop" if stopped else "length" for stopped in chooser.stopped.tolist()],
            prompt_tokens=lengths,
            seconds=watch.seconds,
            kv_cache_bytes=kv.size_in_bytes(kv_cache) if kv_cache else 0,
            decode_steps=len(tokens) - 1,
        )

    def _pad_id(self, options: GenerationOptions) -> int:
        if self.config.pad_token_id is not None:
            return self.config.pad_token_id
        return options.stop_token_ids[0] if options.stop_token_ids else 0

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
        single call knows: hence the sum.
        """
        hidden, _ = self.hidden_states(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, position_ids=position_ids
        )
        return self._summed_loss(hidden, labels)

    def _summed_loss(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        front = hidden.shape[1] - labels.shape[1]  # picture positions in front carry no loss
        # The position before a labelled token predicts it.
        hidden = hidden[:, front - 1 : -1] if front else hidden[:, :-1]
        targets = labels if front else labels[:, 1:]
        chosen = targets != IGNORE_INDEX
        logits = self.language_model.logits(hidden[chosen]).float()  # (labelled, V)
        total = F.cross_entropy(logits, targets[chosen], reduction="sum")
        return total, chosen.sum()
