"""The routes behind the list of conversations, its files and presets, as a tab asks them."""

import asyncio
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from app.api.keys import ApiKey
from app.history.book import Book
from app.ui import attachments, chat_files, chats, refusals


class House:
    """The routes over a history in a folder. `told` are the calls of what makes answers."""

    def __init__(self, folder: Path) -> None:
        self.book = Book(folder / "history.db")
        self.told: list[tuple[str, str]] = []
        self.turns = asyncio.Lock()
        self.is_admin = True
        self.num_tokens: int | None = 7
        app = FastAPI()
        app.middleware("http")(self._with_key)
        refusals.install(app)
        app.include_router(chats.router(self.book, self))
        app.include_router(attachments.router(self.book, self.count))
        self.client = TestClient(app)

    async def _with_key(self, request: Request, go_on: Any) -> Any:
        request.state.key = ApiKey("laptop", b"", is_admin=self.is_admin)
        return await go_on(request)

    def changed(self, chat_id: str) -> None:
        self.told.append(("changed", chat_id))

    async def stop_chat(self, chat_id: str) -> None:
        self.told.append(("stopped", chat_id))

    async def count(self, text: str) -> int | None:
        return self.num_tokens and len(text)

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        reply = self.client.get(f"/ui/{path}", params=query)
        assert reply.status_code == status, reply.text
        return reply.json()

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        reply = self.client.post(f"/ui/{path}", **sent)
        assert reply.status_code == status, reply.text
        return reply.json()

    def chat(self, *texts: str, **fields: Any) -> str:
        chat_id: str = self.post("chats", fields)["id"]
        parent_id = None
        for number, text in enumerate(texts):
            role: Any = "assistant" if number % 2 else "user"
            parent_id = self.book.of(chat_id).add(chat_id, parent_id, role, text).id
        return chat_id


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.book.close()


def test_the_list_is_told_in_pages_with_its_folders(house: House) -> None:
    """However old a chat is: what is pinned or in a folder is on the first page."""
    filed = house.chat("one", folder="work")
    pinned = house.chat("two", is_pinned=True)
    first, second = house.chat("three"), house.chat("four")
    told = house.get("chats", limit=1)
    assert [chat["id"] for chat in told["chats"]] == [pinned, filed, second]
    assert told["has_more"] and told["folders"] == ["work"]
    told = house.get("chats", limit=1, offset=1)
    assert [chat["id"] for chat in told["chats"]] == [first] and not told["has_more"]
    assert [chat["id"] for chat in house.get("chats", folder="work")["chats"]] == [filed]


def test_a_search_gives_the_chat_and_the_message(house: House) -> None:
    chat_id = house.chat("where is the needle?")
    house.chat("hay")
    told = house.get("chats/search", q='NEED "Is The"')
    (found,) = told["found"]
    assert told["words"] == ["need", "is the"]
    assert found["chat"]["id"] == chat_id and found["node_id"] and "needle" in found["excerpt"]


def test_a_change_keeps_what_it_does_not_name_and_tells_the_tabs(house: House) -> None:
    chat_id = house.chat("one", system="Be brief.", sampling={"temperature": 0.2, "stop": ["\n"]})
    house.told.clear()
    told = house.post(f"chats/{chat_id}", {"title": "  Renamed ", "is_pinned": True})
    assert (told["title"], told["is_pinned"], told["system"]) == ("Renamed", True, "Be brief.")
    assert told["sampling"] == {"temperature": 0.2, "stop": ["\n"]}
    assert house.told == [("changed", chat_id)]
    assert house.post(f"chats/{chat_id}", {"sampling": {}, "system": ""})["sampling"] == {}
    assert house.get(f"chats/{chat_id}")["system"] == ""


@pytest.mark.parametrize(
    "change", [{"sampling": {"temperature": 3}}, {"sampling": {"heat": 1}}, {"title": "x" * 201}, {"leaf_id": "x"}]
)
def test_a_change_that_makes_no_sense_changes_nothing(house: House, change: dict[str, Any]) -> None:
    chat_id = house.chat("one")
    before = house.get(f"chats/{chat_id}")
    (name,) = change
    assert name in house.post(f"chats/{chat_id}", change, status=422)["error"]["message"]
    assert house.get(f"chats/{chat_id}") == before


def test_a_deletion_stops_answers_and_can_be_undone(house: House) -> None:
    chat_id = house.chat("one")
    house.told.clear()
    assert house.post(f"chats/{chat_id}/delete") == {"can_undo": True}
    assert house.told == [("stopped", chat_id), ("changed", chat_id)]
    assert house.get("chats")["chats"] == []
    assert house.get(f"chats/{chat_id}", status=404)["error"]["code"] == "chat_not_found"
    assert house.post(f"chats/{chat_id}/restore")["id"] == chat_id
    assert len(house.get("chats")["chats"]) == 1


