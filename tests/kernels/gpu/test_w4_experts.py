"""The experts' products in one launch against each expert alone, and the mixture against its definition."""

import pytest
import torch
import torch.nn.functional as F

from kernels.gpu import activation, moe, w4_experts
from kernels.gpu.planar import PlanarWeight, StackedWeights, pack_planar, stack_planar
from tests.kernels.gpu.weights import numbers
from tests.kernels.gpu.where import DEVICE, DTYPES, ON_CARD, random

_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
_SIXTEEN_BITS = [dtype for dtype in DTYPES if not (ON_CARD and dtype is torch.float32)]
_EXPERTS, _CHOSEN = 5, 2


def _weights(k: int, n: int, group: int, zeros_in: tuple[int, ...] = ()) -> list[PlanarWeight]:
    return [pack_planar(*numbers(k, n, group, i in zeros_in, seed=i).parts, group) for i in range(_EXPERTS)]


def _stack(weights: list[PlanarWeight]) -> StackedWeights:
    stacked = stack_planar(weights)
    assert stacked is not None
    return stacked[0]


def _chosen(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """int32 [tokens, 2], an expert that nobody takes among them."""
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randperm(_EXPERTS - 1, generator=generator)[:_CHOSEN].sort().values for _ in range(num_tokens)]
    return torch.stack(picks).to(DEVICE, torch.int32)


@pytest.mark.parametrize("dtype", _SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("zeros_in", [(), (0, 1, 2, 3, 4), (2,)], ids=["symmetric", "zeros", "zeros in one"])
@pytest.mark.parametrize(("k", "n", "group", "tile"), [(256, 70, 128, 8), (200, 40, 32, 16), (192, 130, 64, 64)])
def test_each_pair_is_multiplied_by_its_own_expert(k, n, group, tile, zeros_in, dtype) -> None:
    weights, chosen = _weights(k, n, group, zeros_in), _chosen(7)
    x = random(7, k, dtype=dtype)
    grouping = moe.group_by_expert(chosen, _EXPERTS, tile)
    ours = w4_experts.product(x, _stack(weights), grouping, _CHOSEN, chosen.numel())
    for pair, expert in enumerate(chosen.flatten().tolist()):
        exact = weights[expert].dequantize(torch.float64) @ x[pair // _CHOSEN].double()
        assert float((ours[pair].double() - exact).norm() / exact.norm()) < _TOLERANCE[dtype]


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("num_tokens", [1, 23])
def test_a_mixture_is_the_weighted_sum_of_its_experts(num_tokens: int, is_gelu: bool) -> None:
    gate_up, down = _weights(128, 192, 64), _weights(96, 128, 32)
    x, chosen = random(num_tokens, 128, dtype=torch.float16), _chosen(num_tokens)
    shares = random(num_tokens, _CHOSEN, seed=3).softmax(-1)
    gated = activation.gelu_tanh_mul if is_gelu else activation.silu_mul
    ours = w4_experts.mixture(x, chosen, shares, _stack(gate_up), _stack(down), gated)
    for token in range(num_tokens):
        exact = torch.zeros(128, dtype=torch.float64, device=DEVICE)
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up = (gate_up[expert].dequantize(torch.float64) @ x[token].double()).chunk(2)
            inside = (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up
            exact += share.double() * (down[expert].dequantize(torch.float64) @ inside)
        assert float((ours[token].double() - exact).norm() / exact.norm()) < 3e-3


def test_the_parts_of_a_stack_are_the_weights_themselves_and_take_no_memory_of_their_own() -> None:
    weights = _weights(256, 70, 128, zeros_in=(1,))
    stacked = stack_planar(weights)
    assert stacked is not None
    for one, view in zip(weights, stacked[1], strict=True):
        assert torch.equal(one.dequantize(torch.float32), view.dequantize(torch.float32))
        assert view.codes.untyped_storage().data_ptr() == stacked[0].codes.untyped_storage().data_ptr()


def test_weights_that_differ_in_shape_or_groups_are_not_stacked() -> None:
    assert stack_planar([*_weights(256, 70, 128), *_weights(256, 70, 64)]) is None
    assert stack_planar([*_weights(256, 70, 128), *_weights(256, 71, 128)]) is None


def test_tiles_of_rows_follow_what_an_expert_gets() -> None:
    assert [w4_experts.row_tile(n, 8) for n in (2, 64, 65, 512, 5000)] == [8, 8, 16, 64, 64]
