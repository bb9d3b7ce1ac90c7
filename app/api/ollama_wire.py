"""Ollama's wire words for requests (/api/chat, /api/generate), and their conversion to app.chat.types.

Options that mean nothing here (num_gpu, num_thread, mirostat, ...) are accepted and ignored, as its clients send them
always; `num_ctx` too: the context is the one that the model was loaded with.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from app.api.body import MAX_MESSAGES, Many, invalid
from app.api.conversation import MessageBody, messages_of, tools_of
from app.api.errors import echo
from app.api.numbers import Count, Penalty, Probability, Repetition, Seed, Temperature, TopK, Whole
from app.api.protocol import Stop, greedy_at_zero, stop_strings
from app.chat.types import ChatRequest, CompletionRequest, Effort, FillIn, Message, SamplingOptions, ToolCall
from app.errors import AppError
from engine.types import GrammarKind, GrammarSpec

_LATEST = ":latest"  # how Ollama writes a name without a tag
_NO_LIMIT = (-1, -2)
_AT_ONCE = (0, "0", "0s", "0m", "0h")

Form = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]
Think = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string"}]})]


class OptionsBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    num_predict: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop = None


class OllamaBody(BaseModel):
    """What both endpoints take. A stream unless `stream` is false."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    format: Form = None
    options: OptionsBody | None = None
    think: Think = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None

    @property
    def asks_to_unload(self) -> bool:
        """Ollama's way, where there is nothing to answer; other values are ignored: `--idle-timeout` rules."""
        return self.keep_alive in _AT_ONCE and not isinstance(self.keep_alive, bool)

    @property
    def wants_stream(self) -> bool:
        return self.stream is not False

    @property
    def name(self) -> str:
        return plain_name(self.model)

    def sampling(self) -> SamplingOptions:
        """Raises AppError (400)."""
        self._refuse_logprobs()
        options = self.options or OptionsBody()
        temperature, top_p = greedy_at_zero(options.temperature, options.top_p)
        return SamplingOptions(
            max_tokens=_limit(options.num_predict),
            temperature=temperature,
            top_p=top_p,
            top_k=None if options.top_k is None else max(0, options.top_k),
            min_p=options.min_p,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty or 0.0,
            frequency_penalty=options.frequency_penalty or 0.0,
            seed=None if options.seed is None or options.seed < 0 else options.seed,
            stop=stop_strings(options.stop, "options.stop"),
            grammar=self._grammar(),
            grammar_param="format",
        )

    def _refuse_logprobs(self) -> None:
        for name in ("logprobs", "top_logprobs"):
            if getattr(self, name):
                raise AppError(
                    400,
                    "unsupported_parameter",
                    f"`{name}` is not supported here.",
                    hint="Leave it out, or ask /v1/chat/completions, which has them.",
                    param=name,
                )

    def _grammar(self) -> GrammarSpec | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        if isinstance(self.format, dict):
            return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(self.format))
        raise invalid("format", f'must be "json" or a JSON schema; got {echo(self.format)}.')

    def effort(self) -> Effort | None:
        if self.think is None or self.think is True:
            return None
        effort = "none" if self.think is False else self.think
        known = next((word for word in get_args(Effort) if word == effort), None)
        if known is None:
            raise invalid("think", f"must be true, false, low, medium or high; got {echo(self.think)}.")
        return known  # type: ignore[no-any-return]


class ChatBody(OllamaBody):
    messages: Annotated[Many[dict[str, Any]], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Any = None

    def request(self, request_id: str) -> ChatRequest:
        """Raises AppError (400)."""
        messages = tuple(_with_ids(messages_of(list(map(_message, self.messages))), self.messages))
        return ChatRequest(
            request_id=request_id,
            model=self.name,
            messages=messages,
            sampling=self.sampling(),
            tools=tools_of(self.tools),
            reasoning_effort=self.effort(),
            continue_final_message=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        )


class GenerateBody(OllamaBody):
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: Many[Whole] | None = None
    images: list[Any] | None = None

    def request(self, request_id: str) -> ChatRequest | CompletionRequest:
        """Raises AppError (400)."""
        for name in ("template", "context", "images"):
            if getattr(self, name):
                raise AppError(
                    400,
                    "unsupported_parameter",
                    f"`{name}` is not supported.",
                    hint="Leave it out; /api/chat takes a whole conversation.",
                    param=name,
                )
        if self.raw or self.suffix:
            prompt = FillIn(self.prompt, self.suffix) if self.suffix else self.prompt
            return CompletionRequest(request_id=request_id, model=self.name, prompt=prompt, sampling=self.sampling())
        return ChatRequest(
            request_id=request_id,
            model=self.name,
            messages=(*self._system(), Message(role="user", content=self.prompt)),
            sampling=self.sampling(),
            reasoning_effort=self.effort(),
        )

    def _system(self) -> Iterator[Message]:
        if self.system:
            yield Message(role="system", content=self.system)


def plain_name(name: str | None) -> str:
    return (name or "").removesuffix(_LATEST)


def _limit(num_predict: int | None) -> int | None:
    if num_predict is None or num_predict in _NO_LIMIT:
        return None
    if num_predict < 1:
        raise invalid(
            "options.num_predict", f"must be at least 1, got {num_predict}; -1 takes what the context leaves."
        )
    return num_predict


def _message(message: Mapping[str, Any]) -> MessageBody:
    images = message.get("images")
    content = message.get("content")
    role = message.get("role")
    return MessageBody(
        role=role if isinstance(role, str) else repr(role),
        content=[{"type": "text", "text": content}, {"type": "image"}] if images else content,  # refused by that name
        reasoning_content=message.get("thinking"),
        tool_calls=message.get("tool_calls"),
        tool_call_id=message.get("tool_call_id"),
    )


def _with_ids(messages: tuple[Message, ...], given: list[dict[str, Any]]) -> Iterator[Message]:
    """Ollama's calls have no ids, and a result has the name of its tool: the first call of it that has none yet."""
    open_calls: list[ToolCall] = []
    num_calls = 0
    for message, as_sent in zip(messages, given, strict=True):
        if message.tool_calls:
            calls = [replace(call, id=f"call{num_calls + i:05d}") for i, call in enumerate(message.tool_calls)]
            num_calls += len(calls)
            open_calls += calls
            yield replace(message, tool_calls=tuple(calls))
        elif message.role == "tool" and message.tool_call_id is None and open_calls:
            name = as_sent.get("tool_name") or as_sent.get("name")
            call = next((call for call in open_calls if call.name == name), open_calls[0])
            open_calls.remove(call)
            yield replace(message, tool_call_id=call.id)
        else:
            yield message
