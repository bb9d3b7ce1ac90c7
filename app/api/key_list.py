"""GET, POST, DELETE /keys: the keys there are, a new one, one less. For the page alone, whose Settings tab shows them;
what changes here holds at once.
"""

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from app.api.guard import admin
from app.api.keys import KEY_FILE, Keyring, add_key, read_key_file, remove_key
from app.background import in_daemon_thread
from app.errors import AppError
from app.settings import Settings, SettingsError


class NewKeyBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    is_admin: bool = False


def key_list_router(keys: Keyring, settings: Settings, *, must_have_keys: bool) -> APIRouter:
    """keys: the ring that the guard looks at. must_have_keys: other machines can reach this server."""
    path = settings.key_file or settings.home / KEY_FILE
    router = APIRouter(dependencies=[Depends(admin)])

    def in_file() -> set[str]:
        return {key.name for key in read_key_file(path)} if path.is_file() else set()

    def listed() -> list[dict[str, Any]]:
        kept = in_file()
        return [{"name": k.name, "is_admin": k.is_admin, "is_in_file": k.name in kept} for k in keys.keys]

    def make(name: str, is_admin: bool) -> str:
        if not keys.has_admin and not is_admin:
            hint = "Make an admin key first; the page asks for a key from then on."
            what = "With user keys alone nobody could load models or change settings here any more."
            raise AppError(400, "admin_key_first", what, hint=hint, param="is_admin")
        if keys.named(name) is not None:
            raise AppError(409, "already_there", f"There is a key `{name}` already.", param="name")
        words = add_key(path, name, is_admin=is_admin)
        keys.take(Keyring.of(settings).keys)
        return words

    def remove(name: str) -> None:
        left = [key for key in keys.keys if key.name != name]
        if left and not any(key.is_admin for key in left):
            what = "It is the last admin key: nobody could load models or change settings here any more."
            raise AppError(409, "last_admin_key", what, hint="Delete the user keys first.", param="name")
        if not left and must_have_keys:
            what = "It is the last key, and other machines can reach this server."
            raise AppError(409, "last_key", what, hint="Start Fireside with --allow-no-key to let everybody in.")
        remove_key(path, name)
        keys.take(Keyring.of(settings).keys)

    @router.get("/keys")
    async def list_keys() -> dict[str, Any]:
        return {"keys": await in_daemon_thread(listed), "file": str(path)}

    @router.post("/keys")
    async def make_key(body: NewKeyBody, request: Request) -> Response:
        """Its words are told this once. The first key logs the page in that made it, which else would be shut out."""
        is_first = not keys
        try:
            words = await in_daemon_thread(lambda: make(body.name, body.is_admin))
        except SettingsError as error:
            raise AppError(400, "bad_key", str(error), param="name") from None
        reply = JSONResponse({"name": body.name, "key": words})
        made = keys.find(words)
        if is_first and made is not None:
            request.state.login.let_in(reply, made, is_https=request.scope["scheme"] == "https")
        return reply

    @router.delete("/keys")
    async def remove_one(name: str) -> dict[str, bool]:
        try:
            await in_daemon_thread(lambda: remove(name))
        except SettingsError as error:
            raise AppError(
                400, "not_in_file", str(error), hint="Keys of flags and the environment end with them."
            ) from None
        return {"success": True}

    return router
