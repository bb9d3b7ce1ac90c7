"""This computer's memory as a forecast sees it: the card by NVIDIA's management library, the rest by psutil."""

from dataclasses import dataclass

import psutil

_GIB = 2**30


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
        return Memory(self.kind, self.name, self.total - left_out, max(self.free - left_out, 0), self.held)

    def with_free(self, num_bytes: int) -> "Memory":
        """With so much more of it free, as when what holds it had gone."""
        return Memory(self.kind, self.name, self.total, min(self.free + num_bytes, self.total), self.held)

    def emptied(self) -> "Memory":
        """With nothing on it."""
        return Memory(self.kind, f"{self.name}, empty", self.total, self.total)


def empty_card(gb: float) -> Memory:
    total = int(gb * _GIB)
    return Memory("cuda", f"a card with {gb:g} GB, empty", total, total)


def card() -> Memory | None:
    """The first card now; None where there is none, or nobody can tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # no driver, no library, not allowed: the bindings have an exception for each
        return None
    held = tuple((_program(process.pid), process.usedGpuMemory) for process in found if process.usedGpuMemory)
    return Memory("cuda", name if isinstance(name, str) else name.decode(), memory.total, memory.free, held)


def computer() -> Memory:
    memory = psutil.virtual_memory()
    return Memory("cpu", "this computer (CPU)", memory.total, memory.available)


def _program(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"a program (pid {pid})"
