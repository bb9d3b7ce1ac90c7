"""Several models, one memory: who goes for whom, in which order, and to whom the hand goes back."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import AppError
from app.models.machine import Memory
from app.models.manager import ModelManager
from app.models.memory.room import needed_bytes
from engine.config import EngineConfig
from engine.errors import BadCheckpoint, EngineClosed
from engine.types import FinishReason
from tests.app.models.scripted import Child, Engines, ThreeModels, ask, managed, until
from tests.checkpoints import tiny_checkpoint
from tests.fakes import memory_report


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, whatever this machine has."""
    monkeypatch.setattr("app.models.memory.room.memory_of", lambda kind: Memory("cpu", "x", 10**12, 10**12))


async def test_a_request_loads_the_model_that_it_names_once_its_predecessors_answers_have_ended(
    manager: ModelManager, engines: Engines
) -> None:
    answers = [asyncio.create_task(ask(manager, "one", (i,))) for i in range(8)]
    await asyncio.sleep(0)
    swapping = [asyncio.create_task(ask(manager, "two", (i,))) for i in range(8)]
    await until(lambda: "Waiting for 8 answers of one" in manager.status().stage)
    assert not engines.children[0].is_closed and manager.status().model == "two"
    engines.children[0].may_finish.set()
    assert await asyncio.gather(*answers) == [FinishReason.STOP] * 8
    await until(lambda: len(engines.children) == 2)
    assert engines.children[0].is_closed, "the old one is gone before the new one starts"
    engines.children[1].may_finish.set()
    assert await asyncio.gather(*swapping) == [FinishReason.STOP] * 8
    assert len(engines.children) == 2


