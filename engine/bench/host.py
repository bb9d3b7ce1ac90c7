"""Host time of the scheduler alone: an engine over a runner that computes nothing."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.bench.load import PROMPT_TOKENS, Prompts, submit
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.plan import BatchPlan, FinishedStep, Grammar, StepOutput
from engine.types import GrammarSpec, MemoryReport, ModelInfo

_COUNTS = (1, 8, 32, 128, 256)
_VOCAB_SIZE = 1000


class _NullRunner:
    """Computes nothing: every sequence gets token 0."""

    info = ModelInfo(
        architecture="none",
        quantization=None,
        dtype="none",
        device="none",
        vocab_size=_VOCAB_SIZE,
        num_layers=0,
        max_model_len=8192,
        context_length=8192,
        eos_token_ids=(),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    memory = MemoryReport(
        total_bytes=0,
        free_bytes_at_start=0,
        weights_bytes=0,
        workspace_bytes=0,
        kv_bytes=0,
        reserve_bytes=0,
        num_blocks=20_000,
        block_size=16,
    )

    steps_ahead = 0

    def device_memory(self) -> None:
        return None

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        raise BadRequest("A runner that computes nothing takes no grammars.")

    def blocks_within(self, kv_bytes: int) -> int:
        return self.memory.num_blocks

    def resize_kv(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        raise BadRequest("A runner that computes nothing has no KV cache.")

    def submit(self, plan: BatchPlan) -> FinishedStep:
        return FinishedStep(StepOutput((0,) * plan.num_sampled))


def host_times() -> dict[str, Any]:
    """Median microseconds that plan and settle take a step, by the number of sequences that decode."""
    return {"host_us": {str(count): statistics.median(_host_us(count)) for count in _COUNTS}}


def long_answers() -> dict[str, Any]:
    """Sixteen answers of 2,000 tokens in a cache with room for five: what is computed again for want of blocks."""
    runner = _NullRunner()
    runner.memory = replace(runner.memory, num_blocks=600)
    engine = Engine(runner, EngineConfig(model="none"))
    requests = Prompts(_VOCAB_SIZE)
    submit(engine, requests, requests.several(16, PROMPT_TOKENS), 2000)
    while engine.has_work:
        engine.step()
    return {"long_answers": {"preemptions": engine.stats().num_preemptions}}


def _host_us(count: int) -> Iterator[float]:
    engine = Engine(_NullRunner(), EngineConfig(model="none", max_num_seqs=256))
    requests = Prompts(_VOCAB_SIZE)
    submit(engine, requests, requests.several(count, PROMPT_TOKENS), 1000)
    while engine.stats().generation_tokens < count * 10:  # all prompts are in
        engine.step()
    for _ in range(500):
        engine.step()
        yield engine.stats().step_host_us
