"""The engine: token ids in, token ids out. `add`, `abort`, and `step()` = plan -> submit -> settle.

Refuses at `add` what could never be served. Knows no process and no tensor: the runner comes in, so that the same
engine runs in the child, in benches and in tests.
"""

import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.blocks import BlockPool
from engine.checks import check_params, stop_ids
from engine.compiling import GrammarDesk
from engine.config import EngineConfig
from engine.errors import BadRequest, ContextTooLong, EngineError, TooManyRequests
from engine.plan import BatchPlan, Grammar, PendingStep
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import (
    ORDINARY,
    STEP_TOKEN_BOUNDS,
    DeviceMemory,
    EngineStats,
    FinishReason,
    GrammarSpec,
    MemoryReport,
    ModelInfo,
    RequestClass,
    SamplingParams,
    Standing,
    TokenEvent,
)

_SEED_BITS = 63  # drawn seeds fit a signed 64-bit tensor
_SMALLEST_POOL = 256  # tokens: with less a chat is of no use


class Runner(Protocol):
    """What executes plans: `engine.runner.ModelRunner`, or a fake. Its reports size the pool and the limits."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def memory(self) -> MemoryReport: ...
    def device_memory(self) -> DeviceMemory | None:
        """Of the card now; None on a CPU."""
        ...

    @property
    def steps_ahead(self) -> int:
        """Steps that may be submitted before the one before them is done: 1, or 0 where nothing is gained by it."""
        ...

    def submit(self, plan: BatchPlan) -> PendingStep:
        """Have the plan computed, after all that was submitted before. Raises EngineError: then it will not be."""
        ...

    def blocks_within(self, kv_bytes: int) -> int:
        """Blocks that so much memory for the KV cache holds. Raises BadRequest where it cannot be resized."""
        ...

    def resize_kv(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """Have as many blocks from now on, after the content of some was moved, from id to id; `memory` tells it.

        No step is under way. Raises OutOfMemory where the device has no room for more; then nothing has changed.
        """
        ...

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """In a thread of its own, as it may take a second. Raises BadRequest that says what is wrong with it."""
        ...


class Engine:
    """`on_compiled` is called in another thread when a request's grammar is done: `can_compute` may have changed."""

    def __init__(self, runner: Runner, config: EngineConfig, *, on_compiled: Callable[[], None] = lambda: None) -> None:
        assert runner.steps_ahead in (0, 1), "a preempted sequence may come back before its last id"
        self._runner = runner
        self._under_way: deque[tuple[BatchPlan, PendingStep]] = deque()
        self._info = runner.info
        self._pool = BlockPool(
            runner.memory.num_blocks,
            runner.memory.block_size,
            windows=runner.memory.windows,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=runner.info.max_num_seqs,
            max_num_batched_tokens=runner.info.max_num_batched_tokens,
            policy=config.scheduler_policy,
            target_itl_s=config.target_itl_ms / 1000,
        )
        self._smallest_pool = min(_SMALLEST_POOL, runner.info.max_model_len)  # that it may be resized to
        self._policy = config.scheduler_policy
        self._whole_kv_bytes, self._whole_blocks = runner.memory.kv_bytes, runner.memory.num_blocks
        self._max_length = self._longest(self._whole_blocks)
        self._max_in_flight = runner.info.max_num_seqs + config.max_queued_requests
        self._desk = GrammarDesk(runner.compile_grammar, on_compiled)
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self._step_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._host_us = 0.0
        self._last_step_s = time.monotonic()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def memory(self) -> MemoryReport:
        return self._runner.memory

    def _longest(self, num_blocks: int) -> int:
        """Tokens that a sequence may have in so many blocks."""
        return self.memory.layout.longest(num_blocks, self._info.max_model_len)

    @property
    def has_work(self) -> bool:
        """Some request has not ended, or a step is under way."""
        return bool(self.can_compute or self._desk.request_ids)

    @property
    def can_compute(self) -> bool:
        """`step` has something to do. If not, all requests wait for their grammars, and it would wait with them."""
        return bool(
            self._scheduler.num_running or self._scheduler.num_waiting or self._under_way or self._desk.has_compiled
        )

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended yet."""
        return self._scheduler.request_ids + self._desk.request_ids

    def add(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> list[str]:
        """Take a request in; ends those that it supersedes, and returns their ids.

        Raises BadRequest, ContextTooLong or TooManyRequests; then nothing was taken in, and nothing ended.
        """
        if request_id in self._scheduler or request_id in self._desk.request_ids:
            raise BadRequest(f"request id {request_id!r} is in use by a request that has not ended.")
        check_params(params, self._info)
        self._check_standing(standing)
        self._check_prompt(prompt_token_ids)
        max_length = self._max_length_of(len(prompt_token_ids), params.max_tokens)
        superseded = self._superseded_by(standing)
        self._check_line(len(superseded))
        for other in superseded:
            self.abort(other)
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            max_length=max_length,
            params=params,
            stop_token_ids=stop_ids(params, self._info.eos_token_ids),
            seed=self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed,
            arrived_s=time.monotonic(),
            standing=standing,
            needs_its_ids=params.grammar is not None,
        )
        if params.grammar is None:
            self._scheduler.add(sequence)
        else:
            self._desk.add(sequence, params.grammar)
        return superseded

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and free its blocks. Its last event, or None if it has ended already."""
        if self._desk.abort(request_id):
            return TokenEvent(request_id, None, FinishReason.ABORT)
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Submit one step, and take in the oldest that is under way, unless more may be submitted before.

        One event for each request that got a token; while a long prompt is computed none, or its progress. Raises
        EngineError if the step was refused or failed; what is in flight can then only be aborted.
        """
        refused = self._admit_compiled()
        planning_ns = time.perf_counter_ns()
        plan = self._scheduler.plan()
        planned_ns = time.perf_counter_ns()
        assert plan.sequences or self._under_way or not self.can_compute, "requests wait and nothing can run"
        if plan.sequences:
            self._under_way.append((plan, self._runner.submit(plan)))
        self._host_us = (planned_ns - planning_ns) / 1000
        if len(self._under_way) > self._runner.steps_ahead or not plan.sequences:
            return refused + self._settle_oldest()
        return refused

    def _admit_compiled(self) -> list[TokenEvent]:
        """Let those run whose grammars are done; the last events of those whose grammars are none."""
        if not self.can_compute:
            self._desk.wait()
        events = []
        for sequence, grammar in self._desk.take():
            if isinstance(grammar, EngineError):
                events.append(TokenEvent(sequence.request_id, None, FinishReason.ERROR, error=grammar))
            else:
                sequence.grammar = grammar
                self._scheduler.add(sequence)
                if sequence.params.reports_progress:  # the grammar is one: so much is certain now
                    events.append(TokenEvent(sequence.request_id, None, None, sequence.num_prompt_tokens))
        return events

    def _settle_oldest(self) -> list[TokenEvent]:
        if not self._under_way:
            return []
        plan, pending = self._under_way.popleft()
        output = pending.wait()
        settling_ns = time.perf_counter_ns()
        events = self._scheduler.settle(plan, output)
        self._host_us += (time.perf_counter_ns() - settling_ns) / 1000
        self._num_steps += 1
        self._step_tokens += plan.num_tokens
        self._steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, plan.num_tokens)] += 1
        self._last_step_s = time.monotonic()
        return events

    def resize_kv(self, give_back_bytes: int) -> list[TokenEvent]:
        """Have the KV cache smaller by so much than it was made; 0 makes it whole again. `memory` tells what came out.

        Requests go on: what is cached for nobody is forgotten first, blocks move, and whoever does not fit any more is
        computed again later. Waits for the step under way, and returns its events. Raises BadRequest or OutOfMemory;
        then it is as before.
        """
        num_blocks = self._runner.blocks_within(max(self._whole_kv_bytes - give_back_bytes, 0))
        self._check_all_fit(num_blocks)
        events = []
        while self._under_way:
            events += self._settle_oldest()
        if num_blocks > self._pool.num_blocks:
            self._runner.resize_kv(num_blocks, {})
            self._scheduler.resize(num_blocks)
        elif num_blocks < self._pool.num_blocks:
            self._runner.resize_kv(num_blocks, self._scheduler.resize(num_blocks))
        self._max_length = self._longest(num_blocks)
        for sequence in self._desk.sequences:
            sequence.fit(self._max_length)
        return events

    def _check_all_fit(self, num_blocks: int) -> None:
        lengths = [sequence.length for sequence in (*self._scheduler.sequences, *self._desk.sequences)]
        needed = max(max(lengths, default=0) + 1, self._smallest_pool)
        needed_blocks = self.memory.layout.needed(needed)
        if num_blocks < needed_blocks:
            most_bytes = self._whole_kv_bytes * (1 - needed_blocks / max(self._whole_blocks, 1))
            most_tokens = self.memory.layout.longest(num_blocks, needed)
            raise BadRequest(
                f"The KV cache would hold {most_tokens} tokens; the requests that run or wait need {needed}. "
                f"At most {max(most_bytes, 0) / 1e9:.2f} GB can be given back now."
            )

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting + len(self._desk.request_ids),
            num_blocks_total=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
            num_blocks_cached=self._pool.num_cached,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=self._num_steps,
            last_step_age_s=time.monotonic() - self._last_step_s if self.has_work else 0.0,
            step_host_us=self._host_us,
            steps_by_tokens=tuple(self._steps_by_tokens),
            step_tokens=self._step_tokens,
            device_memory=self._runner.device_memory(),
        )

    def check(self) -> None:
        """Assert the invariants of scheduler and pool. For tests."""
        self._scheduler.check()

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise BadRequest("The prompt has 0 tokens; it needs at least 1.")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._info.vocab_size:
                raise BadRequest(f"Token id {token_id} is outside this model's vocabulary of {self._info.vocab_size}.")

    def _max_length_of(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens at which the sequence must end. The words of the refusal are OpenAI's, which agents match."""
        asked = max_tokens or 0
        wanted = num_prompt_tokens + asked
        if num_prompt_tokens + max(asked, 1) > self._max_length:
            why = "An answer needs room for 1 token more. " if wanted == self._max_length else ""
            raise ContextTooLong(
                f"This model's maximum context length is {self._max_length} tokens. However, you requested {wanted} "
                f"tokens ({num_prompt_tokens} in the messages, {asked} in the completion). "
                f"{why}Please reduce the length of the messages or completion."
            )
        return self._max_length if max_tokens is None else wanted

    def _superseded_by(self, standing: Standing) -> list[str]:
        """Requests that one of such a standing makes useless."""
        if standing.request_class is not RequestClass.AUTOCOMPLETE or not standing.client_id:
            return []
        who = (standing.request_class, standing.client_id)
        return [
            other.request_id
            for other in self._scheduler.sequences + self._desk.sequences
            if (other.standing.request_class, other.standing.client_id) == who
        ]

    def _check_standing(self, standing: Standing) -> None:
        if standing.priority and self._policy != "priority":
            raise BadRequest(
                f"priority is {standing.priority}, and this engine serves by arrival (scheduler_policy is "
                f"{self._policy!r}). Leave it out, or load the model with scheduler_policy 'priority'.",
                "priority",
            )

    def _check_line(self, num_superseded: int) -> None:
        num_in_flight = len(self.request_ids) - num_superseded
        if num_in_flight >= self._max_in_flight:
            raise TooManyRequests(
                f"{num_in_flight} requests are running or waiting, and no more than {self._max_in_flight} may "
                "(max_num_seqs + max_queued_requests). Try again when some have ended."
            )
