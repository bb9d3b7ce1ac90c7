"""Files beside a message: routes `/ui/attachments...`. A file is kept as text; its message names it when it is sent."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from app.background import in_daemon_thread
from app.history.book import Book
from app.history.file_text import MAX_FILE_BYTES, prompt_text, text_of
from app.ui.chats import read_raw

# Tokens of a text for the model in hand; None where none is ready. Raises AppError for one too long to be counted.
Count = Callable[[str], Awaitable[int | None]]


def router(book: Book, count: Count) -> APIRouter:
    attachments, routes = _Attachments(book, count), APIRouter(prefix="/ui/attachments")
    routes.add_api_route("", attachments.attach, methods=["POST"])
    routes.add_api_route("/{attachment_id}/tokens", attachments.tokens, methods=["GET"])
    return routes


class _Attachments:
    def __init__(self, book: Book, count: Count) -> None:
        self._book = book
        self._count = count

    async def attach(self, request: Request, name: str, is_incognito: bool = False) -> dict[str, Any]:
        """The file is the body as it is."""
        shown = " ".join(name.split())[:200] or "file"
        body = await read_raw(request, MAX_FILE_BYTES, shown, hint="Attach a part of it.")

        def keep() -> dict[str, Any]:
            kind, text = text_of(shown, body)
            history = self._book.incognito if is_incognito else self._book.kept
            return asdict(history.attach(shown, kind, len(body), text))

        return await in_daemon_thread(keep)

    async def tokens(self, attachment_id: str, name: str = "") -> dict[str, int | None]:
        """What the file takes of the context as the model reads it; null while no model is ready."""
        text = await in_daemon_thread(lambda: self._book.of(attachment_id).attached_text(attachment_id))
        return {"num_tokens": await self._count(prompt_text("", [(name, text)]))}
