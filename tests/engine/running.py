"""A checkpoint run without an engine: loaded, fed by hand-made plans, compared."""

import json
from itertools import accumulate
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.loading import load_runner
from engine.plan import BatchPlan, ScheduledSequence
from engine.runner import ModelRunner
from engine.types import SamplingParams


def engine_config(folder: Path, device: str = "cpu", **options: object) -> EngineConfig:
    options = {"kv_gb": 0.01, "gpu_memory_utilization": 0.05, "dtype": "float32", **options}
    return EngineConfig(model=str(folder), device=device, **options)


def load(folder: Path, device: str = "cpu", **options: object) -> ModelRunner:
    return load_runner(engine_config(folder, device, **options), lambda stage, fraction: None)


def logits_in_chunks(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits after the last token, the prompt fed in chunks into scattered blocks."""
    tables = scattered(runner, len(tokens))
    for start in range(0, len(tokens), chunk):
        part = tuple(tokens[start : start + chunk])
        is_last = start + chunk >= len(tokens)
        plan = ScheduledSequence(
            "a", 0, 0, part, False, start, tables, is_last, len(tokens), SamplingParams(temperature=0.0), 0
        )
        logits = runner.logits(BatchPlan((plan,)))
    return logits[0].cpu()


def scattered(runner: ModelRunner, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Tables of one sequence, from the last block it takes to the first; those of a window are used again and again."""
    tables = runner.memory.layout.tables_alone(num_tokens)
    last = max(map(max, tables)) + 3
    return tuple(tuple(last - block for block in table) for table in tables)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def plan_of(runner: ModelRunner, parts: list[tuple[list[int], int, int]]) -> BatchPlan:
    """A step of parts (tokens, where they start, the sequence's whole length), each sequence in blocks of its own."""
    layout = runner.memory.layout
    firsts = accumulate((layout.needed(length) for _, _, length in parts), initial=0)
    tables = [
        tuple(tuple(first + block for block in table) for table in layout.tables_alone(length))
        for first, (_, _, length) in zip(firsts, parts, strict=False)
    ]
    greedy = SamplingParams(temperature=0.0)
    return BatchPlan(
        tuple(
            ScheduledSequence(str(i), i, 0, tuple(tokens), False, start, tables[i], True, 0, greedy, 0)
            for i, (tokens, start, _) in enumerate(parts)
            if tokens
        )
    )
