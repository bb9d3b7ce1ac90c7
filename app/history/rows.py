"""Rows of the database -> the words of the history, and the queries that give such rows."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from app.history.types import Attachment, Chat, Node

CHAT = "id, title, folder, is_pinned, model_id, system, sampling, leaf_id, created_at, updated_at"
# A chat that nobody has said or chosen anything in: it is in no list, goes out in no file, and is forgotten.
IS_EMPTY = """
    (leaf_id IS NULL AND title = '' AND folder = '' AND NOT is_pinned
        AND system = '' AND sampling = '{}' AND model_id = '')
"""

# A node and its place among its versions: the work does not grow with its chat.
_NODE = """
    n.id, n.chat_id, n.parent_id, n.role, n.text, n.reasoning, n.state, n.attachments, n.meta, n.created_at,
    (SELECT count(*) FROM nodes s WHERE s.parent_id IS n.parent_id AND s.chat_id = n.chat_id AND s.seq <= n.seq)
        AS version,
    (SELECT count(*) FROM nodes s WHERE s.parent_id IS n.parent_id AND s.chat_id = n.chat_id) AS num_versions
"""
NODE_BY_ID = f"SELECT {_NODE} FROM nodes n WHERE n.id = :id"
VERSIONS = f"SELECT {_NODE} FROM nodes n WHERE n.parent_id IS :parent_id AND n.chat_id = :chat_id ORDER BY n.seq"
TREE = f"SELECT {_NODE} FROM nodes n WHERE n.chat_id = :chat_id ORDER BY n.seq"
PATH = f"""
    WITH RECURSIVE up (id, parent_id, height) AS (
        SELECT id, parent_id, 1 FROM nodes WHERE id = :leaf_id
        UNION ALL
        SELECT p.id, p.parent_id, height + 1 FROM up JOIN nodes p ON p.id = up.parent_id WHERE height < :limit
    )
    SELECT {_NODE} FROM up JOIN nodes n ON n.id = up.id ORDER BY up.height DESC
"""
IDS_ABOVE = """
    WITH RECURSIVE up (id, parent_id) AS (
        SELECT id, parent_id FROM nodes WHERE id = :leaf_id
        UNION ALL
        SELECT p.id, p.parent_id FROM up JOIN nodes p ON p.id = up.parent_id
    )
    SELECT id FROM up
"""
# From a node down, each time to the newest below it.
NEWEST_BELOW = """
    WITH RECURSIVE down (id, depth) AS (
        SELECT id, 1 FROM nodes WHERE id = :id
        UNION ALL
        SELECT (SELECT c.id FROM nodes c WHERE c.parent_id = down.id ORDER BY c.seq DESC LIMIT 1), depth + 1
        FROM down WHERE down.id IS NOT NULL
    )
    SELECT id FROM down WHERE id IS NOT NULL ORDER BY depth DESC LIMIT 1
"""


def chat(row: sqlite3.Row) -> Chat:
    fields = {name: row[name] for name in CHAT.split(", ")}
    return Chat(**{**fields, "is_pinned": bool(row["is_pinned"]), "sampling": json.loads(row["sampling"])})


def node(row: sqlite3.Row) -> Node:
    attachments = tuple(Attachment(**fields) for fields in json.loads(row["attachments"]))
    return Node(**{**dict(row), "attachments": attachments, "meta": json.loads(row["meta"])})


def insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    """Both the table and the names of the values are our own words, never a caller's."""
    marks = ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)


def as_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
