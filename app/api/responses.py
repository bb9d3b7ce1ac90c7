"""POST /v1/responses: OpenAI's newer endpoint, without a memory: each request brings its whole conversation.

A response is a list of items: thinking, a message, calls. In a stream each item is added, continued and done before the
next is added, and every event has its number.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.api.body import body_schema, read_body
from app.api.dialect import SSE_TYPE, Answer, Part, parts_of, scored, sse
from app.api.errors import error_response
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.responses_wire import ResponsesBody, as_sent
from app.api.stream import AnswerReply
from app.chat.service import ChatService
from app.chat.types import ChatDelta, ScoredToken, Usage
from app.errors import AppError


def responses_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["responses"])

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody))
    @router.post("/responses", include_in_schema=False)
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponsesBody)
        sources = [service.stream(body.request(engine_request_id(request)))]
        dialect = ResponsesFormat(body, body.model or shelf.health().model)
        return AnswerReply(sources, dialect, stream=bool(body.stream))

    return router


class ResponsesFormat:
    """The Dialect of one request, whose words are repeated in its response."""

    choices = 1
    stream_type = SSE_TYPE

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._frame = _frame(body, model)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # those that are done
        self._item: _Item | None = None  # the one that is added
        self._last = ChatDelta()

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._begun)
        yield self._event("response.in_progress", response=self._begun)

    def piece(self, index: int, delta: ChatDelta) -> Iterator[bytes]:
        if delta.is_empty:
            yield self._event("response.in_progress", response=self._begun)
        for part in parts_of(delta):
            if self._item is None or self._item.block != part.block:
                yield from self._end_item("completed")
                self._item = _Item(part)
                yield from self._about_item(self._item.added())
            if part.text:
                yield from self._about_item([self._item.continued(part.text, part.tokens)])
        if delta.finish_reason is not None:
            self._last = delta
            yield from self._end_item(_status_of(self._item, delta.finish_reason))

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def closing(self) -> Iterator[bytes]:
        response = self._response(self._items, self._last.finish_reason, self._last.usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: AppError) -> Iterator[bytes]:
        failed = {"status": "failed", "output": self._items, "error": {"code": error.code, "message": error.text}}
        yield self._event("response.failed", response=self._frame | failed)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        items = list(_items_of(answer))
        told = [item.whole("completed") for item in items[:-1]]
        told += [item.whole(_status_of(item, answer.finish_reason)) for item in items[-1:]]
        return self._response(told, answer.finish_reason, answer.usage)

    def refusal(self, error: AppError) -> Response:
        return error_response(error)

    @property
    def _begun(self) -> dict[str, Any]:
        return self._frame | {"status": "in_progress", "output": []}

    def _end_item(self, status: str) -> Iterator[bytes]:
        if self._item is not None:
            yield from self._about_item(self._item.done(status))
            self._items.append(self._item.whole(status))
            self._item = None

    def _about_item(self, events: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[bytes]:
        for name, data in events:
            yield self._event(name, output_index=len(self._items), **data)

    def _response(self, items: Sequence[dict[str, Any]], finish: str | None, usage: Usage | None) -> dict[str, Any]:
        is_cut = finish == "length"
        return self._frame | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(items),
            "usage": _usage(usage),
        }

    def _event(self, event: str, **data: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return sse({"type": event, "sequence_number": number, **data}, event=event)


class _Item:
    """One item of a response, from its first part on. Events are (name, data)."""

    def __init__(self, part: Part) -> None:
        self.block = part.block
        self._kind = part.kind
        self._call = part.begins
        self._id = f"{_PREFIX[part.kind]}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []
        self._scored: list[ScoredToken] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_whole_call(self) -> bool:
        return self._kind == "call" and _is_json(self._text)

    def added(self) -> Iterator[tuple[str, dict[str, Any]]]:
        empty = self.whole("in_progress")
        if self._kind != "call":
            empty["content"] = []
        yield "response.output_item.added", {"item": empty}
        if self._kind != "call":
            yield "response.content_part.added", self._at | {"part": self._part("")}

    def continued(self, text: str, tokens: Sequence[ScoredToken]) -> tuple[str, dict[str, Any]]:
        """tokens   that came with it"""
        self._pieces.append(text)
        self._scored += tokens
        return f"response.{_WORD[self._kind]}.delta", self._at | {"delta": text} | self._logprobs(tokens)

    def done(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._kind == "call":
            told = {"arguments": self._arguments, "name": self._call.name if self._call else ""}
        else:
            told = {"text": self._text}
        yield f"response.{_WORD[self._kind]}.done", self._at | told | self._logprobs(self._scored)
        if self._kind != "call":
            yield "response.content_part.done", self._at | {"part": self._part(self._text)}
        yield "response.output_item.done", {"item": self.whole(status)}

    def whole(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "status": status}
        if self._kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": [self._part(self._text)]}
        if self._kind == "text":
            return head | {"type": "message", "role": "assistant", "content": [self._part(self._text)]}
        assert self._call is not None
        arguments = self._arguments if status != "in_progress" else ""
        return head | {
            "type": "function_call",
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": arguments,
        }

    @property
    def _arguments(self) -> str:
        return self._text or "{}"

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id} | ({} if self._kind == "call" else {"content_index": 0})

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"logprobs": scored(tokens)} if self._kind == "text" else {}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": []} | self._logprobs(self._scored)


_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_WORD = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _items_of(answer: Answer) -> Iterator[_Item]:
    for block in answer.blocks:
        item = _Item(block)
        item.continued(block.text, block.tokens)
        yield item


def _status_of(last: _Item | None, finish_reason: str | None) -> str:
    """Of the last item. A whole call may be the last that is told: the one that was cut after it had not begun."""
    is_cut = finish_reason == "length" and not (last is not None and last.is_whole_call)
    return "incomplete" if is_cut else "completed"


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _frame(body: ResponsesBody, model: str) -> dict[str, Any]:
    """What is known before anything is answered: most of it is what was asked."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": as_sent(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.functions,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
