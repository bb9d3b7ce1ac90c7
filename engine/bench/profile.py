"""Where the time of a decode step goes, kernel by kernel: torch's profiler over some steps of a full batch."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
from torch._C._autograd import DeviceType

from engine.bench.load import Prompts, submit
from engine.config import EngineConfig
from engine.engine import Engine, Runner

_BATCHES = (1, 8, 32, 64)
_STEPS = 8
_SHOWN = 14


def profile(runner: Runner, config: EngineConfig) -> dict[str, Any]:
    """Batch -> kernel -> microseconds a step; `busy` is the sum, `wall` what a step takes from end to end."""
    return {f"batch{batch}": _profile(Engine(runner, config), batch) for batch in _BATCHES}


def _profile(engine: Engine, batch: int) -> dict[str, float]:
    prompts = Prompts(engine.info.vocab_size)
    submit(engine, prompts, prompts.several(batch, 128), 3 * _STEPS)
    while engine.stats().generation_tokens < batch * _STEPS:  # all prompts are in
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    return _by_kernel(found)


def _by_kernel(found: torch.profiler.profile) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    first, last = float("inf"), 0.0
    for name, start, length in _kernels(found):
        times[name] += length
        counts[name] += 1
        first, last = min(first, start), max(last, start + length)
    longest = sorted(times.items(), key=itemgetter(1), reverse=True)
    shown = {f"{name[:60]} x{counts[name] / _STEPS:.0f}": us / _STEPS for name, us in longest[:_SHOWN]}
    return {"wall": (last - first) / _STEPS, "busy": sum(times.values()) / _STEPS, **shown}


def _kernels(found: torch.profiler.profile) -> Iterator[tuple[str, float, float]]:
    """Name, start and length in microseconds of all that ran on the card."""
    for event in found.events():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA:
            yield event.name, event.time_range.start, event.time_range.elapsed_us()
