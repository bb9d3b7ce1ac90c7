"""The engine: token ids in, token ids out. `add`, `abort`, and `step()` = plan -> submit -> settle.

Refuses at `add` what could never be served. Knows no process and no tensor: the runner comes in, so that the same
engine runs in the child, in benches and in tests.
"""

import math
import random
import time
from collections import deque
from typing import Protocol

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import BadRequest, ContextTooLong, TooManyRequests
from engine.plan import BatchPlan, PendingStep
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import EngineStats, MemoryReport, ModelInfo, SamplingParams, TokenEvent

_SEED_BITS = 63  # drawn seeds fit a signed 64-bit tensor


class Runner(Protocol):
    """What executes plans: `engine.runner.ModelRunner`, or a fake. Its reports size the pool and the limits."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def memory(self) -> MemoryReport: ...
    @property
    def steps_ahead(self) -> int:
        """Steps that may be submitted before the one before them is done: 1, or 0 where nothing is gained by it."""
        ...

    def submit(self, plan: BatchPlan) -> PendingStep:
        """Have the plan computed, after all that was submitted before. Raises EngineError: then it will not be."""
        ...


class Engine:
    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        assert runner.steps_ahead in (0, 1), "a preempted sequence may come back before its last id"
        self._runner = runner
        self._under_way: deque[tuple[BatchPlan, PendingStep]] = deque()
        self._info = runner.info
        self._pool = BlockPool(
            runner.memory.num_blocks,
            runner.memory.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=runner.info.max_num_seqs,
            max_num_batched_tokens=runner.info.max_num_batched_tokens,
        )
        self._max_length = min(runner.info.max_model_len, runner.memory.kv_tokens)
        self._max_in_flight = runner.info.max_num_seqs + config.max_num_queued_seqs
        self._eos_token_ids = frozenset(runner.info.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self._host_us = 0.0
        self._last_step_s = time.monotonic()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def memory(self) -> MemoryReport:
        return self._runner.memory

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_running or self._scheduler.num_waiting or self._under_way)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended yet."""
        return self._scheduler.request_ids

    def add(self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> None:
        """Take a request in. Raises BadRequest, ContextTooLong or TooManyRequests; then nothing was taken in."""
        if request_id in self._scheduler:
            raise BadRequest(f"request id {request_id!r} is in use by a request that has not ended.")
        _check_params(params)
        self._check_prompt(prompt_token_ids)
        max_length = self._max_length_of(len(prompt_token_ids), params.max_tokens)
        self._check_line()
        self._scheduler.add(
            Sequence(
                request_id=request_id,
                token_ids=list(prompt_token_ids),
                num_prompt_tokens=len(prompt_token_ids),
                max_length=max_length,
                params=params,
                stop_token_ids=frozenset(params.stop_token_ids) | self._eos_of(params),
                seed=self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed,
                arrived_s=time.monotonic(),
            )
        )

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and free its blocks. Its last event, or None if it has ended already."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Submit one step, and take in the oldest that is under way, unless more may be submitted before.

        One event for each request that got a token; none while a long prompt is computed. Raises EngineError if the
        step was refused or failed; what is in flight can then only be aborted.
        """
        planning_ns = time.perf_counter_ns()
        plan = self._scheduler.plan()
        planned_ns = time.perf_counter_ns()
        assert plan.sequences or self._under_way or not self.has_work, "requests wait and nothing can run"
        if plan.sequences:
            self._under_way.append((plan, self._runner.submit(plan)))
        self._host_us = (planned_ns - planning_ns) / 1000
        if len(self._under_way) > self._runner.steps_ahead or not plan.sequences:
            return self._settle_oldest()
        return []

    def _settle_oldest(self) -> list[TokenEvent]:
        if not self._under_way:
            return []
        plan, pending = self._under_way.popleft()
        output = pending.wait()
        settling_ns = time.perf_counter_ns()
        events = self._scheduler.settle(plan, output)
        self._host_us += (time.perf_counter_ns() - settling_ns) / 1000
        self._num_steps += 1
        self._last_step_s = time.monotonic()
        return events

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            num_blocks_total=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=self._num_steps,
            last_step_age_s=time.monotonic() - self._last_step_s if self.has_work else 0.0,
            step_host_us=self._host_us,
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

    def _check_line(self) -> None:
        num_in_flight = len(self._scheduler.request_ids)
        if num_in_flight >= self._max_in_flight:
            raise TooManyRequests(
                f"{num_in_flight} requests are running or waiting, and no more than {self._max_in_flight} may "
                "(max_num_seqs + max_num_queued_seqs). Try again when some have ended."
            )

    def _eos_of(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._eos_token_ids


def _check_params(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise BadRequest(f"temperature is {params.temperature}; it must be a number of at least 0.")
    if not 0 < params.top_p <= 1:
        raise BadRequest(f"top_p is {params.top_p}; it must be above 0 and at most 1.")
    if params.top_k < 0:
        raise BadRequest(f"top_k is {params.top_k}; it must be at least 0, where 0 keeps every token.")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest(f"max_tokens is {params.max_tokens}; it must be at least 1.")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise BadRequest(f"seed is {params.seed}; it must fit into 64 bits with a sign.")
