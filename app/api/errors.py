"""AppError -> the error object of the OpenAI API, as an HTTP reply or as the last frame of a stream.

No traceback, path or address gets into a message; what a client sent is echoed at 200 characters at most.
"""

from typing import Any

import orjson
from starlette.responses import Response

from app.errors import AppError

MAX_ECHO = 200
_WORTH_A_RETRY = frozenset({408, 409, 429, 503})


def error_body(error: AppError) -> dict[str, Any]:
    return {"error": {"message": error.text, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: AppError) -> Response:
    """The reply to a request that failed before its first byte.

    The SDKs post a failed request again up to twice, so a permanent fault says that it is one; a passing fault says
    when to come back.
    """
    passing = error.status in _WORTH_A_RETRY
    headers = {"Retry-After": "1"} if passing else {"x-should-retry": "false"}
    return Response(orjson.dumps(error_body(error)), error.status, headers, "application/json")


def internal_error() -> AppError:
    """What a client hears about a fault of ours; the log has the traceback under the same request id."""
    return AppError(
        500,
        "internal_error",
        "Fireside failed on this request.",
        hint="Its log says why, under the id in X-Request-Id.",
    )


def echo(value: object) -> str:
    """`value` as the client sent it, short enough to put into a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"
