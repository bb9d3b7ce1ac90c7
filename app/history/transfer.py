"""Whole chats out of the database and into it, inside a transaction of app.history.history."""

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from app.history import rows
from app.history.exchange import WholeChat, WholeFile, WholeMessage
from app.history.types import Chat, Node


def read_whole(db: sqlite3.Connection, chat: Chat) -> WholeChat:
    messages = [rows.node(row) for row in db.execute(rows.TREE, {"chat_id": chat.id})]
    return WholeChat(
        title=chat.title,
        folder=chat.folder,
        is_pinned=chat.is_pinned,
        model_id=chat.model_id,
        system=chat.system,
        sampling=dict(chat.sampling),
        created_at=chat.created_at,
        updated_at=chat.updated_at,
        leaf_id=chat.leaf_id,
        messages=tuple(_read_message(db, message) for message in messages),
    )


def _read_message(db: sqlite3.Connection, node: Node) -> WholeMessage:
    return WholeMessage(
        id=node.id,
        parent_id=node.parent_id,
        role=node.role,
        text=node.text,
        reasoning=node.reasoning,
        state=node.state,
        meta=dict(node.meta),
        created_at=node.created_at,
        attachments=tuple(_read_file(db, each.id) for each in node.attachments),
    )


def _read_file(db: sqlite3.Connection, attachment_id: str) -> WholeFile:
    row = db.execute("SELECT name, kind, num_bytes, text FROM attachments WHERE id = ?", [attachment_id]).fetchone()
    return WholeFile(**dict(row))


def insert_whole(db: sqlite3.Connection, chat: WholeChat, new_id: Callable[[], str]) -> str:
    """Everything gets an id of its own, so that a chat can come in twice. Gives the chat's."""
    chat_id, now = new_id(), time.time()
    ids = {message.id: new_id() for message in chat.messages}
    rows.insert(
        db,
        "chats",
        {
            **chat.model_dump(exclude={"messages", "sampling"}),
            "id": chat_id,
            "is_pinned": int(chat.is_pinned),
            "sampling": rows.as_json(chat.sampling),
            "leaf_id": ids.get(chat.leaf_id or ""),
            "created_at": chat.created_at or now,
            "updated_at": chat.updated_at or now,
        },
    )
    for message in chat.messages:
        _insert_message(db, message, chat_id, ids, new_id)
    return chat_id


def _insert_message(
    db: sqlite3.Connection, message: WholeMessage, chat_id: str, ids: dict[str, str], new_id: Callable[[], str]
) -> None:
    attachments = [_insert_file(db, file, chat_id, new_id()) for file in message.attachments]
    rows.insert(
        db,
        "nodes",
        {
            **message.model_dump(exclude={"attachments", "meta"}),
            "id": ids[message.id],
            "chat_id": chat_id,
            "parent_id": ids.get(message.parent_id or ""),
            "state": "cut" if message.state == "writing" else message.state,  # its writer is elsewhere
            "created_at": message.created_at or time.time(),
            "attachments": rows.as_json(attachments),
            "meta": rows.as_json(message.meta),
        },
    )


def _insert_file(db: sqlite3.Connection, file: WholeFile, chat_id: str, its_id: str) -> dict[str, Any]:
    rows.insert(db, "attachments", {**file.model_dump(), "id": its_id, "chat_id": chat_id, "created_at": time.time()})
    summary = file.model_dump(exclude={"text"})
    return {**summary, "id": its_id, "num_chars": len(file.text)}
