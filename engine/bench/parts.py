"""The same work as other engines were measured with, in five parts; see PARTS. Greedy, past any end of sequence.

Each part runs twice and the second time counts: in the first, kernels are compiled and steps captured.
"""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.bench.load import Prompt, Prompts, gaps_s, run_s, serve, submit
from engine.config import EngineConfig
from engine.engine import Engine, Runner
from engine.types import SamplingParams

DEFAULT_LOAD = Path(__file__).with_name("mixed_load_256.json")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and batches of the parts; smaller ones for tests.

    prompt, new     of parts a and b
    batches         of part b
    prefills        prompts of part c
    shared, own     tokens of part e's prompts; short: its answers; requests: how many
    """

    prompt: int = 128
    new: int = 256
    batches: tuple[int, ...] = (8, 32, 64, 128)
    prefills: tuple[int, ...] = (2048, 8192)
    shared: int = 1024
    own: int = 64
    short: int = 64
    requests: int = 64
    repeats: int = 3


class Bench:
    """An engine for each part, over one runner."""

    def __init__(self, runner: Runner, config: EngineConfig, sizes: Sizes, load: Path = DEFAULT_LOAD) -> None:
        self._runner, self._config, self._sizes, self._load = runner, config, sizes, load
        self._prompts = Prompts(runner.info.vocab_size)

    def run(self, parts: str) -> dict[str, Any]:
        """`parts`: letters of PARTS, divided by commas."""
        return {letter: PARTS[letter](self) for letter in parts.split(",")}

    def one_at_a_time(self) -> dict[str, Any]:
        """a: batch 1."""
        engine = self._engine()
        for _ in range(2):
            submit(engine, self._prompts, self._prompts.several(1, self._sizes.prompt), self._sizes.new)
            gaps_ms = [gap * 1000 for gap in gaps_s(engine)]
        return {"tpot_ms_p50": statistics.median(gaps_ms), "tpot_ms_p99": _percentile(gaps_ms, 0.99)}

    def batches(self) -> dict[str, Any]:
        """b: several at once."""
        engine = self._engine()
        return {f"batch{batch}": self._batch(engine, batch) for batch in self._sizes.batches}

    def _batch(self, engine: Engine, batch: int) -> dict[str, float]:
        for _ in range(2):
            prompts = self._prompts.several(batch, self._sizes.prompt)
            served = serve(engine, self._prompts, prompts, self._sizes.new)
        return {
            "decode_tok_s": served.decode_tokens_per_s,
            "step_ms": 1000 * batch / served.decode_tokens_per_s,
            "served_tok_s": served.served_tokens_per_s,
        }

    def prefills(self) -> dict[str, Any]:
        """c: long prompts, one token out."""
        engine = self._engine()
        return {f"prompt{length}": self._prefill(engine, length) for length in self._sizes.prefills}

    def _prefill(self, engine: Engine, length: int) -> dict[str, float]:
        times = []
        for _ in range(1 + self._sizes.repeats):
            submit(engine, self._prompts, self._prompts.several(1, length), 1)
            times.append(run_s(engine))
        return {"prefill_tok_s": length / statistics.median(times[1:])}

    def mixed(self) -> dict[str, Any]:
        """d: the load file, all at once."""
        requests = [(self._mixed_prompt(i, length), new) for i, (length, new) in enumerate(self._lengths())]
        for _ in range(2):
            engine = self._engine()  # new, so that the prefix cache has nothing to give
            for prompt, new in requests:
                params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
                engine.add(self._prompts.name(), prompt, params)
            seconds = run_s(engine)
        num_prompt, num_new = sum(len(prompt) for prompt, _ in requests), sum(new for _, new in requests)
        return {
            "total_tok_s": (num_prompt + num_new) / seconds,
            "output_tok_s": num_new / seconds,
            "seconds": seconds,
            "preemptions": engine.stats().num_preemptions,
        }

    def _lengths(self) -> list[tuple[int, int]]:
        """Prompt and answer of each request."""
        lengths: list[tuple[int, int]] = json.loads(self._load.read_text(encoding="utf-8"))["lengths"]
        return lengths

    def _mixed_prompt(self, index: int, length: int) -> Prompt:
        source = random.Random(1000 + index)
        highest = min(31990, self._runner.info.vocab_size)
        return tuple(source.randrange(10, highest) for _ in range(length))

    def shared_prefix(self) -> dict[str, Any]:
        """e: requests that begin alike, with and without the prefix cache."""
        return {
            "cache_on": self._shared_prefix(self._engine()),
            "cache_off": self._shared_prefix(self._engine(enable_prefix_caching=False)),
        }

    def _shared_prefix(self, engine: Engine) -> dict[str, float]:
        sizes = self._sizes
        for _ in range(2):
            shared = self._prompts.prompt(sizes.shared)
            prompts = [shared + own for own in self._prompts.several(sizes.requests, sizes.own)]
            before = engine.stats()
            submit(engine, self._prompts, prompts, sizes.short)
            seconds = run_s(engine)
        hits = engine.stats().prefix_cache_hits - before.prefix_cache_hits
        return {"req_s": sizes.requests / seconds, "hit_tokens": hits}

    def _engine(self, **changes: Any) -> Engine:
        return Engine(self._runner, replace(self._config, **changes))


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "a": Bench.one_at_a_time,
    "b": Bench.batches,
    "c": Bench.prefills,
    "d": Bench.mixed,
    "e": Bench.shared_prefix,
}


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
