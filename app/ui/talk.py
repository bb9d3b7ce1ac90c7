"""What a tab asks of its conversation: send, answer again, go on, stop, look at other versions. Routes `/ui/talk/...`.

Every reply is small: a chat is read in its last messages first, and pieces of answers come over the tab's socket.
"""

from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from app.background import in_daemon_thread
from app.chat.types import ChatRequest
from app.errors import AppError
from app.history.book import Book
from app.history.history import History
from app.history.types import Chat, Node, Preset
from app.ui.answers import Answers
from app.ui.chat_bodies import PresetBody, SamplingBody, chosen
from app.ui.prompts import Way, request_for

NUM_AT_ONCE = 40  # messages of a chat that are read at a time
MAX_SIDE_BY_SIDE = 4

_GOES_ON = ("stopped", "cut", "failed", "done")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class WayBody(_Body):
    """How one answer is made (`app.ui.prompts.Way`)."""

    model_id: str = Field(default="", max_length=500)
    preset: PresetBody | None = None
    sampling: SamplingBody = SamplingBody()

    def way(self) -> Way:
        return Way(self.model_id, Preset(**chosen(self.preset)) if self.preset else None, chosen(self.sampling))


class Send(_Body):
    """
    chat_id     None begins a chat
    parent_id   the message that this one follows; None is the chat's beginning
    is_version  it takes the place of another below `parent_id`; else it goes on at the end of what the chat shows, and
                is refused where another tab has put something else there
    ways        of its answers: several stand side by side
    """

    chat_id: str | None = None
    is_incognito: bool = False
    parent_id: str | None = None
    is_version: bool = False
    text: str = Field(max_length=4_000_000)
    attachment_ids: list[str] = Field(default_factory=list)
    ways: list[WayBody] = Field(default_factory=lambda: [WayBody()], min_length=1, max_length=MAX_SIDE_BY_SIDE)
    shows_probabilities: bool = False


class AnswerAgain(_Body):
    """node_id: the message of the user that is answered once more."""

    node_id: str
    ways: list[WayBody] = Field(default_factory=lambda: [WayBody()], min_length=1, max_length=MAX_SIDE_BY_SIDE)
    shows_probabilities: bool = False


class OfNode(_Body):
    node_id: str


class Turn(_Body):
    """step: how many versions further; -1 is the one before."""

    node_id: str
    step: int = 0


def router(book: Book, answers: Answers) -> APIRouter:
    talk, routes = _Talk(book, answers), APIRouter(prefix="/ui/talk")
    routes.add_api_route("/chat/{chat_id}", talk.read, methods=["GET"])
    routes.add_api_route("/earlier/{node_id}", talk.earlier, methods=["GET"])
    routes.add_api_route("/tokens/{node_id}", talk.tokens, methods=["GET"])
    for name in ("send", "again", "go_on", "stop", "turn"):
        routes.add_api_route(f"/{name}", getattr(talk, name), methods=["POST"])
    return routes


