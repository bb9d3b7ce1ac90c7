"""ChatService: one turn of talk, from messages to deltas. What the API and the page both call.

    request -> ModelSource -> template -> tokenizer -> engine -> detokenizer -> channels -> deltas

Closing the returned iterator at any point closes the engine's, which aborts the request there.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from app.chat.channels import CLOSE, Channels, prompt_opens_thinking, text_is_thinking
from app.chat.detokenizer import Detokenizer
from app.chat.model_text import ModelText, ModelTexts
from app.chat.scores import Scores
from app.chat.types import (
    ChatDelta,
    ChatRequest,
    CompletionRequest,
    LoadedModel,
    ModelSource,
    ScoredToken,
    Timings,
    Usage,
)
from app.errors import AppError, from_engine_error
from engine.errors import EngineError
from engine.types import FinishReason, ModelInfo, RequestTimes, TokenEvent

_log = logging.getLogger("fireside.chat")

MAX_COUNTED_CHARS = 4_000_000  # a second and some 150 MB

Ending = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One turn as it went; complete when it is over.

    model        the asked one, until it is found
    reason       abort: the caller left before the end
    error        with reason "error"
    ttft_s       request to first token; None where none came
    times        the engine's own; None where it was stopped from here (stop string, abort)
    """

    request_id: str
    model: str
    reason: Ending = "abort"
    error: AppError | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    times: RequestTimes | None = None
    started: float = field(default_factory=time.perf_counter)

    def token(self, event: TokenEvent) -> None:
        """Count one event of the engine; the stop id counts as a token of the answer."""
        self.total_s = time.perf_counter() - self.started
        self.prompt_tokens, self.cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        self.completion_tokens += event.token_id is not None
        self.times = event.times
        if self.ttft_s is None:
            self.ttft_s = self.total_s

    def failed(self, error: AppError) -> AppError:
        self.reason, self.error = "error", error
        return error


class TurnObserver(Protocol):
    """Who counts turns (the metrics)."""

    def token(self, gap_s: float) -> None:
        """A token came, `gap_s` after the one before it in the same answer."""
        ...

    def ended(self, turn: TurnRecord) -> None: ...


