"""One turn of talk: what the API and the page both ask, and what both get back. Knows no HTTP and no widget."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from engine.types import ORDINARY, GrammarSpec, ModelInfo, SamplingParams, Standing, TokenEvent

# How models write tool calls: the names that the catalogue may give; app.chat.tools has a file for each.
TOOL_FORMATS = ("qwen3_xml", "hermes", "mistral_v11", "mistral", "llama3_json", "pythonic")

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


# What a function without `parameters` takes.
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function that the model may call.

    parameters  JSON schema of the object of its arguments
    is_strict   its calls follow the schema to the letter, and one that cannot be enforced is refused
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool choice: this one and no other."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an assistant made. `arguments` is the text that the model wrote, JSON if it did well."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message as a chat template sees it. `content` is text, with the parts of a list already joined.

    tool_calls    made in this message of the assistant
    tool_call_id  in a message of role tool: the call whose result it is
    """

    role: Role
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What the caller asked; None leaves it to the catalogue, generation_config.json, the engine's default, in turn.

    Names and meanings are those of `engine.types.SamplingParams`; `stop` are strings, looked for in the text. Neither
    they nor stop ids end an answer before it has `min_tokens`.

    grammar_param         the field of the request that asked for the grammar, for refusals
    bad_words             texts that do not come anywhere in the answer
    keeps_stop            the stop string is part of the answer
    shows_control_tokens  they are part of its text
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    grammar_param: str | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    keeps_stop: bool = False
    shows_control_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """
    model                   id of a catalogue entry, alias or folder; "" takes the model in hand
    tools                   what the model may call; () for none. `tool_choice` and `parallel_tool_calls` are of no
                            use without
    parallel_tool_calls     False ends the answer with its first call
    reasoning_effort        how much the model thinks before it answers; None leaves it to its template
    continue_final_message  the last message is an assistant's beginning: go on in it, open no new turn
    template_kwargs         passed to the chat template (enable_thinking, ...); they go before `reasoning_effort`
    keep_last               of a longer prompt only so many last tokens are used; -1 uses as many as fit
    reports_progress        deltas tell how much of a long prompt is computed
    returns_prompt_ids      the first delta has the prompt's tokens
    standing                its class and priority beside other requests
    """

    request_id: str
    model: str
    messages: tuple[Message, ...]
    sampling: SamplingOptions = SamplingOptions()
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_last: int | None = None
    reports_progress: bool = False
    returns_prompt_ids: bool = False
    standing: Standing = ORDINARY

    @property
    def must_call(self) -> bool:
        """Its answer is calls and no text."""
        return bool(self.tools) and self.tool_choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class FillIn:
    """A prompt for what stands between two texts. `others`: (name, text) of files for the model to look at."""

    before: str
    after: str
    others: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Raw continuation: `prompt` is text (special tokens in it are parsed), token ids, or a gap to fill.

    echo       gives the prompt back first; with max_tokens 0 nothing else
    keep_last  of a longer prompt only so many last tokens are used; -1 uses as many as fit
    """

    request_id: str
    model: str
    prompt: str | tuple[int, ...] | FillIn
    sampling: SamplingOptions = SamplingOptions()
    echo: bool = False
    keep_last: int | None = None
    reports_progress: bool = False
    returns_prompt_ids: bool = False
    standing: Standing = ORDINARY


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A text, or token ids, to be made into a vector."""

    request_id: str
    model: str
    prompt: str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """
    cached_tokens     of the prompt's, those that came from the prefix cache
    reasoning_tokens  of the completion's, those of its thinking
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """True numbers from the engine for one answer; rates in tokens a second, 0 where nothing was computed."""

    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_per_second: float
    predicted_per_second: float


class ScoredToken(NamedTuple):
    """One token with its log-probability, where that was asked.

    token     UTF-8, maybe a part of a character
    is_text   False for control tokens, which are no part of the text
    logprob   None for the first token of a prompt, which follows nothing
    top       the likeliest tokens at its place, likeliest first
    """

    token: bytes
    is_text: bool
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call. The first of each call has `id` and `name`, the others `arguments` alone; those of a call
    joined are its arguments.

    index  of the call in its answer: 0, 1, ...; a call is over when the next begins
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Progress(NamedTuple):
    """Tokens of the prompt that are computed or were found in the cache, of how many."""

    num_computed: int
    num_cached: int
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of the answer. Only the last one has finish_reason, usage and timings (its text may be empty).

    logprobs       of the tokens that came since the delta before: one for each that usage counts, the stop id included.
                   What they spell may be in a later delta, since text is held back
    token_ids      those tokens
    prompt_token_ids  in the first delta, where they were asked
    progress       of the prompt; such a delta has nothing else
    finish_reason  tool_calls: the model has ended its answer, and there are calls in it
    stop_reason    with "stop": the stop string of the request that was met; None where the model ended by itself
    embedding      of length 1: all that answers an EmbeddingRequest
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    progress: Progress | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    embedding: tuple[float, ...] = ()

    @property
    def is_empty(self) -> bool:
        """It says nothing of the answer."""
        return not (self.text or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason)

    @property
    def is_silent(self) -> bool:
        """It says nothing at all."""
        return self.is_empty and self.progress is None and not self.prompt_token_ids


class EngineLike(Protocol):
    """The part of `engine.client.EngineClient` that a turn needs; tests bring a scripted one."""

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request. Closing the iterator aborts it. Raises EngineError."""
        ...


class LoadedModel(Protocol):
    """A model that can answer now.

    sampling     the catalogue's defaults for it: temperature, top_p, top_k; empty where it says none
    tool_format  how it writes tool calls, by name; None leaves it to its chat template
    reasoning    the tags around its thinking; None leaves it to its chat template
    """

    @property
    def id(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def sampling(self) -> Mapping[str, float | int]: ...
    @property
    def tool_format(self) -> str | None: ...
    @property
    def reasoning(self) -> tuple[str, str] | None: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def engine(self) -> EngineLike: ...


class ModelSource(Protocol):
    """Who hands out models: the ModelManager in the app, a fake in tests."""

    def lease(self, model: str) -> AbstractAsyncContextManager[LoadedModel]:
        """The model ready to answer, for as long as an answer takes: no other takes its place meanwhile. Waits while it
        loads. Raises AppError (404 unknown, 503 failed to load)."""
        ...
