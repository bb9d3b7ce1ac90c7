"""The bodies of chat and raw completions: what clients send, field by field, and what becomes of it."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.api.chat_body import ChatBody
from app.api.completion_body import CompletionBody
from app.api.protocol import _REFUSED
from app.chat.types import ChatRequest, CompletionRequest, FillIn, NamedTool, ToolCall, ToolSpec
from app.errors import AppError
from engine.types import GrammarKind, GrammarSpec, RequestClass, Standing

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> list[ChatRequest]:
    return ChatBody.model_validate({"messages": [USER]} | fields).requests("id")


def completion(**fields: Any) -> list[CompletionRequest]:
    return CompletionBody.model_validate({"prompt": "x"} | fields).requests("id")


def test_nulls_are_the_same_as_nothing() -> None:
    names = [*ChatBody.model_fields.keys() - {"messages"}, *_REFUSED]
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": -1}, None),
        ({"max_completion_tokens": -1}, None),
    ],
)
def test_either_name_of_max_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert chat(**fields)[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -2])
def test_zero_and_negative_max_tokens_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(AppError) as caught:
        chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ("", ()), ([], ()), ("a", ("a",)), (["a", "", "b"], ("a", "b")), ([f"s{n}" for n in range(12)], 12)],
)
def test_every_shape_of_stop(stop: Any, expected: Any) -> None:
    got = chat(stop=stop)[0].sampling.stop
    assert len(got) == expected if isinstance(expected, int) else got == expected


@pytest.mark.parametrize("stop", [5, {"a": 1}, ["a", 5], ["x"] * 1000, ["x" * 10_000]])
def test_a_stop_that_is_none_is_refused(stop: Any) -> None:
    with pytest.raises(AppError) as caught:
        chat(stop=stop)
    assert caught.value.param == "stop"


def test_temperature_zero_is_kept_and_top_p_zero_is_greedy() -> None:
    assert chat(temperature=0)[0].sampling.temperature == 0
    greedy = chat(top_p=0, temperature=1)[0].sampling
    assert (greedy.temperature, greedy.top_p) == (0, None)
    assert chat(top_k=-1)[0].sampling.top_k == 0


def test_priority_is_that_of_every_answer_and_0_unless_given() -> None:
    assert [request.standing for request in chat(priority=3, n=2)] == [Standing(priority=3)] * 2
    assert chat()[0].standing == Standing()


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 10**12), ("temperature", -1), ("top_p", 1.5), ("n", 0), ("n", 1000), ("top_k", -2), ("seed", 2**70)],
)
def test_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        chat(**{name: value})


def test_n_answers_have_their_own_id_and_seed() -> None:
    asked = chat(n=3, seed=7)
    assert [request.sampling.seed for request in asked] == [7, 8, 9]
    assert len({request.request_id for request in asked}) == 3
    assert [request.sampling.seed for request in chat(n=2, seed=-1)] == [None, None]


def test_roles_of_other_dialects() -> None:
    roles = ["developer", "system", "user", "assistant", "tool", "function"]
    messages = [{"role": role, "content": "x"} for role in roles]
    got = [message.role for message in chat(messages=messages)[0].messages]
    assert got == ["system", "system", "user", "assistant", "tool", "tool"]
    with pytest.raises(AppError) as caught:
        chat(messages=[{"role": "robot", "content": "x"}])
    assert caught.value.param == "messages[0].role"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("s", "s"),
        (None, ""),
        ([], ""),
        (" ", " "),
        ([{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"text": "b"}], "a\nb"),
    ],
)
def test_every_shape_of_content(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}])[0].messages[0].content == text


def test_an_image_is_refused_with_its_place_and_cause() -> None:
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}},
    ]
    with pytest.raises(AppError, match="image_url, and this model reads text only") as caught:
        chat(messages=[{"role": "user", "content": parts}])
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[1]")


def test_extras_of_a_message_do_no_harm() -> None:
    extras = {"refusal": None, "prefix": True, "tool_calls": [], "name": "Ann", "reasoning_content": "r", "audio": None}
    message = chat(messages=[USER | extras])[0].messages[0]
    assert (message.name, message.reasoning_content) == ("Ann", "r")


FUNCTION = {"type": "function", "function": {"name": "f"}}
REFUSED = [
    ("functions", [{"name": "f"}]),
    ("prompt_logprobs", 1),
    ("typical_p", 0.5),
    ("best_of", 2),
    ("mirostat_mode", 2),
    ("chat_template", "{{ x }}"),
]
NEUTRAL = [
    ("tools", []),
    ("tool_choice", "auto"),
    ("tool_choice", "none"),
    ("bad_words", [""]),
    ("skip_special_tokens", True),
    ("include_stop_str_in_output", False),
    ("return_token_ids", False),
    ("mirostat_mode", 0),
    ("response_format", {"type": "text"}),
    ("logprobs", False),
    ("top_logprobs", 0),
    ("logit_bias", {}),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0),
    ("min_tokens", 0),
    ("structured_outputs", {}),
    ("guided_choice", []),
    ("modalities", ["text"]),
    ("no_such_field", 1),
    ("parallel_tool_calls", True),
    ("user", "u"),
    ("user", 5),
    ("metadata", {"a": "b"}),
    ("prompt_cache_key", "k"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(AppError, match=f"`{name}` is not supported") as caught:
        chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_a_value_that_changes_nothing_passes(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("tool", "spec"),
    [
        (FUNCTION, ToolSpec(name="f")),
        (
            {"type": "function", "function": {"name": "f", "description": None, "parameters": None}},
            ToolSpec(name="f", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
        ),
        ({"name": "f", "parameters": {}}, ToolSpec(name="f", parameters={"type": "object", "properties": {}})),
        ({"type": "function", "name": "f", "strict": True}, ToolSpec(name="f", is_strict=True)),
        (
            {"function": {"name": "f", "description": "d", "parameters": {"properties": {"a": {}}}}},
            ToolSpec(name="f", description="d", parameters={"type": "object", "properties": {"a": {}}}),
        ),
    ],
)
def test_every_shape_of_a_tool(tool: Any, spec: ToolSpec) -> None:
    assert chat(tools=[tool])[0].tools == (spec,)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, NamedTool("f")),
        ({"type": "function", "name": "f"}, NamedTool("f")),
    ],
)
def test_every_shape_of_a_tool_choice(choice: Any, read: Any) -> None:
    assert chat(tools=[FUNCTION], tool_choice=choice)[0].tool_choice == read


def test_allowed_tools_leave_those_alone() -> None:
    others = [FUNCTION, {"type": "function", "function": {"name": "g"}}]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    asked = chat(tools=others, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})[0]
    assert (asked.tool_choice, [tool.name for tool in asked.tools]) == ("required", ["g"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [FUNCTION] * 2}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools[0].function.name"),
        (
            {"tools": [FUNCTION, {"type": "function", "function": {"name": "g", "parameters": []}}]},
            "tools[1].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": 5}, "tool_choice"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_an_odd_tool_is_refused_with_its_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(AppError) as caught:
        chat(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_earlier_calls_and_their_results() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    talk = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": {"b": 2}}},
    ]
    _, call, result, older = chat(messages=talk)[0].messages
    assert call.tool_calls == (ToolCall(id="c1", name="f", arguments='{"a": 1}'),) and call.content == ""
    assert (result.role, result.tool_call_id, result.content) == ("tool", "c1", "42")
    assert older.tool_calls == (ToolCall(id="call_0", name="g", arguments='{"b": 2}'),)
    assert chat(messages=talk)[0].continue_final_message is False


def test_thoughts_of_the_past_are_kept_apart() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    message = chat(messages=[USER, {"role": "assistant", "content": parts}])[0].messages[1]
    assert (message.content, message.reasoning_content) == ("a\nb", "hm")


def test_fields_of_vllm_are_passed_on() -> None:
    sent = {
        "allowed_token_ids": [1, 2],
        "bad_words": ["x", ""],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    for requests in (chat(**sent), completion(**sent)):
        got = requests[0].sampling
        assert (got.allowed_token_ids, got.bad_words) == ((1, 2), ("x",))
        assert got.keeps_stop and got.shows_control_tokens
    cut = [chat(truncate_prompt_tokens=5)[0], completion(truncate_prompt_tokens=-1, return_token_ids=True)[0]]
    assert [request.keep_last for request in cut] == [5, -1] and cut[1].returns_prompt_ids
    assert chat(stream=True, stream_options={"include_progress": True})[0].reports_progress


def test_a_class_of_its_own() -> None:
    standing = chat(request_class="autocomplete", user="ann")[0].standing
    assert standing == Standing(request_class=RequestClass.AUTOCOMPLETE, client_id="ann")


def test_a_suffix_makes_a_gap_to_fill() -> None:
    assert completion(prompt=["a", "b"], suffix="z")[1].prompt == FillIn("b", "z")
    assert completion(suffix="")[0].prompt == "x"
    with pytest.raises(AppError, match="suffix"):
        completion(prompt=[1, 2], suffix="z")


def test_an_echo_alone() -> None:
    assert completion(echo=True, max_tokens=0)[0].sampling.max_tokens == 0
    with pytest.raises(AppError, match="max_tokens"):
        completion(max_tokens=0)


def test_sampling_fields_are_passed_on() -> None:
    sent = {
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100, "7": 2.5},
        "min_tokens": 3,
    }
    for sampling in (chat(**sent)[0].sampling, completion(**sent)[0].sampling):
        expected = {**sent, "logit_bias": {5: -100.0, 7: 2.5}}
        assert {name: getattr(sampling, name) for name in sent} == expected


def test_logprobs_are_asked_in_the_words_of_each_endpoint() -> None:
    asked = [chat(logprobs=True), chat(logprobs=True, top_logprobs=5), chat(logprobs=False), chat()]
    assert [requests[0].sampling.logprobs for requests in asked] == [0, 5, None, None]
    asked = [completion(logprobs=0), completion(logprobs=3), completion(logprobs=False), completion()]
    assert [requests[0].sampling.logprobs for requests in asked] == [0, 3, None, None]
    assert completion(logprobs=2, echo=True)[0].sampling.prompt_logprobs == 2
    assert completion(logprobs=2)[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_an_odd_sampling_field_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises((AppError, ValidationError)) as caught:
        chat(**body)
    if isinstance(caught.value, AppError):
        assert (caught.value.status, caught.value.param) == (400, param)
    else:
        assert caught.value.errors()[0]["loc"][0] == param


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
    ],
)
def test_every_way_to_ask_for_a_form(body: dict[str, Any], kind: str, text: str) -> None:
    for requests in (chat(**body), completion(**body)):
        assert requests[0].sampling.grammar == GrammarSpec(GrammarKind(kind), text)


def test_template_switches() -> None:
    got = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")[0]
    assert (got.template_kwargs, got.reasoning_effort) == ({"enable_thinking": False}, "low")
    assert chat(reasoning={"effort": "none"})[0].reasoning_effort == "none"


@pytest.mark.parametrize(
    ("flags", "continues"),
    [
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": True}, False),
        ({"continue_final_message": False}, False),
    ],
)
def test_a_last_message_of_the_assistant_is_its_beginning(flags: dict[str, bool], continues: bool) -> None:
    messages = [USER, {"role": "assistant", "content": "The"}]
    assert chat(messages=messages, **flags)[0].continue_final_message is continues
    assert chat()[0].continue_final_message is False


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in completion(prompt=prompt)] == prompts


@pytest.mark.parametrize("prompt", ["", [], None, [[]], [""], 5, [1, "a"], [True], {"a": 1}])
def test_no_prompt_at_all_is_refused(prompt: Any) -> None:
    with pytest.raises(AppError) as caught:
        completion(prompt=prompt)
    assert caught.value.status == 400
    assert caught.value.param is not None and caught.value.param.startswith("prompt")


def test_answers_are_numbered_prompt_by_prompt() -> None:
    asked = completion(prompt=["a", "b"], n=2)
    assert [(request.request_id, request.prompt) for request in asked] == [
        ("id-0", "a"),
        ("id-1", "a"),
        ("id-2", "b"),
        ("id-3", "b"),
    ]


def test_stream_options_without_stream_are_refused() -> None:
    with pytest.raises(AppError, match="stream_options"):
        chat(stream_options={"include_usage": True})
    chat(stream_options={"include_usage": True}, stream=True)
