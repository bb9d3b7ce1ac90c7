"""Ollama's dialect: /api/version, /api/tags, /api/show, /api/ps, /api/chat, /api/generate.

A stream is one JSON object a line; its last one has `done` and the counts. Calls of tools are sent whole.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse

from app.api.body import body_schema, read_body
from app.api.dialect import Answer, arguments_of, json_bytes, parts_of
from app.api.embeddings import InputBody, Vectors
from app.api.errors import error_response, ollama_body
from app.api.guard import admin
from app.api.ids import engine_request_id
from app.api.models import ModelCard, Shelf, card_of
from app.api.ollama_wire import ChatBody, GenerateBody, OllamaBody, plain_name
from app.api.stream import AnswerReply, WholeReply
from app.chat.service import ChatService
from app.chat.types import ChatDelta, ChatRequest, ToolCall, ToolCallDelta, Usage
from app.errors import AppError

NDJSON_TYPE = "application/x-ndjson"

_SPEAKS = "0.12.0"  # the version of Ollama whose API this is: clients want 0.6.4 or newer
_NO_END = "0001-01-01T00:00:00Z"  # how Ollama writes a model that stays


class ShowBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    name: str | None = None


class EmbedBody(InputBody):
    """A text that is too long is refused and never cut, whatever `truncate` says."""


def ollama_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ollama"])

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": _SPEAKS}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_listed(card) for card in shelf.cards()]}

    @router.get("/ps")
    async def running() -> dict[str, Any]:
        return {"models": [_running(card) for card in shelf.cards() if card.state == "loaded"]}

    async def _without_words(request: Request, body: OllamaBody, dialect: "OllamaChat") -> Response:
        """Nothing to answer is Ollama's way to ask that a model be loaded, or let go of."""
        if not body.asks_to_unload:
            await service.text_of(body.name)
            return JSONResponse(dialect.ended(Answer(), "load"))
        admin(request)
        if body.name:
            shelf.check(body.name)
        if shelf.holds(body.name):
            await shelf.unload(body.name)
        return JSONResponse(dialect.ended(Answer(), "unload"))

    @router.post("/show", openapi_extra=body_schema(ShowBody))
    async def show(request: Request) -> dict[str, Any]:
        body = await read_body(request, ShowBody)
        name = plain_name(body.model or body.name)
        if not name:
            raise AppError(400, "missing_field", "`model` is missing.", hint="GET /api/tags lists them.", param="model")
        return _shown(card_of(shelf, name))

    @router.post("/chat", openapi_extra=body_schema(ChatBody))
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        dialect = OllamaChat(body.model or shelf.health().model)
        if not body.messages:
            return await _without_words(request, body, dialect)
        asked = body.request(engine_request_id(request))
        return AnswerReply([service.stream(asked)], dialect, stream=body.wants_stream)

    @router.post("/generate", openapi_extra=body_schema(GenerateBody))
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateBody)
        dialect = OllamaGenerate(body.model or shelf.health().model)
        if not body.prompt:
            return await _without_words(request, body, dialect)
        asked = body.request(engine_request_id(request))
        source = service.stream(asked) if isinstance(asked, ChatRequest) else service.complete(asked)
        return AnswerReply([source], dialect, stream=body.wants_stream)

    @router.post("/embed", openapi_extra=body_schema(EmbedBody))
    async def embed(request: Request) -> Response:
        body = await read_body(request, EmbedBody)
        dialect = OllamaEmbed(body.model or shelf.health().model, body.dimensions)
        sources = [service.embed(asked) for asked in body.requests(engine_request_id(request), plain_name(body.model))]
        return WholeReply(sources, dialect)

    return router


