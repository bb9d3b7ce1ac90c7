"""A scripted shelf and scripted engines for the manager: children that live, die and hang as a test says."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app import settings
from app.chat.types import LoadedModel
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.making import Progress
from app.models.manager import ModelManager
from app.models.memory.room import Needs
from engine.config import EngineConfig
from engine.errors import BadRequest, EngineClosed, EngineDied, EngineError
from engine.types import (
    ORDINARY,
    EngineStats,
    FinishReason,
    MemoryReport,
    ModelInfo,
    SamplingParams,
    Standing,
    TokenEvent,
)
from tests.fakes import memory_report, model_info

GREEDY = SamplingParams(temperature=0.0)


class Child:
    """An engine that lives, dies and is closed. A request gets one token when `may_begin` is set, as it is at first,
    and its end when `may_finish` is.
    """

    pid = None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info: ModelInfo = model_info()
        self.memory: MemoryReport = memory_report("The context was made smaller.")
        self.stats = EngineStats(num_steps=7)
        self.may_begin, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_begin.set()
        self.most_lent, self.lent = 100, list[int]()
        self.asked: list[tuple[int, ...]] = []
        self.death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.is_closed = False

    @property
    def is_alive(self) -> bool:
        return not self.death.done()

    def die(self, why: str = "killed by SIGKILL", kind: type[EngineDied] = EngineDied) -> None:
        if self.is_alive:
            self.death.set_result(kind(why))

    def put_on_card(self, report: MemoryReport) -> None:
        self.info, self.memory, self.most_lent = (
            replace(self.info, device="NVIDIA H200", device_kind="cuda"),
            report,
            report.kv_bytes,
        )

    def give_up(self, why: str) -> None:
        self.die(why)

    async def until_ended(self) -> EngineError:
        return await asyncio.shield(self.death)

    async def submit(
        self, request_id: str, ids: tuple[int, ...], params: SamplingParams, standing: Standing = ORDINARY
    ) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(ids)
        await self._until(self.may_begin)
        yield TokenEvent(request_id, 1)
        await self._until(self.may_finish)
        yield TokenEvent(request_id, 2, FinishReason.STOP)

    async def _until(self, event: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait({waiting, self.death}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self.is_alive:
            raise self.death.result()

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        self.lent.append(give_back_bytes)
        if give_back_bytes > self.most_lent:
            raise BadRequest(f"At most {self.most_lent} bytes.")
        return replace(self.memory, kv_bytes=100 - give_back_bytes)

    async def close(self) -> None:
        self.is_closed = True
        if self.is_alive:
            self.death.set_result(EngineClosed("closed"))


@dataclass
class Engines:
    """start_engine: keeps every child; waits for `gate`; raises the next of `errors`.

    needed   bytes, by model
    on_card  what its children report there; None puts them on a CPU
    begins_at_once, finishes_at_once  its children's answers wait for nothing
    say      what the load under way says of itself
    silence_s  that the last load was allowed
    """

    say: Callable[[str, float], None] = field(init=False)
    children: list[Child] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_cancelled: int = 0
    silence_s: float = 0.0
    needed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("one", "two", "three"), 10**9))
    on_card: MemoryReport | None = None
    begins_at_once: bool = True
    finishes_at_once: bool = False

    @staticmethod
    def stats_of_a_hung_one(last_step_age_s: float) -> EngineStats:
        return EngineStats(last_step_age_s=last_step_age_s)

    async def __call__(
        self, config: EngineConfig, *, on_loading: Callable[[str, float], None], log_path: str | None, silence_s: float
    ) -> Child:
        self.say, self.silence_s = on_loading, silence_s
        on_loading("reading weights", 0.25)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        self.children.append(Child(config))
        if self.on_card is not None:
            self.children[-1].put_on_card(self.on_card)
        if not self.begins_at_once:
            self.children[-1].may_begin.clear()
        if self.finishes_at_once:
            self.children[-1].may_finish.set()
        return self.children[-1]


class ThreeModels:
    """A shelf with `one` (also called `uno`), `two` and `three`. A fetch goes on until `may_end` is set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_fetches = 0
        self.absent: set[str] = set()
        self._entries = {
            "one": CatalogEntry(id="one", context_length=2000, sampling={"temperature": 0.2}),
            "two": CatalogEntry(id="two", load={"max_model_len": 512, "kv_cache_dtype": "int8"}),
            "three": CatalogEntry(id="three"),
        }

    def entries(self) -> list[CatalogEntry]:
        return list(self._entries.values())

    def find(self, name: str) -> CatalogEntry | None:
        return self._entries.get({"uno": "one"}.get(name, name))

    def resolve(self, name: str) -> CatalogEntry:
        found = self.find(name)
        if found is None:
            raise AppError(404, "model_not_found", f"no {name}")
        return found

    def is_whole(self, entry: CatalogEntry) -> bool:
        return entry.id not in self.absent

    def ensure(self, entry: CatalogEntry, on_progress: Progress) -> Path:
        self.absent.discard(entry.id)
        self.num_fetches += 1
        while not self.may_end.wait(0.01):
            on_progress("Fetching", 0.5)
        return self.folder / entry.id


@asynccontextmanager
async def managed(
    home: Path,
    shelf: ThreeModels,
    engines: Engines,
    needs: Needs | None = None,
    retry_pause_s: float = 0.2,
    **chosen: Any,
) -> AsyncIterator[ModelManager]:
    """One model at a time, unless `max_models` says otherwise."""
    made = ModelManager(
        settings.load({"home": home, "max_models": 1} | chosen, {}),
        shelf,
        engines,
        text_notes=lambda folder: [f"{folder.name} has no template."],
        needs=needs or (lambda folder, config, kind: engines.needed[folder.name]),
        retry_pause_s=retry_pause_s,
        look_every_s=0.01,
    )
    try:
        yield made
    finally:
        await made.close()


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not claim():
            await asyncio.sleep(0.005)


async def finish(model: LoadedModel, prompt: tuple[int, ...] = (1, 2)) -> FinishReason | None:
    """The end of one answer."""
    events = [event async for event in model.engine.submit("r", prompt, GREEDY)]
    return events[-1].finish_reason


async def ask(manager: ModelManager, name: str, prompt: tuple[int, ...] = (1, 2)) -> Any:
    """One whole turn: how it ended, or its error."""
    try:
        async with manager.lease(name) as model:
            return await finish(model, prompt)
    except (AppError, EngineDied) as error:
        return error
