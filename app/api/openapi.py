"""The schema at /openapi.json, made true: FastAPI sees neither what a route that builds its own reply answers, nor
that a stream has another type, nor in which dialect a path is refused.

An answer here has what a client may rely on; more fields may stand beside.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from app.api.dialect import SSE_TYPE
from app.api.errors import anthropic_body, body_for, error_body, ollama_body
from app.errors import AppError

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}
STREAM: Schema = {"description": "One JSON object an event, or a line"}  # some tools ask it of the whole, some of each


def some(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def record(optional: Schema | None = None, /, **required: Schema) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required)}


_USAGE = record(
    {"prompt_tokens_details": record(cached_tokens=WHOLE)},
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
)
_CALL = record(id=TEXT, type=one_of("function"), function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(
    {"reasoning_content": TEXT, "refusal": some(TEXT), "tool_calls": many(_CALL)},
    role=one_of("assistant"),
    content=some(TEXT),
)
_CHOICE = record(
    index=WHOLE, message=_MESSAGE, finish_reason=one_of("stop", "length", "tool_calls"), logprobs=some(ANYTHING)
)
_MODEL = record(id=TEXT, object=one_of("model"), created=WHOLE, owned_by=TEXT)

# Path -> what a reply of status 200 holds. A path that is not here answers with some object.
_ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": record(
        id=TEXT,
        object=one_of("chat.completion"),
        created=WHOLE,
        model=TEXT,
        choices=many(_CHOICE),
        usage=_USAGE,
    ),
    "/v1/completions": record(
        id=TEXT,
        object=one_of("text_completion"),
        created=WHOLE,
        model=TEXT,
        choices=many(record(index=WHOLE, text=TEXT, finish_reason=one_of("stop", "length"), logprobs=some(ANYTHING))),
        usage=_USAGE,
    ),
    "/v1/models": record(object=one_of("list"), data=many(_MODEL)),
    "/v1/models/{model_id}": _MODEL,
    "/v1/messages": record(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=many(record(type=one_of("text", "thinking", "tool_use"))),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=some(TEXT),
        usage=record(input_tokens=WHOLE, output_tokens=WHOLE),
    ),
    "/v1/messages/count_tokens": record(input_tokens=WHOLE),
    "/v1/responses": record(
        id=TEXT, object=one_of("response"), created_at=NUMBER, status=TEXT, model=TEXT, output=many(record(type=TEXT))
    ),
    "/v1/embeddings": record(
        object=one_of("list"),
        model=TEXT,
        data=many(record(object=one_of("embedding"), index=WHOLE)),
        usage=record(prompt_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "/tokenize": record(count=WHOLE, max_model_len=WHOLE, tokens=many(WHOLE)),
    "/detokenize": record(prompt=TEXT),
    "/api/chat": record(model=TEXT, created_at=TEXT, done=FLAG, message=record(role=TEXT, content=TEXT)),
    "/api/generate": record(model=TEXT, created_at=TEXT, done=FLAG, response=TEXT),
    "/api/embed": record(model=TEXT, embeddings=many(many(NUMBER))),
    "/api/tags": record(models=many(record(name=TEXT, model=TEXT))),
    "/api/version": record(version=TEXT),
    "/health": record(
        status=one_of("ok"), state=one_of("empty", "loading", "ready", "failed"), model=TEXT, detail=TEXT
    ),
}

_HELLO = [{"role": "user", "content": "Hello!"}]

# Path -> a body that is served as it stands, whatever model is in hand.
_EXAMPLES: dict[str, Schema] = {
    "/v1/chat/completions": {"messages": _HELLO, "max_tokens": 16},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 16},
    "/v1/messages": {"messages": _HELLO, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": _HELLO},
    "/v1/responses": {"input": "Hello!"},
    "/v1/embeddings": {"input": "Hello!"},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [72, 105]},
    "/infill": {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n"},
    "/v1/fim/completions": {"prompt": "def add(a, b):\n    return ", "suffix": "\n"},
    "/memory": {"give_back_gb": 0},
    "/api/embed": {"input": "Hello!"},
    "/api/chat": {"messages": _HELLO},
    "/api/generate": {"prompt": "Hello!"},
}

_EVENTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/infill", "/v1/fim/completions", "/models/sse"),
)
_STREAMS = {
    **dict.fromkeys(_EVENTS, SSE_TYPE),
    **dict.fromkeys(("/api/chat", "/api/generate"), "application/x-ndjson"),
}

_ERRORS: dict[Callable[[AppError], dict[str, Any]], tuple[str, Schema]] = {
    error_body: ("Error", record(error=record(message=TEXT, type=TEXT, param=some(TEXT), code=some(TEXT)))),
    anthropic_body: ("AnthropicError", record(type=one_of("error"), error=record(type=TEXT, message=TEXT))),
    ollama_body: ("OllamaError", record(error=TEXT)),
}


def describe(app: FastAPI) -> None:
    """Have `app.openapi()` give the whole schema. Call it once all routes are there."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(FastAPI.openapi(app))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(schema: Schema) -> Schema:
    parts = schema.setdefault("components", {})
    parts["schemas"] = dict(_ERRORS.values())
    parts["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schema["security"] = [{}, {"bearer": []}, {"x-api-key": []}]  # {}: none is asked unless the server has keys
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, operation["responses"]["200"])
            if path in _EXAMPLES and "requestBody" in operation:
                operation["requestBody"] = _with_example(operation["requestBody"], _EXAMPLES[path])
    return schema


def _with_example(body: Schema, example: Schema) -> Schema:
    content = body["content"]["application/json"]
    return body | {"content": {"application/json": content | {"example": example}}}


def _responses(path: str, answer: Schema) -> Schema:
    content = answer.setdefault("content", {})
    if path in _ANSWERS:
        content["application/json"] = {"schema": _ANSWERS[path]}
    if path in _STREAMS:
        content[_STREAMS[path].partition(";")[0]] = {"schema": STREAM}
    name, _ = _ERRORS[body_for(path)]
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {
        "200": answer,
        "4XX": {"description": "What is wrong with the request, and the next step", "content": refusal},
        "5XX": {"description": "A fault of the server, or no model that could answer", "content": refusal},
    }
