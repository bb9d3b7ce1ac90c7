"""What the Monitor tab is told: engine, requests, memory, latencies; and what went wrong lately."""

import asyncio
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.api.guard import admin
from app.chat.service import TurnRecord
from app.errors import AppError
from app.models.machine import MachineNow, Memory
from app.models.memory.room import Holding
from app.ui.lately import Lately, Noting
from app.ui.monitor import Monitor, monitor_room
from engine.types import EngineStats, RequestClass, Standing
from tests.app.ui.rooms import ADMIN, USER, page_of
from tests.fakes import memory_report, model_info

_NOW = MachineNow(Memory("cuda", "a card", 24, 20, (("other (pid 7)", 3),)), 0.5, 60.0, None)


class Models:
    """The manager, with a model in hand or without."""

    def __init__(self, stats: EngineStats | None) -> None:
        self._stats = stats

    def stats(self) -> EngineStats | None:
        return self._stats

    def ready(self) -> Any:
        if self._stats is None:
            return None
        child = SimpleNamespace(memory=memory_report("A note."))
        return SimpleNamespace(id="one", child=child, info=model_info(), made_kv_bytes=100)

    def holdings(self) -> list[Holding]:
        """With a cache of which this process, small as it is, has written only a part."""
        report = replace(memory_report(), weights_bytes=0, workspace_bytes=0, kv_bytes=10**12)
        return [] if self._stats is None else [Holding("cpu", os.getpid(), report, 10**12)]


def monitor(stats: EngineStats | None = None, *turns: TurnRecord) -> Monitor:
    return Monitor(Models(stats), lambda: turns, lambda: {"ttft": [(0.1, 2), (math.inf, 1)]}, lambda: _NOW)


@pytest.fixture
def lately() -> Iterator[Lately]:
    made, logger = Lately(), logging.getLogger("fireside.test_monitor")
    logger.addHandler(made)
    logger.setLevel(logging.INFO)
    yield made
    logger.removeHandler(made)


async def test_the_numbers_are_those_of_now_and_can_be_sent() -> None:
    watched = monitor(
        EngineStats(num_requests_running=2, num_blocks_total=10, num_blocks_cached=3, generation_tokens=7)
    )
    first = watched.now()
    assert first["machine"] is None, "it is asked in a thread"
    while (now := watched.now())["machine"] is None:
        await asyncio.sleep(0.01)
    assert json.loads(json.dumps(now)) == json.loads(json.dumps(now, allow_nan=False))
    assert (now["engine"]["num_requests_running"], now["engine"]["num_blocks_cached"]) == (2, 3)
    assert (now["in_hand"]["model"], now["in_hand"]["made_kv_bytes"]) == ("one", 100)
    assert now["machine"]["memory"]["held"] == (("other (pid 7)", 3),) and now["machine"]["power_w"] is None
    assert 9e11 < now["machine"]["promised_bytes"] < 1e12, "what is written of a cache is given already"
    assert now["latencies"] == {"ttft": [(0.1, 2), (None, 1)]}


async def test_without_a_model_there_is_no_engine_to_tell_of() -> None:
    now = monitor().now()
    assert (now["engine"], now["in_hand"], now["requests"]) == (None, None, [])


async def test_each_request_is_told_with_its_class_and_how_far_it_is() -> None:
    batch = Standing(request_class=RequestClass.BATCH)
    turns = (
        TurnRecord(request_id="a", model=""),
        TurnRecord(request_id="b", model="one", standing=batch, prompt_tokens=9, cached_tokens=4),
        TurnRecord(request_id="c", model="one", prompt_tokens=9, completion_tokens=2, ttft_s=0.1),
    )
    told = monitor(EngineStats(), *turns).now()["requests"]
    assert [(each["id"], each["class"], each["stage"]) for each in told] == [
        ("a", "interactive", "waiting"),
        ("b", "batch", "reading"),
        ("c", "interactive", "writing"),
    ]


class _Silent:
    def __init__(self) -> None:
        self.ends: list[TurnRecord] = []

    def first_token(self, ttft_s: float) -> None: ...

    def token(self, gap_s: float) -> None: ...

    def ended(self, turn: TurnRecord) -> None:
        self.ends.append(turn)


async def test_failed_answers_and_warnings_are_kept_and_good_ones_pass(lately: Lately) -> None:
    beside = _Silent()
    observer = Noting(lately, beside)
    good = TurnRecord(request_id="a", model="one", reason="stop")
    bad = TurnRecord(request_id="b", model="one", error=AppError(503, "engine_died", "It died.", hint="Again."))
    observer.ended(good)
    observer.ended(bad)
    logging.getLogger("fireside.test_monitor").warning("The disk is %s", "full")
    logging.getLogger("fireside.test_monitor").info("as always")
    assert beside.ends == [good, bad]
    assert [(fault.what, fault.model, fault.text) for fault in lately.faults] == [
        ("engine_died", "one", "It died. Again."),
        ("warning", "", "The disk is full"),
    ]
    assert [line.rpartition(": ")[2] for line in lately.lines] == ["The disk is full", "as always"]


async def test_the_log_is_for_admins(lately: Lately) -> None:
    logging.getLogger("fireside.test_monitor").info("a line")
    for key, status in ((USER, 403), (ADMIN, 200)):
        app, _ = page_of(monitor_room(monitor(), lately, admin), key=key)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            reply = await client.get("/ui/monitor/lately")
        assert reply.status_code == status
    assert reply.json()["lines"][0].endswith("a line")
