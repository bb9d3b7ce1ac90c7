"""app.chat.detokenizer: however an answer is cut into tokens, its text is the same, and nothing is taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.detokenizer import Detokenizer, StopStrings
from app.chat.tokenizer import Tokenizer
from tests.fakes import BOS, byte_model_folder, ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_model_folder(tmp_path_factory.mktemp("model"), words=["lo w", "STO"]))


def test_half_characters_are_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token_id) for token_id in ids("é日😀")]
    assert pieces == ["", "é", "", "", "日", "", "", "", "😀"]


def test_a_broken_character_becomes_the_same_replacement_as_in_a_whole_decode(tokenizer: Tokenizer) -> None:
    token_ids = (*ids("a"), 0xF0, 0x9F, *ids("b"), 0xE6, 0x97)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()
    assert text == tokenizer.decode(token_ids) == "a�b�"


def test_a_real_replacement_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.feed, ids("�"))) == "�"


def test_control_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.feed, (*ids("a"), BOS, *ids("b")))) == "ab"


def test_a_stop_string_matches_across_token_borders(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    token_ids = (*tokenizer.encode("hello w STO", add_special_tokens=False), *ids("Pnever"))
    text = "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()
    assert (text, detokenizer.stopped_by) == ("hello w ", "STOP")


def test_only_a_live_partial_match_is_held_back() -> None:
    stops = StopStrings(["\n\nUser:"])
    assert [stops.feed(piece) for piece in ("a\n", "b", "\n\n", "Us", "e", "x")] == ["a", "\nb", "", "", "", "\n\nUsex"]
    assert stops.finish() == ""


def test_a_partial_match_at_the_end_is_given_out() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("the EN") + stops.finish() == "the EN"


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    stops = StopStrings(["abcX", "bc", ""])
    assert stops.feed("1abcX") == "1a"
    assert stops.found == "bc"


@given(
    text=st.text(alphabet="ab ", max_size=30),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_whole_piecewise_and_one_character_at_a_time_give_the_same(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        buffer = StopStrings(stops)
        out = "".join(map(buffer.feed, pieces)) + buffer.finish()
        return out, buffer.found

    pieces, rest = [], text
    for size in cuts:
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text if not ends else text[: min(ends)]
    whole, found = run([text])
    assert run(list(text)) == run([*pieces, rest]) == (whole, found)
    assert whole + (found or "") == expected
