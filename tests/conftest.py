"""What holds for every test, and the embedded model's real weights for those that need them."""

import os
from pathlib import Path

import pytest

from engine import environment

environment.prepare()  # before any test module imports torch


@pytest.fixture(scope="session")
def embedded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of Fireside whose models folder has the embedded model, in its default form, whole.

    FIRESIDE_TEST_HOME keeps it between runs. Skips where the weights are not there and cannot be fetched.
    """
    from app.errors import AppError
    from app.models.embedded import Form, ensure_embedded

    kept = os.environ.get("FIRESIDE_TEST_HOME")
    home = Path(kept) if kept else tmp_path_factory.mktemp("home")
    (home / "models").mkdir(parents=True, exist_ok=True)
    try:
        ensure_embedded(Form.LOSSLESS, home / "models", lambda stage, fraction: None)
    except AppError as error:
        if error.code != "download_failed":
            raise
        pytest.skip(f"the embedded model cannot be fetched here: {error.text}")
    return home
