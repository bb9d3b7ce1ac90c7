"""Tools told to a model in words, where its chat template knows none: in the system message, and the calls and results
of the past as plain text. What the model then writes is read as the same format.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from app.chat.tools.format import ToolFormat
from app.chat.tools.json_calls import loaded
from app.chat.types import Message, ToolSpec

_PARAGRAPH = "\n\n"


def told_in_words(messages: Sequence[Message], tools: Sequence[ToolSpec], format: ToolFormat) -> tuple[Message, ...]:
    """The same conversation without tools, tool calls and messages of role tool."""
    plain = tuple(_without_tools(messages, format))
    if not tools:
        return plain
    words = _words(tools, format)
    if plain and plain[0].role == "system":
        return (replace(plain[0], content=plain[0].content + _PARAGRAPH + words), *plain[1:])
    return (Message(role="system", content=words), *plain)


def _words(tools: Sequence[ToolSpec], format: ToolFormat) -> str:
    example = format.written([(tools[0].name, {key: "..." for key in _keys(tools[0])})])
    return _PARAGRAPH.join(
        [
            "You may call these functions, given as JSON, one in each line:",
            "\n".join(json.dumps(tool_as_json(tool)["function"], ensure_ascii=False) for tool in tools),
            f"To call one, write it like this and nothing else:\n{example}",
            "You are then told its result. If no function is of use, answer in words.",
        ]
    )


def _keys(tool: ToolSpec) -> Sequence[str]:
    properties = tool.parameters.get("properties")
    return tuple(properties) if isinstance(properties, dict) else ()


def _without_tools(messages: Sequence[Message], format: ToolFormat) -> Iterator[Message]:
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "tool":  # results of one turn are one message: many templates want user and assistant to alternate
            results = (f"<tool_response>\n{message.content}\n</tool_response>" for message in group)
            yield Message(role="user", content="\n".join(results))
        else:
            yield from (_with_calls_written(message, format) for message in group)


def _with_calls_written(message: Message, format: ToolFormat) -> Message:
    if not message.tool_calls:
        return message
    calls = format.written([(call.name, loaded(call.arguments) or {}) for call in message.tool_calls])
    return replace(message, content=f"{message.content}\n{calls}".lstrip("\n"), tool_calls=())


def tool_as_json(tool: ToolSpec) -> dict[str, object]:
    """As OpenAI's API has it, which is what chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
