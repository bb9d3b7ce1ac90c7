"""Many streams at once, of which a third leave at random: nobody gets another's text, and nothing is left behind."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clients.stage import Stage, model_folder, until
from tests.e2e.test_real_server import Server
from tests.fakes import Script

STREAMS = 256
REAL_STREAMS = 32
_PATIENCE_S = 200.0


def leaves_after(number: int) -> int | None:
    """Pieces of text after which client `number` leaves; None where it stays."""
    source = random.Random(number)
    return source.randrange(30) if number % 3 == 0 else None


async def ask(http: httpx.AsyncClient, question: str, leave_after: int | None, **fields: Any) -> str:
    """The text of a streamed answer, as far as it was read."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True} | fields
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if leave_after is not None and len(text) >= leave_after:
                break
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return text


def http_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=_PATIENCE_S)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A model that repeats what it was asked, without an end where it was asked to."""

    def repeat(prompt: tuple[int, ...]) -> Script:
        text = bytes(token for token in prompt if token < 256).partition(b"user\n")[2].partition(b"\n")[0]
        return Script(token_ids=tuple(text * (1000 if b"endlessly" in text else 1)), pause_s=0.005)

    with Stage(model_folder(tmp_path_factory.mktemp("load") / "byte-model"), repeat) as running:
        yield running


def question_of(number: int) -> str:
    how = "endlessly" if leaves_after(number) is not None else "once"
    return f"client {number} asks {how} {chr(97 + number % 26) * 8};"


async def test_many_streams_stay_apart_and_those_who_leave_leave_nothing(stage: Stage) -> None:
    process = psutil.Process()
    async with http_client(stage.url) as http:
        await ask(http, question_of(1), None)
    await asyncio.to_thread(until, lambda: not stage.engine.running)
    tasks, handles = stage.num_tasks(), process.num_fds()
    async with http_client(stage.url) as http:
        asked = (ask(http, question_of(number), leaves_after(number)) for number in range(STREAMS))
        texts = await asyncio.gather(*asked)
    for number, text in enumerate(texts):
        whole = question_of(number)
        assert text == whole if leaves_after(number) is None else (whole * 1000).startswith(text)
    await asyncio.to_thread(until, lambda: not stage.engine.running)
    assert len(stage.engine.aborted) == sum(leaves_after(number) is not None for number in range(STREAMS)) > 64
    await asyncio.to_thread(until, lambda: stage.num_tasks() <= tasks and process.num_fds() <= handles)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_streams_of_the_real_model_are_each_the_answer_alone(embedded_home: Path) -> None:
    server = Server(embedded_home)
    try:
        await _play_real(server)
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


async def _play_real(server: Server) -> None:
    engine, app = server.engine_process(), psutil.Process(server.process.pid)

    fields = {"temperature": 0, "max_tokens": 24}
    questions = [f"Write one sentence about the number {number}." for number in range(REAL_STREAMS)]
    async with http_client(server.url) as http:
        alone = [await ask(http, question, None, **fields) for question in questions]
    await server.until_idle()
    handles = (app.num_fds(), engine.num_fds())
    async with http_client(server.url) as http:
        asked = (ask(http, question, leaves_after(number), **fields) for number, question in enumerate(questions))
        together = await asyncio.gather(*asked)
    for number, text in enumerate(together):
        assert alone[number] == text if leaves_after(number) is None else alone[number].startswith(text)
    await server.until_idle()
    await asyncio.to_thread(until, lambda: app.num_fds() <= handles[0] and engine.num_fds() <= handles[1])
