"""What goes out as JSON comes in the same; Markdown keeps what a person reads; a bad file changes nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import AppError
from app.history.exchange import WholeChat, WholeFile, WholeMessage, read_json, write_json
from app.history.history import History
from app.history.markdown import read_markdown, write_markdown


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def _rich_chat(history: History) -> str:
    chat = history.create_chat("Title", folder="work", system="Be brief.", sampling={"temperature": 0.5}, model_id="m")
    history.change_chat(chat.id, is_pinned=True)
    attached = history.attach("a.py", "text", 9, "print(1)\n")
    asked = history.add(chat.id, None, "user", "see", attachment_ids=[attached.id])
    history.add(chat.id, asked.id, "assistant", "first", meta={"figures": {"ttft_s": 0.1}})
    history.add(chat.id, asked.id, "assistant", "second", reasoning="hm", state="stopped")
    return chat.id


def _without_ids(chat: WholeChat) -> dict[str, Any]:
    """A chat as it is but for the ids of its messages, which are numbered instead."""
    number = {message.id: i for i, message in enumerate(chat.messages)}
    body = chat.model_dump()
    for message in body["messages"]:
        message["id"], message["parent_id"] = number[message["id"]], number.get(message["parent_id"])
    return body | {"leaf_id": number.get(chat.leaf_id or "")}


def test_a_chat_comes_in_as_it_went_out_with_every_version(history: History) -> None:
    went = history.export([_rich_chat(history)])
    (came,) = history.import_(read_json(write_json(went)))
    assert [_without_ids(chat) for chat in history.export([came.id])] == [_without_ids(chat) for chat in went]
    assert [node.text for node in history.path(came.leaf_id)] == ["see", "second"]
    assert len(history.chats()) == 2 and len(history.search("second")) == 2


def test_an_import_of_all_chats_doubles_them(history: History) -> None:
    _rich_chat(history)
    _rich_chat(history)
    history.import_(read_json(write_json(history.export())))
    assert len(history.chats()) == 4


def test_an_answer_in_the_making_comes_in_as_cut(history: History) -> None:
    chat = history.create_chat("c")
    history.add(chat.id, None, "assistant", "so far", state="writing")
    (came,) = history.import_(history.export())
    assert history.node(came.leaf_id or "").state == "cut"


_GOOD: dict[str, Any] = {
    "format": "fireside-chats",
    "version": 1,
    "chats": [{"title": "t", "messages": [{"id": "a", "role": "user", "text": "x"}]}],
}


def _bad(**changes: Any) -> str:
    message = _GOOD["chats"][0]["messages"][0] | changes
    return json.dumps(_GOOD | {"chats": [{"title": "t", "messages": [message]}]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "JSON of another program"),
        ("null", "a single value \\(null\\)"),
        ("7", "a single value \\(7\\)"),
        ('"words"', 'a single value \\("words"\\)'),
        ('[1, null, {"a": 1}]', "JSON of another program"),
        ('[{"title": "t", "mapping": {}}]', "ChatGPT"),
        ('[{"uuid": "u", "chat_messages": []}]', "Claude"),
        ('[{"id": "i", "chat": {}}]', "Open WebUI"),
        (json.dumps(_GOOD | {"chats": [None]}), "chat 1 is null"),
        (json.dumps(_GOOD | {"version": 2}), "version 2"),
        (json.dumps(_GOOD | {"chats": {}}), "no list"),
        (_bad(role="tool"), "chat 1, messages.0.role"),
        (_bad(surprise=1), "surprise"),
        (_bad(text=None), "messages.0.text"),
        (_bad(parent_id="a"), "parent"),
        (_bad(state="odd"), "state"),
        (_bad(created_at="soon"), "created_at"),
        (_bad(text="TEXT").replace("TEXT", "\\ud800"), "no JSON"),
        (_bad(created_at=7).replace("7", "NaN"), "no JSON"),
        (_bad(created_at=7).replace("7", "1e999"), "created_at"),
        (_bad(meta={"figure": 7}).replace("7", "1e999"), "figure"),
        (_bad(attachments=[{"name": "f", "text": "x", "num_bytes": 2**70}]), "num_bytes"),
        (json.dumps(_GOOD | {"chats": [{"title": "t", "leaf_id": "z"}]}), "leaf_id"),
        (json.dumps(_GOOD | {"chats": [_GOOD["chats"][0] | {"messages": _GOOD["chats"][0]["messages"] * 2}]}), "two"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(AppError, match=told) as caught:
        read_json(text)
    assert caught.value.status == 400 and "Nothing of it was taken" in caught.value.hint


def test_a_chat_that_fails_midway_takes_the_others_with_it(history: History) -> None:
    good = read_json(json.dumps(_GOOD))[0]
    orphan = good.model_copy(update={"messages": (WholeMessage(id="b", role="user", text="\ud800"),)})
    with pytest.raises(UnicodeEncodeError):
        history.import_([good, orphan])
    assert history.chats() == []


def test_a_branch_is_a_chat_of_its_own_with_what_leads_to_a_message(history: History) -> None:
    chat_id = _rich_chat(history)
    leaf_id = history.chat(chat_id).leaf_id or ""
    first = history.siblings(leaf_id)[0]
    history.add(chat_id, first.id, "user", "after it")
    branched = history.branch(first.id)
    path = history.path(branched.leaf_id)
    assert [(node.text, node.num_versions) for node in path] == [("see", 1), ("first", 1)]
    assert history.attached_text(path[0].attachments[0].id) == "print(1)\n"
    assert (branched.system, branched.sampling, branched.is_pinned) == ("Be brief.", {"temperature": 0.5}, False)


# Markdown


def test_markdown_reads_as_a_conversation(history: History) -> None:
    (chat,) = history.export([_rich_chat(history)])
    assert write_markdown(chat) == (
        "# Title\n\n## System\n\nBe brief.\n\n## User\n\nsee\n\n## File: a.py\n\nprint(1)\n\n"
        "## Thinking\n\nhm\n\n## Assistant\n\nsecond\n"
    )


_LINES = st.sampled_from(
    ["## User", "\\## User", "\\\\## File: x", "# Title", "## Assistant ", "```", "text", "", "\\"]
)
_TEXTS = st.one_of(
    st.lists(_LINES, max_size=5).map("\n".join), st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30)
).map(lambda text: text.strip("\n"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_TEXTS, _TEXTS, st.lists(_TEXTS, max_size=2)), min_size=1, max_size=4), _TEXTS)
def test_texts_survive_markdown_whatever_their_lines_look_like(
    turns: list[tuple[str, str, list[str]]], system: str
) -> None:
    messages = tuple(
        WholeMessage(
            id=str(i),
            parent_id=str(i - 1) if i else None,
            role="assistant" if i % 2 else "user",
            text=text,
            reasoning=reasoning,
            attachments=tuple(WholeFile(name="f", text=file, num_bytes=len(file.encode())) for file in files),
        )
        for i, (text, reasoning, files) in enumerate(turns)
    )
    chat = WholeChat(title="T", system=system, messages=messages, leaf_id=messages[-1].id)
    assert read_markdown(write_markdown(chat)) == chat


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no line"),
        ("No title", "it is text, and no chat"),
        ("# Title\n\nMany words", "it is text, and no chat"),
        ("Some words\n\n## User\n\nhello", "more than a title"),
        ("# T\nwords\n## User\n\nhello", "more than a title"),
        ("## User\n\nhello\n\n## Thinking\n\nhm", "Thinking"),
        ("## File: a\n\nx\n\n## User\n\nhello", "before any message"),
    ],
)
def test_markdown_with_something_that_has_no_place_is_refused(text: str, told: str) -> None:
    with pytest.raises(AppError, match=told):
        read_markdown(text)


@pytest.mark.parametrize("chat", [WholeChat(title="T"), WholeChat(title="T", system="Be brief.")])
def test_a_chat_without_a_message_survives_markdown(chat: WholeChat) -> None:
    assert read_markdown(write_markdown(chat)) == chat


def test_an_unnamed_chat_has_a_name_in_markdown_and_one_without_is_read() -> None:
    message = WholeMessage(id="0", role="user", text="hello")
    assert read_markdown(write_markdown(WholeChat(title="", messages=(message,), leaf_id="0"))).title == "New chat"
    assert read_markdown("# \n\n## User\n\nhello\n").messages == (message,)


def test_markdown_of_another_system_is_read() -> None:
    chat = read_markdown("\ufeff# A talk\r\n\r\n## User\r\n\r\nHi\r\nthere\r\n\r\n## Assistant\r\n\r\nHello\r\n")
    assert (chat.title, [message.text for message in chat.messages]) == ("A talk", ["Hi\nthere", "Hello"])
