"""Residents: how models come into memory, stay beside each other, are watched, and leave it.

    begun -> in line -> fetched -> room is made -> loading -> ready -> let go
      ^                                              |          |
      +----- after a pause, not for ever ------------+-- died --+

One load at a time, in the order of asking. Models stay beside each other where they fit; else the one that was used
longest ago goes, once its answers have ended, and its memory is seen to be free before the next one takes it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

from app.background import in_daemon_thread
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.memory.line import Line
from app.models.memory.loading import Loader, load_error
from app.models.memory.page_cache import warm
from app.models.memory.resident import Engine, ReadyModel, Resident, Shelf, StartEngine, Stopped
from app.models.memory.room import Holding, Needs, Room, kind_here, memory_of
from app.models.memory.watched import WatchedEngine
from app.settings import Settings
from engine.errors import EngineClosed, EngineError

_log = logging.getLogger("fireside.models")

STOP_GRACE_S = 0.7  # a fetch looks at the stop flag several times a second
LOOK_EVERY_S = 1.0
_MOST_FAILURES = 8  # told until the next load of that model
_CPU_STEP_TIMEOUT_S, _CARD_STEP_TIMEOUT_S = 600.0, 120.0  # on a CPU a large model's prompt takes minutes


class Residents:
    """
    in_hand  id of the model that a request without a name means: the last one chosen, or what took its place; where
             its load fails or is given up, the one before it again
    """

    def __init__(
        self,
        settings: Settings,
        shelf: Shelf,
        start_engine: StartEngine,
        text_notes: Callable[[Path], Sequence[str]],
        look_every_s: float,
        lease: Callable[[str], AbstractAsyncContextManager[ReadyModel]],
        needs: Needs,
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._loader = Loader(settings, shelf, start_engine)
        self._text_notes = text_notes
        self._look_every_s = look_every_s
        self._lease = lease
        self._needs = needs
        self._room = Room(settings.gpu_memory_utilization)
        self._line = Line()
        self._by_id: dict[str, Resident] = {}
        self._endings: dict[asyncio.Task[None], Resident] = {}
        self._looking: asyncio.Task[None] | None = None
        self.logs = self._loader.logs
        self.in_hand = ""
        self.is_closed = False

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._by_id

    @property
    def all(self) -> list[Resident]:
        return [*self._by_id.values()]

    def get(self, model_id: str) -> Resident | None:
        return self._by_id.get(model_id)

    def follow(self, settings: Settings) -> None:
        """These hold from now on; what is loaded stays as it is."""
        self._settings, self._room = settings, Room(settings.gpu_memory_utilization)
        self._loader.follow(settings)

    def holdings(self) -> list[Holding]:
        """What each model in memory holds of it."""
        return [each.ready.holding for each in self.all if each.ready and each.is_answering]

    # -- coming

    def choose(self, name: str, model_id: str) -> None:
        """By hand: whatever it did before is forgiven. Another one chosen before that still loads is given up, as soon
        as it is known that this one can be loaded.
        """
        self._loader.conduct(model_id).pardon()
        resident = self._by_id.get(model_id)
        if resident is None or not (resident.is_loading or resident.is_answering):
            resident = self.begin(name, model_id, is_chosen=True)
        resident.is_chosen = True
        if self.in_hand != model_id:
            self.in_hand, resident.displaced = model_id, self.in_hand
        if resident.is_proven:
            self._give_up_others(resident)

    def begin(self, name: str, model_id: str, *, is_chosen: bool) -> Resident:
        """A new stay; what is left of the one before it is cleared away first."""
        remains = self._by_id.get(model_id)
        resident = Resident(name, model_id, self._line.join(), is_chosen=is_chosen)
        resident.outcome = asyncio.create_task(self._bring(resident, remains), name=f"load {name}")
        resident.outcome.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._by_id[model_id] = resident
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_after_all(), name="look after models")
        return resident

    async def _bring(self, resident: Resident, remains: Resident | None) -> ReadyModel:
        try:
            if remains is not None:
                await _end(remains)
            self._loader.conduct(resident.model_id).check_model()
            entry = self._shelf.resolve(resident.name)
            folder = await self._loader.fetched(resident, entry)
            await self._prove(resident, entry, folder)
            warming = asyncio.create_task(in_daemon_thread(lambda: warm(folder)))
            warming.add_done_callback(lambda task: None if task.cancelled() else task.exception())
            await resident.place.turn()
            await self._make_room(resident, entry, folder)
            return await self._ready(resident, entry, folder)
        except Exception as error:
            raise self._failed(resident, error) from error
        finally:
            resident.place.leave()

    async def _prove(self, resident: Resident, entry: CatalogEntry, folder: Path) -> None:
        """Raises AppError for what can never be loaded, while another load could still be given up for it."""
        if any(other.is_loading and other.is_chosen for other in self.all if other is not resident):
            await in_daemon_thread(lambda: self._needs(folder, self._loader.config(entry, folder), kind_here()))
        resident.is_proven = True
        self._give_up_others(resident)

    def _give_up_others(self, resident: Resident) -> None:
        """For the one that was chosen last: what was chosen before it and still loads."""
        if not resident.is_chosen or self.in_hand != resident.model_id:
            return
        for other in self.all:
            if other.is_loading and other.is_chosen and other is not resident:
                resident.gave_up = other if other.model_id == resident.displaced else resident.gave_up
                self.let_go(other)

    async def _ready(self, resident: Resident, entry: CatalogEntry, folder: Path) -> ReadyModel:
        child = await self._loader.started(resident, entry, folder)
        for note in (*child.memory.notes, *await in_daemon_thread(lambda: self._text_notes(folder))):
            _log.warning("%s: %s", entry.id, note)
        self.in_hand = self.in_hand or entry.id
        resident.used_at = time.monotonic()
        resident.watch = asyncio.create_task(self._watch(resident, child), name=f"watch {entry.id}")
        return ReadyModel(
            id=entry.id,
            folder=folder,
            sampling=entry.sampling,
            tool_format=entry.tool_format,
            reasoning=entry.reasoning,
            engine=WatchedEngine(child, self._loader.conduct(entry.id), lambda: self._lease(entry.id)),
            child=child,
            made_kv_bytes=child.memory.kv_bytes,
        )

    def _failed(self, resident: Resident, error: Exception) -> AppError:
        resident.failed_at = time.monotonic()
        told = load_error(resident, error)
        if told.status == 404:  # a request named it in vain: it leaves no trace
            self._forget(resident)
        if not isinstance(error, Stopped | AppError):
            self._loader.conduct(resident.model_id).failed(told.message)
        if told.status != 404 and not isinstance(error, Stopped):
            _log.warning("%s was not loaded. %s", resident.model_id, told.text)
        was_in_hand = self.in_hand == resident.model_id
        self._hand_back(resident)
        if resident.gave_up is not None and was_in_hand and not isinstance(error, Stopped):
            self.choose(resident.gave_up.name, resident.gave_up.model_id)
        self._forget_old_failures()
        return told

    def _hand_back(self, resident: Resident) -> None:
        """To the model whose place it took, if that one can answer or its next request brings it back."""
        for other in self.all:
            if other.displaced == resident.model_id:
                other.displaced = resident.displaced if resident.displaced != other.model_id else ""
        before = self._by_id.get(resident.displaced)
        can_come = before.error is None if before else self._settings.load_on_request
        if self.in_hand == resident.model_id and resident.displaced and can_come:
            self.in_hand = resident.displaced

    def _forget_old_failures(self) -> None:
        failed = [each for each in self.all if each.error is not None and each.model_id != self.in_hand]
        for each in sorted(failed, key=lambda each: each.failed_at)[:-_MOST_FAILURES]:
            self._forget(each)

    # -- room

    async def _make_room(self, resident: Resident, entry: CatalogEntry, folder: Path) -> None:
        if self._endings:  # what was let go of by hand
            await asyncio.wait(self._endings)
        while (victim := await self._victim(resident, entry, folder)) is not None:
            if victim.model_id == self.in_hand:
                self.in_hand, resident.displaced = resident.model_id, victim.model_id
            if victim.num_held:
                resident.show(f"Waiting for {victim.num_held} answers of {victim.model_id} to end", None)
            await asyncio.shield(self.let_go(victim, self._settings.drain_timeout))

    async def _victim(self, resident: Resident, entry: CatalogEntry, folder: Path) -> Resident | None:
        """Who has to go so that it finds room; None where it does, or where nobody is left to go.

        Raises AppError for a model that can never be loaded: nobody goes for it.
        """
        others = [other for other in self.all if other is not resident and other.is_answering]
        if not others:
            return None
        holdings = [other.ready.holding for other in others if other.ready]
        config = self._loader.config(entry, folder)
        needed = await in_daemon_thread(lambda: self._needs(folder, config, holdings[0].kind))
        if len(others) < self._settings.max_models and await self._fits(needed, others, holdings):
            return None
        return min(others, key=lambda other: (other.num_held > 0, other.used_at))

    async def _fits(self, needed: int, others: Sequence[Resident], holdings: Sequence[Holding]) -> bool:
        """Whether it finds room beside the others; those on a card may give up to half of their cache for it."""
        shortage = await in_daemon_thread(lambda: self._room.shortage(needed, holdings))
        if shortage > sum(held.could_lend for held in holdings):
            return False
        for other, held in zip(others, holdings, strict=True):
            lent = min(held.could_lend, shortage)
            if lent > 0 and not await _resized(other, other.lent_bytes + lent):
                return False
            shortage -= max(lent, 0)
        return True

    # -- being watched

    async def _watch(self, resident: Resident, child: Engine) -> None:
        """See its engine die, and begin again."""
        death = await child.until_ended()
        if resident.is_leaving or isinstance(death, EngineClosed):
            return
        self._loader.conduct(resident.model_id).failed(death.message)
        if self._by_id.get(resident.model_id) is resident:
            self.begin(resident.name, resident.model_id, is_chosen=resident.is_chosen)
        await self._loader.say(resident.model_id, f"died: {death.message}")

    async def _look_after_all(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            for resident in self.all:
                try:
                    if resident.is_answering:
                        self._look_after(resident)
                        await self._give_back(resident)
                        await in_daemon_thread(partial(self._loader.logs.turn_over, resident.model_id))
                except Exception:  # one model's trouble leaves nobody else unwatched
                    _log.exception("looking after %s failed", resident.model_id)

    async def _give_back(self, resident: Resident) -> None:
        """What it lent to others, once it is alone."""
        is_alone = all(other is resident or other.error is not None for other in self.all)
        if resident.lent_bytes and is_alone and not self._endings:
            await _resized(resident, 0)

    def _look_after(self, resident: Resident) -> None:
        assert resident.ready is not None
        child, idle_s = resident.ready.child, time.monotonic() - resident.used_at
        timeout_s = self._settings.step_timeout or (
            _CPU_STEP_TIMEOUT_S if child.info.device_kind == "cpu" else _CARD_STEP_TIMEOUT_S
        )
        if child.stats.last_step_age_s > timeout_s:
            child.give_up(f"The engine hung: no step ended for {timeout_s:.0f} s (--step-timeout). It was ended.")
        elif self._settings.idle_timeout and not resident.num_held and idle_s >= self._settings.idle_timeout:
            _log.info("%s: not used for %.0f s, so its memory is given back.", resident.model_id, idle_s)
            self.let_go(resident)

    # -- leaving

    def let_go(self, resident: Resident, drain_s: float = 0.0) -> asyncio.Task[None]:
        """It takes no more requests from now on; the task is done when it is gone, and its memory with it.

        drain_s  so long its answers may go on
        """
        resident.is_leaving = True
        self._forget(resident)
        if resident.is_loading:
            self._hand_back(resident)
        task = asyncio.create_task(self._part(resident, drain_s), name=f"unload {resident.name}")
        self._endings[task] = resident
        task.add_done_callback(self._endings.pop)
        return task

    async def _part(self, resident: Resident, drain_s: float) -> None:
        if resident.num_held and drain_s:
            await resident.until_free(drain_s)
        held = resident.ready.holding if resident.is_answering and resident.ready else None
        before = await in_daemon_thread(lambda: memory_of(held.kind)) if held else None
        await _end(resident)
        if held is not None and before is not None:
            await self._room.until_back(held, before, lambda: not self.is_closed)

    def _forget(self, resident: Resident) -> None:
        if self._by_id.get(resident.model_id) is resident:
            del self._by_id[resident.model_id]

    async def close(self) -> None:
        self.is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        for resident in self.all:
            self.let_go(resident)
        for resident in self._endings.values():
            resident.cut_short()
        if self._endings:
            await asyncio.wait(self._endings)


async def _resized(resident: Resident, lent_bytes: int) -> bool:
    """Have it lend so much of its cache in all. False where it does not, as its requests need it."""
    assert resident.ready is not None
    try:
        await resident.ready.child.resize_kv(lent_bytes)
    except EngineError as refusal:
        _log.info("%s lends no more of its cache: %s", resident.model_id, refusal.message)
        return False
    resident.lent_bytes = lent_bytes
    return True


async def _end(resident: Resident) -> None:
    """Stop a load that runs, close the engine of one that is done. Raises nothing: it is the last word."""
    resident.is_leaving = True
    if resident.is_fetching:  # its thread ends by itself at the next look at the flag, and takes its processes along
        await asyncio.wait({resident.outcome}, timeout=STOP_GRACE_S)
    if not resident.outcome.done():
        resident.outcome.cancel()
        await asyncio.wait({resident.outcome})
    if resident.ready is not None:
        with suppress(EngineError, OSError):
            await resident.ready.child.close()
        await asyncio.wait({resident.watch})
