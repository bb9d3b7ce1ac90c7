"""Texts as vectors, in OpenAI's and Ollama's words."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.app.api.answers import error_of
from tests.app.api.house import House
from tests.app.api.test_routes import metric
from tests.fakes import Script, byte_model_folder, embedding_of, ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an embedding model, as its maker leaves it on the Hub."""
    made = byte_model_folder(tmp_path_factory.mktemp("embedding-model"))
    (made / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    return made


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script())


async def embed(house: House, **body: Any) -> Any:
    return await house.ask("POST", "/v1/embeddings", json={"model": "fake-model"} | body)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "you"], ["Hi", "you"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [121]], ["Hi", "y"]),
        (["Hi", [121]], ["Hi", "y"]),
    ],
)
async def test_each_input_has_its_vector_in_order(house: House, given: Any, texts: list[str]) -> None:
    said = (await embed(house, input=given)).json()
    assert (said["object"], said["model"]) == ("list", "fake-model")
    assert [(item["object"], item["index"]) for item in said["data"]] == [("embedding", i) for i in range(len(texts))]
    assert [tuple(item["embedding"]) for item in said["data"]] == [embedding_of(ids(text)) for text in texts]
    assert said["usage"] == {"prompt_tokens": sum(map(len, texts)), "total_tokens": sum(map(len, texts))}


async def test_base64_is_little_endian_float32_and_dimensions_cut_and_bring_to_length_1(house: House) -> None:
    (item,) = (await embed(house, input="Hi", encoding_format="base64")).json()["data"]
    assert struct.unpack("<4f", base64.b64decode(item["embedding"])) == pytest.approx(embedding_of(ids("Hi")))
    (item,) = (await embed(house, input="Hi", dimensions=2)).json()["data"]
    first, second, *_ = embedding_of(ids("Hi"))
    length = (first**2 + second**2) ** 0.5
    assert item["embedding"] == pytest.approx([first / length, second / length])
    assert error_of(await embed(house, input="Hi", dimensions=5), 400)["param"] == "dimensions"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": ["x", 3]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [["x"]]}, "input[0]"),
        ({"input": ["x"] * 1025}, "input"),
        ({"input": [512]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "x" * 200}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
    ],
)
async def test_what_is_no_text_is_a_400_that_names_the_place(house: House, body: dict[str, Any], param: str) -> None:
    assert error_of(await embed(house, **body), 400)["param"] == param


async def test_a_model_that_was_not_trained_to_it_says_so(tmp_path: Path) -> None:
    house = House(byte_model_folder(tmp_path), Script())
    error = error_of(await embed(house, input="x"), 404)
    assert (error["code"], error["param"]) == ("no_embeddings", "model") and "Qwen3-Embedding" in error["message"]
    assert not house.engine.submitted


async def test_ollamas_words_for_the_same(house: House) -> None:
    body = {"model": "fake-model:latest", "input": ["Hi", "you"], "truncate": True}
    said = (await house.ask("POST", "/api/embed", json=body)).json()
    assert [tuple(vector) for vector in said["embeddings"]] == [embedding_of(ids(text)) for text in ("Hi", "you")]
    assert said["prompt_eval_count"] == 5
    refused = await house.ask("POST", "/api/embed", json={"model": "fake-model", "input": 3})
    assert refused.status_code == 400 and "input" in refused.json()["error"]


async def test_vectors_count_prompt_tokens_and_no_answer(house: House) -> None:
    await embed(house, input=["Hi", "you"])
    assert await metric(house, "fireside_request_success_total", finished_reason="stop") == 2
    assert await metric(house, "fireside_request_prompt_tokens_sum") == 5
    assert await metric(house, "fireside_request_generation_tokens_sum") == 0


async def test_openais_package_reads_them(house: House) -> None:
    async with (
        house.client() as http,
        openai.AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="none", http_client=http) as client,
    ):
        plain = await client.embeddings.create(model="fake-model", input="Hi")  # it asks for base64 by itself
        (cut,) = (await client.embeddings.create(model="fake-model", input="Hi", dimensions=2)).data
    assert plain.data[0].embedding == pytest.approx(embedding_of(ids("Hi")), rel=1e-6)
    assert len(cut.embedding) == 2
