"""Continue, as its command line program `cn` (the editor extension has the same core)."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.clients.foreign import environment, node_packages
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client

CLIENT = Client("Continue (cn)", "@continuedev/cli", "continue-cli/package.json")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first


@pytest.mark.proves("chat", "stream")
def test_a_prompt_is_answered(stage: Stage, tmp_path: Path) -> None:
    entry = {"name": "Fireside", "provider": "openai", "model": MODEL, "apiBase": f"{stage.url}/v1", "apiKey": "none"}
    models = [entry | {"roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"]}]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"name": "Local", "version": "0.0.1", "schema": "v1", "models": models}))
    program = node_packages("continue-cli") / "node_modules" / ".bin" / "cn"
    run = subprocess.run(
        [str(program), "-p", "scene:plain", "--config", str(config)],
        cwd=tmp_path,
        env=environment() | {"HOME": str(tmp_path), "CONTINUE_TELEMETRY_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.stdout.strip().endswith("Paris."), run.stdout + run.stderr
