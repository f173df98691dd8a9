"""The flags of `train.py --plan`, and the devices that it knows. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config import check_range, flag

# Dense bfloat16 products with float32 sums, and float32 products without TF32, of NVIDIA's data sheets.
PEAKS = {
    "A10": (125e12, 31.2e12),
    "A100": (312e12, 19.5e12),
    "RTX A6000": (154.8e12, 38.7e12),
    "L4": (121e12, 30.3e12),
    "L40S": (362e12, 91.6e12),
    "H100": (989.4e12, 66.9e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H200": (989.4e12, 66.9e12),
    "GH200": (989.4e12, 66.9e12),
    "B200": (2250e12, 75e12),
    "RTX 3090": (71e12, 35.6e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 5090": (209.5e12, 104.8e12),
}


def _field(default, help_text: str):
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class PlanOptions:
    """What a plan assumes besides the recipe.

    Raises:
        ValueError: one sentence that names the flag.
    """

    plan: bool = _field(False, "print parameters, memory, FLOPs and hours of this run, and leave")
    plan_ranks: int = _field(1, "plan: processes, one for each device")
    plan_device: str = _field("auto", f"plan: cpu, {', '.join(PEAKS)}; auto: this machine's GPU, else H100")
    plan_tflops: float = _field(0.0, "plan: what a device can do at most, TFLOP/s; 0: by its name")
    plan_mfu: float = _field(0.4, "plan: share of that which the model's FLOPs reach")
    plan_tiles: float = _field(-1.0, "plan: tiles of a sample; -1: those of one image of 4:3")
    plan_text: int = _field(100, "plan: tokens of a sample besides its images")
    plan_labelled: float = _field(0.4, "plan: share of these that are answers")
    plan_rows: int = _field(0, "plan: rows of the data; 0: counted where they lie here")

    def __post_init__(self):
        devices = {name.lower(): name for name in ("auto", "cpu", *PEAKS)}
        if self.plan_device.lower() not in devices:
            raise ValueError(
                f"--plan-device: expected {', '.join(devices.values())}, got {self.plan_device!r}; others go "
                "by --plan-tflops"
            )
        object.__setattr__(self, "plan_device", devices[self.plan_device.lower()])
        check_range(self, 1, 1_000_000, "plan_ranks")
        check_range(self, 0, 1e6, "plan_tflops")
        check_range(self, 1, 1_000_000, "plan_text")
        check_range(self, 0, 10**12, "plan_rows")
        if self.plan_tiles != -1 and not 0 <= self.plan_tiles <= 65_536:
            raise ValueError(
                f"--plan-tiles: expected from 0 to 65536, or -1 for an image of 4:3, got {self.plan_tiles}"
            )
        for name in ("plan_mfu", "plan_labelled"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{flag(name)}: expected more than 0, at most 1, got {getattr(self, name)}")
