"""Qwen3-Coder's XML: `<function=name>` with `<parameter=key>` lines inside, in a `<tool_call>` that it may forget.

Values are bare text; the schema says which are strings. Those go out as they come, others when they are whole.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.chat.tools.format import ToolFormat, ToolsByName
from app.chat.tools.found import Finds
from app.chat.tools.grammar import Lark, alternatives, literal, properties_of, required_of
from app.chat.tools.json_calls import loaded
from app.chat.tools.source import Source, Steps, first_of, live_size
from app.chat.tools.tagged_json import skip_closing
from app.chat.types import ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_ENDS = (_END_PARAMETER, "\n" + _PARAMETER, "\n" + _END_FUNCTION)  # it may forget the first, too
_LONGEST_NAME = 256
_STRING = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXml(ToolFormat):
    name = "qwen3_xml"
    starts = (_OPEN, _FUNCTION)
    control = (_CLOSE,)

    def claims(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        blanks = ""
        if start == _OPEN:
            blanks = yield from source.blanks()
            if not (yield from source.skip(_FUNCTION)):
                source.put_back(blanks)
                return False
        name = yield from _read_name(source)
        if name is None:
            source.put_back((blanks + _FUNCTION) if start == _OPEN else "")
            return False
        finds.begin(name)
        yield from _read_parameters(source, finds, _types(tools.get(name)))
        for end in (_END_FUNCTION, _CLOSE):
            yield from skip_closing(source, end)
        return True

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "\n".join(f"{_OPEN}\n{_written(name, arguments)}\n{_CLOSE}" for name, arguments in calls)

    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        functions = [_function(index, tool, lark) for index, tool in enumerate(tools)]
        body = lark.rule("body", alternatives(functions))
        rule = lark.rule("call", f'{lark.opening(_OPEN)} "\\n" {body} "\\n" {lark.tag(_CLOSE)}')
        return lark.join(rule, "\n") if several else rule


def _read_name(source: Source) -> Steps[str | None]:
    """What stands before `>`."""
    while ">" not in source.rest and len(source.rest) < _LONGEST_NAME and (yield from source.more()):
        pass
    name, bracket, _ = source.rest.partition(">")
    if not (bracket and name.strip()) or "\n" in name:
        return None
    source.take(len(name) + 1)
    return name.strip().strip("\"'")


def _read_parameters(source: Source, finds: Finds, types: Mapping[str, frozenset[str]]) -> Steps[None]:
    """Those that follow, as one JSON object, which stays open where the last value is cut."""
    lead = "{"
    while True:
        gap = yield from source.blanks()
        if not (yield from source.skip(_PARAMETER)):
            source.put_back(gap)
            break
        key = yield from _read_name(source)
        if key is None:
            source.put_back(gap + _PARAMETER)
            break
        finds.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        lead = ", "
        copy = _copy_text if types.get(key) == _STRING else _copy_value
        if not (yield from copy(source, finds)):
            return
    if source.is_over and _is_cut(source.rest.strip()):
        source.take(len(source.rest))
    else:
        finds.arguments("{}" if lead == "{" else "}")


def _is_cut(text: str) -> bool:
    """It is the beginning of a tag."""
    return bool(text) and any(tag.startswith(text) for tag in (_PARAMETER, _END_FUNCTION))


def _copy_text(source: Source, finds: Finds) -> Steps[bool]:
    """A string value as JSON, piece by piece. One new line at either end is layout. False where it is cut."""
    yield from source.skip("\n")
    finds.arguments('"')
    while (found := first_of(source.rest, _ENDS)) is None:
        held = live_size(source.rest, _ENDS)
        held += source.rest.endswith("\n", 0, len(source.rest) - held)
        finds.arguments(_inside(source.take(len(source.rest) - held)))
        if not (yield from source.more()):
            finds.arguments(_inside(source.take(len(source.rest))))
            return False
    finds.arguments(_inside(source.take(found[0]).removesuffix("\n")) + '"')
    yield from source.skip(_END_PARAMETER)
    return True


def _copy_value(source: Source, finds: Finds) -> Steps[bool]:
    """Any other value, once it is whole. False where it is cut."""
    yield from source.skip("\n")
    while (found := first_of(source.rest, _ENDS)) is None and (yield from source.more()):
        pass
    text = source.take(len(source.rest) if found is None else found[0])
    finds.arguments(_value(text.removesuffix("\n")))
    yield from source.skip(_END_PARAMETER)
    return found is not None


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str) -> str:
    """A bare value as JSON: as it stands where it is some, else a string."""
    plain = _WORDS.get(text.strip(), text.strip())
    is_json = plain == "null" or loaded(plain) is not None
    return plain if is_json else json.dumps(text, ensure_ascii=False)


def _types(tool: ToolSpec | None) -> Mapping[str, frozenset[str]]:
    """Parameter -> the JSON types that its schema takes; none where it does not say."""
    return {key: _types_of(schema) for key, schema in properties_of(tool).items()} if tool is not None else {}


def _types_of(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        return _STRING
    return frozenset([kind] if isinstance(kind, str) else kind if isinstance(kind, list) else [])


def _written(name: str, arguments: Any) -> str:
    lines = [f"{_FUNCTION}{name}>"]
    for key, value in (arguments if isinstance(arguments, Mapping) else {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{_PARAMETER}{key}>\n{text}\n{_END_PARAMETER}")
    return "\n".join([*lines, _END_FUNCTION])


def _function(index: int, tool: ToolSpec, lark: Lark) -> str:
    """Its parameters in the schema's order, those that are not required left out at will."""
    parts = []
    for place, (key, schema) in enumerate(properties_of(tool).items()):
        rule = lark.rule(f"parameter_{index}_{place}", _parameter(f"{index}_{place}", key, schema, tool, lark))
        parts.append(rule if key in required_of(tool) else f"{rule}?")
    return " ".join([literal(f"{_FUNCTION}{tool.name}>\n"), *parts, literal(_END_FUNCTION)])


def _parameter(place: str, key: str, schema: Any, tool: ToolSpec, lark: Lark) -> str:
    """A string is bare text; so is each choice of an enum of strings."""
    head, tail = literal(f"{_PARAMETER}{key}>\n"), f"\n{_END_PARAMETER}\n"
    if _types_of(schema) != _STRING:
        return f"{head} {lark.value(place, schema, tool)} {literal(tail)}"
    if "enum" in schema:
        choices = alternatives([literal(str(choice)) for choice in schema["enum"]])
        return f"{head} ({choices}) {literal(tail)}"
    return f"{head} {lark.text_until(f'text_{place}', tail)}"


QWEN_XML = QwenXml()
