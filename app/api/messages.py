"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect, which Claude Code and its SDKs speak.

An answer is a list of blocks: thinking, text, calls. In a stream each block is begun, continued and ended before the
next begins; the message begins before them and ends after them.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.anthropic_wire import CountBody, MessagesBody
from app.api.body import body_schema, read_body
from app.api.dialect import SSE_TYPE, Answer, Part, arguments_of, parts_of, sse
from app.api.errors import anthropic_body, error_response
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.stream import AnswerReply
from app.chat.service import ChatService
from app.chat.types import ChatDelta, Usage
from app.errors import AppError

_PATH = "/v1/messages"


def messages_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["anthropic"])

    @router.post(_PATH, openapi_extra=body_schema(MessagesBody))
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody)
        asked = replace(body.request(engine_request_id(request)), sampling=body.sampling())
        dialect = MessagesFormat(body.model or shelf.health().model)
        return AnswerReply([service.stream(asked)], dialect, stream=bool(body.stream))

    @router.post(f"{_PATH}/count_tokens", openapi_extra=body_schema(CountBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        asked = (await read_body(request, CountBody)).request(engine_request_id(request))
        return {"input_tokens": len(await service.prompt_ids(asked))}

    return router


class MessagesFormat:
    """The Dialect. `model` is echoed to the client."""

    choices = 1
    stream_type = SSE_TYPE

    def __init__(self, model: str) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._block: tuple[str, int] | None = None  # the one that is begun
        self._num_blocks = 0
        self._has_begun = False

    def opening(self) -> Iterator[bytes]:
        """The message begins with the first delta, which knows how long the prompt is."""
        return iter(())

    def piece(self, index: int, delta: ChatDelta) -> Iterator[bytes]:
        if not self._has_begun:
            yield self._begin(len(delta.prompt_token_ids))
        if delta.is_empty:
            yield self.keep_alive()
        for part in parts_of(delta):
            if part.block != self._block:
                yield from self._end_block()
                self._block = part.block
                yield _event("content_block_start", index=self._num_blocks, content_block=_begun(part))
            if part.text:
                yield _event("content_block_delta", index=self._num_blocks, delta=_continued(part))
        if delta.finish_reason is not None:
            yield from self._end_block()
            told = {**_stop(delta.finish_reason, delta.stop_reason), "stop_details": None}
            yield _event("message_delta", delta=told, usage=_usage(delta.usage))

    def keep_alive(self) -> bytes:
        ping = _event("ping")
        return ping if self._has_begun else self._begin(0) + ping

    def closing(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def failure(self, error: AppError) -> Iterator[bytes]:
        yield sse(anthropic_body(error), event="error")

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        stop = _stop(answer.finish_reason, answer.stop_reason)
        return self._message | stop | {"content": list(_content(answer)), "usage": _usage(answer.usage)}

    def refusal(self, error: AppError) -> Response:
        return error_response(error, _PATH)

    def _begin(self, prompt_tokens: int) -> bytes:
        self._has_begun = True
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message | {"usage": usage})

    def _end_block(self) -> Iterator[bytes]:
        if self._block is not None:
            yield _event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._block = None


def _event(event: str, **data: Any) -> bytes:
    return sse({"type": event, **data}, event=event)


def _begun(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    assert part.begins is not None
    return {"type": "tool_use", "id": part.begins.id, "name": part.begins.name, "input": {}}


def _continued(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    if part.kind == "text":
        return {"type": "text_delta", "text": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}


def _content(answer: Answer) -> Iterator[dict[str, Any]]:
    for block in answer.blocks:
        told = {"reasoning": {"thinking": block.text}, "text": {"text": block.text}}
        yield _begun(block) | told.get(block.kind, {"input": arguments_of(block.text)})


def _stop(finish_reason: str | None, stop_string: str | None) -> dict[str, Any]:
    if finish_reason == "stop" and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[finish_reason or "stop"], "stop_sequence": None}


def _usage(usage: Usage | None) -> dict[str, int]:
    """Anthropic counts what came from the cache apart from the rest of the prompt."""
    assert usage is not None
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
