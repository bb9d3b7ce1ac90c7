"""Grammars of tool calls, written in llguidance's Lark. A format says how a call is spelled; here are the pieces."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.chat.types import ToolSpec

_ANY = "/(?s:.*)/"
_BLANKS = r"( |\n{1,2}[ \t]{0,20})?"  # as much room for indentation as an answer in JSON has


class Lark:
    """
    token_id  the id of a token of its own that is written so, which no text stands for; None where there is none
    is_lazy   free text may come before a call
    """

    def __init__(self, token_id: Callable[[str], int | None], *, is_lazy: bool = False) -> None:
        self._token_id = token_id
        self._is_lazy = is_lazy
        self._rules: dict[str, str] = {}

    def tag(self, text: str) -> str:
        """A string of the format: one token where the vocabulary has it, else its text."""
        token_id = self._token_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def opening(self, text: str) -> str:
        """The tag with which a call begins, and any text before it."""
        if not self._is_lazy:
            return self.tag(text)
        return f"{self.rule('free', _ANY)} {self.tag(text)}" if self.is_token(text) else self.text_until("free", text)

    def join(self, rule: str, between: str) -> str:
        """One or more of a rule that begins with `opening`. Free text has what stands between them in it already."""
        return f"{rule}+" if self._is_lazy else f"{rule} ({literal(between)} {rule})*"

    def is_token(self, text: str) -> bool:
        return self._token_id(text) is not None

    def rule(self, name: str, body: str) -> str:
        """Add one; gives back its name."""
        self._rules[name] = body
        return name

    def arguments(self, index: int, tool: ToolSpec) -> str:
        """The rule of a tool's arguments as a JSON object."""
        schema = {"type": "object", **tool.parameters, **_options(tool)}
        return self.rule(f"arguments_{index}", f"%json {json.dumps(schema)}")

    def value(self, place: str, schema: Any, tool: ToolSpec) -> str:
        """The rule of one of its parameters as JSON."""
        shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        own = schema if isinstance(schema, Mapping) else {}
        return self.rule(f"value_{place}", f"%json {json.dumps({**own, **shared, **_options(tool)})}")

    def text_until(self, name: str, end: str) -> str:
        """The rule of any text up to and with `end`."""
        self.rule(f"{name}[suffix={literal(end)}]", _ANY)
        return name

    def source(self, start: str) -> str:
        return "\n".join(f"{name}: {body}" for name, body in {"start": start, **self._rules}.items())


def _options(tool: ToolSpec) -> dict[str, Any]:
    """A tool that is not strict may have keywords that no grammar keeps: they are hints to the model alone."""
    return {"x-guidance": {"lenient": not tool.is_strict, "whitespace_pattern": _BLANKS}}


def properties_of(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(tool: ToolSpec) -> Sequence[str]:
    required = tool.parameters.get("required")
    return required if isinstance(required, list) else ()


def free_of(pattern: str) -> str:
    """A terminal: any text that does not match this regular expression as a whole."""
    return f"{_ANY} & ~/(?s:{pattern})/"


def literal(text: str) -> str:
    return json.dumps(text)


def alternatives(bodies: Sequence[str]) -> str:
    return " | ".join(bodies)


def escaped(text: str) -> str:
    """`text` inside a regular expression between slashes."""
    return re.sub(r"[^\w\s<>:=,'\"`-]", lambda match: "\\" + match[0], text).replace("\n", "\\n")
