"""The feed-forward half of a layer: one gated network, or experts of which each token takes a few."""

import torch

from engine.model.spec import MoeSpec
from engine.quant.linear import GatedW4Linear, Linear, stack_linears, with_activation
from kernels import ops

_GATED = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}


class GatedFfn:
    def __init__(self, activation: str, gate_up: Linear, down: Linear) -> None:
        self._activation, self.gate_up, self._down = activation, gate_up, down

    waits_for_nothing = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self._down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        inside = self.gate_up(x)
        return self._down(inside if isinstance(self.gate_up, GatedW4Linear) else _GATED[self._activation](inside))

    def fuse(self) -> None:
        """From now on in one launch less, where the card's kernels can: gate and up's product with the activation."""
        self.gate_up = with_activation(self.gate_up, self._activation, self._down) or self.gate_up


class Moe:
    """Mixture of experts: each token's result is the weighted sum of what its likeliest experts say.

    Where the experts' weights are alike and in 4 bits on a card, one launch a projection does for all of them, and the
    host learns nothing of who goes where. Else the experts take their tokens one after another.
    """

    def __init__(self, spec: MoeSpec, router: Linear, experts: tuple[GatedFfn, ...], *, in_16_bits: bool) -> None:
        """in_16_bits: the arithmetic, without which there is no launch for all."""
        self._spec, self._router, self._experts = spec, router, experts
        projections = zip(*(expert.linears for expert in experts), strict=True)
        self._stacks = [stack_linears(part) if in_16_bits else None for part in projections]

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host need not know which experts were chosen."""
        return None not in self._stacks

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._router, *(linear for expert in self._experts for linear in expert.linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]. The sums run in fp32 in the experts' order, whatever the company."""
        weights, chosen = ops.route_experts(self._router(x), self._spec.num_chosen, self._spec.renormalise)
        gate_up, down = self._stacks
        if gate_up is not None and down is not None:
            return ops.w4_mixture(x, chosen, weights, gate_up, down, self._spec.expert.activation)
        by_expert = chosen.flatten().argsort(stable=True)  # places in [tokens * chosen], grouped by expert
        tokens, shares = by_expert // self._spec.num_chosen, weights.flatten()[by_expert].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=self._spec.num_experts).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, rows, share in zip(self._experts, tokens.split(counts), shares.split(counts), strict=True):
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]).float() * share)
        return out.to(x.dtype)
