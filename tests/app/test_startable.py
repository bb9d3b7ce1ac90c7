"""What a start would stumble over is refused when it is kept, and a start that does tells the key and its file."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app import server
from app.errors import AppError
from app.settings import load
from app.startable import check_start
from app.ui.settings_tab import SettingsDesk

BAD: list[tuple[str, Any, str]] = [
    ("host", "no-such-host.invalid", "cannot be found"),
    ("host", "203.0.113.1", "other machines can reach Fireside"),
    ("model", "nonexistent", "is no catalogue id"),
    ("model_alias", ["gpt-4o=nonexist"], "stands for 'nonexist', which is no model here"),
    ("model_alias", ["x"], "is 'x'; it must be NAME=MODEL"),
    ("kv_gb", 9999, "GB of memory in all"),
    ("ssl_certfile", "/no/such.pem", "there is no file /no/such.pem"),
    ("key_file", "/no/such.keys", "No such file or directory."),
]


def desk_of(home: Path) -> SettingsDesk:
    running = load({"home": home}, {})
    return SettingsDesk(running, {}, lambda to_come: check_start(to_come, own_port=running.port), lambda _: None)


@pytest.mark.parametrize(("name", "value", "told"), BAD)
def test_what_would_stop_the_next_start_is_not_kept(name: str, value: Any, told: str, tmp_path: Path) -> None:
    desk = desk_of(tmp_path)
    with pytest.raises(AppError) as refused:
        desk.change(name, value)
    assert told in refused.value.message and "[Errno" not in refused.value.message
    assert not (tmp_path / "settings.yaml").exists()


def test_a_port_that_another_program_has_is_not_kept(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AppError, match="is taken"):
            desk_of(tmp_path).change("port", taken.getsockname()[1])


def test_a_fault_of_another_key_is_told_with_its_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("model: nonexistent\n")
    with pytest.raises(AppError) as refused:
        desk_of(tmp_path).change("max_models", 2)
    assert f"`model` in {tmp_path / 'settings.yaml'}" in refused.value.message
    desk_of(tmp_path).change("model", None)


@pytest.mark.parametrize(
    ("line", "flag"), [("host: 203.0.113.1\nallow_no_key: true", "--host 127.0.0.1"), ("kv_gb: 9999", "--kv-gb GB")]
)
def test_a_start_that_the_file_stops_names_the_key_and_the_way_on(
    line: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text(line)
    assert server.main(["--home", str(tmp_path), "--no-browser", "--port", "0"]) in (1, 2)
    told = capsys.readouterr().err
    assert f"`{line.split(':')[0]}` in {tmp_path / 'settings.yaml'}" in told and f"`{flag}`" in told


@pytest.mark.parametrize("line", ["model: nonexistent", "model_alias: [gpt-4o=nonexist]"])
def test_a_model_that_stops_the_start_is_told_with_its_line_of_the_file(line: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(line)
    command = [sys.executable, "-m", "app.server", "--home", str(tmp_path), "--port", "0", "--no-browser"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and f"`{line.split(':')[0]}` in {tmp_path / 'settings.yaml'}" in run.stderr
