"""The device that an engine runs on: asked once, handed on."""

import os
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Device:
    """
    kind        "cpu" or "cuda"
    capability  (major, minor) of a CUDA card; None on a CPU
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    def free_bytes(self) -> int:
        """Memory that could be allocated now: what the driver says of a card, what the system calls available."""
        if self.kind == "cuda":
            return torch.cuda.mem_get_info()[0]
        return psutil.virtual_memory().available

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1] if self.kind == "cuda" else psutil.virtual_memory().total


def open_device(kind: str) -> Device:
    """`kind` is auto | cpu | cuda. Raises RuntimeError when cuda is asked for and there is none."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise RuntimeError("No CUDA device is usable: torch finds no driver or was built without CUDA.")
        return Device("cuda", torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    return Device("cpu", f"CPU, {usable_cores()} cores")


def usable_cores() -> int:
    """Cores that this process may run on (a container may grant fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(device: Device, count: int) -> None:
    """CPU threads of torch and, where they compute, of our own kernels."""
    torch.set_num_threads(count)
    if device.kind == "cpu":
        from kernels.cpu import compile as cpu_compile  # numba: half a second that a card need not wait for

        cpu_compile.set_threads(count)
