"""A manager that has one of three models in memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.models.manager import ModelManager
from tests.app.models.scripted import Engines, ThreeModels, managed


@pytest.fixture
async def manager(tmp_path: Path, shelf: ThreeModels, engines: Engines) -> AsyncIterator[ModelManager]:
    async with managed(tmp_path, shelf, engines) as made:
        made.load("one")
        await made.acquire("one")
        yield made
