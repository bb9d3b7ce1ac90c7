"""Mistral: `[TOOL_CALLS]` before a list of JSON calls, or (from its tokenizer 11 on) before each `name[ARGS]{...}`."""

import json
from collections.abc import Sequence
from typing import Any

from app.chat.tools.format import ToolFormat, ToolsByName
from app.chat.tools.found import Finds
from app.chat.tools.grammar import Lark, alternatives, literal
from app.chat.tools.json_calls import copy_value
from app.chat.tools.source import Source, Steps
from app.chat.tools.tagged_json import read_list_or_call
from app.chat.types import ToolSpec

_TAG, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LONGEST_NAME = 256


class Mistral(ToolFormat):
    """writes_names  its newer way, which has no list"""

    starts = (_TAG,)
    control = (_ID, _ARGS)

    def __init__(self, name: str, *, writes_names: bool) -> None:
        self.name = name
        self._writes_names = writes_names

    def claims(self, template: str) -> bool:
        return _TAG in template and (_ARGS in template) == self._writes_names

    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        """Either way, whatever the model was taught."""
        blanks = yield from source.blanks()
        if (yield from source.has("[")) or (yield from source.has("{")):
            is_call = yield from read_list_or_call(source, finds)
        else:
            is_call = yield from _read_named(source, finds)
        if not is_call:
            source.put_back(blanks)
        return is_call

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        if self._writes_names:
            return "".join(f"{_TAG}{n}{_ARGS}{json.dumps(a, ensure_ascii=False)}" for n, a in calls)
        return _TAG + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)

    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        return (self._named if self._writes_names else self._listed)(tools, lark, several)

    def _named(self, tools: Sequence[ToolSpec], lark: Lark, several: bool) -> str:
        bodies = [f"{literal(t.name)} {lark.tag(_ARGS)} {lark.arguments(i, t)}" for i, t in enumerate(tools)]
        rule = lark.rule("call", f"{lark.opening(_TAG)} ({alternatives(bodies)})")
        return f"{rule}+" if several else rule

    def _listed(self, tools: Sequence[ToolSpec], lark: Lark, several: bool) -> str:
        heads = (f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ' for tool in tools)
        calls = [f'{literal(h)} {lark.arguments(i, t)} "}}"' for i, (h, t) in enumerate(zip(heads, tools, strict=True))]
        rule = lark.rule("call", alternatives(calls))
        more = f' (", " {rule})*' if several else ""
        return f'{lark.opening(_TAG)} " "? "[" {rule}{more} "]"'


def _read_named(source: Source, finds: Finds) -> Steps[bool]:
    """name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}; the model's own id is not kept, as it is unique in nothing."""
    while _ARGS not in source.rest and len(source.rest) < _LONGEST_NAME and (yield from source.more()):
        pass
    head, tag, _ = source.rest.partition(_ARGS)
    name = head.partition(_ID)[0].strip()
    if not (tag and name) or any(char.isspace() for char in name):
        return False
    taken = source.take(len(head) + len(tag))
    blanks = yield from source.blanks()
    if not (yield from source.has("{")):
        source.put_back(taken + blanks)
        return False
    finds.begin(name)
    yield from copy_value(source, finds)
    return True


MISTRAL = Mistral("mistral", writes_names=False)
MISTRAL_NAMED = Mistral("mistral_v11", writes_names=True)
