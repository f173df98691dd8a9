"""A GGUF file of a language model's shape with random weights, for llama.cpp to be timed on.

    write_gguf(SHAPES["SmolVLM-256M"].text, "Q8_0", Path("model.gguf"))

Needs the `gguf` package (requirements-bench.txt). All layers get the same numbers: speed does not depend on
them, and making them once keeps memory small. The tokens have names and no meaning.
"""

from __future__ import annotations

from pathlib import Path

from models.config import TextConfig

FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # llama.cpp's names of our precisions


def tensor_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes (rows, columns) of llama.cpp's tensors for an untied Llama."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    block = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    shapes = {"token_embd.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"output_norm.weight": (width,), "output.weight": (config.vocab_size, width)}


def write_gguf(config: TextConfig, format_name: str, path: Path) -> int:
    """Write the file; returns the bytes of weights that one token reads: all but the embedding table."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[format_name]
    writer = gguf.GGUFWriter(path, "llama")
    _add_geometry(writer, config)
    _add_tokens(writer, config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format_name}" if format_name != "F32" else "ALL_F32"])
    random, made, read = np.random.default_rng(0), {}, 0
    for name, shape in tensor_shapes(config).items():
        what = name.split(".")[-2], shape  # the same for all layers
        if what not in made:
            if len(shape) == 1:
                made[what] = np.ones(shape, np.float32), gguf.GGMLQuantizationType.F32
            else:
                numbers = random.standard_normal(shape, np.float32) * shape[1] ** -0.5
                made[what] = gguf.quants.quantize(numbers, kind), kind
        data, raw_type = made[what]
        writer.add_tensor(name, data, raw_dtype=raw_type)
        if name != "token_embd.weight":
            read += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _add_geometry(writer, config: TextConfig) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer, vocab_size: int) -> None:
    """A sentencepiece vocabulary: three control tokens, the 256 bytes it must have, and names."""
    from gguf import TokenType

    if vocab_size < 3 + 256:
        raise ValueError(f"a GGUF vocabulary needs the 256 bytes and 3 control tokens, got {vocab_size} ids")
    names = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    more = vocab_size - len(names)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names + [f"token{number}".encode() for number in range(more)])
    writer.add_token_scores([0.0] * 3 + [-float(number) for number in range(vocab_size - 3)])
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * more])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
