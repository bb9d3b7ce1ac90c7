"""The list of conversations: routes `/ui/chats...`, `/ui/presets...`, `/ui/history...`. What is said is in talk.py.

A tab hears of changes by the topics "chats" (the list) and "chat:ID", and reads again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.background import in_daemon_thread
from app.errors import AppError
from app.history.book import Book, is_incognito
from app.history.search import words_in
from app.history.types import Preset
from app.ui.chat_bodies import ChangeBody, CreateBody, Form, NameBody, NodeBody, PresetBody, chosen
from app.ui.chat_files import import_from, write_files

MAX_IMPORT_BYTES = 256 << 20
_MAX_PLACED = 10_000
_EXPORT_LESS = "Nothing of it was taken. Export fewer chats at a time: the menu of a chat exports it alone."
T = TypeVar("T")


class Talks(Protocol):
    """The face of `app.ui.answers.Answers`.

    turns  held while a chat is looked at and then changed by it
    """

    turns: asyncio.Lock

    def changed(self, chat_id: str) -> None:
        """Tabs that show this chat, or the list, are to read it again."""
        ...

    async def stop_chat(self, chat_id: str) -> None:
        """Its answers in the making end."""
        ...


def router(book: Book, talks: Talks) -> APIRouter:
    chats, presets, file = _Chats(book, talks), _Presets(book), _File(book, talks)
    routes = APIRouter(prefix="/ui")
    for path, get in (
        ("", chats.list),
        ("/search", chats.search),
        ("/export", chats.export),
        ("/{chat_id}", chats.read),
    ):
        routes.add_api_route(f"/chats{path}", get, methods=["GET"])
    for path, post in (("", chats.create), ("/branch", chats.branch), ("/import", chats.bring_in)):
        routes.add_api_route(f"/chats{path}", post, methods=["POST"])
    for path, change in (("", chats.change), ("/delete", chats.delete), ("/restore", chats.restore)):
        routes.add_api_route(f"/chats/{{chat_id}}{path}", change, methods=["POST"])
    routes.add_api_route("/presets", presets.list, methods=["GET"])
    routes.add_api_route("/presets", presets.save, methods=["POST"])
    routes.add_api_route("/presets/delete", presets.delete, methods=["POST"])
    routes.add_api_route("/history", file.state, methods=["GET"])
    routes.add_api_route("/history/set_aside", file.set_aside, methods=["POST"])
    return routes


class _Chats:
    def __init__(self, book: Book, talks: Talks) -> None:
        self._book = book
        self._talks = talks

    async def list(self, folder: str | None = None, offset: int = 0, limit: int = 100) -> dict[str, Any]:
        """A page of the list, and the folders there are. Incognito chats are in no list.

        The first page has all chats that are pinned or in a folder too, so that no folder is shown in part; offset and
        limit count the others.
        """
        num_others = min(limit, 500)

        def read() -> dict[str, Any]:
            history = self._book.kept
            placed = [] if offset > 0 else history.chats(folder=folder, is_placed=True, limit=_MAX_PLACED)
            others = history.chats(folder=folder, is_placed=False, offset=max(0, offset), limit=num_others + 1)
            shown = [asdict(chat) for chat in [*placed, *others[:num_others]]]
            return {"chats": shown, "has_more": len(others) > num_others, "folders": history.folders()}

        return await in_daemon_thread(read)

    async def search(self, q: str) -> dict[str, Any]:
        """words: what was looked for, as it is to be marked."""
        query = q[:500]
        found = await in_daemon_thread(lambda: self._book.kept.search(query))
        return {"found": [asdict(each) for each in found], "words": words_in(query)}

    async def read(self, chat_id: str) -> dict[str, Any]:
        return await self._chat(chat_id, lambda: self._book.of(chat_id).chat(chat_id))

    async def create(self, body: CreateBody) -> dict[str, Any]:
        def create() -> Any:
            chat = self._book.create(is_incognito=body.is_incognito)
            return self._book.of(chat.id).change_chat(chat.id, **chosen(body))

        chat = await in_daemon_thread(create)
        self._talks.changed(chat.id)
        return asdict(chat)

    async def change(self, chat_id: str, body: ChangeBody) -> dict[str, Any]:
        """What the body names; all else stays."""
        changes = chosen(body)
        return await self._changed(chat_id, lambda: self._book.of(chat_id).change_chat(chat_id, **changes))

    async def delete(self, chat_id: str) -> dict[str, Any]:
        """Its answers in the making are stopped first. can_undo: for how many seconds `restore` brings it back."""
        async with self._talks.turns:
            await self._talks.stop_chat(chat_id)
            await in_daemon_thread(lambda: self._book.of(chat_id).delete_chat(chat_id))
        self._talks.changed(chat_id)
        return {"can_undo": not is_incognito(chat_id)}

    async def restore(self, chat_id: str) -> dict[str, Any]:
        return await self._changed(chat_id, lambda: self._book.of(chat_id).restore_chat(chat_id))

    async def branch(self, body: NodeBody) -> dict[str, Any]:
        chat = await in_daemon_thread(lambda: self._book.of(body.node_id).branch(body.node_id))
        self._talks.changed(chat.id)
        return asdict(chat)

    async def export(self, form: Form = "json", ids: str = "") -> Response:
        """One file to save. ids: with commas between them; none takes every chat of the list."""

        def write() -> Response:
            chat_ids = [each for each in ids.split(",") if each]
            history = self._book.of(chat_ids[0]) if chat_ids else self._book.kept
            return write_files(history.export(chat_ids or None), form)

        return await in_daemon_thread(write)

    async def bring_in(self, request: Request) -> dict[str, Any]:
        """The file is the body as it is: JSON, Markdown, or a zip of such. All of it comes in, or none."""
        raw = await read_raw(request, MAX_IMPORT_BYTES, "The file to import", hint=_EXPORT_LESS)
        chats = await in_daemon_thread(lambda: import_from(self._book.kept, raw))
        for chat in chats:
            self._talks.changed(chat.id)
        return {"chats": [asdict(chat) for chat in chats]}

    async def _chat(self, chat_id: str, work: Callable[[], Any]) -> dict[str, Any]:
        return {**asdict(await in_daemon_thread(work)), "is_incognito": is_incognito(chat_id)}

    async def _changed(self, chat_id: str, work: Callable[[], Any]) -> dict[str, Any]:
        told = await self._chat(chat_id, work)
        self._talks.changed(chat_id)
        return told


class _Presets:
    def __init__(self, book: Book) -> None:
        self._book = book

    async def list(self) -> dict[str, Any]:
        presets = await in_daemon_thread(lambda: self._book.kept.presets())
        return {"presets": [asdict(preset) for preset in presets]}

    async def save(self, body: PresetBody) -> dict[str, Any]:
        preset = Preset(**chosen(body))
        await in_daemon_thread(lambda: self._book.kept.save_preset(preset))
        return asdict(preset)

    async def delete(self, body: NameBody) -> dict[str, Any]:
        await in_daemon_thread(lambda: self._book.kept.delete_preset(body.name))
        return {}


class _File:
    def __init__(self, book: Book, talks: Talks) -> None:
        self._book = book
        self._talks = talks

    async def state(self) -> dict[str, Any]:
        """Where the history lies, and why it cannot be used, where that is so."""

        def look() -> dict[str, Any]:
            try:
                _ = self._book.kept
            except AppError as error:
                return {"path": str(self._book.path), "error": error.as_fields()}
            return {"path": str(self._book.path), "error": None}

        return await in_daemon_thread(look)

    async def set_aside(self, request: Request) -> dict[str, Any]:
        """Begin a new history; the file that cannot be used stays beside it under the name that is told."""
        if not request.state.key.is_admin:
            raise AppError(403, "admin_key_required", "Only an admin key may begin a new history.")
        goal = await in_daemon_thread(self._book.set_aside)
        self._talks.changed("")
        return {"moved_to": str(goal)}


async def read_raw(request: Request, max_bytes: int, what: str, *, hint: str) -> bytes:
    """A body that is a file. Raises AppError 413 before it is read whole, with this hint."""
    told = int(request.headers.get("content-length") or 0)
    body = bytearray()
    if told <= max_bytes:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                break
    if max(told, len(body)) > max_bytes:
        raise AppError(413, "file_too_large", f"{what} is larger than {max_bytes >> 20} MB.", hint=hint)
    return bytes(body)
