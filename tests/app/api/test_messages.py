"""Anthropic's dialect: what its requests mean, and the order and shape of its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import ModelInfo

from app.api.anthropic_wire import MessagesBody
from app.api.dialect import Answer
from app.api.messages import MessagesFormat
from app.chat.types import ChatDelta, ChatRequest, Message, NamedTool, ToolCall, ToolCallDelta, Usage
from app.errors import AppError
from engine.errors import EngineDied
from engine.types import GrammarKind, GrammarSpec
from tests.app.api.answers import assert_no_leak, named_events
from tests.app.api.house import USER, House
from tests.fakes import Script, byte_model_folder, ids

USAGE = Usage(prompt_tokens=30, completion_tokens=9, cached_tokens=12)
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script(token_ids=ids("<think>hm</think>Hello"), num_cached=4))


def asked(**body: Any) -> ChatRequest:
    return MessagesBody.model_validate({"messages": [USER]} | body).request("id")


async def send(house: House, **body: Any) -> Any:
    return await house.ask("POST", "/v1/messages", json={"model": "", "max_tokens": 50, "messages": [USER]} | body)


# Requests


def test_system_is_text_or_blocks_and_may_stand_among_the_messages() -> None:
    blocks = [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}]
    said = asked(system=blocks, messages=[USER, {"role": "system", "content": "C"}, {"role": "user", "content": "D"}])
    assert [(message.role, message.content) for message in said.messages] == [
        ("system", "A\nB"),
        ("user", "Hi"),
        ("system", "C"),
        ("user", "D"),
    ]
    assert asked(system="S").messages[0] == Message(role="system", content="S")
    assert asked(system=[]).messages == asked(system="").messages == asked().messages


@pytest.mark.parametrize("rest", ["", "You are a tool."])
def test_the_billing_line_that_changes_each_time_is_left_out(rest: str) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"
    for system in (f"{line}\n{rest}", [{"type": "text", "text": line}, {"type": "text", "text": rest}]):
        texts = [message.content for message in asked(system=system).messages if message.role == "system"]
        assert texts == [rest] * bool(rest)
    assert asked(system=f"{rest}\n{line}").messages[0].content.endswith(line), "only where it is the first"


def test_blocks_of_a_conversation_become_calls_results_and_thoughts() -> None:
    said = asked(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ä"}},
                    {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a dog"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "Well?"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "notes"}},
                ],
            },
        ],
        tools=[TOOL],
    )
    _, assistant, *results, last = said.messages
    calls = (ToolCall(id="t1", name="look", arguments='{"at": "ä"}'), ToolCall(id="t2", name="look", arguments="{}"))
    assert assistant == Message(role="assistant", content="Let me look.", reasoning_content="hm", tool_calls=calls)
    assert results == [
        Message(role="tool", content="a dog", tool_call_id="t1"),
        Message(role="tool", content="", tool_call_id="t2"),
    ]
    assert last == Message(role="user", content="Well?\nnotes")
    assert said.tools[0].parameters == TOOL["input_schema"] and not said.continue_final_message


def test_a_last_message_of_the_assistant_is_its_beginning() -> None:
    assert asked(messages=[USER, {"role": "assistant", "content": "Once"}]).continue_final_message


@pytest.mark.parametrize(
    ("choice", "meant", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, NamedTool("look"), True),
        ({"type": "none"}, "none", True),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", True),
        (None, "auto", True),
    ],
)
def test_tool_choices(choice: Any, meant: Any, parallel: bool) -> None:
    said = asked(tools=[TOOL], tool_choice=choice)
    assert (said.tool_choice, said.parallel_tool_calls) == (meant, parallel)


def test_what_the_answer_should_be_like() -> None:
    schema = {"type": "object"}
    body = MessagesBody.model_validate(
        {
            "messages": [USER],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0,
            "top_k": 3,
            "stop_sequences": ["a", ""],
            "output_format": {"type": "json_schema", "schema": schema},
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "u"},
            "betas": ["x"],
        }
    )
    options = body.sampling()
    assert (options.max_tokens, options.temperature, options.top_p, options.top_k) == (7, 0.0, None, 3)
    assert options.stop == ("a",)
    assert options.grammar == GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert body.request("id").reasoning_effort == "none"
    assert asked(thinking={"type": "enabled", "budget_tokens": 2000}).reasoning_effort is None
    assert asked(output_config={"effort": "max"}).reasoning_effort == "xhigh"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "is a block of type image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 3}]}]}, "content[0].id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 100_000}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs on Anthropic's servers alone"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "bash_20250124, a tool that Fireside does not support yet",
        ),
        ({"tools": [{"type": "text_editor_20250728", "name": "edit"}]}, "does not support yet"),
        ({"tools": [{"name": 3}]}, "tools[0].name"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice.type"),
        ({"output_format": {"type": "xml"}}, "output_format"),
        ({"system": 3}, "system"),
        ({"model": "nope"}, "nope"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_cannot_be_served_is_an_error_of_anthropics_shape(
    house: House, body: dict[str, Any], words: str, path: str
) -> None:
    if path.endswith("count_tokens") and {"max_tokens", "temperature", "stop_sequences", "output_format"} & set(body):
        return
    reply = await house.ask("POST", path, json={"max_tokens": 9, "messages": [USER]} | body)
    said = reply.json()
    assert reply.status_code == (404 if "model" in body else 400), said
    assert said["type"] == "error" and set(said["error"]) == {"type", "message", "code"}
    assert said["error"]["type"] == ("not_found_error" if "model" in body else "invalid_request_error")
    assert words in said["error"]["message"] and len(said["error"]["message"]) < 500
    assert_no_leak(said["error"]["message"])


# Models


async def models(house: House, path: str = "", **query: Any) -> Any:
    return await house.ask("GET", f"/v1/models{path}", headers={"anthropic-version": "2023-06-01"}, params=query)


async def test_models_have_anthropics_shape_for_who_speaks_it(house: House) -> None:
    said = (await models(house)).json()
    assert [item["id"] for item in said["data"]] == ["fake-model", "owner/other-4bit"]
    assert (said["has_more"], said["first_id"], said["last_id"]) == (False, "fake-model", "owner/other-4bit")
    for item in said["data"]:
        read = ModelInfo.model_validate(item)
        assert (read.type, read.display_name, read.created_at.tzinfo is not None) == ("model", item["id"], True)
    assert said["data"][1] == (await models(house, "/owner/other-4bit")).json()
    assert (await house.ask("GET", "/v1/models")).json()["object"] == "list"


async def test_models_come_in_pages(house: House) -> None:
    first = (await models(house, limit=1)).json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (["fake-model"], True)
    second = (await models(house, limit=1, after_id=first["last_id"])).json()
    assert ([item["id"] for item in second["data"]], second["has_more"]) == (["owner/other-4bit"], False)
    assert (await models(house, before_id="owner/other-4bit")).json()["data"] == first["data"]
    end = (await models(house, after_id="owner/other-4bit")).json()
    assert end == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("path", "query", "status", "words"),
    [
        ("/nope", {}, 404, "nope"),
        ("", {"limit": 0}, 400, "limit"),
        ("", {"after_id": "nope"}, 400, "after_id"),
        ("", {"after_id": "fake-model", "before_id": "fake-model"}, 400, "before_id"),
    ],
)
async def test_refusals_about_models_have_anthropics_shape(
    house: House, path: str, query: Any, status: int, words: str
) -> None:
    reply = await models(house, path, **query)
    assert reply.status_code == status and reply.json()["type"] == "error"
    assert words in reply.json()["error"]["message"]


# Answers


async def test_a_whole_message(house: House) -> None:
    said = (await send(house)).json()
    assert said["id"].startswith("msg_") and (said["type"], said["role"]) == ("message", "assistant")
    assert said["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hello"},
    ]
    assert (said["model"], said["stop_reason"], said["stop_sequence"]) == ("fake-model", "end_turn", None)
    prompt = len("*user\nHi*\n*assistant\n")
    assert said["usage"]["input_tokens"] == prompt - 4 and said["usage"]["cache_read_input_tokens"] == 4
    assert (await send(house, max_tokens=3)).json()["stop_reason"] == "max_tokens"
    stopped = (await send(house, stop_sequences=["zzz", "llo"])).json()
    assert stopped["content"][-1]["text"] == "He"


async def test_a_streamed_message_begins_continues_and_ends_each_block_in_turn(house: House) -> None:
    told = named_events(await send(house, stream=True))
    begun = told[0][1]["message"]
    assert begun["content"] == [] and begun["usage"] == {"input_tokens": 21, "output_tokens": 0}
    names = [name for name, _ in told]
    unique = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert unique == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    starts = [data for name, data in told if name == "content_block_start"]
    assert [(data["index"], data["content_block"]["type"]) for data in starts] == [(0, "thinking"), (1, "text")]
    deltas = [data["delta"] for name, data in told if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "Hello"
    last = told[-2][1]
    assert last["delta"]["stop_reason"] == "end_turn" and last["usage"]["output_tokens"] == 23


CALLS = [
    ChatDelta(text="I look."),
    ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c0", name="look"),)),
    ChatDelta(tool_calls=(ToolCallDelta(index=0, arguments='{"at":'), ToolCallDelta(index=0, arguments=" 1}"))),
    ChatDelta(tool_calls=(ToolCallDelta(index=1, id="c1", name="rest"),)),
    ChatDelta(finish_reason="tool_calls", usage=USAGE),
]


def test_calls_are_blocks_of_their_own_whole_and_streamed() -> None:
    dialect, answer = MessagesFormat("m"), Answer()
    frames: list[bytes] = []
    for delta in CALLS:
        answer.add(delta)
        frames += dialect.piece(0, delta)
    data = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    assert [(item["type"], item.get("index")) for item in data] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
    ]
    assert data[4]["content_block"] == {"type": "tool_use", "id": "c0", "name": "look", "input": {}}
    assert data[-1]["delta"]["stop_reason"] == "tool_use"
    assert data[-1]["usage"] == {
        "input_tokens": 18,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 12,
        "output_tokens": 9,
    }
    whole = MessagesFormat("m").whole([answer])
    assert whole["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c0", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "c1", "name": "rest", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"


def test_a_whole_message_has_its_blocks_in_the_order_of_the_stream() -> None:
    dialect, answer = MessagesFormat("m"), Answer()
    calls = [ToolCallDelta(index=0, id="c0", name="look"), ToolCallDelta(index=1, id="c1", name="rest")]
    begun = []
    for delta in (
        ChatDelta(tool_calls=(calls[0],)),
        ChatDelta(text="Now"),
        ChatDelta(text=" this."),
        ChatDelta(tool_calls=(calls[1],)),
        ChatDelta(text="Done.", finish_reason="tool_calls", usage=USAGE),
    ):
        answer.add(delta)
        frames = [json.loads(frame.split(b"data: ")[1]) for frame in dialect.piece(0, delta)]
        begun += [frame["content_block"]["type"] for frame in frames if frame["type"] == "content_block_start"]
    whole = MessagesFormat("m").whole([answer])["content"]
    assert [block["type"] for block in whole] == begun == ["tool_use", "text", "tool_use", "text"]
    assert [block.get("text") for block in whole] == [None, "Now this.", None, "Done."]


def test_a_call_that_was_cut_short_keeps_its_words() -> None:
    answer = Answer()
    answer.add(ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c", name="look", arguments='{"at": "no'),)))
    answer.add(ChatDelta(finish_reason="length", usage=USAGE))
    said = MessagesFormat("m").whole([answer])
    assert said["content"][0]["input"] == {"arguments": '{"at": "no'} and said["stop_reason"] == "max_tokens"


def test_the_stop_sequence_that_was_met_is_told() -> None:
    answer = Answer()
    answer.add(ChatDelta(text="x", finish_reason="stop", stop_reason="END", usage=USAGE))
    said = MessagesFormat("m").whole([answer])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "END")


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(folder: Path) -> None:
    script = Script(token_ids=ids("abcd"), error=EngineDied("gone"), error_at=2, pause_s=0.15)
    told = named_events(await send(House(folder, script), stream=True))
    name, data = told[-1]
    assert name == "error" and data["error"]["type"] == "overloaded_error" and "gone" in data["error"]["message"]
    assert "message_stop" not in [name for name, _ in told]


def test_silence_is_a_ping() -> None:
    dialect = MessagesFormat("m")
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert b"message_start" in dialect.keep_alive(), "before which nothing may come"
    assert list(dialect.piece(0, ChatDelta())) == [dialect.keep_alive()] == [ping]


async def test_tokens_are_counted_as_the_message_would_have_them(house: House) -> None:
    used = (await send(house)).json()["usage"]
    counted = (await house.ask("POST", "/v1/messages/count_tokens", json={"messages": [USER]})).json()
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_refusals_keep_their_status() -> None:
    for status, kind in (
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (500, "api_error"),
        (413, "request_too_large"),
    ):
        reply = MessagesFormat("m").refusal(AppError(status, "x", "y"))
        assert reply.status_code == status and json.loads(bytes(reply.body))["error"]["type"] == kind
