"""Ollama's dialect: what its requests mean, and the lines of its answers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.dialect import Answer
from app.api.keys import ApiKey, Keyring, digest_of
from app.api.ollama import OllamaChat
from app.api.ollama_wire import ChatBody, GenerateBody
from app.chat.types import ChatDelta, ChatRequest, CompletionRequest, FillIn, Message, ToolCall, ToolCallDelta, Usage
from engine.errors import EngineDied
from engine.types import GrammarKind, GrammarSpec
from tests.app.api.answers import assert_no_leak
from tests.app.api.house import USER, House
from tests.fakes import FakeHealth, Script, byte_model_folder, ids

USAGE = Usage(prompt_tokens=30, completion_tokens=9, cached_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script(token_ids=ids("<think>hm</think>Hello"), num_cached=4))


def lines(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def chat(house: House, **body: Any) -> httpx.Response:
    return await house.ask("POST", "/api/chat", json={"model": "fake-model", "messages": [USER]} | body)


# Discovery, loading and unloading


async def test_nothing_to_answer_loads_or_with_keep_alive_0_unloads(house: House) -> None:
    for path, body in (("chat", {"messages": []}), ("generate", {})):
        house.shelf.now, house.shelf.asked = FakeHealth(), []
        for keep, reason, asked in ((300, "load", []), ("0s", "unload", ["unload fake-model"]), (0, "unload", [])):
            sent = body | {"model": "fake-model:latest", "keep_alive": keep}
            told = (await house.ask("POST", f"/api/{path}", json=sent)).json()
            assert (told["done"], told["done_reason"]) == (True, reason)
            assert house.shelf.asked == asked
            house.shelf.asked = []
    missing = await house.ask("POST", "/api/generate", json={"model": "none", "keep_alive": 0})
    assert missing.status_code == 404


async def test_only_an_admin_unloads(folder: Path) -> None:
    words = "user-words-1"
    house = House(folder, keys=Keyring([ApiKey("u", digest_of(words))]))
    sent = {"model": "fake-model", "keep_alive": 0}
    refused = await house.ask("POST", "/api/generate", json=sent, headers={"api-key": words})
    assert refused.status_code == 403 and house.shelf.asked == []


async def test_its_clients_find_version_models_and_what_they_can(house: House) -> None:
    major, minor, patch = map(int, (await house.ask("GET", "/api/version")).json()["version"].split("."))
    assert (major, minor, patch) >= (0, 6, 4)
    loaded, other = (await house.ask("GET", "/api/tags")).json()["models"]
    assert loaded["name"] == loaded["model"] == "fake-model" and len(loaded["digest"]) == 64
    assert other["size"] == 5_000_000_000 and loaded["modified_at"] == "2023-11-14T22:13:20Z"
    (running,) = (await house.ask("GET", "/api/ps")).json()["models"]
    assert (running["name"], running["context_length"]) == ("fake-model", 1000)
    for name in ("fake-model", "fake-model:latest", "fake"):
        shown = (await house.ask("POST", "/api/show", json={"model": name})).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == 1000
    other = (await house.ask("POST", "/api/show", json={"name": "owner/other-4bit"})).json()
    assert other["capabilities"] == ["completion", "tools", "thinking"]
    missing = await house.ask("POST", "/api/show", json={"model": "none"})
    assert missing.status_code == 404 and isinstance(missing.json()["error"], str)


# Requests


def asked(**body: Any) -> ChatRequest:
    return ChatBody.model_validate({"model": "x:latest", "messages": [USER]} | body).request("id")


def test_options_are_those_of_sampling_and_the_rest_is_left_alone() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_p": 0, "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1}
    options |= {"seed": 4, "stop": ["a"], "num_ctx": 4096, "num_gpu": 99, "mirostat": 2}
    said = asked(options=options, keep_alive="5m", think="low")
    sampling = said.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, None, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed, sampling.stop) == (0.1, 1.1, 4, ("a",))
    assert (said.model, said.reasoning_effort) == ("x", "low")
    for num_predict in (-1, -2, None):
        assert asked(options={"num_predict": num_predict}).sampling.max_tokens is None
    assert asked(think=False).reasoning_effort == "none" and asked(think=True).reasoning_effort is None


def test_forms_of_the_answer() -> None:
    schema = {"type": "object"}
    assert asked(format="json").sampling.grammar == GrammarSpec(GrammarKind.JSON_OBJECT)
    assert asked(format=schema).sampling.grammar == GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert asked(format="").sampling.grammar is asked().sampling.grammar is None


def test_results_of_tools_find_their_calls_by_name() -> None:
    def call(name: str) -> Any:
        return {"function": {"name": name, "arguments": {"at": 1}}}

    said = asked(
        messages=[
            USER,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call("look"), call("hear")]},
            {"role": "tool", "tool_name": "hear", "content": "woof"},
            {"role": "tool", "content": "a dog"},
            {"role": "assistant", "content": "", "tool_calls": [call("look")]},
            {"role": "tool", "tool_name": "look", "content": "a cat"},
        ]
    ).messages
    first, second = said[1].tool_calls
    assert first == ToolCall(id=first.id, name="look", arguments='{"at": 1}') and said[1].reasoning_content == "hm"
    assert (said[2].tool_call_id, said[3].tool_call_id) == (second.id, first.id)
    assert said[5].tool_call_id == said[4].tool_calls[0].id
    assert len({first.id, second.id, said[4].tool_calls[0].id}) == 3


def test_generate_is_a_turn_or_a_raw_text_or_a_gap() -> None:
    def generate(**body: Any) -> ChatRequest | CompletionRequest:
        return GenerateBody.model_validate({"model": "x", "prompt": "Hi"} | body).request("id")

    turn = generate(system="Be brief.")
    assert isinstance(turn, ChatRequest)
    assert turn.messages == (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    raw, gap = generate(raw=True), generate(suffix="end")
    assert isinstance(raw, CompletionRequest) and raw.prompt == "Hi"
    assert isinstance(gap, CompletionRequest) and gap.prompt == FillIn("Hi", "end")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [3]}, "messages[0]"),
        ("chat", {"messages": [USER | {"images": ["aGk="]}]}, "messages[0].content[1]"),
        ("chat", {"messages": [USER], "options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"messages": [USER], "options": {"num_predict": 0}}, "options.num_predict"),
        ("chat", {"messages": [USER], "format": "xml"}, "format"),
        ("chat", {"messages": [USER], "format": 3}, "format"),
        ("chat", {"messages": [USER], "think": "hard"}, "think"),
        ("chat", {"messages": [USER], "think": []}, "think"),
        ("chat", {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0]"),
        ("chat", {"messages": [USER], "tools": {"a": 1}}, "tools"),
        ("generate", {"prompt": 3}, "prompt"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("chat", {"messages": [USER], "logprobs": True}, "`logprobs` is not supported"),
        ("generate", {"prompt": "x", "logprobs": True, "top_logprobs": 2}, "`logprobs` is not supported"),
        ("show", {"model": 3}, "model"),
        ("show", {}, "`model` is missing"),
        ("nope", {}, "/api/nope"),
    ],
)
async def test_what_cannot_be_served_is_an_error_of_ollamas_shape(
    house: House, path: str, body: dict[str, Any], words: str
) -> None:
    reply = await house.ask("POST", f"/api/{path}", json=body)
    assert reply.status_code == (404 if path == "nope" else 400), reply.text
    assert set(reply.json()) == {"error"} and words in reply.json()["error"]
    assert_no_leak(reply.json()["error"])
    assert not house.engine.submitted


# Answers


async def test_a_whole_chat(house: House) -> None:
    said = (await chat(house, stream=False)).json()
    assert said["message"] == {"role": "assistant", "content": "Hello", "thinking": "hm"}
    assert (said["model"], said["done"], said["done_reason"]) == ("fake-model", True, "stop")
    assert (said["prompt_eval_count"], said["eval_count"]) == (21, 23)
    assert (said["prompt_eval_duration"], said["eval_duration"]) == (2_000_000_000, 4_000_000_000)
    assert said["total_duration"] > 0 and said["created_at"].endswith("Z")
    assert (await chat(house, stream=False, options={"num_predict": 3})).json()["done_reason"] == "length"


async def test_a_chat_is_streamed_unless_that_is_not_wanted(house: House) -> None:
    *pieces, last = lines(await chat(house))
    assert [piece["done"] for piece in pieces] == [False] * len(pieces) and last["done"]
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello"
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == "hm"
    assert last["message"]["content"] == "" and last["eval_count"] == 23


async def test_generate_whole_and_streamed(house: House) -> None:
    body = {"model": "fake-model:latest", "prompt": "Hi"}
    said = (await house.ask("POST", "/api/generate", json=body | {"stream": False})).json()
    assert (said["response"], said["thinking"], said["done"]) == ("Hello", "hm", True)
    *pieces, last = lines(await house.ask("POST", "/api/generate", json=body))
    assert "".join(piece["response"] for piece in pieces) == "Hello" and last["done"]
    raw = (await house.ask("POST", "/api/generate", json=body | {"raw": True, "stream": False})).json()
    assert raw["response"] == "<think>hm</think>Hello" and house.engine.submitted[-1][1] == ids("Hi")


async def test_nothing_to_answer_loads_the_model(house: House) -> None:
    for path, body in (("chat", {"messages": []}), ("chat", {}), ("generate", {}), ("generate", {"prompt": ""})):
        said = (await house.ask("POST", f"/api/{path}", json={"model": "fake-model"} | body)).json()
        assert (said["done"], said["done_reason"]) == (True, "load")
    assert not house.engine.submitted
    assert (await house.ask("POST", "/api/chat", json={"model": "none"})).status_code == 404


def test_calls_are_sent_whole() -> None:
    dialect, answer, told = OllamaChat("m"), Answer(), []
    for delta in (
        ChatDelta(text="I look."),
        ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c0", name="look"),)),
        ChatDelta(tool_calls=(ToolCallDelta(index=0, arguments='{"at":'), ToolCallDelta(index=0, arguments=" 1}"))),
        ChatDelta(tool_calls=(ToolCallDelta(index=1, id="c1", name="hear"),)),
        ChatDelta(finish_reason="tool_calls", usage=USAGE),
    ):
        answer.add(delta)
        told += [json.loads(line) for line in dialect.piece(0, delta)]
    calls = [[call["function"] for call in line["message"].get("tool_calls", [])] for line in told]
    look, hear = {"name": "look", "arguments": {"at": 1}}, {"name": "hear", "arguments": {}}
    assert calls == [[], [look], [hear], []]
    assert (told[-1]["done"], told[-1]["done_reason"]) == (True, "stop")
    whole = OllamaChat("m").whole([answer])["message"]
    assert [call["function"] for call in whole["tool_calls"]] == [look, hear] and whole["content"] == "I look."


async def test_a_failure_in_mid_stream_is_a_line_with_the_error(folder: Path) -> None:
    script = Script(token_ids=ids("abcd"), error=EngineDied("gone"), error_at=2, pause_s=0.15)
    *pieces, last = lines(await chat(House(folder, script)))
    assert "gone" in last["error"] and not any(piece["done"] for piece in pieces)


def test_silence_is_no_line_and_then_an_empty_piece() -> None:
    dialect = OllamaChat("m")
    assert dialect.keep_alive() == b""
    (line,) = dialect.piece(0, ChatDelta())
    assert json.loads(line)["message"] == {"role": "assistant", "content": ""}
