"""Numbers in every dialect: also as text, within the limits that the schema tells, and never true or false."""

from collections.abc import Iterator
from typing import Any

import pytest

from app.api.dialect import json_bytes
from tests.app.api.answers import error_of
from tests.app.api.house import House
from tests.fakes import byte_model_folder

Schema = dict[str, Any]
Place = tuple[str, Any]  # a field's path, and the value that it is to have


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(byte_model_folder(tmp_path_factory.mktemp("byte-model")))


def variants(schema: Schema) -> list[Schema]:
    return [schema, *(one for key in ("anyOf", "allOf") for one in schema.get(key, ()))]


def truths(schema: Schema) -> Iterator[Place]:
    """Where true would stand in a number's place in a value of this schema."""
    for one in variants(schema):
        if one.get("type") in ("integer", "number"):
            yield "", True
        if one.get("type") == "array":
            yield from ((f"[0]{path}", [value]) for path, value in truths(one.get("items", {})))
        for name, inner in one.get("properties", {}).items():
            yield from ((f".{name}{path}", {name: value}) for path, value in truths(inner))


def bodies(house: House) -> Iterator[tuple[str, str, Schema]]:
    """Path of a route, path of a field, a whole body in which the field is true."""
    for path, operations in house.app.openapi()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        for field, value in truths(content["schema"]) if content else ():
            yield path, field.removeprefix("."), content.get("example", {"model": "fake-model"}) | value


async def test_true_is_no_number_in_any_field_of_any_dialect(house: House) -> None:
    tried = set()
    for path, field, body in bodies(house):
        reply = await house.ask("POST", path, content=json_bytes(body))
        assert reply.status_code == 400, (path, field, reply.text)
        assert field in reply.text and "got true" in reply.text, (path, field, reply.text)
        tried.add((path, field))
    for known in (
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "stop_token_ids[0]"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/api/chat", "options.num_predict"),
        ("/v1/embeddings", "dimensions"),
        ("/memory", "give_back_gb"),
    ):
        assert known in tried


async def test_a_number_as_text_is_one_and_its_limits_are_in_the_schema(house: House) -> None:
    assert (await house.chat(max_tokens="3", temperature="0.5")).status_code == 200
    assert error_of(await house.chat(logit_bias={"5": True}), 400)["param"] == "logit_bias.5"
    assert error_of(await house.chat(logit_bias={"five": 1}), 400)["param"] == "logit_bias.five"
    body = house.app.openapi()["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    limits = body["schema"]["properties"]["min_tokens"]["anyOf"][0]
    assert (limits["minimum"], limits["exclusiveMaximum"]) == (0, 2**53)
