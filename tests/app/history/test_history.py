"""Chats are trees: versions, branches, what is shown; what is searched; what a deletion leaves."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import AppError
from app.history.history import UNDO_S, History


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def _talk(history: History, *texts: str) -> tuple[str, list[str]]:
    """A chat of these messages, one after another: its id and theirs."""
    chat = history.create_chat()
    ids: list[str] = []
    for text in texts:
        role = "assistant" if len(ids) % 2 else "user"
        ids.append(history.add(chat.id, ids[-1] if ids else None, role, text).id)
    return chat.id, ids


def _shown(history: History, chat_id: str) -> list[str]:
    return [node.text for node in history.path(history.chat(chat_id).leaf_id)]


def test_what_is_shown_is_the_path_to_the_newest_message(history: History) -> None:
    chat_id, _ = _talk(history, "one", "two", "three")
    assert _shown(history, chat_id) == ["one", "two", "three"]


def test_a_second_message_below_the_same_parent_is_a_version(history: History) -> None:
    chat_id, ids = _talk(history, "ask", "first answer")
    second = history.add(chat_id, ids[0], "assistant", "second answer")
    assert (second.version, second.num_versions) == (2, 2)
    assert [node.text for node in history.siblings(ids[1])] == ["first answer", "second answer"]
    assert _shown(history, chat_id) == ["ask", "second answer"]


def test_an_edited_first_message_is_a_version_of_it_in_its_own_chat_alone(history: History) -> None:
    chat_id, _ = _talk(history, "ask")
    _talk(history, "another chat")
    edited = history.add(chat_id, None, "user", "ask better")
    assert (edited.version, edited.num_versions) == (2, 2)


def test_selecting_a_version_shows_its_branch_down_to_the_newest_message(history: History) -> None:
    chat_id, ids = _talk(history, "ask", "answer", "more", "answer to more")
    history.add(chat_id, None, "user", "ask anew")
    assert _shown(history, chat_id) == ["ask anew"]
    assert history.select(chat_id, ids[0]).leaf_id == ids[3]


def test_selecting_a_message_that_is_shown_leaves_the_branch_below_it(history: History) -> None:
    chat_id, ids = _talk(history, "ask", "answer", "more", "answer to more")
    newer = history.add(chat_id, ids[2], "assistant", "another answer to more", is_shown=False)
    assert history.select(chat_id, ids[1]).leaf_id == ids[3]
    assert history.select(chat_id, newer.id).leaf_id == newer.id


@pytest.mark.parametrize(
    "chosen", [{"system": "Be brief."}, {"sampling": {"top_k": 1}}, {"model_id": "m"}, {"folder": "f"}]
)
def test_a_chat_that_something_was_chosen_for_is_listed_exported_and_kept(
    history: History, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]
) -> None:
    chat, other = history.create_chat(**chosen), history.create_chat("Other")
    later = time.time() + 90_000
    monkeypatch.setattr("app.history.history.time.time", lambda: later)
    history.delete_chat(other.id)
    assert history.chats() == [chat] and len(history.export()) == 1
    history.change_chat(chat.id, system="", sampling={}, model_id="", folder="")
    assert history.chats() == [] and history.export() == []


def test_a_chat_without_a_title_and_a_message_is_not_listed_and_not_kept_for_long(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, named = history.create_chat(), history.create_chat("Named")
    assert [chat.id for chat in history.chats()] == [named.id] and len(history.export()) == 1
    later = time.time() + 90_000
    monkeypatch.setattr("app.history.history.time.time", lambda: later)
    history.delete_chat(named.id)
    with pytest.raises(AppError, match="no chat"):
        history.chat(empty.id)


def test_a_path_can_be_read_from_its_end_in_pieces(history: History) -> None:
    chat_id, _ = _talk(history, *map(str, range(7)))
    end = history.path(history.chat(chat_id).leaf_id, limit=3)
    before = history.path(end[0].parent_id, limit=3)
    first = history.path(before[0].parent_id, limit=3)
    assert [node.text for node in (*first, *before, *end)] == list("0123456")
    assert history.path(first[0].parent_id) == []


def test_a_message_cannot_hang_below_one_of_another_chat(history: History) -> None:
    chat_id, _ = _talk(history, "one")
    _, others = _talk(history, "two")
    with pytest.raises(AppError, match="no message"):
        history.add(chat_id, others[0], "assistant", "lost")
    with pytest.raises(AppError, match="no message"):
        history.select(chat_id, others[0])


def test_an_answer_is_written_as_it_grows_and_keeps_what_is_not_given_again(history: History) -> None:
    chat_id, ids = _talk(history, "ask")
    answer = history.add(chat_id, ids[0], "assistant", state="writing")
    history.write(answer.id, reasoning="hm")
    history.write(answer.id, text="It")
    history.write(answer.id, text="It is", state="done", meta={"model": "m"})
    node = history.node(answer.id)
    assert (node.text, node.reasoning, node.state, node.meta) == ("It is", "hm", "done", {"model": "m"})


def test_the_first_message_gives_an_unnamed_chat_its_title(history: History) -> None:
    chat_id, _ = _talk(history, "How  do\nI " + "x" * 100)
    title = history.chat(chat_id).title
    assert title.startswith("How do I xxx") and title.endswith("…") and len(title) == 61
    named = history.create_chat("Mine")
    history.add(named.id, None, "user", "words")
    assert history.chat(named.id).title == "Mine"


def test_pinned_chats_come_first_and_then_those_last_spoken_in(history: History) -> None:
    (old, _), (new, _), (pinned, _) = _talk(history, "old"), _talk(history, "new"), _talk(history, "pinned")
    history.change_chat(pinned, is_pinned=True)
    history.add(old, None, "user", "again")
    history.change_chat(new, title="renaming moves nothing", folder="work")
    assert [chat.id for chat in history.chats()] == [pinned, old, new]
    assert [chat.id for chat in history.chats(folder="work")] == [new]
    assert history.folders() == ["work"]


def test_a_chat_keeps_its_system_prompt_and_sampling(history: History) -> None:
    chat = history.create_chat(system="Be brief.", sampling={"temperature": 0.3})
    history.change_chat(chat.id, sampling={"top_p": 0.9, "stop": ["\n"]}, model_id="other")
    now = history.chat(chat.id)
    assert (now.system, now.sampling, now.model_id) == ("Be brief.", {"top_p": 0.9, "stop": ["\n"]}, "other")


@pytest.mark.parametrize(
    "query",
    ["fooba", "FOOBAR", "world hel", "你好", "жёл", "жё", "ÉT", "it's", '"quoted"', "100%", "a_b", "*", "two\nwords"],
)
def test_a_search_finds_parts_of_words_of_any_script_and_case(history: History, query: str) -> None:
    text = 'Hello World, fooBar 你好世界 ЖЁЛТЫЙ été it\'s "quoted" 100% a_b * two words'
    chat_id, ids = _talk(history, text)
    _talk(history, "something else entirely: hello and no more")
    assert [(found.chat.id, found.node_id) for found in history.search(query)] == [(chat_id, ids[0])]


@pytest.mark.parametrize("query", ["", "  ", "hello nowhere", "100_", "fooBar AND", "fo*", "NEAR(a b)"])
def test_a_search_takes_no_character_for_an_operator(history: History, query: str) -> None:
    _talk(history, "Hello fooBar 100% a b")
    assert history.search(query) == []


@pytest.mark.parametrize(
    ("query", "is_found"),
    [
        *[('"two little words"', True), ('"little two"', False), ("“little words” two", True), ("「你好世界」", True)],
        *[('say "two', False), ('f("x y")', True), ('" "', False), ("straße", True)],
    ],
)
def test_words_between_quotation_marks_are_searched_as_they_stand(history: History, query: str, is_found: bool) -> None:
    _talk(history, 'Two little words, 你好世界, f("x y") in a Straße')
    assert bool(history.search(query)) is is_found


def test_a_search_finds_titles_and_the_newest_message_with_an_excerpt(history: History) -> None:
    chat_id, ids = _talk(history, "needle", "x" * 100 + " the Needle " + "y" * 200)
    titled = history.create_chat("Needlework")
    found = {each.chat.id: each for each in history.search("needle")}
    assert found[titled.id].node_id is None
    assert found[chat_id].node_id == ids[1]
    assert "the Needle yyy" in found[chat_id].excerpt and found[chat_id].excerpt.startswith("…")


def test_a_search_knows_an_answer_once_it_is_over_as_it_is_then(history: History) -> None:
    chat_id, ids = _talk(history, "ask")
    answer = history.add(chat_id, ids[0], "assistant", "provisional", state="writing")
    assert history.search("provisional") == []
    history.write(answer.id, text="definite", state="done")
    assert [found.node_id for found in history.search("definite")] == [answer.id]
    history.write(answer.id, text="rewritten", state="done")
    assert history.search("definite") == [] and history.search("provisional") == []
    history.write(answer.id, text="rewritten", state="writing")
    assert history.search("rewritten") == []


def test_a_deleted_chat_is_gone_at_once_and_can_be_brought_back(history: History) -> None:
    chat_id, ids = _talk(history, "needle")
    history.delete_chat(chat_id)
    assert history.chats() == [] and history.search("needle") == []
    with pytest.raises(AppError, match="no chat"):
        history.chat(chat_id)
    assert history.restore_chat(chat_id).leaf_id == ids[0]
    assert [found.node_id for found in history.search("needle")] == ids


def test_nothing_of_a_deleted_chat_stays_in_the_file_when_the_time_to_undo_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.db")
    chat_id, ids = _talk(history, "a secret sentence")
    attached = history.attach("plan.txt", "text", 3, "a secret file")
    history.add(chat_id, ids[0], "user", "see", attachment_ids=[attached.id])
    history.delete_chat(chat_id)
    history.close()
    later = time.time() + UNDO_S + 1
    monkeypatch.setattr("app.history.history.time.time", lambda: later)
    History(tmp_path / "history.db").close()
    assert b"secret" not in (tmp_path / "history.db").read_bytes()


def test_a_file_goes_with_the_message_that_names_it_and_with_no_other_chat(history: History) -> None:
    attached = history.attach("a.py", "text", 9, "print(1)\n")
    chat_id, _ = _talk(history, "one")
    node = history.add(chat_id, None, "user", "see", attachment_ids=[attached.id])
    assert node.attachments == (attached,) and history.node(node.id) == node
    assert history.attached_text(attached.id) == "print(1)\n"
    other, _ = _talk(history, "two")
    with pytest.raises(AppError, match="no file"):
        history.add(other, None, "user", "mine?", attachment_ids=[attached.id])


def test_the_index_forgets_the_words_of_a_deleted_chat(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db", undo_s=0.0)
    # Of each piece of three the index keeps what differs from the one before it.
    keys = "".join(chr(0x4E00 + i) for i in range(2000))
    chat_id, _ = _talk(history, keys)
    _talk(history, "something else")
    history.delete_chat(chat_id)
    history.close()
    assert keys[1001:1003].encode() not in (tmp_path / "history.db").read_bytes()


def test_a_message_that_is_only_a_file_gives_its_name_as_title(history: History) -> None:
    attached = history.attach("plan.txt", "text", 1, "x")
    chat = history.create_chat()
    history.add(chat.id, None, "user", "", attachment_ids=[attached.id])
    assert history.chat(chat.id).title == "plan.txt"


def test_what_is_not_there_is_told(history: History) -> None:
    for ask in (history.chat, history.node, history.siblings, history.attached_text, history.delete_chat):
        with pytest.raises(AppError) as caught:
            ask("nothing")
        assert caught.value.status == 404
    with pytest.raises(AppError, match="no message"):
        history.write("nothing", text="lost")