class OllamaChat:
    """The Dialect of /api/chat. `model` is echoed to the client."""

    choices = 1
    stream_type = NDJSON_TYPE

    def __init__(self, model: str) -> None:
        self._model = model
        self._began_ns = time.perf_counter_ns()
        self._call: ToolCallDelta | None = None  # the one that is coming in
        self._arguments: list[str] = []

    def opening(self) -> Sequence[bytes]:
        return ()

    def piece(self, index: int, delta: ChatDelta) -> Iterator[bytes]:
        if delta.is_empty:
            yield self._line()
        for part in parts_of(delta):
            if part.kind == "call" and part.begins is None:
                self._arguments.append(part.text)
                continue
            yield from self._finished_call()
            if part.kind == "call":
                self._call, self._arguments = part.begins, [part.text]
            elif part.kind == "reasoning":
                yield self._line(reasoning=part.text)
            else:
                yield self._line(text=part.text)
        if delta.finish_reason is not None:
            yield from self._finished_call()
            yield json_bytes(self.ended(_end_of(delta), delta.finish_reason)) + b"\n"

    def keep_alive(self) -> bytes:
        """A line that is no object would break its clients."""
        return b""

    def closing(self) -> Sequence[bytes]:
        return ()

    def failure(self, error: AppError) -> Sequence[bytes]:
        return [json_bytes(ollama_body(error)) + b"\n"]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self.ended(answer, answer.finish_reason or "stop")

    def refusal(self, error: AppError) -> Response:
        return error_response(error, "/api/")

    def ended(self, answer: Answer, reason: str) -> dict[str, Any]:
        """The only object of a whole reply, and the last of a stream; durations are nanoseconds."""
        usage, timings = answer.usage or Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0), answer.timings
        return self._frame(answer.text, answer.reasoning, answer.tool_calls) | {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": time.perf_counter_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(timings.prefill_s * 1e9) if timings else 0,
            "eval_count": usage.completion_tokens,
            "eval_duration": round(timings.decode_s * 1e9) if timings else 0,
        }

    def _finished_call(self) -> Iterator[bytes]:
        if self._call is not None:
            call = ToolCall(id=self._call.id or "", name=self._call.name or "", arguments="".join(self._arguments))
            self._call = None
            yield self._line(calls=(call,))

    def _line(self, text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = ()) -> bytes:
        return json_bytes(self._frame(text, reasoning, calls) | {"done": False}) + b"\n"

    def _frame(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"model": self._model, "created_at": _now(), **self._said(text, reasoning, calls)}

    def _said(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": arguments_of(call.arguments)}} for call in calls
            ]
        return {"message": message}


class OllamaGenerate(OllamaChat):
    """The Dialect of /api/generate, which calls no tools."""

    def _said(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"response": text} | ({"thinking": reasoning} if reasoning else {})


class OllamaEmbed(Vectors):
    """The WholeDialect of /api/embed."""

    def __init__(self, model: str, dimensions: int | None) -> None:
        super().__init__(model, dimensions)
        self._began_ns = time.perf_counter_ns()

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": self.vectors(answers),
            "total_duration": time.perf_counter_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens(answers),
        }

    def refusal(self, error: AppError) -> Response:
        return error_response(error, "/api/")


def _end_of(delta: ChatDelta) -> Answer:
    """What a last delta says beside its text, which has been sent."""
    return Answer(usage=delta.usage, timings=delta.timings)


def _now() -> str:
    return _written(datetime.now(UTC))


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _listed(card: ModelCard) -> dict[str, Any]:
    """The digest is of the name: it tells models apart, and stays."""
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": _written(datetime.fromtimestamp(card.created, UTC)),
        "size": card.size_bytes,
        "digest": hashlib.sha256(card.id.encode()).hexdigest(),
        "details": _details(card),
    }


def _running(card: ModelCard) -> dict[str, Any]:
    return _listed(card) | {"expires_at": _NO_END, "size_vram": 0, "context_length": card.max_model_len}


def _shown(card: ModelCard) -> dict[str, Any]:
    architecture = card.architecture or "unknown"
    return {
        "modified_at": _written(datetime.fromtimestamp(card.created, UTC)),
        "details": _details(card),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": card.id,
            f"{architecture}.context_length": card.max_model_len or card.context_length,
        },
        "capabilities": ["completion", "tools", *(["thinking"] if card.thinks else [])],
        "template": "",
        "parameters": "",
        "modelfile": "",
    }


def _details(card: ModelCard) -> dict[str, Any]:
    family = card.architecture or ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": card.format or "",
    }
