"""GET /health, /version, /metrics: what scripts and dashboards ask."""

from typing import Any

from fastapi import APIRouter, Response

from app.api.metrics import Metrics
from app.api.models import Shelf


def health_router(shelf: Shelf, metrics: Metrics, version: str) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> dict[str, Any]:
        """200 as long as the server answers; `state` tells whether a model does.

        `last_step_age_s` grows only while the engine has work and no step ends: many seconds of it mean a stuck engine.
        """
        now = shelf.health()
        stats = metrics.stats()
        return {
            "status": "ok",
            "state": now.state,
            "model": now.model,
            "detail": now.detail,
            "seconds_left": now.seconds_left,
            "last_step_age_s": stats.last_step_age_s if stats else 0.0,
        }

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version}

    @router.get("/metrics", include_in_schema=False)
    async def get_metrics() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    return router
