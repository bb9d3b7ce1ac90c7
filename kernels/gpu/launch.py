"""Launches that find their compiled kernel by a look at the arguments' types. Triton's own way to it, which writes all
of them out as a text and compares every global that the kernel reads, takes the host several times as long as the
launch itself: it sets the pace of steps with short prompts, whose kernels are launched one by one.
"""

from functools import partial
from typing import Any

import torch
from triton.runtime.jit import JITFunction

_TENSOR = torch.Tensor
_RUN = JITFunction.run  # `ahead.py` puts another in its place while launches are to be left out


class Launchable:
    """A kernel, called as Triton's are: runtime arguments by place, constants and options by name. One card a process.

    kernel  what `triton.jit` made
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_compiled = isinstance(kernel, JITFunction)  # else it is interpreted
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._is_compiled or JITFunction.run is not _RUN:
            self.kernel[grid](*args, **constants)
            return
        key = (*map(_kind, args), *constants.values())
        found = self._known.get(key)
        if found is None:
            self._known[key] = self.kernel[grid](*args, **constants), self._last_arguments(len(args), constants)
            return
        compiled, last = found
        compiled[(*grid, 1, 1)[:3]](*args, *last)

    def _last_arguments(self, num_given: int, constants: dict[str, Any]) -> tuple[Any, ...]:
        """The constants in the order of the kernel's parameters, without the compiler's options."""
        last = self.kernel.params[num_given:]
        assert all(param.is_constexpr for param in last), (
            "runtime arguments go by place: what is named is not looked at"
        )
        return tuple(constants[param.name] for param in last)


def _kind(value: Any) -> Any:
    """What Triton compiles a kernel for: a tensor's type and whether it lies at a multiple of 16; of a whole number,
    whether it is 1, a multiple of 16, or more than 32 bits. Some twenty calls a launch: the order of the tests counts.
    """
    kind = type(value)
    if kind is _TENSOR:
        return value.dtype, value.data_ptr() & 15
    if kind is int:
        if -(2**31) <= value < 2**31:
            return 1 if value == 1 else 0 if value & 15 else 16
        return 64, value & 15 == 0
    return kind
