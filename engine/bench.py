"""How fast an engine is: decode and prefill tokens a second, time to first token, peak memory. The last line is JSON.

    python -m engine.bench --model smollm2-135m-instruct --batch 1,8,32 --json
    python -m engine.bench --model smollm2-135m-instruct --compare smollm2-135m-instruct-dense   # beside transformers
    python -m engine.bench --fake-runner --json                       # host time of the scheduler alone

Machines are noisy: with --compare both sides take turns in the same run, and the ratio of each round is what counts.
Prompts are random token ids, new for each measurement, so that the prefix cache has nothing to give.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine import environment
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadRequest
from engine.model_folder import model_folder
from engine.plan import BatchPlan, FinishedStep, Grammar, StepOutput
from engine.types import GrammarSpec, MemoryReport, ModelInfo, SamplingParams

PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 128, 128, 1024
_HOST_COUNTS = (1, 8, 32, 128, 256)


def main(arguments: list[str] | None = None) -> int:
    environment.prepare()
    options = _parse(arguments)
    result = _host_times() | _long_answers() if options.fake_runner else _measure(options)
    _print_table(result)
    print(json.dumps(result))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name of the catalogue")
    parser.add_argument("--batch", default="1,8,32", help="numbers of sequences that decode at once")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens that each sequence generates")
    parser.add_argument("--compare", metavar="MODEL", help="take turns with transformers in fp32 on this dense model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --compare")
    parser.add_argument("--fake-runner", action="store_true", help="measure the scheduler's host time, no model")
    parser.add_argument("--json", action="store_true", help="accepted for scripts; the last line always is JSON")
    options = parser.parse_args(arguments)
    options.batch = [int(count) for count in options.batch.split(",")]
    return options


# -- a model -------------------------------------------------------------------------------------------------------


class Subject(Protocol):
    """One side of a measurement."""

    def serve(self, batch: int, new_tokens: int) -> "Served": ...

    def prefill_tokens_per_s(self) -> float: ...


@dataclass(frozen=True)
class Served:
    """`batch` prompts at once, each answered with as many tokens.

    served_tokens_per_s  generated tokens over the whole time, prompts included
    decode_tokens_per_s  the same from the moment when every prompt has its first token
    """

    served_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass
class _Requests:
    """Random prompts under fresh names."""

    vocab_size: int
    source: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.source.randrange(3, self.vocab_size) for _ in range(length))

    def name(self) -> str:
        self.count += 1
        return f"bench-{self.count}"


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    engine = _open_engine(options)
    ready_s = time.perf_counter() - started
    requests = _Requests(engine.info.vocab_size)
    first_token_s = _first_token_s(engine, requests)
    subject = _EngineSubject(engine, requests)
    result: dict[str, Any] = {"model": options.model, "device": engine.info.device, "load_s": round(ready_s, 2)}
    if options.compare:
        result |= _compare(subject, _TransformersSubject(model_folder(options.compare), requests), options)
    else:
        result |= _figures(subject, options)
    return result | {
        "ttft_ms": first_token_s * 1000,
        "second_turn_ttft_ms": _second_turn_s(engine, requests) * 1000,
        "peak_memory_mb": _peak_memory_mb(engine.info.device),
        "weights_mb": engine.memory.weights_bytes / 1e6,
        "preemptions": engine.stats().num_preemptions,
        "cache_hit_rate": _hit_rate(engine),
    }


def _hit_rate(engine: Engine) -> float:
    """Of all prompt tokens; only second turns have something to find."""
    stats = engine.stats()
    return stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)


def _second_turn_s(engine: Engine, requests: _Requests) -> float:
    """A prompt again with a few tokens more, as a chat goes on: the time to its first token."""
    prompt = requests.prompt(PREFILL_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add(requests.name(), prompt, params)
    _run_s(engine)
    engine.add(requests.name(), prompt + requests.prompt(PROMPT_TOKENS), params)
    return _run_s(engine)


def _open_engine(options: argparse.Namespace) -> Engine:
    from engine.runner import load_runner

    config = EngineConfig(
        model=model_folder(options.model), device=options.device, max_num_seqs=max(32, *options.batch)
    )
    return Engine(load_runner(config, lambda stage, fraction: None), config)


class _EngineSubject:
    def __init__(self, engine: Engine, requests: _Requests) -> None:
        self._engine, self._requests = engine, requests

    def serve(self, batch: int, new_tokens: int) -> Served:
        _submit(self._engine, self._requests, batch, PROMPT_TOKENS, new_tokens)
        waiting = set(self._engine.request_ids)
        started = all_begun = time.perf_counter()
        left = batch * new_tokens  # tokens still to come when every prompt has its first
        while self._engine.has_work:
            events = self._engine.step()
            if waiting:
                left -= len(events)
                waiting -= {event.request_id for event in events}
                all_begun = time.perf_counter()
        ended = time.perf_counter()
        return Served(batch * new_tokens / (ended - started), left / (ended - all_begun))

    def prefill_tokens_per_s(self) -> float:
        _submit(self._engine, self._requests, 1, PREFILL_TOKENS, 1)
        return PREFILL_TOKENS / _run_s(self._engine)


def _run_s(engine: Engine) -> float:
    """Seconds until all requests have ended."""
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def _submit(engine: Engine, requests: _Requests, batch: int, prompt_tokens: int, new_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for _ in range(batch):
        engine.add(requests.name(), requests.prompt(prompt_tokens), params)


def _first_token_s(engine: Engine, requests: _Requests) -> float:
    """A short prompt on an idle engine: the median of three, the first of all thrown away."""
    times = []
    for _ in range(4):
        _submit(engine, requests, 1, PROMPT_TOKENS, 1)
        times.append(_run_s(engine))
    return statistics.median(times[1:])


def _peak_memory_mb(device: str) -> float:
    """Most that this process held: of the card's memory, or resident."""
    import torch

    if not device.startswith("CPU"):
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(getattr(psutil.Process().memory_info(), "peak_wset")) / 1e6  # noqa: B009 (unknown to mypy here)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


