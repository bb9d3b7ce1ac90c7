"""Swaps under streams, and kill -9 at random moments: real processes over a scripted model whose every letter is known.

Nothing is lost (each stream ends, by its end or by an error that says why), nothing is false (a model gives its own
letter and no other), no process is left.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.app.test_server import LoneServer, posix_only

LETTERS = {"letters": "a", "others": "b"}
_PATIENCE_S = 120.0


@dataclass
class Ended:
    """How a stream ended: `finish` or `error`, never neither."""

    text: str = ""
    finish: str = ""
    error: str = ""


class Client:
    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits)
        self._num_asked = 0

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def stream(self, model: str, num_tokens: int) -> Ended:
        """No two requests are the same: one that was there at two deaths would be refused."""
        self._num_asked += 1
        messages = [{"role": "user", "content": f"request {self._num_asked}"}]
        body = {"model": model, "messages": messages, "stream": True, "max_tokens": num_tokens}
        ended = Ended()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("{"):  # refused before its first byte
                    ended.error = json.loads(line)["error"]["code"]
                if not line.startswith("data: {"):
                    continue
                chunk: dict[str, Any] = json.loads(line[6:])
                if "error" in chunk:
                    ended.error = chunk["error"]["code"]
                    continue
                assert not ended.finish and not ended.error, "something came after the end"
                ended.text += chunk["choices"][0]["delta"].get("content") or ""
                ended.finish = chunk["choices"][0]["finish_reason"] or ""
        assert bool(ended.finish) != bool(ended.error), ended
        assert set(ended.text) <= {LETTERS[model]}, ended
        assert ended.error or len(ended.text) == num_tokens, ended
        return ended

    async def running(self) -> dict[str, float]:
        lines = (await self._http.get("/metrics")).text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("fireside_num_requests")}

    async def health(self) -> dict[str, Any]:
        return dict((await self._http.get("/health")).json())


def engines_of(server: LoneServer) -> list[psutil.Process]:
    """Children that have a model."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


async def most_engines(server: LoneServer, over: asyncio.Event) -> int:
    """At one time, until `over`."""
    most = 0
    while not over.is_set():
        most = max(most, len(await asyncio.to_thread(engines_of, server)))
        await asyncio.sleep(0.01)
    return most


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LoneServer]:
    running = LoneServer(tmp_path, "--max-models", "1", "--drain-timeout", "120")
    yield running
    running.kill()


async def swaps_under_streams(server: LoneServer, num_swaps: int) -> list[float]:
    """Seconds from asking for a model to its answer, while eight streams of the one before it go on."""
    over, seconds = asyncio.Event(), []
    counting = asyncio.create_task(most_engines(server, over))
    async with Client(server.wait_until_ready()) as client:
        await client.stream("letters", 1)
        for number in range(num_swaps):
            old, new = list(LETTERS)[:: -1 if number % 2 else 1]
            streams = [asyncio.create_task(client.stream(old, 20 + 5 * i)) for i in range(8)]
            await asyncio.sleep(0.1)
            began = time.monotonic()
            answers = await asyncio.gather(*(client.stream(new, 3) for _ in range(4)))
            seconds.append(time.monotonic() - began)
            assert [ended.finish for ended in (*answers, *await asyncio.gather(*streams))] == ["length"] * 12
    over.set()
    assert await counting == 1, "the old engine is gone before the new one starts"
    return seconds


async def test_swaps_lose_no_stream_and_two_engines_are_never_there(server: LoneServer) -> None:
    assert len(await swaps_under_streams(server, 2)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_many_swaps_lose_no_stream(server: LoneServer) -> None:
    seconds = sorted(await swaps_under_streams(server, 30))
    print(f"\nswap under 8 streams: median {seconds[15]:.2f} s, longest {seconds[-1]:.2f} s")


async def kills_of_the_child(server: LoneServer, num_kills: int) -> tuple[int, int]:
    """(streams, of which cut by a kill). The moments: in a load, in a prompt, in an answer, at rest."""
    moments = random.Random(7)
    outcomes: list[Ended] = []
    async with Client(server.wait_until_ready()) as client:
        for _ in range(num_kills):
            streams = [asyncio.create_task(client.stream("letters", moments.randrange(1, 60))) for _ in range(4)]
            await asyncio.sleep(moments.uniform(0, 0.6))
            for engine in engines_of(server):
                engine.kill()
            outcomes += await asyncio.gather(*streams)
            assert (await client.stream("letters", 3)).finish == "length", "the next request is answered"
        health = await client.health()
    assert health["state"] == "ready" and health["last_step_age_s"] == 0
    assert {ended.error for ended in outcomes} <= {"", "engine_died"}
    assert len(engines_of(server)) == 1
    return len(outcomes), sum(bool(ended.error) for ended in outcomes)


@posix_only
async def test_kills_of_the_engine_cost_its_answers_and_no_more(server: LoneServer) -> None:
    asked, _ = await kills_of_the_child(server, 5)
    assert asked == 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@posix_only
async def test_fifty_kills_of_the_engine(server: LoneServer) -> None:
    asked, cut = await kills_of_the_child(server, 50)
    print(f"\n50 kills of the engine: {asked} streams, {cut} cut with an error that says so, none lost")
    assert cut > 0


@posix_only
async def test_an_engine_that_stands_still_is_found_by_the_age_of_its_last_step(tmp_path: Path) -> None:
    server = LoneServer(tmp_path, "--step-timeout", "4")
    try:
        async with Client(server.wait_until_ready()) as client:
            (engine,) = engines_of(server)
            stream = asyncio.create_task(client.stream("letters", 90_000))
            while not (await client.running())["fireside_num_requests_running"]:
                await asyncio.sleep(0.05)
            engine.suspend()
            assert (await stream).error == "engine_died"
            assert (await client.stream("letters", 3)).finish == "length"
            assert [other.pid for other in engines_of(server)] != [engine.pid]
    finally:
        server.kill()


@pytest.mark.slow
@posix_only
async def test_an_engine_that_stands_still_while_it_loads_is_found_by_its_silence(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = LoneServer(tmp_path, "--load-timeout", "25")
    try:
        async with Client(server.url()) as client:
            while "held" not in (await client.health())["detail"]:
                await asyncio.sleep(0.05)
            (engine,) = engines_of(server)
            engine.suspend()
            while engine in engines_of(server):
                await asyncio.sleep(0.05)
            hold.unlink()
            assert (await client.stream("letters", 3)).finish == "length"
            assert "hung while it loaded" in server.output
    finally:
        server.kill()


def kills_of_the_app(home: Path, num_kills: int) -> None:
    """At random moments of a start, of a load, of answers; then one whole start, in which all is as it was."""
    moments = random.Random(11)
    for _ in range(num_kills):
        server = LoneServer(home)
        family = {psutil.Process(server.process.pid)}
        until = time.monotonic() + moments.uniform(0, 4)
        while time.monotonic() < until:
            family |= {*psutil.Process(server.process.pid).children(recursive=True)}
            time.sleep(0.02)
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, "a process is left"
    server = LoneServer(home)
    try:
        asked = {"model": "letters", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        answer = httpx.post(f"{server.wait_until_ready()}/v1/chat/completions", json=asked, timeout=_PATIENCE_S).json()
        assert answer["choices"][0]["message"]["content"] == "aaa"
    finally:
        server.kill()


@posix_only
def test_kills_of_the_app_leave_no_process_and_the_next_start_is_whole(tmp_path: Path) -> None:
    kills_of_the_app(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@posix_only
def test_fifty_kills_of_the_app(tmp_path: Path) -> None:
    kills_of_the_app(tmp_path, 50)
