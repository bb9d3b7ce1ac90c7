"""POST and DELETE /models, as llama.cpp's router has them: fetch and delete. GET /models/search, /fit, /downloads; what
may be done to a download. The work is the library's, in threads.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.body import body_schema, query_schema, read_body, read_query
from app.api.errors import echo
from app.api.guard import admin
from app.api.models import Shelf
from app.background import in_daemon_thread
from app.errors import AppError
from app.models.catalog import CatalogEntry
from app.models.fit import FitReport
from app.models.hub.downloads import Download


class Library(Protocol):
    """The face of `app.models.library.Library`. Blocks, and raises AppError."""

    def search(self, words: str, gpu_gb: float | None = None, **filters: Any) -> list[dict[str, Any]]: ...
    def fit(
        self, name: str, gpu_gb: float | None = None, context: int | None = None, kv: str | None = None
    ) -> FitReport: ...
    def all_downloads(self) -> list[Download]: ...
    def known_downloads(self) -> list[Download]:
        """From memory: asked on the event loop."""
        ...

    def pull(self, name: str) -> Download: ...
    def pause(self, name: str) -> Download: ...
    def resume(self, name: str) -> Download: ...
    def cancel(self, name: str) -> None: ...
    def add(self, name: str, entry_id: str | None = None) -> CatalogEntry: ...
    def remove(self, name: str) -> int: ...
    def verify(self, name: str, *, repairs: bool = False) -> dict[str, Any]: ...
    def keep_token(self, token: str) -> None: ...
    def forget_token(self) -> bool: ...


class PullBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str = Field(description="a catalogue id or a repository (owner/name)")


class VerifyBody(PullBody):
    repair: bool = Field(default=False, description="fetch or make again what is damaged or missing, and only that")


class AddBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = Field(description="a repository (owner/name) or a folder")
    id: str | None = Field(default=None, description="the name it is to have here")


class ModelQuery(BaseModel):
    model: str = Field(min_length=1)


class SearchQuery(BaseModel):
    """max_gb: of the weights. gpu_gb: of the card to judge by."""

    q: str = Field(default="", max_length=200)
    format: Literal["awq", "gptq", "compressed-tensors"] | None = None
    max_gb: float | None = Field(default=None, gt=0, le=1e6)
    licence: str | None = Field(default=None, max_length=100)
    limit: int = Field(default=20, ge=1, le=100)
    gpu_gb: float | None = Field(default=None, gt=0, le=1e4)


class FitQuery(ModelQuery):
    gpu_gb: float | None = Field(default=None, gt=0, le=1e4)
    context: int | None = Field(default=None, ge=1, le=2**31)
    kv_cache_dtype: Literal["auto", "fp32", "fp16", "bf16", "int8"] | None = None


class TokenBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: str | None = Field(description="of the hub; null forgets the one that is kept")


def library_router(library: Library, shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["library"], dependencies=[Depends(admin)])

    @router.post("/models", openapi_extra=body_schema(PullBody))
    async def pull(request: Request) -> dict[str, Any]:
        """Begin to download; GET /models/downloads tells how far it is."""
        name = (await read_body(request, PullBody)).model
        return {"success": True, "download": download_told(await in_daemon_thread(lambda: library.pull(name)))}

    @router.delete("/models", openapi_extra=query_schema(ModelQuery))
    async def remove(request: Request) -> dict[str, Any]:
        """Delete its files and what came of a download. Refused while the model is loaded."""
        name = read_query(request, ModelQuery).model
        if shelf.holds(name):
            raise AppError(409, "model_loaded", f"{echo(name)} is loaded.", hint="Unload it first.", param="model")
        return {"success": True, "freed_bytes": await in_daemon_thread(lambda: library.remove(name))}

    @router.get("/models/search", openapi_extra=query_schema(SearchQuery))
    async def search(request: Request) -> dict[str, Any]:
        """Models of the hub, the most downloaded first, each with whether it fits this machine."""
        asked = read_query(request, SearchQuery)
        filters = {"fmt": asked.format, "max_gb": asked.max_gb, "licence": asked.licence, "limit": asked.limit}
        found = await in_daemon_thread(lambda: library.search(asked.q, asked.gpu_gb, **filters))
        return {"object": "list", "data": found}

    @router.get("/models/fit", openapi_extra=query_schema(FitQuery))
    async def fit(request: Request) -> dict[str, Any]:
        """What it takes and holds, now and on an empty card; nothing but headers is fetched."""
        asked = read_query(request, FitQuery)
        kv, context = asked.kv_cache_dtype, asked.context
        return (await in_daemon_thread(lambda: library.fit(asked.model, asked.gpu_gb, context, kv))).as_json()

    @router.get("/models/downloads")
    async def downloads() -> dict[str, Any]:
        found = await in_daemon_thread(library.all_downloads)
        return {"object": "list", "data": [download_told(download) for download in found]}

    def may(path: str, deed: Callable[[str], object], summary: str) -> None:
        async def change(request: Request) -> dict[str, bool]:
            name = (await read_body(request, PullBody)).model
            await in_daemon_thread(lambda: deed(name))
            return {"success": True}

        router.post(f"/models/downloads/{path}", openapi_extra=body_schema(PullBody), summary=summary)(change)

    may("pause", library.pause, "What has come stays")
    may("resume", library.resume, "A paused or failed download goes on")
    may("cancel", library.cancel, "Nothing of it stays")

    @router.post("/models/add", openapi_extra=body_schema(AddBody))
    async def add(request: Request) -> dict[str, Any]:
        """Put a repository or a folder of this machine into the user's own models.yaml."""
        body = await read_body(request, AddBody)
        added = await in_daemon_thread(lambda: library.add(body.model, body.id))
        return {"id": added.id, "format": added.format, "context_length": added.context_length}

    @router.post("/models/verify", openapi_extra=body_schema(VerifyBody))
    async def verify(request: Request) -> dict[str, Any]:
        """Every file: verified by its hash, unverified (nobody knows one), damaged or missing."""
        body = await read_body(request, VerifyBody)
        return {"files": await in_daemon_thread(lambda: library.verify(body.model, repairs=body.repair))}

    @router.post("/models/token", openapi_extra=body_schema(TokenBody))
    async def token(request: Request) -> dict[str, bool]:
        """The hub's, for gated models: kept in a file that only this user can read."""
        given = (await read_body(request, TokenBody)).token
        await in_daemon_thread(lambda: library.forget_token() if given is None else library.keep_token(given))
        return {"success": True}

    return router


def download_told(download: Download) -> dict[str, Any]:
    """error is that of a download that failed: code, message, hint. is_to_load: it is loaded once it is here."""
    report = download.report
    told: dict[str, Any] = {
        "model": download.repo,
        "state": download.state,
        "error": download.error,
        "is_to_load": download.is_to_load,
    }
    if report is None:
        return told
    files = [
        {"name": file.name, "size_bytes": file.num_bytes, "done_bytes": file.done_bytes, "state": file.state}
        for file in report.files
    ]
    return told | {
        "size_bytes": report.num_bytes,
        "done_bytes": report.done_bytes,
        "bytes_per_s": report.bytes_per_s,
        "seconds_left": report.seconds_left,
        "files": files,
    }
