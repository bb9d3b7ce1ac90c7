"""GET and POST /memory: what the loaded model takes of the card, and KV cache given back while answers come."""

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.body import body_schema, read_body
from app.api.guard import admin
from app.api.models import Shelf
from engine.types import MemoryReport

_GB = 1e9


class MemoryBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    give_back_gb: float = Field(
        ge=0, le=1e6, allow_inf_nan=False, description="of the KV cache as it was made; 0 takes it again"
    )


def memory_router(shelf: Shelf) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.get("/memory")
    async def memory() -> dict[str, Any]:
        return _as_told(shelf.memory())

    @router.post("/memory", openapi_extra=body_schema(MemoryBody), dependencies=[Depends(admin)])
    async def resize(request: Request) -> dict[str, Any]:
        """Returns when the memory is the system's again. Requests go on; new ones may have less room."""
        give_back_gb = (await read_body(request, MemoryBody)).give_back_gb
        return _as_told(await shelf.resize_kv(int(give_back_gb * _GB)))

    return router


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
