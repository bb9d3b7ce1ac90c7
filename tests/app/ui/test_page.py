"""The page as the server mounts it: what it exposes, and what it never asks of a browser."""

import os
import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.ui.page import mount
from app.ui.status import ModelStatus
from tests.app.ui.scripted import ScriptedService


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"object": "list"})
    mount(app, ScriptedService(), lambda: ModelStatus(model_id="tiny", state="loading", stage="a", fraction=0.5))
    return TestClient(app)


def _events(client: TestClient) -> dict[str, Any]:
    blocks = client.app.routes[-1].app.blocks  # type: ignore[attr-defined]
    return {event.name: event for event in blocks.fns.values()}


def test_no_event_waits_for_another_and_only_the_one_of_programs_is_public(client: TestClient) -> None:
    events = client.get("/config").json()["dependencies"]
    assert [event["api_name"] for event in events if event["api_visibility"] != "private"] == ["chat"]
    assert {event.concurrency_limit for event in _events(client).values()} == {None}


def test_the_page_holds_no_connection_while_it_is_idle(client: TestClient) -> None:
    assert client.get("/config").json()["connect_heartbeat"] is False


def test_telemetry_is_off() -> None:
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_monitoring_and_run_history_are_off(client: TestClient) -> None:
    assert client.get("/monitoring").status_code == 403
    config = client.get("/config").json()
    assert config["footer_links"] == [] and config["run_history"] is False


def test_a_policy_forbids_every_other_host(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy


def test_routes_that_were_there_before_still_answer(client: TestClient) -> None:
    assert client.get("/v1/models").json() == {"object": "list"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_mistyped_address_is_told_as_the_endpoint_tells_it(client: TestClient, method: str) -> None:
    reply = client.request(method, "/v2/chat/completions")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "not_found"


def test_the_status_route_gives_the_snapshot(client: TestClient) -> None:
    assert client.get("/ui/status").json() == {
        "model_id": "tiny",
        "state": "loading",
        "stage": "a",
        "fraction": 0.5,
        "seconds_left": None,
        "error": "",
        "max_model_len": None,
    }


def test_the_page_names_every_module_of_the_chat_so_that_none_is_found_late(client: TestClient) -> None:
    named = re.findall(r'<link rel="modulepreload" href="([^"]+)">', client.get("/").text)
    assert {"ui/static/chat.js", "ui/static/words/zh.js", "ui/vendor/dompurify/purify.es.mjs"} <= set(named)
    assert len(named) == len(set(named))
    assert {client.get(f"/{path}").status_code for path in named} == {200}


def test_who_runs_no_scripts_is_told_why_the_page_is_empty(client: TestClient) -> None:
    assert "<noscript>Fireside's page needs JavaScript.</noscript>" in client.get("/").text
