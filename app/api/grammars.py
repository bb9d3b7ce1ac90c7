"""How clients ask for an answer of a given form: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields -> GrammarSpec. Whether the engine can serve a grammar, its compiler says.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.api.body import invalid
from app.api.errors import echo
from app.errors import AppError
from engine.types import GrammarKind, GrammarSpec

MAX_CHARS = 1_000_000
FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"),
)


def grammar_of(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The form alone, otherwise as `named_grammar_of`."""
    named = named_grammar_of(fields)
    return None if named is None else named[1]


def named_grammar_of(fields: Mapping[str, Any]) -> tuple[str, GrammarSpec] | None:
    """`fields` has those of FIELDS that were sent: the one that asks for a form, and the form. Raises AppError (400)
    for more than one, or an odd one."""
    asked = {}
    for name in FIELDS:
        value = fields.get(name)
        spec = None if value is None or value in ({}, [], "") else _read(name, value)
        if spec is not None and len(spec.text) > MAX_CHARS:
            raise invalid(name, f"has {len(spec.text):,} characters; at most {MAX_CHARS:,} are compiled.")
        if spec is not None:
            asked[name] = spec
    if len(asked) > 1:
        raise invalid(list(asked)[1], f"not together with `{next(iter(asked))}`: an answer has one form.")
    return next(iter(asked.items()), None)


def _read(name: str, value: Any) -> GrammarSpec | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _READERS[name.removeprefix("guided_")](name, value)


def _response_format(value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":  # with a schema beside it: llama.cpp's way
        schema = value.get("schema")
        return _json_object("response_format", True) if schema is None else _schema("response_format.schema", schema)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise invalid("response_format.json_schema", "expected an object with a `schema`.")
        return _schema("response_format.json_schema.schema", schema)
    raise invalid("response_format", f"`type` must be text, json_object or json_schema; got {echo(value)}.")


def _structured_outputs(value: Any) -> GrammarSpec | None:
    if not isinstance(value, dict):
        raise invalid("structured_outputs", f"expected an object; got {echo(value)}.")
    asked = [(kind, item) for kind, item in value.items() if item is not None and kind in _READERS]
    unknown = [kind for kind, item in value.items() if kind not in _READERS and item]
    if unknown:
        raise AppError(
            400,
            "unsupported_parameter",
            f"`structured_outputs.{echo(unknown[0])}` is not supported.",
            hint=f"There are {', '.join(_READERS)}.",
            param="structured_outputs",
        )
    if len(asked) > 1:
        raise invalid("structured_outputs", f"an answer has one form; got {', '.join(kind for kind, _ in asked)}.")
    return next((_READERS[kind](f"structured_outputs.{kind}", item) for kind, item in asked), None)


def _schema(param: str, value: Any) -> GrammarSpec:
    if isinstance(value, str):
        return GrammarSpec(GrammarKind.JSON_SCHEMA, value)
    if not isinstance(value, dict):
        raise invalid(param, f"expected a JSON schema; got {echo(value)}.")
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def _json_object(param: str, value: Any) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise invalid(param, f"expected true or false; got {echo(value)}.")
    return GrammarSpec(GrammarKind.JSON_OBJECT) if value else None


def _choice(param: str, value: Any) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise invalid(param, f"expected a list of one string or more, none empty; got {echo(value)}.")
    return GrammarSpec(GrammarKind.CHOICE, json.dumps(value))


def _text(kind: GrammarKind) -> Callable[[str, Any], GrammarSpec]:
    def read(param: str, value: Any) -> GrammarSpec:
        if not isinstance(value, str) or not value:
            raise invalid(param, f"expected a text; got {echo(value)}.")
        return GrammarSpec(kind, value)

    return read


_READERS: dict[str, Callable[[str, Any], GrammarSpec | None]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _text(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text(GrammarKind.LARK),
}
