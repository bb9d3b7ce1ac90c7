"""Files that a person attaches -> text for a prompt. What cannot be read as a whole is refused, never cut.

Text is UTF-8, or UTF-16 or UTF-32 with its mark. PDF is read in a process of its own: it takes seconds of Python, which
answers in progress would feel, and a hostile one may take for ever.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath

from app.errors import AppError

MAX_FILE_BYTES = 32 << 20
MAX_CHARS = 2_000_000  # some 500,000 tokens: more than models of 24 GB have room for
PDF_TIMEOUT_S = 60.0
_ROOT = Path(__file__).parents[2]
_MARKS = (
    *((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32")),
    *((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"", "utf-8-sig")),
)


def text_of(name: str, body: bytes) -> tuple[str, str]:
    """("text" or "pdf", text). Blocks. Raises AppError: 413 too large, 415 no text, 422 a PDF that cannot be read."""
    check_size(name, len(body))
    kind = "pdf" if body[:1024].lstrip().startswith(b"%PDF-") else "text"
    text = _pdf_text(name, body) if kind == "pdf" else _plain_text(name, body)
    if len(text) > MAX_CHARS:
        what = f"{name} has {len(text):,} characters; at most {MAX_CHARS:,} can be attached."
        raise AppError(413, "file_too_large", what, hint="Attach a part of it.")
    if not text.strip():
        hint = "Pages that were scanned are pictures: they need text recognition first." if kind == "pdf" else ""
        raise AppError(415, "file_without_text", f"{name} has no text.", hint=hint)
    return kind, text


def check_size(name: str, num_bytes: int) -> None:
    """Raises AppError 413."""
    if num_bytes > MAX_FILE_BYTES:
        what = f"{name} has {num_bytes / 2**20:,.1f} MB; at most {MAX_FILE_BYTES >> 20} MB can be attached."
        raise AppError(413, "file_too_large", what, hint="Attach a part of it.")


def _plain_text(name: str, body: bytes) -> str:
    encoding = next(encoding for mark, encoding in _MARKS if body.startswith(mark))
    try:
        text = body.decode(encoding)
    except UnicodeDecodeError as error:
        what = f"{name} is no text, or not in UTF-8 (byte {error.start:,} is none of it)."
        raise AppError(415, "file_not_text", what, hint="Save it as UTF-8, or as PDF.") from None
    if "\0" in text:
        raise AppError(415, "file_not_text", f"{name} is no text: it has zero bytes.", hint="Attach text or PDF.")
    return text.replace("\r\n", "\n")


def _pdf_text(name: str, body: bytes) -> str:
    command = [sys.executable, "-m", "app.history.pdf_text"]
    try:
        done = subprocess.run(command, input=body, capture_output=True, timeout=PDF_TIMEOUT_S, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        what = f"{name} could not be read within {PDF_TIMEOUT_S:.0f} seconds."
        raise AppError(422, "pdf_too_slow", what, hint="Attach fewer pages of it, or its text.") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"]
        what = f"{name} could not be read as a PDF: {lines[-1][:300].rstrip('.')}."
        raise AppError(422, "pdf_unreadable", what, hint="Attach its text, or save it anew with another program.")
    return done.stdout.decode("utf-8")


def prompt_text(text: str, files: Iterable[tuple[str, str]]) -> str:
    """What the model reads of a message with files, each (name, text): the files first, in fences, then the words."""
    return "\n\n".join([*(_fenced(name, body) for name, body in files), text])


def _fenced(name: str, body: str) -> str:
    """In a fence longer than any in the file, so that the file cannot end it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"File: {name}\n{fence}{PurePath(name).suffix.removeprefix('.')}\n{body.rstrip()}\n{fence}"
