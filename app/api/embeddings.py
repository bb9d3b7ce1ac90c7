"""POST /v1/embeddings: texts as vectors, by models that were trained to that. Ollama's /api/embed asks the same."""

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from app.api.body import body_schema, invalid, read_body
from app.api.dialect import Answer
from app.api.errors import echo, error_response
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.numbers import Positive
from app.api.stream import WholeReply
from app.chat.service import ChatService
from app.chat.types import EmbeddingRequest
from app.errors import AppError

MAX_INPUTS = 1024  # what waits in the engine's line at most

Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]})]


class InputBody(BaseModel):
    """
    input       a text, token ids, or a list of either
    dimensions  of the vector only so many first numbers, brought to length 1 again
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    input: Input
    dimensions: Positive | None = None

    def requests(self, request_id: str, model: str) -> list[EmbeddingRequest]:
        """One for each input. Raises AppError (400)."""
        return [
            EmbeddingRequest(request_id=f"{request_id}-{index}", model=model, prompt=prompt)
            for index, prompt in enumerate(_prompts(self.input))
        ]


class EmbeddingsBody(InputBody):
    encoding_format: Literal["float", "base64"] | None = None


def embeddings_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingsBody))
    @router.post("/embeddings", include_in_schema=False)
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingsBody)
        sources = [service.embed(asked) for asked in body.requests(engine_request_id(request), body.model or "")]
        return WholeReply(sources, EmbeddingsFormat(body, body.model or shelf.health().model))

    return router


class Vectors:
    """What the dialects of vectors share."""

    choices = 1

    def __init__(self, model: str, dimensions: int | None) -> None:
        self._model = model
        self._dimensions = dimensions

    def vectors(self, answers: Sequence[Answer]) -> list[tuple[float, ...]]:
        return [self._cut(answer.embedding) for answer in answers]

    def prompt_tokens(self, answers: Sequence[Answer]) -> int:
        return sum(answer.usage.prompt_tokens for answer in answers if answer.usage is not None)

    def _cut(self, vector: tuple[float, ...]) -> tuple[float, ...]:
        if self._dimensions is None or self._dimensions == len(vector):
            return vector
        if self._dimensions > len(vector):
            raise invalid("dimensions", f"is {self._dimensions}; this model's vectors have {len(vector)}.")
        head = vector[: self._dimensions]
        length = math.hypot(*head) or 1.0
        return tuple(number / length for number in head)


class EmbeddingsFormat(Vectors):
    """OpenAI's WholeDialect."""

    def __init__(self, body: EmbeddingsBody, model: str) -> None:
        super().__init__(model, body.dimensions)
        self._is_base64 = body.encoding_format == "base64"

    def refusal(self, error: AppError) -> Response:
        return error_response(error)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompt_tokens = self.prompt_tokens(answers)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _base64(vector) if self._is_base64 else vector}
                for index, vector in enumerate(self.vectors(answers))
            ],
            "model": self._model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }


def _base64(vector: tuple[float, ...]) -> str:
    """Little-endian float32, as every machine that we run on has them."""
    return base64.b64encode(array("f", vector).tobytes()).decode()


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    if isinstance(given, list) and given and all(map(_is_token_id, given)):
        return [tuple(given)]
    items = given if isinstance(given, list) else [given]
    if not items or len(items) > MAX_INPUTS:
        raise invalid("input", f"expected 1 to {MAX_INPUTS:,} texts; got {len(items):,}.")
    several = isinstance(given, list)
    return [_prompt(f"input[{index}]" if several else "input", item) for index, item in enumerate(items)]


def _prompt(param: str, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(map(_is_token_id, item)):
        return tuple(item)
    raise invalid(param, f"expected text or a list of token ids, not empty; got {echo(item)}.")


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
