"""Claude Code, the command line program, over /v1/messages: its own prompt, its own tools."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.foreign import environment, node_packages
from tests.clients.scenes import REPORT, SCENES, text_of
from tests.clients.stage import MODEL, Stage, model_folder
from tests.clients.table import Client
from tests.fakes import Script, ids

CLIENT = Client("Claude Code", "@anthropic-ai/claude-code", "claude-code/package.json")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first


@pytest.fixture(scope="module")
def note(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work") / "note.txt"
    path.write_text(REPORT)
    return path


@pytest.fixture(scope="module")
def stage(note: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A model that reads the note when it is asked to, and tells what it read."""
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(note)}})

    def play(prompt: tuple[int, ...]) -> Script:
        text = text_of(prompt)
        if "scene:read" not in text:
            return SCENES["plain"].script()
        if REPORT in text:
            return SCENES["told"].script()
        return Script(token_ids=ids(f"<tool_call>\n{call}\n</tool_call>"))

    with Stage(model_folder(tmp_path_factory.mktemp("claude") / "byte-model"), play) as running:
        yield running


def claude(stage: Stage, folder: Path, *words: str) -> dict[str, Any]:
    server = {
        "ANTHROPIC_BASE_URL": stage.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "HOME": str(folder),
    }
    kept = {name: value for name, value in environment().items() if not name.startswith("CLAUDE")}
    wrapper = node_packages("claude-code") / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    run = subprocess.run(
        ["node", str(wrapper), *words, "--output-format", "json"],
        cwd=folder,
        env=kept | server,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told


@pytest.mark.proves("chat", "stream", "usage")
def test_a_prompt_is_answered(stage: Stage, note: Path) -> None:
    told = claude(stage, note.parent, "-p", "scene:plain")
    assert (told["result"], told["is_error"], told["stop_reason"]) == ("Paris.", False, "end_turn")
    assert told["usage"]["output_tokens"] == 7


@pytest.mark.proves("tools", "tool_stream")
def test_a_tool_of_its_own_is_called_and_its_result_told(stage: Stage, note: Path) -> None:
    told = claude(stage, note.parent, "-p", "scene:read", "--allowedTools", "Read")
    assert (told["result"], told["num_turns"]) == (f"It is {REPORT}.", 2)