class ChatService:
    """Answers requests with the models of `source`. One for the API and the page; any number of turns at once."""

    def __init__(self, source: ModelSource, *, observer: TurnObserver | None = None) -> None:
        self._source = source
        self._observer = observer
        self._texts = ModelTexts()

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        """The answer to a conversation. The first delta is empty and says that the request is accepted: the model is
        ready, the prompt is made and fits. Raises AppError, before it or (the engine's fault) after."""
        async with self._turn(request.request_id, request.model) as turn:
            model = await self._source.acquire(request.model)
            turn.model = model.id
            text = await self._texts.of(model.folder)
            room = _Room(model.info, request.sampling.max_tokens, "messages")
            prompt, prompt_ids = await text.chat_prompt(request, room.admit_at_least)
            is_thinking = _starts_thinking(request, prompt)
            channels, asked = Channels(opened=is_thinking), _after_thinking(request) if is_thinking else request
            room.admit(turn, prompt_ids)
            yield ChatDelta()
            async with aclosing(self._answer(turn, model, text, prompt_ids, asked)) as deltas:
                async for delta in deltas:
                    routed = _route(channels, delta)
                    if not routed.is_empty:
                        yield routed

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[ChatDelta, None]:
        """The raw continuation of a text or of token ids; otherwise as `stream`, without channels."""
        async with self._turn(request.request_id, request.model) as turn:
            model = await self._source.acquire(request.model)
            turn.model = model.id
            text = await self._texts.of(model.folder)
            room = _Room(model.info, request.sampling.max_tokens, "prompt")
            prompt_ids = await _plain_prompt(request.prompt, text, room)
            room.admit(turn, prompt_ids)
            yield ChatDelta(text=_echoed(request.prompt, text) if request.echo else "")
            async with aclosing(self._answer(turn, model, text, prompt_ids, request)) as deltas:
                async for delta in deltas:
                    yield delta

    async def text_of(self, model: str) -> tuple[LoadedModel, ModelText]:
        """A model that can answer, and what its folder says about text. Waits for a load. Raises AppError."""
        loaded = await self._source.acquire(model)
        return loaded, await self._texts.of(loaded.folder)

    async def prompt_ids(self, request: ChatRequest) -> tuple[int, ...]:
        """The tokens that `stream` would make of a conversation, also where they do not fit. Raises AppError (400)."""
        _, text = await self.text_of(request.model)
        check_countable(sum(len(message.content) for message in request.messages))
        return (await text.chat_prompt(request, lambda fewest: None))[1]

    async def _answer(
        self,
        turn: TurnRecord,
        model: LoadedModel,
        text: ModelText,
        prompt_ids: tuple[int, ...],
        request: ChatRequest | CompletionRequest,
    ) -> AsyncGenerator[ChatDelta, None]:
        """Tokens to text. Ends with exactly one delta that has a finish_reason, or raises."""
        options = request.sampling
        written, scores = Detokenizer(text.tokenizer, options.stop, options.min_tokens), Scores(text.tokenizer)
        params = text.sampling(options, model.sampling)
        events = model.engine.submit(turn.request_id, prompt_ids, params, request.standing)
        async with aclosing(events):
            last = ""
            async for event in events:
                self._count(turn, event)
                scores.add(event, prompt_ids)
                last = _text_of(event, written)
                if event.finish_reason is not None or written.stopped_by is not None:
                    turn.reason = "stop" if written.stopped_by is not None else _ending(event.finish_reason)
                    break
                if last:
                    yield ChatDelta(text=last, logprobs=scores.take())
            else:
                raise AppError(500, "internal_error", "The engine ended this answer without saying why.")
        yield _last_delta(turn, last + written.finish(), scores.take())

    def _count(self, turn: TurnRecord, event: TokenEvent) -> None:
        before, is_first = turn.total_s, turn.ttft_s is None
        turn.token(event)
        if self._observer is not None and not is_first:
            self._observer.token(turn.total_s - before)

    @asynccontextmanager
    async def _turn(self, request_id: str, model: str) -> AsyncIterator[TurnRecord]:
        """Around every turn: engine errors become app errors, and however it ends, it is counted and logged."""
        turn = TurnRecord(request_id=request_id, model=model)
        try:
            yield turn
        except EngineError as error:
            raise turn.failed(from_engine_error(error)) from error
        except AppError as error:
            turn.failed(error)
            raise
        except Exception as error:
            turn.failed(AppError(500, "internal_error", type(error).__name__))
            raise
        finally:
            turn.total_s = time.perf_counter() - turn.started
            if self._observer is not None:
                self._observer.ended(turn)
            _log.info(_line(turn))


def check_countable(num_chars: int) -> None:
    """What is only counted meets no context that would bound it. Raises AppError (400)."""
    if num_chars > MAX_COUNTED_CHARS:
        raise AppError(
            400,
            "text_too_long",
            f"The text has {num_chars:,} characters; at most {MAX_COUNTED_CHARS:,} are made into tokens at once.",
            hint="Send it in parts.",
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """The context that a prompt and its answer must fit into; refuses before anything is computed.

    param   the request field that holds the prompt
    """

    info: ModelInfo
    max_tokens: int | None
    param: str

    def admit(self, turn: TurnRecord, prompt_ids: tuple[int, ...]) -> None:
        turn.prompt_tokens = len(prompt_ids)
        if not prompt_ids:
            raise AppError(400, "empty_prompt", "The prompt has no tokens.", hint="Send some text.", param=self.param)
        self._check(len(prompt_ids))

    def admit_at_least(self, prompt_tokens: int) -> None:
        """As `admit`, for a prompt of which only the least possible length is known yet."""
        self._check(prompt_tokens, "at least ")

    def _check(self, prompt_tokens: int, bound: str = "") -> None:
        """Agents look for the first sentence and then shorten their history."""
        length, answer = self.info.max_model_len, self.max_tokens or 0
        if prompt_tokens + max(answer, 1) <= length:
            return
        raise AppError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {length} tokens. However, you requested "
            f"{bound}{prompt_tokens + answer} tokens "
            f"({bound}{prompt_tokens} in the messages, {answer} in the completion).",
            hint=self._next_step(is_full=prompt_tokens + answer == length),
            param="max_tokens" if prompt_tokens < length else self.param,
        )

    def _next_step(self, *, is_full: bool) -> str:
        why = "An answer needs room for 1 token more. " if is_full else ""
        shorter = "Please reduce the length of the messages or completion"
        if self.info.max_model_len >= self.info.context_length:
            return f"{why}{shorter}."
        return (
            f"{why}{shorter}, or load the model with a larger context "
            f"(`--max-model-len`, at most {self.info.context_length})."
        )


