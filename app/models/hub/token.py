"""The token for gated repositories: that of HF_TOKEN or `hf auth login`, else one given to Fireside, which is kept in a
file that this user alone can read.
"""

import os
import re
from pathlib import Path

from app.errors import AppError

_FILE = "hub-token"
_TOKEN = re.compile(r"[!-~]{8,512}")


def read_token(home: Path) -> str | None:
    from huggingface_hub import get_token

    return get_token() or _kept(home / _FILE)


def keep_token(home: Path, token: str) -> Path:
    """Returns the file. Raises AppError for what is no token."""
    if not _TOKEN.fullmatch(token.strip()):
        raise AppError(400, "bad_token", "A token is 8 to 512 printable characters without blanks.", param="token")
    path = home / _FILE
    part = path.with_name(f".{_FILE}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(token.strip())
    os.replace(part, path)
    return path


def forget_token(home: Path) -> bool:
    """Whether there was one."""
    path = home / _FILE
    was_there = path.exists()
    path.unlink(missing_ok=True)
    return was_there


def _kept(path: Path) -> str | None:
    try:
        return path.read_text("utf-8").strip() or None
    except FileNotFoundError:
        return None
