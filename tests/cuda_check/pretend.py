"""A CUDA device pretended on the CPU: tensors say `cuda:0`, compute on the CPU, and refuse what CUDA refuses.

    with pretended() as seen:
        model.to("cuda").generate(...)
    seen.syncs       where the host would have waited for all that the device had to do
    seen.waits       where it would have waited for an event, such as that of flags that are read late
    seen.pageable    copies to the device from memory that is not pinned
    seen.kernels     operations that would have launched a kernel, and Triton's kernels
    seen.attention   the kernel that torch's own dispatcher chose for each attention
    seen.graphs      what was recorded; `kernels` of each counts those of one replay

What it takes from a GPU: devices that do not mix, memory that is pinned or not, where the host waits, that
nothing waits or reads the host's memory while a graph is recorded, that recording computes nothing, the
choice of the attention kernel, the order in memory of its result. What it does not: time, rounding, memory's
limits, streams that overlap, kernels that fail, inductor. Triton's kernels run in its interpreter.

It needs a CUDA build of torch with `driver_stub.c` preloaded: `make cuda-check`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
# Operations that launch nothing, besides views; and those whose result the host has to know.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
READING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
ATTENTION = {  # operation -> kernel
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention_forward": "efficient, lower right",
}


class Pretended(torch.Tensor):
    """A tensor on the pretended device; `held` is where its numbers are."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **layout, device=CUDA)
        made.held = held
        return made

    def __init__(self, held: Tensor):
        pass

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        assert Device.current is not None, "a tensor of a pretended device that is gone"
        return Device.current.run(function, arguments, named or {})

    def __repr__(self, **_):
        return f"Pretended({self.held})"

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new: Tensor):
        self.held = held_of(new)

    def tolist(self):
        Device.current.sync("tolist")
        return self.held.tolist()

    def __getitem__(self, index):
        return super().__getitem__(lists_as_tensors(index))

    def __setitem__(self, index, value):
        super().__setitem__(lists_as_tensors(index), value)

    def numpy(self, *_, **__):
        raise TypeError("cannot convert a cuda:0 tensor to numpy")

    def record_stream(self, stream):
        pass


