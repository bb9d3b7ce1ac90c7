"""The routes: shapes of answers, errors and headers, as api-contract says them."""

import asyncio
import gzip
import json
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.metrics import Metrics
from engine.errors import BadRequest, EngineClosed, EngineDied, TooManyRequests
from engine.types import EngineStats, FinishReason, GrammarKind, GrammarSpec
from tests.app.api.answers import error_of, events, named_events
from tests.app.api.house import USER, House
from tests.fakes import EOS, FakeHealth, Script, byte_model_folder, ids, model_info


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script(token_ids=ids("Hello"), num_cached=4))


async def test_a_whole_chat_answer(house: House) -> None:
    body = (await house.chat()).json()
    assert body["object"] == "chat.completion" and isinstance(body["created"], int)
    assert body["id"].startswith("chatcmpl-") and body["model"] == "fake-model"
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    prompt = len("*user\nHi*\n*assistant\n")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"]["prompt_n"] == prompt - 4 and body["timings"]["cache_n"] == 4
    assert body["timings"]["predicted_per_second"] == 5 / 4.0


TOOL = {"type": "function", "name": "look", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("ending", [{}, {"stop": "name"}], ids=["max_tokens", "stop"])
async def test_a_forced_call_that_is_cut_before_its_name_is_no_text(folder: Path, ending: Any) -> None:
    house = House(folder, Script(token_ids=ids('<tool_call>\n{"name": "')), max_model_len=5000)
    limit = {} if ending else {"max_tokens": 20}
    asked = {"tools": [TOOL], "tool_choice": "required", **limit, **ending}
    (choice,) = (await house.chat(**asked)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == ("stop" if ending else "length")
    streamed = [chunk for chunk in events(await house.chat(**asked, stream=True)) if chunk != "[DONE]"]
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in streamed)
    assert (await house.chat(**asked | {"tool_choice": "auto"})).json()["choices"][0]["message"]["content"]


async def test_a_forced_call_that_is_cut_is_no_text_in_the_other_dialects(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids('<tool_call>\n{"name": "')), max_model_len=5000)
    asked = {"input": "Hi", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 20}
    said = (await house.ask("POST", "/v1/responses", json=asked)).json()
    assert (said["output"], said["status"]) == ([], "incomplete")
    last = named_events(await house.ask("POST", "/v1/responses", json=asked | {"stream": True}))[-1][1]["response"]
    assert (last["output"], last["status"]) == ([], "incomplete")
    tools = {"tools": [{"name": "look", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    body = {"messages": [USER], "max_tokens": 20, **tools}
    said = (await house.ask("POST", "/v1/messages", json=body)).json()
    assert (said["content"], said["stop_reason"]) == ([], "max_tokens")
    told = (await house.ask("POST", "/v1/messages", json=body | {"stream": True})).text
    assert "content_block" not in told and "max_tokens" in told


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"allowed_token_ids": [1], "structured_outputs": {"regex": "a"}}, "allowed_token_ids", "structured_outputs"),
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "allowed_token_ids", "bad_words"),
    ],
)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_token_ids_that_cannot_be_kept_are_refused_by_name(
    house: House, path: str, fields: Any, param: str, word: str
) -> None:
    error = error_of(await getattr(house, path)(**fields), 400)
    assert error["param"] == param and param in error["message"] and word in error["message"]
    assert not house.engine.submitted


async def test_the_order_of_a_chat_stream(house: House) -> None:
    response = await house.chat(stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert all(isinstance(chunk["choices"], list) and isinstance(chunk["created"], int) for chunk in chunks)
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "fake-model")
    }
    opening, *middle, finish, usage = chunks
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in middle)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 6 + ["stop"]
    assert finish["timings"]["predicted_n"] == 6
    assert usage["choices"] == [] and usage["usage"] == (await house.chat()).json()["usage"]
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_usage_comes_only_when_asked(house: House) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert "usage" not in (await house.chat(stream=True, **options)).text


