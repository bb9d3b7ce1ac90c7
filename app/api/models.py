"""GET /v1/models, /v1/models/{id}: what is on the shelf. Instant: never waits for a load, never reads a disk.

/models is the same list in the words of llama.cpp's router too; what other servers call it is in discovery.py. Who says
which `anthropic-version` it speaks gets Anthropic's own shape.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from app.api.body import invalid, read_query
from app.api.errors import anthropic_body, echo
from app.errors import AppError
from app.models.hub.downloads import Download
from engine.types import MemoryReport


class ModelCard(Protocol):
    """
    id               what a client puts into `model`
    created          Unix seconds
    state            "unloaded" | "loading" | "loaded" | "failed"
    max_model_len    tokens that a request may hold as loaded now; None while not loaded
    context_length   tokens that the architecture was trained for; None if not known yet
    format           "gptq", "awq", ...; None if not known yet
    thinks           it thinks in tags before it answers
    architecture     None while not loaded
    error            why its last load failed; "" else
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
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def format(self) -> str | None: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def thinks(self) -> bool: ...
    @property
    def architecture(self) -> str | None: ...
    @property
    def error(self) -> str: ...


class Health(Protocol):
    """
    state     "empty" | "loading" | "ready" | "failed"
    model     id of the model in hand, or the one that is loading; "" where there is none
    detail    one line for people: the stage of the load, or why it failed
    fraction  0 to 1 of that stage; None where it cannot be known
    seconds_left  until it can answer; None where it cannot be told
    """

    @property
    def state(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def seconds_left(self) -> float | None: ...


class Shelf(Protocol):
    """What models there are and how those in memory are. Asked on the event loop, so these answer from memory."""

    def cards(self) -> Sequence[ModelCard]: ...
    def health(self) -> Health:
        """Of the model in hand."""
        ...

    def statuses(self) -> Sequence[Health]:
        """Of every model that is loaded, loading or failed."""
        ...

    def check(self, name: str) -> None:
        """Raises AppError (404, with what there is) where no model can go by this name."""
        ...

    @property
    def is_closed(self) -> bool:
        """Fireside is ending: nothing changes any more."""
        ...

    def holds(self, name: str) -> bool:
        """Whether `name` means a model that is loaded or loading; "" the one in hand."""
        ...

    def load(self, name: str) -> str:
        """Begin to bring this model in hand, fetched first where needed; others go where there is no room beside.

        Returns its id. A load that fails leaves the model before it in hand.
        """
        ...

    async def unload(self, name: str) -> None:
        """Let go of it; returns when its memory is free."""
        ...

    async def log_lines(self, name: str, num_lines: int) -> tuple[str, list[str]]:
        """The id of a model ("" the one in hand) and the last lines of its engine's log. Raises AppError (404)."""
        ...

    def memory(self) -> MemoryReport | None:
        """Of the model in hand; None where none is ready."""
        ...

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        """Have its KV cache smaller by so much than it was made, while requests go on. Raises AppError."""
        ...


Downloading = Callable[[], Sequence[Download]]  # those of this process, from memory


def models_router(shelf: Shelf, downloading: Downloading) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def list_models(request: Request) -> Any:
        if _speaks_anthropic(request):
            return _for_anthropic(lambda: _page(shelf.cards(), read_query(request, PageQuery)))
        under_way = {download.name: download for download in downloading() if download.is_under_way}
        items = [_item(card) for card in shelf.cards()]
        for item in items:
            if download := under_way.pop(str(item["id"]).replace("/", "--"), None):
                item |= {"state": "downloading", "status": download_status(download)}
        return {"object": "list", "data": [*items, *map(_coming, under_way.values())]}

    @router.get("/v1/models/{model_id:path}")
    @router.get("/models/{model_id:path}", include_in_schema=False)
    async def one_model(request: Request, model_id: str) -> Any:
        if _speaks_anthropic(request):
            return _for_anthropic(lambda: _described(card_of(shelf, model_id)))
        return _item(card_of(shelf, model_id))

    return router


class PageQuery(BaseModel):
    """Of Anthropic's list: at most one of the two ids."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def _speaks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _for_anthropic(answer: Callable[[], dict[str, Any]]) -> Response:
    """The refusal has Anthropic's shape too."""
    try:
        return JSONResponse(answer())
    except AppError as error:
        return JSONResponse(anthropic_body(error), error.status, {"x-should-retry": "false"})


def _page(cards: Sequence[ModelCard], asked: PageQuery) -> dict[str, Any]:
    """Raises AppError (400)."""
    if asked.after_id and asked.before_id:
        raise invalid("before_id", "not together with `after_id`.")
    ids = [card.id for card in cards]
    for name in ("after_id", "before_id"):
        place = getattr(asked, name)
        if place and place not in ids:
            raise invalid(name, f"there is no model {echo(place)} here.")
    if asked.before_id:
        left = cards[: ids.index(asked.before_id)]
        shown = left[-asked.limit :]
    else:
        left = cards[ids.index(asked.after_id) + 1 if asked.after_id else 0 :]
        shown = left[: asked.limit]
    return {
        "data": [_described(card) for card in shown],
        "has_more": len(shown) < len(left),
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }


def _described(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len or card.context_length,
    }


def card_of(shelf: Shelf, name: str) -> ModelCard:
    """By id or alias; "" is the model in hand. Raises AppError (404)."""
    wanted = (name or shelf.health().model).casefold()
    for card in shelf.cards():
        if wanted in (card.id.casefold(), *(alias.casefold() for alias in card.aliases)):
            return card
    raise AppError(
        404,
        "model_not_found",
        f"There is no model {echo(name)!r} here." if name else "No model is in hand.",
        hint="GET /v1/models lists what there is.",
        param="model",
    )


def _item(card: ModelCard) -> dict[str, Any]:
    """`context_length` is the loaded one where the model is loaded: it is what a client may fill."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "fireside",
        "state": card.state,
        "status": router_status(card),
        "aliases": list(card.aliases),
        "max_model_len": card.max_model_len or card.context_length,
        "context_length": card.max_model_len or card.context_length,
    }


def _coming(download: Download) -> dict[str, Any]:
    """A model that no catalogue knows, on its way here."""
    status = download_status(download)
    return {
        "id": download.repo,
        "object": "model",
        "created": 0,
        "owned_by": "fireside",
        "state": "downloading",
        "status": status,
        "aliases": [],
        "max_model_len": None,
        "context_length": None,
    }


def download_status(download: Download) -> dict[str, Any]:
    """In the words of llama.cpp's router, bytes by file."""
    return {"value": "downloading", "progress": progress_by_file(download)}


def progress_by_file(download: Download) -> dict[str, dict[str, int]]:
    files = download.report.files if download.report else ()
    return {file.name: {"done": file.done_bytes, "total": file.num_bytes} for file in files}


def router_status(card: ModelCard) -> dict[str, Any]:
    """In the words of llama.cpp's router: a load that failed is an unloaded model with a mark."""
    if card.state == "failed":
        return {"value": "unloaded", "failed": True} | ({"message": card.error} if card.error else {})
    return {"value": card.state}
