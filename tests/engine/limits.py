"""A loaded model under other limits than it was loaded with."""

from dataclasses import replace

from engine.plan import BatchPlan, Grammar, PendingStep
from engine.runner import ModelRunner
from engine.types import DeviceMemory, GrammarSpec


class Limits:
    """One loaded model under smaller limits, which the engine reads from `info` and `memory`."""

    def __init__(
        self, runner: ModelRunner, *, num_blocks: int | None = None, steps_ahead: int = 0, **info: int
    ) -> None:
        assert num_blocks is None or num_blocks <= runner.memory.num_blocks
        self.info = replace(runner.info, **info)
        self.memory = replace(runner.memory, num_blocks=num_blocks or runner.memory.num_blocks)
        self.steps_ahead = steps_ahead
        self._runner = runner

    def submit(self, plan: BatchPlan) -> PendingStep:
        return self._runner.submit(plan)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        return self._runner.compile_grammar(spec)

    def device_memory(self) -> DeviceMemory | None:
        return self._runner.device_memory()
