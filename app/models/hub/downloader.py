"""One download in a process of its own, so that it ends at once when it is told to, whatever its network does.

`fetch_apart` starts it and hears its reports, a line of JSON each. It ends with its parent, whose end of a pipe closes.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import AppError
from app.models.hub.download import fetch, is_there, repair
from app.models.hub.report import OnReport, Report

_ROOT = Path(__file__).parents[3]
_POLL_S = 0.2
_LAST_LINES = 5
_NOTHING_YET = ""


def fetch_apart(repo: str, revision: str | None, folder: Path, on_report: OnReport, *, repairs: bool = False) -> Path:
    """As `download.fetch` (`repairs`: as `download.repair`), in a child. What on_report raises kills it at once.

    Raises   AppError as `fetch`; download_failed where the child itself was killed
    """
    if not repairs and is_there(folder, repo, revision):
        return folder
    child = _start(json.dumps([repo, revision, str(folder), repairs]))
    try:
        return _listen(child, repo, folder, on_report)
    finally:
        child.kill()
        child.communicate()


def _start(task: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "app.models.hub.downloader", task],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def _listen(child: "subprocess.Popen[str]", repo: str, folder: Path, on_report: OnReport) -> Path:
    last, words = Report(repo, "queued", ()), [""]
    for line in _lines(child):
        message = _message(line)
        if line == _NOTHING_YET:
            on_report(last)
        elif message is None:
            words = [*words[-_LAST_LINES:], line.strip()]
        elif "error" in message:
            raise AppError(**message["error"])
        elif "done" in message:
            return folder
        else:
            last = Report.from_json(message)
            on_report(last)
    code = child.wait()
    raise AppError(
        502,
        "download_failed",
        f"The download of {repo} ended by itself ({'signal' if code < 0 else 'exit code'} {abs(code)}). "
        f"{' '.join(words).strip()}".strip(),
        hint="Start it again: it goes on where it stopped.",
    )


def _lines(child: "subprocess.Popen[str]") -> Iterator[str]:
    """Lines as they come, until the child's end; _NOTHING_YET where none came for a while."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="downloader's lines", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            line = _NOTHING_YET
        if line is None:
            return
        yield line


def _message(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def main(task: str) -> None:
    """The child."""
    from app.models.hub.token import read_token

    threading.Thread(target=_end_with_parent, daemon=True).start()
    repo, revision, place, repairs = json.loads(task)
    folder = Path(place)
    token = read_token(folder.parent.parent)
    try:
        if repairs:
            repair(folder, _tell, token)
        else:
            fetch(repo, revision, folder, _tell, token)
        _say({"done": True})
    except AppError as error:
        _say({"error": error.as_fields()})
    os._exit(0)  # a thread that waits for the network would hold us up


def _tell(report: Report) -> None:
    _say(report.as_json())


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
