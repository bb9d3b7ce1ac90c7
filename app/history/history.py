"""Conversations that outlive the server: chats, each a tree of messages, in SQLite.

Knows no HTTP. Every method blocks (call it through `app.background`) and may be called from any thread. What has
returned outlives a kill of the process, and a loss of power too unless it is a piece of an answer in the making.
"""

import itertools
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from app.errors import AppError
from app.history import rows
from app.history.database import Database
from app.history.exchange import WholeChat
from app.history.search import find, merge_index
from app.history.transfer import insert_whole, read_whole
from app.history.types import Attachment, Chat, Found, Node, Preset, Role, State

UNDO_S = 600.0
_UNUSED_S = 86_400.0  # that a file waits for the message it was attached to, and an empty chat for its first
_MERGED_AT_ONCE = 200  # pages of the index; others may write in between
_TITLE_CHARS = 60
_ALL = 1 << 62
_CHANGEABLE = ("title", "folder", "is_pinned", "model_id", "system", "sampling")


class History:
    """
    path       of the file; None keeps all in memory, and it is gone after `close`
    id_prefix  of every id that is made here
    undo_s     that a deleted chat can be brought back; then nothing of it stays in the file

    Methods raise AppError: 404 for what is not there, 503 for a file that cannot be used (app.history.refusals).
    """

    def __init__(self, path: Path | None, *, id_prefix: str = "", undo_s: float = UNDO_S) -> None:
        self._id_prefix = id_prefix
        self._undo_s = undo_s
        self._writer = _own_name()
        self._database = Database(path)
        try:
            self._cut_answers_of_the_dead()
            self._forget_old()
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Answers that are being written here are cut; where that cannot be written, the next start does it."""
        with suppress(AppError), self._database.writing() as db:
            db.execute("UPDATE nodes SET state = 'cut' WHERE state = 'writing' AND writer = ?", [self._writer])
        self._database.close()

    def check(self) -> None:
        """Read the whole file. Raises AppError 503 history_damaged."""
        self._database.check()

    # Chats

    def create_chat(
        self,
        title: str = "",
        *,
        folder: str = "",
        model_id: str = "",
        system: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Without a title its first message gives it one."""
        chat_id, now = self._new_id(), time.time()
        values: dict[str, Any] = {"id": chat_id, "title": title, "folder": folder, "is_pinned": 0, "model_id": model_id}
        values |= {"system": system, "sampling": rows.as_json(sampling or {}), "created_at": now, "updated_at": now}
        with self._database.writing() as db:
            rows.insert(db, "chats", values)
            return _chat(db, chat_id)

    def chat(self, chat_id: str) -> Chat:
        with self._database.reading() as db:
            return _chat(db, chat_id)

    def chats(
        self, *, folder: str | None = None, is_placed: bool | None = None, limit: int = 100, offset: int = 0
    ) -> list[Chat]:
        """Pinned ones first, then by their last message; not those that nothing was said or chosen in.

        folder     None takes all
        is_placed  only those that are pinned or in a folder, or only those that are neither; None takes both
        """
        sql = f"""
            SELECT {rows.CHAT} FROM chats
            WHERE deleted_at IS NULL AND NOT {rows.IS_EMPTY} AND (:folder IS NULL OR folder = :folder)
                AND (:is_placed IS NULL OR (is_pinned OR folder <> '') = :is_placed)
            ORDER BY is_pinned DESC, updated_at DESC, id LIMIT :limit OFFSET :offset
        """
        with self._database.reading() as db:
            values = {"folder": folder, "is_placed": is_placed, "limit": limit, "offset": offset}
            found = db.execute(sql, values)
            return [rows.chat(row) for row in found]

    def folders(self) -> list[str]:
        with self._database.reading() as db:
            sql = "SELECT DISTINCT folder FROM chats WHERE deleted_at IS NULL AND folder <> '' ORDER BY folder"
            return [row["folder"] for row in db.execute(sql)]

    def change_chat(self, chat_id: str, **changes: Any) -> Chat:
        """changes: of title, folder, is_pinned, model_id, system, sampling."""
        assert set(changes) <= set(_CHANGEABLE), f"a chat has nothing like {set(changes) - set(_CHANGEABLE)} to change"
        if "sampling" in changes:
            changes["sampling"] = rows.as_json(changes["sampling"])
        with self._database.writing() as db:
            _chat(db, chat_id)
            for name, value in changes.items():
                db.execute(f"UPDATE chats SET {name} = ? WHERE id = ?", [value, chat_id])
            return _chat(db, chat_id)

    def delete_chat(self, chat_id: str) -> None:
        """It is gone at once, but can be brought back for a while (`undo_s`)."""
        with self._database.writing() as db:
            _chat(db, chat_id)
            db.execute("UPDATE chats SET deleted_at = ? WHERE id = ?", [time.time(), chat_id])
        self._forget_old()

    def restore_chat(self, chat_id: str) -> Chat:
        with self._database.writing() as db:
            db.execute("UPDATE chats SET deleted_at = NULL WHERE id = ?", [chat_id])
            return _chat(db, chat_id)

    # Messages

    def add(
        self,
        chat_id: str,
        parent_id: str | None,
        role: Role,
        text: str = "",
        *,
        reasoning: str = "",
        state: State = "done",
        attachment_ids: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
        is_shown: bool = True,
    ) -> Node:
        """A message below `parent_id`, one more version if that has any already.

        is_shown  it becomes the end of what the chat shows
        """
        node_id, now = self._new_id(), time.time()
        values: dict[str, Any] = {"id": node_id, "chat_id": chat_id, "parent_id": parent_id, "role": role, "text": text}
        values |= {"reasoning": reasoning, "state": state, "meta": rows.as_json(meta or {}), "created_at": now}
        values["writer"] = self._writer if state == "writing" else None
        with self._database.writing() as db:
            chat = _chat(db, chat_id)
            if parent_id is not None and _node(db, parent_id).chat_id != chat_id:
                raise _not_found("message", parent_id)
            attachments = [_claim(db, each, chat_id) for each in attachment_ids]
            rows.insert(db, "nodes", values | {"attachments": rows.as_json([asdict(each) for each in attachments])})
            db.execute("UPDATE chats SET updated_at = ? WHERE id = ?", [now, chat_id])
            if is_shown:
                db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", [node_id, chat_id])
            if not chat.title and role == "user":
                title = _title(text.strip() or " ".join(each.name for each in attachments))
                db.execute("UPDATE chats SET title = ? WHERE id = ?", [title, chat_id])
            return _node(db, node_id)

    def write(
        self,
        node_id: str,
        *,
        text: str | None = None,
        reasoning: str | None = None,
        state: State = "writing",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """What a message is by now: whole texts, not pieces; None leaves one as it is."""
        values = {
            "id": node_id,
            "text": text,
            "reasoning": reasoning,
            "state": state,
            "writer": self._writer if state == "writing" else None,
            "meta": None if meta is None else rows.as_json(meta),
        }
        sql = """
            UPDATE nodes SET text = coalesce(:text, text), reasoning = coalesce(:reasoning, reasoning),
                meta = coalesce(:meta, meta), state = :state, writer = :writer WHERE id = :id
        """
        with self._database.writing(outlasts_power=state != "writing") as db:
            if db.execute(sql, values).rowcount == 0:
                raise _not_found("message", node_id)

    def node(self, node_id: str) -> Node:
        with self._database.reading() as db:
            return _node(db, node_id)

    def path(self, leaf_id: str | None, *, limit: int | None = None) -> list[Node]:
        """From a chat's first message down to `leaf_id`; with `limit` the last so many (the rest is the path of the
        first one's parent). None is an empty path.
        """
        with self._database.reading() as db:
            found = db.execute(rows.PATH, {"leaf_id": leaf_id, "limit": limit or _ALL})
            return [rows.node(row) for row in found]

    def siblings(self, node_id: str) -> list[Node]:
        """All versions of a message, itself included, in the order of their making."""
        with self._database.reading() as db:
            node = _node(db, node_id)
            found = db.execute(rows.VERSIONS, {"parent_id": node.parent_id, "chat_id": node.chat_id})
            return [rows.node(row) for row in found]

    def select(self, chat_id: str, node_id: str) -> Chat:
        """Show the branch that this message is in, down to the newest message below it; one that is shown stays."""
        with self._database.writing() as db:
            chat = _chat(db, chat_id)
            if _node(db, node_id).chat_id != chat_id:
                raise _not_found("message", node_id)
            if node_id in _ids_above(db, chat.leaf_id):
                return chat
            leaf_id = db.execute(rows.NEWEST_BELOW, {"id": node_id}).fetchone()["id"]
            db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", [leaf_id, chat_id])
            return _chat(db, chat_id)

    def search(self, query: str, *, limit: int = 50) -> list[Found]:
        """Chats with all words of the query in their title or in one message (app.history.search)."""
        with self._database.reading() as db:
            return find(db, query, limit)

    # Whole chats

    def export(self, chat_ids: Sequence[str] | None = None) -> list[WholeChat]:
        """All that they are; None takes every chat. For `write_json` and `write_markdown`."""
        with self._database.reading() as db:
            sql = f"SELECT id FROM chats WHERE deleted_at IS NULL AND NOT {rows.IS_EMPTY} ORDER BY updated_at DESC, id"
            ids = [row["id"] for row in db.execute(sql)] if chat_ids is None else chat_ids
        return [self._whole(chat_id) for chat_id in ids]  # one by one: answers in the making are written in between

    def _whole(self, chat_id: str) -> WholeChat:
        with self._database.reading() as db:
            return read_whole(db, _chat(db, chat_id))

    def import_(self, chats: Sequence[WholeChat]) -> list[Chat]:
        """All of them or, where that fails, none; beside what is there already."""
        with self._database.writing() as db:
            return [_chat(db, insert_whole(db, chat, self._new_id)) for chat in chats]

    def branch(self, node_id: str) -> Chat:
        """A new chat with what leads to this message, and nothing else of its chat; its title has a number."""
        with self._database.writing() as db:
            chat = _chat(db, _node(db, node_id).chat_id)
            above = _ids_above(db, node_id)
            whole = read_whole(db, chat)
            kept = tuple(message for message in whole.messages if message.id in above)
            titles = {row["title"] for row in db.execute("SELECT title FROM chats")}
            title = _numbered(chat.title, titles)
            now = {
                "title": title,
                "leaf_id": node_id,
                "is_pinned": False,
                "created_at": 0.0,
                "updated_at": 0.0,
                "messages": kept,
            }
            return _chat(db, insert_whole(db, whole.model_copy(update=now), self._new_id))

    # Attachments

    def attach(self, name: str, kind: str, num_bytes: int, text: str) -> Attachment:
        """Keep a file's text for a message to come, which names it in `attachment_ids`."""
        attachment_id = self._new_id()
        values: dict[str, Any] = {"id": attachment_id, "name": name, "kind": kind, "num_bytes": num_bytes}
        with self._database.writing() as db:
            rows.insert(db, "attachments", values | {"created_at": time.time(), "text": text})
        return Attachment(id=attachment_id, name=name, kind=kind, num_bytes=num_bytes, num_chars=len(text))

    def attached_text(self, attachment_id: str) -> str:
        with self._database.reading() as db:
            row = db.execute("SELECT text FROM attachments WHERE id = ?", [attachment_id]).fetchone()
        if row is None:
            raise _not_found("file", attachment_id)
        return str(row["text"])

    # Presets

    def presets(self) -> list[Preset]:
        with self._database.reading() as db:
            found = db.execute("SELECT name, system, sampling FROM presets ORDER BY name")
            return [Preset(row["name"], row["system"], json.loads(row["sampling"])) for row in found]

    def save_preset(self, preset: Preset) -> None:
        """In place of one of the same name."""
        values = [preset.name, preset.system, rows.as_json(preset.sampling)]
        with self._database.writing() as db:
            db.execute("INSERT OR REPLACE INTO presets (name, system, sampling) VALUES (?, ?, ?)", values)

    def delete_preset(self, name: str) -> None:
        with self._database.writing() as db:
            if db.execute("DELETE FROM presets WHERE name = ?", [name]).rowcount == 0:
                raise _not_found("preset", name)

    # Inside

    def _new_id(self) -> str:
        return self._id_prefix + secrets.token_hex(12)

    def _cut_answers_of_the_dead(self) -> None:
        with self._database.writing() as db:
            writers = db.execute("SELECT DISTINCT writer FROM nodes WHERE state = 'writing'").fetchall()
            for writer in (row["writer"] for row in writers):
                if not _is_alive(writer):
                    db.execute("UPDATE nodes SET state = 'cut' WHERE state = 'writing' AND writer = ?", [writer])

    def _forget_old(self) -> None:
        """What is over for good; of its words nothing stays in the index either."""
        now = time.time()
        with self._database.writing() as db:
            num_gone = db.execute("DELETE FROM chats WHERE deleted_at <= ?", [now - self._undo_s]).rowcount
            for unused in ("attachments WHERE chat_id IS NULL", f"chats WHERE {rows.IS_EMPTY}"):
                db.execute(f"DELETE FROM {unused} AND created_at < ?", [now - _UNUSED_S])
        num_pages = -_MERGED_AT_ONCE  # the first step puts all parts of the index in line
        while num_gone and num_pages:
            with self._database.writing() as db:
                num_pages = _MERGED_AT_ONCE if merge_index(db, num_pages) else 0


def _chat(db: sqlite3.Connection, chat_id: str) -> Chat:
    row = db.execute(f"SELECT {rows.CHAT} FROM chats WHERE id = ? AND deleted_at IS NULL", [chat_id]).fetchone()
    if row is None:
        raise _not_found("chat", chat_id)
    return rows.chat(row)


def _node(db: sqlite3.Connection, node_id: str) -> Node:
    row = db.execute(rows.NODE_BY_ID, {"id": node_id}).fetchone()
    if row is None:
        raise _not_found("message", node_id)
    return rows.node(row)


def _ids_above(db: sqlite3.Connection, leaf_id: str | None) -> set[str]:
    """Of the path to it, itself included."""
    return {row["id"] for row in db.execute(rows.IDS_ABOVE, {"leaf_id": leaf_id})}


def _claim(db: sqlite3.Connection, attachment_id: str, chat_id: str) -> Attachment:
    """The attachment, of this chat from now on."""
    sql = """
        SELECT id, name, kind, num_bytes, length(text) AS num_chars FROM attachments
        WHERE id = :id AND coalesce(chat_id, :chat_id) = :chat_id
    """
    row = db.execute(sql, {"id": attachment_id, "chat_id": chat_id}).fetchone()
    if row is None:
        raise _not_found("file", attachment_id)
    db.execute("UPDATE attachments SET chat_id = ? WHERE id = ?", [chat_id, attachment_id])
    return Attachment(**dict(row))


def _not_found(what: str, its_id: str) -> AppError:
    return AppError(
        404,
        f"{what}_not_found",
        f"There is no {what} {its_id!r} in the history.",
        hint="It may have been deleted; load the page again.",
    )


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TITLE_CHARS else f"{line[:_TITLE_CHARS].rstrip()}…"


def _numbered(title: str, others: Collection[str]) -> str:
    """ "A walk" -> "A walk (2)", or the next number that no other has."""
    stem = re.sub(r" \(\d+\)$", "", title)
    return next(name for number in itertools.count(2) if (name := f"{stem} ({number})") not in others)


def _own_name() -> str:
    """Of this process and of this object in it: the number of a process alone is given again to another."""
    return f"{os.getpid()} {psutil.Process().create_time()} {secrets.token_hex(4)}"


def _is_alive(writer: str) -> bool:
    number, began, _ = writer.split()
    try:
        # The time of its beginning is counted from that of the boot, which moves with corrections of the clock.
        return bool(abs(psutil.Process(int(number)).create_time() - float(began)) < 2)
    except psutil.Error:
        return False
