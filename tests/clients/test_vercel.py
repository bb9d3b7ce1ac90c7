"""The Vercel AI SDK: `ai` over `@ai-sdk/openai-compatible` (node/vercel.mjs)."""

from tests.clients.foreign import frame, node_command
from tests.clients.table import Client

CLIENT = Client("Vercel AI SDK", "ai", "node/package.json")

results, test_a_check, test_leaving_aborts_in_the_engine = frame(
    lambda: node_command("vercel.mjs"),
    *("chat", "stream", "usage", "unicode", "stop", "tools", "tool_stream", "parallel", "schema"),
    *("reasoning", "completions", "embeddings", "errors"),
)
