"""The anthropic package for Python."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.scenes import REPORT, UNICODE, WEATHER_SCHEMA
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client
from tests.e2e.test_real_server import ANSWER, FRANCE, Server

CLIENT = Client("anthropic (Python)", "anthropic")
WEATHER: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER_SCHEMA}
proves = pytest.mark.proves


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stage.url, api_key="none", max_retries=0) as made:
        yield made


def asks(scene: str) -> list[Any]:
    return [{"role": "user", "content": f"scene:{scene}"}]


def fields(scene: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "messages": asks(scene)} | more


def ask(client: anthropic.Anthropic, scene: str, **more: Any) -> Any:
    return client.messages.create(**fields(scene, **more))


def streamed(client: anthropic.Anthropic, scene: str, **more: Any) -> Any:
    with client.messages.stream(**fields(scene, **more)) as stream:
        return stream.get_final_message()


@proves("chat", "usage")
def test_a_whole_message_has_its_text_its_end_and_its_usage(client: anthropic.Anthropic, stage: Stage) -> None:
    answer = ask(client, "plain", system="Be brief.", extra_body={"temperature": 0})
    assert ([block.text for block in answer.content], answer.stop_reason) == (["Paris."], "end_turn")
    assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (7, 3)
    assert "Be brief." in stage.last_prompt()


@proves("stream", "unicode", "usage")
def test_a_stream_has_the_order_of_events_and_the_whole_text(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**fields("unicode")) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message_", "content_block_"))]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == UNICODE
    assert final.usage.output_tokens == len(UNICODE.encode()) + 1


@proves("stop")
def test_a_stop_sequence_is_named_and_not_seen(client: anthropic.Anthropic) -> None:
    for answer in (
        ask(client, "stop", stop_sequences=["</s>", "zzz"]),
        streamed(client, "stop", stop_sequences=["</s>", "zzz"]),
    ):
        assert answer.content[0].text == "one"
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "</s>")


@proves("models")
def test_the_list_of_models(client: anthropic.Anthropic) -> None:
    assert MODEL in [model.id for model in client.models.list()]


@proves("tools")
def test_a_tool_is_called_and_its_result_told(client: anthropic.Anthropic) -> None:
    asked = ask(client, "tool", tools=[WEATHER])
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    assert (asked.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": REPORT}]}
    history = [
        *asks("tool"),
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    assert ask(client, "tool", tools=[WEATHER], messages=history).content[0].text == f"It is {REPORT}."


@proves("tool_stream", "parallel")
def test_calls_that_are_streamed_have_whole_inputs(client: anthropic.Anthropic) -> None:
    for scene, cities in (("tool", ["Paris"]), ("tools", ["Paris", "Rome"])):
        answer = streamed(client, scene, tools=[WEATHER])
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert [call.input["city"] for call in calls] == cities
        assert answer.stop_reason == "tool_use" and len({call.id for call in calls}) == len(cities)


@proves("reasoning")
def test_the_thinking_is_a_block_of_its_own_streamed_or_not(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 500}
    for answer in (ask(client, "reasoning", thinking=thinking), streamed(client, "reasoning", thinking=thinking)):
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("Two and two.", "Four.")


@proves("tokens")
def test_a_count_is_that_of_the_prompt(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=asks("plain")).input_tokens
    usage = ask(client, "plain").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@proves("errors")
def test_errors_are_the_clients_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no-such"):
        ask(client, "plain", model="no-such")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, "plain", extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError, match="200000"):
        ask(client, "plain", messages=[{"role": "user", "content": "x" * 200_001}])
    with pytest.raises(anthropic.APIStatusError, match="The engine ended"):
        streamed(client, "breaks")


@pytest.mark.slow
@proves("real")
def test_the_real_model_answers_whole_and_streamed(real: Server) -> None:
    asked: Any = {"model": "default", "max_tokens": 20, "messages": FRANCE, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=real.url, api_key="none") as client:
        assert client.messages.create(**asked).content[0].text == ANSWER
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_text() == ANSWER


@proves("abort")
def test_closing_a_stream_aborts_in_the_engine(client: anthropic.Anthropic, stage: Stage) -> None:
    left = stage.num_left()
    with client.messages.stream(**fields("endless", max_tokens=9000)) as stream:
        next(iter(stream.text_stream))
    stage.until_left(left + 1)
