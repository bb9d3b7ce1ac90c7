"""Anthropic's wire words for requests (/v1/messages), and their conversion to a ChatRequest.

A block that a text model can read is turned into text or a tool's words; any other is refused by name. Fields that
mean nothing here (cache_control, metadata, service_tier, ...) are accepted and ignored.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from app.api.body import MAX_MESSAGES, Many, invalid
from app.api.conversation import tool_choice_of, tools_of
from app.api.errors import echo
from app.api.numbers import NUMBER, Positive, Probability, Temperature
from app.api.protocol import greedy_at_zero, stop_strings
from app.chat.types import ChatRequest, Effort, Message, SamplingOptions, ToolCall
from app.errors import AppError
from engine.types import GrammarKind, GrammarSpec

# Some versions of Claude Code begin their system prompt with a line of this name that differs each time; with it no
# prompt would ever be found in the prefix cache.
_CHANGING_LINE = "x-anthropic-billing-header"

_EFFORTS: dict[str, Effort] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}

_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_")  # run by the client; each version has a date


class TurnBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: Any


class CountBody(BaseModel):
    """What makes the prompt."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    messages: Annotated[Many[TurnBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Any = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def request(self, request_id: str) -> ChatRequest:
        """Raises AppError (400)."""
        turns = [message for index, turn in enumerate(self.messages) for message in _messages(index, turn)]
        choice = self.tool_choice or {}
        functions = [_function(index, tool) for index, tool in enumerate(self.tools or ())]
        tool_choice, tools = tool_choice_of(_choice(choice), tools_of(functions))
        return ChatRequest(
            request_id=request_id,
            model=self.model or "",
            messages=(*_system(self.system), *turns),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            reasoning_effort=self._effort(),
            continue_final_message=turns[-1].role == "assistant" and not turns[-1].tool_calls,
            returns_prompt_ids=True,
        )

    def _effort(self) -> Effort | None:
        if (self.thinking or {}).get("type") == "disabled":
            return "none"
        effort = (self.output_config or {}).get("effort")
        return _EFFORTS.get(effort) if isinstance(effort, str) else None


class MessagesBody(CountBody):
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0), NUMBER] | None = None
    stop_sequences: Many[str] | None = None
    output_format: dict[str, Any] | None = None
    stream: bool | None = None

    def sampling(self) -> SamplingOptions:
        """Raises AppError (400)."""
        temperature, top_p = greedy_at_zero(self.temperature, self.top_p)
        return SamplingOptions(
            max_tokens=self.max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=self.top_k,
            stop=stop_strings(self.stop_sequences, "stop_sequences"),
            grammar=self._grammar(),
            grammar_param="output_format",
        )

    def _grammar(self) -> GrammarSpec | None:
        form = self.output_format or (self.output_config or {}).get("format")
        if not form:
            return None
        schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
        if not isinstance(schema, dict):
            raise invalid("output_format", f"expected type json_schema and a `schema`; got {echo(form)}.")
        return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _system(system: Any) -> Iterator[Message]:
    text = _text("system", system) if system else ""
    lines = text.split("\n", 1)
    if lines[0].startswith(_CHANGING_LINE):
        text = "".join(lines[1:])
    if text:
        yield Message(role="system", content=text)


def _messages(index: int, turn: TurnBody) -> Iterator[Message]:
    """One turn may hold several messages of ours: results of tools stand before what the user says to them."""
    place = f"messages[{index}]"
    if turn.role == "assistant":
        yield _assistant(place, turn.content)
    elif turn.role == "user":
        yield from _user(place, turn.content)
    elif turn.role in ("system", "developer"):
        yield Message(role="system", content=_text(f"{place}.content", turn.content))
    else:
        raise invalid(f"{place}.role", f"must be user, assistant or system; got {echo(turn.role)}.")


def _assistant(place: str, content: Any) -> Message:
    texts, thoughts, calls = [], [], []
    for where, block in _blocks(f"{place}.content", content):
        match block.get("type"):
            case "text":
                texts.append(_field(where, block, "text"))
            case "thinking":
                thoughts.append(_field(where, block, "thinking"))
            case "redacted_thinking":
                pass  # sealed by whoever wrote it: nothing in it can be read here
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append(
                    ToolCall(id=_field(where, block, "id"), name=_field(where, block, "name"), arguments=arguments)
                )
            case kind:
                raise _unreadable(where, kind)
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _user(place: str, content: Any) -> Iterator[Message]:
    texts: list[str] = []
    has_results = False
    for where, block in _blocks(f"{place}.content", content):
        if block.get("type") == "tool_result":
            has_results = True
            result = _text(f"{where}.content", block.get("content") or "")
            yield Message(role="tool", content=result, tool_call_id=_field(where, block, "tool_use_id"))
        else:
            texts.append(_text_block(where, block))
    if texts or not has_results:
        yield Message(role="user", content="\n".join(texts))


def _blocks(param: str, content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, block) of each; a string is one block of text."""
    if isinstance(content, str):
        yield param, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid(param, f"expected a string or a list of blocks; got {echo(content)}.")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{param}[{index}]", f"expected a block; got {echo(block)}.")
        yield f"{param}[{index}]", block


def _text(param: str, content: Any) -> str:
    return "\n".join(_text_block(where, block) for where, block in _blocks(param, content))


def _text_block(where: str, block: Mapping[str, Any]) -> str:
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _field(f"{where}.source", source, "data")
    if block.get("type") != "text":
        raise _unreadable(where, block.get("type"))
    return _field(where, block, "text")


def _field(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"expected a text; got {echo(value)}.")
    return value


def _unreadable(where: str, kind: Any) -> AppError:
    return AppError(
        400,
        "unsupported_content",
        f"`{where}` is a block of type {echo(kind)}, and this model reads text only.",
        hint="Send text blocks, or choose a model that takes such input.",
        param=where,
    )


def _function(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the client's own, in OpenAI's words; those that Anthropic's models know by name have no schema."""
    where = f"tools[{index}]"
    schema = tool.get("input_schema")
    if tool.get("type", "custom") not in ("custom", None) and schema is None:
        is_clients = str(tool["type"]).startswith(_CLIENT_TOOLS)
        why = "a tool that Fireside does not support yet" if is_clients else "which runs on Anthropic's servers alone"
        raise AppError(
            400,
            "unsupported_tool",
            f"`{where}` is {echo(tool['type'])}, {why}.",
            hint="Leave it out, or send a tool with an `input_schema`.",
            param=where,
        )
    if schema is not None and not isinstance(schema, dict):
        raise invalid(f"{where}.input_schema", f"expected a JSON schema; got {echo(schema)}.")
    name = _field(where, tool, "name")
    described = {"description": tool.get("description"), "strict": tool.get("strict")}
    return {"type": "function", "name": name, "parameters": schema, **described}


def _choice(choice: Mapping[str, Any]) -> str | dict[str, str]:
    """In OpenAI's words."""
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "name": _field("tool_choice", choice, "name")}
    if kind not in ("auto", "any", "none"):
        raise invalid("tool_choice.type", f"must be auto, any, tool or none; got {echo(kind)}.")
    return str(kind)
