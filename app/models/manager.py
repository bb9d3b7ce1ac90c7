"""ModelManager: which model a name means, who may have it, and how all of them are: the house's face to API and page.

How models come into memory and leave it is in `memory`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from app.background import in_daemon_thread
from app.errors import AppError, from_engine_error
from app.models.catalog import CatalogEntry, guess
from app.models.memory.resident import Engine, ReadyModel, Resident, Shelf, StartEngine, ending
from app.models.memory.residents import LOOK_EVERY_S, Residents
from app.models.memory.room import Holding, Needs, needed_bytes
from app.models.status import ModelCard, ModelStatus, total_of
from app.settings import Settings
from engine.errors import EngineError
from engine.types import EngineStats, MemoryReport

RETRY_PAUSE_S = 10.0  # after a failed load, so that a crowd of requests does not load one broken model in a loop


class ModelManager:
    """Implements `app.chat.types.ModelSource` and `app.api.models.Shelf`. Lives on one event loop.

    start_engine  EngineClient.start, or a scripted one in tests
    needs         bytes that a model will need, from its folder
    text_notes    what is odd about the text side of a model's folder, in words; said once it is loaded
    """

    def __init__(
        self,
        settings: Settings,
        shelf: Shelf,
        start_engine: StartEngine,
        *,
        text_notes: Callable[[Path], Sequence[str]] = lambda folder: (),
        needs: Needs = needed_bytes,
        retry_pause_s: float = RETRY_PAUSE_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._retry_pause_s = retry_pause_s
        self._residents = Residents(settings, shelf, start_engine, text_notes, look_every_s, self.lease, needs)
        self._names: dict[str, str] = {}  # of what was chosen in this run, by id
        self._created = int(time.time())

    # -- what the owner asks

    def check(self, name: str) -> None:
        """Raises AppError 404 with what there is, where no model can go by this name. Asks no network."""
        self._shelf.resolve(name)

    def load(self, name: str) -> str:
        """Begin to bring this model in hand, fetched first where needed. Returns its id at once.

        Another one chosen before that still loads is given up, once this one is here and can be loaded. A load that
        fails leaves the model before it in hand.
        """
        if self.is_closed:
            raise ending()
        model_id = self._id_of(name)
        self._names[model_id] = name
        self._residents.choose(name, model_id)
        return model_id

    async def unload(self, name: str) -> None:
        """Let go of a model or of its load; returns when its memory is free. Answers under way end with an error."""
        resident = self._find(name)
        if resident is not None:
            await asyncio.shield(self._residents.let_go(resident))

    @property
    def is_closed(self) -> bool:
        """Fireside is ending."""
        return self._residents.is_closed

    async def close(self) -> None:
        """End every load and every child. Whoever waits gets an error. Twice is the same as once."""
        await self._residents.close()

    def follow(self, settings: Settings) -> None:
        """These hold from now on, and for loads to come; what is loaded stays as it is."""
        self._settings = settings
        self._residents.follow(settings)

    # -- what requests ask

    @asynccontextmanager
    async def lease(self, model: str) -> AsyncIterator[ReadyModel]:
        """The model, loaded where it is not yet, for as long as an answer takes: no other takes its place meanwhile,
        unless it has to wait too long.

        Raises AppError: 404 model_not_found, model_not_loaded, model_not_downloaded; 503 with why the load failed
        """
        resident = await self._held(model)
        try:
            assert resident.ready is not None
            yield resident.ready
        finally:
            resident.release()

    async def acquire(self, model: str) -> ReadyModel:
        """As `lease`, for whoever only looks."""
        async with self.lease(model) as ready:
            return ready

    async def _held(self, model: str) -> Resident:
        while True:
            resident = self._wanted(model)
            resident.hold()
            is_answering = False
            try:
                await asyncio.wait({resident.outcome})
                if resident.is_leaving:
                    continue  # given up for another one: look again
                if resident.error is not None and not model and self._residents.in_hand != resident.model_id:
                    continue  # the one before it is in hand again
                if resident.error is not None:  # one object for many callers: their frames must not pile up
                    raise resident.error.with_traceback(None)
                is_answering = resident.is_answering
                if is_answering:
                    return resident
                await asyncio.wait({resident.watch})  # it begins a new one
            finally:
                if not is_answering:
                    resident.release()

    def _wanted(self, model: str) -> Resident:
        """The stay of the model that a request means, begun where there is none; a failed one again after the pause."""
        if self.is_closed:
            raise ending()
        model_id = self._meant(model)
        resident = self._residents.get(model_id)
        if resident is None:
            return self._residents.begin(self._names.get(model_id, model), model_id, is_chosen=False)
        if resident.error is not None and time.monotonic() - resident.failed_at >= self._retry_pause_s:
            return self._residents.begin(resident.name, model_id, is_chosen=resident.is_chosen)
        return resident

    def _meant(self, model: str) -> str:
        """The id that a request's `model` leads to. Raises AppError where there is none, or it may not be loaded."""
        if model in self._residents:
            return model
        if not model:
            return self._current_or_refused()
        entry = self._shelf.find(model)  # only the catalogue is told about, never the disk
        if entry is not None and entry.id in self._residents:
            return entry.id
        known = self._shelf.entries()
        if entry is None or (entry.id not in [each.id for each in known] and entry.id not in self._names):
            if self._settings.model_fallback:
                return self._current_or_refused()
            raise AppError(
                404,
                "model_not_found",
                f"The model `{model[:200]}` does not exist here.",
                hint=f"{self._in_hand()} {guess(model, known)}GET /v1/models lists all.",
                param="model",
            )
        if not self._settings.load_on_request:
            raise AppError(  # not 409: the openai client would try again by itself
                404,
                "model_not_loaded",
                f"`{entry.id}` is not loaded. {self._in_hand()}",
                hint=f"Load it (`python launch.py models load {entry.id}`, POST /models/load), or start Fireside "
                "without --no-load-on-request.",
                param="model",
            )
        return entry.id

    def _current_or_refused(self) -> str:
        in_hand = self._residents.in_hand
        if in_hand in self._residents or (in_hand and self._settings.load_on_request):
            return in_hand
        raise _no_model()

    def _in_hand(self) -> str:
        in_hand = self._residents.in_hand
        return f"`{in_hand}` is in hand." if in_hand in self._residents else "No model is in hand."

    # -- how it all is

    def holds(self, name: str) -> bool:
        """Whether `name` means a model that is loaded or loading; "" the one in hand."""
        resident = self._find(name)
        return resident is not None and (resident.is_loading or resident.is_answering)

    def status(self, name: str = "") -> ModelStatus:
        """Of the model that `name` means; "" the one in hand."""
        resident = self._find(name)
        return ModelStatus() if resident is None else resident.status()

    def health(self) -> ModelStatus:
        return self.status()

    def statuses(self) -> list[ModelStatus]:
        """Of every model that is loaded, loading or failed; the one in hand first."""
        in_hand = self._residents.in_hand
        return [each.status() for each in sorted(self._residents.all, key=lambda each: each.model_id != in_hand)]

    def stats(self) -> EngineStats | None:
        """Of all models together; None where none can answer."""
        children = [each.ready.child for each in self._residents.all if each.ready and each.is_answering]
        return total_of([child.stats for child in children]) if children else None

    def ready(self) -> ReadyModel | None:
        """The model in hand, where it can answer."""
        resident = self._find("")
        return resident.ready if resident and resident.is_answering else None

    def holdings(self) -> list[Holding]:
        """Of memory, what each loaded model holds."""
        return self._residents.holdings()

    def memory(self) -> MemoryReport | None:
        """Of the model in hand; None where none is ready."""
        ready = self.ready()
        return None if ready is None else ready.child.memory

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        """Have its KV cache smaller by so much than it was made; 0 takes all of it again. Raises AppError."""
        try:
            return await self._child_or_refused().resize_kv(give_back_bytes)
        except EngineError as error:
            raise from_engine_error(error) from error

    async def log_lines(self, name: str, num_lines: int) -> tuple[str, list[str]]:
        """The id of a model ("" the one in hand), and the last lines of its engine's log. Raises AppError."""
        model_id = self._shelf.resolve(name).id if name else self._residents.in_hand
        return model_id, await in_daemon_thread(lambda: self._residents.logs.tail(model_id, num_lines))

    def cards(self) -> list[ModelCard]:
        """The catalogue, and the models in memory where they are no part of it."""
        entries = {entry.id: entry for entry in self._shelf.entries()}
        for resident in self._residents.all:
            entries.setdefault(resident.model_id, CatalogEntry(id=resident.model_id))
        return [self._card(entry) for entry in entries.values()]

    def _card(self, entry: CatalogEntry) -> ModelCard:
        resident = self._residents.get(entry.id)
        now = ModelStatus() if resident is None else resident.status()
        ready = None if resident is None else resident.ready
        return ModelCard(
            id=entry.id,
            created=self._created,
            state=now.on_card,
            max_model_len=now.max_model_len,
            context_length=ready.info.context_length if ready else entry.context_length,
            aliases=entry.aliases,
            format=(ready.info.quantization or "dense") if ready else entry.format,
            size_bytes=entry.size_bytes,
            thinks=entry.reasoning is not None,
            architecture=ready.info.architecture if ready else None,
            error=now.error,
        )

    def _child_or_refused(self) -> Engine:
        ready = self.ready()
        if ready is None:
            raise _no_model()
        return ready.child

    def _find(self, name: str) -> Resident | None:
        return self._residents.get(self._id_of(name) if name else self._residents.in_hand)

    def _id_of(self, name: str) -> str:
        if name in self._residents:
            return name
        entry = self._shelf.find(name)
        return name if entry is None else entry.id


def _no_model() -> AppError:
    return AppError(
        503, "no_model", "No model is loaded.", hint="POST /models/load loads one; GET /v1/models lists all."
    )
