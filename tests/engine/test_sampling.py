"""Sampling through the whole engine on a tiny random model: log-probabilities, seeds, what survives a preemption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_runner
from engine.types import SamplingParams, TokenEvent
from tests.checkpoints import tiny_checkpoint

# Logits of two layers in fp32 differ from transformers' by some 1e-6 of their size, 30 at most.
_TOLERANCE = 1e-3
_BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # slots, keys and values, layers, KV heads, head_dim, fp32

EVERYTHING: dict[str, Any] = {
    "temperature": 1.3,
    "top_p": 0.98,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "logit_bias": {7: 1.5},
    "min_tokens": 30,
}
WAYS: list[dict[str, Any]] = [
    {},
    {"top_k": 30, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    EVERYTHING,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return tiny_checkpoint(folder, "llama")


def _engine(folder: Path, **options: Any) -> Engine:
    config = EngineConfig(model=str(folder), device="cpu", **{"kv_gb": 0.01, **options})
    return Engine(load_runner(config, lambda stage, fraction: None), config)


def _run(engine: Engine, requests: dict[str, tuple[tuple[int, ...], SamplingParams]]) -> dict[str, list[TokenEvent]]:
    for request_id, (prompt, params) in requests.items():
        engine.add(request_id, prompt, params)
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in requests}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    return events


def _tokens(events: list[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@torch.inference_mode()
def _theirs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] log_softmax after each token, transformers'."""
    return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 7])
def test_logprobs_equal_transformers(folder: Path, model: torch.nn.Module, budget: int) -> None:
    prompts = {f"r{i}": _prompt(5 + 13 * i, seed=i) for i in range(4)}
    requests = {
        name: (prompt, SamplingParams(max_tokens=32, ignore_eos=True, logprobs=5 * i, seed=i, **WAYS[i]))
        for i, (name, prompt) in enumerate(prompts.items())
    }
    events = _run(_engine(folder, max_num_batched_tokens=budget), requests)
    for i, (name, prompt) in enumerate(prompts.items()):
        answer = _tokens(events[name])
        theirs = _theirs(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        for event, expected in zip(events[name], theirs, strict=True):
            assert event.logprobs is not None
            assert event.logprobs.logprob == pytest.approx(float(expected[event.token_id]), abs=_TOLERANCE)
            assert event.logprobs.top_logprobs == pytest.approx(expected.topk(5 * i).values.tolist(), abs=_TOLERANCE)
            assert event.logprobs.top_ids == tuple(expected.topk(5 * i).indices.tolist())
            assert event.prompt_logprobs is None


@pytest.mark.parametrize("budget", [512, 7])
def test_prompt_logprobs_equal_transformers_whether_the_prompt_is_known_or_not(
    folder: Path, model: torch.nn.Module, budget: int
) -> None:
    """A prompt of 150 tokens takes two rounds of logits; the second request finds it in the prefix cache."""
    engine, prompt = _engine(folder, max_num_batched_tokens=budget), _prompt(150)
    expected = _theirs(model, list(prompt))[:-1]
    plain = _run(engine, {"plain": (prompt, SamplingParams(max_tokens=1, temperature=0.0))})["plain"]
    for count in (0, 3):
        params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=count, ignore_eos=True)
        first, *others = _run(engine, {"asks": (prompt, params)})["asks"]
        assert [event.prompt_logprobs for event in others] == [None, None]
        assert first.num_cached_tokens == 0
        assert first.token_id == plain[0].token_id
        assert first.prompt_logprobs is not None
        for given, row, token in zip(first.prompt_logprobs, expected, prompt[1:], strict=True):
            assert given.logprob == pytest.approx(float(row[token]), abs=_TOLERANCE)
            assert given.top_ids == tuple(row.topk(count).indices.tolist())
    assert _run(engine, {"after": (prompt, SamplingParams(max_tokens=1))})["after"][0].num_cached_tokens == 144


def test_a_prompt_of_one_token_has_no_logprobs_and_says_so(folder: Path, model: torch.nn.Module) -> None:
    events = _run(_engine(folder), {"r": ((5,), SamplingParams(max_tokens=1, prompt_logprobs=2))})["r"]
    assert events[0].prompt_logprobs == ()


