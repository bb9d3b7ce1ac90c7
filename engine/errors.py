"""What the engine refuses, and in which words.

EngineError            code, message; picklable, so that it crosses the process border whole
├── ContextTooLong     the prompt (or prompt + max_tokens) is larger than this model was loaded with
├── TooManyRequests    the waiting line is full
├── Superseded         an autocomplete request, once a newer one of the same client came
├── BadRequest         a sampling parameter or token id that cannot be served
│   └── BadGrammar     a grammar that cannot be served
├── OutOfMemory        weights, or the smallest useful KV pool, do not fit
├── UnsupportedModel   an architecture, quantisation or setting that we do not read
├── BadCheckpoint      files that are missing, incomplete or contradict their config
└── EngineDied         the child process ended; every waiting request gets this
    ├── EngineLost     without a word: killed, or crashed below Python
    └── EngineClosed   it was ended on purpose
"""


class EngineError(Exception):
    """A refusal: a stable `code` for programs, a `message` for people (what happened, the numbers, the next step).

    param   the field of a request that is at fault, where it is one
    """

    code = "engine_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ContextTooLong(EngineError):
    code = "context_length_exceeded"


class TooManyRequests(EngineError):
    code = "too_many_requests"


class Superseded(EngineError):
    code = "superseded"


class BadRequest(EngineError):
    code = "bad_request"


class BadGrammar(BadRequest):
    code = "bad_grammar"


class OutOfMemory(EngineError):
    code = "out_of_memory"


class UnsupportedModel(EngineError):
    code = "unsupported_model"


class BadCheckpoint(EngineError):
    code = "bad_checkpoint"


class EngineDied(EngineError):
    code = "engine_died"


class EngineLost(EngineDied):
    """For callers the same; no request is known to be at fault."""


class EngineClosed(EngineDied):
    code = "engine_closed"


_BY_CODE: dict[str, type[EngineError]] = {
    kind.code: kind
    for kind in (
        EngineError,
        ContextTooLong,
        TooManyRequests,
        Superseded,
        BadRequest,
        BadGrammar,
        OutOfMemory,
        UnsupportedModel,
        BadCheckpoint,
        EngineDied,
        EngineClosed,
    )
}


def error_from_code(code: str, message: str, param: str | None = None) -> EngineError:
    """Rebuild the error that a `Failed` carries; a code that we do not know stays an `EngineError`."""
    return _BY_CODE.get(code, EngineError)(message, param)
