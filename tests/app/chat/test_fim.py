"""app.chat.fim: the prompt of a gap, as each family of models was trained on it."""

from typing import Any

import pytest

from app.chat.fim import fim_prompt
from app.chat.types import FillIn
from app.errors import AppError

GAP = FillIn("before", "after")


def prompt(gap: FillIn, *tokens: str) -> str:
    ids: Any = {token: index for index, token in enumerate(tokens)}
    return fim_prompt(gap, ids.get)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>",
        ),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>before<fim_suffix>after<fim_middle>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<PRE>before▁<SUF>after▁<MID>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]after[PREFIX]before"),
    ],
)
def test_a_family_is_known_by_its_tokens(tokens: tuple[str, ...], text: str) -> None:
    assert prompt(GAP, *tokens) == text


def test_other_files_stand_before_under_their_names_where_there_are_tokens_for_that() -> None:
    gap = FillIn("a", "b", (("x.py", "X"), ("y.py", "Y")))
    family = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    named = prompt(gap, *family, "<|repo_name|>", "<|file_sep|>")
    assert named.startswith(
        "<|repo_name|>project\n<|file_sep|>x.py\nX\n<|file_sep|>y.py\nY\n<|file_sep|>current\n<|fim"
    )
    assert prompt(gap, *family).startswith("X\n\nY\n\n<|fim_prefix|>a")


@pytest.mark.parametrize("tokens", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
def test_half_a_family_is_none(tokens: tuple[str, ...]) -> None:
    with pytest.raises(AppError, match="no tokens for filling a gap"):
        prompt(GAP, *tokens)
