"""ModelManager: which model is in hand, and the one owner of its engine child.

    empty -> loading (fetch, convert, load) -> ready
                     \\-> failed -> (load(), or the first request after a pause) -> loading ...

One load at a time is one task; everyone who needs the model waits for that task. A child that died is replaced by the
next request, once, however many ask.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from app.background import in_daemon_thread
from app.chat.types import EngineLike
from app.errors import AppError, from_engine_error
from app.models.catalog import CatalogEntry
from app.models.making import Progress
from app.settings import Settings
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.types import EngineStats, MemoryReport, ModelInfo

_log = logging.getLogger("fireside.models")

RETRY_PAUSE_S = 10.0  # after a failed load, so that a crowd of requests does not load one broken model in a loop
STOP_GRACE_S = 0.7  # a fetch looks at the stop flag several times a second

_MOST_LISTED = 30

State = Literal["empty", "loading", "ready", "failed"]


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
    async def close(self) -> None: ...
    async def resize_kv(self, give_back_bytes: int) -> MemoryReport: ...


class StartEngine(Protocol):
    """`EngineClient.start`: returns when the model can answer; cancelling it ends the child. Raises EngineError."""

    def __call__(self, config: EngineConfig, *, on_loading: Callable[[str, float], None]) -> Awaitable[Engine]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model that can answer (`app.chat.types.LoadedModel`)."""

    id: str
    folder: Path
    sampling: Mapping[str, float | int]
    tool_format: str | None
    reasoning: tuple[str, str] | None
    engine: Engine

    @property
    def info(self) -> ModelInfo:
        return self.engine.info


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A snapshot for the page, /health and the terminal.

    model          id in hand or being loaded; "" where there is none
    stage          what a load does now, for people
    fraction       0 to 1 of that stage; None where it cannot be known
    error          why there is no model, with the next step
    max_model_len  tokens that a request may hold; None until the model is ready
    """

    state: State = "empty"
    model: str = ""
    stage: str = ""
    fraction: float | None = None
    error: str = ""
    max_model_len: int | None = None

    @property
    def detail(self) -> str:
        """One line for people."""
        if self.error or self.fraction is None:
            return self.error or self.stage
        return f"{self.stage} ({self.fraction:.0%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One line of GET /v1/models.

    format        gptq, awq, ...; None where it is not known
    architecture  known once the model is loaded
    """

    id: str
    created: int
    state: Literal["unloaded", "loading", "loaded", "failed"]
    max_model_len: int | None
    context_length: int | None
    aliases: tuple[str, ...] = ()
    format: str | None = None
    size_bytes: int = 0
    thinks: bool = False
    architecture: str | None = None


class _Stopped(Exception):
    """Thrown into a fetch to end it."""


