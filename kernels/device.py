"""The device that an engine runs on: asked once, handed on."""

import os
from dataclasses import dataclass
from operator import itemgetter

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Device:
    """
    kind        "cpu" or "cuda"
    capability  (major, minor) of a CUDA card; None on a CPU
    left_out_bytes  of a card's memory: what it has and we act as if it had not
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    left_out_bytes: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    def free_bytes(self) -> int:
        """Memory that could be allocated now: what the driver says of a card, what the system calls available."""
        if self.kind == "cuda":
            return max(torch.cuda.mem_get_info()[0] - self.left_out_bytes, 0)
        return psutil.virtual_memory().available

    def total_bytes(self) -> int:
        if self.kind == "cuda":
            return torch.cuda.mem_get_info()[1] - self.left_out_bytes
        return psutil.virtual_memory().total

    def holders(self) -> list[tuple[str, int]]:
        """Programs that hold a card's memory and how much, the largest first; none where nobody can tell."""
        return _holders() if self.kind == "cuda" else []


def _holders() -> list[tuple[str, int]]:
    """By NVIDIA's management library, if its bindings (nvidia-ml-py) are installed."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # By its UUID: the library counts cards by their place on the bus, CUDA_VISIBLE_DEVICES or not.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(card) + pynvml.nvmlDeviceGetGraphicsRunningProcesses(card)
    except Exception:  # not installed, no driver, not allowed: the bindings have an exception for each
        return []
    held = {process.pid: process.usedGpuMemory for process in found if process.usedGpuMemory}  # Windows does not tell
    named = [(f"{_program(pid)} (pid {pid})", num_bytes) for pid, num_bytes in held.items()]
    return sorted(named, key=itemgetter(1), reverse=True)


def _program(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a program"


def open_device(kind: str, *, memory_gb: float | None = None) -> Device:
    """`kind` is auto | cpu | cuda; `memory_gb` (2**30 bytes) makes a card act as one with less memory.

    Raises RuntimeError when cuda is asked for and there is none.
    """
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise RuntimeError("No CUDA device is usable: torch finds no driver or was built without CUDA.")
        total = torch.cuda.mem_get_info()[1]
        left_out = 0 if memory_gb is None else max(total - int(memory_gb * 2**30), 0)
        return Device("cuda", torch.cuda.get_device_name(), torch.cuda.get_device_capability(), left_out)
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
