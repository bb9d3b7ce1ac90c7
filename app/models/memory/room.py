"""Which models fit beside each other, and whether one that goes has given its memory back before the next takes it.

One budget for all: on a card its total times gpu_memory_utilization, on a CPU what the system has available. What a
model holds is what its engine reported; what a new one needs is the engine's own forecast and a small cache.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.background import in_daemon_thread
from app.models.machine import Memory, card, computer
from engine.config import EngineConfig
from engine.types import MemoryReport

_log = logging.getLogger("fireside.models")

_CARD_RESERVE_BYTES = 512 * 1024**2
_CPU_RESERVE_BYTES = 1_000_000_000  # for the rest of the machine
_PROCESS_BYTES = 400_000_000  # on a CPU: Python and torch, before a weight is there
_USEFUL_TOKENS = 8192  # of cache; with less a model is of little use beside others
_LENT_SHARE = 0.5  # of its cache, that a model may be asked to give to others
_BACK_SHARE = 0.8  # of what a model held, to be free again: other programs move meanwhile
_BACK_S = 5.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Holding:
    """What a loaded model has.

    kind           of its device, as in `ModelInfo`
    pid            of its process
    made_kv_bytes  its cache as it was made, before any of it was given back
    """

    kind: str
    pid: int | None
    report: MemoryReport
    made_kv_bytes: int

    @property
    def num_bytes(self) -> int:
        found = self.report
        return found.weights_bytes + found.kv_bytes + found.workspace_bytes + found.graphs_bytes

    @property
    def promised(self) -> int:
        """Of it, what the system has not given yet: on a CPU a cache is the system's until it is written. Asks the
        system.
        """
        return max(self.num_bytes - _resident_bytes(self.pid), 0) if self.kind == "cpu" else 0

    @property
    def given(self) -> int:
        """Of it, what is free again once it goes. Asks the system."""
        return self.num_bytes - self.promised

    @property
    def could_lend(self) -> int:
        """Of its cache as it is now; a CPU's cannot be resized."""
        least = int(self.made_kv_bytes * (1 - _LENT_SHARE))
        return max(self.report.kv_bytes - least, 0) if self.kind != "cpu" else 0


Needs = Callable[[Path, EngineConfig, str], int]


def needed_bytes(folder: Path, config: EngineConfig, kind: str) -> int:
    """That a model needs to be useful on a device of this kind. Raises AppError where it cannot be loaded at all."""
    from app.errors import from_engine_error
    from app.models.outline import outline_of_folder
    from engine.errors import EngineError
    from engine.forecast import can_be_captured, compute_dtype, forecast
    from engine.memory import asked_context, batched_tokens, cache_sizes

    outline, memory = outline_of_folder(folder), memory_of(kind)
    try:
        dtype = compute_dtype(config, outline.spec, kind)
        uses_graphs = kind == "cuda" and can_be_captured(outline.spec, outline.stated)
        parts = forecast(config, outline.spec, outline, outline.stated, memory, dtype, uses_graphs=uses_graphs)
        num_tokens = min(asked_context(config, outline.spec), _USEFUL_TOKENS)
    except EngineError as error:
        raise from_engine_error(error) from error
    sizes = cache_sizes(outline.spec, dtype, config.block_size, batched_tokens(config, memory))
    cache = int(config.kv_gb * 1e9) if config.kv_gb else sizes.bytes_for(num_tokens)
    return parts.total + cache + (_PROCESS_BYTES if kind == "cpu" else 0)


def memory_of(kind: str) -> Memory:
    """Now, whoever holds it. Asks a driver, or the system."""
    return card() or Memory("cuda", "a card that nobody tells of", 0, 0) if kind != "cpu" else computer()


def kind_here() -> str:
    """Of the device that an engine will choose here."""
    return "cpu" if card() is None else "cuda"


class Room:
    """share: of a card's memory that may be used."""

    def __init__(self, share: float) -> None:
        self._share = share

    def shortage(self, needed: int, holdings: Sequence[Holding]) -> int:
        """Bytes that are missing for a model beside these; 0 or less where it fits."""
        kind = holdings[0].kind
        memory = memory_of(kind)
        if kind != "cpu":
            budget = int(memory.total * self._share) - sum(held.num_bytes for held in holdings)
            return needed - min(budget, memory.free - _CARD_RESERVE_BYTES)
        promised = sum(held.promised for held in holdings)  # counts as taken
        return needed - (memory.free - promised - _CPU_RESERVE_BYTES)

    async def until_back(self, held: Holding, before: Memory, is_needed: Callable[[], bool]) -> None:
        """Return once the memory of a model that has ended is seen to be free; says so in the log where it is not.

        before     the memory while it was there
        is_needed  False ends the wait
        """
        began = time.monotonic()
        while is_needed() and not await in_daemon_thread(lambda: _is_back(held, before)):
            if time.monotonic() - began > _BACK_S:
                _log.warning(
                    "%.2f GB of a model that has ended are not seen to be free after %.0f s; going on.",
                    held.num_bytes / 1e9,
                    _BACK_S,
                )
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        _log.info("%.2f GB are free again after %.2f s.", held.num_bytes / 1e9, time.monotonic() - began)


def _is_back(held: Holding, before: Memory) -> bool:
    if _resident_bytes(held.pid):
        return False
    if held.kind == "cpu":  # the system has it back with the end of the process
        return True
    return memory_of(held.kind).free >= before.free + held.num_bytes * _BACK_SHARE


def _resident_bytes(pid: int | None) -> int:
    """What a process has of the system's memory now; 0 once it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid is not None else 0
    except psutil.Error:
        return 0
