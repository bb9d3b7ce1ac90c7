"""The stage that every client plays on; what each test proves goes into its reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import table
from tests.clients.stage import Stage, model_folder
from tests.e2e.test_real_server import Server

COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("clients") / "byte-model")


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    with Stage(folder) as running:
        yield running


@pytest.fixture(scope="session")
def real(embedded_home: Path) -> Iterator[Server]:
    """The whole thing, with the embedded model."""
    running = Server(embedded_home)
    yield running
    running.process.terminate()
    running.process.wait(timeout=30)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before the slow ones are taken out: the table in the docs has them too."""
    config.stash[COLLECTED] = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in config.stash[COLLECTED]:
        table.lay_beside(item)
