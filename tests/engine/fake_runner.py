"""A runner without a model that makes paging mistakes visible, and the answer that it must give.

For each fed token it stores, at (block, slot), a number that stands for the whole history up to that token, as real KV
does; a sampled id hashes every number that it reads back through the block table. A wrong table, a block that was
shared too early, overwritten or never computed changes the id. `solo_answer` says the right ids without any block.

Of a group of layers with a window it reads what the window covers, and nothing before it.

A step is executed when it is waited for, so that with `steps_ahead=1` the next plan is made from what is known before.

The `load_*` functions are what a spawned child loads; each has its own way to go wrong.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import BadCheckpoint, BadRequest, OutOfMemory
from engine.layout import Window
from engine.plan import BatchPlan, ScheduledSequence, StepOutput
from engine.types import GrammarSpec, MemoryReport, ModelInfo, SamplingParams

VOCAB_SIZE = 50
EOS = 1
UNLUCKY = 13  # a prompt that begins with this token breaks the faulty runner
NO_MEMORY = 14  # and with this one makes it refuse the step

OnProgress = Callable[[str, float], None]


class FakeRunner:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        windows: tuple[Window, ...] = (None,),
        max_model_len: int = 128,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        step_s: float = 0.0,
        steps_ahead: int = 0,
    ) -> None:
        self.steps_ahead = steps_ahead
        self.info = ModelInfo(
            architecture="fake",
            quantization=None,
            dtype="none",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            num_layers=1,
            max_model_len=max_model_len,
            context_length=max_model_len,
            eos_token_ids=(EOS,),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.memory = MemoryReport(
            total_bytes=0,
            free_bytes_at_start=0,
            weights_bytes=0,
            workspace_bytes=0,
            kv_bytes=num_blocks,
            reserve_bytes=0,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            step_tokens=max_num_batched_tokens,
        )
        self.most_blocks, self.num_taken_by_others = num_blocks, 0
        self.plans: list[BatchPlan] = []
        self.gate = threading.Event()
        self._step_s = step_s
        self._num_executed = 0
        self._kvs: dict[tuple[int, int], int] = {}
        self._last_ids: dict[int, int] = {}

    def device_memory(self) -> None:
        return None

    def compile_grammar(self, spec: GrammarSpec) -> "FakeGrammar":
        """The text is how many tokens the grammar takes; "bad" is refused, "wait" is compiled when `gate` is set."""
        if spec.text == "bad":
            raise BadRequest("This grammar is bad.")
        if spec.text == "wait":
            assert self.gate.wait(timeout=30)
        return FakeGrammar(1 if spec.text == "wait" else int(spec.text))

    def blocks_within(self, kv_bytes: int) -> int:
        """A block is a byte here."""
        return min(kv_bytes, self.most_blocks)

    def resize_kv(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        assert self._num_executed == len(self.plans), "a step is under way"
        assert not set(moves) & set(moves.values()) and all(target < num_blocks for target in moves.values())
        if num_blocks > self.most_blocks - self.num_taken_by_others:
            raise OutOfMemory("Others have the memory now.")
        kept = {place: kv for place, kv in self._kvs.items() if place[0] not in {*moves, *moves.values()}}
        moved = {(moves[block], at): kv for (block, at), kv in self._kvs.items() if block in moves}
        self._kvs = {place: kv for place, kv in (kept | moved).items() if place[0] < num_blocks}
        self.memory = replace(self.memory, num_blocks=num_blocks, kv_bytes=num_blocks)

    def submit(self, plan: BatchPlan) -> "_FakeStep":
        assert len(self.plans) - self._num_executed <= self.steps_ahead, "more steps under way than the runner takes"
        self._check(plan)
        self.plans.append(plan)
        return _FakeStep(self, plan)

    def execute(self, plan: BatchPlan) -> StepOutput:
        assert plan is self.plans[self._num_executed], "steps are executed in order"
        self._num_executed += 1
        time.sleep(self._step_s)
        for sequence in plan.sequences:  # all writes of a step come before its reads, as on a device
            self._write(sequence)
        sampled = {sequence.slot: self._sample(sequence) for sequence in plan.sequences if sequence.samples}
        self._last_ids |= sampled
        return StepOutput(tuple(sampled.values()))

    def _check(self, plan: BatchPlan) -> None:
        assert plan.sequences, "an empty plan was run"
        assert plan.num_tokens <= self.info.max_num_batched_tokens
        assert len(plan.sequences) <= self.info.max_num_seqs
        assert len({sequence.request_id for sequence in plan.sequences}) == len(plan.sequences)
        assert len({sequence.slot for sequence in plan.sequences}) == len(plan.sequences)
        for sequence in plan.sequences:
            assert sequence.num_tokens >= 1
            assert 0 <= sequence.slot < self.info.max_num_seqs
            assert not sequence.feeds_last or (sequence.token_ids == (0,) and self.steps_ahead)
            end = sequence.start + sequence.num_tokens
            for group, table in enumerate(sequence.block_tables):
                assert len(table) == -(-end // self.memory.block_size)
                first = _first_seen(self.memory.windows[group], sequence.start) // self.memory.block_size
                assert max(table[first:]) < self.memory.num_blocks, "a block that does not exist"

    def _write(self, sequence: ScheduledSequence) -> None:
        token_ids = (self._last_ids[sequence.slot],) if sequence.feeds_last else sequence.token_ids
        reads = self._reads(sequence)
        for position, token_id in enumerate(token_ids, sequence.start):
            kv = _kv(reads, self.memory.windows, position, token_id)
            for table in sequence.block_tables:
                self._kvs[self._place(table, position)] = kv

    def _sample(self, sequence: ScheduledSequence) -> int:
        last = sequence.start + sequence.num_tokens - 1
        reads = self._reads(sequence)
        return _pick(reads, self.memory.windows, last, sequence.sample_position, sequence.seed, sequence.params)

    def _reads(self, sequence: ScheduledSequence) -> "_Read":
        return lambda group, position: self._kvs[self._place(sequence.block_tables[group], position)]

    def _place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.memory.block_size)
        return table[block], offset


class FakeGrammar:
    """Complete after so many tokens; breaks on the token UNLUCKY."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def accept(self, token_id: int) -> None:
        if token_id == UNLUCKY:
            raise BadRequest("This grammar takes no such token.")
        self._left -= 1


