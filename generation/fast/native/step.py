"""The decode step in C: decode.c, compiled once for this machine and called with addresses.

step = NativeStep(language_model)              # float32, bfloat16 or packed weights
logits = step(token_ids, kv_cache, start_pos)  # (B, V) float32, as the eager step gives

The compiler is `$CC`, or the first of cc, gcc and clang on the path. Libraries are kept in a cache folder. A
library's name carries a hash of the source, the flags, the compiler and the processor, so that a change in
any of them compiles anew. The SHA-256 of its bytes is appended to the file: a library that was cut short
would end the process that runs it, so one that is damaged, or belongs to another user, is compiled anew too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from generation.kv_cache import KVCache

SOURCE = Path(__file__).with_name("decode.c")
# Sums are vectorised by hand and stay as they are written, so that a row's result is the same in any batch.
# NaN and infinity keep their meaning.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
         "-fno-trapping-math", "-Wno-psabi")  # fmt: skip


class NoCompiler(RuntimeError):
    """The step cannot be compiled here; the eager one runs instead."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: $OCELLI_CACHE, or ocelli/ in your cache folder."""
    if own := os.environ.get("OCELLI_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")  # by its standard, empty or relative means unset
    try:
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "ocelli"
    except RuntimeError:
        raise NoCompiler("there is no home folder to keep the compiled step in: set OCELLI_CACHE") from None


def find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise NoCompiler("no C compiler found (tried $CC, cc, gcc, clang)")


def _openmp_library() -> list[str]:
    """PyTorch's own OpenMP runtime, so that both share one set of threads instead of two that fight."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0]), f"-Wl,-rpath,{found[0].parent}"] if found else []


def library_file(weight_bits: int, cache_bits: int) -> tuple[str, tuple[str, ...], Path]:
    """(compiler, its defines, where the library is or will be). Raises NoCompiler."""
    compiler = find_compiler()
    defines = (f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits}")
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    parts = (sources, FLAGS, defines, compiler, torch.__version__, _processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return compiler, defines, cache_folder() / f"decode-{key[:24]}.so"


@cache
def load_library(weight_bits: int, cache_bits: int) -> ctypes.CDLL:
    """The compiled step for one weight type (32, 16 or 8 bits) and one cache type (32 or 16 bits).

    Raises NoCompiler if there is no compiler, it fails, or the library cannot be kept or opened.
    """
    compiler, defines, target = library_file(weight_bits, cache_bits)
    if is_sound(target):
        with suppress(OSError, AttributeError):  # made against another C library, say
            return _open(target)
    try:
        _compile(compiler, defines, target)
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {error}") from error
    except OSError as error:
        raise NoCompiler(
            f"the compiled step cannot be kept in {target.parent} ({error.strerror or error}): "
            "set OCELLI_CACHE to another folder"
        ) from error
    try:
        return _open(target)
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"the library that {compiler} made cannot be opened: {error}") from error


def is_sound(library: Path) -> bool:
    """Whether a library is there with the bytes that were written, and belongs to this user or to root."""
    try:
        with library.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
    except OSError:
        return False
    return owner in (0, os.geteuid()) and content[-32:] == hashlib.sha256(content[:-32]).digest()


def _open(library: Path) -> ctypes.CDLL:
    """Raises OSError for what is no library, AttributeError for one without our functions."""
    opened = ctypes.CDLL(str(library))
    opened.ocelli_scratch_floats.restype = _LONG
    opened.ocelli_scratch_floats.argtypes = (ctypes.POINTER(_Model), *(_LONG,) * 3)
    opened.ocelli_decode.restype = None
    opened.ocelli_decode.argtypes = (
        ctypes.POINTER(_Model), _POINTER, _POINTER, *(_LONG,) * 3, _POINTER, _POINTER
    )  # fmt: skip
    return opened


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, defines: tuple[str, ...], target: Path) -> None:
    """Under a temporary name first: two processes may compile the same library at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise PermissionError(errno.EACCES, "noexec: it may not hold programs")
        draft = Path(folder) / target.name
        command = [compiler, *FLAGS, *defines, str(SOURCE), "-o", str(draft), *_openmp_library(), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else done.stderr[:200]
            raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {reason.strip()}")
        content = draft.read_bytes()
        draft.write_bytes(content + hashlib.sha256(content).digest())
        draft.replace(target)


# ------------------------------------------------------------------------------------------ the step

_BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8}
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("scale", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "key", "value")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocab")),
        ("eps", ctypes.c_float),
        ("embedding", _Matrix),
        ("head", _Matrix),
        ("final_norm", _POINTER),
        ("inv_freq", _POINTER),
        ("layer", ctypes.POINTER(_Layer)),
    )


