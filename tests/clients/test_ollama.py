"""Ollama's package for Python."""

import json
from typing import Any

import ollama
import pytest

from tests.clients.scenes import ADA, ADA_SCHEMA, REPORT, UNICODE, WEATHER_SCHEMA
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client
from tests.e2e.test_real_server import ANSWER, FRANCE, Server
from tests.fakes import embedding_of, ids

CLIENT = Client("ollama (Python)", "ollama")
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER_SCHEMA},
}
proves = pytest.mark.proves


@pytest.fixture(scope="module")
def client(stage: Stage) -> ollama.Client:
    return ollama.Client(host=stage.url)


def asks(scene: str) -> list[Any]:
    return [{"role": "user", "content": f"scene:{scene}"}]


def ask(client: ollama.Client, scene: str, **more: Any) -> Any:
    return client.chat(model=MODEL, messages=asks(scene), **more)


def text_of(pieces: Any) -> str:
    return "".join(piece.message.content or "" for piece in pieces)


@proves("chat", "usage")
def test_a_whole_answer_has_its_text_its_end_and_its_counts(client: ollama.Client, stage: Stage) -> None:
    answer = ask(client, "plain", options={"temperature": 0, "num_predict": 50, "seed": 4})
    assert (answer.message.content, answer.done, answer.done_reason) == ("Paris.", True, "stop")
    assert answer.eval_count == 7 and answer.prompt_eval_count > 0
    params = stage.last_params()
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 50, 4)


@proves("stream", "unicode", "usage")
def test_a_stream_joins_to_the_whole_text_with_counts_last(client: ollama.Client) -> None:
    pieces = list(ask(client, "unicode", stream=True))
    assert text_of(pieces) == UNICODE
    assert [piece.done for piece in pieces[-2:]] == [False, True]
    assert pieces[-1].eval_count == len(UNICODE.encode()) + 1


@proves("stop")
def test_nothing_of_a_stop_string_is_seen(client: ollama.Client) -> None:
    assert ask(client, "stop", options={"stop": ["</s>", "zzz"]}).message.content == "one"


@proves("models")
def test_the_list_of_models_and_what_one_can(client: ollama.Client) -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert "tools" in (client.show(MODEL).capabilities or [])


@proves("completions")
def test_generate_whole_and_streamed(client: ollama.Client) -> None:
    assert client.generate(model=MODEL, prompt="scene:plain").response == "Paris."
    pieces = client.generate(model=MODEL, prompt="scene:plain", stream=True)
    assert "".join(piece.response for piece in pieces) == "Paris."


@proves("tools")
def test_a_tool_is_called_and_its_result_told(client: ollama.Client) -> None:
    message = ask(client, "tool", tools=[WEATHER]).message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    history = [*asks("tool"), message, {"role": "tool", "tool_name": "get_weather", "content": REPORT}]
    answer = client.chat(model=MODEL, messages=history, tools=[WEATHER])
    assert answer.message.content == f"It is {REPORT}."


@proves("tool_stream", "parallel")
def test_calls_that_are_streamed_are_whole(client: ollama.Client) -> None:
    for scene, cities in (("tool", ["Paris"]), ("tools", ["Paris", "Rome"])):
        pieces = list(ask(client, scene, stream=True, tools=[WEATHER]))
        calls = [call for piece in pieces for call in piece.message.tool_calls or []]
        assert [call.function.arguments["city"] for call in calls] == cities


@proves("schema")
def test_a_schema_and_plain_json_reach_the_engine(client: ollama.Client, stage: Stage) -> None:
    forms: list[Any] = [ADA_SCHEMA, "json"]
    for form in forms:
        assert json.loads(ask(client, "json", format=form).message.content) == ADA
        assert stage.last_params().grammar is not None


@proves("reasoning")
def test_the_thinking_is_beside_the_answer(client: ollama.Client) -> None:
    message = ask(client, "reasoning", think=True).message
    assert (message.content, message.thinking) == ("Four.", "Two and two.")


@proves("embeddings")
def test_texts_become_vectors_in_order(client: ollama.Client) -> None:
    made = client.embed(model=MODEL, input=["a", "bc"]).embeddings
    assert [tuple(vector) for vector in made] == [embedding_of(ids(text)) for text in ("a", "bc")]


@proves("errors")
def test_errors_are_the_clients_own_with_their_status(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no-such") as caught:
        client.chat(model="no-such", messages=asks("plain"))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature") as caught:
        ask(client, "plain", options={"temperature": -1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="The engine ended"):
        list(ask(client, "breaks", stream=True))


@pytest.mark.slow
@proves("real")
def test_the_real_model_answers_whole_and_streamed(real: Server) -> None:
    client = ollama.Client(host=real.url)
    asked: Any = {"model": "default", "messages": FRANCE, "options": {"temperature": 0}}
    assert client.chat(**asked).message.content == text_of(client.chat(**asked, stream=True)) == ANSWER


@proves("abort")
def test_closing_a_stream_aborts_in_the_engine(client: ollama.Client, stage: Stage) -> None:
    left = stage.num_left()
    stream = ask(client, "endless", stream=True)
    next(piece for piece in stream if piece.message.content)
    stream.close()
    stage.until_left(left + 1)