async def test_stream_and_whole_say_the_same(folder: Path) -> None:
    text = "<think>so 日</think>\n\nGrüße 😀 now END never"
    house = House(folder, Script(token_ids=ids(text)))
    whole = (await house.chat(stop="END")).json()["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(await house.chat(stop="END", stream=True))[:-1]]
    assert whole["content"] == "".join(delta.get("content", "") for delta in deltas) == "Grüße 😀 now "
    assert whole["reasoning_content"] == "".join(delta.get("reasoning_content", "") for delta in deltas) == "so 日"


async def test_n_answers_share_the_prompt_and_keep_their_index(house: House) -> None:
    body = (await house.chat(n=3, temperature=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 18
    assert body["usage"]["prompt_tokens"] == len("*user\nHi*\n*assistant\n")
    *chunks, _ = events(await house.chat(n=2, stream=True))
    by_index: dict[int, list[str | None]] = {0: [], 1: []}
    for chunk in chunks:
        by_index[chunk["choices"][0]["index"]].append(chunk["choices"][0]["finish_reason"])
    assert all(reasons.count("stop") == 1 and reasons[-1] == "stop" for reasons in by_index.values())


async def test_the_first_of_n_answers_goes_ahead_so_that_the_others_find_its_prefill(folder: Path) -> None:
    gate = asyncio.Event()
    house = House(folder, Script(token_ids=ids("ab"), gate=gate))
    asked = asyncio.create_task(house.complete(prompt=["x", "y"], n=3))
    while len(house.engine.running) < 2:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert [prompt for _, prompt, _ in house.engine.submitted] == [ids("x"), ids("y")]
    gate.set()
    assert [choice["text"] for choice in (await asked).json()["choices"]] == ["ab"] * 6


async def test_completions_whole_and_streamed(house: House) -> None:
    body = (await house.complete(prompt=["a", "bc"], n=2, echo=True)).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "aHello"),
        (1, "aHello"),
        (2, "bcHello"),
        (3, "bcHello"),
    ]
    assert body["usage"]["prompt_tokens"] == 3
    *chunks, done = events(await house.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] == 6
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Hello"


async def test_paths_without_v1_and_bodies_without_a_type_are_served(house: House) -> None:
    content = json.dumps({"messages": [USER]})
    headers = {"content-type": "application/x-www-form-urlencoded", "authorization": "Bearer "}
    response = await house.ask("POST", "/chat/completions", content=content, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions//"])
async def test_slashes_where_a_base_url_meets_a_path_do_not_matter(house: House, path: str) -> None:
    response = await house.ask("POST", f"http://localhost:8000{path}", json={"messages": [USER]})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/api/tags", "/v1/models/fake-model"])
async def test_head_answers_as_get_does(house: House, path: str) -> None:
    head, get = [await house.ask(method, path) for method in ("HEAD", "GET")]
    assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])


async def test_a_body_with_a_byte_order_mark_is_read(house: House) -> None:
    content = json.dumps({"messages": [USER]}).encode("utf-8-sig")
    assert (await house.ask("POST", "/v1/chat/completions", content=content)).status_code == 200


async def test_a_piece_of_a_call_comes_alone_in_its_chunk(folder: Path) -> None:
    """Some clients take only the first piece of a call from a chunk."""
    word = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    tool = {"type": "function", "function": {"name": "look"}}
    house = House(byte_model_folder(folder / "words", words=[word]), Script(token_ids=[259]))
    house.source.model.info = model_info(max_model_len=1000)
    chunks = events(await house.chat(stream=True, tools=[tool]))[:-1]
    (pieces,) = [delta["tool_calls"] for c in chunks if "tool_calls" in (delta := c["choices"][0]["delta"])]
    assert [piece["function"] for piece in pieces] == [{"name": "look", "arguments": '{"at": 1}'}]


# Errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{not json", None),
        ("", None),
        ("[1]", None),
        ('"x"', None),
        ("[" * 5000, None),
        ("{}", "messages"),
        ('{"messages": []}', "messages"),
        ('{"messages": "hi"}', "messages"),
        ('{"messages": [{"content": "x"}]}', "messages[0].role"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
        ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "max_tokens"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": "x"}], "n": 1.5}', "n"),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_place(house: House, body: str, param: str | None) -> None:
    response = await house.ask("POST", "/v1/chat/completions", content=body)
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert response.headers["x-should-retry"] == "false"


async def test_what_is_echoed_is_bounded(house: House) -> None:
    response = await house.chat(stop={"x": "A" * 10_000})
    assert len(error_of(response, 400)["message"]) < 400
    response = await house.chat(max_tokens="A" * 10_000)
    assert len(error_of(response, 400)["message"]) < 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_status_streamed_or_not(folder: Path, stream: bool) -> None:
    full = House(folder, Script(token_ids=ids("x"), error=TooManyRequests("The waiting line is full.")))
    response = await full.chat(stream=stream)
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] and "x-should-retry" not in response.headers
    response = await full.chat(stream=stream, model="no-such-model")
    assert error_of(response, 404)["code"] == "model_not_found"
    response = await full.chat(stream=stream, messages=[{"role": "user", "content": "x" * 300}], max_tokens=9)
    error = error_of(response, 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert error["message"].startswith(
        "This model's maximum context length is 200 tokens. However, you requested 328 tokens "
        "(319 in the messages, 9 in the completion)."
    )


async def test_an_error_in_mid_stream_is_an_object_and_then_the_end(folder: Path) -> None:
    script = Script(token_ids=ids("abcdef"), error=EngineDied("The engine ended."), error_at=4, pause_s=0.15)
    *chunks, last = events(await House(folder, script).chat(stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abcd"
    said = "The engine ended. Send it again: a fresh engine process answers the next request."
    assert last == {"error": {"message": said, "type": "server_error", "param": None, "code": "engine_died"}}


async def test_a_model_that_was_closed_on_purpose_promises_no_fresh_engine(folder: Path) -> None:
    script = Script(token_ids=ids("abc"), error=EngineClosed("The model was unloaded."), error_at=2)
    error = error_of(await House(folder, script).chat(), 503)
    assert (error["code"], error["message"]) == ("engine_closed", "The model was unloaded.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_tells_no_secrets_and_is_logged(
    folder: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(folder, Script(token_ids=ids("x"), error=RuntimeError("secret at /home/me")))
    response = await house.chat(stream=stream)
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text and "secret" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", "/elsewhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("DELETE", "/tokenize", 405),
        ("TRACE", "/props", 405),
        ("GET", "/v1", 404),
        ("POST", "/v1/v1/messages", 404),
    ],
)
async def test_unknown_paths_and_methods_have_the_same_shape(house: House, method: str, path: str, status: int) -> None:
    response = await house.ask(method, path)
    if path.startswith("/v1/v1"):
        assert "leave it out there" in response.json()["error"]["message"]
    else:
        error_of(response, status)
    assert (status == 405) == bool(response.headers.get("allow"))


async def test_a_packed_body_is_told_apart_from_a_broken_one(house: House) -> None:
    packed = gzip.compress(json.dumps({"messages": [USER]}).encode())
    headers = {"content-encoding": "gzip"}
    error = error_of(await house.ask("POST", "/v1/chat/completions", content=packed, headers=headers), 415)
    assert error["code"] == "unsupported_encoding" and "gzip" in error["message"]


async def test_a_body_beyond_all_reason_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.body.MAX_BODY_BYTES", 1000)
    error = error_of(await house.chat(user="x" * 2000), 413)
    assert error["code"] == "body_too_large" and "the limit is 1,000" in error["message"]
    assert int(error["message"].split()[3].replace(",", "")) > 2000, "what Content-Length says"


async def test_a_body_that_does_not_say_its_length_is_counted_while_it_is_read(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.body.MAX_BODY_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    error = error_of(await house.ask("POST", "/v1/completions", content=pieces()), 413)
    assert error["message"].startswith("The body has 1,100 bytes or more; the limit is 1,000.")


# Models, health, metrics


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/models", "/models/"])
async def test_the_model_list(house: House, path: str) -> None:
    body = (await house.ask("GET", path)).json()
    assert body["object"] == "list"
    loaded, other = body["data"]
    assert {**loaded, "created": 0} == {
        "id": "fake-model",
        "object": "model",
        "created": 0,
        "owned_by": "fireside",
        "state": "loaded",
        "status": {"value": "loaded"},
        "aliases": ["fake"],
        "max_model_len": 1000,
        "context_length": 1000,
    }
    assert other["context_length"] == 4096 and other["state"] == "unloaded"


async def test_one_model_also_with_a_slash_in_its_name(house: House) -> None:
    assert (await house.ask("GET", "/v1/models/owner/other-4bit")).json()["id"] == "owner/other-4bit"
    assert (await house.ask("GET", "/v1/models/Fake/")).json()["id"] == "fake-model", "an alias"
    assert error_of(await house.ask("GET", "/v1/models/none"), 404)["code"] == "model_not_found"


async def test_the_list_and_health_answer_while_a_model_loads(house: House) -> None:
    house.shelf.now = FakeHealth(state="loading", detail="reading weights")
    assert (await house.ask("GET", "/v1/models")).status_code == 200
    health = await house.ask("GET", "/health")
    assert health.status_code == 200 and health.json()["state"] == "loading"
    assert (await house.ask("GET", "/version")).json() == {"version": "1.2.3"}


async def metric(house: House, name: str, **labels: str) -> float:
    response = await house.ask("GET", "/metrics")
    families = text_string_to_metric_families(response.text)
    values = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    assert len(values) == 1, f"{name} {labels}: {values}"
    return float(values[0])


async def test_metrics_count_turns_by_their_end(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("Hello")))
    await house.chat()
    await house.chat(max_tokens=2)
    await house.chat(model="none")
    assert await metric(house, "fireside_request_success_total", finished_reason="stop") == 1
    assert await metric(house, "fireside_request_success_total", finished_reason="length") == 1
    assert await metric(house, "fireside_admission_rejections_total", reason="model_not_found") == 1
    assert await metric(house, "fireside_request_generation_tokens_sum") == 6 + 2
    assert await metric(house, "fireside_inter_token_latency_seconds_count") == 5 + 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert await metric(house, f"fireside_{name}_count") == 2
    assert await metric(house, "fireside_request_decode_time_seconds_sum") == 8.0


def test_latencies_for_people_count_each_token_in_one_bound() -> None:
    metrics = Metrics(lambda: None)
    for gap_s in (0.0005, 0.0015, 0.0016, 100.0):
        metrics.token(gap_s)
    counts = metrics.latencies()["inter_token"]
    assert [(bound, count) for bound, count in counts if count] == [(0.001, 1), (0.002, 2), (math.inf, 1)]


async def test_metrics_show_the_engines_own_numbers_and_zeros_without_one(house: House) -> None:
    assert await metric(house, "fireside_num_requests_running") == 0
    house.stats = EngineStats(
        num_requests_running=3, num_blocks_total=8, num_blocks_used=2, prefix_cache_hits=7, generation_tokens=9
    )
    assert await metric(house, "fireside_num_requests_running") == 3
    assert await metric(house, "fireside_kv_cache_usage_perc") == 0.25
    assert await metric(house, "fireside_prefix_cache_hits_total") == 7
    assert await metric(house, "fireside_generation_tokens_total") == 9


async def test_two_apps_in_one_process_count_apart(folder: Path) -> None:
    first, second = House(folder, Script()), House(folder, Script())
    await first.chat()
    assert await metric(first, "fireside_request_generation_tokens_sum") == 1
    assert await metric(second, "fireside_request_generation_tokens_sum") == 0


# The door


async def test_every_reply_has_a_request_id_and_a_clients_own_is_kept(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for method, path in (("GET", "/health"), ("GET", "/v1/nope"), ("POST", "/v1/chat/completions")):
        response = await house.ask(method, path, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
    forged = await house.ask("GET", "/health", headers={"x-request-id": "a b\tc"})
    assert forged.headers["x-request-id"] not in ("", "a b\tc")
    async with house.client(headers={"x-request-id": "mine-2"}) as client:
        await client.post("/v1/chat/completions", json={"messages": [USER]})
    lines = [record.getMessage() for record in caplog.records if "mine-2" in record.getMessage()]
    assert len(lines) == 1 and ": stop; model fake-model, prompt 21 tokens (4 cached), answer 6" in lines[0]
    assert any("mine-1: refused, invalid_json" in record.getMessage() for record in caplog.records)


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}


@pytest.mark.parametrize(
    "origin", ["http://localhost:5173", "http://127.0.0.1", "https://[::1]:8443", "app://obsidian.md"]
)
async def test_pages_of_this_machine_may_call(house: House, origin: str) -> None:
    response = await house.ask("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT | {"origin": origin})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    for path in ("/v1/models", "/v1/nope"):
        response = await house.ask("GET", path, headers={"origin": origin})
        assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://[bad"])
async def test_pages_of_elsewhere_may_not(house: House, origin: str) -> None:
    response = await house.ask("OPTIONS", "/v1/models", headers=PREFLIGHT | {"origin": origin})
    error_of(response, 403)
    assert "access-control-allow-origin" not in response.headers
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
        response = await house.ask(method, path, headers={"origin": origin})
        assert error_of(response, 403)["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


async def test_options_needs_no_origin_and_says_what_may_be_sent(house: House) -> None:
    for headers in ({}, {"origin": "http://localhost:5173"}):
        response = await house.ask("OPTIONS", "/v1/chat/completions", headers=headers)
        assert response.status_code == 204 and "POST" in response.headers["allow"]
        sent = response.headers["access-control-allow-headers"].lower()
        assert all(name in sent for name in ("authorization", "content-type", "x-api-key"))


async def test_a_page_that_we_served_ourselves_may_call_under_whatever_name(folder: Path) -> None:
    house = House(folder, Script(), hosts=frozenset({"nas.local"}))
    own = {"host": "nas.local:8000", "origin": "http://nas.local:8000"}
    assert (await house.ask("GET", "/v1/models", headers=own)).status_code == 200
    assert (await house.ask("GET", "/v1/models", headers=own | {"origin": "http://nas.local"})).status_code == 403


async def test_listed_pages_of_elsewhere_may_call(folder: Path) -> None:
    house = House(folder, Script(), origins=frozenset({"https://chat.example"}))
    for origin, status in (("https://chat.example", 204), ("https://chat.example.evil", 403)):
        response = await house.ask("OPTIONS", "/v1/models", headers=PREFLIGHT | {"origin": origin})
        assert response.status_code == status
    for origin in ("https://any.example", "null"):
        response = await House(folder, origins=frozenset({"*"})).ask("GET", "/v1/models", headers={"origin": origin})
        assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "", "[bad"])
async def test_an_unknown_host_is_refused_against_dns_rebinding(house: House, host: str) -> None:
    assert error_of(await house.ask("GET", "/v1/models", headers={"host": host}), 403)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("OPTIONS", "*", 204, None),
        ("PRI", "*", 404, "not_found"),
        ("BREW", "/v1/models", 405, "method_not_allowed"),
        ("BREW", "/v1/none", 405, "method_not_allowed"),
    ],
)
async def test_what_hardly_is_http_is_refused_as_all_else(
    house: House, method: str, path: str, status: int, code: str | None
) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}
    await house.app(scope, receive, send)
    assert sent[0]["status"] == status
    if code is not None:
        assert json.loads(sent[1]["body"])["error"]["code"] == code


