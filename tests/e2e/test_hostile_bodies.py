"""Bodies that no honest client sends, to every POST route there is: a refusal in the route's dialect that names the
fault in bounded words, bounded memory, and the next request is served.
"""

import copy
import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from fastapi import FastAPI
from fastapi.routing import _IncludedRouter
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.routing import Route

from app.api.body import _explained
from app.api.errors import anthropic_body, body_for, error_body
from app.errors import AppError
from tests.clients.stage import Stage, model_folder
from tests.fakes import FakeHealth

_PATIENCE_S = 200.0
_MAX_MESSAGE = 1200
_MEMORY_BYTES = 700 * 2**20  # for a body of 10 MB: its text, its JSON, its values, and what the machine keeps back


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(model_folder(tmp_path_factory.mktemp("hostile") / "byte-model")) as running:
        yield running


@pytest.fixture(scope="module")
def http(stage: Stage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stage.url, timeout=_PATIENCE_S) as client:
        yield client


def post_routes(app: FastAPI) -> list[str]:
    """Of the API, those that the schema hides too (they are other names of the same)."""
    routers = [route.original_router for route in app.routes if isinstance(route, _IncludedRouter)]
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    return sorted(route.path for route in routes if "POST" in (route.methods or ()) and "{" not in route.path)


@pytest.fixture(scope="module")
def routes(stage: Stage) -> list[str]:
    found = post_routes(stage.house.app)
    assert "/v1/chat/completions" in found and "/chat/completions" in found
    return found


def bodies(stage: Stage) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Path -> a good body and the names of all its fields, from the schema."""
    found = {}
    for path, operations in stage.house.app.openapi()["paths"].items():
        if "post" in operations:
            content = operations["post"]["requestBody"]["content"]["application/json"]
            found[path] = (content.get("example", {"model": "fake-model"}), [*content["schema"]["properties"]])
    return found


def refused(reply: httpx.Response, path: str) -> None:
    assert 400 <= reply.status_code < 500, f"{path}: {reply.status_code} {reply.text[:300]}"
    assert reply.headers["content-type"] == "application/json"
    body, dialect = reply.json(), body_for(path)
    if dialect is error_body:
        assert {*body} == {"error"} and {*body["error"]} == {"message", "type", "param", "code"}
        message = body["error"]["message"]
    elif dialect is anthropic_body:
        assert body["type"] == "error" and body["error"]["type"]
        message = body["error"]["message"]
    else:
        message = body["error"]
    assert isinstance(message, str) and 0 < len(message) <= _MAX_MESSAGE, f"{path}: a message of {len(message)}"
    assert "Traceback" not in message


def served(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "scene:plain"}]})
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "Paris."


NO_OBJECTS = {
    "nothing": b"",
    "blanks": b" \n ",
    "no JSON": b"hello",
    "half of it": b'{"messages": [',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1e999999",
    "a text": b'"text"',
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": ""}'.encode("utf-16"),
    "half a character": b'{"model": "\\ud800"}',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not a number": b'{"temperature": NaN, "messages": NaN, "prompt": NaN, "input": NaN, "tokens": NaN, "model": NaN}',
    "a form": b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--",
}


@pytest.mark.parametrize("body", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
def test_what_is_no_object_is_refused_in_the_routes_own_dialect(
    http: httpx.Client, routes: list[str], body: bytes
) -> None:
    for path in routes:
        refused(http.post(path, content=body), path)
    served(http)


TEXT_10_MB = "word " * (2 * 2**20)
CHAT = {"messages": [{"role": "user", "content": "scene:plain"}]}
HUGE: dict[str, dict[str, Any]] = {
    "a message": {"messages": [{"role": "user", "content": TEXT_10_MB}]},
    "a model's name": CHAT | {"model": TEXT_10_MB},
    "a role": {"messages": [{"role": TEXT_10_MB, "content": "x"}]},
    "a stop string": CHAT | {"stop": TEXT_10_MB},
    "stop strings": CHAT | {"stop": [str(number) for number in range(100_000)]},
    "messages": {"messages": [{"role": "user", "content": "word"}] * 60_000},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "word "}] * 60_000}]},
    "messages that are none": {"messages": [1] * 1_000_000},
    "a list of numbers": CHAT | {"stop": list(range(1_000_000))},
}
LARGE = {
    "a pattern": {"structured_outputs": {"regex": "(a|b)*" * 100_000}},
    "choices": {"structured_outputs": {"choice": [str(number) * 9 for number in range(60_000)]}},
    "stop ids": {"stop_token_ids": list(range(500_000))},
    "biases": {"logit_bias": {str(number): 1 for number in range(16_000)}},
    "template switches": {"chat_template_kwargs": {str(number): number for number in range(60_000)}},
    "unknown fields": {str(number): [number] for number in range(60_000)},
}


@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE.keys())
def test_what_is_huge_is_refused_and_does_not_stay_in_memory(http: httpx.Client, body: dict[str, Any]) -> None:
    before = _peak_bytes()
    refused(http.post("/v1/chat/completions", content=_json(body)), "/v1/chat/completions")
    assert _peak_bytes() - before < _MEMORY_BYTES
    served(http)


@pytest.mark.parametrize("fields", LARGE.values(), ids=LARGE.keys())
def test_what_is_large_but_might_be_meant_does_not_stay_in_memory(http: httpx.Client, fields: dict[str, Any]) -> None:
    """The engine, which a script stands for here, has its own word on each of them."""
    before = _peak_bytes()
    reply = http.post("/v1/chat/completions", content=_json(CHAT | fields))
    if reply.status_code != 200:
        refused(reply, "/v1/chat/completions")
    assert _peak_bytes() - before < _MEMORY_BYTES
    served(http)


@pytest.mark.parametrize("digits", [4000, 6000])
def test_a_number_of_many_digits_is_refused_wherever_it_stands(
    stage: Stage, http: httpx.Client, digits: int, subtests: pytest.Subtests
) -> None:
    """Python itself refuses to write numbers of more than 4,300 digits."""
    number = b"9" * digits
    for path, (good, names) in bodies(stage).items():
        for name in names:
            with subtests.test(f"{path} {name}"):
                rest = _json({key: value for key, value in good.items() if key != name})[1:]
                comma = b"," if rest != b"}" else b""
                reply = http.post(path, content=b'{"' + name.encode() + b'":' + number + comma + rest)
                if reply.status_code != 200:
                    refused(reply, path)
    served(http)


def _holds(schema: dict[str, Any], kind: str) -> bool:
    """Whether a field may be a list ("items") or an object ("additionalProperties") of things of a certain kind."""
    return any(branch.get(kind) not in (None, {}, True) for branch in (schema, *schema.get("anyOf", ())))


def test_the_first_of_many_wrong_items_is_the_answer(
    stage: Stage, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Pydantic would take a minute to tell of a million of them, and every other answer would wait."""
    counts = []

    def counted(error: ValidationError) -> AppError:
        counts.append(error.error_count())
        return _explained(error)

    monkeypatch.setattr("app.api.body._explained", counted)
    for path, operations in stage.house.app.openapi()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {"content": {"application/json": {}}})["content"]
        for name, schema in content["application/json"].get("schema", {"properties": {}})["properties"].items():
            wrong: list[Any] = [[[0]] * 20_000] if _holds(schema, "items") else []
            wrong += [{f"x{number}": [0] for number in range(20_000)}] if _holds(schema, "additionalProperties") else []
            for value in wrong:
                with subtests.test(f"{path} {name}"):
                    example = content["application/json"].get("example", {"model": "fake-model"})
                    refused(http.post(path, json=example | {name: value}), path)
    assert counts and max(counts) < 10
    served(http)


