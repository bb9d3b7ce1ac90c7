"""OpenAI's wire words for requests, and their conversion to app.chat.types.

A field that is honoured is declared here; one that cannot be honoured yet is in `_NOT_YET` and refused by name unless
its value changes nothing; any other is accepted and ignored, as clients send many of their own.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from app.api.body import invalid
from app.api.errors import echo
from app.api.grammars import FIELDS as GRAMMAR_FIELDS
from app.api.grammars import grammar_of
from app.chat.types import ChatRequest, CompletionRequest, Message, Role, SamplingOptions
from app.errors import AppError
from engine.types import Standing

MAX_CHOICES = 128
MAX_STOPS = 256
MAX_STOP_CHARS = 4096
MAX_LOGPROBS = 20
_SEEDS = 2**63
_PRIORITIES = 10**9

Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What both endpoints take. None is the same as not given, everywhere."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    temperature: Annotated[Finite, Field(ge=0)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-_PRIORITIES, le=_PRIORITIES)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served_yet(self) -> "GenerationBody":
        for name, value in (self.model_extra or {}).items():
            changes_nothing = _NOT_YET.get(name)
            if changes_nothing is not None and value is not None and not changes_nothing(value):
                raise _unsupported(name, value)
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose log-probabilities are asked with each token; None asks for none at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def standing(self) -> Standing:
        """Somebody waits for what an API answers; `priority` as in vLLM, lower first."""
        return Standing(priority=self.priority or 0)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when `stream` is true.")

    def sampling(self, choice: int, max_tokens: int | None) -> SamplingOptions:
        """Options of answer number `choice`. Each answer of a seeded request has its own seed, or all were the same."""
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise invalid("min_tokens", f"is {min_tokens}, more than the {max_tokens} that the answer may have.")
        greedy = self.top_p == 0  # the smallest set of tokens that reaches probability 0 is the likeliest one
        seed = None if self.seed is None or self.seed < 0 else (self.seed + choice) % _SEEDS
        return SamplingOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=None if greedy else self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=grammar_of({name: getattr(self, name) for name in GRAMMAR_FIELDS}),
        )


class MessageBody(BaseModel):
    """Fields beyond these (refusal, cache_control, prefix, ...) are dropped: no chat template reads them."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, WithJsonSchema({"type": "string", "enum": [*ROLES]})]
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def requests(self, request_id: str) -> list[ChatRequest]:
        """One request for each of the n answers. Raises AppError (400)."""
        self.check_stream_options()
        messages = tuple(_message(index, message) for index, message in enumerate(self.messages))
        return [
            ChatRequest(
                request_id=f"{request_id}-{choice}",
                model=self.model or "",
                messages=messages,
                sampling=self.sampling(choice, self._max_tokens()),
                continue_final_message=self._continues(messages),
                template_kwargs=self._template_kwargs(),
                standing=self.standing,
            )
            for choice in range(self.num_choices)
        ]

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only allowed when `logprobs` is true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> int | None:
        """The newer name wins; SillyTavern sends both."""
        if self.max_completion_tokens is not None:
            return token_limit("max_completion_tokens", self.max_completion_tokens)
        return token_limit("max_tokens", self.max_tokens)

    def _continues(self, messages: tuple[Message, ...]) -> bool:
        """A last message of the assistant is its beginning, unless the client says otherwise (vLLM's two flags)."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "not together with add_generation_prompt.")
        is_assistant = messages[-1].role == "assistant"
        if self.continue_final_message and not is_assistant:
            raise invalid("continue_final_message", "the last message is not the assistant's.")
        return is_assistant and self.continue_final_message is not False and not self.add_generation_prompt

    def _template_kwargs(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class CompletionBody(GenerationBody):
    prompt: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, logprobs: Any) -> Any:
        """Chat's way to say none."""
        return None if logprobs is False else logprobs

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """With `echo` the prompt is part of the text."""
        return self.logprobs if self.echo else None

    @field_validator("prompt")
    @classmethod
    def _some_prompt(cls, prompt: Any) -> Any:
        if prompt is None or prompt == "" or prompt == []:
            raise AppError(400, "empty_prompt", "`prompt` is empty.", hint="Send some text.", param="prompt")
        return prompt

    def prompts(self) -> list[str | tuple[int, ...]]:
        """string | list of strings | token ids | list of lists of token ids -> the prompts. Raises AppError (400)."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt, list):
            if all(map(_is_token_id, self.prompt)):
                return [tuple(self.prompt)]
            return [_one_prompt(index, item) for index, item in enumerate(self.prompt)]
        raise invalid("prompt", f"expected text, token ids, or a list of either; got {echo(self.prompt)}.")

    def requests(self, request_id: str) -> list[CompletionRequest]:
        """One request for each answer: n for the first prompt, then n for the next. Raises AppError (400)."""
        self.check_stream_options()
        prompts = self.prompts()
        if len(prompts) * self.num_choices > MAX_CHOICES:
            raise invalid("prompt", f"{len(prompts)} prompts of n={self.num_choices}: at most {MAX_CHOICES} answers.")
        return [
            CompletionRequest(
                request_id=f"{request_id}-{index * self.num_choices + choice}",
                model=self.model or "",
                prompt=prompt,
                sampling=self.sampling(choice, token_limit("max_tokens", self.max_tokens)),
                echo=bool(self.echo),
                standing=self.standing,
            )
            for index, prompt in enumerate(prompts)
            for choice in range(self.num_choices)
        ]


def token_limit(param: str, value: int | None) -> int | None:
    """None and -1 take what the context leaves."""
    if value is None or value == -1:
        return None
    if value < 1:
        raise invalid(param, f"must be at least 1, got {value}; leave it out to use what the context leaves.")
    return value


def stop_strings(stop: Any, param: str = "stop") -> tuple[str, ...]:
    """null | string | list of strings; empty strings stop nothing. Raises AppError (400)."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid(param, f"expected a string or a list of strings; got {echo(stop)}.")
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise invalid(param, f"at most {MAX_STOPS} strings of {MAX_STOP_CHARS:,} characters in all.")
    return tuple(item for item in stops if item)


