"""The memory that models take, as this machine tells it: the card's by its driver, the system's, a process's.

Asked from beside the event loop: a driver may take its time. The app knows no torch, so a card is asked through NVML.
"""

import os
from typing import NamedTuple

import psutil


class Memory(NamedTuple):
    """Bytes, whoever holds them."""

    free_bytes: int
    total_bytes: int


def memory_of(device: str) -> Memory | None:
    """Of `cuda` or `cpu`, as `ModelInfo.device` names them; None where a card's driver tells nothing."""
    if device == "cpu":
        found = psutil.virtual_memory()
        return Memory(found.available, found.total)
    return _card()


def resident_bytes(pid: int | None) -> int:
    """What a process has of the system's memory now; 0 once it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    except psutil.Error:
        return 0


def _card() -> Memory | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlDeviceGetMemoryInfo(_first_card(pynvml))
    except Exception:  # not installed, no driver, not allowed: the bindings have an exception for each
        return None
    return Memory(int(found.free), int(found.total))


def _first_card(pynvml: object) -> object:
    """The card that torch calls 0: CUDA_VISIBLE_DEVICES names it by number or by id."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if named.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(named))  # type: ignore[attr-defined]
    return pynvml.nvmlDeviceGetHandleByUUID(named)  # type: ignore[attr-defined]
