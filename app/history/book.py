"""The two histories of a server: the kept one, in a file, and that of incognito chats, in memory alone.

book = Book(settings.home / HISTORY_FILE)
book.of(chat_id).path(leaf_id)

An id tells which one it belongs to. A file that cannot be used does not keep the server from starting: each use says
why, and incognito chats go on.
"""

import threading
import time
from pathlib import Path

from app.errors import AppError
from app.history.history import History
from app.history.types import Chat

HISTORY_FILE = "history.db"
INCOGNITO = "incognito-"  # begins the ids of its chats, messages and files
INCOGNITO_S = 6 * 3600.0  # after its last word: the tab that it was in may be gone
_ALL = 1_000_000
_BESIDE = ("-wal", "-shm", "")  # what a database's file names end with; the file itself is moved last


class Book:
    """Opening and moving the file block; call them through `app.background`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.incognito = History(None, id_prefix=INCOGNITO, undo_s=0.0)
        self._kept: History | None = None
        self._opening = threading.Lock()

    @property
    def kept(self) -> History:
        """Opened at the first use, and at the next one where that failed. Raises AppError (app.history.refusals)."""
        with self._opening:
            if self._kept is None:
                self._kept = History(self.path)
            return self._kept

    def of(self, its_id: str) -> History:
        """The history of a chat, a message or a file."""
        return self.incognito if is_incognito(its_id) else self.kept

    def create(self, *, is_incognito: bool = False) -> Chat:
        """A new chat. Incognito ones that nobody has spoken in for INCOGNITO_S are forgotten on this occasion."""
        if not is_incognito:
            return self.kept.create_chat()
        for chat in self.incognito.chats(limit=_ALL):
            if chat.updated_at < time.time() - INCOGNITO_S:
                self.incognito.delete_chat(chat.id)
        return self.incognito.create_chat()

    def set_aside(self) -> Path:
        """Move a file that cannot be used out of the way, and begin a new one; gives its new place.

        Raises AppError 409 where it can be used.
        """
        with self._opening:
            if self._kept is not None:
                _check_is_damaged(self._kept, self.path)
                self._kept.close()
                self._kept = None
            goal = _move_aside(self.path)
            self._kept = History(self.path)
            return goal

    def close(self) -> None:
        with self._opening:
            if self._kept is not None:
                self._kept.close()
                self._kept = None
        self.incognito.close()


def _check_is_damaged(history: History, path: Path) -> None:
    """It was opened; damage may have been found, or done, since."""
    try:
        history.check()
    except AppError:
        return
    raise AppError(409, "history_usable", f"The history {path} can be read: it stays where it is.")


def is_incognito(its_id: str) -> bool:
    return its_id.startswith(INCOGNITO)


def _move_aside(path: Path) -> Path:
    stem = f"{path.stem}-set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    goal = path.with_name(stem + path.suffix)
    if goal.exists():
        raise AppError(409, "history_busy", f"{goal} is there already.", hint="Try again in a second.")
    for ending in _BESIDE:
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.rename(goal.with_name(goal.name + ending))
    return goal
