"""The engine over a fake runner: what it refuses, and that an answer is the same whatever happens around it."""

import math
from typing import cast

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest, ContextTooLong, EngineError, OutOfMemory, TooManyRequests
from engine.plan import BatchPlan, PendingStep
from engine.types import FinishReason, RequestClass, SamplingParams, Standing, TokenEvent
from tests.engine.fake_runner import EOS, VOCAB_SIZE, FakeRunner, solo_answer

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [tuple(range(2 + i, 2 + i + length)) for i, length in enumerate((1, 3, 4, 5, 9, 12, 17, 20))]


@pytest.fixture(params=[0, 1], ids=["in step", "one ahead"])
def steps_ahead(request: pytest.FixtureRequest) -> int:
    return cast(int, request.param)


def _engine(runner: FakeRunner, **config: object) -> Engine:
    return Engine(runner, EngineConfig(model="fake", **config))  # type: ignore[arg-type]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def _run(engine: Engine, answers: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until idle. The tokens by request id, added to `answers`."""
    answers = {} if answers is None else answers
    while engine.has_work:
        _collect(engine.step(), answers)
        engine.check()
    assert engine.stats().num_blocks_used == 0
    return answers


def _collect(events: list[TokenEvent], answers: dict[str, list[int]]) -> None:
    for event in events:
        assert event.token_id is not None
        answers.setdefault(event.request_id, []).append(event.token_id)


def _expected(max_tokens: int = 12) -> dict[str, list[int]]:
    return {str(i): solo_answer(prompt, max_tokens) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_chunked_prompts_get_the_same_tokens(budget: int, enable_prefix_caching: bool, steps_ahead: int) -> None:
    runner = FakeRunner(steps_ahead=steps_ahead, max_num_batched_tokens=budget)
    engine = _engine(runner, enable_prefix_caching=enable_prefix_caching)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, _greedy(12))
    assert _run(engine) == _expected()


def test_staggered_requests_get_the_tokens_that_each_gets_alone(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, max_num_seqs=3))
    answers: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, _greedy(12))
        _collect(engine.step(), answers)
        _collect(engine.step(), answers)
    assert _run(engine, answers) == _expected()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_get_the_same_tokens(enable_prefix_caching: bool, steps_ahead: int) -> None:
    """Each answer grows far past the look-ahead, so that three that were admitted cannot all stay."""
    runner = FakeRunner(steps_ahead=steps_ahead, num_blocks=128, max_model_len=400)
    engine = _engine(runner, enable_prefix_caching=enable_prefix_caching)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    prompts = {str(i): (2 + i, 3, 4) for i in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, params)
    answers = _run(engine)
    assert engine.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert answers[request_id] == solo_answer(prompt, 300, ignore_eos=True)


