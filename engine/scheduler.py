"""Who computes how many tokens in the next step, in which blocks; and what the sampled ids then mean.

No prefill and no decode phase: each sequence has `num_computed_tokens`, which catches up with its length. Sequences
that need one token come first, then prefill chunks, then new admissions, all under one token budget.

There is one order, the ranks. Under `fcfs` it is that of arrival. Under `priority` a class or a priority further down
is worth an arrival some time later; so whoever waits moves up beside those that come, and nobody waits for ever. When
blocks run out the last in rank gives its up and computes them again later; so it does for somebody before it who waits.

A plan may be made while the step before is under way: its tokens count as computed, and the id that it samples is fed
by the device itself. That this is safe rests on the device executing steps in order. A sequence that turns out to have
ended is in the next plan for nothing: its blocks are free at once, since whoever gets them writes later, and what that
step wrote is never published.

Blocks that a window has passed by are free when the step is settled that took it past them, after they were published.
"""

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.blocks import NO_PREFIX, BlockPool, PrefixMatch
from engine.errors import EngineError
from engine.layout import CacheLayout, num_passed
from engine.pace import PrefillPace
from engine.plan import BatchPlan, ScheduledSequence, StepOutput
from engine.sequence import Sequence, SequenceStatus
from engine.types import FinishReason, RequestClass, Standing, TokenEvent, TokenLogprobs

# Admission keeps this many tokens of room for each sequence to go on. Without it a full pool would admit a sequence
# whose neighbours take its blocks a few steps later; with the whole max_tokens, long limits would run alone. It doubles
# with each preemption, so that a long answer is preempted a few times and not every 128 tokens.
_LOOKAHEAD_TOKENS = 128

# A prompt that is followed by others leaves them one part in so many of the budget: the first token of a short
# prompt does not wait for the last token of a long one.
_PARTS_OF_BUDGET = 4

# Who begins like a sequence that is being computed waits for that beginning, a step or two, if it is at least so long
# and half of its prompt.
_WORTH_WAITING_TOKENS = 128

