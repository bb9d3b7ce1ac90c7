"""What other servers call "which models are there": LM Studio, llama.cpp, TabbyAPI and TextGen, for their clients."""

import asyncio
from typing import Any

from fastapi import APIRouter

from app.api.models import ModelCard, Shelf, card_of
from app.chat.service import ChatService
from app.chat.template import told_of_tokenizer
from app.errors import AppError


def discovery_router(service: ChatService, shelf: Shelf, version: str) -> APIRouter:
    router = APIRouter(tags=["discovery"])

    @router.get("/api/v0/models")
    async def lm_studio_list() -> dict[str, Any]:
        return {"object": "list", "data": [_lm_studio(card) for card in shelf.cards()]}

    @router.get("/api/v0/models/{model_id:path}")
    async def lm_studio_one(model_id: str) -> dict[str, Any]:
        return _lm_studio(card_of(shelf, model_id))

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """llama.cpp's, of the model in hand; waits for a load that is under way, and begins none: clients poll it."""
        if not shelf.holds(""):
            raise AppError(503, "no_model", "No model is in memory.", hint="POST /models/load loads one.")
        loaded, _ = await service.text_of("")
        told = await asyncio.to_thread(told_of_tokenizer, loaded.folder)
        return {
            "default_generation_settings": {"n_ctx": loaded.info.max_model_len, "params": dict(loaded.sampling)},
            "total_slots": loaded.info.max_num_seqs,
            "model_alias": loaded.id,
            "model_path": loaded.id,
            "chat_template": told.get("chat_template") or "",
            "bos_token": told.get("bos_token") or "",
            "eos_token": told.get("eos_token") or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"fireside-{version}",
        }

    @router.get("/v1/model")
    async def tabby_one() -> dict[str, Any]:
        return _tabby(card_of(shelf, ""))

    @router.get("/v1/model/list")
    async def tabby_list() -> dict[str, Any]:
        return {"object": "list", "data": [_tabby(card) for card in shelf.cards()]}

    @router.get("/v1/internal/model/info")
    async def textgen_info() -> dict[str, Any]:
        return {"model_name": shelf.health().model or "None", "lora_names": [], "loader": "fireside"}

    @router.get("/v1/internal/model/list")
    async def textgen_list() -> dict[str, Any]:
        return {"model_names": [card.id for card in shelf.cards()]}

    return router


def _lm_studio(card: ModelCard) -> dict[str, Any]:
    item = {
        "id": card.id,
        "object": "model",
        "type": "llm",
        "publisher": "fireside",
        "arch": card.architecture,
        "compatibility_type": "safetensors",
        "quantization": card.format,
        "state": "loaded" if card.state == "loaded" else "not-loaded",
        "max_context_length": card.context_length,
        "capabilities": ["tool_use"],
    }
    return item | ({"loaded_context_length": card.max_model_len} if card.max_model_len else {})


def _tabby(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "fireside",
        "parameters": {"max_seq_len": card.max_model_len or card.context_length},
    }
