"""The door: what holds for every request before a route sees it, and for every reply, errors included.

A request id, CORS, the Host check and the last net under an exception. One ASGI middleware, so that the order is
plain: OPTIONS first (a browser sends no key with it), then the Host and Origin checks, then the guard and the app.
"""

import ipaddress
import logging
import re
import uuid
from collections.abc import Callable
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
_SLASHES = re.compile("/{2,}")
_METHODS = "GET, POST, DELETE, OPTIONS"
_SENT = "Authorization, Content-Type, api-key, x-api-key, anthropic-version, x-request-id"
_RATES = ", ".join(
    f"x-ratelimit-{fact}-{kind}" for fact in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
_EXPOSED = f"X-Request-Id, Retry-After, x-should-retry, {_RATES}"


class Door:
    """
    allowed_hosts    names that the Host header may carry (without port), "*" for every name. This is what stops DNS
                     rebinding: a web page that resolves its own name to 127.0.0.1 still sends that name. An address
                     is no name, so it passes; so does who sends no Host (HTTP/1.0), as no browser does.
    allowed_origins  web pages that may call beside those of this machine and our own, "*" for all. Others are refused
                     and not only kept from reading: a browser sends them our way without asking first.
    is_api           whether the API serves a request; all else is the page's
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: frozenset[str],
        allowed_origins: frozenset[str],
        is_api: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts
        self._allowed_origins = allowed_origins
        self._is_api = is_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket" and self._refusal(Headers(scope=scope)) is not None:
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        reply = _Reply(send, _request_id(headers), self._readable_origin(headers))
        scope.setdefault("state", {})["request_id"] = reply.request_id
        plain = _plain(scope)
        is_api = self._is_api(plain)
        if scope["method"] == "OPTIONS" and (is_api or "access-control-request-method" in headers):
            await _preflight(headers, reply.origin)(scope, receive, reply.send)
        elif (refusal := self._refusal(headers)) is not None:
            await error_response(refusal, scope["path"])(scope, receive, reply.send)
        else:
            await self._inside(plain if is_api else scope, receive, reply)
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

    def _refusal(self, headers: Headers) -> AppError | None:
        host = headers.get("host")
        if host is not None and not self._host_is_allowed(_host_name(host)):
            return _wrong_host(host)
        origin = headers.get("origin")
        if origin is None or self._readable_origin(headers) is not None or is_own(origin, host or ""):
            return None
        return _wrong_origin(headers)

    def _host_is_allowed(self, name: str) -> bool:
        return name in self._allowed_hosts or "*" in self._allowed_hosts or _is_address(name)

    def _readable_origin(self, headers: Headers) -> str | None:
        """The Origin if it may read our replies: a page of this machine or one that is listed, or an app that is no
        web page at all.

        No site can have another scheme than http or https, so `app://obsidian.md` or an editor's webview is a local
        program; "null" is what sandboxed frames of any site send.
        """
        origin = headers.get("origin")
        if origin is None or not self._allowed_origins.isdisjoint((origin, "*")):
            return origin
        scheme, mark, host = origin.partition("://")
        if not mark or (scheme in ("http", "https") and _host_name(host) not in LOOPBACK_HOSTS):
            return None
        return origin


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


def _host_name(host: str) -> str:
    """`[::1]:8000` -> `::1`; what is no host at all -> ""."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_own(origin: str, host: str) -> bool:
    """A page that we served ourselves, under whatever name."""
    return bool(host) and origin.partition("://")[2] == host


def _plain(scope: Scope) -> Scope:
    """As the routes know it: base URLs end with a slash or not, and HEAD is GET whose body the server keeps back."""
    path = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
    return {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}


def _preflight(headers: Headers, origin: str | None) -> Response:
    if origin is None and "origin" in headers:
        return error_response(_wrong_origin(headers))
    allowed = {
        "Allow": _METHODS,
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", _SENT),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)


def _wrong_host(host: str) -> AppError:
    return AppError(
        403,
        "host_not_allowed",
        f"Fireside does not answer under the name {echo(host)!r}.",
        hint="Use localhost or an address, or start Fireside with `--allowed-host NAME`.",
    )


def _wrong_origin(headers: Headers) -> AppError:
    return AppError(
        403,
        "origin_not_allowed",
        f"Pages from {echo(headers.get('origin', ''))!r} may not call Fireside.",
        hint="Pages served from this machine may, and those that `--allowed-origin` names.",
    )
