"""`python -m engine.sampling.bench`: milliseconds of one sampling step beside torch's plain argmax of the same logits.

Prints a table; the last line is one JSON object. Logits are copied before each step, since a step overwrites them; the
copy is not in the figures. The rows of a batch all want the same.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.plan import ScheduledSequence
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams

_CONTEXT = 1024  # tokens that each row has already
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k 40": {"top_k": 40},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, flat": {"temperature": 2.0, "top_p": 0.95},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, **_PENALTIES},
    "penalties, top_k 40, top_p 0.95": {"top_k": 40, "top_p": 0.95, **_PENALTIES},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", default="49152,151936", help="sizes, with commas between")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's own choice if not given")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sizes = [int(size) for size in options.vocab.split(",")]
    result = {size: _measure(options.rows, size, torch.device(options.device)) for size in sizes}
    print(f"{'ms for ' + str(options.rows) + ' rows':<34}" + "".join(f"{size:>12,}" for size in sizes))
    for way in result[sizes[0]]:
        print(f"{way:<34}" + "".join(f"{result[size][way]:>12.2f}" for size in sizes))
    print(json.dumps({"sampling_ms": result, "rows": options.rows, "threads": torch.get_num_threads()}))


@torch.inference_mode()
def _measure(num_rows: int, vocab_size: int, device: torch.device) -> dict[str, float]:
    """Milliseconds by way. Probabilities fall with the square of a token's rank, so that 12 tokens have 95 % of them;
    at temperature 2 ("flat") it takes more than half of the vocabulary.
    """
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    logits = (-2.0 * (ranks + 1.0).log()).to(device)
    times = {"torch.argmax": _best_of(lambda work: work.argmax(dim=-1), logits)}
    for way, params in WAYS.items():
        sampler = Sampler(
            max_num_seqs=num_rows, max_len=2 * _CONTEXT, vocab_size=vocab_size, eos_token_ids=(2,), device=device
        )
        rows = _rows(num_rows, vocab_size, SamplingParams(**params))
        times[way] = _best_of(partial(sampler.sample, rows=rows), logits)
    return times


def _rows(count: int, vocab_size: int, params: SamplingParams) -> list[ScheduledSequence]:
    tokens = torch.randint(vocab_size, (count, _CONTEXT), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        ScheduledSequence(
            request_id=str(index),
            slot=index,
            run_id=index,
            token_ids=(0,),
            feeds_last=False,
            start=_CONTEXT - 1,
            block_tables=(),
            samples=True,
            sample_position=_CONTEXT,
            params=params,
            seed=index,
            num_prompt_tokens=_CONTEXT // 2,
            known_token_ids=tokens[index],
        )
        for index in range(count)
    ]


def _best_of(step: Callable[[torch.Tensor], Any], logits: torch.Tensor, tries: int = 7) -> float:
    """Milliseconds of the quickest of several; the first, which makes the parameters, is left out."""
    best = float("inf")
    for attempt in range(tries + 1):
        work = logits.clone()
        _wait(logits.device)
        started = time.perf_counter()
        step(work)
        _wait(logits.device)
        if attempt:
            best = min(best, time.perf_counter() - started)
    return best * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
