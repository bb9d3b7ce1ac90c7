"""The Vercel AI SDK: `ai` over `@ai-sdk/openai-compatible` (node/vercel.mjs)."""

import pytest

from tests.clients.foreign import Results, cells, node_command, play_script
from tests.clients.stage import Stage
from tests.clients.table import Client

CLIENT = Client("Vercel AI SDK", "ai", "node/package.json")


@pytest.fixture(scope="module")
def results(stage: Stage) -> Results:
    return play_script(node_command("vercel.mjs"), stage)


@cells(
    *("chat", "stream", "usage", "unicode", "stop", "tools", "tool_stream", "parallel", "schema", "reasoning"),
    *("completions", "embeddings", "errors"),
)
def test_a_check(feature: str, results: Results) -> None:
    assert results[feature] is None


@cells("abort")
def test_leaving_a_stream_aborts_in_the_engine(feature: str, results: Results, stage: Stage) -> None:
    assert results[feature] is None
    stage.until_left(1)
