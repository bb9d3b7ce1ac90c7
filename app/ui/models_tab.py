"""What the Models tab asks beside the API's own routes for models (the server puts those under /ui as well): all that
is on the shelf in one reply, where the disk goes, the best model for this machine, a model's own defaults.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict

from app.background import in_daemon_thread
from app.models.catalog import CatalogEntry
from app.models.hub.downloads import Download
from app.models.memory.room import Holding
from app.models.shelved import Disk, Shelved
from app.models.status import ModelStatus
from app.ui.live import Hub, State

_LOOK_EVERY_S = 0.5


class Library(Protocol):
    """The face of `app.models.library.Library`. Blocks, and raises AppError."""

    def shelved(self, held_bytes: int = 0) -> list[Shelved]: ...
    def disk(self) -> Disk: ...
    def best(self, held_bytes: int = 0) -> CatalogEntry | None: ...
    def set_defaults(self, name: str, values: Mapping[str, Any]) -> None: ...
    def pull(self, name: str, *, is_to_load: bool = False) -> Download: ...


class Models(Protocol):
    """The face of `app.models.manager.ModelManager`. From memory."""

    def statuses(self) -> Iterable[ModelStatus]: ...
    def holdings(self) -> list[Holding]: ...


class DefaultsBody(BaseModel):
    """What is left out stays; null goes back to the catalogue's."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None


class ModelBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str


def models_room(library: Library, models: Models, admin: Callable[[Request], None]) -> Callable[[FastAPI, Hub], None]:
    """Routes under /ui/models, and the topic "models". admin: raises AppError for who may not change anything."""
    router = APIRouter(prefix="/ui", include_in_schema=False)
    changes = [Depends(admin)]

    @router.get("/me")
    async def me(request: Request) -> dict[str, Any]:
        """Who asks: the name of its key, "" where none is asked."""
        key = request.state.key
        return {"name": key.name, "is_admin": key.is_admin}

    @router.get("/models/shelf")
    async def shelf(request: Request) -> dict[str, Any]:
        """best: the id of the model to begin with; null where the catalogue has none for this machine."""
        holdings = models.holdings()

        def look() -> dict[str, Any]:
            held_bytes = sum(held.given for held in holdings)
            best = library.best(held_bytes)
            return {"models": [asdict(each) for each in library.shelved(held_bytes)], "best": best and best.id}

        return {**await in_daemon_thread(look), "is_admin": request.state.key.is_admin}

    @router.get("/models/disk")
    async def disk() -> dict[str, Any]:
        return asdict(await in_daemon_thread(library.disk))

    @router.post("/models/defaults", dependencies=changes)
    async def defaults(body: DefaultsBody) -> dict[str, bool]:
        """Its own from its next load on."""
        values = body.model_dump(exclude={"model"}, exclude_unset=True)
        await in_daemon_thread(lambda: library.set_defaults(body.model, values))
        return {"success": True}

    @router.post("/models/get", dependencies=changes)
    async def get(body: ModelBody) -> dict[str, bool]:
        """Download it while the model in hand goes on answering, and load it then, whenever that
        is: after a pause, or in the next run."""
        await in_daemon_thread(lambda: library.pull(body.model, is_to_load=True))
        return {"success": True}

    def in_memory() -> dict[str, Any]:
        return {"models": [asdict(each) for each in models.statuses()]}

    def on_page(app: FastAPI, hub: Hub) -> None:
        app.include_router(router)
        hub.add("models", State(in_memory), every_s=_LOOK_EVERY_S)

    return on_page