@pytest.mark.parametrize("length", range(1, 18))
def test_warm_prompt_of_every_length_gets_the_tokens_of_the_cold_one(length: int, steps_ahead: int) -> None:
    prompt = tuple(2 + i % 40 for i in range(length))
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, max_num_batched_tokens=32))
    cold: list[TokenEvent] = []
    warm: list[TokenEvent] = []
    for name, events in (("cold", cold), ("warm", warm)):
        engine.add(name, prompt, _greedy(6))
        while engine.has_work:
            events += engine.step()
    assert [e.token_id for e in warm] == [e.token_id for e in cold] == solo_answer(prompt, 6)
    assert {e.num_cached_tokens for e in cold} == {0}
    assert {e.num_cached_tokens for e in warm} == {(length - 1) // 4 * 4}
    assert {e.num_prompt_tokens for e in (*cold, *warm)} == {length}


@pytest.mark.parametrize(("num_long", "most_steps"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("steps_before", range(4))
def test_short_prompt_gets_its_first_token_in_few_steps_while_long_prompts_are_computed(
    num_long: int, most_steps: int, steps_before: int
) -> None:
    """A step computes 512 tokens at most: the wait is bounded by 512 or 1,024 of them, not by 2,000 and more."""
    runner = FakeRunner(num_blocks=512, block_size=16, max_model_len=4096, max_num_batched_tokens=512)
    engine = _engine(runner)
    for i in range(num_long):
        engine.add(f"long {i}", tuple(2 + (i + j) % 40 for j in range(2000)), _greedy(1))
    answers: dict[str, list[int]] = {}
    for _ in range(steps_before):
        _collect(engine.step(), answers)
    engine.add("short", tuple(range(2, 42)), _greedy(1))
    for _ in range(most_steps):
        _collect(engine.step(), answers)
    assert list(answers) == ["short"]
    assert set(_run(engine, answers)) == {"short", *(f"long {i}" for i in range(num_long))}


def test_end_id_of_the_model_stops_and_ignore_eos_goes_on(steps_ahead: int) -> None:
    prompt = next(p for p in ((i,) for i in range(2, VOCAB_SIZE)) if solo_answer(p, 20)[-1] == EOS)
    engine = _engine(FakeRunner(steps_ahead=steps_ahead))
    engine.add("stops", prompt, _greedy(30))
    engine.add("goes on", prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    answers = _run(engine)
    assert answers["stops"] == solo_answer(prompt, 20)
    assert len(answers["goes on"]) == 30


def test_stop_id_of_the_request_is_its_last_token(steps_ahead: int) -> None:
    prompt = (5, 6, 7)
    alone = solo_answer(prompt, 8)
    engine = _engine(FakeRunner(steps_ahead=steps_ahead))
    engine.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(alone[2],)))
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[-1].token_id == alone[2]
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + [FinishReason.STOP]


def test_without_max_tokens_an_answer_takes_what_the_context_leaves(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, max_model_len=24))
    engine.add("a", (5, 6, 7), SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(_run(engine)["a"]) == 24 - 3


def test_a_pool_smaller_than_the_context_is_the_limit(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, max_model_len=128, num_blocks=5, block_size=4))
    engine.add("a", (5, 6, 7), SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(_run(engine)["a"]) == 20 - 3


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "requested", "completion", "why"),
    [
        (24, None, 24, 0, "An answer needs room for 1 token more. "),
        (30, None, 30, 0, ""),
        (20, 5, 25, 5, ""),
    ],
)
def test_request_that_cannot_fit_is_refused_with_both_numbers(
    num_prompt: int, max_tokens: int | None, requested: int, completion: int, why: str
) -> None:
    engine = _engine(FakeRunner(max_model_len=24))
    with pytest.raises(ContextTooLong) as refusal:
        engine.add("a", (5,) * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert refusal.value.message == (
        f"This model's maximum context length is 24 tokens. However, you requested {requested} tokens "
        f"({num_prompt} in the messages, {completion} in the completion). "
        f"{why}Please reduce the length of the messages or completion."
    )
    assert not engine.has_work


def test_request_that_just_fits_is_served(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, max_model_len=24))
    engine.add("a", (5,) * 23, SamplingParams(temperature=0.0))
    engine.add("b", (5,) * 20, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert {name: len(tokens) for name, tokens in _run(engine).items()} == {"a": 1, "b": 4}


@pytest.mark.parametrize(
    ("params", "number"),
    [
        (SamplingParams(temperature=-0.5), "-0.5"),
        (SamplingParams(temperature=math.nan), "nan"),
        (SamplingParams(temperature=math.inf), "inf"),
        (SamplingParams(top_p=0.0), "0.0"),
        (SamplingParams(top_p=1.5), "1.5"),
        (SamplingParams(top_p=math.nan), "nan"),
        (SamplingParams(top_k=-1), "-1"),
        (SamplingParams(max_tokens=0), "0"),
        (SamplingParams(seed=2**63), str(2**63)),
    ],
)
def test_parameter_that_means_nothing_is_refused_with_its_number(params: SamplingParams, number: str) -> None:
    with pytest.raises(BadRequest, match=f"is {number};"):
        _engine(FakeRunner()).add("a", (5,), params)


@pytest.mark.parametrize(("prompt", "number"), [((), "0 tokens"), ((5, 50), "id 50 "), ((5, -1), "id -1 ")])
def test_prompt_that_no_model_can_read_is_refused(prompt: tuple[int, ...], number: str) -> None:
    with pytest.raises(BadRequest, match=number):
        _engine(FakeRunner()).add("a", prompt, GREEDY)


def test_request_id_in_use_is_refused() -> None:
    engine = _engine(FakeRunner())
    engine.add("a", (5,), GREEDY)
    with pytest.raises(BadRequest, match="'a' is in use"):
        engine.add("a", (5,), GREEDY)


def test_full_line_refuses_one_more_until_somebody_leaves() -> None:
    engine = _engine(FakeRunner(max_num_seqs=2), max_queued_requests=1)
    for name in "abc":
        engine.add(name, (5,), GREEDY)
    with pytest.raises(TooManyRequests, match="3 requests"):
        engine.add("d", (5,), GREEDY)
    engine.abort("b")
    engine.add("d", (5,), GREEDY)


def test_newer_autocomplete_of_the_same_client_ends_the_older_one() -> None:
    def standing(client_id: str, request_class: RequestClass = RequestClass.AUTOCOMPLETE) -> Standing:
        return Standing(request_class=request_class, client_id=client_id)

    engine = _engine(FakeRunner(max_num_seqs=1), max_queued_requests=4)
    assert engine.add("typed", (5,), GREEDY, standing("editor")) == []
    engine.step()
    assert engine.add("other", (5,), GREEDY, standing("other")) == []
    assert engine.add("nobody", (5,), GREEDY, standing("")) == []
    assert engine.add("chat", (5,), GREEDY, standing("editor", RequestClass.INTERACTIVE)) == []
    assert engine.add("nobody again", (5,), GREEDY, standing("")) == []
    assert engine.add("typed more", (5,), GREEDY, standing("editor")) == ["typed"]
    assert "typed" not in engine.request_ids
    engine.check()


def test_refused_autocomplete_ends_nothing() -> None:
    standing = Standing(request_class=RequestClass.AUTOCOMPLETE, client_id="editor")
    engine = _engine(FakeRunner())
    engine.add("a", (5,), GREEDY, standing)
    with pytest.raises(BadRequest):
        engine.add("b", (), GREEDY, standing)
    assert engine.request_ids == ("a",)


def test_priority_is_refused_where_requests_are_served_by_arrival() -> None:
    engine = _engine(FakeRunner(), scheduler_policy="fcfs")
    with pytest.raises(BadRequest, match="priority is 3, and this engine serves by arrival"):
        engine.add("a", (5,), GREEDY, Standing(priority=3))
    engine.add("a", (5,), GREEDY, Standing(request_class=RequestClass.BATCH))


def test_seeded_request_gets_the_same_tokens_in_any_company(steps_ahead: int) -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=10)
    engine = _engine(FakeRunner(steps_ahead=steps_ahead))
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params)
    answers = _run(engine)
    for i, prompt in enumerate(PROMPTS):
        assert answers[str(i)] == solo_answer(prompt, 10, seed=42, temperature=1.0)