def _starts_thinking(request: ChatRequest, prompt: str) -> bool:
    if request.continue_final_message:
        return text_is_thinking(request.messages[-1].content)
    return prompt_opens_thinking(prompt)


def _after_thinking(request: ChatRequest) -> ChatRequest:
    """A grammar is for the answer: where the prompt has opened the thinking, that is closed first."""
    grammar = request.sampling.grammar
    if grammar is None:
        return request
    return replace(request, sampling=replace(request.sampling, grammar=replace(grammar, after=CLOSE)))


def _route(channels: Channels, delta: ChatDelta) -> ChatDelta:
    piece = channels.feed(delta.text)
    if delta.finish_reason is not None:
        piece += channels.finish()
    return ChatDelta(
        text=piece.content,
        reasoning=piece.reasoning,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        usage=delta.usage,
        timings=delta.timings,
    )


async def _plain_prompt(prompt: str | tuple[int, ...], text: ModelText, room: _Room) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await text.plain_prompt(prompt, room.admit_at_least)
    for token_id in prompt:
        if not 0 <= token_id < room.info.vocab_size:
            raise AppError(
                400,
                "invalid_token_id",
                f"Token id {token_id} is outside this model's vocabulary of {room.info.vocab_size:,}.",
                param="prompt",
            )
    return prompt


def _echoed(prompt: str | tuple[int, ...], text: ModelText) -> str:
    return prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt)


def _text_of(event: TokenEvent, written: Detokenizer) -> str:
    """A stop id is no text."""
    if event.token_id is None or event.finish_reason is FinishReason.STOP:
        return ""
    return written.feed(event.token_id)


def _ending(reason: FinishReason | None) -> Ending:
    if reason is FinishReason.ABORT:
        raise AppError(503, "aborted", "The model was taken away during this answer.", hint="Send the request again.")
    return "length" if reason is FinishReason.LENGTH else "stop"


def _last_delta(turn: TurnRecord, text: str, logprobs: tuple[ScoredToken, ...]) -> ChatDelta:
    assert turn.reason in ("stop", "length")
    usage = Usage(
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        cached_tokens=turn.cached_tokens,
    )
    return ChatDelta(text=text, logprobs=logprobs, finish_reason=turn.reason, usage=usage, timings=_timings(turn))


def _timings(turn: TurnRecord) -> Timings:
    """The engine's times; where a stop string ended the answer from here, ours: the prompt's include its waiting."""
    ttft_s = turn.ttft_s or 0.0
    times = turn.times or RequestTimes(queue_s=0.0, prefill_s=ttft_s, decode_s=turn.total_s - ttft_s)
    return Timings(
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        prompt_per_second=_rate(turn.prompt_tokens - turn.cached_tokens, times.prefill_s),
        predicted_per_second=_rate(turn.completion_tokens - 1, times.decode_s),  # the first token came with the prompt
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


def _line(turn: TurnRecord) -> str:
    why = f" ({turn.error.code}: {turn.error.message})" if turn.error else ""
    ttft = "no token" if turn.ttft_s is None else f"first after {turn.ttft_s * 1000:.0f} ms"
    return (
        f"request {turn.request_id}: {turn.reason}{why}; model {turn.model}, "
        f"prompt {turn.prompt_tokens} tokens ({turn.cached_tokens} cached), answer {turn.completion_tokens}, "
        f"{ttft}, {turn.total_s:.2f} s in all"
    )
