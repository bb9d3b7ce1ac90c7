"""`models pull`, `verify`, `rm`, `token` from their words to what lies on the disk."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import main as cli
from app.cli.progress import Shown
from app.models.hub import downloader, downloads
from app.models.hub.download import fetch
from app.models.hub.report import Report, Transfer
from tests.app.models.fake_hub import FakeHub, led_here, running
from tests.app.models.hub.test_download import REPO, model_files
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Downloads run in this process: their own processes are tested beside them."""
    with running(FakeHub(files={REPO: model_files()}, commits={REPO: "a" * 40})) as hub:
        led_here(hub, monkeypatch)
        monkeypatch.setattr(downloads.Downloads.__init__, "__defaults__", (fetch,))
        yield hub


def run(home: Path, *words: str) -> int:
    return cli.main([*words, "--home", str(home)])


def rows(home: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert run(home, "models", "list", "--json") == 0
    return {row["id"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_model_is_pulled_verified_and_removed(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "models", "pull", REPO) == 0
    told = capsys.readouterr()
    assert "4 files, every one verified by its hash." in told.out
    assert "100%" in told.err
    folder = tmp_path / "models" / "org--tiny-AWQ"
    assert run(tmp_path, "models", "verify", REPO, "--json") == 0
    assert set(json.loads(capsys.readouterr().out).values()) == {"verified"}
    assert run(tmp_path, "models", "rm", REPO) == 0
    assert not folder.exists()
    assert run(tmp_path, "models", "rm", REPO) == 1


def test_verify_tells_a_damaged_file_and_ends_with_1(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "models", "pull", REPO)
    path = tmp_path / "models" / "org--tiny-AWQ" / "tokenizer.json"
    path.write_text(path.read_text().replace("x", "y", 1))
    assert run(tmp_path, "models", "verify", REPO) == 1
    assert ["tokenizer.json", "damaged"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_verify_and_repair_tell_how_far_they_are(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "models", "pull", REPO)
    capsys.readouterr()
    assert run(tmp_path, "models", "verify", REPO) == 0
    assert "Checking org/tiny-AWQ (0.00 GB): 100%" in capsys.readouterr().err
    (tmp_path / "models" / "org--tiny-AWQ" / "config.json").write_text("[]")
    assert run(tmp_path, "models", "verify", REPO, "--repair", "--json") == 0
    told = capsys.readouterr()
    assert "Downloading org/tiny-AWQ" in told.err
    assert set(json.loads(told.out).values()) == {"verified"}


def test_at_a_terminal_the_whole_and_each_file_on_its_way_are_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    files = (Transfer("a", 10**9, 5 * 10**8, "downloading"), Transfer("b", 10, 10, "verified"), Transfer("c" * 60, 10))
    with Shown() as shown:
        shown.report(Report(REPO, "downloading", files, 10**7))
        shown.stage("Converting", 0.5)
    first, second = capsys.readouterr().err.split("\033[J")[1:]
    assert first.startswith(f"Downloading {REPO} (1.00 GB): 50%") and max(map(len, first.splitlines())) < 50
    assert "\n  a: 500.00 MB of 1.00 GB" in first and "  b:" not in first
    assert first.endswith("\r\033[1A"), "two lines were there"
    assert second == "Converting: 50%\n"


def test_what_came_of_a_command_is_told_as_json_where_that_is_asked(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> dict[str, object]:
        assert run(tmp_path, "models", *words, "--json") == 0
        return dict(json.loads(capsys.readouterr().out))

    assert set(dict(told("pull", REPO)["files"]).values()) == {"verified"}  # type: ignore[call-overload]
    freed = told("rm", REPO)
    assert freed["id"] == REPO and freed["freed_bytes"] > 3_000_000  # type: ignore[operator]
    tiny_checkpoint(tmp_path / "mine", "llama")
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    assert told("add", str(tmp_path / "mine"), "--id", "it")["id"] == "it"
    assert run(tmp_path, "models", "add", str(tmp_path / "mine"), "--id", "no id") == 1
    assert "'no id'; it must be made of letters" in capsys.readouterr().err


def test_without_a_hash_nothing_is_called_verified(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.tells_no_hash = True
    assert run(tmp_path, "models", "pull", REPO) == 0
    assert "4 files; unverified, as no hash of them is known: " in capsys.readouterr().out


def test_a_failed_download_is_told_and_listed_with_its_state(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.gated.add(REPO)
    assert run(tmp_path, "models", "pull", REPO) == 1
    assert "`python launch.py models token`" in capsys.readouterr().err
    assert rows(tmp_path, capsys)[REPO]["state"] == "failed"


def test_the_token_that_is_kept_opens_a_gated_repository(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(REPO)
    monkeypatch.setattr(downloads.Downloads.__init__, "__defaults__", (downloader.fetch_apart,))
    monkeypatch.setattr("builtins.input", lambda: hub.token)
    assert run(tmp_path, "models", "token") == 0
    assert os.name == "nt" or (tmp_path / "hub-token").stat().st_mode & 0o77 == 0
    assert run(tmp_path, "models", "pull", REPO) == 0
    assert run(tmp_path, "models", "token", "--forget") == 0
    assert "Forgotten." in capsys.readouterr().out


def test_a_name_of_the_users_own_goes_and_its_folder_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path / "mine", "llama")
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    assert run(tmp_path, "models", "add", str(tmp_path / "mine"), "--id", "it") == 0
    capsys.readouterr()
    assert run(tmp_path, "models", "rm", "it") == 0
    told = capsys.readouterr().out
    assert "it is taken out of" in told and f"{tmp_path / 'mine'} stays" in told and "freed" not in told
    assert (tmp_path / "mine" / "config.json").exists() and "it" not in rows(tmp_path, capsys)


def test_a_folder_of_the_users_own_is_never_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert run(tmp_path, "models", "rm", str(mine)) == 1
    assert "a folder of your own" in capsys.readouterr().err
    assert (mine / "config.json").exists()