# One class, or one step of priority, is worth an arrival this much later; many are worth less each, and all together no
# more than _MOST_LEVELS of them: so no priority, however large, makes a request wait for ever.
_LEVEL_S = 30.0
_MOST_LEVELS = 20.0
_LEVELS = {request_class: level for level, request_class in enumerate(RequestClass)}


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made. Tokens that are computed again after a preemption count again."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """A plan in the making: who computes how many tokens, in order, and the tokens that are left to give."""

    budget: int
    num_prompt_tokens: int = 0
    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    has_preempted: bool = False


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        target_itl_s: float = 0.05,
        lookahead_tokens: int = _LOOKAHEAD_TOKENS,
        worth_waiting_tokens: int = _WORTH_WAITING_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.layout = CacheLayout(pool.block_size, pool.windows, max_num_batched_tokens)
        self.counters = Counters()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._is_by_priority = policy == "priority"
        self._lookahead_tokens = lookahead_tokens
        self._worth_waiting_tokens = worth_waiting_tokens
        self._clock = clock
        self._pace = PrefillPace(target_itl_s, max_num_batched_tokens)
        self._settled_s = 0.0
        self._num_added = 0
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # this and the next by rank
        self._running: list[Sequence] = []
        self._waits_for_blocks = False  # the head of the line did not fit; look again when blocks come back
        self._free_slots = list(range(max_num_seqs))
        self._last_run_id = 0
        self._has_windows = any(window is not None for window in pool.windows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those that have not ended."""
        return tuple(self._sequences.values())

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the line. Its max_length must fit into the pool."""
        assert sequence.request_id not in self._sequences
        assert self.layout.needed(sequence.max_length) <= self.pool.num_blocks
        self._sequences[sequence.request_id] = sequence
        self._num_added += 1
        later_s = _handicap_s(sequence.standing) if self._is_by_priority else 0.0
        sequence.rank = (sequence.arrived_s + later_s if self._is_by_priority else 0.0, self._num_added)
        self._wait(sequence)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a sequence between two steps, wherever it is; its blocks are free at once. None if there is no such."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        self._end(sequence)
        return _event(sequence, None, FinishReason.ABORT, self._clock())

    def plan(self) -> BatchPlan:
        """Decide the next step and hold the blocks that it writes."""
        draft = _Draft(self._max_num_batched_tokens)
        planned_s = self._clock()
        prefilling = []
        for sequence in tuple(self._running):
            if sequence.num_uncomputed_tokens > 1:
                prefilling.append(sequence)
            else:
                self._extend(sequence, draft)
        if draft.num_tokens:
            coming = len(prefilling) + min(len(self._waiting), self._max_num_seqs - len(self._running))
            draft.budget = min(draft.budget, self._pace.allowance(len(draft.num_tokens), coming))
        for sequence in prefilling:
            is_followed = sequence is not prefilling[-1] or self._may_admit()
            self._extend(sequence, draft, is_followed=is_followed)
        if not draft.has_preempted:
            self._admit(draft)
        scheduled = tuple(_scheduled(sequence, count) for sequence, count in draft.num_tokens.items())
        return BatchPlan(scheduled, planned_s, draft.num_prompt_tokens)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Make the pool smaller or larger, between two steps, none of which is under way. Returns where blocks go.

        Every sequence must fit, with one token more; those for whom there is no room now are computed again later.
        """
        assert all(not sequence.num_pending for sequence in self._running), "a step is under way"
        draft = _Draft(budget=0)
        while self.pool.missing_below(num_blocks):
            self._preempt_last(draft)
        moves = self.pool.resize(num_blocks)
        for sequence in self._running:
            sequence.block_tables = tuple(
                tuple(moves.get(block_id, block_id) for block_id in table) for table in sequence.block_tables
            )
        for sequence in self._sequences.values():
            sequence.fit(self.layout.longest(num_blocks, sequence.asked_length))
        self._waits_for_blocks = False
        return moves

    def settle(self, plan: BatchPlan, output: StepOutput) -> list[TokenEvent]:
        """Take in what the step computed.

        Plans are settled in the order in which they were made. What was computed for a sequence that has ended
        meanwhile is dropped; one that was preempted keeps its token, though not its KV.
        """
        now_s, num_before = self._clock(), len(self._sequences)
        # It began when it was planned, or when the one before it was done.
        num_decoding = plan.num_tokens - plan.num_prompt_tokens
        self._pace.observe(now_s - max(plan.planned_s, self._settled_s), num_decoding, plan.num_prompt_tokens)
        self._settled_s = now_s
        sampled = iter(enumerate(output.token_ids))
        events = []
        for place, scheduled in enumerate(plan.sequences):
            sample, token_id = next(sampled) if scheduled.samples else (0, None)
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is None or sequence.run_id != scheduled.run_id:
                continue
            self._advance(sequence, scheduled)
            if place in output.prompt_logprobs:
                sequence.prompt_logprobs[scheduled.start :] = output.prompt_logprobs[place]
            if token_id is not None:
                event = self._append(sequence, token_id, output.logprobs.get(sample), now_s)
                events.append(event._replace(embedding=output.embeddings[sample]) if sequence.params.embeds else event)
            elif sequence.params.reports_progress and len(sequence.token_ids) == sequence.num_prompt_tokens:
                num_computed = scheduled.start + scheduled.num_tokens
                events.append(_event(sequence, None, None, now_s)._replace(num_computed_tokens=num_computed))
        assert next(sampled, None) is None, "more ids than sequences that sample"
        if len(self._sequences) < num_before:
            self._running = [sequence for sequence in self._running if sequence.status is SequenceStatus.RUNNING]
        return events

    def check(self) -> None:
        """Assert that sequences, lines and blocks agree. For tests."""
        assert sorted(self._sequences) == sorted(s.request_id for s in (*self._running, *self._waiting))
        assert all(line == sorted(line, key=_rank) for line in (self._running, self._waiting)), "out of order"
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not any(s.block_tables) for s in self._waiting)
        assert all(s.num_uncomputed_tokens >= 1 for s in self._sequences.values()), "nothing left to compute"
        assert all(s.length <= s.max_length for s in self._sequences.values()), "sampled past the end"
        slots = [*self._free_slots, *(s.slot for s in self._running)]
        assert sorted(slots) == list(range(self._max_num_seqs)), "a slot that nobody or more than one has"
        held = [self.layout.held(sequence.block_tables, sequence.num_settled_tokens) for sequence in self._running]
        for sequence, block_ids in zip(self._running, held, strict=True):
            assert len(set(map(len, sequence.block_tables))) == 1, "groups whose tables differ in length"
            assert len(block_ids) <= self.layout.needed(sequence.max_length), "more than it was said to need at most"
        self.pool.check(held)

    # -- planning ---------------------------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, draft: _Draft, *, is_followed: bool = False) -> None:
        """Plan the next tokens of a running sequence, unless the budget is spent or an older one took its blocks."""
        allowed = draft.budget - draft.budget // _PARTS_OF_BUDGET if is_followed else draft.budget
        start = sequence.num_computed_tokens
        end = min(sequence.length, start + allowed)
        if end == start or sequence.status is not SequenceStatus.RUNNING or not sequence.can_go_on:
            return
        missing = self.pool.blocks_for(end) - sequence.num_places
        if missing <= 0 or self._hold_blocks(sequence, missing, draft):
            draft.num_tokens[sequence] = end - start
            draft.budget -= end - start
            draft.num_prompt_tokens += end - start if end - start > 1 else 0

    def _hold_blocks(self, sequence: Sequence, missing: int, draft: _Draft) -> bool:
        """More blocks for each group, at the cost of the last in rank; False if that came to be the sequence itself."""
        tables = sequence.block_tables
        while (block_ids := self.pool.allocate(missing * len(tables))) is None:
            if self._preempt_last(draft) is sequence:
                return False
        sequence.block_tables = tuple(
            table + block_ids[group * missing : (group + 1) * missing] for group, table in enumerate(tables)
        )
        return True

    def _preempt_last(self, draft: _Draft) -> Sequence:
        """Back into the line with all tokens and no blocks; what it already had in this plan is undone."""
        sequence = self._running.pop()
        num_tokens = draft.num_tokens.pop(sequence, 0)
        draft.budget += num_tokens
        draft.num_prompt_tokens -= num_tokens if num_tokens > 1 else 0
        draft.has_preempted = True
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._wait(sequence)
        self.counters.num_preemptions += 1
        return sequence

    def _wait(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_rank)
        if sequence is self._waiting[0]:
            self._waits_for_blocks = False

    def _admit(self, draft: _Draft) -> None:
        """Start waiting sequences, in order, while budget, seats and the blocks that all will soon need allow it."""
        if not self._may_admit():
            return
        promised = sum(map(self._blocks_ahead, self._running))
        while draft.budget and self._may_admit():
            sequence = self._waiting[0]
            match = self.pool.match(sequence.token_ids, sequence.num_cacheable_tokens)
            if any(self._computes_most_of(other, sequence, match) for other in self._running):
                return
            needed = self._blocks_after(sequence, match)
            if len(self._running) == self._max_num_seqs or promised + needed > self.pool.num_free - match.num_idle:
                if not self._outranks_the_last():
                    self._waits_for_blocks = True
                    return
                promised -= self._blocks_ahead(self._running[-1])
                self._preempt_last(draft)
                continue
            self._start(self._waiting.pop(0), match)
            self._extend(sequence, draft, is_followed=self._may_admit())
            promised += self._blocks_ahead(sequence)

    def _computes_most_of(self, other: Sequence, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether a running sequence is computing a good part of a waiting one's prompt: requests that begin alike and
        come at once would else all compute their beginning.
        """
        size, start = self.pool.block_size, len(match.tables[0]) * self.pool.block_size
        if other.prefix != match.prefix or other.num_published * size != start or not self.pool.enable_prefix_caching:
            return False
        theirs, ours = other.token_ids, sequence.token_ids
        end = start
        most = min(len(theirs), sequence.num_cacheable_tokens)
        while end + size <= most and theirs[end : end + size] == ours[end : end + size]:
            end += size
        return end - start >= self._worth_waiting_tokens and 2 * (end - start) >= len(ours) - start

    def _may_admit(self) -> bool:
        """Somebody waits whose last id is known, has a seat or can take one, and was not found to lack blocks."""
        if not self._waiting or self._waits_for_blocks or self._waiting[0].num_pending:
            return False
        return len(self._running) < self._max_num_seqs or self._outranks_the_last()

    def _outranks_the_last(self) -> bool:
        """The head of the line goes before somebody who runs."""
        return bool(self._running) and self._waiting[0].rank < self._running[-1].rank

    def _blocks_ahead(self, sequence: Sequence) -> int:
        """Blocks that a sequence does not hold yet and will need for its tokens and the look-ahead."""
        num_settled, num_uncomputed = sequence.num_settled_tokens, sequence.num_uncomputed_tokens
        return self._blocks_to_come(sequence, sequence.num_places, num_settled, num_uncomputed)

    def _blocks_after(self, sequence: Sequence, match: PrefixMatch) -> int:
        """The same of one that waits, and would begin with what was found."""
        num_found = len(match.tables[0])
        num_tokens = num_found * self.pool.block_size
        return self._blocks_to_come(sequence, num_found, num_tokens, sequence.length - num_tokens)

    def _blocks_to_come(self, sequence: Sequence, num_places: int, num_settled: int, num_uncomputed: int) -> int:
        lookahead = self._lookahead_tokens << sequence.num_preemptions
        num_tokens = min(sequence.length + lookahead, sequence.max_length)
        return self.layout.to_come(num_tokens, num_uncomputed, num_places, num_settled)

    def _start(self, sequence: Sequence, match: PrefixMatch) -> None:
        assert not sequence.num_pending, "a step with this sequence is under way"
        self.pool.share(match.block_ids)
        sequence.block_tables = match.tables
        sequence.prefix = match.prefix
        sequence.num_published = len(match.tables[0])
        sequence.num_computed_tokens = sequence.num_settled_tokens = len(match.tables[0]) * self.pool.block_size
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self._last_run_id = sequence.run_id = self._last_run_id + 1
        insort(self._running, sequence, key=_rank)
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.counters.prefix_cache_queries += sequence.num_prompt_tokens
            self.counters.prefix_cache_hits += sequence.num_cached_tokens

    # -- settling ---------------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, scheduled: ScheduledSequence) -> None:
        """The KV of the planned tokens is final now: count it, let blocks that became full be found, and give up those
        that the next token sees nothing of.

        Before the token that the step sampled is appended, all that it fed is in token_ids.
        """
        start, size = scheduled.start, self.pool.block_size
        end = start + len(scheduled.token_ids)
        if start < sequence.num_prompt_tokens:
            self.counters.prompt_tokens += min(end, sequence.num_prompt_tokens) - start
        if sequence.status is not SequenceStatus.RUNNING:
            return
        if end // size > sequence.num_published:
            self._publish(sequence, end // size)
        if self._has_windows:
            self._slide(sequence, end)
        sequence.num_settled_tokens = end

    def _publish(self, sequence: Sequence, num_full: int) -> None:
        size = self.pool.block_size
        for index in range(sequence.num_published, num_full):
            block_tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            column = [table[index] for table in sequence.block_tables]
            sequence.prefix = self.pool.publish(column, sequence.prefix, block_tokens)
            sequence.num_published = index + 1

    def _slide(self, sequence: Sequence, num_tokens: int) -> None:
        """Give up the blocks that the windows pass by when so many tokens are settled. They can still be found, and go
        out before other cached ones: only who begins alike and goes on otherwise wants them.
        """
        size = self.pool.block_size
        for window, table in zip(self.pool.windows, sequence.block_tables, strict=True):
            first = num_passed(window, sequence.num_settled_tokens, size)
            last = num_passed(window, num_tokens, size)
            if last > first:
                self.pool.free(table[first:last], keep=False)
                if last > first + 1:  # more than the next tokens take again
                    self._waits_for_blocks = False

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now_s: float) -> TokenEvent:
        sequence.token_ids.append(token_id)
        sequence.num_pending -= 1
        self.counters.generation_tokens += 1
        prompt_logprobs = None
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            if sequence.params.prompt_logprobs is not None:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
        try:
            reason = _ending(sequence, token_id)
        except EngineError as error:
            self._end(sequence)
            return _event(sequence, None, FinishReason.ERROR, now_s)._replace(error=error)
        if reason is not None:
            self._end(sequence)
        event = _event(sequence, token_id, reason, now_s)
        if logprobs is None and prompt_logprobs is None:
            return event
        return event._replace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
        else:  # also a preempted one, by an id that was under way
            self._waiting.remove(sequence)
            self._waits_for_blocks = False
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request_id]

    def _leave(self, sequence: Sequence) -> None:
        """Give up slot and blocks."""
        self._free_slots.append(sequence.slot)
        keep = sequence.standing.request_class is RequestClass.INTERACTIVE
        self.pool.free(self.layout.held(sequence.block_tables, sequence.num_settled_tokens), keep=keep)
        sequence.block_tables = ()
        sequence.prefix = NO_PREFIX
        sequence.num_published = sequence.num_computed_tokens = sequence.num_settled_tokens = 0
        self._waits_for_blocks = False


def _ending(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Why the sequence ends with its newest token, if it does. Raises EngineError if its grammar cannot go on."""
    if token_id in sequence.stop_token_ids:
        return FinishReason.STOP
    if sequence.grammar is not None:
        sequence.grammar.accept(token_id)
        if sequence.grammar.is_complete:
            return FinishReason.GRAMMAR
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_length else None


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _handicap_s(standing: Standing) -> float:
    """How much later a request might have come for the same place; negative for one that goes before others."""
    level = _LEVELS[standing.request_class] + standing.priority
    return _LEVEL_S * level / (1.0 + abs(level) / _MOST_LEVELS)


def _scheduled(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """The sequence's part of the plan, which counts as computed from now on."""
    start, length, is_pending = sequence.num_computed_tokens, sequence.length, sequence.num_pending > 0
    end = sequence.num_computed_tokens = start + num_tokens
    if end == length:
        sequence.num_pending += 1
    return ScheduledSequence(
        sequence.request_id,
        sequence.slot,
        sequence.run_id,
        (0,) if is_pending else tuple(sequence.token_ids[start:end]),
        is_pending,
        start,
        sequence.block_tables,
        end == length,
        length,
        sequence.params,
        sequence.seed,
        sequence.num_prompt_tokens,
        sequence.token_ids,
        sequence.grammar,
    )


def _event(sequence: Sequence, token_id: int | None, reason: FinishReason | None, now_s: float) -> TokenEvent:
    return TokenEvent(
        sequence.request_id,
        token_id,
        reason,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        None if reason is None else sequence.times(now_s),
    )
