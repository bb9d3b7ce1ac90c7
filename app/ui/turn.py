"""One answer on its way from the service to a tab: gathered, handed on at a pace a page can draw, stopped for good.

Knows no widget. `ChatTab` makes one `RunningTurn` a message and draws what `updates` yields.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Self

from app.chat.types import ChatDelta, ChatRequest, Timings, Usage
from app.errors import AppError
from app.ui.status import Answerer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """All that has come so far. Times are seconds as this side of the server saw them.

    ttft_s   from asking to the first piece, waiting for the model included
    error    why it ended early, in words
    """

    text: str = ""
    reasoning: str = ""
    ttft_s: float | None = None
    thinking_s: float | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    is_stopped: bool = False
    error: str = ""

    @property
    def has_begun(self) -> bool:
        return bool(self.text or self.reasoning)


class RunningTurn:
    """An answer being made, from `async with` to its end: leaving the block ends the engine's work too.

    interval_s  shortest time between two updates: 12 a second read as smooth and cost a few milliseconds each
    calm_s      longest time without one, so that a waiting page can say what it waits for
    idle_s      an answer that nobody has drawn for so long is abandoned, whatever happened to its tab
    """

    def __init__(
        self,
        service: Answerer,
        request: ChatRequest,
        *,
        interval_s: float = 1 / 12,
        calm_s: float = 0.5,
        idle_s: float = 30.0,
    ) -> None:
        self.answer = Answer()
        self.is_discarded = False
        self._service = service
        self._request = request
        self._interval_s = interval_s
        self._calm_s = calm_s
        self._idle_s = idle_s
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._started_at = self._drawn_at = time.monotonic()
        self._thinking_since: float | None = None

    async def __aenter__(self) -> Self:
        self._gathering = asyncio.create_task(self._gather())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gathering.cancel()
        await asyncio.wait((self._gathering,))
        self._over.set()

    async def updates(self) -> AsyncIterator[Answer]:
        """The growing answer, the same object each time; the last is whole."""
        while not self._gathering.done():
            await self._wait_for_news()
            self._drawn_at = time.monotonic()
            yield self.answer
        yield self.answer

    def stop(self) -> None:
        """End the engine's work now. What has come stays, and `updates` ends with it."""
        if not self._gathering.done():
            self.answer.is_stopped = True
            self._gathering.cancel()

    async def discard(self) -> None:
        """Stop, tell whoever draws that the answer is not wanted any more, and wait until it has let go."""
        self.is_discarded = True
        self.stop()
        await self._over.wait()

    async def _wait_for_news(self) -> None:
        """Rest for what is left of the interval, then until something came; the end cuts both short."""
        rest_s = self._drawn_at + self._interval_s - time.monotonic()
        await asyncio.wait((self._gathering,), timeout=max(0.0, rest_s))
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait((news, self._gathering), timeout=self._calm_s, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()

    async def _gather(self) -> None:
        try:
            async with closing(self._service.stream(self._request)) as deltas:
                async for delta in deltas:
                    self._take(delta)
        except Exception as error:
            self.answer.error = _in_words(error)

    def _take(self, delta: ChatDelta) -> None:
        now, answer = time.monotonic(), self.answer
        if now - self._drawn_at > self._idle_s:
            raise AppError(
                499, "abandoned", f"Nobody has looked at this answer for {self._idle_s:.0f} s; it ended here."
            )
        if answer.ttft_s is None and (delta.text or delta.reasoning):
            answer.ttft_s = now - self._started_at
        if delta.reasoning and self._thinking_since is None:
            self._thinking_since = now
        if delta.text and self._thinking_since is not None and answer.thinking_s is None:
            answer.thinking_s = now - self._thinking_since
        answer.text += delta.text
        answer.reasoning += delta.reasoning
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answer.usage = delta.usage or answer.usage
        answer.timings = delta.timings or answer.timings
        self._news.set()


@asynccontextmanager
async def closing(deltas: AsyncIterator[ChatDelta]) -> AsyncIterator[AsyncIterator[ChatDelta]]:
    """Close the iterator on the way out, now and not at some later collection: closing is what stops the engine."""
    try:
        yield deltas
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()


def _in_words(error: Exception) -> str:
    if isinstance(error, AppError):
        return error.text
    _log.exception("An answer broke", exc_info=error)
    return f"Something broke inside Fireside ({type(error).__name__}: {error}). The log has the details."
