"""How long each model took to load the last time, kept beside the settings: what a person is told to wait."""

import json
import os
from pathlib import Path

_UNREADABLE = (OSError, ValueError, AttributeError, TypeError)


class LoadTimes:
    """Of the models of one home folder. Both methods touch the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def last_s(self, model_id: str) -> float | None:
        found = self._read().get(model_id)
        return float(found) if isinstance(found, int | float) else None

    def keep(self, model_id: str, seconds: float) -> None:
        """Nothing is lost where it cannot be written."""
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(self._read() | {model_id: round(seconds, 2)}, indent=1), "utf-8")
            os.replace(part, self._file)
        except OSError:
            part.unlink(missing_ok=True)

    def _read(self) -> dict[str, object]:
        try:
            return dict(json.loads(self._file.read_text("utf-8")).items())
        except _UNREADABLE:
            return {}
