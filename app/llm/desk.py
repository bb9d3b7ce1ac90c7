"""Prompts' way through the engine: as many at once as it takes, tokens to text, answers put together."""

import asyncio
import functools
from contextlib import aclosing
from dataclasses import dataclass

from app.chat.detokenizer import Detokenizer
from app.chat.model_text import ModelText
from app.errors import AppError
from app.llm.outputs import CompletionOutput, Logprobs, RequestOutput, logprobs_of
from app.llm.params import SamplingParams
from app.llm.terminal import Bar
from engine.client import EngineClient
from engine.types import FinishReason, Standing, TokenEvent

_MOST_WAITING = 512  # below what an engine's waiting line takes


@dataclass(frozen=True, slots=True)
class Job:
    request_id: str
    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    standing: Standing


class Desk:
    """Hands requests to the engine: as many as it can run, and as many again that wait there."""

    def __init__(self, engine: EngineClient, text: ModelText, bar: Bar) -> None:
        self._engine, self._text, self._bar = engine, text, bar
        self._seats = asyncio.Semaphore(engine.info.max_num_seqs + min(engine.info.max_num_seqs, _MOST_WAITING))

    async def answer(self, job: Job) -> RequestOutput:
        """The first of `n` answers goes ahead until its first token: then the others find its prompt in the cache."""
        is_computed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(job, index, is_computed)) for index in range(job.params.n)]
        answers = [task.result() for task in tasks]
        self._bar.prompt_done(len(job.token_ids))
        return RequestOutput(
            request_id=job.request_id,
            prompt=job.prompt,
            prompt_token_ids=job.token_ids,
            prompt_logprobs=self._prompt_logprobs(job, answers[0].first),
            outputs=[answer.output for answer in answers],
            num_cached_tokens=answers[0].first.num_cached_tokens,
        )

    async def _one(self, job: Job, index: int, is_computed: asyncio.Event) -> "Answer":
        if index:
            await is_computed.wait()
        params = job.params.for_engine(self._text, index)
        answer = Answer(index, job.params, self._text)
        async with self._seats:
            events = self._engine.submit(f"{job.request_id}.{index}", job.token_ids, params, job.standing)
            async with aclosing(events):
                async for event in events:
                    is_computed.set()
                    self._bar.token()
                    if answer.take(event):
                        break
        return answer

    def _prompt_logprobs(self, job: Job, first: TokenEvent) -> list[Logprobs | None] | None:
        if first.prompt_logprobs is None:
            return None
        pairs = zip(job.token_ids[1:], first.prompt_logprobs, strict=True)
        return [None, *(logprobs_of(self._text, token_id, found) for token_id, found in pairs)]


class Answer:
    """One answer as it grows. first: its first event; output: what came of it, once `take` has said that it ended."""

    def __init__(self, index: int, params: SamplingParams, text: ModelText) -> None:
        self._index, self._params, self._text = index, params, text
        self._written = Detokenizer(text.tokenizer, params.stop_strings)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self.first: TokenEvent

    def take(self, event: TokenEvent) -> bool:
        """Whether the answer is complete with this event."""
        if event.error is not None:
            raise event.error
        if event.token_id is None:
            raise AppError(503, "aborted", "The engine gave up this answer.")
        if not self._token_ids:
            self.first = event
        self._token_ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(logprobs_of(self._text, event.token_id, event.logprobs))
        if event.finish_reason is not FinishReason.STOP:  # a stop id is no text
            self._pieces.append(self._written.feed(event.token_id))
        self._finish_reason = event.finish_reason
        return event.finish_reason is not None or self._written.stopped_by is not None

    @functools.cached_property
    def output(self) -> CompletionOutput:
        is_cut = self._finish_reason is FinishReason.LENGTH and self._written.stopped_by is None
        text = "".join(self._pieces) + self._written.finish(is_cut=is_cut)
        has_logprobs = self._params.logprobs is not None
        chosen = (found[token_id].logprob for token_id, found in zip(self._token_ids, self._logprobs, strict=False))
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids),
            cumulative_logprob=sum(chosen) if has_logprobs else None,
            logprobs=self._logprobs if has_logprobs else None,
            finish_reason="length" if is_cut else "stop",
            stop_reason=self._stop_reason(),
        )

    def _stop_reason(self) -> str | int | None:
        if self._written.stopped_by is not None:
            return self._written.stopped_by
        last = self._token_ids[-1]
        if self._finish_reason is not FinishReason.STOP:
            return None
        if last in (self._params.stop_token_ids or ()):
            return last
        written = self._text.tokenizer.token_bytes(last).decode("utf-8", "replace")
        return written if written in self._params.stop_strings else None
