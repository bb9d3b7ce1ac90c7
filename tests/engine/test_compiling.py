"""Requests whose grammars are being compiled hold up nobody, and end as any other: over the fake runner."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest, TooManyRequests
from engine.types import FinishReason, GrammarKind, GrammarSpec, SamplingParams, TokenEvent
from tests.engine.fake_runner import UNLUCKY, VOCAB_SIZE, FakeRunner, solo_answer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def _with_grammar(text: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, grammar=GrammarSpec(GrammarKind.REGEX, text))


def _engine(runner: FakeRunner, **config: object) -> Engine:
    return Engine(runner, EngineConfig(model="fake", **config))  # type: ignore[arg-type]


def _run(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def test_a_request_waits_for_its_grammar_while_others_run_to_their_end() -> None:
    runner = FakeRunner()
    engine = _engine(runner)
    engine.add("grammar", (2, 3), _with_grammar("wait"))
    engine.add("free", (4, 5), GREEDY)
    assert engine.stats().num_requests_waiting == 2
    events: list[TokenEvent] = []
    while len(events) < 6:
        events += engine.step()
    assert [event.token_id for event in events] == solo_answer((4, 5), 6, ignore_eos=True)
    assert engine.has_work and not engine.can_compute
    assert engine.request_ids == ("grammar",) and engine.stats().num_requests_waiting == 1
    runner.gate.set()
    assert [(event.request_id, event.finish_reason) for event in _run(engine)] == [("grammar", FinishReason.GRAMMAR)]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_answer_ends_with_the_token_that_completes_its_grammar(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead))
    prompt = next(p for p in ((i,) for i in range(2, 50)) if UNLUCKY not in solo_answer(p, 5, ignore_eos=True))
    engine.add("r", prompt, _with_grammar("5"))
    events = _run(engine)
    assert [event.token_id for event in events] == solo_answer(prompt, 5, ignore_eos=True)
    assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.GRAMMAR]


def test_a_grammar_that_cannot_go_on_ends_its_request_alone() -> None:
    prompt = next(p for p in ((i,) for i in range(2, VOCAB_SIZE)) if UNLUCKY in solo_answer(p, 20, ignore_eos=True))
    engine = _engine(FakeRunner())
    engine.add("breaks", prompt, _with_grammar("20"))
    engine.add("free", prompt, GREEDY)
    events = _run(engine)
    *tokens, last = [event for event in events if event.request_id == "breaks"]
    answer = solo_answer(prompt, 20, ignore_eos=True)
    assert [event.token_id for event in tokens] == answer[: answer.index(UNLUCKY)]
    assert last.token_id is None and last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, BadRequest)
    assert [event.token_id for event in events if event.request_id == "free"] == answer[:6]


def test_a_refused_grammar_is_told_though_nothing_else_runs() -> None:
    engine = _engine(FakeRunner())
    engine.add("bad", (2,), _with_grammar("bad"))
    events = _run(engine)
    assert [(event.request_id, event.finish_reason) for event in events] == [("bad", FinishReason.ERROR)]
    assert "bad" in str(events[0].error)


def test_a_fault_inside_the_compiler_is_that_requests_alone() -> None:
    engine = _engine(FakeRunner())
    engine.add("odd", (2,), _with_grammar("no number"))
    engine.add("free", (4, 5), GREEDY)
    events = _run(engine)
    error = next(event.error for event in events if event.request_id == "odd")
    assert isinstance(error, BadRequest) and "ValueError" in error.message
    assert [event.token_id for event in events if event.request_id == "free"] == solo_answer((4, 5), 6, ignore_eos=True)


def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_counts_as_in_flight() -> None:
    runner = FakeRunner(max_num_seqs=1)
    engine = _engine(runner, max_queued_requests=1)
    engine.add("a", (2, 3), _with_grammar("wait"))
    engine.add("b", (2, 3), _with_grammar("wait"))
    with pytest.raises(BadRequest, match="in use"):
        engine.add("a", (2, 3), GREEDY)
    with pytest.raises(TooManyRequests):
        engine.add("c", (2, 3), GREEDY)
    aborted = engine.abort("a")
    assert aborted is not None and aborted.finish_reason is FinishReason.ABORT
    assert engine.abort("a") is None
    runner.gate.set()
    assert {event.request_id for event in _run(engine)} == {"b"}


async def test_a_sleeping_child_wakes_when_a_grammar_is_done_or_refused() -> None:
    config = EngineConfig(model="fake", max_num_seqs=8)
    client = await EngineClient.start(config, load_runner="tests.engine.fake_runner:load_fake")
    try:
        async with asyncio.timeout(100):
            events = [event async for event in client.submit("good", (2,), _with_grammar("1"))]
            assert [event.finish_reason for event in events] == [FinishReason.GRAMMAR]
            refused: AsyncGenerator[TokenEvent, None] = client.submit("bad", (2,), _with_grammar("bad"))
            with pytest.raises(BadRequest, match="This grammar is bad"):
                await anext(refused)
            assert [event async for event in client.submit("bad", (2,), _with_grammar("1"))]
    finally:
        await client.close()
