"""What training costs, by formula: parameters, bytes of activations, floating-point operations.

Everything follows from the shapes in a `VLMConfig`; parameters are counted on the meta device, so that the
largest model takes no memory. The formulas count what our own modules do (`models/`), and
tests/test_training_plan.py holds them against what autograd keeps and what torch's counter counts.

Symbols: D width of the text, F its SwiGLU width, H query heads of d each, K key heads, L blocks, V words, T
positions of a row; D_v, F_v, L_v the vision tower's, P patches of a tile, s pixel shuffle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from models.checkpoints.load import meta_init
from models.config import TextConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel

PARTS = ("vision", "projector", "language")
_OWNERS = {"vision_model": "vision", "projector": "projector", "language_model": "language"}


# --------------------------------------------------------------------------------------------- parameters
def meta_parameters(config: VLMConfig) -> dict[str, nn.Parameter]:
    """Every parameter by its name, on the meta device; a tied head is not there twice."""
    with meta_init():
        return dict(VisionLanguageModel(config).named_parameters())


def part_of(name: str) -> str:
    """vision, projector or language: what a parameter belongs to."""
    return _OWNERS[name.partition(".")[0]]


def is_muon_matrix(name: str, parameter: nn.Parameter, everywhere: bool = False) -> bool:
    """Whether Muon, where it is chosen, trains this: the matrices of the language model's blocks, or
    `everywhere` those of the vision tower's and the projector's, too."""
    inside = ".layers." in name or part_of(name) == "projector"
    return parameter.dim() == 2 and inside and (everywhere or part_of(name) == "language")


def count(parameters: dict[str, nn.Parameter], key=part_of) -> dict[str, int]:
    """Numbers of weights, summed by what `key` makes of their names."""
    counted: dict[str, int] = {}
    for name, parameter in parameters.items():
        counted[key(name)] = counted.get(key(name), 0) + parameter.numel()
    return counted


def linear_sizes(text: TextConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear layer of a decoder block."""
    width, inner = text.hidden_size, text.intermediate_size
    query, key = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    return {
        "q_proj": (width, query),
        "k_proj": (width, key),
        "v_proj": (width, key),
        "o_proj": (query, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


def lora_parameters(text: TextConfig, rank: int, targets: Collection[str] | None = None) -> int:
    """Of adapters on linear layers of the blocks, all by default: r · (in + out) each (arXiv:2106.09685)."""
    sizes = linear_sizes(text)
    return text.num_hidden_layers * rank * sum(sum(sizes[name]) for name in targets or sizes)


# -------------------------------------------------------------------------------------------- activations
@dataclass(frozen=True)
class Widths:
    """Bytes of a number: `residual` in the residual stream, `product` where matrices are multiplied; `casts`
    where each product converts its input by itself, as autocast does, and so keeps one of its own."""

    residual: int
    product: int
    casts: bool = False


FLOAT32 = Widths(4, 4)
AUTOCAST = Widths(4, 2, casts=True)  # bfloat16 products over float32 weights
BFLOAT16 = Widths(2, 2)  # weights in bfloat16, as FSDP's mixed precision gathers them


def decoder_block_bytes(text: TextConfig, widths: Widths, learns: bool = True, lora: bool = False) -> float:
    """What one decoder block keeps for backward, for each position.

    Two norms keep their float32 input and their output before the weight: 2 D (4 + residual). Products keep
    their inputs, one for q, k, v and one for gate, up, or one each under autocast: 2 or 5 times D · product.
    Attention keeps q, k, v and what comes out, which is also o_proj's input, (2 H d + 2 K d) · product, and a
    float32 normalizer for each head. SwiGLU keeps gate, up, silu(gate) and their product: 4 F · product.

    A frozen block (learns=False) needs no inputs of its products and no normed numbers; with `lora`, its
    adapters need those inputs again.
    """
    width, inner = text.hidden_size, text.intermediate_size
    query, key = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    inputs = (5 if widths.casts else 2) * width * widths.product
    norms = 2 * width * (4 + (widths.residual if learns else 0))
    attention = (2 * query + 2 * key) * widths.product + 4 * text.num_attention_heads
    swiglu = 4 * inner * widths.product
    if not (learns or lora):
        inputs, swiglu = 0, 3 * inner * widths.product
    return norms + inputs + attention + swiglu


def vision_block_bytes(config: VLMConfig, widths: Widths) -> float:
    """What one block of the vision tower keeps for backward, for each patch.

    Two norms keep their input, 2 D_v · residual, with mean and deviation; products keep theirs, one for
    q, k, v and one for fc1, or one each under autocast: 2 or 4 times D_v · product; attention q, k, v and
    what comes out: 4 D_v · product and a float32 for each head; the MLP what goes into GELU and what comes
    out: 2 F_v · product.
    """
    vision = config.vision
    width, inner = vision.hidden_size, vision.intermediate_size
    inputs = (4 if widths.casts else 2) * width * widths.product
    attention = 4 * width * widths.product + 4 * vision.num_attention_heads
    return 2 * (width * widths.residual + 8) + inputs + attention + 2 * inner * widths.product


def vision_bytes(config: VLMConfig, widths: Widths, checkpointing: bool) -> float:
    """What the tower keeps for each tile, pixels included.

    With checkpointing, each block keeps its input alone, and one block at a time has all that it needs.
    """
    vision = config.vision
    patches, width = vision.num_patches, vision.hidden_size
    block = vision_block_bytes(config, widths)
    blocks = vision.num_hidden_layers * block
    if checkpointing:
        blocks = vision.num_hidden_layers * width * widths.residual + block
    pixels = vision.num_channels * vision.image_size**2 * widths.product
    last_norm = width * widths.residual + 8
    return pixels + patches * (blocks + last_norm)


def projector_bytes(config: VLMConfig, widths: Widths) -> float:
    """The shuffled patches that go into the projection, for each tile: P · D_v · product."""
    return config.vision.num_patches * config.vision.hidden_size * widths.product


def language_bytes(
    text: TextConfig, widths: Widths, checkpointing: bool, learns: bool = True, lora: bool = False
) -> float:
    """What the decoder keeps for each position: its blocks and the last norm."""
    block = decoder_block_bytes(text, widths, learns, lora)
    blocks = text.num_hidden_layers * block
    if checkpointing:
        blocks = text.num_hidden_layers * text.hidden_size * widths.residual + block
    return blocks + text.hidden_size * (4 + (widths.residual if learns else 0))


def head_bytes(config: VLMConfig, widths: Widths, labelled: float, chunk: int) -> float:
    """Of the loss (`models/losses.py`): a chunk of float32 logits, with the product they came from and their
    gradient where those are narrower; hidden states of labelled positions and their gradient."""
    narrow = 2 * widths.product if widths.product < 4 else 0
    logits = min(labelled, chunk) * config.text.vocab_size * (4 + narrow)
    return logits + 2 * labelled * config.text.hidden_size * widths.residual


# -------------------------------------------------------------------------------------------------- FLOPs
@dataclass(frozen=True)
class Forward:
    """FLOPs of a forward pass, two for each multiplication with its addition, by what backward does with
    them: a product with a weight is done again for the input and for the weight, one of two activations for
    both."""

    patches: float  # the patch convolution, for each tile: its input, pixels, learns nothing
    vision_products: float  # for each tile
    vision_attention: float  # for each tile
    projector: float  # for each tile
    products: float  # of the decoder's linear layers, for each position
    attention: float  # for each position and each one that it may look at
    head: float  # for each labelled position


def forward_flops(config: VLMConfig) -> Forward:
    """FLOPs of one forward pass.

    Products: 2 · in · out for each position (Kaplan et al., arXiv:2001.08361). Attention: 4 · d · heads for
    each pair of positions, once for scores and once for their sum over values; a causal mask is not
    deducted, as in PaLM's count (arXiv:2204.02311, appendix B). Norms, rotations, activations do not count.
    """
    vision, text = config.vision, config.text
    patches, width = vision.num_patches, vision.hidden_size
    per_patch = 2 * (4 * width * width + 2 * width * vision.intermediate_size)
    return Forward(
        patches=2 * patches * vision.num_channels * vision.patch_size**2 * width,
        vision_products=vision.num_hidden_layers * patches * per_patch,
        vision_attention=vision.num_hidden_layers * 4 * patches**2 * width,
        projector=2 * patches * width * text.hidden_size,
        products=text.num_hidden_layers * 2 * sum(a * b for a, b in linear_sizes(text).values()),
        attention=text.num_hidden_layers * 4 * text.num_attention_heads * text.head_dim,
        head=2 * text.hidden_size * text.vocab_size,
    )


@dataclass(frozen=True)
class Amounts:
    """How much of everything: `pairs` is the sum over positions of how many each may look at. Without
    positions, tiles go through the vision tower alone."""

    tiles: float
    positions: float
    pairs: float
    labelled: float


def training_flops(
    config: VLMConfig, amounts: Amounts, learns: frozenset[str], adapters: int = 0, again: bool = False
) -> float:
    """FLOPs of forward and backward.

    Backward repeats a product once for its input, where something in front of it learns, and once for its
    weight, where that learns: three times forward where all learns.

    Args:
        learns: which of `PARTS` do; with LoRA, the language model's adapters do in its place.
        adapters: weights of these.
        again: with the second forward pass of the blocks that activation checkpointing makes.
    """
    one = forward_flops(config)
    vision, projector, language = (part in learns for part in PARTS)
    reaches_text = vision or projector  # gradients go back through the whole decoder
    reaches_blocks = reaches_text or language or adapters > 0
    tile = one.patches * (1 + vision)
    tile += (one.vision_products + one.vision_attention) * (1 + 2 * vision)
    if amounts.positions:
        tile += one.projector * (1 + projector + vision)
    position = one.products * (1 + language + reaches_blocks)
    position += 3 * 2 * adapters
    pair = one.attention * (1 + 2 * reaches_blocks)
    label = one.head * (1 + language + reaches_blocks)
    if again:
        tile += (one.vision_products + one.vision_attention) * vision
        position, pair = position + one.products, pair + one.attention
    return (
        tile * amounts.tiles + position * amounts.positions + pair * amounts.pairs + label * amounts.labelled
    )