# -- beside transformers -------------------------------------------------------------------------------------------


class _TransformersSubject:
    """`generate` of transformers in fp32, greedy, each batch of one length."""

    def __init__(self, folder: str, requests: _Requests) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._requests = torch, requests
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def serve(self, batch: int, new_tokens: int) -> Served:
        first_s = self._generate_s(batch, PROMPT_TOKENS, 1)
        whole_s = self._generate_s(batch, PROMPT_TOKENS, new_tokens)
        return Served(batch * new_tokens / whole_s, batch * (new_tokens - 1) / (whole_s - first_s))

    def prefill_tokens_per_s(self) -> float:
        return PREFILL_TOKENS / self._generate_s(1, PREFILL_TOKENS, 1)

    def _generate_s(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        ids = self._torch.tensor([self._requests.prompt(prompt_tokens) for _ in range(batch)])
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        started = time.perf_counter()
        with self._torch.inference_mode():
            mask = self._torch.ones_like(ids)
            self._model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return time.perf_counter() - started


def _figures(side: Subject, options: argparse.Namespace) -> dict[str, Any]:
    served = {str(batch): side.serve(batch, options.new_tokens) for batch in options.batch}
    return {
        "decode_tokens_per_s": {batch: figures.decode_tokens_per_s for batch, figures in served.items()},
        "served_tokens_per_s": {batch: figures.served_tokens_per_s for batch, figures in served.items()},
        "prefill_tokens_per_s": side.prefill_tokens_per_s(),
    }


def _compare(ours: Subject, theirs: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns; of each figure the median over the rounds, and the median of the rounds' ratios."""
    rounds = [(_flat(_figures(ours, options)), _flat(_figures(theirs, options))) for _ in range(options.rounds)]
    names = rounds[0][0]
    return {
        "ratio": {name: statistics.median(a[name] / b[name] for a, b in rounds) for name in names},
        "ours": {name: statistics.median(a[name] for a, _ in rounds) for name in names},
        "transformers": {name: statistics.median(b[name] for _, b in rounds) for name in names},
    }


def _flat(figures: dict[str, Any]) -> dict[str, float]:
    """{"a": {"1": x}, "b": y} -> {"a 1": x, "b": y}"""
    pairs = ((name, value.items() if isinstance(value, dict) else [("", value)]) for name, value in figures.items())
    return {f"{name} {key}".strip(): number for name, rows in pairs for key, number in rows}


# -- the scheduler alone -------------------------------------------------------------------------------------------


class _NullRunner:
    """Computes nothing: every sequence gets token 0."""

    info = ModelInfo(
        architecture="none",
        quantization=None,
        dtype="none",
        device="none",
        vocab_size=1000,
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

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        raise BadRequest("A runner that computes nothing takes no grammars.")

    def submit(self, plan: BatchPlan) -> FinishedStep:
        return FinishedStep(StepOutput((0,) * plan.num_sampled))


def _host_times() -> dict[str, Any]:
    """Median microseconds that plan and settle take a step, by the number of sequences that decode."""
    return {"host_us": {str(count): statistics.median(_host_us(count)) for count in _HOST_COUNTS}}


def _long_answers() -> dict[str, Any]:
    """Sixteen answers of 2,000 tokens in a cache with room for five: what is computed again for want of blocks."""
    runner = _NullRunner()
    runner.memory = replace(runner.memory, num_blocks=600)
    engine = Engine(runner, EngineConfig(model="none"))
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    requests = _Requests(1000)
    for _ in range(16):
        engine.add(requests.name(), requests.prompt(PROMPT_TOKENS), params)
    while engine.has_work:
        engine.step()
    return {"long_answers": {"preemptions": engine.stats().num_preemptions}}


def _host_us(count: int) -> Iterator[float]:
    engine = Engine(_NullRunner(), EngineConfig(model="none", max_num_seqs=256))
    _submit(engine, _Requests(1000), count, PROMPT_TOKENS, 1000)
    while engine.stats().generation_tokens < count * 10:  # all prompts are in
        engine.step()
    for _ in range(500):
        engine.step()
        yield engine.stats().step_host_us


# -- output --------------------------------------------------------------------------------------------------------


def _print_table(result: dict[str, Any]) -> None:
    for name, value in _flat(result).items():
        shown = f"{value:,.2f}" if isinstance(value, float) else str(value)
        print(f"{name:<40} {shown:>16}")


if __name__ == "__main__":
    sys.exit(main())