def test_a_body_beyond_the_limit_is_refused_on_every_route(http: httpx.Client, routes: list[str]) -> None:
    for path in routes:
        reply = http.post(path, content=b" " * (33 * 2**20))
        assert reply.status_code == 413
        refused(reply, path)
    served(http)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**30, -(10**30), 2**63, 2**31, -(2**63) - 1]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "\ud800", "\udfff\ud800", "NaN", "a" * 100_000, "<|im_end|>", "{{ 7*7 }}", "../x"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name", "function", "x", ""]), inner),
    ),
    max_leaves=8,
)


def _play(stage: Stage, http: httpx.Client, num_examples: int) -> None:
    known = bodies(stage)

    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(sorted(known)), st.data())
    def play(path: str, data: st.DataObject) -> None:
        good, names = known[path]
        body = copy.deepcopy(good)
        for name in data.draw(st.lists(st.sampled_from([*names, "unknown"]), min_size=1, max_size=3)):
            body[name] = data.draw(VALUES)
        stage.house.shelf.now = FakeHealth()  # whatever the request before has unloaded
        reply = http.post(path, content=_json(body))
        if reply.status_code != 200:
            refused(reply, path)

    play()
    served(http)


def test_odd_values_of_any_field_are_served_or_refused(stage: Stage, http: httpx.Client) -> None:
    _play(stage, http, num_examples=150)


@pytest.mark.slow
def test_odd_values_of_any_field_are_served_or_refused_for_long(stage: Stage, http: httpx.Client) -> None:
    _play(stage, http, num_examples=5000)
