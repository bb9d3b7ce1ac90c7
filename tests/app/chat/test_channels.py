"""app.chat.channels: thinking and answer are told apart, however the text is cut."""

import pytest

from app.chat.channels import Channels, Piece, prompt_opens_thinking, text_is_thinking

CASES = [
    ("plain", False, Piece("", "plain")),
    (" leading blank stays", False, Piece("", " leading blank stays")),
    ("<think>\nhm, hm\n</think>\n\nyes", False, Piece("hm, hm", "yes")),
    ("\n<think>a</think>b", False, Piece("a", "b")),
    ("<think>\n\n</think>\n\nyes", False, Piece("", "yes")),
    ("<think>a < b </thin x</think>c", False, Piece("a < b </thin x", "c")),
    ("so\nit is\n</think>\n\nyes", True, Piece("so\nit is", "yes")),
    ("never closed", True, Piece("never closed", "")),
    ("<think>never closed </thi", False, Piece("never closed </thi", "")),
    ("<thi", False, Piece("", "<thi")),
    ("  ", False, Piece("", "  ")),
    ("use <think> as a tag</think>", False, Piece("", "use <think> as a tag</think>")),
    ("<think>a</think>b</think><think>c", False, Piece("a", "b</think><think>c")),
    ("", False, Piece()),
]


def run(pieces: list[str], opened: bool) -> Piece:
    channels = Channels(opened=opened)
    total = Piece()
    for piece in pieces:
        total += channels.feed(piece)
    return total + channels.finish()


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_tag_split_at_every_place_gives_the_same_channels(text: str, opened: bool, expected: Piece) -> None:
    assert run([text], opened) == expected
    assert run(list(text), opened) == expected
    for cut in range(len(text)):
        assert run([text[:cut], text[cut:]], opened) == expected


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<th", False, Piece()),
        ("<think>hm </thi", False, Piece("hm ", "")),
        ("hm</think", True, Piece("hm", "")),
        ("1 <", False, Piece("", "1 <")),
    ],
)
def test_of_half_a_tag_in_which_an_answer_is_cut_nothing_is_seen(text: str, opened: bool, expected: Piece) -> None:
    channels = Channels(opened=opened)
    assert channels.feed(text) + channels.finish(is_cut=True) == expected


def test_text_comes_as_soon_as_it_is_certain() -> None:
    channels = Channels()
    assert channels.feed("<think>one <") == Piece("one", "")
    assert channels.feed(" two") == Piece(" < two", "")
    assert channels.feed("</think>") == Piece()
    assert channels.feed(" yes") == Piece("", "yes")


def test_a_template_that_opens_the_tag_itself_is_seen() -> None:
    assert prompt_opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not prompt_opens_thinking("user: what is <think>?\nassistant:")


def test_an_answer_begun_in_thought_goes_on_in_thought() -> None:
    assert text_is_thinking("<think>\nfirst")
    assert not text_is_thinking("<think>first</think> so")
    assert not text_is_thinking("The tag <think>")