class _Load:
    """One attempt to bring a model in hand, and what became of it.

    outcome  the task: a ReadyModel, or an AppError
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.model_id = name
        self.stage = "Looking for the model"
        self.fraction: float | None = None
        self.is_fetching = False
        self.is_stopped = False
        self.failed_at = 0.0  # on the monotonic clock
        self.outcome: asyncio.Task[ReadyModel]

    @property
    def ready(self) -> ReadyModel | None:
        return self.outcome.result() if self._ended_well() else None

    @property
    def error(self) -> AppError | None:
        if not self.outcome.done() or self._ended_well():
            return None
        found = None if self.outcome.cancelled() else self.outcome.exception()
        return found if isinstance(found, AppError) else _closed()

    def show(self, stage: str, fraction: float | None) -> None:
        """Called from the fetching thread and from the event loop; two plain stores, so no lock."""
        self.stage, self.fraction = stage, fraction

    def show_or_stop(self, stage: str, fraction: float | None) -> None:
        """For a fetch: raising here is what ends it."""
        if self.is_stopped:
            raise _Stopped
        self.show(stage, fraction)

    def _ended_well(self) -> bool:
        return self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None


class ModelManager:
    """Implements `app.chat.types.ModelSource` and `app.api.models.Shelf`. Lives on one event loop.

    start_engine  EngineClient.start, or a scripted one in tests
    text_notes    what is odd about the text side of a model's folder, in words; said once it is loaded
    """

    def __init__(
        self,
        settings: Settings,
        shelf: Shelf,
        start_engine: StartEngine,
        *,
        text_notes: Callable[[Path], Sequence[str]] = lambda folder: (),
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._start_engine = start_engine
        self._text_notes = text_notes
        self._retry_pause_s = retry_pause_s
        self._load: _Load | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._is_closed = False
        self._created = int(time.time())

    def check(self, name: str) -> None:
        """Raises AppError 404 with what there is, where no model can go by this name. Asks no network."""
        self._shelf.resolve(name)

    def load(self, name: str) -> None:
        """Begin to bring this model in hand; the one in hand goes first. Returns at once: see `status`, `acquire`."""
        if self._is_closed:
            raise _closed()
        previous, load = self._load, _Load(name)
        load.outcome = asyncio.create_task(self._replace(previous, load), name=f"load {name}")
        load.outcome.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._load = load

    @property
    def is_closed(self) -> bool:
        """Fireside is ending."""
        return self._is_closed

    def holds(self, name: str) -> bool:
        """Whether `name` means the model in hand, or the one that is loading; "" does."""
        load = self._load
        if load is None or load.error is not None or (load.ready is not None and not load.ready.engine.is_alive):
            return False
        if name in ("", load.name, load.model_id):
            return True
        entry = self._shelf.find(name)
        return entry is not None and entry.id == load.model_id

    async def unload(self) -> None:
        """Let go of the model in hand or of its load. Whoever waits for it gets an error."""
        load, self._load = self._load, None
        if load is not None:
            self._unloading = asyncio.create_task(_end(load), name=f"unload {load.name}")
            await asyncio.shield(self._unloading)

    async def acquire(self, model: str) -> ReadyModel:
        """The model in hand when it can answer: waits for its load, and starts a new child where the last one died.

        Raises AppError: 404 model_not_found, model_not_loaded; 503 with the reason where the load failed
        """
        while True:
            load = self._in_hand(model)
            await asyncio.wait({load.outcome})
            if load is not self._load:  # replaced meanwhile: look again
                continue
            if load.error is not None:
                raise load.error.with_traceback(None)  # one object for many callers: their frames must not pile up
            if load.ready is not None and load.ready.engine.is_alive:
                return load.ready
            if not self._is_closed:
                _log.warning("The engine of %s ended; starting a new one.", load.model_id)
                self.load(load.name)

    def status(self) -> ModelStatus:
        load = self._load
        if load is None:
            return ModelStatus()
        if load.error is not None:
            return ModelStatus(state="failed", model=load.model_id, error=load.error.text)
        ready = load.ready
        if ready is None:
            return ModelStatus(state="loading", model=load.model_id, stage=load.stage, fraction=load.fraction)
        if not ready.engine.is_alive:
            gone = "The engine process ended. The next message starts a new one."
            return ModelStatus(state="failed", model=ready.id, error=gone)
        return ModelStatus(state="ready", model=ready.id, max_model_len=ready.info.max_model_len)

    def stats(self) -> EngineStats | None:
        ready = self._load.ready if self._load else None
        return ready.engine.stats if ready and ready.engine.is_alive else None

    def memory(self) -> MemoryReport:
        """Of the model in hand. Raises AppError 503 where none is ready."""
        return self._engine_in_hand().memory

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        """Have its KV cache smaller by so much than it was made; 0 takes all of it again. Raises AppError."""
        try:
            return await self._engine_in_hand().resize_kv(give_back_bytes)
        except EngineError as error:
            raise from_engine_error(error) from error

    def _engine_in_hand(self) -> Engine:
        ready = self._load.ready if self._load else None
        if ready is None or not ready.engine.is_alive:
            raise _no_model()
        return ready.engine

    def health(self) -> ModelStatus:
        return self.status()

    def cards(self) -> list[ModelCard]:
        """The catalogue, and the model in hand where it is no part of it."""
        now = self.status()
        entries = {entry.id: entry for entry in self._shelf.entries()}
        if now.model:
            entries.setdefault(now.model, CatalogEntry(id=now.model))
        return [self._card(entry, now) for entry in entries.values()]

    async def close(self) -> None:
        """End the load or the child. Whoever waits gets an error. Twice is the same as once."""
        self._is_closed = True
        if self._load is not None:
            await _end(self._load)
        await self._unloaded()

    async def _unloaded(self) -> None:
        """Return when what was let go of is gone, and its memory with it."""
        if self._unloading is not None:
            await asyncio.wait({self._unloading})

    def _card(self, entry: CatalogEntry, now: ModelStatus) -> ModelCard:
        words: dict[State, Literal["unloaded", "loading", "loaded", "failed"]]
        words = {"empty": "unloaded", "loading": "loading", "ready": "loaded", "failed": "failed"}
        is_in_hand = entry.id == now.model
        ready = self._load.ready if is_in_hand and self._load else None
        return ModelCard(
            id=entry.id,
            created=self._created,
            state=words[now.state] if is_in_hand else "unloaded",
            max_model_len=now.max_model_len if is_in_hand else None,
            context_length=ready.info.context_length if ready else entry.context_length,
            aliases=entry.aliases,
            format=(ready.info.quantization or "dense") if ready else entry.format,
            size_bytes=entry.size_bytes,
            thinks=entry.reasoning is not None,
            architecture=ready.info.architecture if ready else None,
        )

    def _in_hand(self, model: str) -> _Load:
        """The current load, if `model` means it; a failed one is tried again after the pause."""
        load = self._load
        if load is None or self._is_closed:
            raise _closed() if self._is_closed else _no_model()
        if model not in ("", load.name, load.model_id):
            self._check_same(model, load)
        if load.error is not None and time.monotonic() - load.failed_at >= self._retry_pause_s:
            self.load(load.name)
        assert self._load is not None
        return self._load

    def _check_same(self, model: str, load: _Load) -> None:
        """Pass where `model` is another name of the one in hand. Only the catalogue is told about, never the disk."""
        entry = self._shelf.find(model)
        if entry is not None and entry.id == load.model_id:
            return
        known = [known.id for known in self._shelf.entries()]
        if entry is None or entry.id not in known:
            if self._settings.model_fallback:
                return
            raise AppError(
                404,
                "model_not_found",
                f"The model `{model[:200]}` does not exist here.",
                hint=f"`{load.model_id}` is in hand. There are: {_listed(known)}.",
                param="model",
            )
        raise AppError(  # not 409: the openai client would try again by itself
            404,
            "model_not_loaded",
            f"`{entry.id}` is not loaded; `{load.model_id}` is in hand.",
            hint=f"Ask for `{load.model_id}`, or start Fireside with `--model {entry.id}`.",
            param="model",
        )

    async def _replace(self, previous: _Load | None, load: _Load) -> ReadyModel:
        if previous is not None:
            await _end(previous)
        await self._unloaded()
        try:
            return await self._bring(load)
        except Exception as error:
            load.failed_at = time.monotonic()
            raise _load_error(load, error) from error

    async def _bring(self, load: _Load) -> ReadyModel:
        entry = self._shelf.resolve(load.name)
        load.model_id = entry.id
        load.is_fetching = True
        folder = await in_daemon_thread(lambda: self._shelf.ensure(entry, load.show_or_stop))
        load.is_fetching = False
        load.show("Starting the engine", None)
        engine = await self._start_engine(
            _engine_config(self._settings, folder),
            on_loading=load.show,
        )
        for note in (*engine.memory.notes, *await in_daemon_thread(lambda: self._text_notes(folder))):
            _log.warning("%s: %s", entry.id, note)
        return ReadyModel(
            id=entry.id,
            folder=folder,
            sampling=entry.sampling,
            tool_format=entry.tool_format,
            reasoning=entry.reasoning,
            engine=engine,
        )


def _engine_config(settings: Settings, folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        gpu_memory_gb=settings.gpu_memory_gb,
        kv_gb=settings.kv_gb,
        kv_cache_dtype=settings.kv_cache_dtype,
        keep_packed=settings.keep_packed,
        quantize_lm_head=settings.quantize_lm_head,
    )


async def _end(load: _Load) -> None:
    """Stop a load that runs, close the engine of one that is done. Raises nothing: it is the last word."""
    load.is_stopped = True
    if load.is_fetching:  # its thread ends by itself at the next look at the flag, and takes its processes along
        await asyncio.wait({load.outcome}, timeout=STOP_GRACE_S)
    if not load.outcome.done():
        load.outcome.cancel()
        await asyncio.wait({load.outcome})
    if load.ready is not None:
        with suppress(EngineError, OSError):
            await load.ready.engine.close()


def _load_error(load: _Load, error: Exception) -> AppError:
    """Any failure of a load, as what a waiting request is told."""
    if isinstance(error, _Stopped):
        return _closed()
    if isinstance(error, AppError):
        return AppError(503, error.code, error.message, hint=error.hint)
    if isinstance(error, EngineError):
        return AppError(503, error.code, f"`{load.model_id}` could not be loaded: {error.message}")
    _log.error("loading %s failed", load.model_id, exc_info=error)
    return AppError(503, "load_failed", f"`{load.model_id}` could not be loaded: {type(error).__name__}: {error}")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more (GET /v1/models lists all)" if more > 0 else "")


def _no_model() -> AppError:
    return AppError(
        503, "no_model", "No model is loaded.", hint="POST /models/load loads one; GET /v1/models lists all."
    )


def _closed() -> AppError:
    return AppError(503, "shutting_down", "Fireside is ending.")
