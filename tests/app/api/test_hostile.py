"""Bodies that nobody should send: an OpenAI-shaped 4xx that names what is wrong, and the next request is served."""

import json
from typing import Any

import pytest

from tests.app.api.house import USER, House
from tests.fakes import Script, byte_model_folder, ids, model_info

HUGE = "x" * 10_000_000
CHAT = "/v1/chat/completions"


def chat(**body: Any) -> tuple[str, str]:
    return CHAT, json.dumps({"messages": [USER]} | body)


def raw(fields: str) -> tuple[str, str]:
    return CHAT, f'{{"messages": [{{"role": "user", "content": "hi"}}], {fields}}}'


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


BODIES = {
    "nothing": (CHAT, ""),
    "null": (CHAT, "null"),
    "a list": (CHAT, "[]"),
    "a NUL": (CHAT, "\0"),
    "open braces": (CHAT, "{" * 100_000),
    "deep lists": (CHAT, f'{{"messages": {"[" * 100_000}{"]" * 100_000}}}'),
    "deep parts": (CHAT, f'{{"messages": [{{"role": "user", "content": {"[" * 150}{"]" * 150}}}]}}'),
    "lone surrogate": (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "lone surrogate in a stop string": raw('"stop": "\\udfff"'),
    "NaN": raw('"temperature": NaN'),
    "infinity": raw('"temperature": 1e999'),
    "a number of 5000 digits": raw(f'"max_tokens": {"9" * 5000}'),
    "more tokens than there are": chat(max_tokens=10**18),
    "100,000 stop strings": chat(stop=[f"x{number}" for number in range(100_000)]),
    "a huge stop string": chat(stop=[HUGE]),
    "huge bad words": chat(bad_words=[HUGE]),
    "a huge message": chat(messages=[{"role": "user", "content": HUGE}]),
    "a huge role": chat(messages=[{"role": HUGE, "content": ""}]),
    "a huge model": chat(model=HUGE),
    "a huge effort": chat(reasoning_effort=HUGE),
    "a huge grammar": chat(structured_outputs={"regex": HUGE}),
    "100,000 messages": chat(messages=[USER] * 100_000),
    "many messages of some words": chat(messages=[{"role": "user", "content": "some words"}] * 10_000),
    "10,000 tools": chat(tools=[function()] * 10_000),
    "a tool of no kind": chat(tools=[[]]),
    "a tool with a list for a schema": chat(tools=[function(parameters=[])]),
    "a choice that is a list": chat(tools=[function()], tool_choice=[[]]),
    "a choice of nothing": chat(tools=[function()], tool_choice={"type": "allowed_tools"}),
    "parts of no type": chat(messages=[{"role": "user", "content": [None, 1, []]}]),
    "a type that is a list": chat(messages=[{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]),
    "names in a template that are none": chat(chat_template_kwargs={"bos_token": [], "a b": {}}, messages=[]),
    "a form that is a list": chat(response_format=[1]),
    "an odd class": chat(request_class="first"),
    "300,000 ids": ("/v1/completions", json.dumps({"prompt": [0] * 300_000})),
    "100,000 prompts": ("/v1/completions", json.dumps({"prompt": ["x"] * 100_000})),
    "a huge id": ("/v1/completions", json.dumps({"prompt": [10**30]})),
    "a huge prompt to cut": ("/v1/completions", json.dumps({"prompt": HUGE, "truncate_prompt_tokens": 5})),
    "a prefix that is a number": ("/infill", json.dumps({"input_prefix": 1})),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(byte_model_folder(tmp_path_factory.mktemp("byte-model")), Script(token_ids=ids("ok")))


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_is_refused_and_the_next_request_served(house: House, name: str) -> None:
    path, body = BODIES[name]
    headers = {"content-type": "application/json"}
    reply = await house.ask("POST", path, content=body.encode(), headers=headers)
    assert 400 <= reply.status_code < 500, reply.text[:300]
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 1000
    assert house.engine.running == set()
    assert (await house.chat()).json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_of_more_than_64_bits_is_given_back_as_it_was_written(house: House, stream: bool) -> None:
    number = 10**30
    body = {"model": "", "input": "Hi", "text": {"verbosity": number}, "stream": stream}
    assert f'"verbosity":{number}' in (await house.ask("POST", "/v1/responses", json=body)).text
    call = f'<tool_call>{{"name": "f", "arguments": {{"at": {number}}}}}</tool_call>'
    caller = House(house.source.model.folder, Script(token_ids=ids(call)))
    caller.source.model.info = model_info(max_model_len=1000)
    tool = function(parameters={"properties": {"at": {"minimum": number}}})
    body = {"model": "", "messages": [USER], "tools": [tool], "stream": stream}
    assert f'{{"at":{number}}}' in (await caller.ask("POST", "/api/chat", json=body)).text
