"""Puts the page together: its rooms, and what of the rest of the house stands behind each."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from app.chat.service import ChatService
    from app.models.library import Library
    from app.models.manager import ModelManager
    from app.ui.live import Hub
    from app.ui.status import ModelStatus


def build_page(settings: Settings, service: "ChatService", manager: "ModelManager", library: "Library") -> "FastAPI":
    """An app of its own, for the page's slot. Imports Gradio, which takes seconds."""
    from fastapi import FastAPI

    from app.api.guard import admin
    from app.ui import page
    from app.ui.models_tab import models_room

    rooms = (_api_room(manager, library), models_room(library, manager, admin))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page.mount(app, service, lambda: _status(manager), rooms)
    return app


def _status(manager: "ModelManager") -> "ModelStatus":
    from app.ui.status import ModelStatus

    now = manager.status()
    return ModelStatus(
        model_id=now.model,
        state=now.state,
        stage=", ".join(filter(None, (now.stage, now.time_left))),
        fraction=now.fraction,
        error=now.error,
        max_model_len=now.max_model_len,
    )


def _api_room(manager: "ModelManager", library: "Library") -> Callable[["FastAPI", "Hub"], None]:
    """The API's own routes for models and memory under /ui, where the page's cookie is worth something."""
    from app.api.library import library_router
    from app.api.loading import loading_router
    from app.api.memory import memory_router

    routers = (
        library_router(library, manager),
        loading_router(manager, library.known_downloads),
        memory_router(manager),
    )

    def on_page(app: "FastAPI", hub: "Hub") -> None:
        for router in routers:
            app.include_router(router, prefix="/ui", include_in_schema=False)

    return on_page
