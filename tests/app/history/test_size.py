"""What a history costs does not grow with what is not shown: counted in work, not in seconds."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.history.history import History

SHOWN = 60  # messages that the page draws at first


def fill(path: Path, num_messages: int, num_chats: int = 1) -> str:
    """Chats of so many messages each, in one transaction; gives the id of the last."""
    history = History(path)
    chat_ids = [f"chat{number}" for number in range(num_chats)]
    nodes = [
        (f"{chat_id}-{i}", chat_id, f"{chat_id}-{i - 1}" if i else None, "assistant" if i % 2 else "user", _text(i))
        for chat_id in chat_ids
        for i in range(num_messages)
    ]
    with history._database.writing() as db:
        db.executemany(
            "INSERT INTO chats (id, title, folder, is_pinned, model_id, system, sampling, leaf_id, created_at,"
            " updated_at) VALUES (?, 'title', '', 0, '', '', '{}', ?, 1.0, ?)",
            [(chat_id, f"{chat_id}-{num_messages - 1}", i) for i, chat_id in enumerate(chat_ids)],
        )
        db.executemany(
            "INSERT INTO nodes (id, chat_id, parent_id, role, text, state, created_at, attachments, meta, reasoning)"
            " VALUES (?, ?, ?, ?, ?, 'done', 1.0, '[]', '{}', '')",
            nodes,
        )
    history.close()
    return chat_ids[-1]


def _text(number: int) -> str:
    return f"message {number}: " + "the quick brown fox jumps over the lazy dog, and then once more. " * 12


def _work(history: History, ask: Callable[[], object]) -> int:
    """Instructions of SQLite's machine, in tens."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1

    connection = history._database._connection
    connection.set_progress_handler(count, 10)
    ask()
    connection.set_progress_handler(None, 0)
    return done


def test_the_end_of_a_long_chat_costs_what_that_of_a_short_one_does(tmp_path: Path) -> None:
    work = {}
    for num_messages in (200, 2000):
        path = tmp_path / f"{num_messages}.db"
        chat_id = fill(path, num_messages)
        history = History(path)
        leaf_id = history.chat(chat_id).leaf_id
        work[num_messages] = _work(history, lambda: history.path(leaf_id, limit=SHOWN))  # noqa: B023
        history.close()
    assert work[2000] <= 1.1 * work[200]


def test_a_page_of_the_list_costs_what_it_shows(tmp_path: Path) -> None:
    work = {}
    for num_chats in (120, 1000):
        path = tmp_path / f"{num_chats}.db"
        fill(path, 1, num_chats)
        history = History(path)
        work[num_chats] = _work(history, lambda: history.chats(limit=100))  # noqa: B023
        history.close()
    assert work[1000] <= 1.1 * work[120]


@pytest.mark.slow
def test_a_history_of_ten_thousand_messages_opens_at_once(tmp_path: Path) -> None:
    """Told in seconds for people; the rule itself is in the two tests above."""
    path = tmp_path / "history.db"
    chat_id = fill(path, 10_000)
    began = time.perf_counter()
    history = History(path)
    opened = time.perf_counter()
    chats = history.chats()
    shown = history.path(chats[0].leaf_id, limit=SHOWN)
    drawn = time.perf_counter()
    assert [node.id for node in shown] == [f"{chat_id}-{i}" for i in range(10_000 - SHOWN, 10_000)]
    assert len(history.path(chats[0].leaf_id)) == 10_000
    whole = time.perf_counter()
    assert len(history.search("message 777:")) == 1
    found = time.perf_counter()
    history.close()
    print(
        f"\n10,000 messages, {path.stat().st_size / 1e6:.0f} MB: opened and checked {opened - began:.3f} s, list and "
        f"end of the chat {drawn - opened:.3f} s, all of it {whole - drawn:.3f} s, search {found - whole:.3f} s"
    )
