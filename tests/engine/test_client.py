"""The client and a real spawned child over a fake runner: tokens, refusals, leaving early, and every way to die."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    BadCheckpoint,
    BadRequest,
    ContextTooLong,
    EngineClosed,
    EngineDied,
    EngineError,
    EngineLost,
    OutOfMemory,
    Superseded,
)
from engine.messages import Abort, Shutdown, Stats, Submit, ToChild, Tokens
from engine.process import _serve
from engine.types import FinishReason, RequestClass, SamplingParams, Standing
from tests.engine.fake_runner import NO_MEMORY, UNLUCKY, FakeRunner, solo_answer

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
posix_only = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


def _start(
    runner: str, on_loading: Callable[[str, float], None] | None = None, **options: Any
) -> asyncio.Future[EngineClient]:
    config, load_runner = EngineConfig(model="fake", max_num_seqs=8), f"tests.engine.fake_runner:{runner}"
    return asyncio.ensure_future(EngineClient.start(config, on_loading=on_loading, load_runner=load_runner, **options))


@asynccontextmanager
async def _client(runner: str) -> AsyncIterator[EngineClient]:
    client = await _start(runner)
    try:
        yield client
    finally:
        await client.close()


async def _answer(client: EngineClient, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    tokens = []
    async for event in client.submit(request_id, prompt, params):
        assert event.request_id == request_id
        assert event.token_id is not None
        tokens.append(event.token_id)
    return tokens


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not is_so():
            await asyncio.sleep(0.01)


def _is_idle(client: EngineClient) -> bool:
    """The child did something, has nothing left to do and holds nothing, and the client waits for nothing."""
    stats = client.stats
    in_flight = stats.num_requests_running + stats.num_requests_waiting + stats.num_blocks_used
    return stats.num_steps > 0 and stats.load_s > 0 and in_flight == 0 and stats.last_step_age_s == 0


async def test_concurrent_requests_get_the_tokens_that_each_gets_alone() -> None:
    prompts = [tuple(range(2 + i, 2 + i + length)) for i, length in enumerate((1, 3, 4, 5, 9, 12, 17, 20, 33))]
    async with _client("load_fake") as client:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        answers = await asyncio.gather(*(_answer(client, f"r{i}", p, params) for i, p in enumerate(prompts)))
        assert answers == [solo_answer(prompt, 20) for prompt in prompts]
        # Not once it is idle: the last snapshot may be of a moment when it was, between two of the requests.
        await _until(lambda: client.stats.generation_tokens == sum(map(len, answers)))


async def test_loading_is_told_before_the_model_answers() -> None:
    stages: list[tuple[str, float]] = []
    client = await _start("load_fake", lambda stage, fraction: stages.append((stage, fraction)))
    assert stages[0] == ("starting", 0.0)
    assert stages[1:] == [("reading weights", 0.0), ("measuring memory", 1.0)]
    assert client.info.architecture == "fake"
    assert client.memory.num_blocks == 2048
    assert client.is_alive
    await client.close()


async def test_refusals_of_the_engine_reach_the_caller_and_hurt_nobody_else() -> None:
    async with _client("load_fake") as client:
        with pytest.raises(ContextTooLong, match="maximum context length is 4096 tokens"):
            await _answer(client, "long", (5,) * 5000, ENDLESS)
        with pytest.raises(BadRequest, match=r"top_p is 2\.0"):
            await _answer(client, "odd", (5,), SamplingParams(top_p=2.0))
        assert len(await _answer(client, "good", (5,), SamplingParams(max_tokens=3, ignore_eos=True))) == 3


async def test_superseded_autocomplete_ends_with_its_own_error() -> None:
    standing = Standing(request_class=RequestClass.AUTOCOMPLETE, client_id="editor")
    async with _client("load_slow") as client:
        older = client.submit("older", (5, 6), ENDLESS, standing)
        await anext(older)
        newer = client.submit("newer", (5, 6), ENDLESS, standing)
        await anext(newer)
        with pytest.raises(Superseded, match="newer request of the same client"):
            async for _ in older:
                pass
        await newer.aclose()
        await _until(lambda: _is_idle(client))


async def test_params_of_another_kind_are_refused_and_hurt_nobody_else() -> None:
    async with _client("load_fake") as client:
        with pytest.raises(BadRequest, match="cannot be read: TypeError"):
            await _answer(client, "odd", (5,), SamplingParams(min_p="x"))  # type: ignore[arg-type]
        assert len(await _answer(client, "good", (5,), SamplingParams(max_tokens=3, ignore_eos=True))) == 3


async def test_closing_the_iterator_ends_the_request() -> None:
    async with _client("load_slow") as client:
        async with aclosing(client.submit("a", (5, 6), ENDLESS)) as events:
            await anext(events)
        await _until(lambda: _is_idle(client))


async def test_leaving_the_loop_early_ends_the_request() -> None:
    async with _client("load_slow") as client:
        async for _ in client.submit("a", (5, 6), ENDLESS):
            break
        await _until(lambda: _is_idle(client))


async def test_cancelling_the_task_ends_the_request() -> None:
    async with _client("load_slow") as client:
        task = asyncio.create_task(_answer(client, "a", (5, 6), ENDLESS))
        await _until(lambda: client.stats.num_requests_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: _is_idle(client))


async def test_request_id_is_refused_until_the_child_has_ended_the_request_before() -> None:
    """Or tokens of the one that was left, still under way, would be taken for the new one's."""
    async with _client("load_slow") as client:
        events = client.submit("a", (5, 6), ENDLESS)
        await anext(events)
        with pytest.raises(BadRequest, match="in use"):
            await _answer(client, "a", (7,), ENDLESS)
        await events.aclose()
        with pytest.raises(BadRequest, match="in use"):
            await _answer(client, "a", (7,), ENDLESS)
        await _until(lambda: _is_idle(client))
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert await _answer(client, "a", (7, 8), params) == solo_answer((7, 8), 5)


