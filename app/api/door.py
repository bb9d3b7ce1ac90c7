"""The door: what holds for every request before a route sees it, and for every reply, errors included.

A request id, CORS, the Host check and the last net under an exception. One ASGI middleware, so that the order is
plain: preflight first (a browser sends no key with it), then the Host check, then the app.
"""

import logging
import re
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import echo, error_response, internal_error
from app.errors import AppError

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

_log = logging.getLogger("fireside.api")
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, x-should-retry"


class Door:
    """
    allowed_hosts   names that the Host header may carry (without port); None lets every name in. With the server
                    bound to loopback this is what stops DNS rebinding: a web page that resolves its own name to
                    127.0.0.1 still sends that name.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str] | None) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket" and not self._host_is_allowed(Headers(scope=scope)):
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        reply = _Reply(send, _request_id(headers), _allowed_origin(headers))
        scope.setdefault("state", {})["request_id"] = reply.request_id
        if _is_preflight(scope, headers):
            await _preflight(headers, reply.origin)(scope, receive, reply.send)
        elif not self._host_is_allowed(headers):
            await error_response(_wrong_host(headers))(scope, receive, reply.send)
        else:
            await self._inside(scope, receive, reply)
        _log.debug("request %s: %s %s, status %s", reply.request_id, scope["method"], scope["path"], reply.status)

    async def _inside(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        try:
            await self._app(scope, receive, reply.send)
        except ClientDisconnect:
            _log.info("request %s: the client left while sending", reply.request_id)
        except Exception:
            _log.exception("request %s: %s %s failed", reply.request_id, scope["method"], scope["path"])
            if reply.status is None:
                await error_response(internal_error())(scope, receive, reply.send)

    def _host_is_allowed(self, headers: Headers) -> bool:
        return self._allowed_hosts is None or _host_name(headers.get("host", "")) in self._allowed_hosts


class _Reply:
    """Puts the request id and the CORS headers on the reply, whoever makes it."""

    def __init__(self, send: Send, request_id: str, origin: str | None) -> None:
        self._send = send
        self.request_id = request_id
        self.origin = origin
        self.status: int | None = None  # once the reply has begun

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            if self.origin is not None:
                headers["Access-Control-Allow-Origin"] = self.origin
                headers["Access-Control-Expose-Headers"] = _EXPOSED
                headers.add_vary_header("Origin")
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The client's own id where it sends a plain one, so that its log and ours can be laid side by side."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _allowed_origin(headers: Headers) -> str | None:
    """The Origin if it may read our replies: a page of this machine, or an app that is no web page at all.

    No site can have another scheme than http or https, so `app://obsidian.md` or an editor's webview is a local
    program; "null" is what sandboxed frames of any site send.
    """
    origin = headers.get("origin")
    if origin is None or "://" not in origin:
        return None
    scheme = origin.partition("://")[0]
    if scheme in ("http", "https") and _host_name(origin.partition("://")[2]) not in LOOPBACK_HOSTS:
        return None
    return origin


def _host_name(host: str) -> str:
    """`[::1]:8000` -> `::1`; what is no host at all -> ""."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight(headers: Headers, origin: str | None) -> Response:
    if origin is None:
        return error_response(_wrong_origin(headers))
    allowed = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)


def _wrong_host(headers: Headers) -> AppError:
    return AppError(
        403,
        "host_not_allowed",
        f"Fireside does not answer under the name {echo(headers.get('host', ''))!r}.",
        hint="Use localhost or 127.0.0.1.",
    )


def _wrong_origin(headers: Headers) -> AppError:
    return AppError(
        403,
        "origin_not_allowed",
        f"Pages from {echo(headers.get('origin', ''))!r} may not call Fireside.",
        hint="Pages served from this machine may.",
    )
