"""NVIDIA's library with three cards in it, for a machine that has none: `install` puts its answers into pynvml."""

import os
from types import SimpleNamespace

import pynvml
import pytest

# By their place on the bus: name, cores, clock in MHz, UUID.
CARDS = (("slow", 1000, 1500, "GPU-aa11"), ("fast", 9000, 1700, "GPU-bb22"), ("spare", 5000, 1600, "GPU-bb33"))


def install(patch: pytest.MonkeyPatch) -> None:
    """Their memory is 2, 4 and 6 GB, half of it free; this process holds 0.25 GB; they are at work and warm."""
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(CARDS),
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"MIG-cc": 2}[uuid],
        "nvmlDeviceGetUUID": lambda number: CARDS[number][3],
        "nvmlDeviceGetName": lambda number: CARDS[number][0].encode(),
        "nvmlDeviceGetNumGpuCores": lambda number: CARDS[number][1],
        "nvmlDeviceGetMaxClockInfo": lambda number, clock: CARDS[number][2],
        "nvmlDeviceGetMemoryInfo": lambda number: SimpleNamespace(free=_gb(number + 1), total=_gb(2 * (number + 1))),
        "nvmlDeviceGetCudaComputeCapability": lambda number: (8, number),
        "nvmlDeviceGetComputeRunningProcesses": lambda number: [_process(_gb(0.25))],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda number: [_process(None)],
        "nvmlDeviceGetUtilizationRates": lambda number: SimpleNamespace(gpu=37, memory=12),
        "nvmlDeviceGetTemperature": lambda number, sensor: 64,
        "nvmlDeviceGetPowerUsage": lambda number: 215_400,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }.items():
        patch.setattr(pynvml, name, answer)
    patch.delenv("CUDA_DEVICE_ORDER", raising=False)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _gb(number: float) -> int:
    return int(number * 10**9)


def _process(num_bytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=os.getpid(), usedGpuMemory=num_bytes)
