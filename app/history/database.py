"""The file of the history: opened, brought to this version's tables, read and written in transactions.

Knows no chats. One connection under one lock serves every thread; other processes are kept apart by SQLite's own locks.
A file that cannot be used is left as it is, and the refusal says what to do.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.history import refusals
from app.history.schema import APPLICATION_ID, MIGRATIONS

BUSY_TIMEOUT_S = 10.0  # that a write waits for another process


class Database:
    """
    path  None keeps everything in memory: it is gone when this is closed

    Raises AppError 503: history_damaged, history_newer, history_foreign, history_unusable, history_busy.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        _check_sqlite()
        with refusals.told(path):
            self._connection = _connect(path)
            try:
                _check(self._connection, path)
                _configure(self._connection)
                _migrate(self._connection, path)
            except BaseException:
                self._connection.close()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """What is read inside belongs to one moment."""
        with self._lock, refusals.told(self._path), _transaction(self._connection, "BEGIN"):
            yield self._connection

    @contextmanager
    def writing(self, *, outlasts_power: bool = True) -> Iterator[sqlite3.Connection]:
        """All of it or nothing. Once this is left without an error it outlives a kill of the process and, with
        `outlasts_power`, a loss of power.
        """
        with self._lock, refusals.told(self._path):
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if outlasts_power else 'NORMAL'}")
            with _transaction(self._connection, "BEGIN IMMEDIATE"):
                yield self._connection

    def check(self) -> None:
        """Read every page. Raises AppError 503 history_damaged."""
        with self._lock, refusals.told(self._path):
            _check(self._connection, self._path)

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have ended it already
            connection.execute("ROLLBACK")
        raise


def _check_sqlite() -> None:
    """Raises AppError 503: the pieces of words that the search finds are younger than SQLite itself."""
    options = sqlite3.connect(":memory:")
    has_fts5 = ("ENABLE_FTS5",) in options.execute("PRAGMA compile_options").fetchall()
    options.close()
    if sqlite3.sqlite_version_info < (3, 34) or not has_fts5:
        raise refusals.without_search(sqlite3.sqlite_version)


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what is said here is for this user alone
    connection = sqlite3.connect(
        ":memory:" if path is None else path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


def _check(connection: sqlite3.Connection, path: Path | None) -> None:
    """Raises AppError for a file that is not to be touched. Only reads."""
    owner, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    is_empty = _pragma(connection, "schema_version") == 0
    if owner != APPLICATION_ID and not is_empty:
        raise refusals.foreign(path)
    if version > len(MIGRATIONS):
        raise refusals.newer(path, version, len(MIGRATIONS))
    finding = connection.execute("PRAGMA quick_check (1)").fetchone()[0]
    if finding != "ok":
        raise refusals.damaged(path, finding)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _configure(connection: sqlite3.Connection) -> None:
    _use_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: to the disk itself, not to its cache
    connection.execute("PRAGMA secure_delete = ON")  # what was deleted does not stay readable in the file
    connection.create_function("folded", 1, str.casefold, deterministic=True)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Waits for other processes, which this change does not do by itself."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    """The steps that are missing, each whole or not at all; a copy of an older file stays beside it."""
    version = _pragma(connection, "user_version")
    if path is not None and 0 < version < len(MIGRATIONS):
        _copy(connection, path.with_name(f"{path.stem}-format-{version}{path.suffix}"))
    while version < len(MIGRATIONS):
        with _transaction(connection, "BEGIN IMMEDIATE"):
            version = _pragma(connection, "user_version")  # another process may have taken the step
            if version < len(MIGRATIONS):
                _step(connection, version)
                version += 1


def _step(connection: sqlite3.Connection, version: int) -> None:
    for statement in MIGRATIONS[version]:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version + 1}")


def _copy(connection: sqlite3.Connection, goal: Path) -> None:
    if goal.exists():  # made by an attempt before this one, or by another process now
        return
    growing = goal.with_name(f"{goal.name}.{os.getpid()}")
    os.close(os.open(growing, os.O_CREAT | os.O_RDWR, 0o600))
    copy = sqlite3.connect(growing)
    try:
        connection.backup(copy)
    finally:
        copy.close()
    growing.replace(goal)
