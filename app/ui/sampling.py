"""The sampling fields of the Advanced fold: what they are called, what they may hold, and how they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.chat.types import SamplingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """
    name     the field of SamplingOptions
    allowed  the rule in words, for the error
    accepts  the rule
    """

    name: str
    label: str
    read: Callable[[str], float]
    allowed: str
    accepts: Callable[[float], bool]


FIELDS = (
    Field(
        name="temperature",
        label="Temperature",
        read=float,
        allowed="a number from 0 to 2 (0 always takes the likeliest word)",
        accepts=lambda value: 0 <= value <= 2,
    ),
    Field(
        name="top_p",
        label="Top p",
        read=float,
        allowed="a number above 0 and at most 1",
        accepts=lambda value: 0 < value <= 1,
    ),
    Field(
        name="max_tokens",
        label="Max tokens",
        read=int,
        allowed="a whole number of at least 1",
        accepts=lambda value: value >= 1,
    ),
    Field(
        name="seed", label="Seed", read=int, allowed="a whole number of at least 0", accepts=lambda value: value >= 0
    ),
)


def read_sampling(texts: Sequence[str]) -> SamplingOptions:
    """What was typed in the order of FIELDS; empty leaves it to the model. Raises ValueError in words for people."""
    options: dict[str, Any] = {}
    for field, text in zip(FIELDS, texts, strict=True):
        if text.strip():
            options[field.name] = _read(field, text.strip())
    return SamplingOptions(**options)


def _read(field: Field, text: str) -> float:
    refusal = ValueError(f'{field.label} is "{text}"; it must be {field.allowed}. Empty takes the model\'s own.')
    try:
        value = field.read(text)
    except ValueError:
        raise refusal from None
    if not field.accepts(value):
        raise refusal
    return value
