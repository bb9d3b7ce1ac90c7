"""The openai package for Python."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.scenes import ADA, ADA_SCHEMA, REPORT, UNICODE, WEATHER_SCHEMA
from tests.clients.stage import MODEL, Stage, until
from tests.clients.table import Client
from tests.e2e.test_real_server import ANSWER, FRANCE, Server
from tests.fakes import embedding_of, ids

CLIENT = Client("openai (Python)", "openai")
proves = pytest.mark.proves


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asks(scene: str) -> list[Any]:
    return [{"role": "user", "content": f"scene:{scene}"}]


def chat(client: openai.OpenAI, scene: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=asks(scene), **fields)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@proves("chat", "usage")
def test_a_whole_answer_has_its_text_its_end_and_its_usage(client: openai.OpenAI) -> None:
    answer = chat(client, "plain")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Paris.", "stop")
    assert answer.usage.completion_tokens == 7 and answer.usage.prompt_tokens_details.cached_tokens == 3


@proves("stream", "usage", "unicode")
def test_a_stream_joins_to_the_whole_text_with_usage_last(client: openai.OpenAI) -> None:
    chunks = list(chat(client, "unicode", stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == UNICODE == chat(client, "unicode").choices[0].message.content
    assert not any("�" in text_of([chunk]) for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ids(UNICODE)) + 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


@proves("stop")
def test_nothing_of_a_stop_string_is_seen_and_the_engine_stops_streamed_or_not(
    client: openai.OpenAI, stage: Stage
) -> None:
    aborted = len(stage.engine.aborted)
    assert chat(client, "stop", stop=["</s>", "zzz"]).choices[0].message.content == "one"
    assert text_of(list(chat(client, "stop", stop="</s>", stream=True))) == "one"
    assert len(stage.engine.aborted) == aborted + 2


@proves("models")
def test_the_list_of_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER_SCHEMA},
}


@proves("tools")
def test_a_tool_is_called_and_its_result_told(client: openai.OpenAI) -> None:
    choice = chat(client, "tool", tools=[WEATHER], parallel_tool_calls=True).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    messages: list[Any] = [*asks("tool"), choice.message, result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == f"It is {REPORT}."


@proves("tool_stream", "parallel")
def test_the_stream_helper_joins_the_pieces_of_every_call(client: openai.OpenAI) -> None:
    for scene, cities in (("tool", ["Paris"]), ("tools", ["Paris", "Rome"])):
        with client.chat.completions.stream(model=MODEL, messages=asks(scene), tools=[WEATHER]) as stream:
            choice = stream.get_final_completion().choices[0]
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
        assert choice.finish_reason == "tool_calls" and len({call.id for call in calls}) == len(cities)


@proves("tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_is_a_matter_of_the_grammar(client: openai.OpenAI, stage: Stage, choice: Any) -> None:
    assert chat(client, "tool", tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
    assert stage.last_params().grammar is not None


class Person(BaseModel):
    name: str
    age: int


@proves("schema")
def test_parse_gives_an_object_of_the_callers_own_class(client: openai.OpenAI, stage: Stage) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=asks("json"), response_format=Person)
    assert answer.choices[0].message.parsed == Person(**ADA)
    assert stage.last_params().grammar is not None


@proves("schema")
def test_a_schema_reaches_the_engine_and_so_does_json_object(client: openai.OpenAI, stage: Stage) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": ADA_SCHEMA, "strict": True}}
    for response_format, word in ((form, "integer"), ({"type": "json_object"}, "")):
        assert '"Ada"' in chat(client, "json", response_format=response_format).choices[0].message.content
        assert word in stage.last_params().grammar.text


@proves("reasoning")
def test_the_thinking_is_beside_the_answer_streamed_or_not(client: openai.OpenAI) -> None:
    message = chat(client, "reasoning").choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Four.", "Two and two.")
    chunks = list(chat(client, "reasoning", stream=True))
    thought = [chunk.choices[0].delta.model_extra.get("reasoning_content", "") for chunk in chunks]
    assert (text_of(chunks), "".join(thought)) == ("Four.", "Two and two.")
    with client.chat.completions.stream(model=MODEL, messages=asks("reasoning")) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Four."


@proves("logprobs")
def test_every_token_of_an_answer_has_its_log_probability(client: openai.OpenAI) -> None:
    entries = chat(client, "plain", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(entry.token for entry in entries[:6]) == "Paris."
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    legacy = client.completions.create(model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=1).choices[0]
    assert legacy.logprobs is not None and legacy.logprobs.token_logprobs is not None
    assert legacy.logprobs.token_logprobs[0] is None and len(legacy.logprobs.token_logprobs) == 3


@proves("completions")
def test_completions_of_every_shape_of_prompt(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["a", ["a", "b"], [97], [[97], [98]]]
    for prompt in prompts:
        answer = client.completions.create(model=MODEL, prompt=prompt, echo=True)
        assert [choice.text for choice in answer.choices] in (["aParis."], ["aParis.", "bParis."])
    stream = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Paris."


@proves("embeddings")
def test_texts_become_vectors_in_order(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model=MODEL, input=["a", "bc"]).data
    assert [item.index for item in made] == [0, 1]
    assert [tuple(item.embedding) for item in made] == [
        pytest.approx(embedding_of(ids(text)), rel=1e-6) for text in ("a", "bc")
    ]


@proves("errors")
def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=asks("plain"))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 200000 tokens") as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 200_001}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "plain", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        chat(client, "plain", extra_body={"typical_p": 0.5})
    with pytest.raises(openai.RateLimitError, match="The line is full"):
        chat(client, "full")


@proves("errors")
def test_a_failure_in_mid_stream_raises_in_the_client(client: openai.OpenAI) -> None:
    text = ""
    with pytest.raises(openai.APIError, match="The engine ended"):
        for chunk in chat(client, "breaks", stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "abc"


@pytest.mark.slow
@proves("real")
def test_the_real_model_answers_whole_and_streamed(real: Server) -> None:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(model="", messages=FRANCE, temperature=0)
        pieces = list(client.chat.completions.create(model="", messages=FRANCE, temperature=0, stream=True))
    assert whole.choices[0].message.content == text_of(pieces) == ANSWER


@proves("abort")
def test_closing_a_stream_aborts_in_the_engine(client: openai.OpenAI, stage: Stage) -> None:
    left = stage.num_left()
    stream = chat(client, "endless", stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    stage.until_left(left + 1)


@proves("abort")
async def test_a_cancelled_call_aborts_in_the_engine(stage: Stage) -> None:
    left = stage.num_left()
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        call = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=asks("endless")))
        await asyncio.to_thread(until, lambda: bool(stage.engine.running))
        call.cancel()
        await asyncio.to_thread(stage.until_left, left + 1)
