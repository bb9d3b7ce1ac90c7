"""The page's rooms over a real library and a scripted manager, without Gradio: for tests of their routes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.keys import ApiKey
from app.models.memory.room import Holding
from app.models.status import ModelStatus
from app.ui import refusals
from app.ui.live import Hub
from tests.fakes import memory_report

ADMIN, USER = ApiKey("boss", b"", True), ApiKey("laptop", b"")


@dataclass
class FakeModels:
    """The manager. `asked` is what it was told."""

    now: list[ModelStatus] = field(default_factory=lambda: [ModelStatus(state="ready", model="one", max_model_len=100)])
    asked: list[str] = field(default_factory=list)

    def statuses(self) -> list[ModelStatus]:
        return self.now

    def holdings(self) -> list[Holding]:
        return [Holding("cuda", None, replace(memory_report(), weights_bytes=10**9, kv_bytes=0), 0)]

    def load(self, name: str) -> str:
        self.asked.append(f"load {name}")
        return name


def page_of(*rooms: Callable[[FastAPI, Hub], None], key: ApiKey = ADMIN) -> tuple[FastAPI, Hub]:
    """An app with these rooms, asked by whoever has `key`."""
    app, hub = FastAPI(), Hub()
    refusals.install(app)
    app.add_middleware(Known, key=key)
    for room in rooms:
        room(app, hub)
    return app, hub


class Known:
    """What the guard does: says whose request it is."""

    def __init__(self, app: ASGIApp, key: ApiKey) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["key"] = self._key
        await self._app(scope, receive, send)


def told(hub: Hub, topic: str) -> dict[str, Any]:
    """What a tab that begins to watch is told."""
    source = hub.source(topic)
    assert source is not None
    (event,) = source.news(topic, {})
    return dict(event)
