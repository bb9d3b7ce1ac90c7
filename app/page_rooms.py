"""Puts the page together: its rooms, and what of the rest of the house stands behind each."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.background import in_daemon_thread
from app.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from app.api.keys import Keyring
    from app.api.metrics import Metrics
    from app.chat.service import ChatService
    from app.models.library import Library
    from app.models.manager import ModelManager
    from app.models.status import ModelStatus as ManagedStatus
    from app.ui.attachments import Count
    from app.ui.lately import Lately
    from app.ui.live import Hub
    from app.ui.settings_tab import SettingsDesk
    from app.ui.status import ModelStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What the rooms are doors to."""

    settings: Settings
    service: "ChatService"
    manager: "ModelManager"
    library: "Library"
    metrics: "Metrics"
    lately: "Lately"
    keys: "Keyring"


def build_page(behind: Behind) -> "FastAPI":
    """An app of its own, for the page's slot. Imports Gradio, which takes seconds."""
    from fastapi import FastAPI

    from app.api.guard import admin
    from app.history.book import HISTORY_FILE, Book
    from app.ui import page
    from app.ui.chat_room import chat_room
    from app.ui.models_tab import models_room
    from app.ui.monitor import Monitor, monitor_room
    from app.ui.settings_tab import settings_room

    def status(model_id: str = "") -> "ModelStatus":
        return _status(manager.status(model_id))

    manager, service = behind.manager, behind.service
    monitor = Monitor(manager, service.under_way, behind.metrics.latencies)
    book = Book(behind.settings.home / HISTORY_FILE)
    rooms = (
        chat_room(service, status, book, _count(service, manager)),
        _api_room(behind),
        models_room(behind.library, manager, admin),
        monitor_room(monitor, behind.lately, admin),
        settings_room(_settings_desk(behind), admin),
    )
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page.mount(app, service, status, rooms)
    return app


def _status(now: "ManagedStatus") -> "ModelStatus":
    from app.ui.status import ModelStatus

    return ModelStatus(
        model_id=now.model,
        state=now.state,
        stage=now.stage,
        fraction=now.fraction,
        seconds_left=now.seconds_left,
        error=now.error,
        max_model_len=now.max_model_len,
    )


def _count(service: "ChatService", manager: "ModelManager") -> "Count":
    from app.chat.service import check_countable

    async def count(text: str) -> int | None:
        """Tokens of a text for the model in hand; None while none is ready."""
        if manager.status().state != "ready":
            return None
        check_countable(len(text))
        _, model_text = await service.text_of("")
        return len(await in_daemon_thread(lambda: model_text.tokenizer.encode(text, add_special_tokens=False)))

    return count


def _api_room(behind: Behind) -> Callable[["FastAPI", "Hub"], None]:
    """The API's own routes for models and memory under /ui, where the page's cookie is worth something; and the keys,
    which only the page shows.
    """
    from app.api.key_list import key_list_router
    from app.api.library import library_router
    from app.api.loading import loading_router
    from app.api.memory import memory_router
    from app.server import is_loopback

    settings, manager, library = behind.settings, behind.manager, behind.library
    is_open = not settings.allow_no_key and not is_loopback(settings.host)
    routers = (
        library_router(library, manager),
        loading_router(manager, library.known_downloads),
        memory_router(manager),
        key_list_router(behind.keys, settings, must_have_keys=is_open),
    )

    def on_page(app: "FastAPI", hub: "Hub") -> None:
        for router in routers:
            app.include_router(router, prefix="/ui", include_in_schema=False)

    return on_page


def _settings_desk(behind: Behind) -> "SettingsDesk":
    from app.startable import check_start
    from app.ui.settings_tab import SettingsDesk

    def follow(to_come: Settings) -> None:
        behind.manager.follow(to_come)
        behind.library.follow(to_come)

    def check(to_come: Settings) -> None:
        check_start(to_come, own_port=behind.settings.port)

    return SettingsDesk(behind.settings, os.environ, check, follow)
