"""GET /v1/models, /v1/models/{id}: what is on the shelf. Instant: never waits for a load, never reads a disk."""

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import APIRouter

from app.api.errors import echo
from app.errors import AppError


class ModelCard(Protocol):
    """
    id               what a client puts into `model`
    created          Unix seconds
    state            "unloaded" | "loading" | "loaded" | "failed"
    max_model_len    tokens that a request may hold as loaded now; None while not loaded
    context_length   tokens that the architecture was trained for; None if not known yet
    """

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def context_length(self) -> int | None: ...


class Health(Protocol):
    """
    state    "empty" | "loading" | "ready" | "failed"
    model    id of the model in hand, or the one that is loading; "" where there is none
    detail   one line for people: the stage of the load, or why it failed
    """

    @property
    def state(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def detail(self) -> str: ...


class Shelf(Protocol):
    """What models there are and how the one in hand is. Asked on the event loop, so both answer from memory."""

    def cards(self) -> Sequence[ModelCard]: ...
    def health(self) -> Health: ...


def models_router(shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_item(card) for card in shelf.cards()]}

    @router.get("/v1/models/{model_id:path}")
    @router.get("/models/{model_id:path}", include_in_schema=False)
    async def one_model(model_id: str) -> dict[str, Any]:
        if not model_id:  # "/v1/models/": the list, with a trailing slash
            return await list_models()
        for card in shelf.cards():
            if card.id == model_id.rstrip("/"):
                return _item(card)
        raise AppError(
            404,
            "model_not_found",
            f"There is no model {echo(model_id)!r} here.",
            hint="GET /v1/models lists what there is.",
            param="model",
        )

    return router


def _item(card: ModelCard) -> dict[str, Any]:
    """`context_length` is the loaded one where the model is loaded: it is what a client may fill."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "fireside",
        "state": card.state,
        "max_model_len": card.max_model_len or card.context_length,
        "context_length": card.max_model_len or card.context_length,
    }
