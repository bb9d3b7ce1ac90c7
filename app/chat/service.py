"""ChatService: one turn of talk, from messages to deltas. What the API and the page both call.

    request -> ModelSource -> template -> tokenizer -> engine -> AnswerText -> deltas

Closing the returned iterator at any point closes the engine's, which aborts the request there.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from app.chat.answer import AnswerText, Spoken
from app.chat.job import Job, chat_job, completion_job, embedding_prompt
from app.chat.model_text import ModelText, ModelTexts
from app.chat.scores import Scores
from app.chat.types import (
    ChatDelta,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadedModel,
    ModelSource,
    Progress,
    Timings,
    Usage,
)
from app.errors import AppError, from_engine_error
from engine.errors import EngineError
from engine.types import ORDINARY, FinishReason, RequestClass, RequestTimes, SamplingParams, Standing, TokenEvent

_log = logging.getLogger("fireside.chat")

MAX_COUNTED_CHARS = 4_000_000  # a second and some 150 MB

Ending = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, kw_only=True, eq=False)
class TurnRecord:
    """One turn as it went; complete when it is over.

    model        the asked one, until it is found
    standing     its class and priority
    grammar_param  the field of the request that asked for a grammar
    reason       abort: the caller left before the end
    error        with reason "error"
    ttft_s       request to first token; None where none came
    times        the engine's own; None where it was stopped from here (stop string, abort)
    """

    request_id: str
    model: str
    standing: Standing = ORDINARY
    grammar_param: str | None = None
    reason: Ending = "abort"
    error: AppError | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
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

    def first_token(self, ttft_s: float) -> None:
        """The first token of an answer came, so long after it was asked for."""
        ...

    def token(self, gap_s: float) -> None:
        """A token came, `gap_s` after the one before it in the same answer."""
        ...

    def ended(self, turn: TurnRecord) -> None: ...


_IN_BACKGROUND = Standing(request_class=RequestClass.BACKGROUND)  # its cache is of no use to anybody


class ChatService:
    """Answers requests with the models of `source`. One for the API and the page; any number of turns at once."""

    def __init__(self, source: ModelSource, *, observer: TurnObserver | None = None) -> None:
        self._source = source
        self._observer = observer
        self._texts = ModelTexts()
        self._under_way: list[TurnRecord] = []

    def under_way(self) -> list[TurnRecord]:
        """The turns of now, as far as they have come, the oldest first."""
        return [*self._under_way]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        """The answer to a conversation. The first delta is empty and says that the request is accepted: the model is
        ready, the prompt is made and fits, a grammar is compiled. Raises AppError, before it or (the engine's fault)
        after."""
        async with self._turn(request) as turn, self._source.lease(request.model) as model:
            turn.model = model.id
            text = await self._texts.of(model.folder)
            job = await chat_job(request, model, text)
            async with aclosing(self._answer(turn, model, text, job)) as deltas:
                async for delta in deltas:
                    yield delta

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[ChatDelta, None]:
        """The raw continuation of a text or of token ids; otherwise as `stream`, without channels and tools."""
        async with self._turn(request) as turn, self._source.lease(request.model) as model:
            turn.model = model.id
            text = await self._texts.of(model.folder)
            job = await completion_job(request, model, text)
            async with aclosing(self._answer(turn, model, text, job)) as deltas:
                async for delta in deltas:
                    yield delta

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[ChatDelta, None]:
        """The vector of a text, in the second delta of two; the first says, as in `stream`, that it is accepted."""
        async with self._turn(request) as turn, self._source.lease(request.model) as model:
            turn.model = model.id
            text = await self._texts.of(model.folder)
            prompt_ids = await embedding_prompt(request, model, text)
            yield ChatDelta()
            asked = SamplingParams(max_tokens=1, embeds=True)
            async with aclosing(model.engine.submit(turn.request_id, prompt_ids, asked, _IN_BACKGROUND)) as events:
                async for event in events:
                    self._count(turn, event)
                    if event.embedding is not None:
                        turn.reason, turn.completion_tokens = "stop", 0  # the token that came along says nothing
                        yield ChatDelta(embedding=event.embedding, finish_reason="stop", usage=_usage(turn))

    async def text_of(self, model: str) -> tuple[LoadedModel, ModelText]:
        """A model that can answer, and what its folder says about text. Waits for a load. Raises AppError."""
        async with self._source.lease(model) as loaded:
            return loaded, await self._texts.of(loaded.folder)

    async def prompt_ids(self, request: ChatRequest) -> tuple[int, ...]:
        """The tokens that `stream` would make of a conversation, also where they do not fit. Raises AppError (400)."""
        model, text = await self.text_of(request.model)
        check_countable(sum(len(message.content) for message in request.messages))
        format = text.tool_format(model.tool_format) if request.tools else None
        return (await text.chat_prompt(request, lambda fewest: None, format))[1]

    async def _answer(
        self, turn: TurnRecord, model: LoadedModel, text: ModelText, job: Job
    ) -> AsyncGenerator[ChatDelta, None]:
        """Tokens to deltas. Ends with exactly one delta that has a finish_reason, or raises."""
        turn.prompt_tokens, turn.grammar_param = len(job.prompt_ids), job.grammar_param
        said = _Said(Scores(text.tokenizer), job.prompt_ids)
        first = ChatDelta(text=job.echo, prompt_token_ids=job.prompt_ids if job.returns_prompt_ids else ())
        is_accepted = job.params.grammar is None
        if is_accepted:
            yield first
        events = model.engine.submit(turn.request_id, job.prompt_ids, job.params, job.standing)
        async with aclosing(events):
            async for event in events:
                if not is_accepted:
                    is_accepted = True
                    yield first
                if event.token_id is None and event.finish_reason is None:
                    if job.reports_progress:
                        yield ChatDelta(progress=_progress(event))
                    continue
                self._count(turn, event)
                spoken = said.take_in(event, job.answer)
                turn.reasoning_tokens += job.answer.is_thinking
                if event.finish_reason is not None or job.answer.is_over:
                    turn.reason = "stop" if job.answer.is_over else _ending(event.finish_reason)
                    break
                if any(spoken):
                    yield said.delta(spoken)
            else:
                raise AppError(500, "internal_error", "The engine ended this answer without saying why.")
        yield said.last_delta(turn, spoken, job)

    def _count(self, turn: TurnRecord, event: TokenEvent) -> None:
        before, is_first = turn.total_s, turn.ttft_s is None
        turn.token(event)
        if self._observer is None:
            return
        if is_first:
            self._observer.first_token(turn.total_s)
        else:
            self._observer.token(turn.total_s - before)

    @asynccontextmanager
    async def _turn(self, request: ChatRequest | CompletionRequest | EmbeddingRequest) -> AsyncIterator[TurnRecord]:
        """Around every turn: engine errors become app errors, and however it ends, it is counted and logged."""
        standing = _IN_BACKGROUND if isinstance(request, EmbeddingRequest) else request.standing
        turn = TurnRecord(request_id=request.request_id, model=request.model, standing=standing)
        self._under_way.append(turn)
        try:
            yield turn
        except EngineError as error:
            raise turn.failed(from_engine_error(error, turn.grammar_param)) from error
        except AppError as error:
            turn.failed(error)
            raise
        except Exception as error:
            turn.failed(AppError(500, "internal_error", type(error).__name__))
            raise
        finally:
            self._under_way.remove(turn)
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


def _progress(event: TokenEvent) -> Progress:
    return Progress(event.num_computed_tokens, event.num_cached_tokens, event.num_prompt_tokens)


@dataclass(slots=True)
class _Said:
    """Tokens and their scores on the way into deltas: both go out with the text that is certain next."""

    scores: Scores
    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)

    def take_in(self, event: TokenEvent, answer: AnswerText) -> Spoken:
        self.scores.add(event, self.prompt_ids)
        if event.token_id is None:
            return Spoken()
        self.token_ids.append(event.token_id)
        return (
            Spoken() if event.finish_reason is FinishReason.STOP else answer.feed(event.token_id)
        )  # its id is no text

    def delta(self, spoken: Spoken) -> ChatDelta:
        token_ids, self.token_ids = tuple(self.token_ids), []
        return ChatDelta(
            text=spoken.content,
            reasoning=spoken.reasoning,
            tool_calls=tuple(spoken.calls),
            logprobs=self.scores.take(),
            token_ids=token_ids,
        )

    def last_delta(self, turn: TurnRecord, spoken: Spoken, job: Job) -> ChatDelta:
        if job.says_nothing:
            return _last_of_nothing(turn, self.delta(Spoken()))
        rest = job.answer.finish(is_cut=turn.reason == "length")
        whole = Spoken(spoken.content + rest.content, spoken.reasoning + rest.reasoning, (*spoken.calls, *rest.calls))
        return replace(
            self.delta(whole),
            finish_reason=job.answer.finish_reason(is_cut=turn.reason == "length"),
            stop_reason=job.answer.stopped_by,
            usage=_usage(turn),
            timings=_timings(turn),
        )


def _last_of_nothing(turn: TurnRecord, delta: ChatDelta) -> ChatDelta:
    """The prompt's scores alone; the answer has no tokens, as was asked."""
    turn.reason, turn.completion_tokens = "length", 0
    return replace(
        delta,
        logprobs=delta.logprobs[:-1],
        token_ids=(),
        finish_reason="length",
        usage=_usage(turn),
        timings=_timings(turn),
    )


def _ending(reason: FinishReason | None) -> Ending:
    if reason is FinishReason.ABORT:
        raise AppError(503, "aborted", "The model was taken away during this answer.", hint="Send the request again.")
    return "length" if reason is FinishReason.LENGTH else "stop"


def _usage(turn: TurnRecord) -> Usage:
    return Usage(
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        cached_tokens=turn.cached_tokens,
        reasoning_tokens=turn.reasoning_tokens,
    )


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
