"""Llama 3.1 and 3.2: the whole answer is `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`; several
stand with `;` or a new line between them. A text may begin with a brace too, so only known names are calls.
"""

import json
from collections.abc import Sequence
from typing import Any

from app.chat.tools.format import ToolFormat, ToolsByName
from app.chat.tools.found import Finds
from app.chat.tools.grammar import Lark, alternatives, literal
from app.chat.tools.json_calls import read_call
from app.chat.tools.source import Source, Steps
from app.chat.tools.tagged_json import read_list_or_call
from app.chat.types import ToolSpec

_TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    name = "llama3_json"
    starts = (_TAG, "{", "[")
    at_start = True

    def claims(self, template: str) -> bool:
        return _TAG in template or ('"parameters": ' in template and "ipython" in template)

    def read_calls(self, start: str, source: Source, finds: Finds, tools: ToolsByName) -> Steps[bool]:
        names = frozenset(tools)
        if start != _TAG:
            source.put_back(start)
        blanks = yield from source.blanks()
        if not (yield from read_list_or_call(source, finds, names)):
            source.put_back(blanks)
            if start != _TAG:
                source.take(len(start))
            return False
        while True:
            gap = yield from source.blanks()
            gap += ";" if (yield from source.skip(";")) else ""
            gap += yield from source.blanks()
            if not (gap and (yield from source.has("{")) and (yield from read_call(source, finds, names))):
                source.put_back(gap)
                return True

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)

    def grammar(self, tools: Sequence[ToolSpec], lark: Lark, *, several: bool) -> str:
        heads = (f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": ' for tool in tools)
        calls = [f'{literal(h)} {lark.arguments(i, t)} "}}"' for i, (h, t) in enumerate(zip(heads, tools, strict=True))]
        rule = lark.rule("call", alternatives(calls))
        tag = f"{lark.tag(_TAG)}? " if lark.is_token(_TAG) else ""
        return f'{tag}{rule} ("; " {rule})*' if several else f"{tag}{rule}"

    def call_pattern(self) -> str:
        """A JSON object that names a function; any other is an answer."""
        return r'[ \n]*\[?[ \n]*\{[ \n]*"(name|function|type)".*'


LLAMA3_JSON = Llama3Json()
