"""Reading the small JSON files of a model folder, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from app.errors import AppError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises AppError where the file is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise bad_checkpoint(path, str(error)) from error
    if not isinstance(value, dict):
        raise bad_checkpoint(path, f"expected a JSON object, found {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def bad_checkpoint(path: Path, reason: str) -> AppError:
    return AppError(
        500,
        "bad_checkpoint",
        f"{path.parent.name}/{path.name} cannot be read: {reason[:200]}.",
        hint="Download the model again.",
    )