def test_an_incognito_chat_is_in_no_list_and_its_deletion_is_final(house: House, tmp_path: Path) -> None:
    chat_id = house.chat("a secret", is_incognito=True)
    assert house.get(f"chats/{chat_id}")["is_incognito"]
    assert house.get("chats")["chats"] == [] and house.get("chats/search", q="secret")["found"] == []
    assert house.post(f"chats/{chat_id}/delete") == {"can_undo": False}
    house.post(f"chats/{chat_id}/restore", status=404)


def test_a_branch_is_a_new_chat(house: House) -> None:
    chat_id = house.chat("ask", "answer", "more")
    second = house.book.kept.path(house.get(f"chats/{chat_id}")["leaf_id"])[1]
    branched = house.post("chats/branch", {"node_id": second.id})
    assert [node.text for node in house.book.kept.path(branched["leaf_id"])] == ["ask", "answer"]
    again = house.post("chats/branch", {"node_id": branched["leaf_id"]})
    title = house.get(f"chats/{chat_id}")["title"]
    assert [branched["title"], again["title"]] == [f"{title} (2)", f"{title} (3)"]


@pytest.mark.parametrize("form", ["json", "markdown"])
def test_a_chat_that_was_exported_comes_in_again(house: House, form: str) -> None:
    chat_id = house.chat("ask", "answer", title='Ü/"1"')
    reply = house.client.get("/ui/chats/export", params={"ids": chat_id, "form": form})
    ending = {"json": "json", "markdown": "md"}[form]
    assert f"filename*=UTF-8''%C3%9C%201.{ending}" in reply.headers["content-disposition"]
    (chat,) = house.post("chats/import", reply.content)["chats"]
    assert chat["id"] != chat_id and chat["title"] == 'Ü/"1"'
    assert [node.text for node in house.book.kept.path(chat["leaf_id"])] == ["ask", "answer"]


def test_all_chats_are_exported_at_once(house: House) -> None:
    for _ in range(2):
        house.chat("ask", "answer", title="same")
    assert len(json.loads(house.client.get("/ui/chats/export").content)["chats"]) == 2
    packed = zipfile.ZipFile(io.BytesIO(house.client.get("/ui/chats/export", params={"form": "markdown"}).content))
    assert packed.namelist() == ["0001 same.md", "0002 same.md"]


