"""What holds for every test, the embedded model's real weights for those that need them, and the table of clients.

The whole suite runs in several processes at once, a test file in one of them (launch.py, ALL_CORES).
"""

import os
from pathlib import Path

import pytest

from engine import environment
from tests.clients import table

environment.prepare()  # before any test module imports torch


def _has_card() -> bool:
    """Asked of the driver's own files: torch must not be imported by the tests that never need it."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


if not _has_card():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's decorator runs: kernels then take CPU tensors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _has_card():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


@pytest.fixture(scope="session")
def embedded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of Fireside whose models folder has the embedded model, in its default form, whole.

    One for all processes of a run; FIRESIDE_TEST_HOME keeps it between runs. Skips where the weights are not there and
    cannot be fetched.
    """
    from app.errors import AppError
    from app.models.embedded.forms import Form, ensure_embedded

    kept = os.environ.get("FIRESIDE_TEST_HOME")
    home = Path(kept) if kept else _common_folder(tmp_path_factory) / "home"
    (home / "models").mkdir(parents=True, exist_ok=True)
    try:
        ensure_embedded(Form.LOSSLESS, home / "models", lambda stage, fraction: None)
    except AppError as error:
        if error.code != "download_failed":
            raise
        pytest.skip(f"the embedded model cannot be fetched here: {error.text}")
    return home


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A whole model of a few kilobytes, by file name."""
    from tests.checkpoints import tiny_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, "llama", "gptq")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"tokenizer.json": b"{}"}


def _common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in all processes of a run; each has a temporary folder of its own within it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Client x version x feature."""
    outcomes = table.Outcomes()
    for kind in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(kind):
            outcomes.add(table.proofs_in(report), kind)
    if outcomes.rows:
        terminalreporter.section("clients")
        terminalreporter.write_line(outcomes.text())
