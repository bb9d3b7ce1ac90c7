"""What the engines write, kept in <home>/logs: a file a model, which is turned over before it grows large.

The child appends to its file by itself, so that its last words are there however it, or the app, ended.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

_MOST_BYTES = 2_000_000
_TAIL_BYTES = 400_000


class EngineLogs:
    """Every method touches the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, model_id: str) -> Path:
        return self._folder / f"engine-{re.sub(r'[^A-Za-z0-9._-]+', '--', model_id)[:150]}.log"

    def begin(self, model_id: str) -> str | None:
        """The file for a new child; None where none can be written, and it writes where the app does."""
        path = self.path(model_id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError:
            return None
        self.turn_over(model_id)
        return str(path)

    def turn_over(self, model_id: str) -> None:
        """Once it is large, its content becomes the file of yesterday; the child goes on writing at its beginning."""
        path = self.path(model_id)
        with suppress(OSError):
            if path.stat().st_size > _MOST_BYTES:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def note(self, model_id: str, line: str) -> None:
        """A line of ours among those of the engine. A full disk costs the line alone."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{now % 1 * 1000:03.0f}"
        with suppress(OSError), self.path(model_id).open("a", encoding="utf-8") as file:
            file.write(f"{stamp} FIRESIDE {line}\n")

    def tail(self, model_id: str, num_lines: int) -> list[str]:
        """The last lines, oldest first; none where nothing was written."""
        path = self.path(model_id)
        lines: list[str] = []
        for file in (path.with_suffix(".log.1"), path):
            if file.is_file():
                lines += _end_of(file)
        return lines[-num_lines:] if num_lines > 0 else []


def _end_of(file: Path) -> list[str]:
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
        return opened.read().decode("utf-8", errors="replace").splitlines()
