"""OpenAI's wire words for a conversation and its tools, as /v1/chat/completions has them -> app.chat.types."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from app.api.body import invalid
from app.api.errors import echo
from app.chat.types import NO_PARAMETERS, Message, NamedTool, Role, ToolCall, ToolChoice, ToolSpec
from app.errors import AppError

MAX_TOOLS = 512
_MAX_NAME = 256

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")


class MessageBody(BaseModel):
    """Fields beyond these (cache_control, prefix, ...) are dropped: no chat template reads them."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, WithJsonSchema({"type": "string", "enum": [*_ROLES]})]
    content: Any = None
    refusal: Any = None
    name: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None


def messages_of(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Raises AppError (400) that names the place."""
    return tuple(_message(f"messages[{index}]", body) for index, body in enumerate(bodies))


def _message(place: str, body: MessageBody) -> Message:
    role = _ROLES.get(body.role)
    if role is None:
        raise invalid(f"{place}.role", f"must be one of {', '.join(_ROLES)}; got {echo(body.role)}.")
    texts, thoughts = _parts(f"{place}.content", body.content)
    if body.content is None and isinstance(body.refusal, str):
        texts = [body.refusal]
    thought = next((said for said in (body.reasoning_content, body.reasoning) if isinstance(said, str)), None)
    return Message(
        role=role,
        content="\n".join(texts),
        name=body.name if isinstance(body.name, str) else None,
        reasoning_content=thought if thought is not None else "\n".join(thoughts) or None,
        tool_calls=tuple(_calls(place, body)) if role == "assistant" else (),
        tool_call_id=body.tool_call_id if isinstance(body.tool_call_id, str) else None,
    )


def _parts(param: str, content: Any) -> tuple[list[str], list[str]]:
    """Texts and thoughts of a string, null, or a list of parts."""
    if content is None or isinstance(content, str):
        return [content or ""], []
    if not isinstance(content, list):
        raise invalid(param, f"expected a string or a list of parts; got {echo(content)}.")
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        kind, text = _part(f"{param}[{index}]", part)
        (thoughts if kind in _THOUGHT_PARTS else texts).append(text)
    return texts, thoughts


def _part(param: str, part: Any) -> tuple[str, str]:
    if isinstance(part, str):
        return "text", part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind in (*_TEXT_PARTS, *_THOUGHT_PARTS, "refusal"):
        text = part.get("text", part.get(kind))
        if not isinstance(text, str):
            raise invalid(param, f"a part of type {kind} needs a string `text`.")
        return kind, text
    raise AppError(
        400,
        "unsupported_content",
        f"`{param}` is a part of type {echo(kind)}, and this model reads text only.",
        hint="Send text parts, or choose a model that takes such input.",
        param=param,
    )


def _calls(place: str, body: MessageBody) -> Iterator[ToolCall]:
    """Earlier calls, also in the older form of one `function_call`."""
    if body.function_call:
        yield _call(f"{place}.function_call", {"function": body.function_call}, 0)
    if body.tool_calls is None:
        return
    if not isinstance(body.tool_calls, list):
        raise invalid(f"{place}.tool_calls", f"expected a list; got {echo(body.tool_calls)}.")
    for index, call in enumerate(body.tool_calls):
        yield _call(f"{place}.tool_calls[{index}]", call, index)


def _call(place: str, call: Any, index: int) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(place, f"expected a `function` with a name; got {echo(call)}.")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some send the object itself
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    call_id = call.get("id")
    return ToolCall(
        id=call_id if isinstance(call_id, str) and call_id else f"call_{index}",
        name=function["name"],
        arguments=arguments,
    )


def tools_of(tools: Any) -> tuple[ToolSpec, ...]:
    """null and [] are no tools. Raises AppError (400)."""
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid("tools", f"expected a list of at most {MAX_TOOLS} tools; got {echo(tools)}.")
    specs = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid("tools", f"{echo(twice)} is there twice; a call could not tell which.")
    return specs


def _tool(place: str, tool: Any) -> ToolSpec:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if kind != "function":
        raise AppError(
            400,
            "unsupported_tool",
            f"`{place}` is of type {echo(kind)}; only functions can be called here.",
            hint="Leave it out, or describe it as a function.",
            param=place,
        )
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise invalid(f"{place}.function.name", f"expected a name of at most {_MAX_NAME} characters; got {echo(name)}.")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.function.parameters", f"expected a JSON schema; got {echo(parameters)}.")
    description = function.get("description")
    return ToolSpec(
        name=name,
        description=description if isinstance(description, str) else "",
        parameters=NO_PARAMETERS if parameters is None else {"type": "object", "properties": {}, **parameters},
        is_strict=function.get("strict") is True,
    )


def tool_choice_of(choice: Any, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    """The choice, and the tools that it leaves. Raises AppError (400)."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), tools)
    read = _choice(choice)
    if not tools and read not in ("auto", "none"):
        raise invalid("tool_choice", "asks for a call, and there are no `tools`.")
    return read if tools else "auto", tools


def _choice(choice: Any) -> ToolChoice:
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice]
    name = _name_in(choice)
    if name is None:
        raise invalid("tool_choice", f"must be auto, none, required or a function by name; got {echo(choice)}.")
    return NamedTool(name)


def _name_in(choice: Any) -> str | None:
    """{"type": "function", "function": {"name": ...}}, or with the name beside the type."""
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _allowed(allowed: Any, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, tuple[ToolSpec, ...]]:
    names = allowed.get("tools") if isinstance(allowed, Mapping) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if not isinstance(names, list) or mode not in ("auto", "required"):
        raise invalid("tool_choice", f"`allowed_tools` needs a mode (auto, required) and tools; got {echo(allowed)}.")
    wanted = {_name_in(item) for item in names}
    kept = tuple(tool for tool in tools if tool.name in wanted)
    if len(kept) != len(wanted):
        raise invalid("tool_choice", f"allows tools that are not among `tools`: {echo(names)}.")
    return mode, kept
