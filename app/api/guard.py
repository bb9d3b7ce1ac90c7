"""Who is let in: the key of a request, what it may do, how much it may ask. Stands behind the door, before any route.

Open to everyone: /health and the page's static files. Where keys are asked all else needs one: the API in a header,
the page by its login.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.door import is_own
from app.api.errors import echo, error_response
from app.api.keys import ApiKey, Keyring
from app.api.limits import Limits, caller
from app.api.login import LOGIN_PATH, Login
from app.errors import AppError

_log = logging.getLogger("fireside.api")

_OPEN = ("/health", "/favicon.ico", "/theme.css")
_OPEN_FOLDERS = ("/assets/", "/static/")
_LOOK_EVERY_S = 1.0  # whether the key of an open socket still holds
_NOBODY = ApiKey("", b"", is_admin=True)  # where no keys are asked: whoever reaches this machine's own address


class Guard:
    """
    is_api    whether a route of the API serves this request; all else is the page's
    refused   told of every request to the API that is not let in
    page_origins  under which our own page is known elsewhere, as behind a proxy
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keyring,
        limits: Limits,
        is_api: Callable[[Scope], bool],
        refused: Callable[[AppError], None],
        page_origins: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._is_api = is_api
        self._refused = refused
        self._page_origins = page_origins
        self._login = Login(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._is_api(scope):
            await self._api(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _api(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            key = _NOBODY if scope["path"] in _OPEN else self._who(Headers(scope=scope))
            scope.setdefault("state", {})["key"] = key
            if scope["method"] == "POST":
                send = _with_headers(send, lambda: self._limits.headers(key.name))
                self._limits.admit(key.name)
        except AppError as error:
            self._refused(error)
            _log.info("request %s: refused, %s: %s", scope["state"]["request_id"], error.code, error.text)
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            caller.set(key.name)
            await self._app(scope, receive, send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path, is_http = Headers(scope=scope), scope["path"], scope["type"] == "http"
        key = _NOBODY if path in _OPEN or path.startswith(_OPEN_FOLDERS) else self._who_on_the_page(headers)
        if is_http and self._keys and path == LOGIN_PATH and scope["method"] == "POST":
            await (await self._login.enter(Request(scope, receive)))(scope, receive, send)
        elif key is not None:
            scope.setdefault("state", {}).update(key=key, login=self._login)
            await (self._app(scope, receive, send) if is_http else self._socket(scope, receive, send, key))
        elif not is_http:
            await send({"type": "websocket.close", "code": 1008})
        elif not self._keys:
            await error_response(_foreign_page(headers), path)(scope, receive, send)
        elif path == "/" and scope["method"] == "GET":
            await self._login.form(headers)(scope, receive, send)
        else:
            await error_response(_no_key(headers), path)(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send, key: ApiKey) -> None:
        """Served until it ends or whom it belongs to has changed: its key was deleted or may do less, its login has
        ended, or keys are asked now. The page then opens it again, or is led to the login.
        """
        serving = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            while not (await asyncio.wait((serving,), timeout=_LOOK_EVERY_S))[0]:
                if self._who_on_the_page(Headers(scope=scope)) != key:
                    await send({"type": "websocket.close", "code": 1008})
                    break
        except asyncio.CancelledError:
            serving.cancel()
            raise
        await serving  # it notices by itself that its socket is closed

    def _who_on_the_page(self, headers: Headers) -> ApiKey | None:
        """By header or cookie; the cookie counts for our own page alone, as a browser sends it along for every port."""
        if not self._keys:
            return _NOBODY if self._is_ours(headers) else None
        return self._key_in(headers) or (self._login.who(headers) if self._is_ours(headers) else None)

    def _is_ours(self, headers: Headers) -> bool:
        """From our own page, or from no web page at all. The door lets other pages of this machine ask too, but those
        have the API: here settings are changed and chats are read.
        """
        origin = headers.get("origin")
        return origin is None or origin in self._page_origins or is_own(origin, headers.get("host", ""))

    def _who(self, headers: Headers) -> ApiKey:
        """Raises AppError (401)."""
        if not self._keys:
            return _NOBODY
        key = self._key_in(headers)
        if key is None:
            raise _no_key(headers)
        return key

    def _key_in(self, headers: Headers) -> ApiKey | None:
        """Clients send their key in one of three headers, some in more than one of them."""
        return next((key for words in _words_in(headers) if (key := self._keys.find(words)) is not None), None)


def admin(request: Request) -> None:
    """A dependency of routes that change which model is in hand. Raises AppError (403)."""
    if not request.state.key.is_admin:
        raise AppError(
            403,
            "admin_key_required",
            f"The key `{request.state.key.name}` may ask models, but not load or unload them.",
            hint="Send an admin key (`--admin-key`, or `python -m app.api.keys new NAME --admin`).",
        )


def _words_in(headers: Headers) -> list[str]:
    bearer = [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]
    found = [*bearer, *headers.getlist("api-key"), *headers.getlist("x-api-key")]
    return [words.strip() for words in found if words.strip()]


def _no_key(headers: Headers) -> AppError:
    what = "This API key is not known here." if _words_in(headers) else "This server asks for an API key."
    return AppError(
        401,
        "invalid_api_key",
        what,
        hint="Send a key as `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`.",
    )


def _foreign_page(headers: Headers) -> AppError:
    return AppError(
        403,
        "origin_not_allowed",
        f"{echo(headers.get('origin', ''))!r} is not Fireside's own page.",
        hint="Other pages have the API at /v1. Behind a proxy that changes the Host: --allowed-origin ORIGIN.",
    )


def _with_headers(send: Send, extra: Callable[[], Mapping[str, str]]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(extra())
        await send(message)

    return send_with_headers
