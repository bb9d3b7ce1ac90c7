"""What no request may ask is refused by its name and number."""

import math
from typing import Any

import pytest

from engine.checks import check_params, stop_ids
from engine.errors import BadRequest
from engine.types import GrammarKind, GrammarSpec, SamplingParams
from tests.fakes import model_info

INFO = model_info(vocab_size=10, eos_token_ids=(3,))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"seed": 2**63},
        {"logit_bias": {10: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"allowed_token_ids": (-1,)},
        {"banned_token_ids": (10,)},
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(params))) as caught:
        check_params(SamplingParams(**params), INFO)
    assert caught.value.param in params


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "top_k": 10**9},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"min_tokens": 4, "max_tokens": 4, "logprobs": 20, "prompt_logprobs": 0, "seed": -(2**63)},
        {"logit_bias": {0: -100.0, 9: 100.0}, "allowed_token_ids": (0, 9), "banned_token_ids": (9,)},
    ],
)
def test_what_lies_at_the_borders_is_taken(params: dict[str, Any]) -> None:
    check_params(SamplingParams(**params), INFO)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (1,), "banned_token_ids": (1, 2)},
        {"banned_token_ids": tuple(range(10))},
        {"allowed_token_ids": (3, 5), "stop_token_ids": (5,), "min_tokens": 1},
        {"allowed_token_ids": (1,), "grammar": GrammarSpec(GrammarKind.REGEX, "a")},
    ],
)
def test_a_request_that_leaves_no_token_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        check_params(SamplingParams(**params), INFO)
    for name in ("allowed_token_ids", "banned_token_ids"):
        assert (name in caught.value.message) == (name in params), "only what was sent is named"


def test_stop_ids_are_the_requests_and_the_models_unless_those_are_ignored() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(5,)), (3,)) == {3, 5}
    assert stop_ids(SamplingParams(stop_token_ids=(5,), ignore_eos=True), (3,)) == {5}
