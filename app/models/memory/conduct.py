"""How a model behaves: how often it failed in a row, and which requests were under way whenever its engine died.

A model that fails again and again is parked until somebody loads it by hand; a request that was there at two deaths is
refused. Whatever is answered wipes its own slate, and the model's.
"""

import asyncio
import time

from app.errors import AppError
from engine.types import SamplingParams

MOST_FAILURES = 3  # in a row; then it is parked
MOST_DEATHS = 2  # that a request may be there at
_PAUSES_S = (0.0, 0.0, 2.0)  # before the next try, after so many failures
_FORGOTTEN_S = 600.0
_MOST_SUSPECTS = 1024


class Conduct:
    """Of one model."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._reason = ""
        self._num_failures = 0
        self._failed_at = 0.0
        self.alone = asyncio.Lock()  # for requests under suspicion, one at a time
        self._suspects: dict[int, tuple[int, float]] = {}  # deaths in a row, and when the last was

    def failed(self, reason: str) -> None:
        """A load that failed, or the death of its engine."""
        now = time.monotonic()
        if now - self._failed_at > _FORGOTTEN_S:
            self._num_failures = 0
        self._num_failures += 1
        self._failed_at, self._reason = now, reason

    def answered(self, fingerprint: int) -> None:
        """A request came to its end."""
        self._num_failures = 0
        self._suspects.pop(fingerprint, None)

    def served(self) -> None:
        """A request got tokens, and its caller left before its end."""
        self._num_failures = 0

    def suspect(self, fingerprint: int) -> None:
        """This request was under way when the engine died; told once for each death."""
        deaths = self._suspects.pop(fingerprint, (0, 0.0))[0] + 1
        self._suspects[fingerprint] = (deaths, time.monotonic())
        if len(self._suspects) > _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]  # the oldest

    def pardon(self) -> None:
        """Somebody asked for this model by hand: it begins anew."""
        self._num_failures = 0
        self._suspects.clear()

    @property
    def num_failures(self) -> int:
        return self._num_failures

    @property
    def is_parked(self) -> bool:
        return self._num_failures >= MOST_FAILURES

    @property
    def pause_s(self) -> float:
        return _PAUSES_S[min(self._num_failures, MOST_FAILURES - 1)]

    def check_model(self) -> None:
        """Raises AppError (503) where it is parked."""
        if self.is_parked:
            raise AppError(
                503,
                "model_parked",
                f"`{self._model_id}` failed {self._num_failures} times in a row and is left alone now; the last time: "
                f"{self._reason}",
                hint="`python launch.py models load` or POST /models/load tries it again; GET /logs has what its "
                "engine wrote.",
            )

    def is_suspect(self, fingerprint: int) -> bool:
        return fingerprint in self._suspects

    def check_request(self, fingerprint: int) -> None:
        """Raises AppError (400) where it was there at too many deaths."""
        deaths, at = self._suspects.get(fingerprint, (0, 0.0))
        if deaths >= MOST_DEATHS and time.monotonic() - at < _FORGOTTEN_S:
            raise AppError(
                400,
                "request_ends_engine",
                f"The engine of `{self._model_id}` died {deaths} times in a row while it answered this very request, "
                "so it is not taken again.",
                hint=f"Change the request, or wait {_FORGOTTEN_S / 60:.0f} minutes.",
            )


def fingerprint_of(prompt_token_ids: tuple[int, ...], params: SamplingParams) -> int:
    """The same for the same request sent again, in this run."""
    return hash((prompt_token_ids, repr(params)))
