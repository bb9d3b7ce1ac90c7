"""The openai package for Node (node/openai.mjs)."""

from tests.clients.foreign import frame, node_command
from tests.clients.table import Client

CLIENT = Client("openai (Node)", "openai", "node/package.json")

results, test_a_check, test_leaving_aborts_in_the_engine = frame(
    lambda: node_command("openai.mjs"),
    *("chat", "stream", "usage", "unicode", "stop", "tools", "tool_stream", "parallel", "schema"),
    *("models", "reasoning", "logprobs", "completions", "embeddings", "errors"),
)
