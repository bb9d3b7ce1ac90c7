"""What the app says when it cannot do what was asked, and the one table from engine errors to HTTP.

AppError(status, code, message, hint)
"""

from typing import Any

from engine.errors import EngineError

_STATUS_BY_ENGINE_CODE = {
    "context_length_exceeded": 400,
    "bad_request": 400,
    "bad_grammar": 400,
    "too_many_requests": 429,
    "superseded": 499,  # nginx's word for a client that did not wait: no answer is read, and none is to be retried
    "out_of_memory": 503,
    "unsupported_model": 501,
    "bad_checkpoint": 500,
    "engine_died": 503,
    "engine_closed": 503,
}


# The next step, where the engine's own words cannot know it.
_HINT_BY_ENGINE_CODE = {"engine_died": "Send it again: a fresh engine process answers the next request."}


class AppError(Exception):
    """A refusal that can be shown.

    status         HTTP status
    code           stable word for programs ("model_not_found"), or None
    message        what happened, with the numbers
    hint           the next step; joined to the message where there is one line only
    param          the request field at fault, where there is one
    retry_after_s  when to ask again, where that is known
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def text(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def as_fields(self) -> dict[str, Any]:
        """What `AppError(**fields)` makes again on the other side of a pipe."""
        return {"status": self.status, "code": self.code, "message": self.message, "hint": self.hint}

    @property
    def type(self) -> str:
        """OpenAI's error type for this status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def from_engine_error(error: EngineError, grammar_param: str | None = None) -> AppError:
    """The one place where an engine error becomes an HTTP status.

    grammar_param  the request field that is at fault where a grammar is
    """
    hint = _HINT_BY_ENGINE_CODE.get(error.code, "")
    param = grammar_param if error.code == "bad_grammar" else error.param
    return AppError(_STATUS_BY_ENGINE_CODE.get(error.code, 500), error.code, error.message, hint=hint, param=param)
