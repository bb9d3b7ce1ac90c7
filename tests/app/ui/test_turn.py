"""One answer on its way to a tab: gathered whole, paced, stopped together with the engine's work."""

import asyncio
from collections.abc import AsyncIterator

from app.chat.types import ChatDelta, ChatRequest, Message
from app.errors import from_engine_error
from app.ui.turn import Answer, RunningTurn
from engine.errors import EngineDied
from tests.app.ui.scripted import ScriptedService


def _request(script: str) -> ChatRequest:
    return ChatRequest(request_id="r1", model="", messages=(Message(role="user", content=script),))


async def _drain(running: RunningTurn) -> Answer:
    return [answer async for answer in running.updates()][-1]


async def test_the_last_update_is_whole_with_usage_and_timings() -> None:
    async with RunningTurn(ScriptedService(), _request("think: a b | c d")) as running:
        answer = await _drain(running)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("a b", "c d", "stop")
    assert answer.usage is not None and answer.timings is not None
    assert answer.ttft_s is not None and answer.thinking_s is not None
    assert not answer.is_stopped and not answer.error


async def test_many_pieces_become_few_updates_and_nothing_is_lost() -> None:
    async with RunningTurn(ScriptedService(), _request("count: 300 every 0 as n"), interval_s=0.2) as running:
        seen = [answer.text async for answer in running.updates()]
    assert seen[-1] == "".join(f"n{index} " for index in range(300))
    assert len(seen) < 100


async def test_stop_closes_the_answer_at_once_and_keeps_what_has_come() -> None:
    service = ScriptedService()
    async with RunningTurn(service, _request("count: 1000 every 0.01 as n"), interval_s=0.0) as running:
        async for answer in running.updates():
            if answer.text and not answer.is_stopped:
                running.stop()
                before = answer.text
    assert service.closed == ["r1"] and service.num_open == 0
    assert answer.is_stopped and answer.text == before


async def test_stop_works_while_nothing_has_come_yet() -> None:
    service = ScriptedService()
    service.is_ready = False
    async with RunningTurn(service, _request("say: a"), interval_s=0.0, calm_s=0.01) as running:
        async for _ in running.updates():
            if service.num_open:
                running.stop()
    assert service.closed == ["r1"]


async def test_leaving_the_block_closes_the_answer() -> None:
    service = ScriptedService()
    async with RunningTurn(service, _request("count: 1000 every 0.01 as n")) as running:
        async for answer in running.updates():
            if answer.text:
                break
    assert service.closed == ["r1"] and service.num_open == 0


async def test_stop_after_the_end_does_not_claim_to_have_stopped() -> None:
    async with RunningTurn(ScriptedService(), _request("say: a")) as running:
        await _drain(running)
        running.stop()
    assert not running.answer.is_stopped


async def test_a_second_stop_changes_nothing() -> None:
    async with RunningTurn(ScriptedService(), _request("count: 1000 every 0.01 as n")) as running:
        running.stop()
        await _drain(running)
        running.stop()
    assert running.answer.is_stopped


async def test_a_waiting_answer_still_gives_updates() -> None:
    service = ScriptedService()
    service.is_ready = False
    async with RunningTurn(service, _request("say: a"), interval_s=0.0, calm_s=0.01) as running:
        updates = running.updates()
        for _ in range(3):
            assert not (await anext(updates)).has_begun


async def test_an_answer_that_nobody_draws_is_abandoned() -> None:
    service = ScriptedService()
    request = _request("count: 100000 every 0.01 as n")
    async with RunningTurn(service, request, interval_s=0.0, idle_s=0.05) as running:
        await anext(running.updates())
        while service.num_open:
            await asyncio.sleep(0.01)
    assert service.closed == ["r1"]
    assert "Nobody has looked" in running.answer.error


async def test_an_error_is_told_in_its_own_words_after_what_had_come() -> None:
    async with RunningTurn(ScriptedService(), _request("fail: The engine ended.")) as running:
        answer = await _drain(running)
    assert answer.text == "It began well " and answer.error == "The engine ended."


async def test_the_death_of_the_engine_tells_the_next_step() -> None:
    class Dying:
        async def stream(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
            raise from_engine_error(EngineDied("The engine process ended unexpectedly (killed by SIGKILL)."))
            yield ChatDelta()

    async with RunningTurn(Dying(), _request("a")) as running:
        answer = await _drain(running)
    assert answer.error.endswith("(killed by SIGKILL). Send it again: a fresh engine process answers the next request.")


async def test_an_unforeseen_error_is_named() -> None:
    class Broken:
        async def stream(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
            raise KeyError("chat_template")
            yield ChatDelta()

    async with RunningTurn(Broken(), _request("a")) as running:
        answer = await _drain(running)
    assert "KeyError" in answer.error and "log" in answer.error
