"""From a module's tensors to a Linear: fused where modules agree, packed for the device, checked before use.

Codes of up to 4 bits stay packed (2 and 3 bits in the same 4-bit form, without loss); 8-bit modules, and the rare ones
that a card's kernels cannot take, are dequantised to 16 bits while they are read. The decoder never learns which.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.errors import BadCheckpoint
from engine.quant.base import DenseTensors, Format, QuantizedTensors, read_bias
from engine.quant.check import ProductCheck, check_numbers
from engine.quant.kept import KeptWeights, PackedModules
from engine.weights.reader import CheckpointReader
from kernels import ops
from kernels.gpu.planar import PlanarWeight
from kernels.w8 import W8Weight

_PACKED_BITS = 4


class Linear(Protocol):
    """x [tokens, K] -> [tokens, N]"""

    num_bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.numel() * weight.element_size()

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class W8Linear:
    """A head in 8 bits; its result is fp32, whatever the arithmetic's type."""

    def __init__(self, weight: W8Weight) -> None:
        self.weight = weight
        self.num_bytes = weight.num_bytes
        self.shape = (weight.num_outputs, weight.num_inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.w8_linear(x, self.weight)


class W4Linear:
    """A packed weight, with what its checkpoint asks for around it: inputs gathered by `order`, padded with zeros."""

    def __init__(
        self, weight: ops.PackedWeight, num_inputs: int, order: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        self.weight, self.order, self.bias = weight, order, bias
        self.num_bytes = weight.num_bytes
        self.shape = (weight.num_outputs, num_inputs)
        self._padding = weight.num_inputs - num_inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.w4_linear(_laid_out(x, self.order, self._padding), self.weight, self.bias)


class GatedW4Linear:
    """A gate and an up projection with the activation at the end of their product: x [tokens, K] -> [tokens, N / 2]."""

    def __init__(self, gate_up: W4Linear, weight: ops.PairedWeight, bias: torch.Tensor | None, activation: str) -> None:
        """`weight` and `bias` are those of gate_up, which nothing uses any more."""
        self.weight, self.num_bytes = weight, gate_up.num_bytes
        self.shape = (gate_up.shape[0] // 2, gate_up.shape[1])
        self._order, self._padding = gate_up.order, weight.planar.num_inputs - gate_up.shape[1]
        self._bias, self._activation = bias, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.w4_gated(_laid_out(x, self._order, self._padding), self.weight, self._bias, self._activation)


def with_activation(gate_up: Linear, activation: str, down: Linear) -> GatedW4Linear | None:
    """The same with the activation in its product, for gates and then ups; None where there is no such kernel.

    Its result has the order in which `down` wants its inputs, who need no longer see to it.
    """
    if not isinstance(gate_up, W4Linear):
        return None
    order = down.order if isinstance(down, W4Linear) else None
    weight = ops.pair_weight(gate_up.weight, order)
    if weight is None:
        return None
    take_order(down)
    return GatedW4Linear(gate_up, weight, ops.pair_bias(gate_up.bias, order), activation)


def _laid_out(x: torch.Tensor, order: torch.Tensor | None, padding: int) -> torch.Tensor:
    """x as a packed weight takes it."""
    if order is not None:
        x = x[:, order]
    return F.pad(x, (0, padding)) if padding else x


def take_order(linear: Linear) -> torch.Tensor | None:
    """The order [K] in which it wants its inputs, from now on left to who makes them; None if that is their own."""
    if not isinstance(linear, W4Linear):
        return None
    order, linear.order = linear.order, None
    return order


class SplitLinear:
    """Projections that share an input but cannot share a weight (different formats, groups or orders), side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def packed_weights(linears: Iterable[Linear]) -> Iterator[ops.PackedWeight]:
    """Those that are held in 4 bits."""
    for linear in linears:
        if isinstance(linear, SplitLinear):
            yield from packed_weights(linear.parts)
        elif isinstance(linear, W4Linear):
            yield linear.weight
        elif isinstance(linear, GatedW4Linear):
            yield linear.weight.planar


def stack_linears(linears: Sequence[Linear]) -> ops.StackedWeights | None:
    """One tensor for the weights of linears that are nothing but 4-bit products, alike in form, on a card: each then
    holds a view of it. None for any others.
    """
    plain = [
        linear for linear in linears if isinstance(linear, W4Linear) and linear.order is None and linear.bias is None
    ]
    stacked = ops.stack_weights([linear.weight for linear in plain]) if len(plain) == len(linears) else None
    if stacked is None:
        return None
    whole, parts = stacked
    for linear, part in zip(plain, parts, strict=True):
        linear.weight = part
    return whole


class LinearLoader:
    """Makes the Linears of one checkpoint, and remembers in `notes` what a reader of the log should know of them."""

    def __init__(
        self,
        reader: CheckpointReader,
        fmt: Format | None,
        device: torch.device,
        dtype: torch.dtype,
        model_dtype: str,
        kept: KeptWeights | None = None,
    ) -> None:
        """`dtype` is that of the arithmetic, `model_dtype` the one that the checkpoint's config names. `kept`: where
        packed weights are found, or go for the next load.
        """
        self._reader, self._format, self._device, self._dtype = reader, fmt, device, dtype
        self._model_dtype = model_dtype
        self._kept = kept
        # In the order of their coming, each once.
        self._notes: dict[str, None] = dict.fromkeys(kept.notes if kept else ())
        self._checks: dict[str, ProductCheck] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def checks(self) -> tuple[ProductCheck, ...]:
        """Those still to be made: of the first packed weight of each kind."""
        return tuple(self._checks.values())

    def check_products(self) -> None:
        """Before the first token and before anything is kept for the next load. Raises EngineError."""
        for check in self.checks:
            check.check()
        self._checks.clear()

    def load(self, prefixes: Sequence[str], shape: tuple[int, int]) -> Linear:
        """One Linear for the modules `prefixes`, fused along N where their tensors allow it. `shape` is (N, K) of all.

        Raises BadCheckpoint for a module that is stored neither densely nor in the checkpoint's format, whose numbers
        make no sense, or whose shape is not the one that config.json asks for.
        """
        if (linear := self._find_kept(prefixes, shape)) is not None:
            return linear
        modules = [self._read(prefix) for prefix in prefixes]
        if sum(module.shape[0] for module in modules) != shape[0] or any(m.shape[1] != shape[1] for m in modules):
            each = ", ".join(f"`{module.prefix}` {module.shape}" for module in modules)
            raise BadCheckpoint(f"config.json asks for weights of {shape} (outputs, inputs); the files have {each}.")
        parts = [self._build(group) for group in _fusable(modules)]
        if len(parts) > 1:
            return SplitLinear(parts)
        self._keep(prefixes, parts[0])
        return parts[0]

    def _find_kept(self, prefixes: Sequence[str], shape: tuple[int, int]) -> W4Linear | None:
        """They were checked when they were packed."""
        packed = self._kept.find(prefixes) if self._kept else None
        if packed is None or (packed.weight.num_outputs, packed.num_inputs) != shape:
            return None
        for prefix in prefixes:
            for name in self._names_of(prefix):
                self._reader.skip(name)
        bias = None if packed.bias is None else packed.bias.to(self._dtype)
        return W4Linear(packed.weight, packed.num_inputs, packed.order, bias)

    def _keep(self, prefixes: Sequence[str], linear: Linear) -> None:
        if self._kept and isinstance(linear, W4Linear) and isinstance(linear.weight, PlanarWeight):
            self._kept.add(prefixes, PackedModules(linear.weight, linear.shape[1], linear.order, linear.bias))

    def _names_of(self, prefix: str) -> list[str]:
        """Tensors of a module, as its format calls them."""
        return [name for name in self._reader.names if name.startswith(prefix + ".")]

    def is_quantized(self, prefix: str) -> bool:
        return self._format is not None and self._format.claims(self._reader, prefix)

    def _read(self, prefix: str) -> DenseTensors | QuantizedTensors:
        if self._format is not None and self.is_quantized(prefix):
            quantized = self._format.read(self._reader, prefix)
            check_numbers(quantized)
            self._note_precision(quantized)
            return quantized if quantized.bits <= _PACKED_BITS else _as_dense(quantized, torch.float16)
        if self._reader.has(f"{prefix}.weight"):
            return DenseTensors(prefix, self._reader.get(f"{prefix}.weight"), read_bias(self._reader, prefix))
        found = sorted(name.removeprefix(prefix + ".") for name in self._names_of(prefix))
        wanted = f"weight, or {self._format.name} tensors" if self._format else "weight (no quantization_config)"
        raise BadCheckpoint(f"`{prefix}`: expected {wanted}; found {', '.join(found) or 'nothing'}.")

    def _note_precision(self, module: QuantizedTensors) -> None:
        if module.bits > _PACKED_BITS:
            self._notes[f"Modules of {module.bits} bits are held as 16-bit weights: twice their size on disk."] = None
        elif module.bits < _PACKED_BITS:
            self._notes[f"Modules of {module.bits} bits are held in 4 bits, without loss."] = None
        scales_dtype = str(module.scales.dtype).removeprefix("torch.")
        if self._model_dtype in ("float16", "bfloat16") and scales_dtype != self._model_dtype:
            self._notes[f"The model is {self._model_dtype}, its scales are {scales_dtype}: cast to float32."] = None

    def _build(self, modules: Sequence[DenseTensors | QuantizedTensors]) -> Linear:
        bias = self._cat_biases(modules)
        first = modules[0]
        if isinstance(first, DenseTensors):
            weights = [place(m.weight, self._device, self._dtype) for m in modules if isinstance(m, DenseTensors)]
            return DenseLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
        quantized = [module for module in modules if isinstance(module, QuantizedTensors)]
        packed = self._pack(quantized)
        if packed is None:
            return self._build([self._unpackable(module) for module in quantized])
        order = None if first.order is None else first.order.to(self._device)
        linear = W4Linear(packed, first.shape[1], order, bias)
        self._check_kind(quantized, linear)
        return linear

    def _unpackable(self, module: QuantizedTensors) -> DenseTensors:
        """Under fp32 arithmetic in fp32, so that no number of the checkpoint is rounded."""
        in_full = self._dtype is torch.float32
        which = f"groups of {module.group_size} inputs, or zeros that are no codes,"
        as_what = "32-bit weights on a card: eight" if in_full else "16-bit weights on a card: four"
        self._notes[f"Modules with {which} are held as {as_what} times their size."] = None
        return _as_dense(module, torch.float32 if in_full else torch.float16)

    def _pack(self, modules: Sequence[QuantizedTensors]) -> ops.PackedWeight | None:
        codes, scales, offsets = (
            torch.cat([getattr(module, part).to(self._device) for module in modules], dim=1)
            for part in ("codes", "scales", "offsets")
        )
        return ops.pack_weight(codes, scales, offsets, modules[0].group_size, self._dtype)

    def _cat_biases(self, modules: Sequence[DenseTensors | QuantizedTensors]) -> torch.Tensor | None:
        if all(module.bias is None for module in modules):
            return None
        return torch.cat([_bias_or_zeros(module).to(self._device, self._dtype) for module in modules])

    def _check_kind(self, modules: Sequence[QuantizedTensors], linear: W4Linear) -> None:
        """Only the first of each kind: one layer's query projection stands for every layer's."""
        module = modules[0]
        names = re.sub(r"\d+", "#", " ".join(module.prefix for module in modules))
        kind = f"{names} {module.bits} {module.group_size} {module.order is None}"
        if kind not in self._checks:
            as_it_is = W4Linear(linear.weight, linear.shape[1], linear.order, linear.bias)  # others may take its order
            self._checks[kind] = ProductCheck(modules, as_it_is, self._device, self._dtype)


def place(weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A dense weight where it will be used. Under fp32 arithmetic 16 bits stay 16 bits: half the memory, no loss."""
    keeps_16_bits = dtype == torch.float32 and weight.dtype in (torch.float16, torch.bfloat16)
    return weight.to(device, weight.dtype if keeps_16_bits else dtype)


def _as_dense(module: QuantizedTensors, dtype: torch.dtype) -> DenseTensors:
    """In fp16 rather than bf16: 11 bits hold more of code * scale than 8, and `check_numbers` has seen that it fits."""
    return DenseTensors(module.prefix, module.dequantize().T.to(dtype).contiguous(), module.bias)


def _fusable(modules: Sequence[DenseTensors | QuantizedTensors]) -> list[list[DenseTensors | QuantizedTensors]]:
    """All in one group if they agree, else each alone."""
    first = modules[0]
    alike = all(_agree(first, other) for other in modules[1:])
    return [list(modules)] if alike else [[module] for module in modules]


def _agree(a: DenseTensors | QuantizedTensors, b: DenseTensors | QuantizedTensors) -> bool:
    if isinstance(a, DenseTensors) and isinstance(b, DenseTensors):
        return a.weight.dtype == b.weight.dtype
    if isinstance(a, DenseTensors) or isinstance(b, DenseTensors):
        return False
    if a.group_size != b.group_size or (a.order is None) != (b.order is None):
        return False
    return a.order is None or b.order is None or torch.equal(a.order, b.order)


def _bias_or_zeros(module: DenseTensors | QuantizedTensors) -> torch.Tensor:
    return module.bias if module.bias is not None else torch.zeros(module.shape[0])
