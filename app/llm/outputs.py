"""What comes back of a prompt, under vLLM's names."""

from dataclasses import dataclass
from typing import Literal

from app.chat.model_text import ModelText
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """rank: 1 for the likeliest; None for a token that is not among the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = dict[int, Logprob]  # token id -> its, for one place; the token that came is first


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer. token_ids has the end or stop id that text leaves out; stop_reason is the stop string or id."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt. prompt is None where token ids were given; prompt_logprobs begins with a None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int


def logprobs_of(text: ModelText, token_id: int, found: TokenLogprobs) -> Logprobs:
    ranks = {top_id: rank for rank, top_id in enumerate(found.top_ids, 1)}
    of = {token_id: found.logprob, **dict(zip(found.top_ids, found.top_logprobs, strict=True))}
    return {
        each: Logprob(
            logprob=logprob,
            rank=ranks.get(each),
            decoded_token=text.tokenizer.token_bytes(each).decode("utf-8", "replace"),
        )
        for each, logprob in of.items()
    }
