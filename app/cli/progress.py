"""How far a download, a check or the making of a model is, on standard error."""

import shutil
import sys
from types import TracebackType

from app.models.hub.report import Report, Transfer

_UNDER_WAY = ("downloading", "verifying")


class Shown:
    """At a terminal lines that are written over: the whole, and below it each file that is on its way. Elsewhere one
    for every tenth of a stage. To be closed (`with`): then the last state stays.
    """

    def __init__(self) -> None:
        self._num_lines = 0  # that stand there to be written over
        self._told = ("", -1)

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._num_lines:
            print(file=sys.stderr, flush=True)

    def report(self, report: Report) -> None:
        """Implements `app.models.hub.report.OnReport`."""
        pace = _pace(report.bytes_per_s, report.seconds_left) if report.files else ""
        of_files = [_of_file(file) for file in report.files if file.state in _UNDER_WAY]
        self._show(report.stage, report.fraction, pace, of_files)

    def stage(self, stage: str, fraction: float | None) -> None:
        """Implements `app.models.making.Progress`."""
        self._show(stage, fraction, "", [])

    def _show(self, stage: str, fraction: float | None, pace: str, below: list[str]) -> None:
        line = stage if fraction is None else f"{stage}: {fraction:.0%}{pace}"
        told = (stage, int((fraction or 0) * 10))
        if sys.stderr.isatty():
            self._write_over([line, *below])
        elif told != self._told:
            print(line, file=sys.stderr, flush=True)
        self._told = told

    def _write_over(self, lines: list[str]) -> None:
        """A line that is wider than the terminal would take two, and then not be reached again."""
        width = shutil.get_terminal_size().columns - 1
        back = f"\r\033[{self._num_lines - 1}A" if self._num_lines > 1 else "\r"
        print(f"{back}\033[J" + "\n".join(line[:width] for line in lines), end="", file=sys.stderr, flush=True)
        self._num_lines = len(lines)


def _of_file(file: Transfer) -> str:
    word = " (checking)" if file.state == "verifying" else ""
    return f"  {file.name}: {size(file.done_bytes)} of {size(file.num_bytes)}{word}"


def size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _pace(bytes_per_s: float | None, seconds_left: float | None) -> str:
    if not bytes_per_s or seconds_left is None:
        return ""
    minutes, seconds = divmod(round(seconds_left), 60)
    return f", {bytes_per_s / 1e6:.1f} MB/s, {minutes}:{seconds:02} left"
