"""Models that fail, engines that die or hang: what becomes of the model, and of the requests that were there."""

import asyncio
from pathlib import Path

import pytest

from app.models.manager import ModelManager
from engine.errors import EngineDied, EngineLost
from engine.types import FinishReason
from tests.app.models.scripted import Engines, ThreeModels, ask, managed, until


async def test_a_death_ends_the_requests_and_the_next_engine_is_begun_at_once(
    manager: ModelManager, engines: Engines
) -> None:
    answers = [asyncio.create_task(ask(manager, "", (i,))) for i in range(3)]
    await until(lambda: bool(engines.children) and len(engines.children[0].asked) == 3)
    engines.children[0].die("killed by SIGKILL")
    assert [str(ended) for ended in await asyncio.gather(*answers)] == ["killed by SIGKILL"] * 3
    await until(lambda: len(engines.children) == 2 and manager.status().state == "ready")
    _, lines = await manager.log_lines("one", 10)
    assert "The engine died: killed by SIGKILL" in lines[-1]


async def test_a_death_in_a_load_costs_the_waiting_requests_nothing(manager: ModelManager, engines: Engines) -> None:
    engines.errors = [EngineDied("killed by SIGKILL")]
    assert (await manager.acquire("two")).child is engines.children[1]
    assert not engines.errors


async def test_a_model_that_fails_three_times_in_a_row_is_parked_until_it_is_loaded_by_hand(
    manager: ModelManager, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.memory.conduct._PAUSES_S", (0.0, 0.0, 0.01))
    for count in range(3):
        await until(lambda count=count: len(engines.children) == count + 1 and manager.status().state == "ready")  # type: ignore[misc]
        engines.children[-1].die(f"CUDA error {count}")
    await until(lambda: manager.status().state == "failed" and "left alone" in manager.status().error)
    await asyncio.sleep(0.3)  # longer than the pause after a failed load
    refused = await ask(manager, "one")
    assert refused.code == "model_parked" and "CUDA error 2" in refused.text and len(engines.children) == 3
    manager.load("one")
    assert (await manager.acquire("one")).child is engines.children[3]


async def test_an_answer_that_ends_wipes_the_slate_of_its_model(manager: ModelManager, engines: Engines) -> None:
    for count in range(8):
        await until(lambda count=count: len(engines.children) == count + 1 and manager.status().state == "ready")  # type: ignore[misc]
        engines.children[-1].may_finish.set()
        assert await ask(manager, "", (count,)) is FinishReason.STOP
        engines.children[-1].die()
    assert (await manager.acquire("")).child is engines.children[8]


async def test_a_request_that_was_there_at_two_deaths_is_refused_and_no_other(
    manager: ModelManager, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.memory.conduct._PAUSES_S", (0.0, 0.0, 0.01))
    for count in range(2):
        killer = asyncio.create_task(ask(manager, "", (6, 6, 6)))
        others = [asyncio.create_task(ask(manager, "", (6, 6, 6))) for _ in range(2)]  # one request with n = 3
        await until(lambda count=count: len(engines.children) == count + 1 and manager.status().state == "ready")  # type: ignore[misc]
        await until(lambda: len(engines.children[-1].asked) == 3)
        engines.children[-1].die()
        assert {type(ended) for ended in await asyncio.gather(killer, *others)} == {EngineDied}
    refused = await ask(manager, "", (6, 6, 6))
    assert (refused.status, refused.code) == (400, "request_ends_engine")
    engines.children[-1].may_finish.set()
    assert await ask(manager, "", (6, 6, 7)) is FinishReason.STOP
    manager.load("one")
    assert await ask(manager, "", (6, 6, 6)) is FinishReason.STOP, "loaded by hand, all is forgiven"


async def test_a_request_that_got_nothing_from_an_engine_that_was_lost_is_asked_again_once(
    manager: ModelManager, engines: Engines
) -> None:
    first = engines.children[0]
    first.may_begin.clear()
    answer = asyncio.create_task(ask(manager, ""))
    await until(lambda: bool(first.asked))
    first.die(kind=EngineLost)
    await until(lambda: len(engines.children) == 2)
    engines.children[1].may_finish.set()
    assert await answer is FinishReason.STOP and engines.children[1].asked == [(1, 2)]
    engines.children[1].may_finish.clear()
    seen = asyncio.create_task(ask(manager, ""))
    await until(lambda: len(engines.children[1].asked) == 2)
    await asyncio.sleep(0)
    engines.children[1].die(kind=EngineLost)
    assert isinstance(await seen, EngineLost), "the caller has a part of the answer already"


async def test_requests_under_suspicion_begin_one_at_a_time_so_that_the_next_death_tells_which_it_was(
    manager: ModelManager, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.memory.conduct._PAUSES_S", (0.0, 0.0, 0.01))
    engines.begins_at_once = False
    engines.children[0].may_begin.clear()
    killer, *others = (asyncio.create_task(ask(manager, "", (number,))) for number in (6, 7, 8))
    await until(lambda: len(engines.children[0].asked) == 3)
    engines.children[0].die(kind=EngineLost)
    await until(lambda: len(engines.children) == 2 and bool(engines.children[1].asked))
    await asyncio.sleep(0.02)
    assert engines.children[1].asked == [(6,)], "the others wait for its first token"
    engines.begins_at_once = engines.finishes_at_once = True
    engines.children[1].die(kind=EngineLost)
    assert isinstance(await killer, EngineLost)
    assert await asyncio.gather(*others) == [FinishReason.STOP] * 2
    assert (await ask(manager, "", (6,))).code == "request_ends_engine"


async def test_an_engine_of_which_no_step_ends_is_ended_and_begun_again(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    async with managed(tmp_path, shelf, engines, step_timeout=5.0) as manager:
        answer = asyncio.create_task(ask(manager, "one"))
        await until(lambda: bool(engines.children))
        engines.children[0].stats = engines.stats_of_a_hung_one(4.9)
        await asyncio.sleep(0.05)
        assert not answer.done()
        engines.children[0].stats = engines.stats_of_a_hung_one(5.1)
        ended = await answer
        assert isinstance(ended, EngineDied) and "no step ended for 5 s" in ended.message
        await until(lambda: len(engines.children) == 2)
