"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from app.api.answers import ChatFormat
from app.api.body import body_schema, read_body
from app.api.chat_body import ChatBody
from app.api.ids import engine_request_id
from app.api.models import Shelf
from app.api.stream import AnswerReply
from app.chat.service import ChatService


def chat_router(service: ChatService, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    @router.post("/chat/completions", include_in_schema=False)
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        requests = body.requests(engine_request_id(request))
        sources = [service.stream(asked) for asked in requests]
        dialect = ChatFormat(
            body.model or shelf.health().model,
            answers=len(sources),
            choices=body.num_choices,
            usage=body.wants_usage,
            ids=bool(body.return_token_ids),
            shows_reasoning=body.include_reasoning is not False,
            must_call=requests[0].must_call,
        )
        return AnswerReply(sources, dialect, stream=bool(body.stream))

    return router
