"""JSON calls between two tags: Hermes' and Qwen's `<tool_call>`, and what a template shows that we know by no name."""

import json
from collections.abc import Sequence
from typing import Any

from app.chat.tools.format import ToolFormat, ToolsByName
from app.chat.tools.found import Finds
from app.chat.tools.grammar import Lark, alternatives, literal
from app.chat.tools.json_calls import read_call
from app.chat.tools.source import Source, Steps
from app.chat.types import ToolSpec


class TaggedJson(ToolFormat):
    """
    opening, closing   the tags; "" closes with the end of the object
    layout             between a tag and the object
    arguments_key      what the arguments are called
    is_list            one pair of tags around a list of calls
    """

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str,
        *,
        layout: str = "\n",
        arguments_key: str = "arguments",
        is_list: bool = False,
    ) -> None:
        self.name = name
        self.starts = (opening,)
        self.control = (closing,) if closing else ()
        self._opening, self._closing, self._layout = opening, closing, layout
        self._arguments_key, self._is_list = arguments_key, is_list

    def claims(self, template: str) -> bool:
        return self._opening in template and "<arg_key>" not in template  # GLM has these tags around its own XML

    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        blanks = yield from source.blanks()
        found = yield from read_list_or_call(source, finds)
        if not found:
            source.put_back(blanks)
            return False
        yield from skip_closing(source, self._closing)
        return True

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        objects = [json.dumps({"name": n, self._arguments_key: a}, ensure_ascii=False) for n, a in calls]
        if self._is_list:
            objects = [f"[{', '.join(objects)}]"]
        return "\n".join(f"{self._opening}{self._layout}{text}{self._layout}{self._closing}" for text in objects)

    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        body = lark.rule("body", alternatives([self._object(index, tool, lark) for index, tool in enumerate(tools)]))
        inner = body
        if self._is_list:
            inner = f'"[" {body} (", " {body})* "]"' if several else f'"[" {body} "]"'
        call = [lark.opening(self._opening), *self._space(), inner, *self._space()]
        call += [lark.tag(self._closing)] if self._closing else []
        rule = lark.rule("call", " ".join(call))
        return lark.join(rule, "\n") if several and not self._is_list else rule

    def _space(self) -> list[str]:
        return [literal(self._layout)] if self._layout else []

    def _object(self, index: int, tool: ToolSpec, lark: Lark) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self._arguments_key}": '
        return f'{literal(head)} {lark.arguments(index, tool)} "}}"'


def read_list_or_call(source: Source, finds: Finds, names: frozenset[str] | None = None) -> Steps[bool]:
    """One call object, or a list of them. False, with nothing taken, where the first of them is none."""
    is_list = yield from source.skip("[")
    blanks = (yield from source.blanks()) if is_list else ""
    if not (yield from read_call(source, finds, names)):
        source.put_back(("[" if is_list else "") + blanks)
        return False
    while is_list:
        gap = yield from source.blanks()
        if not (yield from source.skip(",")):
            break
        gap += "," + (yield from source.blanks())
        if not (yield from read_call(source, finds, names)):
            source.put_back(gap)
            return True
    if is_list:
        yield from source.skip("]")
    return True


def skip_closing(source: Source, closing: str) -> Steps[None]:
    """Take the closing tag where it comes, or the half of it that an answer breaks off in; a call that is whole without
    it is one."""
    blanks = yield from source.blanks()
    if closing and (yield from source.skip(closing)):
        return
    if source.rest and closing.startswith(source.rest):  # more would have come
        source.take(len(closing))
    else:
        source.put_back(blanks)


HERMES = TaggedJson("hermes", "<tool_call>", "</tool_call>")
