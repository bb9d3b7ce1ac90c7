"""The contract of a checkpoint format: claims -> read -> repack -> Linear. The decoder never learns the format.

A format decides per module from the tensors that are there, not from the config's lists of names: newer uploads leave
some layers in 16 bits, and the lists of different writers match names by different rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import BadCheckpoint
from engine.weights.reader import CheckpointReader
from kernels import ops
from kernels.w4 import W4Weight, pack_w4


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """weight [N, K] as stored; bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The canonical form of one 4-bit module: W[k, n] = codes * scales[group of k] + offsets[group of k].

    codes    uint8 [K, N], rows ordered so that groups are contiguous
    scales   fp32 [K / group, N], sign kept; offsets fp32 [K / group, N]
    order    int64 [K] or None: row i of codes belongs to input order[i] (act-order checkpoints)
    bias     [N] or None
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None


class Format(Protocol):
    """One checkpoint format, configured from `quantization_config`."""

    name: str

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        """Whether the module `prefix` is stored in this format."""
        ...

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        """Raises BadCheckpoint where tensors are missing or contradict each other."""
        ...


class Linear(Protocol):
    """x [tokens, K] -> [tokens, N]"""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class W4Linear:
    def __init__(self, weight: W4Weight, order: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self.weight, self.order, self.bias = weight, order, bias
        self.num_bytes = weight.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = ops.w4_linear(x if self.order is None else x[:, self.order], self.weight)
        return y if self.bias is None else y + self.bias


class SplitLinear:
    """Projections that share an input but cannot share a weight (different formats, groups or orders), side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts
        self.num_bytes = sum(part.num_bytes for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def load_linear(
    reader: CheckpointReader, prefixes: Sequence[str], fmt: Format | None, device: torch.device, dtype: torch.dtype
) -> Linear:
    """One Linear for the modules `prefixes`, fused along N where their tensors allow it.

    Raises BadCheckpoint when a module is stored neither densely nor in the checkpoint's format.
    """
    modules = [_read(reader, prefix, fmt) for prefix in prefixes]
    groups = _fusable(modules)
    parts = [_build(group, device, dtype) for group in groups]
    return parts[0] if len(parts) == 1 else SplitLinear(parts)


def _read(reader: CheckpointReader, prefix: str, fmt: Format | None) -> DenseTensors | QuantizedTensors:
    if fmt is not None and fmt.claims(reader, prefix):
        return fmt.read(reader, prefix)
    if reader.has(f"{prefix}.weight"):
        return DenseTensors(reader.get(f"{prefix}.weight"), read_bias(reader, prefix))
    found = sorted(name.removeprefix(prefix + ".") for name in reader.names if name.startswith(prefix + "."))
    wanted = f"weight, or {fmt.name} tensors" if fmt else "weight (the config names no quantization)"
    raise BadCheckpoint(f"`{prefix}`: expected {wanted}; found {', '.join(found) or 'nothing'}.")


def read_bias(reader: CheckpointReader, prefix: str) -> torch.Tensor | None:
    return reader.get(f"{prefix}.bias") if reader.has(f"{prefix}.bias") else None


def _fusable(modules: Sequence[DenseTensors | QuantizedTensors]) -> list[list[DenseTensors | QuantizedTensors]]:
    """All in one group if they agree, else each alone."""
    first = modules[0]
    alike = all(_agree(first, other) for other in modules[1:])
    return [list(modules)] if alike else [[module] for module in modules]


def _agree(a: DenseTensors | QuantizedTensors, b: DenseTensors | QuantizedTensors) -> bool:
    if isinstance(a, DenseTensors) or isinstance(b, DenseTensors):
        return isinstance(a, DenseTensors) and isinstance(b, DenseTensors)
    if a.scales.shape[0] != b.scales.shape[0] or (a.order is None) != (b.order is None):
        return False
    return a.order is None or b.order is None or torch.equal(a.order, b.order)


def place(weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A dense weight where it will be used. Under fp32 arithmetic 16 bits stay 16 bits: half the memory, no loss."""
    keeps_16_bits = dtype == torch.float32 and weight.dtype in (torch.float16, torch.bfloat16)
    return weight.to(device, weight.dtype if keeps_16_bits else dtype)


def _build(modules: Sequence[DenseTensors | QuantizedTensors], device: torch.device, dtype: torch.dtype) -> Linear:
    bias = _cat_biases(modules, device, dtype)
    first = modules[0]
    if isinstance(first, DenseTensors):
        weights = [place(m.weight, device, dtype) for m in modules if isinstance(m, DenseTensors)]
        return DenseLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
    quantized = [m for m in modules if isinstance(m, QuantizedTensors)]
    codes, scales, offsets = (
        torch.cat([getattr(m, part).to(device) for m in quantized], dim=1) for part in ("codes", "scales", "offsets")
    )
    order = None if first.order is None else first.order.to(device)
    return W4Linear(pack_w4(codes, scales, offsets), order, bias)


def _cat_biases(
    modules: Sequence[DenseTensors | QuantizedTensors], device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([_bias_or_zeros(module).to(device, dtype) for module in modules])


def _bias_or_zeros(module: DenseTensors | QuantizedTensors) -> torch.Tensor:
    if module.bias is not None:
        return module.bias
    num_outputs = module.weight.shape[0] if isinstance(module, DenseTensors) else module.codes.shape[1]
    return torch.zeros(num_outputs)
