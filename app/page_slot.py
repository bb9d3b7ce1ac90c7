"""The place of the page at "/": a loading page until Gradio is imported, then the page itself.

Plain ASGI. The loading page asks for itself again each second and takes nothing from elsewhere.
"""

import html
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from app.language import Language, asked_for

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

_HTML = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8">{refresh}<title>Fireside</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; font: 1.1rem/1.5 system-ui, sans-serif }}
body {{ min-height: 90vh; display: grid; place-content: center; text-align: center; padding: 1rem }}
progress {{ width: min(22rem, 80vw) }}
</style></head>
<body><main><h1>Fireside</h1><p role="status">{line}</p>{bar}</main></body></html>
"""


class Status(Protocol):
    """What the loading page shows of `app.models.manager.ModelStatus`."""

    @property
    def state(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def fraction(self) -> float | None: ...


class PageSlot:
    """
    status  the model's state now
    page    the real page, once it is there
    error   why there will be none
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self.page: AsgiApp | None = None
        self.error = ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.page is not None:
            await self.page(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        elif scope["path"] == "/":
            language = asked_for(_header(scope, b"accept-language"))
            await _reply(send, 500 if self.error else 200, "text/html; charset=utf-8", self._html(language))
        else:  # a tab from before a restart asks for its parts: it will ask again
            body = {"message": "The page is being opened.", "type": "server_error", "param": None, "code": "loading"}
            await _reply(send, 503, "application/json", json.dumps({"error": body}))

    def _html(self, language: Language) -> str:
        refresh = "" if self.error else '<meta http-equiv="refresh" content="1">'
        now = self._status()
        line = self.error or _line(now, language)
        value = "" if now.fraction is None else f' value="{now.fraction:.3f}"'
        bar = f"<progress{value}></progress>" if now.state in ("loading", "ready") and not self.error else ""
        return _HTML.format(language=language, refresh=refresh, line=html.escape(line), bar=bar)


def _line(now: Status, language: Language) -> str:
    """The stage of a load is told in English alone: the page's modules have the words for it."""
    if now.state == "failed":
        return now.detail
    if now.state == "loading":
        return f"{now.model}: {now.detail}" if language == "en" else f"正在加载 {now.model}"
    return "Opening the page" if language == "en" else "正在打开页面"


def _header(scope: Message, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _reply(send: Send, status: int, content_type: str, text: str) -> None:
    body = text.encode()
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
