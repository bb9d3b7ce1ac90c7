"""One model's stay: waiting for its turn, fetched, loaded, answering, gone. Knows who holds it, and starts nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.chat.types import EngineLike
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.making import Progress
from app.models.memory.line import Place
from app.models.memory.room import Holding
from app.models.status import ModelStatus
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.types import EngineStats, MemoryReport, ModelInfo

_TOLD_FROM = 0.05  # share of a load from which its speed so far says something


class Shelf(Protocol):
    """The face of `app.models.shelf.ModelShelf`: what models there are, and how one comes to lie whole in a folder."""

    def entries(self) -> Sequence[CatalogEntry]:
        """The catalogue, from memory."""
        ...

    def find(self, name: str) -> CatalogEntry | None:
        """The entry with this id, alias, repository or folder; None where there is none."""
        ...

    def resolve(self, name: str) -> CatalogEntry:
        """As `find`; raises AppError 404 with what there is."""
        ...

    def is_whole(self, entry: CatalogEntry) -> bool:
        """Whether it lies there to be loaded. Touches the disk."""
        ...

    def ensure(self, entry: CatalogEntry, on_progress: Progress) -> Path:
        """The folder of the whole checkpoint, fetched or converted first where needed. Blocks. Raises AppError."""
        ...


class Engine(EngineLike, Protocol):
    """The face of `engine.client.EngineClient` that its owner needs."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def memory(self) -> MemoryReport: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def pid(self) -> int | None: ...
    async def until_ended(self) -> EngineError: ...
    def give_up(self, why: str) -> None: ...
    async def close(self) -> None: ...
    async def resize_kv(self, give_back_bytes: int) -> MemoryReport: ...


class StartEngine(Protocol):
    """`EngineClient.start`: returns when the model can answer; cancelling it ends the child. Raises EngineError."""

    def __call__(
        self, config: EngineConfig, *, on_loading: Callable[[str, float], None], log_path: str | None, silence_s: float
    ) -> Awaitable[Engine]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model that can answer (`app.chat.types.LoadedModel`).

    engine  as turns get it
    child   as its owner has it
    made_kv_bytes  its cache as it was made
    """

    id: str
    folder: Path
    sampling: Mapping[str, float | int]
    tool_format: str | None
    reasoning: tuple[str, str] | None
    engine: EngineLike
    child: Engine
    made_kv_bytes: int

    @property
    def info(self) -> ModelInfo:
        return self.child.info

    @property
    def holding(self) -> Holding:
        return Holding(self.child.info.device_kind, self.child.pid, self.child.memory, self.made_kv_bytes)


class Stopped(Exception):
    """Thrown into a fetch to end it."""


class Resident:
    """
    name       under which it was asked for
    is_chosen  somebody loaded it by hand; else a request named it
    displaced  the model in hand that it took the place of
    gave_up    the load of that model, which was ended for this one
    is_proven  it lies there whole, and is a model that can be loaded
    lent_bytes  of its cache, to other models
    num_held   requests that wait for it or are answered
    outcome    the task that brings it: a ReadyModel, or an AppError
    watch      the task that sees its engine die
    """

    outcome: asyncio.Task[ReadyModel]
    watch: asyncio.Task[None]

    def __init__(self, name: str, model_id: str, place: Place, *, is_chosen: bool) -> None:
        self.name = name
        self.model_id = model_id
        self.place = place
        self.is_chosen = is_chosen
        self.displaced = ""
        self.gave_up: Resident | None = None
        self.stage = "Looking for the model"
        self.fraction: float | None = None
        self.expected_s: float | None = None  # from the start of its engine, as the last load went
        self.started_at = 0.0  # its engine; this and the times below are of the monotonic clock
        self._told_since: tuple[float, float] | None = None  # when, and the share from which its speed is measured
        self.failed_at = 0.0
        self.used_at = time.monotonic()
        self.is_fetching = False
        self.is_proven = False
        self.is_leaving = False
        self.lent_bytes = 0
        self.num_held = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    # -- who holds it

    def hold(self) -> None:
        self.num_held += 1
        self._is_free.clear()

    def release(self) -> None:
        self.num_held -= 1
        self.used_at = time.monotonic()
        if not self.num_held:
            self._is_free.set()

    def cut_short(self) -> None:
        """Whoever waits for it to be free waits no longer."""
        self._is_free.set()

    async def until_free(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._is_free.wait(), timeout_s)
        except TimeoutError:
            return

    # -- how it is

    @property
    def ready(self) -> ReadyModel | None:
        return self.outcome.result() if self._ended_well() else None

    @property
    def error(self) -> AppError | None:
        if not self.outcome.done() or self._ended_well():
            return None
        found = None if self.outcome.cancelled() else self.outcome.exception()
        return found if isinstance(found, AppError) else ending()

    @property
    def is_answering(self) -> bool:
        return self.ready is not None and self.ready.child.is_alive

    @property
    def is_loading(self) -> bool:
        return not self.outcome.done()

    def _ended_well(self) -> bool:
        return self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None

    def status(self) -> ModelStatus:
        ready, error = self.ready, self.error
        if error is not None:
            return ModelStatus(state="failed", model=self.model_id, error=error.text)
        if ready is None:
            return ModelStatus(
                state="loading",
                model=self.model_id,
                stage=self.stage,
                fraction=self.fraction,
                seconds_left=self._seconds_left(),
            )
        if not ready.child.is_alive:
            gone = "The engine process ended. A new one is being started."
            return ModelStatus(state="failed", model=self.model_id, error=gone)
        return ModelStatus(state="ready", model=self.model_id, max_model_len=ready.info.max_model_len)

    def _seconds_left(self) -> float | None:
        """As the last load of it went; else as this one goes since its first steps, which tell nothing of the rest."""
        if not self.started_at:
            return None
        now = time.monotonic()
        if self.expected_s is not None and now - self.started_at < self.expected_s:
            return self.expected_s - (now - self.started_at)
        since, first_share = self._told_since or (now, 1.0)
        done = (self.fraction or 0.0) - first_share
        return (now - since) * (1 - first_share - done) / done if done >= _TOLD_FROM else None

    # -- what its load says

    def begin_load(self) -> None:
        self.started_at, self._told_since = time.monotonic(), None

    def show_load(self, stage: str, fraction: float) -> None:
        """fraction  of the whole load of its engine"""
        self.show(stage, fraction)
        if self._told_since is None and fraction >= _TOLD_FROM:
            self._told_since = (time.monotonic(), fraction)

    def show(self, stage: str, fraction: float | None) -> None:
        """Called from the fetching thread and from the event loop; two plain stores, so no lock."""
        self.stage, self.fraction = stage, fraction

    def show_or_stop(self, stage: str, fraction: float | None) -> None:
        """For a fetch: raising here is what ends it."""
        if self.is_leaving:
            raise Stopped
        self.show(stage, fraction)


def ending() -> AppError:
    return AppError(503, "shutting_down", "Fireside is ending.")
