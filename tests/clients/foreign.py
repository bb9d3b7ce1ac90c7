"""Clients that do not live in this Python: Node's, and those whose packages do not go with ours.

Such a client is a script that plays its checks against a stage and prints a JSON line for each, {"feature", "error"};
its test file is a `frame` of it, with one case a feature. What it needs is installed once, into `CACHE`, by what its
pins say.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.clients.scenes import ADA, ADA_SCHEMA, REPORT, UNICODE, WEATHER_SCHEMA
from tests.clients.stage import MODEL, Stage

_HERE = Path(__file__).parent
CACHE = Path(os.environ.get("FIRESIDE_TEST_HOME") or _HERE.parent / "artifacts") / "clients"
_INSTALL_S, _RUN_S = 900, 120

Results = Mapping[str, str | None]


def frame(command: Callable[[], list[str]], *features: str) -> tuple[Any, Any, Any]:
    """What the test file of a script has: the fixture `results`, a case for each feature, and one for leaving.

    results, test_a_check, test_leaving_aborts_in_the_engine = frame(lambda: ..., "chat", ...)
    """

    @pytest.fixture(scope="module")
    def results(stage: Stage) -> Results:
        return play_script(command(), stage)

    @_cells(*features)
    def test_a_check(feature: str, results: Results) -> None:
        assert results[feature] is None

    @_cells("abort")
    def test_leaving_aborts_in_the_engine(feature: str, results: Results, stage: Stage) -> None:
        assert results[feature] is None
        stage.until_left(1)

    return results, test_a_check, test_leaving_aborts_in_the_engine


def _cells(*features: str) -> pytest.MarkDecorator:
    """One case a feature, each marked with what it proves."""
    cases = [pytest.param(feature, marks=pytest.mark.proves(feature)) for feature in features]
    return pytest.mark.parametrize("feature", cases)


def play_script(command: list[str], stage: Stage) -> Results:
    """Feature -> what went wrong, None where nothing did. Raises AssertionError where the script itself fails."""
    wanted = {
        "url": stage.url,
        "model": MODEL,
        "unicode": UNICODE,
        "ada": ADA,
        "ada_schema": ADA_SCHEMA,
        "weather_schema": WEATHER_SCHEMA,
        "report": REPORT,
    }
    run = subprocess.run(
        command, input=json.dumps(wanted), capture_output=True, text=True, timeout=_RUN_S, env=environment()
    )
    assert run.returncode == 0, f"{command[-1]} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"feature"')]
    return {line["feature"]: line["error"] for line in lines}


def node_packages(name: str) -> Path:
    """A folder with the packages of `name`/package-lock.json. Skips where they cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node is not installed here")
    return _installed(
        name,
        [_HERE / name / "package.json", _HERE / name / "package-lock.json"],
        lambda place: [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(place)],
    )


def node_command(script: str) -> list[str]:
    """`node script`, with the packages of node/package-lock.json beside it."""
    folder = node_packages("node")
    for source in (_HERE / "node").glob("*.mjs"):
        shutil.copy(source, folder)  # Node looks for packages beside the script
    return ["node", str(folder / script)]


def venv_command(name: str) -> list[str]:
    """`python scripts/<name>_client.py` where requirements/<name>.txt is installed. Skips where it cannot be."""
    return [str(venv_python(name)), str(_HERE / "scripts" / f"{name}_client.py")]


def venv_python(name: str) -> Path:
    python = Path("Scripts" if sys.platform == "win32" else "bin") / "python"
    pins = _HERE / "requirements" / f"{name}.txt"

    def install(place: Path) -> list[str]:
        venv.create(place, with_pip=True)
        return [str(place / python), "-m", "pip", "install", "--quiet", "-r", str(place / pins.name)]

    return _installed(name, [pins], install) / python


def _installed(name: str, pins: list[Path], install: Any) -> Path:
    """The folder of one set of packages; made whole or not at all, by one process at a time."""
    key = hashlib.sha256(b"".join(path.read_bytes() for path in pins)).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "whole").exists():
            _install(name, folder, pins, install)
    return folder


def _install(name: str, folder: Path, pins: list[Path], install: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in pins:
        shutil.copy(path, folder)
    run = subprocess.run(install(folder), capture_output=True, text=True, timeout=_INSTALL_S)
    if run.returncode != 0:
        pytest.skip(f"the packages of {name} cannot be installed here: {run.stderr.strip()[-300:]}")
    (folder / "whole").touch()


def environment() -> dict[str, str]:
    """Ours, without what would lead a client to another server or have it call home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return kept | {"LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