async def test_two_hundred_aborted_requests_leave_the_pool_full_and_no_task() -> None:
    async def leave_early(client: EngineClient, i: int) -> None:
        async with aclosing(client.submit(f"r{i}", tuple(range(2, 3 + i % 30)), ENDLESS)) as events:
            for _ in range(i % 4):
                await anext(events)

    async with _client("load_fake") as client:
        await asyncio.gather(*(leave_early(client, i) for i in range(200)))
        await _until(lambda: _is_idle(client))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert await _answer(client, "after", (7, 8), params) == solo_answer((7, 8), 5)


@posix_only
async def test_killed_child_ends_every_stream_with_the_signal_named() -> None:
    async with _client("load_slow") as client:
        streams = [asyncio.create_task(_answer(client, f"r{i}", (5 + i,), ENDLESS)) for i in range(12)]
        await _until(lambda: client.stats.num_requests_running == 8)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(100):
            outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {EngineLost}
        assert {str(outcome) for outcome in outcomes} == {"The engine process ended unexpectedly (killed by SIGKILL)."}
        assert not client.is_alive
        with pytest.raises(EngineDied, match="SIGKILL"):
            await _answer(client, "after", (5,), ENDLESS)


@posix_only
async def test_a_child_that_is_given_up_says_where_it_hangs_and_everybody_gets_the_words(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    client = await _start("load_hanging", log_path=str(log))
    dying = asyncio.create_task(client.until_ended())
    answer = asyncio.create_task(_answer(client, "r", (UNLUCKY,), ENDLESS))
    await _until(lambda: client.stats.last_step_age_s > 0.2)
    assert not dying.done()
    client.give_up("It hung.")
    with pytest.raises(EngineDied, match=r"^It hung\.$"):
        await answer
    assert (await dying).message == "It hung."
    await client.close()
    assert not _is_running(client.pid)
    said = log.read_text()
    assert "Process" in said and "Ready:" in said
    assert "in _hang" in said, "its stack"


async def test_fault_in_a_step_ends_every_stream_and_the_child() -> None:
    async with _client("load_faulty") as client:
        good = client.submit("good", (5, 6), ENDLESS)
        await anext(good)
        with pytest.raises(EngineDied, match="ZeroDivisionError: a mistake of ours"):
            await _answer(client, "bad", (UNLUCKY,), ENDLESS)
        with pytest.raises(EngineDied, match="ZeroDivisionError"):
            async for _ in good:
                pass
        assert client.pid is not None
        await _until(lambda: not _is_running(client.pid))


async def test_step_that_is_refused_ends_its_requests_and_the_next_one_is_served() -> None:
    async with _client("load_faulty") as client:
        with pytest.raises(OutOfMemory, match="more workspace"):
            await _answer(client, "large", (NO_MEMORY,), ENDLESS)
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert await _answer(client, "small", (7, 8), params) == solo_answer((7, 8), 5)


@pytest.mark.parametrize(
    ("runner", "error", "words"),
    [
        ("load_refusing", BadCheckpoint, r"fake has no config\.json"),
        ("load_broken", EngineDied, "ZeroDivisionError: a mistake of ours"),
        ("load_missing", EngineDied, "AttributeError"),
    ],
)
async def test_load_that_fails_raises_its_own_error(runner: str, error: type[EngineError], words: str) -> None:
    before = _engine_children()
    with pytest.raises(error, match=words):
        await _start(runner)
    assert _engine_children() == before


@posix_only
async def test_ctrl_c_of_the_whole_group_while_the_childs_python_starts_leaves_the_child_alone() -> None:
    before = _engine_children()
    starting = _start("load_fake")
    await asyncio.sleep(0)  # the child is made now, and has not run a line of ours
    (child,) = _engine_children() - before
    os.kill(child, signal.SIGINT)
    client = await starting
    assert client.pid == child
    await client.close()


@posix_only
async def test_ctrl_c_while_the_child_is_started_is_not_lost_for_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    start_process = SpawnProcess.start

    def interrupted_start(child: SpawnProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start_process(child)

    monkeypatch.setattr(SpawnProcess, "start", interrupted_start)
    own_handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        client = await _start("load_fake")
    finally:
        signal.signal(signal.SIGINT, own_handler)
    assert heard == [signal.SIGINT]
    await client.close()


@posix_only
async def test_child_killed_while_loading_is_an_error_of_the_start() -> None:
    loading = asyncio.Event()
    before = _engine_children()
    starting = _start("load_endless", lambda stage, fraction: loading.set() if fraction else None)
    await loading.wait()
    (child,) = _engine_children() - before
    os.kill(child, signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        await starting


async def test_a_child_may_load_as_long_as_it_speaks_and_is_ended_once_it_says_nothing() -> None:
    before, told = _engine_children(), list[str]()
    with pytest.raises(EngineDied, match="hung while it loaded: it said nothing for 3 s"):
        await _start("load_falling_silent", lambda stage, fraction: told.append(stage), silence_s=3.0)
    assert told[-1] == "layer 34", "that is 3.5 s of work"
    assert _engine_children() - before == set()


async def test_cancelling_a_start_ends_the_child() -> None:
    loading = asyncio.Event()
    before = _engine_children()
    starting = _start("load_endless", lambda stage, fraction: loading.set() if fraction else None)
    await loading.wait()
    assert len(_engine_children() - before) == 1
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert _engine_children() - before == set()


async def test_closing_during_a_stream_ends_it_in_words_of_its_own() -> None:
    client = await _start("load_slow")
    events = client.submit("a", (5, 6), ENDLESS)
    await anext(events)
    await asyncio.gather(client.close(), client.close())
    await client.close()
    with pytest.raises(EngineClosed, match=r"^The model was unloaded or Fireside is ending\.$"):
        async for _ in events:
            pass
    with pytest.raises(EngineClosed, match=r"^The model was unloaded or Fireside is ending\.$"):
        await _answer(client, "b", (5,), ENDLESS)
    assert not _is_running(client.pid)


@posix_only
async def test_closing_a_child_that_hangs_ends_it_all_the_same() -> None:
    client = await _start("load_fake")
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    await client.close()
    assert not _is_running(client.pid)


@posix_only
async def test_step_age_grows_while_the_child_hangs() -> None:
    async with _client("load_slow") as client:
        events = client.submit("a", (5, 6), ENDLESS)
        await anext(events)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        await _until(lambda: client.stats.last_step_age_s > 0.5)
        os.kill(client.pid, signal.SIGCONT)
        await _until(lambda: client.stats.last_step_age_s < 0.5)
        await events.aclose()


@posix_only
async def test_child_leaves_ctrl_c_to_the_parent() -> None:
    async with _client("load_fake") as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        assert len(await _answer(client, "a", (5,), SamplingParams(max_tokens=3, ignore_eos=True))) == 3


async def test_idle_child_uses_no_cpu() -> None:
    async with _client("load_fake") as client:
        await _answer(client, "a", (5,), SamplingParams(max_tokens=3))
        await _until(lambda: _is_idle(client))
        child = psutil.Process(client.pid)
        before = child.cpu_times()
        await asyncio.sleep(0.6)
        after = child.cpu_times()
        assert (after.user - before.user) + (after.system - before.system) < 0.1


_PARENT = """
import asyncio
from engine.client import EngineClient
from engine.config import EngineConfig

def tell(stage, fraction):
    if fraction:
        import multiprocessing
        print(multiprocessing.active_children()[0].pid, flush=True)

async def main():
    config = EngineConfig(model="fake")
    client = await EngineClient.start(config, on_loading=tell, load_runner="tests.engine.fake_runner:{runner}")
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@posix_only
@pytest.mark.parametrize("runner", ["load_slow", "load_endless"])
async def test_child_ends_when_its_parent_is_killed(runner: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT.format(runner=runner)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(await asyncio.to_thread(parent.stdout.readline))
    assert _is_running(child)
    parent.kill()
    parent.wait()
    await _until(lambda: not _is_running(child))
    parent.stdout.close()


class _Outbox:
    """The messages that a child would send."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_all_tokens_of_a_step_travel_in_one_message() -> None:
    inbox: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for name in "abc":
        inbox.put(Submit(name, (5, 6), params))
    outbox = _Outbox()
    engine = Engine(FakeRunner(), EngineConfig(model="fake"))
    engine_step = engine.step

    def step() -> list[object]:
        events = engine_step()
        if not engine.has_work:
            inbox.put(Shutdown())
        return cast("list[object]", events)

    engine.step = step  # type: ignore[method-assign, assignment]
    _serve(engine, 0.0, inbox, outbox)  # type: ignore[arg-type]
    tokens = [message for message in outbox.sent if isinstance(message, Tokens)]
    assert [len(message.events) for message in tokens] == [3, 3, 3, 3]
    assert isinstance(outbox.sent[-1], Stats)
    assert outbox.sent[-1].stats.num_blocks_used == 0


def test_aborted_request_ends_with_an_abort_event() -> None:
    inbox: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
    for message in (Submit("a", (5, 6), ENDLESS), Abort(("a", "unknown")), Submit("b", (5,), ENDLESS), Abort(("b",))):
        inbox.put(message)
    inbox.put(Shutdown())
    outbox = _Outbox()
    _serve(Engine(FakeRunner(), EngineConfig(model="fake")), 0.0, inbox, outbox)  # type: ignore[arg-type]
    ended = [event for message in outbox.sent if isinstance(message, Tokens) for event in message.events]
    assert [(e.request_id, e.token_id, e.finish_reason) for e in ended] == [
        ("a", None, FinishReason.ABORT),
        ("b", None, FinishReason.ABORT),
    ]


def _is_running(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _engine_children() -> set[int]:
    """Spawned children of this process; the resource tracker is not one."""
    return {child.pid for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())}


async def test_the_cache_is_made_smaller_while_answers_come() -> None:
    async with _client("load_slow") as client:
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        answer = asyncio.create_task(_answer(client, "r", (2, 3, 4), params))
        await asyncio.sleep(0.05)
        memory = await client.resize_kv(1000)
        assert memory.num_blocks == client.memory.num_blocks == 1048
        with pytest.raises(BadRequest, match="At most"):
            await client.resize_kv(2047)
        assert (await client.resize_kv(0)).num_blocks == 2048
        assert await answer == solo_answer((2, 3, 4), 300, ignore_eos=True)


async def test_whoever_waits_for_the_cache_is_told_when_the_child_dies() -> None:
    async with _client("load_slow") as client:
        os.kill(client.pid or 0, signal.SIGSTOP)
        resize = asyncio.create_task(client.resize_kv(1))
        await asyncio.sleep(0.05)
        os.kill(client.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await resize
