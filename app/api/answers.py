"""Deltas -> the objects of OpenAI's two answer formats, as chunks of a stream and as one whole.

Rules kept here, each of which has broken a client: every object has id, object, created, model and a `choices` list;
every choice has an index; the role stands in the first chunk alone; exactly one finish_reason a choice; a tool call's
id, type and name stand in its first piece alone.
"""

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from starlette.responses import Response

from app.api.dialect import SSE_TYPE, Answer, scored, sse
from app.api.errors import error_body, error_response
from app.chat.types import ChatDelta, Progress, ScoredToken, Timings, ToolCall, ToolCallDelta, Usage
from app.errors import AppError


class AnswerFormat(ABC):
    """The Dialect of OpenAI's older endpoints.

    model    echoed to the client
    answers  of the whole request
    choices  answers a prompt; the prompt's tokens count once for all of them
    usage    a stream ends with the usage chunk
    ids      choices have their `token_ids`
    """

    stream_type = SSE_TYPE
    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, answers: int, choices: int, usage: bool, ids: bool = False) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._answers = answers
        self._wants_usage = usage
        self._wants_ids = ids
        self._usages: dict[int, Usage] = {}
        self.choices = choices

    def opening(self) -> Iterator[bytes]:
        for index in range(self._answers):
            first = self._first(index)
            if first is not None:
                yield sse(first)

    def piece(self, index: int, delta: ChatDelta) -> Iterable[bytes]:
        if delta.usage is not None:
            self._usages[index] = delta.usage
        return [sse(self.chunk(index, delta))]

    def keep_alive(self) -> bytes:
        """Not `: ping`: one client takes that for the end."""
        return b": keep-alive\n\n"

    def closing(self) -> Iterator[bytes]:
        if self._wants_usage:
            yield sse(self.usage_chunk([self._usages[index] for index in sorted(self._usages)]))
        yield b"data: [DONE]\n\n"

    def failure(self, error: AppError) -> Iterable[bytes]:
        return [sse(error_body(error))]

    def refusal(self, error: AppError) -> Response:
        return error_response(error)

    @abstractmethod
    def _first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens answer `index`, if the format has one."""

    @abstractmethod
    def _delta(self, delta: ChatDelta) -> dict[str, Any]:
        """The part of a chunk's choice that carries text."""

    @abstractmethod
    def _whole(self, answer: Answer) -> dict[str, Any]:
        """The part of a whole choice that carries text."""

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Those of the next tokens of answer `index`."""

    def chunk(self, index: int, delta: ChatDelta) -> dict[str, Any]:
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        choice = {"index": index, **self._delta(delta), "logprobs": logprobs, **self._ending(delta)}
        frame = self._frame(self.chunk_object, [choice])
        if delta.progress is not None:
            frame["prompt_progress"] = progress_block(delta.progress)
        if delta.timings is not None and delta.usage is not None:
            frame["timings"] = timings_block(delta.usage, delta.timings)
        return frame

    def usage_chunk(self, usages: Sequence[Usage]) -> dict[str, Any]:
        return self._frame(self.chunk_object, []) | {"usage": self._usage(usages)}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        usages = [answer.usage for answer in answers if answer.usage is not None]
        frame = self._frame(self.whole_object, choices) | {"usage": self._usage(usages)}
        if len(answers) == 1 and answers[0].timings is not None:
            frame["timings"] = timings_block(usages[0], answers[0].timings)
        return frame

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = self._logprobs(index, answer.logprobs) if answer.logprobs else None
        return {"index": index, **self._whole(answer), "logprobs": logprobs, **self._ending(answer)}

    def _ending(self, said: ChatDelta | Answer) -> dict[str, Any]:
        """How it ended, if it did, and what vLLM's clients may ask for beside it."""
        ending: dict[str, Any] = {"finish_reason": said.finish_reason}
        if said.stop_reason is not None:
            ending["stop_reason"] = said.stop_reason
        if self._wants_ids:
            ending["token_ids"] = list(said.token_ids)
            ending |= {"prompt_token_ids": list(said.prompt_token_ids)} if said.prompt_token_ids else {}
        return ending

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        prompts = usages[:: self.choices]
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        reasoning_tokens = sum(usage.reasoning_tokens for usage in usages)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


class ChatFormat(AnswerFormat):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, *, shows_reasoning: bool = True, must_call: bool = False, **common: Any) -> None:
        super().__init__(model, **common)
        self._shows_reasoning = shows_reasoning
        self._must_call = must_call

    def _first(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._frame(self.chunk_object, [choice])

    def _delta(self, delta: ChatDelta) -> dict[str, Any]:
        parts = {"content": delta.text, "reasoning_content": delta.reasoning if self._shows_reasoning else ""}
        parts = {name: text for name, text in parts.items() if text}
        pieces = [_call_piece(_joined([*calls])) for _, calls in groupby(delta.tool_calls, lambda call: call.index)]
        return {"delta": parts | ({"tool_calls": pieces} if pieces else {})}

    def _whole(self, answer: Answer) -> dict[str, Any]:
        calls = [_whole_call(call) for call in answer.tool_calls]
        content = answer.text or (None if calls or self._must_call else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self._shows_reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"content": scored(tokens), "refusal": None}


class CompletionFormat(AnswerFormat):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, **common: Any) -> None:
        super().__init__(model, **common)
        # What an answer's tokens have spelled so far, by answer: half characters, and how many whole ones.
        self._texts: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )
        self._num_chars: defaultdict[int, int] = defaultdict(int)

    def _first(self, index: int) -> None:
        return None

    def _delta(self, delta: ChatDelta) -> dict[str, Any]:
        return {"text": delta.text}

    def _whole(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        offsets, text = [], self._texts[index]
        for token in tokens:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text.decode(token.token)) if token.is_text else 0
        return {
            "tokens": [_spelled(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _joined(pieces: Sequence[ToolCallDelta]) -> ToolCallDelta:
    """Of one call; some clients take only one piece of it from a chunk."""
    return replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))


def _call_piece(piece: ToolCallDelta) -> dict[str, Any]:
    """Clients join what comes more than once: id, type and name must not."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _spelled(token: bytes) -> str:
    """A token that is no whole text is written byte by byte, so that two of them differ (OpenAI's own way)."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest tokens and the one that came, which may not be among them."""
    if token.logprob is None:
        return None
    return {_spelled(likely): logprob for likely, logprob in (*token.top, (token.token, token.logprob))}


def progress_block(progress: Progress) -> dict[str, int]:
    """llama.cpp's block, of tokens."""
    return {
        "total": progress.num_prompt,
        "cache": progress.num_cached,
        "processed": progress.num_computed,
    }


def timings_block(usage: Usage, timings: Timings) -> dict[str, float]:
    """llama.cpp's block, which several web clients show as tokens a second."""
    return {
        "prompt_n": usage.prompt_tokens - usage.cached_tokens,
        "cache_n": usage.cached_tokens,
        "prompt_ms": timings.prefill_s * 1000,
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": timings.decode_s * 1000,
        "predicted_per_second": timings.predicted_per_second,
    }
