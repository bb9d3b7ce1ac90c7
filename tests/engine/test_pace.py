"""The prefill allowance against a device of known cost: a step takes so long, and each prompt token adds so much."""

from dataclasses import dataclass

import pytest

from engine.blocks import BlockPool
from engine.pace import PrefillPace
from engine.plan import BatchPlan, StepOutput
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import SamplingParams

BUDGET = 512


@dataclass
class Device:
    """
    decode_s    of a step in which one sequence decodes
    token_s     more for each prompt token
    sequence_s  more for each further sequence that decodes
    """

    decode_s: float
    token_s: float
    sequence_s: float = 0.0

    def settled(self, target_s: float = 0.05, num_steps: int = 40) -> PrefillPace:
        """After a whole prompt of the largest chunk, some decodes, and so many steps of both."""
        pace = PrefillPace(target_s, BUDGET)
        pace.observe(self.step_s(BUDGET, 0), 0, BUDGET)
        for _ in range(5):
            pace.observe(self.step_s(0), 1, 0)
        for _ in range(num_steps):
            self.step(pace, pace.allowance(1))
        return pace

    def step(self, pace: PrefillPace, num_prompt_tokens: int) -> None:
        pace.observe(self.step_s(num_prompt_tokens), 1, num_prompt_tokens)

    def step_s(self, num_prompt_tokens: int, num_decoding: int = 1) -> float:
        return self.decode_s + self.token_s * num_prompt_tokens + self.sequence_s * (num_decoding - 1)


def test_without_measurements_the_whole_budget_is_allowed() -> None:
    assert PrefillPace(0.05, BUDGET).allowance(1) == BUDGET


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.010, 0.0004), (0.020, 0.0001), (0.001, 0.001)])
def test_a_step_with_as_many_prompt_tokens_as_are_allowed_takes_the_target(decode_s: float, token_s: float) -> None:
    device = Device(decode_s, token_s)
    assert device.step_s(device.settled().allowance(1)) == pytest.approx(0.05, abs=2 * token_s)


def test_fast_device_is_allowed_the_whole_budget() -> None:
    assert Device(0.005, 0.00001).settled().allowance(1) == BUDGET


def test_where_decoding_alone_misses_the_target_a_step_may_take_twice_as_long() -> None:
    device = Device(0.100, 0.001)
    assert device.step_s(device.settled().allowance(1)) == pytest.approx(0.200, abs=0.002)


def test_allowance_never_falls_below_a_sixteenth_of_the_budget() -> None:
    assert Device(0.001, 1.0).settled().allowance(1) == BUDGET // 16


def test_one_stall_is_forgotten() -> None:
    device = Device(0.010, 0.0004)
    pace = device.settled()
    before = pace.allowance(1)
    pace.observe(30.0, 1, before)
    pace.observe(30.0, 1, 0)
    for _ in range(20):
        device.step(pace, 0)
        device.step(pace, pace.allowance(1))
    assert pace.allowance(1) == pytest.approx(before, rel=0.05)


def test_last_few_tokens_of_a_prompt_say_nothing_about_the_cost_of_a_token() -> None:
    pace = Device(0.010, 0.0004).settled()
    before = pace.allowance(1)
    pace.observe(0.040, 1, 1)
    assert pace.allowance(1) == before


def test_cost_of_a_prompt_token_is_kept_while_nothing_but_answers_is_computed() -> None:
    device = Device(0.010, 0.0004)
    pace = device.settled()
    before = pace.allowance(1)
    for _ in range(1000):
        device.step(pace, 0)
    assert pace.allowance(1) == pytest.approx(before, rel=0.02)


def test_where_all_who_wait_will_miss_the_target_together_a_step_may_take_twice_as_long_as_theirs() -> None:
    """Of 32 that come at once the first would else be answered before the last is read."""
    device = Device(0.010, 0.001, sequence_s=0.003)
    pace = device.settled()
    for num_decoding in range(1, 33):
        pace.observe(device.step_s(0, num_decoding), num_decoding, 0)
    assert device.step_s(0, 32) == pytest.approx(0.103)
    assert device.step_s(pace.allowance(4, 28), 4) == pytest.approx(0.206, rel=0.03)
    assert device.step_s(pace.allowance(4, 4), 4) == pytest.approx(0.062, rel=0.03)
    assert device.step_s(pace.allowance(4), 4) == pytest.approx(0.05, rel=0.05)


