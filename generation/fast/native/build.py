"""C files of this folder, compiled once for this machine and opened, and the weights that they read.

library = load_library("decode.c", ("-DWEIGHT_BITS=32", "-DCACHE_BITS=32"), declare)

The compiler is `$CC`, or the first of cc, gcc and clang on the path. Libraries are kept in a cache folder. A
library's name carries a hash of the source, the flags, the compiler and the processor, so that a change in
any of them compiles anew. The SHA-256 of its bytes is appended to the file: a library that was cut short
would end the process that runs it, so one that is damaged, or belongs to another user, is compiled anew too.

    to_panels(model.language_model)      # in place: linear layers and token embeddings on a CPU

C multiplies weights in panels with one row or with thousands, with the same bits for each. A panel holds the
weights of a few outputs (32 with AVX-512, else 16) in 32-bit units along the inner dimension: 1 float,
2 bfloat16, 4 int8 or 8 of four bits, padded with zeros; see panels.h. Eager code runs on such layers as well.

    put_rounded("int4", model, names, tensor)  # as a checkpoint is read (`models.checkpoints.load.load`)

    reason = DECODER.strange(language_model)     # None, or what in it there is no code for

A fast step reads weights where it expects them. Of another network it would miss some, and leave others out
without a word. So each says in a `Network` all that it computes, and whatever else there is, today or in a
later version of the network, is left to PyTorch.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.fast.quantized import (
    ARITHMETIC,
    PARTIAL_FLOATS,
    UNPACKED,
    PackedEmbedding,
    PackedLinear,
    has_four_bits,
    put_packed,
    quantize_rows,
    rows_of_units,
)
from generation.threads import CROWD, HOOKS, Paces, with_threads

FOLDER = Path(__file__).parent
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8, torch.int32: 4}  # int32: eight weights
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
STAKE = 2e-4  # seconds that threads may wait for one another in a pass, whatever that brings
_SUMMED = 4_096  # rows
NOTED = 256  # tokens by which second moments are known
NOTHING: Mapping[str, Any] = MappingProxyType({})
_packing, _multiplying = Paces(CROWD), Paces(CROWD)
# Sums are vectorised by hand and stay as they are written, so that a row's result is the same in any batch.
# NaN and infinity keep their meaning.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", _NATIVE, "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi")  # fmt: skip


class NoCompiler(RuntimeError):
    """Nothing can be compiled here; eager code runs instead."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: $OCELLI_CACHE, or ocelli/ in your cache folder."""
    if own := os.environ.get("OCELLI_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")  # by its standard, empty or relative means unset
    try:
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "ocelli"
    except RuntimeError:
        raise NoCompiler("there is no home folder to keep compiled libraries in: set OCELLI_CACHE") from None


def find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise NoCompiler("no C compiler found (tried $CC, cc, gcc, clang)")


def _openmp_library() -> list[str]:
    """PyTorch's own OpenMP runtime, so that both share one set of threads instead of two that fight."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0]), f"-Wl,-rpath,{found[0].parent}"] if found else []


def library_file(source: str, options: tuple[str, ...]) -> tuple[str, Path]:
    """(compiler, where the library of a C file and these options is or will be). Raises NoCompiler."""
    compiler = find_compiler()
    texts = [path.read_bytes() for path in (FOLDER / source, *sorted(FOLDER.glob("*.h")))]
    parts = (texts, FLAGS, options, compiler, torch.__version__, processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return compiler, cache_folder() / f"{Path(source).stem}-{key[:24]}.so"


@cache
def load_library(
    source: str, options: tuple[str, ...], declare: Callable[[ctypes.CDLL], None]
) -> ctypes.CDLL:
    """The library of a C file in this folder, opened once.

    Args:
        options: the compiler's, after FLAGS.
        declare: gives the library's functions their argument types; AttributeError if it lacks one.

    Raises NoCompiler if there is no compiler, it fails, or the library cannot be kept or opened.
    """
    compiler, target = library_file(source, options)
    if is_sound(target):
        with suppress(OSError, AttributeError):  # made against another C library, say
            return _open(target, declare)
    try:
        _compile(compiler, source, options, target)
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"{compiler} could not compile {source}: {error}") from error
    except OSError as error:
        raise NoCompiler(
            f"the compiled library cannot be kept in {target.parent} ({error.strerror or error}): "
            "set OCELLI_CACHE to another folder"
        ) from error
    try:
        return _open(target, declare)
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


def _open(library: Path, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    """Raises OSError for what is no library, AttributeError for one without our functions."""
    opened = ctypes.CDLL(str(library))
    declare(opened)
    return opened


def digest_of(library: ctypes.CDLL) -> str:
    """The SHA-256 of an opened library's bytes, which are what the compiler made of the source."""
    return Path(library._name).read_bytes()[-32:].hex()


