"""The page's list of keys: what is made holds at once, and nobody is shut out by accident."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.api.guard import Guard
from app.api.key_list import key_list_router
from app.api.keys import KEY_FILE, Keyring
from app.api.limits import Limits
from app.settings import load
from app.ui import refusals


def client(home: Path, *, must_have_keys: bool = False, **flags: object) -> httpx.AsyncClient:
    settings = load({"home": home} | flags, {})
    keys = Keyring.of(settings)
    app = FastAPI()
    refusals.install(app)
    app.include_router(key_list_router(keys, settings, must_have_keys=must_have_keys), prefix="/ui")
    app.add_middleware(Guard, keys=keys, limits=Limits(), is_api=lambda scope: False, refused=lambda error: None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000")


async def test_the_first_key_is_an_admins_and_lets_its_maker_stay(tmp_path: Path) -> None:
    async with client(tmp_path) as page:
        assert (await page.get("/ui/keys")).json()["keys"] == []
        refused = await page.post("/ui/keys", json={"name": "laptop"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "admin_key_first")
        made = (await page.post("/ui/keys", json={"name": "boss", "is_admin": True})).json()
        assert made["key"] not in (tmp_path / KEY_FILE).read_text()
        assert (await page.get("/ui/keys")).status_code == 200, "its cookie came with the reply"
        await page.post("/ui/keys", json={"name": "laptop"})
        assert [key["name"] for key in (await page.get("/ui/keys")).json()["keys"]] == ["laptop", "boss"]
        page.cookies.clear()
        assert (await page.get("/ui/keys")).status_code == 401
        assert (await page.get("/ui/keys", headers={"x-api-key": made["key"]})).status_code == 200


async def test_a_deleted_key_is_let_in_no_more_and_the_others_stay(tmp_path: Path) -> None:
    async with client(tmp_path) as page:
        await page.post("/ui/keys", json={"name": "boss", "is_admin": True})
        laptop = (await page.post("/ui/keys", json={"name": "laptop"})).json()["key"]
        assert (await page.delete("/ui/keys?name=boss")).json()["error"]["code"] == "last_admin_key"
        assert (await page.delete("/ui/keys?name=laptop")).status_code == 200
        page.cookies.clear()
        assert (await page.get("/ui/keys", headers={"x-api-key": laptop})).status_code == 401


async def test_the_last_key_stays_where_others_reach_the_server(tmp_path: Path) -> None:
    async with client(tmp_path, must_have_keys=True) as page:
        await page.post("/ui/keys", json={"name": "boss", "is_admin": True})
        assert (await page.delete("/ui/keys?name=boss")).json()["error"]["code"] == "last_key"
    async with client(tmp_path / "home") as page:
        await page.post("/ui/keys", json={"name": "boss", "is_admin": True})
        assert (await page.delete("/ui/keys?name=boss")).status_code == 200
        page.cookies.clear()
        assert (await page.get("/ui/keys")).json()["keys"] == []


async def test_a_user_key_sees_and_makes_nothing(tmp_path: Path) -> None:
    async with client(tmp_path, api_key=("laptop:right-key-1",), admin_key=("boss:admin-key-1",)) as page:
        user = {"x-api-key": "right-key-1"}
        assert (await page.get("/ui/keys", headers=user)).status_code == 403
        assert (await page.post("/ui/keys", json={"name": "x"}, headers=user)).status_code == 403
        boss = {"x-api-key": "admin-key-1"}
        assert (await page.delete("/ui/keys?name=laptop", headers=boss)).json()["error"]["code"] == "not_in_file"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é"])
async def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    async with client(tmp_path) as page:
        assert (await page.post("/ui/keys", json={"name": name, "is_admin": True})).status_code == 400
    assert not (tmp_path / KEY_FILE).exists()
