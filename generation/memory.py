"""How much memory caches need and may take: what does not fit is refused before any work.

check_caches_fit(model.language_model, [(8, 1024)])     # 8 rows of 1024 positions
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from generation import kv_cache as kv

if TYPE_CHECKING:
    from generation.decoding import GenerationOptions

SPARE = 0.1  # of the free memory, left to activations
GROUPS = Path("/sys/fs/cgroup")
# Of a control group, version 2 and 1: its limit, what it uses, and how much of that are files to be dropped.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class CacheMemoryError(ValueError):
    """More rows or positions than there is memory for."""


def bytes_per_position(language_model) -> int:
    """Bytes that one position of one row takes in a cache of this model."""
    text = language_model.config
    return kv.bytes_per_token(
        text.num_hidden_layers, text.num_key_value_heads, text.head_dim, language_model.cache_dtype
    )


def check_answers_fit(language_model, lengths: Sequence[int], options: GenerationOptions) -> None:
    """`check_caches_fit` for prompts of these lengths with all of their answers."""
    longest, answers = max(lengths), options.num_return_sequences
    caches = [(len(lengths) * answers, longest + options.max_new_tokens - 1)]
    if answers > 1:  # the prompts' own stands beside it while it is copied
        caches.append((len(lengths), longest))
    check_caches_fit(language_model, caches)


def check_caches_fit(language_model, caches: Sequence[tuple[int, int]], held: int = 0) -> None:
    """Refuse what is larger than the memory of the model's device.

    Args:
        caches: (rows, positions) of each one that is to be there at the same time.
        held: bytes of a cache that is there already and becomes one of them.

    Raises:
        CacheMemoryError: with the bytes needed and had.
    """
    needed = sum(rows * positions for rows, positions in caches) * bytes_per_position(language_model)
    had = available_bytes(language_model.norm.weight.device)
    if needed > held and had is not None and needed > had + held:
        shapes = " and ".join(f"{rows} x {positions}" for rows, positions in caches)
        raise CacheMemoryError(
            f"{shapes} positions need {needed} bytes of cache, {had + held} are to be had: "
            "take fewer answers at once, or shorter ones"
        )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that a cache on this device may take now, or None where nobody tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    else:
        free = _available_to_process()
    return None if free is None else int(free * (1 - SPARE))


def _available_to_process() -> int | None:
    """Main memory: what the kernel calls available, and what containers leave; None off Linux."""
    found, meminfo, member = [], Path("/proc/meminfo"), Path("/proc/self/cgroup")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:  # not in kernels before 3.14, nor in every sandbox's imitation
            found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if member.is_file():
        found += left_by_groups(member.read_text(), GROUPS)
    return min(found, default=None)


def left_by_groups(membership: str, root: Path) -> list[int]:
    """Bytes that each limited control group around a process leaves to it.

    Args:
        membership: lines "number:controllers:path", as in /proc/self/cgroup.
        root: where the groups are mounted. Inside a container its own group is the root, whatever the path.
    """
    found = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = root, _VERSION_2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", _VERSION_1
        else:
            continue
        for part in (Path(path), *Path(path).parents):
            group = base / str(part).strip("/")
            limit, used, files = (group / names[0], group / names[1], group / "memory.stat")
            if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
                droppable = _field(files, names[2])
                found.append(max(0, int(text) - int(used.read_text()) + droppable))
    return found


def _field(file: Path, name: str) -> int:
    """The number beside a name in memory.stat; 0, which allows least, where nobody tells."""
    entries = file.read_text().splitlines() if file.is_file() else []
    return next((int(entry.split()[1]) for entry in entries if entry.startswith(f"{name} ")), 0)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
