"""aider, in an environment of its own: it asks through litellm and edits a file as the model says."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.foreign import environment, venv_python
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client

CLIENT = Client("aider", "aider-chat", "requirements/aider.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first
_FLAGS = [
    *("--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable"),
    *("--yes-always", "--no-git", "--no-pretty", "--no-detect-urls", "--map-tokens", "0"),
]


def aider(stage: Stage, folder: Path, *words: str) -> str:
    server = {"OPENAI_API_BASE": f"{stage.url}/v1", "OPENAI_API_KEY": "none", "HOME": str(folder)}
    command = [str(venv_python("aider")), "-m", "aider", "--model", f"openai/{MODEL}", *_FLAGS, *words]
    run = subprocess.run(
        command,
        cwd=folder,
        env=environment() | server,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.proves("chat", "stream")
@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_a_message_is_answered(stage: Stage, tmp_path: Path, flag: str) -> None:
    assert "Paris." in aider(stage, tmp_path, flag, "--message", "scene:plain")


@pytest.mark.proves("edits")
def test_a_file_is_edited_as_the_model_says(stage: Stage, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("before\n")
    aider(stage, tmp_path, "note.txt", "--message", "scene:edit")
    assert note.read_text() == "written by a model\n"
