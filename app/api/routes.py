"""Puts the HTTP API on an app. `install` is the whole public face of app.api; app.server calls it, once."""

import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from app.api.chat import chat_router
from app.api.completions import completions_router
from app.api.discovery import discovery_router
from app.api.door import LOOPBACK_HOSTS, Door
from app.api.embeddings import embeddings_router
from app.api.errors import echo, error_response
from app.api.fim import fim_router
from app.api.guard import Guard
from app.api.health import health_router
from app.api.keys import Keyring
from app.api.library import Library, library_router
from app.api.limits import Charging, Limits
from app.api.loading import loading_router
from app.api.memory import memory_router
from app.api.messages import messages_router
from app.api.metrics import Metrics
from app.api.models import Downloading, Shelf, models_router
from app.api.ollama import ollama_router
from app.api.openapi import describe
from app.api.responses import responses_router
from app.api.tokens import tokens_router
from app.chat.service import ChatService
from app.errors import AppError

__all__ = ["LOOPBACK_HOSTS", "Charging", "Keyring", "Limits", "Metrics", "Shelf", "install"]

_log = logging.getLogger("fireside.api")
_OUR_FOLDERS = ("/v1", "/api")
_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]


def install(
    app: FastAPI,
    *,
    service: ChatService,
    shelf: Shelf,
    metrics: Metrics,
    version: str,
    keys: Keyring,
    limits: Limits,
    library: Library | None = None,
    allowed_hosts: frozenset[str] = LOOPBACK_HOSTS,
    allowed_origins: frozenset[str] = frozenset(),
) -> None:
    """Add the routes, the error handlers and the door to `app`. Call it before the page is mounted at "/".

    service          answers; the same object that the page gets. Make it with `ChatService(source, observer=
                     Charging(limits, metrics))`, so that every turn is counted (the page's too) and charged
    shelf            the models there are, and the state of the one in hand (app.api.models.Shelf)
    metrics          `Metrics(stats)`, with stats() -> EngineStats | None of the engine in hand
    version          of Fireside, for GET /version
    keys             who is let in; an empty ring lets everyone in
    limits           how much each key may ask
    library          search, fit and downloads (app.api.library.Library); None leaves their routes out
    allowed_hosts    names that the Host header may carry, "*" for every name
    allowed_origins  web pages elsewhere that may call, "*" for all
    """
    downloading: Downloading = library.known_downloads if library else list
    routers = [
        chat_router(service, shelf),
        completions_router(service, shelf),
        fim_router(service, shelf),
        messages_router(service, shelf),
        responses_router(service, shelf),
        ollama_router(service, shelf),
        embeddings_router(service, shelf),
        *([library_router(library, shelf)] if library else []),
        loading_router(shelf, downloading),  # both before the list, which takes every path below /models
        models_router(shelf, downloading),
        memory_router(shelf),
        tokens_router(service),
        discovery_router(service, shelf, version),
        health_router(shelf, metrics, version),
    ]
    for router in routers:
        app.include_router(router)
    served = [route for router in routers for route in router.routes]
    _refuse_the_rest(app, served)
    describe(app)
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(HTTPException, _http_error)

    def is_api(scope: Scope) -> bool:
        return _is_api(served, scope)

    app.add_middleware(
        Guard, keys=keys, limits=limits, is_api=is_api, refused=metrics.refused, page_origins=allowed_origins
    )
    app.add_middleware(Door, allowed_hosts=allowed_hosts, allowed_origins=allowed_origins, is_api=is_api)


def _refuse_the_rest(app: FastAPI, served: Sequence[BaseRoute]) -> None:
    """Own every path under /v1 and /api, and ours elsewhere with whatever method, so that a mistyped request gets our
    error and not the page's."""

    async def refuse(request: Request) -> Response:
        allowed = _methods_of(served, request)
        return _wrong_way(request, allowed) if allowed else error_response(_unknown_path(request), request.url.path)

    paths = [path for folder in _OUR_FOLDERS for path in (folder, f"{folder}/{{path:path}}")]
    for path in [*paths, *sorted({route.path for route in served if isinstance(route, Route)})]:
        app.add_route(path, refuse, methods=_ANY, include_in_schema=False)


def _is_api(served: Sequence[BaseRoute], scope: Scope) -> bool:
    """Ours, or a mistyped path of ours; the rest is the page's. What is no path at all is ours (`OPTIONS *`)."""
    if scope["type"] != "http":
        return False
    before, _, rest = scope["path"].partition("/")
    first = f"/{rest.partition('/')[0]}"
    return (
        bool(before)
        or first in (*_OUR_FOLDERS, "/openapi.json")
        or any(route.matches(scope)[0] is not Match.NONE for route in served)
    )


def _methods_of(served: Sequence[BaseRoute], request: Request) -> set[str]:
    """Methods under which the path would have been served."""
    partial = [route for route in served if route.matches(request.scope)[0] is Match.PARTIAL]
    return {method for route in partial for method in getattr(route, "methods", None) or ()}


def _wrong_way(request: Request, allowed: set[str]) -> Response:
    ways = ", ".join(sorted(allowed))
    error = AppError(405, "method_not_allowed", f"{echo(request.method)} is not served here.", hint=f"Use {ways}.")
    reply = error_response(error, request.url.path)
    reply.headers["Allow"] = ways
    return reply


def _unknown_path(request: Request) -> AppError:
    path = request.url.path
    hint = "The API has /v1/models, /v1/chat/completions and /v1/completions."
    if path.startswith("/v1/v1"):
        hint = "The client adds /v1 to its base URL by itself: leave it out there."
    return AppError(404, "not_found", f"Nothing is served at {echo(path)}.", hint=hint)


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    _log.info("request %s: refused, %s: %s", request.state.request_id, error.code, error.text)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """What starlette itself refuses (404, 405 outside /v1), in the same shape as our own refusals."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(_unknown_path(request), request.url.path)
    if error.status_code == 405:
        return _wrong_way(request, {*(error.headers or {}).get("Allow", "GET").split(", ")})
    return error_response(AppError(error.status_code, None, str(error.detail)), request.url.path)
