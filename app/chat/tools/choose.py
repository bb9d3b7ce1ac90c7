"""Which tool format a model writes: the one its catalogue entry names, else what its chat template shows."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from app.chat.tools.format import ToolFormat
from app.chat.tools.llama3_json import LLAMA3_JSON
from app.chat.tools.mistral import MISTRAL, MISTRAL_NAMED
from app.chat.tools.pythonic import PYTHONIC
from app.chat.tools.qwen_xml import QWEN_XML
from app.chat.tools.tagged_json import HERMES, TaggedJson

FORMATS: dict[str, ToolFormat] = {
    format.name: format for format in (QWEN_XML, HERMES, MISTRAL_NAMED, MISTRAL, LLAMA3_JSON, PYTHONIC)
}
PROBE_NAME, PROBE_KEY, PROBE_VALUE = "fireside_probe", "probe_key", "probe_value"

# Renders one call of the probe function, as a conversation's last message: the text, or None where it cannot.
RenderProbe = Callable[[], str | None]


def choose_format(template: str, render_probe: RenderProbe) -> ToolFormat:
    """By the words of a template, in the table's order; else from what it writes of a call; else Hermes, which is then
    told to the model in words."""
    claimed = next((format for format in FORMATS.values() if format.claims(template)), None)
    if claimed is not None:
        return claimed
    text = render_probe() if "tool_calls" in template else None
    return (_from_example(text) if text else None) or HERMES


def _from_example(text: str) -> ToolFormat | None:
    """A format made of what stands around the probe's JSON; None where the call is written in another way."""
    name_at = text.rfind(json.dumps(PROBE_NAME))
    start = text.rfind("{", 0, name_at)
    if name_at < 0 or start < 0:
        return None
    try:
        call, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    key = _arguments_key(call)
    before, is_list, after = _surroundings(text[:start], text[end:])
    opening, blanks = before.rstrip(), before[len(before.rstrip()) :]
    tag = opening[_tag_start(opening) :]
    if key is None or not tag:
        return None
    return TaggedJson("from the template", tag, _closing(after), layout=blanks, arguments_key=key, is_list=is_list)


def _arguments_key(call: Any) -> str | None:
    if not isinstance(call, dict) or call.get("name") != PROBE_NAME:
        return None
    return next((key for key in ("arguments", "parameters") if call.get(key) == {PROBE_KEY: PROBE_VALUE}), None)


def _surroundings(before: str, after: str) -> tuple[str, bool, str]:
    """Without the brackets of a list."""
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        return before.rstrip()[:-1], True, after.lstrip()[1:]
    return before, False, after


def _tag_start(text: str) -> int:
    """Where the last tag of `text` begins: `<...>` or `[...]`."""
    if text.endswith(">"):
        return text.rfind("<")
    return text.rfind("[") if text.endswith("]") else len(text)


def _closing(after: str) -> str:
    """The closing tag `</...>`, `<...>` or `[/...]` that follows at once, unless it ends the turn."""
    text = after.lstrip()
    ends: Sequence[tuple[str, str]] = (("</", ">"), ("<|/", ">"), ("<|tool", ">"), ("[/", "]"))
    return next((text[: text.index(end) + 1] for start, end in ends if text.startswith(start) and end in text), "")