class _FakeStep:
    def __init__(self, runner: FakeRunner, plan: BatchPlan) -> None:
        self._runner, self._plan = runner, plan

    def wait(self) -> StepOutput:
        return self._runner.execute(self._plan)


_Read = Callable[[int, int], int]  # of a group, at a position


def solo_answer(
    prompt: tuple[int, ...],
    num_tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    windows: tuple[Window, ...] = (None,),
) -> list[int]:
    """The ids that a prompt alone must get, up to and with EOS."""
    params = SamplingParams(temperature=temperature)
    kvs: list[int] = []
    answer: list[int] = []

    def read(group: int, position: int) -> int:
        return kvs[position]

    for token_id in prompt:
        kvs.append(_kv(read, windows, len(kvs), token_id))
    while len(answer) < num_tokens and (ignore_eos or EOS not in answer):
        answer.append(_pick(read, windows, len(kvs) - 1, len(kvs), seed, params))
        kvs.append(_kv(read, windows, len(kvs), answer[-1]))
    return answer


def _first_seen(window: Window, position: int) -> int:
    return 0 if window is None else max(position - window + 1, 0)


def _kv(read: _Read, windows: tuple[Window, ...], position: int, token_id: int) -> int:
    """Of a group without a window the number before stands for all of them."""
    before: list[int] = []
    for group, window in enumerate(windows):
        if window is None:
            before.append(read(group, position - 1) if position else 0)
        else:
            before += (read(group, earlier) for earlier in range(_first_seen(window, position), position))
    return hash((*before, token_id))


def _pick(read: _Read, windows: tuple[Window, ...], last: int, position: int, seed: int, params: SamplingParams) -> int:
    """By all that the token at `last` sees."""
    seen = [
        read(group, earlier)
        for group, window in enumerate(windows)
        for earlier in range(_first_seen(window, last), last + 1)
    ]
    return hash((*seen, position, seed if params.temperature else 0)) % VOCAB_SIZE


def load_fake(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    on_progress("reading weights", 0.0)
    on_progress("measuring memory", 1.0)
    return FakeRunner(max_model_len=4096, num_blocks=2048, max_num_seqs=config.max_num_seqs)


def load_slow(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    return FakeRunner(max_model_len=4096, num_blocks=2048, max_num_seqs=config.max_num_seqs, step_s=0.01)


def load_refusing(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    raise BadCheckpoint(f"{config.model} has no config.json.")


def load_broken(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    raise ZeroDivisionError("a mistake of ours")


def load_endless(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    on_progress("reading weights", 0.5)
    time.sleep(3600)
    raise AssertionError("nobody ended this load")


def load_falling_silent(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    for number in range(35):
        time.sleep(0.1)
        on_progress(f"layer {number}", number / 35)
    return load_endless(config, lambda stage, fraction: None)


def load_faulty(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    return _FaultyRunner(max_model_len=4096, num_blocks=2048, max_num_seqs=config.max_num_seqs, step_s=0.01)


class _FaultyRunner(FakeRunner):
    def submit(self, plan: BatchPlan) -> _FakeStep:
        first = {sequence.token_ids[0] for sequence in plan.sequences if sequence.start == 0}
        if UNLUCKY in first:
            raise ZeroDivisionError("a mistake of ours")
        if NO_MEMORY in first:
            raise OutOfMemory("This step needs more workspace than there is.")
        return super().submit(plan)


def load_hanging(config: EngineConfig, on_progress: OnProgress) -> FakeRunner:
    return _HangingRunner(max_model_len=4096, num_blocks=2048, max_num_seqs=config.max_num_seqs)


class _HangingRunner(FakeRunner):
    def submit(self, plan: BatchPlan) -> _FakeStep:
        if UNLUCKY in {sequence.token_ids[0] for sequence in plan.sequences}:
            _hang()
        return super().submit(plan)


def _hang() -> None:
    while True:
        time.sleep(3600)