def processor() -> str:
    """Its model, and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, source: str, options: tuple[str, ...], target: Path) -> None:
    """Under a temporary name first: two processes may compile the same library at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise PermissionError(errno.EACCES, "noexec: it may not hold programs")
        draft = Path(folder) / target.name
        inputs = [str(FOLDER / source), *_openmp_library(), "-lm"]
        command = [compiler, *FLAGS, *options, "-o", str(draft), *inputs]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else done.stderr[:200]
            raise NoCompiler(f"{compiler} could not compile {source}: {reason.strip()}")
        content = draft.read_bytes()
        draft.write_bytes(content + hashlib.sha256(content).digest())
        draft.replace(target)


class Pass(ctypes.Structure):
    """What team.h knows a pass by."""

    _fields_ = (
        ("threads", _LONG),
        *((name, ctypes.c_double) for name in ("stake", "worth", "seconds", "waited", "off")),
    )


def make_pass(paces: Paces, amount: int, call: Callable[[Pass], None], each: float = 1.0) -> None:
    """Call C, which works on `amount` units, with as many threads as pay. each: see `with_threads`."""

    def run(threads: int, worth: float) -> tuple[float, float, float]:
        made = Pass(threads, STAKE, worth)
        call(made)
        return made.seconds, made.waited, made.off

    with_threads(paces, amount, run, each)


