"""Chats as files that a browser saves and sends: JSON, Markdown, several of them in a zip."""

import io
import re
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from app.errors import AppError
from app.history.exchange import WholeChat, is_json, read_json, refusal, write_json
from app.history.history import History
from app.history.markdown import read_markdown, write_markdown
from app.history.types import Chat
from app.ui.chat_bodies import Form, KeptMeta, SamplingBody

MAX_UNPACKED_BYTES = 256 << 20
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # the second is one of no files
_ZIP_FAULTS = {"File is not a zip file": "it breaks off before its end"}  # of one that begins as a zip
_IS_ENCRYPTED = 1
_OTHERS = (  # what people have beside their chats, by its first bytes
    (b"%PDF-", "it is a PDF"),
    (b"SQLite format 3\0", "it is a database, maybe a whole history, and no export of chats"),
    (b"\x1f\x8b", "it is packed by gzip"),
    (b"\x89PNG", "it is a picture"),
    (b"\xff\xd8\xff", "it is a picture"),
)
_BESIDE = re.compile(r"__MACOSX/|(.*/)?\.DS_Store$|(.*/)?\._")  # what a Mac puts into a zip by itself


def write_files(chats: Sequence[WholeChat], form: Form) -> Response:
    today = time.strftime("%Y-%m-%d")
    name = _file_name(chats[0].title) if len(chats) == 1 else f"fireside-chats-{today}"
    if form == "json":
        return _download(write_json(chats).encode(), f"{name}.json", "application/json")
    if len(chats) == 1:
        return _download(write_markdown(chats[0]).encode(), f"{name}.md", "text/markdown; charset=utf-8")
    return _download(_zip_of(chats), f"{name}.zip", "application/zip")


def import_from(history: History, raw: bytes) -> list[Chat]:
    """All chats of the file, or none. Raises AppError 400."""
    chats = _chats_in_zip(raw) if raw.startswith(_ZIP) else _chats_in(raw)
    if not chats:
        raise refusal("it is an export without any chat")
    for chat in chats:
        _check(chat)
    return history.import_(chats)


def _check(chat: WholeChat) -> None:
    """What no tab could draw and no model be asked with does not come in."""
    _check_part(SamplingBody, chat.sampling, f"chat {chat.title!r}, sampling")
    for number, message in enumerate(chat.messages, 1):
        _check_part(KeptMeta, message.meta, f"chat {chat.title!r}, message {number}, meta")


def _check_part(kind: type[BaseModel], part: Mapping[str, Any], place: str) -> None:
    try:
        kind.model_validate(part)
    except ValidationError as error:
        first = error.errors()[0]
        raise refusal(f"{'.'.join((place, *map(str, first['loc'])))}: {first['msg']}") from None


def _chats_in(raw: bytes) -> list[WholeChat]:
    if not raw.strip():
        raise refusal("it is empty")
    for beginning, what in _OTHERS:
        if raw.startswith(beginning):
            raise refusal(what)
    text = _text_of(raw)
    return read_json(text) if is_json(text) else [read_markdown(text)]


def _text_of(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal(f"it is neither a zip nor text (byte {error.start:,} is not UTF-8)") from None
    if "\0" in text:
        raise refusal("it is neither a zip nor text (it has zero bytes)")
    return text


def _chats_in_zip(raw: bytes) -> list[WholeChat]:
    """Of its JSON and Markdown files, in their order; other files in it are somebody else's, and refuse the whole."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as packed:
            members = [each for each in packed.infolist() if not each.is_dir() and not _BESIDE.match(each.filename)]
            _check_members(members)
            files = [(member.filename, packed.read(member)) for member in members]
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise refusal(f"it is a zip that cannot be unpacked ({_ZIP_FAULTS.get(str(error), error)})") from None
    return [chat for name, file in files for chat in _chats_of(name, file)]


def _check_members(members: Sequence[zipfile.ZipInfo]) -> None:
    """What a member says of its size is what it is read to at most."""
    if not members:
        raise refusal("it is a zip without any file")
    if any(member.filename.endswith("conversations.json") for member in members):
        raise refusal("it is an export of ChatGPT or Claude, which Fireside does not read")
    for member in members:
        if not member.filename.lower().endswith((".md", ".markdown", ".json")):
            raise refusal(f"it is a zip, and its {member.filename!r} is neither Markdown nor JSON")
        if member.flag_bits & _IS_ENCRYPTED:
            raise refusal(f"it is a zip, and its {member.filename!r} asks for a password")
    total = sum(member.file_size for member in members)
    if total > MAX_UNPACKED_BYTES:
        raise refusal(f"it unpacks to {total >> 20:,} MB, and at most {MAX_UNPACKED_BYTES >> 20} MB are taken")


def _chats_of(name: str, raw: bytes) -> list[WholeChat]:
    try:
        return _chats_in(raw)
    except AppError as error:
        raise AppError(error.status, error.code, f"{name}: {error.message}", hint=error.hint) from None


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
