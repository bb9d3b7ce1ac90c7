"""Layers with a window on real (tiny) models, through the engine: what the window has passed by is given up, nobody
reads it, and no answer changes by it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.bench.host import _NullRunner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.layout import Window, group_layers
from engine.plan import BatchPlan, FinishedStep
from engine.runner import ModelRunner
from engine.types import SamplingParams
from tests.checkpoints import tiny_checkpoint
from tests.engine.limits import Limits
from tests.engine.running import engine_config, load, prompt

_FAMILIES = ("mistral", "gemma2", "gemma3_deep")  # windows alone; as many of both; groups with an empty place
_WINDOW, _BLOCK, _NEW_TOKENS = 24, 16, 10


class Subject:
    def __init__(self, family: str, folder: Path) -> None:
        self.model = tiny_checkpoint(folder, family)
        self.runner = load(folder, max_num_batched_tokens=32)
        self.config = engine_config(folder)
        self._alone: dict[tuple[int, ...], list[int]] = {}

    def engine(self, *, budget: int = 32, num_blocks: int | None = None, steps_ahead: int = 0) -> Engine:
        """A new one, over a cache without a number."""
        poison(self.runner, range(self.runner.memory.num_blocks))
        limits = Limits(self.runner, num_blocks=num_blocks, steps_ahead=steps_ahead, max_num_batched_tokens=budget)
        return Engine(limits, self.config)

    @torch.inference_mode()
    def alone(self, tokens: list[int]) -> list[int]:
        """Greedy, by transformers."""
        if tuple(tokens) not in self._alone:
            known = list(tokens)
            for _ in range(_NEW_TOKENS):
                known.append(int(self.model(torch.tensor([known])).logits[0, -1].argmax()))
            self._alone[tuple(tokens)] = known[len(tokens) :]
        return self._alone[tuple(tokens)]


@pytest.fixture(scope="module", params=_FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp(request.param) / "model")


def poison(runner: ModelRunner, block_ids: range | list[int]) -> None:
    for layer in runner._cache.layers:
        layer.paged.keys[list(block_ids)] = torch.nan
        layer.paged.values[list(block_ids)] = torch.nan


def _forgotten(engine: Engine) -> list[int]:
    """Blocks that nobody holds and nobody can find."""
    return [b.block_id for b in engine._pool._blocks if b.ref_count == 0 and b.prefix is None]


def run(subject: Subject, engine: Engine, prompts: dict[str, list[int]], stagger: int = 0) -> dict[str, list[int]]:
    """Greedy answers; after each step every block that is of no use to anybody is NaN."""
    out: dict[str, list[int]] = {name: [] for name in prompts}
    coming = list(prompts.items())
    steps = 0
    while coming or engine.has_work:
        while coming and (not stagger or steps % stagger == 0):
            name, tokens = coming.pop(0)
            engine.add(name, tuple(tokens), SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True))
            if stagger:
                break
        for event in engine.step():
            assert event.token_id is not None
            out[event.request_id].append(event.token_id)
        engine.check()
        poison(subject.runner, _forgotten(engine))
        steps += 1
    return out


@pytest.mark.parametrize(("budget", "steps_ahead"), [(32, 0), (7, 1)])
def test_answers_are_transformers_though_what_is_given_up_is_overwritten(
    subject: Subject, budget: int, steps_ahead: int
) -> None:
    prompts = {f"r{i}": prompt(5 + 31 * i, seed=i) for i in range(4)}
    ours = run(subject, subject.engine(budget=budget, steps_ahead=steps_ahead), prompts, stagger=3)
    assert ours == {name: subject.alone(tokens) for name, tokens in prompts.items()}


def test_a_long_sequence_holds_no_more_of_its_windows_than_it_was_said_to(subject: Subject) -> None:
    engine, layout = subject.engine(budget=16), subject.runner.memory.layout
    engine.add("long", tuple(prompt(200)), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    most, last = 0, 0
    while engine.has_work:
        engine.step()
        engine.check()
        most, last = max(most, engine.stats().num_blocks_used), engine.stats().num_blocks_used or last
    whole, windows = -(-239 // _BLOCK), [window for window in layout.windows if window]
    assert most <= layout.needed(240, 16)
    # The window's last 23 tokens and the one that is computed lie in 3 blocks at most; 2 of them at 239 tokens.
    assert last <= (len(layout.windows) - len(windows)) * whole + 3 * len(windows)
    assert last < len(layout.windows) * whole


def logits_of(subject: Subject) -> Iterator[list[torch.Tensor]]:
    """Rows of logits that are computed from now on."""
    rows: list[torch.Tensor] = []
    compute = subject.runner._decoder.logits

    def computed(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        rows.extend(logits.clone())
        return logits

    subject.runner._decoder.logits = computed  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        subject.runner._decoder.logits = compute  # type: ignore[method-assign]


@pytest.mark.parametrize("length", [24, 33, 41, 65, 130])
def test_a_found_beginning_gives_the_bits_of_a_computed_one(subject: Subject, length: int) -> None:
    engine, tokens = subject.engine(), prompt(length, seed=length)
    answers, rows = [], []
    for name in ("miss", "hit"):
        found = logits_of(subject)
        kept = next(found)
        answers.append(run(subject, engine, {name: tokens})[name])
        found.close()
        rows.append(torch.stack(kept))
    assert answers[0] == answers[1] == subject.alone(tokens)
    hits = engine.stats().prefix_cache_hits
    assert hits == (length - 1) // _BLOCK * _BLOCK, "all full blocks, but for the token that is left to compute"
    same_bits = subject.model.config.model_type != "gemma2"  # its scores' cap is torch's to compute, in any order
    assert torch.equal(*rows) if same_bits else torch.allclose(*rows, rtol=1e-4, atol=1e-4)


def test_a_beginning_whose_window_is_gone_is_computed_again(subject: Subject) -> None:
    """The first goes on far beyond what the second shares with it; others take the blocks that its window passed by."""
    shared, engine = prompt(48, seed=1), subject.engine(num_blocks=_tight(subject))
    first, second = shared + prompt(100, seed=2), shared + prompt(30, seed=3)
    prompts = {"first": first, "other": prompt(120, seed=4), "second": second}
    for name, tokens in prompts.items():
        assert run(subject, engine, {name: tokens})[name] == subject.alone(tokens)


def _tight(subject: Subject) -> int:
    return subject.runner.memory.layout.needed(180) + 2


def test_preempted_sequences_get_the_answers_of_those_alone(subject: Subject) -> None:
    engine = subject.engine(num_blocks=_tight(subject))
    engine._scheduler._lookahead_tokens = 0
    prompts = {f"r{i}": prompt(110 + 9 * i, seed=i) for i in range(4)}
    ours = run(subject, engine, prompts)
    assert ours == {name: subject.alone(tokens) for name, tokens in prompts.items()}


class _Ahead(_NullRunner):
    """Notes the blocks that are held when a step is planned and the one before it not settled."""

    steps_ahead = 1

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.used: list[int] = []

    def submit(self, plan: BatchPlan) -> FinishedStep:
        assert self.engine is not None
        self.used.append(self.engine.stats().num_blocks_used)
        return super().submit(plan)


@pytest.mark.parametrize("windows", [(None, *(1024,) * 5), (4096,), (None, 4096)])
def test_what_a_sequence_is_said_to_need_is_what_it_takes(windows: tuple[Window, ...]) -> None:
    runner = _Ahead()
    runner.memory = replace(runner.memory, windows=windows, step_tokens=2048)
    engine = runner.engine = Engine(runner, EngineConfig(model="none"))
    engine.add("long", (1,) * 8000, SamplingParams(max_tokens=192, ignore_eos=True))
    while engine.has_work:
        engine.step()
    layout = runner.memory.layout
    assert max(runner.used) <= layout.needed(8192) <= 1.05 * max(runner.used)
    assert runner.used[-1] <= layout.needed(8192, 1) <= 1.05 * runner.used[-1]


@pytest.mark.parametrize("windows", [(None, *(1024,) * 5), (4096,)])
def test_as_many_chats_fit_as_are_forecast(windows: tuple[Window, ...]) -> None:
    runner = _Ahead()
    layout = replace(runner.memory, windows=windows, step_tokens=2048).layout
    num_blocks = layout.useful(6, 8192)
    assert (layout.num_sequences(num_blocks, 8192), layout.num_sequences(num_blocks - 1, 8192)) == (6, 5)
    runner.memory = replace(runner.memory, windows=windows, step_tokens=2048, num_blocks=num_blocks)
    engine = runner.engine = Engine(runner, EngineConfig(model="none"))
    for index in range(6):
        engine.add(str(index), (index,) * 8000, SamplingParams(max_tokens=192, ignore_eos=True))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().num_requests_running)
    assert (most, engine.stats().num_preemptions) == (6, 0)


def test_layers_are_grouped_by_window_where_a_chat_takes_the_least() -> None:
    gemma3 = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    groups = group_layers(gemma3)
    assert (groups.windows, groups.size, groups.num_empty) == ((None, *(1024,) * 6), 10, 8)
    assert len(set(groups.places)) == 62
    assert all(groups.windows[group] == window for (group, _), window in zip(groups.places, gemma3, strict=True))
    assert (group_layers([4096] * 32).windows, group_layers([None] * 32).windows) == ((4096,), (None,))
    assert (group_layers([4096, None] * 21).windows, group_layers([4096, None] * 21).size) == ((None, 4096), 21)


def test_a_window_that_no_sequence_outgrows_is_none(subject: Subject) -> None:
    spec = subject.runner._decoder.spec
    assert _WINDOW in spec.layer_groups.windows
    assert set(replace(spec, context_length=_WINDOW).layer_groups.windows) == {None}
