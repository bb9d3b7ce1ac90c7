"""What only a real socket shows, over a scripted engine: order and silence of a stream, leaving, posting again."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from app.errors import AppError
from engine.errors import EngineDied
from tests.app.api.house import USER, House
from tests.fakes import Script, byte_model_folder, ids

HELD = 30.0  # far longer than a test takes: only an abort ends such an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@asynccontextmanager
async def serving(house: House) -> AsyncIterator[str]:
    """The app behind a real server; gives its address."""
    server = uvicorn.Server(uvicorn.Config(house.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@asynccontextmanager
async def openai_client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(house) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def raw_stream(house: House) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a chat stream as they come off the socket."""
    body = {"messages": [USER], "stream": True}
    async with (
        serving(house) as address,
        httpx.AsyncClient(base_url=address) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        yield reply.aiter_lines()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.005)


async def test_two_answers_are_interleaved(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("abcdef"), pause_s=0.02))
    async with openai_client(house) as client:
        stream = await client.chat.completions.create(model="", messages=[USER], stream=True, n=2, seed=5)
        chunks = [chunk.choices[0] async for chunk in stream]
    order = [choice.index for choice in chunks if choice.delta.content]
    assert order != sorted(order)
    for index in (0, 1):
        assert "".join(choice.delta.content or "" for choice in chunks if choice.index == index) == "abcdef"
    assert [params.seed for _, _, params in house.engine.submitted] == [5, 6]


async def test_a_permanent_fault_is_not_posted_again(folder: Path) -> None:
    """Else one failure after a long generation becomes three generations."""
    house = House(folder, Script(token_ids=ids("x"), error=RuntimeError("a fault of ours")))
    async with openai_client(house) as client:
        with pytest.raises(openai.InternalServerError):
            await client.with_options(max_retries=2).chat.completions.create(model="", messages=[USER])
    assert len(house.engine.submitted) == 1


async def test_a_request_that_an_engine_took_with_it_is_posted_again(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("x"), error=EngineDied("gone")))
    async with openai_client(house) as client:
        with pytest.raises(openai.InternalServerError, match="Send it again"):
            await client.with_options(max_retries=1).chat.completions.create(model="", messages=[USER])
    assert len(house.engine.submitted) == 2


async def test_closing_the_stream_aborts_in_the_engine(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("ab"), pause_s=HELD))
    async with openai_client(house) as client:
        stream = await client.chat.completions.create(model="", messages=[USER], stream=True, n=2)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await until(lambda: len(house.engine.submitted) == 2)
        await stream.close()
        await until(lambda: len(house.engine.aborted) == 2)
    assert not house.engine.running


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_nothing_comes_aborts_streamed_or_not(folder: Path, stream: bool) -> None:
    house = House(folder, Script(token_ids=ids("a"), gate=asyncio.Event()))
    async with openai_client(house) as client:
        request = asyncio.create_task(_read_all(client, stream))
        await until(lambda: bool(house.engine.running))
        request.cancel()
        await until(lambda: len(house.engine.aborted) == 1)
    assert not house.engine.running


async def _read_all(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer: Any = await client.chat.completions.create(model="", messages=[USER], stream=stream)
    if stream:
        async for _ in answer:
            pass


async def test_leaving_while_the_model_loads_leaves_no_task_behind(folder: Path) -> None:
    house = House(folder)
    house.source.gate = asyncio.Event()
    async with serving(house) as address:
        before = len(asyncio.all_tasks())
        async with httpx.AsyncClient(base_url=address) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(
                    "/v1/chat/completions", json={"messages": [USER]}, timeout=httpx.Timeout(100, read=0.2)
                )
        await until(lambda: len(asyncio.all_tasks()) <= before)
    assert house.engine.submitted == []


async def test_the_opening_chunk_comes_before_the_first_token(folder: Path) -> None:
    gate = asyncio.Event()
    async with raw_stream(House(folder, Script(token_ids=ids("a"), gate=gate))) as lines:
        opening = json.loads((await anext(lines)).removeprefix("data: "))
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        gate.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_a_request_that_waits_long_for_its_model_is_kept_alive_and_a_failed_load_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.stream._ACCEPT_S", 0.05)
    monkeypatch.setattr("app.api.stream.KEEP_ALIVE_S", 0.05)
    house = House(folder)
    house.source.gate = asyncio.Event()
    seen: list[str] = []
    async with raw_stream(house) as lines:
        async for line in lines:
            seen.append(line)
            if seen.count(": keep-alive") == 2:
                house.source.failure = AppError(503, "out_of_memory", "It does not fit.")
                house.source.gate.set()
    *_, last = [line for line in seen if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "out_of_memory"


async def test_silence_is_filled_with_comments_and_now_and_then_an_empty_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.stream.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("app.api.stream.EMPTY_CHUNK_S", 0.2)
    gate = asyncio.Event()
    seen: list[str] = []
    async with raw_stream(House(folder, Script(token_ids=ids("a"), gate=gate))) as lines:
        async for line in lines:
            seen.append(line)
            if sum('"delta":{}' in line for line in seen) == 2:
                gate.set()
    comments = [line for line in seen if line.startswith(":")]
    assert len(comments) >= 2 and set(comments) == {": keep-alive"}
    assert seen.index(": keep-alive") < next(n for n, line in enumerate(seen) if '"delta":{}' in line)
    assert [line for line in seen if line][-1] == "data: [DONE]"


async def test_a_client_that_leaves_in_the_middle_of_its_body_does_no_harm(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    house = House(folder, Script(token_ids=ids("ok")))
    async with openai_client(house) as client:
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: "the client left while sending" in caplog.text)
        assert (await client.chat.completions.create(model="", messages=[USER])).choices[0].message.content == "ok"
    assert "Traceback" not in caplog.text
