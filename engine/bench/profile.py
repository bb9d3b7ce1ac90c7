"""Where the time of a step goes, kernel by kernel: torch's profiler over full batches that decode, and prompts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch._C._autograd import DeviceType

from engine.bench.load import Prompts, run_s, submit
from engine.config import EngineConfig
from engine.engine import Engine, Runner

_BATCHES = (1, 8, 32, 64)
_PROMPTS = (2048, 8192)
_STEPS = 8
_SHOWN = 14


def profile(runner: Runner, config: EngineConfig) -> dict[str, Any]:
    """Work -> kernel -> microseconds a step; `busy` is the sum, `wall` what a step takes from end to end."""
    uncached = replace(config, enable_prefix_caching=False)
    batches = {f"batch{batch}": _decode(Engine(runner, config), batch) for batch in _BATCHES}
    longest = runner.info.max_model_len - 1
    prompts = {f"prompt{n}": _prompts(Engine(runner, uncached), n) for n in _PROMPTS if n <= longest}
    return batches | prompts


def _decode(engine: Engine, batch: int) -> dict[str, float]:
    prompts = Prompts(engine.info.vocab_size)
    submit(engine, prompts, prompts.several(batch, 128), 3 * _STEPS)
    while engine.stats().generation_tokens < batch * _STEPS:  # all prompts are in
        engine.step()
    found = _recorded(engine.step)
    run_s(engine)
    return found


def _prompts(engine: Engine, length: int) -> dict[str, float]:
    """One after another, each with one token out."""
    prompts = Prompts(engine.info.vocab_size)

    def one() -> None:
        submit(engine, prompts, prompts.several(1, length), 1)
        run_s(engine)

    one()
    return _recorded(one)


def _recorded(step: Callable[[], object]) -> dict[str, float]:
    """What ran on the card, of a step's share."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    return _summary(found)


def _summary(found: torch.profiler.profile) -> dict[str, float]:
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
