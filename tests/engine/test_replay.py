"""A CPU's decode steps out of kept kernel calls are the steps that they stand for, bit for bit, in every family."""

from pathlib import Path

import pytest
import torch

from engine.forward import forward_batch
from engine.plan import BatchPlan
from engine.runner import ModelRunner
from tests.checkpoints import tiny_checkpoint
from tests.engine.running import load, plan_of, prompt

_PROMPTS = [prompt(20 + 9 * i, seed=i) for i in range(3)]
_STEPS = 4


@pytest.mark.parametrize(
    ("family", "fmt", "is_kept"),
    [
        ("llama", "dense", True),
        ("llama", "gptq", True),
        ("mistral", "awq_gemv_fast", True),
        ("qwen2", "dense", False),  # torch adds its biases
        ("gemma2", "dense", False),
        ("mixtral", "dense", False),  # which experts run depends on the numbers
    ],
)
def test_a_kept_step_has_the_bits_of_a_computed_one(family: str, fmt: str, is_kept: bool, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, fmt)
    runner = load(tmp_path)
    computed = [_computed(runner, plan) for plan in _plans(runner)]
    for layer in runner._cache.layers:  # so that no step finds what another left
        layer.paged.keys.fill_(torch.nan)
        layer.paged.values.fill_(torch.nan)
    replayed = [_replayed(runner, plan) for plan in _plans(runner)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, computed, strict=True))
    assert {rows: step.recording is not None for rows, step in runner._replay._steps.items()} == {
        1: is_kept,  # the step that warms up
        2: is_kept,
        3: is_kept,
    }


def _plans(runner: ModelRunner) -> list[BatchPlan]:
    """All prompts, then steps of one token each, at last without the second sequence."""
    lengths = [len(tokens) + _STEPS for tokens in _PROMPTS]
    plans = [plan_of(runner, [(tokens, 0, n) for tokens, n in zip(_PROMPTS, lengths, strict=True)])]
    for step in range(_STEPS):
        parts = [([3 + step], len(tokens) + step, n) for tokens, n in zip(_PROMPTS, lengths, strict=True)]
        if step >= _STEPS // 2:
            parts[1] = ([], 0, lengths[1])
        plans.append(plan_of(runner, parts))
    return plans


@torch.inference_mode()
def _computed(runner: ModelRunner, plan: BatchPlan) -> torch.Tensor:
    batch = forward_batch(plan, runner.memory.block_size, torch.device("cpu"), runner._last_token_ids)
    return runner._decoder.hidden(batch, runner._cache)[batch.sample_rows]


@torch.inference_mode()
def _replayed(runner: ModelRunner, plan: BatchPlan) -> torch.Tensor:
    return runner._hidden(plan)[0].clone()