def _message(index: int, body: MessageBody) -> Message:
    place = f"messages[{index}]"
    role = ROLES.get(body.role)
    if role is None:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}; got {echo(body.role)}.")
    if body.tool_calls:
        raise _unsupported(f"{place}.tool_calls", body.tool_calls)
    return Message(
        role=role,
        content=_text(f"{place}.content", body.content),
        name=body.name,
        reasoning_content=body.reasoning_content,
    )


def _text(param: str, content: Any) -> str:
    """Content as one text: a string, null, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, f"expected a string or a list of parts; got {echo(content)}.")
    return "\n".join(_part(f"{param}[{index}]", part) for index, part in enumerate(content))


def _part(param: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(text, str):
        return text
    if kind in ("text", "input_text", "output_text"):
        raise invalid(param, "a text part needs a string `text`.")
    raise AppError(
        400,
        "unsupported_content",
        f"`{param}` is a part of type {echo(kind)}, and this model reads text only.",
        hint="Send text parts, or choose a model that takes such input.",
        param=param,
    )


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _one_prompt(index: int, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(map(_is_token_id, item)):
        return tuple(item)
    raise invalid(f"prompt[{index}]", f"expected text or a list of token ids, not empty; got {echo(item)}.")


def _unsupported(name: str, value: Any) -> AppError:
    return AppError(
        400,
        "unsupported_parameter",
        f"`{name}` is not supported yet (got {echo(value)}).",
        hint="Leave it out.",
        param=name,
    )


def _is_one_of(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value in neutral


_ONE = _is_one_of(1)
_OFF = _is_one_of(False)
_EMPTY = _is_one_of([], {}, "")

# Fields with a meaning that the engine cannot give yet -> does this value change nothing?
_NOT_YET: dict[str, Callable[[Any], bool]] = {
    "tools": _EMPTY,
    "functions": _EMPTY,
    "tool_choice": _is_one_of("none", "auto"),
    "function_call": _is_one_of("none", "auto"),
    "prompt_logprobs": lambda value: value is False,
    "typical_p": _ONE,
    "best_of": _ONE,
    "suffix": _EMPTY,
    "use_beam_search": _OFF,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": _is_one_of(True),
    "modalities": _is_one_of(["text"], []),
    "audio": _EMPTY,
}