def test_drawn_seeds_differ_between_requests_and_repeat_with_the_config_seed() -> None:
    def drawn(seed: int | None) -> list[int]:
        runner = FakeRunner()
        engine = _engine(runner, seed=seed)
        for name in "ab":
            engine.add(name, (5,), SamplingParams(max_tokens=1))
        _run(engine)
        return [sequence.seed for sequence in runner.plans[0].sequences]

    first, second = drawn(3)
    assert first != second
    assert drawn(3) == [first, second]
    assert drawn(None) != drawn(None)


def test_two_hundred_aborted_requests_leave_the_pool_full(steps_ahead: int) -> None:
    engine = _engine(FakeRunner(steps_ahead=steps_ahead, num_blocks=32, max_num_batched_tokens=7))
    for i in range(200):
        engine.add(str(i), PROMPTS[i % len(PROMPTS)], SamplingParams(temperature=0.0, ignore_eos=True))
        engine.step()
        if i % 3:
            engine.step()
        ended = engine.abort(str(i))
        assert ended is not None
        assert ended.finish_reason is FinishReason.ABORT
        engine.check()
    assert engine.stats().num_blocks_used == 0
    assert _run(engine) == {}


def test_aborting_an_unknown_or_ended_request_does_nothing() -> None:
    engine = _engine(FakeRunner())
    engine.add("a", (5,), _greedy(1))
    engine.step()
    assert engine.abort("a") is None
    assert engine.abort("nobody") is None


def test_step_that_fails_can_be_cleaned_up_and_followed_by_others(steps_ahead: int) -> None:
    class Breaking(FakeRunner):
        is_broken = True

        def submit(self, plan: BatchPlan) -> PendingStep:
            if self.is_broken:
                raise EngineError("no")
            return super().submit(plan)

    runner = Breaking(steps_ahead=steps_ahead)
    engine = _engine(runner)
    engine.add("a", (5, 6, 7, 8, 9), GREEDY)
    with pytest.raises(EngineError, match="no"):
        engine.step()
    engine.check()
    for request_id in engine.request_ids:
        engine.abort(request_id)
    assert engine.stats().num_blocks_used == 0
    runner.is_broken = False
    engine.add("b", (5, 6, 7, 8, 9), _greedy(6))
    assert _run(engine)["b"] == solo_answer((5, 6, 7, 8, 9), 6)


