"""The commands of the terminal: found by their words, told in words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from app.cli import main as cli
from tests.checkpoints import tiny_checkpoint


def run(home: Path, *words: str) -> int:
    return cli.main([*words, "--home", str(home)])


def test_the_front_door_knows_the_first_word_of_every_command() -> None:
    assert set(launch.COMMANDS) == {command.words.split()[0] for command in cli.COMMANDS}


def test_the_list_has_every_model_of_the_catalogue_and_says_what_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "models", "list", "--json") == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2-135m-instruct"]["state"] == ""
    assert run(tmp_path, "models", "list") == 0
    printed = capsys.readouterr().out
    assert [name for name in rows if name not in printed] == []


def test_the_list_tells_a_damaged_folder_and_the_size_of_what_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "cut"):
        tiny_checkpoint(tmp_path / name, "llama")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"padding": "x" * 30_000_000}))
    (tmp_path / "cut" / "config.json").unlink()
    blocks = (f"{name}:\n  folder: {tmp_path / name}\n" for name in ("whole", "cut", "gone"))
    (tmp_path / "models.yaml").write_text("".join(blocks))
    assert run(tmp_path, "models", "list", "--json") == 0
    rows = {row["id"]: (row["state"], row["gb"]) for row in json.loads(capsys.readouterr().out)}
    assert [rows["whole"], rows["cut"], rows["gone"]] == [("ready", 0.03), ("damaged", None), ("", None)]


def test_a_broken_catalogue_of_the_users_is_told_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.yaml").write_text("mine:\n  repoo: a/b\n")
    assert run(tmp_path, "models", "list") == 1
    assert "models.yaml:2: mine: unknown key `repoo`. Did you mean `repo`?" in capsys.readouterr().err


def test_a_wrong_setting_is_told_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.yaml").write_text("port: many\n")
    assert run(tmp_path, "models", "list") == 2
    assert "`port`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fit", "default", "--context", "0"], "context is 0; it must be a whole number"),
        (["fit", "default", "--context", "-5"], "context is -5"),
        (["fit", "default", "--gpu-gb", "nan"], "gpu_gb is nan; it must be above 0 and below 10,000"),
        (["fit", "default", "--gpu-gb", "1e9"], "gpu_gb is 1e+09"),
        (["models", "search", "--gpu-gb", "nan"], "gpu_gb is nan"),
        (["models", "search", "--gpu-gb", "-1"], "gpu_gb is -1"),
        (["models", "search", "--max-gb", "nan"], "max_gb is nan; it must be above 0"),
        (["models", "search", "--max-gb", "0"], "max_gb is 0"),
        (["models", "search", "--limit", "0"], "limit is 0; it must be 1 to 100"),
    ],
)
def test_numbers_that_nothing_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert run(tmp_path, *words) == 1
    assert told in capsys.readouterr().err


def test_a_command_whose_reader_has_gone_ends_quietly(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from app.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for words, codes in ((["models", "list", "--home", str(tmp_path)], {141}), (["--help"], {0, 141})):
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=write,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            text=True,
            check=False,
        )
        assert not ended.stderr and ended.returncode in codes
    os.close(write)


def test_a_search_without_a_network_is_told_once(tmp_path: Path) -> None:
    no_waits = "import time; time.sleep = lambda seconds: None; "  # between its tries: 23 s in all
    code = no_waits + "import sys; from app.cli.main import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, "models", "search", "qwen", "--home", str(tmp_path)],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        cwd=Path(__file__).parents[3],
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and "could not be reached" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
