"""LangChain's langchain-openai, in an environment of its own (scripts/langchain_client.py)."""

import pytest

from tests.clients.foreign import Results, cells, play_script, venv_command
from tests.clients.stage import Stage
from tests.clients.table import Client

CLIENT = Client("LangChain", "langchain-openai", "requirements/langchain.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first


@pytest.fixture(scope="module")
def results(stage: Stage) -> Results:
    return play_script(venv_command("langchain"), stage)


@cells(
    *(
        "chat",
        "stream",
        "usage",
        "unicode",
        "stop",
        "tools",
        "tool_stream",
        "parallel",
        "schema",
        "logprobs",
        "completions",
        "embeddings",
        "errors",
    ),
)
def test_a_check(feature: str, results: Results) -> None:
    assert results[feature] is None


@cells("abort")
def test_leaving_a_stream_aborts_in_the_engine(feature: str, results: Results, stage: Stage) -> None:
    assert results[feature] is None
    stage.until_left(1)
