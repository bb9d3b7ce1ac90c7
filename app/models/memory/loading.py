"""From a name to a running engine: fetched, started, begun again where it died meanwhile. What goes wrong, in words."""

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from app.background import in_daemon_thread
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.memory.conduct import Conduct
from app.models.memory.engine_logs import EngineLogs
from app.models.memory.load_times import LoadTimes
from app.models.memory.resident import Engine, Resident, Shelf, StartEngine, Stopped, ending
from app.settings import Settings
from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError

_log = logging.getLogger("fireside.models")


class Loader:
    """Keeps each model's conduct and what its engines write."""

    def __init__(self, settings: Settings, shelf: Shelf, start_engine: StartEngine) -> None:
        self._settings = settings
        self._shelf = shelf
        self._start_engine = start_engine
        self._load_times = LoadTimes(settings.home / "load-times.json")
        self._conducts: dict[str, Conduct] = {}
        self.logs = EngineLogs(settings.home / "logs")

    def conduct(self, model_id: str) -> Conduct:
        return self._conducts.setdefault(model_id, Conduct(model_id))

    async def fetched(self, resident: Resident, entry: CatalogEntry) -> Path:
        """Its folder. What is no file of ours yet is fetched if it was chosen; others may load meanwhile."""
        if not await in_daemon_thread(lambda: self._shelf.is_whole(entry)):
            if not resident.is_chosen and not entry.is_embedded:
                raise _not_downloaded(entry)
            resident.place.step_aside(True)
        resident.is_fetching = True
        folder = await in_daemon_thread(lambda: self._shelf.ensure(entry, resident.show_or_stop))
        resident.is_fetching = False
        resident.place.step_aside(False)
        return folder

    async def started(self, resident: Resident, entry: CatalogEntry, folder: Path) -> Engine:
        """Its engine. One that dies while it loads is begun again, with pauses, as one that dies later."""
        model_id, conduct = resident.model_id, self.conduct(resident.model_id)
        log_path = await in_daemon_thread(lambda: self.logs.begin(model_id))
        resident.expected_s = await in_daemon_thread(lambda: self._load_times.last_s(model_id))
        while True:
            resident.show("Waiting before the next try", None)
            await asyncio.sleep(conduct.pause_s)
            resident.show("Starting the engine", None)
            resident.begin_load()
            try:
                child = await self._start_engine(
                    self.config(entry, folder),
                    on_loading=resident.show_load,
                    log_path=log_path,
                    silence_s=self._settings.load_timeout,
                )
            except EngineDied as death:
                conduct.failed(death.message)
                await self.say(model_id, f"died while it loaded: {death.message}")
                conduct.check_model()
                continue
            keep = partial(self._load_times.keep, model_id, time.monotonic() - resident.started_at)
            await in_daemon_thread(keep)
            return child

    async def say(self, model_id: str, what: str) -> None:
        """In the app's log and among the lines of the engine."""
        conduct = self.conduct(model_id)
        then = "It is parked." if conduct.is_parked else f"Beginning again in {conduct.pause_s:.0f} s."
        _log.warning("The engine of %s %s %s", model_id, what, then)
        await in_daemon_thread(lambda: self.logs.note(model_id, f"The engine {what} {then}"))

    def follow(self, settings: Settings) -> None:
        """These hold from the next load on."""
        self._settings = settings

    def config(self, entry: CatalogEntry, folder: Path) -> EngineConfig:
        """What the settings say, and before them the catalogue of this model."""
        settings = self._settings
        return EngineConfig(
            model=str(folder),
            max_model_len=entry.load.get("max_model_len", settings.max_model_len),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            gpu_memory_gb=settings.gpu_memory_gb,
            kv_gb=settings.kv_gb,
            kv_cache_dtype=entry.load.get("kv_cache_dtype", settings.kv_cache_dtype),
            keep_packed=settings.keep_packed,
            quantize_lm_head=settings.quantize_lm_head,
            cache_dir=str(settings.home / "cache"),
        )


def load_error(resident: Resident, error: Exception) -> AppError:
    """Any failure of a load, as what a waiting request is told; of a chosen model, that it is not there now."""
    model_id = resident.model_id
    if isinstance(error, Stopped):
        return ending()
    if isinstance(error, AppError):
        status = 503 if resident.is_chosen else error.status
        return AppError(status, error.code, error.message, hint=error.hint, param=error.param)
    if isinstance(error, EngineError):
        return AppError(503, error.code, f"`{model_id}` could not be loaded: {error.message}")
    _log.error("loading %s failed", model_id, exc_info=error)
    return AppError(503, "load_failed", f"`{model_id}` could not be loaded: {type(error).__name__}: {error}")


def _not_downloaded(entry: CatalogEntry) -> AppError:
    return AppError(
        404,
        "model_not_downloaded",
        f"`{entry.id}` is in the catalogue, but not on this machine.",
        hint=f"`python launch.py models pull {entry.id}` fetches it; POST /models/load fetches and loads it.",
        param="model",
    )