def held_of(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def lists_as_tensors(index: Any) -> Any:
    """An index whose lists are tensors of the host: torch would send them to a device that is not there."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return parts if isinstance(index, tuple) else parts[0]


def where() -> str:
    """The innermost line of the repository that is running, these files apart."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if (
            path.is_relative_to(ROOT)
            and "site-packages" not in path.parts
            and path.parent.name != "cuda_check"
        ):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Device:
    """The pretended device: what it was asked to do, and where a GPU would be waited for, or refuse."""

    current: Device | None = None

    def __init__(self):
        self.syncs, self.waits, self.pageable = Counter(), Counter(), Counter()
        self.kernels, self.attention = Counter(), Counter()
        self.graphs: list[Graph] = []
        self.recording: Graph | None = None
        self._pinned: dict[int, Tensor] = {}  # kept, so that no other memory gets their addresses

    # ------------------------------------------------------------------------------ what is counted
    def sync(self, why: str) -> None:
        assert self.recording is None, f"{why} waits for the device while a graph is recorded, {where()}"
        self.syncs[f"{why}, {where()}"] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, Pretended), "only memory of the host can be pinned"
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _upload(self, source: Tensor, non_blocking: bool) -> None:
        if self.is_pinned(source):
            return None if non_blocking else self.sync("copy to the device")
        assert self.recording is None, f"a graph is recorded that copies pageable memory, {where()}"
        self.pageable[where()] += 1

    # --------------------------------------------------------------------------- what is computed
    def run(self, function, arguments: tuple, named: dict) -> Any:
        """One operation of torch, on tensors of this device, of the host, or making some."""
        name, named = function.overloadpacket.__name__, dict(named)
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
        target = torch.device(named["device"]).type if named.get("device") is not None else None
        pinned = named.pop("pin_memory", None)
        if name in ("_to_copy", "copy_"):
            to_device = isinstance(tensors[0], Pretended)
            source = tensors[0] if name == "_to_copy" else tensors[1]
            if name == "_to_copy" and target is not None:
                to_device = target == "cuda"
            if to_device != isinstance(source, Pretended):
                return self._cross(function, name, arguments, named, to_device)
        if not ours and target != "cuda":
            made = function(*arguments, **named)
            return self.pin(made) if pinned else made
        self._check_devices(name, tensors)
        if name in READING or self._counts_first(name, arguments, named, tensors):
            self.sync(name)
        launches = not function.is_view and name not in FREE
        self.kernels[name] += launches
        if target is not None:
            named["device"] = "cpu"
        if name in ATTENTION:
            compute = lambda: self._attend(ATTENTION[name], *tree_map(held_of, (arguments, named)))
        else:
            held, held_named = tree_map(held_of, (arguments, named))
            compute = lambda: computed(function, held, held_named)
        result = self._do(compute, ours if function._schema.is_mutable else [], launches)
        # What an operation changes in place, it returns as the same object.
        same = {id(tensor.held): tensor for tensor in ours}
        new = lambda x: same[id(x)] if id(x) in same else Pretended(x)
        return tree_map(lambda x: new(x) if isinstance(x, Tensor) else x, result)

    def launch(self, kernel, interpreted: Callable, arguments: tuple, named: dict) -> None:
        """One of Triton's kernels."""
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in tensors if not isinstance(tensor, Pretended)]
        assert not host, f"{kernel.__name__} is given {len(host)} tensors of the host"
        self.kernels[f"triton {kernel.__name__}"] += 1
        held, held_named = tree_map(held_of, (arguments, named))
        self._do(lambda: interpreted(kernel, *held, **held_named), tensors, launches=True)

    def _do(self, compute: Callable[[], Any], changed: list[Tensor], launches: bool) -> Any:
        if self.recording is not None:
            self.recording.save(changed)
        with _disable_current_modes():
            result = compute()
        if self.recording is not None and launches:
            self.recording.operations.append((compute, result))
        return result

    def _cross(self, function, name: str, arguments: tuple, named: dict, to_device: bool) -> Tensor:
        """A copy between the host and the device."""
        non_blocking = bool(named.get("non_blocking") or (name == "copy_" and arguments[2:] == (True,)))
        if name == "copy_":
            target, source = arguments[:2]
            if to_device:
                self._upload(source, non_blocking)
            elif not (non_blocking and self.is_pinned(target)):
                self.sync("copy to the host")
            held, held_source = held_of(target), held_of(source)
            self._do(lambda: held.copy_(held_source), [target] if to_device else [], launches=True)
            return target
        (source,) = arguments
        if to_device:
            self._upload(source, non_blocking)
        elif not non_blocking:
            self.sync("copy to the host")
        assert self.recording is None or not to_device, "a copy that is recorded needs memory that stays"
        with _disable_current_modes():
            made = function(held_of(source), **named | {"device": "cpu"})
            made = made.clone() if made is held_of(source) else made
        return Pretended(made) if to_device else self.pin(made) if non_blocking else made

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, Pretended) or tensor.dim() == 0:  # numbers may come from the host
                continue
            if name in INDEXING and number and not tensor.is_floating_point():
                self._upload(tensor, non_blocking=False)  # CUDA takes them: it copies them first
            else:
                raise RuntimeError(f"{name} mixes devices: {tuple(tensor.shape)} is on the CPU, {where()}")

    @staticmethod
    def _counts_first(name: str, arguments: tuple, named: dict, tensors: list[Tensor]) -> bool:
        """Whether the size of the result, or the places to write to, must be counted first."""
        if name == "repeat_interleave":
            return tensors[-1].dim() > 0 and named.get("output_size") is None
        masks = [t for t in tree_leaves(arguments[1]) if isinstance(t, Tensor)] if name in INDEXING else []
        filled = name != "index" and name in INDEXING and tensors[-1].numel() == 1  # as masked_fill does it
        return any(mask.dtype == torch.bool for mask in masks) and not filled

    def _attend(self, kernel: str, arguments: tuple, named: dict) -> tuple:
        """A fused attention. Its result lies in memory as (B, T, H, D)."""
        q, k, v, *rest = arguments
        lower_right = kernel == "efficient, lower right"
        if lower_right:  # takes (B, T, H, D), and comes from causal_lower_right alone
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            mask, causal = None, named["custom_mask_type"] == 2
        elif kernel == "flash":
            mask, causal = None, rest[1] if len(rest) > 1 else named.get("is_causal", False)
        else:
            mask = rest[0] if rest else named.get("attn_bias")
            causal = rest[3] if len(rest) > 3 else named.get("is_causal", False)
        self.attention[f"{kernel}, {q.dtype}"] += 1
        if causal:  # fewer queries than keys are the last ones
            assert mask is None, "causal, and a mask"
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=named.get("scale"), enable_gqa=grouped)
        out, nothing = out.transpose(1, 2).contiguous(), torch.zeros((), dtype=torch.int64)
        if lower_right:
            return out, nothing, nothing, nothing, q.shape[2], k.shape[2]
        if kernel == "efficient":
            return out.transpose(1, 2), nothing, nothing, nothing
        sizes = q.shape[2], k.shape[2]
        return out.transpose(1, 2), nothing, nothing, nothing, *sizes, nothing, nothing, nothing


