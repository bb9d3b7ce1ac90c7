"""How each slot's token is chosen among its logits, on the device: what `ops.choose_tokens` reads."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choices:
    """
    numbers  [slots, 3] fp64: temperature, where 0 takes the likeliest token; top_p, where 1 keeps all; the logarithm of
             min_p, where -inf keeps all
    wholes   [slots, 2] int64: top_k, where the vocabulary's size keeps all; seed
    """

    numbers: torch.Tensor
    wholes: torch.Tensor


def greedy_choices(num_slots: int, device: torch.device) -> Choices:
    """All slots take the likeliest token until they are told otherwise."""
    return Choices(
        torch.zeros(num_slots, 3, dtype=torch.float64, device=device),
        torch.zeros(num_slots, 2, dtype=torch.int64, device=device),
    )
