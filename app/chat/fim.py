"""Filling a gap: the texts around it -> the prompt that a model was trained on, by its vocabulary's own tokens."""

from collections.abc import Callable
from typing import NamedTuple

from app.chat.types import FillIn
from app.errors import AppError


class _Tokens(NamedTuple):
    """How a family marks the two texts and the gap. `suffix_first`: the text after the gap stands first."""

    before: str
    after: str
    gap: str
    suffix_first: bool = False


_FAMILIES = (
    _Tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Tokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Tokens("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    _Tokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Tokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
_REPOSITORY_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))


def fim_prompt(fill_in: FillIn, token_id: Callable[[str], int | None]) -> str:
    """The prompt as text, its marks as the tokens are written.

    token_id  of a token of its own that is written so; None where the vocabulary has none
    Raises AppError (400) where the model has no such tokens
    """
    family = next((f for f in _FAMILIES if all(token_id(mark) is not None for mark in f[:3] if mark)), None)
    if family is None:
        raise AppError(
            400,
            "no_fim_tokens",
            "This model's vocabulary has no tokens for filling a gap (fill-in-the-middle).",
            hint="Use a code model that has them, such as Qwen2.5-Coder, or send a prompt without a suffix.",
            param="suffix",
        )
    return _others(fill_in, token_id) + _gap(fill_in, family)


def _gap(fill_in: FillIn, family: _Tokens) -> str:
    before, after = family.before + fill_in.before, family.after + fill_in.after
    return after + before + family.gap if family.suffix_first else before + after + family.gap


def _others(fill_in: FillIn, token_id: Callable[[str], int | None]) -> str:
    """Other files, under their names, where the vocabulary can tell files apart; else as plain text before."""
    marks = next((pair for pair in _REPOSITORY_TOKENS if all(token_id(mark) is not None for mark in pair)), None)
    if marks is None or not fill_in.others:
        return "".join(f"{text}\n\n" for _, text in fill_in.others)
    files = "".join(f"{marks[1]}{name}\n{text}\n" for name, text in fill_in.others)
    return f"{marks[0]}project\n{files}{marks[1]}current\n"
