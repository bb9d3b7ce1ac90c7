"""Chats as JSON, whole: every version of every message, settings, files. Out, and in again.

{"format": "fireside-chats", "version": 1, "chats": [{"title": ..., "messages": [{"id": ..., "parent_id": ...}]}]}
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from app.errors import AppError
from app.history.types import Role, State

FORMAT = "fireside-chats"
VERSION = 1
_PROGRAM_BY_KEY = {"mapping": "ChatGPT", "chat_messages": "Claude", "chat": "Open WebUI"}  # of a chat in its files


class _Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WholeFile(_Whole):
    """An attachment with its text. num_bytes: of the file that the text was taken from."""

    name: str
    kind: str = "text"
    num_bytes: int = Field(default=0, ge=0, lt=2**53)
    text: str


class WholeMessage(_Whole):
    """id, parent_id: within this chat of this file alone."""

    id: str
    parent_id: str | None = None
    role: Role
    text: str
    reasoning: str = ""
    state: State = "done"
    meta: dict[str, JsonValue] = Field(default_factory=dict)
    created_at: float = 0.0
    attachments: tuple[WholeFile, ...] = ()


class WholeChat(_Whole):
    """messages: parents before their children. leaf_id: the end of what is shown."""

    title: str
    folder: str = ""
    is_pinned: bool = False
    model_id: str = ""
    system: str = ""
    sampling: dict[str, JsonValue] = Field(default_factory=dict)
    created_at: float = 0.0
    updated_at: float = 0.0
    leaf_id: str | None = None
    messages: tuple[WholeMessage, ...] = ()


def write_json(chats: Sequence[WholeChat]) -> str:
    body = {"format": FORMAT, "version": VERSION, "chats": [chat.model_dump(exclude_defaults=True) for chat in chats]}
    return json.dumps(body, ensure_ascii=False, indent=1)


def is_json(text: str) -> bool:
    """It is, or is meant to be: what breaks off is told so."""
    if text.lstrip()[:1] in ("{", "["):
        return True
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def read_json(text: str) -> list[WholeChat]:
    """Raises AppError 400 that says where the file is not as it should be."""
    try:
        body = from_json(text, allow_inf_nan=False)  # what json takes beyond JSON could not be sent to a page
    except ValueError as error:
        raise refusal(f"it is no JSON ({error})") from None
    if not isinstance(body, dict | list):
        raise refusal(f"it is JSON of a single value ({json.dumps(body, ensure_ascii=False)[:40]}), and no chats")
    if program := _program_of(body):
        raise refusal(f"it is an export of {program}, which Fireside does not read")
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise refusal(f'it is JSON of another program: it does not say "format": "{FORMAT}"')
    if body.get("version") != VERSION:
        raise refusal(f"it has version {body.get('version')!r}, and this Fireside reads version {VERSION}")
    chats = body.get("chats")
    if not isinstance(chats, list):
        raise refusal("its `chats` is no list")
    return [_read_chat(chat, number) for number, chat in enumerate(chats, 1)]


def _program_of(body: dict[str, Any] | list[Any]) -> str | None:
    first = body[0] if isinstance(body, list) and body else body
    keys = first.keys() if isinstance(first, dict) else ()
    return next((program for key, program in _PROGRAM_BY_KEY.items() if key in keys), None)


def _read_chat(body: Any, number: int) -> WholeChat:
    if not isinstance(body, dict):
        raise refusal(f"its chat {number} is {json.dumps(body, ensure_ascii=False)[:40]}, and no object of JSON")
    try:
        chat = WholeChat.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise refusal(f"chat {number}, {place or 'as a whole'}: {first['msg']}") from None
    for fault in _faults(chat):
        raise refusal(f"chat {number}, {chat.title!r}: {fault}")
    return chat


def _faults(chat: WholeChat) -> Iterator[str]:
    """What is wrong with the tree of its messages."""
    known: set[str] = set()
    for message in chat.messages:
        if message.id in known:
            yield f"two messages have the id {message.id!r}"
        if message.parent_id is not None and message.parent_id not in known:
            yield f"message {message.id!r} does not come after its parent {message.parent_id!r}"
        known.add(message.id)
    if chat.leaf_id is not None and chat.leaf_id not in known:
        yield f"its leaf_id {chat.leaf_id!r} is none of its messages"


def refusal(why: str) -> AppError:
    return AppError(
        400,
        "bad_import",
        f"This file cannot be imported: {why}.",
        hint="Nothing of it was taken. Choose a JSON, Markdown or zip file that Fireside exported.",
    )
