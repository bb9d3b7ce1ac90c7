"""The scripted shelf and engines as the tests of the manager get them: three models, and engines that start at once."""

from pathlib import Path

import pytest

from tests.app.models.scripted import Engines, ThreeModels


@pytest.fixture
def shelf(tmp_path: Path) -> ThreeModels:
    return ThreeModels(tmp_path)


@pytest.fixture
def engines() -> Engines:
    made = Engines()
    made.gate.set()
    return made
