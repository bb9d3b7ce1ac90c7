"""This computer's memory as a forecast sees it: the card by NVIDIA's management library, the rest by psutil."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

_GIB = 2**30
_WATCHED_S = 0.5  # psutil's way without an interval goes by what the same thread asked before


@dataclass(frozen=True, slots=True)
class Memory:
    """The face of `engine.memory.Machine`. kind: "cpu" or "cuda"."""

    kind: str
    name: str
    total: int
    free: int
    held: tuple[tuple[str, int], ...] = ()

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return self.total

    def holders(self) -> list[tuple[str, int]]:
        return list(self.held)

    def acting_as(self, gb: float) -> "Memory":
        """The same card as if it had `gb` (2**30 bytes) at most."""
        left_out = max(self.total - int(gb * _GIB), 0)
        name = f"{self.name} as a card with {gb:g} GiB"
        return Memory(self.kind, name, self.total - left_out, max(self.free - left_out, 0), self.held)

    def with_free(self, num_bytes: int) -> "Memory":
        """With so much more of it free, as when what holds it had gone."""
        return Memory(self.kind, self.name, self.total, min(self.free + num_bytes, self.total), self.held)

    def emptied(self) -> "Memory":
        """With nothing on it."""
        return Memory(self.kind, f"{self.name}, empty", self.total, self.total)


def empty_card(gb: float) -> Memory:
    """gb  as cards are sold: 2**30 bytes each"""
    total = int(gb * _GIB)
    return Memory("cuda", f"a card with {gb:g} GiB, empty", total, total)


@dataclass(frozen=True, slots=True)
class Card:
    """capability: of its architecture, as (8, 6)."""

    memory: Memory
    driver: str
    capability: tuple[int, int]


def card() -> Memory | None:
    """The memory of `first_card` now; None where there is none."""
    found = first_card()
    return found.memory if found else None


def first_card() -> Card | None:
    """The card that an engine would compute on, CUDA_VISIBLE_DEVICES minded; None where there is none, or nobody can
    tell.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _first_visible(pynvml)
        return None if handle is None else _card(pynvml, handle)
    except Exception:  # no driver, no library, not allowed: the bindings have an exception for each
        return None


def _card(nvml: Any, handle: Any) -> Card:
    memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), _text(nvml.nvmlDeviceGetName(handle))
    found = nvml.nvmlDeviceGetComputeRunningProcesses(handle) + nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    held = {process.pid: process.usedGpuMemory for process in found if process.usedGpuMemory}
    named = tuple((_program(pid), num_bytes) for pid, num_bytes in held.items())
    return Card(
        Memory("cuda", name, memory.total, memory.free, named),
        _text(nvml.nvmlSystemGetDriverVersion()),
        tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _first_visible(nvml: Any) -> Any:
    """The handle of CUDA's device 0: an index of CUDA_VISIBLE_DEVICES is one in CUDA's order, a name is a UUID or its
    beginning. What is neither ("", "-1") hides all cards, as in CUDA.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    handles = _in_cuda_order(nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())])
    if first.startswith("GPU-"):
        return next((handle for handle in handles if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(first)), None)
    return handles[int(first)] if first.isdecimal() and int(first) < len(handles) else None


def _in_cuda_order(nvml: Any, handles: list[Any]) -> list[Any]:
    """The library counts cards by their place on the bus; CUDA begins with the fastest unless it is told otherwise."""
    if len(handles) < 2 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return handles

    def speed(handle: Any) -> int:
        clock: int = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        return clock * int(nvml.nvmlDeviceGetNumGpuCores(handle))

    fastest = max(handles, key=speed)
    return [fastest, *(handle for handle in handles if handle is not fastest)]


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode()


@dataclass(frozen=True, slots=True)
class MachineNow:
    """What works: the card, or where there is none the computer. Shares of 1; None where nobody tells."""

    memory: Memory
    busy: float | None
    temperature_c: float | None = None
    power_w: float | None = None


def machine_now() -> MachineNow:
    """Blocks: where there is no card, for as long as the processor is watched."""
    memory = card()
    if memory is None:
        return MachineNow(computer(), psutil.cpu_percent(_WATCHED_S) / 100)
    import pynvml

    handle = _first_visible(pynvml)
    return MachineNow(
        memory,
        _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        _told(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        _told(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    )


def _told(read: Callable[[], float]) -> float | None:
    """None where this card does not tell it."""
    try:
        return float(read())
    except Exception:  # the bindings have an exception for each reason
        return None


def computer() -> Memory:
    memory = psutil.virtual_memory()
    return Memory("cpu", "this computer (CPU)", memory.total, memory.available)


def _program(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"a program (pid {pid})"
