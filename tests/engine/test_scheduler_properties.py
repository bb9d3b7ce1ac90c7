"""Whatever comes in whatever order: blocks and sequences agree after every step, nothing leaks, nobody waits for ever,
and every answer equals the one that its request gets alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.blocks import NO_PREFIX, BlockPool, PrefixId, PrefixMatch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest, ContextTooLong
from engine.layout import Window
from engine.plan import ScheduledSequence
from engine.scheduler import Scheduler
from engine.sequence import Sequence as EngineSequence
from engine.types import FinishReason, RequestClass, SamplingParams, Standing, TokenEvent
from tests.engine.fake_runner import FakeRunner, solo_answer

# Few beginnings, so that prompts share prefixes; ends of one token more or less around the block borders.
_BEGINNINGS = (tuple(range(10, 40)), tuple(range(10, 20)) + tuple(range(40, 48)), (7,) * 30)
prompts = st.builds(
    lambda beginning, length, end: beginning[:length] + end,
    st.sampled_from(_BEGINNINGS),
    st.integers(0, 18),
    st.lists(st.integers(2, 5), min_size=1, max_size=2).map(tuple),
)

# Under the fcfs policy a priority is refused, so that it is left out there.
standings = st.builds(
    Standing,
    request_class=st.sampled_from(RequestClass),
    priority=st.sampled_from((0, 0, 0, -2, 1, 1000)),
    client_id=st.sampled_from(("", "editor")),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from((1, 2, 4)),
        windows=st.sampled_from(((None,), (None,), (5,), (1,), (None, 6), (None, 3, 3), (None, None, 9), (4, 11))),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        lookahead=st.sampled_from((0, 0, 3, 128)),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        steps_ahead=st.sampled_from((0, 1, 1)),
        scheduler_policy=st.sampled_from(("fcfs", "priority", "priority")),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[Window, ...],
        max_num_seqs: int,
        budget: int,
        lookahead: int,
        enable_prefix_caching: bool,
        steps_ahead: int,
        scheduler_policy: str,
    ) -> None:
        runner = FakeRunner(
            num_blocks=num_blocks * len(windows),
            block_size=block_size,
            windows=windows,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=48,
            steps_ahead=steps_ahead,
        )
        config = EngineConfig(
            model="fake", enable_prefix_caching=enable_prefix_caching, scheduler_policy=scheduler_policy
        )
        self.engine = Engine(runner, config)
        self.engine._smallest_pool = 1  # far smaller than anybody would make it
        # A small look-ahead admits more than fits, so that sequences are preempted often.
        self.engine._scheduler._lookahead_tokens = lookahead
        self.engine._scheduler._worth_waiting_tokens = 4
        self.by_priority = scheduler_policy == "priority"
        self.wanted: dict[str, list[int]] = {}
        self.given: dict[str, list[int]] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.num_added = 0

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 16),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        standing=standings,
    )
    def add(self, prompt: tuple[int, ...], max_tokens: int, seed: int, ignore_eos: bool, standing: Standing) -> None:
        standing = standing if self.by_priority else replace(standing, priority=0)
        request_id = f"r{self.num_added}"
        self.num_added += 1
        params = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)
        try:
            superseded = self.engine.add(request_id, prompt, params, standing)
        except ContextTooLong:
            return
        for other in superseded:
            del self.given[other]
        self.wanted[request_id] = solo_answer(
            prompt,
            max_tokens,
            seed=seed,
            temperature=params.temperature,
            ignore_eos=ignore_eos,
            windows=self.engine.memory.windows,
        )
        self.given[request_id] = []
        self.prompts.append(prompt)
        self.engine.check()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), max_tokens=st.integers(1, 16), standing=standings)
    def add_again(self, data: st.DataObject, max_tokens: int, standing: Standing) -> None:
        self.add(data.draw(st.sampled_from(self.prompts)), max_tokens, seed=0, ignore_eos=False, standing=standing)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.given)))
        event = self.engine.abort(request_id)
        assert event is not None
        assert event.finish_reason is FinishReason.ABORT
        assert self.engine.abort(request_id) is None
        del self.given[request_id]
        self.engine.check()

    @rule(give_back=st.integers(0, 72))
    def resize(self, give_back: int) -> None:
        """The cache in another size, while requests run: nobody's answer changes, but for its length."""
        blocks, longest = self.engine.memory.num_blocks, self.engine._max_length
        try:
            self._take_in(self.engine.resize_kv(give_back), longest)  # of steps that were under way before
        except BadRequest:
            assert self.engine.memory.num_blocks == blocks
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Preemption makes some tokens again, but each round of the line ends at least its head.
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "somebody waits for ever"
        assert self.given == {}
        assert self.engine.stats().num_blocks_used == 0

    def _step(self) -> None:
        self._take_in(self.engine.step(), self.engine._max_length)

    def _take_in(self, events: list[TokenEvent], longest: int) -> None:
        """longest: that a sequence could be."""
        for event in events:
            answer = self.given[event.request_id]
            assert event.token_id is not None
            answer.append(event.token_id)
            wanted = self.wanted[event.request_id]
            assert answer == wanted[: len(answer)]
            is_cut = event.num_prompt_tokens + len(answer) == longest
            assert (event.finish_reason is not None) == (len(answer) == len(wanted) or is_cut)
            if event.finish_reason is not None:
                del self.given[event.request_id]
        assert sorted(self.engine.request_ids) == sorted(self.given)
        self.engine.check()


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def test_every_answer_equals_the_one_given_alone() -> None:
    run_state_machine_as_test(EngineMachine, settings=_settings(200))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_answer_equals_the_one_given_alone_in_many_more_cases() -> None:
    run_state_machine_as_test(EngineMachine, settings=_settings(2000))


