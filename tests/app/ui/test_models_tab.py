"""The Models tab's own routes: what they tell, and who may change what."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.guard import admin
from app.models.hub.downloads import Download, Downloads
from app.models.library import Library
from app.models.status import ModelStatus
from app.settings import load
from app.ui.models_tab import models_room
from tests.app.models.test_shelf import put_model
from tests.app.ui.rooms import ADMIN, USER, FakeModels, page_of, told

REPO_ID, MODEL = "Qwen/Qwen3-8B-AWQ", "qwen3-8b-awq"


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(load({"home": tmp_path}, {}))


def client(library: Library, models: FakeModels | None = None, key: Any = ADMIN) -> httpx.AsyncClient:
    app, _ = page_of(models_room(library, models or FakeModels(), admin), key=key)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_the_shelf_is_told_whole_in_one_reply(library: Library, tmp_path: Path) -> None:
    put_model(tmp_path / "models" / MODEL)
    async with client(library, key=USER) as asked:
        models = {each["id"]: each for each in (await asked.get("/ui/models/shelf")).json()["models"]}
    assert (models[MODEL]["state"], models[MODEL]["thinks"], models[MODEL]["origin"]) == ("ready", True, REPO_ID)
    assert models["smollm2-135m-instruct"]["is_embedded"] and len(models) > 25


async def test_who_asks_is_told_what_it_may(library: Library) -> None:
    for key, may in ((ADMIN, True), (USER, False)):
        async with client(library, key=key) as asked:
            assert (await asked.get("/ui/me")).json() == {"name": key.name, "is_admin": may}


async def test_the_model_to_begin_with_is_one_of_the_shelf(library: Library) -> None:
    async with client(library) as asked:
        shelf = (await asked.get("/ui/models/shelf")).json()
    (model,) = (each for each in shelf["models"] if each["id"] == shelf["best"])
    assert not model["is_embedded"] and shelf["is_admin"]


async def test_the_disk_adds_up(library: Library, tmp_path: Path) -> None:
    put_model(tmp_path / "models" / MODEL)
    async with client(library) as asked:
        disk = (await asked.get("/ui/models/disk")).json()
    assert [name for name, _ in disk["models"]] == [MODEL] and disk["home"] == str(tmp_path)


async def test_a_models_defaults_are_kept_and_a_user_may_not_change_them(library: Library) -> None:
    body = {"model": MODEL, "temperature": 0.1, "max_model_len": 4096}
    async with client(library, key=USER) as asked:
        refused = await asked.post("/ui/models/defaults", json=body)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
    async with client(library) as asked:
        assert (await asked.post("/ui/models/defaults", json=body)).status_code == 200
        found = next(each for each in library.shelved() if each.id == MODEL)
        assert (found.defaults["temperature"], found.defaults["max_model_len"]) == (0.1, 4096)
        await asked.post("/ui/models/defaults", json={"model": MODEL, "max_model_len": None})
        assert "max_model_len" not in next(each for each in library.shelved() if each.id == MODEL).defaults
        assert next(each for each in library.shelved() if each.id == MODEL).defaults["temperature"] == 0.1
        for bad in (
            {"model": MODEL, "temperature": -3},
            {"model": MODEL, "colour": "red"},
            {"model": MODEL, "top_k": "x"},
        ):
            reply = await asked.post("/ui/models/defaults", json=bad)
            assert reply.status_code in (400, 422) and reply.json()["error"]["message"], bad


async def test_a_model_that_is_fetched_to_be_used_is_queued_with_that_wish(library: Library, tmp_path: Path) -> None:
    asked_for: list[tuple[str, bool]] = []

    class Scripted(Downloads):
        def add(self, name: str, entry: Any, *, is_to_load: bool = False) -> Download:
            asked_for.append((name, is_to_load))
            return Download(name, entry.repo, None, "queued", is_to_load=is_to_load)

    library.downloads = Scripted(tmp_path / "models")
    async with client(library, key=USER) as asked:
        assert (await asked.post("/ui/models/get", json={"model": MODEL})).status_code == 403
    async with client(library) as asked:
        assert (await asked.post("/ui/models/get", json={"model": MODEL})).json() == {"success": True}
    assert asked_for == [(MODEL, True)]


def test_a_tab_that_watches_is_told_how_each_model_in_memory_is(library: Library) -> None:
    models = FakeModels([ModelStatus(state="loading", model="one", stage="Reading", fraction=0.5, seconds_left=3.0)])
    _, hub = page_of(models_room(library, models, admin))
    (model,) = told(hub, "models")["models"]
    assert (model["model"], model["state"], model["fraction"], model["seconds_left"]) == ("one", "loading", 0.5, 3.0)
