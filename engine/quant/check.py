"""What is checked of a quantised module before the first token: a garbled checkpoint is an error, not garbled text."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.errors import BadCheckpoint, EngineError
from engine.quant.base import QuantizedTensors

_LARGEST_WEIGHT = 65504.0  # fp16's last number; weights of real models are below 100
_COLUMNS = 8  # outputs of a module that are computed both ways
_INPUTS = 128  # different rows
# Rows that a product is tried with: one, a few, and so many that the weight is expanded first (see `ops.w4_linear`).
_ROWS = {"cpu": (1, 5, 128), "cuda": (1, 5, 9 * _INPUTS)}
_FP32_ERROR = 1e-4  # of the sum of absolute terms: 16,384 sums in fp32 differ by less than 1e-5 of it

_BROKEN = "The checkpoint is damaged or was quantised wrongly. Download it again, or take another."


def check_numbers(module: QuantizedTensors) -> None:
    """Raises BadCheckpoint naming the module and the number that no weight has."""
    scales = module.scales.float()
    for name, numbers in (("scales", scales), ("zeros times scales", module.offsets)):
        if num_broken := int((~numbers.isfinite()).sum()):
            raise BadCheckpoint(
                f"`{module.prefix}`: {num_broken} of {numbers.numel()} {name} are infinite or no numbers. {_BROKEN}"
            )
    if not scales.any():
        raise BadCheckpoint(f"`{module.prefix}`: all {scales.numel()} scales are 0. {_BROKEN}")
    at_highest_code = scales * ((1 << module.bits) - 1) + module.offsets
    largest = max(float(module.offsets.abs().max()), float(at_highest_code.abs().max()))
    if largest > _LARGEST_WEIGHT:
        raise BadCheckpoint(
            f"`{module.prefix}`: scales reach {float(scales.abs().max()):.3g}, weights {largest:.3g}. {_BROKEN}"
        )


class ProductCheck:
    """Compares a packed weight's products with those of the plain dequantised numbers, on a few columns.

    The latter are computed here; `launch` makes the former, `check` compares, when the kernels are there.
    """

    def __init__(
        self,
        modules: Sequence[QuantizedTensors],
        linear: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """linear: of all modules, on the packed weight. dtype: of the activations."""
        self.prefix, self._linear = modules[0].prefix, linear
        generator = torch.Generator().manual_seed(0)
        num_inputs = modules[0].shape[1]
        x = torch.randn(_INPUTS, num_inputs, generator=generator)
        single = torch.linspace(0, num_inputs - 1, _INPUTS // 2).long()
        x[1::2] = F.one_hot(single, num_inputs).float()  # single weights
        x = x.to(dtype)
        columns, weights, sizes, biases = _few_columns(modules)
        self._expected = x.double() @ weights + biases
        self._allowed = (x.abs().double() @ sizes + biases.abs()) * max(_FP32_ERROR, 4 * torch.finfo(dtype).eps)
        self._x, self._columns = x.to(device), columns.to(device)

    def launch(self) -> list[torch.Tensor]:
        """[rows, columns] for each number of rows."""
        return [self._linear(_rows(self._x, count))[:, self._columns] for count in _ROWS[self._x.device.type]]

    def check(self) -> None:
        """Raises EngineError where they differ: then a kernel or the packing is at fault, not the checkpoint."""
        for got in self.launch():
            num_rows = len(got)
            error = (got.double().cpu() - _rows(self._expected, num_rows)).abs() - _rows(self._allowed, num_rows)
            if not bool((error <= 0).all()):
                raise EngineError(
                    f"`{self.prefix}`: the packed weight gives other products than the checkpoint's numbers, off by "
                    f"{float(error.max()):.3g} more than rounding ({num_rows} rows, {self._x.dtype}). A kernel is at "
                    "fault on this machine: start with REFERENCE=1 in the environment, and report it."
                )


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ones, or all of them again and again."""
    return x[:count] if count <= len(x) else x.repeat(count // len(x), 1)


def _few_columns(
    modules: Sequence[QuantizedTensors],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the first and last outputs of each module: their columns in the whole, and in fp64 their weights [K, columns],
    the sizes of the terms that these are made of, and their biases.
    """
    columns, weights, sizes, biases = [], [], [], []
    start = 0
    for module in modules:
        num_outputs, num_inputs = module.shape
        for part in (slice(0, min(_COLUMNS, num_outputs)), slice(max(0, num_outputs - _COLUMNS), num_outputs)):
            columns.append(torch.arange(start + part.start, start + part.stop))
            weights.append(module.dequantize(part).double().cpu())
            term = module.scales[:, part].double().abs() * ((1 << module.bits) - 1) + module.offsets[:, part].abs()
            sizes.append(term.max(dim=0).values.cpu().expand(num_inputs, -1))
            bias = torch.zeros(num_outputs) if module.bias is None else module.bias
            biases.append(bias[part].double().cpu())
        start += num_outputs
    return torch.cat(columns), torch.cat(weights, dim=1), torch.cat(sizes, dim=1), torch.cat(biases)
