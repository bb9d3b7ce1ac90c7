"""POST /tokenize, /detokenize, GET /tokenizer_info: vLLM's ways to ask what a text is in tokens."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.body import Many, body_schema, invalid, parse_body, raw_body, read_body
from app.api.chat_body import ChatBody
from app.api.ids import engine_request_id
from app.chat.service import ChatService, check_countable
from app.chat.template import told_of_tokenizer

_MAX_IDS = 4_000_000

TokenId = Annotated[int, Field(strict=True)]


class TokenizeBody(BaseModel):
    """Either `prompt` or what a chat request has: `messages`, `tools`, ..."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: Annotated[Many[TokenId], Field(max_length=_MAX_IDS)]


def tokens_router(service: ChatService) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        raw = await raw_body(request)
        body = parse_body(raw, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either `prompt` or `messages`.")
        loaded, text = await service.text_of(body.model or "")
        if body.prompt is not None:
            check_countable(len(body.prompt))
            is_bare = body.add_special_tokens is False
            ids = await asyncio.to_thread(text.tokenizer.encode, body.prompt, add_special_tokens=not is_bare)
        else:
            ids = await _of_chat(service, raw, body, request)
        return {
            "count": len(ids),
            "max_model_len": loaded.info.max_model_len,
            "tokens": list(ids),
            "token_strs": [text.tokenizer.decode([token_id]) for token_id in ids] if body.return_token_strs else None,
        }

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_body(request, DetokenizeBody)
        loaded, text = await service.text_of(body.model or "")
        for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= token_id < loaded.info.vocab_size:
                raise invalid("tokens", f"{token_id} is outside the vocabulary of {loaded.info.vocab_size:,}.")
        return {"prompt": await asyncio.to_thread(text.tokenizer.decode, body.tokens)}

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str = "") -> dict[str, Any]:
        """tokenizer_config.json of the model in hand, special tokens written plain."""
        loaded, _ = await service.text_of(model)
        return await asyncio.to_thread(told_of_tokenizer, loaded.folder)

    return router


async def _of_chat(service: ChatService, raw: bytes, body: TokenizeBody, request: Request) -> tuple[int, ...]:
    if body.add_special_tokens:
        raise invalid("add_special_tokens", "a chat template writes them itself; leave it out.")
    chat = parse_body(raw, ChatBody)
    asked = chat.requests(engine_request_id(request))[0]
    if chat.add_generation_prompt is False and not asked.continue_final_message:
        raise invalid("add_generation_prompt", "a prompt ends with the head of the answer here; leave it out.")
    return await service.prompt_ids(asked)