def _zip(encrypted: bool = False, more: tuple[str, ...] = (), **files: bytes) -> bytes:
    """files: the names without their ending, which is md. more: names of others, each of a byte."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, body in {**{f"{name}.md": body for name, body in files.items()}, **dict.fromkeys(more, b"x")}.items():
            packed.writestr(name, body)
    raw = bytearray(file.getvalue())
    if encrypted:
        for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            raw[raw.index(mark) + place] |= 1
    return bytes(raw)


def test_chats_that_were_exported_in_a_zip_come_in_again(house: House) -> None:
    for title in ("one", "two"):
        house.chat("ask", "answer", title=title)
    raw = house.client.get("/ui/chats/export", params={"form": "markdown"}).content
    assert {chat["title"] for chat in house.post("chats/import", raw)["chats"]} == {"one", "two"}
    assert len(house.get("chats")["chats"]) == 4


def test_what_a_mac_puts_into_a_zip_is_passed_over(house: House) -> None:
    raw = _zip(good=_CHAT, more=("__MACOSX/._good.md", ".DS_Store", "chats/.DS_Store"))
    assert [chat["title"] for chat in house.post("chats/import", raw)["chats"]] == ["ok"]


_CHAT = b"# ok\n\n## User\n\nhello\n"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (_zip(good=_CHAT, bad=b"what is this"), "bad.md: This file cannot be imported: it is text, and no chat"),
        (_zip(more=("picture.png",)), "'picture.png' is neither"),
        (_zip(more=("chat.html", "conversations.json")), "an export of ChatGPT or Claude"),
        (_zip(), "without any file"),
        (_zip(encrypted=True, good=_CHAT), "asks for a password"),
        (_zip(good=_CHAT)[:-30], "cannot be unpacked (it breaks off before its end)"),
        (_zip(good=_CHAT).replace(b"hello", b"HELLO"), "cannot be unpacked (Bad CRC"),
    ],
)
def test_a_zip_comes_in_whole_or_not_at_all(house: House, raw: bytes, why: str) -> None:
    assert why in house.post("chats/import", raw, status=400)["error"]["message"]
    assert house.get("chats")["chats"] == []


def test_a_zip_that_unpacks_to_too_much_is_refused_unread(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_files, "MAX_UNPACKED_BYTES", 1 << 20)
    told = house.post("chats/import", _zip(large=b" " * ((1 << 20) + 1)), status=400)
    assert "unpacks to 1 MB" in told["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{", "it is no JSON"),
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"null", "it is JSON of a single value (null)"),
        (b"\xff\xfe\0", "it is neither a zip nor text (byte 0 is not UTF-8)"),
        (b"a\0b", "it is neither a zip nor text (it has zero bytes)"),
        (b"%PDF-1.7", "it is a PDF"),
        (b"SQLite format 3\0", "it is a database"),
        (b'{"format": "fireside-chats", "version": 1, "chats": []}', "it is an export without any chat"),
        (b'[{"title": "t", "mapping": {}}]', "it is an export of ChatGPT"),
    ],
)
def test_a_file_that_is_no_export_is_refused_in_words(house: House, raw: bytes, why: str) -> None:
    error = house.post("chats/import", raw, status=400)["error"]
    assert error["message"].startswith(f"This file cannot be imported: {why}"), error["message"]
    assert "JSON, Markdown or zip file that Fireside exported" in error["hint"]
    assert house.get("chats")["chats"] == []


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"sampling": {"heat": 1}}, "sampling.heat"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"meta": {"timings": {"decode_s": 1}}}, "message 1, meta.timings.predicted_per_second"),
        ({"meta": {"usage": 5}}, "meta.usage"),
        ({"meta": {"thinking_s": "x"}}, "meta.thinking_s"),
        ({"meta": {"tokens": [["a"]]}}, "meta.tokens.0"),
    ],
)
def test_a_chat_that_no_tab_could_draw_does_not_come_in(house: House, part: dict[str, Any], place: str) -> None:
    message = {"id": "1", "role": "assistant", "text": "hi", "meta": part.get("meta", {})}
    chat = {"title": "x", "leaf_id": "1", "messages": [message], "sampling": part.get("sampling", {})}
    whole = {"format": "fireside-chats", "version": 1, "chats": [chat]}
    assert place in house.post("chats/import", json.dumps(whole).encode(), status=400)["error"]["message"]
    assert house.get("chats")["chats"] == []


def test_a_file_that_is_too_large_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "MAX_IMPORT_BYTES", 1 << 20)
    told = house.post("chats/import", b"x" * ((1 << 20) + 1), status=413)
    assert "larger than 1 MB" in told["error"]["message"]


def test_presets_are_kept_by_name(house: House) -> None:
    house.post("presets", {"name": "Coder", "system": "You write code.", "sampling": {"temperature": 0}})
    house.post("presets", {"name": "Coder", "sampling": {"temperature": 0.1}})
    house.post("presets", {"name": "Bard"})
    assert house.get("presets")["presets"] == [
        {"name": "Bard", "system": "", "sampling": {}},
        {"name": "Coder", "system": "", "sampling": {"temperature": 0.1}},
    ]
    house.post("presets/delete", {"name": "Bard"})
    house.post("presets/delete", {"name": "Bard"}, status=404)


# Attachments


def test_a_file_is_kept_as_text_and_counted(house: House) -> None:
    kept = house.post("attachments?name=a.py", b"print(1)\n")
    assert (kept["name"], kept["kind"], kept["num_bytes"], kept["num_chars"]) == ("a.py", "text", 9, 9)
    num_tokens = house.get(f"attachments/{kept['id']}/tokens", name="a.py")["num_tokens"]
    assert num_tokens == len("File: a.py\n```py\nprint(1)\n```\n\n")
    house.num_tokens = None
    assert house.get(f"attachments/{kept['id']}/tokens")["num_tokens"] is None


def test_a_file_for_an_incognito_chat_is_kept_in_memory(house: House) -> None:
    kept = house.post("attachments?name=a.py&is_incognito=true", b"print(1)\n")
    chat_id = house.chat(is_incognito=True)
    house.book.incognito.add(chat_id, None, "user", "see", attachment_ids=[kept["id"]])
    assert house.book.of(kept["id"]).attached_text(kept["id"]) == "print(1)\n"


def test_a_file_that_is_no_text_is_refused_in_words(house: House) -> None:
    error = house.post("attachments?name=photo.png", b"\x89PNG\0", status=415)["error"]
    assert error["message"].startswith("photo.png") and error["hint"]


# A history that cannot be used


def test_a_damaged_history_is_told_and_can_be_set_aside_by_an_admin(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"no database" * 1000)
    house = House(tmp_path)
    assert house.get("chats", status=503)["error"]["code"] == "history_damaged"
    assert house.get("history")["error"]["code"] == "history_damaged"
    incognito = house.chat("goes on", is_incognito=True)
    assert house.get(f"chats/{incognito}")["title"] == "goes on"
    house.is_admin = False
    house.post("history/set_aside", status=403)
    house.is_admin = True
    moved_to = Path(house.post("history/set_aside")["moved_to"])
    assert moved_to.read_bytes() == b"no database" * 1000
    assert house.get("history")["error"] is None and house.get("chats")["chats"] == []
    house.book.close()
