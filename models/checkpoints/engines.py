"""Which programs open a checkpoint, from the name of its architecture. Only transformers is tried here.

From what the engines say in 2026: vLLM's supported models, the files in SGLang's `srt/models` and llama.cpp's
`conversion`, pull requests of mlx-vlm.
"""

from __future__ import annotations

TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX = "transformers", "vLLM", "SGLang", "llama.cpp", "MLX"

_NO = "no"
_CONVERT_FIRST = "no: convert it first (python -m models.checkpoints convert)"
_NO_TOWERS = "no: a vision tower answers nothing by itself"
_IDEFICS = {
    TRANSFORMERS: "yes: AutoModelForImageTextToText",
    VLLM: "yes: vllm serve",
    SGLANG: "not by a model of its own; at most through its transformers backend",
    LLAMA_CPP: "if it knows the tokenizer, as two GGUF files: convert_hf_to_gguf.py, again with --mmproj",
    MLX: "yes: mlx-vlm",
}
_LLAMA = {
    TRANSFORMERS: "yes: AutoModelForCausalLM",
    VLLM: "yes: vllm serve",
    SGLANG: "yes",
    LLAMA_CPP: "if it knows the tokenizer, as GGUF: convert_hf_to_gguf.py",
    MLX: "yes: mlx-lm",
}
_SIGLIP = {
    TRANSFORMERS: "yes: AutoModel",
    VLLM: "as embeddings, the pair of towers",
    SGLANG: _NO_TOWERS,
    LLAMA_CPP: _NO_TOWERS,
    MLX: _NO_TOWERS,
}
_BY_MODEL_TYPE = {
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llama": _LLAMA,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP | {VLLM: _NO_TOWERS},
}
TRIED = "by its architecture; tried with transformers alone"


def engines(model_type: str | None) -> dict[str, str]:
    """Engine -> whether and how it opens a config of this model_type; None is nanoVLM's, which has none."""
    return dict(
        _BY_MODEL_TYPE.get(model_type or "", dict.fromkeys((TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX), _NO))
        if model_type is not None
        else dict.fromkeys((TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX), _CONVERT_FIRST)
    )
