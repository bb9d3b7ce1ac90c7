"""Nothing acknowledged is lost: not by kill -9, not by another process, not by a file that cannot be used."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.errors import AppError
from app.history import schema
from app.history.book import Book
from app.history.database import Database
from app.history.history import History

ROOT = Path(__file__).parents[3]


def _start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.app.history.writer", str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _kill_after(path: Path, num_acknowledged: int) -> dict[str, str]:
    """Kill a writer in the middle of its work. Gives the last text acknowledged for each message."""
    writer = _start_writer(path)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(num_acknowledged)]
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.readlines()  # what it had said by the time that it died
    writer.wait()
    whole = [line.rstrip("\n") for line in lines if line.endswith("\n")]
    return dict(line.split(" ", 1) for line in whole)


def _kills(path: Path, num_kills: int) -> None:
    chance = random.Random(7)
    acknowledged: dict[str, str] = {}
    for _ in range(num_kills):
        acknowledged |= _kill_after(path, chance.randrange(1, 60))
        history = History(path)  # as the next start of the server does; checks the whole file
        kept = {node_id: history.node(node_id) for node_id in acknowledged}
        assert {node_id for node_id, text in acknowledged.items() if not kept[node_id].text.startswith(text)} == set()
        assert "writing" not in {node.state for node in kept.values()}
        history.close()


def test_a_kill_loses_nothing_acknowledged(tmp_path: Path) -> None:
    _kills(tmp_path / "history.db", 5)


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    _kills(tmp_path / "history.db", 100)


def test_an_answer_of_a_killed_server_is_cut_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    mine = History(path)
    chat_id = mine.create_chat().id
    living = mine.add(chat_id, None, "assistant", state="writing")
    dead: dict[str, str] = {}
    for _ in range(20):  # a kill may fall between two answers
        dead |= _kill_after(path, 3)
        other = History(path)
        states = {other.node(node_id).state for node_id in dead}
        assert states <= {"done", "cut"} and other.node(living.id).state == "writing"
        if "cut" in states:
            break
        other.close()
    assert states == {"done", "cut"}
    mine.close()
    assert other.node(living.id).state == "cut"
    other.close()


def test_processes_that_write_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """They also open a file that is not there yet at the same time."""
    path = tmp_path / "history.db"
    writers = [_start_writer(path) for _ in range(3)]
    said: dict[str, str] = {}
    for writer in writers:
        assert writer.stdout is not None
        said |= dict(writer.stdout.readline().rstrip("\n").split(" ", 1) for _ in range(30))
    for writer in writers:
        writer.kill()
        writer.wait()
    history = History(path)
    assert all(history.node(node_id).text.startswith(text) for node_id, text in said.items())
    assert len(history.chats()) == 3
    history.close()


def test_threads_that_write_at_once_wait_for_each_other(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    chat_ids = [history.create_chat().id for _ in range(8)]

    def write(chat_id: str) -> None:
        for turn in range(20):
            history.add(chat_id, None, "user", f"{turn}")

    threads = [threading.Thread(target=write, args=(chat_id,)) for chat_id in chat_ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for chat_id in chat_ids:
        assert history.path(history.chat(chat_id).leaf_id)[0].num_versions == 20
    history.close()


def test_a_process_that_holds_the_file_too_long_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.history.database.BUSY_TIMEOUT_S", 0.05)
    history = History(tmp_path / "history.db")
    other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(AppError, match="another process") as caught:
        history.create_chat()
    assert caught.value.code == "history_busy"
    other.execute("ROLLBACK")
    assert history.create_chat().id
    history.close()


# Files that cannot be used


def _filled(path: Path) -> None:
    history = History(path)
    chat = history.create_chat()
    for turn in range(50):
        history.add(chat.id, None, "user", f"words {turn} " * 200)
    history.close()


def _overwrite(path: Path, start: int, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * num_bytes)


def _refusal(path: Path) -> AppError:
    with pytest.raises(AppError) as caught:
        History(path)
    assert caught.value.status == 503 and str(path) in caught.value.message and caught.value.hint
    return caught.value


@pytest.mark.parametrize("start", [0, 40_000, -30_000])
def test_a_damaged_file_is_refused_and_stays_as_it_is(tmp_path: Path, start: int) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    _overwrite(path, start % path.stat().st_size, 8192)
    before = path.read_bytes()
    assert _refusal(path).code == "history_damaged"
    assert path.read_bytes() == before


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    os.truncate(path, path.stat().st_size // 2)
    assert _refusal(path).code == "history_damaged"


def test_a_file_of_a_newer_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    before = path.read_bytes()
    assert _refusal(path).code == "history_newer"
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    assert _refusal(path).code == "history_foreign"


def test_a_place_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.db").mkdir()
    assert _refusal(tmp_path / "history.db").code == "history_unusable"


def test_damage_found_while_reading_is_told(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    history = History(path)
    history._database._connection.execute("PRAGMA shrink_memory")  # pages that are in memory hide it
    _overwrite(path, 8192, path.stat().st_size - 8192)
    with pytest.raises(AppError) as caught:
        history.search("words")
    assert caught.value.code == "history_damaged"
    history.close()


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    chat = history.create_chat("kept")
    history._database._connection.execute("PRAGMA max_page_count = 1")  # it takes the least that is possible
    with pytest.raises(AppError) as caught:
        history.add(chat.id, None, "user", "x" * 10**6)
    assert (caught.value.status, caught.value.code) == (507, "disk_full")
    assert [each.title for each in history.chats()] == ["kept"]
    history.close()


def test_a_file_that_cannot_be_used_is_set_aside_whole(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(b"no database at all" * 1000)
    book = Book(path)
    with pytest.raises(AppError, match="damaged"):
        _ = book.kept
    assert book.incognito.create_chat().id.startswith("incognito-")
    goal = book.set_aside()
    assert goal.parent == tmp_path and goal.read_bytes() == b"no database at all" * 1000
    assert book.kept.chats() == []
    with pytest.raises(AppError, match="can be read"):
        book.set_aside()
    book.close()


def test_a_file_that_was_damaged_while_it_was_open_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    book = Book(path)
    book.kept._database._connection.execute("PRAGMA shrink_memory")
    _overwrite(path, 8192, path.stat().st_size - 8192)
    goal = book.set_aside()
    assert b"\xa5" * 8192 in goal.read_bytes() and book.kept.chats() == []
    book.close()


def test_an_incognito_chat_never_touches_the_disk(tmp_path: Path) -> None:
    book = Book(tmp_path / "history.db")
    chat = book.incognito.create_chat()
    node = book.of(chat.id).add(chat.id, None, "user", "a secret sentence")
    assert book.of(node.id).node(node.id).text == "a secret sentence"
    assert book.kept.chats() == []
    book.close()
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


# Steps from older formats


@pytest.mark.parametrize("version", range(1, len(schema.MIGRATIONS)))
def test_a_file_of_each_older_format_is_brought_here_and_a_copy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    path = tmp_path / "history.db"
    with monkeypatch.context() as then:
        then.setattr("app.history.database.MIGRATIONS", schema.MIGRATIONS[:version])
        _write_as_of(version, path)
    history = History(path)
    assert [found.node_id for found in history.search("needle")] == ["n"]
    assert history.node("n").text == "a needle"
    history.close()
    copy = tmp_path / f"history-format-{version}.db"
    assert sqlite3.connect(copy).execute("PRAGMA user_version").fetchone() == (version,)


def _write_as_of(version: int, path: Path) -> None:
    database = Database(path)
    with database.writing() as db:
        db.execute("INSERT INTO chats VALUES ('c', 't', '', 0, '', '', '{}', 'n', 1.0, 1.0, NULL)")
        db.execute(
            "INSERT INTO nodes VALUES (1, 'n', 'c', NULL, 'user', 'done', NULL, 1.0, '[]', '{}', '', 'a needle')"
        )
    database.close()


def test_a_step_that_fails_leaves_the_file_in_the_format_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.db"
    _filled(path)
    bad = (*schema.MIGRATIONS, ("CREATE TABLE half (x)", "NONSENSE"))
    with monkeypatch.context() as broken:
        broken.setattr("app.history.database.MIGRATIONS", bad)
        with pytest.raises(sqlite3.OperationalError, match="NONSENSE"):
            History(path)
    history = History(path)
    assert len(history.search("words")) == 1
    history.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'half'").fetchone() == (0,)
