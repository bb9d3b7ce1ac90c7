"""The API over a scripted engine, as one object: an app with the real installer and everything behind it fake."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from app.api.keys import Keyring
from app.api.limits import Charging, Limits
from app.api.routes import LOOPBACK_HOSTS, Metrics, install
from app.chat.service import ChatService
from engine.types import EngineStats
from tests.fakes import FakeEngine, FakeModel, FakeShelf, FakeSource, Script, model_info


class House:
    def __init__(
        self,
        folder: Path,
        script: Any = None,
        *,
        hosts: frozenset[str] = LOOPBACK_HOSTS,
        origins: frozenset[str] = frozenset(),
        keys: Keyring | None = None,
        limits: Limits | None = None,
        max_model_len: int = 200,
    ) -> None:
        budgets = limits or Limits()
        self.engine = FakeEngine(script or Script())
        self.stats: EngineStats | None = None
        self.source = FakeSource(FakeModel(folder, self.engine, info=model_info(max_model_len=max_model_len)))
        self.shelf = FakeShelf()
        self.metrics = Metrics(lambda: self.stats)
        self.service = ChatService(self.source, observer=Charging(budgets, self.metrics))
        self.app = FastAPI()
        install(
            self.app,
            service=self.service,
            shelf=self.shelf,
            metrics=self.metrics,
            version="1.2.3",
            keys=keys or Keyring(),
            limits=budgets,
            allowed_hosts=hosts,
            allowed_origins=origins,
        )

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        """In process, no socket; an exception that the app lets out would come out here."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", **options) as client:
            yield client

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.request(method, path, **options)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.ask("POST", "/v1/chat/completions", json={"messages": [USER]} | body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.ask("POST", "/v1/completions", json={"prompt": "x"} | body)


USER = {"role": "user", "content": "Hi"}
