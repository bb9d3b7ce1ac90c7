"""app.chat.template: the prompt's text is transformers', message for message; foreign templates stay in their box."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.chat.template import ChatTemplate
from app.chat.types import Message
from app.errors import AppError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# SmolLM2-Instruct's own
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Mistral and Gemma: strict alternation, a trimmed text, no system role
ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# In the manner of Qwen3 and Llama 3.1: namespaces, loop controls, json, dates, the training tag, switches
MODERN = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- "Today is " + strftime_now("%Y") + "\\n" }}
{{- {"flags": ["<b>", "é"]} | tojson }}
{{- {"a": 1} | tojson(indent=2) }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is defined and message.reasoning_content %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- generation %}{{ message.content }}{% endgeneration %}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '(' ~ ns.last ~ ')' }}
    {%- if loop.index > 90 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
{%- if tools is none and documents is none %}{{ '' }}{% endif %}
"""
TALK = [("user", "Hi <b>é</b> 日本 "), ("assistant", " Hello."), ("user", "And?\n")]


def messages(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in pairs)  # type: ignore[arg-type]


def transformers_text(template: str, pairs: list[tuple[str, str]], continues: bool = False, **variables: Any) -> str:
    rendered, _ = render_jinja_template(
        [[{"role": role, "content": content} for role, content in pairs]],
        chat_template=template,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **TOKENS,
        **variables,
    )
    return str(rendered[0])


@pytest.mark.parametrize("template", [SMOLLM2, ALTERNATING, MODERN])
def test_the_prompt_is_transformers(template: str) -> None:
    assert ChatTemplate(template, TOKENS).render(messages(*TALK)) == transformers_text(template, TALK)


def test_variables_reach_the_template() -> None:
    ours = ChatTemplate(MODERN, TOKENS).render(messages(*TALK), variables={"enable_thinking": False})
    assert ours == transformers_text(MODERN, TALK, enable_thinking=False)
    assert ours.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [SMOLLM2, ALTERNATING, MODERN])
@pytest.mark.parametrize("beginning", ["The capital", "The capital ", "a\n\nb"])
def test_an_answer_to_be_continued_ends_the_prompt_as_in_transformers(template: str, beginning: str) -> None:
    talk = [("user", "What is it?"), ("assistant", beginning)]
    ours = ChatTemplate(template, TOKENS).render(messages(*talk), continue_final_message=True)
    assert ours == transformers_text(template, talk, continues=True)
    assert ours.rstrip().endswith(beginning.rstrip())


def test_an_empty_beginning_opens_the_turn_and_no_more() -> None:
    talk = messages(("user", "x"), ("assistant", ""))
    assert ChatTemplate(SMOLLM2, TOKENS).render(talk, continue_final_message=True).endswith("<|im_start|>assistant\n")


def test_system_text_goes_into_the_first_user_message_where_there_is_no_system_role() -> None:
    text = ChatTemplate(ALTERNATING, TOKENS).render(messages(("system", "Be brief."), ("user", "Hi")))
    assert text == "<s>[INST] Be brief.\n\nHi [/INST]"


def test_neighbours_are_joined_where_roles_must_alternate() -> None:
    text = ChatTemplate(ALTERNATING, TOKENS).render(messages(("user", "a"), ("user", "b"), ("assistant", "c")))
    assert text == "<s>[INST] a\n\nb [/INST]c</s>"


def test_several_system_messages_are_merged_only_where_the_template_refuses_them() -> None:
    one_system = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must come first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    talk = messages(("system", "A"), ("user", "u"), ("system", "B"))
    assert ChatTemplate(one_system, TOKENS).render(talk) == "[system]A\n\nB[user]u"
    assert "system\nB<|im_end|>" in ChatTemplate(SMOLLM2, TOKENS).render(talk)


def test_a_role_that_the_template_skips_in_silence_is_not_lost() -> None:
    skipping = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert ChatTemplate(skipping, TOKENS).render(messages(("system", "rule"), ("user", "u"))) == "[rule\n\nu]"


def test_a_refusal_in_every_shape_is_told_in_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('Only on Sundays') }}", TOKENS)
    with pytest.raises(AppError, match="Only on Sundays") as caught:
        template.render(messages(("user", "x")))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% set _ = messages.append(1) %}", "{{ cycler.__init__ }}x"],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    try:
        text = ChatTemplate(attack, TOKENS).render(messages(("user", "x")))
    except AppError:
        return
    assert "class" not in text and "function" not in text


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_config.json", {"chat_template": "T{{ bos_token }}", "bos_token": {"content": "<b>"}}),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": "T{{ bos_token }}"}], "bos_token": "<b>"},
        ),
        ("chat_template.json", {"chat_template": "T{{ bos_token }}"}),
        ("chat_template.jinja", "T{{ bos_token }}"),
    ],
)
def test_every_place_of_a_template_is_read(tmp_path: Path, name: str, value: object) -> None:
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<b>"})
    write(tmp_path, name, value)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render(messages(("user", ""))) == "T<b>"


def test_a_folder_without_a_template_and_a_broken_one(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, "chat_template.jinja", "{% if %}")
    with pytest.raises(AppError, match="chat_template"):
        ChatTemplate.from_folder(tmp_path)
