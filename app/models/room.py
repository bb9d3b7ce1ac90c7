"""Which models fit beside each other, and whether one that goes has given its memory back before the next takes it.

One budget for all: on a card its total times gpu_memory_utilization, on a CPU what the system has available. What a
model holds is what its engine reported; what a new one will need is told from its files.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.background import in_daemon_thread
from app.models.host_memory import Memory, memory_of, resident_bytes
from app.settings import Settings
from engine.types import MemoryReport

_log = logging.getLogger("fireside.models")

_CARD_RESERVE_BYTES = 512 * 1024**2
_CPU_RESERVE_BYTES = 1_000_000_000  # for the rest of the machine
_WEIGHTS_SHARE = 1.1  # scales held in 32 bits, tables of angles
_WORKSPACE_BYTES = 400_000_000  # a small step's, and what a process with torch takes before a weight is there
_LEAST_KV_BYTES = 500_000_000  # with less of a cache a model is of little use beside others
_BACK_SHARE = 0.8  # of what a model held, to be free again: other programs move meanwhile
_BACK_S = 5.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Holding:
    """What a loaded model has.

    device  as in `ModelInfo`
    pid     of its process
    """

    device: str
    pid: int | None
    report: MemoryReport

    @property
    def num_bytes(self) -> int:
        found = self.report
        return found.weights_bytes + found.kv_bytes + found.workspace_bytes + found.graphs_bytes


class Room:
    def __init__(self, settings: Settings) -> None:
        self._share = settings.gpu_memory_utilization
        self._kv_bytes = _LEAST_KV_BYTES if settings.kv_gb is None else int(settings.kv_gb * 1e9)

    def needed_bytes(self, folder: Path) -> int:
        """Of a model to be useful. Touches the disk."""
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return int(weights * _WEIGHTS_SHARE) + _WORKSPACE_BYTES + self._kv_bytes

    def fits(self, needed_bytes: int, holdings: Sequence[Holding]) -> bool:
        """Whether a model finds room beside these; False where nobody can tell. Asks a driver, or the system."""
        device = holdings[0].device
        memory = memory_of(device)
        return memory is not None and needed_bytes <= self._left(device, memory, holdings)

    def _left(self, device: str, memory: Memory, holdings: Sequence[Holding]) -> int:
        if device != "cpu":
            budget = int(memory.total_bytes * self._share) - sum(held.num_bytes for held in holdings)
            return min(budget, memory.free_bytes - _CARD_RESERVE_BYTES)
        # A cache is the system's until it is written: what was promised counts as taken.
        promised = sum(max(held.num_bytes - resident_bytes(held.pid), 0) for held in holdings)
        return memory.free_bytes - promised - _CPU_RESERVE_BYTES

    async def until_back(self, held: Holding, before: Memory | None) -> None:
        """Return once the memory of a model that has ended is seen to be free; says so in the log where it is not.

        before  the memory while it was there
        """
        began = time.monotonic()
        while not await in_daemon_thread(lambda: _is_back(held, before)):
            if time.monotonic() - began > _BACK_S:
                _log.warning(
                    "%.2f GB of a model that has ended are not seen to be free after %.0f s; going on.",
                    held.num_bytes / 1e9,
                    _BACK_S,
                )
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        _log.info("%.2f GB are free again after %.2f s.", held.num_bytes / 1e9, time.monotonic() - began)


def _is_back(held: Holding, before: Memory | None) -> bool:
    if resident_bytes(held.pid):
        return False
    now = memory_of(held.device) if held.device != "cpu" else None  # the system's is back with the process
    return now is None or before is None or now.free_bytes >= before.free_bytes + held.num_bytes * _BACK_SHARE
