"""Calls as Python writes them: `[f(a=1, b="x"), g()]` (Gemma 3, Llama 3.2 and 4), or in a ```tool_code fence.

A text may begin with a bracket too, so only known names are calls. Arguments go out one by one, as each is whole.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.chat.tools.format import ToolFormat, ToolsByName
from app.chat.tools.found import Finds
from app.chat.tools.grammar import Lark, alternatives, escaped, literal, properties_of, required_of
from app.chat.tools.source import Source, Steps
from app.chat.types import ToolSpec

_FENCE, _END_FENCE = "```tool_code", "```"
_LONGEST_NAME = 256


class Pythonic(ToolFormat):
    name = "pythonic"
    starts = (_FENCE, "[", "<|python_start|>")
    control = ("<|python_end|>",)
    at_start = True

    def claims(self, template: str) -> bool:
        return "params_name1=" in template or "tool_code" in template or "<|python_start|>" in template

    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        blanks = yield from source.blanks()
        bracket = start == "[" or (yield from source.skip("["))
        if not (yield from _read_call(source, finds, tools)):
            source.put_back(blanks + ("[" if bracket and start != "[" else ""))
            return False
        while True:
            gap = yield from source.blanks()
            gap += "," if (yield from source.skip(",")) else ""
            gap += yield from source.blanks()
            if not (yield from _read_call(source, finds, tools)):
                source.put_back(gap)
                break
        for end in (*(["]"] if bracket else []), _END_FENCE if start == _FENCE else self.control[0]):
            gap = yield from source.blanks()
            if not (yield from source.skip(end)):
                source.put_back(gap)
        return True

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"[{', '.join(_written(name, arguments) for name, arguments in calls)}]"

    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        """A name stands in one string with what comes before it: what may be text as well is told by the longest."""
        inside = [lark.rule(f"inside_{index}", _inside(index, tool, lark)) for index, tool in enumerate(tools)]

        def calls(lead: str) -> str:
            heads = (literal(f"{lead}{tool.name}(") for tool in tools)
            return alternatives([f"{head} {rest}" for head, rest in zip(heads, inside, strict=True)])

        first, others = lark.rule("first", calls("[")), lark.rule("others", calls(", "))
        return f'{first} {others}* "]"' if several else f'{first} "]"'

    def call_pattern(self) -> str:
        return rf"[ \n]*(\[[ \n]*[A-Za-z_][A-Za-z0-9_.\-]*\(|{escaped(_FENCE)}|<\|python_start).*"


def _read_call(source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
    """name(key=value, ...). False, with nothing taken, if it is no call of a known function."""
    while "(" not in source.rest and len(source.rest) < _LONGEST_NAME and (yield from source.more()):
        pass
    name, bracket, _ = source.rest.partition("(")
    if not bracket or name.strip() not in tools:
        return False
    source.take(len(name) + 1)
    finds.begin(name.strip())
    lead = "{"
    while True:
        yield from source.blanks()
        if (yield from source.skip(")")):
            finds.arguments("{}" if lead == "{" else "}")
            return True
        argument = yield from _read_argument(source)
        if argument is None:
            return True
        finds.arguments(f"{lead}{argument}")
        lead = ", "
        yield from source.blanks()
        yield from source.skip(",")


def _read_argument(source: Source) -> Steps[str | None]:
    """key=value as a member of a JSON object; None, with nothing taken, where it is none or is cut."""
    size = yield from _size_of_argument(source)
    if size is None:
        return None
    key, equals, value = source.rest[:size].partition("=")
    written = _as_json(value.strip()) if equals else None
    if written is None or not key.strip().isidentifier():
        return None
    source.take(size)
    return f"{json.dumps(key.strip())}: {written}"


def _size_of_argument(source: Source) -> Steps[int | None]:
    """Characters up to the comma or bracket that ends it."""
    at, depth, quote = 0, 0, ""
    while True:
        text = source.rest
        while at < len(text):
            char = text[at]
            if quote:
                at += char == "\\"
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif depth == 0 and char in ",)":
                return at
            elif char in ")]}":
                depth -= 1
            at += 1
        if not (yield from source.more()):
            return None


def _as_json(value: str) -> str | None:
    """A Python literal as JSON; JSON's own words are taken too."""
    try:
        return json.dumps(ast.literal_eval(value), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _written(name: str, arguments: Any) -> str:
    pairs = arguments.items() if isinstance(arguments, Mapping) else ()
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in pairs)})"


def _inside(index: int, tool: ToolSpec, lark: Lark) -> str:
    """Its parameters in the schema's order, the required ones first. Values are JSON, which the parser takes."""
    pairs = []
    for place, (key, schema) in enumerate(properties_of(tool).items()):
        body = f"{literal(key + '=')} {lark.value(f'{index}_{place}', schema, tool)}"
        pairs.append((key in required_of(tool), lark.rule(f"argument_{index}_{place}", body)))
    needed = [rule for is_needed, rule in pairs if is_needed]
    others = [rule for is_needed, rule in pairs if not is_needed]
    if not needed and others:
        first, *others = others
        return f"({first} {_each_or_not(others)})? {literal(')')}"
    return " ".join([' ", " '.join(needed), _each_or_not(others), literal(")")])


def _each_or_not(rules: Sequence[str]) -> str:
    return " ".join(f'(", " {rule})?' for rule in rules)


PYTHONIC = Pythonic()
