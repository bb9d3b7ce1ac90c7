"""What a request's sampling parameters must be; everything that could not be served is refused here, by name."""

import math

from engine.errors import BadRequest
from engine.types import ModelInfo, SamplingParams

MAX_LOGPROBS = 20


def check_params(params: SamplingParams, info: ModelInfo) -> None:
    """Raises BadRequest."""
    _check_numbers(params)
    _check_counts(params)
    _check_token_ids(params, info)


def _check_numbers(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise BadRequest(f"temperature is {params.temperature}; it must be a number of at least 0.", "temperature")
    if not 0 < params.top_p <= 1:
        raise BadRequest(f"top_p is {params.top_p}; it must be above 0 and at most 1.", "top_p")
    if not 0 <= params.min_p <= 1:
        raise BadRequest(f"min_p is {params.min_p}; it must be from 0 to 1, where 0 keeps every token.", "min_p")
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise BadRequest(
            f"repetition_penalty is {params.repetition_penalty}; it must be a number above 0, where 1 is none.",
            "repetition_penalty",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2 <= value <= 2:
            raise BadRequest(f"{name} is {value}; it must be from -2 to 2.", name)
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise BadRequest(f"logit_bias of token {token_id} is {bias}; it must be a finite number.", "logit_bias")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise BadRequest(f"seed is {params.seed}; it must fit into 64 bits with a sign.", "seed")


def _check_counts(params: SamplingParams) -> None:
    if params.top_k < 0:
        raise BadRequest(f"top_k is {params.top_k}; it must be at least 0, where 0 keeps every token.", "top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest(f"max_tokens is {params.max_tokens}; it must be at least 1.", "max_tokens")
    if params.min_tokens < 0:
        raise BadRequest(f"min_tokens is {params.min_tokens}; it must be at least 0.", "min_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest(f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}.", "min_tokens")
    if params.embeds and params.max_tokens != 1:
        raise BadRequest(
            f"embeds asks for a vector and no answer; max_tokens is {params.max_tokens} and must be 1.", "embeds"
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise BadRequest(f"{name} is {count}; it must be from 0 to {MAX_LOGPROBS}.", name)


def _check_token_ids(params: SamplingParams, info: ModelInfo) -> None:
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        for token_id in getattr(params, name):
            if not 0 <= token_id < info.vocab_size:
                raise BadRequest(
                    f"{name} has token id {token_id}, outside this model's vocabulary of {info.vocab_size}.", name
                )
    given = [name for name in ("allowed_token_ids", "banned_token_ids") if getattr(params, name)]
    if not given:
        return
    if params.grammar is not None:
        raise BadRequest(f"{' and '.join(given)} cannot be combined with a grammar.", given[0])
    allowed = set(params.allowed_token_ids or range(info.vocab_size)) - set(params.banned_token_ids)
    if params.min_tokens:
        allowed -= set(stop_ids(params, info.eos_token_ids))
    if not allowed:
        raise BadRequest(f"{' and '.join(given)} leave no token that may come first.", given[0])


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Ids that end a sequence: the request's, and the model's unless it goes on after those."""
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