async def test_answers_that_last_too_long_end_with_an_error_of_their_own(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    async with managed(tmp_path, shelf, engines, drain_timeout=0.05) as manager:
        answer = asyncio.create_task(ask(manager, "one"))
        await until(lambda: bool(engines.children))
        assert (await manager.acquire("two")).id == "two"
        ended = await answer
    assert isinstance(ended, EngineClosed)


async def test_requests_that_come_while_their_model_leaves_wait_until_it_is_back(
    manager: ModelManager, engines: Engines
) -> None:
    async with manager.lease("one"):
        two = asyncio.create_task(manager.acquire("two"))
        await until(lambda: "Waiting for 1 answers" in manager.status().stage)
        late = asyncio.create_task(manager.acquire("one"))
        await asyncio.sleep(0.05)
        assert not late.done() and not two.done()
    assert (await two).child is engines.children[1]
    assert (await late).child is engines.children[2]


async def test_loads_come_in_the_order_of_asking(manager: ModelManager, engines: Engines) -> None:
    engines.gate.clear()
    order: list[str] = []

    async def note(name: str) -> None:
        async with manager.lease(name) as model:
            order.append(model.id)

    tasks = []
    for name in ("three", "two", "one", "three"):
        tasks.append(asyncio.create_task(note(name)))
        await asyncio.sleep(0)
    engines.gate.set()
    await asyncio.gather(*tasks)
    assert order == ["one", "three", "three", "two"]


async def test_a_swap_back_and_forth_serves_everybody_between(manager: ModelManager, engines: Engines) -> None:
    """Whoever waited for a load is served before the next model may take its place."""
    engines.finishes_at_once = True
    engines.children[0].may_finish.set()
    outcomes = await asyncio.gather(*(ask(manager, name, (i,)) for i in range(5) for name in ("one", "two", "three")))
    assert outcomes == [FinishReason.STOP] * 15
    assert len(engines.children) == 3
    assert [child.is_closed for child in engines.children] == [True, True, False]


async def test_models_that_fit_stay_beside_each_other_and_the_longest_unused_goes_first(
    tmp_path: Path, shelf: ThreeModels, engines: Engines, plenty: None
) -> None:
    async with managed(tmp_path, shelf, engines, max_models=2) as manager:
        manager.load("one")
        await manager.acquire("one")
        await manager.acquire("two")
        assert not engines.children[0].is_closed and manager.status().model == "one", "one stays in hand"
        await manager.acquire("one")
        await manager.acquire("three")
        assert [child.is_closed for child in engines.children] == [False, True, False]
        assert [status.model for status in manager.statuses()] == ["one", "three"]
        assert [card.state for card in manager.cards()] == ["loaded", "unloaded", "loaded"]


async def test_without_room_a_model_goes_even_below_the_most(
    tmp_path: Path, shelf: ThreeModels, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.memory.room.memory_of", lambda kind: Memory("cpu", "x", 10**12, 10**9))
    async with managed(tmp_path, shelf, engines, max_models=3) as manager:
        await manager.acquire("one")
        await manager.acquire("two")
        assert [child.is_closed for child in engines.children] == [True, False]


@pytest.mark.parametrize(
    ("needed", "refuses", "lent"),
    [(4 * 10**9, False, [4 * 10**9, 0]), (6 * 10**9, False, []), (4 * 10**9, True, [4 * 10**9])],
)
async def test_on_a_card_a_model_lends_up_to_half_of_its_cache_and_takes_it_back_once_alone(
    tmp_path: Path,
    shelf: ThreeModels,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    needed: int,
    refuses: bool,
    lent: list[int],
) -> None:
    """One model has all of a card's budget, 5 GB of weights and 10 of cache; more than half of it would be its end."""
    monkeypatch.setattr("app.models.memory.room.memory_of", lambda kind: Memory("cuda", "x", 15 * 10**9, 15 * 10**9))
    monkeypatch.setattr("app.models.memory.room._is_back", lambda held, before: True)
    engines.on_card = replace(memory_report(), weights_bytes=5 * 10**9, kv_bytes=10**10)
    engines.needed["two"] = needed
    async with managed(tmp_path, shelf, engines, max_models=2, gpu_memory_utilization=1.0) as manager:
        await manager.acquire("one")
        if refuses:
            engines.children[0].most_lent = 0
        await manager.acquire("two")
        stays = bool(lent) and not refuses
        assert engines.children[0].is_alive is stays and engines.children[0].lent == lent[:1]
        await manager.unload("two")
        if stays:
            await until(lambda: engines.children[0].lent == lent)


async def test_nobody_goes_for_a_model_that_can_never_be_loaded(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    def refuse(folder: Path, config: EngineConfig, kind: str) -> int:
        raise AppError(501, "unsupported_model", "An architecture that nobody knows.")

    async with managed(tmp_path, shelf, engines, needs=refuse) as manager:
        await manager.acquire("one")
        assert (await ask(manager, "two")).code == "unsupported_model"
        assert engines.children[0].is_alive and manager.status().model == "one"


@pytest.mark.parametrize("is_by_hand", [False, True])
async def test_nobody_goes_for_a_folder_whose_tensors_are_not_its_configs(
    tmp_path: Path, shelf: ThreeModels, engines: Engines, is_by_hand: bool
) -> None:
    tiny_checkpoint(tmp_path / "two", "llama", "gptq")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    async with managed(tmp_path, shelf, engines, needs=needed_bytes) as manager:
        await manager.acquire("one")
        if is_by_hand:
            manager.load("two")
            await until(lambda: "do not belong together" in manager.statuses()[-1].error)
        else:
            assert (await ask(manager, "two")).code == "bad_checkpoint"
        assert (await manager.acquire("")).child is engines.children[0] and engines.children[0].is_alive


async def test_a_model_that_is_not_here_is_refused_to_requests_and_fetched_for_the_owner(
    manager: ModelManager, shelf: ThreeModels, engines: Engines
) -> None:
    shelf.absent.add("two")
    refused = await ask(manager, "two")
    assert (refused.status, refused.code, refused.param) == (404, "model_not_downloaded", "model")
    assert manager.status().model == "one" and manager.holds("one") and not manager.holds("two")
    shelf.may_end.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "Fetching")
    engines.children[0].may_finish.set()
    assert await ask(manager, "one") is FinishReason.STOP, "the old one goes on while the new one is fetched"
    shelf.may_end.set()
    assert (await manager.acquire("")).id == "two"


async def test_a_load_on_request_that_fails_leaves_the_hand_to_the_model_that_it_took_the_place_of(
    manager: ModelManager, engines: Engines
) -> None:
    engines.errors = [BadCheckpoint("no such tensor")]
    refused = await ask(manager, "two")
    assert refused.code == "bad_checkpoint" and "no such tensor" in refused.text
    assert (await manager.acquire("")).id == "one"


async def test_a_load_by_hand_that_fails_leaves_the_old_model_in_hand(
    manager: ModelManager, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engines.gate.clear()
    engines.errors = [BadCheckpoint("no such tensor")]
    manager.load("two")
    waiting = asyncio.create_task(manager.acquire(""))
    await until(lambda: manager.status().stage == "reading weights")
    engines.gate.set()
    assert (await waiting).id == "one", "also for those who waited for the new one"
    assert manager.status().model == "one" and manager.memory()
    failed = manager.statuses()[1]
    assert (failed.model, failed.state) == ("two", "failed") and "no such tensor" in failed.error
    assert next(card for card in manager.cards() if card.id == "two").error == failed.error
    assert "two was not loaded" in caplog.text


async def test_a_fetch_that_fails_or_is_given_up_leaves_the_old_model_answering(
    manager: ModelManager, shelf: ThreeModels, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(entry: object, on_progress: object) -> Path:
        raise AppError(502, "hub_unreachable", "The hub cannot be reached.")

    shelf.absent.add("two")
    shelf.may_end.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "Fetching")
    await manager.unload("two")
    assert (manager.status().model, manager.status().state) == ("one", "ready")
    monkeypatch.setattr(shelf, "ensure", no_network)
    shelf.absent.add("three")
    manager.load("two")
    manager.load("three")
    await until(lambda: len(manager.statuses()) == 3)
    await until(lambda: manager.status().state == "ready")
    assert (await manager.acquire("")).child is engines.children[0] and len(engines.children) == 1
    assert [status.state for status in manager.statuses()] == ["ready", "failed", "failed"]


async def test_a_load_by_hand_is_not_given_up_for_one_that_can_never_be_loaded(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    def needs(folder: Path, config: EngineConfig, kind: str) -> int:
        if folder.name == "two":
            raise AppError(501, "unsupported_model", "An architecture that nobody knows.")
        return 1

    engines.gate.clear()
    async with managed(tmp_path, shelf, engines, needs=needs) as manager:
        manager.load("one")
        await until(lambda: manager.status().stage == "reading weights")
        manager.load("two")
        await until(lambda: "nobody knows" in manager.statuses()[-1].error)
        engines.gate.set()
        assert (await manager.acquire("")).id == "one"
        assert engines.num_cancelled == 0 and len(engines.children) == 1


async def test_a_load_by_hand_goes_on_while_the_one_chosen_after_it_is_fetched(
    manager: ModelManager, shelf: ThreeModels, engines: Engines
) -> None:
    engines.gate.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "reading weights")
    shelf.absent.add("three")
    shelf.may_end.clear()
    manager.load("three")
    await until(lambda: manager.status().stage == "Fetching")
    engines.gate.set()
    assert (await manager.acquire("two")).id == "two"
    shelf.may_end.set()
    assert (await manager.acquire("")).id == "three"


async def test_a_load_that_was_given_up_for_one_that_fails_is_begun_again(
    manager: ModelManager, engines: Engines
) -> None:
    engines.gate.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "reading weights")
    manager.load("three")
    await until(lambda: engines.num_cancelled == 1)
    engines.errors = [BadCheckpoint("no such tensor")]
    engines.gate.set()
    await until(lambda: manager.status().state == "ready")
    assert manager.status().model == "two" and (await manager.acquire("")).id == "two"
    assert [card.state for card in manager.cards()] == ["unloaded", "loaded", "failed"]


async def test_a_load_that_was_given_up_for_one_that_is_unloaded_stays_given_up(
    manager: ModelManager, engines: Engines
) -> None:
    engines.gate.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "reading weights")
    manager.load("three")
    await until(lambda: engines.num_cancelled == 1 and manager.status().stage == "reading weights")
    await manager.unload("three")
    engines.gate.set()
    assert not manager.holds("two") and not manager.holds("three")
    assert (await manager.acquire("")).id == "one", "the one in hand before both"


async def test_no_more_than_some_failures_are_told(manager: ModelManager) -> None:
    for number in range(20):
        manager.load(f"nowhere {number}")
        await until(lambda: manager.status().state == "ready")
    statuses = manager.statuses()
    assert statuses[0].model == "one" and 5 <= len(statuses) <= 10
    assert statuses[-1].model == "nowhere 19"


async def test_an_unused_model_is_let_go_and_comes_back_with_the_next_request(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    async with managed(tmp_path, shelf, engines, idle_timeout=0.05) as manager:
        manager.load("one")
        async with manager.lease("one"):
            await asyncio.sleep(0.15)
            assert not engines.children[0].is_closed, "it is in use"
        await until(lambda: engines.children[0].is_closed)
        assert (await manager.acquire("")).child is engines.children[1]


async def test_closing_cuts_an_answer_that_was_let_go_on(manager: ModelManager, engines: Engines) -> None:
    answer = asyncio.create_task(ask(manager, "one"))
    await until(lambda: bool(engines.children) and bool(engines.children[0].asked))
    swap = asyncio.create_task(ask(manager, "two"))
    await until(lambda: "Waiting for 1 answers" in manager.status().stage)
    async with asyncio.timeout(100):
        await manager.close()
    assert isinstance(await answer, EngineClosed)
    assert (await swap).code == "shutting_down"
    assert all(isinstance(child, Child) and child.is_closed for child in engines.children)


async def test_the_seconds_left_are_those_of_the_last_load(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    (tmp_path / "load-times.json").write_text('{"one": 40.0, "two": "long"}')
    engines.gate.clear()
    async with managed(tmp_path, shelf, engines) as manager:
        manager.load("one")
        await until(lambda: manager.status().stage == "reading weights")
        left = manager.status().seconds_left
        assert left is not None and 30 < left <= 40
        engines.gate.set()
        await manager.acquire("one")
        engines.gate.clear()
        manager.load("two")
        await until(lambda: manager.status().model == "two" and manager.status().stage == "reading weights")
        assert manager.status().seconds_left is None, "one word tells no speed"
        began = time.monotonic()
        await asyncio.sleep(0.02)
        engines.say("reading weights", 0.5)
        left = manager.status().seconds_left
        passed = time.monotonic() - began
        assert left is not None and 0.02 * 2 <= left < 2 * passed + 1, "a third of what was left took so long"
