"""The table of docs/clients.md says what the tests prove, of the versions that are installed."""

import importlib.metadata
from pathlib import Path

import pytest

from tests.clients import table
from tests.clients.conftest import COLLECTED


def test_the_table_in_the_docs_is_up_to_date(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[COLLECTED]
    files = {*Path(__file__).parent.glob("test_*.py")}
    if {item.path for item in items} != files:
        pytest.skip("only a part of the clients was collected")
    assert table.in_docs() == table.markdown(proof for item in items for proof in table.proofs_of(item))


def test_the_versions_of_the_table_are_those_that_are_installed(request: pytest.FixtureRequest) -> None:
    proofs = [proof for item in request.config.stash[COLLECTED] for proof in table.proofs_of(item)]
    for client in {proof.client for proof in proofs if proof.client.pins == "constraints.txt"}:
        assert client.version == importlib.metadata.version(client.package)
