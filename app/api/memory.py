"""GET and POST /memory: what the model in hand takes of the card, and KV cache given back while answers come.

Without a model: how much memory there is, and that nothing of it is ours.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.body import body_schema, read_body
from app.api.guard import admin
from app.api.models import Shelf
from app.api.numbers import NUMBER
from app.models.machine import Memory, card, computer
from engine.types import MemoryReport

_GB = 1e9


class MemoryBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    give_back_gb: Annotated[
        float,
        Field(ge=0, le=1e6, allow_inf_nan=False, description="of the KV cache as it was made; 0 takes it again"),
        NUMBER,
    ]


def memory_router(shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.get("/memory")
    async def memory() -> dict[str, Any]:
        report = shelf.memory()
        return _without_model(await asyncio.to_thread(_machine)) if report is None else _as_told(report)

    @router.post("/memory", openapi_extra=body_schema(MemoryBody), dependencies=[Depends(admin)])
    async def resize(request: Request) -> dict[str, Any]:
        """Returns when the memory is the system's again. Requests go on; new ones may have less room."""
        give_back_gb = (await read_body(request, MemoryBody)).give_back_gb
        return _as_told(await shelf.resize_kv(int(give_back_gb * _GB)))

    return router


def _machine() -> Memory:
    return card() or computer()


def _without_model(machine: Memory) -> dict[str, Any]:
    nothing = MemoryReport(
        total_bytes=machine.total,
        free_bytes_at_start=machine.free,
        weights_bytes=0,
        workspace_bytes=0,
        kv_bytes=0,
        reserve_bytes=0,
        num_blocks=0,
        block_size=0,
        notes=("No model is in memory. POST /models/load loads one; GET /v1/models lists all.",),
    )
    return _as_told(nothing)


def _as_told(report: MemoryReport) -> dict[str, Any]:
    """Bytes by part, and the tokens that the cache has room for."""
    return {
        "total_bytes": report.total_bytes,
        "free_bytes_at_start": report.free_bytes_at_start,
        "weights_bytes": report.weights_bytes,
        "kv_bytes": report.kv_bytes,
        "kv_tokens": report.kv_tokens,
        "workspace_bytes": report.workspace_bytes,
        "graphs_bytes": report.graphs_bytes,
        "reserve_bytes": report.reserve_bytes,
        "notes": list(report.notes),
    }
