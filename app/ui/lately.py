"""What happened lately: the app's last log lines and the last failures of answers, in memory, for the Monitor tab."""

import logging
import time
from collections import deque
from dataclasses import dataclass

from app.chat.service import TurnObserver, TurnRecord

_MOST_LINES, _MOST_FAULTS = 300, 50


@dataclass(frozen=True, slots=True)
class Fault:
    """time: Unix seconds. what: an error's code, or a log's level. model: "" where it is of none."""

    time: float
    what: str
    text: str
    model: str = ""


class Lately(logging.Handler):
    """A handler of the app's logger; called from any thread, as `deque.append` may be."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.faults: deque[Fault] = deque(maxlen=_MOST_FAULTS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.append(self.format(record))
            if record.levelno >= logging.WARNING:
                self.faults.append(Fault(record.created, record.levelname.lower(), record.getMessage()))
        except Exception:
            self.handleError(record)

    def failed(self, turn: TurnRecord) -> None:
        assert turn.error is not None
        what = turn.error.code or str(turn.error.status)
        self.faults.append(Fault(time.time(), what, turn.error.text, turn.model))


class Noting:
    """A TurnObserver that keeps the failures of turns, beside another observer."""

    def __init__(self, lately: Lately, beside: TurnObserver) -> None:
        self._lately = lately
        self._beside = beside

    def first_token(self, ttft_s: float) -> None:
        self._beside.first_token(ttft_s)

    def token(self, gap_s: float) -> None:
        self._beside.token(gap_s)

    def ended(self, turn: TurnRecord) -> None:
        if turn.error is not None:
            self._lately.failed(turn)
        self._beside.ended(turn)
