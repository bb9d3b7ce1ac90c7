"""Answers in the making. They live here, in the server: tabs only watch, so closing or reloading one ends nothing.

What a tab is shown is in the history first. So whatever ends a server, a tab finds again all that it has shown.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from app.background import in_daemon_thread
from app.chat.types import ChatDelta, ChatRequest, Progress, ScoredToken
from app.errors import AppError
from app.history.book import Book
from app.history.types import Node, State
from app.ui.live import INTERVAL_S, Changes, Event, Hub, Seen
from app.ui.status import Answerer, StatusOf

TOPIC = "chat"  # "chat:ID"
LIST_TOPIC = "chats"

_ENDINGS_FROM_OUTSIDE = ("engine_closed", "shutting_down")  # nothing is wrong with the answer, it can be gone on with
# What to do at the page, where the API's hint names its routes.
_NEXT_STEPS = {
    "no_model": "Choose one at the top of the page, then have it answer again.",
    "model_not_loaded": "Choose it at the top of the page, then have it answer again.",
    "model_not_found": "Choose another in the settings of this chat, or get it in Models.",
}
_log = logging.getLogger("fireside.answers")


class Piece(NamedTuple):
    text: str
    reasoning: str


class Whole(NamedTuple):
    num_pieces: int
    text: str
    reasoning: str


@dataclass(slots=True)
class Figures:
    """How an answer came to be. Times are seconds as this side of the server saw them.

    model_id    that answers, and how long its context is; None until it does
    wait_s      until a model was ready and the prompt made: loading, a swap of models
    ttft_s      from asking to the first piece
    thinking_s  from the first word of reasoning to the first of the answer
    """

    model_id: str | None = None
    max_model_len: int | None = None
    wait_s: float | None = None
    ttft_s: float | None = None
    thinking_s: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    error: str = ""


@dataclass(slots=True)
class RunningAnswer:
    """One answer, from its beginning to its end.

    node       as it was when this began: with text in it, the answer goes on there
    text       what is in the history by now, as `reasoning`: the first `num_kept` of all pieces that have come. Only
               they are shown
    progress   of a long prompt
    num_prompt tokens of the prompt; None until it is accepted
    tokens     with their probabilities, where they were asked
    """

    node: Node
    text: str
    reasoning: str
    figures: Figures = field(default_factory=Figures)
    pieces: list[Piece] = field(default_factory=list)
    num_kept: int = 0
    progress: Progress | None = None
    num_prompt: int | None = None
    tokens: list[ScoredToken] = field(default_factory=list)
    state: State = "writing"
    started_at: float = field(default_factory=time.monotonic)
    thinking_since: float | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: ChatDelta) -> None:
        now, figures = time.monotonic(), self.figures
        if figures.wait_s is None:
            figures.wait_s = now - self.started_at
        self.progress = delta.progress or self.progress
        if delta.prompt_token_ids:
            self.num_prompt = len(delta.prompt_token_ids)
        self.tokens.extend(delta.logprobs)
        figures.num_tokens += len(delta.token_ids)
        figures.finish_reason = delta.finish_reason or figures.finish_reason
        if delta.usage is not None:
            figures.usage = asdict(delta.usage)
        if delta.timings is not None:
            figures.timings = asdict(delta.timings)
        if delta.text or delta.reasoning:
            self._time(delta, now)
            self.pieces.append(Piece(delta.text, delta.reasoning))
        if delta.text or delta.reasoning or delta.progress:
            self.news.set()

    def _time(self, delta: ChatDelta, now: float) -> None:
        figures = self.figures
        if figures.ttft_s is None:
            figures.ttft_s = now - self.started_at
        if delta.reasoning and self.thinking_since is None:
            self.thinking_since = now
        if delta.text and self.thinking_since is not None and figures.thinking_s is None:
            figures.thinking_s = now - self.thinking_since

    def end(self) -> None:
        self._measure()
        self.over.set()
        self.news.set()

    def _measure(self) -> None:
        """An answer that did not come to its own end tells no figures: those that were seen here stand for them."""
        figures = self.figures
        if figures.timings is not None or figures.ttft_s is None or self.num_prompt is None:
            return
        decode_s = time.monotonic() - self.started_at - figures.ttft_s
        speed = (figures.num_tokens - 1) / decode_s if figures.num_tokens > 1 else 0.0
        cached = self.progress.num_cached if self.progress else 0
        figures.timings = {"decode_s": decode_s, "predicted_per_second": speed}
        figures.usage = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": figures.num_tokens,
            "cached_tokens": cached,
        }

    def whole(self) -> Whole:
        """All that has come, to be written and then to be `kept`."""
        fresh = self.pieces[self.num_kept :]
        text, reasoning = "".join(each.text for each in fresh), "".join(each.reasoning for each in fresh)
        return Whole(len(self.pieces), self.text + text, self.reasoning + reasoning)

    def kept(self, whole: Whole) -> None:
        self.num_kept, self.text, self.reasoning = whole

    def meta(self) -> dict[str, Any]:
        """What is kept beside the text. Where an answer was gone on with, its former thinking and tokens stay."""
        figures = {name: value for name, value in asdict(self.figures).items() if value is not None}
        tokens = [*self.node.meta.get("tokens", []), *(_scored(token) for token in self.tokens)]
        return {**self.node.meta, **figures, **({"tokens": tokens} if tokens else {})}


class Answers:
    """All answers in the making, by the id of their node. A source of the hub for the topics "chat:ID"."""

    def __init__(self, service: Answerer, status: StatusOf, book: Book, hub: Hub) -> None:
        self._service = service
        self._status = status
        self._book = book
        self._hub = hub
        self._changes = Changes(hub)
        self._running: dict[str, RunningAnswer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Held while a chat is looked at and then changed by it: tabs may ask at the same moment.
        self.turns = asyncio.Lock()
        hub.add(TOPIC, self)
        hub.add(LIST_TOPIC, self._changes)

    def begin(self, node: Node, request: ChatRequest) -> None:
        """Make the answer whose place in the history is `node`, of state writing."""
        running = RunningAnswer(node, node.text, node.reasoning)
        self._running[node.id] = running
        self._tasks[node.id] = asyncio.create_task(self._run(running, request))
        self.changed(node.chat_id)

    async def stop(self, node_id: str) -> bool:
        """End the engine's work now; what has come stays. Returns when that is kept; False where it was over before."""
        running, task = self._running.get(node_id), self._tasks.get(node_id)
        if running is None or task is None:
            return False
        _cancel(running, task, "stopped")
        await asyncio.wait((task,))
        return True

    async def stop_chat(self, chat_id: str, *, but: Collection[str] = ()) -> None:
        """As `stop`, for all answers of a chat but these."""
        here = [node_id for node_id, running in self._running.items() if running.node.chat_id == chat_id]
        ids = [node_id for node_id in here if node_id not in but]
        await asyncio.gather(*(self.stop(node_id) for node_id in ids))

    async def close(self) -> None:
        """The server ends: what has come is kept, and marked as cut."""
        for node_id, task in self._tasks.items():
            _cancel(self._running[node_id], task, "cut")
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def changed(self, chat_id: str) -> None:
        """Tabs that show this chat, or the list, are to read it again."""
        self._changes.changed(f"{TOPIC}:{chat_id}")
        self._changes.changed(LIST_TOPIC)

    # -- what tabs are told

    def news(self, topic: str, seen: Seen) -> Iterable[Event]:
        yield from self._changes.news(topic, seen)
        marks = seen.setdefault("marks", {})
        chat_id = topic.partition(":")[2]
        here = {node_id: each for node_id, each in self._running.items() if each.node.chat_id == chat_id}
        for node_id in marks.keys() - here.keys():
            del marks[node_id]
        for node_id, running in here.items():
            yield from _told(node_id, running, marks)

    # -- the making

    async def _run(self, running: RunningAnswer, request: ChatRequest) -> None:
        keeping = asyncio.create_task(self._keep(running))
        try:
            async with closing(self._service.stream(request)) as deltas:
                async for delta in deltas:
                    if keeping.done():
                        keeping.result()  # raises: what cannot be kept is not gone on with
                    if running.figures.model_id is None:  # it is here: while this waited another may have been chosen
                        status = self._status(request.model)
                        running.figures.model_id = request.model or status.model_id
                        running.figures.max_model_len = status.max_model_len
                    running.take(delta)
            running.state = "done"
        except asyncio.CancelledError:
            assert running.state in ("stopped", "cut")
        except Exception as error:
            running.state, running.figures.error = _failure(error)
        running.end()
        await asyncio.wait((keeping,))
        await self._end(running)

    async def _keep(self, running: RunningAnswer) -> None:
        """Write what has come, then show it, again and again."""
        while not running.over.is_set():
            await running.news.wait()
            running.news.clear()
            if running.num_kept < len(running.pieces):
                await self._write(running, "writing")
            self._hub.wake(f"{TOPIC}:{running.node.chat_id}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.over.wait(), INTERVAL_S)

    async def _write(self, running: RunningAnswer, state: State, meta: dict[str, Any] | None = None) -> None:
        whole, node_id = running.whole(), running.node.id
        history = self._book.of(node_id)
        await in_daemon_thread(
            lambda: history.write(node_id, text=whole.text, reasoning=whole.reasoning, state=state, meta=meta)
        )
        running.kept(whole)

    async def _end(self, running: RunningAnswer) -> None:
        try:
            await self._write(running, running.state, running.meta())
        except AppError as error:  # the chat was deleted meanwhile, or its file cannot be written
            _log.warning("answer %s could not be kept: %s", running.node.id, error.text)
        finally:
            del self._running[running.node.id], self._tasks[running.node.id]
            self.changed(running.node.chat_id)


def _cancel(running: RunningAnswer, task: asyncio.Task[None], state: State) -> None:
    """Unless it is ending already: its last words must reach the history."""
    if running.state == "writing":
        running.state = state
        task.cancel()


def _told(node_id: str, running: RunningAnswer, marks: dict[str, int]) -> Iterator[Event]:
    about = {"node_id": node_id, "num_tokens": running.figures.num_tokens, "thinking_s": running.figures.thinking_s}
    if node_id not in marks:
        yield {"kind": "answer", **about, "text": running.text, "reasoning": running.reasoning}
    elif marks[node_id] < running.num_kept:
        fresh = running.pieces[marks[node_id] : running.num_kept]
        text, reasoning = "".join(each.text for each in fresh), "".join(each.reasoning for each in fresh)
        yield {"kind": "piece", **about, "text": text, "reasoning": reasoning}
    elif running.progress is not None and not running.pieces:
        yield {"kind": "progress", **about, **running.progress._asdict()}
    marks[node_id] = running.num_kept


def _failure(error: Exception) -> tuple[State, str]:
    """How the answer ended, and why in words."""
    if isinstance(error, AppError):
        step = _NEXT_STEPS.get(error.code or "")
        words = f"{error.message} {step}" if step else error.text
        return ("cut" if error.code in _ENDINGS_FROM_OUTSIDE else "failed"), words
    _log.exception("An answer broke", exc_info=error)
    return "failed", f"Something broke inside Fireside ({type(error).__name__}: {error}). The log has the details."


def _scored(token: ScoredToken) -> list[Any]:
    """[text, log-probability, [[text, log-probability], ...]]"""
    top = [[_words(each), round(logprob, 4)] for each, logprob in token.top]
    return [_words(token.token) if token.is_text else "", round(token.logprob or 0.0, 4), top]


def _words(token: bytes) -> str:
    return token.decode("utf-8", "backslashreplace")  # a part of a character is told by its bytes


@asynccontextmanager
async def closing(deltas: AsyncIterator[ChatDelta]) -> AsyncIterator[AsyncIterator[ChatDelta]]:
    """Close the iterator on the way out, now and not at some later collection: closing is what stops the engine."""
    try:
        yield deltas
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()
