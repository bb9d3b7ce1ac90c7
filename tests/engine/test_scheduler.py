"""The scheduler: what a step computes, in which order, in which blocks, and what makes room."""

from engine.blocks import BlockPool
from engine.plan import BatchPlan, StepOutput
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import ORDINARY, FinishReason, RequestClass, SamplingParams, Standing, TokenEvent

STOP_ID = 99


class Steps:
    """A scheduler over a pool of 4-token blocks, whose steps can be played by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_num_seqs: int = 4,
        budget: int = 8,
        lookahead: int = 0,
        policy: str = "fcfs",
        worth_waiting: int = 1000,
    ) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            lookahead_tokens=lookahead,
            worth_waiting_tokens=worth_waiting,
            policy=policy,
            clock=lambda: 0.0,
        )

    def add(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        *,
        max_length: int = 32,
        needs_its_ids: bool = False,
        standing: Standing = ORDINARY,
        arrived_s: float = 0.0,
        reports_progress: bool = False,
    ) -> Sequence:
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_length=max_length,
            params=SamplingParams(reports_progress=reports_progress),
            stop_token_ids=frozenset({STOP_ID}),
            seed=0,
            arrived_s=arrived_s,
            standing=standing,
            needs_its_ids=needs_its_ids,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, *token_ids: int) -> tuple[BatchPlan, list[TokenEvent]]:
        """One step; without given ids every sequence that samples gets 7."""
        plan = self.scheduler.plan()
        return plan, self.settle(plan, *token_ids)

    def settle(self, plan: BatchPlan, *token_ids: int) -> list[TokenEvent]:
        events = self.scheduler.settle(plan, StepOutput(token_ids or (7,) * plan.num_sampled))
        self.scheduler.check()
        return events


def _work(plan: BatchPlan) -> list[tuple[str, int, int, bool]]:
    return [(s.request_id, s.start, s.num_tokens, s.samples) for s in plan.sequences]


def _order(plan: BatchPlan) -> list[str]:
    return [s.request_id for s in plan.sequences]


def _class(name: str, priority: int = 0) -> Standing:
    return Standing(request_class=RequestClass(name), priority=priority)


def _numbers(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_prompt_within_the_budget_is_computed_and_sampled_in_one_step() -> None:
    steps = Steps()
    steps.add("a", _numbers(0, 5))
    plan, events = steps.step()
    assert _work(plan) == [("a", 0, 5, True)]
    assert plan.sequences[0].block_tables == ((0, 1),)
    assert plan.sequences[0].sample_position == 5
    assert [event.token_id for event in events] == [7]


def test_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    steps = Steps(budget=8)
    steps.add("a", _numbers(0, 19))
    assert [_work(steps.step()[0]) for _ in range(4)] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 3, True)],
        [("a", 19, 1, True)],
    ]


def test_progress_of_a_long_prompt_is_told_where_it_was_asked() -> None:
    steps = Steps(budget=4)
    steps.add("told", _numbers(0, 10), reports_progress=True)
    told = [steps.step()[1] for _ in range(4)]
    assert [[(e.token_id, e.num_computed_tokens, e.num_prompt_tokens) for e in events] for events in told] == [
        [(None, 4, 10)],
        [(None, 8, 10)],
        [(7, 0, 10)],
        [(7, 0, 10)],
    ]
    silent = Steps(budget=4)
    silent.add("silent", _numbers(0, 10))
    assert [silent.step()[1] for _ in range(2)] == [[], []]


def test_a_plan_holds_the_blocks_of_its_tokens_and_no_more() -> None:
    steps = Steps(budget=6)
    steps.add("a", _numbers(0, 19))
    assert [steps.step()[0].sequences[0].block_tables[0] for _ in range(3)] == [(0, 1), (0, 1, 2), (0, 1, 2, 3, 4)]


def test_decodes_come_first_and_prefill_takes_what_the_budget_leaves() -> None:
    steps = Steps(budget=8)
    steps.add("long", _numbers(0, 30))
    steps.step()
    steps.scheduler.abort("long")
    steps.add("a", _numbers(40, 3))
    steps.add("b", _numbers(50, 3))
    steps.step()
    steps.add("long", _numbers(100, 30), max_length=40)
    plan, _ = steps.step()
    assert _work(plan) == [("a", 3, 1, True), ("b", 3, 1, True), ("long", 0, 6, False)]


def test_next_prompt_starts_beside_the_end_of_the_one_before() -> None:
    steps = Steps(budget=8)
    steps.add("first", _numbers(0, 10))
    steps.add("second", _numbers(50, 7))
    assert _work(steps.step()[0]) == [("first", 0, 6, False), ("second", 0, 2, False)]
    assert _work(steps.step()[0]) == [("first", 6, 4, True), ("second", 2, 4, False)]
    assert _work(steps.step()[0]) == [("first", 10, 1, True), ("second", 6, 1, True)]


def test_no_more_than_max_num_seqs_run() -> None:
    steps = Steps(max_num_seqs=2)
    for name in "abc":
        steps.add(name, (1, 2))
    steps.step()
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (2, 1)


def test_seat_of_a_finished_sequence_is_taken_in_the_next_step() -> None:
    steps = Steps(max_num_seqs=1)
    steps.add("a", (1, 2))
    steps.add("b", (3, 4))
    _, events = steps.step(STOP_ID)
    assert events[0].finish_reason is FinishReason.STOP
    assert _work(steps.step()[0]) == [("b", 0, 2, True)]


def test_full_prefix_hit_still_leaves_one_token_to_compute() -> None:
    steps = Steps(budget=16)
    steps.add("a", _numbers(0, 8))
    steps.step(STOP_ID)
    twin = steps.add("b", _numbers(0, 8))
    plan, _ = steps.step()
    assert _work(plan) == [("b", 4, 4, True)]
    assert twin.num_cached_tokens == 4
    assert steps.scheduler.counters.prefix_cache_queries == 16
    assert steps.scheduler.counters.prefix_cache_hits == 4


def test_prefix_hit_shares_the_blocks_of_a_sequence_that_still_runs() -> None:
    steps = Steps(budget=16)
    steps.add("a", _numbers(0, 9))
    first, _ = steps.step()
    steps.add("b", _numbers(0, 9))
    plan, _ = steps.step()
    assert _work(plan) == [("a", 9, 1, True), ("b", 8, 1, True)]
    assert plan.sequences[1].block_tables[0][:2] == first.sequences[0].block_tables[0][:2]
    assert plan.sequences[1].block_tables[0][2] != first.sequences[0].block_tables[0][2]


def test_block_is_not_found_before_the_step_that_computes_it_is_settled() -> None:
    steps = Steps(budget=32)
    steps.add("a", _numbers(0, 9))
    steps.add("b", _numbers(0, 9))
    assert _work(steps.step()[0]) == [("a", 0, 9, True), ("b", 0, 9, True)]


def test_answer_is_found_by_the_next_turn_of_the_same_chat() -> None:
    steps = Steps(budget=32)
    steps.add("a", _numbers(0, 6), max_length=9)
    answer = [event.token_id for _ in range(3) for event in steps.step()[1]]
    assert answer == [7, 7, 7]
    steps.add("b", (*_numbers(0, 6), 7, 7, 7, 50))
    assert _work(steps.step()[0]) == [("b", 8, 2, True)]


def test_stop_id_ends_a_sequence_and_is_its_last_token() -> None:
    steps = Steps()
    steps.add("a", (1, 2))
    steps.step()
    _, events = steps.step(STOP_ID)
    assert (events[0].token_id, events[0].finish_reason) == (STOP_ID, FinishReason.STOP)
    assert events[0].times is not None
    assert steps.pool.num_used == 0


def test_max_length_ends_a_sequence() -> None:
    steps = Steps()
    steps.add("a", (1, 2), max_length=4)
    assert [steps.step()[1][0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]
    assert steps.pool.num_used == 0


def test_newest_sequence_gives_its_blocks_when_they_run_out() -> None:
    steps = Steps(num_blocks=2)
    steps.add("old", (1, 2, 3), max_length=8)
    steps.add("new", (4, 5, 6), max_length=8)
    steps.step()
    steps.step()
    plan, _ = steps.step()
    assert _work(plan) == [("old", 4, 1, True)]
    assert steps.scheduler.counters.num_preemptions == 1
    assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (1, 1)


def test_preempted_sequence_comes_back_before_those_that_wait() -> None:
    steps = Steps(num_blocks=2, max_num_seqs=2)
    steps.add("old", (1, 2, 3), max_length=8)
    steps.add("new", (4, 5, 6), max_length=8)
    steps.add("later", (8, 9), max_length=8)
    for _ in range(3):
        steps.step()
    steps.scheduler.abort("old")
    plan, _ = steps.step()
    assert plan.sequences[0].request_id == "new"
    assert plan.sequences[0].start + plan.sequences[0].num_tokens == 5  # its prompt and the two tokens it had


def test_work_that_a_preemption_undoes_leaves_the_plan() -> None:
    """The older prompt needs the block that a newer sequence holds, whose next token is already planned."""
    steps = Steps(num_blocks=9, budget=8)
    steps.add("old", _numbers(0, 30), max_length=32)
    steps.add("new", (50, 51), max_length=32)
    for _ in range(4):
        plan, _ = steps.step()
    assert _work(plan) == [("new", 4, 1, True), ("old", 20, 7, False)]
    assert steps.pool.num_free == 0
    assert _work(steps.step()[0]) == [("old", 27, 3, True)]
    assert steps.scheduler.num_waiting == 1


def test_long_prompt_leaves_part_of_the_budget_to_those_behind_it() -> None:
    steps = Steps(num_blocks=64, budget=8)
    steps.add("long", _numbers(0, 200), max_length=201)
    steps.add("short", (1, 2))
    assert _work(steps.step()[0]) == [("long", 0, 6, False), ("short", 0, 2, True)]
    assert _work(steps.step()[0]) == [("short", 2, 1, True), ("long", 6, 7, False)]


def test_long_prompt_takes_the_whole_budget_when_nobody_behind_it_can_start() -> None:
    steps = Steps(num_blocks=64, budget=8, max_num_seqs=1)
    steps.add("long", _numbers(0, 200), max_length=201)
    steps.add("short", (1, 2))
    assert _work(steps.step()[0]) == [("long", 0, 8, False)]


def test_sequence_without_room_for_its_look_ahead_waits() -> None:
    steps = Steps(num_blocks=4, budget=16, lookahead=8)
    steps.add("a", (1, 2, 3), max_length=16)
    steps.add("b", (4, 5, 6), max_length=16)
    plan, _ = steps.step()
    assert [s.request_id for s in plan.sequences] == ["a"]
    for _ in range(4):
        steps.step()
    assert steps.scheduler.counters.num_preemptions == 0


def test_waiting_sequence_starts_when_blocks_come_back() -> None:
    steps = Steps(num_blocks=4, budget=16)
    steps.add("a", _numbers(0, 12), max_length=16)
    steps.add("b", _numbers(50, 12), max_length=16)
    steps.step()
    assert steps.scheduler.num_waiting == 1
    steps.step(STOP_ID)
    assert _work(steps.step()[0]) == [("b", 0, 12, True)]


def test_aborting_the_head_of_the_line_lets_the_next_one_start() -> None:
    steps = Steps(num_blocks=4, budget=16)
    steps.add("a", _numbers(0, 10), max_length=16)
    steps.add("large", _numbers(50, 12), max_length=16)
    steps.add("small", (90, 91), max_length=4)
    steps.step()
    assert steps.scheduler.num_waiting == 2
    steps.scheduler.abort("large")
    plan, _ = steps.step()
    assert [s.request_id for s in plan.sequences] == ["a", "small"]


def test_abort_frees_the_blocks_at_once_wherever_the_sequence_is() -> None:
    steps = Steps(num_blocks=16, max_num_seqs=2, budget=8)
    steps.add("decoding", (1, 2))
    steps.step()
    steps.add("prefilling", _numbers(10, 20))
    steps.add("waiting", (3, 4))
    steps.step()
    for request_id in ("waiting", "prefilling", "decoding"):
        event = steps.scheduler.abort(request_id)
        assert event is not None
        assert (event.token_id, event.finish_reason) == (None, FinishReason.ABORT)
        steps.scheduler.check()
    assert steps.pool.num_used == 0
    assert steps.scheduler.abort("decoding") is None


def test_abort_of_a_preempted_sequence_and_of_ones_under_way_frees_their_blocks_at_once() -> None:
    steps = Steps(num_blocks=3, budget=16)
    steps.add("old", _numbers(10, 7), max_length=12)
    steps.add("preempted", (1, 2, 3), max_length=12)
    steps.settle(steps.scheduler.plan(), 5, 6)
    second, third = steps.scheduler.plan(), steps.scheduler.plan()
    for request_id in ("preempted", "old"):
        assert steps.scheduler.abort(request_id) is not None
        steps.scheduler.check()
    assert steps.pool.num_used == 0
    assert steps.settle(second, 8, 9) == steps.settle(third, 8) == []
    assert steps.scheduler.plan().sequences == ()


def test_plan_of_an_idle_scheduler_is_empty() -> None:
    assert Steps().scheduler.plan().sequences == ()


# -- one step ahead -------------------------------------------------------------------------------------------------


def test_token_that_is_not_known_yet_is_fed_from_the_slot() -> None:
    steps = Steps()
    steps.add("a", (1, 2, 3))
    first, second = steps.scheduler.plan(), steps.scheduler.plan()
    (fed,) = second.sequences
    assert (fed.feeds_last, fed.token_ids, fed.start, fed.sample_position) == (True, (0,), 3, 4)
    assert fed.slot == first.sequences[0].slot
    assert not first.sequences[0].feeds_last
    assert [event.token_id for event in steps.settle(first, 8)] == [8]
    third = steps.scheduler.plan()
    assert [event.token_id for event in steps.settle(second, 9)] == [9]
    assert (third.sequences[0].feeds_last, third.sequences[0].sample_position) == (True, 5)


def test_prompt_goes_on_while_its_first_chunk_is_under_way() -> None:
    steps = Steps(budget=8)
    steps.add("a", _numbers(0, 12))
    assert _work(steps.scheduler.plan()) == [("a", 0, 8, False)]
    assert _work(steps.scheduler.plan()) == [("a", 8, 4, True)]


def test_sequence_that_needs_its_ids_is_not_planned_before_they_are_known() -> None:
    steps = Steps()
    steps.add("free", (1, 2, 3))
    steps.add("bound", (4, 5, 6), needs_its_ids=True)
    first, second = steps.scheduler.plan(), steps.scheduler.plan()
    assert [s.request_id for s in second.sequences] == ["free"]
    steps.settle(first, 8, 9)
    steps.settle(second, 8)
    third = steps.scheduler.plan()
    assert [(s.request_id, s.token_ids, s.feeds_last) for s in third.sequences] == [
        ("free", (8,), False),
        ("bound", (9,), False),
    ]


def test_token_after_a_stop_found_late_is_dropped() -> None:
    steps = Steps()
    steps.add("a", (1, 2, 3))
    first, second = steps.scheduler.plan(), steps.scheduler.plan()
    (event,) = steps.settle(first, STOP_ID)
    assert (event.token_id, event.finish_reason) == (STOP_ID, FinishReason.STOP)
    assert steps.pool.num_used == 0
    assert steps.settle(second, 7) == []


def test_block_that_a_step_for_nothing_filled_is_never_found() -> None:
    """The stop id is the fourth token of a block of four; its KV is written by the step that came too late."""
    steps = Steps()
    steps.add("a", (1, 2, 3))
    first, second = steps.scheduler.plan(), steps.scheduler.plan()
    steps.settle(first, STOP_ID)
    steps.settle(second, 7)
    assert steps.pool.match((1, 2, 3, STOP_ID), 4).block_ids == ()


def test_block_is_not_found_while_the_step_that_computes_it_is_under_way() -> None:
    steps = Steps()
    steps.add("a", _numbers(0, 7))
    steps.scheduler.plan()
    steps.add("b", _numbers(0, 7))
    assert _work(steps.scheduler.plan()) == [("a", 7, 1, True), ("b", 0, 7, True)]


def test_preempted_sequence_keeps_the_token_that_was_under_way_and_publishes_nothing() -> None:
    steps = Steps(num_blocks=3, budget=16)
    steps.add("old", _numbers(10, 7), max_length=12)
    new = steps.add("new", (1, 2, 3), max_length=12)
    first = steps.scheduler.plan()
    steps.settle(first, 5, 6)
    second = steps.scheduler.plan()  # old fills its second block, new its first
    third = steps.scheduler.plan()  # old needs one more
    assert [s.request_id for s in third.sequences] == ["old"]
    assert [(e.request_id, e.token_id) for e in steps.settle(second, 8, 9)] == [("old", 8), ("new", 9)]
    assert new.token_ids == [1, 2, 3, 6, 9]
    assert steps.pool.match((1, 2, 3, 6), 4).block_ids == ()
    steps.settle(third, 8)


def test_preempted_sequence_ends_by_a_stop_that_was_under_way() -> None:
    steps = Steps(num_blocks=3, budget=16)
    steps.add("old", _numbers(10, 7), max_length=12)
    steps.add("new", (1, 2, 3), max_length=12)
    steps.settle(steps.scheduler.plan(), 5, 6)
    second, third = steps.scheduler.plan(), steps.scheduler.plan()
    events = steps.settle(second, 8, STOP_ID)
    assert [(e.request_id, e.finish_reason) for e in events] == [("old", None), ("new", FinishReason.STOP)]
    assert steps.scheduler.num_waiting == 0
    steps.settle(third, 8)


def test_slot_is_held_while_a_sequence_runs_and_then_goes_to_another() -> None:
    steps = Steps(max_num_seqs=2)
    steps.add("a", (1, 2))
    steps.add("b", (3, 4))
    steps.add("c", (5, 6))
    plan, _ = steps.step()
    slots = {s.request_id: s.slot for s in plan.sequences}
    assert sorted(slots.values()) == [0, 1]
    plan, _ = steps.step(STOP_ID, 7)
    assert {s.request_id: s.slot for s in plan.sequences} == slots
    plan, _ = steps.step()
    assert [(s.request_id, s.slot) for s in plan.sequences] == [("b", slots["b"]), ("c", slots["a"])]
    assert len({s.run_id for s in plan.sequences}) == 2


# -- who goes first -------------------------------------------------------------------------------------------------


def test_classes_go_in_their_order_and_those_of_one_class_by_arrival() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=8)
    for name in ("batch", "background", "autocomplete", "interactive", "interactive"):
        steps.add(f"{name} {steps.scheduler.num_waiting}", (1, 2), standing=_class(name))
    plan, _ = steps.step()
    assert _order(plan) == ["interactive 3", "interactive 4", "autocomplete 2", "background 1", "batch 0"]


def test_lower_priority_number_goes_first_however_large_they_are() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=8)
    for priority in (10**9, 1000, 0, -5, -(10**9), 999):
        steps.add(str(priority), (1, 2), standing=_class("interactive", priority))
    plan, _ = steps.step()
    assert _order(plan) == [str(-(10**9)), "-5", "0", "999", "1000", str(10**9)]


def test_by_arrival_nothing_else_counts() -> None:
    steps = Steps(policy="fcfs", budget=32, max_num_seqs=8)
    for name in ("batch", "background", "interactive"):
        steps.add(name, (1, 2), standing=_class(name))
    plan, _ = steps.step()
    assert _order(plan) == ["batch", "background", "interactive"]


def test_request_that_waited_long_goes_before_a_better_one_that_just_came() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=8)
    steps.add("batch", (1, 2), standing=_class("batch"), arrived_s=0.0)
    steps.add("soon", (1, 2), arrived_s=60.0)
    steps.add("late", (1, 2), arrived_s=100.0)
    plan, _ = steps.step()
    assert _order(plan) == ["soon", "batch", "late"]


def test_no_priority_makes_a_request_wait_for_more_than_ten_minutes_of_better_ones() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=8)
    steps.add("last", (1, 2), standing=_class("batch", 10**12), arrived_s=0.0)
    steps.add("later", (1, 2), arrived_s=601.0)
    plan, _ = steps.step()
    assert _order(plan) == ["last", "later"]


def test_better_request_takes_the_seat_of_the_last_in_rank() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=2)
    steps.add("background", (1, 2), standing=_class("background"))
    steps.add("batch", (3, 4), standing=_class("batch"))
    steps.step()
    steps.add("chat", (5, 6))
    assert _order(steps.step()[0]) == ["background", "chat"]
    assert steps.scheduler.counters.num_preemptions == 1
    steps.scheduler.abort("chat")
    plan, _ = steps.step()
    assert [(s.request_id, s.sample_position) for s in plan.sequences] == [("background", 4), ("batch", 3)]


def test_better_request_takes_the_blocks_of_the_last_in_rank() -> None:
    steps = Steps(policy="priority", budget=32, num_blocks=4)
    steps.add("batch", _numbers(0, 12), max_length=16, standing=_class("batch"))
    steps.step()
    steps.add("chat", _numbers(50, 7), max_length=16)
    assert _order(steps.step()[0]) == ["chat"]
    assert steps.scheduler.num_waiting == 1


def test_equal_request_takes_nobodys_place() -> None:
    steps = Steps(policy="priority", budget=32, max_num_seqs=1)
    steps.add("first", (1, 2), arrived_s=0.0)
    steps.step()
    steps.add("second", (5, 6), arrived_s=1.0)
    assert _order(steps.step()[0]) == ["first"]
    assert steps.scheduler.counters.num_preemptions == 0


def test_sequence_whose_seat_was_taken_is_not_back_before_its_last_id_is_known() -> None:
    """The chat is so short that both would fit; what the batch request sampled is still under way."""
    steps = Steps(policy="priority", budget=32, max_num_seqs=2)
    steps.add("other", (7, 8))
    batch = steps.add("batch", (1, 2), standing=_class("batch"))
    first = steps.scheduler.plan()
    steps.add("chat", (5, 6))
    second = steps.scheduler.plan()
    assert _order(second) == ["other", "chat"]
    steps.scheduler.abort("chat")
    assert _order(steps.scheduler.plan()) == ["other"]
    steps.settle(first, 20, 21)
    assert batch.token_ids == [1, 2, 21]


def test_new_head_of_the_line_is_looked_at_though_the_one_before_lacked_blocks() -> None:
    steps = Steps(policy="priority", budget=32, num_blocks=4)
    steps.add("runs", _numbers(0, 7), max_length=12)
    steps.add("large", _numbers(20, 11), max_length=16, standing=_class("background"))
    steps.step()
    steps.add("small", (1, 2), max_length=4)
    assert _order(steps.step()[0]) == ["runs", "small"]


def test_preempted_sequence_comes_back_with_room_for_twice_the_look_ahead() -> None:
    steps = Steps(num_blocks=8, budget=64, lookahead=4)
    steps.add("old", _numbers(0, 11), max_length=32)
    new = steps.add("new", _numbers(50, 11), max_length=32)
    while not new.num_preemptions:
        steps.step()
    assert steps.scheduler._blocks_ahead(new) == steps.pool.blocks_for(new.length + 8)


def test_background_request_leaves_the_cache_of_a_chat_alone_while_another_victim_exists() -> None:
    steps = Steps(num_blocks=6, budget=64)
    steps.add("chat", _numbers(0, 8), max_length=16)
    steps.step(STOP_ID)
    for first in (100, 200, 300):
        steps.add(f"title {first}", _numbers(first, 8), max_length=16, standing=_class("background"))
        steps.step(STOP_ID)
    assert len(steps.pool.match(_numbers(0, 8), 8).block_ids) == 2
    assert len(steps.pool.match(_numbers(100, 8), 8).block_ids) == 0


def test_who_begins_like_one_that_is_being_computed_waits_and_takes_it_from_the_cache() -> None:
    steps = Steps(num_blocks=32, budget=64, worth_waiting=16)
    shared = tuple(range(16))
    for name, own in (("a", (50,)), ("b", (60, 61)), ("c", (70, 71, 72))):
        steps.add(name, shared + own)
    first, _ = steps.step()
    assert _work(first) == [("a", 0, 17, True)]
    second, _ = steps.step()
    assert _work(second) == [("a", 17, 1, True), ("b", 16, 2, True), ("c", 16, 3, True)]


def test_who_shares_little_or_less_than_half_with_one_that_is_being_computed_does_not_wait() -> None:
    for worth_waiting, num_own in ((5, 1), (4, 5)):
        steps = Steps(num_blocks=32, budget=64, worth_waiting=worth_waiting)
        steps.add("a", (1, 2, 3, 4, 5))
        steps.add("b", (1, 2, 3, 4, *_numbers(10, num_own)))
        plan, _ = steps.step()
        assert _work(plan) == [("a", 0, 5, True), ("b", 0, 4 + num_own, True)]


def test_who_waits_for_one_that_leaves_computes_the_rest_itself() -> None:
    steps = Steps(num_blocks=32, budget=8, worth_waiting=8)
    steps.add("a", _numbers(0, 16))
    steps.add("b", (*_numbers(0, 16), 20))
    plan, _ = steps.step()
    assert _order(plan) == ["a"]
    steps.scheduler.abort("a")
    plan, _ = steps.step()
    assert _work(plan)[0][:2] == ("b", 4)  # what was finished is in the cache
