"""Names of devices, judged without torch: a mistyped one is refused before it is imported."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version

_DEVICE = re.compile(r"auto|(cpu|cuda|mps)(:\d+)?")


def check_device(name: str) -> str:
    """A device that this machine may have, by its name.

    Raises:
        ValueError: no such kind of device, or none that the installed PyTorch is built for.
    """
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"device: expected auto, cpu, cuda, mps or cuda:N, got {name!r}")
    torch = version("torch") if name.startswith("cuda") else ""
    if torch.endswith("+cpu"):
        raise ValueError(f"device {name}: PyTorch {torch} is built for CPUs only; use auto or cpu")
    if name.startswith("mps") and sys.platform != "darwin":
        raise ValueError(f"device {name}: only Macs have one; use auto or cpu")
    return name
