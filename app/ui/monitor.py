"""What the Monitor tab shows: the topic "monitor", told once a second to whoever watches, and what happened lately.

The memory and the load of the machine are asked in a thread, as a driver may take its time; all else is in memory.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request

from app.background import in_daemon_thread
from app.chat.service import TurnRecord
from app.models.machine import MachineNow, machine_now
from app.models.memory.resident import ReadyModel
from app.models.memory.room import Holding
from app.ui.lately import Lately
from app.ui.live import Hub, State

EVERY_S = 1.0
_MOST_REQUESTS = 100


class Watched(Protocol):
    """The face of `app.models.manager.ModelManager`. From memory."""

    def stats(self) -> Any: ...
    def ready(self) -> ReadyModel | None: ...
    def holdings(self) -> list[Holding]: ...


Latencies = Callable[[], Mapping[str, Sequence[tuple[float, int]]]]


class Monitor:
    """
    under_way  the turns of now
    latencies  counts by bound, of first tokens and of further ones
    """

    def __init__(
        self,
        models: Watched,
        under_way: Callable[[], Iterable[TurnRecord]],
        latencies: Latencies,
        machine: Callable[[], MachineNow] = machine_now,
    ) -> None:
        self._models = models
        self._under_way = under_way
        self._latencies = latencies
        self._machine = machine
        self._machine_now: dict[str, Any] | None = None
        self._asking: asyncio.Task[None] | None = None

    def now(self) -> dict[str, Any]:
        """From memory; the machine as it was a moment ago."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_machine())
        ready = self._models.ready()
        return {
            "time": time.time(),
            "engine": _engine(self._models.stats()),
            "in_hand": None if ready is None else _in_hand(ready),
            "machine": self._machine_now,
            "requests": [_request(turn) for turn in [*self._under_way()][:_MOST_REQUESTS]],
            "latencies": {name: _finite(found) for name, found in self._latencies().items()},
        }

    async def _ask_machine(self) -> None:
        holdings = self._models.holdings()

        def ask() -> dict[str, Any]:
            return {**asdict(self._machine()), "promised_bytes": sum(held.promised for held in holdings)}

        self._machine_now = await in_daemon_thread(ask)


def monitor_room(monitor: Monitor, lately: Lately, admin: Callable[[Request], None]) -> Callable[[FastAPI, Hub], None]:
    """The topic "monitor", and GET /ui/monitor/lately, which is for admins as it tells of others' requests."""
    router = APIRouter(prefix="/ui/monitor", include_in_schema=False)

    @router.get("/lately", dependencies=[Depends(admin)])
    async def what_happened() -> dict[str, Any]:
        return {"faults": [asdict(fault) for fault in [*lately.faults]], "lines": [*lately.lines]}

    def on_page(app: FastAPI, hub: Hub) -> None:
        app.include_router(router)
        hub.add("monitor", State(monitor.now), every_s=EVERY_S)

    return on_page


def _engine(stats: Any) -> dict[str, Any] | None:
    if stats is None:
        return None
    names = (
        *("num_requests_running", "num_requests_waiting", "num_blocks_total", "num_blocks_used", "num_blocks_cached"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
        *("num_steps", "last_step_age_s"),
    )
    return {name: getattr(stats, name) for name in names}


def _in_hand(ready: ReadyModel) -> dict[str, Any]:
    """Its memory by part; how much of its cache there is, and was when it was made."""
    report = ready.child.memory
    return {
        "model": ready.id,
        "device_kind": ready.info.device_kind,
        "total_bytes": report.total_bytes,
        "weights_bytes": report.weights_bytes,
        "workspace_bytes": report.workspace_bytes + report.graphs_bytes,
        "kv_bytes": report.kv_bytes,
        "made_kv_bytes": ready.made_kv_bytes,
        "tokens_a_block": report.kv_tokens / max(report.num_blocks, 1),
        "max_model_len": ready.info.max_model_len,
        "notes": list(report.notes),
    }


def _request(turn: TurnRecord) -> dict[str, Any]:
    """stage: waiting (for a model, or its turn), reading (its prompt), writing."""
    writes = turn.ttft_s is not None
    return {
        "id": turn.request_id,
        "model": turn.model,
        "class": turn.standing.request_class.value,
        "stage": "writing" if writes else "reading" if turn.prompt_tokens else "waiting",
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "completion_tokens": turn.completion_tokens,
        "seconds": round(time.perf_counter() - turn.started, 1),
        "ttft_s": turn.ttft_s,
    }


def _finite(counts: Sequence[tuple[float, int]]) -> list[tuple[float | None, int]]:
    """JSON knows no infinity."""
    return [(None if math.isinf(bound) else bound, count) for bound, count in counts]
