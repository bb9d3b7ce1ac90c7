"""Filling a gap in a text: POST /infill as llama.cpp has it, POST /v1/fim/completions as Mistral has it.

Both are what an editor asks while somebody types, so they are of the class autocomplete.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.answers import ChatFormat, timings_block
from app.api.body import Many, body_schema, read_body
from app.api.dialect import SSE_TYPE, Answer, sse
from app.api.errors import error_body, error_response
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.numbers import COUNTS, NUMBER
from app.api.protocol import GenerationBody, token_limit
from app.api.stream import AnswerReply
from app.chat.service import ChatService
from app.chat.types import ChatDelta, CompletionRequest, FillIn, Timings, Usage
from app.errors import AppError
from engine.types import RequestClass


class _GapBody(GenerationBody):
    """What both bodies have."""

    def _request(self, request_id: str, gap: FillIn, max_tokens: int | None) -> CompletionRequest:
        self.request_class = self.request_class or RequestClass.AUTOCOMPLETE
        return CompletionRequest(
            request_id=request_id,
            model=self.model or "",
            prompt=gap,
            sampling=self.sampling(0, max_tokens),
            standing=self.standing,
        )

    @property
    def num_logprobs(self) -> int | None:
        return None


class FimBody(_GapBody):
    prompt: str
    suffix: str | None = None

    def request(self, request_id: str) -> CompletionRequest:
        """Raises AppError (400)."""
        self.check_stream_options()
        max_tokens = token_limit("max_tokens", self.max_tokens)
        return self._request(request_id, FillIn(self.prompt, self.suffix or ""), max_tokens)


class ExtraFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    filename: str = ""
    text: str


class InfillBody(_GapBody):
    """prompt   of the gap's own line, what stands before it: comes after `input_prefix`"""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Many[ExtraFile] | None = None
    prompt: str | None = None
    n_predict: Annotated[int, Field(ge=-1, lt=COUNTS), NUMBER] | None = None

    def request(self, request_id: str) -> CompletionRequest:
        """`n_predict` 0 computes the prompt for the cache and says nothing. Raises AppError (400)."""
        others = tuple((file.filename, file.text) for file in self.input_extra or ())
        gap = FillIn(self.input_prefix + (self.prompt or ""), self.input_suffix, others)
        max_tokens = 0 if self.n_predict == 0 else token_limit("n_predict", self.n_predict)
        return self._request(request_id, gap, max_tokens)


class InfillFormat:
    """The Dialect of llama.cpp's completions."""

    choices = 1
    stream_type = SSE_TYPE

    def __init__(self, model: str) -> None:
        self._model = model

    def opening(self) -> Iterable[bytes]:
        return ()

    def piece(self, index: int, delta: ChatDelta) -> Iterator[bytes]:
        yield sse({"index": index, "content": delta.text, "stop": False})
        if delta.finish_reason is not None and delta.usage is not None and delta.timings is not None:
            yield sse(self._end("", delta.finish_reason, delta.stop_reason, delta.usage, delta.timings))

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def closing(self) -> Iterable[bytes]:
        return ()

    def failure(self, error: AppError) -> Iterable[bytes]:
        return [sse(error_body(error))]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        assert answer.usage is not None and answer.timings is not None and answer.finish_reason is not None
        return self._end(answer.text, answer.finish_reason, answer.stop_reason, answer.usage, answer.timings)

    def refusal(self, error: AppError) -> Response:
        return error_response(error)

    def _end(self, text: str, finish: str, stopped_by: str | None, usage: Usage, timings: Timings) -> dict[str, Any]:
        kind = "limit" if finish == "length" else "word" if stopped_by is not None else "eos"
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "stop_type": kind,
            "stopping_word": stopped_by or "",
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "timings": timings_block(usage, timings),
        }


def fim_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/infill", openapi_extra=body_schema(InfillBody))
    async def infill(request: Request) -> Response:
        body = await read_body(request, InfillBody)
        source = service.complete(body.request(engine_request_id(request)))
        return AnswerReply([source], InfillFormat(body.model or shelf.health().model), stream=bool(body.stream))

    @router.post("/v1/fim/completions", openapi_extra=body_schema(FimBody))
    @router.post("/fim/completions", include_in_schema=False)
    async def fim_completions(request: Request) -> Response:
        body = await read_body(request, FimBody)
        source = service.complete(body.request(engine_request_id(request)))
        dialect = ChatFormat(body.model or shelf.health().model, answers=1, choices=1, usage=body.wants_usage)
        return AnswerReply([source], dialect, stream=bool(body.stream))

    return router
