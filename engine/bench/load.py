"""Requests for an engine under measurement, and a stopwatch around its steps."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.types import SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 128, 128

Prompt = tuple[int, ...]


@dataclass
class Prompts:
    """Random prompts, new each time, so that the prefix cache has nothing to give; and names that nobody had."""

    vocab_size: int
    source: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0

    def prompt(self, length: int) -> Prompt:
        return tuple(self.source.randrange(3, self.vocab_size) for _ in range(length))

    def several(self, count: int, length: int) -> list[Prompt]:
        return [self.prompt(length) for _ in range(count)]

    def name(self) -> str:
        self.count += 1
        return f"bench-{self.count}"


@dataclass(frozen=True)
class Served:
    """Prompts that came at once, each answered with as many tokens.

    served_tokens_per_s  generated tokens over the whole time, prompts included
    decode_tokens_per_s  the same from the moment when every prompt has its first token
    """

    served_tokens_per_s: float
    decode_tokens_per_s: float


def submit(engine: Engine, names: Prompts, prompts: Sequence[Prompt], new_tokens: int) -> None:
    """Greedy, past any end of sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(names.name(), prompt, params)


def run_s(engine: Engine) -> float:
    """Seconds until all requests have ended."""
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def gaps_s(engine: Engine) -> Iterator[float]:
    """Seconds between the tokens of the one request that runs."""
    before = None
    while engine.has_work:
        if engine.step():
            now = time.perf_counter()
            if before is not None:
                yield now - before
            before = now


def serve(engine: Engine, names: Prompts, prompts: Sequence[Prompt], new_tokens: int) -> Served:
    submit(engine, names, prompts, new_tokens)
    waiting = set(engine.request_ids)
    started = all_begun = time.perf_counter()
    left = len(prompts) * new_tokens  # tokens still to come when every prompt has its first
    while engine.has_work:
        events = engine.step()
        if waiting:
            left -= len(events)
            waiting -= {event.request_id for event in events}
            all_begun = time.perf_counter()
    ended = time.perf_counter()
    return Served(len(prompts) * new_tokens / (ended - started), left / (ended - all_begun))
