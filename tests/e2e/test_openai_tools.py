"""Tools, forms and thinking through the openai package over a scripted engine: what its helpers make of our chunks."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from engine.errors import BadGrammar
from engine.types import FinishReason, GrammarKind
from tests.app.api.house import USER, House
from tests.clients.scenes import TEMPLATE, call
from tests.e2e.test_streams import openai_client, until
from tests.fakes import Script, byte_model_folder, ids, model_info

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("tool-model"), chat_template=TEMPLATE)


def house(folder: Path, text: str, **script: Any) -> House:
    house = House(folder, Script(token_ids=ids(text), **script))
    house.source.model.info = model_info(max_model_len=4000)
    return house


async def test_calls_are_put_together_by_the_clients_stream_helper(folder: Path) -> None:
    text = f"<think>two</think>Let me see.\n{call('Paris')}\n{call('Rome')}"
    async with (
        openai_client(house(folder, text)) as client,
        client.chat.completions.stream(model="", messages=[USER], tools=[WEATHER]) as stream,
    ):
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER])).choices[0]
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = choice.message.tool_calls or []
        assert [c.function.name for c in calls if c.type == "function"] == ["get_weather"] * 2  # type: ignore[union-attr]
        assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Paris"}, {"city": "Rome"}]  # type: ignore[union-attr]
        assert len({c.id for c in calls}) == 2


async def test_a_streamed_call_has_its_id_type_and_name_once_and_index_always(folder: Path) -> None:
    async with openai_client(house(folder, f"{call('Paris')}\n{call('Rome')}")) as client:
        stream = await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    pieces = [piece for choice in chunks for piece in choice.delta.tool_calls or []]
    heads = [piece for piece in pieces if piece.id is not None]
    assert [(head.index, head.type, head.function.name) for head in heads if head.function] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert all(piece.type is None and piece.function.name is None for piece in pieces if piece not in heads)  # type: ignore[union-attr]
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["tool_calls"]
    assert not any(choice.delta.content for choice in chunks)


async def test_a_reply_with_calls_alone_has_no_content(folder: Path) -> None:
    async with openai_client(house(folder, call("Paris"))) as client:
        message = (await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER])).choices[0].message
    assert message.content is None and message.tool_calls


async def test_a_call_cut_by_max_tokens_is_not_lost_and_says_length(folder: Path) -> None:
    text = call("Paris")
    async with openai_client(house(folder, text)) as client:
        for cut, content in ((20, text[:20]), (60, None)):
            answer = await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], max_tokens=cut)
            choice = answer.choices[0]
            assert (choice.finish_reason, choice.message.content) == ("length", content)
            assert bool(choice.message.tool_calls) is (content is None)


async def test_without_parallel_calls_the_answer_ends_with_the_first_and_is_aborted(folder: Path) -> None:
    home = house(folder, f"{call('Paris')}\n{call('Rome')}")
    async with openai_client(home) as client:
        answer = await client.chat.completions.create(
            model="", messages=[USER], tools=[WEATHER], parallel_tool_calls=False
        )
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) == 1 and answer.choices[0].finish_reason == "tool_calls"
    assert len(home.engine.aborted) == 1


async def test_a_forced_call_is_enforced_by_a_grammar_and_none_by_one_too(folder: Path) -> None:
    home = house(folder, call("Paris"))
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with openai_client(home) as client:
        for choice in ("required", named, "none", "auto"):
            await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match="names 'other'"):
            other: Any = {"type": "function", "function": {"name": "other"}}
            await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], tool_choice=other)
    grammars = [params.grammar for _, _, params in home.engine.submitted]
    required, by_name, none, auto = grammars
    assert required is not None and by_name is not None and none is not None and auto is None
    assert required.kind is by_name.kind is none.kind is GrammarKind.NATIVE
    assert "get_weather" in required.text and ")*" in required.text and ")*" not in by_name.text
    assert "<tool_call>" in none.text and "get_weather" not in none.text


async def test_with_none_a_call_stays_text(folder: Path) -> None:
    async with openai_client(house(folder, call("Paris"))) as client:
        answer = await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], tool_choice="none")
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", call("Paris"))


async def test_tools_calls_and_results_reach_the_prompt(folder: Path) -> None:
    home = house(folder, "Sunny.")
    async with openai_client(home) as client:
        asked = await client.chat.completions.create(model="", messages=[USER], tools=[WEATHER], n=1)
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        calls = [{"id": "c", "type": "function", "function": function}]
        talk: Any = [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "18 degrees"}]},
        ]
        answer = await client.chat.completions.create(model="", messages=talk, tools=[WEATHER])
    assert asked.choices[0].message.content == answer.choices[0].message.content == "Sunny."
    prompt = bytes(token for token in home.engine.submitted[-1][1] if token < 256).decode()
    assert '"city": "Paris"' in prompt and "18 degrees" in prompt and "Weather of a city" in prompt


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    capital: str


async def test_parse_gives_the_clients_own_class(folder: Path) -> None:
    home = house(folder, '<think>hm</think>{"country": "France", "capital": "Paris"}')
    async with openai_client(home) as client:
        answer = await client.chat.completions.parse(model="", messages=[USER], response_format=Capital)
    assert answer.choices[0].message.parsed == Capital(country="France", capital="Paris")
    grammar = home.engine.submitted[0][2].grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA


async def test_parse_of_tool_arguments(folder: Path) -> None:
    class GetWeather(BaseModel):
        city: str

    tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
    home = house(folder, call("Paris"))
    async with openai_client(home) as client:
        answer = await client.chat.completions.parse(model="", messages=[USER], tools=[tool])
    calls = answer.choices[0].message.tool_calls or []
    assert [parsed.function.parsed_arguments for parsed in calls] == [GetWeather(city="Paris")]
    grammar = home.engine.submitted[0][2].grammar
    assert grammar is not None and '"lenient": false' in grammar.text  # the helper makes its tools strict


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
async def test_a_grammar_that_cannot_be_served_names_its_field_streamed_or_not(
    folder: Path, body: dict[str, Any], param: str
) -> None:
    home = house(folder, "x", error=BadGrammar('The grammar cannot be served: Unimplemented keys: ["not"]'))
    async with openai_client(home) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as caught:
                await client.chat.completions.create(model="", messages=[USER], extra_body=body, stream=stream)
            assert (caught.value.param, caught.value.code) == (param, "bad_grammar")


async def test_ids_and_stop_strings_of_vllm(folder: Path) -> None:
    home = house(folder, "ab<|end|>cd", finish=FinishReason.LENGTH)
    async with openai_client(home) as client:
        extra = {"return_token_ids": True, "include_stop_str_in_output": True}
        answer = await client.completions.create(model="", prompt="x", stop=["<|end|>"], extra_body=extra)
        stream = await client.completions.create(model="", prompt="x", stop=["<|end|>"], extra_body=extra, stream=True)
        chunks = [chunk.choices[0].model_extra or {} async for chunk in stream]
    choice = answer.choices[0]
    assert choice.text == "ab<|end|>" and choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == "<|end|>"
    assert choice.model_extra["token_ids"] == list(ids("ab<|end|>")) == [t for c in chunks for t in c["token_ids"]]
    assert choice.model_extra["prompt_token_ids"] == list(ids("x")) == chunks[0]["prompt_token_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_a_grammar_is_compiled_aborts(folder: Path, stream: bool) -> None:
    home = house(folder, "1", gate=asyncio.Event())
    options: Any = {"extra_body": {"structured_outputs": {"regex": "[0-9]"}}, "stream": stream}
    async with openai_client(home) as client:
        asked = asyncio.create_task(client.chat.completions.create(model="", messages=[USER], **options))
        await until(lambda: bool(home.engine.running))
        asked.cancel()
        await until(lambda: len(home.engine.aborted) == 1)
    assert not home.engine.running
