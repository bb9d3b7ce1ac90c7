"""The Settings tab: every row of the table with its value, where that came from, and when another one would hold; a
changed value goes into settings.yaml, and holds at once where it can.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict

from app import settings as settings_module
from app.background import in_daemon_thread
from app.errors import AppError
from app.models.own_catalog import put_key, remove_block
from app.settings import SETTINGS_FILE, TABLE, Setting, Settings, SettingsError, with_source
from app.ui.live import Hub

_HEADING = "# Fireside's settings; `python launch.py --help` lists them.\n"


class ChangeBody(BaseModel):
    """value: as text, a switch or a list; null takes it out of the file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: bool | int | float | str | list[str] | None


class SettingsDesk:
    """
    running  the settings of this run
    env      the environment that it was started with
    check    raises SettingsError for settings that Fireside would not start with
    follow   is told the settings as they would be now; it takes what can change in a run
    """

    def __init__(
        self,
        running: Settings,
        env: Mapping[str, str],
        check: Callable[[Settings], None],
        follow: Callable[[Settings], None],
    ) -> None:
        self._running = running
        self._env = env
        self._check = check
        self._follow = follow
        self._path = running.home / SETTINGS_FILE

    def told(self) -> dict[str, Any]:
        """Blocks. Raises AppError for a file that cannot be read."""
        to_come = self._to_come()
        return {"file": str(self._path), "rows": [self._row(row, to_come) for row in TABLE]}

    def change(self, name: str, value: Any) -> Settings:
        """Into the file, or out of it. Returns the settings to come; raises AppError (400), the file as it was."""
        row = next((row for row in TABLE if row.name == name), None)
        if row is None or row.is_secret or name == "home":
            raise AppError(400, "bad_setting", f"`{name[:100]}` cannot be set in {SETTINGS_FILE}.", param="name")
        before = self._path.read_text("utf-8") if self._path.exists() else None
        to_come = None
        try:
            if value is None:
                remove_block(self._path, name)
            else:
                put_key(self._path, name, _plain(row.value(value, f"`{name}`"), value), _HEADING)
            to_come = self._load()
            self._check(to_come)
        except SettingsError as error:
            self._restore(before)
            told = str(error) if to_come is None or error.setting == name else with_source(error, to_come)
            raise AppError(400, "bad_setting", told, param="value") from None
        return to_come

    def follow(self, to_come: Settings) -> None:
        """On the event loop."""
        self._follow(to_come)

    def _restore(self, before: str | None) -> None:
        if before is None:
            self._path.unlink(missing_ok=True)
        else:
            self._path.write_text(before, "utf-8")

    def _to_come(self) -> Settings:
        try:
            return self._load()
        except SettingsError as error:
            raise AppError(400, "bad_setting", str(error)) from None

    def _load(self) -> Settings:
        """What another start with the same flags and environment would find."""
        flagged = [row.name for row in TABLE if self._running.sources[row.name].startswith("flag")]
        flags = {name: getattr(self._running, name) for name in flagged} | {"home": self._running.home}
        return settings_module.load(flags, self._env)

    def _row(self, row: Setting, to_come: Settings) -> dict[str, Any]:
        now, then = getattr(self._running, row.name), getattr(to_come, row.name)
        source = self._running.sources[row.name]
        holds_now = row.applies == "now"
        return {
            "name": row.name,
            "flag": row.flag,
            "env": row.env,
            "help": row.help,
            "allowed": row.allowed,
            "default": row.shown_default,
            "value": _shown(row, then if holds_now else now),
            "to_come": _shown(row, then),
            "source": to_come.sources[row.name] if holds_now and row.name != "home" else source,
            "applies": row.applies,
            "is_pending": now != then and not holds_now,
            "is_fixed": row.is_secret or row.name == "home" or source.startswith(("flag", "environment")),
            "kind": _kind(row),
            "choices": list(row.choices),
        }


def settings_room(desk: SettingsDesk, admin: Callable[[Request], None]) -> Callable[[FastAPI, Hub], None]:
    router = APIRouter(prefix="/ui/settings", include_in_schema=False)

    @router.get("")
    async def told() -> dict[str, Any]:
        return await in_daemon_thread(desk.told)

    @router.post("", dependencies=[Depends(admin)])
    async def change(body: ChangeBody) -> dict[str, Any]:
        to_come = await in_daemon_thread(lambda: desk.change(body.name, body.value))
        desk.follow(to_come)
        return await in_daemon_thread(desk.told)

    def on_page(app: FastAPI, hub: Hub) -> None:
        app.include_router(router)

    return on_page


def _kind(row: Setting) -> str:
    """How it is asked for."""
    if row.takes == "list":
        return "list"
    if isinstance(row.default, bool):
        return "switch"
    return "choice" if row.choices else "text"


def _plain(checked: Any, given: Any) -> Any:
    """What goes into the file: a number as a number, all else as it was written."""
    if isinstance(checked, float) and checked.is_integer():
        return int(checked)
    return checked if isinstance(checked, bool | int | float | str) else given


def _shown(row: Setting, value: Any) -> Any:
    """A secret is told by how many of it there are; None where the default is no plain value."""
    if row.is_secret:
        return str(len(value)) if value else None
    if isinstance(value, tuple):
        return ["=".join(each) if isinstance(each, tuple) else str(each) for each in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else value  # 30, not 30.0
    return str(value) if isinstance(value, Path) else value