def test_next_step_is_submitted_before_the_ids_of_the_one_before_are_known() -> None:
    runner = FakeRunner(steps_ahead=1)
    engine = _engine(runner)
    engine.add("a", (5, 6, 7), _greedy(3))
    assert engine.step() == []
    events = engine.step()
    assert [event.token_id for event in events] == solo_answer((5, 6, 7), 3)[:1]
    assert [(s.feeds_last, s.start, s.sample_position) for plan in runner.plans for s in plan.sequences] == [
        (False, 0, 3),
        (True, 3, 4),
    ]


def test_step_that_only_a_finished_request_was_in_is_still_waited_for() -> None:
    prompt = (5, 6, 7)
    stop = solo_answer(prompt, 1)[0]
    engine = _engine(FakeRunner(steps_ahead=1))
    engine.add("a", prompt, SamplingParams(temperature=0.0, stop_token_ids=(stop,)))
    engine.step()
    (event,) = engine.step()
    assert event.finish_reason is FinishReason.STOP
    assert (engine.request_ids, engine.stats().num_blocks_used) == ((), 0)
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work


def test_request_that_reaches_its_length_is_not_run_ahead() -> None:
    runner = FakeRunner(steps_ahead=1)
    engine = _engine(runner)
    engine.add("a", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    _run(engine)
    assert [plan.num_tokens for plan in runner.plans] == [3, 1, 1, 1]


def test_request_id_used_again_gets_no_token_of_the_one_aborted_before() -> None:
    engine = _engine(FakeRunner(steps_ahead=1))
    engine.add("a", (5, 6, 7), _greedy(4))
    engine.step()
    engine.abort("a")
    engine.add("a", (20, 21), _greedy(4))
    assert _run(engine)["a"] == solo_answer((20, 21), 4)


def test_stats_count_what_was_done() -> None:
    engine = _engine(FakeRunner(num_blocks=64, max_num_batched_tokens=32))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add("a", tuple(range(2, 12)), params)
    engine.step()
    during = engine.stats()
    assert (during.num_requests_running, during.num_blocks_used, during.num_blocks_total) == (1, 3, 64)
    _run(engine)
    engine.add("b", tuple(range(2, 12)), params)
    _run(engine)
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (12, 6, 6)
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.last_step_age_s) == (0, 0, 0.0)
    assert stats.step_host_us > 0
    assert sum(stats.steps_by_tokens) == 6 and stats.step_tokens == 12 + 4
    assert stats.steps_by_tokens[0] == 4, "steps of one token"


def test_a_smaller_cache_ends_nobody_and_bounds_new_requests_until_it_is_whole_again() -> None:
    runner = FakeRunner(num_blocks=32, block_size=4, max_model_len=128, max_num_seqs=2)
    engine = Engine(runner, EngineConfig(model="fake"))
    engine._smallest_pool = 8
    engine.add("open", tuple(range(2, 12)), SamplingParams(temperature=0.0, ignore_eos=True))
    events = [engine.step() for _ in range(4)]
    events.append(engine.resize_kv(give_back_bytes=26))
    assert engine.memory.num_blocks == 6 and engine.stats().num_blocks_total == 6
    with pytest.raises(ContextTooLong, match="maximum context length is 24 tokens"):
        engine.add("long", (2,) * 30, SamplingParams())
    with pytest.raises(BadRequest, match=r"would hold 8 tokens; the requests that run or wait need 1[0-9]"):
        engine.resize_kv(give_back_bytes=30)
    engine.resize_kv(give_back_bytes=0)
    while engine.has_work:
        events.append(engine.step())
    answer = [event.token_id for step in events for event in step]
    assert answer == solo_answer(tuple(range(2, 12)), 118, ignore_eos=True)


def test_a_cache_that_cannot_grow_again_stays_as_it_is() -> None:
    runner = FakeRunner(num_blocks=32, block_size=4, max_model_len=128)
    engine = Engine(runner, EngineConfig(model="fake"))
    engine._smallest_pool = 8
    engine.resize_kv(give_back_bytes=20)
    runner.num_taken_by_others = 10
    with pytest.raises(OutOfMemory):
        engine.resize_kv(give_back_bytes=0)
    assert engine.memory.num_blocks == 12
    engine.check()
