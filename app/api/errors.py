"""AppError -> the error object of the OpenAI API (or of another dialect), as an HTTP reply or the last of a stream.

No traceback, path or address gets into a message; what a client sent is echoed at 200 characters at most.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from app.errors import AppError

MAX_ECHO = 200
_WORTH_A_RETRY = frozenset({408, 409, 429, 503})


def error_body(error: AppError) -> dict[str, Any]:
    return {"error": {"message": error.text, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_body(error: AppError) -> dict[str, Any]:
    """As Anthropic's API says it; `code` is ours, for the logs of people."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.text, "code": error.code}}


def ollama_body(error: AppError) -> dict[str, Any]:
    return {"error": error.text}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(error: AppError, path: str = "") -> Response:
    """The reply to a request that failed before its first byte, in the shape of the dialect that `path` belongs to.

    The SDKs post a failed request again up to twice, so a permanent fault says that it is one; a passing fault says
    when to come back.
    """
    if error.status in _WORTH_A_RETRY:
        headers = {"Retry-After": str(math.ceil(error.retry_after_s or 1))}
    else:
        headers = {"x-should-retry": "false"}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(orjson.dumps(body_for(path)(error)), error.status, headers, "application/json")


def body_for(path: str) -> Callable[[AppError], dict[str, Any]]:
    """The dialect that a path refuses in."""
    if path.startswith("/v1/messages"):
        return anthropic_body
    if path.startswith("/api/") and not path.startswith("/api/v0/"):
        return ollama_body
    return error_body


def internal_error() -> AppError:
    """What a client hears about a fault of ours; the log has the traceback under the same request id."""
    return AppError(
        500,
        "internal_error",
        "Fireside failed on this request.",
        hint="Its log says why, under the id in X-Request-Id.",
    )


def echo(value: object) -> str:
    """`value` as the client sent it, in JSON's words, short enough to put into a message."""
    is_text = isinstance(value, str) and value
    text = str(value) if is_text else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"