def unsupported(language_model) -> str | None:
    """Why decode.c cannot run this model, or None where it can."""
    config, weight = language_model.config, language_model.layers[0].self_attn.q_proj.weight
    if weight.device.type != "cpu":
        return f"the weights are on {weight.device.type}"
    if weight.dtype not in _BITS:
        return f"{weight.dtype} weights (float32, bfloat16 and int8 are supported)"
    if config.attention_bias or config.mlp_bias:
        return "the model's projections have biases"
    return unknown_parts(language_model)


def unknown_parts(language_model) -> str | None:
    """What this model's attention has that the fast steps do not compute (norms of queries, say), or None."""
    known = {"q_proj", "k_proj", "v_proj", "o_proj"}
    parts = {name for name, _ in language_model.layers[0].self_attn.named_children()} - known
    return f"the model's attention has {', '.join(sorted(parts))}" if parts else None


def is_compiled(language_model) -> bool:
    """Whether the library for this model exists already. Raises NoCompiler."""
    weight = language_model.layers[0].self_attn.q_proj.weight
    return is_sound(library_file(_BITS[weight.dtype], _BITS[language_model.cache_dtype])[2])


class NativeStep:
    """A `generation.steps.DecodeStep` in C. It uses the weights where they are; nothing is copied. Threads
    that share one take turns.

    Raises NoCompiler, and ValueError for a model that it does not support (`unsupported` says why).
    """

    def __init__(self, language_model):
        if reason := unsupported(language_model):
            raise ValueError(f"the native decode step cannot run this model: {reason}")
        model, config = language_model, language_model.config
        self._vocab = config.vocab_size
        self._kept: list[Tensor] = []  # decode.c points to these, so they must live as long as this object
        self._weight_bits = _BITS[model.layers[0].self_attn.q_proj.weight.dtype]
        load_library(self._weight_bits, _BITS[model.cache_dtype])
        self._layers = (_Layer * config.num_hidden_layers)()
        for slot, layer in zip(self._layers, model.layers, strict=True):
            for name in ("q", "k", "v", "o"):
                setattr(slot, name, self._matrix(getattr(layer.self_attn, f"{name}_proj")))
            for name in ("gate", "up", "down"):
                setattr(slot, name, self._matrix(getattr(layer.mlp, f"{name}_proj")))
            slot.input_norm = self._float(layer.input_layernorm.weight)
            slot.post_norm = self._float(layer.post_attention_layernorm.weight)
        self._description = _Model(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            embedding=self._matrix(model.embed_tokens),
            head=self._matrix(model.lm_head),
            final_norm=self._float(model.norm.weight),
            inv_freq=self._float(model.inv_freq(torch.device("cpu"))),
            layer=self._layers,
        )
        self._scratch = torch.empty(0)
        self._lock = Lock()  # for the cache's addresses and the scratch memory

    def _keep(self, tensor: Tensor) -> int:
        assert tensor.is_contiguous(), "decode.c reads contiguous tensors"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().float().contiguous())

    def _matrix(self, module) -> _Matrix:
        weight = module.weight.detach()
        assert _BITS[weight.dtype] == self._weight_bits, f"mixed weight types: {weight.dtype}"
        scale = self._keep(module.scale) if weight.dtype == torch.int8 else None
        return _Matrix(self._keep(weight.contiguous()), scale)

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) token ids -> (B, V) float32 logits; the cache gains one position in each row."""
        batch, key = len(token_ids), kv_cache[0]["key"]
        capacity, head_stride = key.shape[2], key.stride(1) // key.shape[3]
        library = load_library(self._weight_bits, _BITS[key.dtype])
        positions = torch.full((batch,), start_pos) if isinstance(start_pos, int) else start_pos.contiguous()
        if (last := int(positions.max())) >= capacity:
            raise ValueError(f"kv_cache: expected room for position {last}, got {capacity} positions")
        logits = torch.empty(batch, self._vocab)
        tokens, threads = token_ids.contiguous(), torch.get_num_threads()
        with self._lock:
            # Of all layers, each time: a new cache may reuse part of an old one's freed memory.
            for slot, layer in zip(self._layers, kv_cache, strict=True):
                slot.key, slot.value = layer["key"].data_ptr(), layer["value"].data_ptr()
            needed = library.ocelli_scratch_floats(self._description, batch, head_stride, threads)
            if self._scratch.numel() < needed:
                self._scratch = torch.empty(needed)
            library.ocelli_decode(
                self._description, tokens.data_ptr(), positions.data_ptr(), batch, head_stride,
                threads, self._scratch.data_ptr(), logits.data_ptr(),
            )  # fmt: skip
        return logits