class Matrix(ctypes.Structure):
    """What panels.h knows a matrix by."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scale", "sum", "bias")),
        *((name, _LONG) for name in ("rows", "columns")),
    )


def library_parts(weight_bits: int, cache_bits: int | None = None) -> tuple[str, tuple[str, ...]]:
    """The C file for weights of 32, 16, 8 or 4 bits and a cache of 32 or 16 bits, and the options that it is
    compiled with. None: the cache that a model with these weights has."""
    cache_bits = cache_bits or max(16, weight_bits)
    return "decode.c", (f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits}")


def _declare_panels(opened: ctypes.CDLL) -> None:
    matrix, made = ctypes.POINTER(Matrix), ctypes.POINTER(Pass)
    functions = {
        "panel": (_LONG, ()),
        "units": (_LONG, (_LONG,)),
        "linear_floats": (_LONG, (matrix, _LONG)),
        "linear": (None, (matrix, _POINTER, _LONG, made, _POINTER, _POINTER)),
        "embed": (None, (matrix, _POINTER, _LONG, _POINTER)),
    }
    if hasattr(opened, "ocelli_quantize"):  # four bits
        functions["quantize"] = (None, (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, made))
    else:
        functions["pack"] = (None, (_POINTER, _LONG, _LONG, _POINTER, made))
    for name, (result, arguments) in functions.items():
        function = getattr(opened, f"ocelli_{name}")
        function.restype, function.argtypes = result, arguments


def load_panels(weight_bits: int) -> ctypes.CDLL:
    """What linear.h exports, for one weight type. Raises NoCompiler."""
    return load_library(*library_parts(weight_bits), _declare_panels)


def refuse_change(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError if this would move weights or change their type: C has their addresses."""
    before = torch.empty(0)
    after = fn(before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise RuntimeError(
            "the model's weights are in panels, which stay on the CPU and in their type: load the checkpoint "
            "again for another device or dtype"
        )


class PanelWeight(nn.Module):
    """A matrix (out, in) of float32, bfloat16, int8 with one float32 scale an output row, or four bits, in
    panels.

    Args:
        bits: 4 rounds a float matrix, part by part (`quantize.h`); None leaves it as it is.
        moments: (in,) mean squares of its inputs (`second_moments`), by which errors of four bits count.
    """

    weight: Tensor  # (panels, units, weights of a unit of each output)
    scale: Tensor | None
    sum: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        bits: int | None = None,
        moments: Tensor | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        library = load_panels(bits or BITS[weight.dtype])
        panel, units = library.ocelli_panel(), library.ocelli_units(self.in_features)
        padding = -self.out_features % panel
        weight, count = weight.detach(), (self.out_features + padding) // panel
        if bits == 4:
            panels = torch.empty(count, units, panel, dtype=torch.int32)
            scale = torch.empty(self.out_features + padding)
            importance = _importance(moments, self.in_features)
            at = 0
            for rows in weight.split(max(1, PARTIAL_FLOATS // self.in_features // panel) * panel):
                part, codes, scales = rows.float().contiguous(), panels[at // panel :], scale[at:]
                given = part.data_ptr(), importance.data_ptr()
                arguments = (*given, *part.shape, codes.data_ptr(), scales.data_ptr())
                kibibytes = 64 * part.nbytes // 1024 + 1  # each number is looked at so much longer
                make_pass(_packing, kibibytes, partial(library.ocelli_quantize, *arguments))
                at += len(part)
        else:
            weight = weight.contiguous()
            panels = torch.empty(count, units, panel * 4 // weight.itemsize, dtype=weight.dtype)
            where, to = weight.data_ptr(), panels.data_ptr()
            kibibytes = weight.nbytes // 1024 + 1
            make_pass(_packing, kibibytes, lambda made: library.ocelli_pack(where, *weight.shape, to, made))
        self.register_buffer("weight", panels)
        # As long as the panels are, because C reads whole vectors of them.
        sums = None  # of rows, a few at a time: PyTorch widens them all first
        if scale is not None and bits is None:
            scale = F.pad(scale.detach().float(), (0, padding))
            counted = [rows.sum(1, dtype=torch.int32) for rows in weight.split(_SUMMED)]
            sums = F.pad(torch.cat(counted), (0, padding))
        self.register_buffer("scale", scale)
        self.register_buffer("sum", sums)
        self.register_buffer("bias", None if bias is None else F.pad(bias.detach().float(), (0, padding)))

    @classmethod
    def of(cls, shape: tuple[int, int], **parts: Tensor | None) -> PanelWeight:
        """One of weight, scale, sum and bias as another had them."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.out_features, made.in_features = shape
        for name in ("weight", "scale", "sum", "bias"):
            made.register_buffer(name, parts.get(name))
        return made

    @classmethod
    def sharing(cls, other: PanelWeight) -> PanelWeight:
        """One with the weights of another, and no bias."""
        parts = {name: getattr(other, name) for name in ("weight", "scale", "sum")}
        return cls.of((other.out_features, other.in_features), **parts)

    def _apply(self, fn, recurse: bool = True):
        """What `.to()`, `.half()` and the like call."""
        refuse_change(fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """What `state_dict` calls: float weights are those of the layer that this one stands for."""
        if not self.weight.is_floating_point():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        destination[f"{prefix}weight"] = self.unpacked()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias[: self.out_features].clone()

    def unpacked(self) -> Tensor:
        """The matrix (out, in) that was put into panels; of int8 without its scale. Of four bits it is what
        they stand for, float32."""
        if self.weight.dtype == torch.int32:
            return PanelEmbedding.sharing(self)(torch.arange(self.out_features))
        panels, units, length = self.weight.shape
        unit = 32 // BITS[self.weight.dtype]
        rows = self.weight.view(panels, units, length // unit, unit).transpose(1, 2)
        return rows.reshape(-1, units * unit)[: self.out_features, : self.in_features].contiguous()

    def rows(self, device: torch.device) -> Tensor:
        """What is in its panels as rows on a device, without scales of rows: int8, or units of four bits."""
        if self.weight.dtype != torch.int32:
            return self.unpacked().to(device)
        units = self.weight.to(device).transpose(1, 2).flatten(0, 1)[: self.out_features]
        return rows_of_units(units.unflatten(1, (-1, 9)))

    @property
    def matrix(self) -> Matrix:
        """Its addresses, which hold as long as this module is where it is."""
        parts = (self.weight, self.scale, self.sum, self.bias)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        return Matrix(*addresses, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.weight.dtype}"


class PanelLinear(PanelWeight):
    """y = x Wᵀ + b: (…, in) of any float type -> (…, out) float32; without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected inputs (…, {self.in_features}), got {tuple(x.shape)}")
        rows = x.detach().float().reshape(-1, self.in_features).contiguous()
        y = torch.empty(len(rows), self.out_features)
        library, matrix = load_panels(BITS[self.weight.dtype]), self.matrix
        room = torch.empty(library.ocelli_linear_floats(matrix, len(rows)))
        from_, to, count = rows.data_ptr(), y.data_ptr(), len(rows)
        products = count * self.in_features * self.out_features // 2**16 + 1
        call = library.ocelli_linear
        make_pass(_multiplying, products, lambda made: call(matrix, from_, count, made, room.data_ptr(), to))
        return y.view(*x.shape[:-1], self.out_features)


class PanelEmbedding(PanelWeight):
    """Rows of a table in panels: ids (…) -> (…, in) float32."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids: expected 0 to {self.out_features - 1}, got {ids.min()} to {ids.max()}")
        x, flat = torch.empty(*ids.shape, self.in_features), ids.long().contiguous()
        load_panels(BITS[self.weight.dtype]).ocelli_embed(
            self.matrix, flat.data_ptr(), flat.numel(), x.data_ptr()
        )
        return x


def _users(model: nn.Module, kinds: tuple[type, ...]) -> list[list[tuple[nn.Module, str]]]:
    """Where the layers of some kinds are: (parent, name), those that share their weight together."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, kinds) and name != UNPACKED:
                places.setdefault(id(child.weight), []).append((parent, name))
    return [*places.values()]


@torch.no_grad()
def to_panels(model: nn.Module) -> nn.Module:
    """Put the weights of every linear layer and token embedding into panels, in place.

    One matrix at a time, so that no second copy of the model exists. Matrices that share their weight (a tied
    head) go on sharing it. Everything small, and with it all arithmetic, becomes float32. Layers that are in
    panels already stay. Raises NoCompiler.
    """
    for users in _users(model, (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding)):
        first: PanelWeight | None = None
        for parent, name in users:
            child = getattr(parent, name)
            kind = PanelLinear if isinstance(child, nn.Linear | PackedLinear) else PanelEmbedding
            bias = getattr(child, "bias", None)
            if first is not None and bias is None:
                made = kind.sharing(first)
            else:
                made = kind(child.weight, getattr(child, "scale", None), bias)
            first = first or made
            setattr(parent, name, made)
        del child  # freed before the next one is packed
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def put_rounded(
    precision: str,
    model: nn.Module,
    names: Sequence[str],
    tensor: Tensor,
    moments: Mapping[str, Tensor] = NOTHING,
) -> None:
    """`put_packed`, and for int4 into panels: the matrices and the token embedding of the language model with
    four bits (`moments`: of their inputs, by name), those of all else as int8. Raises NoCompiler."""
    if precision != "int4":
        return put_packed(precision, model, names, tensor)
    first: PanelWeight | None = None
    for name in names:
        path, _, leaf = name.rpartition(".")
        above, _, own = path.rpartition(".")
        module: Any = model.get_submodule(path)
        if leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding) and own != UNPACKED:
            kind = PanelLinear if isinstance(module, nn.Linear) else PanelEmbedding
            bias = getattr(module, "bias", None)
            if first is not None:
                made = kind.sharing(first)
            elif has_four_bits(precision, name):
                known = next((moments[one] for one in names if one in moments), None)
                made = kind(tensor, None, bias, bits=4, moments=known)
            else:
                made = kind(*quantize_rows(tensor), bias)
            first = first or made
            setattr(model.get_submodule(above), own, made)
        elif isinstance(module, PanelWeight):  # its bias
            module.bias = F.pad(tensor.float(), (0, -len(tensor) % load_panels(4).ocelli_panel()))
        else:
            setattr(module, leaf, nn.Parameter(tensor.float()))
    return None


@torch.no_grad()
def to_rows(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device where others than C read its weights, in place: int8 and four bits that are in
    panels as rows (`quantized.py`), one matrix at a time, and everything small in the device's arithmetic."""
    dtype = ARITHMETIC[device.type]
    for users in _users(model, (PanelWeight,)):
        packed: tuple[Tensor, Tensor] | None = None
        for parent, name in users:
            child = getattr(parent, name)
            packed = packed or (child.rows(device), child.scale[: child.out_features].to(device))
            if isinstance(child, PanelLinear):
                bias = None if child.bias is None else child.bias[: child.out_features].to(device, dtype)
                setattr(parent, name, PackedLinear(*packed, bias))
            else:
                setattr(parent, name, PackedEmbedding(*packed, dtype, child.in_features))
        del child  # freed before the next one is moved
    for name, parameter in [*model.named_parameters()]:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.to(device, dtype)))
    return model


@torch.no_grad()
def second_moments(language_model) -> dict[str, Tensor]:
    """The mean square of each input of the linear layers of a language model, by their names in a whole
    model: (in,) each, over tokens drawn at random. Some channels are hundreds of times as large as others,
    whatever the text."""
    moments: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        moments[f"language_model.{name}.weight"] = x.float().square().flatten(0, -2).mean(0)

    layers = [(name, one) for name, one in language_model.named_modules() if isinstance(one, LINEAR)]
    hooks = [one.register_forward_pre_hook(lambda _, x, name=name: note(name, x[0])) for name, one in layers]
    config = language_model.config
    count, generator = min(NOTED, config.max_position_embeddings), torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator)
    try:
        hidden, _ = language_model(language_model.embed(ids))
    finally:
        for hook in hooks:
            hook.remove()
    note("lm_head", hidden)
    return moments


def _importance(moments: Tensor | None, columns: int) -> Tensor:
    """(columns,) mean squares, padded to whole blocks and divided by the mean of their group of 32. What is
    never used, and what is not a number, is as good as any other."""
    if moments is None:
        return torch.ones(-(-columns // 64) * 64)
    groups = F.pad(moments, (0, -columns % 64)).view(-1, 32)
    groups = groups / groups.mean(1, keepdim=True)
    return groups.nan_to_num(1.0, 1.0).clamp_(min=1e-4).flatten()


LINEAR = (nn.Linear, PackedLinear, PanelLinear)
EMBEDDING = (nn.Embedding, PackedEmbedding, PanelEmbedding)
NORMS = (nn.RMSNorm, nn.LayerNorm)
LEAVES = (*LINEAR, *EMBEDDING, *NORMS, nn.Conv2d)  # that have weights
ANY = ()  # values of a field


@dataclass(frozen=True)
class Network:
    """What a step has code for.

    parts: the types that may stand at each place ("layers.*.mlp"). Those of `models`, which this folder does
        not import, by their full names.
    config: the full name of its config's type, and fields: the values that it computes, ANY for all. A field
        that is not here must have its default.
    eps: the field that all norms have theirs from.
    tensors: by place, those of its own that a part there may have which is no layer by itself.
    """

    parts: Mapping[str, tuple[type | str, ...]]
    config: str
    fields: Mapping[str, tuple[Any, ...]]
    eps: str
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def strange(self, network: nn.Module) -> str | None:
        """What is in a network that there is no code for, in words; or None."""
        found = next(self._strange(network), None)
        return None if found is None else f"{found}, which only PyTorch computes"

    def _strange(self, network: nn.Module) -> Iterator[str]:
        """Each thing, the first one before anything is taken for granted that it says not to be there."""
        for name, module in network.named_modules():
            kind, where = type(module), name or "the network"
            place = re.sub(r"\.\d+", ".*", name)
            known = self.parts.get(place, ())
            if kind not in known and full_name(kind) not in known:
                yield f"{where} is a {full_name(kind)}"
            if not HOOKS.issuperset((*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
                yield f"{where} has hooks"
            tensors = {**module._parameters, **module._buffers}
            if not isinstance(module, LEAVES) and (own := tensors.keys() - {*self.tensors.get(place, ())}):
                yield f"{where} has {', '.join(sorted(own))} of its own"
            if isinstance(module, NORMS):
                if None in tensors.values():
                    yield f"{where} is a norm without weights or without biases"
                if module.eps != getattr(network.config, self.eps):
                    yield f"{where} has an epsilon of its own"
        config: Any = network.config
        if full_name(type(config)) != self.config:
            yield f"its config is a {full_name(type(config))}"
        for name, value, default in _fields(config):
            if (values := self.fields.get(name, (default,))) != ANY and value not in values:
                yield f"its {name} is {value!r}"
        if len(network.get_submodule("layers")._modules) != config.num_hidden_layers:
            yield f"it does not have the {config.num_hidden_layers} layers of its config"


def unfit(network: nn.Module) -> str | None:
    """Why C cannot read the weights of a network that is not `strange`, or None."""
    devices = {tensor.device.type for tensor in (*network.parameters(), *network.buffers())}
    if devices != {"cpu"}:
        return f"the weights are on {' and '.join(sorted(devices))}"
    modules = (module for name, module in network.named_modules() if name != UNPACKED)
    types = {str(module.weight.dtype) for module in modules if isinstance(module, (*LINEAR, *EMBEDDING))}
    if len(types) > 1 or not types <= set(map(str, BITS)):
        return f"{' and '.join(sorted(types))} weights (float32, bfloat16, int8 or four bits are supported)"
    return None


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(config: Any, front: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of each field of a dataclass, and of those within it."""
    for own in fields(config):
        value = getattr(config, own.name)
        yield f"{front}{own.name}", value, own.default
        if is_dataclass(value):
            yield from _fields(value, f"{front}{own.name}.")
