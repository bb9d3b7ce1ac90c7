"""Where the Firesides of a home folder listen: each server leaves a note there, for commands of the same user.

And how one that a command started ends with that command.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

_NOTES = "server-*.json"
_CLOCK_SLACK_S = 5.0  # between a process's own clock and a disk's


def leave_note(home: Path, url: str) -> None:
    """Nothing is lost where it cannot be written: commands then ask for --url."""
    for note in home.glob(_NOTES):
        if not _is_of_living(note):
            with suppress(OSError):
                note.unlink()
    part = home / f"server-{os.getpid()}.part"
    with suppress(OSError):
        part.write_text(json.dumps({"url": url}), encoding="utf-8")
        os.replace(part, _own_note(home))


def take_note_away(home: Path) -> None:
    """This process's own; those of other servers stay."""
    with suppress(OSError):
        _own_note(home).unlink()


def noted_url(home: Path) -> str | None:
    """Of the server that began last among those whose process lives."""
    living = [(_written_at(note), note) for note in home.glob(_NOTES) if _is_of_living(note)]
    for _, note in sorted(living, reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(note.read_text("utf-8"))["url"])
    return None


def _own_note(home: Path) -> Path:
    return home / f"server-{os.getpid()}.json"


def _written_at(note: Path) -> float:
    """Seconds since the epoch; 0 where it has gone meanwhile."""
    try:
        return note.stat().st_mtime
    except OSError:
        return 0.0


def _is_of_living(note: Path) -> bool:
    """Whether the process that wrote it lives: not one that got the same number later."""
    try:
        begun_at = psutil.Process(int(note.stem.removeprefix("server-"))).create_time()
    except psutil.AccessDenied:
        return True
    except (ValueError, psutil.Error):
        return False
    return begun_at <= _written_at(note) + _CLOCK_SLACK_S


def end_with_starter() -> None:
    """Get a SIGTERM once standard input, a pipe from whoever started this process, is closed: by its end, however."""

    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="starter", daemon=True).start()
