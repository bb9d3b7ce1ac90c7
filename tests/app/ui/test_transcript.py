"""What the model is sent of a conversation, and how text is kept from becoming markup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.types import Message
from app.ui.transcript import Turn, bubbles, dump, literal, load, messages

_texts = st.text(st.characters(codec="utf-8"))


@given(st.lists(st.builds(Turn, user=_texts, answer=_texts, reasoning=_texts, note=_texts)))
def test_a_conversation_comes_back_exactly_as_it_left(turns: list[Turn]) -> None:
    assert load(dump(turns)) == tuple(turns)


def test_an_empty_field_is_an_empty_conversation() -> None:
    assert load("") == ()


@pytest.mark.parametrize(
    "text", ['[{"user": "a", "is_admin": true}]', '[{"user": "a", "note_kind": "x onload=y"}]', "[1]", "{"]
)
def test_a_field_that_is_no_conversation_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        load(text)


def test_the_model_is_sent_system_prompt_answered_turns_and_the_new_message() -> None:
    turns = (Turn(user="a", answer="A", reasoning="hm"), Turn(user="b", note="It broke."))
    assert messages(turns, "c", "Be brief.") == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="a"),
        Message(role="assistant", content="A", reasoning_content="hm"),
        Message(role="user", content="c"),
    )


def test_an_empty_system_prompt_sends_none() -> None:
    assert [message.role for message in messages((), "a", "  ")] == ["user"]


@pytest.mark.parametrize(
    "text",
    [
        "`<b>`",
        "```html\n<b>\n```",
        "~~~\n<b>",
        "``a ` <b>``",
        "$$a<b$$",
        "\\(a<b\\)",
        "a < b, 1<2",
        "costs $5 and $10",
        "from $5-$10",
    ],
)
def test_code_formulas_and_plain_signs_are_left_alone(text: str) -> None:
    assert literal(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b>x</b>", "&lt;b>x&lt;/b>"),
        ("`<i>` <b>", "`<i>` &lt;b>"),
        ("```\n<i>\n```\n<b>", "```\n<i>\n```\n&lt;b>"),
        ("` <b>", "` &lt;b>"),
        ("<!-- x -->", "&lt;!-- x -->"),
        ("for $n$ and $a<b$.", "for \\(n\\) and \\(a<b\\)."),
    ],
)
def test_html_outside_code_is_shown_and_single_dollars_make_a_formula(text: str, shown: str) -> None:
    assert literal(text) == shown


def test_text_reaches_the_chat_with_its_spaces() -> None:
    user, answer = bubbles(Turn(user="  a\n    b\n", answer="    code\n"))
    assert user["content"][0]["text"] == "  a\n    b\n"
    assert answer["content"][0]["text"] == "    code\n"


def test_reasoning_is_a_fold_that_is_open_ended_until_the_answer_begins() -> None:
    thinking = bubbles(Turn(user="a", reasoning="hm"))[1]
    done = bubbles(Turn(user="a", reasoning="hm", answer="A", thinking_s=1.26))[1]
    assert thinking["metadata"]["status"] == "pending"
    assert done["metadata"] == {"title": "Thinking", "status": "done", "duration": 1.3}


def test_a_note_cannot_bring_markup() -> None:
    note = bubbles(Turn(user="a", note="<img src=x>\n\n<b>", note_kind="error"))[-1]["content"][0]["text"]
    assert note == '<p class="fs-note fs-error">&lt;img src=x&gt; &lt;b&gt;</p>'
