"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from app.api.answers import CompletionFormat
from app.api.body import body_schema, read_body
from app.api.completion_body import CompletionBody
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.stream import AnswerReply
from app.chat.service import ChatService


def completions_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    @router.post("/completions", include_in_schema=False)
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        sources = [service.complete(asked) for asked in body.requests(engine_request_id(request))]
        dialect = CompletionFormat(
            body.model or shelf.health().model,
            answers=len(sources),
            choices=body.num_choices,
            usage=body.wants_usage,
            ids=bool(body.return_token_ids),
        )
        return AnswerReply(sources, dialect, stream=bool(body.stream))

    return router
