"""How the page gets in where keys are asked: a form takes the key once, a cookie shows later that it was right.

The cookie holds a name, an end and a seal over both and the key by a secret of this process; nothing is kept here. It
opens the page alone, never the API: a page of another port of this machine would send it along too. It ends with its
key, and a later key of the same name is another one.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.api.keys import ApiKey, Keyring
from app.language import Language, asked_for

LOGIN_PATH = "/ui/login"
COOKIE = "fireside_session"

_LASTS_S = 30 * 24 * 3600
_MAX_FORM_BYTES = 4096
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
_FORM = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><title>Fireside</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; font: 1.1rem/1.5 system-ui, sans-serif }}
body {{ min-height: 90vh; display: grid; place-content: center; text-align: center; padding: 1rem }}
form {{ display: grid; gap: .7rem; width: min(22rem, 80vw) }}
input, button {{ font: inherit; padding: .5rem .7rem }}
</style></head>
<body><main><h1>Fireside</h1><form method="post" action="/ui/login">
<label for="key">{key}</label>
<input id="key" name="key" type="password" required autofocus autocomplete="current-password">
<button>{enter}</button><p role="alert">{told}</p></form></main></body></html>
"""
_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "key": "API key",
        "enter": "Open",
        "wrong": "This key is not known here.",
        "over": "Your login no longer holds: it has ended, or its key was deleted or changed. Enter a key that holds.",
    },
    "zh": {
        "key": "API 密钥",
        "enter": "打开",
        "wrong": "这里不认识此密钥。",
        "over": "您的登录已失效。请输入有效的密钥。",
    },
}


class Login:
    def __init__(self, keys: Keyring, *, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def who(self, headers: Headers) -> ApiKey | None:
        """The key by which this browser got in, if its cookie is ours and has not ended."""
        name, _, rest = _cookie_in(headers).partition(":")
        end, _, seal = rest.partition(":")
        key = self._keys.named(name)
        if key is None or not hmac.compare_digest(seal.encode(), self._seal(key, end).encode()):
            return None
        return key if float(end) >= self._clock() else None

    def form(self, headers: Headers, *, is_wrong: bool = False) -> Response:
        """401, as nothing is shown yet; a browser draws it all the same. Its referrer policy lets it tell its origin,
        without which the door would not take what it sends.
        """
        own = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
        language = asked_for(headers.get("accept-language", ""))
        words = _WORDS[language]
        told = words["wrong"] if is_wrong else words["over"] if _cookie_in(headers) else ""
        page = _FORM.format(language=language, key=words["key"], enter=words["enter"], told=told)
        return HTMLResponse(page, 401, own)

    async def enter(self, request: Request) -> Response:
        """Take what the form sends."""
        key = self._keys.find(await _sent_key(request))
        if key is None:
            return self.form(request.headers, is_wrong=True)
        reply = RedirectResponse("/", 303)
        self.let_in(reply, key, is_https=request.scope["scheme"] == "https")
        return reply

    def let_in(self, reply: Response, key: ApiKey, *, is_https: bool) -> None:
        """The browser that gets this reply is known by this key from now on."""
        end = str(int(self._clock() + _LASTS_S))
        reply.set_cookie(
            COOKIE,
            f"{key.name}:{end}:{self._seal(key, end)}",
            max_age=_LASTS_S,
            secure=is_https,
            httponly=True,
            samesite="strict",
        )

    def _seal(self, key: ApiKey, end: str) -> str:
        sealed = f"{key.name}:{end}:{key.digest.hex()}:{key.is_admin}"
        return hmac.new(self._secret, sealed.encode(), hashlib.sha256).hexdigest()


def _cookie_in(headers: Headers) -> str:
    try:
        value = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if value is None else value.value


async def _sent_key(request: Request) -> str:
    from urllib.parse import parse_qs

    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _MAX_FORM_BYTES:
            return ""
    return parse_qs(raw.decode("utf-8", "replace")).get("key", [""])[0].strip()
