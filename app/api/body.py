"""Reads a request's body into a pydantic model; whatever is wrong with it becomes a 400 (413) that names the place."""

import codecs
import functools
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, Field, ValidationError

from app.api.errors import echo
from app.errors import AppError

MAX_BODY_BYTES = 32 * 2**20  # a million-token prompt, as text or as ids, fits
MAX_MESSAGES = 50_000  # a template takes seconds for so many

# A list whose first wrong item is the answer: to tell of a million of them takes a minute.
Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body as `model`, whatever its Content-Type says. Raises AppError."""
    return parse_body(await raw_body(request), model)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Raises AppError (400)."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _explained(error) from error


@functools.cache
def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body with `read_body`."""
    schema = model.model_json_schema()
    inlined = _without_refs(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def read_query(request: Request, model: type[Body]) -> Body:
    """What stands behind the `?` as `model`. Raises AppError (400)."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _explained(error) from error


@functools.cache
def query_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its query with `read_query`."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    properties = schema["properties"].items()
    return {
        "parameters": [{"name": n, "in": "query", "required": n in required, "schema": kind} for n, kind in properties]
    }


def invalid(param: str, message: str) -> AppError:
    """A 400 for the request field `param`."""
    return AppError(400, "invalid_value", f"`{param}`: {message}", param=param)


def _without_refs(schema: Any, definitions: dict[str, Any]) -> Any:
    """Definitions put where they are used: OpenAPI keeps them elsewhere than JSON schema. None of ours is recursive."""
    if isinstance(schema, list):
        return [_without_refs(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_refs(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _without_refs(value, definitions) for key, value in schema.items()}


async def raw_body(request: Request) -> bytes:
    """Raises AppError: 413 beyond MAX_BODY_BYTES, 415 where it is packed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise AppError(
            415, "unsupported_encoding", f"The body is packed as {echo(encoding)}.", hint="Send it as plain JSON."
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared):,} bytes")
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise _too_large(f"{len(raw):,} bytes or more")
    return bytes(raw.removeprefix(codecs.BOM_UTF8))  # some programs on Windows write one


def _too_large(size: str) -> AppError:
    return AppError(
        413,
        "body_too_large",
        f"The body has {size}; the limit is {MAX_BODY_BYTES:,}.",
        hint="Send a shorter conversation.",
    )


def _explained(error: ValidationError) -> AppError:
    """The first mistake, in OpenAI's shape."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return AppError(400, "invalid_json", f"The body is not valid JSON: {first['msg']}.")
    if not first["loc"]:
        return AppError(400, "invalid_json", "The body must be a JSON object.")
    param = _path(first["loc"])
    if first["type"] == "missing":
        return AppError(400, "missing_field", f"`{param}` is missing.", param=param)
    return invalid(param, f"{first['msg']}; got {echo(first['input'])}.")


def _path(loc: Sequence[int | str]) -> str:
    """("messages", 0, "role") -> messages[0].role; pydantic's own word for a key that is wrong is left out."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc if step != "[key]")
    return "".join(steps).removeprefix(".")