class Clocked:
    """A scheduler whose steps take as long as the device says, `steps_ahead` of them under way."""

    def __init__(self, device: Device, *, steps_ahead: int) -> None:
        self.now_s, self.device, self.steps_ahead = 0.0, device, steps_ahead
        self.scheduler = Scheduler(
            BlockPool(4096, 16),
            max_num_seqs=32,
            max_num_batched_tokens=BUDGET,
            target_itl_s=0.05,
            clock=lambda: self.now_s,
        )
        self.under_way: list[BatchPlan] = []
        self.plans: list[BatchPlan] = []
        self.counts: dict[str, int] = {}  # of tokens that a request has

    def add(self, request_id: str, num_tokens: int) -> None:
        self.scheduler.add(
            Sequence(
                request_id=request_id,
                token_ids=list(range(num_tokens)),
                num_prompt_tokens=num_tokens,
                max_length=20_000,
                params=SamplingParams(),
                stop_token_ids=frozenset(),
                seed=0,
                arrived_s=self.now_s,
            )
        )

    def step(self) -> list[str]:
        """Who got a token."""
        self.under_way.append(self.scheduler.plan())
        if len(self.under_way) <= self.steps_ahead:
            return []
        plan = self.under_way.pop(0)
        self.plans.append(plan)
        num_decoding = plan.num_tokens - plan.num_prompt_tokens
        self.now_s += self.device.step_s(plan.num_prompt_tokens, num_decoding)
        events = self.scheduler.settle(plan, StepOutput((7,) * plan.num_sampled))
        for event in events:
            self.counts[event.request_id] = self.counts.get(event.request_id, 0) + 1
        return [event.request_id for event in events]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_running_chat_keeps_its_pace_while_a_long_prompt_is_computed(steps_ahead: int) -> None:
    clocked = Clocked(Device(0.010, 0.001), steps_ahead=steps_ahead)
    clocked.add("chat", 600)
    for _ in range(20):
        clocked.step()
    clocked.add("long", 10_000)
    gaps = []
    while "long" not in clocked.step():
        gaps.append(clocked.device.step_s(clocked.plans[-1].num_prompt_tokens))
    assert len(gaps) > 100
    assert max(gaps[2:]) <= 0.06
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.05, abs=0.005)


def test_nobody_decoding_a_prompt_takes_the_whole_budget() -> None:
    clocked = Clocked(Device(0.010, 0.001), steps_ahead=0)
    clocked.add("long", 3000)
    while not clocked.step():
        assert clocked.plans[-1].num_tokens == BUDGET


def test_short_prompt_has_its_first_token_soon_while_a_long_one_is_computed_beside_a_chat() -> None:
    """A step computes 40 prompt tokens for 50 ms; a quarter of them is the short prompt's."""
    clocked = Clocked(Device(0.010, 0.001), steps_ahead=0)
    clocked.add("chat", 600)
    for _ in range(20):
        clocked.step()
    clocked.add("long", 10_000)
    for _ in range(10):
        clocked.step()
    clocked.add("short", 40)
    assert "short" in [request_id for _ in range(5) for request_id in clocked.step()]


def test_many_that_come_at_once_run_together() -> None:
    """Each has 128 tokens and wants 128: 8 steps of prompts alone and 127 of 32 sequences are the fewest."""
    clocked = Clocked(Device(0.010, 0.001, sequence_s=0.003), steps_ahead=1)
    for round_ in range(2):  # the second knows the device
        for i in range(32):
            clocked.add(f"{round_}-{i}", 128)
        num_tokens, clocked.plans = 0, []
        while num_tokens < 32 * 128:
            ended = [request_id for request_id in clocked.step() if clocked.counts[request_id] == 128]
            num_tokens = sum(clocked.counts.values()) - round_ * 32 * 128
            for request_id in ended:
                clocked.scheduler.abort(request_id)
    assert len(clocked.plans) < 165
