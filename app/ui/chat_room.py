"""The chat's room of the page: answers in the making over a book of chats, and the routes by which tabs reach them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from app.history.book import Book
from app.ui import attachments, chats, talk
from app.ui.answers import Answers
from app.ui.attachments import Count
from app.ui.live import Hub
from app.ui.status import Answerer, StatusOf


def chat_room(service: Answerer, status: StatusOf, book: Book, count: Count) -> Callable[[FastAPI, Hub], None]:
    """The room owns the book and closes it with the page. count: tokens of a text for the model in hand."""

    def on_page(app: FastAPI, hub: Hub) -> None:
        answers = Answers(service, status, book, hub)
        for router in (talk.router(book, answers), chats.router(book, answers), attachments.router(book, count)):
            app.include_router(router)
        _close_with(app, answers, book)

    return on_page


def _close_with(app: FastAPI, answers: Answers, book: Book) -> None:
    opened = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[object]:
        async with opened(app) as state:
            try:
                yield state
            finally:
                await answers.close()
                book.close()

    app.router.lifespan_context = lifespan  # type: ignore[assignment]
