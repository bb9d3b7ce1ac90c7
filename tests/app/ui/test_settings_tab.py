"""The Settings tab's routes: each row with its value, source and when a change holds; the file that keeps changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.guard import admin
from app.settings import SETTINGS_FILE, TABLE, Settings, SettingsError, load
from app.ui.settings_tab import SettingsDesk, settings_room
from tests.app.ui.rooms import ADMIN, USER, page_of


class Desk:
    """The room over a home of its own; `followed` are the settings that the rest of the house was told."""

    def __init__(self, home: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> None:
        self.file = home / SETTINGS_FILE
        self.followed: list[Settings] = []
        self.env = env or {}
        self.running = load({"home": home} | (flags or {}), self.env)
        self.desk = SettingsDesk(self.running, self.env, _check, self.followed.append)

    def client(self, key: Any = ADMIN) -> httpx.AsyncClient:
        app, _ = page_of(settings_room(self.desk, admin), key=key)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    async def rows(self) -> dict[str, dict[str, Any]]:
        async with self.client() as client:
            return {row["name"]: row for row in (await client.get("/ui/settings")).json()["rows"]}

    async def change(self, name: str, value: Any, key: Any = ADMIN) -> httpx.Response:
        async with self.client(key) as client:
            return await client.post("/ui/settings", json={"name": name, "value": value})


def _check(settings: Settings) -> None:
    if settings.host == "0.0.0.0":
        raise SettingsError("Other machines could reach it.")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Desk]:
    return lambda **given: Desk(tmp_path, **given)


async def test_every_setting_is_there_with_its_value_default_and_source(make: Callable[..., Desk]) -> None:
    desk = make(flags={"port": 8123}, env={"FIRESIDE_MAX_MODELS": "2"})
    desk.file.write_text("idle_timeout: 60\n")
    rows = await make(flags={"port": 8123}, env={"FIRESIDE_MAX_MODELS": "2"}).rows()
    assert list(rows) == [row.name for row in TABLE]
    found = {
        name: (rows[name]["value"], rows[name]["source"]) for name in ("port", "max_models", "idle_timeout", "host")
    }
    assert found == {
        "port": (8123, "flag --port"),
        "max_models": (2, "environment FIRESIDE_MAX_MODELS"),
        "idle_timeout": (60.0, SETTINGS_FILE),
        "host": ("127.0.0.1", "default"),
    }
    assert [rows[name]["is_fixed"] for name in ("port", "max_models", "idle_timeout")] == [True, True, False]


async def test_a_key_is_told_by_its_number_and_never_shown(make: Callable[..., Desk]) -> None:
    async with make(flags={"api_key": ("secret-words-1",)}).client() as client:
        reply = await client.get("/ui/settings")
    assert "secret-words" not in reply.text
    assert next(row for row in reply.json()["rows"] if row["name"] == "api_key")["value"] == "1"


async def test_a_change_is_kept_in_the_file_and_told_with_when_it_holds(make: Callable[..., Desk]) -> None:
    desk = make()
    for name, value in (("port", "8200"), ("max_model_len", "4096"), ("max_models", "5"), ("model_fallback", True)):
        assert (await desk.change(name, value)).status_code == 200, name
    assert "port: 8200\n" in desk.file.read_text()
    rows = await desk.rows()
    told = {name: (rows[name]["value"], rows[name]["to_come"], rows[name]["is_pending"]) for name in rows}
    assert told["port"] == (8000, 8200, True)
    assert told["max_model_len"] == (None, 4096, True)
    assert told["max_models"] == (5, 5, False), "it holds at once"
    assert told["model_fallback"] == (True, True, False)
    assert [desk.followed[-1].max_models, desk.followed[-1].max_model_len] == [5, 4096]
    assert load({"home": desk.running.home}, {}).port == 8200, "the next start reads it"


async def test_null_goes_back_to_the_default_and_the_rest_of_the_file_stays(make: Callable[..., Desk]) -> None:
    desk = make()
    desk.file.write_text("# mine\nport: 8200  # for work\n# keep this\nmax_models: 2\n")
    assert (await desk.change("port", 8300)).status_code == 200
    assert (await desk.change("max_models", None)).status_code == 200
    assert desk.file.read_text() == "# mine\nport: 8300\n# keep this\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 99999), ("kv_cache_dtype", "int3"), ("home", "/x"), ("api_key", "secret-words-1"), ("colour", "red")],
)
async def test_what_is_not_allowed_is_refused_and_not_kept(make: Callable[..., Desk], name: str, value: Any) -> None:
    desk = make()
    reply = await desk.change(name, value)
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert not desk.file.exists() and desk.followed == []


async def test_what_fireside_would_not_start_with_is_refused_and_taken_back(make: Callable[..., Desk]) -> None:
    desk = make()
    desk.file.write_text("max_models: 2\n")
    reply = await desk.change("host", "0.0.0.0")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "Other machines could reach it.")
    assert desk.file.read_text() == "max_models: 2\n"


async def test_a_user_may_look_and_not_change(make: Callable[..., Desk]) -> None:
    desk = make()
    assert (await desk.change("port", 8200, key=USER)).status_code == 403
    assert not desk.file.exists()
    async with desk.client(USER) as client:
        assert (await client.get("/ui/settings")).status_code == 200