class _Talk:
    def __init__(self, book: Book, answers: Answers) -> None:
        self._book = book
        self._answers = answers

    async def read(self, chat_id: str) -> dict[str, Any]:
        """The chat and its last messages."""

        def read() -> dict[str, Any]:
            history = self._book.of(chat_id)
            chat = history.chat(chat_id)
            return {"chat": asdict(chat), **self._page(history, chat.leaf_id)}

        return await in_daemon_thread(read)

    async def earlier(self, node_id: str) -> dict[str, Any]:
        """Messages down to this one."""
        return await in_daemon_thread(lambda: self._page(self._book.of(node_id), node_id))

    async def tokens(self, node_id: str) -> Any:
        """The answer token by token, each with its probability and the likeliest at its place."""
        node = await self._node(node_id)
        return {"tokens": node.meta.get("tokens", [])}

    async def send(self, sent: Send) -> dict[str, Any]:
        """A message, kept when this returns, and its answers, which have begun."""
        if not sent.text.strip() and not sent.attachment_ids:
            raise AppError(400, "empty_message", "The message is empty.")

        def keep() -> tuple[Chat, Node]:
            if sent.chat_id is None:
                chat = self._book.create(is_incognito=sent.is_incognito)
            else:
                chat = self._book.of(sent.chat_id).chat(sent.chat_id)
            history = self._book.of(chat.id)
            _check_is_over(history, sent.parent_id)
            if not sent.is_version and sent.parent_id != chat.leaf_id:
                raise _moved_on()
            node = history.add(chat.id, sent.parent_id, "user", sent.text, attachment_ids=sent.attachment_ids)
            return chat, node

        async with self._answers.turns:
            chat, node = await in_daemon_thread(keep)
            begun = await self._answer(node, sent)
        return {"chat_id": chat.id, "nodes": [_shown(node), *begun]}

    async def again(self, asked: AnswerAgain) -> dict[str, Any]:
        def question() -> Node:
            history = self._book.of(asked.node_id)
            node = history.node(asked.node_id)
            if node.role != "user":
                raise AppError(400, "no_question", "Only a message of yours can be answered again.")
            leaf_id = history.chat(node.chat_id).leaf_id
            leaf = history.node(leaf_id) if leaf_id else node
            if leaf.parent_id == node.id and leaf.state == "writing":  # another tab has asked this at the same moment
                raise AppError(
                    409, "still_writing", "This message is being answered already.", hint="Stop it, or wait."
                )
            return node

        async with self._answers.turns:
            node = await in_daemon_thread(question)
            return {"nodes": await self._answer(node, asked)}

    async def go_on(self, asked: OfNode) -> dict[str, Any]:
        """Go on with an answer that ended before it was complete."""

        def prepare() -> tuple[Node, ChatRequest]:
            history = self._book.of(asked.node_id)
            node = history.node(asked.node_id)
            if node.role != "assistant" or node.state not in _GOES_ON:
                raise AppError(409, "cannot_go_on", "This answer is still being written.")
            way = Way.of(node.meta) if "beside" in node.meta else None  # gone on with as it was begun
            request = request_for(history, history.chat(node.chat_id), history.path(node.id), way)
            node = replace(node, state="writing", reasoning=node.reasoning if node.text else "")
            history.write(node.id, reasoning=node.reasoning, state="writing")
            return node, request

        async with self._answers.turns:
            node, request = await in_daemon_thread(prepare)
            self._answers.begin(node, request)
        return {"nodes": [_shown(node)]}

    async def stop(self, asked: OfNode) -> dict[str, Any]:
        return {"is_stopped": await self._answers.stop(asked.node_id)}

    async def turn(self, asked: Turn) -> dict[str, Any]:
        """Show another version of a message, and what follows it."""

        def select() -> Node:
            history = self._book.of(asked.node_id)
            versions = history.siblings(asked.node_id)
            place = [each.id for each in versions].index(asked.node_id) + asked.step
            node = versions[min(max(place, 0), len(versions) - 1)]
            history.select(node.chat_id, node.id)
            return node

        node = await in_daemon_thread(select)
        self._answers.changed(node.chat_id)
        return {"node_id": node.id}

    async def _answer(self, node: Node, asked: Send | AnswerAgain) -> list[dict[str, Any]]:
        """Begin the answers to a message of the user. What was being written in their place ends, so that nothing is
        written where no tab sees it.
        """
        ways = [each.way() for each in asked.ways]
        meta = {"beside": node.id} if len(ways) > 1 else {}

        def prepare() -> list[tuple[Node, ChatRequest]]:
            history = self._book.of(node.id)
            chat, path = history.chat(node.chat_id), history.path(node.id)
            requests = [
                request_for(history, chat, path, way, shows_probabilities=asked.shows_probabilities) for way in ways
            ]
            places = [
                history.add(
                    node.chat_id,
                    node.id,
                    "assistant",
                    state="writing",
                    meta={**meta, **way.kept(), "model_id": request.model},
                    is_shown=way is ways[0],
                )
                for way, request in zip(ways, requests, strict=True)
            ]
            return list(zip(places, requests, strict=True))

        begun = await in_daemon_thread(prepare)
        for place, request in begun:
            self._answers.begin(place, request)
        if not isinstance(asked, Send) or asked.is_version:
            await self._answers.stop_chat(node.chat_id, but=[place.id for place, _ in begun])
        return [_shown(place) for place, _ in begun]

    async def _node(self, node_id: str) -> Node:
        return await in_daemon_thread(lambda: self._book.of(node_id).node(node_id))

    def _page(self, history: History, leaf_id: str | None) -> dict[str, Any]:
        nodes = history.path(leaf_id, limit=NUM_AT_ONCE)
        return {"nodes": [self._with_those_beside(history, node) for node in nodes]}

    def _with_those_beside(self, history: History, node: Node) -> dict[str, Any]:
        shown = _shown(node)
        if beside := node.meta.get("beside"):
            versions = history.siblings(node.id)
            shown["beside"] = [_shown(each) for each in versions if each.meta.get("beside") == beside]
        return shown


def _check_is_over(history: History, node_id: str | None) -> None:
    if node_id is not None and history.node(node_id).state == "writing":
        raise AppError(409, "still_writing", "The answer before it is still being written.", hint="Stop it, or wait.")


def _moved_on() -> AppError:
    return AppError(
        409,
        "chat_moved_on",
        "This chat has gone on in another tab meanwhile, so this message was not sent.",
        hint="Look at what is there now, then send it again.",
    )


def _shown(node: Node) -> dict[str, Any]:
    """For a tab: without the probabilities, which it asks for by themselves."""
    fields = asdict(node)
    fields["meta"] = {name: value for name, value in node.meta.items() if name != "tokens"}
    fields["has_tokens"] = "tokens" in node.meta
    return fields
