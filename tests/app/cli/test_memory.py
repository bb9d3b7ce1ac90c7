"""`models load`, `unload`, `logs` and `chat` against a served API over scripted engines."""

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.cli import main as cli
from app.running import leave_note, noted_url, take_note_away
from tests.clients.stage import Stage, model_folder
from tests.fakes import FakeCard, FakeHealth, Script, ids

Run = Callable[..., int]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    script = Script(token_ids=ids("Hello you."))
    with Stage(model_folder(tmp_path_factory.mktemp("cli") / "byte-model"), script) as running:
        yield running


@pytest.fixture
def run(stage: Stage, tmp_path: Path) -> Run:
    stage.house.shelf.now = FakeHealth()
    stage.house.shelf.asked.clear()
    leave_note(tmp_path, stage.url)
    return lambda *words: cli.main([*words, "--home", str(tmp_path)])


def comes_to(stage: Stage, outcome: FakeHealth, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is asked for takes a moment, and ends so."""
    shelf = stage.house.shelf
    begin = shelf.load

    def load(name: str) -> str:
        begin(name)
        threading.Timer(0.5, lambda: setattr(shelf, "now", outcome)).start()
        return name

    monkeypatch.setattr(shelf, "load", load)


def test_a_load_is_followed_until_the_model_answers(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_to(stage, FakeHealth(model="owner/other-4bit"), monkeypatch)
    assert run("models", "load", "owner/other-4bit") == 0
    assert capsys.readouterr().out == "owner/other-4bit is loaded.\n"
    assert stage.house.shelf.asked == ["load owner/other-4bit"]


def test_what_a_command_did_is_told_as_json_where_that_is_asked(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["models", "logs", "--lines", "2"], {"model": "fake-model", "lines": ["two", "three"]}),
        (["models", "load", "owner/other-4bit", "--no-wait"], {"model": "owner/other-4bit", "state": "loading"}),
        (["models", "unload"], {"model": "owner/other-4bit", "state": "unloaded"}),
    ):
        assert run(*words, "--json") == 0
        assert json.loads(capsys.readouterr().out) == told


def test_the_list_tells_what_the_running_fireside_has_in_memory(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [
        FakeCard(id="qwen3-8b-awq", state="loading"),
        FakeCard(id="my-folder", state="loaded"),
        FakeCard(id="x", state="failed"),
    ]
    monkeypatch.setattr(stage.house.shelf, "held", cards)
    assert run("models", "list", "--json") == 0
    states = {row["id"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert (states["qwen3-8b-awq"], states["my-folder"]) == ("loading", "loaded")
    assert "x" not in states and [name for name, state in states.items() if state] == ["qwen3-8b-awq", "my-folder"]


def test_what_is_loaded_is_not_removed(
    run: Run, stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "qwen3-8b-awq"
    folder.mkdir(parents=True)
    monkeypatch.setattr(stage.house.shelf, "held", [FakeCard(id="qwen3-8b-awq", state="loaded")])
    assert run("models", "rm", "qwen3") == 1
    assert "`python launch.py models unload qwen3-8b-awq` first" in capsys.readouterr().err and folder.exists()
    monkeypatch.setattr(stage.house.shelf, "held", [])
    assert run("models", "rm", "qwen3") == 0 and not folder.exists()


def test_a_load_that_fails_ends_with_1_and_the_reason(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_to(stage, FakeHealth(state="failed", model="owner/other-4bit", detail="It needs 9 GB."), monkeypatch)
    assert run("models", "load", "owner/other-4bit") == 1
    assert capsys.readouterr().err == "It needs 9 GB.\n"
    assert run("models", "load", "nothing") == 1
    assert "There is no model 'nothing'" in capsys.readouterr().err


def test_a_load_that_fails_while_the_model_before_it_stays_in_hand_ends_with_1_and_the_reason(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_to(stage, FakeHealth(model="fake-model"), monkeypatch)
    failed = FakeCard(id="owner/other-4bit", state="failed", error="The hub cannot be reached.")
    monkeypatch.setattr(stage.house.shelf, "held", [stage.house.shelf.held[0], failed])
    assert run("models", "load", "owner/other-4bit") == 1
    told = capsys.readouterr()
    assert told.err == "The hub cannot be reached. fake-model is in hand as before.\n" and not told.out


def test_without_a_loaded_model_there_is_none_to_unload(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.house.shelf.now = FakeHealth(state="failed", model="fake-model", detail="no room")
    assert run("models", "unload") == 1 and not stage.house.shelf.asked
    assert "No model is loaded." in capsys.readouterr().err


def test_unloading_takes_the_model_in_hand_unless_one_is_named(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "unload") == 0 and stage.house.shelf.asked == ["unload fake-model"]
    assert "its memory is free" in capsys.readouterr().out
    assert run("models", "unload", "owner/other-4bit") == 1
    assert "is not loaded" in capsys.readouterr().err


def test_the_logs_are_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "logs", "--lines", "2") == 0
    assert capsys.readouterr().out == "two\nthree\n"


def test_one_question_or_what_is_piped_in_is_answered_without_a_word_more(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("chat", "Hi?", "--system", "Be brief.", "--max-tokens", "50") == 0
    assert capsys.readouterr().out == "Hello you.\n"
    assert "Be brief." in stage.last_prompt() and stage.last_params().max_tokens == 50
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert run("chat") == 0
    assert capsys.readouterr().out == "Hello you.\n" and "piped" in stage.last_prompt()


def test_a_conversation_remembers_and_obeys(
    run: Run, stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["first", "second\\", "line", "/undo", "third", "/new", "/nonsense", "/model none", "fourth", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    before = len(stage.engine.submitted)
    assert run("chat") == 0
    prompts = [bytes(t for t in prompt if t < 256).decode() for _, prompt, _ in stage.engine.submitted[before:]]
    assert [("first" in p, "second\nline" in p, "third" in p, "fourth" in p) for p in prompts] == [
        (True, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
        (False, False, False, True),
    ]
    told = capsys.readouterr()
    assert told.out.count("Hello you.") == 4
    assert "There is no /nonsense" in told.err and "There is no model 'none'" in told.err


def test_a_server_that_was_started_for_a_chat_ends_with_it() -> None:
    code = "from app.running import end_with_starter; end_with_starter(); import time; time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], stdin=subprocess.PIPE
    ) as started:
        assert started.poll() is None
        assert started.stdin is not None
        started.stdin.close()
        assert started.wait(timeout=60) == -signal.SIGTERM


def test_of_two_servers_on_one_home_the_newest_that_lives_is_found(tmp_path: Path) -> None:
    code = "import pathlib, sys; from app.running import leave_note; leave_note(pathlib.Path(sys.argv[1]), sys.argv[2])"
    root = Path(__file__).parents[3]

    def other(url: str, then: str) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-c", f"{code}; print(1, flush=True); {then}", str(tmp_path), url]
        return subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with other("http://first", "sys.stdin.read()") as first:
        assert first.stdout is not None and first.stdout.readline()
        leave_note(tmp_path, "http://second")
        assert noted_url(tmp_path) == "http://second"
        take_note_away(tmp_path)
        assert noted_url(tmp_path) == "http://first"
        with other("http://third", "pass") as third:
            third.wait()
        assert noted_url(tmp_path) == "http://first", "the note of one that died is passed over"
        first.kill()
    assert noted_url(tmp_path) is None
    leave_note(tmp_path, "http://fourth")
    assert len(list(tmp_path.glob("server-*"))) == 1, "notes of the dead are cleared away"


def test_without_a_server_the_way_to_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_note(tmp_path, "http://127.0.0.1:9")
    assert cli.main(["models", "unload", "--home", str(tmp_path)]) == 1
    assert "Start Fireside with `python launch.py`" in capsys.readouterr().err
    take_note_away(tmp_path)
    assert noted_url(tmp_path) is None
