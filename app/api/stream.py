"""Deltas -> an HTTP reply, as a stream or as one JSON object. Client gone -> iterators closed, either way.

The order of a stream: headers and the dialect's opening as soon as the request is accepted, then pieces, then its
closing, end of the body. While nothing comes, a comment keeps the connection alive, and now and then an empty piece:
some clients' clocks count chunks alone. A failure after the headers is the last that is sent.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.api.dialect import Answer, Dialect, WholeDialect, json_bytes
from app.api.errors import internal_error
from app.chat.types import ChatDelta
from app.errors import AppError

KEEP_ALIVE_S = 10.0
EMPTY_CHUNK_S = 60.0
_ACCEPT_S = 10.0  # a request that still waits for its model after this long gets its headers and keep-alives
_REFUSAL_S = 0.25  # the engine's own refusals (queue full) come at once, if at all; they still become a status

_log = logging.getLogger("fireside.api")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class WholeReply(Response):
    """The reply to a request, as one JSON object.

    sources   an iterator for each answer, `dialect.choices` for each prompt; not started yet
    """

    def __init__(self, sources: Sequence[AsyncGenerator[ChatDelta, None]], dialect: WholeDialect) -> None:
        super().__init__()
        self._sources = sources
        self._whole_dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._reply(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(work, gone)
        if not work.cancelled():
            work.result()

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = [Answer() for _ in self._sources]
        async with Merged(self._sources, self._whole_dialect.choices) as merged:
            try:
                while merged.open:
                    index, delta = await merged.next()
                    answers[index].add(delta)
                reply = Response(json_bytes(self._whole_dialect.whole(answers)), media_type="application/json")
            except Exception as error:
                reply = self._whole_dialect.refusal(_app_error(error))
        await reply(scope, receive, send)


class AnswerReply(WholeReply):
    """The same, or a stream."""

    def __init__(self, sources: Sequence[AsyncGenerator[ChatDelta, None]], dialect: Dialect, *, stream: bool) -> None:
        super().__init__(sources, dialect)
        self._dialect = dialect
        self._stream = stream

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._as_stream if self._stream else super()._reply
        await reply(scope, receive, send)

    async def _as_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Merged(self._sources, self._dialect.choices) as merged:
            try:
                early = await _before_headers(merged)
            except Exception as error:
                await self._dialect.refusal(_app_error(error))(scope, receive, send)
                return
            await send(_head(self._dialect.stream_type))
            async with aclosing(self._frames(merged, early)) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, merged: "Merged", early: Sequence[tuple[int, ChatDelta]]) -> AsyncGenerator[bytes, None]:
        for frame in self._dialect.opening():
            yield frame
        try:
            async for index, delta in _all(early, merged):
                if delta is None:
                    yield self._dialect.keep_alive()
                    continue
                for frame in self._dialect.piece(index, delta):
                    yield frame
        except Exception as error:
            for frame in self._dialect.failure(_app_error(error)):
                yield frame
            return
        for frame in self._dialect.closing():
            yield frame


class Merged:
    """Several answers as one sequence of (index, delta). Leaving the `async with` closes every source.

    The answers of one prompt come `choices` in a row. The first of them goes ahead to its first text, so that the
    others find the prompt in the prefix cache.

    open   indices of the answers that have not finished
    """

    def __init__(self, sources: Sequence[AsyncGenerator[ChatDelta, None]], choices: int) -> None:
        self._sources = sources
        self._choices = choices
        self._ready = [asyncio.Event() for _ in sources[::choices]]
        self._queue: asyncio.Queue[tuple[int, ChatDelta | Exception]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.open = set(range(len(sources)))

    async def __aenter__(self) -> "Merged":
        self._tasks = [asyncio.create_task(self._drain(index)) for index in range(len(self._sources))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _cancel(*self._tasks)

    async def next(self, timeout_s: float | None = None) -> tuple[int, ChatDelta]:
        """Raises what a source raised; TimeoutError where nothing came, which loses nothing."""
        if self._queue.empty():
            async with asyncio.timeout(timeout_s):
                index, item = await self._queue.get()
        else:
            index, item = self._queue.get_nowait()
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self.open.discard(index)
        return index, item

    async def _drain(self, index: int) -> None:
        first_of_prompt, is_follower = divmod(index, self._choices)
        ready = self._ready[first_of_prompt]
        if is_follower:
            await ready.wait()
        try:
            async with aclosing(self._sources[index]) as deltas:
                async for delta in deltas:
                    self._queue.put_nowait((index, delta))
                    if not delta.is_empty:
                        ready.set()
        except Exception as error:
            self._queue.put_nowait((index, error))


async def _before_headers(merged: Merged) -> list[tuple[int, ChatDelta]]:
    """Wait until the request is accepted, and a moment longer: a refusal before the headers still has a status."""
    early: list[tuple[int, ChatDelta]] = []
    try:
        early.append(await merged.next(_ACCEPT_S))
        early.append(await merged.next(_REFUSAL_S))
    except TimeoutError:
        pass
    return early


async def _all(early: Sequence[tuple[int, ChatDelta]], merged: Merged) -> AsyncIterator[tuple[int, ChatDelta | None]]:
    """Every delta that says something; in a silence (0, None) each KEEP_ALIVE_S and an empty one each EMPTY_CHUNK_S."""
    for index, delta in early:
        if not delta.is_silent:
            yield index, delta
    last_chunk = time.monotonic()
    while merged.open:
        try:
            index, delta = await merged.next(KEEP_ALIVE_S)
        except TimeoutError:
            if time.monotonic() - last_chunk < EMPTY_CHUNK_S:
                yield 0, None
                continue
            index, delta = min(merged.open), ChatDelta()
        else:
            if delta.is_silent:
                continue
        last_chunk = time.monotonic()
        yield index, delta


def _head(content_type: str) -> Message:
    response = Response(headers=_HEADERS, media_type=content_type)
    del response.headers["content-length"]
    return {"type": "http.response.start", "status": 200, "headers": response.raw_headers}


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed its side; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _app_error(error: Exception) -> AppError:
    if isinstance(error, AppError):
        return error
    _log.error("an answer failed", exc_info=error)
    return internal_error()
