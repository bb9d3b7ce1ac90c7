"""Puts the HTTP API on an app. `install` is the whole public face of app.api; app.server calls it, once."""

import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from app.api.chat import chat_router
from app.api.completions import completions_router
from app.api.door import LOOPBACK_HOSTS, Door
from app.api.errors import echo, error_response
from app.api.health import health_router
from app.api.metrics import Metrics
from app.api.models import Shelf, models_router
from app.chat.service import ChatService
from app.errors import AppError

__all__ = ["LOOPBACK_HOSTS", "Metrics", "Shelf", "install"]

_log = logging.getLogger("fireside.api")
_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def install(
    app: FastAPI,
    *,
    service: ChatService,
    shelf: Shelf,
    metrics: Metrics,
    version: str,
    allowed_hosts: frozenset[str] | None = LOOPBACK_HOSTS,
) -> None:
    """Add the routes, the error handlers and the door to `app`. Call it before the page is mounted at "/".

    service        answers; the same object that the page gets. Make it with `ChatService(source, observer=metrics)`,
                   so that every turn, the page's too, is counted
    shelf          the models there are, and the state of the one in hand (app.api.models.Shelf)
    metrics        `Metrics(stats)`, with stats() -> EngineStats | None of the engine in hand
    version        of Fireside, for GET /version
    allowed_hosts  names that the Host header may carry; LOOPBACK_HOSTS where the server is bound to loopback, with
                   its own names added where it is bound elsewhere; None lets every name in
    """
    routers = [
        chat_router(service, shelf),
        completions_router(service, shelf),
        models_router(shelf),
        health_router(shelf, metrics, version),
    ]
    for router in routers:
        app.include_router(router)
    _refuse_the_rest(app, [route for router in routers for route in router.routes])
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Door, allowed_hosts=allowed_hosts)


def _refuse_the_rest(app: FastAPI, served: Sequence[BaseRoute]) -> None:
    """Own every path under /v1, so that a mistyped one gets our error and not the page's."""

    @app.api_route("/v1/{path:path}", methods=_ANY, include_in_schema=False)
    async def unknown(request: Request, path: str) -> Response:
        allowed = _methods_of(served, request)
        return error_response(_wrong_method(request, allowed) if allowed else _unknown_path(request))


def _methods_of(served: Sequence[BaseRoute], request: Request) -> set[str]:
    """Methods under which the path would have been served."""
    partial = [route for route in served if route.matches(request.scope)[0] is Match.PARTIAL]
    return {method for route in partial for method in getattr(route, "methods", None) or ()}


def _wrong_method(request: Request, allowed: set[str]) -> AppError:
    ways = ", ".join(sorted(allowed))
    return AppError(405, "method_not_allowed", f"{request.method} is not served here.", hint=f"Use {ways}.")


def _unknown_path(request: Request) -> AppError:
    path = echo(request.url.path)
    return AppError(
        404,
        "not_found",
        f"Nothing is served at {path}.",
        hint="The API has /v1/models, /v1/chat/completions and /v1/completions.",
    )


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    _log.info("request %s: refused, %s: %s", request.state.request_id, error.code, error.text)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What starlette itself refuses (404, 405 outside /v1), in the same shape as our own refusals."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(_unknown_path(request))
    return error_response(AppError(error.status_code, None, str(error.detail)))
