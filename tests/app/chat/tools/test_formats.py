"""app.chat.tools: calls and content are told apart in every format, however the text is cut; nothing is lost."""

import itertools
import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.tools.choose import FORMATS
from app.chat.types import ToolSpec

WEATHER = ToolSpec(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "near": {"type": ["string", "null"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = ToolSpec(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, NOW)

Heard = tuple[str, list[tuple[str, str]]]  # content, (name, arguments) of each call


def hear(format: str, pieces: Sequence[str]) -> Heard:
    """What a client puts together from the deltas; checks their shape on the way."""
    numbers = itertools.count()
    parser = FORMATS[format].parser(TOOLS, new_id=lambda: f"id{next(numbers)}")
    content, calls, ids = "", [], []
    for found in [*map(parser.feed, pieces), parser.finish()]:
        content += found.content
        for delta in found.calls:
            if delta.id is not None:
                assert delta.index == len(calls) and delta.name and not delta.arguments
                calls.append([delta.name, ""])
                ids.append(delta.id)
            else:
                assert delta.name is None and delta.index == len(calls) - 1 and delta.arguments
                calls[-1][1] += delta.arguments
    assert len({*ids}) == len(ids)
    return content, [(name, arguments) for name, arguments in calls]


ONE = [("get_weather", '{"city": "Paris"}')]
BOTH = [*ONE, ("now", "{}")]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
MISTRAL = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
NAMED = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}'

CASES: list[tuple[str, str, Heard]] = [
    ("hermes", "plain  \n", ("plain  \n", [])),
    ("hermes", HERMES, ("", ONE)),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES_NOW}\n", ("Let me see.", BOTH)),
    ("hermes", f"{HERMES}\n\nDone. ", ("\n\nDone.", ONE)),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', ("", ONE)),
    ("hermes", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', ("", [("now", "{}")])),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', ("", [("now", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}', ("", [("now", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}\\"</tool_call>"}}',
        ("", [("f", '{"a": "}\\"</tool_call>"}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', ("", [("f", '{"a": 1}')])),
    # broken off or no call at all: the text is content, or what there is of the arguments
    ("hermes", "a <tool_call> is a tag", ("a <tool_call> is a tag", [])),
    ("hermes", "a\n<tool_c", ("a\n<tool_c", [])),
    ("hermes", '<tool_call>\n{"name": "now", "argum', ('<tool_call>\n{"name": "now", "argum', [])),
    (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": "sunn',
        ('<tool_call>\n{"name": "now", "arguments": "sunn', []),
    ),
    (
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Par', ("", [("f", '{"city": "Par')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": oops}}', ("oops}}", [("f", '{"city": ')])),
    ("qwen3_xml", f"So:\n{XML}\n{XML_NOW}", ("So:", BOTH)),
    ("qwen3_xml", XML.removeprefix("<tool_call>\n"), ("", ONE)),
    (
        "qwen3_xml",
        '<function=get_weather>\n<parameter=city>\na "b"\n\n</parameter>\n<parameter=days>\n3\n</function>',
        ("", [("get_weather", '{"city": "a \\"b\\"\\n", "days": 3}')]),
    ),
    ("qwen3_xml", "<function=now>\n<parameter=x>\nTrue\n</function>", ("", [("now", '{"x": true}')])),
    (
        "qwen3_xml",
        "<function=now>\n<parameter=x>\nyes, do\n</parameter>\n</function>",
        ("", [("now", '{"x": "yes, do"}')]),
    ),
    ("qwen3_xml", XML[:55], ("", [("get_weather", '{"city": "Par')])),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_c', ("", [("now", "{}")])),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</table', ("\n</table", [("now", "{}")])),
    ("qwen3_xml", "<function=now>\n<parameter=x>\n3\n</parameter>\n</fun", ("", [("now", '{"x": 3}')])),
    ("qwen3_xml", "<function=now>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool", ("", [("now", '{"x": 3}')])),
    ("qwen3_xml", "<tool_call>\n<function=now\nx", ("<tool_call>\n<function=now\nx", [])),
    ("mistral", MISTRAL, ("", BOTH)),
    ("mistral", f"Well, {MISTRAL} ", ("Well,", BOTH)),
    ("mistral", NAMED, ("", BOTH)),
    ("mistral_v11", NAMED.replace("[ARGS]", "[CALL_ID]abc123xyz[ARGS]"), ("", BOTH)),
    ("mistral", "[TOOL_CALLS] none, thank you", ("[TOOL_CALLS] none, thank you", [])),
    ("llama3_json", LLAMA, ("", BOTH)),
    ("llama3_json", f"<|python_tag|>{LLAMA.replace('; ', chr(10))}\n", ("", BOTH)),
    (
        "llama3_json",
        '{"name": "Ada", "parameters": {"born": 1815}}',
        ('{"name": "Ada", "parameters": {"born": 1815}}', []),
    ),
    ("llama3_json", f"I would write {LLAMA}", (f"I would write {LLAMA}", [])),
    ("pythonic", '[get_weather(city="Paris"), now()]', ("", BOTH)),
    ("pythonic", "```tool_code\nget_weather(city='Paris')\n```", ("", ONE)),
    (
        "pythonic",
        '[get_weather(city="a,b(\\"", days=3, near=None)]',
        ("", [("get_weather", '{"city": "a,b(\\"", "days": 3, "near": null}')]),
    ),
    ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", [])),
    ("pythonic", '[get_weather(city="Par', ('city="Par', [("get_weather", "")])),
]


@pytest.mark.parametrize(("format", "text", "heard"), CASES)
def test_text_cut_at_every_place_gives_the_same_calls(format: str, text: str, heard: Heard) -> None:
    assert hear(format, [text]) == heard
    assert hear(format, list(text)) == heard
    for cut in range(len(text)):
        assert hear(format, [text[:cut], text[cut:]]) == heard


_SHARDS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    '{"name": "now", ',
    '"arguments": {',
    '"a": "x',
    '"',
    "}}",
    "]",
    "[",
    ";",
    ",",
    "<function=now>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "now",
    "now(",
    "a=1",
    ")",
    "<|python_tag|>",
    '{"name": "get_weather", "parameters": {"city": "é😀"}}',
    "text",
    "```tool_code",
    "\\",
]


@given(st.sampled_from([*FORMATS]), st.lists(st.sampled_from(_SHARDS), max_size=12), st.randoms())
def test_any_text_cut_anywhere_gives_the_same_calls(format: str, shards: list[str], random: Random) -> None:
    text = "".join(shards)
    cuts = sorted(random.sample(range(len(text) + 1), min(len(text), random.randint(0, 6))))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert hear(format, pieces) == hear(format, [text])


@given(st.sampled_from([*FORMATS]), st.lists(st.sampled_from(_SHARDS), max_size=12))
def test_no_word_is_lost_in_a_text_that_is_no_call(format: str, shards: list[str]) -> None:
    text = "".join(shards)
    content, calls = hear(format, [text])
    assert calls or content == text


def test_arguments_are_given_out_as_they_come() -> None:
    parser = FORMATS["hermes"].parser(TOOLS)
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "P')
    assert [delta.arguments for delta in parser.feed("ar").calls] == ["ar"]
    assert parser.num_calls == 1 and not parser.has_ended_call
    parser.feed('is"}}</tool_call>')
    assert parser.has_ended_call


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_reads_what_it_writes(format: str) -> None:
    arguments = {"city": 'Pa"r\nis', "days": 3}
    content, calls = hear(format, [FORMATS[format].written([("get_weather", arguments), ("now", {})])])
    assert content == "" and [name for name, _ in calls] == ["get_weather", "now"]
    assert [json.loads(text) for _, text in calls] == [arguments, {}]
