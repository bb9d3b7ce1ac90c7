"""The wire words of OpenAI's newer endpoint (/v1/responses) for requests, and their conversion to a ChatRequest.

Nothing is kept between requests: what would need that is refused. Tools that OpenAI runs on its own servers cannot be
called here; they are left out, and the reply lists those that are left.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from app.api.body import MAX_MESSAGES, Many, invalid
from app.api.conversation import tool_choice_of, tools_of
from app.api.errors import echo
from app.api.grammars import grammar_of
from app.api.numbers import Count, Logprobs, Penalty, Probability, Seed, Temperature, TopK
from app.api.protocol import greedy_at_zero, token_limit
from app.chat.types import (
    ChatRequest,
    Effort,
    Message,
    Role,
    SamplingOptions,
    ToolCall,
)
from app.errors import AppError
from engine.types import GrammarSpec

_log = logging.getLogger("fireside.api")

Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]})]

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EFFORTS: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh")
_STATEFUL = ("previous_response_id", "conversation", "prompt")
_HOSTED_TOOLS = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")  # and their versions
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class ResponsesBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    top_logprobs: Logprobs | None = None
    include: Many[str] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    truncation: str | None = None
    stream: bool | None = None

    def request(self, request_id: str) -> ChatRequest:
        """Raises AppError (400)."""
        self._refuse_state()
        messages = (*self._instructions(), *_messages(self.input))
        self._leave_out_hosted_tools(request_id)
        tool_choice, tools = tool_choice_of(self.tool_choice, tools_of(self.functions))
        return ChatRequest(
            request_id=request_id,
            model=self.model or "",
            messages=messages,
            sampling=self._sampling(),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self._effort(),
            continue_final_message=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        )

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that can be called here, as they were sent."""
        return [tool for tool in self.tools or () if tool.get("type") == "function"]

    def _leave_out_hosted_tools(self, request_id: str) -> None:
        """Raises AppError (400) for one that runs at the client: what it would be called for is lost without it."""
        for index, tool in enumerate(self.tools or ()):
            kind = str(tool.get("type"))
            if kind.startswith(_HOSTED_TOOLS):
                _log.info("request %s: tool left out, as it runs on OpenAI's servers alone: %s", request_id, echo(kind))
            elif kind != "function":
                raise AppError(
                    400,
                    "unsupported_tool",
                    f"`tools[{index}]` ({echo(tool.get('name', 'no name'))}) is of type {echo(kind)}; only functions "
                    "can be called here.",
                    hint="Leave it out, or describe it as a function.",
                    param=f"tools[{index}]",
                )

    def _refuse_state(self) -> None:
        for name in _STATEFUL:
            if getattr(self, name, None):
                raise AppError(
                    400,
                    "unsupported_parameter",
                    f"`{name}`: Fireside keeps no responses.",
                    hint="Send the whole conversation as `input`.",
                    param=name,
                )
        if self.background:
            raise invalid("background", "an answer is given at once here; leave it out.")
        if self.truncation not in (None, "disabled"):
            why = "an input that is too long is refused here, not cut" if self.truncation == "auto" else "no such way"
            raise invalid("truncation", f"{why}; got {echo(self.truncation)}. Send disabled, or leave it out.")

    def _instructions(self) -> Iterator[Message]:
        if self.instructions:
            yield Message(role="system", content=self.instructions)

    def _sampling(self) -> SamplingOptions:
        temperature, top_p = greedy_at_zero(self.temperature, self.top_p)
        return SamplingOptions(
            max_tokens=token_limit("max_output_tokens", self.max_output_tokens),
            temperature=temperature,
            top_p=top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=None if self.seed is None or self.seed < 0 else self.seed,
            logprobs=self._num_logprobs(),
            grammar=self._grammar(),
            grammar_param="text.format",
        )

    def _num_logprobs(self) -> int | None:
        is_asked = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_asked else None

    def _grammar(self) -> GrammarSpec | None:
        """`text.format` is `response_format` without its inner box."""
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        try:
            return grammar_of({"response_format": form})
        except AppError as error:
            raise invalid("text.format", error.message) from error

    def _effort(self) -> Effort | None:
        effort = (self.reasoning or {}).get("effort")
        if effort is None or effort in _EFFORTS:
            return effort
        raise invalid("reasoning.effort", f"must be one of {', '.join(_EFFORTS)}; got {echo(effort)}.")


def _messages(given: Any) -> list[Message]:
    """Items that an assistant made in one go (its thinking, its text, its calls) are one message of ours."""
    if isinstance(given, str) and given:
        return [Message(role="user", content=given)]
    if not isinstance(given, list) or not given:
        raise invalid("input", f"expected a text or a list of items, not empty; got {echo(given)}.")
    if len(given) > MAX_MESSAGES:
        raise invalid("input", f"has {len(given):,} items; the limit is {MAX_MESSAGES:,}.")
    messages: list[Message] = []
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise invalid(f"input[{index}]", f"expected an item; got {echo(item)}.")
        message = _item(f"input[{index}]", item)
        if messages and _go_together(messages[-1], message):
            message = _one_of(messages.pop(), message)
        messages.append(message)
    return messages


def _item(where: str, item: Mapping[str, Any]) -> Message:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}; got {echo(role)}.")
            return Message(role=_ROLES[role], content=_text(f"{where}.content", item.get("content")))
        case "function_call":
            call = ToolCall(
                id=_field(where, item, "call_id"),
                name=_field(where, item, "name"),
                arguments=_field(where, item, "arguments"),
            )
            return Message(role="assistant", content="", tool_calls=(call,))
        case "function_call_output":
            output = _text(f"{where}.output", item.get("output"))
            return Message(role="tool", content=output, tool_call_id=_field(where, item, "call_id"))
        case "reasoning":
            thoughts = item.get("content") or item.get("summary") or []
            text = _text(f"{where}.content", thoughts)
            return Message(role="assistant", content="", reasoning_content=text or None)
        case kind:
            raise AppError(
                400,
                "unsupported_content",
                f"`{where}` is an item of type {echo(kind)}, which cannot be read here.",
                hint="There are message, function_call, function_call_output and reasoning.",
                param=where,
            )


def _go_together(before: Message, after: Message) -> bool:
    """Thinking comes before the text, and both before the calls."""
    if before.role != "assistant" or after.role != "assistant":
        return False
    if after.tool_calls:
        return True
    return not before.tool_calls and not before.content and bool(before.reasoning_content)


def _one_of(before: Message, after: Message) -> Message:
    thoughts = [text for text in (before.reasoning_content, after.reasoning_content) if text]
    return Message(
        role="assistant",
        content=before.content + after.content,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=before.tool_calls + after.tool_calls,
    )


def _text(param: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(param, f"expected a string or a list of parts; got {echo(content)}.")
    return "\n".join(_part(f"{param}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise AppError(
            400,
            "unsupported_content",
            f"`{where}` is a part of type {echo(kind)}, and this model reads text only.",
            hint="Send text parts, or choose a model that takes such input.",
            param=where,
        )
    return _field(where, part, "refusal" if kind == "refusal" else "text")


def _field(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"expected a text; got {echo(value)}.")
    return value


def as_sent(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """OpenAI's SDKs read a mapping of texts."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in (metadata or {}).items()}
