"""How far a download is: by file, in all, how fast, how long still. Crosses a pipe as JSON."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

_WINDOW_S = 5.0  # over which a speed is measured


@dataclass(slots=True)
class Transfer:
    """One file. state: waiting | downloading | verifying | verified | unverified (no hash of it is known), and where
    files are only looked at also damaged | missing.
    """

    name: str
    num_bytes: int
    done_bytes: int = 0
    state: str = "waiting"

    def snapshot(self) -> "Transfer":
        return replace(self)


@dataclass(frozen=True, slots=True)
class Report:
    """state: queued | waiting (another process makes this model) | downloading | verifying."""

    repo: str
    state: str
    files: tuple[Transfer, ...]
    bytes_per_s: float | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def done_bytes(self) -> int:
        return sum(file.done_bytes for file in self.files)

    @property
    def fraction(self) -> float | None:
        """None until it is known how much there is."""
        return self.done_bytes / self.num_bytes if self.num_bytes else None

    @property
    def seconds_left(self) -> float | None:
        return (self.num_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s else None

    @property
    def stage(self) -> str:
        """For people; the same from the first byte to the last."""
        if self.state == "waiting":
            return f"Waiting for another Fireside that is preparing {self.repo}"
        if not self.files:
            return f"Asking for {self.repo}"
        word = "Checking" if self.state == "verifying" else "Downloading"
        return f"{word} {self.repo} ({self.num_bytes / 1e9:.2f} GB)"

    def as_json(self) -> dict[str, Any]:
        return {
            "repo": self.repo,
            "state": self.state,
            "bytes_per_s": self.bytes_per_s,
            "files": [[file.name, file.num_bytes, file.done_bytes, file.state] for file in self.files],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Report":
        return cls(
            found["repo"], found["state"], tuple(Transfer(*file) for file in found["files"]), found["bytes_per_s"]
        )


OnReport = Callable[[Report], None]


def unheard(report: Report) -> None:
    pass


@dataclass(slots=True)
class Speed:
    """Bytes a second over the last few seconds."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def of(self, done_bytes: int) -> float | None:
        """With what is done by now; None until there is something to compare it with."""
        now = time.monotonic()
        self._seen.append((now, done_bytes))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        begun, before = self._seen[0]
        return max(done_bytes - before, 0) / (now - begun) if now > begun else None