class _IgnoresTheParent(BlockPool):
    def publish(self, block_ids: Sequence[int], parent: PrefixId, token_ids: Sequence[int]) -> PrefixId:
        super().publish(block_ids, NO_PREFIX, token_ids)
        return NO_PREFIX

    def match(self, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        found = []
        for end in range(self.block_size, max_tokens + 1, self.block_size):
            one = super().match(token_ids[end - self.block_size : end], self.block_size)
            if not one.block_ids:
                break
            found.append(one)
        tables = tuple(tuple(one.tables[group][0] for one in found) for group in range(len(self.windows)))
        block_ids = tuple(block_id for one in found for block_id in one.block_ids)
        return PrefixMatch(tables, block_ids, NO_PREFIX, sum(one.num_idle for one in found))


class _KeepsTheKeyOfABlockHandedOut(BlockPool):
    def _hand_out(self) -> int:
        block_id, _ = next(free for free in self._free if free).popitem(last=False)
        self.num_free -= 1
        self._blocks[block_id].ref_count = 1
        return block_id


class _FreesABlockThatOthersHold(BlockPool):
    def free(self, block_ids: Sequence[int], *, keep: bool = True) -> None:
        super().free(block_ids, keep=keep)
        for block_id in block_ids:
            if self._blocks[block_id].ref_count:
                self._set_free(self._blocks[block_id])


class _SharesWithoutHolding(BlockPool):
    def share(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1


class _ForgetsToFreeTheTail(BlockPool):
    def free(self, block_ids: Sequence[int], *, keep: bool = True) -> None:
        super().free(block_ids[:-1], keep=keep)


class _PublishesAFullBlockUnderAnotherOnesTokens(BlockPool):
    def publish(self, block_ids: Sequence[int], parent: PrefixId, token_ids: Sequence[int]) -> PrefixId:
        return super().publish(block_ids, parent, (*token_ids[:-1], 7))


class _MatchesTheWholePrompt(BlockPool):
    def match(self, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        return super().match(token_ids, max_tokens + 1)


class _GivesOneBlockTwice(BlockPool):
    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        block_ids = super().allocate(num_blocks)
        return block_ids if block_ids is None else block_ids[:1] * num_blocks


class _MovesBlocksAndTellsNobody(BlockPool):
    def resize(self, num_blocks: int) -> dict[int, int]:
        super().resize(num_blocks)
        return {}


class _FindsABeginningWithoutItsWindow(BlockPool):
    def match(self, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        windows = self.windows
        self.windows = tuple(window and 1 for window in windows)
        try:
            return super().match(token_ids, max_tokens)
        finally:
            self.windows = windows


@pytest.mark.parametrize(
    "mutant",
    [
        _FindsABeginningWithoutItsWindow,
        _IgnoresTheParent,
        _KeepsTheKeyOfABlockHandedOut,
        _FreesABlockThatOthersHold,
        _SharesWithoutHolding,
        _ForgetsToFreeTheTail,
        pytest.param(_PublishesAFullBlockUnderAnotherOnesTokens, marks=pytest.mark.slow),  # takes 15 s to be found
        _MatchesTheWholePrompt,
        _GivesOneBlockTwice,
        _MovesBlocksAndTellsNobody,
    ],
)
@pytest.mark.parametrize("with_check", [True, False], ids=["invariants", "answers alone"])
def test_a_block_pool_with_a_mistake_is_found_out(
    mutant: type[BlockPool], with_check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.engine.BlockPool", mutant)
    _find_out(with_check, monkeypatch)


class _SlidesABlockTooFar(Scheduler):
    def _slide(self, sequence: EngineSequence, num_tokens: int) -> None:
        super()._slide(sequence, num_tokens + self.pool.block_size)


class _NeverSlides(Scheduler):
    def _slide(self, sequence: EngineSequence, num_tokens: int) -> None:
        pass


class _SlidesBeforeTheStepIsSettled(Scheduler):
    def _advance(self, sequence: EngineSequence, scheduled: ScheduledSequence) -> None:
        sequence.num_settled_tokens = scheduled.start + scheduled.num_tokens
        super()._advance(sequence, scheduled)


@pytest.mark.parametrize("mutant", [_SlidesABlockTooFar, _NeverSlides, _SlidesBeforeTheStepIsSettled])
@pytest.mark.parametrize("with_check", [True, False], ids=["invariants", "answers alone"])
def test_a_window_that_is_let_go_of_wrongly_is_found_out(
    mutant: type[Scheduler], with_check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.engine.Scheduler", mutant)
    _find_out(with_check, monkeypatch)


def _find_out(with_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_check:
        monkeypatch.setattr(Engine, "check", lambda self: None)
    only_find = settings(_settings(600), phases=[Phase.generate], derandomize=True)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(EngineMachine, settings=only_find)
