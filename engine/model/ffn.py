"""The feed-forward half of a layer."""

import torch

from engine.quant.linear import Linear
from kernels import ops


class GatedFfn:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        return self.down(ops.silu_mul(self.gate_up(x)))
