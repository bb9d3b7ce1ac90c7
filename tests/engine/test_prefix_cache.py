"""The prefix cache on a real (tiny) model: a prompt of every length gets the same tokens and logits whether its
beginning is computed, found, computed again after a preemption, or still being computed by somebody else.

The same bits: on a CPU no kernel sums a row in an order that its company could change (see `kernels.cpu`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_runner
from engine.plan import BatchPlan, PendingStep
from engine.types import SamplingParams
from tests.checkpoints import tiny_checkpoint
from tests.engine.limits import Limits

pytest.importorskip("numba", reason="a CPU's kernels are numba's")

_BLOCK = 16
_LENGTHS = range(1, 4 * _BLOCK + 2)
_NEW_TOKENS = 4


class Answer(NamedTuple):
    """Of one request: its tokens, the logits of each, its cached tokens."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    num_cached_tokens: set[int]


class Subject:
    """One tiny model, with the logits of each request kept."""

    def __init__(self, fmt: str, folder: Path) -> None:
        tiny_checkpoint(folder, "llama", fmt)
        config = EngineConfig(model=str(folder), device="cpu", kv_gb=0.01, dtype="float32")
        self.runner = load_runner(config, lambda stage, fraction: None)
        self._submit, self._logits = self.runner.submit, self.runner._decoder.logits
        self.runner.submit = self._keep_logits  # type: ignore[method-assign]
        self.runner._decoder.logits = self._computed  # type: ignore[method-assign]
        self._rows: list[torch.Tensor] = []
        self.answers: dict[str, Answer] = {}

    def _computed(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden)
        self._rows += logits.clone()
        return logits

    def _keep_logits(self, plan: BatchPlan) -> PendingStep:
        self._rows = []
        step = self._submit(plan)
        rows = iter(self._rows)
        for sequence in plan.sequences:
            answer = self.answers.setdefault(sequence.request_id, Answer([], [], set()))
            if sequence.samples:
                answer.logits.append(next(rows))
        return step

    def engine(self, steps_ahead: int, *, num_blocks: int = 64, budget: int = 512, caching: bool = True) -> Engine:
        """A new engine over a cache in which no number is left."""
        for layer in self.runner._cache.layers:
            layer.paged.keys.fill_(torch.nan)
            layer.paged.values.fill_(torch.nan)
        self.answers = {}
        limits = Limits(self.runner, num_blocks=num_blocks, steps_ahead=steps_ahead, max_num_batched_tokens=budget)
        return Engine(limits, EngineConfig(model="", enable_prefix_caching=caching))

    def step(self, engine: Engine) -> None:
        for event in engine.step():
            assert event.token_id is not None
            self.answers[event.request_id].token_ids.append(event.token_id)
            self.answers[event.request_id].num_cached_tokens.add(event.num_cached_tokens)
        engine.check()

    def run(self, engine: Engine) -> None:
        while engine.has_work:
            self.step(engine)

    def answer(self, engine: Engine, request_id: str, prompt: tuple[int, ...]) -> Answer:
        """Of a request that comes alone."""
        engine.add(request_id, prompt, _greedy(_NEW_TOKENS))
        self.run(engine)
        return self.answers[request_id]


@pytest.fixture(scope="module", params=["dense", "gptq"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(params=[0, 1], ids=["in step", "one ahead"])
def steps_ahead(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def cold(subject: Subject) -> Callable[[int], Answer]:
    """The answer to the prompt of a length by an engine that knows no prefix cache."""
    known = {}
    for length in _LENGTHS:
        known[length] = subject.answer(subject.engine(0, caching=False), "cold", _prompt(length))
    return known.__getitem__


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 259, (_LENGTHS[-1],), generator=generator).tolist()[:length])


def _found(length: int) -> int:
    """Prompt tokens that a full hit gives: whole blocks, and at least one token is left to compute."""
    return (length - 1) // _BLOCK * _BLOCK


def _assert_same(answer: Answer, wanted: Answer) -> None:
    assert answer.token_ids == wanted.token_ids
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(answer.logits, wanted.logits, strict=True))


def test_found_prefix_gives_the_tokens_and_logits_of_a_computed_one(
    subject: Subject, cold: Callable[[int], Answer], steps_ahead: int
) -> None:
    for length in _LENGTHS:
        engine = subject.engine(steps_ahead)
        for name, num_cached in (("first", 0), ("second", _found(length))):
            answer = subject.answer(engine, name, _prompt(length))
            assert answer.num_cached_tokens == {num_cached}
            _assert_same(answer, cold(length))


def test_preempted_request_gets_the_tokens_and_logits_of_one_that_is_not(
    subject: Subject, cold: Callable[[int], Answer], steps_ahead: int
) -> None:
    """The older one takes one more block for its third token, and then the pool has too few for both."""
    for length in _LENGTHS:
        num_blocks = 1 + -(-(length + _NEW_TOKENS - 1) // _BLOCK)
        engine = subject.engine(steps_ahead, num_blocks=max(num_blocks, 2))
        engine._scheduler._lookahead_tokens = 0
        engine.add("older", _prompt(_BLOCK - 1, seed=2), _greedy(5))
        engine.add("newer", _prompt(length), _greedy(_NEW_TOKENS))
        subject.run(engine)
        assert engine.stats().num_preemptions == 1
        _assert_same(subject.answers["newer"], cold(length))


def test_prefix_that_another_request_still_computes_gives_the_same_tokens_and_logits(
    subject: Subject, cold: Callable[[int], Answer], steps_ahead: int
) -> None:
    """The second comes when the first has computed one chunk of 24 tokens and has the next under way."""
    for length in _LENGTHS:
        engine = subject.engine(steps_ahead, budget=24)
        engine.add("first", _prompt(length), _greedy(_NEW_TOKENS))
        subject.step(engine)
        engine.add("second", _prompt(length), _greedy(_NEW_TOKENS))
        subject.run(engine)
        for name in ("first", "second"):
            _assert_same(subject.answers[name], cold(length))
