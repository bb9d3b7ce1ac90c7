"""Chats as files that a browser saves and sends: JSON, Markdown, several Markdown files in a zip."""

import io
import re
import time
import zipfile
from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import Response

from app.history.exchange import WholeChat, read_json, refusal, write_json
from app.history.history import History
from app.history.markdown import read_markdown, write_markdown
from app.history.types import Chat
from app.ui.chat_bodies import Form


def write_files(chats: Sequence[WholeChat], form: Form) -> Response:
    today = time.strftime("%Y-%m-%d")
    name = _file_name(chats[0].title) if len(chats) == 1 else f"fireside-chats-{today}"
    if form == "json":
        return _download(write_json(chats).encode(), f"{name}.json", "application/json")
    if len(chats) == 1:
        return _download(write_markdown(chats[0]).encode(), f"{name}.md", "text/markdown; charset=utf-8")
    return _download(_zip_of(chats), f"{name}.zip", "application/zip")


def import_from(history: History, raw: bytes) -> list[Chat]:
    """Raises AppError 400."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal(f"it is not UTF-8 (byte {error.start:,})") from None
    chats = read_json(text) if text.lstrip()[:1] in ("{", "[") else [read_markdown(text)]
    return history.import_(chats)


def _zip_of(chats: Sequence[WholeChat]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for number, chat in enumerate(chats, 1):  # numbered: titles are often the same
            packed.writestr(f"{number:04d} {_file_name(chat.title)}.md", write_markdown(chat))
    return file.getvalue()


def _file_name(title: str) -> str:
    """What every system takes as the name of a file."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]+', " ", title).strip(" .")[:80].strip() or "chat"


def _download(body: bytes, name: str, media_type: str) -> Response:
    plain = name.encode("ascii", "replace").decode().replace("?", "_").replace('"', "_")
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name)}"
    return Response(body, media_type=media_type, headers={"Content-Disposition": disposition})
