"""What a person types into the search box -> the chats that have it.

Every word must occur, as a part of a word too, whatever its case: all in a chat's title, or all in one message. Words
between quotation marks are one.
"""

import re
import sqlite3

from app.history.rows import CHAT, chat
from app.history.types import Found

_PIECE = 3  # characters; the index finds no shorter ones
_WORD = re.compile(r'(?<!\S)(?:"([^"]+)"|“([^”]+)”|「([^」]+)」)(?!\S)|(\S+)')
_EXCERPT_BEFORE, _EXCERPT_AFTER = 40, 120


def find(connection: sqlite3.Connection, query: str, limit: int) -> list[Found]:
    """Pinned chats first, then the newest. An empty query finds nothing."""
    words = words_in(query)
    if not words:
        return []
    in_title = [word.casefold() for word in words]
    rows = connection.execute(_sql(words), [*_values(words), *in_title, limit]).fetchall()
    return [_found(row, words) for row in rows]


def words_in(query: str) -> list[str]:
    """What is searched, in lower case: that is how the index folds, which keeps an ß."""
    pieces = ["".join(found.groups(default="")) for found in _WORD.finditer(query.lower())]
    return [piece.strip() for piece in pieces if piece.strip()]


def merge_index(connection: sqlite3.Connection, num_pages: int) -> bool:
    """Put some more of the index's parts together, which is when words that were deleted leave it; False once all is
    one. A negative number begins. https://www.sqlite.org/fts5.html#the_merge_command
    """
    connection.execute("INSERT INTO words (words, rank) VALUES ('usermerge', 2)")
    before = connection.total_changes
    connection.execute("INSERT INTO words (words, rank) VALUES ('merge', ?)", [num_pages])
    return connection.total_changes - before >= 2  # one is that of the command itself


def _sql(words: list[str]) -> str:
    long = any(len(word) >= _PIECE for word in words)
    source = "words w JOIN nodes n ON n.seq = w.rowid" if long else "nodes n"
    wanted = ["words MATCH ?"] if long else ["n.state <> 'writing'"]
    wanted += ["instr(folded(n.text), ?) > 0" for word in words if len(word) < _PIECE]
    in_title = " AND ".join(["instr(folded(title), ?) > 0"] * len(words))
    return f"""
        WITH hits AS (SELECT n.chat_id, max(n.seq) AS seq FROM {source} WHERE {" AND ".join(wanted)} GROUP BY n.chat_id)
        SELECT {", ".join(f"c.{name} AS {name}" for name in CHAT.split(", "))}, n.id AS node_id, n.text
        FROM chats c LEFT JOIN hits ON hits.chat_id = c.id LEFT JOIN nodes n ON n.seq = hits.seq
        WHERE c.deleted_at IS NULL AND (n.id IS NOT NULL OR {in_title})
        ORDER BY c.is_pinned DESC, c.updated_at DESC LIMIT ?
    """


def _values(words: list[str]) -> list[str]:
    quoted = ['"' + word.replace('"', '""') + '"' for word in words if len(word) >= _PIECE]
    return [*([" ".join(quoted)] if quoted else []), *(word.casefold() for word in words if len(word) < _PIECE)]


def _found(row: sqlite3.Row, words: list[str]) -> Found:
    return Found(chat(row), row["node_id"], "" if row["node_id"] is None else _excerpt(row["text"], words))


def _excerpt(text: str, words: list[str]) -> str:
    """One line around the first of the words."""
    lowered = text.lower()
    places = [place for word in words if (place := lowered.find(word)) >= 0]
    start = max(0, min(places, default=0) - _EXCERPT_BEFORE)
    end = start + _EXCERPT_BEFORE + _EXCERPT_AFTER
    piece = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{piece}{'…' if end < len(text) else ''}"
