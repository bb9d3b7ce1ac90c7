"""The page: one Gradio Blocks app mounted at the root of the server. Holds the frame; the parts live beside it.

What a tab shows is `frame.html`, drawn by the modules in `static/` over Gradio's own frame: they need not wait for
Gradio's scripts, and read over short requests and one WebSocket (live.py). `mount` is the whole public face. It must be
called after every other route, since a mount at "/" takes what is left.
"""

import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.ui import refusals
from app.ui.live import Hub, State
from app.ui.named import NamedChat
from app.ui.status import Answerer, StatusSource

_HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import (?:[^"]+ from )?"(\.[^"]+)";', re.MULTILINE)
# What Gradio draws its own page into: unseen behind ours, its loading sign would ask for 60 frames a second for ever.
_GRADIOS_OWN = re.compile(rb"<gradio-app.*?</gradio-app>", re.DOTALL)

# Text of a model is cleaned before it is drawn. This is the second wall: whatever might slip through can neither load
# from nor send to another host. Gradio itself needs inline scripts and eval.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "frame-src 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    )
)


# Puts one room's routes on the page's app and its sources into the hub.
Room = Callable[[FastAPI, Hub], None]

_STATUS_EVERY_S = 0.5


def mount(app: FastAPI, service: Answerer, status: StatusSource, rooms: Iterable[Room] = ()) -> None:
    """Put the page at "/" of `app`, after its other routes.

    service  answers; one object for every tab
    status   gives the model's state now; called from the event loop, so it must not block
    rooms    what stands behind the other tabs of the page
    """

    async def ui_status() -> dict[str, Any]:
        return asdict(status())

    hub = Hub()
    hub.add("status", State(lambda: asdict(status())), every_s=_STATUS_EVERY_S)
    app.add_api_route("/ui/status", ui_status, include_in_schema=False)
    refusals.install(app)
    app.include_router(hub.router())
    for room in rooms:
        room(app, hub)
    for folder in ("static", "vendor"):
        app.mount(f"/ui/{folder}", _Files(directory=_HERE / folder))
    gr.mount_gradio_app(
        app,
        _build(service),
        path="/",
        app_kwargs={
            "middleware": [Middleware(_SecurityHeaders), Middleware(_OwnHead, head=_head())],
            "exception_handlers": {404: _not_found},
        },
        favicon_path=str(_HERE / "favicon.png"),
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        theme=_theme(),
    )


def _head() -> str:
    """Our styles and modules, and what they draw."""
    frame = (_HERE / "frame.html").read_text(encoding="utf-8")
    styles = ("theme.css", *(f"ui/static/{name}.css" for name in ("style", "chats", "rooms")))
    return "".join(
        (
            "<title>Fireside</title>",  # Gradio sets it only once its scripts run
            *(f'<link rel="stylesheet" href="{style}">' for style in styles),
            *(f'<link rel="modulepreload" href="ui/{module}">' for module in _modules_of("static/chat.js")),
            f'<template id="fs-template">{frame}</template>',
            '<script type="module" src="ui/static/main.js"></script>',
            "<noscript>Fireside's page needs JavaScript.</noscript>",
        )
    )


def _modules_of(first: str) -> list[str]:
    """A module and all that it imports at its top, which a browser finds only level by level: named at once, they come
    before Gradio's scripts (docs/log.md has what that gains)."""
    found = [first]
    for module in found:
        text = (_HERE / module).read_text(encoding="utf-8")
        paths = [posixpath.normpath(posixpath.join(module, "..", path)) for path in _IMPORT.findall(text)]
        found += [path for path in dict.fromkeys(paths) if path not in found]
    return found


class _Files(StaticFiles):
    """Asked for again at each visit, which costs a 304: modules of two versions must not meet in one tab."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        reply = super().file_response(*args, **kwargs)
        reply.headers["Cache-Control"] = "no-cache"
        return reply


async def _not_found(request: Request, error: Exception) -> Response:
    """As the endpoint says it, for clients with a mistyped address; what Gradio has to say of its own parts stays."""
    assert isinstance(error, HTTPException)
    if error.detail != "Not Found":
        return JSONResponse({"detail": error.detail}, 404)
    message = f"Nothing is served at {request.url.path[:200]}. The endpoint is at /v1."
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    return JSONResponse({"error": body}, 404, {"x-should-retry": "false"})


def _build(service: Answerer) -> gr.Blocks:
    blocks = gr.Blocks(title="Fireside", analytics_enabled=False, fill_height=True, fill_width=True)
    with blocks:
        NamedChat(service)
    blocks.queue(default_concurrency_limit=None, api_open=False)
    # Gradio looks for new events a thousand times a second, 6 % of a core that the engine can use; fifty are enough.
    blocks._queue.sleep_when_free = 0.02
    return blocks


def _theme() -> gr.themes.Base:
    """Fonts that systems have, so nothing is fetched; text and buttons of a contrast above 4.5 to 1."""
    theme = gr.themes.Base(
        primary_hue="orange",
        neutral_hue="stone",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
    )
    return theme.set(
        body_text_color_subdued="*neutral_500",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
    )


class _SecurityHeaders:
    """Adds the policy to every answer of the page's own app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _OwnHead:
    """Puts `head` into the page as it is sent, and takes Gradio's own part out of it.

    Gradio's own parameter for a head has its scripts put it there, seconds later.
    """

    def __init__(self, app: ASGIApp, head: str) -> None:
        self._app = app
        self._head = head.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        begin: Message = {}
        body = bytearray()

        async def gather(message: Message) -> None:
            if message["type"] == "http.response.start":
                begin.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                page = _GRADIOS_OWN.sub(b"", bytes(body)).replace(b"<head>", b"<head>" + self._head, 1)
                MutableHeaders(scope=begin)["content-length"] = str(len(page))
                await send(begin)
                await send({"type": "http.response.body", "body": page})

        plain = [header for header in scope["headers"] if header[0] != b"accept-encoding"]  # or it comes compressed
        await self._app({**scope, "headers": plain}, receive, gather)
