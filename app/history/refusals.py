"""What SQLite's errors mean to a person: one table, and what Fireside itself refuses of a file."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import AppError

_SET_ASIDE = (
    "Nothing in it was changed. Copy it to a safe place, then move it aside (the page has a button for it) to begin a "
    "new history; `sqlite3 FILE .recover` gets out of a damaged one what can be read."
)
# By the beginning of SQLite's name for the error: HTTP status, code, what happened, the next step.
_BY_NAME = {
    "SQLITE_NOTADB": (503, "history_damaged", "is no database, or its beginning is damaged", _SET_ASIDE),
    "SQLITE_CORRUPT": (503, "history_damaged", "is damaged", _SET_ASIDE),
    "SQLITE_BUSY": (503, "history_busy", "is being written by another process", "Try again in a moment."),
    "SQLITE_FULL": (507, "disk_full", "cannot grow: the disk is full", "Free some space, then try again."),
    "SQLITE_READONLY": (503, "history_unusable", "may not be written", "Check who owns it and its permissions."),
    "SQLITE_CANTOPEN": (503, "history_unusable", "cannot be opened", "Check its folder and its permissions."),
    "SQLITE_IOERR": (503, "history_unusable", "cannot be read or written", "Check the disk that it lies on."),
}


@contextmanager
def told(path: Path | None) -> Iterator[None]:
    """SQLite's errors inside become AppErrors; one that is our own mistake stays what it is."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        known = next((row for start, row in _BY_NAME.items() if name.startswith(start)), None)
        if known is None:
            raise
        status, code, what, hint = known
        raise AppError(status, code, f"The history {path} {what} ({error}).", hint=hint) from error
    except OSError as error:
        raise AppError(
            503,
            "history_unusable",
            f"The history {path} cannot be opened: {error.strerror}.",
            hint="Check its folder and its permissions.",
        ) from error


def without_search(version: str) -> AppError:
    return AppError(
        503,
        "history_unusable",
        f"The history needs SQLite 3.34 or newer with FTS5, and this Python comes with {version}.",
        hint="Start Fireside with another Python (that of python.org has it). Incognito chats need it too.",
    )


def newer(path: Path | None, found: int, known: int) -> AppError:
    return AppError(
        503,
        "history_newer",
        f"The history {path} was written by a newer Fireside: it has format {found}, and this one reads up to {known}.",
        hint="Start the newer Fireside. Or move the file aside (the page has a button for it) to begin a new history "
        "here; it stays whole.",
    )


def foreign(path: Path | None) -> AppError:
    return AppError(
        503,
        "history_foreign",
        f"{path} is a database of another program.",
        hint="Move it to where it belongs, then start again; Fireside has changed nothing in it.",
    )


def damaged(path: Path | None, finding: str) -> AppError:
    return AppError(503, "history_damaged", f"The history {path} is damaged ({finding}).", hint=_SET_ASIDE)
