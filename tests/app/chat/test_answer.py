"""app.chat.answer: the one state machine. However an answer is cut into tokens, what is heard is the same."""

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.answer import AnswerText
from app.chat.channels import Channels, Tags
from app.chat.detokenizer import Detokenizer
from app.chat.tools.choose import FORMATS
from app.chat.types import ToolSpec

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
SHARDS = ["<think>", "</think>", "hm 日本", "\n", " ", CALL, "<tool_call>", "👩‍👩‍👧 é́", "STOP", "ST", "so"]


class Pieces:
    """A tokenizer whose token number i is piece i, maybe half a character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def hear(pieces: Sequence[bytes], stops: Sequence[str] = (), **options: Any) -> tuple[Any, ...]:
    """(content, reasoning, calls, stop string, finish reason) of a whole answer, read token by token."""
    tokenizer: Any = Pieces(pieces)
    single_call = options.pop("single_call", False)
    calls = FORMATS["hermes"].parser([ToolSpec(name="now")], new_id=lambda: "id")
    text = Detokenizer(tokenizer, stops, **options)
    answer = AnswerText(text, Channels(), calls, single_call=single_call)
    spoken = []
    for token_id in range(len(pieces)):
        spoken.append(answer.feed(token_id))
        if answer.is_over:
            break
    spoken.append(answer.finish())
    heard: dict[int, str] = {}
    for delta in itertools.chain.from_iterable(said.calls for said in spoken):
        heard[delta.index] = heard.get(delta.index, "") + delta.arguments
    return (
        "".join(said.content for said in spoken),
        "".join(said.reasoning for said in spoken),
        heard,
        answer.stopped_by,
        answer.finish_reason(is_cut=False),
    )


@given(st.lists(st.sampled_from(SHARDS), max_size=8), st.booleans(), st.randoms())
def test_tokens_cut_anywhere_give_the_same_answer(shards: list[str], stops: bool, random: Random) -> None:
    raw = "".join(shards).encode()
    cuts = sorted(random.sample(range(len(raw) + 1), min(len(raw), random.randint(0, 8))))
    pieces = [raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(raw)])]
    wanted = ["STOP"] if stops else []
    assert hear(pieces, wanted) == hear([raw], wanted) == hear([bytes([byte]) for byte in raw], wanted)


def test_thinking_comes_before_calls_and_calls_inside_it_are_thoughts() -> None:
    text = f"<think>I could {CALL}</think>\n\nYes.\n{CALL}"
    assert hear([text.encode()]) == ("Yes.", f"I could {CALL}", {0: '{"zone": "UTC"}'}, None, "tool_calls")


def test_a_stop_string_inside_a_call_loses_nothing_before_it() -> None:
    content, _, calls, stopped_by, _ = hear([CALL.encode()], ["UTC"])
    assert (content, calls, stopped_by) == ("", {0: '{"zone": "'}, "UTC")
    content, _, calls, _, reason = hear([CALL.encode()], ["name"])
    assert (content, calls, reason) == ('<tool_call>\n{"', {}, "stop")


def test_a_stop_string_may_be_kept() -> None:
    assert hear([b"one S", b"TOP two"], ["STOP"], keeps_stop=True)[0] == "one STOP"


def test_a_single_call_ends_the_answer() -> None:
    content, _, calls, _, reason = hear([CALL.encode(), b"\n", CALL.encode(), b"more"], single_call=True)
    assert (content, calls, reason) == ("", {0: '{"zone": "UTC"}'}, "tool_calls")


def test_of_a_list_of_calls_in_one_token_a_single_one_is_kept() -> None:
    text = '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]</tool_call>'
    assert hear([text.encode()], single_call=True)[2] == {0: "{}"}
    assert hear([text.encode()])[2] == {0: "{}", 1: "{}"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_cut", [True, False])
def test_where_only_calls_may_come_what_is_left_of_a_cut_one_is_no_text(format: str, is_cut: bool) -> None:
    written = FORMATS[format].written([("now", {"zone": "UTC"}), ("now", {})])
    for size in range(len(written) + 1):
        pieces = [char.encode() for char in written[:size]]
        text = Detokenizer(Pieces(pieces), ())  # type: ignore[arg-type]
        answer = AnswerText(text, Channels(), FORMATS[format].parser([ToolSpec(name="now")]), must_call=True)
        spoken = [*map(answer.feed, range(size)), answer.finish(is_cut=is_cut)]
        assert "".join(said.content for said in spoken) == "", written[:size]
        begun = [call for said in spoken for call in said.calls if call.id is not None]
        assert len(begun) == 2 if size == len(written) else len(begun) <= 2
        assert answer.finish_reason(is_cut=is_cut) == ("length" if is_cut else "tool_calls" if begun else "stop")


@pytest.mark.parametrize("tags", [Tags("[THINK]", "[/THINK]"), Tags("<|begin|>", "<|end|>")])
def test_other_tags_around_thinking(tags: Tags) -> None:
    channels = Channels(tags)
    pieces = [*map(channels.feed, f"{tags.opening}a{tags.closing}b"), channels.finish()]
    assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == ("a", "b")
