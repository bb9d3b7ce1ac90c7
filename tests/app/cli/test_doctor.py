"""The doctor names what is wrong and what to do."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import doctor
from app.cli import main as cli
from app.models.machine import Card, Memory
from tests.app.models.fake_hub import FakeHub, led_here, running


def findings(home: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    cli.main(["doctor", "--json", "--home", str(home)])
    return {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens: the answer comes at once."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("FIRESIDE_PORT", str(server.getsockname()[1]))
        yield server.getsockname()[1]


def test_every_note_and_problem_has_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(tmp_path, capsys)
    assert {"versions", "packages", "GPU", "disk", "port", "models", "hub"} <= set(found)
    assert [f["about"] for f in found.values() if f["state"] != "ok" and not f["fix"]] == []


def test_a_port_that_is_taken_is_told_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listening: int
) -> None:
    port = findings(tmp_path, capsys)["port"]
    assert port["state"] == "note" and f"--port {listening + 1}" in port["fix"]


def test_a_broken_catalogue_is_a_problem_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.yaml").write_text("mine:\n  repo: nothing\n")
    assert "models.yaml:2: mine: `repo` is" in findings(tmp_path, capsys)["models.yaml"]["found"]
    assert cli.main(["doctor", "--home", str(tmp_path)]) == 1
    assert "PROBLEM models.yaml" in capsys.readouterr().out


def test_a_download_that_is_not_finished_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / ".org--tiny.download").mkdir(parents=True)
    assert "org--tiny" in findings(tmp_path, capsys)["downloads"]["found"]


def test_a_full_disk_and_offline_mode_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5e8))
    found = findings(tmp_path, capsys)
    assert (found["disk"]["state"], found["hub"]["state"]) == ("problem", "note")


@pytest.mark.parametrize(
    ("capability", "torch", "about"), [((7, 5), "2.13.0", "GPU"), ((8, 9), "2.13.0+cpu", "PyTorch")]
)
def test_a_card_that_cannot_be_used_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], torch: str, about: str
) -> None:
    memory = Memory("cuda", "a card", 24 * 10**9, 20 * 10**9)
    monkeypatch.setattr(doctor, "first_card", lambda: Card(memory, "580.1", capability))
    monkeypatch.setattr(doctor, "_version_of", lambda name: torch)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    problems = {finding.about for finding in doctor._gpu(None) if finding.state == "problem"}  # type: ignore[arg-type]
    assert problems == {about, "C compiler"}


def test_cards_that_the_environment_hides_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES is '-1'" in findings(tmp_path, capsys)["GPU"]["fix"]


def test_the_hub_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = findings(tmp_path, capsys)["hub"]
    assert hub["state"] == "note" and "http://127.0.0.1:9 cannot be reached" in hub["found"] and hub["fix"]
    with running(FakeHub()) as there:
        led_here(there, monkeypatch)
        assert findings(tmp_path, capsys)["hub"]["state"] == "ok"