def test_prompt_logprobs_are_whole_where_the_prompt_was_computed_again(folder: Path, model: torch.nn.Module) -> None:
    """Two tokens a step: before the prompt is in, the older answer needs a block more than the pool has."""
    engine = _engine(folder, kv_gb=20 * _BLOCK_BYTES / 1e9, max_num_batched_tokens=2)
    older = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    prompt, asks = _prompt(150), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    events = _run(engine, {"older": (_prompt(20), older), "asks": (prompt, asks)})["asks"]
    assert engine.stats().num_preemptions == 1
    expected = _theirs(model, list(prompt))[:-1]
    chosen = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=True)]
    assert events[0].prompt_logprobs is not None
    assert [entry.logprob for entry in events[0].prompt_logprobs] == pytest.approx(chosen, abs=_TOLERANCE)


# -- seeds ------------------------------------------------------------------------------------------------------------


def _requests(num_tokens: int, count: int = 32) -> dict[str, tuple[tuple[int, ...], SamplingParams]]:
    """Of every way, with prompts that share their beginnings in fours."""
    return {
        f"r{i}": (
            _prompt(20 + i % 7, seed=i // 4),
            SamplingParams(max_tokens=num_tokens, seed=i, ignore_eos=True, **WAYS[i % len(WAYS)]),
        )
        for i in range(count)
    }


@pytest.fixture(scope="module")
def alone(folder: Path, model: torch.nn.Module) -> dict[str, list[int | None]]:
    engine = _engine(folder, enable_prefix_caching=False)
    return {name: _tokens(_run(engine, {name: request})[name]) for name, request in _requests(num_tokens=40).items()}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [512, 40])
def test_a_seeded_request_gets_the_tokens_that_it_gets_alone(
    folder: Path, alone: dict[str, list[int | None]], budget: int, caching: bool
) -> None:
    engine = _engine(folder, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for _ in range(2 if caching else 1):  # the second time all prompts are in the cache
        events = _run(engine, _requests(num_tokens=40))
        assert {name: _tokens(of_one) for name, of_one in events.items()} == alone


def test_a_seeded_request_gets_the_same_tokens_after_a_preemption(folder: Path, model: torch.nn.Module) -> None:
    requests = _requests(num_tokens=180, count=4)
    roomy = _engine(folder)
    alone = {name: _tokens(_run(roomy, {name: request})[name]) for name, request in requests.items()}
    engine = _engine(folder, kv_gb=24 * _BLOCK_BYTES / 1e9)
    events = _run(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert {name: _tokens(of_one) for name, of_one in events.items()} == alone


def test_requests_without_a_seed_differ(folder: Path, model: torch.nn.Module) -> None:
    request = (_prompt(10), SamplingParams(max_tokens=20, ignore_eos=True))
    events = _run(_engine(folder), {"a": request, "b": request})
    assert _tokens(events["a"]) != _tokens(events["b"])


def test_frequency_penalty_counts_the_tokens_of_the_answer_again_after_a_preemption(
    folder: Path, model: torch.nn.Module
) -> None:
    """Greedy under a strong penalty, against transformers' logits and a count by hand."""
    prompts = {f"r{i}": _prompt(20, seed=i) for i in range(4)}
    params = SamplingParams(max_tokens=180, temperature=0.0, frequency_penalty=1.5, ignore_eos=True)
    engine = _engine(folder, kv_gb=24 * _BLOCK_BYTES / 1e9)
    events = _run(engine, {name: (prompt, params) for name, prompt in prompts.items()})
    assert engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        answer = _tokens(events[name])
        theirs = _theirs(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        counts = torch.zeros(259, dtype=torch.float64)
        for token, row in zip(answer, theirs, strict=True):
            assert token == int((row - 1.5 * counts).argmax())
            counts[token] += 1


# -- several answers --------------------------------------------------------------------------------------------------


def test_further_answers_of_a_prompt_compute_its_last_block_alone(folder: Path, model: torch.nn.Module) -> None:
    engine, prompt = _engine(folder), _prompt(100)
    params = [SamplingParams(max_tokens=5, seed=i, ignore_eos=True) for i in range(4)]
    _run(engine, {"0": (prompt, params[0])})
    before = engine.stats().prompt_tokens
    events = _run(engine, {str(i): (prompt, params[i]) for i in (1, 2, 3)})
    assert {of_one[0].num_cached_tokens for of_one in events.values()} == {96}
    assert engine.stats().prompt_tokens - before == 3 * 4
