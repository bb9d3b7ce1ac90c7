"""One WebSocket a browser tab, `/ui/live`: what the tab watches, and what is new of it.

A tab names topics ("status", "chat:7"); the part before the colon names a `Source`, which tells what a tab that has
seen so much has not seen yet. Nothing is queued for a tab: a slow one is told less often, in larger pieces, and a tab
that comes back is told from the beginning. WebSockets are not under a browser's limit of six connections a host.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

Event = Mapping[str, Any]
Seen = dict[str, Any]

INTERVAL_S = 1 / 12  # between two messages to one tab: this reads as smooth
MAX_TOPICS = 64
MAX_MESSAGE_CHARS = 16_384

_log = logging.getLogger("fireside.live")


class Source(Protocol):
    """Knows the topics of one kind."""

    def news(self, topic: str, seen: Seen) -> Iterable[Event]:
        """What a tab has not been told yet, oldest first.

        seen  the source's own notes on this tab and topic, empty at first; it keeps them up to date itself
        """
        ...


class State:
    """A source of one topic whose whole state is told whenever it has changed. `read` must be quick."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def news(self, topic: str, seen: Seen) -> Iterable[Event]:
        now = dict(self._read())
        if seen == now:
            return ()
        seen.clear()
        seen.update(now)
        return ({"kind": "state", **now},)


class Changes:
    """A source of topics of which a tab needs to hear only that they have changed: it reads them again by itself.

    It is told so at once when it begins to watch: what it read before that may have changed meanwhile.
    """

    def __init__(self, hub: "Hub") -> None:
        self._hub = hub
        self._times: dict[str, int] = {}

    def changed(self, topic: str) -> None:
        """Call from the event loop."""
        self._times[topic] = self._times.get(topic, 0) + 1
        self._hub.wake(topic)

    def news(self, topic: str, seen: Seen) -> Iterable[Event]:
        before, seen["times"] = seen.get("times"), self._times.get(topic, 0)
        return ({"kind": "changed"},) if before != seen["times"] else ()


class Hub:
    """All open tabs, and the sources of what they watch. Lives on one event loop."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._paces: dict[str, float] = {}
        self._tabs: set[_Tab] = set()

    def add(self, kind: str, source: Source, *, every_s: float | None = None) -> None:
        """Topics "kind" and "kind:..." are this source's. With `every_s` it is asked so often while a tab watches."""
        assert kind not in self._sources
        self._sources[kind] = source
        if every_s:
            self._paces[kind] = every_s

    def wake(self, topic: str) -> None:
        """There is news of this topic."""
        for tab in self._tabs:
            tab.wake(topic)

    def watched(self, topic: str) -> bool:
        return any(topic in tab.topics for tab in self._tabs)

    def source(self, topic: str) -> Source | None:
        return self._sources.get(_kind(topic))

    def pace(self, topic: str) -> float | None:
        return self._paces.get(_kind(topic))

    async def serve(self, socket: WebSocket) -> None:
        """One tab, from the opening of its socket to its end."""
        await socket.accept()
        tab = _Tab(self, socket)
        self._tabs.add(tab)
        telling = asyncio.create_task(tab.tell())
        try:
            await tab.listen()
        finally:
            self._tabs.discard(tab)
            telling.cancel()
            await asyncio.wait((telling,))

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_websocket_route("/ui/live", self.serve)
        return router


class _Tab:
    """
    topics  what it watches: topic -> the source's notes
    """

    def __init__(self, hub: Hub, socket: WebSocket) -> None:
        self.topics: dict[str, Seen] = {}
        self._hub = hub
        self._socket = socket
        self._due: set[str] = set()
        self._news = asyncio.Event()
        self._clocks: dict[str, asyncio.TimerHandle] = {}

    def wake(self, topic: str) -> None:
        if topic in self.topics:
            self._due.add(topic)
            self._news.set()

    async def listen(self) -> None:
        """Until the tab is closed. It sends {"watch": [every topic that it wants from now on]}."""
        try:
            while True:
                self._watch(_topics_in(await self._socket.receive_text()))
        except WebSocketDisconnect:
            pass
        except (ValueError, KeyError, RecursionError) as error:  # no JSON, bytes in place of text, too deep
            await self._socket.close(1003, str(error)[:100])
        finally:
            self._watch(())

    def _watch(self, topics: Collection[str]) -> None:
        for topic in self.topics.keys() - set(topics):
            del self.topics[topic]
            if clock := self._clocks.pop(topic, None):
                clock.cancel()
        for topic in topics:
            if topic not in self.topics:
                self.topics[topic] = {}
                self._look(topic)

    def _look(self, topic: str) -> None:
        self.wake(topic)
        if every_s := self._hub.pace(topic):
            self._clocks[topic] = asyncio.get_running_loop().call_later(every_s, self._look, topic)

    async def tell(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has gone; `listen` notices as well
            while True:
                await self._news.wait()
                self._news.clear()
                if events := self._gather():
                    await self._socket.send_text(json.dumps(events, ensure_ascii=False, separators=(",", ":")))
                    await asyncio.sleep(INTERVAL_S)

    def _gather(self) -> list[Event]:
        due, self._due = self._due, set()
        return [event for topic in sorted(due & self.topics.keys()) for event in self._news_of(topic)]

    def _news_of(self, topic: str) -> list[Event]:
        source = self._hub.source(topic)
        if source is None:
            return [{"topic": topic, "kind": "unknown"}]
        try:
            return [{"topic": topic, **event} for event in source.news(topic, self.topics[topic])]
        except Exception as error:  # one topic's fault must not silence the others
            _log.exception("no news of %s", topic)
            return [{"topic": topic, "kind": "broken", "message": f"{type(error).__name__}: {error}"}]


def _kind(topic: str) -> str:
    return topic.partition(":")[0]


def _topics_in(text: str) -> list[str]:
    """Raises ValueError in words for the tab's log."""
    if len(text) > MAX_MESSAGE_CHARS:
        raise ValueError(f"A message has at most {MAX_MESSAGE_CHARS} characters.")
    message = json.loads(text)
    topics = message.get("watch") if isinstance(message, dict) else None
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise ValueError('A message is {"watch": [topics]}.')
    if len(topics) > MAX_TOPICS:
        raise ValueError(f"A tab watches at most {MAX_TOPICS} topics.")
    return topics
