"""POST /models/load, /models/unload, GET /models/sse, as llama.cpp's router has them; GET /logs: what engines wrote.

A load is begun and not waited for: GET /models, or the events, tell when it is done.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse

from app.api.body import body_schema, invalid, read_body
from app.api.dialect import SSE_TYPE, sse
from app.api.errors import echo
from app.api.guard import admin
from app.api.models import Downloading, Health, Shelf, progress_by_file

_LOOK_EVERY_S = 0.25
_LOOKS_TO_KEEP_ALIVE = 40
_MOST_LINES = 2000
_WORDS = {"ready": "loaded", "loading": "loading"}


class ModelBody(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str


def loading_router(shelf: Shelf, downloading: Downloading) -> APIRouter:
    router = APIRouter(tags=["loading"], dependencies=[Depends(admin)])

    @router.post("/models/load", openapi_extra=body_schema(ModelBody))
    async def load(request: Request) -> dict[str, Any]:
        """Begin to load; it is the model in hand from now on, unless the load fails."""
        name = (await read_body(request, ModelBody)).model
        shelf.check(name)
        return {"success": True, "model": shelf.load(name)}

    @router.post("/models/unload", openapi_extra=body_schema(ModelBody))
    async def unload(request: Request) -> dict[str, bool]:
        """Returns when the memory is free again."""
        name = (await read_body(request, ModelBody)).model
        if not shelf.holds(name):
            held = [status.model for status in shelf.statuses() if status.state in _WORDS]
            raise invalid("model", f"{echo(name)} is not loaded; in memory is {', '.join(held) or 'no model'}.")
        await shelf.unload(name)
        return {"success": True}

    @router.get("/models/sse")
    async def events() -> Response:
        return StreamingResponse(
            _events(shelf, downloading), media_type=SSE_TYPE, headers={"Cache-Control": "no-cache"}
        )

    @router.get("/logs")
    async def logs(model: str = "", lines: str = "200") -> dict[str, Any]:
        """What the engine of a model (without a name, of the one in hand) wrote last, and when it ended."""
        if not (lines.isascii() and lines.isdigit() and 1 <= int(lines[:9]) <= _MOST_LINES):
            raise invalid("lines", f"must be a whole number from 1 to {_MOST_LINES}; got {echo(lines)}.")
        model_id, found = await shelf.log_lines(model, int(lines))
        return {"model": model_id, "lines": found}

    return router


async def _events(shelf: Shelf, downloading: Downloading) -> AsyncIterator[bytes]:
    """The state of each model and download now, then every change of it, until Fireside ends."""
    num_looks = 0
    told: dict[str, dict[str, Any]] = {}
    coming: dict[str, dict[str, Any]] = {}
    while not shelf.is_closed:
        before, coming = coming, {found.repo: progress_by_file(found) for found in downloading() if found.is_under_way}
        for event in _download_events(before, coming):
            yield sse(event)
        now = {status.model: _status(status) for status in shelf.statuses()}
        for model in told.keys() - now.keys():
            yield sse(_event(model, {"status": "unloaded"}))
        for model, status in now.items():
            if status != told.get(model):
                yield sse(_event(model, status))
        told, num_looks = now, num_looks + 1
        if num_looks % _LOOKS_TO_KEEP_ALIVE == 0:
            yield b": keep-alive\n\n"
        await asyncio.sleep(_LOOK_EVERY_S)


def _download_events(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What has come since; when a download ends, however it ends, the list is to be asked again."""
    for repo, progress in now.items():
        if progress != before.get(repo):
            yield {"model": repo, "event": "download_progress", "data": progress}
    if before.keys() - now.keys():
        yield {"model": "*", "event": "models_reload", "data": {}}


def _status(now: Health) -> dict[str, Any]:
    status: dict[str, Any] = {"status": _WORDS.get(now.state, "unloaded")}
    if now.state == "loading" and now.fraction is not None:
        status["progress"] = {"stages": [now.detail], "current": now.detail, "value": now.fraction}
    if now.state == "failed":
        status |= {"failed": True, "message": now.detail}
    return status


def _event(model: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "event": "model_status", "data": data}