async def test_a_request_of_http_1_0_needs_no_host(house: House) -> None:
    async with house.client() as client:
        request = client.build_request("GET", "/health")
        del request.headers["host"]
        assert (await client.send(request)).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1", "192.168.1.7:8000"])
async def test_loopback_names_are_let_in(house: House, host: str) -> None:
    assert (await house.ask("GET", "/health", headers={"host": host})).status_code == 200


async def test_a_star_lets_every_name_in(folder: Path) -> None:
    house = House(folder, Script(), hosts=frozenset({"*"}))
    assert (await house.ask("GET", "/health", headers={"host": "nas.local"})).status_code == 200


async def test_a_broken_route_is_a_500_in_our_shape_with_all_headers(house: House) -> None:
    @house.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret")

    response = await house.ask("GET", "/broken", headers={"host": "localhost", "origin": "http://localhost"})
    assert "secret" not in error_of(response, 500)["message"]
    assert response.headers["access-control-allow-origin"] == "http://localhost"


async def test_special_tokens_in_a_raw_prompt_reach_the_engine_as_tokens(house: House) -> None:
    await house.complete(prompt="a<|im_end|>")
    assert house.engine.submitted[0][1] == (*ids("a"), EOS)


async def test_the_schema_of_every_body_stands_alone(house: House) -> None:
    schema = (await house.ask("GET", "/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "stream_options" in body["properties"]
        assert "$ref" not in json.dumps(body)


# Log-probabilities


@pytest.fixture
def half_letters(folder: Path) -> House:
    """Its answer is "é!" and an end id; "é" comes in two tokens."""
    return House(folder, Script(token_ids=ids("é!")))


async def test_chat_logprobs_whole_and_streamed_have_an_entry_for_each_token(half_letters: House) -> None:
    body = (await half_letters.chat(logprobs=True, top_logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert set(logprobs) == {"content", "refusal"}
    assert len(logprobs["content"]) == body["usage"]["completion_tokens"] == 4
    first, *_, mark, end = logprobs["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.195)
    assert (mark["token"], mark["bytes"], end["token"]) == ("!", [0x21], "<|im_end|>")
    assert mark["top_logprobs"] == [
        {"token": "z", "logprob": -0.01, "bytes": [122]},
        {"token": "\ufffd", "logprob": -0.02, "bytes": [0xC3]},
    ]
    *chunks, _ = events(await half_letters.chat(logprobs=True, top_logprobs=2, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == logprobs["content"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "é!"


async def test_logprobs_are_null_unless_asked(half_letters: House) -> None:
    assert (await half_letters.chat()).json()["choices"][0]["logprobs"] is None
    assert (await half_letters.complete()).json()["choices"][0]["logprobs"] is None


async def test_completion_logprobs_of_an_echoed_prompt_begin_with_null(half_letters: House) -> None:
    asked = {"prompt": "aü", "echo": True, "logprobs": 1, "max_tokens": 3}
    choice = (await half_letters.complete(**asked)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aüé!"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["token_logprobs"] == [None, -0.195, -0.188, -0.195, -0.169, -0.033]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {"z": -0.01, "!": -0.033}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 3]
    *chunks, _ = events(await half_letters.complete(**asked, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [item for part in parts for item in part[name]] for name in logprobs} == logprobs


async def test_logprobs_up_to_a_stop_string_are_those_of_the_tokens_that_usage_counts(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("one END two")))
    body = (await house.complete(stop=" END", logprobs=0)).json()
    choice = body["choices"][0]
    assert choice["text"] == "one"
    assert choice["logprobs"]["tokens"] == list("one END")
    assert body["usage"]["completion_tokens"] == 7
    assert choice["logprobs"]["top_logprobs"][0] == {"o": -0.111}


async def test_stop_strings_wait_for_min_tokens(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids("a.b.c.d")))
    assert (await house.complete(stop=".", min_tokens=4)).json()["choices"][0]["text"] == "a.b.c"


# Answers of a given form


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_served_is_a_400_streamed_or_not(folder: Path, stream: bool) -> None:
    house = House(folder, Script(token_ids=ids("x"), error=BadRequest('Unimplemented keys: ["not"]')))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    error = error_of(await house.chat(response_format=form, stream=stream), 400)
    assert "not" in error["message"] and error["type"] == "invalid_request_error"


async def test_a_complete_grammar_is_a_stop_and_its_last_token_is_text(folder: Path) -> None:
    house = House(folder, Script(token_ids=ids('{"a":1}'), finish=FinishReason.GRAMMAR))
    choice = (await house.chat(response_format={"type": "json_object"})).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a":1}', "stop")
    assert house.engine.submitted[0][2].grammar == GrammarSpec(GrammarKind.JSON_OBJECT)


async def test_a_grammar_begins_after_the_thinking_that_the_prompt_has_opened(tmp_path: Path) -> None:
    opened = byte_model_folder(tmp_path, chat_template="{{ messages[0].content }}<think>\n")
    house = House(opened, Script(token_ids=ids('hm</think>{"a":1}'), finish=FinishReason.GRAMMAR))
    message = (await house.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a":1}')
    assert house.engine.submitted[0][2].grammar == GrammarSpec(GrammarKind.JSON_OBJECT, after="</think>")
