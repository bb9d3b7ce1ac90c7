"""Logits to tokens beside torch's argmax of the same: `python -m kernels.bench --op sample`, on a card.

Logits fall with the logarithm of a token's rank, twelve tokens having 95 % of the weight; "flat" ones are normal.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels import ops
from kernels.choices import Choices
from kernels.gpu.beside import header, line, timed
from kernels.gpu.timing import ring_size

__all__ = ["header", "line", "rows"]  # what a bench of one op has

VOCAB, ROWS = 151_936, (1, 8, 32, 128)
# temperature, top_p, top_k (0: all), min_p
WAYS = {
    "greedy": (0.0, 1.0, 0, 0.0),
    "temperature": (0.7, 1.0, 0, 0.0),
    "top_k 40": (1.0, 1.0, 40, 0.0),
    "top_p 0.95": (1.0, 0.95, 0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 0.95, 20, 0.0),
    "min_p 0.05": (1.0, 1.0, 0, 0.05),
    "top_p 0.95, flat": (1.0, 0.95, 0, 0.0),
}


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    for count in ROWS:
        ring = min(ring_size(4 * count * VOCAB), 16)
        ranks = torch.rand(ring, count, VOCAB, device="cuda").argsort(dim=-1)
        falling, flat = -2.0 * (ranks + 1.0).log(), torch.randn(ring, count, VOCAB, device="cuda")
        del ranks
        slots, positions = (torch.arange(count, device="cuda") for _ in range(2))
        for way, (temperature, top_p, top_k, min_p) in WAYS.items():
            logits = flat if "flat" in way else falling
            numbers = [temperature, top_p, math.log(min_p) if min_p else -math.inf]
            choices = Choices(
                torch.tensor([numbers] * count, dtype=torch.float64, device="cuda"),
                torch.tensor([[top_k or VOCAB, seed] for seed in range(count)], device="cuda"),
            )
            _check(way, logits[0], ops.choose_tokens(logits[0], slots, positions, choices))
            yield timed(
                "sample",
                way,
                count,
                partial(_chosen, logits, slots, positions, choices),
                partial(_likeliest, logits),
                4 * count * VOCAB,
                gb_per_s,
                ring,
            )


def _chosen(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, choices: Choices, i: int
) -> torch.Tensor:
    return ops.choose_tokens(logits[i], slots, positions, choices)


def _likeliest(logits: torch.Tensor, i: int) -> torch.Tensor:
    return logits[i].argmax(-1)


def _check(way: str, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raises SystemExit if a token is none that the limits leave, counted over the vocabulary in order."""
    temperature, top_p, top_k, min_p = WAYS[way]
    if temperature == 0.0:
        is_left = tokens == logits.argmax(-1)
    else:
        weights = (logits.double() / temperature).softmax(-1)
        chosen = weights.gather(1, tokens.unsqueeze(1))
        is_above = weights > chosen
        mass = torch.where(is_above, weights, 0.0).sum(-1)
        if top_k:
            mass = mass / weights.topk(top_k).values.sum(-1)
        is_left = (is_above.sum(-1) < (top_k or VOCAB)) & ((mass < top_p) | (top_p == 1.0))
        is_left &= chosen.squeeze(1) >= min_p * 0.999 * weights.amax(-1)
    if not bool(is_left.all()):
        raise SystemExit(f"sample {way}: {int((~is_left).sum())} of {len(tokens)} tokens are none that may come.")
