"""One model's speed on any machine, alone or in turns with transformers: what `--batch` and `--compare` measure."""

import argparse
import statistics
import sys
import time
from typing import Any, Protocol

from engine.bench.load import PROMPT_TOKENS, Prompts, Served, run_s, serve, submit
from engine.bench.output import flat
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_folder import model_folder

PREFILL_TOKENS = 1024


class Subject(Protocol):
    """One side of a measurement."""

    def serve(self, batch: int, new_tokens: int) -> Served: ...

    def prefill_tokens_per_s(self) -> float: ...


def measure(options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    engine = _open_engine(options)
    ready_s = time.perf_counter() - started
    requests = Prompts(engine.info.vocab_size)
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


def _second_turn_s(engine: Engine, requests: Prompts) -> float:
    """A prompt again with a few tokens more, as a chat goes on: the time to its first token."""
    prompt = requests.prompt(PREFILL_TOKENS)
    submit(engine, requests, [prompt], 1)
    run_s(engine)
    submit(engine, requests, [prompt + requests.prompt(PROMPT_TOKENS)], 1)
    return run_s(engine)


def _open_engine(options: argparse.Namespace) -> Engine:
    from engine.loading import load_runner

    config = EngineConfig(
        model=model_folder(options.model), device=options.device, max_num_seqs=max(32, *options.batch)
    )
    return Engine(load_runner(config, lambda stage, fraction: None), config)


class _EngineSubject:
    def __init__(self, engine: Engine, requests: Prompts) -> None:
        self._engine, self._requests = engine, requests

    def serve(self, batch: int, new_tokens: int) -> Served:
        prompts = self._requests.several(batch, PROMPT_TOKENS)
        return serve(self._engine, self._requests, prompts, new_tokens)

    def prefill_tokens_per_s(self) -> float:
        submit(self._engine, self._requests, [self._requests.prompt(PREFILL_TOKENS)], 1)
        return PREFILL_TOKENS / run_s(self._engine)


def _first_token_s(engine: Engine, requests: Prompts) -> float:
    """A short prompt on an idle engine: the median of three, the first of all thrown away."""
    times = []
    for _ in range(4):
        submit(engine, requests, [requests.prompt(PROMPT_TOKENS)], 1)
        times.append(run_s(engine))
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


class _TransformersSubject:
    """`generate` of transformers in fp32, greedy, each batch of one length."""

    def __init__(self, folder: str, requests: Prompts) -> None:
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
    rounds = [(flat(_figures(ours, options)), flat(_figures(theirs, options))) for _ in range(options.rounds)]
    names = rounds[0][0]
    return {
        "ratio": {name: statistics.median(a[name] / b[name] for a, b in rounds) for name in names},
        "ours": {name: statistics.median(a[name] for a, _ in rounds) for name in names},
        "transformers": {name: statistics.median(b[name] for _, b in rounds) for name in names},
    }
