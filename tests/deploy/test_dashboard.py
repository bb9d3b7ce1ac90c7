"""What lies in deploy/: the dashboard asks for numbers that there are, and the real Prometheus reads them."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from engine.types import STEP_TOKEN_BOUNDS, DeviceMemory, EngineStats
from tests.app.api.house import House
from tests.fakes import Script, byte_model_folder, ids

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Debian's package prometheus"
)


def stats(steps: int) -> EngineStats:
    return EngineStats(
        num_requests_running=1,
        num_blocks_total=8,
        num_blocks_used=2,
        prefix_cache_queries=100 * steps,
        prefix_cache_hits=50 * steps,
        num_preemptions=steps,
        prompt_tokens=60 * steps,
        generation_tokens=40 * steps,
        num_steps=steps,
        steps_by_tokens=(0, 0, steps, *(0,) * (len(STEP_TOKEN_BOUNDS) - 2)),
        step_tokens=3 * steps,
        load_s=2.5,
        device_memory=DeviceMemory(used_bytes=3 * 2**30, free_bytes=2**30),
    )


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(byte_model_folder(tmp_path / "bytes"), Script(token_ids=ids("Hello")))
    made.stats = stats(1)
    return made


async def test_every_number_of_the_dashboard_is_on_the_metrics_page(house: House) -> None:
    await house.chat()
    await house.chat(model="none")
    page = (await house.ask("GET", "/metrics")).text
    there = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    wanted = {name for expression in EXPRESSIONS for name in re.findall(r"fireside_\w+", expression)}
    assert wanted <= there, wanted - there
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


async def test_steps_are_counted_by_their_tokens(house: House) -> None:
    page = (await house.ask("GET", "/metrics")).text
    found = dict(re.findall(r'^fireside_iteration_tokens_total_bucket\{le="(\S+)"\} (\S+)', page, re.MULTILINE))
    assert (found["2.0"], found["4.0"], found["+Inf"]) == ("0.0", "1.0", "1.0")
    assert "fireside_iteration_tokens_total_sum 3.0" in page
    house.stats = None
    assert 'fireside_iteration_tokens_total_bucket{le="+Inf"} 0.0' in (await house.ask("GET", "/metrics")).text


@pytest.mark.slow
@needs_prometheus
def test_the_real_prometheus_reads_our_numbers_and_answers_every_panel(house: House, tmp_path: Path) -> None:
    config = DEPLOY / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True, timeout=60)
    with _serving(house) as port, _prometheus(_retargeted(config, port, tmp_path), tmp_path) as prometheus:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        deadline = time.monotonic() + 120
        waiting = set(EXPRESSIONS)
        while waiting:
            house.stats = stats(house.stats.num_steps + 1 if house.stats else 1)
            for body in (chat, chat | {"model": "none"}):
                httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=30)
            waiting -= {expression for expression in waiting if _has_data(prometheus, expression)}
            assert time.monotonic() < deadline, f"no data for {waiting}"
            time.sleep(0.5)
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=page, text=True, capture_output=True, timeout=60
        )
        complaints = [line for line in checked.stderr.splitlines() if "iteration_tokens_total" not in line]
        assert not complaints, complaints  # vLLM's name, and so ours, ends like a counter's


@contextmanager
def _serving(house: House) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(house.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def _retargeted(config: Path, port: int, tmp_path: Path) -> Path:
    """The same configuration, which asks this test's server, and more often."""
    settings = yaml.safe_load(config.read_text("utf-8"))
    settings["global"]["scrape_interval"] = "1s"
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    return tmp_path / "prometheus.yml"


@contextmanager
def _prometheus(config: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def _has_data(prometheus: str, expression: str) -> bool:
    query = expression.replace("$__rate_interval", "20s")
    try:
        reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=30).json()
    except (httpx.ConnectError, ValueError):
        return False
    assert reply["status"] == "success", f"{query}: {reply}"
    return any(item["value"][1] != "NaN" for item in reply["data"]["result"])
