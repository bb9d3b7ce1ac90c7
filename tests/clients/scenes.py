"""What the scripted model says: one scene a feature, asked for by name in the last user message ("scene:tools").

A token is a byte, so every character of several bytes and every tag and stop string is cut in all places.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EngineDied, EngineError, TooManyRequests
from engine.types import FinishReason
from tests.fakes import Script, ids

UNICODE = "日本語、한국어, Grüße 👩‍👩‍👧‍👦 🇫🇷 é́"
ADA: dict[str, Any] = {"name": "Ada", "age": 36}
ADA_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "name of a city"}},
    "required": ["city"],
}
REPORT = "18 degrees and sunny"  # what the tool gives back


def call(city: str) -> str:
    """A tool call as Hermes and Qwen write it."""
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


@dataclass(frozen=True)
class Scene:
    """
    says       token by token
    pause_s    before each token but the first
    breaks_at  the engine is lost before this token
    error      how
    """

    says: str
    finish: FinishReason = FinishReason.STOP
    pause_s: float = 0.0
    breaks_at: int | None = None
    error: EngineError = field(default_factory=lambda: EngineDied("The engine ended."))

    def script(self) -> Script:
        error = None if self.breaks_at is None else self.error
        return Script(
            token_ids=ids(self.says),
            finish=self.finish,
            pause_s=self.pause_s,
            error=error,
            error_at=self.breaks_at or 0,
            num_cached=3,
        )


SCENES = {
    "plain": Scene("Paris."),
    "unicode": Scene(UNICODE),
    "stop": Scene("one</s>two"),
    "reasoning": Scene("<think>Two and two.</think>Four."),
    "json": Scene(json.dumps(ADA)),
    "tool": Scene(call("Paris")),
    "tools": Scene(call("Paris") + "\n" + call("Rome")),
    "told": Scene(f"It is {REPORT}."),
    "edit": Scene("note.txt\n```\nwritten by a model\n```\n"),
    "endless": Scene("a" * 10_000, pause_s=0.01),
    "breaks": Scene("abcdef", breaks_at=3, pause_s=0.1),
    "full": Scene("a", breaks_at=0, error=TooManyRequests("The line is full.")),
}


def play(prompt: tuple[int, ...]) -> Script:
    """The script of the scene that the prompt asks for last; after a tool's result, what is told of it."""
    text = text_of(prompt)
    asked = list(re.finditer(r"scene:(\w+)", text))
    name = asked[-1].group(1) if asked else "plain"
    if name in ("tool", "tools") and REPORT in text[asked[-1].end() :]:
        name = "told"
    return SCENES[name].script()


def text_of(prompt: tuple[int, ...]) -> str:
    return bytes(token for token in prompt if token < 256).decode("utf-8", "replace")


# The template of a model that calls tools, in the form of Qwen's: it lists them, and shows earlier calls and results.
TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
You may call functions, each described within <tools></tools>:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Answer a call as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
