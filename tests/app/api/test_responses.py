"""OpenAI's newer endpoint: what its requests mean, and the order and shape of its answers."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from app.api.dialect import Answer
from app.api.responses import ResponsesFormat
from app.api.responses_wire import ResponsesBody
from app.chat.types import ChatDelta, ChatRequest, Message, NamedTool, ToolCall, ToolCallDelta, Usage
from engine.errors import EngineDied
from engine.types import FinishReason, GrammarKind
from tests.app.api.answers import error_of, named_events
from tests.app.api.house import House
from tests.fakes import Script, byte_model_folder, ids

USAGE = Usage(prompt_tokens=30, completion_tokens=9, cached_tokens=12)
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script(token_ids=ids("<think>hm</think>Hello"), num_cached=4))


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": "Hi"} | fields)


def asked(**fields: Any) -> ChatRequest:
    return body(**fields).request("id")


async def send(house: House, **fields: Any) -> Any:
    return await house.ask("POST", "/v1/responses", json={"model": "", "input": "Hi"} | fields)


# Requests


def test_input_is_a_text_or_items_and_instructions_come_first() -> None:
    assert asked(instructions="Be brief.").messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
    )
    items = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "C"},
    ]
    assert [message.role for message in asked(input=items).messages] == ["system", "system", "user"]


def test_what_an_assistant_did_in_one_go_is_one_message() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": "fc", "call_id": "c0", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":1}'},
        {"type": "function_call_output", "call_id": "c0", "output": "a dog"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a cat"}]},
    ]
    said = asked(input=items)
    calls = (ToolCall(id="c0", name="look", arguments="{}"), ToolCall(id="c1", name="look", arguments='{"at":1}'))
    assert said.messages[1:] == (
        Message(role="assistant", content="I look.", reasoning_content="hm", tool_calls=calls),
        Message(role="tool", content="a dog", tool_call_id="c0"),
        Message(role="tool", content="a cat", tool_call_id="c1"),
    )
    assert not said.continue_final_message
    assert asked(input=[{"role": "assistant", "content": "Once"}]).continue_final_message
    two = asked(input=[{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]).messages
    assert len(two) == 2, "two turns of the assistant stay two"


def test_tools_choices_effort_and_form() -> None:
    said = asked(
        tools=[TOOL, {"type": "web_search"}],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        max_output_tokens=7,
        top_p=0,
    )
    (tool,) = said.tools
    assert (tool.name, tool.parameters, tool.is_strict) == ("look", {"type": "object", "properties": {}}, True)
    assert (said.tool_choice, said.parallel_tool_calls) == (NamedTool("look"), False)
    assert said.reasoning_effort == "low" and said.sampling.max_tokens == 7 and said.sampling.temperature == 0.0
    grammar = said.sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA and json.loads(grammar.text)["type"]
    assert asked(text={"format": {"type": "text"}}).sampling.grammar is None
    assert asked(tool_choice="required", tools=[TOOL]).tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": ["x"]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "x"}]}, "input[0].arguments"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "middle"}, "truncation"),
        ({"truncation": 3}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"effort": ["low"]}}, "reasoning.effort"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "custom", "name": "patch"}]}, "tools[1]"),
        ({"tools": [{"type": "web_search_preview"}, {"type": "local_shell"}]}, "tools[1]"),
        ({"tools": [{"type": "shell"}]}, "tools[0]"),
        ({"tools": [{"name": "look"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "x", "parameters": 3}]}, "tools[0].function.parameters"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_the_place(
    house: House, fields: dict[str, Any], param: str
) -> None:
    assert error_of(await send(house, **fields), 400)["param"] == param
    assert not house.engine.submitted


async def test_tools_that_run_at_the_client_are_refused_by_name(house: House) -> None:
    error = error_of(await send(house, tools=[{"type": "custom", "name": "patch"}]), 400)
    assert error["code"] == "unsupported_tool" and "patch" in error["message"] and "custom" in error["message"]


async def test_nulls_and_fields_of_the_client_alone_change_nothing(house: House) -> None:
    empty = {
        name: None for name in ("instructions", "tools", "tool_choice", "text", "reasoning", "metadata", "include")
    }
    ignored = {"store": True, "user": "u", "prompt_cache_key": "k", "truncation": "disabled", "include": []}
    for fields in (empty, ignored):
        assert (await send(house, **fields)).status_code == 200
    assert error_of(await send(house, model="nope"), 404)["code"] == "model_not_found"


# Answers


async def test_a_whole_response(house: House) -> None:
    said = (await send(house, metadata={"a": 1}, instructions="Be brief.")).json()
    assert said["id"].startswith("resp_") and (said["object"], said["status"]) == ("response", "completed")
    thinking, message = said["output"]
    assert (thinking["type"], thinking["content"][0]["text"], thinking["summary"]) == ("reasoning", "hm", [])
    assert (message["type"], message["role"], message["content"][0]["text"]) == ("message", "assistant", "Hello")
    assert said["usage"]["input_tokens_details"] == {"cached_tokens": 4} and said["usage"]["output_tokens"] == 23
    assert said["usage"]["output_tokens_details"] == {"reasoning_tokens": len(">hm</think")}
    assert (said["store"], said["previous_response_id"], said["metadata"]) == (False, None, {"a": "1"})
    cut = (await send(house, max_output_tokens=20)).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]


async def test_a_streamed_response_adds_continues_and_finishes_each_item_in_turn(house: House) -> None:
    told = named_events(await send(house, stream=True))
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    names = [name.removeprefix("response.") for name, _ in told]
    unique = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    item = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert unique == [
        *("created", "in_progress"),
        *(step.format("reasoning_text") for step in item),
        *(step.format("output_text") for step in item),
        "completed",
    ]
    whole = told[-1][1]["response"]
    done = [data["item"] for name, data in told if name == "response.output_item.done"]
    assert whole["output"] == done and whole["id"] == told[0][1]["response"]["id"]
    text = "".join(data["delta"] for name, data in told if name == "response.output_text.delta")
    assert text == "Hello" == whole["output"][1]["content"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2)],
)
async def test_each_token_of_the_text_has_its_log_probability_whole_and_streamed(
    house: House, fields: dict[str, Any], num_top: int
) -> None:
    whole = (await send(house, **fields)).json()["output"][1]["content"][0]["logprobs"]
    told = named_events(await send(house, stream=True, **fields))
    assert "".join(entry["token"] for entry in whole) == "Hello"
    assert all(len(entry["top_logprobs"]) == num_top and entry["logprob"] < 0 for entry in whole)
    deltas = [data["logprobs"] for name, data in told if name == "response.output_text.delta"]
    (done,) = [data["logprobs"] for name, data in told if name == "response.output_text.done"]
    assert [entry for delta in deltas for entry in delta] == whole == done
    assert told[-1][1]["response"]["output"][1]["content"][0]["logprobs"] == whole


def test_calls_are_items_of_their_own_whole_and_streamed() -> None:
    dialect, answer = ResponsesFormat(body(tools=[TOOL]), "m"), Answer()
    frames: list[bytes] = list(dialect.opening())
    for delta in (
        ChatDelta(text="I look."),
        ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c0", name="look"),)),
        ChatDelta(tool_calls=(ToolCallDelta(index=0, arguments='{"at":'), ToolCallDelta(index=0, arguments=" 1}"))),
        ChatDelta(tool_calls=(ToolCallDelta(index=1, id="c1", name="look"),)),
        ChatDelta(finish_reason="tool_calls", usage=USAGE),
    ):
        answer.add(delta)
        frames += dialect.piece(0, delta)
    frames += dialect.closing()
    data = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    calls = [item for item in data if item["type"].startswith("response.function_call")]
    assert [item.get("delta") or item["arguments"] for item in calls] == ['{"at":', " 1}", '{"at": 1}', "{}"]
    streamed, whole = data[-1]["response"], ResponsesFormat(body(), "m").whole([answer])
    for said in (streamed, whole):
        assert [item["type"] for item in said["output"]] == ["message", "function_call", "function_call"]
        first, second = said["output"][1:]
        assert (first["call_id"], first["name"], first["arguments"]) == ("c0", "look", '{"at": 1}')
        assert second["arguments"] == "{}" and second["status"] == "completed"
    added = [item["item"] for item in data if item["type"] == "response.output_item.added"]
    assert added[1]["arguments"] == "" and added[1]["id"] == streamed["output"][1]["id"]


@pytest.mark.parametrize(
    ("arguments", "status"), [('{"at": 1}', "completed"), ('{"at": ', "incomplete"), ("", "incomplete")]
)
def test_a_whole_call_is_completed_where_what_came_after_it_was_cut(arguments: str, status: str) -> None:
    dialect, answer = ResponsesFormat(body(tools=[TOOL]), "m"), Answer()
    frames: list[bytes] = []
    for delta in (
        ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c0", name="look", arguments=arguments),)),
        ChatDelta(finish_reason="length", usage=USAGE),
    ):
        answer.add(delta)
        frames += dialect.piece(0, delta)
    frames += dialect.closing()
    streamed = json.loads(frames[-1].split(b"data: ")[1])["response"]
    for said in (streamed, ResponsesFormat(body(), "m").whole([answer])):
        assert said["status"] == "incomplete"
        assert [item["status"] for item in said["output"]] == [status]


def test_a_whole_response_has_its_items_in_the_order_of_the_stream() -> None:
    dialect, answer = ResponsesFormat(body(tools=[TOOL]), "m"), Answer()
    for delta in (
        ChatDelta(tool_calls=(ToolCallDelta(index=0, id="c0", name="look"),)),
        ChatDelta(text="Done."),
        ChatDelta(finish_reason="tool_calls", usage=USAGE),
    ):
        answer.add(delta)
        assert list(dialect.piece(0, delta)) or delta.finish_reason
    last = json.loads(list(dialect.closing())[-1].split(b"data: ")[1])["response"]
    for said in (last, ResponsesFormat(body(), "m").whole([answer])):
        assert [item["type"] for item in said["output"]] == ["function_call", "message"]


async def test_a_failure_in_mid_stream_is_a_failed_response(folder: Path) -> None:
    script = Script(token_ids=ids("abcd"), error=EngineDied("gone"), error_at=2, pause_s=0.15)
    name, data = named_events(await send(House(folder, script), stream=True))[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed"
    assert data["response"]["error"]["code"] == "engine_died"


# OpenAI's own package


async def test_openais_package_reads_whole_streamed_and_parsed_responses(house: House) -> None:
    class Name(BaseModel):
        name: str

    async with (
        house.client() as http,
        openai.AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="none", http_client=http) as client,
    ):
        whole = await client.responses.create(model="fake-model", input="Hi", instructions="Be brief.")
        assert whole.output_text == "Hello" and whole.usage is not None and whole.usage.output_tokens == 23
        async with client.responses.stream(
            model="fake-model", input=[{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}]
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Hello" and kinds[-1] == "response.completed"
        house.engine.script = Script(token_ids=ids('{"name":"Ada"}'), finish=FinishReason.GRAMMAR)
        parsed = await client.responses.parse(model="fake-model", input="Who?", text_format=Name)
        assert parsed.output_parsed == Name(name="Ada")
        grammar = house.engine.submitted[-1][2].grammar
        assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await client.responses.create(model="fake-model", input="Hi", previous_response_id="resp_1")
