"""What the front end adds to each token: from the engine's having it to the client's socket, p50 and p99.

    python -m app.bench_front --model smollm2-135m-instruct --streams 1,32,256

The whole way of a chat's answer (ChatService, tokenizer, API, uvicorn, loopback) runs in a process of its own, over a
scripted engine that gives each stream one token a step, as the real one does, and notes when. Clients, here, note when
the bytes come. Both read the machine's monotonic clock. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from app.api.routes import Charging, Keyring, Limits, Metrics, Shelf, install
from app.chat.service import ChatService
from engine.types import ORDINARY, FinishReason, ModelInfo, RequestTimes, SamplingParams, Standing, TokenEvent

TOKENS, STEP_S = 64, 0.05  # of each stream; between one step and the next
_MAX_MODEL_LEN = 4096
_WORDS = "and the time of our long day"
_TIMES = RequestTimes(queue_s=0.0, prefill_s=0.0, decode_s=1.0)
_PATIENCE_S = 300.0
_INFO = ModelInfo(
    architecture="none",
    quantization=None,
    dtype="none",
    device="none",
    vocab_size=10**6,
    num_layers=1,
    max_model_len=_MAX_MODEL_LEN,
    context_length=_MAX_MODEL_LEN,
    eos_token_ids=(),
    max_num_seqs=1024,
    max_num_batched_tokens=_MAX_MODEL_LEN,
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m app.bench_front", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and template are used")
    parser.add_argument("--streams", default="1,32,256", help="streams at once, of one run each (default 1,32,256)")
    options = parser.parse_args(arguments)
    fetch = [sys.executable, "-m", "app.models.fetch", options.model]
    folder = Path(subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip())
    result = measure(folder, [int(count) for count in options.streams.split(",")])
    for name, value in result.items():
        print(f"{name:<40} {value:>12,.3f}")
    print(json.dumps(result))
    return 0


def measure(folder: Path, streams: Sequence[int]) -> dict[str, float]:
    """Milliseconds a token, by the number of streams at once."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, theirs), daemon=True)
    server.start()
    try:
        port: int = _received(ours)
        asyncio.run(_run(port, 1))  # not counted: imports, the tokenizer's first use
        return {name: value for count in streams for name, value in _figures(ours, port, count).items()}
    finally:
        server.kill()
        server.join()


def _figures(server: Connection, port: int, count: int) -> dict[str, float]:
    _, before_s = _told(server)
    arrivals = asyncio.run(_run(port, count))
    emitted, after_s = _told(server)
    by_stream = {request_id.partition("/")[0]: times for request_id, times in emitted.items()}
    added_ms = [
        1000 * (came - gone)
        for name, times in arrivals.items()
        for came, gone in zip(times, by_stream[name], strict=True)
    ]
    return {
        f"front_end_p50_ms_{count}_streams": statistics.median(added_ms),
        f"front_end_p99_ms_{count}_streams": sorted(added_ms)[int(0.99 * (len(added_ms) - 1))],
        f"front_end_cpu_ms_per_token_{count}_streams": 1000 * (after_s - before_s) / len(added_ms),
    }


def _told(server: Connection) -> tuple[dict[str, list[float]], float]:
    server.send(None)
    return cast(tuple[dict[str, list[float]], float], _received(server))


def _received(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise SystemExit("The server of the bench does not answer.")
    return pipe.recv()


# -- the clients ---------------------------------------------------------------------------------------------------


async def _run(port: int, count: int) -> dict[str, list[float]]:
    """When each token of each stream came, by the stream's name."""
    readers = [_Reader() for _ in range(count)]
    loop = asyncio.get_running_loop()
    for number, reader in enumerate(readers):
        transport, _ = await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
        transport.write(_request(f"stream-{number}"))
    async with asyncio.timeout(_PATIENCE_S):
        await asyncio.gather(*(reader.closed.wait() for reader in readers))
    return {f"stream-{number}": reader.token_times() for number, reader in enumerate(readers)}


def _request(name: str) -> bytes:
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


class _Reader(asyncio.Protocol):
    """Notes when bytes come and reads them afterwards, so that reading does not count."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._pieces: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    def token_times(self) -> list[float]:
        """A frame whose delta has content is a token; it came with its last byte."""
        times, rest = [], b""
        for when, data in self._pieces:
            *frames, rest = (rest + data).split(b"\n\n")
            times += [when for frame in frames if b'"delta":{"content":"' in frame]
        return times


# -- the server ----------------------------------------------------------------------------------------------------


def _serve(folder: Path, pipe: Connection) -> None:
    asyncio.run(_Server(folder, pipe).run())


class _Server:
    """The app's front end; tells what it is asked through the pipe."""

    def __init__(self, folder: Path, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine = _Engine()
        self._source = _Source(_Model(folder, self._engine))

    async def run(self) -> None:
        limits, metrics = Limits(), Metrics(lambda: None)
        service = ChatService(self._source, observer=Charging(limits, metrics))
        app = FastAPI()
        shelf = cast(Shelf, None)  # nothing that is asked here looks at it
        install(app, service=service, shelf=shelf, metrics=metrics, version="0", keys=Keyring(), limits=limits)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
        text = (await service.text_of(""))[1]
        self._engine.token_ids = text.tokenizer.encode(_WORDS, add_special_tokens=False)
        tasks = [asyncio.create_task(self._engine.run()), asyncio.create_task(server.serve())]
        while not server.started:
            await asyncio.sleep(0.01)
        self._pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await asyncio.gather(*tasks, self._tell())

    async def _tell(self) -> None:
        """When asked: the times of the tokens since the last time, and how much CPU was used so far."""
        while True:
            await asyncio.to_thread(self._pipe.recv)
            self._pipe.send((self._engine.emitted, time.process_time()))
            self._engine.emitted = {}


@dataclass
class _Engine:
    """EngineLike by script.

    emitted   when each token was there, by request
    """

    emitted: dict[str, list[float]] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    _waiting: "dict[str, asyncio.Queue[None]]" = field(default_factory=dict)

    async def run(self) -> None:
        """Every stream gets a token at once, as one message of the engine brings them."""
        while True:
            await asyncio.sleep(STEP_S)
            now = time.monotonic()
            for name, queue in self._waiting.items():
                self.emitted[name].append(now)
                queue.put_nowait(None)

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        queue: asyncio.Queue[None] = asyncio.Queue()
        self.emitted[request_id], self._waiting[request_id] = [], queue
        for number in itertools.count():
            await queue.get()
            is_last = number + 1 == params.max_tokens
            if is_last:
                del self._waiting[request_id]
            yield TokenEvent(
                request_id=request_id,
                token_id=self.token_ids[number % len(self.token_ids)],
                finish_reason=FinishReason.LENGTH if is_last else None,
                num_prompt_tokens=len(prompt_token_ids),
                times=_TIMES if is_last else None,
            )


@dataclass(frozen=True)
class _Model:
    folder: Path
    engine: _Engine
    id: str = "bench"
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning: tuple[str, str] | None = None
    info: ModelInfo = _INFO


@dataclass(frozen=True)
class _Source:
    model: _Model

    @contextlib.asynccontextmanager
    async def lease(self, model: str) -> AsyncIterator[_Model]:
        yield self.model


if __name__ == "__main__":
    sys.exit(main())