def computed(function, arguments: tuple, named: dict) -> Any:
    try:
        return function(*arguments, **named)
    except NotImplementedError:  # CUDA has a kernel for it that the CPU has not
        return decomposition_table[function](*arguments, **named)


class Mode(TorchDispatchMode):
    """Sends what is made on the device to it, in the thread that enters it."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        return self._device.run(function, arguments, named or {})


# ------------------------------------------------------------------------------------- torch.cuda
class Graph:
    """In place of torch.cuda.CUDAGraph. What is recorded is also computed, because further operations depend
    on it; at the end everything that it has changed is as before."""

    def __init__(self, *_, **__):
        self.operations: list[tuple[Callable[[], Any], Any]] = []
        self._saved: dict[int, tuple[Any, Any]] = {}

    @property
    def kernels(self) -> int:
        return len(self.operations)

    def save(self, changed: list[Tensor]) -> None:
        for tensor in changed:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._saved:
                self._saved[storage.data_ptr()] = storage, storage.clone()

    def capture_begin(self, *_, **__):
        Device.current.recording = self

    def capture_end(self):
        Device.current.recording = None
        for storage, before in self._saved.values():
            storage.copy_(before)
        self._saved.clear()
        Device.current.graphs.append(self)

    def replay(self):
        with _disable_current_modes():
            for compute, result in self.operations:
                for old, new in zip(tree_leaves(result), tree_leaves(compute()), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 1.0

    def synchronize(self):
        Device.current.waits[where()] += 1


class Stream:
    cuda_stream, device = 0, CUDA

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        Device.current.sync("synchronize")


PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=10**11, L2_cache_size=5 * 10**7,
    multi_processor_count=4,  # fewer programs for the interpreter
)  # fmt: skip


def cuda_functions(device: Device) -> dict[str, Any]:
    """What stands in place of torch.cuda's own, by name."""
    nothing = lambda *_, **__: None
    constants = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "graph_pool_handle": (0, 1), "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0,
        "mem_get_info": (10**11, 10**11), "get_device_name": PROPERTIES.name, "is_bf16_supported": True,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor), "get_device_properties": PROPERTIES,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    silent = (
        "_lazy_init", "manual_seed", "manual_seed_all", "set_rng_state", "reset_peak_memory_stats",
        "set_device", "empty_cache",
    )  # fmt: skip
    return {
        **{name: (lambda *_, value=value, **__: value) for name, value in constants.items()},
        **dict.fromkeys(silent, nothing),
        **{"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "current_stream": lambda *_: Stream()},
        **dict.fromkeys(("stream", "device"), lambda *_: nullcontext()),
        "synchronize": lambda *_: device.sync("synchronize"),
    }


# ---------------------------------------------------------------------- what does not reach the dispatcher
def on_host_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and its like, which build on the host and copy."""

    def made(data, *, dtype=None, device=None, **more) -> Tensor:
        if isinstance(data, Pretended):
            return data if dtype is None else data.to(dtype)
        on_device = device is not None and torch.device(device).type == "cuda"
        built = make(data, dtype=dtype, **more)
        return built.to("cuda") if on_device else built

    return made


def module_to(original: Callable) -> Callable:
    def to(module, *arguments, **named):
        """As torch's: weights that are shared stay shared."""
        places: dict[Tensor, list] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((part, name))
        original(module, *arguments, **named)
        for (first, own), *others in places.values():
            for part, name in others:
                part._parameters[name] = first._parameters[own]
        return module

    return to


def outside_of_modes(cls, *_, **__) -> Tensor:
    """A tensor of a class of torch's own, which cannot be made while the dispatcher is watched."""
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def counting_attention(original: Callable) -> Callable:
    """The fused kernels' backward passes want what their forward passes return besides the result: with
    gradients the plain formula computes, and what torch would have chosen is counted."""

    def attention(query, key, value, attn_mask=None, *more, **named):
        if isinstance(attn_mask, CausalBias):  # it looks for torch's own function, which this one replaces
            return CausalBias._dispatch(query, key, value, attn_mask, *more, **named)
        if not (isinstance(query, Pretended) and torch.is_grad_enabled()):
            counts = Device.current.attention
            before = counts.total()
            result = original(query, key, value, attn_mask, *more, **named)
            if isinstance(query, Pretended) and counts.total() == before:  # no fused kernel takes this
                counts[f"math, {query.dtype}"] += 1
            return result
        low = torch.bfloat16 if torch.is_autocast_enabled("cuda") else query.dtype
        inputs = [tensor.detach().to(low).requires_grad_() for tensor in (query, key, value)]
        chosen = torch._fused_sdp_choice(*inputs, attn_mask, *more, **named)
        Device.current.attention[f"{SDPBackend(chosen).name.lower()} with gradients, {low}"] += 1
        with sdpa_kernel(SDPBackend.MATH):
            return original(query, key, value, attn_mask, *more, **named)

    return attention


@contextmanager
def pretended() -> Iterator[Device]:
    """A device for the length of the block. What was moved to it is of no use afterwards."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in cuda_functions(device).items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda.random, "manual_seed_all", lambda *_: None)
        patch.setattr(torch.accelerator, "synchronize", lambda *_: device.sync("synchronize"))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, on_host_first(getattr(torch, name)))
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        patch.setattr(torch.nn.Module, "to", module_to(torch.nn.Module.to))
        patch.setattr(F, "scaled_dot_product_attention", counting_attention(F.scaled_dot_product_attention))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: device.pin(tensor.clone()))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: device.is_pinned(tensor))
        patch.setattr(CausalBias, "__new__", outside_of_modes, raising=False)
        run = threading.Thread.run

        def in_mode(thread):
            with Mode(device):
                run(thread)

        patch.setattr(threading.Thread, "run", in_mode)
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreter = pytest.importorskip("triton.runtime.interpreter")
            interpreted = interpreter.InterpretedFunction.run
            launch = lambda kernel, *a, **named: device.launch(kernel, interpreted, a, named)
            patch.setattr(interpreter.InterpretedFunction, "run", launch)
        patch.setattr(Device, "current", device)
        with Mode(device):
            yield device
