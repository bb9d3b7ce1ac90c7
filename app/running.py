"""Where the Fireside of a home folder listens: a note that its server leaves there, for commands of the same user.

And how one that a command started ends with that command.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

NOTE = "server.json"


def leave_note(home: Path, url: str) -> None:
    """Nothing is lost where it cannot be written: commands then ask for --url."""
    part = home / f"{NOTE}.part"
    with suppress(OSError):
        part.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
        os.replace(part, home / NOTE)


def take_note_away(home: Path) -> None:
    """Unless another server has left its own meanwhile."""
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((home / NOTE).read_text("utf-8")).get("pid") == os.getpid():
            (home / NOTE).unlink()


def noted_url(home: Path) -> str | None:
    """What the last server of this home left; it may have ended since, without taking it away."""
    try:
        return str(json.loads((home / NOTE).read_text("utf-8"))["url"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def end_with_starter() -> None:
    """Get a SIGTERM once standard input, a pipe from whoever started this process, is closed: by its end, however."""

    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="starter", daemon=True).start()
