"""Search, fit and downloads over HTTP, against a hub of our own."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.api import loading
from app.api.keys import ApiKey, Keyring, digest_of
from app.api.limits import Limits
from app.api.routes import Metrics, install
from app.chat.service import ChatService
from app.models.hub.download import fetch
from app.models.hub.downloads import Downloads
from app.models.library import Library
from app.settings import load
from tests.app.api.answers import error_of
from tests.app.models.fake_hub import FakeHub
from tests.app.models.hub.test_download import REPO, model_files
from tests.app.models.small_hub import TINY, small_hub
from tests.fakes import FakeEngine, FakeModel, FakeShelf, FakeSource, Script, byte_model_folder, model_info


@pytest.fixture
def hub(tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with small_hub({TINY: tiny_files, REPO: model_files()}, monkeypatch) as hub:
        yield hub


class Client:
    def __init__(self, home: Path, keys: Keyring) -> None:
        self.shelf = FakeShelf()
        self.library = Library(load({"home": home}, {}))
        self.library.downloads = Downloads(home / "models", fetch)
        engine = FakeEngine(Script())
        source = FakeSource(FakeModel(byte_model_folder(home / "bytes"), engine, info=model_info()))
        self.app = FastAPI()
        install(
            self.app,
            service=ChatService(source),
            shelf=self.shelf,
            metrics=Metrics(lambda: None),
            version="1",
            keys=keys,
            limits=Limits(),
            library=self.library,
        )

    async def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, path, **options)

    async def until(self, state: str) -> dict[str, Any]:
        begun = time.monotonic()
        while time.monotonic() - begun < 100:
            (found,) = (await self("GET", "/models/downloads")).json()["data"]
            if found["state"] == state:
                return dict(found)
            await asyncio.sleep(0.02)  # or the threads that download hardly run
        raise AssertionError(f"it never was {state}: {found}")


@pytest.fixture
async def client(hub: FakeHub, tmp_path: Path) -> AsyncIterator[Client]:
    made = Client(tmp_path / "home", Keyring())
    yield made
    made.library.downloads.close()


async def test_a_search_has_a_word_on_the_fit_of_every_hit(client: Client) -> None:
    found = (await client("GET", "/models/search", params={"q": "qwen3", "gpu_gb": 24})).json()["data"]
    assert {hit["repo"]: hit["fit"] for hit in found} == {
        "Qwen/Qwen3-8B-AWQ": "fits",
        "big/Qwen3-235B-AWQ": "too large",
        "x/Qwen3-nf4": "unsupported",
        "x/Qwen3-silent-AWQ": "unknown",
        "x/Qwen3.5-AWQ": "unsupported",
    }
    first = found[0]
    assert (first["weights_bytes"], first["licence"], first["format"]) == (6_072_000_000, "apache-2.0", "awq")
    assert found[1]["is_gated"] and "bitsandbytes is not read" in found[2]["why"]


@pytest.mark.parametrize(
    ("params", "repos"),
    [
        ({"format": "awq", "licence": "mit"}, ["big/Qwen3-235B-AWQ"]),
        ({"max_gb": 50, "licence": "apache-2.0"}, ["Qwen/Qwen3-8B-AWQ"]),
        ({"limit": 1}, ["Qwen/Qwen3-8B-AWQ"]),
        ({"limit": 1, "max_gb": 5}, ["x/Qwen3-nf4"]),
    ],
)
async def test_a_search_is_filtered(client: Client, params: dict[str, Any], repos: list[str]) -> None:
    found = (await client("GET", "/models/search", params={"q": "qwen3"} | params)).json()["data"]
    assert [hit["repo"] for hit in found] == repos


async def test_a_search_without_network_says_so(client: Client, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert error_of(await client("GET", "/models/search", params={"q": "qwen3"}), 503)["code"] == "offline"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/models/search?limit=0", "limit"),
        ("/models/search?format=gguf", "format"),
        ("/models/search?max_gb=x", "max_gb"),
        ("/models/fit", "model"),
        ("/models/fit?model=a/b&context=0", "context"),
        ("/models/fit?model=a/b&kv_cache_dtype=int3", "kv_cache_dtype"),
    ],
)
async def test_a_wrong_query_is_a_400_that_names_the_field(client: Client, path: str, param: str) -> None:
    assert error_of(await client("GET", path), 400)["param"] == param


async def test_the_fit_is_told_before_any_weights_are_fetched(client: Client, hub: FakeHub) -> None:
    report = (await client("GET", "/models/fit", params={"model": TINY, "gpu_gb": 24})).json()
    assert (report["architecture"], report["format"]) == ("LlamaForCausalLM", "gptq")
    assert report["fits"][0]["verdict"] == "fits" and report["fits"][0]["max_context"] == 256
    small = (await client("GET", "/models/fit", params={"model": TINY, "kv_cache_dtype": "int8"})).json()
    assert {fit["kv_dtype"] for fit in small["fits"]} == {"int8"}
    error_of(await client("GET", "/models/fit", params={"model": "no/where"}), 404)


async def test_a_model_is_fetched_and_deleted_in_the_routers_words(client: Client, tmp_path: Path) -> None:
    begun = await client("POST", "/models", json={"model": REPO})
    assert begun.json()["success"] is True
    done = await client.until("ready")
    assert done["done_bytes"] == done["size_bytes"] > 3_000_000
    assert {file["state"] for file in done["files"]} == {"verified"}
    verified = (await client("POST", "/models/verify", json={"model": REPO})).json()["files"]
    assert set(verified.values()) == {"verified"}
    tokenizer = tmp_path / "home" / "models" / "org--tiny-AWQ" / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"x", b"y", 1))
    for repair, state in ((False, "damaged"), (True, "verified")):
        checked = await client("POST", "/models/verify", json={"model": REPO, "repair": repair})
        assert checked.json()["files"]["tokenizer.json"] == state
    assert (await client("DELETE", "/models", params={"model": REPO})).json()["freed_bytes"] > 3_000_000
    assert not (tmp_path / "home" / "models" / "org--tiny-AWQ").exists()
    error_of(await client("DELETE", "/models", params={"model": REPO}), 404)


async def test_with_a_half_download_the_name_of_the_users_own_goes_too(client: Client, hub: FakeHub) -> None:
    hub.pause_s = 0.5
    assert (await client("POST", "/models/add", json={"model": TINY, "id": "mine"})).status_code == 200
    await client("POST", "/models", json={"model": "mine"})
    assert (await client("DELETE", "/models", params={"model": "mine"})).status_code == 200
    error_of(await client("POST", "/models", json={"model": "mine"}), 404)


async def test_a_download_is_in_the_list_and_the_events_in_the_routers_words(client: Client, hub: FakeHub) -> None:
    hub.pause_s = 0.5  # it cannot end while it is looked at
    await client("POST", "/models", json={"model": REPO})
    begun = time.monotonic()
    while True:
        (item,) = (i for i in (await client("GET", "/models")).json()["data"] if i["id"] == REPO)
        if item["status"].get("progress"):
            break
        assert time.monotonic() - begun < 100
        await asyncio.sleep(0.02)
    assert item["status"]["value"] == "downloading"
    assert item["status"]["progress"]["model.safetensors"]["total"] == len(hub.files[REPO]["model.safetensors"])
    events = loading._events(client.shelf, client.library.known_downloads)
    first = json.loads((await anext(events)).decode().removeprefix("data: "))
    assert (first["model"], first["event"]) == (REPO, "download_progress")
    assert set(first["data"]["config.json"]) == {"done", "total"}
    hub.pause_s = 0
    told = ""
    async for event in events:
        told += event.decode()
        if "models_reload" in told:
            break
    await events.aclose()
    assert [i for i in (await client("GET", "/models")).json()["data"] if i["id"] == REPO] == []


async def test_a_download_is_paused_resumed_and_cancelled(client: Client, hub: FakeHub) -> None:
    hub.pause_s = 0.05
    await client("POST", "/models", json={"model": REPO})
    await client.until("downloading")
    assert (await client("POST", "/models/downloads/pause", json={"model": REPO})).json() == {"success": True}
    await client.until("paused")
    error_of(await client("POST", "/models/downloads/pause", json={"model": REPO}), 409)
    assert (await client("POST", "/models/downloads/resume", json={"model": REPO})).json() == {"success": True}
    assert (await client("POST", "/models/downloads/cancel", json={"model": REPO})).json() == {"success": True}
    assert (await client("GET", "/models/downloads")).json()["data"] == []
    error_of(await client("POST", "/models/downloads/cancel", json={"model": REPO}), 404)


async def test_a_gated_model_asks_for_a_token_and_takes_it(client: Client, hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add(REPO)
    await client("POST", "/models", json={"model": REPO})
    failed = await client.until("failed")
    assert failed["error"]["code"] == "gated_model"
    assert (await client("POST", "/models/token", json={"token": hub.token})).json() == {"success": True}
    assert (tmp_path / "home" / "hub-token").read_text() == hub.token
    error_of(await client("POST", "/models/token", json={"token": "a b"}), 400)
    assert (await client("POST", "/models/token", json={"token": None})).json() == {"success": True}
    assert not (tmp_path / "home" / "hub-token").exists()


async def test_a_repository_is_added_to_the_users_own_catalogue(client: Client, tmp_path: Path) -> None:
    added = (await client("POST", "/models/add", json={"model": TINY})).json()
    assert added == {"id": "tiny-gptq", "format": "gptq", "context_length": 256}
    assert client.library.shelf.resolve("tiny-gptq").repo == TINY
    error_of(await client("POST", "/models/add", json={"model": TINY}), 409)


async def test_a_loaded_model_is_not_deleted(client: Client) -> None:
    assert client.shelf.holds("fake-model")
    refused = error_of(await client("DELETE", "/models", params={"model": "fake-model"}), 409)
    assert refused["code"] == "model_loaded"


async def test_all_of_it_needs_an_admin_key(hub: FakeHub, tmp_path: Path) -> None:
    keys = Keyring([ApiKey("user", digest_of("user-key-1"), is_admin=False)])
    client = Client(tmp_path / "home", keys)
    for method, path in (("GET", "/models/downloads"), ("POST", "/models"), ("DELETE", "/models?model=x")):
        answer = await client(method, path, headers={"Authorization": "Bearer user-key-1"}, json={"model": "x"})
        assert error_of(answer, 403)["code"] == "admin_key_required"
