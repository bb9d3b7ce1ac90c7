"""Programs that cannot be run in a test (editors, web applications): the requests that their sources send, replayed.

Each is as its program writes it, oddities included; what comes back is looked at as that program looks at it.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.scenes import WEATHER_SCHEMA
from tests.clients.stage import MODEL, Stage


@pytest.fixture(scope="module")
def http(stage: Stage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stage.url, timeout=60) as client:
        yield client


def tool(**extra: Any) -> dict[str, Any]:
    parameters = WEATHER_SCHEMA | {"additionalProperties": False}
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters} | extra}


USER = {"role": "user", "content": "scene:plain"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Continue, chat": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "x"}, USER, {"role": "assistant", "content": " "}, USER],
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": False,
        },
    ),
    "Continue, autocomplete": (
        COMPLETIONS,
        {
            "prompt": "<|fim_prefix|>def add(a, b):<|fim_suffix|>scene:plain<|fim_middle|>",
            "max_tokens": 256,
            "temperature": 0.01,
            "stop": [
                *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
                *("<|im_start|>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```"),
            ],
        },
    ),
    "Cline": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "scene:plain"}]},
            ],
            "stream_options": {"include_usage": True},
            "tools": [tool()],
            "tool_choice": "auto",
        },
    ),
    "Roo": (
        CHAT,
        {
            "messages": [{"role": "developer", "content": "x"}, USER],
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "tools": [tool(strict=True)],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
    ),
    "Zed": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "user", "content": [{"type": "text", "text": "scene:plain"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "content": [], "tool_call_id": "c1"},
            ],
            "temperature": 1.0,
            "max_completion_tokens": 4096,
            "stream_options": {"include_usage": True},
            "tools": [],
            "prompt_cache_key": "thread-1",
            "stop": [],
        },
    ),
    "Zed, LM Studio provider": (CHAT, {"messages": [USER], "max_tokens": -1, "tools": [], "temperature": 1.0}),
    "VS Code Copilot": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}, USER],
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {"name": "noop", "description": "x"}}],
            "intent": False,
        },
    ),
    "JetBrains AI": (CHAT, {"messages": [{"role": "system", "content": "x"}, USER], "tools": [tool()], "user": "jb"}),
    "Open WebUI": (
        CHAT,
        {
            "messages": [USER],
            "max_completion_tokens": 1000,
            "metadata": {"chat_id": "1"},
            "chat_template_kwargs": {"enable_thinking": False},
            "params": {},
            "features": {"web_search": False},
        },
    ),
    "SillyTavern, chat": (
        CHAT,
        {
            "messages": [{"role": "system", "content": ""}, USER, {"role": "system", "content": "[Start]"}],
            "temperature": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "top_p": 1,
            "top_k": 0,
            "max_tokens": 300,
            "max_completion_tokens": 300,
            "stop": [],
            "logit_bias": {},
            "seed": 7,
            "n": 1,
        },
    ),
    "SillyTavern, text": (
        COMPLETIONS,
        {
            "prompt": "scene:plain",
            "max_new_tokens": 300,
            "max_tokens": 300,
            "temperature": 0.7,
            "typical_p": 1,
            "min_p": 0,
            "repetition_penalty": 1,
            "stop": [f"\n{name}:" for name in ("You", "User", "Assistant", "A", "B", "C", "D", "E", "F", "G")],
            "stopping_strings": ["\nYou:"],
            "truncation_length": 8192,
            "ban_eos_token": False,
            "skip_special_tokens": True,
        },
    ),
    "LibreChat": (
        CHAT,
        {
            "messages": [USER],
            "user": "6531",
            "stream_options": {"include_usage": True},
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        },
    ),
    "LlamaIndex": (COMPLETIONS, {"prompt": "scene:plain", "temperature": 0.1, "max_tokens": None, "logprobs": None}),
}


@pytest.mark.parametrize(("path", "body"), STREAMS.values(), ids=STREAMS.keys())
def test_a_streamed_request_is_served_as_its_program_reads_it(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    with http.stream("POST", path, json={"model": MODEL, "stream": True} | body) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        frames = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert all(isinstance(chunk["choices"], list) and isinstance(chunk["created"], int) for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices) == "Paris."
    if body.get("stream_options"):
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0


def test_open_webuis_background_call_and_librechats_title_are_whole_answers(http: httpx.Client) -> None:
    reply = http.post(CHAT, json={"model": MODEL, "messages": [USER], "stream": False, "max_tokens": 1000})
    assert reply.json()["choices"][0]["message"]["content"] == "Paris."


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/"])
def test_the_lists_of_models_that_settings_pages_ask_for(http: httpx.Client, path: str) -> None:
    (item, *_) = http.get(path).json()["data"]
    assert item["id"] == MODEL and isinstance(item["created"], int) and item["context_length"] > 0


def test_the_discovery_of_copilots_ollama_provider(http: httpx.Client) -> None:
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split(".")[:3])) >= (0, 6, 4)
    assert MODEL in [model["model"].removesuffix(":latest") for model in http.get("/api/tags").json()["models"]]
    shown = http.post("/api/show", json={"model": MODEL}).json()
    architecture = shown["model_info"]["general.architecture"]
    assert "tools" in shown["capabilities"] and shown["model_info"][f"{architecture}.context_length"] > 0


def test_the_discovery_of_clines_and_roos_lm_studio_provider(http: httpx.Client) -> None:
    (item, *_) = http.get("/api/v0/models").json()["data"]
    assert (item["id"], item["state"], item["type"]) == (MODEL, "loaded", "llm")
    assert item["max_context_length"] > 0 and item["loaded_context_length"] > 0


def test_open_webui_sees_which_model_is_loaded(http: httpx.Client) -> None:
    (item, *_) = http.get("/models").json()["data"]
    assert item["status"]["value"] == "loaded"


def test_a_page_of_another_program_may_call_and_reads_its_errors(http: httpx.Client) -> None:
    origin = {"Origin": "app://obsidian.md"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-api-key"}
    preflight = http.options(CHAT, headers=origin | asked)
    assert preflight.status_code in (200, 204) and "authorization" in preflight.headers["access-control-allow-headers"]
    refused = http.post(CHAT, json={"messages": []}, headers=origin)
    assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == origin["Origin"]


@pytest.mark.parametrize("key", ["Bearer", "Bearer none", "Bearer noop", "Bearer DUMMY_KEY"])
def test_whatever_stands_for_a_key_passes_where_none_is_asked(http: httpx.Client, key: str) -> None:
    headers = {"Authorization": key, "api-key": "x", "x-api-key": "y", "x-stainless-lang": "js", "X-Title": "z"}
    assert http.post(CHAT, json={"messages": [USER]}, headers=headers).status_code == 200
