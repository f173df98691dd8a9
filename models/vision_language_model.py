"""`VisionLanguageModel`: image features placed among token embeddings, the loss, and answers.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
new_ids = model.generate(**processor_output, max_new_tokens=64)      # (B, T_new)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation import decoding
from generation.decoding import GenerationOutput, TokenStream
from generation.options import GenerationOptions, with_overrides
from generation.prompt import check_placeholders, tiles_of_rows
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
            pixel_values: (N, 3, H, W), or (B, n, 3, H, W) with padding; see `tiles_of_rows`.
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
        if pixel_values is None or not pixel_values.numel():
            check_placeholders(self.config, input_ids, None)
            return x
        tiles, mask, row_tiles = tiles_of_rows(pixel_values, pixel_attention_mask)
        check_placeholders(self.config, input_ids, len(tiles), row_tiles)
        return self.place_features(input_ids, x, self.encode_images(tiles, mask))

    def place_features(self, input_ids: Tensor, x: Tensor, features: Tensor | None) -> Tensor:
        """Put features (N, S, D) among the embeddings x (B, T, D) of input_ids (B, T); see
        `generation.prompt.check_placeholders`."""
        if features is None:
            return x
        if self.config.image_placement == "prefix":
            return torch.cat((features, x), dim=1)
        assert self.config.image_token_id is not None, "placeholders have an id"
        places = torch.eq(input_ids, self.config.image_token_id)
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
        options: GenerationOptions | None = None,
        **overrides,
    ) -> Tensor:
        """New token ids (B · N, T_new), stop tokens included, the pad id after a row's stop token.

        Args:
            input_ids: (B, T).
            pixel_values: (B, n, 3, H, W) or (N, 3, H, W), or None.
            pixel_attention_mask: (B, n, H, W) or (N, H, W), or None.
            attention_mask: (B, T), 0 on padding, on either side; every row gets what it gets alone.
            options: see `GenerationOptions`; None is its defaults.
            **overrides: single fields of it: max_new_tokens, temperature (0 is greedy), top_k, top_p, min_p,
                repetition_penalty, seed, num_return_sequences, stop_token_ids, use_cache, decode_step.

        Raises:
            TypeError: an option that does not exist, with what to use instead.
            ValueError: bad options or shapes, too long for the context or the memory, logits not finite.
        """
        inputs = (input_ids, pixel_values, pixel_attention_mask, attention_mask)
        return self.generate_stream(*inputs, options, **overrides).drain().token_ids

    def generate_detailed(self, *inputs, **inputs_and_options) -> GenerationOutput:
        """`generate`, with stop reasons, timings and sizes. Takes the same arguments."""
        return self.generate_stream(*inputs, **inputs_and_options).drain()

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        options: GenerationOptions | None = None,
        **overrides,
    ) -> TokenStream:
        """`generate`, token by token: iterate for (B · N,) ids, then read `.result`."""
        inputs = (input_ids, pixel_values, pixel_attention_mask, attention_mask)
        return decoding.generate_stream(self, *inputs, self.generation_options(options, **overrides))

    def generation_options(self, options: GenerationOptions | None = None, **overrides) -> GenerationOptions:
        """Checked options, with this checkpoint's stop ids unless others are given. Raises as `generate`."""
        return with_overrides(options, overrides, self.config.eos_token_ids)

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
