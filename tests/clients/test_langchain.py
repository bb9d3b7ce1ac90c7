"""LangChain's langchain-openai, in an environment of its own (scripts/langchain_client.py)."""

import pytest

from tests.clients.foreign import frame, venv_command
from tests.clients.table import Client

CLIENT = Client("LangChain", "langchain-openai", "requirements/langchain.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the packages are installed first

results, test_a_check, test_leaving_aborts_in_the_engine = frame(
    lambda: venv_command("langchain"),
    *("chat", "stream", "usage", "unicode", "stop", "tools", "tool_stream", "parallel", "schema"),
    *("logprobs", "completions", "embeddings", "errors"),
)
