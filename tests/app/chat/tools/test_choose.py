"""Which format a model writes, and how a conversation with tools becomes a prompt: shown by the template, or told."""

import json
from typing import Any

import pytest

from app.chat.template import ChatTemplate
from app.chat.tools.choose import FORMATS
from app.chat.tools.tagged_json import TaggedJson
from app.chat.types import TOOL_FORMATS, Message, ToolCall, ToolSpec
from tests.clients.scenes import TEMPLATE
from tests.fakes import CHATML

WEATHER = ToolSpec(
    name="get_weather",
    description="Weather of a city",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
USER = Message(role="user", content="Is it warm in Paris?")
CALLED = Message(
    role="assistant",
    content="",
    tool_calls=(ToolCall(id="call_1", name="get_weather", arguments='{"city": "Paris"}'),),
)
RESULT = Message(role="tool", content="18 degrees", tool_call_id="call_1")
TALK = (USER, CALLED, RESULT)


def render(source: str, *messages: Message, tools: tuple[ToolSpec, ...] = (WEATHER,), **options: Any) -> str:
    return ChatTemplate(source, {}).render(messages, tools=tools, **options)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TEMPLATE, "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_xml"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]name[ARGS]", "mistral_v11"),
        ('Environment: ipython {"name": function name, "parameters": {}} <|python_tag|>', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        (CHATML, "hermes"),
    ],
)
def test_a_format_is_known_by_its_templates_words(source: str, name: str) -> None:
    assert ChatTemplate(source, {}).tool_format is FORMATS[name]


def test_the_catalogue_may_name_every_format() -> None:
    assert (*FORMATS,) == TOOL_FORMATS


def test_a_format_of_no_name_is_seen_in_what_the_template_writes() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|call|>"
        "[{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}]"
        "<|/call|>{% endfor %}<end>{% endfor %}"
    )
    format = ChatTemplate(source, {}).tool_format
    assert isinstance(format, TaggedJson) and format.starts == ("<|call|>",)
    written = format.written([("f", {"a": 1})])
    assert written == '<|call|>[{"name": "f", "parameters": {"a": 1}}]<|/call|>'
    found = format.parser([]).feed(f"{written} ")
    assert [(delta.name, delta.arguments) for delta in found.calls] == [("f", ""), (None, '{"a": 1}')]


def test_a_template_that_knows_tools_shows_them_with_arguments_as_an_object() -> None:
    text = render(TEMPLATE, *TALK)
    assert text.count("get_weather") == 2 and '"arguments": {"city": "Paris"}' in text and "18 degrees" in text


def test_a_template_without_tools_has_them_told_in_words() -> None:
    text = render(CHATML, *TALK)
    assert text.startswith("<|im_start|>system\nYou may call these functions")
    assert json.dumps(WEATHER.parameters) in text and "Weather of a city" in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}' in text
    assert "<|im_start|>user\n<tool_response>\n18 degrees\n</tool_response>" in text


def test_told_tools_stand_after_the_callers_own_system_message_and_in_the_models_format() -> None:
    text = render(CHATML, Message(role="system", content="Be brief."), USER, tool_format=FORMATS["pythonic"])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call") and "[get_weather(city='...')]" in text


def test_calls_of_the_past_are_told_also_where_no_tools_are_left() -> None:
    text = render(CHATML, *TALK, tools=())
    assert "get_weather" in text and "You may call" not in text


def test_ids_are_made_short_for_templates_that_take_no_others() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "{{ c.function.arguments | tojson }}{{ c.function.name }}{{ c.id }}{% endfor %}"
        "{{ m.content }}{{ m.tool_call_id }}{% endfor %}"
    )
    text = render(source, *TALK)
    short = text.partition("get_weather")[2].partition("get_weather")[2][:9]
    assert text.count(short) == 2 and "You may call" not in text


def test_a_template_that_looks_for_calls_only_where_there_is_no_content() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert render(source, *TALK).count("get_weather") == 2


def test_arguments_that_are_no_json_are_shown_as_they_were_written() -> None:
    broken = Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments='{"a": '),))
    assert '"arguments": "{\\"a\\": "' in render(TEMPLATE, USER, broken, RESULT)


def test_broken_arguments_become_an_object_for_templates_that_loop_over_them() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    broken = Message(role="assistant", content="", tool_calls=(ToolCall(id="call_1", name="f", arguments='{"a": '),))
    text = render(source, USER, broken, RESULT)
    assert '<arguments>{"a": ' in text and "You may call" not in text


def test_several_calls_are_told_one_after_the_other_with_their_results_where_a_template_takes_one() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}<{{ a.city or a | tojson }}>{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    calls = tuple(
        ToolCall(id=city, name="get_weather", arguments=json.dumps({"city": city})) for city in ("Paris", "Rome")
    )
    both = Message(role="assistant", content="", tool_calls=calls)
    results = [Message(role="tool", content=f"{city} is warm", tool_call_id=city) for city in ("Rome", "Paris")]
    text = render(source, USER, both, *results)
    assert text.endswith("<Paris>Paris is warm<Rome>Rome is warm")
